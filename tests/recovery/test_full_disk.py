"""The journal's disk is full (docs/howto/full-disk.md): nothing is lost, nothing is done twice, and all of it continues
once there is space again."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.errors import JournalCorrupt, JournalUnavailable
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.recovery import OncallPaged
from rolecall.detector.base.findings import FULL_DISK
from rolecall.recovery import policy
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.loop import (
    DAMAGED_TICKS_MAX,
    FAILED_TICKS_MAX,
    OUTAGE,
    OUTAGE_PAGED_SECONDS,
    UNAVAILABLE_TICKS_MAX,
    failed_ticks_max,
)
from tests.full_disk import SmallDisk, small_disk
from tests.recovery.world import World


class StopAfter(threading.Event):
    """Set after so many seconds of fake time, which pass in its waits."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__()
        self._clock, self._ends, self.num_waits = clock, clock.monotonic() + seconds, 0

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.advance(timeout or 0.0)
        self.num_waits += 1
        if self._clock.monotonic() >= self._ends:
            self.set()
        return self.is_set()


class StopAfterOneTick(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self._num_asked = 0

    def is_set(self) -> bool:
        self._num_asked += 1
        return self._num_asked > 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as made:
        yield made


def _page(number: int) -> OncallPaged:
    return OncallPaged(topic="test", because=f"event {number}", channel="log")


def test_an_append_to_a_full_disk_fails_whole_and_what_is_there_stays_readable(disk: SmallDisk) -> None:
    journal = World(disk.path).journal
    kept = [journal.append(_page(number)).event_id for number in range(3)]
    disk.fill()
    for number in range(3, 6):
        with pytest.raises(JournalUnavailable, match=r"journal\.db.*full.*free space"):
            journal.append(_page(number))
    assert [event.event_id for event in journal.events()] == kept
    journal.verify()
    disk.free()
    journal.append(_page(6))
    assert [event.payload.because for event in journal.events()] == ["event 0", "event 1", "event 2", "event 6"]
    journal.verify()


def test_a_fault_during_a_full_disk_is_repaired_once_after_it(disk: SmallDisk) -> None:
    world = World(disk.path)
    watch = world.watch()
    world.run(2, watch)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    disk.fill()
    world.clock.advance(world.detector.delay_seconds)
    for _ in range(5):
        with pytest.raises(JournalUnavailable):
            watch.tick()
    assert world.incidents() == [] and world.desired("rollout/1") == 1, "without its record nothing is done"
    disk.free()
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED
    assert world.runtime.replaced == [("rollout/1", 1)]
    world.journal.verify()


@pytest.mark.parametrize("kind", ["plan_created", "action_started", "action_done", "incident_verified"])
def test_a_disk_that_fills_in_the_middle_of_an_incident_delays_it_only(disk: SmallDisk, kind: str) -> None:
    world = World(disk.path)
    watch = world.watch()
    world.run(2, watch)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    watch_append = watch._journal.append

    def append_and_fill(payload: Payload, **options: Any) -> Event:
        event = watch_append(payload, **options)
        if event.kind == kind:
            disk.fill()
        return event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch._journal, "append", append_and_fill)
        with pytest.raises(JournalUnavailable):
            world.run(60, watch)
    world.clock.advance(5.0)
    with pytest.raises(JournalUnavailable):
        watch.tick()
    disk.free()
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED
    assert world.runtime.replaced == [("rollout/1", 1)]
    world.journal.verify()


def _full_disk(onset: float) -> Diagnosis:
    return Diagnosis(
        suspects=(Suspect(node=NodeId("node-0")),),
        fault_class=FaultClass.RESOURCE_EXHAUSTED,
        onset=onset,
        detected_at=onset + 2.0,
        confidence=0.99,
        because="the disk of /runs/a on node-0 is full: 0 of 1,048,576 bytes free",
        detectors=(FULL_DISK,),
        advice="free space on the disk of /runs/a",
        about=f":{FULL_DISK}:/runs/a",
    )


def test_on_call_is_told_of_the_full_disk_while_it_is_full_and_the_incident_ends_with_it(disk: SmallDisk) -> None:
    world = World(disk.path)
    watch = world.watch()
    world.run(2, watch)
    world.detector.extra = [_full_disk(world.clock.wall())]
    disk.fill()
    stop = StopAfter(world.clock, 40.0)
    with pytest.raises(JournalUnavailable):  # its lease cannot be released
        watch.run(stop)
    assert stop.num_waits > FAILED_TICKS_MAX, "it goes on for longer than after other failures"
    (sent,) = world.notifier.messages
    assert (sent.kind, sent.seq, sent.facts) == ("oncall_paged", 0, {"topic": FULL_DISK})
    assert "0 of 1,048,576 bytes free, and the journal cannot be written; free space" in sent.because
    assert world.incidents() == []
    disk.free()
    world.run(30, watch)
    incident = world.only()
    assert incident.outcome is None and incident.state is IncidentState.PLANNED, "it is still reported"
    assert "no replica is evicted" in incident.page_reason
    world.detector.extra = []
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.SELF_RECOVERED
    assert [m.kind for m in world.notifier.messages] == ["oncall_paged", "oncall_paged", "incident_closed"]
    assert world.notifier.messages[-1].resolved
    assert world.runtime.replaced == []
    world.journal.verify()


def test_on_call_is_told_of_a_journal_that_stays_away_once_for_each_outage(disk: SmallDisk) -> None:
    """The watch's own disk may have no agent that could report it."""
    world = World(disk.path)
    watch = world.watch()
    world.run(2, watch)
    for num_pages in (1, 2):
        disk.fill()
        world.clock.advance(world.config.lease_seconds)  # it is to be renewed
        with pytest.raises(JournalUnavailable):  # and cannot be released
            watch.run(StopAfter(world.clock, OUTAGE_PAGED_SECONDS))
        assert len(world.notifier.messages) == num_pages - 1, "it may be over soon"
        with pytest.raises(JournalUnavailable):
            watch.run(StopAfter(world.clock, 2 * OUTAGE_PAGED_SECONDS))
        assert len(world.notifier.messages) == num_pages
        sent = world.notifier.messages[-1]
        assert (sent.kind, sent.seq, sent.facts) == ("oncall_paged", 0, {"topic": OUTAGE})
        assert re.match(r"nothing is repaired: for 30 s the journal cannot be used now: .* full .*space", sent.because)
        disk.free()
        watch.run(StopAfterOneTick())
        world.run(2, watch)  # it leads again
    assert world.incidents() == []


def test_one_without_the_lease_tells_nobody_of_a_full_disk(disk: SmallDisk) -> None:
    world = World(disk.path)
    leader, follower = world.watch(), world.watch()
    world.run(2, leader, follower)
    world.detector.extra = [_full_disk(world.clock.wall())]
    disk.fill()
    world.clock.advance(world.config.lease_seconds + 1.0)  # it cannot take over
    stop = StopAfter(world.clock, 2 * OUTAGE_PAGED_SECONDS)
    follower.run(stop)
    assert stop.num_waits > 10 and world.notifier.messages == []


@pytest.mark.parametrize(
    ("error", "most"),
    [
        (JournalCorrupt(where="x", reason="y"), DAMAGED_TICKS_MAX),
        (JournalUnavailable(where="x", reason="y", hint="z"), UNAVAILABLE_TICKS_MAX),
        (RuntimeError("a defect"), FAILED_TICKS_MAX),
    ],
)
def test_how_often_a_watch_tries_depends_on_what_fails(error: Exception, most: int) -> None:
    assert failed_ticks_max(error) == most
    assert DAMAGED_TICKS_MAX < FAILED_TICKS_MAX < UNAVAILABLE_TICKS_MAX


def test_policy_and_detector_mean_the_same_finding() -> None:
    assert policy.FULL_DISK == FULL_DISK
