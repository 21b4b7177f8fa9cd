"""State of a detector on a panel: each machine's score against its threshold, or that it cannot tell yet.

Only for display with a diagnosis; no decision depends on it. It also shows where "nothing found" does not mean
"healthy" because no fault could have been found.
"""

import math
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import PanelShape, Tracker

Standing = tuple[NDArray[np.floating[Any]], float]
"""Scores (N,) at the last tick (NaN: unknown), and the threshold (infinite while there is none)."""


@runtime_checkable
class ScoredTracker(Protocol):
    """A tracker that exposes each machine's score and the threshold."""

    @property
    def scores(self) -> NDArray[np.floating[Any]]: ...

    @property
    def threshold(self) -> float: ...


def standing(tracker: Tracker) -> Standing | None:
    """None for a tracker without scores."""
    return (tracker.scores, tracker.threshold) if isinstance(tracker, ScoredTracker) else None


def cannot_tell(shape: PanelShape, detector: str, tracker: Tracker) -> str:
    """Why there is no verdict on this panel, and what would settle it; "" if there is one."""
    num, stands = len(shape.machines), standing(tracker)
    if num == 1:
        return f"cannot tell for {shape.name}: one machine has no peers; two more would settle it"
    if num == 2:
        return f"cannot tell which for {shape.name}: two peers that differ accuse each other; a third would settle it"
    if stands is not None and math.isinf(stands[1]):
        so_far = f"detector {detector} has not seen enough of its {num} machines to know what is usual"
        return f"cannot tell for {shape.name}: {so_far}; a longer time would settle it"
    return ""
