"""`rolecall watch run --require-approval`: it asks where the job file would act, and gives nothing that the file does
not."""

from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import ConfigError
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.loop import LEASE_NAME
from rolecall.recovery.operators import commands
from rolecall.watch.run import with_required_approval
from tests.events import filled
from tests.recovery.world import World

K = EventKind


def _job(mode: str) -> JobConfig:
    return parse_job({"recovery": {"mode": mode, "approval_timeout_seconds": 60}})


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(f"sqlite:///{tmp_path / 'other.db'}", clock=FakeClock())


def _other_watch(journal: Journal, mode: str, orphans_mode: str = "") -> None:
    lease = journal.acquire(LEASE_NAME, "host:1:1", 5.0)
    assert lease is not None
    body = {"holder": lease.holder, "fence": lease.fence, "mode": mode, "orphans_mode": orphans_mode}
    journal.append(filled(K.LEASE_ACQUIRED, body))


@pytest.mark.parametrize("mode", ["act", "approve"])
def test_an_acting_watch_requires_approval(mode: str, journal: Journal) -> None:
    job = _job(mode)
    asked = with_required_approval(job, journal)
    assert asked.recovery.mode == "approve" and asked.recovery.approval_timeout_seconds == 60
    assert asked.model_copy(update={"recovery": job.recovery}) == job, "nothing else is changed"


def test_an_observing_watch_stays_observing(journal: Journal) -> None:
    with pytest.raises(ConfigError, match=r"recovery.mode is observe in the job file"):
        with_required_approval(_job("observe"), journal)


def test_required_approval_is_refused_beside_an_acting_watch(journal: Journal) -> None:
    _other_watch(journal, "act")
    with pytest.raises(ConfigError, match=r"watch host:1:1 holds the lease in mode act"):
        with_required_approval(_job("act"), journal)
    assert isinstance(journal.clock, FakeClock)
    journal.clock.advance(6.0)
    assert with_required_approval(_job("act"), journal).recovery.mode == "approve", "that watch is gone"


def test_it_is_refused_beside_a_watch_that_ends_orphans_without_approval(journal: Journal) -> None:
    _other_watch(journal, "approve", "act")
    with pytest.raises(ConfigError, match=r"in mode approve \(act for orphans\) and acts without approval"):
        with_required_approval(_job("act"), journal)


def test_two_that_ask_may_follow_each_other(journal: Journal) -> None:
    _other_watch(journal, "approve")
    assert with_required_approval(_job("act"), journal).recovery.mode == "approve"


def test_a_plan_waits_for_the_word(tmp_path: Path, journal: Journal) -> None:
    world = World(tmp_path)
    watch = world.watch(with_required_approval(_job("act"), journal).recovery)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: world.events(K.PLAN_PROPOSED), watch)
    world.run(50, watch)
    attempt = world.only().attempt
    assert attempt is not None and world.only().state is IncidentState.PROPOSED and world.runtime.replaced == []
    commands.approve_plan(RunDir(tmp_path), attempt.plan.digest, "alice", world.clock)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.runtime.replaced == [("rollout/1", 1)]


def test_without_a_word_it_lapses_and_an_operator_is_called(tmp_path: Path, journal: Journal) -> None:
    world = World(tmp_path)
    watch = world.watch(with_required_approval(_job("act"), journal).recovery)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch, seconds=120)
    assert world.runtime.replaced == [] and world.only().outcome is IncidentOutcome.ESCALATED
    (proposed,), (lapsed,) = world.events(K.PLAN_PROPOSED), world.events(K.PLAN_EXPIRED)
    assert 60 <= lapsed.wall_at - proposed.wall_at < 62
    assert [e.payload.topic for e in world.events(K.ONCALL_PAGED)] == ["expired"]
