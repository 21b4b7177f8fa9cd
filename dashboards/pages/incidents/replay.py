"""Decides an incident again from what is stored with it: each plan from its question, the diagnosis from its window."""

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
    """`same`: None, nothing is stored that could be decided again."""

    same: bool | None
    lines: tuple[str, ...]


def replay(events: Sequence[Event], window: Mapping[str, Any] | None) -> ReplayResult:
    """The incident's own events; the window that its diagnosis had read."""
    plans = [_plan(e) for e in events if e.kind is K.PLAN_CREATED]
    told = [*plans, _diagnosis(events, window)]
    known = [same for same, _ in told if same is not None]
    return ReplayResult(same=all(known) if known else None, lines=tuple(plain(line, 1000) for _, line in told))


def _plan(e: Event) -> tuple[bool | None, str]:
    try:
        asked = PolicyInput.from_dict(dict(e.as_(PlanCreated).question))
    except (KeyError, TypeError, ValueError) as error:
        return None, f"{e.event_id}: the question of this plan cannot be read ({type(error).__name__}: {error})"
    again = decide(asked).to_dict()
    same = canonical(again) == canonical(decided_then(e.as_(PlanCreated)))
    word = "the same plan" if same else "ANOTHER plan"
    return same, f"{e.event_id}: {word}, {again['plan']['action']}, because {again['plan']['because']}"


def _diagnosis(events: Sequence[Event], window: Mapping[str, Any] | None) -> tuple[bool | None, str]:
    if window is None:
        return None, "no window is stored with it: the diagnosis cannot be made again"
    try:
        from rolecall.detector.live.engine import LiveDetector
    except ImportError as e:
        return None, f"the diagnosis cannot be made again on this machine: {e}"
    try:
        first = next(e for e in events if e.kind is K.INCIDENT_OPENED)
        opened = first.as_(IncidentOpened).diagnosis
        standing = {d.key: d for looked in LiveDetector.replay_window(window) for d in looked}
    except (StopIteration, KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        return None, f"the stored window cannot be read ({type(e).__name__}: {e})"
    again = standing.get(opened.key)
    if again is None:
        return False, "the stored window does not give this diagnosis again"
    return True, f"diagnosed again from the stored window: {again.because}"
