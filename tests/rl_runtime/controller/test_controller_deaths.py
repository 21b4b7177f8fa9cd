"""The controller is killed before and after its effects (calls, journal and ledger writes), and another one continues.

Enumerated, not only sampled: `effects` counts them all in an undisturbed run, and a controller dies at each in turn; at
most of them in the long tests.
"""

import asyncio
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.core.errors import CheckpointCorrupt, ProofMismatch, StaleIncarnation
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Ledger
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.controller.trajectories import GroupPhase
from tests.rl_runtime.loop import CONTROLLER, World, small_job
from tests.rl_runtime.scripted_responses import expected_tokens, request_seed_of
from tests.rl_runtime.simulated_fleet import FakeRequest, FakeRollout
from tests.support import some

SHORT = {"num_steps": 4, "checkpoint__every_steps": 2}
STRIDE = 13
"""Every so many effects one death for each offset. A prime: it meets every kind."""
OFFSETS = 0, 4, 8
"""Of the default run; the long one has all others."""


def run_with_deaths(path: Path, deaths: list[int], seed: int = 0) -> World:
    path.mkdir()
    w = World(job=small_job(**SHORT), path=path, seed=seed, deaths=list(deaths)).run()
    try:
        found = w.check()
        assert set(found.dropped_by_reason) <= {"run_ended", "stale"}
        assert all(len(c) == 1 for c in w.fleet.optimizer.values()), "a step entered the optimizer twice"
    except AssertionError as e:
        raise AssertionError(f"controller deaths at {deaths}, seed {seed}: {e}") from e
    return w


def effects(path: Path) -> int:
    return run_with_deaths(path / "undisturbed", []).mortalities[0].effects


@pytest.mark.parametrize("offset", some([(n,) for n in range(STRIDE)], [(n,) for n in OFFSETS]))
def test_a_controller_killed_at_any_effect_is_succeeded(tmp_path: Path, offset: int) -> None:
    total = effects(tmp_path)
    died = 0
    for at in range(1 + offset, total, STRIDE):
        died += len(run_with_deaths(tmp_path / f"{at}", [at]).controllers) == 2
    assert died >= 10


@pytest.mark.parametrize("trial", range(6))
def test_controllers_die_one_after_the_other_while_the_fleet_is_hurt(tmp_path: Path, seed: int, trial: int) -> None:
    rng = random.Random(f"{seed}/{trial}")

    async def script(w: World) -> None:
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0.3, 2.5))
            victim = rng.choice(
                ["rollout/0", "rollout/1", "rollout/2", "trainer/0", "trainer/1", "reward/0", "reward/1"]
            )
            if not w.fleet.newest(victim).dead.is_set():
                rng.choice([w.fleet.kill, w.fleet.hang])(victim)

    deaths = [rng.randrange(20, 400) for _ in range(3)]
    job = small_job(num_steps=16, checkpoint__every_steps=4)
    w = World(job=job, path=tmp_path, seed=rng.randrange(1000), deaths=deaths, script=script).run()
    w.check()
    assert len(w.controllers) == 4


@pytest.mark.parametrize("seed", range(3))
def test_a_job_whose_replicas_all_end_at_once_continues_from_its_newest_checkpoint(tmp_path: Path, seed: int) -> None:
    async def script(w: World) -> None:
        while len(w.events(EventKind.STEP_COMMITTED)) < 6 + seed:
            await asyncio.sleep(0.05)
        w.mortalities[-1].dies_at = 0
        for replica in ("trainer/0", "trainer/1", "rollout/0", "rollout/1", "rollout/2", "reward/0", "reward/1"):
            w.fleet.kill(replica)

    job = small_job(num_steps=12, checkpoint__every_steps=4)
    w = World(job=job, path=tmp_path, seed=seed, script=script).run()
    w.check()
    assert len(w.controllers) == 2
    (went_back,) = w.events(EventKind.STEP_INTERRUPTED)[-1:]
    assert went_back["step"] in (4, 8) and "state taken from" in went_back["because"]
    assert len(w.events(EventKind.STEP_COMMITTED)) > 12, "steps after the checkpoint are trained again"


def test_tokens_of_open_requests_are_recovered_from_the_engines(tmp_path: Path) -> None:
    """Streams are open when the controller dies; the next one starts nothing over that an engine still holds."""
    streaming: list[int] = []

    async def script(w: World) -> None:
        while len(streaming) == 0:
            await asyncio.sleep(0.01)
            open_groups = list(w.controllers[-1].table.groups.values()) if w.controllers else []
            count = sum(bool(t.tokens) and not t.finished for g in open_groups for t in g.trajectories)
            scored = sum(g.phase in (GroupPhase.SCORED, GroupPhase.ASSIGNED) for g in open_groups)
            if count >= 4 and scored >= 8:
                streaming.append(count)
                w.mortalities[-1].dies_at = 0

    w = World(job=small_job(**SHORT), path=tmp_path, seed=3, script=script).run()
    w.check()
    assert streaming and len(w.controllers) == 2 and not w.fleet.started_over
    for request_id, made in w.fleet.tokens_made.items():
        whole = expected_tokens(request_seed_of(w.job.seed, request_id))
        assert made <= len(whole), f"{request_id}: {made} tokens were generated, {len(whole)} are needed"
    (taken_over,) = [b for b in w.events(EventKind.REQUESTS_REASSIGNED) if b["from_replica"] == CONTROLLER]
    assert taken_over["num_requests"] >= streaming[0] and taken_over["tokens_kept"] >= streaming[0]


@pytest.mark.parametrize("seed", range(2))
def test_engines_drop_tokens_of_a_discarded_policy_although_the_controller_died_before_notifying_them(
    tmp_path: Path, seed: int
) -> None:
    never: list[FakeRequest] = []
    kept: list[FakeRequest] = []

    def held(w: World) -> list[FakeRequest]:
        return [h for p in w.fleet.processes.values() if isinstance(p.body, FakeRollout) for h in p.body.held.values()]

    async def script(w: World) -> None:
        while not (w.controllers and w.controllers[-1].state.step >= 8):
            await asyncio.sleep(0.01)
        w.fleet.kill("trainer/0")
        w.fleet.kill("trainer/1")
        while w.controllers[-1].state.step >= 8:
            await asyncio.sleep(0.001)
        w.mortalities[-1].dies_at = 0
        never.extend(h for h in held(w) if max(h.versions, default=0) > w.controllers[-1].state.step)
        while len(w.controllers) < 2 or not w.controllers[-1].state.issuing:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)
        kept.extend(h for h in held(w) if any(h is one for one in never))

    w = World(job=small_job(num_steps=30), path=tmp_path, seed=seed, script=script).run()
    w.check()
    assert len(w.controllers) == 2 and never, "no engine held any such token"
    assert not kept, [h.request.request_id for h in kept]


def test_an_older_controller_writes_nothing_once_a_newer_one_is_wanted(tmp_path: Path) -> None:
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}")
    node = NodeId("node-0")
    journal.set_desired(Desired(replica=CONTROLLER, incarnation=1, node=node))
    journal.set_actual(Actual(replica=CONTROLLER, incarnation=1, node=node, state=ReplicaState.READY))
    recorder = RunRecorder(journal, Ledger(journal.store), CONTROLLER, 1)
    recorder.issued([])
    journal.set_desired(Desired(replica=CONTROLLER, incarnation=2, node=node))
    for write in (
        lambda: recorder.issued([]),
        lambda: recorder.dropped([], "x") or recorder.returned(0, [], "x"),
        lambda: recorder.event(EventKind.STEP_COMMITTED, {}),
        lambda: recorder.change_members(joined=[(CONTROLLER, 1)], because="x"),
        lambda: recorder.fence(CONTROLLER, 1, "x"),
        lambda: recorder.undone_after(0, "x"),
    ):
        with pytest.raises(StaleIncarnation):
            write()
    assert journal.head().position == 0
    journal.close()


def test_a_newer_controller_makes_the_older_one_end_without_a_word(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        while not (w.controllers and w.controllers[-1].state.step >= 2):
            await asyncio.sleep(0.01)
        node = NodeId("node-0")
        w.journal.set_desired(Desired(replica=CONTROLLER, incarnation=2, node=node))

    w = World(job=small_job(**SHORT), path=tmp_path, seed=0, script=script).run()
    w.check()
    assert len(w.controllers) == 2, "the first one ended without an outcome, the second one ended the run"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def kill_trainers(w: World) -> None:
    for replica in ("trainer/0", "trainer/1"):
        if not w.fleet.newest(replica).dead.is_set():
            w.fleet.kill(replica)


def test_a_checkpoint_that_appears_after_a_return_is_not_loaded(tmp_path: Path) -> None:
    """Its writer outlives the controller that told it to write, and then the run goes back to an older step."""
    states: list[tuple[int, list[int]]] = []

    def returns(w: World) -> list[int]:
        return [e["step"] for e in w.events(EventKind.STEP_INTERRUPTED) if "state taken from" in e["because"]]

    async def script(w: World) -> None:
        await until(lambda: 1 in w.fleet.checkpoints)
        w.fleet.writes_survive, w.fleet.write_seconds = True, lambda: 6.0
        await until(lambda: any(p.body.writing for p in w.fleet.trainers()))
        w.fleet.write_seconds = lambda: 1000.0
        await until(lambda: w.controllers[-1].state.step > 5)
        w.mortalities[-1].dies_at = 0
        kill_trainers(w)
        await until(
            lambda: len(w.fleet.checkpoints) > 1 and w.controllers[-1].state.step > max(w.fleet.checkpoints) + 1
        )
        states.append((len(w.controllers), sorted(w.fleet.checkpoints)))
        w.fleet.write_seconds = lambda: 0.05
        kill_trainers(w)
        await until(lambda: len(returns(w)) > 1)

    w = World(job=small_job(num_steps=60, checkpoint__every_steps=2), path=tmp_path, seed=1, script=script).run()
    w.check()
    [(controllers, [one, late])] = states
    assert controllers == 2 and one == 1 < late and returns(w) == [2, 2], "from the checkpoint of step 1, both times"
    refused = [e["refused_checkpoints"] for e in w.events(EventKind.STEP_INTERRUPTED) if e["refused_checkpoints"]]
    assert len(refused) == 1 and f"step-{late:08d}: its last step was undone" in refused[0][0]


@pytest.mark.parametrize("trial", range(8))
def test_exactly_once_with_checkpoints_that_fail_and_come_late(tmp_path: Path, seed: int, trial: int) -> None:
    rng = random.Random(f"checkpoints/{seed}/{trial}")

    async def script(w: World) -> None:
        w.fleet.write_seconds = lambda: rng.choice([0.05, 0.3, 2.0, 8.0])
        w.fleet.write_fails = lambda: rng.random() < 0.2
        w.fleet.writes_survive = rng.random() < 0.7
        w.fleet.load_fails = lambda path: (
            CheckpointCorrupt(path=path, reason="Input/output error") if path and rng.random() < 0.1 else None
        )
        for _ in range(5):
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            kill_trainers(w) if rng.random() < 0.6 else w.fleet.hang(rng.choice(["trainer/0", "trainer/1"]))

    deaths = [rng.randrange(20, 500) for _ in range(3)]
    job = small_job(num_steps=20, checkpoint__every_steps=rng.choice([1, 2, 3]), checkpoint__keep=rng.choice([1, 2]))
    w = World(job=job, path=tmp_path, seed=rng.randrange(1000), deaths=deaths, script=script).run()
    w.check()


def test_a_checkpoint_that_does_not_fit_the_job_ends_the_run(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.load_fails = lambda path: ProofMismatch(
            replica="trainer/0", part="state", tensor="(frozen)", reason="the model folder has changed"
        )
        await until(lambda: 1 in w.fleet.checkpoints)
        kill_trainers(w)

    w = World(job=small_job(**SHORT), path=tmp_path, seed=0, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "failed" and len(w.controllers) == 1
    assert re.search(r"checkpoints/step-00000001 does not fit this job: .*model folder has changed", w.outcome.because)
    assert w.audit().ok


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.load_fails = lambda path: (
            CheckpointCorrupt(path=path, reason="its SHA-256 is not that of what was written")
            if path.endswith("step-00000003")
            else None
        )
        await until(lambda: 3 in w.fleet.checkpoints)
        kill_trainers(w)

    w = World(job=small_job(num_steps=12, checkpoint__every_steps=2), path=tmp_path, seed=0, script=script).run()
    w.check()
    [back] = [e for e in w.events(EventKind.STEP_INTERRUPTED) if e["refused_checkpoints"]]
    assert back["step"] == 2 and "step-00000003: its SHA-256" in back["refused_checkpoints"][0]


def test_a_run_does_not_begin_again_because_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    """They may be unreadable for a moment only, and would then be removed as undone."""

    async def script(w: World) -> None:
        await until(lambda: 1 in w.fleet.checkpoints)
        w.fleet.load_fails = lambda path: CheckpointCorrupt(path=path, reason="Stale file handle") if path else None
        kill_trainers(w)

    w = World(job=small_job(**SHORT), path=tmp_path, seed=0, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "failed" and len(w.controllers) == 1
    assert "none can be read" in w.outcome.because and "Stale file handle" in w.outcome.because
    assert 1 in w.fleet.checkpoints


def test_checkpoints_that_no_trainer_can_read_end_the_run(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await until(lambda: 1 in w.fleet.checkpoints)
        w.fleet.list_fails = lambda folder: CheckpointCorrupt(path=folder, reason="Permission denied")
        kill_trainers(w)

    w = World(job=small_job(**SHORT), path=tmp_path, seed=0, script=script).run()
    assert w.outcome is not None and w.outcome.outcome == "failed" and len(w.controllers) == 1
    assert "no trainer could take a state" in w.outcome.because and "Permission denied" in w.outcome.because


def test_a_trainer_that_was_cut_off_does_not_bring_back_what_was_undone(tmp_path: Path) -> None:
    """It answers again after the others went back to an older step, and has a newer state than they."""

    async def script(w: World) -> None:
        w.fleet.hung_seconds = 500.0
        await until(lambda: 1 in w.fleet.checkpoints)
        w.fleet.write_fails = lambda: True
        await until(lambda: w.controllers[-1].state.step > 6)
        w.fleet.hang("trainer/1")
        w.fleet.kill("trainer/0")
        await until(lambda: w.controllers[-1].state.step == 3)
        w.fleet.resume("trainer/1")

    w = World(job=small_job(num_steps=30, checkpoint__every_steps=2), path=tmp_path, seed=0, script=script).run()
    w.check()
    last = w.journal.epoch()
    assert last is not None and ("trainer/1", 1) in last.members, "it copied the state and joined"
