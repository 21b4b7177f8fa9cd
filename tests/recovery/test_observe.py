"""Mode observe: nothing is done, and an incident lasts as long as its fault, across restarts of the watch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.diagnosis import ActionKind, Diagnosis, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import IncidentOpened, IncidentUpdated
from rolecall.recovery.actuators.base import NoopActuator
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.loop import REDISCOVERY_SECONDS, Watch
from rolecall.recovery.next_step import UNSEEN_SECONDS
from rolecall.recovery.operators import queries
from rolecall.recovery.operators.run_location import JournalLocation
from rolecall.testing.recovery_world import FakeSource, diagnosis
from tests.events import filled
from tests.recovery.world import World

K = EventKind
OPENED = ["incident_opened", "plan_created", "plan_blocked", "oncall_paged"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, mode="observe")


def _external(world: World, mode: str = "act") -> Watch:
    """The watch of a job that rolecall did not start, whatever the configuration allows."""
    world.num_watches += 1
    config = world.config.model_copy(update={"mode": mode})
    source, holder = FakeSource(world.clock), f"host:{world.num_watches}:1"
    return Watch(
        world.journal, source, world.detector, NoopActuator(), config, world.notifier, world.clock, holder, run_id="r"
    )


def _lasting(world: World, fault: FaultClass, *who: tuple[str, int]) -> Diagnosis:
    found = diagnosis(fault, *who, onset=world.clock.wall())
    world.detector.extra = [found]
    return found


def test_a_hang_stays_open_while_it_is_reported(world: World) -> None:
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.run(40, watch)
    assert world.kinds() == OPENED and world.only().state is IncidentState.PLANNED
    (blocked,) = world.events(K.PLAN_BLOCKED)
    assert blocked.payload.to_body()["guard"] == "mode"
    assert "it would replace rollout/1#1 on node-rollout-1" in blocked.payload.to_body()["because"]
    (message,) = world.notifier.messages
    assert "rollout/1#1: hang" in message.because and "would replace rollout/1#1" in message.because
    assert world.runtime.replaced == []


def test_it_closes_when_its_replica_was_replaced_by_somebody_else(world: World) -> None:
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.run(10, watch)
    desired = {str(r): d for r, d in world.journal.desired().items()}["rollout/1"]
    world.journal.set_desired(type(desired)(replica=desired.replica, incarnation=2, node=desired.node))
    world.until(world.all_closed, watch)
    world.run(10, watch)
    assert world.kinds() == [*OPENED, "incident_closed"]
    assert world.only().outcome is IncidentOutcome.SELF_RECOVERED
    assert [m.resolved for m in world.notifier.messages] == [False, True], "the alert is resolved too"


def test_it_closes_when_the_fault_clears_and_the_next_one_is_another(world: World) -> None:
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.SLOW)
    world.run(3, watch)
    world.runtime.processes["rollout/1"].fault = None
    world.run(3, watch)
    assert world.only().outcome is None, "a moment's silence is not the end of a fault"
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.SELF_RECOVERED
    world.run(10, watch)
    world.runtime.inject("rollout/1", FaultClass.SLOW)
    world.run(3, watch)
    assert [i.incident_id for i in world.incidents()] == ["inc-1-rollout-1", "inc-2-rollout-1"]


@pytest.mark.parametrize(
    ("fault", "who", "paged"),
    [
        (FaultClass.SLOW, (("rollout/1", 1),), False),  # no gain was measured: tolerated
        (FaultClass.CANNOT_TELL, (("rollout/1", 1), ("trainer/0", 1)), True),
    ],
)
def test_a_fault_without_a_remedy_stays_open_too(
    world: World, fault: FaultClass, who: Sequence[tuple[str, int]], paged: bool
) -> None:
    watch = world.watch()
    _lasting(world, fault, *who)
    world.run(15, watch)
    incident = world.only()
    assert incident.outcome is None and incident.attempt is not None
    assert incident.attempt.plan.action is ActionKind.TOLERATE
    assert bool(incident.page_topics) is paged
    world.detector.extra = []
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.SELF_RECOVERED


def test_it_closes_when_the_run_ends(world: World) -> None:
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.run(2, watch)
    world.journal.append(filled(K.RUN_ENDED, {"outcome": "done", "because": "all steps are done"}))
    world.step(watch)
    assert watch.finished and world.only().outcome is IncidentOutcome.ENDED
    assert world.only().because == "the run ended before it was resolved: all steps are done"


def test_a_job_without_an_actuator_is_observed_whatever_its_mode(world: World) -> None:
    watch = _external(world, mode="act")
    _lasting(world, FaultClass.HANG, ("worker/7", 0))
    world.run(15, watch)
    assert world.kinds() == OPENED and world.only().outcome is None
    plan = world.only().attempt.plan  # type: ignore[union-attr]
    assert plan.action is ActionKind.TOLERATE and plan.because.startswith(
        "rolecall only watches this job: read the stack"
    )
    (message,) = world.notifier.messages
    assert message.because.endswith(plan.because) and "mode act" not in message.because


def test_it_closes_when_no_process_of_its_suspect_is_left(world: World) -> None:
    watch = _external(world)
    _lasting(world, FaultClass.HANG, ("rollout/1", 0))
    world.run(3, watch)
    world.detector.extra, world.detector.without_process = [], {"rollout/1"}
    world.runtime.inject("rollout/1", FaultClass.CRASH)  # makes no progress
    world.detector.delay_seconds = 1e9
    world.run(UNSEEN_SECONDS - 5, watch)
    assert world.only().outcome is None, "its launcher may be restarting it"
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.ENDED
    assert world.only().because == "no process of rollout/1 is left"


def test_a_restarted_watch_keeps_it_open_until_its_detectors_could_have_seen_the_fault(world: World) -> None:
    world.runtime.inject("rollout/1", FaultClass.SLOW)
    world.run(3, world.watch())
    fault, world.runtime.processes["rollout/1"].fault = world.runtime.processes["rollout/1"].fault, None
    world.clock.advance(world.config.lease_seconds + 1)  # the first watch was killed
    again = world.watch()
    world.run(REDISCOVERY_SECONDS / 2, again)  # it does not see the fault yet
    assert world.only().outcome is None
    world.runtime.processes["rollout/1"].fault = fault
    world.run(REDISCOVERY_SECONDS / 2 + 10, again)
    assert world.kinds() == OPENED, "the same incident, opened and reported once"
    world.runtime.processes["rollout/1"].fault = None
    world.until(world.all_closed, again)
    assert world.only().outcome is IncidentOutcome.SELF_RECOVERED


def test_a_lease_that_changes_hands_and_another_class_open_nothing_twice(world: World) -> None:
    first, second = world.watch(), world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.run(3, first, second)
    world.run(20, second)
    assert second.acting
    _lasting(world, FaultClass.CANNOT_TELL, ("rollout/1", 1))
    world.run(20, second, first)
    assert [i.outcome for i in world.incidents()] == [None]


def test_a_silent_detector_ends_nothing(world: World) -> None:
    watch = world.watch()
    world.detector.extra = [
        Diagnosis(
            suspects=(Suspect(node=NodeId("node-3")),),
            fault_class=FaultClass.GPU,
            onset=world.clock.wall(),
            detected_at=world.clock.wall(),
            confidence=0.9,
            because="XID 79 on GPU 0 of node-3",
        )
    ]
    world.run(3, watch)
    observe = world.detector.observe
    world.detector.observe = lambda observation: 1 / 0  # type: ignore[method-assign]
    world.run(UNSEEN_SECONDS + 10, watch)
    assert world.only().outcome is None
    world.detector.observe = observe  # type: ignore[method-assign]
    world.run(3, watch)
    assert [i.outcome for i in world.incidents()] == [None]


def _of_rank(world: World, fault: FaultClass, rank: int, because: str) -> Diagnosis:
    one = diagnosis(fault, ("trainer/0", 1), onset=world.clock.wall(), because=because)
    return replace(one, suspects=tuple(replace(s, rank=rank) for s in one.suspects))


def test_the_same_fault_of_other_ranks_is_told_once_for_each(world: World) -> None:
    watch = _external(world)
    for rank in (1, 3, 1, 5, 3, 5):
        world.detector.extra = [_of_rank(world, FaultClass.HANG, rank, f"rank {rank} hangs")]
        world.run(3, watch)
    assert len(world.events(K.INCIDENT_OPENED)) == 1
    assert [e.as_(IncidentUpdated).diagnosis.because for e in world.events(K.INCIDENT_UPDATED)] == [
        "rank 3 hangs",
        "rank 5 hangs",
    ]
    assert {s.rank for s in world.only().suspects} == {1, 3, 5}


def test_a_second_fault_of_its_replica_leaves_the_first_one_told(world: World) -> None:
    """One incident is open for a replica: it keeps what it was opened for, and says what was added."""
    watch = _external(world)
    first = _of_rank(world, FaultClass.CRASH, 1, "rank 1 crashed")
    world.detector.extra = [first]
    world.run(3, watch)
    world.detector.extra = [first, _of_rank(world, FaultClass.HANG, 3, "rank 3 hangs")]
    world.run(3, watch)
    (opened,), (updated,) = world.events(K.INCIDENT_OPENED), world.events(K.INCIDENT_UPDATED)
    assert opened.as_(IncidentOpened).diagnosis.because == "rank 1 crashed"
    change = updated.as_(IncidentUpdated)
    assert change.diagnosis.because == "rank 3 hangs" and change.relation.startswith("a second fault of a replica")
    assert [d.because for d in world.only().told_before] == ["rank 1 crashed"]

    location = JournalLocation(world.url)
    (shown,) = queries.incidents(location)
    assert shown["because"] == "rank 3 hangs"
    assert shown["before"] == [{"fault_class": "crash", "because": "rank 1 crashed"}]
    (whole,) = queries.incidents(location, shown["incident_id"])
    text = [queries.event_text(e) for e in whole["events"] if e["kind"] == K.INCIDENT_UPDATED]
    assert text == [f"incident updated: rank 3 hangs ({change.relation})"]


def test_status_shows_it_with_exit_code_1(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.notifier.channel = "log"
    world.runtime.inject("rollout/1", FaultClass.HANG)
    watch = world.watch()
    world.run(10, watch)
    (shown,) = queries.status(JournalLocation(world.url), world.clock)["open_incidents"]
    assert shown["would"] == "replace rollout/1#1 on node-rollout-1"
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setitem(os.environ, "COLUMNS", "200")
    assert main(["status", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "inc-1-rollout-1 open: rollout/1#1: hang" in text
    assert "only observed: in mode act rolecall would replace rollout/1#1 on node-rollout-1" in text
    assert "NOBODY WAS PAGED, because no notification channel is configured (recovery.notify)\n" in text, (
        "the diagnosis is told once"
    )
    world.runtime.processes["rollout/1"].fault = None
    world.until(world.all_closed, watch)
    assert main(["status", str(tmp_path)]) == 0
    assert "no open incident" in capsys.readouterr().out


def test_a_page_that_could_not_name_the_rank_is_followed_by_one_that_does(world: World) -> None:
    watch = _external(world)
    tie = _lasting(world, FaultClass.CANNOT_TELL, ("worker/0", 0), ("worker/1", 0))
    world.run(3, watch)
    named = diagnosis(FaultClass.HANG, ("worker/1", 0), onset=tie.onset, because="worker/1 holds the others up")
    world.detector.extra = [named]
    world.run(10, watch)
    world.detector.extra = [diagnosis(FaultClass.CRASH, ("worker/1", 0), onset=tie.onset)]
    world.run(10, watch)
    first, second = world.notifier.messages
    assert first.because.startswith(tie.because) and second.because.startswith(named.because)
    assert first.incident_id == second.incident_id == world.only().incident_id, "one alert"
    assert world.only().page_topics == {"mode", "update"}
