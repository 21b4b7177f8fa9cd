"""How detectors word their findings: one suspect from a subject, one finding from its evidence."""

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.live.subject import MonitoredProcess

SETTLE = "settle"
"""Evidence of this kind says what would settle a `cannot_tell`."""
ADVISES = "advice"
"""Evidence of this kind says what helps, where more is known than the class of the fault."""
GAIN = "slow_ratio"
"""Evidence of this kind holds `ratio`: how many times slower than its peers the suspect works."""

EXIT = "exit"
"""Evidence of this kind says how a process ended; `signal` among its values where one ended it, `oom` where that was the
kernel for want of memory."""

OF_GPU = "gpu"
"""Evidence of this kind says which GPU a suspect uses, and how its values compare with those of peers."""

PANEL = "panel:"
"""Names of detectors that begin with this look at panels of metrics: they tell that a machine changed, not what ails it."""


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


def settles(text: str) -> Evidence:
    return Evidence(kind=SETTLE, text=text)
