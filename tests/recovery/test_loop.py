"""The loop on a fake fleet: one fault, one cure; modes; pauses; two watches; faults during cures."""

import math
import time
from pathlib import Path

import pytest

from rolecall.core.diagnosis import Diagnosis, Evidence, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import PlanApproved
from rolecall.core.membership import ReplicaState
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.isolation import OUTAGES_APART_SECONDS
from rolecall.recovery.loop import Watch
from rolecall.recovery.operators import commands
from rolecall.testing.recovery_world import FLEET, diagnosis
from tests.events import filled
from tests.recovery.simulated_kill import SimulatedKill
from tests.recovery.world import TICK_SECONDS, World

K = EventKind
A_CURE = [
    "incident_opened",
    "plan_created",
    "action_started",
    "action_done",
    "incident_verified",
    "incident_closed",
]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("fault", [FaultClass.CRASH, FaultClass.HANG, FaultClass.SLOW])
def test_a_fault_is_resolved_and_nothing_else_is_touched(world: World, fault: FaultClass) -> None:
    watch = world.watch()
    world.run(2, watch)
    world.runtime.inject("rollout/1", fault)
    world.until(world.all_closed, watch)
    incident = world.only()
    assert incident.incident_id == "inc-1-rollout-1"
    assert incident.outcome is IncidentOutcome.RESOLVED
    assert world.kinds(incident.incident_id) == A_CURE
    assert world.runtime.replaced == [("rollout/1", 1)]
    assert {r: d.incarnation for r, d in world.journal.desired().items() if d.incarnation > 1} == {"rollout/1": 2}
    assert world.runtime.healthy("rollout/1")
    assert world.notifier.messages == []
    world.journal.verify()


def test_from_finding_to_desired_in_one_tick(world: World) -> None:
    watch = world.watch()
    world.run(2, watch)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.clock.advance(world.detector.delay_seconds)
    assert world.desired("rollout/1") == 1
    began = time.perf_counter()
    watch.tick()
    seconds = time.perf_counter() - began
    assert world.desired("rollout/1") == 2
    assert world.journal.desired()["rollout/1"].incident_id == "inc-1-rollout-1"  # type: ignore[index]
    # A goal of 0.1 s; a shared machine may hold any one tick up, so this only catches a different order of magnitude.
    assert seconds < 10.0


def test_every_event_walks_back_to_the_diagnosis(world: World) -> None:
    watch = world.watch()
    world.runtime.inject("trainer/0", FaultClass.HANG)
    world.until(world.all_closed, watch)
    events = {e.event_id: e for e in world.journal.events()}
    at = next(e for e in reversed(events.values()) if e.kind is K.INCIDENT_CLOSED)
    walked = [at.kind]
    while at.caused_by is not None:
        at = events[at.caused_by]
        walked.append(at.kind)
    assert [str(k) for k in reversed(walked)] == A_CURE
    assert at.payload.to_body()["diagnosis"]["because"] == "trainer/0#1: hang"
    assert world.journal.windows("inc-1-trainer-0")[at.payload.window] == {"at": at.wall_at, "late_seconds": 0.0}


def test_a_pause_stops_before_the_next_action_and_resuming_goes_on(world: World) -> None:
    watch = world.watch()
    world.journal.set_flag("paused", "alice: upgrade")
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.run(30, watch)
    assert world.runtime.replaced == []
    assert world.kinds() == ["incident_opened", "plan_created", "plan_blocked"]
    assert "alice: upgrade" in world.events(K.PLAN_BLOCKED)[0].payload.because
    world.journal.set_flag("paused", None)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED


def test_a_slow_replica_is_tolerated_without_a_horizon(tmp_path: Path) -> None:
    world = World(tmp_path, horizon_seconds=None)
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.SLOW)
    world.run(20, watch)
    incident = world.only()
    assert incident.outcome is IncidentOutcome.TOLERATED and "horizon_seconds is not set" in incident.because
    assert world.kinds() == ["incident_opened", "plan_created", "incident_closed"]


def test_a_tolerated_slowness_that_gets_worse_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, horizon_seconds=60.0)
    world.detector.gain_ratio = 1.2
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.SLOW)
    world.run(5, watch)
    assert [i.outcome for i in world.incidents()] == [IncidentOutcome.TOLERATED]
    world.detector.gain_ratio = 4.0
    world.until(lambda: world.runtime.healthy("rollout/1"), watch)
    world.until(world.all_closed, watch)
    assert [i.outcome for i in world.incidents()] == [IncidentOutcome.TOLERATED, IncidentOutcome.RESOLVED]


def _said_by_panels(onset: float) -> Diagnosis:
    seen = Evidence(kind="metric:rolecall_process_resident_memory_bytes", text="resident memory: 8.1 deviations above")
    return diagnosis(
        FaultClass.SLOW, ("rollout/1", 1), onset=onset, evidence=(seen,), detectors=("panel:sequential",),
        because="rollout/1 of role rollout is not as it was: resident memory stays away from its 2 peers",
    )  # fmt: skip


def test_panel_findings_are_reported_and_replace_nothing(world: World) -> None:
    """In mode act, with a horizon over which any measured slowness would be worth a replacement."""
    watch = world.watch()
    world.detector.extra = [_said_by_panels(world.clock.wall())]
    world.run(30, watch)
    incident = world.only()
    assert (incident.outcome, world.runtime.replaced) == (IncidentOutcome.TOLERATED, [])
    assert "resident memory stays away" in incident.because and "not measured" in incident.because
    assert [e.text for e in incident.diagnosis.evidence] == ["resident memory: 8.1 deviations above"]
    assert world.kinds() == ["incident_opened", "plan_created", "incident_closed"]
    # The same replica, now measured: the fault is weighed like any other.
    world.detector.extra = []
    world.runtime.inject("rollout/1", FaultClass.SLOW)
    world.until(lambda: world.runtime.healthy("rollout/1") and world.all_closed(), watch)
    assert [i.outcome for i in world.incidents()] == [IncidentOutcome.TOLERATED, IncidentOutcome.RESOLVED]


def test_panel_findings_do_not_change_a_held_incident(world: World) -> None:
    world.journal.set_flag("paused", "alice")
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.run(3, watch)
    world.detector.extra = [_said_by_panels(world.clock.wall())]
    world.run(3, watch)
    assert world.only().diagnosis.fault_class is FaultClass.CRASH
    world.detector.extra = []
    world.journal.set_flag("paused", None)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED


def test_user_code_stops_the_job_and_evicts_nothing(world: World) -> None:
    watch = world.watch()
    said = diagnosis(FaultClass.USER_CODE, ("trainer/0", 1), ("trainer/1", 1), because="ValueError on all 2 trainers")
    world.detector.extra = [said]
    world.run(5, watch)
    assert world.runtime.replaced == [] and all(d.incarnation == 1 for d in world.journal.desired().values())
    assert "ValueError on all 2 trainers" in (world.journal.flag("stop") or "")
    assert world.events(K.JOB_STOP_REQUESTED)[0].payload.because == world.journal.flag("stop")
    incident = world.only()
    assert incident.incident_id == "inc-1-job" and incident.outcome is IncidentOutcome.ESCALATED
    assert [m.kind for m in world.notifier.messages] == ["oncall_paged"]
    # What dies while the job stops is no new fault.
    world.runtime.inject("trainer/0", FaultClass.CRASH)
    world.run(10, watch)
    assert len(world.incidents()) == 1


def test_user_code_takes_over_the_incidents_of_its_victims(world: World) -> None:
    watch = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("trainer/0", FaultClass.CRASH)
    world.run(3, watch)
    said = diagnosis(FaultClass.USER_CODE, ("trainer/0", 1), ("trainer/1", 1), because="ValueError on all 2 trainers")
    world.detector.extra = [said]
    world.run(1, watch)
    world.journal.set_flag("paused", None)
    world.run(3, watch)
    assert world.runtime.replaced == []
    assert [i.outcome for i in world.incidents()] == [IncidentOutcome.SELF_RECOVERED, IncidentOutcome.ESCALATED]


@pytest.mark.parametrize("fault", [FaultClass.USER_CODE, FaultClass.SILENT_CORRUPTION])
def test_a_collapsed_policy_calls_an_operator_once_and_a_crash_beside_it_is_resolved(
    world: World, fault: FaultClass
) -> None:
    watch = world.watch()
    said = diagnosis(
        fault, onset=world.clock.wall(), because="mean reward fell", about=":collapse", detectors=("collapse",)
    )
    world.detector.extra = [said]
    world.run(5, watch)
    world.runtime.inject("trainer/0", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    world.run(30, watch)  # it goes on standing
    assert [i.outcome for i in world.incidents()] == [IncidentOutcome.TOLERATED, IncidentOutcome.RESOLVED]
    assert world.journal.flag("stop") is None and world.desired("trainer/0") == 2
    (shown,) = [m for m in world.notifier.messages if m.kind == "oncall_paged"]
    assert "mean reward fell" in shown.because and "an operator must decide whether to stop" in shown.because


def _code_fails(world: World, about: str) -> Diagnosis:
    """As the detector says it: no one is named."""
    because = f"role {about.partition(':')[0]} fails in its code"
    return diagnosis(FaultClass.USER_CODE, onset=world.clock.wall(), because=because, about=about)


def test_user_code_without_suspects_supersedes_the_incidents_of_its_role(world: World) -> None:
    watch = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("trainer/0", FaultClass.CRASH)
    world.run(3, watch)
    world.detector.extra = [_code_fails(world, "trainer:ValueError:f1")]
    world.journal.set_flag("paused", None)
    world.run(3, watch)
    assert world.runtime.replaced == [] and world.desired("trainer/0") == 1
    assert [i.outcome for i in world.incidents()] == [IncidentOutcome.SELF_RECOVERED, IncidentOutcome.ESCALATED]


def test_user_code_of_one_role_leaves_the_incidents_of_another_alone(tmp_path: Path) -> None:
    world = World(tmp_path, mode="observe")
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.run(2, watch)
    world.detector.extra = [_code_fails(world, "trainer:ValueError:f1")]
    world.run(3, watch)
    assert [i.outcome for i in world.incidents()] == [None, None]


def test_two_different_failures_of_the_code_are_two_incidents(tmp_path: Path) -> None:
    world = World(tmp_path, mode="observe")
    watch = world.watch()
    world.detector.extra = [_code_fails(world, "trainer:ValueError:f1")]
    world.run(2, watch)
    world.detector.extra.append(_code_fails(world, "reward:KeyError:f2"))
    world.run(2, watch)
    assert [i.diagnosis.role_at_fault for i in world.incidents()] == ["trainer", "reward"]
    assert [i.outcome for i in world.incidents()] == [None, None]


def test_an_unresolvable_fault_pages_oncall_once(world: World) -> None:
    watch = world.watch()
    lost = Diagnosis(
        suspects=(Suspect(node=NodeId("node-3")),),
        fault_class=FaultClass.CANNOT_TELL,
        onset=world.clock.wall(),
        detected_at=world.clock.wall(),
        confidence=0.5,
        because="node-3 does not answer",
        settle="whether Ray counts node-3 as alive",
    )
    world.detector.extra = [lost]
    world.run(30, watch)
    incident = world.only()
    assert incident.incident_id == "inc-1-node-3" and incident.outcome is IncidentOutcome.TOLERATED
    (shown,) = [m for m in world.notifier.messages if m.kind == "oncall_paged"]
    assert "whether Ray counts node-3 as alive" in shown.because
    assert world.runtime.replaced == []


def test_a_replacement_killed_while_it_starts_is_made_again_in_the_same_incident(world: World) -> None:
    world.runtime.starts_that_die["rollout/1"] = 1
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    incident = world.only()
    assert incident.outcome is IncidentOutcome.RESOLVED
    assert [(a.plan.action, a.failure) for a in incident.attempts] == [
        ("replace_replica", "died"),
        ("replace_replica", None),
    ]
    assert world.runtime.replaced == [("rollout/1", 1), ("rollout/1", 2)]
    assert world.desired("rollout/1") == 3
    world.run(10, watch)
    assert len(world.incidents()) == 1


def test_the_detector_alone_may_see_the_replacement_die(world: World) -> None:
    world.runtime.reports_losses = False
    world.runtime.starts_that_die["trainer/1"] = 1
    watch = world.watch()
    world.runtime.inject("trainer/1", FaultClass.HANG)
    world.until(world.all_closed, watch)
    incident = world.only()
    assert incident.outcome is IncidentOutcome.RESOLVED and len(incident.attempts) == 2
    assert "the replacement trainer/1#2 failed" in incident.attempts[0].failed_because


def test_two_deaths_on_first_start_are_not_hardware(world: World) -> None:
    world.runtime.starts_that_die["rollout/1"] = 9
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    world.run(60, watch)
    incident = world.only()
    assert incident.outcome is IncidentOutcome.ESCALATED
    assert "2 replacements in a row died before their first progress" in incident.because
    assert world.desired("rollout/1") == 3
    assert [m.kind for m in world.notifier.messages] == ["oncall_paged"]


def test_a_replacement_that_never_works_moves_to_another_node(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=1)
    world.runtime.starts_that_hang["rollout/1"] = 1
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    incident = world.only()
    assert incident.outcome is IncidentOutcome.RESOLVED
    assert [(str(a.plan.action), a.failure) for a in incident.attempts] == [
        ("replace_replica", "no_progress"),
        ("replace_node", None),
    ]
    (left,) = incident.attempts[-1].plan.targets
    assert world.journal.desired()[left.replica].node != left.node


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_second_fault_waits_for_the_first_repair_only_at_the_limit(tmp_path: Path, at_once: int) -> None:
    world = World(tmp_path, replicas_at_once_max=at_once)
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.run(1, watch)
    world.runtime.inject("trainer/0", FaultClass.HANG)
    world.until(world.all_closed, watch)
    first, second = world.incidents()
    assert (first.outcome, second.outcome) == (IncidentOutcome.RESOLVED, IncidentOutcome.RESOLVED)
    assert first.verified_at is not None and second.attempts[0].started_at is not None
    waited = second.attempts[0].started_at >= first.verified_at
    assert waited == bool(second.attempts[0].held_because) == (at_once == 1) and not second.attempts[0].held_by
    assert world.runtime.replaced == [("rollout/1", 1), ("trainer/0", 1)]


def test_a_loss_that_no_detector_sees_is_repaired_all_the_same(world: World) -> None:
    world.detector.silent = True
    watch = world.watch()
    world.runtime.inject("reward/0", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    incident = world.only()
    assert (
        incident.outcome is IncidentOutcome.RESOLVED
        and "is lost: the runtime reported it" in incident.diagnosis.because
    )


def test_an_old_incarnation_asks_for_nothing(world: World) -> None:
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    world.detector.extra = [diagnosis(FaultClass.HANG, ("rollout/1", 1), onset=world.clock.wall())]
    world.run(10, watch)
    assert len(world.incidents()) == 1 and world.desired("rollout/1") == 2
    assert ("rollout/1", 2) in world.detector.forgotten


def test_one_fault_with_three_names_is_one_incident(world: World) -> None:
    world.journal.set_flag("paused", "bob: a look")
    watch = world.watch()
    for fault in (FaultClass.SLOW, FaultClass.HANG, FaultClass.CRASH):
        world.runtime.inject("rollout/1", fault)
        world.run(2, watch)
    world.journal.set_flag("paused", None)
    world.until(world.all_closed, watch)
    incident = world.only()
    assert incident.outcome is IncidentOutcome.RESOLVED and incident.diagnosis.fault_class is FaultClass.CRASH
    assert len(incident.seen_keys) == 3 and world.desired("rollout/1") == 2


def test_two_watches_one_acts_and_the_other_succeeds_it(world: World) -> None:
    first, second = world.watch(), world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.run(1, first, second)
    assert first.acting and not second.acting
    assert world.desired("rollout/1") == 2
    # The first one is gone in the middle of the cure.
    world.until(world.all_closed, second)
    assert second.acting
    assert world.kinds("inc-1-rollout-1") == A_CURE
    assert [e.payload.fence for e in world.events(K.LEASE_ACQUIRED)] == [1, 2]


def test_a_watch_that_slept_through_its_lease_writes_nothing_any_more(world: World) -> None:
    first, second = world.watch(), world.watch()
    world.step(first)
    # It believes for a moment longer that it acts: its clock stood still, as that of a stopped process does.
    first._renew_at = float("inf")
    world.clock.advance(world.config.lease_seconds + 1)
    world.step(second)
    assert second.acting
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.clock.advance(1)
    first.tick()
    assert not first.acting
    assert world.incidents() == [] and world.desired("rollout/1") == 1
    world.until(world.all_closed, first, second)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.desired("rollout/1") == 2


def test_a_watch_that_lost_its_lease_cannot_go_on_with_an_incident_either(world: World) -> None:
    first, second = world.watch(), world.watch()
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.run(2, first)
    first._renew_at = float("inf")
    world.clock.advance(world.config.lease_seconds + 1)
    world.step(second)
    world.journal.set_flag("paused", None)
    first.tick()
    assert not first.acting and world.events(K.ACTION_STARTED) == []
    world.until(world.all_closed, first, second)
    assert world.kinds() == [*A_CURE[:2], "plan_blocked", *A_CURE[2:]]


def test_a_started_action_without_effect_waits_for_the_end_of_a_pause(world: World) -> None:
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.switch.dies_before = "perform"
    with pytest.raises(SimulatedKill):
        world.run(5, watch)
    world.switch.dies_before = ""
    watch = world.watch()
    assert world.desired("rollout/1") == 1
    world.journal.set_flag("paused", "bob: a look")
    world.run(20, watch)
    assert world.desired("rollout/1") == 1 and world.only().state == "acting"
    world.journal.set_flag("paused", None)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.desired("rollout/1") == 2


def test_a_broken_detector_stops_no_recovery_and_pages_oncall(world: World) -> None:
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: world.desired("rollout/1") == 2, watch)

    class Broken(Exception):
        pass

    def broken(observation: object) -> list[Diagnosis]:
        raise Broken(str(observation))

    world.detector.observe = broken  # type: ignore[method-assign]
    world.until(world.all_closed, watch)
    world.run(5, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED
    (shown,) = [m for m in world.notifier.messages if m.kind == "oncall_paged"]
    assert "no diagnosis is possible" in shown.because and "Broken" in shown.because


def test_each_outage_of_the_detectors_is_told_once(world: World) -> None:
    watch, observe = world.watch(), world.detector.observe

    def broken(observation: object) -> list[Diagnosis]:
        raise RuntimeError(str(observation))

    def outage(of: Watch) -> int:
        world.detector.observe = broken  # type: ignore[method-assign]
        world.run(5, of)
        world.detector.observe = observe  # type: ignore[method-assign]
        return len(world.notifier.messages)

    assert outage(watch) == 1
    world.run(OUTAGES_APART_SECONDS / 2, watch)
    assert outage(watch) == 1, "the same one, which comes and goes"
    world.run(OUTAGES_APART_SECONDS, watch)
    assert outage(watch) == 2
    world.clock.advance(world.config.lease_seconds + 1)
    again = world.watch()
    world.run(OUTAGES_APART_SECONDS, again)
    assert outage(again) == 3


def test_an_incident_whose_events_do_not_fit_is_set_aside_with_its_story(world: World) -> None:
    watch = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.run(2, watch)
    # Somebody writes what no watch would.
    world.journal.append(filled(K.ACTION_DONE, {"digest": "nonsense"}), incident_id="inc-1-rollout-1")
    world.journal.set_flag("paused", None)
    world.runtime.inject("trainer/0", FaultClass.HANG)
    world.until(lambda: world.runtime.healthy("trainer/0"), watch)
    world.run(2, watch)
    shown = [m.because for m in world.notifier.messages if m.kind == "oncall_paged"]
    assert len(shown) == 1 and "is illegal in state" in shown[0] and "plan_created" in shown[0]
    assert world.desired("rollout/1") == 1


def test_the_end_of_the_run_ends_its_incidents(world: World) -> None:
    watch = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.run(2, watch)
    world.journal.append(filled(K.RUN_ENDED, {"outcome": "done", "because": "all steps are done"}))
    world.step(watch)
    assert watch.finished and world.only().outcome is IncidentOutcome.ESCALATED
    assert "the run ended" in world.only().because


def test_signs_of_life_come_at_their_interval(world: World) -> None:
    watch, other = world.watch(), world.watch()
    world.run(3 * world.config.deadman_seconds - TICK_SECONDS, watch, other)
    assert len(world.notifier.heartbeats) == 3
    assert world.notifier.heartbeats[0]["mode"] == "act"


def test_verification_as_the_runtime_reports_it(world: World) -> None:
    """INCIDENT_VERIFIED tells when the replacement began to serve, which is before anybody could see that it works."""
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    (verified,) = world.events(K.INCIDENT_VERIFIED)
    actual = world.journal.current()["rollout/1"]  # type: ignore[index]
    assert actual.state is ReplicaState.SERVING
    assert verified.payload.serving_at == actual.changed_at <= verified.wall_at


def test_with_the_scope_job_a_fault_restarts_every_replica_once(tmp_path: Path) -> None:
    world = World(tmp_path, scope="job")
    watch = world.watch()
    world.run(2, watch)
    world.runtime.inject("trainer/0", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    incident = world.only()
    assert incident.outcome is IncidentOutcome.RESOLVED and world.kinds(incident.incident_id) == A_CURE
    assert sorted(world.runtime.replaced) == [(replica, 1) for replica in FLEET]
    assert all(world.runtime.healthy(replica) for replica in FLEET)
    assert "recovery.scope is job" in incident.because
    world.run(10, watch)
    assert len(world.incidents()) == 1, "that the others ended was intended"


def test_with_the_scope_job_a_fault_during_the_restart_restarts_the_job_again(tmp_path: Path) -> None:
    world = World(tmp_path, scope="job")
    world.runtime.starts_that_die_ready["rollout/2"] = 1
    watch = world.watch()
    world.runtime.inject("trainer/0", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and len(world.only().attempts) == 2
    assert {world.desired(replica) for replica in FLEET} == {3}


def test_with_the_scope_job_a_second_fault_is_over_with_the_restart(tmp_path: Path) -> None:
    world = World(tmp_path, scope="job")
    watch = world.watch()
    world.runtime.inject("rollout/0", FaultClass.CRASH)
    world.runtime.inject("trainer/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    assert {world.desired(replica) for replica in FLEET} == {2}
    outcomes = {i.outcome for i in world.incidents()}
    assert outcomes <= {IncidentOutcome.RESOLVED, IncidentOutcome.SELF_RECOVERED}


def test_replacements_that_die_in_their_first_iteration_restart_the_role(world: World) -> None:
    world.runtime.starts_that_die_ready["trainer/0"] = 2
    watch = world.watch()
    world.runtime.inject("trainer/0", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    incident = world.only()
    actions = [str(a.plan.action) for a in incident.attempts]
    assert actions == ["replace_replica", "replace_replica", "restart_role"]
    assert incident.outcome is IncidentOutcome.RESOLVED
    assert {r: world.desired(r) for r in FLEET if world.desired(r) > 1} == {"trainer/0": 4, "trainer/1": 2}


@pytest.mark.parametrize(("commits", "second"), [(False, "restart_role"), (True, "replace_replica")])
def test_a_replica_that_fails_again_in_the_same_step_restarts_its_role(
    world: World, commits: bool, second: str
) -> None:
    watch = world.watch()
    world.journal.append(filled(K.STEP_COMMITTED, {"step": 6}))
    for number in (1, 2):
        world.step(watch)
        world.runtime.inject("rollout/1", FaultClass.CRASH)
        world.until(lambda n=number: len(world.incidents()) == n and world.all_closed(), watch)  # type: ignore[misc]
        if commits:
            world.step(watch)
            world.journal.append(filled(K.STEP_COMMITTED, {"step": 7}))
    actions = [str(i.attempts[-1].plan.action) for i in world.incidents()]
    assert actions == ["replace_replica", second]


def test_replacements_that_die_while_the_job_commits_steps_page_on_call(world: World) -> None:
    world.runtime.starts_that_die_ready["trainer/0"] = 2
    watch = world.watch()
    world.others.append(lambda: world.journal.append(filled(K.STEP_COMMITTED, {"step": 7})))
    world.runtime.inject("trainer/0", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.ESCALATED and world.desired("trainer/1") == 1
    assert "the job still commits steps" in world.only().because


def test_a_restart_of_the_job_waits_for_its_approval(tmp_path: Path) -> None:
    world = World(tmp_path, scope="job", mode="approve")
    watch = world.watch()
    world.runtime.inject("reward/0", FaultClass.CRASH)
    world.until(lambda: "plan_proposed" in [str(e.kind) for e in world.events()], watch)
    world.run(5, watch)
    assert world.runtime.replaced == []
    incident = world.only()
    assert incident.attempt is not None
    world.journal.append(PlanApproved(digest=incident.attempt.plan.digest, by="bob"), incident_id=incident.incident_id)
    world.until(world.all_closed, watch)
    proposed, approved, closed = ((m.kind, m.resolved, m.because) for m in world.notifier.messages)
    assert proposed[:2] == ("plan_proposed", False) and closed[:2] == ("incident_closed", True)
    assert approved == ("plan_approved", True, "plan approved by bob")


def test_a_replacement_that_no_controller_can_use_yet_is_not_replaced_again(tmp_path: Path) -> None:
    """Only a controller makes it serve, and the controller's own plan waits for an approval."""
    w = World(tmp_path, mode="approve")
    run, watch = RunDir(tmp_path), w.watch()

    def approve_next() -> None:
        w.until(lambda: [i for i in w.incidents() if i.state is IncidentState.PROPOSED], watch)
        attempt = next(i.attempt for i in w.incidents() if i.state is IncidentState.PROPOSED)
        assert attempt is not None
        commands.approve_plan(run, attempt.plan.digest, "alice", w.clock)

    w.runtime.inject("rollout/1", FaultClass.CRASH)
    approve_next()
    w.until(lambda: w.runtime.processes["rollout/1"].state is ReplicaState.READY, watch)
    w.runtime.processes["rollout/1"].next_at = math.inf
    w.runtime.inject("controller/0", FaultClass.CRASH)
    w.run(5 * w.config.verification_timeout_seconds, watch)
    assert w.events(K.ACTION_FAILED) == [] and w.desired("rollout/1") == 2
    approve_next()
    w.until(lambda: w.runtime.healthy("controller/0"), watch)
    w.run(w.config.verification_timeout_seconds / 2, watch)
    w.runtime.processes["rollout/1"].next_at = 0.0
    w.until(w.all_closed, watch)
    assert {i.outcome for i in w.incidents()} == {IncidentOutcome.RESOLVED} and w.desired("rollout/1") == 2
