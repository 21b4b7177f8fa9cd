"""Incidents from the journal with their times, matched with the injected faults that caused them. Pure.

The injection log is used only for evaluation; rolecall's detectors never see it. A fault is matched with the earliest
later incident that names its target, else with one that opened soon after it and names another suspect (detected, but
misattributed). If that incident was tolerated, the fault may have gone on: it is matched with the next one that was
not, and the first is no alarm. An unmatched fault is missed; an unmatched incident is a false alarm.

Seconds of an incident count from the finding (`detected_at`, when the detectors were certain):

    detected_seconds           fault injected -> finding
    requests_resumed_seconds   finding -> its open requests were reassigned to other engines; 0 if done before
    step_committed_seconds     finding -> the step that the fault interrupted was committed; 0 if before
    serving_seconds            finding -> the replacement serves (rollout: with proof of its weights; trainer: in an
                               epoch)
    verified_seconds           finding -> the replacement was seen to make progress
    resolved_seconds           finding -> the replacement serves, once its progress is verified
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rolecall.core.faults import FaultClass
from rolecall.core.ids import role_of
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import ActionStarted, NodeLent
from rolecall.core.journal.payloads.run import (
    ComponentRestarted,
    EpochAdvanced,
    ReplicaReady,
    ReplicaStarting,
    RequestsReassigned,
    StepCommitted,
    StepInterrupted,
    WeightsAdmitted,
)
from rolecall.core.membership import is_standby
from rolecall.recovery.durations import IncidentDurations, durations
from rolecall.recovery.incidents import Incident, IncidentOutcome, fold
from rolecall.views.lifetimes import IncarnationRecord, Key

CLOCK_SLACK_SECONDS = 0.05
"""The injector records its time after it acted: a finding may precede that time by this much."""
REPLACEMENT_FIELDS = ("replica", "incarnation", "node", "pid", "from_standby", "serving_at")
"""Of the report."""
WRONG_NAME_SECONDS = 60.0
"""An incident that names another suspect is matched with a fault if it opened this soon after it."""

_K = EventKind


HELPER_KINDS = ("agent-", "watch-")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """One line of the fault injector's log, `injections.jsonl`: used only for evaluation, never by a detector."""

    kind: str
    target: str  # replica, or `trainer/0 rank 1`: one process of it
    injected_at: float  # wall seconds
    how: str = ""
    incarnation: int | None = None
    node: str = ""
    pid: int = 0
    start_ticks: int = 0
    met: bool = True  # injected at the intended moment
    targets: tuple[str, ...] = ()  # all replicas hit together; `target` is the first of them

    @property
    def hit(self) -> tuple[str, ...]:
        """Replicas."""
        return tuple(dict.fromkeys(t.partition(" rank ")[0] for t in self.targets or (self.target,)))

    @property
    def of_helper(self) -> bool:
        """It hit one of rolecall's own processes, which is restarted and is no incident of the job."""
        return self.kind.startswith(HELPER_KINDS)

    def to_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.__slots__}, "targets": list(self.hit)}


def parse_injections(text: str) -> list[InjectedFault]:
    """The injector's log, oldest first, without an incomplete last line.

    Raises:
        ValueError: a complete line is malformed.
    """
    faults = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            faults.append(_fault(json.loads(line)))
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"line {number} is not what the injector writes: {e!r}") from e
    return sorted(faults, key=lambda f: f.injected_at)


def _fault(record: Any) -> InjectedFault:
    if not isinstance(record, dict):
        raise TypeError("not a mapping")
    incarnation = record.get("incarnation")
    return InjectedFault(
        kind=str(record["kind"]),
        target=str(record["target"]),
        injected_at=float(record["injected_at"]),
        how=str(record.get("how") or ""),
        incarnation=None if incarnation is None else int(incarnation),
        node=str(record.get("node") or ""),
        pid=int(record.get("pid") or 0),
        start_ticks=int(record.get("start_ticks") or 0),
        met=record.get("met") is not False,
        targets=tuple(str(t) for t in record.get("targets") or ()),
    )


def last_of(times: Sequence[float | None]) -> float | None:
    """The last of these moments; None: there is none, or one of them is not known."""
    known = [at for at in times if at is not None]
    return max(known) if known and len(known) == len(times) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwayTime:
    """Time in which a replica was not there to work, without a fault of its own: it had lent its node, or a restart of
    its role, the job or the whole run had taken it down (`by_restart`). Wall seconds; None: it has not yet served
    again."""

    replica: str
    incarnation: int  # that ended
    since: float
    until: float | None = None
    incident_id: str = ""
    by_restart: bool = False


@dataclass
class AwayReplicas:
    """Replicas that have lent their nodes, or that the start of the whole run again has to bring back, event by event.

    When a run ended is not in its journal: until it is started again it counts as away from the last commit or
    membership epoch. Owned by one reader.
    """

    open: dict[str, AwayTime] = field(default_factory=dict)
    _members: dict[str, int] = field(default_factory=dict)  # rollout or trainer -> newest incarnation of an epoch
    _worked_at: float = 0.0

    def take(self, event: Event) -> list[AwayTime]:
        """Returns the times of replicas that serve again."""
        match event.payload:
            case StepCommitted():
                self._worked_at = event.wall_at
            case EpochAdvanced(members=members):
                self._worked_at = event.wall_at
                self._members |= {r: i for r, i in members if role_of(r) in ("rollout", "trainer")}
                return self._served([(r, i) for r, i in members if role_of(r) != "rollout"], event.wall_at)
            case WeightsAdmitted() as said:
                return self._served([(said.replica, said.incarnation)], event.wall_at)
            case NodeLent() as said if not is_standby(said.replica):
                self.open[said.replica] = AwayTime(
                    replica=said.replica,
                    incarnation=said.incarnation,
                    since=event.wall_at,
                    incident_id=event.incident_id or "",
                )
            case ComponentRestarted(what="supervisor"):
                for replica, incarnation in self._members.items():
                    away = AwayTime(replica=replica, incarnation=incarnation, since=self._worked_at, by_restart=True)
                    self.open.setdefault(replica, away)
        return []

    def _served(self, serving: Iterable[tuple[str, int]], at: float) -> list[AwayTime]:
        back = [r for r, incarnation in serving if r in self.open and incarnation > self.open[r].incarnation]
        return [replace(self.open.pop(replica), until=at) for replica in back]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSummary:
    """One incident with its fault and its cost. Times are wall seconds, None if it did not happen."""

    incident: Incident
    fault: InjectedFault | None = None
    diagnosed_correctly: bool | None = None  # None without a fault
    further_faults: tuple[InjectedFault, ...] = ()  # hit this incident's own replacements: resolved with it, or not
    replacements: tuple[IncarnationRecord, ...] = ()  # that the newest plan requested
    restarts: tuple[AwayTime, ...] = ()
    """Of the replicas that restarts of the role or of the job took down."""
    requests_resumed_at: float | None = None
    step_committed_at: float | None = None
    tokens_kept: int = 0
    tokens_lost: int = 0
    steps_lost: int = 0

    @property
    def detected_at(self) -> float:
        return self.incident.first_diagnosis.detected_at

    @property
    def began_at(self) -> float:
        """When the impact began: the time of the fault if known, else the onset in the diagnosis."""
        return self.fault.injected_at if self.fault else min(self.incident.first_diagnosis.onset, self.detected_at)

    @property
    def serving_at(self) -> float | None:
        # Of a restart of the job: when it computes again.
        computing = [r for r in self.replacements if r.role in ("rollout", "trainer")]
        return last_of([r.serving_at for r in computing or self.replacements])

    @property
    def resolved_at(self) -> float | None:
        """When the replacement served, once its progress is verified; without one, when progress was verified."""
        verified_at = self.incident.verified_at
        return verified_at if verified_at is None or self.serving_at is None else self.serving_at

    @property
    def resolved(self) -> bool:
        return self.incident.outcome is IncidentOutcome.RESOLVED and self.resolved_at is not None

    @property
    def ends_at(self) -> float | None:
        """Close time; while it is open, `resolved_at`."""
        return self.incident.closed_at if self.incident.closed_at is not None else self.resolved_at

    @property
    def partners(self) -> dict[str, float]:
        """Replica -> when it was taken down as part of a hybrid whose other replica the fault hit."""
        hit = self.affected | {s.replica for s in self.incident.suspects}
        found: dict[str, float] = {}
        for attempt in self.incident.attempts:
            if attempt.started_at is not None and not attempt.plan.action.is_restart:
                for target in attempt.plan.targets:
                    if target.replica not in hit:
                        found.setdefault(target.replica, attempt.started_at)
        return found

    @property
    def affected(self) -> set[str]:
        """Replicas that the fault hit; those that the diagnosis names, if it is not known."""
        named = {s.replica for s in self.incident.diagnosis.suspects if s.replica}
        return set(self.fault.hit) if self.fault else named

    def since_finding(self, at: float | None) -> float | None:
        return None if at is None else round(max(0.0, at - self.detected_at), 3)

    def durations(self, now: float) -> IncidentDurations:
        fault_at = self.fault.injected_at if self.fault else None
        return durations(self.incident, now, fault_at=fault_at, serving_at=self.serving_at)

    def to_dict(self, now: float) -> dict[str, Any]:
        """Layout in the report. `now`: wall seconds, for the age of an open incident."""
        incident, diagnosis, took = self.incident, self.incident.diagnosis, self.durations(now)
        plan = incident.attempt.plan if incident.attempt else None
        return {
            "incident_id": incident.incident_id,
            "fault": self.fault.to_dict() if self.fault else None,
            "further_faults": [f.to_dict() for f in self.further_faults],
            "diagnosed_correctly": self.diagnosed_correctly,
            "suspects": [s.name for s in diagnosis.suspects],
            "fault_class": str(diagnosis.fault_class),
            "confidence": diagnosis.confidence,
            "detectors": list(diagnosis.detectors),
            "because": diagnosis.because,
            "before": [{"fault_class": str(d.fault_class), "because": d.because} for d in incident.told_before],
            "advice": diagnosis.advice,
            "evidence": [{"kind": e.kind, "text": e.text} for e in diagnosis.evidence],
            "onset": incident.first_diagnosis.onset,
            "detected_at": self.detected_at,
            "opened_at": incident.opened_at,
            "serving_at": self.serving_at,
            "resolved_at": self.resolved_at,
            "closed_at": incident.closed_at,
            "detected_seconds": took.fault_to_finding,
            "detected_after_onset_seconds": took.onset_to_finding,
            "requests_resumed_seconds": self.since_finding(self.requests_resumed_at),
            "step_committed_seconds": self.since_finding(self.step_committed_at),
            "serving_seconds": took.finding_to_serving,
            "resolved_seconds": self.since_finding(self.resolved_at),
            "verified_seconds": took.finding_to_verified,
            "closed_seconds": took.opening_to_close,
            "durations": took.words,
            "action": str(plan.action) if plan else None,
            "plan": plan.because if plan else "",
            "plan_targets": [f"{t.replica}#{t.incarnation}" for t in plan.targets] if plan else [],
            "also_hit": list(plan.also_hit) if plan else [],
            "num_plans": len(incident.attempts),
            "held": [because for a in incident.attempts for because in a.held_because],
            "action_failed": [a.failed_because for a in incident.failures],
            "replacements": [{name: getattr(r, name) for name in REPLACEMENT_FIELDS} for r in self.replacements],
            "verified": incident.verified_because,
            "outcome": str(incident.outcome or "open"),
            "closed_because": incident.because,
            "tokens_kept": self.tokens_kept,
            "tokens_lost": self.tokens_lost,
            "steps_lost": self.steps_lost,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedIncidents:
    summaries: tuple[IncidentSummary, ...] = ()
    missed: tuple[InjectedFault, ...] = ()
    false_alarms: tuple[str, ...] = ()  # incident ids
    away: tuple[AwayTime, ...] = ()


def summarize_incidents(
    events: Sequence[Event],
    known: Mapping[Key, IncarnationRecord],
    faults: Sequence[InjectedFault],
    steps_undone: Mapping[int, float] | None = None,
    incidents: Iterable[Incident] | None = None,
) -> MatchedIncidents:
    """All incidents with their faults and times.

    `faults`: those of rolecall's own processes belong to no incident, and one that tells of them is no false alarm.
    `steps_undone`: optimizer step -> wall time at which its groups were marked undone (from the ledger). `incidents`:
    if they are known; else they come from `events` too.
    """
    if incidents is None:
        incidents = fold(events, strict=False).values()
    helpers = [f for f in faults if f.of_helper]
    found, missed, alarms = _join(
        [IncidentSummary(incident=i) for i in incidents], [f for f in faults if not f.of_helper]
    )
    by_id = {s.incident.incident_id: s.incident for s in found}
    false_alarms = [which for which in alarms if not any(_tells_of(by_id[which], helper) for helper in helpers)]
    work = _Work(events)
    summaries = [
        _work_lost(
            replace(s, replacements=_replacements(s.incident, known), restarts=_restarts(s.incident, known)),
            work,
            steps_undone or {},
        )
        for s in found
    ]
    return MatchedIncidents(
        summaries=tuple(summaries),
        missed=tuple(missed),
        false_alarms=tuple(false_alarms),
        away=away_times(events),
    )


def away_times(events: Iterable[Event]) -> tuple[AwayTime, ...]:
    replicas = AwayReplicas()
    over = [away for e in events for away in replicas.take(e)]
    return (*over, *replicas.open.values())


def named_by_plans(events: Iterable[Event]) -> frozenset[Key]:
    """All incarnations that a started plan named, or that were there when the whole run was started again."""
    named: set[Key] = set()
    begun: set[Key] = set()
    for event in events:
        if isinstance(event.payload, ReplicaStarting | ReplicaReady):
            begun.add((event.payload.replica, event.payload.incarnation))
        if isinstance(event.payload, ComponentRestarted) and event.payload.continues_run:
            named |= begun
        if isinstance(event.payload, ActionStarted):
            plan = event.payload.plan
            named |= {(t.replica, t.incarnation) for t in (*plan.targets, *plan.lent)}
    return frozenset(named)


def _names(incident: Incident, fault: InjectedFault) -> bool:
    for suspect in incident.suspects:
        process = suspect.process
        if process is not None and fault.pid and len(fault.hit) == 1:
            if (process.pid, process.start_ticks) == (fault.pid, fault.start_ticks):
                return True
            continue
        same = suspect.replica in fault.hit or (not suspect.replica and suspect.node == (fault.node or fault.target))
        if same and (None in (suspect.incarnation, fault.incarnation) or suspect.incarnation == fault.incarnation):
            return True
    return False


def _join(
    summaries: Sequence[IncidentSummary], faults: Sequence[InjectedFault]
) -> tuple[list[IncidentSummary], list[InjectedFault], list[str]]:
    """Summaries with their faults, the faults that no incident belongs to, and the ids of false alarms."""
    by_id = {s.incident.incident_id: s for s in summaries}
    free = [s.incident.incident_id for s in sorted(summaries, key=lambda s: s.detected_at)]
    left = list(faults)

    def join(right: bool) -> None:
        # Of two faults of one process the later one goes first: what it caused is not the earlier one's.
        for fault in left[::-1] if right else list(left):
            fitting = list[str]()
            for which in free:
                summary = by_id[which]
                soon = summary.incident.opened_at - fault.injected_at < WRONG_NAME_SECONDS
                fits = _names(summary.incident, fault) if right else soon
                if fits and summary.detected_at - fault.injected_at >= -CLOCK_SLACK_SECONDS:
                    fitting.append(which)
            if not fitting:
                continue
            repaired = [w for w in fitting if by_id[w].incident.outcome is not IncidentOutcome.TOLERATED]
            which = repaired[0] if right and repaired else fitting[0]
            by_id[which] = replace(by_id[which], fault=fault, diagnosed_correctly=right)
            free[:] = [w for w in free if w not in fitting[: fitting.index(which) + 1]]
            left.remove(fault)

    join(right=True)
    for fault in list(left):
        for which, summary in by_id.items():
            if _affects_replacement(summary.incident, fault):
                by_id[which] = replace(summary, further_faults=(*summary.further_faults, fault))
                left.remove(fault)
                break
    join(right=False)
    # An operator request is not an alarm, nor one more incident of a fault that hit several: a node and its replicas.
    alarms = [
        which
        for which in free
        if not by_id[which].incident.requested_by_operator and not any(_is_of(by_id[which], f) for f in faults)
    ]
    return list(by_id.values()), left, alarms


def _is_of(summary: IncidentSummary, fault: InjectedFault) -> bool:
    """Whether an incident is one of several that a fault of several replicas opened."""
    since = summary.incident.opened_at - fault.injected_at
    soon = -CLOCK_SLACK_SECONDS <= since < WRONG_NAME_SECONDS
    return len(fault.hit) > 1 and soon and _names(summary.incident, fault)


def _tells_of(incident: Incident, helper: InjectedFault) -> bool:
    """Whether an incident says that this agent does not answer: it takes a few seconds to start on a busy machine."""
    since = incident.opened_at - helper.injected_at
    is_control_plane = incident.diagnosis.fault_class is FaultClass.CONTROL_PLANE
    return is_control_plane and -CLOCK_SLACK_SECONDS <= since < WRONG_NAME_SECONDS and _names(incident, helper)


def _affects_replacement(incident: Incident, fault: InjectedFault) -> bool:
    """Whether a fault hit a replacement that the incident had planned, while the incident was open."""
    during = incident.opened_at <= fault.injected_at <= (incident.closed_at or math.inf)
    targets = {(t.replica, t.incarnation) for a in incident.attempts for t in a.plan.targets}
    return during and len(fault.hit) == 1 and (fault.hit[0], fault.incarnation) in targets


def _replacements(incident: Incident, known: Mapping[Key, IncarnationRecord]) -> tuple[IncarnationRecord, ...]:
    if incident.attempt is None or incident.action_started_at is None:
        return ()
    records = (known.get((t.replica, t.incarnation + 1)) for t in incident.attempt.plan.targets)
    return tuple(record for record in records if record is not None)


def _restarts(incident: Incident, known: Mapping[Key, IncarnationRecord]) -> tuple[AwayTime, ...]:
    """Of every restart that was begun, also of one that failed: most of what it took down serves again."""
    begun = [a for a in incident.attempts if a.started_at is not None]
    found = []
    for number, attempt in enumerate(begun):
        for target in attempt.plan.targets if attempt.plan.action.is_restart else ():
            record = known.get((target.replica, target.incarnation + 1))
            later = [a for a in begun[number + 1 :] if target.replica in {t.replica for t in a.plan.targets}]
            until = record.serving_at if record is not None else incident.closed_at
            if until is None and later:
                until = later[0].started_at
            elif until is None:  # another incident may have replaced it
                newer = [r for (who, n), r in known.items() if who == target.replica and n > target.incarnation]
                until = min((r.serving_at for r in newer if r.serving_at is not None), default=None)
            found.append(
                AwayTime(
                    replica=str(target.replica),
                    incarnation=target.incarnation,
                    since=attempt.started_at or 0.0,
                    until=until,
                    incident_id=incident.incident_id,
                    by_restart=True,
                )
            )
    return tuple(found)


class _Work:
    """Work events by time, so that each incident reads only its own time span."""

    def __init__(self, events: Iterable[Event]) -> None:
        kinds = (_K.REQUESTS_REASSIGNED, _K.STEP_INTERRUPTED, _K.STEP_COMMITTED)
        self._events = sorted((e for e in events if e.kind in kinds), key=lambda e: e.wall_at)
        self._times = [e.wall_at for e in self._events]

    def between(self, since: float, until: float) -> list[Event]:
        """Both ends included, in journal order."""
        found = self._events[bisect_left(self._times, since) : bisect_right(self._times, until)]
        return sorted(found, key=lambda e: e.seq)


def _work_lost(summary: IncidentSummary, work: _Work, steps_undone: Mapping[int, float]) -> IncidentSummary:
    """Cost of the fault: tokens, steps, and when the interrupted work continued."""
    suspects = summary.incident.diagnosis.suspects
    affected = {s.replica for s in suspects if s.replica} | summary.affected
    affected |= summary.partners.keys() | {away.replica for away in summary.restarts}
    affected |= {str(t.replica) for a in summary.incident.attempts if a.started_at for t in a.plan.lent}
    since = summary.began_at - CLOCK_SLACK_SECONDS
    until = summary.ends_at if summary.ends_at is not None else math.inf
    during = work.between(since, until)
    named = {(s.replica, s.incarnation) for s in suspects}
    moved = [
        (e.wall_at, e.payload)
        for e in during
        if isinstance(e.payload, RequestsReassigned) and _moved_from(e.payload, affected, named)
    ]
    return replace(
        summary,
        requests_resumed_at=max((at for at, _ in moved), default=None),
        tokens_kept=sum(m.tokens_kept for _, m in moved),
        tokens_lost=sum(m.tokens_lost for _, m in moved),
        steps_lost=sum(since <= at <= until for at in steps_undone.values()),
        step_committed_at=_step_committed_at(during, affected, summary.detected_at),
    )


def _moved_from(moved: RequestsReassigned, affected: set[str], named: set[tuple[str, int | None]]) -> bool:
    """Whether requests were moved away from one of these replicas, matching the named incarnation if both are known."""
    who, incarnation = moved.from_replica, moved.from_incarnation
    others = {i for r, i in named if r == who} - {None}
    return who in affected and (incarnation is None or not others or incarnation in others)


def _step_committed_at(during: Sequence[Event], affected: set[str], detected_at: float) -> float | None:
    """When the interrupted step was committed; if that is not recorded, the first commit after the finding."""
    if not any(r.startswith("trainer/") for r in affected):
        return None
    interrupted = next(((e.seq, e.payload.step) for e in during if isinstance(e.payload, StepInterrupted)), None)
    commits = [(e.seq, e.wall_at, e.payload.step) for e in during if isinstance(e.payload, StepCommitted)]
    if interrupted is not None:
        return next((at for seq, at, step in commits if seq > interrupted[0] and step == interrupted[1]), None)
    return next((at for _, at, _ in commits if at >= detected_at), None)
