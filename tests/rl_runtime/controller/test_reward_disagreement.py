"""Second opinions on rewards: who is contradicted, which rewards count, and what a wrong worker does to a run."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.processes.state_pages import parse_page
from rolecall.agent.reporter import reporter
from rolecall.core.errors import WrongNumbers
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.rl_runtime.controller.disagreement import equal, is_sampled, judge
from rolecall.rl_runtime.controller.reward_scoring import WATCHED_GROUPS
from rolecall.rl_runtime.controller.trajectories import EngineKey
from tests.rl_runtime.loop import World, small_job

A, B, C = ((ReplicaId(f"reward/{n}"), 1) for n in range(3))


@pytest.mark.parametrize(
    ("answers", "odd", "used"),
    [
        ({A: (0.0, 1.0), B: (0.5, 1.0), C: (0.0, 1.0)}, B, (0.0, 1.0)),
        ({A: (0.5, 1.0), B: (0.0, 1.0), C: (0.0, 1.0)}, A, (0.0, 1.0)),
        ({A: (0.0, 1.0), B: (0.0, 1.0), C: (0.0, 0.0)}, C, (0.0, 1.0)),
        ({A: (0.1,), B: (0.2,), C: (0.3,)}, None, (0.1,)),
        ({A: (0.1,), B: (0.2,)}, None, (0.1,)),
        ({A: (0.1,), B: (0.1 + 1e-12,), C: (0.1,)}, None, (0.1,)),
    ],
)
def test_two_against_one(
    answers: dict[EngineKey, tuple[float, ...]], odd: EngineKey | None, used: tuple[float, ...]
) -> None:
    verdict = judge(answers)
    assert verdict.odd == odd and equal(verdict.rewards, used)


def test_the_sample_has_the_requested_share_and_is_the_same_for_every_controller() -> None:
    groups = [GroupId(f"g{n:08d}") for n in range(20_000)]
    sampled = [g for g in groups if is_sampled(7, g, 0.02)]
    assert 300 < len(sampled) < 500 and sampled == [g for g in groups if is_sampled(7, g, 0.02)]
    assert sampled != [g for g in groups if is_sampled(8, g, 0.02)]
    assert not any(is_sampled(7, g, 0.0) for g in groups) and all(is_sampled(7, g, 1.0) for g in groups)


def world(tmp_path: Path, *, share: float, num_workers: int, wrong: dict[str, float], **job: Any) -> World:
    """`wrong`: what a worker adds to every reward from the beginning."""

    async def script(w: World) -> None:
        for replica, added in wrong.items():
            w.fleet.newest(replica).body.added = added
        await asyncio.sleep(0)

    value = small_job(runtime__reward_check_share=share, roles__reward=num_workers, **job)
    return World(job=value, path=tmp_path, seed=0, script=script)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_wrong_worker_is_named_and_none_of_its_rewards_is_trained_on(tmp_path: Path, num_workers: int) -> None:
    """The simulated trainers assert that they are right."""
    w = world(tmp_path, share=1.0, num_workers=num_workers, wrong={"reward/1": 0.25}).run()
    w.check()
    compared = w.events(EventKind.REWARDS_COMPARED)
    assert compared and {b["odd"] for b in compared} == {"reward/1#1"}
    third = "controller/0#1" if num_workers == 2 else "reward/2#1"
    assert {tuple(sorted(b["rewards"])) for b in compared} == {tuple(sorted((third, "reward/0#1", "reward/1#1")))}
    report = parse_page(reporter.page_bytes()).exception
    assert report is not None and report.type.endswith("WrongNumbers")
    found = WrongNumbers.parse(report.message)
    assert found is not None and found[:2] == ("reward/1", 1) and found[2].startswith("prompt group g")


def test_three_different_answers_name_no_worker(tmp_path: Path) -> None:
    w = world(tmp_path, share=1.0, num_workers=2, wrong={"reward/0": 0.25, "reward/1": 0.5}, num_steps=2)
    w.run()
    compared = w.events(EventKind.REWARDS_COMPARED)
    assert compared and {b["odd"] for b in compared} == {""}


def test_healthy_workers_are_compared_without_a_word(tmp_path: Path) -> None:
    w = world(tmp_path, share=1.0, num_workers=2, wrong={}).run()
    w.check()
    assert w.events(EventKind.REWARDS_COMPARED) == []


def test_a_contradicted_worker_is_checked_more_often(tmp_path: Path) -> None:
    """Rewards before the first contradiction are trained on: the fleet's own check of them is not asked here."""
    few = world(tmp_path, share=0.05, num_workers=2, wrong={"reward/1": 0.25}).run()
    compared = few.events(EventKind.REWARDS_COMPARED)
    sampled = [b for b in compared if is_sampled(few.job.seed, b["group"], 0.05)]
    assert len(compared) > 3 * len(sampled) > 0 and len(compared) < WATCHED_GROUPS


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("added", [math.nan, math.inf])
def test_a_worker_whose_rewards_are_not_finite_is_named_outside_of_the_sample_too(
    tmp_path: Path, num_workers: int, added: float
) -> None:
    """One that is alone is contradicted by the controller."""

    async def script(w: World) -> None:
        worker = w.fleet.newest("reward/0").body
        worker.added = added
        if num_workers == 1:
            await asyncio.sleep(0.5)
            worker.added = 0.0

    job = small_job(runtime__reward_check_share=1e-9, roles__reward=num_workers)
    w = World(job=job, path=tmp_path, seed=0, script=script).run()
    w.check()
    compared = w.events(EventKind.REWARDS_COMPARED)
    assert compared and {b["odd"] for b in compared} == {"reward/0#1"}
    assert all(math.isfinite(r) for b in compared for r in b["used"])
    assert not any(math.isfinite(float(r)) for b in compared for r in b["rewards"]["reward/0#1"])
    report = parse_page(reporter.page_bytes()).exception
    assert report is not None
    found = WrongNumbers.parse(report.message)
    assert found is not None and found[:2] == ("reward/0", 1) and "at reward/0#1" in found[3]


def test_without_a_share_a_reward_that_is_not_finite_names_nobody(tmp_path: Path) -> None:
    """The scorer may give equal answers different rewards."""
    w = world(tmp_path, share=0.0, num_workers=2, wrong={"reward/0": math.nan}).run()
    w.check()
    assert w.events(EventKind.REWARDS_COMPARED) == []


def test_a_peer_that_dies_while_it_is_asked_costs_only_the_second_opinion(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await asyncio.sleep(1.0)
        w.fleet.hang("reward/1")

    w = World(job=small_job(runtime__reward_check_share=1.0), path=tmp_path, seed=0, script=script).run()
    w.check()
    assert w.events(EventKind.REWARDS_COMPARED) == []
