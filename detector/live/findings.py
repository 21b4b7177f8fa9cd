"""Constructs suspects and findings of the live detector from monitored processes."""

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.live.subject import MonitoredProcess


def suspect(subject: MonitoredProcess) -> Suspect:
    return Suspect(
        node=NodeId(subject.node),
        role=subject.role,
        replica=subject.replica,
        rank=subject.rank,
        incarnation=subject.incarnation,
        process=subject.process,
    )


def finding(
    detector: str,
    suspects: list[MonitoredProcess],
    fault_class: FaultClass,
    *,
    onset: float,
    now: float,
    confidence: float,
    because: str,
    evidence: tuple[Evidence, ...] = (),
    about: str = "",
) -> Finding:
    ordered = sorted(suspects, key=lambda s: s.key)
    return Finding(
        detector=detector,
        suspects=tuple(suspect(s) for s in ordered),
        fault_class=fault_class,
        onset=min(onset, now),
        detected_at=now,
        confidence=confidence,
        because=because,
        evidence=evidence,
        about=about,
    )
