"""The timeline of an incident: its relevant events in order, numbered, with a text each. Pure.

The number appears in the chart and in the list below it, so the chart needs neither text nor colour.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rolecall.core.diagnosis import Plan
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.recovery import (
    ActionDone,
    ActionStarted,
    DiagnosisReviewed,
    IncidentClosed,
    IncidentOpened,
    IncidentUpdated,
    OncallPaged,
    PlanBlocked,
    PlanCreated,
    PlanProposed,
)
from rolecall.core.journal.payloads.run import (
    ReplicaLost,
    ReplicaReady,
    ReplicaStarting,
    RequestsReassigned,
    StepCommitted,
    StepInterrupted,
    WeightsAdmitted,
    WeightsRejected,
)
from rolecall.core.text import in_words, plain
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.recovery.incidents import paged_text
from rolecall.views.incidents import IncidentSummary, summarize_incidents

ENTRIES_MAX = 60
"""Longest timeline; of a longer one the middle is left out, with a note."""
WORDS_MAX = 400
CONTEXT_SHARE = 0.25
CONTEXT_SECONDS_MIN = 4.0
"""Padding before and after: share of the time from onset to last event, and minimum seconds."""
ZOOM_FROM = 3.0
"""A timeline this many times longer than the time from onset to action is first shown around the detection."""

K = EventKind


class TimelineEntryKind(StrEnum):
    """Kinds of entries; each has its own shape in the chart."""

    FAULT = "fault injected"
    ONSET = "onset"
    DETECTED = "detected"
    UPDATED = "diagnosis updated"
    EVIDENCE = "evidence"
    PLAN = "plan"
    BLOCKED = "blocked"
    OPERATOR = "operator"
    PAGED = "paging"
    ACTION = "action"
    FAILED = "failed"
    RUN = "run"
    WEIGHTS = "weights"
    VERIFIED = "verified"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """`at`: wall seconds."""

    at: float
    kind: TimelineEntryKind
    words: str
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRange:
    """The time range that is drawn. Wall seconds; zero is the onset."""

    begin: float
    end: float
    zero: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTimeline:
    moments: tuple[TimelineEntry, ...]
    whole: TimelineRange
    around: TimelineRange | None
    """The time around the detection, if the whole range is too long to show it."""
    num_left_out: int = 0


def incident_summary(material: IncidentPageInputs) -> IncidentSummary | None:
    """The incident's summary, as in the report; None: it has no readable INCIDENT_OPENED."""
    joined = summarize_incidents(material.around, material.known, material.faults, material.steps_undone)
    return next((s for s in joined.summaries if s.incident.incident_id == material.incident_id), None)


def build_timeline(material: IncidentPageInputs, summary: IncidentSummary | None) -> IncidentTimeline:
    moments = sorted(_moments(material, summary), key=lambda x: x.at)
    left_out = max(0, len(moments) - ENTRIES_MAX)
    if left_out:
        moments = [*moments[: ENTRIES_MAX // 2], *moments[-(ENTRIES_MAX - ENTRIES_MAX // 2) :]]
    known = plain(material.incident.diagnosis.because) if material.incident else ""
    numbered = tuple(replace(x, number=n, words=_shorter(x.words, known)) for n, x in enumerate(moments, start=1))
    whole, around = _axes(material, numbered)
    return IncidentTimeline(moments=numbered, whole=whole, around=around, num_left_out=left_out)


def _shorter(words: str, known: str) -> str:
    """The text without the diagnosis, which is shown at the top of the page and which most reasons repeat."""
    if known and words == known:
        return "same reason, more evidence"
    short = words.replace(known, "…") if known else words
    begun = next((n for n in range(len(known), 20, -1) if short.endswith(known[:n])), 0) if known else 0
    return plain(short[: len(short) - begun] + "…" if begun else short, WORDS_MAX)


def _axes(material: IncidentPageInputs, moments: Sequence[TimelineEntry]) -> tuple[TimelineRange, TimelineRange | None]:
    diagnosis = material.incident.first_diagnosis if material.incident else None
    zero = min(diagnosis.onset, diagnosis.detected_at) if diagnosis else (moments[0].at if moments else material.now)
    times = [x.at for x in moments] or [zero]
    last = material.now if material.is_open else max(times)
    whole = _padded(min(*times, zero), max(last, zero), zero)
    acted = next(
        (x.at for x in moments if x.kind in (TimelineEntryKind.ACTION, TimelineEntryKind.PLAN)),
        diagnosis.detected_at if diagnosis else zero,
    )
    short = _padded(min(*times, zero), max(acted, zero), zero)
    too_long = whole.end - whole.begin > ZOOM_FROM * (short.end - short.begin)
    return whole, short if too_long else None


def _padded(begin: float, end: float, zero: float) -> TimelineRange:
    context = max(CONTEXT_SECONDS_MIN, CONTEXT_SHARE * (end - begin))
    return TimelineRange(begin=begin - context, end=end + context, zero=zero)


def _moments(material: IncidentPageInputs, summary: IncidentSummary | None) -> list[TimelineEntry]:
    found: list[TimelineEntry] = []
    if material.incident is not None:
        diagnosis = material.incident.first_diagnosis
        found.append(
            TimelineEntry(
                min(diagnosis.onset, diagnosis.detected_at), TimelineEntryKind.ONSET, "estimated by the diagnosis"
            )
        )
    faults = [] if summary is None else [f for f in (summary.fault, *summary.further_faults) if f is not None]
    for fault in faults:
        how = f", {fault.how}" if fault.how else ""
        words = plain(f"{fault.kind}{how} at {', '.join(fault.hit)}", WORDS_MAX)
        found.append(TimelineEntry(fault.injected_at, TimelineEntryKind.FAULT, words))
    for event in material.events:
        made = OWN.get(event.kind)
        if made is not None:
            kind, text_of = made
            found.append(TimelineEntry(_at(event), kind, plain(text_of(event))))
    return found + _of_run(material, summary)


def _at(event: Event) -> float:
    """A fault is detected at its finding, from which all durations count; its incident is opened afterwards."""
    payload = event.payload
    return payload.diagnosis.detected_at if isinstance(payload, IncidentOpened) else event.wall_at


def _because(prefix: str) -> Callable[[Event], str]:
    return lambda e: f"{prefix}: {e.payload.reason}"


def _by(verb: str) -> Callable[[Event], str]:
    return lambda e: by_words(e.payload, verb)


def by_words(payload: Payload, verb: str) -> str:
    """Who did something to a plan or a diagnosis, and why."""
    because = f": {payload.reason}" if payload.reason else ""
    return f"{getattr(payload, 'by', '') or 'someone'} {verb}{because}"


def _plan_words(event: Event) -> str:
    payload = event.payload
    assert isinstance(payload, PlanCreated | PlanProposed | ActionStarted)
    return action_words(payload.plan)


def _updated(payload: IncidentUpdated) -> str:
    because = payload.diagnosis.because
    return f"{because} ({payload.relation})" if payload.relation else because


def action_words(plan: Plan) -> str:
    return plain(plan.words, WORDS_MAX)


OWN: Mapping[EventKind, tuple[TimelineEntryKind, Callable[[Event], str]]] = {
    K.INCIDENT_OPENED: (TimelineEntryKind.DETECTED, lambda e: _found_words(e)),
    K.INCIDENT_UPDATED: (TimelineEntryKind.UPDATED, lambda e: _updated(e.as_(IncidentUpdated))),
    K.EVIDENCE_COLLECTED: (TimelineEntryKind.EVIDENCE, _because("collected")),
    K.PLAN_CREATED: (TimelineEntryKind.PLAN, lambda e: _plan_words(e)),
    K.PLAN_BLOCKED: (
        TimelineEntryKind.BLOCKED,
        lambda e: f"by guard {in_words(e.as_(PlanBlocked).guard)}: {e.payload.reason}",
    ),
    K.PLAN_PROPOSED: (TimelineEntryKind.OPERATOR, lambda e: f"approval requested: {_plan_words(e)}"),
    K.PLAN_APPROVED: (TimelineEntryKind.OPERATOR, _by("approved it")),
    K.PLAN_REJECTED: (TimelineEntryKind.OPERATOR, _by("rejected it")),
    K.PLAN_EXPIRED: (TimelineEntryKind.OPERATOR, _because("the plan expired")),
    K.HOLD_PLACED: (TimelineEntryKind.OPERATOR, _by("put it on hold")),
    K.HOLD_LIFTED: (TimelineEntryKind.OPERATOR, _by("lifted the hold")),
    K.DIAGNOSIS_REVIEWED: (
        TimelineEntryKind.OPERATOR,
        lambda e: by_words(e.payload, f"reviewed the diagnosis as {e.as_(DiagnosisReviewed).verdict}"),
    ),
    K.ONCALL_PAGED: (
        TimelineEntryKind.PAGED,
        lambda e: f"{paged_text(e.as_(OncallPaged).channel)}: {e.payload.reason}",
    ),
    K.ACTION_STARTED: (TimelineEntryKind.ACTION, lambda e: f"started: {_plan_words(e)}"),
    K.ACTION_DONE: (
        TimelineEntryKind.ACTION,
        lambda e: f"done: {e.as_(ActionDone).result.get('because', '')}".rstrip(": "),
    ),
    K.ACTION_FAILED: (TimelineEntryKind.FAILED, lambda e: e.payload.reason),
    K.INCIDENT_VERIFIED: (TimelineEntryKind.VERIFIED, lambda e: e.payload.reason),
    K.INCIDENT_CLOSED: (TimelineEntryKind.CLOSED, lambda e: f"as {in_words(e.as_(IncidentClosed).outcome)}"),
}
"""Timeline entry of each event kind: its kind and text."""


def _found_words(event: Event) -> str:
    diagnosis = event.as_(IncidentOpened).diagnosis
    return f"{in_words(diagnosis.fault_class)} detected by {in_words(', '.join(diagnosis.detectors)) or 'unknown'}"


def affected_replicas(material: IncidentPageInputs) -> frozenset[str]:
    """Replicas that the incident names or acts on."""
    if material.incident is None:
        return frozenset()
    return frozenset({*material.incident.named, *material.incident.touched})


def _of_run(material: IncidentPageInputs, summary: IncidentSummary | None) -> list[TimelineEntry]:
    """Related events of the run: replaced replicas, weight transfers, requests, interrupted steps."""
    who, made = affected_replicas(material), material.incident.touched if material.incident else {}
    until = summary.ends_at if summary is not None else None
    since = (
        summary.began_at if summary is not None else (material.events[0].wall_at if material.events else material.now)
    )
    found = []
    interrupted: int | None = None
    proven: set[tuple[str, int]] = set()
    for event in material.around:
        if event.wall_at < since - 1.0 or (until is not None and event.wall_at > until + 1.0):
            continue
        words, kind = "", TimelineEntryKind.RUN
        match event.payload:
            case ReplicaLost() as lost if lost.replica in who:
                words = f"{lost.replica}#{lost.incarnation} is lost: {lost.because}"
            case ReplicaStarting() as starting if starting.replica in who:
                words = f"{starting.replica}#{starting.incarnation} starts on {starting.node}"
            case ReplicaReady() as ready if ready.replica in who:
                came = f", from the standby {ready.from_standby}" if ready.from_standby else ""
                words = f"{ready.replica}#{ready.incarnation} is ready on {ready.node}, pid {ready.pid}{came}"
            case WeightsAdmitted(replica=replica, incarnation=number, policy_version=version) if (
                number >= made.get(replica, sys.maxsize) and (replica, number) not in proven
            ):
                proven.add((replica, number))
                words = f"{replica}#{number} is serving: its weights (version {version}) are verified"
                kind = TimelineEntryKind.WEIGHTS
            case WeightsRejected() as rejected if rejected.replica in who:
                words = f"weights of {rejected.replica}#{rejected.incarnation} were rejected: {rejected.because}"
                kind = TimelineEntryKind.FAILED
            case RequestsReassigned() as moved if moved.from_replica in who:
                words = moved_words(moved)
            case StepInterrupted(step=step, because=because):
                interrupted = step
                words = f"step {step} is interrupted: {because}"
            case StepCommitted(step=step) if step == interrupted:
                words, interrupted = f"step {step}, which was interrupted, is committed", None
        if words and event.incident_id in (None, material.incident_id):
            found.append(TimelineEntry(event.wall_at, kind, plain(words)))
    return found + _serving(material, summary, proven)


def moved_words(moved: RequestsReassigned) -> str:
    """Reassignment of the requests of a lost engine."""
    to = ", ".join(moved.to) or "the next available engine"
    cut = f", {moved.num_cut} of them in their next window; existing tokens are trained on" if moved.num_cut else ""
    return f"{moved.num_requests} requests of {moved.from_replica} continue at {to}{cut}"


def _serving(
    material: IncidentPageInputs, summary: IncidentSummary | None, proven: set[tuple[str, int]]
) -> list[TimelineEntry]:
    """For replicas without weights to verify: when they rejoined an epoch."""
    if summary is None:
        return []
    return [
        TimelineEntry(
            replacement.serving_at,
            TimelineEntryKind.WEIGHTS,
            plain(f"{replacement.replica}#{replacement.incarnation} rejoined", WORDS_MAX),
        )
        for replacement in summary.replacements
        if replacement.serving_at is not None and (replacement.replica, replacement.incarnation) not in proven
    ]
