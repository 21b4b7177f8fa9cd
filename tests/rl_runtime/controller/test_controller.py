"""The loop on a simulated fleet: healthy, then hurt in every way, with the same invariants checked after each run."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.membership import ReplicaState
from rolecall.rl_runtime.algorithms.batching import mini_batches
from tests.rl_runtime.loop import World, small_job


def world(tmp_path: Path, seed: int = 0, job: dict[str, Any] | None = None, **rest: Any) -> World:
    return World(job=small_job(**(job or {})), path=tmp_path, seed=seed, **rest)


def test_a_healthy_run_trains_every_group_and_drops_only_what_the_end_leaves(tmp_path: Path) -> None:
    w = world(tmp_path).run()
    found = w.check()
    assert found.groups_trained == 12 * 8
    assert set(found.dropped_by_reason) <= {"run_ended"}
    assert len(w.events(EventKind.WEIGHTS_ADMITTED)) == 3
    assert not w.events(EventKind.STEP_INTERRUPTED)
    assert [b["step"] for b in w.events(EventKind.STEP_COMMITTED)] == list(range(12))
    assert w.clock.monotonic() - 1000 < 30


async def at_step(w: World, step: int) -> None:
    """Returns once a controller works on `step`, at a random moment of it."""
    while not (w.controllers and w.controllers[-1].state.step >= step):
        await asyncio.sleep(0.01)
    await asyncio.sleep(w.rng.uniform(0.0, 0.2))


def kill(replica: str, *, at: int) -> Any:
    """Kills it from a step on; a rollout in the middle of requests that have tokens already."""

    async def script(w: World) -> None:
        await at_step(w, at)
        key = (ReplicaId(replica), 1)
        while replica.startswith("rollout") and sum(map(bool, w.controllers[-1].table.offsets(key).values())) < 3:
            await asyncio.sleep(0.01)
        w.fleet.kill(replica)

    return script


def hang(replica: str, *, at: int) -> Any:
    async def script(w: World) -> None:
        await at_step(w, at)
        w.fleet.hang(replica)

    return script


LONG = {"num_steps": 40}
"""Long enough that a replacement comes back during the run."""


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_rollouts_requests_continue_elsewhere_and_no_group_is_lost(tmp_path: Path, seed: int) -> None:
    w = world(tmp_path, seed, LONG, script=kill("rollout/1", at=4)).run()
    found = w.check()
    assert set(found.dropped_by_reason) <= {"run_ended"}
    lost = [e for e in w.journal.events(kinds=[EventKind.REPLICA_LOST]) if e.payload.replica == "rollout/1"]
    assert len(lost) == 1
    assert not w.fleet.started_over, "streamed tokens were lost"
    assert len(w.events(EventKind.REQUESTS_REASSIGNED)) == 1
    for moved in w.journal.events(kinds=[EventKind.REQUESTS_REASSIGNED]):
        assert moved.payload.tokens_kept >= 3
        assert moved.payload.from_replica == "rollout/1" and moved.wall_at - lost[0].wall_at <= 2.0
        assert moved.payload.to and "rollout/1" not in moved.payload.to
    assert [b["incarnation"] for b in w.events(EventKind.WEIGHTS_ADMITTED) if b["replica"] == "rollout/1"] == [1, 2]


@pytest.mark.parametrize("seed", range(2))
def test_a_hung_rollout_stops_no_other_replica_and_is_replaced(tmp_path: Path, seed: int) -> None:
    w = world(tmp_path, seed, LONG, script=hang("rollout/0", at=4)).run()
    w.check()
    commits = w.journal.events(kinds=[EventKind.STEP_COMMITTED])
    # Two others continue: the longest pause stays far below the time until recovery acts.
    gaps = [b.wall_at - a.wall_at for a, b in pairwise(commits[4:])]
    assert max(gaps) < 2.7
    assert [b["incarnation"] for b in w.events(EventKind.WEIGHTS_ADMITTED) if b["replica"] == "rollout/0"] == [1, 2]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hurt", [kill, hang])
def test_a_lost_trainer_costs_no_step_and_its_replacement_joins(tmp_path: Path, seed: int, hurt: Any) -> None:
    w = world(tmp_path, seed, LONG, script=hurt("trainer/1", at=3)).run()
    w.check()
    assert all(len(c) == 1 for c in w.fleet.optimizer.values()), "a step was made twice"
    assert w.journal.current()["trainer/1"].incarnation == 2  # type: ignore[index]
    assert w.journal.current()["trainer/1"].state is ReplicaState.SERVING  # type: ignore[index]
    last = w.journal.epoch()
    assert last is not None and ("trainer/0", 1) in last.members and ("trainer/1", 2) in last.members


def test_a_step_interrupted_by_a_death_keeps_what_the_survivor_computed(tmp_path: Path) -> None:
    computed: list[int] = []

    async def script(w: World) -> None:
        await at_step(w, 3)
        survivor, victim = w.fleet.newest("trainer/0").body, w.fleet.newest("trainer/1").body
        while not (len(survivor.computed) == 2 and victim.computed):
            await asyncio.sleep(0.005)
        w.fleet.kill("trainer/1")
        await asyncio.sleep(0.001)
        computed.append(len(survivor.computed))

    w = world(tmp_path, 1, LONG, script=script).run()
    w.check()
    assert computed == [2]
    (interrupted,) = w.events(EventKind.STEP_INTERRUPTED)
    assert interrupted["lost"] == ["trainer/1"] and "trainer/1#1" in interrupted["because"]


def test_each_trainer_has_its_share_of_every_mini_batch(tmp_path: Path) -> None:
    found: dict[tuple[int, str], tuple[str, ...]] = {}

    async def script(w: World) -> None:
        while True:
            for replica in ("trainer/0", "trainer/1"):
                result = w.fleet.newest(replica).body.last_result()
                if result is not None:
                    found[result.commit.step, replica] = result.my_microbatches
            await asyncio.sleep(0.005)

    job = {"algorithm__mini_batches": 2, "algorithm__ppo_epochs": 3}
    w = world(tmp_path, job=job, script=script).run()
    w.check()
    assert len(found) >= 2 * 8, "steps were seen"
    for (step, _), mine in found.items():
        ids = [f"{step}.{n}" for n in range(4)]
        for part in mini_batches(ids, step=step, number=2, seed=w.job.seed):
            assert len({*part} & {*mine}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_without_any_trainer_left_the_newest_checkpoint_is_taken_and_later_groups_are_undone(
    tmp_path: Path, seed: int
) -> None:
    async def script(w: World) -> None:
        await at_step(w, 8)
        w.fleet.kill("trainer/0")
        w.fleet.kill("trainer/1")

    w = world(tmp_path, seed, LONG, script=script).run()
    found = w.check()
    assert found.groups_undone >= 8
    steps = [b["step"] for b in w.events(EventKind.STEP_COMMITTED)]
    assert len(steps) > len(set(steps)) == 40, "no step was made again from the checkpoint"


def test_a_trainer_that_was_not_in_the_epoch_has_the_newest_state_left(tmp_path: Path) -> None:
    """One member has left for the rest of the step, and the only other one commits it and dies."""

    async def script(w: World) -> None:
        await at_step(w, 8)
        w.fleet.unusual = lambda replica, _microbatch: replica == "trainer/1"
        loop = w.controllers[-1]
        while len(loop.trainers.members) > 1:
            await asyncio.sleep(0.001)
        w.fleet.unusual = lambda _replica, _microbatch: False
        step = loop.state.step
        while loop.state.step == step:
            await asyncio.sleep(0.001)
        w.fleet.kill("trainer/0")

    w = world(tmp_path, 0, {**LONG, "checkpoint__every_steps": 100}, script=script).run()
    assert w.check().groups_undone == 8, "those of one step"
    [back] = [e for e in w.events(EventKind.STEP_INTERRUPTED) if "state taken from" in e["because"]]
    assert f"state taken from trainer/1#1, step {back['step'] - 1}" in back["because"]


def test_without_any_checkpoint_the_run_restarts(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await at_step(w, 3)
        w.fleet.kill("trainer/0")
        w.fleet.kill("trainer/1")

    w = world(tmp_path, 0, script=script).run()
    assert w.check().groups_undone == 24


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("hurt", [kill, hang])
def test_a_lost_reward_worker_costs_no_group(tmp_path: Path, seed: int, hurt: Any) -> None:
    w = world(tmp_path, seed, LONG, script=hurt("reward/0", at=3)).run()
    assert not any(r.startswith("reward") for r in w.check().dropped_by_reason)


def test_a_version_whose_only_holder_died_before_any_rollout_had_it_is_offered_by_the_next_trainer(
    tmp_path: Path,
) -> None:
    """Found by simulation: a circular wait. On-policy, so that no step can be made without it."""

    async def script(w: World) -> None:
        await at_step(w, 5)
        step = w.controllers[-1].state.step
        while w.controllers[-1].state.step == step:
            await asyncio.sleep(0.001)
        w.fleet.kill("trainer/0")

    job = {**LONG, "roles__trainer": 1, "runtime__staleness_max": 0, "checkpoint__every_steps": 1}
    w = world(tmp_path, 0, job, script=script).run()
    w.check()


def test_a_scorer_that_always_fails_never_makes_a_reward(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await at_step(w, 2)
        for index in range(2):
            w.fleet.newest(f"reward/{index}").body.answers = [
                ValueError("bad checker"),
                [[float("nan")]],
                [],
                ValueError("again"),
                ValueError("and again"),
            ]

    found = world(tmp_path, 0, script=script).run().check()
    assert any(r.startswith("reward_failed") for r in found.dropped_by_reason)


def test_a_scorer_that_fails_for_every_group_ends_the_run(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await at_step(w, 2)
        for index in range(2):
            w.fleet.newest(f"reward/{index}").body.answers = [KeyError("level")] * 10_000

    w = world(tmp_path, 0, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "failed"
    assert w.outcome.because == "64 prompt groups in a row could not be scored, the last one: reward_failed: KeyError"
    assert w.audit().ok
    assert max(w.fleet.checkpoints) == w.outcome.steps - 1, "no committed step is lost"


def test_a_rollout_that_proves_something_else_does_not_serve(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.newest("rollout/2").body.bad_proofs = 1
        await asyncio.sleep(0)

    w = world(tmp_path, 0, LONG, script=script).run()
    w.check()
    (refused,) = w.events(EventKind.WEIGHTS_REJECTED)
    assert refused["replica"] == "rollout/2" and refused["part"] == "a"


def test_a_step_with_an_exception_of_trainer_code_is_not_repeated_endlessly(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await at_step(w, 3)
        for index in range(2):
            w.fleet.newest(f"trainer/{index}").body.raises = [ZeroDivisionError("in the loss")] * 50

    w = world(tmp_path, 0, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "failed"
    assert "ZeroDivisionError: in the loss" in w.outcome.because
    assert len(w.events(EventKind.STEP_INTERRUPTED)) <= 2
    assert w.audit().ok


def test_a_microbatch_that_is_not_finite_is_computed_by_another_trainer_within_its_step(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.spoils = lambda replica, microbatch: (replica, microbatch) == ("trainer/1", "3.3")
        while not any(e["step"] == 5 for e in w.events(EventKind.STEP_COMMITTED)):
            await asyncio.sleep(0.01)

    w = world(tmp_path, 0, LONG, script=script).run()
    found = w.check()
    assert set(found.dropped_by_reason) <= {"run_ended"}
    (again,) = w.events(EventKind.MICROBATCH_RECOMPUTED)
    assert (again["step"], again["microbatch"], again["finite"]) == (3, "3.3", True)
    assert (again["from_replica"], again["by"]) == ("trainer/1", "trainer/0") and again["groups"]
    (interrupted,) = w.events(EventKind.STEP_INTERRUPTED)
    assert "trainer/1, step 3: loss or gradient of microbatch 3.3" in interrupted["because"]
    assert not interrupted["lost"] and not w.events(EventKind.REPLICA_LOST)
    attempts = {b["step"]: b["attempts"] for b in w.events(EventKind.STEP_COMMITTED)}
    assert attempts.pop(3) == 2 and set(attempts.values()) == {1}
    # It rejoined, with a copy of the state.
    assert w.journal.current()[ReplicaId("trainer/1")].state is ReplicaState.SERVING


def test_a_microbatch_that_is_not_finite_anywhere_fails_its_step_with_its_groups(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.spoils = lambda replica, microbatch: microbatch == "3.3"
        await asyncio.sleep(0)

    w = world(tmp_path, 0, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "failed"
    (again,) = w.events(EventKind.MICROBATCH_RECOMPUTED)
    assert (again["from_replica"], again["by"], again["finite"]) == ("trainer/1", "trainer/0", False)
    assert "microbatch 3.3 (prompt groups " in w.outcome.because and again["groups"][0] in w.outcome.because
    assert len(w.events(EventKind.STEP_INTERRUPTED)) == 2
    assert w.audit().ok


def test_the_only_trainer_computes_a_microbatch_that_is_not_finite_once_more(tmp_path: Path) -> None:
    spoilt = iter([True])

    async def script(w: World) -> None:
        w.fleet.kill("trainer/1")
        w.fleet.spoils = lambda replica, microbatch: microbatch == "3.3" and next(spoilt, False)
        await asyncio.sleep(0)

    w = world(tmp_path, 0, LONG, script=script, recovers=False).run()
    w.check()
    (again,) = w.events(EventKind.MICROBATCH_RECOMPUTED)
    assert (again["from_replica"], again["by"], again["finite"]) == ("trainer/0", "trainer/0", True)


@pytest.mark.parametrize(("unusual_at", "verdict"), [("trainer/1", "wrong"), ("trainer/", "same")])
def test_an_unusual_microbatch_is_computed_by_another_trainer_within_its_step(
    tmp_path: Path, unusual_at: str, verdict: str
) -> None:
    async def script(w: World) -> None:
        w.fleet.unusual = lambda replica, microbatch: replica.startswith(unusual_at) and microbatch == "3.3"
        while not any(e["step"] == 5 for e in w.events(EventKind.STEP_COMMITTED)):
            await asyncio.sleep(0.01)

    w = world(tmp_path, 0, LONG, script=script).run()
    found = w.check()
    assert set(found.dropped_by_reason) <= {"run_ended"}
    (compared,) = w.events(EventKind.MICROBATCH_COMPARED)
    assert (compared["step"], compared["microbatch"]) == (3, "3.3") and compared["groups"]
    assert (compared["from_replica"], compared["by"], compared["verdict"]) == ("trainer/1", "trainer/0", verdict)
    assert (compared["grad_norm"], compared["grad_norm_again"]) == (800.0, 1.0 if verdict == "wrong" else 800.0)
    (interrupted,) = w.events(EventKind.STEP_INTERRUPTED)
    assert "trainer/1, step 3: microbatch 3.3 is unusual: gradient norm 800" in interrupted["because"]
    assert not interrupted["lost"] and not w.events(EventKind.REPLICA_LOST)
    attempts = {b["step"]: b["attempts"] for b in w.events(EventKind.STEP_COMMITTED)}
    assert attempts.pop(3) == 2 and set(attempts.values()) == {1}
    assert w.journal.current()[ReplicaId("trainer/1")].state is ReplicaState.SERVING


def test_unusual_microbatches_of_several_trainers_are_noted_and_cost_no_attempt(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.unusual = lambda replica, microbatch: microbatch.startswith("3.")
        await asyncio.sleep(0)

    w = world(tmp_path, 0, script=script).run()
    w.check()
    noted = w.events(EventKind.MICROBATCH_COMPARED)
    assert {b["verdict"] for b in noted} == {"several"} and {b["by"] for b in noted} == {""}
    assert {b["from_replica"] for b in noted} == {"trainer/0", "trainer/1"}
    assert not w.events(EventKind.STEP_INTERRUPTED)


def test_the_only_trainer_computes_an_unusual_microbatch_once_more(tmp_path: Path) -> None:
    unusual = iter([True])

    async def script(w: World) -> None:
        w.fleet.kill("trainer/1")
        w.fleet.unusual = lambda replica, microbatch: microbatch == "3.3" and next(unusual, False)
        await asyncio.sleep(0)

    w = world(tmp_path, 0, LONG, script=script, recovers=False).run()
    w.check()
    (compared,) = w.events(EventKind.MICROBATCH_COMPARED)
    assert (compared["from_replica"], compared["by"], compared["verdict"]) == ("trainer/0", "trainer/0", "wrong")


def test_a_stop_ends_the_run_and_accounts_for_every_group(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await at_step(w, 5)
        w.journal.set_flag("stop", "user code fails everywhere")

    w = world(tmp_path, 0, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "stopped"
    assert w.outcome.because == "user code fails everywhere"
    assert w.audit().ok and 5 <= w.outcome.steps <= 8


def test_while_hold_is_set_training_continues(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.journal.set_flag("hold", "faults are still to come")
        await at_step(w, 20)
        w.journal.set_flag("hold", None)

    w = world(tmp_path, 0, script=script).run()
    w.check()
    assert w.outcome is not None and 20 <= w.outcome.steps <= 30
    done = w.journal.flag("done")
    assert done is not None and '"outcome": "completed"' in done


def test_a_trainer_with_a_non_finite_microbatch_that_stops_answering_blocks_no_other(tmp_path: Path) -> None:
    """The others name it; its own answer comes too late."""

    async def script(w: World) -> None:
        victim = w.fleet.newest("trainer/1")

        def spoils(replica: str, microbatch: str) -> bool:
            if (replica, microbatch) != ("trainer/1", "3.3"):
                return False
            victim.running.clear()  # stopped before its answer is on its way
            return True

        w.fleet.spoils = spoils
        await asyncio.sleep(0)

    w = world(tmp_path, 0, script=script, recovers=False).run()
    w.check()
    assert len(w.controllers) == 1, "the controller ended"
    (again,) = w.events(EventKind.MICROBATCH_RECOMPUTED)
    assert (again["from_replica"], again["by"], again["finite"]) == ("trainer/1", "trainer/0", True)
