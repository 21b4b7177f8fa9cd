"""ETTR while the run goes on: the same as the report's, event by event, settled or not."""

import itertools
import random
from dataclasses import replace

import pytest

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import Event
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.views.ettr import (
    UNDETECTED,
    EttrAccumulator,
    Loss,
    by_cause,
    ettr,
    faultless_step_seconds,
    losses,
    lost_seconds,
    steps,
    training_began,
)
from rolecall.views.incidents import summarize_incidents
from rolecall.views.lifetimes import incarnation_records
from tests.events import made_event

ROLLOUTS, TRAINERS = 3, 2


def _events(run: RunDir) -> list[Event]:
    journal = Journal(run.database_url, create=False)
    try:
        return journal.events()
    finally:
        journal.close()


def _reported(events: list[Event]) -> float:
    """As report.py counts it, without the injector's log."""
    began, committed = training_began(events), steps(events)
    assert began is not None
    until = committed[-1].at
    lost = losses(summarize_incidents(events, incarnation_records(events, {}), ()), until)
    assert {loss.replica for loss in lost} == {"rollout/0", "rollout/1", "trainer/1"}
    found = ettr(began, until, lost, num_rollouts=ROLLOUTS, num_trainers=TRAINERS)
    assert found is not None
    return found


@pytest.mark.parametrize("settle_seconds", [20.0, 600.0])
def test_a_run_followed_event_by_event_ends_with_the_reports_ettr(fake_run: RunDir, settle_seconds: float) -> None:
    events = _events(fake_run)
    followed = EttrAccumulator(num_rollouts=ROLLOUTS, num_trainers=TRAINERS, settle_seconds=settle_seconds)
    for event in events:
        followed.take(event)
        followed.account(event.wall_at)
    # An hour later, as a Prometheus may still ask.
    account = followed.account(events[-1].wall_at + 3600.0)
    assert account is not None and account.ettr == pytest.approx(_reported(events), abs=1e-6)
    assert set(account.lost) == {("rollout", "crash"), ("trainer", "hang"), ("rollout", "slow")}
    assert account.effective_seconds + sum(account.lost.values()) == pytest.approx(account.training_seconds)
    committed = steps(events)
    assert not followed._losses and followed._events[0].wall_at >= committed[-1].at, "what is settled is let go"


def test_what_is_kept_of_a_plan_has_no_fleet_in_it() -> None:
    followed = EttrAccumulator(num_rollouts=ROLLOUTS, num_trainers=TRAINERS)
    body = {"question": {"fleet": {"replicas": ["x" * 1000]}}}
    followed.take(made_event(seq=1, kind=K.INCIDENT_OPENED, wall_at=1.0, incident_id="inc-1"))
    followed.take(made_event(seq=2, kind=K.PLAN_CREATED, wall_at=1.0, body=body, incident_id="inc-1"))
    assert not followed._events and "xxx" not in repr(followed)


def test_an_outage_shows_while_it_lasts(fake_run: RunDir) -> None:
    events = _events(fake_run)
    hung = next(e for e in events if e.kind is K.ACTION_STARTED and "trainer/1" in str(e.payload.to_body()))
    followed = EttrAccumulator(num_rollouts=ROLLOUTS, num_trainers=TRAINERS)
    for event in events[: hung.seq]:
        followed.take(event)
    soon, later = followed.account(hung.wall_at), followed.account(hung.wall_at + 100.0)
    assert soon is not None and later is not None
    # Nobody trains, the three rollouts go on: two fifths are lost, and go to the trainer that hangs.
    assert later.lost["trainer", "hang"] - soon.lost["trainer", "hang"] == pytest.approx(100.0 * TRAINERS / 5)


def _open_hang(at: float) -> Event:
    suspect = Suspect(node=NodeId("node-2"), role="trainer", replica="trainer/1", incarnation=1)
    found = Diagnosis(
        suspects=(suspect,), fault_class=FaultClass.HANG, onset=at, detected_at=at + 3.0, confidence=1.0, because="hung"
    )
    body = {"diagnosis": found.to_dict(), "window": "observations"}
    return made_event(seq=9, kind=K.INCIDENT_OPENED, wall_at=at + 3.0, body=body, incident_id="i-1")


def test_an_open_incident_costs_now_without_an_action_and_without_a_watch(fake_run: RunDir) -> None:
    events = [e for e in _events(fake_run) if e.kind is not K.RUN_ENDED]
    last = steps(events)[-1].at
    followed = EttrAccumulator(num_rollouts=ROLLOUTS, num_trainers=TRAINERS)
    for event in events:
        followed.take(event)
    before = followed.account(last + 50.0, watched=False)
    assert before is not None and before.end == last, "nobody watches, so what happens since is not known"
    lost = sum(before.lost.values())
    followed.take(_open_hang(last))
    for watched in (True, False):
        account = followed.account(last + 100.0, watched=watched)
        assert account is not None and account.end == last + 100.0
        assert sum(account.lost.values()) - lost == pytest.approx(100.0 * TRAINERS / 5)


def test_before_training_there_is_no_account() -> None:
    assert EttrAccumulator(num_rollouts=1, num_trainers=1).account(5.0) is None


def test_what_ettr_leaves_out_is_what_is_lost(rng: random.Random) -> None:
    for _ in range(300):
        found = []
        for _ in range(rng.randrange(6)):
            since = rng.uniform(-5, 20)
            until = since + rng.uniform(0, 15)
            name = rng.choice(["rollout/0", "rollout/1", "rollout/2", "trainer/0", "trainer/1"])
            stalled = rng.uniform(since, until) if name.startswith("trainer") else 0.0
            fault = rng.choice(["crash", "hang"])
            found.append(Loss(replica=name, since=since, until=until, stalled_until=stalled, fault=fault))
        share = ettr(0.0, 20.0, found, num_rollouts=ROLLOUTS, num_trainers=TRAINERS)
        lost = lost_seconds(found, 0.0, 20.0, num_rollouts=ROLLOUTS, num_trainers=TRAINERS)
        assert share == pytest.approx(_by_sampling(found)), found
        assert share is not None and sum(by_cause(lost).values()) == pytest.approx((1 - share) * 20.0), found


def _by_sampling(found: list[Loss]) -> float:
    """The definition of ETTR, evaluated between each two moments at which something changes."""
    moments = sorted({0.0, 20.0, *(t for c in found for t in (c.since, c.until, c.stalled_until) if 0 < t < 20)})
    effective = 0.0
    for left, right in itertools.pairwise(moments):
        now = [c for c in found if c.since <= left < c.until]
        rollouts = {c.replica for c in now if c.role == "rollout"}
        trainers = {c.replica for c in now if c.role == "trainer"}
        stalled = any(left < c.stalled_until for c in now if c.role == "trainer")
        at_work = ROLLOUTS - len(rollouts) + (0 if stalled else TRAINERS - len(trainers))
        effective += (right - left) * at_work / (ROLLOUTS + TRAINERS)
    return effective / 20.0


def _lent_for_good(began: float, *, back_at: float | None) -> list[Event]:
    """trainer/1 loses its node after 10 s, rollout/2 lends its own after 20, the incident is over after 30."""
    members = [["rollout/2", 1], ["trainer/1", 1]]
    found = _open_hang(began + 10.0)
    lent = {"replica": "rollout/2", "incarnation": 1, "node": "node-5", "to": "trainer/1", "because": "it is so"}
    events = [
        made_event(seq=1, kind=K.EPOCH_ADVANCED, wall_at=began, body={"members": members}),
        found,
        made_event(seq=10, kind=K.NODE_LENT, wall_at=began + 20.0, body=lent, incident_id="i-1"),
        made_event(
            seq=11, kind=K.INCIDENT_CLOSED, wall_at=began + 30.0, body={"outcome": "tolerated"}, incident_id="i-1"
        ),
    ]
    if back_at is not None:
        body = {"replica": "rollout/2", "incarnation": 3}
        events.append(made_event(seq=12, kind=K.WEIGHTS_ADMITTED, wall_at=back_at, body=body))
    return [*events, made_event(seq=13, kind=K.STEP_COMMITTED, wall_at=began + 100.0, body={"step": 0})]


@pytest.mark.parametrize("settle_seconds", [5.0, 600.0])
@pytest.mark.parametrize(("back_after", "lost"), [(70.0, 50.0), (None, 80.0)])
def test_a_rollout_that_has_lent_its_node_is_lost_until_it_serves_again(
    settle_seconds: float, back_after: float | None, lost: float
) -> None:
    began = 1_000.0
    events = _lent_for_good(began, back_at=None if back_after is None else began + back_after)
    followed = EttrAccumulator(num_rollouts=ROLLOUTS, num_trainers=TRAINERS, settle_seconds=settle_seconds)
    for event in events:
        followed.take(event)
        followed.account(event.wall_at)
    account = followed.account(began + 100.0)
    assert account is not None and account.lost["rollout", "hang"] == pytest.approx(lost / (ROLLOUTS + TRAINERS))
    of_report = losses(summarize_incidents(events, incarnation_records(events, {}), ()), began + 100.0)
    seconds = lost_seconds(of_report, began, began + 100.0, num_rollouts=ROLLOUTS, num_trainers=TRAINERS)
    assert by_cause(seconds)["rollout", "hang"] == pytest.approx(lost / (ROLLOUTS + TRAINERS))


def _both_count(events: list[Event], until: float, settle_seconds: float) -> dict[tuple[str, str], float]:
    """Replica-seconds lost by cause, by the accumulator and by the report."""
    followed = EttrAccumulator(num_rollouts=ROLLOUTS, num_trainers=TRAINERS, settle_seconds=settle_seconds)
    for event in events:
        followed.take(event)
        followed.account(event.wall_at, watched=False)
    account, began = followed.account(until), training_began(events)
    of_report = losses(summarize_incidents(events, incarnation_records(events, {}), ()), until)
    assert account is not None and began is not None
    lost = by_cause(lost_seconds(of_report, began, until, num_rollouts=ROLLOUTS, num_trainers=TRAINERS))
    assert account.lost == pytest.approx(lost)
    return {cause: seconds * (ROLLOUTS + TRAINERS) for cause, seconds in lost.items()}


def _members(incarnation: int) -> list[tuple[str, int]]:
    return [(f"{role}/{n}", incarnation) for role, num in (("rollout", 3), ("trainer", 2)) for n in range(num)]


def _story(*told: tuple[float, K, dict[str, object]], incident_id: str = "") -> list[Event]:
    return [
        made_event(seq=n, kind=kind, wall_at=at, body=body, incident_id=incident_id or None)
        for n, (at, kind, body) in enumerate(told, start=1)
    ]


@pytest.mark.parametrize("settle_seconds", [5.0, 600.0])
@pytest.mark.parametrize("is_back", [True, False])
def test_an_outage_that_a_new_start_ends_is_lost_from_the_last_commit(settle_seconds: float, is_back: bool) -> None:
    events = _story(
        (100.0, K.EPOCH_ADVANCED, {"members": _members(1)}),
        (200.0, K.STEP_COMMITTED, {"step": 0}),
        (300.0, K.STEP_COMMITTED, {"step": 1}),
        (310.0, K.WEIGHTS_ADMITTED, {"replica": "rollout/0", "incarnation": 1}),
        (1200.0, K.COMPONENT_RESTARTED, {"what": "supervisor"}),
        (1230.0, K.EPOCH_ADVANCED, {"members": _members(2)}),
        *((1240.0, K.WEIGHTS_ADMITTED, {"replica": f"rollout/{n}", "incarnation": 2}) for n in range(2 + is_back)),
        (1300.0, K.STEP_COMMITTED, {"step": 2}),
        (1400.0, K.STEP_COMMITTED, {"step": 3}),
    )
    expected = {("trainer", UNDETECTED): 2 * 930.0, ("rollout", UNDETECTED): 3 * 940.0 + (0.0 if is_back else 160.0)}
    assert _both_count(events, 1400.0, settle_seconds) == pytest.approx(expected)
    lost = losses(summarize_incidents(events, incarnation_records(events, {}), ()), 1240.0)
    assert faultless_step_seconds(steps(events), lost) == pytest.approx(100.0), "the outage is no step"


@pytest.mark.parametrize("settle_seconds", [5.0, 600.0])
def test_a_restart_that_failed_costs_after_the_close_until_the_replica_serves(settle_seconds: float) -> None:
    suspect = Suspect(node=NodeId("node-3"), role="rollout", replica="rollout/1", incarnation=1)
    found = Diagnosis(
        suspects=(suspect,), fault_class=FaultClass.HANG, onset=200.0, detected_at=200.0, confidence=1.0, because="hung"
    )
    targets = tuple(
        PlanTarget(replica=ReplicaId(f"rollout/{n}"), incarnation=1, node=NodeId("node-3")) for n in range(ROLLOUTS)
    )
    restart = Plan(incident_id=IncidentId("i-1"), action=ActionKind.RESTART_ROLE, targets=targets, because="why")
    gave_up = replace(restart, action=ActionKind.TOLERATE, targets=())
    starting = [(220.0, K.REPLICA_STARTING, {"replica": f"rollout/{n}", "incarnation": 2}) for n in range(ROLLOUTS)]
    before = _story((100.0, K.EPOCH_ADVANCED, {"members": _members(1)}))
    incident = _story(
        (200.0, K.INCIDENT_OPENED, {"diagnosis": found.to_dict()}),
        (210.0, K.PLAN_CREATED, {"plan": restart.to_dict()}),
        (210.0, K.ACTION_STARTED, {"plan": restart.to_dict()}),
        *starting,
        (230.0, K.WEIGHTS_ADMITTED, {"replica": "rollout/0", "incarnation": 2}),
        (300.0, K.ACTION_FAILED, {"digest": restart.digest, "failure": "no_progress"}),
        (300.0, K.PLAN_CREATED, {"plan": gave_up.to_dict()}),
        (310.0, K.INCIDENT_CLOSED, {"outcome": "escalated"}),
        incident_id="i-1",
    )
    # rollout/1 never serves as #2, but as #3; rollout/2 not at all.
    back = _story((900.0, K.WEIGHTS_ADMITTED, {"replica": "rollout/1", "incarnation": 3}))
    lost = 20.0 + (900.0 - 200.0) + (1000.0 - 210.0)
    events = [replace(e, seq=n) for n, e in enumerate([*before, *incident, *back], start=1)]
    assert _both_count(events, 1000.0, settle_seconds) == pytest.approx({("rollout", "hang"): lost})
