"""Read-only queries: status of the run, its incidents, and the replay of their decisions; as plain values."""

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.diagnosis import Plan
from rolecall.core.errors import CommandRefused
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Lease
from rolecall.core.journal.payloads.recovery import IncidentOpened, LeaseAcquired, NodeLent, PlanCreated
from rolecall.core.journal.payloads.run import EvaluationFinished, RunStarted, StepCommitted
from rolecall.core.journal.rows import reading
from rolecall.core.journal.store import canonical
from rolecall.core.text import in_words
from rolecall.recovery.actuators.ray_runtime import STOP_FLAG
from rolecall.recovery.advice import WATCHED
from rolecall.recovery.durations import durations
from rolecall.recovery.fleet_view import fleet_of
from rolecall.recovery.guards import HOUR_SECONDS, MODE, num_evictions
from rolecall.recovery.incidents import NO_CHANNEL, RIGHT, WRONG, Incident, IncidentState, evictions, paged_text
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.recovery.nodes import NODE_KINDS, fold_nodes
from rolecall.recovery.notifications.outbox import notification_text
from rolecall.recovery.operators.run_location import RunLocation, opened
from rolecall.recovery.policy import PolicyInput, decide
from rolecall.recovery.projection import IncidentProjection

K = EventKind
NAMES_SHOWN_MAX = 20
"""Incident ids listed when an unknown one is requested."""


class WatchState(StrEnum):
    """Of the newest watch that held the lease."""

    NONE = "none"  # there was none
    LEADS = "leads"
    STOPPED = "stopped"  # it has released the lease
    LOST = "lost"  # it has not: it was killed, is stuck, or cannot reach the journal


def _watch_state(lease: Lease | None, now: float) -> WatchState:
    if lease is None:
        return WatchState.NONE
    if not lease.holder:
        return WatchState.STOPPED
    return WatchState.LEADS if lease.expires_at > now else WatchState.LOST


def status(location: RunLocation, clock: Clock | None = None) -> dict[str, Any]:
    """Recovery leader, replicas and open incidents of the run, as plain values."""
    now = (clock or SystemClock()).wall()
    with opened(location) as (journal, projection):
        lease, acquired = journal.lease(LEASE_NAME), journal.last(K.LEASE_ACQUIRED)
        fleet = fleet_of(journal)
        lent = {e.as_(NodeLent).replica: e for e in journal.events(kinds=[K.NODE_LENT], damaged=[])}  # the newest
        quarantined = {n: r for n, r in fold_nodes(journal.events(kinds=NODE_KINDS)).items() if r.quarantined}
        paused, stopping = journal.flag(PAUSED_FLAG), journal.flag(STOP_FLAG)
        committed, evaluated = journal.last(K.STEP_COMMITTED), journal.last(K.EVALUATION_FINISHED)
        started, ended = journal.last(K.RUN_STARTED), journal.last(K.RUN_ENDED)
    state = _watch_state(lease, now)
    since = now - HOUR_SECONDS
    recent = evictions(projection.incidents.values(), since=since)
    return {
        "run": str(location.run_id),
        "mode": acquired.as_(LeaseAcquired).mode if acquired else None,
        "orphans_mode": acquired.as_(LeaseAcquired).orphans_mode or None if acquired else None,
        "watch": {"holder": lease.holder, "fence": lease.fence} if lease and state is WatchState.LEADS else None,
        "watch_state": str(state),
        "lost_watch": {"holder": lease.holder, "expired_at": lease.expires_at}
        if lease and state is WatchState.LOST
        else None,
        "started_at": started.wall_at if started else None,
        "ended_at": ended.wall_at if ended and projection.ended else None,
        "paused": paused,
        "stopping": stopping,
        "ended": projection.ended,
        "num_steps": started.as_(RunStarted).num_steps if started else None,
        "run_mode": started.as_(RunStarted).mode if started else None,
        "progress": _progress(committed.as_(StepCommitted)) if committed else None,
        "evaluation": evaluated.as_(EvaluationFinished).to_body() if evaluated else None,
        "evictions_last_hour": num_evictions(recent, fleet),
        "quarantined_nodes": {
            n: f"{r.quarantined_by}: {r.quarantined_because}" for n, r in sorted(quarantined.items())
        },
        "replicas": [
            {
                "replica": replica.replica,
                "incarnation": replica.incarnation,
                "desired_incarnation": replica.desired_incarnation,
                "state": str(replica.state) if replica.state else None,
                "node": replica.node,
                "partner": replica.partner,
                "since": replica.changed_at,
                "because": replica.because,
                "lent": _lent(lent.get(replica.replica)) if replica.lent else None,
            }
            for replica in fleet.replicas
        ],
        "open_incidents": [summary(i, projection, now) for i in projection.open_incidents()],
        "broken_incidents": {name: str(e).splitlines()[0] for name, e in sorted(projection.broken.items())},
    }


def _lent(event: Event | None) -> dict[str, Any]:
    """To which replica a lender's node went, and since when; empty if that line cannot be read."""
    if event is None:
        return {}
    lent = event.as_(NodeLent)
    return {"node": lent.node, "to": lent.to, "since": event.wall_at}


def _progress(newest: StepCommitted) -> dict[str, Any]:
    dataset = newest.dataset
    progress = {**asdict(dataset), "epoch": dataset.epoch, "epoch_share": dataset.epoch_share} if dataset else None
    return {"steps": newest.step + 1, "reward": newest.reward, "dataset": progress}


def incidents(
    location: RunLocation, incident_id: str | None = None, clock: Clock | None = None
) -> list[dict[str, Any]]:
    """All incidents, open ones and then the newest first, or the requested one with its events, as plain values. Raises
    CommandRefused: there is no incident of this id."""
    now = (clock or SystemClock()).wall()
    with opened(location) as (journal, projection):
        summaries = [
            summary(i, projection, now) for i in projection.incidents.values() if incident_id in (None, i.incident_id)
        ]
        if incident_id is None:
            return sorted(summaries, key=lambda s: (s["outcome"] is not None, -s["opened_at"]))
        found = known(projection, incident_id)
        events = [e.to_dict() for e in journal.events(incident_id=incident_id)]
    return [{**summaries[0], "diagnosis": found.diagnosis.to_dict(), "events": events}]


def known(projection: IncidentProjection, incident_id: str) -> Incident:
    """Raises CommandRefused: there is no such incident, or none of its events could be read."""
    found = projection.incidents.get(incident_id)
    if found is None and incident_id in projection.broken:
        raise CommandRefused(f"{incident_id} is set aside: {projection.broken[incident_id]}")
    if found is None:
        left = len(projection.incidents) - NAMES_SHOWN_MAX
        newest = ", ".join(list(projection.incidents)[-NAMES_SHOWN_MAX:]) or "none"
        older = f" and {left} older ones" if left > 0 else ""
        raise CommandRefused(f"no incident {incident_id}; there are: {newest}{older}")
    return found


def summary(incident: Incident, projection: IncidentProjection, now: float) -> dict[str, Any]:
    took = durations(incident, now)
    attempt, review, broken = incident.attempt, incident.review, projection.broken.get(incident.incident_id)
    observed = attempt is not None and MODE in attempt.held_by and incident.state is IncidentState.PLANNED
    watched = attempt is not None and attempt.plan.because.startswith(WATCHED)
    return {
        "incident_id": incident.incident_id,
        "state": str(incident.state),
        "open": incident.state is not IncidentState.CLOSED,
        "fault_class": str(incident.diagnosis.fault_class),
        "suspects": [s.name for s in incident.diagnosis.suspects],
        "because": incident.diagnosis.because,
        "before": [{"fault_class": str(d.fault_class), "because": d.because} for d in incident.told_before],
        "opened_at": incident.opened_at,
        "durations": {**asdict(took), "text": took.words},
        "action": str(attempt.plan.action) if attempt else None,
        "plan": attempt.plan.to_dict() if attempt else None,
        "would": attempt.plan.intent if attempt and observed and not watched else None,
        "to_do": attempt.plan.because.removeprefix(f"{WATCHED}: ") if attempt and watched else None,
        "num_attempts": len(incident.attempts),
        "held_by": sorted(attempt.held_by) if attempt else [],
        "held_because": list(attempt.held_because) if attempt else [],
        "expires_at": attempt.expires_at if attempt else None,
        "decision": str(attempt.decision) if attempt and attempt.decision else None,
        "decided_by": attempt.decided_by if attempt else "",
        "hold": {**asdict(attempt.hold), "until_text": attempt.hold.until_text} if attempt and attempt.hold else None,
        "review": {**asdict(review), "verdict": RIGHT if review.right else WRONG} if review else None,
        "verified_at": incident.verified_at,
        "closed_at": incident.closed_at,
        "outcome": str(incident.outcome) if incident.outcome else None,
        "closed_because": incident.because,
        "oncall_paged": bool(incident.page_topics) and incident.page_channel != NO_CHANNEL,
        "page": paged_text(incident.page_channel) if incident.page_topics else None,
        "page_reason": incident.page_reason,
        "page_channel": None if incident.page_channel in ("", NO_CHANNEL) else incident.page_channel,
        "set_aside": str(broken).splitlines()[0] if broken is not None else None,
    }


def replay(location: RunLocation, incident_id: str) -> dict[str, Any]:
    """Recomputes each plan of an incident from its stored input and compares the decisions. Raises CommandRefused:
    there is no incident of this id, or it has no plan."""
    with opened(location) as (journal, projection):
        known(projection, incident_id)
        where = journal.store.where
        made = journal.events(incident_id=incident_id, kinds=[K.PLAN_CREATED])
        (first,) = journal.events(incident_id=incident_id, kinds=[K.INCIDENT_OPENED])
    if not made:
        raise CommandRefused(f"{incident_id} has no plan to replay")
    plans = []
    for event in made:
        with reading(where, f"events line {event.seq}, a plan"):
            policy_input = PolicyInput.from_dict(dict(event.as_(PlanCreated).question))
        then = decided_then(event.as_(PlanCreated))
        again = decide(policy_input).to_dict()
        same = canonical(again) == canonical(then)
        plans.append({"event": event.event_id, "same": same, "then": then["plan"], "again": again["plan"]})
    same = all(p["same"] for p in plans)
    lines = [f"{incident_id}: {'same' if same else 'DIFFERENT'} decision from the same input"]
    lines += [f"  {p['event']}: {Plan.from_dict(p['again']).words}: {p['again']['because']}" for p in plans]
    text = _text(lines)
    diagnosis = first.as_(IncidentOpened).diagnosis.to_dict()
    return {"incident_id": incident_id, "same": same, "plans": plans, "diagnosis": diagnosis, "text": text}


def decided_then(created: PlanCreated) -> dict[str, Any]:
    """The stored decision in the form of `PolicyDecision.to_dict`. Side effects (`also_hit`, `also_ends`) come from the
    actuator and are not part of the decision."""
    plan = {**created.plan.to_dict(), "also_hit": [], "also_ends": ()}
    return {"plan": plan, "page_oncall": created.page_oncall, "outcome": created.outcome}


def _text(lines: list[str]) -> str:
    return "\n".join(notification_text(line) for line in lines)


def event_text(event: Mapping[str, Any]) -> str:
    """`plan created: replace replica of rollout/1#1: it crashed`, of an event as a plain value."""
    body = event["body"]
    because = body.get("because") or body.get("diagnosis", {}).get("because")
    relation = f"{because} ({body['relation']})" if body.get("relation") else because
    parts = [in_words(body.get("outcome") or body.get("verdict", "")), relation]
    if isinstance(body.get("plan"), Mapping):  # then `outcome` counts only if the plan is to do nothing
        plan = Plan.from_dict(dict(body["plan"]))
        parts = [plan.words, plan.because]
    kind = paged_text(body["channel"]) if event["kind"] == K.ONCALL_PAGED else in_words(event["kind"])
    return ": ".join([kind, *(str(part) for part in parts if part)])
