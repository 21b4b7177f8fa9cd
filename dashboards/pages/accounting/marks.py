"""How often a diagnosis is right on this cluster, as its people marked them. Pure.

Precision is the share of marked diagnoses that were right, with the interval of Wilson (1927) at 95 %: it stays honest when
few are marked, and when all of them were right.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolecall.core.faults import FAULTS
from rolecall.recovery.incidents.incident import Incident

Z_95 = 1.959964
FEW = 10
"""Fewer marks than this say little: seven right of seven leave everything above 65 % possible."""


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
        """How sure one may be."""
        if self.ratio is None or self.low is None or self.high is None:
            return "no diagnosis is marked: nothing is known"
        told = f"{self.num_right} of {self.num_marked} marked diagnoses were right: {self.ratio:.0%}"
        told += f" (95 % interval {self.low:.0%} to {self.high:.0%})"
        return f"{told}; that is few to go by" if self.num_marked < FEW else told


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSummary:
    of_all: Precision
    by_class: tuple[Precision, ...]
    by_detector: tuple[Precision, ...]


def wilson(num_right: int, num: int) -> tuple[float, float] | None:
    """Interval of a share, 0..1; None of nothing."""
    if num <= 0:
        return None
    p, z2 = num_right / num, Z_95 * Z_95
    middle = (p + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 / (1 + z2 / num) * math.sqrt(p * (1 - p) / num + z2 / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def markable(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    """What detectors said, newest first: a request of a person is no diagnosis."""
    return tuple(sorted((i for i in incidents if not i.requested_by_operator), key=lambda i: i.opened_at, reverse=True))


def marks(incidents: Iterable[Incident]) -> PrecisionSummary:
    """A diagnosis of two detectors counts for both; of the class that it has by now."""
    found = markable(incidents)
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
