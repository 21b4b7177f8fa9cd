"""The detector threshold at which a diagnosis would not have been made, found by replaying the stored window. Pure.

Each replay changes one setting of the detector's configuration; bisection finds the value at which the diagnosis
disappears. A replay takes about a second, so it runs on request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.text import plain
from rolecall.detector.live.engine import LiveDetector

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


def threshold_boundary(window: Mapping[str, Any], d: Diagnosis) -> ThresholdBoundary | str:
    """The boundary, or the reason why there is none."""
    threshold = d.fault_class.spec.threshold
    if threshold is None:
        return f"No detector threshold decides about {str(d.fault_class).replace('_', ' ')}."
    setting, phrase = threshold.setting, threshold.words
    try:
        now = float(window["config"][setting])
        if not _is_diagnosed(window, d, setting, now):
            return "Replaying the stored window does not reproduce this diagnosis."
        low, high = now, now * FACTOR_MAX
        if _is_diagnosed(window, d, setting, high):
            text = (
                f"With {phrase.format(high)} (configured: {now:.3g}) the fault would still have been detected in "
                f"this window."
            )
            return ThresholdBoundary(setting=setting, now=now, detected_at=high, undetected_at=None, text=text)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _is_diagnosed(window, d, setting, middle) else (low, middle)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        return plain(f"The stored window cannot be read ({type(e).__name__}: {e}).", 300)
    text = f"With {phrase.format(high)} (configured: {now:.3g}) the fault would not have been detected in this window."
    if low > now:
        text += f" With {low:.3g} it would have been."
    return ThresholdBoundary(setting=setting, now=now, detected_at=low, undetected_at=high, text=text)


def _is_diagnosed(window: Mapping[str, Any], d: Diagnosis, setting: str, value: float) -> bool:
    """Whether this diagnosis, or one of the same fault, is made with that setting."""
    changed = {**window, "config": {**window["config"], setting: value}}
    return any(found.key == d.key for diagnoses in LiveDetector.replay_window(changed) for found in diagnoses)
