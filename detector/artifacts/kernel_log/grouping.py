"""Shared by findings from kernel logs: sorting and grouping of facts, formatting of times, and finding layout."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.artifacts.kernel_log.logs import SAME_SECONDS, KernelLog, KernelLogFact

DETECTOR = "kernel-log"
ADVICE = "kernel_advice"
"""Evidence of this kind is an advice that replaces the general advice of the fault class
(`diagnosis.with_advice`): NVIDIA's action is specific, and restarting only the process would keep the GPU in
use."""
NUM_LINES_SHOWN = 8
CONFIDENCE_FATAL, CONFIDENCE = 0.95, 0.8

Fact = TypeVar("Fact")
Key = TypeVar("Key", bound=Hashable)


def in_order(logs: Sequence[KernelLog]) -> list[KernelLogFact]:
    """Facts by time; those with only seconds since boot come last. Facts that several files hold (kern.log and the
    journal) appear once."""
    seen = sorted(
        ((s, i) for i, log in enumerate(logs) for s in log.seen), key=lambda pair: (pair[0].dated, pair[0].at)
    )
    if len(logs) < 2:
        return [s for s, _ in seen]
    kept: dict[tuple[str, bool, str], tuple[float, int]] = {}
    found = []
    for s, i in seen:
        key = s.node, s.dated, s.text
        at, of = kept.get(key, (float("-inf"), i))
        if of != i and s.at - at < SAME_SECONDS:
            continue
        kept[key] = s.at, i
        found.append(s)
    return found


def of(seen: Iterable[KernelLogFact], kind: type[Fact]) -> list[tuple[KernelLogFact, Fact]]:
    return [(s, s.fact) for s in seen if isinstance(s.fact, kind)]


def grouped(
    pairs: Iterable[tuple[KernelLogFact, Fact]], key: Callable[[KernelLogFact, Fact], Key]
) -> dict[Key, list[tuple[KernelLogFact, Fact]]]:
    groups: dict[Key, list[tuple[KernelLogFact, Fact]]] = {}
    for s, fact in pairs:
        groups.setdefault(key(s, fact), []).append((s, fact))
    return groups


def times(seen: Sequence[KernelLogFact]) -> str:
    return "once" if len(seen) == 1 else f"{len(seen)} times in {span(seen[-1].at - seen[0].at)}"


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def finding(
    node: str,
    fault_class: FaultClass,
    because: str,
    seen: Sequence[KernelLogFact],
    advice: str,
    about: str,
    evidence: Sequence[Evidence] = (),
) -> Finding:
    lines = [Evidence(kind="line", text=s.text) for s in seen[:NUM_LINES_SHOWN]]
    return Finding(
        detector=DETECTOR,
        suspects=(Suspect(node=NodeId(node)),),
        fault_class=fault_class,
        onset=seen[0].at,
        detected_at=seen[0].at,
        confidence=CONFIDENCE,
        because=because,
        evidence=(*evidence, *lines, Evidence(kind=ADVICE, text=advice)),
        about=f":{about}",
    )
