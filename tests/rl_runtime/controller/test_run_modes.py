"""The modes sync and semi_sync on a simulated fleet: a step has only tokens of its own version, no hybrid's engine works
while a step is trained, and a lost hybrid costs no step."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.journal.events import EventKind
from rolecall.core.membership import ReplicaState
from rolecall.rl_runtime.controller.step_plan import HybridWork
from tests.rl_runtime.controller import test_controller_conversations, test_controller_windows
from tests.rl_runtime.loop import World, small_job
from tests.rl_runtime.simulated_fleet import FakeRollout

SYNC = {"runtime__mode": "sync", "roles__rollout": 2}
SEMI_SYNC = {"runtime__mode": "semi_sync", "roles__rollout": 3}
MODES = pytest.mark.parametrize("mode", [SYNC, SEMI_SYNC], ids=["sync", "semi_sync"])
Script = Callable[[World], Awaitable[None]]


def world(path: Path, mode: dict[str, Any], seed: int = 0, script: Script | None = None, **job: Any) -> World:
    return World(job=small_job(**mode, **job), path=path, seed=seed, script=script)


async def until(w: World, holds: Callable[[World], bool], what: str) -> None:
    for _ in range(60_000):
        if w.controllers and holds(w):
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"it never came to pass: {what}")


def check_on_policy(w: World) -> None:
    """Every step was trained on tokens of its own version alone."""
    for step in w.events(EventKind.STEP_COMMITTED):
        assert step["staleness"] == 0
    assert not w.fleet.off_policy, w.fleet.off_policy


@MODES
@pytest.mark.parametrize("seed", range(2))
def test_a_step_has_tokens_of_its_own_version_only_and_no_group_is_generated_in_vain(
    tmp_path: Path, mode: dict[str, Any], seed: int
) -> None:
    w = world(tmp_path, mode, seed).run()
    found = w.check()
    check_on_policy(w)
    assert found.groups_trained == 12 * 8
    assert not found.dropped_by_reason, "a group was issued that no step had use for"
    assert not w.fleet.started_over
    assert not w.events(EventKind.REQUESTS_REASSIGNED), "a switch is no containment"


def test_in_mode_sync_engines_sleep_during_every_step_and_load_each_version_once(tmp_path: Path) -> None:
    w = world(tmp_path, SYNC).run()
    w.check()
    slept = [e.body.num_sleeps for e in w.fleet.rollouts()]
    assert slept == [12, 12]
    assert sorted((p.replica, p.version) for p in w.fleet.pulls) == [
        (f"rollout/{n}", version) for n in range(2) for version in range(13)
    ]


def test_in_mode_semi_sync_hybrids_sleep_at_half_of_the_groups_and_the_others_finish_the_rest(tmp_path: Path) -> None:
    at_switch: list[int] = []
    rests: list[set[Any]] = []

    async def script(w: World) -> None:
        for step in range(2, 6):
            await until(w, lambda w, step=step: w.controllers[-1].state.step == step, f"step {step}")  # type: ignore[misc]
            for work in HybridWork:
                await until(w, lambda w, work=work: w.controllers[-1].state.hybrid_work is work, f"hybrids {work}")  # type: ignore[misc]
            controller = w.controllers[-1]
            at_switch.append(0 if controller.state.plan is not None else len(controller.batches.ready()))
            await until(w, lambda w: all(w.fleet.newest(f"rollout/{n}").body.asleep for n in range(2)), "they sleep")
            trajectories = [t for g in controller.table.groups.values() for t in g.trajectories]
            rests.append({t.engine for t in trajectories if not t.finished})

    w = world(tmp_path, SEMI_SYNC, script=script, num_steps=20).run()
    w.check()
    check_on_policy(w)
    assert len(at_switch) == 4 and all(4 <= ready < 8 for ready in at_switch)
    assert set().union(*rests) == {("rollout/2", 1)}
    assert not w.fleet.started_over, "tokens of requests that moved were lost"


def test_generation_of_the_next_step_begins_once_all_engines_have_its_version(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await until(w, lambda w: w.controllers[-1].state.step >= 2, "two steps")
        w.fleet.newest("rollout/1").body.update_seconds = 1.5

    w = world(tmp_path, SYNC, script=script).run()
    w.check()
    check_on_policy(w)
    assert w.fleet.first_work, "nothing was seen"
    for step, at in w.fleet.first_work.items():
        ends = [p.begun + p.seconds for p in w.fleet.pulls if p.version == step]
        assert len(ends) == 2 and at >= max(ends), f"step {step} began before all engines had its version"


@MODES
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("work", list(HybridWork))
def test_a_lost_hybrid_costs_no_step_and_its_groups_are_not_generated_again(
    tmp_path: Path, mode: dict[str, Any], seed: int, work: HybridWork
) -> None:
    planned: list[set[str]] = []

    async def script(w: World) -> None:
        await until(w, lambda w: w.controllers[-1].state.step >= 4, "four steps")
        await until(w, lambda w: w.controllers[-1].state.hybrid_work is work, f"hybrids {work}")
        if work is HybridWork.TRAIN:
            await until(w, lambda w: bool(w.fleet.newest("trainer/1").body.computed), "it trains")
            plan = w.controllers[-1].state.plan
            assert plan is not None
            planned.append({g.group_id for m in plan.microbatches for g in m.groups})
        else:
            await until(w, lambda w: bool(w.fleet.newest("rollout/1").body.held), "it generates")
        w.fleet.kill("rollout/1")
        w.fleet.kill("trainer/1")

    w = world(tmp_path, mode, seed, script, num_steps=28).run()
    w.check()
    check_on_policy(w)
    assert all(len(commits) == 1 for commits in w.fleet.optimizer.values()), "a step was made twice"
    assert not w.fleet.started_over, "streamed tokens were lost"
    for groups in planned:
        trained = [set(s["groups"]) for s in w.events(EventKind.STEP_COMMITTED)]
        assert groups in trained, "the step's groups were generated again"
    for replica in ("trainer/1", "rollout/1"):
        current = w.journal.current()[replica]  # type: ignore[index]
        assert (current.incarnation, current.state) == (2, ReplicaState.SERVING)


def test_without_other_rollouts_the_hybrids_generate_until_the_step_is_formed(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await until(w, lambda w: w.controllers[-1].state.step >= 4, "four steps")
        await until(w, lambda w: w.controllers[-1].state.plan is None, "groups are being generated")
        w.fleet.kill("rollout/2")

    w = world(tmp_path, SEMI_SYNC, script=script, num_steps=40)
    w.recovers = False
    w.run()
    w.check()
    check_on_policy(w)
    assert w.journal.current()["rollout/2"].state is ReplicaState.LOST  # type: ignore[index]


def test_an_engine_that_does_not_fall_asleep_is_contained_and_the_step_goes_on(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await until(w, lambda w: w.controllers[-1].state.step >= 4, "four steps")
        w.fleet.newest("rollout/0").body.sleep_seconds = 1000.0

    w = world(tmp_path, SYNC, script=script, num_steps=30).run()
    w.check()
    check_on_policy(w)
    (lost,) = [e for e in w.events(EventKind.REPLICA_LOST) if e["replica"] == "rollout/0"]
    assert "did not fall asleep" in lost["because"]


@MODES
@pytest.mark.parametrize("death", [60, 400])
def test_a_restarted_controller_finds_what_hybrids_do(tmp_path: Path, mode: dict[str, Any], death: int) -> None:
    w = world(tmp_path, mode)
    w.deaths = [death, death]
    w.run()
    w.check()
    check_on_policy(w)
    assert len(w.controllers) == 3


def test_evaluation_waits_for_the_hybrids_and_is_finished(tmp_path: Path) -> None:
    evaluation = {"num_prompts": 6, "samples": 2, "every_steps": 4}
    w = world(tmp_path, SYNC, evaluation=evaluation).run()
    w.check()
    check_on_policy(w)
    assert [e["step"] for e in w.events(EventKind.EVALUATION_FINISHED)] == [0, 4, 8, 12]
    assert all(e["prompts"] == 6 and not e["unscored"] for e in w.events(EventKind.EVALUATION_FINISHED))


def test_dynamic_sampling_fills_a_batch_while_hybrids_sleep(tmp_path: Path) -> None:
    w = world(tmp_path, SEMI_SYNC, algorithm__name="dapo", algorithm__at_refill_limit="take").run()
    w.check()
    check_on_policy(w)


@MODES
def test_windows_of_an_answer_are_trained_step_after_step(tmp_path: Path, mode: dict[str, Any]) -> None:
    w = test_controller_windows.world(tmp_path / "run", "continue", job=mode).run()
    answers = test_controller_windows.check(w)
    assert any(len(windows) > 2 for windows in answers.values())
    assert all(step["staleness"] == 0 for step in w.events(EventKind.STEP_COMMITTED))


def test_conversations_move_with_their_turns(tmp_path: Path) -> None:
    w = test_controller_conversations.world(tmp_path, runtime={"mode": "semi_sync"}).run()
    w.check()
    check_on_policy(w)
    assert not w.fleet.started_over


def test_the_fakes_note_off_policy_tokens(tmp_path: Path) -> None:
    """The check of this file can fail: in mode async it does."""
    w = world(tmp_path, {}).run()
    assert w.fleet.off_policy
    assert all(isinstance(e.body, FakeRollout) and not e.body.num_sleeps for e in w.fleet.rollouts())
