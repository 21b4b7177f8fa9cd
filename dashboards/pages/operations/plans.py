"""What the Operations page shows: pending plans, a preview of draining a node (each replica on it, the plan, and
whether the guards allow it), the state of watch, pause and placement, and the operator commands so far.

The preview uses the same `decide` and `check` as the watch on the current journal, so the result can still change. The
limits come from the latest plan in the journal, because the watch records them nowhere else. One `OperationsReader` per
process reads the state; while the journal cannot be read it returns the last one, and the page shows why.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import JournalError
from rolecall.core.ids import IncidentId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import DiagnosisReviewed, LeaseAcquired, PlanCreated
from rolecall.core.journal.payloads.run import RunStarted
from rolecall.core.text import in_words
from rolecall.dashboards.data.incident_titles import title
from rolecall.dashboards.data.reader import Reader
from rolecall.recovery.actuators.ray_runtime import STOP_FLAG, RayRuntime
from rolecall.recovery.fleet_view import FleetView, ReplicaView, fleet_of
from rolecall.recovery.guards import HOUR_SECONDS, Situation, check
from rolecall.recovery.incidents import NOT_STARTED, Attempt, Decision, Hold, Incident, IncidentState
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.recovery.operators.commands import replacement_request
from rolecall.recovery.operators.run_location import JournalLocation, RunLocation
from rolecall.recovery.policy import decide, question
from rolecall.views.journal_reader import JournalReader

K = EventKind
MODES: Mapping[str, str] = {
    "observe": "rolecall reports what it would do and takes no action.",
    "approve": "rolecall waits for approval. A plan without a decision expires at its deadline.",
    "act": "rolecall starts a plan as soon as all guards pass. Only a plan that a guard blocks can still be held or "
    "rejected; pause stops all later actions.",
}


class PlanStatus(StrEnum):
    """State of a pending plan, most urgent for the operator first."""

    AWAITS_APPROVAL = "awaits approval"
    HELD = "on hold"
    BLOCKED = "blocked by a guard"
    APPROVED = "approved, guards are checked again"
    DUE = "due"
    NOT_EXECUTED = "not executed in this mode"
    EXPIRED = "expired"
    REJECTED = "rejected"


GLYPHS: Mapping[PlanStatus, str] = {
    PlanStatus.AWAITS_APPROVAL: "◐",
    PlanStatus.HELD: "‖",
    PlanStatus.BLOCKED: "▲",
    PlanStatus.APPROVED: "✓",
    PlanStatus.DUE: "▶",
    PlanStatus.NOT_EXECUTED: "○",
    PlanStatus.EXPIRED: "◇",
    PlanStatus.REJECTED: "✗",
}
_ORDER = tuple(PlanStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A plan that has not started. Times are wall seconds."""

    incident: Incident
    attempt: Attempt
    status: PlanStatus
    hold: Hold | None  # in force

    @property
    def expires_at(self) -> float | None:
        return self.attempt.expires_at if self.attempt.decision is None else None

    @property
    def can_be_approved(self) -> bool:
        return self.status is PlanStatus.AWAITS_APPROVAL

    @property
    def can_be_stopped(self) -> bool:
        """Whether it can be put on hold or rejected."""
        return self.status not in (PlanStatus.NOT_EXECUTED, PlanStatus.EXPIRED, PlanStatus.REJECTED)

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the plan expires; None if it has no deadline."""
        return None if self.expires_at is None else max(0.0, self.expires_at - now)


def plan_row(incident: Incident, mode: str, now: float) -> PlanRow | None:
    """The plan of an incident if it has not started. `mode`: of the watch for this incident."""
    attempt = incident.attempt
    if attempt is None or incident.state not in NOT_STARTED or attempt.plan.action is ActionKind.TOLERATE:
        return None
    hold = attempt.hold if attempt.hold is not None and attempt.hold.active(now) else None
    return PlanRow(incident=incident, attempt=attempt, status=_status(incident, attempt, hold, mode, now), hold=hold)


def plan_rows(incidents: Iterable[Incident], mode_of: Callable[[Incident], str], now: float) -> tuple[PlanRow, ...]:
    """Every plan that has not started; plans that await approval first, those that expire soonest at the top."""
    rows = [row for i in incidents if (row := plan_row(i, mode_of(i), now)) is not None]
    rows.sort(key=lambda r: (_ORDER.index(r.status), r.expires_at or r.attempt.made_at, r.incident.incident_id))
    return tuple(rows)


def _status(incident: Incident, attempt: Attempt, hold: Hold | None, mode: str, now: float) -> PlanStatus:
    if attempt.decision is Decision.REJECTED:
        return PlanStatus.REJECTED
    if hold is not None:
        return PlanStatus.HELD
    expired = attempt.expires_at is not None and now > attempt.expires_at and attempt.decision is None
    if attempt.decision is Decision.EXPIRED or expired:
        return PlanStatus.EXPIRED
    if incident.state is IncidentState.PROPOSED:
        return PlanStatus.APPROVED if attempt.decision is Decision.APPROVED else PlanStatus.AWAITS_APPROVAL
    if mode == "observe":
        return PlanStatus.NOT_EXECUTED
    return PlanStatus.BLOCKED if attempt.held_by else PlanStatus.DUE


SUPPORTS = RayRuntime.supports
"""Actions of a run that rolecall executes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """Recovery policy of the watch for replicas, as recorded in the journal."""

    config: RecoveryConfig
    supports: frozenset[ActionKind]
    known: bool  # False: no plan yet, these are the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedReplica:
    replica: str
    action: str
    because: str
    guard: str  # empty: all pass
    guard_because: str


def limits_of(policy_input: Mapping[str, Any], mode: str) -> WatchPolicy:
    """`policy_input`: as stored with the latest plan. `mode`: current mode of the watch, which may have changed
    since."""
    try:
        config = RecoveryConfig.model_validate({**policy_input["config"], **({"mode": mode} if mode else {})})
        return WatchPolicy(
            config=config,
            supports=frozenset(map(ActionKind, policy_input["supports"])) - {ActionKind.END_ORPHAN},
            known=True,
        )
    except (KeyError, TypeError, ValueError):
        # The plan was written by something else and has no limits.
        config = RecoveryConfig.model_validate({"mode": mode} if mode in MODES else {})
        return WatchPolicy(config=config, supports=SUPPORTS, known=False)


def replicas_on(fleet: FleetView, node: str) -> tuple[ReplicaView, ...]:
    return tuple(r for r in fleet.replicas if r.node == node)


def preview(
    node: str,
    *,
    fleet: FleetView,
    incidents: Sequence[Incident],
    avoided: frozenset[str],
    limits: WatchPolicy,
    paused: str | None,
    stopping: str | None,
    now: float,
) -> tuple[DrainedReplica, ...]:
    """`avoided`: nodes in quarantine."""
    # Policy and guards look at no other closed incidents, and a long run has thousands.
    incidents = [
        i
        for i in incidents
        if i.state is not IncidentState.CLOSED
        or i.diagnosis.fault_class.spec.loses_node
        or any((a.started_at or 0.0) > now - HOUR_SECONDS for a in i.attempts)
    ]
    found = []
    for replica in replicas_on(fleet, node):
        diagnosis = replacement_request(replica, f"{node} is to be drained", now)
        incident = Incident(
            incident_id=IncidentId("preview"),
            state=IncidentState.PLANNED,
            diagnosis=diagnosis,
            opened_at=now,
            seen_keys=frozenset({diagnosis.key}),
        )
        policy_input = question(
            incident,
            incidents,
            fleet=fleet,
            config=limits.config,
            supports=limits.supports,
            quarantined_nodes=avoided | {node},
        )
        plan = decide(policy_input).plan
        situation = Situation(
            now=now, fleet=fleet, config=limits.config, incidents=incidents, paused=paused, stopping=stopping
        )
        guarded = check(plan, incident, situation)
        found.append(
            DrainedReplica(
                replica=f"{replica.replica}#{replica.desired_incarnation}",
                action=in_words(plan.action),
                because=plan.because,
                guard=guarded.guard,
                guard_because=guarded.because,
            )
        )
    return tuple(found)


STATE_SECONDS = 1.0
"""A state younger than this is reused for all sessions."""
IDLE_FACTOR = 10.0
"""Seconds between two reads per second that a read takes (0.2 s for ten thousand incarnations)."""
EMPTY_FLEET = FleetView(replicas=())


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Times are wall seconds. `mode` is empty when no watch has ever acted."""

    at: float
    mode: str = ""
    watch: str = ""  # lease holder; empty: none
    paused: str | None = None
    stopping: str | None = None
    fleet: FleetView = field(default=EMPTY_FLEET)
    nodes: tuple[str, ...] = ()  # nodes at the start of the run
    events: tuple[Event, ...] = ()  # operator commands


class OperationsReader:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands = JournalReader(tuple(LABELS))
        self._events: tuple[Event, ...] = ()
        self._last: State | None = None
        self._stale, self._due = False, 0.0

    def latest(self, reader: Reader) -> State:
        """The current state, or the last one that could be read."""
        with self._lock:
            now = reader.now()
            if self._stale or self._last is None or not self._last.at <= now < self._due:
                try:
                    with reader.journal() as journal:
                        self._last, self._stale = self._state(journal, now), False
                    took = max(0.0, reader.now() - now)
                    self._due = now + max(STATE_SECONDS, IDLE_FACTOR * took)
                except JournalError:
                    # The page shows the error; retry at the next refresh.
                    return self._last or State(at=now)
            return self._last

    def invalidate(self) -> None:
        """Forces a read at the next call, because something was just written."""
        self._stale = True

    def _state(self, journal: Journal, now: float) -> State:
        lease, taken = journal.lease(LEASE_NAME), journal.last(K.LEASE_ACQUIRED)
        started = journal.last(K.RUN_STARTED)
        held = lease is not None and lease.holder and lease.expires_at > now
        for page in self._commands.pages(journal):
            self._events += tuple(page.events)
        return State(
            at=now,
            mode=taken.as_(LeaseAcquired).mode if taken else "",
            watch=lease.holder if lease is not None and held else "",
            paused=journal.flag(PAUSED_FLAG),
            stopping=journal.flag(STOP_FLAG),
            fleet=fleet_of(journal),
            nodes=started.as_(RunStarted).nodes if started else (),
            events=self._events,
        )


def newest_limits(reader: Reader, mode: str) -> WatchPolicy:
    """Raises JournalError."""
    with reader.journal() as journal:
        made = journal.last(K.PLAN_CREATED)
    return limits_of(made.as_(PlanCreated).question if made else {}, mode)


def place_of(reader: Reader) -> RunLocation:
    """Where operator commands go: the run directory, or only its journal."""
    settings = reader.settings
    return settings.run if settings.run is not None else JournalLocation(settings.journal_url)


LABELS: Mapping[EventKind, str] = {
    K.PLAN_APPROVED: "approved a plan",
    K.PLAN_REJECTED: "rejected a plan",
    K.HOLD_PLACED: "put a plan on hold",
    K.HOLD_LIFTED: "lifted a hold",
    K.DIAGNOSIS_REVIEWED: "reviewed a diagnosis",
    K.RECOVERY_PAUSED: "paused recovery",
    K.RECOVERY_RESUMED: "resumed recovery",
    K.NODE_QUARANTINED: "quarantined a node",
    K.NODE_RETURNED_TO_SERVICE: "returned a node to service",
    K.NODE_DRAINED: "drained a node",
    K.BURN_IN_FINISHED: "ran a burn-in",
}
"""What each operator command is called; these events are the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLogEntry:
    at: float
    by: str
    what: str
    on: str
    because: str


def history(events: Iterable[Event], incidents: Iterable[Incident]) -> tuple[CommandLogEntry, ...]:
    """Command history, newest first. A replacement that an operator requested is listed with its incident."""
    entries = [_entry(e) for e in events]
    entries += [
        CommandLogEntry(
            at=incident.opened_at,
            # The text of a request starts with the user's name.
            by=incident.diagnosis.because.partition(" requested replacement of ")[0]
            if " requested replacement of " in incident.diagnosis.because
            else "",
            what="requested a replacement",
            on=", ".join([*(s.name for s in incident.diagnosis.suspects), incident.incident_id]),
            because=incident.diagnosis.because,
        )
        for incident in incidents
        if incident.requested_by_operator
    ]
    return tuple(sorted(entries, key=lambda d: d.at, reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionLogEntry:
    at: float
    incident_id: str
    what: str
    because: str
    by: str
    result: str


def performed(incidents: Iterable[Incident], *, ended: bool) -> tuple[ActionLogEntry, ...]:
    """Every action that was started, newest first. `ended`: the run has ended."""
    entries = []
    for incident in incidents:
        unfinished = "not finished" if ended or incident.closed_at is not None else "in progress"
        for attempt in incident.attempts:
            if attempt.started_at is None or attempt.plan.action is ActionKind.TOLERATE:
                continue
            is_verified = attempt is incident.attempt and incident.verified_at is not None
            done = "verified" if is_verified else "done, not verified" if attempt.done_at is not None else unfinished
            approved = f"rolecall, approved by {attempt.decided_by}" if attempt.decided_by else "rolecall"
            entries.append(
                ActionLogEntry(
                    at=attempt.started_at,
                    incident_id=incident.incident_id,
                    what=attempt.plan.intent,
                    because=title(incident),
                    by=approved,
                    result=f"failed: {attempt.failed_because}" if attempt.failure is not None else done,
                )
            )
    return tuple(sorted(entries, key=lambda e: e.at, reverse=True))


def _entry(event: Event) -> CommandLogEntry:
    payload = event.payload
    verdict = f" as {payload.verdict}" if isinstance(payload, DiagnosisReviewed) else ""
    on = [getattr(payload, "node", ""), getattr(payload, "digest", ""), event.incident_id or ""]
    return CommandLogEntry(
        at=event.wall_at,
        by=str(getattr(payload, "by", "")),
        what=LABELS[event.kind] + verdict,
        on=", ".join(filter(None, on)) or "the run",
        because=payload.reason,
    )
