"""Findings of whole recordings and dumps become diagnoses: one per fault, cause before symptom.

Rules, in order:
  findings of one node and one class of evidence that lie within `SAME_FAULT_SECONDS` of each other are one fault,
  whatever rank or GPU of it they name; the earliest says when and why, the others add evidence;
  a slowness of a node that was named for a hang or crash before is its consequence;
  a `cannot_tell` falls when something that could tell has named one of its suspects.
What was said at a time is never taken back by what comes later.
"""

from collections.abc import Sequence
from dataclasses import replace

from rolecall.core.diagnosis import Diagnosis, Evidence, FaultClass, Finding
from rolecall.detector.fusion import to_diagnosis

SAME_FAULT_SECONDS = 600.0
"""Detectors of one fault speak this close together: the slowest needs a few minutes more than the fastest."""
NUM_EVIDENCE_MAX = 12
CAUSES = frozenset({FaultClass.HANG, FaultClass.CRASH, FaultClass.NODE_LOST, FaultClass.NETWORK, FaultClass.USER_CODE})


def merged(findings: Sequence[Finding]) -> list[Diagnosis]:
    """Diagnoses by `detected_at`. The verdict at a time does not change what was said before it."""
    faults: list[list[Finding]] = []
    for f in sorted(findings, key=lambda f: (f.detected_at, f.detector, _nodes(f))):
        for fault in faults:
            if _same(fault, f):
                fault.append(f)
                break
        else:
            faults.append([f])
    kept = [_one(fault) for fault in faults]
    return [to_diagnosis(f) for f in kept if not _explained(f, kept)]


def _nodes(f: Finding) -> tuple[str, ...]:
    return tuple(sorted({s.node for s in f.suspects}))


def _same(fault: Sequence[Finding], f: Finding) -> bool:
    first = fault[0]
    return (
        first.fault_class == f.fault_class
        and _nodes(first) == _nodes(f)
        and first.about == f.about
        and f.detected_at - max(g.detected_at for g in fault) <= SAME_FAULT_SECONDS
    )


def _one(fault: Sequence[Finding]) -> Finding:
    first, *later = fault
    evidence: dict[tuple[str, str], Evidence] = {(e.kind, e.text): e for f in fault for e in f.evidence}
    if not later:
        return first
    return replace(first, evidence=tuple(evidence.values())[:NUM_EVIDENCE_MAX])


def _explained(f: Finding, others: Sequence[Finding]) -> bool:
    """Whether another fault names the cause of this one."""
    if f.fault_class not in (FaultClass.SLOW, FaultClass.CANNOT_TELL):
        return False
    for other in others:
        if other is f or not 0 <= f.detected_at - other.detected_at <= SAME_FAULT_SECONDS:
            continue
        shared = set(_nodes(other)) & set(_nodes(f))
        if f.fault_class == FaultClass.SLOW and other.fault_class in CAUSES and set(_nodes(f)) <= set(_nodes(other)):
            return True
        if f.fault_class == FaultClass.CANNOT_TELL and other.fault_class != FaultClass.CANNOT_TELL and shared:
            return True
    return False
