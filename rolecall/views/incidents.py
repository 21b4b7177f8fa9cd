"""Incidents from the journal with their times, matched with the injected faults that caused them. Pure.

The injection log is used only for evaluation; rolecall's detectors never see it. A fault is matched with the earliest
later incident that names its target, else with one that opened soon after it and names another suspect (detected, but
misattributed). An unmatched fault is missed; an unmatched incident is a false alarm.

Seconds of an incident count from the finding (`detected_at`, when the detectors were certain):

    detected_seconds           fault injected -> finding
    requests_resumed_seconds   finding -> its open requests were reassigned to other engines; 0 if done before
    step_committed_seconds     finding -> the step that the fault interrupted was committed; 0 if before
    serving_seconds            finding -> the replacement serves (rollout: with proof of its weights; trainer: in an
                               epoch)
    cured_seconds              finding -> the replacement serves AND has made progress
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolecall.core.diagnosis import Diagnosis, Plan, Suspect
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import (
    ActionFailed,
    ActionStarted,
    IncidentClosed,
    IncidentOpened,
    IncidentUpdated,
    IncidentVerified,
    PlanBlocked,
    PlanCreated,
    RequestsReassigned,
    StepCommitted,
    StepInterrupted,
)
from rolecall.views.injections import InjectedFault
from rolecall.views.lifetimes import IncarnationRecord, Key

CLOCK_SLACK_SECONDS = 0.05
"""The injector records its time after it acted: a finding may precede that time by this much."""
WRONG_NAME_SECONDS = 60.0
"""An incident that names another suspect is matched with a fault if it opened this soon after it."""

_K = EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """The new incarnation that a plan requested."""

    replica: str
    incarnation: int
    node: str
    pid: int
    from_standby: bool
    serving_at: float | None

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSummary:
    """One incident, from fault to close. Times are wall seconds, None if it did not happen."""

    incident_id: str
    opened_at: float
    diagnosis: Diagnosis
    plan: Plan | None = None
    num_plans: int = 0
    held: tuple[str, ...] = ()  # reasons of guards
    action_started_at: float | None = None
    action_failed: tuple[str, ...] = ()
    verified_at: float | None = None
    verified_because: str = ""
    closed_at: float | None = None
    outcome: str = ""  # empty while it is open
    closed_because: str = ""
    suspects: tuple[Suspect, ...] = ()  # all suspects over time: diagnoses are updated, and a replacement may fail too
    targets: frozenset[Key] = frozenset()  # all planned replacements
    fault: InjectedFault | None = None
    named_right: bool | None = None  # None without a fault
    further_faults: tuple[InjectedFault, ...] = ()  # hit this incident's own replacements: resolved with it, or not
    replacements: tuple[Replacement, ...] = ()
    requests_resumed_at: float | None = None
    step_committed_at: float | None = None
    tokens_kept: int = 0
    tokens_lost: int = 0
    steps_lost: int = 0

    @property
    def detected_at(self) -> float:
        return self.diagnosis.detected_at

    @property
    def began_at(self) -> float:
        """When the impact began: the time of the fault if known, else the onset in the diagnosis."""
        return self.fault.injected_at if self.fault else min(self.diagnosis.onset, self.detected_at)

    @property
    def serving_at(self) -> float | None:
        times = [r.serving_at for r in self.replacements]
        known = [t for t in times if t is not None]
        return max(known) if known and len(known) == len(times) else None

    @property
    def cured_at(self) -> float | None:
        """When the replacement served, once its progress is verified; without one, when progress was verified."""
        if self.verified_at is None:
            return None
        return self.verified_at if self.serving_at is None else self.serving_at

    @property
    def resolved(self) -> bool:
        return self.outcome == "resolved" and self.cured_at is not None

    @property
    def ends_at(self) -> float | None:
        """Close time; while it is open, `cured_at`."""
        return self.closed_at if self.closed_at is not None else self.cured_at

    def since_finding(self, at: float | None) -> float | None:
        return None if at is None else round(max(0.0, at - self.detected_at), 3)

    def to_dict(self) -> dict[str, Any]:
        """Layout in the report."""
        d, plan = self.diagnosis, self.plan
        return {
            "incident_id": self.incident_id,
            "fault": self.fault.to_dict() if self.fault else None,
            "further_faults": [f.to_dict() for f in self.further_faults],
            "named_right": self.named_right,
            "suspects": [suspect_name(s) for s in d.suspects],
            "fault_class": str(d.fault_class),
            "confidence": d.confidence,
            "detectors": list(d.detectors),
            "because": d.because,
            "advice": d.advice,
            "evidence": [{"kind": e.kind, "text": e.text} for e in d.evidence],
            "onset": d.onset,
            "detected_at": d.detected_at,
            "opened_at": self.opened_at,
            "serving_at": self.serving_at,
            "cured_at": self.cured_at,
            "closed_at": self.closed_at,
            "detected_seconds": round(d.detected_at - self.fault.injected_at, 3) if self.fault else None,
            "requests_resumed_seconds": self.since_finding(self.requests_resumed_at),
            "step_committed_seconds": self.since_finding(self.step_committed_at),
            "serving_seconds": self.since_finding(self.serving_at),
            "cured_seconds": self.since_finding(self.cured_at),
            "verified_seconds": self.since_finding(self.verified_at),
            "action": str(plan.action) if plan else None,
            "plan": plan.because if plan else "",
            "plan_targets": [f"{t.replica}#{t.incarnation}" for t in plan.targets] if plan else [],
            "also_hit": list(plan.also_hit) if plan else [],
            "num_plans": self.num_plans,
            "held": list(self.held),
            "action_failed": list(self.action_failed),
            "replacements": [r.to_dict() for r in self.replacements],
            "verified": self.verified_because,
            "outcome": self.outcome or "open",
            "closed_because": self.closed_because,
            "tokens_kept": self.tokens_kept,
            "tokens_lost": self.tokens_lost,
            "steps_lost": self.steps_lost,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedIncidents:
    stories: tuple[IncidentSummary, ...]
    missed: tuple[InjectedFault, ...]
    false_alarms: tuple[str, ...]  # incident ids


def suspect_name(suspect: Suspect) -> str:
    """`rollout/1#2`, or the node if no replica is named."""
    if not suspect.replica:
        return suspect.node
    return suspect.replica if suspect.incarnation is None else f"{suspect.replica}#{suspect.incarnation}"


def summarize_incidents(
    events: Sequence[Event],
    known: Mapping[Key, IncarnationRecord],
    faults: Sequence[InjectedFault],
    steps_undone: Mapping[int, float] | None = None,
) -> MatchedIncidents:
    """All incidents with their faults and times.

    `steps_undone`: optimizer step -> wall time at which its groups were marked undone (from the ledger).
    """
    stories = list(_fold(events).values())
    stories, missed, false_alarms = _join(stories, faults)
    work, finished = _Work(events), []
    for story in stories:
        told = replace(story, replacements=_replacements(story, known))
        finished.append(_work_lost(told, work, steps_undone or {}))
    return MatchedIncidents(stories=tuple(finished), missed=tuple(missed), false_alarms=tuple(false_alarms))


def named_by_plans(events: Iterable[Event]) -> frozenset[Key]:
    """All incarnations that a started plan named."""
    named: set[Key] = set()
    for event in events:
        if isinstance(event.payload, ActionStarted):
            named |= {(t.replica, t.incarnation) for t in event.payload.plan.targets}
    return frozenset(named)


def _fold(events: Iterable[Event]) -> dict[str, IncidentSummary]:
    stories: dict[str, IncidentSummary] = {}
    for event in events:
        which = event.incident_id
        if not which:
            continue
        if isinstance(event.payload, IncidentOpened):
            diagnosis = event.payload.diagnosis
            story = IncidentSummary(
                incident_id=which, opened_at=event.wall_at, diagnosis=diagnosis, suspects=diagnosis.suspects
            )
            stories.setdefault(which, story)
        elif which in stories:
            stories[which] = _after(stories[which], event)
    return stories


def _after(story: IncidentSummary, event: Event) -> IncidentSummary:
    match event.payload:
        case IncidentUpdated(diagnosis=newest):
            # Text and suspects of the newest diagnosis, time of the first.
            first = story.diagnosis
            newest = replace(newest, detected_at=first.detected_at, onset=first.onset)
            return replace(story, diagnosis=newest, suspects=(*story.suspects, *newest.suspects))
        case PlanCreated(plan=plan):
            more = {(str(t.replica), t.incarnation) for t in plan.targets}
            return replace(story, plan=plan, num_plans=story.num_plans + 1, targets=story.targets | more)
        case PlanBlocked(because=because):
            return replace(story, held=(*story.held, because))
        case ActionStarted():
            return replace(story, action_started_at=story.action_started_at or event.wall_at)
        case ActionFailed(because=because):
            return replace(story, action_failed=(*story.action_failed, because))
        case IncidentVerified(because=because):
            return replace(story, verified_at=event.wall_at, verified_because=because)
        case IncidentClosed(outcome=outcome, because=because):
            return replace(story, closed_at=event.wall_at, outcome=outcome, closed_because=because)
        case _:
            return story


def _names(story: IncidentSummary, fault: InjectedFault) -> bool:
    for suspect in story.suspects:
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
    stories: Sequence[IncidentSummary], faults: Sequence[InjectedFault]
) -> tuple[list[IncidentSummary], list[InjectedFault], list[str]]:
    told = {s.incident_id: s for s in stories}
    free = [s.incident_id for s in sorted(stories, key=lambda s: s.detected_at)]
    left = list(faults)

    def join(right: bool) -> None:
        for fault in list(left):
            for which in free:
                story = told[which]
                late = story.detected_at - fault.injected_at
                fits = _names(story, fault) if right else story.opened_at - fault.injected_at < WRONG_NAME_SECONDS
                if late >= -CLOCK_SLACK_SECONDS and fits:
                    told[which] = replace(story, fault=fault, named_right=right)
                    free.remove(which)
                    left.remove(fault)
                    break

    join(right=True)
    for fault in list(left):
        for story in told.values():
            if _affects_replacement(story, fault):
                told[story.incident_id] = replace(story, further_faults=(*story.further_faults, fault))
                left.remove(fault)
                break
    join(right=False)
    # An operator request is not an alarm.
    alarms = [w for w in free if "operator" not in told[w].diagnosis.detectors]
    return list(told.values()), left, alarms


def _affects_replacement(story: IncidentSummary, fault: InjectedFault) -> bool:
    """Whether a fault hit the replacement of the incident's first suspect while the incident was open."""
    during = story.opened_at <= fault.injected_at <= (story.closed_at or float("inf"))
    return during and len(fault.hit) == 1 and (fault.target, fault.incarnation) in story.targets


def _replacements(story: IncidentSummary, known: Mapping[Key, IncarnationRecord]) -> tuple[Replacement, ...]:
    if story.plan is None or story.action_started_at is None:
        return ()
    found = []
    for target in story.plan.targets:
        life = known.get((target.replica, target.incarnation + 1))
        if life is not None:
            found.append(
                Replacement(
                    replica=life.replica,
                    incarnation=life.incarnation,
                    node=life.node,
                    pid=life.pid,
                    from_standby=life.from_standby,
                    serving_at=life.serving_at,
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


def _work_lost(story: IncidentSummary, work: _Work, steps_undone: Mapping[int, float]) -> IncidentSummary:
    """Cost of the fault: tokens, steps, and when the interrupted work continued."""
    hurt = {s.replica for s in story.diagnosis.suspects if s.replica} | set(story.fault.hit if story.fault else ())
    since = story.began_at - CLOCK_SLACK_SECONDS
    until = story.ends_at if story.ends_at is not None else float("inf")
    during = work.between(since, until)
    named = {(s.replica, s.incarnation) for s in story.diagnosis.suspects}
    moved = [
        (e.wall_at, e.payload)
        for e in during
        if isinstance(e.payload, RequestsReassigned) and _moved_from(e.payload, hurt, named)
    ]
    undone = [step for step, at in steps_undone.items() if since <= at <= until]
    return replace(
        story,
        requests_resumed_at=max((at for at, _ in moved), default=None),
        tokens_kept=sum(m.tokens_kept for _, m in moved),
        tokens_lost=sum(m.tokens_lost for _, m in moved),
        steps_lost=len(undone),
        step_committed_at=_step_committed_at(during, hurt, story.detected_at),
    )


def _moved_from(moved: RequestsReassigned, hurt: set[str], named: set[tuple[str, int | None]]) -> bool:
    """Whether requests were moved away from one of these replicas, matching the named incarnation if both are known."""
    who, incarnation = moved.from_replica, moved.from_incarnation
    others = {i for r, i in named if r == who} - {None}
    return who in hurt and (incarnation is None or not others or incarnation in others)


def _step_committed_at(during: Sequence[Event], hurt: set[str], detected_at: float) -> float | None:
    """When the interrupted step was committed; if that is not recorded, the first commit after the finding."""
    if not any(r.startswith("trainer/") for r in hurt):
        return None
    interrupted = next(((e.seq, e.payload.step) for e in during if isinstance(e.payload, StepInterrupted)), None)
    commits = [(e.seq, e.wall_at, e.payload.step) for e in during if isinstance(e.payload, StepCommitted)]
    if interrupted is not None:
        return next((at for seq, at, step in commits if seq > interrupted[0] and step == interrupted[1]), None)
    return next((at for _, at, _ in commits if at >= detected_at), None)
