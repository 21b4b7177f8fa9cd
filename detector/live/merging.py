"""Merges findings of panels and dumps into diagnoses: one per fault, cause before symptom, as early as possible.

Rules, in order:
  findings of one node and one fault class within `SAME_FAULT_SECONDS` of each other are one fault, whichever rank or
  GPU they name; the earliest counts. Flight Recorder dumps may lack role and node; for them, equal ranks count as equal
  nodes;
  a slowdown of nodes named by an earlier fault is its consequence (`FaultSpec.causes_slowness`);
  a `cannot_tell` is dropped once another finding has named one of its nodes.
Later findings never withdraw or change a diagnosis, so live and offline runs give the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rolecall.core.diagnosis import Diagnosis, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.detector.live.fusion import to_diagnosis

SAME_FAULT_SECONDS = 600.0
"""Time within which detectors report the same fault: the slowest takes a few minutes longer than the fastest."""


@dataclass(slots=True)
class Merger:
    """Findings must be added in order of `detected_at`."""

    told: list[Finding] = field(default_factory=list)
    last_at: list[float] = field(default_factory=list)  # per entry of `told`: time of its newest finding

    def add(self, f: Finding) -> Diagnosis | None:
        """The new diagnosis; None if this fault, or one that explains it, was reported before."""
        for i, first in enumerate(self.told):
            if _same(first, f) and f.detected_at - self.last_at[i] <= SAME_FAULT_SECONDS:
                self.last_at[i] = f.detected_at
                return None
        explained = any(
            at <= f.detected_at <= at + SAME_FAULT_SECONDS and _explains(first, f)
            for first, at in zip(self.told, self.last_at, strict=True)
        )
        if explained:
            return None
        self.told.append(f)
        self.last_at.append(f.detected_at)
        return to_diagnosis(f)


def merged(findings: Sequence[Finding]) -> list[Diagnosis]:
    """All diagnoses of these findings, by `detected_at`."""
    merger = Merger()
    # At equal times causes come first.
    ordered = sorted(
        findings, key=lambda f: (f.detected_at, not f.fault_class.spec.causes_slowness, f.detector, _nodes(f))
    )
    return [d for f in ordered if (d := merger.add(f)) is not None]


def _nodes(f: Finding) -> tuple[str, ...]:
    return tuple(sorted({s.node for s in f.suspects}))


def _same(first: Finding, f: Finding) -> bool:
    alike = first.fault_class == f.fault_class and first.about == f.about
    return alike and (_nodes(first) == _nodes(f) or _same_ranks(first.suspects, f.suspects))


def _same_ranks(first: tuple[Suspect, ...], others: tuple[Suspect, ...]) -> bool:
    """Whether both name the same ranks of one job. A pair matches if the nodes are equal, or if one of the two has
    neither role nor replica."""
    mine, theirs = {s.rank: s for s in first}, {s.rank: s for s in others}
    if not mine or None in mine or mine.keys() != theirs.keys() or len(mine) < max(len(first), len(others)):
        return False  # no rank, unknown ranks, other ranks, or ranks numbered per node
    pairs = [(s, theirs[rank]) for rank, s in mine.items()]
    return all(a.node == b.node or any(not s.role and not s.replica for s in (a, b)) for a, b in pairs)


def _explains(cause: Finding, f: Finding) -> bool:
    """Whether the earlier finding `cause` explains `f`."""
    if f.fault_class == FaultClass.SLOW:
        return cause.fault_class.spec.causes_slowness and set(_nodes(f)) <= set(_nodes(cause))
    if f.fault_class == FaultClass.CANNOT_TELL:
        return cause.fault_class != FaultClass.CANNOT_TELL and bool(set(_nodes(f)) & set(_nodes(cause)))
    return False
