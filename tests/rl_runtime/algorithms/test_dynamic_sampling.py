"""DAPO's dynamic sampling on a simulated fleet: filtered groups, batches and the end of the run, with deaths at any
time.

The fakes' tokens, and so their rewards, are functions of a sample's seed: what the sampler must decide of each group is
known without any run (`verdict_of`).
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.ids import GroupId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.ledger import FILTERED, GroupState, Ledger, LedgerLine
from rolecall.rl_runtime.algorithms.sampler import (
    SEED,
    TAKEN,
    GroupSignal,
    SamplerState,
    classify_rewards,
    group_seed,
    request_seed,
)
from rolecall.rl_runtime.controller import batch_assembler
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.tasks.task import group_id, group_number
from tests.rl_runtime.loop import World, small_job
from tests.rl_runtime.scripted_responses import ScriptedResponses

HALF = ScriptedResponses(right_below=9)
"""Every second group of two teaches nothing."""
ALL_WRONG = ScriptedResponses(right_below=3)
LOST = ("run_ended", "stale")


def dapo(num_steps: int = 4, every_steps: int = 2, **algorithm: Any) -> Any:
    """4 steps of 4 microbatches of 2 groups of 2 samples."""
    return small_job(
        num_steps=num_steps,
        checkpoint__every_steps=every_steps,
        algorithm__name="dapo",
        algorithm__overlong_buffer_tokens=2,
        **{f"algorithm__{k}": v for k, v in algorithm.items()},
    )


def verdict_of(w: World, group: GroupId) -> GroupSignal:
    seeds = [request_seed(w.job.seed, group_number(group), n) for n in range(w.job.algorithm.group_size)]
    return classify_rewards([w.answers.reward(w.answers.tokens(s)) for s in seeds], w.job.algorithm.filter_by)


def ledger_lines(w: World) -> list[Mapping[str, Any]]:
    return Ledger(w.journal.store).lines()


def check_sampler(w: World, lines: Sequence[Mapping[str, Any]]) -> None:
    """No prompt was skipped or repeated, each group was judged by its tokens, and no step had others."""
    issued = [str(line["group_id"]) for line in lines if line["state"] == GroupState.ISSUED]
    assert issued == [group_id(n) for n in range(len(issued))], "a prompt was skipped or repeated"
    for line in lines:
        group, state, reason = GroupId(line["group_id"]), line["state"], str(line["reason"])
        if state == GroupState.ISSUED:
            assert reason == f"{SEED}{group_seed(w.job.seed, group_number(group))}"
        elif state == GroupState.ACCEPTED and not reason.startswith(TAKEN):
            assert verdict_of(w, group) is GroupSignal.INFORMATIVE, f"{group} was accepted"
        elif state == GroupState.DROPPED and reason.startswith(FILTERED):
            assert reason == f"{FILTERED}{verdict_of(w, group)}" and verdict_of(w, group) is not GroupSignal.INFORMATIVE
    states: dict[str, str] = {}
    for line in lines:
        if line["state"] == GroupState.ASSIGNED:
            assert states[line["group_id"]] == GroupState.ACCEPTED, f"{line['group_id']} was never accepted"
        if line["state"] == GroupState.ACCEPTED:
            assert states[line["group_id"]] != GroupState.ACCEPTED
        states[line["group_id"]] = line["state"]
    sampler = w.controllers[-1].recorder.sampler
    assert sampler == SamplerState.of(lines, w.job.seed), "the controller's state differs from the ledger"
    assert sampler.cursor == len(issued)


def checked(w: World) -> World:
    found = w.check()
    lost = {r for r in found.dropped_by_reason if not r.startswith(FILTERED)}
    assert lost <= set(LOST), lost
    check_sampler(w, ledger_lines(w))
    return w


# --- what is filtered, and what fills a batch ---------------------------------------------------------------------


def test_every_batch_is_full_of_groups_that_teach_and_the_share_that_was_filtered_is_reported(tmp_path: Path) -> None:
    w = checked(World(job=dapo(8), path=tmp_path, seed=0, answers=HALF).run())
    shares = [b["health"]["filtered_fraction"] for b in w.events(EventKind.STEP_COMMITTED)]
    assert all(0.0 <= share < 1.0 for share in shares)
    found = w.audit()
    filtered = sum(n for r, n in found.dropped_by_reason.items() if r.startswith(FILTERED))
    assert sum(found.filtered_by_length.values()) == filtered >= 20
    # Each step reports 1 - 8/judged: their sum is the ledger's count without groups after the last step.
    judged = sum(8 / (1.0 - share) for share in shares)
    assert judged - 64 == pytest.approx(filtered, abs=24)


def test_without_dynamic_sampling_nothing_is_judged(tmp_path: Path) -> None:
    w = World(job=small_job(num_steps=4), path=tmp_path, seed=0, answers=HALF).run()
    w.check()
    assert GroupState.ACCEPTED not in {line["state"] for line in ledger_lines(w)}
    assert all("filtered_fraction" not in b["health"] for b in w.events(EventKind.STEP_COMMITTED))


@pytest.mark.parametrize(
    ("answers", "kind", "advice"),
    [
        (ALL_WRONG, "0 all right, {} all wrong, 0 all equal", "too hard"),
        (ScriptedResponses(right_below=16), "{} all right, 0 all wrong, 0 all equal", "too easy"),
    ],
)
def test_prompts_without_a_learning_signal_end_the_run_with_an_error(
    tmp_path: Path, answers: ScriptedResponses, kind: str, advice: str
) -> None:
    w = World(job=dapo(refills_max=3), path=tmp_path, seed=0, answers=answers).run()
    assert w.outcome is not None and w.outcome.outcome == "failed" and w.outcome.steps == 0
    judged = sum(str(line["reason"]).startswith(FILTERED) for line in ledger_lines(w))
    assert 24 <= judged <= 32, "scored at once, beyond the limit"
    assert kind.format(judged) in w.outcome.because and advice in w.outcome.because
    assert f"{judged} groups were generated, and only 0 of the 8 required" in w.outcome.because
    assert w.audit().ok
    check_sampler(w, ledger_lines(w))


@pytest.mark.parametrize("answers", [ALL_WRONG, ScriptedResponses(right_below=4)])
def test_at_the_limit_the_newest_filtered_groups_may_fill_the_batch(tmp_path: Path, answers: ScriptedResponses) -> None:
    w = World(job=dapo(refills_max=2, at_refill_limit="take"), path=tmp_path, seed=0, answers=answers).run()
    checked(w)
    lines = ledger_lines(w)
    taken = [line for line in lines if str(line["reason"]).startswith(TAKEN)]
    assert taken and all(str(line["reason"]) == f"{TAKEN}{verdict_of(w, line['group_id'])}" for line in taken)
    filtered = {line["group_id"] for line in lines if str(line["reason"]).startswith(FILTERED)}
    assert not filtered & {line["group_id"] for line in taken}
    for body in w.events(EventKind.STEP_COMMITTED):
        own = [line for line in taken if line["step"] == body["step"]]
        assert body["health"]["filtered_fraction"] >= len(own) / 16


def test_a_long_time_without_a_step_is_not_a_fault_of_a_replica(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await asyncio.sleep(12.0)
        w.journal.set_flag("stop", "seen enough")

    w = World(job=dapo(refills_max=1000), path=tmp_path, seed=0, answers=ALL_WRONG, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "stopped" and w.outcome.steps == 0
    assert w.audit().ok and w.audit().groups_issued > 150, "no more was issued"
    assert not w.events(EventKind.REPLICA_LOST) and not w.events(EventKind.STEP_INTERRUPTED)
    check_sampler(w, ledger_lines(w))


# --- infrastructure never earns a reward --------------------------------------------------------------------------


def test_an_infrastructure_failure_is_never_a_wrong_answer(tmp_path: Path) -> None:
    """Every process fails: `check_sampler` compares each verdict with the tokens' reward."""

    async def script(w: World) -> None:
        w.fleet.newest("reward/0").body.answers = [
            TimeoutError("the checker timed out"),
            [[-1.0]],
            [[float("nan")] * 2],
        ]
        w.fleet.newest("reward/1").body.answers = [ValueError("cannot parse"), []]
        for victim in ("rollout/1", "reward/1", "rollout/2", "trainer/1", "reward/0"):
            await asyncio.sleep(0.4)
            w.fleet.kill(victim)

    w = World(job=dapo(10), path=tmp_path, seed=4, answers=HALF, script=script).run()
    checked(w)
    assert len(w.events(EventKind.REPLICA_LOST)) >= 4
    trained = [b["reward"] for b in w.events(EventKind.STEP_COMMITTED)]
    assert all(0.0 < r < 1.0 for r in trained), "a batch of groups that teach has right and wrong answers"


def test_a_group_whose_scoring_always_fails_is_dropped_and_not_filtered(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        for index in range(2):
            w.fleet.newest(f"reward/{index}").body.answers = [ZeroDivisionError("in the checker")] * 10

    w = World(job=dapo(), path=tmp_path, seed=0, answers=HALF, script=script).run()
    found = w.check()
    assert found.dropped_by_reason.get("reward_failed: ZeroDivisionError", 0) > 0
    check_sampler(w, ledger_lines(w))


# --- deaths -------------------------------------------------------------------------------------------------------


def run_with_deaths(path: Path, deaths: Sequence[int]) -> World:
    path.mkdir()
    return checked(World(job=dapo(3), path=path, seed=0, answers=HALF, deaths=list(deaths)).run())


STRIDE = 37
"""Every so many effects one death in the default run; the long ones meet all others. A prime: it meets every kind."""


@pytest.mark.parametrize("offset", [2, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, STRIDE + 2))])
def test_a_sampler_killed_at_any_effect_continues(tmp_path: Path, offset: int) -> None:
    """Cursor, accepted groups and refills, when the next controller begins, are those of the run without the death."""
    undisturbed = run_with_deaths(tmp_path / "undisturbed", [])
    known = ledger_lines(undisturbed)
    accepted = died = 0
    for at in range(offset, undisturbed.mortalities[0].effects, STRIDE):
        w = run_with_deaths(tmp_path / f"{at}", [at])
        if len(w.controllers) == 1:
            continue
        died += 1
        found = w.lines_found[-1]
        resumed, wanted = SamplerState.of(ledger_lines(w)[:found], 0), SamplerState.of(known[:found], 0)
        assert resumed == wanted, f"killed at effect {at}"
        accepted += bool(resumed.accepted)
        assert not w.fleet.started_over, "what an engine still held was made again"
    assert died >= 8 and (accepted >= 1 or offset > 2)


@pytest.mark.parametrize("trial", range(4))
def test_after_any_death_no_prompt_is_skipped_or_repeated_and_every_batch_is_full(tmp_path: Path, trial: int) -> None:
    rng = random.Random(f"dynamic/{trial}")

    async def script(w: World) -> None:
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            victim = rng.choice(["rollout/0", "rollout/1", "trainer/0", "trainer/1", "reward/0"])
            if not w.fleet.newest(victim).dead.is_set():
                rng.choice([w.fleet.kill, w.fleet.hang])(victim)

    deaths = [rng.randrange(20, 300) for _ in range(3)]
    job = dapo(10, at_refill_limit=rng.choice(["fail", "take"]), refills_max=rng.choice([5, 10]))
    w = World(job=job, path=tmp_path, seed=trial, answers=HALF, deaths=deaths, script=script).run()
    checked(w)
    assert len(w.controllers) == 4


def test_going_back_to_a_checkpoint_judges_the_undone_groups_again(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        while not (w.controllers and w.controllers[-1].state.step >= 5):
            await asyncio.sleep(0.01)
        for index in range(2):
            w.fleet.kill(f"trainer/{index}")

    w = World(job=dapo(10, every_steps=4), path=tmp_path, seed=1, answers=HALF, script=script).run()
    checked(w)
    states = Counter(line["state"] for line in ledger_lines(w))
    assert states[GroupState.UNDONE] >= 8


def test_while_hold_is_set_batches_continue_being_filled(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.journal.set_flag("hold", "faults are still to come")
        while not (w.controllers and w.controllers[-1].state.step >= 7):
            await asyncio.sleep(0.01)
        w.journal.set_flag("hold", None)

    w = checked(World(job=dapo(3), path=tmp_path, seed=0, answers=HALF, deaths=[150], script=script).run())
    assert w.outcome is not None and w.outcome.steps >= 7


# --- mutants: what these tests are able to see --------------------------------------------------------------------


def _forgets_acceptance(patch: pytest.MonkeyPatch) -> None:
    whole = RunRecorder._write

    def write(self: RunRecorder, lines: Sequence[LedgerLine]) -> Any:
        return whole(self, [x for x in lines if x.state is not GroupState.ACCEPTED])

    patch.setattr(RunRecorder, "_write", write)


def _skips_a_prompt(patch: pytest.MonkeyPatch) -> None:
    whole = SamplerState.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[SamplerState], lines: Any, job_seed: int, origin: Any) -> SamplerState:
        state: SamplerState = whole(cls, lines, job_seed, origin)
        state.cursor += bool(lines)
        return state

    patch.setattr(SamplerState, "of", classmethod(of))


def _draws_from_a_counter_of_its_own(patch: pytest.MonkeyPatch) -> None:
    drawn = iter(range(10**6))
    patch.setattr(batch_assembler, "request_seed", lambda job_seed, number, sample: next(drawn))


def _judges_by_another_rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        batch_assembler,
        "classify_rewards",
        lambda rewards, by: GroupSignal.ALL_WRONG if rewards[0] == 0.0 else GroupSignal.INFORMATIVE,
    )


MUTANTS = [_forgets_acceptance, _skips_a_prompt, _draws_from_a_counter_of_its_own, _judges_by_another_rule]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda f: f.__name__)
def test_a_wrong_sampler_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    w = World(job=dapo(3), path=tmp_path, seed=0, answers=HALF, deaths=[150])
    with monkeypatch.context() as patch:
        mutate(patch)
        w.run()
    # Folding is the test's own here, not the mutant's.
    with pytest.raises((AssertionError, KeyError)):
        checked(w)


def test_a_controller_of_another_job_refuses_to_continue(tmp_path: Path) -> None:
    """The job file was changed between two controllers: the first one's groups have other seeds."""

    async def script(w: World) -> None:
        while len(w.controllers) == 0 or w.controllers[-1].state.step < 1:
            await asyncio.sleep(0.01)
        w.job = w.job.model_copy(update={"seed": 99})
        w.mortalities[-1].dies_at = 0

    w = World(job=dapo(3), path=tmp_path, seed=0, answers=HALF, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "failed"
    assert "g00000000" in w.outcome.because
    assert f"seed {group_seed(0, 0)}" in w.outcome.because and f"seed {group_seed(99, 0)}" in w.outcome.because
