"""Incidents joined with their faults: which fault belongs to which incident, how long it took, and what matches neither."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ProcessId, ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import IncidentUpdated, PlanCreated
from rolecall.core.rundir import RunDir
from rolecall.views.ettr import ettr, losses
from rolecall.views.incidents import (
    InjectedFault,
    MatchedIncidents,
    named_by_plans,
    parse_injections,
    summarize_incidents,
)
from rolecall.views.lifetimes import IncarnationRecord, Key, incarnation_records, pids_kept
from tests.events import made_event
from tests.fake_run import ALL

K = EventKind


class Tale:
    """Events with growing sequence numbers, written as a story in a few lines."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def say(self, at: float, kind: EventKind, incident: str | None = None, **body: Any) -> "Tale":
        event = made_event(seq=len(self.events) + 1, kind=kind, wall_at=at, body=body, incident_id=incident)
        self.events.append(event)
        return self

    def opened(
        self,
        at: float,
        incident: str,
        replica: str,
        incarnation: int | None = 1,
        fault_class: FaultClass = FaultClass.HANG,
        **changes: Any,
    ) -> "Tale":
        suspect = {"node": NodeId("node-3"), "replica": replica, "incarnation": incarnation, **changes}
        diagnosis = Diagnosis(
            suspects=(Suspect(**suspect),),
            fault_class=fault_class,
            onset=at - 1,
            detected_at=at,
            confidence=1.0,
            because="because",
        )
        return self.say(at, K.INCIDENT_OPENED, incident, diagnosis=diagnosis.to_dict())

    def acted(
        self,
        at: float,
        incident: str,
        *replicas: str,
        incarnation: int = 1,
        action: ActionKind = ActionKind.REPLACE_REPLICA,
    ) -> "Tale":
        targets = tuple(
            PlanTarget(replica=ReplicaId(r), incarnation=incarnation, node=NodeId("node-3")) for r in replicas
        )
        plan = Plan(incident_id=IncidentId(incident), action=action, targets=targets, because="why")
        self.say(at, K.PLAN_CREATED, incident, plan=plan.to_dict())
        return self.say(at, K.ACTION_STARTED, incident, plan=plan.to_dict())

    def resolved(self, at: float, incident: str) -> "Tale":
        plans = [
            e.payload.plan for e in self.events if isinstance(e.payload, PlanCreated) and e.incident_id == incident
        ]
        self.say(at, K.ACTION_DONE, incident, digest=plans[-1].digest)
        self.say(at, K.INCIDENT_VERIFIED, incident, because="7 units")
        return self.say(at, K.INCIDENT_CLOSED, incident, outcome="resolved", because="7 units")

    def reported(
        self,
        *faults: InjectedFault,
        known: dict[Key, IncarnationRecord] | None = None,
        undone: dict[int, float] | None = None,
    ) -> MatchedIncidents:
        return summarize_incidents(self.events, known or {}, faults, undone)


def _fault(target: str, at: float, **changes: Any) -> InjectedFault:
    return InjectedFault(kind="kill", target=target, injected_at=at, incarnation=1, **changes)


def _second(target: str, at: float) -> InjectedFault:
    return InjectedFault(kind="kill", target=target, injected_at=at, incarnation=2)


# --- joining ------------------------------------------------------------------------------------------------------


def test_a_whole_run_is_reported_with_the_times_at_which_things_happened(fake_run: RunDir) -> None:
    journal = Journal(fake_run.database_url, create=False)
    faults = parse_injections(fake_run.injections_path.read_text())
    joined = summarize_incidents(journal.events(), incarnation_records(journal.events(), journal.actual()), faults)
    journal.close()
    assert not joined.missed and not joined.false_alarms
    for story, strike in zip(joined.summaries, ALL, strict=True):
        assert story.fault is not None and story.fault.target == strike.target
        assert story.diagnosed_correctly and story.resolved
        reported = story.to_dict(now=0.0)
        assert reported["detected_seconds"] == pytest.approx(strike.found_after, abs=1e-3)
        assert reported["serving_seconds"] == pytest.approx(strike.serving_after, abs=1e-3)
        assert reported["resolved_seconds"] == reported["serving_seconds"]
        assert reported["verified_seconds"] == pytest.approx(strike.verified_after, abs=1e-3)
        assert reported["fault_class"] == strike.fault_class and reported["because"] == strike.because
    kill, hang, slow = (s.to_dict(now=0.0) for s in joined.summaries)
    assert kill["requests_resumed_seconds"] == pytest.approx(0.12, abs=1e-3)
    assert kill["step_committed_seconds"] is None and kill["tokens_kept"] == 862
    assert hang["step_committed_seconds"] == pytest.approx(1.4, abs=1e-3) and hang["tokens_kept"] == 0
    assert slow["replacements"][0]["from_standby"] and not hang["replacements"][0]["from_standby"]


@pytest.mark.parametrize(
    ("at", "node", "fault_class", "false_alarms"),
    [
        (14.0, "node-3", FaultClass.CONTROL_PLANE, ()),
        (14.0, "node-3", FaultClass.NODE_LOST, ("i-1",)),
        (14.0, "node-2", FaultClass.CONTROL_PLANE, ("i-1",)),
        (9.0, "node-3", FaultClass.CONTROL_PLANE, ("i-1",)),
    ],
)
def test_an_incident_of_a_killed_agent_is_no_false_alarm(
    at: float, node: str, fault_class: FaultClass, false_alarms: tuple[str, ...]
) -> None:
    """On a busy machine its next process takes longer than the grace for it."""
    tale = Tale().opened(at, "i-1", "", None, fault_class, node=NodeId(node))
    killed = InjectedFault(kind="agent-kill", target="node-3", node="node-3", pid=7, start_ticks=8, injected_at=10.0)
    joined = tale.reported(killed)
    assert joined.false_alarms == false_alarms and not joined.missed
    assert [s.fault for s in joined.summaries] == [None]


@pytest.mark.parametrize("updated", [False, True], ids=["found by the runtime", "found by a detector"])
def test_a_replacement_that_is_killed_while_it_starts_belongs_to_the_incident_that_made_it(updated: bool) -> None:
    tale = Tale().opened(10.0, "i-1", "rollout/0").acted(10.1, "i-1", "rollout/0")
    tale.say(12.0, K.ACTION_FAILED, "i-1", failure="died", because="it ended")
    if updated:
        tale.say(
            12.1,
            K.INCIDENT_UPDATED,
            "i-1",
            diagnosis=Tale().opened(12.0, "", "rollout/0", 2).events[0].payload.to_body()["diagnosis"],
        )
    tale.acted(12.2, "i-1", "rollout/0", incarnation=2)
    tale.opened(14.0, "i-2", "trainer/1").acted(14.1, "i-2", "trainer/1").resolved(20.0, "i-1").resolved(21.0, "i-2")
    first, second, other = _fault("rollout/0", 9.5), _second("rollout/0", 11.5), _fault("trainer/1", 13.0)
    joined = tale.reported(first, second, other)
    assert [(s.fault, s.diagnosed_correctly, s.further_faults) for s in joined.summaries] == [
        (first, True, (second,)),
        (other, True, ()),
    ]
    assert joined.missed == () and joined.false_alarms == ()


def test_a_fault_of_a_replacement_after_its_incident_was_closed_is_one_of_its_own() -> None:
    tale = Tale().opened(10.0, "i-1", "rollout/0").acted(10.1, "i-1", "rollout/0").resolved(12.0, "i-1")
    joined = tale.reported(_fault("rollout/0", 9.5), _second("rollout/0", 13.0))
    assert [f.incarnation for f in joined.missed] == [2]


def test_each_fault_gets_the_earliest_incident_after_it_that_names_it() -> None:
    tale = Tale().opened(5.0, "i0", "rollout/1").opened(12.0, "i1", "rollout/1").opened(30.0, "i2", "rollout/1")
    joined = tale.reported(_fault("rollout/1", 10.0), _fault("rollout/1", 28.0))
    assert [(s.incident.incident_id, s.fault and s.fault.injected_at) for s in joined.summaries] == [
        ("i0", None),
        ("i1", 10.0),
        ("i2", 28.0),
    ]
    assert joined.false_alarms == ("i0",) and not joined.missed


def test_a_suspicion_that_was_tolerated_and_the_incident_that_repaired_are_of_one_fault() -> None:
    tale = Tale().opened(10.1, "i-1", "reward/0").say(10.2, K.INCIDENT_CLOSED, "i-1", outcome="tolerated")
    tale.opened(11.0, "i-2", "reward/0").acted(11.1, "i-2", "reward/0").resolved(15.0, "i-2")
    joined = tale.reported(_fault("reward/0", 10.0))
    assert [s.fault is not None for s in joined.summaries] == [False, True]
    assert joined.missed == () and joined.false_alarms == ()
    once, again = _fault("reward/0", 10.0), _fault("reward/0", 10.5)
    assert [s.fault for s in tale.reported(once, again).summaries] == [once, again], "each has its own"


def test_a_lost_node_and_a_replica_on_it_are_incidents_of_one_fault_and_another_replica_is_an_alarm() -> None:
    lost = replace(_fault("node-3", 10.0), incarnation=None, node="node-3", targets=("node-3", "rollout/1"))
    tale = Tale().opened(10.2, "i1", "", None).say(10.3, K.INCIDENT_CLOSED, "i1", outcome="tolerated")
    tale.opened(10.4, "i2", "rollout/1", 4).acted(10.5, "i2", "rollout/1", incarnation=4).resolved(12.0, "i2")
    joined = tale.reported(lost)
    assert {s.incident.incident_id: s.fault is not None for s in joined.summaries} == {"i1": False, "i2": True}
    assert not joined.missed and not joined.false_alarms
    tale.opened(11.0, "i3", "rollout/2").opened(500.0, "i4", "rollout/1", 5)
    assert tale.reported(lost).false_alarms == ("i3", "i4")


def test_the_right_name_goes_before_the_nearer_time() -> None:
    tale = Tale().opened(11.0, "i1", "rollout/2").opened(12.0, "i2", "rollout/1")
    joined = tale.reported(_fault("rollout/1", 10.0))
    assert {s.incident.incident_id: s.diagnosed_correctly for s in joined.summaries} == {"i1": None, "i2": True}
    assert joined.false_alarms == ("i1",)


def test_an_incident_that_names_another_in_the_faults_time_is_the_wrong_name_not_a_false_alarm() -> None:
    joined = Tale().opened(12.0, "i1", "trainer/0").reported(_fault("trainer/1", 10.0))
    assert joined.summaries[0].diagnosed_correctly is False
    assert not joined.missed and not joined.false_alarms


def test_a_fault_without_any_incident_is_missed_and_a_much_later_incident_is_a_false_alarm() -> None:
    joined = Tale().opened(500.0, "i1", "trainer/0").reported(_fault("trainer/1", 10.0))
    assert [f.target for f in joined.missed] == ["trainer/1"] and joined.false_alarms == ("i1",)


@pytest.mark.parametrize(
    ("suspect", "fault", "same"),
    [
        ({"incarnation": 2}, {}, False),
        ({"incarnation": None}, {}, True),
        ({"process": ProcessId(node=NodeId("node-3"), pid=7, start_ticks=9)}, {"pid": 7, "start_ticks": 9}, True),
        ({"process": ProcessId(node=NodeId("node-3"), pid=7, start_ticks=9)}, {"pid": 7, "start_ticks": 1}, False),
        ({"replica": "", "incarnation": None}, {"node": "node-3"}, True),
        ({"replica": "", "incarnation": None}, {"node": "node-4"}, False),
    ],
)
def test_a_name_means_one_incarnation_and_one_process(
    suspect: dict[str, Any], fault: dict[str, Any], same: bool
) -> None:
    named = {"replica": "rollout/1", "incarnation": 1, **suspect}
    replica = named.pop("replica")
    joined = Tale().opened(12.0, "i1", replica, **named).reported(_fault("rollout/1", 10.0, **fault))
    assert joined.summaries[0].diagnosed_correctly is same


def test_a_request_of_an_operator_is_no_false_alarm() -> None:
    tale = Tale().opened(12.0, "i1", "rollout/1")
    (opened,) = tale.events
    asked = replace(opened.payload.diagnosis, detectors=("operator",))
    tale.events = [replace(opened, payload=replace(opened.payload, diagnosis=asked))]
    assert tale.reported().false_alarms == ()


# --- times --------------------------------------------------------------------------------------------------------


def test_resolved_means_serving_and_observed_making_progress() -> None:
    known = {("rollout/1", 2): IncarnationRecord(replica="rollout/1", incarnation=2, serving_at=14.0)}
    tale = Tale().opened(11.0, "i1", "rollout/1").acted(11.1, "i1", "rollout/1")
    assert tale.reported(_fault("rollout/1", 10.0), known=known).summaries[0].resolved_at is None
    reported = tale.resolved(13.0, "i1").reported(_fault("rollout/1", 10.0), known=known).summaries[0].to_dict(now=0.0)
    assert (reported["serving_seconds"], reported["resolved_seconds"]) == (3.0, 3.0), "it served after it was verified"
    later = {("rollout/1", 2): IncarnationRecord(replica="rollout/1", incarnation=2, serving_at=12.0)}
    reported = tale.reported(_fault("rollout/1", 10.0), known=later).summaries[0].to_dict(now=0.0)
    assert (reported["serving_seconds"], reported["resolved_seconds"], reported["verified_seconds"]) == (1.0, 1.0, 2.0)


def test_what_was_contained_before_the_finding_counts_as_zero() -> None:
    tale = Tale().say(10.1, K.REQUESTS_REASSIGNED, from_replica="rollout/1", tokens_kept=5, tokens_lost=2)
    reported = tale.opened(11.0, "i1", "rollout/1").reported(_fault("rollout/1", 10.0)).summaries[0].to_dict(now=0.0)
    assert (reported["requests_resumed_seconds"], reported["tokens_kept"], reported["tokens_lost"]) == (0.0, 5, 2)


def test_tokens_of_other_replicas_and_other_incarnations_are_not_this_faults() -> None:
    tale = Tale()
    for who, incarnation in (("rollout/2", 1), ("rollout/1", 2), ("rollout/1", 1)):
        tale.say(11.5, K.REQUESTS_REASSIGNED, from_replica=who, from_incarnation=incarnation, tokens_lost=1)
    assert tale.opened(11.0, "i1", "rollout/1").reported(_fault("rollout/1", 10.0)).summaries[0].tokens_lost == 1


def test_the_interrupted_step_is_the_one_whose_commit_counts() -> None:
    tale = Tale().opened(11.0, "i1", "trainer/1")
    tale.say(11.2, K.STEP_INTERRUPTED, step=7).say(11.3, K.STEP_COMMITTED, step=6).say(12.5, K.STEP_COMMITTED, step=7)
    assert tale.reported(_fault("trainer/1", 10.0)).summaries[0].to_dict(now=0.0)["step_committed_seconds"] == 1.5
    without = Tale().opened(11.0, "i1", "trainer/1").say(11.3, K.STEP_COMMITTED, step=6)
    assert without.reported(_fault("trainer/1", 10.0)).summaries[0].step_committed_at == 11.3


def test_steps_undone_while_an_incident_lasts_are_lost_by_it() -> None:
    tale = Tale().opened(11.0, "i1", "trainer/1").acted(11.1, "i1", "trainer/1").resolved(20.0, "i1")
    assert tale.reported(_fault("trainer/1", 10.0), undone={5: 12.0, 6: 12.0, 1: 40.0}).summaries[0].steps_lost == 2


def test_an_update_changes_the_words_and_not_the_moment() -> None:
    tale = Tale().opened(11.0, "i1", "rollout/1").opened(15.0, "i1", "rollout/2")
    newest = tale.events[1].payload.diagnosis
    tale.events[1] = replace(tale.events[1], payload=IncidentUpdated(diagnosis=newest))
    story = tale.reported().summaries[0]
    assert story.detected_at == 11.0 and story.incident.diagnosis.suspects[0].replica == "rollout/2"


# --- the injector's log -------------------------------------------------------------------------------------------


def test_a_line_that_is_still_being_written_is_left_out() -> None:
    line = json.dumps({"kind": "rollout-kill", "target": "rollout/1", "injected_at": 2.0})
    assert len(parse_injections(f"{line}\n{line}\n{line[:20]}")) == 2
    assert parse_injections("") == []


@pytest.mark.parametrize("line", ["{", "{}", "[]", '{"kind": "x"}', '{"kind": 1, "target": 1, "injected_at": "x"}'])
def test_a_whole_line_that_is_wrong_is_named(line: str) -> None:
    good = json.dumps({"kind": "rollout-kill", "target": "rollout/1", "injected_at": 2.0})
    with pytest.raises(ValueError, match="line 2 is not what the injector writes"):
        parse_injections(f"{good}\n{line}\n")


# --- who kept its process -----------------------------------------------------------------------------------------


def _ready(tale: Tale, replica: str, incarnation: int, pid: int) -> Tale:
    body = {"replica": replica, "incarnation": incarnation, "node": "node-3", "pid": pid, "start_ticks": pid * 10}
    return tale.say(float(len(tale.events)), K.REPLICA_READY, **body)


def _kept(tale: Tale, struck: frozenset[Key] = frozenset()) -> list[str]:
    ready = [e.payload for e in tale.events if e.kind is K.REPLICA_READY]
    found = pids_kept(
        incarnation_records(tale.events, {}), ready, named_by_plans(tale.events), struck, work_ended_at=1000.0
    )
    assert found.ok == (not found.violations)
    return list(found.violations)


def test_a_replica_that_a_started_plan_named_may_change_its_process() -> None:
    tale = _ready(Tale(), "rollout/1", 1, 100).acted(1.0, "i1", "rollout/1")
    assert _kept(_ready(tale, "rollout/1", 2, 200)) == []


def test_a_replica_that_no_plan_named_may_not() -> None:
    tale = _ready(_ready(Tale(), "rollout/1", 1, 100), "rollout/1", 2, 200)
    assert _kept(tale) == ["rollout/1#1 (pid 100) became rollout/1#2 (pid 200), and no plan named it"]


def test_a_plan_that_was_never_started_names_no_one() -> None:
    tale = _ready(Tale(), "rollout/1", 1, 100).acted(1.0, "i1", "rollout/1")
    del tale.events[-1]
    assert len(_kept(_ready(tale, "rollout/1", 2, 200))) == 1


def test_a_plan_for_another_incarnation_does_not_name_this_one() -> None:
    tale = _ready(Tale(), "rollout/1", 1, 100).acted(1.0, "i1", "rollout/1", incarnation=2)
    assert len(_kept(_ready(tale, "rollout/1", 2, 200))) == 1


def test_two_processes_under_one_incarnation_are_a_violation() -> None:
    tale = _ready(_ready(Tale(), "trainer/0", 1, 100), "trainer/0", 1, 200)
    assert _kept(tale) == ["trainer/0#1 was pid 100 and became pid 200 under the same incarnation"]


def test_a_standby_that_was_promoted_lives_on_and_its_place_is_filled_again() -> None:
    tale = _ready(_ready(Tale(), "standby/0", 1, 300), "rollout/1", 1, 100).acted(1.0, "i1", "rollout/1")
    _ready(_ready(tale, "rollout/1", 2, 300), "standby/0", 2, 400)
    assert _kept(tale) == []


def test_a_standby_that_vanished_is_a_violation() -> None:
    tale = _ready(_ready(Tale(), "standby/0", 1, 300), "standby/0", 2, 400)
    assert len(_kept(tale)) == 1


def test_what_was_lost_without_a_plan_is_a_violation_unless_it_was_struck() -> None:
    tale = _ready(Tale(), "reward/0", 1, 100).say(5.0, K.REPLICA_LOST, replica="reward/0", incarnation=1, because="x")
    assert _kept(tale) == ["reward/0#1 (pid 100) was lost, and no plan named it: x"]
    assert _kept(tale, struck=frozenset({("reward/0", 1)})) == []


def test_a_restart_costs_every_replica_from_its_start_until_it_serves() -> None:
    replicas = ("controller/0", "rollout/0", "rollout/1", "trainer/0")
    serving = {"rollout/0": 40.0, "rollout/1": 50.0, "trainer/0": 30.0}
    known = {(r, 2): IncarnationRecord(replica=r, incarnation=2, serving_at=serving.get(r)) for r in replicas}
    tale = Tale().opened(11.0, "inc-1", "rollout/1").acted(12.0, "inc-1", *replicas, action=ActionKind.RESTART_JOB)
    joined = tale.resolved(55.0, "inc-1").reported(_fault("rollout/1", 10.0), known=known)
    (summary,) = joined.summaries
    assert summary.serving_at == 50.0, "the controller computes nothing"
    found = losses(joined, 100.0)
    assert {(c.replica, c.since, c.until) for c in found if c.role != "controller"} == {
        ("rollout/1", 10.0, 50.0),  # the replica at fault: from the fault
        ("rollout/0", 12.0, 40.0),
        ("rollout/1", 12.0, 50.0),
        ("trainer/0", 12.0, 30.0),
    }
    sizes = {"num_rollouts": 2, "num_trainers": 1}
    assert ettr(0.0, 100.0, found, **sizes) == pytest.approx(1 - (2 / 3 + 18 + 10 * 2 / 3 + 10 / 3) / 100)
    in_paper = ettr(0.0, 100.0, found, **sizes, count_rollouts=False)
    assert in_paper == pytest.approx(1 - (18 + 10 * 2 / 3 + 10 / 3) / 100), "no rollout is alive in a restart"


def test_a_restart_that_failed_costs_healthy_replicas_until_they_serve() -> None:
    """Not until on-call has been paged and the incident is closed."""
    replicas = ("rollout/0", "rollout/1")
    known = {
        ("rollout/0", 2): IncarnationRecord(replica="rollout/0", incarnation=2, serving_at=40.0),
        ("rollout/1", 2): IncarnationRecord(replica="rollout/1", incarnation=2),
    }
    tale = Tale().opened(11.0, "inc-1", "rollout/1").acted(12.0, "inc-1", *replicas, action=ActionKind.RESTART_ROLE)
    tale.say(60.0, K.ACTION_FAILED, "inc-1", failure="no_progress", because="no token")
    gave_up = Plan(incident_id=IncidentId("inc-1"), action=ActionKind.TOLERATE, targets=(), because="it did not help")
    tale.say(60.0, K.PLAN_CREATED, "inc-1", plan=gave_up.to_dict())
    tale.say(90.0, K.INCIDENT_CLOSED, "inc-1", outcome="escalated", because="paged")
    found = losses(tale.reported(_fault("rollout/1", 10.0), known=known), 100.0)
    assert {(c.replica, c.since, c.until) for c in found if c.by_restart} == {
        ("rollout/0", 12.0, 40.0),
        ("rollout/1", 12.0, 100.0),
    }


def test_processes_of_a_run_that_was_started_again_need_not_be_kept() -> None:
    tale = _ready(Tale(), "rollout/1", 1, 100)
    tale.say(49.0, K.REPLICA_STARTING, replica="standby/0", incarnation=1, node="node-0", because="it still started")
    tale.say(50.0, K.COMPONENT_RESTARTED, what="supervisor")
    tale = _ready(tale, "rollout/1", 2, 200)
    assert named_by_plans(tale.events) == {("rollout/1", 1), ("standby/0", 1)}


def test_the_partner_of_a_hybrid_costs_from_the_action_until_it_serves() -> None:
    tale = Tale().opened(11.0, "i", "rollout/1").acted(12.0, "i", "rollout/1", "trainer/1")
    tale.say(15.0, K.STEP_COMMITTED, step=3)
    known = {
        (r, 2): IncarnationRecord(replica=r, incarnation=2, node="node-3", serving_at=20.0)
        for r in ("rollout/1", "trainer/1")
    }
    found = tale.resolved(21.0, "i").reported(known=known)
    lost = {loss.replica: (loss.since, loss.until, loss.stalled_until) for loss in losses(found, 100.0)}
    assert lost == {"rollout/1": (10.0, 20.0, 15.0), "trainer/1": (12.0, 20.0, 15.0)}
