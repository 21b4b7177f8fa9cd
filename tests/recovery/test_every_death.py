"""A watch is killed at every point of a cure where a kill can tell: before and after each journal write and each call
of the actuator. The points are counted in a run without a kill, then enumerated. Another watch finishes the work, and
the journal and the fleet cannot be told from those of the run where no one died.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.nodes import quarantined_nodes
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import INCIDENT_KINDS, NOT_STARTED, Attempt, IncidentState
from rolecall.recovery.interfaces import Message
from rolecall.recovery.loop import Watch
from rolecall.recovery.next_step import decision_key
from rolecall.recovery.operators import commands
from rolecall.testing.recovery_world import RecordingNotifier, diagnosis
from tests.events import filled
from tests.recovery.simulated_kill import SimulatedKill
from tests.recovery.world import World
from tests.support import some

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


def gets_worse(world: World) -> None:
    """Told as slow, then as hung, while a pause holds the plan: the incident learns more, and its plan is made anew."""
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("rollout/1", FaultClass.SLOW)

    def worse() -> None:
        held = world.events(K.PLAN_BLOCKED)
        process = world.runtime.processes["rollout/1"]
        if held and process.fault is FaultClass.SLOW:
            world.runtime.inject("rollout/1", FaultClass.HANG)
        if len(held) == 2:
            world.journal.set_flag("paused", None)

    world.others.append(worse)


def moves_to_another_node(world: World) -> None:
    world.runtime.starts_that_hang["rollout/1"] = 1
    world.runtime.inject("rollout/1", FaultClass.CRASH)


def nobody_diagnoses(world: World) -> None:
    world.detector.silent = True
    world.runtime.inject("reward/0", FaultClass.CRASH)


def _word(world: World, kind: EventKind) -> Callable[[], None]:
    """An operator who decides about each proposal as soon as it stands, once."""

    def decide() -> None:
        for i in world.incidents():
            a = i.attempt
            if a is not None and i.state is IncidentState.PROPOSED and a.decision is None:
                key = decision_key(i.incident_id, a.number)
                body = {"digest": a.plan.digest, "by": "alice"}
                world.journal.append(filled(kind, body), incident_id=i.incident_id, caused_by=i.last_event_id, key=key)

    return decide


def approved(world: World) -> None:
    world.others.append(_word(world, K.PLAN_APPROVED))
    world.runtime.inject("rollout/1", FaultClass.HANG)


def rejected(world: World) -> None:
    world.others.append(_word(world, K.PLAN_REJECTED))
    world.runtime.inject("rollout/1", FaultClass.HANG)


def lapses(world: World) -> None:
    world.runtime.inject("rollout/1", FaultClass.HANG)


def observed(world: World) -> None:
    """Nothing is done, and an operator replaces it by hand."""
    world.runtime.inject("rollout/1", FaultClass.SLOW)

    def replaces() -> None:
        if world.desired("rollout/1") == 1 and world.events(K.PLAN_BLOCKED):
            desired = world.journal.desired()[ReplicaId("rollout/1")]
            world.journal.set_desired(replace(desired, incarnation=2))

    world.others.append(replaces)


def code_explains_it(world: World) -> None:
    """A victim's incident is open when the code is found to be at fault."""
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("trainer/0", FaultClass.CRASH)

    def found() -> None:
        if world.events(K.PLAN_BLOCKED) and not world.detector.extra:
            failing = diagnosis(FaultClass.USER_CODE, onset=world.clock.wall(), about="trainer:ValueError:f")
            world.detector.extra = [failing]
        if any(e.incident_id == "inc-2-job" for e in world.events(K.PLAN_BLOCKED)):
            world.journal.set_flag("paused", None)

    world.others.append(found)


def _run(world: World) -> RunDir:
    return RunDir(Path(world.url.removeprefix("sqlite:///")).parent)


def asked_by_a_person(world: World) -> None:
    commands.replace(_run(world), "trainer/1", "it feels slow", "alice", world.clock)


Word = Callable[[RunDir, str], object]


def _says(world: World, *words: tuple[Callable[[Attempt], object], Word]) -> None:
    """An operator who says these words of the plan, in order, each in a look of its own when the plan stands so."""
    run, left = _run(world), list(words)

    def say() -> None:
        for i in world.incidents():
            a = i.attempt
            if left and a is not None and i.state in NOT_STARTED and left[0][0](a):
                left.pop(0)[1](run, a.plan.digest)

    world.others.append(say)


def _held_by(guard: str) -> Callable[[Attempt], object]:
    return lambda a: guard in a.held_by


def _proposed(attempt: Attempt) -> object:
    return attempt.expires_at


def _holds(world: World, seconds: float) -> Word:
    return lambda run, digest: commands.hold_plan(run, digest, "alice", "a look", seconds, world.clock)


def _resumes(world: World) -> Word:
    return lambda run, digest: world.journal.set_flag("paused", None)


def held_by_a_person(world: World) -> None:
    """Held while a pause holds it; the pause ends, then the hold by itself."""
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("rollout/1", FaultClass.HANG)
    _says(world, (_held_by("paused"), _holds(world, 8.0)), (_held_by("paused"), _resumes(world)))


def held_and_lifted(world: World) -> None:
    """A proposal is held, approved in that time, and begins when the hold is lifted."""
    world.runtime.inject("rollout/1", FaultClass.HANG)
    _says(
        world,
        (_proposed, _holds(world, 60.0)),
        (_proposed, lambda run, digest: commands.approve_plan(run, digest, "alice", world.clock)),
        (_held_by("hold"), lambda run, digest: commands.lift_hold(run, digest, "alice", "done", world.clock)),
    )


def vetoed_while_held(world: World) -> None:
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("rollout/1", FaultClass.HANG)
    _says(
        world,
        (_held_by("paused"), _holds(world, 60.0)),
        (_held_by("paused"), _resumes(world)),
        (_held_by("hold"), lambda run, digest: commands.reject_plan(run, digest, "alice", "mine", world.clock)),
    )


def node_at_fault(world: World) -> None:
    """The replica moves, and its node is quarantined before."""
    node = world.journal.current()[ReplicaId("rollout/1")].node
    found = diagnosis(FaultClass.GPU, ("rollout/1", 1), onset=world.clock.wall())
    world.detector.extra = [replace(found, suspects=(replace(found.suspects[0], node=node),))]


def drained(world: World) -> None:
    commands.drain(_run(world), world.journal.current()[ReplicaId("trainer/1")].node, "alice", "a fan", world.clock)


def borrows(world: World) -> None:
    """No node is free for a trainer, so a rollout lends its own; somebody repairs the faulty node soon after."""
    node = world.journal.current()[ReplicaId("trainer/1")].node
    found = diagnosis(FaultClass.GPU, ("trainer/1", 1), onset=world.clock.wall())
    world.detector.extra = [replace(found, suspects=(replace(found.suspects[0], node=node),))]

    def repairs() -> None:
        if world.events(K.NODE_LENT) and node in quarantined_nodes(world.journal):
            commands.return_node(_run(world), node, "alice", "a new GPU", world.clock)

    world.others.append(repairs)


def restarts_the_role(world: World) -> None:
    """Two replacements die in their first iteration."""
    world.runtime.starts_that_die_ready["trainer/0"] = 2
    world.runtime.inject("trainer/0", FaultClass.CRASH)


def restarts_the_job(world: World) -> None:
    world.runtime.inject("trainer/0", FaultClass.CRASH)


SCENARIOS: list[Scenario] = [
    crash, replacement_dies, two_faults, gives_up, user_code, nothing_helps, tolerated, gets_worse, moves_to_another_node,
    nobody_diagnoses, approved, rejected, lapses, observed, code_explains_it, asked_by_a_person,
    held_by_a_person, held_and_lifted, vetoed_while_held, node_at_fault, drained, borrows, restarts_the_role,
    restarts_the_job,
]  # fmt: skip
CONFIGS: dict[Scenario, dict[str, Any]] = {
    approved: {"mode": "approve"},
    rejected: {"mode": "approve"},
    held_and_lifted: {"mode": "approve"},
    lapses: {"mode": "approve", "approval_timeout_seconds": 5.0},
    observed: {"mode": "observe"},
    moves_to_another_node: {"verification_timeout_seconds": 5.0, "free_nodes": 1},
    node_at_fault: {"free_nodes": 1},
    drained: {"free_nodes": 1},
    borrows: {"free_nodes": 0},
    restarts_the_job: {"scope": "job"},
}
PEOPLE_WRITE = frozenset({K.PLAN_APPROVED, K.PLAN_REJECTED, K.HOLD_PLACED, K.HOLD_LIFTED, K.DIAGNOSIS_REVIEWED})


def _outcome(world: World) -> dict[str, object]:
    """All of the journal and the fleet that a death must not change."""
    incidents = world.incidents()
    return {
        "incidents": [(i.incident_id, i.state, i.outcome, len(i.attempts), i.page_topics) for i in incidents],
        "events": Counter((e.incident_id, str(e.kind)) for e in world.journal.events() if e.incident_id) - _news(world),
        "desired": {r: (d.incarnation, d.node) for r, d in world.journal.desired().items()},
        "replaced": world.runtime.replaced,
        "stop": world.journal.flag("stop"),
        "windows": {i.incident_id: sorted(world.journal.windows(i.incident_id)) for i in incidents},
        "reported": {(m.incident_id, m.kind) for m in world.notifier.messages},
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
    world = _world(path, scenario)
    watch = world.watch()
    scenario(world)
    _finish(world, watch)
    points = world.switch.points
    written = [p for p in points if p.startswith("after") and p not in ("after perform", "after resume")]
    assert world.switch.num_transactions == len(written), "a write that passes no switch"
    return _outcome(world), points


def _world(path: Path, scenario: Scenario) -> World:
    return World(path, lease_seconds=LEASE_SECONDS, **CONFIGS.get(scenario, {}))


def test_every_kind_of_write_is_enumerated(tmp_path: Path) -> None:
    points = {p for s in SCENARIOS for p in _undisturbed(tmp_path / s.__name__, s)[1]}
    kinds = {K.LEASE_ACQUIRED, K.JOB_STOP_REQUESTED, K.NODE_QUARANTINED, *INCIDENT_KINDS} - PEOPLE_WRITE
    kinds |= {K.NODE_LENT, K.LENDER_RESUMED}
    others = {"acquire", "perform", "resume", "set_desired", "set_flag stop", "set_flag notified", "save_window"}
    wanted = {f"append {k}" for k in kinds} | others
    assert {p.removeprefix("before ") for p in points if p.startswith("before ")} == wanted


STRIDE = 3
"""Of so many points one, other ones in each scenario, in the tests of every day; all of `crash`. The long ones have all."""
EVERY_DAY = [(crash, 1), *((s, STRIDE) for s in SCENARIOS if s is not crash)]


@pytest.mark.parametrize(
    ("scenario", "stride"),
    some([*EVERY_DAY, *((s, 1) for s in SCENARIOS if s is not crash)], EVERY_DAY),
    ids=lambda s: getattr(s, "__name__", None),
)
def test_killed_at_every_point(tmp_path: Path, scenario: Scenario, stride: int) -> None:
    wanted, points = _undisturbed(tmp_path / "whole", scenario)
    last = max(n for n, what in enumerate(points) if "acquire" not in what)
    assert last >= 8, points
    # Within a tick, before one write the world is as after the one before it: seen once is enough.
    told = [n for n in range(last + 1) if scenario is crash or not _is_like_the_one_before(points[n])]
    for n in told[SCENARIOS.index(scenario) % stride :: stride]:
        (tmp_path / str(n)).mkdir()
        world = _world(tmp_path / str(n), scenario)
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
        fences = [e.payload.fence for e in world.events(K.LEASE_ACQUIRED)]
        assert fences == sorted(set(fences))
        world.journal.verify()
        world.journal.close()


def _is_like_the_one_before(point: str) -> bool:
    return point.startswith("before") and point != "before perform"


def test_killed_twice(tmp_path: Path) -> None:
    """The successor dies as well, at each of its own first points."""
    wanted, points = _undisturbed(tmp_path / "whole", crash)
    started = points.index("before perform")
    for n in range(started, started + 4):
        for later in range(1, 8):
            (tmp_path / f"{n}-{later}").mkdir()
            world = _world(tmp_path / f"{n}-{later}", crash)
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


@pytest.mark.parametrize("moment", ["before release", "after release"])
def test_killed_while_it_gives_the_lease_back(tmp_path: Path, moment: str) -> None:
    world = World(tmp_path, lease_seconds=LEASE_SECONDS)
    watch, stop = world.watch(), threading.Event()
    world.step(watch)
    assert watch.acting
    stop.set()
    world.switch.dies_at = len(world.switch.points) + (moment == "after release")
    with pytest.raises(SimulatedKill, match=moment):
        watch.run(stop)
    world.switch.dies_at = None
    successor = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.step(successor, seconds=world.detector.delay_seconds)
    assert successor.acting is (moment == "after release"), "what was given back is free at once"
    _finish(world, successor)
    assert world.runtime.replaced == [("rollout/1", 1)]


class NeverSends(RecordingNotifier):
    """Takes messages, and delivers none."""

    def offer(self, message: Message) -> bool:
        self.messages.append(message)
        return True


def test_undelivered_messages_are_sent_by_the_next_watch(tmp_path: Path) -> None:
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
    assert [m.kind for m in world.notifier.messages] == ["oncall_paged"]
    assert all(i.state is IncidentState.CLOSED for i in world.incidents())
    world.run(10, successor)
    assert len(world.notifier.messages) == 1
