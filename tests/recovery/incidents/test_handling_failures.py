"""What cannot be handled is set apart, told to an operator, and tried again; everything else goes on."""

import logging
import sqlite3
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import Diagnosis, Plan
from rolecall.core.errors import JournalError
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Lease
from rolecall.core.rundir import RunDir
from rolecall.recovery import loop as watch_module
from rolecall.recovery.actuators.base import ActionResult
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.isolation import (
    FIRST_PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    TRIES_MAX,
    HandlingFailures,
)
from rolecall.recovery.loop import Watch
from rolecall.recovery.notifications.outbox import NotificationSender
from rolecall.recovery.operators import queries
from rolecall.testing.recovery_world import RecordingNotifier
from tests.events import filled
from tests.recovery.world import World
from tests.terminal.texts import status_text

K = EventKind
ENOUGH_SECONDS = 60.0
DEADMAN_SECONDS = 5.0


class Unexpected(Exception):
    pass


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, replicas_at_once_max=4, deadman_seconds=DEADMAN_SECONDS)


def _status(world: World, path: Path) -> str:
    return status_text(queries.status(RunDir(path), world.clock))


def _raise_for(replica: str, inner: Callable[..., ActionResult], calls: list[str]) -> Any:
    def perform(plan: Plan, lease: Lease, lost_nodes: Collection[str] = ()) -> ActionResult:
        calls.extend(t.replica for t in plan.targets)
        if any(t.replica == replica for t in plan.targets):
            raise Unexpected("the socket of the actuator \x1b[31m is gone")
        return inner(plan, lease, lost_nodes)

    return perform


def test_an_actuator_that_raises_holds_up_its_own_incident_alone(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, calls = world.watch(), list[str]()
    actuator = world.actuators[0]
    actuator.perform = _raise_for("rollout/1", actuator.perform, calls)  # type: ignore[method-assign]
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.runtime.inject("trainer/0", FaultClass.HANG)
    with caplog.at_level(logging.ERROR):
        world.until(lambda: world.runtime.healthy("trainer/0") and world.desired("trainer/0") == 2, watch)
    assert any("inc-1-rollout-1" in r.getMessage() and "Unexpected" in r.getMessage() for r in caplog.records)
    assert world.runtime.replaced == [("trainer/0", 1)]
    # An operator sees it, an engineer finds its name, and watch says that it lives.
    world.until(lambda: world.notifier.messages, watch, seconds=ENOUGH_SECONDS)
    assert world.notifier.heartbeats != []
    world.until(world.all_closed, watch, seconds=ENOUGH_SECONDS)
    gave_up, resolved = world.incidents()
    assert (gave_up.outcome, resolved.outcome) == (IncidentOutcome.ESCALATED, IncidentOutcome.RESOLVED)
    assert "raises Unexpected" in gave_up.because
    assert calls.count("rollout/1") == TRIES_MAX, "bounded, and performed again each time"
    assert [m.kind for m in world.notifier.messages] == ["oncall_paged"]
    assert "\x1b" not in _status(world, tmp_path)
    world.journal.verify()


def test_a_recovering_actuator_is_retried_without_a_page(world: World) -> None:
    watch, calls = world.watch(), list[str]()
    actuator = world.actuators[0]
    whole = actuator.perform
    actuator.perform = _raise_for("rollout/1", whole, calls)  # type: ignore[method-assign]
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: len(calls) == 2, watch)
    actuator.perform = whole  # type: ignore[method-assign]
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.runtime.replaced == [("rollout/1", 1)]
    assert world.notifier.messages == []


def _breaks(name: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on deciding about `name` raises."""
    whole, asked = watch_module.next_step, list[str]()

    def next_move(incident: Any, *rest: Any) -> Any:
        if incident.incident_id == name:
            asked.append(name)
            raise Unexpected("no such rung")
        return whole(incident, *rest)

    monkeypatch.setattr(watch_module, "next_step", next_move)
    return asked


def test_an_incident_that_cannot_be_decided_is_named_in_status_event_and_sign_of_life(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = world.watch()
    asked = _breaks("inc-1-rollout-1", watch, monkeypatch)
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.run(1, watch)
    world.runtime.inject("trainer/0", FaultClass.HANG)
    world.until(lambda: world.notifier.messages, watch, seconds=ENOUGH_SECONDS)
    assert len(asked) == TRIES_MAX
    (called,) = world.events(K.ONCALL_PAGED)
    assert called.incident_id == "inc-1-rollout-1" and called.payload.topic == "unhandled"
    assert "inc-1-rollout-1 cannot be handled: Unexpected: no such rung" in called.payload.because
    assert "ON-CALL PAGED OVER TEST: inc-1-rollout-1 cannot be handled" in _status(world, tmp_path)
    stuck, resolved = world.incidents()
    assert (stuck.state, resolved.outcome) == (IncidentState.OPEN, IncidentOutcome.RESOLVED)
    before = len(world.notifier.heartbeats)
    world.run(DEADMAN_SECONDS + 1, watch)
    assert len(world.notifier.heartbeats) > before
    assert world.notifier.heartbeats[-1]["unhandled"] == {"inc-1-rollout-1": "Unexpected: no such rung"}
    # A successor counts anew and calls no one a second time; once it can be handled it is.
    world.clock.advance(world.config.lease_seconds + 1)
    other = world.watch()
    world.run(ENOUGH_SECONDS, other)
    assert len(world.events(K.ONCALL_PAGED)) == len(world.notifier.messages) == 1
    monkeypatch.undo()
    world.until(world.all_closed, other, seconds=PAUSE_SECONDS_MAX + ENOUGH_SECONDS)
    world.run(DEADMAN_SECONDS + 1, other)
    assert world.notifier.heartbeats[-1]["unhandled"] == {}


def test_a_diagnosis_that_cannot_be_taken_in_does_not_hold_back_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, whole = world.watch(), watch_module.triage

    def receive(d: Diagnosis, *rest: Any, **more: Any) -> Any:
        if d.suspects[0].replica == "rollout/1":
            raise Unexpected("no such suspect")
        return whole(d, *rest, **more)

    monkeypatch.setattr(watch_module, "triage", receive)
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.runtime.inject("trainer/0", FaultClass.HANG)
    world.until(world.all_closed, watch)
    assert [i.incident_id for i in world.incidents()] == ["inc-1-trainer-0"]
    world.until(lambda: world.notifier.messages, watch, seconds=ENOUGH_SECONDS)
    (called,) = world.events(K.ONCALL_PAGED)
    assert called.incident_id is None and "hang:rollout/1#1 cannot be handled" in called.payload.because
    assert world.notifier.heartbeats != []
    monkeypatch.undo()
    world.until(lambda: world.desired("rollout/1") == 2, watch, seconds=PAUSE_SECONDS_MAX + ENOUGH_SECONDS)


def test_a_window_that_cannot_be_kept_costs_its_incident_nothing(world: World) -> None:
    world.detector.window = lambda _suspects: {"at": object()}  # type: ignore[method-assign,misc,assignment]
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED
    assert world.journal.windows("inc-1-rollout-1") == {} and world.notifier.heartbeats != []


def _tamper(path: Path, statement: str) -> None:
    with sqlite3.connect(path / "journal.db") as db:
        for (name,) in db.execute("select name from sqlite_master where type = 'trigger'").fetchall():
            db.execute(f"drop trigger {name}")
        assert db.execute(statement).rowcount == 1, f"{statement} changed nothing"
    db.close()


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE events SET body = '{\"plan\": 3}' WHERE kind = 'plan_created'",
        "UPDATE events SET body = '{' WHERE kind = 'plan_created'",
        "UPDATE events SET body = '[1]' WHERE kind = 'plan_blocked'",
        "UPDATE events SET body = '{}' WHERE kind = 'incident_opened'",
        "UPDATE events SET body = 'x' WHERE kind = 'incident_opened'",
        "UPDATE events SET kind = 'incident_closed', body = '{}' WHERE kind = 'plan_blocked'",
    ],
)
def test_a_damaged_line_sets_its_own_incident_aside(world: World, tmp_path: Path, harm: str) -> None:
    first = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.run(2, first)
    _tamper(tmp_path, harm)
    world.detector.silent = True  # it would open another incident for the same fault, and cure that
    world.journal.set_flag("paused", None)
    world.clock.advance(world.config.lease_seconds + 1)
    watch = world.watch()
    world.run(2, watch)
    assert "SET ASIDE: inc-1-rollout-1: " in _status(world, tmp_path)
    (reported,) = world.notifier.messages
    assert "inc-1-rollout-1" in reported.because or "events line" in reported.because
    assert world.desired("rollout/1") == 1
    world.detector.silent = False
    world.runtime.processes["rollout/1"].fault = None
    world.runtime.inject("trainer/0", FaultClass.HANG)
    world.until(lambda: world.desired("trainer/0") == 2 and world.runtime.healthy("trainer/0"), watch)
    before = len(world.notifier.heartbeats)
    world.run(DEADMAN_SECONDS + 1, watch)
    assert len(world.notifier.heartbeats) > before and len(world.notifier.messages) == 1


def test_without_the_journal_there_is_no_sign_of_life(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = world.watch()
    world.run(1, watch)
    before = len(world.notifier.heartbeats)

    def gone(*_: Any, **__: Any) -> Any:
        raise JournalError("the disk is full")

    monkeypatch.setattr(watch._projection, "refresh", gone)
    world.clock.advance(2 * DEADMAN_SECONDS)
    with pytest.raises(JournalError):
        watch.tick()
    assert len(world.notifier.heartbeats) == before


def test_undecided_cases_are_reported_as_undecided(world: World) -> None:
    world.journal.append_unchecked(K.ONCALL_PAGED, {"plan": "no mapping"})
    world.journal.append(filled(K.ONCALL_PAGED, {"because": "help"}), key="two")
    notifier = RecordingNotifier()
    teller = NotificationSender(notifier, world.clock, run_id="r", deadman_seconds=60.0)
    watch = world.watch()
    watch._projection.refresh(world.journal)
    teller.send(world.journal, watch._projection)
    assert [m.because for m in notifier.messages] == ["help"]
    assert "oncall_paged: because: " in str(watch._projection.broken["journal line 1"])


def test_pauses_double_up_to_a_limit_and_end_when_it_is_handled() -> None:
    clock = FakeClock()
    troubles, pauses = HandlingFailures(clock), list[float]()
    for number in range(1, 12):
        assert troubles.last_try("x") is (number >= TRIES_MAX)
        with troubles.isolate("x"):
            raise Unexpected(number)
        began = clock.monotonic()
        while not troubles.due("x"):
            clock.advance(0.25)
        pauses.append(clock.monotonic() - began)
        assert bool(troubles.exhausted()) is (number >= TRIES_MAX)
    assert pauses == [min(PAUSE_SECONDS_MAX, FIRST_PAUSE_SECONDS * 2**n) for n in range(11)]
    with troubles.isolate("x"):
        pass
    assert troubles.due("x") and troubles.errors() == {} and troubles.exhausted() == []


def test_errors_that_concern_every_incident_are_raised() -> None:
    troubles = HandlingFailures(FakeClock())
    with pytest.raises(JournalError), troubles.isolate("x"):
        raise JournalError("database is locked")
    assert troubles.due("x") and troubles.errors() == {}
