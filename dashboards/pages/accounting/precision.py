"""Diagnosis precision on this cluster, from operator reviews. Pure.

Precision is the share of reviewed diagnoses that were right, with the 95 % interval of Wilson (1927), which remains
valid for few reviews and when all of them were right.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolecall.core.faults import FAULTS
from rolecall.recovery.incidents.incident import Incident

Z_95 = 1.959964
FEW = 10
"""Fewer reviews than this say little: seven right of seven are compatible with any precision above 65 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    name: str
    num_right: int
    num_marked: int
    num_unmarked: int
    low: float | None
    high: float | None

    @property
    def ratio(self) -> float | None:
        return self.num_right / self.num_marked if self.num_marked else None

    @property
    def sentence(self) -> str:
        """The precision in a sentence."""
        if self.ratio is None or self.low is None or self.high is None:
            return "No diagnosis has been reviewed yet."
        text = f"{self.num_right} of {self.num_marked} reviewed diagnoses were right: {self.ratio:.0%}"
        text += f" (95 % interval {self.low:.0%} to {self.high:.0%})"
        return f"{text}; too few reviews for a precise estimate" if self.num_marked < FEW else text


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSummary:
    of_all: Precision
    by_class: tuple[Precision, ...]
    by_detector: tuple[Precision, ...]


def wilson(num_right: int, num: int) -> tuple[float, float] | None:
    """Confidence interval of a share, 0..1; None without data."""
    if num <= 0:
        return None
    p, z2 = num_right / num, Z_95 * Z_95
    middle = (p + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 / (1 + z2 / num) * math.sqrt(p * (1 - p) / num + z2 / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def reviewable(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    """Incidents with a diagnosis by detectors, newest first, without operator requests."""
    return tuple(sorted((i for i in incidents if not i.requested_by_operator), key=lambda i: i.opened_at, reverse=True))


def precision_summary(incidents: Iterable[Incident]) -> PrecisionSummary:
    """A diagnosis by two detectors counts for both. The fault class is the current one."""
    found = reviewable(incidents)
    classes: dict[str, list[Incident]] = {}
    detectors: dict[str, list[Incident]] = {}
    for i in found:
        classes.setdefault(str(i.diagnosis.fault_class), []).append(i)
        for name in i.diagnosis.detectors or ("unknown",):
            detectors.setdefault(name, []).append(i)
    order = [str(c) for c in FAULTS]
    return PrecisionSummary(
        of_all=_precision("all", found),
        by_class=tuple(_precision(n, classes[n]) for n in sorted(classes, key=order.index)),
        by_detector=tuple(_precision(n, detectors[n]) for n in sorted(detectors)),
    )


def _precision(name: str, incidents: Sequence[Incident]) -> Precision:
    marked = [i.mark for i in incidents if i.mark is not None]
    right = sum(m.right for m in marked)
    low, high = wilson(right, len(marked)) or (None, None)
    return Precision(
        name=name,
        num_right=right,
        num_marked=len(marked),
        num_unmarked=len(incidents) - len(marked),
        low=low,
        high=high,
    )
