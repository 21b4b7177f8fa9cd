"""Lost time taken in event by event is what the report's own arithmetic says of the whole run."""

import math
from dataclasses import replace

import pytest

from rolecall.core.journal.events import Event
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import RecoveryPaused
from rolecall.core.journal.payloads.run import ReplicaStopped, RunEnded
from rolecall.core.rundir import RunDir
from rolecall.dashboards.data.progress import (
    BUCKETS_MAX,
    Bucket,
    Curve,
    RunTrendsProjection,
    merged,
    step_at,
)
from rolecall.reports.report import read_facts
from rolecall.views.ettr import UNDETECTED, EttrAccumulator, ettr, losses, steps, training_began
from rolecall.views.incidents import parse_injections, summarize_incidents


def bucket(step: int, *, reward: float = 0.5, seconds: float = 1.0) -> Bucket:
    return Bucket(
        first_step=step, last_step=step, at=float(step), num=1, reward=reward, seconds=seconds, seconds_max=seconds, tokens=10
    )  # fmt: skip


@pytest.mark.parametrize(
    ("at", "step"),
    [(0.5, 0), (1.0, 1), (1.5, 1), (2.5, None), (3.5, 8), (9.0, 9)],
    ids=["before the first", "at a commit", "between two", "in a gap", "after a gap", "after the last"],
)
def test_the_step_at_a_time_is_the_next_to_be_committed(at: float, step: int | None) -> None:
    assert step_at([(1.0, 0), (2.0, 1), (3.0, 7), (4.0, 8)], at) == step
    assert step_at([], at) is None


@pytest.mark.parametrize("injections", [True, False])
def test_a_real_run_read_in_order_gives_the_ettr_of_its_report(fake_run: RunDir, injections: bool) -> None:
    facts = read_facts(fake_run)
    committed = steps(facts.events)
    began = training_began(facts.events)
    assert began is not None
    faults = parse_injections(fake_run.injections_path.read_text())[: None if injections else 0]
    lost = losses(summarize_incidents(facts.events, facts.known, faults), committed[-1].at)
    expected = ettr(began, committed[-1].at, lost, num_rollouts=3, num_trainers=2)
    fold = RunTrendsProjection(ettr=EttrAccumulator(faults=faults))
    journal = Journal(fake_run.database_url, create=False)
    for event in journal.events():
        fold.take(event)
    course = fold.trends(committed[-1].at + 3600.0, journal.current(), whole=True)
    journal.close()
    assert course.account is not None and course.account.ettr == pytest.approx(expected)
    assert {key for key, seconds in course.account.lost.items() if seconds} == {
        ("rollout", "crash"), ("trainer", "hang"), ("rollout", "slow"),
    }  # fmt: skip
    assert course.still_open == ()
    assert course.steps == {"i-1": 23, "i-2": 54, "i-3": 84}
    assert fold.trends(0.0, {}, whole=False).account is None  # half a history has no ETTR


def test_a_fault_that_no_one_notices_is_lost_time_too(fake_run: RunDir) -> None:
    seen = parse_injections(fake_run.injections_path.read_text())
    missed = replace(
        seen[0], target="rollout/0", targets=(), injected_at=seen[-1].injected_at + 5.0, pid=0, kind="unseen"
    )
    fold = RunTrendsProjection(ettr=EttrAccumulator(faults=[*seen, missed]))
    journal = Journal(fake_run.database_url, create=False)
    for event in journal.events():
        fold.take(event)
    journal.close()
    account = fold.trends(missed.injected_at + 3600.0, {}, whole=True).account
    assert account is not None
    assert account.lost["rollout", UNDETECTED] > 0


def test_replicas_that_stop_because_the_run_ends_hide_no_other_event() -> None:
    def stopped(replica: str, because: str) -> ReplicaStopped:
        return ReplicaStopped(replica=replica, incarnation=1, because=because, node="node-1")

    paused = RecoveryPaused(by="me", because="maintenance")
    shutdown = [stopped(f"rollout/{n}", "120 steps") for n in range(30)]
    ended = RunEnded(outcome="done", because="120 steps")
    fold = RunTrendsProjection()
    for seq, payload in enumerate((paused, *shutdown, stopped("trainer/0", "replaced"), ended), start=1):
        fold.take(Event(seq=seq, wall_at=float(seq), payload=payload))
    recent = fold.trends(40.0, {}, whole=True).recent
    assert [e.payload for e in recent] == [paused, stopped("trainer/0", "replaced"), ended]


def test_a_curve_keeps_few_points_and_every_step() -> None:
    curve = Curve()
    for step in range(10_000):
        curve.add(bucket(step, reward=float(step), seconds=9.0 if step == 7_777 else 1.0))
    points = curve.points()
    assert len(points) <= BUCKETS_MAX + 1
    assert sum(p.num for p in points) == 10_000 and points[-1].last_step == 9_999
    assert max(p.seconds_max for p in points) == 9.0  # the slowest step is not averaged away
    assert points[0].reward == pytest.approx(points[0].last_step / 2)


def test_what_is_no_number_is_left_out_of_a_mean() -> None:
    whole = merged(bucket(1, reward=math.nan), bucket(2, reward=0.4))
    assert whole.reward == 0.4 and whole.num == 2
    assert math.isnan(merged(bucket(1, reward=math.nan), bucket(2, reward=math.nan)).reward)
