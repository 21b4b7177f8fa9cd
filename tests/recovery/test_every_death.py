"""A watch is killed at every point of a cure where a kill can tell: before and after each journal write and each call of
the actuator. The points are counted in a run without a kill, then enumerated. Another watch finishes the work, and the
journal and the fleet cannot be told from those of the run where nobody died.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.core.diagnosis import FaultClass
from rolecall.core.events import EventKind
from rolecall.recovery.incidents import IncidentState
from rolecall.recovery.interfaces import Message
from rolecall.recovery.testing import RecordingNotifier, SimulatedKill, diagnosis
from rolecall.recovery.watch import Watch
from tests.recovery.world import World

K = EventKind
Scenario = Callable[[World], None]
FINISH_SECONDS = 120.0
LEASE_SECONDS = 1.0
"""Short, because each of some hundred successors waits for it."""


def crash(world: World) -> None:
    world.runtime.inject("rollout/1", FaultClass.CRASH)


def replacement_dies(world: World) -> None:
    world.runtime.starts_that_die["trainer/1"] = 1
    world.runtime.inject("trainer/1", FaultClass.HANG)


def two_faults(world: World) -> None:
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.runtime.inject("trainer/0", FaultClass.HANG)


def gives_up(world: World) -> None:
    world.runtime.starts_that_die["rollout/1"] = 99
    world.runtime.inject("rollout/1", FaultClass.CRASH)


def user_code(world: World) -> None:
    world.detector.extra = [
        diagnosis(FaultClass.USER_CODE, ("trainer/0", 1), ("trainer/1", 1), onset=world.clock.wall())
    ]


def nothing_helps(world: World) -> None:
    world.detector.extra = [diagnosis(FaultClass.CONTROL_PLANE, ("reward/0", 1), onset=world.clock.wall())]


def tolerated(world: World) -> None:
    world.detector.gain_ratio = 1.001
    world.runtime.inject("rollout/1", FaultClass.SLOW)


SCENARIOS: list[Scenario] = [crash, replacement_dies, two_faults, gives_up, user_code, nothing_helps, tolerated]


def _outcome(world: World) -> dict[str, object]:
    """All of the journal and the fleet that a death must not change."""
    incidents = world.incidents()
    return {
        "incidents": [(i.incident_id, i.state, i.outcome, len(i.attempts), i.person_topics) for i in incidents],
        "events": Counter((e.incident_id, str(e.kind)) for e in world.journal.events() if e.incident_id) - _news(world),
        "desired": {r: (d.incarnation, d.node) for r, d in world.journal.desired().items()},
        "replaced": world.runtime.replaced,
        "stop": world.journal.flag("stop"),
        "windows": {i.incident_id: sorted(world.journal.windows(i.incident_id)) for i in incidents},
        "told": {(m.incident_id, m.kind) for m in world.notifier.messages},
    }


def _news(world: World) -> Counter[tuple[str | None, str]]:
    """Time passes between a death and the successor, and more may be known by then: the one thing that may differ."""
    return Counter((e.incident_id, str(e.kind)) for e in world.events(K.INCIDENT_UPDATED))


def _finish(world: World, watch: Watch) -> None:
    world.until(world.all_closed, watch, seconds=FINISH_SECONDS)
    # Long enough for anything that would be done twice.
    world.run(2, watch)


def _undisturbed(path: Path, scenario: Scenario) -> tuple[dict[str, object], list[str]]:
    path.mkdir()
    world = World(path, lease_seconds=LEASE_SECONDS)
    watch = world.watch()
    scenario(world)
    _finish(world, watch)
    return _outcome(world), world.switch.points


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_killed_at_every_point(tmp_path: Path, scenario: Scenario) -> None:
    wanted, points = _undisturbed(tmp_path / "whole", scenario)
    last = max(n for n, what in enumerate(points) if "acquire" not in what)
    assert last >= 8, points
    for n in range(last + 1):
        if scenario is not crash and points[n].startswith("before") and points[n] != "before perform":
            # Within a tick, before one write the world is as after the one before it: seen once is enough.
            continue
        (tmp_path / str(n)).mkdir()
        world = World(tmp_path / str(n), lease_seconds=LEASE_SECONDS)
        watch = world.watch()
        scenario(world)
        world.switch.dies_at = n
        with pytest.raises(SimulatedKill) as killed:
            _finish(world, watch)
        assert str(killed.value) == points[n], "the run up to the kill is the same run"
        world.switch.dies_at = None
        _finish(world, world.watch())
        got = _outcome(world)
        assert got == wanted, f"killed {points[n]} (point {n}):\n{world.story()}"
        fences = [e.body["fence"] for e in world.events(K.LEASE_TAKEN)]
        assert fences == sorted(set(fences))
        world.journal.verify()
        world.journal.close()


def test_killed_twice(tmp_path: Path) -> None:
    """The successor dies as well, at each of its own first points."""
    wanted, points = _undisturbed(tmp_path / "whole", crash)
    started = points.index("before perform")
    for n in range(started, started + 4):
        for later in range(1, 8):
            (tmp_path / f"{n}-{later}").mkdir()
            world = World(tmp_path / f"{n}-{later}", lease_seconds=LEASE_SECONDS)
            watch = world.watch()
            crash(world)
            for dies_at in (n, n + later):
                world.switch.dies_at = dies_at
                with pytest.raises(SimulatedKill):
                    _finish(world, watch)
                watch = world.watch()
            world.switch.dies_at = None
            _finish(world, watch)
            assert _outcome(world) == wanted, f"killed at {n} and {n + later}:\n{world.story()}"
            world.journal.close()


class NeverSends(RecordingNotifier):
    """Takes messages, and delivers none."""

    def offer(self, message: Message) -> bool:
        self.messages.append(message)
        return True


def test_what_was_not_delivered_is_told_by_the_next_watch(tmp_path: Path) -> None:
    world = World(tmp_path)
    nothing_helps(world)
    # The messages were queued, and the process died before they were sent.
    world.notifier = NeverSends()
    watch = world.watch()
    world.until(world.all_closed, watch)
    assert world.notifier.messages != [] and world.journal.flag("notified") is None
    world.notifier = RecordingNotifier()
    world.clock.advance(world.config.lease_seconds + 1)
    successor = world.watch()
    world.run(2, successor)
    assert [m.kind for m in world.notifier.messages] == ["person_called"]
    assert all(i.state is IncidentState.CLOSED for i in world.incidents())
    world.run(10, successor)
    assert len(world.notifier.messages) == 1
