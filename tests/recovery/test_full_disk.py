"""The journal's disk is full (docs/howto/full-disk.md): nothing is lost, nothing is done twice, and all of it continues
once there is space again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.errors import JournalUnavailable
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads import OncallPaged, Payload
from rolecall.recovery.incidents import IncidentOutcome
from tests.full_disk import SmallDisk, small_disk
from tests.recovery.world import World


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
