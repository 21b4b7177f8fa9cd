"""An incident on one time axis: every moment that counts, in order, numbered, with its words. Pure.

The number stands in the drawing and in the list beside it, so that neither colour nor space for words is needed there.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rolecall.core.diagnosis import Plan
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import (
    ActionDone,
    DiagnosisReviewed,
    IncidentClosed,
    IncidentOpened,
    IncidentUpdated,
    Payload,
    PlanBlocked,
    ReplicaLost,
    ReplicaReady,
    ReplicaStarting,
    RequestsReassigned,
    StepCommitted,
    StepInterrupted,
    WeightsAdmitted,
    WeightsRejected,
)
from rolecall.core.text import plain
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.views.incidents import IncidentSummary, summarize_incidents
from rolecall.views.injections import InjectedFault

MARKS_MAX = 60
"""Moments of one story; of a longer one those in the middle are left out, and that is said."""
WORDS_MAX = 400
CONTEXT_SHARE = 0.25
CONTEXT_SECONDS_MIN = 4.0
"""So much of the time from onset to the last moment, and so many seconds at least, are shown before and after."""
ZOOM_FROM = 3.0
"""A story so many times longer than the time from onset to action is drawn around the finding first."""

K = EventKind


class TimelineEntryKind(StrEnum):
    """Kinds of moments; each has a shape of its own in the drawing."""

    FAULT = "fault injected"
    ONSET = "onset"
    FOUND = "finding"
    KNOWN = "more is known"
    PLAN = "decision"
    HELD = "held"
    PERSON = "a person"
    ACTION = "action"
    FAILED = "failed"
    RUN = "the run"
    PROOF = "proof"
    VERIFIED = "verified"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """`at`: wall seconds."""

    at: float
    mark: TimelineEntryKind
    words: str
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRange:
    """What of time is drawn. Wall seconds; zero is the onset."""

    begin: float
    end: float
    zero: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTimeline:
    """The whole story."""

    moments: tuple[Moment, ...]
    whole: TimelineRange
    around: TimelineRange | None
    """The time around the finding, where the whole story is so long that nothing could be seen of it."""
    num_left_out: int = 0


def story_of(m: IncidentPageInputs) -> IncidentSummary | None:
    """The incident as the report tells it; None: it cannot be told."""
    try:
        joined = summarize_incidents(m.around, m.known, m.faults, _rolled_back(m.around))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # a body that lacks what its kind must have
    return next((s for s in joined.stories if s.incident_id == m.incident_id), None)


def _rolled_back(around: Sequence[Event]) -> Mapping[int, float]:
    """Steps that were committed again: the first time was undone."""
    seen: set[int] = set()
    undone = {}
    for e in around:
        if e.kind is K.STEP_COMMITTED:
            step = e.as_(StepCommitted).step
            if step in seen:
                undone[step] = e.wall_at
            seen.add(step)
    return undone


def build_timeline(m: IncidentPageInputs, story: IncidentSummary | None) -> IncidentTimeline:
    moments = sorted(_moments(m, story), key=lambda x: x.at)
    left_out = max(0, len(moments) - MARKS_MAX)
    if left_out:
        moments = [*moments[: MARKS_MAX // 2], *moments[-(MARKS_MAX - MARKS_MAX // 2) :]]
    known = plain(m.incident.diagnosis.because) if m.incident else ""
    numbered = tuple(replace(x, number=n, words=_shorter(x.words, known)) for n, x in enumerate(moments, start=1))
    whole, around = _axes(m, numbered)
    return IncidentTimeline(moments=numbered, whole=whole, around=around, num_left_out=left_out)


def _shorter(words: str, known: str) -> str:
    """Without the diagnosis, which stands on top of the page and which every reason repeats."""
    short = words.replace(known, "…") if known else words
    begun = next((n for n in range(len(known), 20, -1) if short.endswith(known[:n])), 0) if known else 0
    return plain(short[: len(short) - begun] + "…" if begun else short, WORDS_MAX)


def _axes(m: IncidentPageInputs, moments: Sequence[Moment]) -> tuple[TimelineRange, TimelineRange | None]:
    d = m.incident.diagnosis if m.incident else None
    zero = min(d.onset, d.detected_at) if d else (moments[0].at if moments else m.now)
    times = [x.at for x in moments] or [zero]
    last = m.now if m.is_open else max(times)
    whole = _padded(min(*times, zero), max(last, zero), zero)
    acted = next(
        (x.at for x in moments if x.mark in (TimelineEntryKind.ACTION, TimelineEntryKind.PLAN)),
        d.detected_at if d else zero,
    )
    short = _padded(min(*times, zero), max(acted, zero), zero)
    too_long = whole.end - whole.begin > ZOOM_FROM * (short.end - short.begin)
    return whole, short if too_long else None


def _padded(begin: float, end: float, zero: float) -> TimelineRange:
    context = max(CONTEXT_SECONDS_MIN, CONTEXT_SHARE * (end - begin))
    return TimelineRange(begin=begin - context, end=end + context, zero=zero)


# --- moments --------------------------------------------------------------------------------------------------------


def _moments(m: IncidentPageInputs, story: IncidentSummary | None) -> list[Moment]:
    found: list[Moment] = []
    if m.incident is not None:
        d = m.incident.diagnosis
        found.append(
            Moment(at=min(d.onset, d.detected_at), mark=TimelineEntryKind.ONSET, words="as the diagnosis has it")
        )
    for fault in (*((story.fault,) if story and story.fault else ()), *(story.further_faults if story else ())):
        found.append(Moment(at=fault.injected_at, mark=TimelineEntryKind.FAULT, words=_of_fault(fault)))
    for e in m.events:
        made = OWN.get(e.kind)
        if made is not None:
            mark, words = made
            found.append(Moment(at=e.wall_at, mark=mark, words=plain(words(e))))
    return found + _of_run(m, story)


def _of_fault(fault: InjectedFault) -> str:
    how = f", {fault.how}" if fault.how else ""
    return plain(f"{fault.kind}{how} at {', '.join(fault.hit)}", WORDS_MAX)


def _by(verb: str) -> Callable[[Event], str]:
    return lambda e: by_words(e.payload, verb)


def by_words(said: Payload, verb: str) -> str:
    """Who did something to a plan or a diagnosis, and why."""
    return f"{getattr(said, 'by', '') or 'somebody'} {verb}" + (f": {said.reason}" if said.reason else "")


def _plan_words(e: Event) -> str:
    plan: Plan = e.payload.plan  # type: ignore[attr-defined]
    targets = ", ".join(f"{t.replica}#{t.incarnation}" for t in plan.targets)
    action = str(plan.action).replace("_", " ")
    return f"{action} of {targets}" if targets else action


OWN: Mapping[EventKind, tuple[TimelineEntryKind, Callable[[Event], str]]] = {
    K.INCIDENT_OPENED: (TimelineEntryKind.FOUND, lambda e: _found_words(e)),
    K.INCIDENT_UPDATED: (TimelineEntryKind.KNOWN, lambda e: e.as_(IncidentUpdated).diagnosis.because),
    K.EVIDENCE_COLLECTED: (TimelineEntryKind.KNOWN, lambda e: f"evidence came: {e.payload.reason}"),
    K.PLAN_CREATED: (TimelineEntryKind.PLAN, lambda e: _plan_words(e)),
    K.PLAN_BLOCKED: (TimelineEntryKind.HELD, lambda e: f"by the guard {e.as_(PlanBlocked).guard}: {e.payload.reason}"),
    K.PLAN_PROPOSED: (TimelineEntryKind.PERSON, lambda e: f"is asked: {_plan_words(e)}"),
    K.PLAN_APPROVED: (TimelineEntryKind.PERSON, _by("approved it")),
    K.PLAN_REJECTED: (TimelineEntryKind.PERSON, _by("said no")),
    K.PLAN_EXPIRED: (TimelineEntryKind.PERSON, lambda e: f"the proposal lapsed: {e.payload.reason}"),
    K.HOLD_PLACED: (TimelineEntryKind.PERSON, _by("put it on hold")),
    K.HOLD_LIFTED: (TimelineEntryKind.PERSON, _by("lifted the hold")),
    K.DIAGNOSIS_REVIEWED: (
        TimelineEntryKind.PERSON,
        lambda e: by_words(e.payload, f"marked the diagnosis {e.as_(DiagnosisReviewed).verdict}"),
    ),
    K.ONCALL_PAGED: (TimelineEntryKind.PERSON, lambda e: f"is called: {e.payload.reason}"),
    K.ACTION_STARTED: (TimelineEntryKind.ACTION, lambda e: f"begins: {_plan_words(e)}"),
    K.ACTION_DONE: (TimelineEntryKind.ACTION, lambda e: f"done: {e.as_(ActionDone).result.get('because', '')}"),
    K.ACTION_FAILED: (TimelineEntryKind.FAILED, lambda e: e.payload.reason),
    K.INCIDENT_VERIFIED: (TimelineEntryKind.VERIFIED, lambda e: e.payload.reason),
    K.INCIDENT_CLOSED: (TimelineEntryKind.CLOSED, lambda e: f"as {e.as_(IncidentClosed).outcome}"),
}
"""The incident's own events: what they are in the drawing, and in words."""


def _found_words(e: Event) -> str:
    diagnosis = e.as_(IncidentOpened).diagnosis
    return f"{str(diagnosis.fault_class).replace('_', ' ')} found by {', '.join(diagnosis.detectors) or 'nobody'}"


def touched(m: IncidentPageInputs) -> frozenset[str]:
    """Replicas that the incident is about."""
    if m.incident is None:
        return frozenset()
    return frozenset({*m.incident.named, *m.incident.touched})


def _of_run(m: IncidentPageInputs, story: IncidentSummary | None) -> list[Moment]:
    """What the run did that belongs to it: the replaced replicas' lives, proofs, requests, interrupted steps."""
    who, made = touched(m), m.incident.touched if m.incident else {}
    until = story.ends_at if story is not None else None
    since = story.began_at if story is not None else (m.events[0].wall_at if m.events else m.now)
    found = []
    interrupted: int | None = None
    proven: set[tuple[str, int]] = set()
    for e in m.around:
        if e.wall_at < since - 1.0 or (until is not None and e.wall_at > until + 1.0):
            continue
        words, mark = "", TimelineEntryKind.RUN
        said = e.payload
        match said:
            case ReplicaLost() if said.replica in who:
                words = f"{said.replica}#{said.incarnation} is lost: {said.because}"
            case ReplicaStarting() if said.replica in who:
                words = f"{said.replica}#{said.incarnation} starts on {said.node}"
            case ReplicaReady() if said.replica in who:
                came = f", from the standby {said.from_standby}" if said.from_standby else ""
                words = f"{said.replica}#{said.incarnation} is ready on {said.node}, pid {said.pid}{came}"
            case WeightsAdmitted(replica=replica, incarnation=number) if (
                number >= made.get(replica, sys.maxsize) and (replica, number) not in proven
            ):
                proven.add((replica, number))
                words = f"{replica}#{number} serves: its weights (version {said.policy_version}) are proven"
                mark = TimelineEntryKind.PROOF
            case WeightsRejected() if said.replica in who:
                words = f"weights of {said.replica}#{said.incarnation} were refused: {said.because}"
                mark = TimelineEntryKind.FAILED
            case RequestsReassigned() if said.from_replica in who:
                words = moved_words(said)
            case StepInterrupted():
                interrupted = said.step
                words = f"step {said.step} is interrupted: {said.because}"
            case StepCommitted(step=step) if step == interrupted:
                words, interrupted = f"step {step}, which was interrupted, is committed", None
            case _:
                pass
        if words and e.incident_id in (None, m.incident_id):
            found.append(Moment(at=e.wall_at, mark=mark, words=plain(words)))
    return found + _serving(m, story, proven)


def moved_words(moved: RequestsReassigned) -> str:
    """What became of the requests of an engine that was lost."""
    to = ", ".join(moved.to) or "the next that may serve"
    cut = f", {moved.num_cut} of them in their next windows: what there was is trained on" if moved.num_cut else ""
    return f"{moved.num_requests} requests of {moved.from_replica} go on at {to}{cut}"


def _serving(m: IncidentPageInputs, story: IncidentSummary | None, proven: set[tuple[str, int]]) -> list[Moment]:
    """Of a replica without weights of its own to prove: when it joined an epoch."""
    if story is None:
        return []
    return [
        Moment(
            at=r.serving_at,
            mark=TimelineEntryKind.PROOF,
            words=plain(f"{r.replica}#{r.incarnation} is a member again", WORDS_MAX),
        )
        for r in story.replacements
        if r.serving_at is not None and (r.replica, r.incarnation) not in proven
    ]
