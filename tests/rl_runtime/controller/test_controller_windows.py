"""T-PPO in the loop: answers are trained window by window, on a fleet that is hurt, and each token is used once."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.ledger import GroupState, Ledger
from rolecall.rl_runtime.controller import windows
from rolecall.rl_runtime.controller.trajectories import GroupPhase
from rolecall.rl_runtime.protocol.messages import EndReason
from rolecall.rl_runtime.tasks.task import group_number, group_start
from tests.rl_runtime.loop import World, small_job
from tests.support import some

PREFIXES = ["continue", "train"]
VICTIMS = ["rollout/0", "rollout/1", "rollout/2", "trainer/0", "trainer/1", "reward/0", "reward/1"]


def tppo_job(prefixes: str, **changes: Any) -> Any:
    """Steps of 4 microbatches of 4 windows of 4 tokens; answers have up to 16."""
    algorithm = {
        "algorithm__name": "tppo",
        "algorithm__group_size": 1,
        "algorithm__groups_per_microbatch": 4,
        "algorithm__window_tokens": 4,
        "algorithm__prefixes": prefixes,
    }
    return small_job(**{**algorithm, "task__num_digits": 12, "num_steps": 12, **changes})


def world(path: Path, prefixes: str, seed: int = 0, job: dict[str, Any] | None = None, **rest: Any) -> World:
    path.mkdir(exist_ok=True)
    return World(job=tppo_job(prefixes, **(job or {})), path=path, seed=seed, **rest)


def check(w: World) -> dict[int, list[GroupId]]:
    """Invariants of every run with windows. Returns the windows of each answer, first to last."""
    w.check()
    ledger = Ledger(w.journal.store)
    states = ledger.groups()
    first_lines: dict[str, int] = {}
    later_lines: dict[str, int] = {}
    for line in ledger.lines():
        before = first_lines if line["state"] == GroupState.ISSUED else later_lines
        before.setdefault(line["group_id"], line["seq"])
    answers: defaultdict[int, list[GroupId]] = defaultdict(list)
    for group in states:
        answers[group_number(group)].append(group)
    for number, found in answers.items():
        found.sort(key=group_start)
        assert group_start(found[0]) == 0, f"the beginning of answer {number} was never issued"
        used = [(g, *w.fleet.used[g]) for g in found if states[g][0] is GroupState.TRAINED]
        for group, start, stop, end in used:
            after = [g for g in found if group_start(g) > start]
            assert start < stop and start == group_start(group)
            if end is EndReason.TRUNCATED:
                assert after and group_start(after[0]) == stop, f"{group} ends at {stop}, and then: {after}"
                assert first_lines[after[0]] < later_lines[group], "the ledger had a line of it before it was followed"
            else:
                dropped = [states[g][0] for g in after]
                assert set(dropped) <= {GroupState.DROPPED}, f"{group} is the end, and then: {after}"
        if len(used) == len(found):
            assert used[-1][3] is not EndReason.TRUNCATED, "an answer stops in the middle, without a word in the ledger"
    return answers


@pytest.mark.parametrize("prefixes", PREFIXES)
def test_a_healthy_run_trains_every_token_once(tmp_path: Path, prefixes: str) -> None:
    w = world(tmp_path, prefixes).run()
    answers = check(w)
    assert set(w.audit().dropped_by_reason) <= {"run_ended"}
    assert sum(len(found) > 2 for found in answers.values()) > 5, "hardly any answer had windows"
    ended = [g for g, (_, _, end) in w.fleet.used.items() if end is not EndReason.TRUNCATED]
    assert len(ended) > 5
    reported = sum(b["tokens"] for b in w.events(EventKind.STEP_COMMITTED))
    assert reported == sum(stop - start for start, stop, _ in w.fleet.used.values()), "a window's context counts again"


async def killing(w: World, rng: random.Random, until: Callable[[], bool]) -> None:
    while not until():
        await asyncio.sleep(rng.uniform(0.3, 2.0))
        victim = rng.choice(VICTIMS)
        if not w.fleet.newest(victim).dead.is_set():
            rng.choice([w.fleet.kill, w.fleet.kill, w.fleet.hang])(victim)


@pytest.mark.parametrize(
    ("hurt", "prefixes"), some(list(product([False, True], PREFIXES)), [(False, "continue"), (True, "train")])
)
def test_the_batch_is_full_over_100_steps_and_no_slot_is_left_empty(tmp_path: Path, prefixes: str, hurt: bool) -> None:
    job = {"num_steps": 100, "checkpoint__every_steps": 10, "algorithm__groups_per_microbatch": 2}
    rng = random.Random(5)
    empty: list[float] = []

    async def script(w: World) -> None:
        if hurt:
            killer = asyncio.ensure_future(killing(w, rng, lambda: w.controllers[-1].state.step > 90))
        while True:
            await asyncio.sleep(0.05)
            c = w.controllers[-1] if w.controllers else None
            if c is not None and c.state.issuing and _is_empty(w):
                empty.append(w.clock.monotonic())
            if hurt and killer.done():
                killer.result()

    w = world(tmp_path, prefixes, job=job, script=script).run()
    check(w)
    sizes = {b["step"]: len(b["groups"]) for b in w.events(EventKind.STEP_COMMITTED)}
    assert sizes == dict.fromkeys(range(100), 8)
    assert not empty


def _is_empty(w: World) -> bool:
    """Whether, right after the controller's check, something could be generated in time, and is not."""
    c = w.controllers[-1]
    c.batches.issue()
    able = [e for e in c.rollouts.loads() if e.may_serve]
    ahead = sum(1 for g in c.table.groups if not c.rollouts.is_stuck(g)) // w.job.algorithm.groups_per_step
    in_time = any(c.state.step + ahead - e.version <= w.job.runtime.staleness_max for e in able)
    wanted = c.state.step + ahead < w.job.num_steps
    updating = any(e.is_due for e in able)  # what it would take is kept for it
    return bool(wanted and in_time and not updating) or bool(able and c.table.unassigned())


@pytest.mark.parametrize(
    ("trial", "prefixes"), some(list(product(range(20), PREFIXES)), list(product(range(2), PREFIXES)))
)
def test_every_token_is_used_once_after_any_death(tmp_path: Path, seed: int, trial: int, prefixes: str) -> None:
    """Engines, trainers (both at once: back to a checkpoint), reward workers and controllers."""
    rng = random.Random(f"windows/{seed}/{trial}")

    async def script(w: World) -> None:
        await asyncio.sleep(rng.uniform(0.3, 3.0))
        for _ in range(3):
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            both = rng.random() < 0.4
            for victim in ["trainer/0", "trainer/1"] if both else [rng.choice(VICTIMS)]:
                if not w.fleet.newest(victim).dead.is_set():
                    (w.fleet.kill if both else rng.choice([w.fleet.kill, w.fleet.hang]))(victim)

    deaths = [rng.randrange(20, 600) for _ in range(3)]
    job = {"num_steps": 16, "checkpoint__every_steps": 4}
    w = world(tmp_path, prefixes, rng.randrange(1000), job, deaths=deaths, script=script).run()
    check(w)
    assert len(w.controllers) in (3, 4), "a run may be over before its third death"


@pytest.mark.parametrize(
    ("offset", "prefixes"), some(list(product(range(23), PREFIXES)), list(zip([0, 11], PREFIXES, strict=True)))
)
def test_a_controller_killed_at_any_effect_forgets_no_answer(tmp_path: Path, offset: int, prefixes: str) -> None:
    job = {"num_steps": 4, "checkpoint__every_steps": 2}
    total = world(tmp_path / "undisturbed", prefixes, job=job).run().mortalities[0].effects
    died = 0
    for at in range(1 + offset, total, 23):
        w = world(tmp_path / f"{at}", prefixes, job=job, deaths=[at]).run()
        try:
            check(w)
            assert set(w.audit().dropped_by_reason) <= {"run_ended", "stale"}
            assert not w.fleet.contexts_lost, "what engines still held was made again"
        except AssertionError as e:
            raise AssertionError(f"controller's death at {at}: {e}") from e
        died += len(w.controllers) == 2
    assert died >= 8


async def engine_with_tokens(w: World, replica: str) -> None:
    """Returns once the engine is in the middle of a few windows."""
    key = (ReplicaId(replica), 1)
    while True:
        await asyncio.sleep(0.01)
        if w.controllers and w.controllers[-1].state.step >= 3:
            table = w.controllers[-1].table
            on_it = [t for g in table.groups.values() for t in g.trajectories if t.engine == key and not t.finished]
            if sum(len(t.tokens) > t.first_fresh for t in on_it) >= 2:
                return


@pytest.mark.parametrize("prefixes", PREFIXES)
def test_unfinished_answers_of_a_dead_engine_are_trained_on_or_continued(tmp_path: Path, prefixes: str) -> None:
    """With its own versions and log-probabilities: the fleet compares those of every token that is trained on."""

    async def script(w: World) -> None:
        await engine_with_tokens(w, "rollout/1")
        w.fleet.kill("rollout/1")

    w = world(tmp_path, prefixes, job={"num_steps": 12}, script=script).run()
    check(w)
    (moved,) = w.events(EventKind.REQUESTS_REASSIGNED)
    odd = [g for g, (start, stop, end) in w.fleet.used.items() if end is EndReason.TRUNCATED and stop - start < 4]
    if prefixes == "continue":
        assert moved["num_cut"] == 0 and not odd
    else:
        assert moved["num_cut"] >= 2 and len(odd) >= 2
    assert not w.fleet.started_over and not w.fleet.contexts_lost, "streamed tokens were made again"


@pytest.mark.parametrize("seed", [0, 2])  # the step with them is trained; it is yet to be formed
def test_a_window_whose_tokens_are_gone_takes_them_from_the_next_one(tmp_path: Path, seed: int) -> None:
    """The engine died, its prefixes were cut, the next windows are under way; now the controller dies too."""
    held: list[set[str]] = []

    async def script(w: World) -> None:
        await engine_with_tokens(w, "rollout/1")
        w.fleet.kill("rollout/1")
        while not w.events(EventKind.REQUESTS_REASSIGNED):
            await asyncio.sleep(0.005)
        table = w.controllers[-1].table
        cut = {g.group_id for g in table.groups.values() if g.is_cut and len(g.trajectories[0].tokens) % 4}
        held.append({str(g) for g in cut if table.groups[g].phase in (GroupPhase.SCORED, GroupPhase.ASSIGNED)})
        while not all(_is_under_way(w, GroupId(g)) for g in held[0]):
            await asyncio.sleep(0.001)
        w.mortalities[-1].dies_at = 0

    w = world(tmp_path, "train", seed, job={"num_steps": 12}, script=script).run()
    check(w)
    assert held and held[0] and len(w.controllers) == 2
    assert not w.fleet.started_over, "tokens that another window still had were made again"


def _is_under_way(w: World, group: GroupId) -> bool:
    table = w.controllers[-1].table
    if group not in table.groups:
        return True
    after = table.groups.get(windows.successor(table.groups[group]))
    return after is None or after.trajectories[0].sent
