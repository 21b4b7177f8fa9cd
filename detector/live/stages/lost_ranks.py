"""Merges exits of several ranks of one replica into one finding, cause first.

A replica is replaced as a whole, so it has one incident. The first suspect is the rank whose node reported a hardware
fault, otherwise the first that exited: the errors of its peers are consequences. A rank on another node with an
independent fault (hardware, a signal such as SIGSEGV, the OOM killer) is a second suspect, because the replacement must
avoid both nodes. Each additional suspect changes the diagnosis key, so the diagnosis is reported again.
"""

from collections.abc import Sequence
from dataclasses import replace

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.base.findings import EXIT
from rolecall.detector.live.stages.stage import Stage, Tick

OWN_SIGNALS = frozenset({4, 7, 8, 11})
"""SIGILL, SIGBUS, SIGFPE, SIGSEGV: not sent by launchers. Excluded: SIGABRT, which comes from NCCL's watchdog, and
SIGKILL and SIGTERM, with which a launcher ends the rest of a job."""
NUM_NAMED_MAX = 8


class LostRanksStage(Stage):
    name = "lost_ranks"

    def evaluate(self, tick: Tick) -> list[Finding]:
        tick.findings = folded(tick.findings)
        return []


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """The findings with all exits of an incarnation merged at the position of the first."""
    groups: dict[tuple[str, int | None], list[Finding]] = {}
    for f in findings:
        if _is_exit(f):
            groups.setdefault((f.suspects[0].replica, f.suspects[0].incarnation), []).append(f)
    one = {id(group[0]): _one(group) for group in groups.values()}
    dropped = {id(f) for group in groups.values() for f in group[1:]}
    return [one.get(id(f), f) for f in findings if id(f) not in dropped]


def _is_exit(f: Finding) -> bool:
    alone = len(f.suspects) == 1 and bool(f.suspects[0].replica)
    is_exit = f.fault_class is FaultClass.CRASH or f.fault_class.spec.is_hardware
    return alone and is_exit and any(e.kind == EXIT for e in f.evidence)


def _one(group: Sequence[Finding]) -> Finding:
    lead, *others = sorted(group, key=lambda f: (not f.fault_class.spec.is_hardware, f.onset))
    if not others:
        return lead
    nodes, own, also = {lead.suspects[0].node}, list[Finding](), list[Finding]()
    for f in others:
        its = f.suspects[0].node
        (own if _by_itself(f) and its not in nodes else also).append(f)
        nodes |= {its} if f in own else set()
    because = "; independent second fault: ".join([lead.because, *(f.because for f in own)])
    if also:
        more = f" and {len(also) - NUM_NAMED_MAX} more" if len(also) > NUM_NAMED_MAX else ""
        because += f"; exited after it: {', '.join(map(_name, also[:NUM_NAMED_MAX]))}{more}"
    told = (e for f in also[:NUM_NAMED_MAX] for e in f.evidence if e.kind == EXIT)
    return replace(
        lead,
        suspects=(lead.suspects[0], *(f.suspects[0] for f in own)),
        because=because,
        evidence=(*lead.evidence, *(e for f in own for e in f.evidence), *told),
    )


def _by_itself(f: Finding) -> bool:
    exits: list[Evidence] = [e for e in f.evidence if e.kind == EXIT]
    signals = {int(e.values.get("signal", 0)) for e in exits}
    return f.fault_class.spec.is_hardware or bool(signals & OWN_SIGNALS) or any(e.values.get("oom") for e in exits)


def _name(f: Finding) -> str:
    s = f.suspects[0]
    return f"rank {s.rank} ({s.node})"
