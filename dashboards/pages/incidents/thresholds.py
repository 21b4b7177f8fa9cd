"""At which threshold the detectors would not have said it: found by asking them again, over the stored window. Pure.

Each question replays the whole window with one number of the detector's configuration changed; the number at which the
diagnosis is made no more is searched for by bisection. A replay takes about a second, so this is done when asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.text import plain
from rolecall.detector.live.engine import LiveDetector

BISECTIONS = 8
FACTOR_MAX = 16.0
"""A number is raised so many times at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdBoundary:
    """`said_at`, `unsaid_at`: neighbouring values of the setting with and without the diagnosis in this window."""

    setting: str
    now: float
    said_at: float
    unsaid_at: float | None
    text: str


def edge(window: Mapping[str, Any], d: Diagnosis) -> ThresholdBoundary | str:
    """The edge, or why there is none."""
    threshold = d.fault_class.spec.threshold
    if threshold is None:
        return f"no threshold of the detectors decides of a {str(d.fault_class).replace('_', ' ')}"
    setting, words = threshold.setting, threshold.words
    try:
        now = float(window["config"][setting])
        if not _says(window, d, setting, now):
            return "the stored window does not give this diagnosis again"
        said, unsaid = now, now * FACTOR_MAX
        if _says(window, d, setting, unsaid):
            text = f"Had {words.format(unsaid)} (it was {now:.3g}): it would have been found within this window all the same."
            return ThresholdBoundary(setting=setting, now=now, said_at=unsaid, unsaid_at=None, text=text)
        for _ in range(BISECTIONS):
            middle = (said + unsaid) / 2
            said, unsaid = (middle, unsaid) if _says(window, d, setting, middle) else (said, middle)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        return plain(f"the stored window cannot be read ({type(e).__name__}: {e})", 300)
    text = f"Had {words.format(unsaid)} (it was {now:.3g}): it would not have been found within this window."
    if said > now:
        text += f" With {said:.3g} it still was."
    return ThresholdBoundary(setting=setting, now=now, said_at=said, unsaid_at=unsaid, text=text)


def _says(window: Mapping[str, Any], d: Diagnosis, setting: str, value: float) -> bool:
    """Whether this diagnosis, or one of the same fault, is made with that setting."""
    asked = {**window, "config": {**window["config"], setting: value}}
    return any(said.key == d.key for looked in LiveDetector.replay_window(asked) for said in looked)
