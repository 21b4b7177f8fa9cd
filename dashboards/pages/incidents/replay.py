"""Replays an incident from its stored inputs: each plan from its policy input, the diagnosis from its telemetry
window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def _plan(e: Event) -> tuple[bool | None, str]:
    try:
        policy_input = PolicyInput.from_dict(dict(e.as_(PlanCreated).question))
    except (KeyError, TypeError, ValueError) as error:
        return None, f"{e.event_id}: the policy input of this plan cannot be read ({type(error).__name__}: {error})"
    again = decide(policy_input).to_dict()
    same = canonical(again) == canonical(decided_then(e.as_(PlanCreated)))
    verdict = "same plan" if same else "DIFFERENT plan"
    return same, f"{e.event_id}: {verdict}, {again['plan']['action']}, because {again['plan']['because']}"


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
