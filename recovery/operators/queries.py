"""Read-only queries: status of the run, its incidents, and the replay of their decisions; as plain values and as
text."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.diagnosis import Plan
from rolecall.core.errors import CommandRefused
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads import IncidentOpened, LeaseAcquired, PlanCreated
from rolecall.core.journal.rows import reading
from rolecall.core.journal.store import canonical
from rolecall.core.text import in_words
from rolecall.recovery.actuators import STOP_FLAG
from rolecall.recovery.durations import durations
from rolecall.recovery.fleet_view import fleet_view
from rolecall.recovery.guards import HOUR_SECONDS, MODE
from rolecall.recovery.incidents import (
    RIGHT,
    WRONG,
    Incident,
    IncidentProjection,
    IncidentState,
    evictions,
    paged_text,
)
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.recovery.nodes import NODE_KINDS, fold_nodes
from rolecall.recovery.notifications.outbox import notification_text
from rolecall.recovery.operators.run_location import RunLocation, opened
from rolecall.recovery.policy import PolicyInput, decide

K = EventKind
NAMES_SHOWN_MAX = 20
"""Incident ids listed when an unknown one is requested."""


def status(location: RunLocation, clock: Clock | None = None) -> dict[str, Any]:
    """Recovery leader, replicas and open incidents of the run, as plain values."""
    now = (clock or SystemClock()).wall()
    with opened(location) as (journal, projection):
        lease, acquired = journal.lease(LEASE_NAME), journal.last(K.LEASE_ACQUIRED)
        desired = journal.desired()
        fleet = fleet_view(desired, journal.current())
        quarantined = {n: r for n, r in fold_nodes(journal.events(kinds=NODE_KINDS)).items() if r.quarantined}
        paused, stopping = journal.flag(PAUSED_FLAG), journal.flag(STOP_FLAG)
    acting = lease is not None and lease.holder != "" and lease.expires_at > now
    since = now - HOUR_SECONDS
    recent = [e for e in evictions(projection.incidents.values(), since=since) if e.at > since]
    return {
        "run": str(location.run_id),
        "mode": acquired.as_(LeaseAcquired).mode if acquired else None,
        "watch": {"holder": lease.holder, "fence": lease.fence} if lease is not None and acting else None,
        "paused": paused,
        "stopping": stopping,
        "ended": projection.ended,
        "evictions_last_hour": len(recent),
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
                "since": replica.changed_at,
                "because": replica.because,
            }
            for replica in fleet.replicas
        ],
        "open_incidents": [summary(i, projection, now) for i in projection.open_incidents()],
        "broken_incidents": {name: str(e).splitlines()[0] for name, e in sorted(projection.broken.items())},
    }


def incidents(
    location: RunLocation, incident_id: str | None = None, clock: Clock | None = None
) -> list[dict[str, Any]]:
    """All incidents, or the requested one with its events, as plain values. Raises CommandRefused: there is no incident
    of this id."""
    now = (clock or SystemClock()).wall()
    with opened(location) as (journal, projection):
        summaries = [
            summary(i, projection, now) for i in projection.incidents.values() if incident_id in (None, i.incident_id)
        ]
        if incident_id is None:
            return summaries
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
    return {
        "incident_id": incident.incident_id,
        "state": str(incident.state),
        "fault_class": str(incident.diagnosis.fault_class),
        "suspects": [s.name for s in incident.diagnosis.suspects],
        "because": incident.diagnosis.because,
        "opened_at": incident.opened_at,
        "durations": {**asdict(took), "text": took.words},
        "action": str(attempt.plan.action) if attempt else None,
        "plan": attempt.plan.to_dict() if attempt else None,
        "would": attempt.plan.intent if attempt and observed else None,
        "num_attempts": len(incident.attempts),
        "held_by": sorted(attempt.held_by) if attempt else [],
        "expires_at": attempt.expires_at if attempt else None,
        "decision": str(attempt.decision) if attempt and attempt.decision else None,
        "decided_by": attempt.decided_by if attempt else "",
        "hold": {**asdict(attempt.hold), "until_text": attempt.hold.until_text} if attempt and attempt.hold else None,
        "review": {**asdict(review), "verdict": RIGHT if review.right else WRONG} if review else None,
        "verified_at": incident.verified_at,
        "closed_at": incident.closed_at,
        "outcome": str(incident.outcome) if incident.outcome else None,
        "closed_because": incident.because,
        "oncall_paged": bool(incident.page_topics),
        "page_reason": incident.page_reason,
        "page_channel": incident.page_channel,
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
    """The stored decision in the form of `PolicyDecision.to_dict`. Side effects (`also_hit`) come from the actuator and
    are not part of the decision."""
    plan = {**created.plan.to_dict(), "also_hit": []}
    return {"plan": plan, "page_oncall": created.page_oncall, "outcome": created.outcome}


def status_text(value: dict[str, Any]) -> str:
    """`status` as text."""
    watch = value["watch"]
    leader = "NO RECOVERY LEADER: no watch holds the lease"
    if watch:
        leader = f"leader {watch['holder']} (fence {watch['fence']})"
    lines = [f"run {value['run']}: mode {value['mode'] or 'unknown'}, {leader}"]
    for condition in ("paused", "stopping", "ended"):
        if value[condition] is not None:
            lines.append(f"{condition.upper()}: {value[condition]}")
    for r in value["replicas"]:
        desired = "" if r["incarnation"] == r["desired_incarnation"] else f" (desired: #{r['desired_incarnation']})"
        lines.append(f"  {r['replica']:<16} #{r['incarnation']} {r['state'] or 'not started'} on {r['node']}{desired}")
    lines.append(f"evictions in the last hour: {value['evictions_last_hour']}")
    lines += _incident_lines(value["open_incidents"]) or ["no open incidents"]
    lines += [f"QUARANTINED: {node}, by {why}" for node, why in value["quarantined_nodes"].items()]
    lines += [f"SET ASIDE: {name}: {why}" for name, why in value["broken_incidents"].items()]
    return _text(lines)


def incidents_text(value: list[dict[str, Any]]) -> str:
    """`incidents` as text."""
    lines = _incident_lines(value) or ["no incidents"]
    for i in value:
        lines += [f"  evidence: {e['text']}" for e in i.get("diagnosis", {}).get("evidence", ())]
        for event in i.get("events", ()):
            body = event["body"]
            lines.append(f"  e{event['seq']} {event_text(event)}")
            if event["kind"] == K.EVIDENCE_COLLECTED:
                missing = [f"not collected: {text}" for text in body.get("missing", ())]
                files = [f["name"] for f in body.get("files", ())]
                lines += [f"    {text}" for text in (*body.get("statements", ()), *missing, *files)]
    return _text(lines)


def event_text(event: Mapping[str, Any]) -> str:
    """`plan created: replace replica of rollout/1#1: it crashed`, of an event as a plain value."""
    body = event["body"]
    parts = [in_words(body.get("outcome", "")), str(body.get("because", ""))]
    plan = body.get("plan")
    if isinstance(plan, Mapping):  # then `outcome` counts only if the plan is to do nothing
        targets = ", ".join(f"{t['replica']}#{t['incarnation']}" for t in plan.get("targets", ()))
        action = in_words(plan.get("action", ""))
        parts = [f"{action} of {targets}" if targets else action, str(plan.get("because", ""))]
    return ": ".join([in_words(event["kind"]), *(part for part in parts if part)])


def _incident_lines(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for incident in found:
        state = "SET ASIDE" if incident["set_aside"] else in_words(incident["outcome"] or incident["state"])
        lines.append(f"{incident['incident_id']} {state}: {incident['set_aside'] or incident['because']}")
        lines.append(f"  {incident['durations']['text']}")
        if incident["would"]:
            lines.append(f"  only observed: in mode act rolecall would {incident['would']}")
        if incident["plan"]:
            blocked = incident["held_by"] and incident["outcome"] is None
            held = f", blocked by {in_words(', '.join(incident['held_by']))}" if blocked else ""
            plan = f"plan {incident['plan']['digest']}, attempt {incident['num_attempts']}{held}"
            lines.append(f"  {Plan.from_dict(incident['plan']).words} ({plan})")
            lines += [f"  also: {hit}" for hit in incident["plan"]["also_hit"]]
        if (hold := incident["hold"]) and not hold["lifted"] and incident["outcome"] is None:
            lines.append(f"  on hold by {hold['by']} until {hold['until_text']}: {hold['because']}")
        if review := incident["review"]:
            reason = f": {review['because']}" if review["because"] else ""
            lines.append(f"  diagnosis reviewed as {review['verdict']} by {review['by']}{reason}")
        if incident["oncall_paged"] and incident["outcome"] is None:
            lines.append(f"  {paged_text(incident['page_channel']).upper()}: {incident['page_reason']}")
        if incident["state"] == IncidentState.PROPOSED:
            lines.append(f"  awaiting approval: rolecall approve|reject|hold {incident['plan']['digest']}")
    return lines


def _text(lines: list[str]) -> str:
    return "\n".join(notification_text(line) for line in lines)
