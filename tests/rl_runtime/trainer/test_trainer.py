"""One trainer replica in this process: fencing, what it keeps of a step, state in and out.

pytest tests/rl_runtime/trainer/test_trainer.py
"""

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rolecall.core.errors import CommitVoteRejected, ProofMismatch, StaleIncarnation
from rolecall.core.ids import replica_id
from rolecall.rl_runtime.protocol.messages import Holder, Microbatch, StepResult, first_commit
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.state import parse_meta
from rolecall.rl_runtime.weights.digest import entries_of
from tests.rl_runtime.trainer_process import LEDGER, Spied, make_microbatches, tiny_job
from tests.support import PATIENCE_SECONDS, eventually

JOB = tiny_job()
NAME = replica_id("trainer", 0)
HOLDER = Holder(replica=NAME, incarnation=1, host="127.0.0.1", port=1)


@pytest.fixture
def trainer() -> Iterator[Spied]:
    trainer = Spied(replica=NAME, incarnation=1, job=JOB)
    trainer.join(1, 1, 0, 1, "127.0.0.1", 0)
    yield trainer
    trainer.close()


def take_step(
    trainer: Spied, step: int, microbatches: list[Microbatch] | None = None, *, incarnation: int = 1, epoch: int = 1
) -> StepResult:
    mine = microbatches if microbatches is not None else make_microbatches(JOB, step)
    ids = [m.microbatch_id for m in make_microbatches(JOB, step)]
    return trainer.train_step(incarnation, epoch, step, mine, ids, LEDGER, [NAME])


def weights(trainer: Spied) -> dict[str, torch.Tensor]:
    return trainer.state.policy_tensors(trainer.state.commit.policy_version)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def test_a_step_reports_its_result(trainer: Spied) -> None:
    result = take_step(trainer, 0)
    samples = [s for m in make_microbatches(JOB, 0) for g in m.groups for s in g.samples]
    assert result.commit.policy_version == 1
    assert result.reward == pytest.approx(sum(s.reward for s in samples) / len(samples))
    assert result.num_tokens == sum(len(s.tokens) for s in samples)
    assert result.my_microbatches == ("0.0", "0.1", "0.2", "0.3")
    assert result.grad_norm > 0
    assert math.isfinite(result.loss)
    assert trainer.last_result == result
    assert trainer.state.commit == result.commit


def test_messages_for_others_are_refused(trainer: Spied) -> None:
    before = weights(trainer)
    for incarnation, epoch, step in [(2, 1, 0), (0, 1, 0), (1, 2, 0), (1, 0, 0), (1, 1, 1)]:
        with pytest.raises(StaleIncarnation):
            take_step(trainer, step, incarnation=incarnation, epoch=epoch)
    for incarnation, epoch in [(2, 2), (1, 1), (1, 0)]:
        with pytest.raises(StaleIncarnation):
            trainer.join(incarnation, epoch, 0, 1, "127.0.0.1", 0)
    with pytest.raises(StaleIncarnation):
        trainer.open_store(1)
    assert same(before, weights(trainer))
    assert take_step(trainer, 0).commit.step == 0, "a stale message does no harm to the step that is due"
    with pytest.raises(StaleIncarnation):  # never twice
        take_step(trainer, 0)


def test_step_of_another_size_is_refused(trainer: Spied) -> None:
    microbatches = make_microbatches(JOB, 0)
    ids = [m.microbatch_id for m in microbatches]
    for bad in (ids[:3], [*ids, "0.4"], [*ids[:3], ids[0]]):
        with pytest.raises(CommitVoteRejected, match="4 make a step"):
            trainer.train_step(1, trainer.info(HOLDER).joined_epoch, 0, microbatches[:3], bad, LEDGER, [NAME])
        trainer.join(1, trainer.info(HOLDER).joined_epoch + 1, 0, 1, "127.0.0.1", 0)


def test_computed_parts_are_kept_and_extended(trainer: Spied) -> None:
    counted: list[str] = []
    of = trainer._gradients.of
    trainer._gradients.of = lambda state, m, **rest: (counted.append(m.microbatch_id), of(state, m, **rest))[1]  # type: ignore[method-assign]
    microbatches = make_microbatches(JOB, 0)
    with pytest.raises(CommitVoteRejected, match="missing"):
        take_step(trainer, 0, microbatches[:2])
    assert trainer.info(HOLDER).computed == ("0.0", "0.1")
    take_step(trainer, 0, [microbatches[n] for n in (3, 1, 0, 2)])
    assert counted == ["0.0", "0.1", "0.3", "0.2"], "nothing is computed twice"
    assert (trainer.info(HOLDER).computed, trainer.info(HOLDER).num_computed) == ((), 4)


def test_starts_again_when_a_microbatch_is_taken_away_or_has_other_content(trainer: Spied) -> None:
    microbatches = make_microbatches(JOB, 0)
    wanted = Spied(replica=NAME, incarnation=1, job=JOB)
    wanted.join(1, 1, 0, 1, "127.0.0.1", 0)
    take_step(wanted, 0)
    other_content = replace(make_microbatches(JOB, 5)[0], microbatch_id="0.0")
    for first in ([microbatches[0], replace(microbatches[1], microbatch_id="0.3")], [other_content]):
        with pytest.raises(CommitVoteRejected):
            take_step(trainer, 0, first)
    take_step(trainer, 0, microbatches)
    for name, gradient in wanted.gradients[0].items():
        assert torch.equal(trainer.gradients[0][name], gradient)


def test_reset_throws_the_partial_step_away(trainer: Spied) -> None:
    with pytest.raises(CommitVoteRejected):
        take_step(trainer, 0, make_microbatches(JOB, 0)[:2])
    with pytest.raises(StaleIncarnation):
        trainer.reset_step(1)
    assert trainer.info(HOLDER).computed == ("0.0", "0.1")
    trainer.reset_step(0)
    assert trainer.info(HOLDER).computed == ()
    assert take_step(trainer, 0).commit.step == 0


def test_policy_snapshot_is_immutable_and_of_one_version(trainer: Spied) -> None:
    snapshot = trainer.state.policy_tensors(0)
    copies = {n: t.clone() for n, t in snapshot.items()}
    take_step(trainer, 0)
    assert same(snapshot, copies)
    assert not same(snapshot, trainer.state.policy_tensors(1))
    with pytest.raises(StaleIncarnation):
        trainer.state.policy_tensors(0)


def test_the_entries_of_a_snapshot_are_those_of_its_tensors(trainer: Spied) -> None:
    for step in range(2):
        tensors, entries = trainer.state.policy_snapshot(step)
        assert entries == entries_of(tensors)
        take_step(trainer, step)


def test_a_loaded_state_of_the_same_version_replaces_the_snapshot(trainer: Spied) -> None:
    other = Spied(replica=NAME, incarnation=2, job=JOB.model_copy(update={"seed": 5}), has_state=False)
    assert not same(trainer.state.policy_snapshot(0)[0], other.state.policy_snapshot(0)[0])
    trainer.load_state(*other.state.export())
    assert same(trainer.state.policy_snapshot(0)[0], other.state.policy_snapshot(0)[0])
    assert trainer.state.policy_snapshot(0)[1] == other.state.policy_snapshot(0)[1]
    assert trainer.state.weights_digest == other.state.weights_digest


def test_state_survives_a_checkpoint_bit_by_bit(trainer: Spied, tmp_path: Path) -> None:
    take_step(trainer, 0)
    take_step(trainer, 1)
    trainer.state.band = replace(trainer.state.band, unproven=trainer.state.band.learned[:1])
    tensors, meta = trainer.state.export()
    assert parse_meta(meta) == (2, trainer.state.commit, trainer.state.band) and trainer.state.band.learned
    found = checkpoint.load(checkpoint.save(tmp_path, 1, tensors, meta))
    heir = Spied(replica=NAME, incarnation=2, job=JOB, has_state=False)
    assert not heir.info(HOLDER).has_state
    heir.load_state(found.tensors, found.meta)
    assert heir.info(HOLDER).has_state
    assert heir.state.export()[1] == meta
    assert same(heir.state.export()[0], tensors)
    heir.join(2, 2, 0, 1, "127.0.0.1", 0)
    take_step(trainer, 2)
    take_step(heir, 2, incarnation=2, epoch=2)
    assert same(heir.state.export()[0], trainer.state.export()[0])


def test_state_that_does_not_fit_is_refused_and_changes_nothing(trainer: Spied) -> None:
    take_step(trainer, 0)
    tensors, meta = trainer.state.export()
    name = min(tensors)
    cases = [
        ({n: t for n, t in tensors.items() if n != name}, meta, "missing"),
        ({**tensors, "weight/x": tensors[name]}, meta, "not of this model"),
        ({**tensors, name: tensors[name].flatten()[:1]}, meta, "expected"),
        ({**tensors, name: tensors[name].double()}, meta, "float64"),
        (tensors, "{", "meta"),
        (tensors, json.dumps({**json.loads(meta), "format": 9}), "format 9"),
        (tensors, json.dumps({"format": 1}), "commit"),
    ]
    heir = Spied(replica=NAME, incarnation=2, job=JOB, has_state=False)
    before = heir.state.export()
    for bad, bad_meta, because in cases:
        with pytest.raises(ProofMismatch, match=because):
            heir.load_state(bad, bad_meta)
    assert same(heir.state.export()[0], before[0])
    assert heir.state.commit == first_commit()
    assert not heir.info(HOLDER).has_state


def test_export_during_steps_is_always_of_one_step(trainer: Spied) -> None:
    """A reader in another thread never sees weights of one step with the record of another."""
    steps = 12
    digests: dict[int, set[str]] = {}
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            tensors, meta = trainer.state.export()
            step = parse_meta(meta)[1].step
            total = "".join(str(float(t.double().sum())) for t in tensors.values())
            digests.setdefault(step, set()).add(total)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        eventually(lambda: digests, "the reader to see the state before the first step")
        for step in range(steps):
            take_step(trainer, step)
        eventually(lambda: steps - 1 in digests, "the reader to see the last step")
    finally:
        done.set()
        reader.join(PATIENCE_SECONDS)
    assert len(digests) > 1
    assert all(len(found) == 1 for found in digests.values())


def test_canary_moves_with_the_weights_only(trainer: Spied) -> None:
    tokens = (1, 5, 13, 14, 2)
    before = trainer.state.canary_logprobs(tokens)
    assert len(before) == 4
    assert all(x < 0 for x in before)
    assert trainer.state.canary_logprobs(tokens) == before
    take_step(trainer, 0)
    assert trainer.state.canary_logprobs(tokens) != before


def test_every_replica_starts_with_the_same_bits() -> None:
    one, other = (Spied(replica=replica_id("trainer", i), incarnation=1, job=JOB) for i in range(2))
    assert same(one.state.policy_tensors(0), other.state.policy_tensors(0))
    assert one.state.weights_digest == other.state.weights_digest


def test_published_after_the_commit_and_before_the_answer() -> None:
    seen: list[tuple[int, int]] = []
    replica: Spied = Spied(
        replica=NAME,
        incarnation=1,
        job=JOB,
        on_publish=lambda version: seen.append((version, replica.state.commit.policy_version)),
    )
    replica.join(1, 1, 0, 1, "127.0.0.1", 0)
    take_step(replica, 0)
    take_step(replica, 1)
    assert seen == [(1, 1), (2, 2)]


def test_reporter_sees_the_work() -> None:
    from rolecall.agent.processes.state_pages import parse_page
    from rolecall.agent.reporter import reporter

    phases: list[tuple[str, str]] = []

    def note_phase(where: str) -> None:
        phases.append((where, parse_page(reporter.page_bytes()).phase))

    trainer = Spied(
        replica=NAME,
        incarnation=1,
        job=JOB,
        on_microbatch=lambda: note_phase("microbatch"),
        on_bucket=lambda: note_phase("bucket"),
        on_publish=lambda version: note_phase("publish"),
    )
    trainer.join(1, 1, 0, 1, "127.0.0.1", 0)
    before = parse_page(reporter.page_bytes())
    result = take_step(trainer, 0)
    after = parse_page(reporter.page_bytes())
    assert set(phases) == {("microbatch", "compute"), ("bucket", "reduce"), ("publish", "publish")}
    assert (before.phase, after.phase) == ("wait", "wait")
    assert after.progress - before.progress == JOB.algorithm.microbatches_per_step
    assert after.tokens - before.tokens == result.num_tokens
    assert after.collectives_entered - before.collectives_entered == 1  # one bucket; a vote of one needs none
    assert after.collectives_done == after.collectives_entered
    assert (after.step, after.epoch, after.policy_version) == (0, 1, 1)
    assert after.loss == result.loss
    assert after.grad_norm == pytest.approx(result.grad_norm)
    assert after.healths - before.healths == 1
    reported = result.health
    assert (after.entropy, after.ratio_max, after.response_length) == pytest.approx(
        (reported.entropy, reported.ratio_max, reported.response_length)
    )
    assert math.isnan(after.filtered_fraction), "the sampler's, not the trainer's"
