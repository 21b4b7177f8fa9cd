"""Replays an incident from its stored inputs: each plan from its policy input, the diagnosis from its telemetry window,
and the diagnosis with other detector thresholds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import IncidentOpened, PlanCreated
from rolecall.core.journal.store import canonical
from rolecall.core.text import plain
from rolecall.recovery.operators.queries import decided_then
from rolecall.recovery.policy import PolicyInput, decide

K = EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """`same`: None if nothing that could be replayed is stored."""

    same: bool | None
    lines: tuple[str, ...]


def replay(events: Sequence[Event], window: Mapping[str, Any] | None) -> ReplayResult:
    """Replays from the incident's events and the telemetry window of its diagnosis."""
    plans = [_plan(e) for e in events if e.kind is K.PLAN_CREATED]
    results = [*plans, _diagnosis(events, window)]
    known = [same for same, _ in results if same is not None]
    return ReplayResult(same=all(known) if known else None, lines=tuple(plain(line, 1000) for _, line in results))


def _plan(event: Event) -> tuple[bool | None, str]:
    try:
        policy_input = PolicyInput.from_dict(dict(event.as_(PlanCreated).question))
    except (KeyError, TypeError, ValueError) as error:
        return None, f"{event.event_id}: the policy input of this plan cannot be read ({type(error).__name__}: {error})"
    again = decide(policy_input).to_dict()
    same = canonical(again) == canonical(decided_then(event.as_(PlanCreated)))
    verdict = "same plan" if same else "DIFFERENT plan"
    return same, f"{event.event_id}: {verdict}, {again['plan']['action']}, because {again['plan']['because']}"


def _diagnosis(events: Sequence[Event], window: Mapping[str, Any] | None) -> tuple[bool | None, str]:
    if window is None:
        return None, "no telemetry window is stored, so the diagnosis cannot be replayed"
    try:
        from rolecall.detector.live.engine import LiveDetector
    except ImportError as e:
        return None, f"the diagnosis cannot be replayed on this machine: {e}"
    try:
        first = next(e for e in events if e.kind is K.INCIDENT_OPENED)
        opened = first.as_(IncidentOpened).diagnosis
        replayed = {d.key: d for diagnoses in LiveDetector.replay_window(window) for d in diagnoses}
    except (StopIteration, KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        return None, f"the stored window cannot be read ({type(e).__name__}: {e})"
    again = replayed.get(opened.key)
    if again is None:
        return False, "replaying the stored window does not reproduce this diagnosis"
    return True, f"same diagnosis from the stored window: {again.because}"


# --- thresholds -------------------------------------------------------------------------------------------------------

BISECTIONS = 8
FACTOR_MAX = 16.0
"""Largest factor by which a setting is raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdBoundary:
    """Neighbouring values of a setting with and without the diagnosis in this window."""

    setting: str
    now: float
    detected_at: float
    undetected_at: float | None
    """None: detected even at the largest value that was tried."""
    text: str


def threshold_boundary(window: Mapping[str, Any], diagnosis: Diagnosis) -> ThresholdBoundary | str:
    """The boundary, or the reason why there is none."""
    threshold = diagnosis.fault_class.spec.threshold
    if threshold is None:
        return f"No detector threshold decides about {str(diagnosis.fault_class).replace('_', ' ')}."
    setting, phrase = threshold.setting, threshold.words
    try:
        now = float(window["config"][setting])
        if not _is_diagnosed(window, diagnosis, setting, now):
            return "Replaying the stored window does not reproduce this diagnosis."
        low, high = now, now * FACTOR_MAX
        if _is_diagnosed(window, diagnosis, setting, high):
            text = (
                f"With {phrase.format(high)} (configured: {now:.3g}) the fault would still have been detected in "
                f"this window."
            )
            return ThresholdBoundary(setting=setting, now=now, detected_at=high, undetected_at=None, text=text)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _is_diagnosed(window, diagnosis, setting, middle) else (low, middle)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        return plain(f"The stored window cannot be read ({type(e).__name__}: {e}).", 300)
    text = f"With {phrase.format(high)} (configured: {now:.3g}) the fault would not have been detected in this window."
    if low > now:
        text += f" With {low:.3g} it would have been."
    return ThresholdBoundary(setting=setting, now=now, detected_at=low, undetected_at=high, text=text)


def _is_diagnosed(window: Mapping[str, Any], diagnosis: Diagnosis, setting: str, value: float) -> bool:
    """Whether this diagnosis, or one of the same fault, is made with that setting."""
    from rolecall.detector.live.engine import LiveDetector

    changed = {**window, "config": {**window["config"], setting: value}}
    return any(found.key == diagnosis.key for diagnoses in LiveDetector.replay_window(changed) for found in diagnoses)
