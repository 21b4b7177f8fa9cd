"""Tokens asked again of the weights that made them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.policy_health import LOG_RATIO_ALARM
from rolecall.rl_runtime.algorithms.agreement import SHARE, VERSIONS_KEPT, is_asked, recomputed_log_probs, rows_to_ask
from rolecall.rl_runtime.algorithms.batching import form_microbatches
from rolecall.rl_runtime.algorithms.objective import Batch, TokenSelection, make_batch
from rolecall.rl_runtime.tasks.reward_worker import task_of
from rolecall.rl_runtime.trainer.model import write_model_folder
from rolecall.rl_runtime.trainer.state import Network
from rolecall.rl_runtime.trainer.trainer import TrainerReplica
from tests.rl_runtime.learning import LEDGER, TRAINER, BatchGenerator, ModelSequenceGenerator, learn

TINY = {"hidden_size": 32, "intermediate_size": 64}
ROUNDING = 1e-4
NO_WEIGHTS: dict[str, Tensor] = {}


def job_of(**changes: Any) -> JobConfig:
    return parse_job({"model": TINY, "task": {"num_digits": 4}, **changes})


def writer_of(job: JobConfig, folder: Path) -> ModelSequenceGenerator:
    write_model_folder(folder, job.model, 0, job.task.name)
    return ModelSequenceGenerator(folder, eos=task_of(job).vocab.eos, seed=job.seed)


class WrongWriter(ModelSequenceGenerator):
    """Holds one wrong matrix from version 2 on."""

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        super().load(version, weights)
        if version >= 2:
            with torch.no_grad():
                self.model.get_parameter("model.layers.0.mlp.down_proj.weight").add_(0.5)


def test_every_step_of_a_late_run_reports_the_agreement(tmp_path: Path) -> None:
    job = job_of()
    points = list(learn(job, writer_of(job, tmp_path), num_steps=6, staleness=2))
    assert {s.versions[0] for g in points[-1].generated.groups for s in g.samples} == {3}, (
        "none is of the trained weights"
    )
    reported = [p.result.log_ratio_max for p in points]
    assert all(x is not None and 0.0 <= x < ROUNDING for x in reported), reported


def test_an_engine_with_wrong_weights_is_seen_although_it_is_two_versions_behind(tmp_path: Path) -> None:
    job = job_of()
    write_model_folder(tmp_path, job.model, 0, job.task.name)
    writer = WrongWriter(tmp_path, eos=task_of(job).vocab.eos, seed=0)
    reported = [p.result.log_ratio_max or 0.0 for p in learn(job, writer, num_steps=6, staleness=2)]
    assert max(reported[:4]) < ROUNDING and min(reported[4:]) > LOG_RATIO_ALARM, reported


@pytest.mark.parametrize(("behind", "staleness"), [(3, 4), (1, 0)], ids=["older than what is kept", "nothing is kept"])
def test_versions_that_no_replica_holds_are_not_compared(tmp_path: Path, behind: int, staleness: int) -> None:
    job = job_of(runtime={"staleness_max": staleness})
    reported = [p.result.log_ratio_max for p in learn(job, writer_of(job, tmp_path), num_steps=6, staleness=behind)]
    # Until a version falls behind what is kept, it is asked; the first step's tokens are of the trained weights.
    known = 1 + min(VERSIONS_KEPT, staleness)
    assert all(x is not None for x in reported[:known]) and reported[known:] == [None] * (6 - known), reported


def test_a_copied_state_has_no_previous_versions_to_compare(tmp_path: Path) -> None:
    job = job_of()
    writer, source_job = writer_of(job, tmp_path), job
    source = BatchGenerator(source_job, task_of(job), writer)
    first, copy = (TrainerReplica(replica=TRAINER, incarnation=1, job=job) for _ in range(2))
    try:
        first.join(1, 1, 0, 1, "127.0.0.1", 0)
        writer.load(0, first.state.policy_tensors(0))
        works = [form_microbatches(s, source.generate().groups, job.algorithm.microbatches_per_step) for s in range(3)]

        def trained(trainer: TrainerReplica, step: int) -> float | None:
            ids = [m.microbatch_id for m in works[step]]
            return trainer.train_step(1, 1, step, works[step], ids, LEDGER, [TRAINER]).log_ratio_max

        assert all((trained(first, step) or 0.0) < ROUNDING for step in range(2))
        copy.load_state(*first.state.export())
        copy.join(1, 1, 0, 1, "127.0.0.1", 0)
        assert trained(copy, 2) is None and (trained(first, 2) or 1.0) < ROUNDING
        assert all(torch.equal(w, copy.state.policy_tensors(3)[n]) for n, w in first.state.policy_tensors(3).items())
    finally:
        first.close()
        copy.close()


def test_asking_leaves_the_weights_that_are_trained_as_they_are(tmp_path: Path) -> None:
    job = job_of()
    writer = writer_of(job, tmp_path)
    groups = BatchGenerator(job, task_of(job), writer).generate().groups
    versions = {s.versions[0] for g in groups for s in g.samples}
    assert versions == {-1}, "as nothing was loaded"
    batch = make_batch(
        groups, job.algorithm, TokenSelection(policy_version=1, staleness_max=2, longest=8), pad=task_of(job).vocab.pad
    )
    batch = _as_of(batch, version=0)
    model = writer.model
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    now = {n: p.detach().clone() for n, p in model.named_parameters()}
    network = Network(model, learning_rate=0.0, grad_norm_max=1.0)

    def ask(version: int, weights: dict[str, Tensor]) -> Tensor:
        def logits_of(_version: int, tokens: Tensor) -> Tensor:
            return network.logits_under(weights, tokens)

        return recomputed_log_probs(logits_of, batch, [version], 1, microbatches=1, cut=lambda ends: [range(len(ends))])

    asked = [ask(v, w) for v, w in ((0, own), (0, now), (5, own))]
    assert 0.0 <= float(asked[0].max()) < ROUNDING and float(asked[1].max()) > LOG_RATIO_ALARM
    assert asked[2].tolist() == [-1.0] * len(batch.tokens_st), "no row has a token of that version"
    rows = -(-len(batch.tokens_st) // SHARE)
    assert int((asked[0] >= 0).sum()) == rows, "only some rows are asked, and each has its own answer"
    assert all(torch.equal(p, now[n]) and p.grad is None for n, p in model.named_parameters())


def _as_of(batch: Batch, *, version: int) -> Batch:
    values = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return Batch(**{**values, "versions_st": torch.where(batch.response_st > 0, version, -1)})


def rows(*versions: Sequence[int]) -> Tensor:
    return torch.tensor([[-1, *row] for row in versions])


def test_the_version_with_the_most_tokens_is_asked_the_newer_of_two_with_as_many() -> None:
    former: dict[int, dict[str, Tensor]] = {3: NO_WEIGHTS, 4: NO_WEIGHTS}
    assert rows_to_ask(rows([3, 3], [3, 4], [2, 2]), former, 0, microbatches=SHARE) == (3, [0, 1])
    assert rows_to_ask(rows([3, 4], [2, 2]), former, 0, microbatches=SHARE) == (4, [0])
    assert rows_to_ask(rows([2, 2], [5, -1]), former, 0, microbatches=SHARE) is None
    assert rows_to_ask(rows([3, 3]), {}, 0, microbatches=SHARE) is None


@pytest.mark.parametrize(("microbatches", "asked"), [(1, 3), (4, 10), (SHARE, 20), (100, 20)])
def test_over_the_steps_every_row_is_asked_and_in_each_a_sixteenth_of_the_step(microbatches: int, asked: int) -> None:
    versions = rows(*[[1 if i % 2 else 0] for i in range(40)])
    found = [rows_to_ask(versions, {1: NO_WEIGHTS}, step, microbatches=microbatches) for step in range(60)]
    assert all(f is not None and len(f[1]) == len(set(f[1])) == asked for f in found)
    assert {row for f in found if f for row in f[1]} == set(range(1, 40, 2))


def test_one_microbatch_of_each_step_is_asked_and_each_in_its_turn() -> None:
    for step in range(8):
        ids = [f"{step}.{n}" for n in (2, 0, 3, 1)]
        assert [i for i in ids if is_asked(i, ids, step)] == [f"{step}.{step % 4}"]


def test_the_engine_that_made_wrong_tokens_is_identified(tmp_path: Path) -> None:
    """Two engines write half of each step; one of them holds a wrong matrix."""
    job = job_of()
    right, wrong = writer_of(job, tmp_path), writer_of(job, tmp_path)
    trainer = TrainerReplica(replica=TRAINER, incarnation=1, job=job)
    trainer.join(1, 1, 0, 1, "127.0.0.1", 0)
    for writer in (right, wrong):
        writer.load(0, trainer.state.policy_tensors(0))
    with torch.no_grad():
        wrong.model.get_parameter("model.layers.0.mlp.down_proj.weight").add_(0.5)
    sources = {name: BatchGenerator(job, task_of(job), w) for name, w in (("a#1", right), ("b#2", wrong))}
    made = [
        replace(group, samples=tuple(replace(s, engine=name) for s in group.samples))
        for name, source in sources.items()
        for group in source.generate().groups[:: 2 if name == "a#1" else -2]
    ]
    groups = {g.group_id: g for g in made}.values()
    work = form_microbatches(0, list(groups), job.algorithm.microbatches_per_step)
    result = trainer.train_step(1, 1, 0, work, [m.microbatch_id for m in work], LEDGER, [TRAINER])
    trainer.close()
    assert result.log_ratios["a#1"] < ROUNDING < LOG_RATIO_ALARM < result.log_ratios["b#2"]
    assert result.log_ratio_max == max(result.log_ratios.values())
