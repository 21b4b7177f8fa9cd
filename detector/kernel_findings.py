"""What kernel logs tell of GPUs, switches, links, memory and the machine: one finding for each thing that is ill.

All XIDs of one GPU are one finding, named by the worst of them (then the earliest), as NVIDIA's catalogue says:
  a GPU that fell off the bus is lost, and what else it logs is the consequence;
  45 follows the XID before it, and alone means the fabric manager; 171 and 172 are details of a 48;
  154 is the driver's own verdict on what came before: its action is the advice;
  codes that are to be ignored make no finding of their own, they are remarks.
On repeats (thresholds as NVIDIA/NVSentinel publishes them): the same fatal XID in five bursts within a day is for support; a 31
twice a day on one GPU alone, or a 13 twice at one place of the chip, is for diagnostics of that GPU; on several GPUs or
at several places it is the application. A fatal error of an NVSwitch explains the NVLink errors that its node's GPUs
report beside it. Pure: facts in, findings out.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rolecall.core.diagnosis import Diagnosis, Evidence, FaultClass, Finding, Suspect
from rolecall.core.ids import NodeId
from rolecall.core.kernel_lines import (
    GpuLost,
    HardwareError,
    KernelFault,
    LinkChange,
    OomKill,
    SxidLine,
    XidLine,
    normal_pci,
    nvlink_error,
)
from rolecall.core.xid import ADVICE as XID_ADVICE
from rolecall.core.xid import RECOVERY_ADVICE, RecoveryAction, Xid, XidAction, sxid, xid
from rolecall.detector.kernel_logs import Log, Seen, time_remarks

DETECTOR = "kernel-log"
ADVICE = "kernel_advice"
"""Evidence of this kind says what to do. It becomes the diagnosis's advice in place of what is said of the whole class
(`with_advice`): NVIDIA's action is exact, and a process that is to be restarted leaves its GPU in use."""

BURST_SECONDS = 180.0
"""Lines of one code within this are one occurrence (NVSentinel)."""
REPEAT_SECONDS = 86_400.0
NUM_FATAL_BURSTS = 5
NUM_REPEATS = 2
NUM_FLAPS = 2
FLAP_SECONDS = 300.0
"""One flap of a link is tolerated, two within this are not (ByteRobust)."""
NUM_LINES_SHOWN = 8
NUM_REMARKS_MAX = 50
FELL_OFF = 79

_RANK = {
    XidAction.IGNORE: 0,
    XidAction.XID_154: 1,
    XidAction.WORKFLOW_XID_45: 1,
    XidAction.RESTART_APP: 2,
    XidAction.CHECK_UVM: 2,
    XidAction.NONE: 3,
    XidAction.UPDATE_SWFW: 4,
    XidAction.CONTACT_SUPPORT: 4,
    XidAction.CHECK_MECHANICALS: 4,
    XidAction.WORKFLOW_NVLINK_ERR: 5,
    XidAction.WORKFLOW_NVLINK5_ERR: 5,
    XidAction.RESET_GPU: 6,
    XidAction.WORKFLOW_XID_48: 6,
    XidAction.RESTART_VM: 7,
    XidAction.RESTART_BM: 8,
}
"""How bad: a reboot supersedes a reset, and this what stays with the application."""

Fact = TypeVar("Fact")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU's XIDs, oldest first. Lost without an XID, it has a 79."""

    node: str
    pci: str
    seen: tuple[tuple[Seen, XidLine], ...]
    uuid: str = ""

    @property
    def codes(self) -> dict[int, list[Seen]]:
        return {code: [s for s, _ in pairs] for code, pairs in _grouped(self.seen, lambda _, x: x.code).items()}

    @property
    def title(self) -> str:
        uuid = f" ({self.uuid})" if self.uuid else ""
        return f"GPU {self.pci}{uuid} of node {self.node}"


def diagnose(logs: Sequence[Log]) -> list[Finding]:
    """One finding for each thing that is ill."""
    seen = _in_order(logs)
    gpus = _gpus(seen, logs)
    found, explained = list[Finding](), set[tuple[str, str]]()
    for (node, switch), pairs in _grouped(_of(seen, SxidLine), lambda s, f: (s.node, f.switch)).items():
        fatal = [(s, f) for s, f in pairs if f.fatal or sxid(f.code).fatal]
        if fatal:
            victims = [g for g in gpus if g.node == node and _explained_by(g, [s.at for s, _ in fatal])]
            found.append(_switch(node, switch, fatal, victims))
            explained |= {(g.node, g.pci) for g in victims}
    num_with_31 = sum(31 in g.codes for g in gpus)
    ill = [g for g in gpus if _lead(g) is not None]
    found += [_gpu(g, num_with_31) for g in ill if (g.node, g.pci) not in explained]
    found += [_oom(node, pairs) for node, pairs in _grouped(_of(seen, OomKill), lambda s, _: s.node).items()]
    links = _grouped(_of(seen, LinkChange), lambda s, f: (s.node, f.interface))
    found += [f for (node, name), pairs in links.items() if (f := _link(node, name, pairs)) is not None]
    of_gpus = {(g.node, g.pci) for g in ill}
    uncorrected = [(s, f) for s, f in _of(seen, HardwareError) if not f.corrected and not _is_of(s, f.device, of_gpus)]
    hardware = _grouped(uncorrected, lambda s, f: (s.node, f.what))
    found += [_hardware(node, what, pairs) for (node, what), pairs in hardware.items()]
    faults = [(s, f) for s, f in _of(seen, KernelFault) if not _is_of(s, f.device, of_gpus)]
    by_what = _grouped(faults, lambda s, f: (s.node, f.what))
    return found + [_fault(node, what, pairs) for (node, what), pairs in by_what.items()]


def remarks(logs: Sequence[Log]) -> tuple[str, ...]:
    """What was seen and is no fault by itself, and what the times are worth."""
    seen, said = _in_order(logs), list[str]()
    for gpu in _gpus(seen, logs):
        if _lead(gpu) is None:
            said += [f"{gpu.title}: {_of_xid(gpu, code)}: no fault by itself" for code in gpu.codes]
    sxids = _grouped(_of(seen, SxidLine), lambda s, f: (s.node, f.switch, f.code))
    for (node, switch, code), pairs in sxids.items():
        if not sxid(code).fatal and not any(f.fatal for _, f in pairs):
            times = _times([s for s, _ in pairs])
            said.append(f"NVSwitch {switch} of node {node}: {_of_sxid(code)}, not fatal, {times}; {sxid(code).advice}")
    corrected = [(s, f) for s, f in _of(seen, HardwareError) if f.corrected]
    for (node, what), lines in _grouped(corrected, lambda s, f: (s.node, f.what)).items():
        said.append(f"node {node}: {len(lines)} line(s) of corrected hardware errors ({what})")
    for (node, name), changes in _grouped(_of(seen, LinkChange), lambda s, f: (s.node, f.interface)).items():
        if any(not f.up for _, f in changes) and _link(node, name, changes) is None:
            said.append(f"node {node}: link {name} went down and came up again: single flaps are no fault")
    if len(said) > NUM_REMARKS_MAX:
        said = [*said[:NUM_REMARKS_MAX], f"{len(said) - NUM_REMARKS_MAX:,} more of the kind"]
    return (*said, *time_remarks(logs))


def looked_at(logs: Sequence[Log]) -> str:
    """A sentence for people."""
    seen = _in_order(logs)
    num_nodes, num_xids = len({s.node for s in seen}), len(_of(seen, XidLine))
    told = (
        f"{len(seen):,} of them tell of something on {num_nodes} node(s), {num_xids:,} XID(s)" if seen else "no event"
    )
    return f"{sum(log.num_lines for log in logs):,} line(s) of the kernel, {told}"


def with_advice(d: Diagnosis) -> Diagnosis:
    """A diagnosis made of one of these findings, its advice where it belongs."""
    advice = [e.text for e in d.evidence if e.kind == ADVICE]
    if DETECTOR not in d.detectors or not advice:
        return d
    return replace(d, advice=advice[0], evidence=tuple(e for e in d.evidence if e.kind != ADVICE))


# --- sorting


def _in_order(logs: Sequence[Log]) -> list[Seen]:
    return sorted((s for log in logs for s in log.seen), key=lambda s: (s.dated, s.at))


def _of(seen: Iterable[Seen], kind: type[Fact]) -> list[tuple[Seen, Fact]]:
    return [(s, s.fact) for s in seen if isinstance(s.fact, kind)]


def _grouped(
    pairs: Iterable[tuple[Seen, Fact]], key: Callable[[Seen, Fact], Key]
) -> dict[Key, list[tuple[Seen, Fact]]]:
    groups: dict[Key, list[tuple[Seen, Fact]]] = {}
    for s, fact in pairs:
        groups.setdefault(key(s, fact), []).append((s, fact))
    return groups


def _is_of(s: Seen, device: str, gpus: set[tuple[str, str]]) -> bool:
    """Whether the device is a GPU that has a finding of its own."""
    return ":" in device and (s.node, normal_pci(device)) in gpus


def _gpus(seen: Sequence[Seen], logs: Sequence[Log]) -> list[_Gpu]:
    uuids = {key: uuid for log in logs for key, uuid in log.uuids.items()}
    lines: list[tuple[Seen, XidLine]] = []
    for s in seen:
        if isinstance(s.fact, XidLine):
            lines.append((s, s.fact))
        elif isinstance(s.fact, GpuLost):
            lines.append((s, XidLine(pci=s.fact.pci, code=FELL_OFF, text=s.text)))
    groups = _grouped(lines, lambda s, x: (s.node, x.pci))
    return [_Gpu(node, pci, tuple(p), uuids.get((node, pci), "")) for (node, pci), p in groups.items()]


def _bursts(at: Sequence[float]) -> list[float]:
    """When each occurrence began."""
    begun: list[float] = []
    last = float("-inf")
    for t in at:
        if t - last > BURST_SECONDS:
            begun.append(t)
        last = t
    return begun


def _most_in_a_day(at: Sequence[float]) -> int:
    """Occurrences within the busiest 24 hours."""
    begun = _bursts(at)
    return max((sum(a <= b < a + REPEAT_SECONDS for b in begun) for a in begun), default=0)


# --- GPUs


def _lead(gpu: _Gpu) -> int | None:
    """The code that names the finding: the worst, then the earliest. None: all are to be ignored."""
    first = {code: seen[0].at for code, seen in gpu.codes.items()}
    ranks = {code: _RANK[xid(code).immediate] for code in first}
    if 154 in ranks:
        ranks[154] = _RANK[_verdict(gpu)[0]] if len(first) == 1 else 0
    worst = max(ranks.values())
    return min((c for c, rank in ranks.items() if rank == worst), key=lambda c: first[c]) if worst else None


def _verdict(gpu: _Gpu) -> tuple[XidAction, str]:
    """What the newest 154 asks for."""
    said = [x.recovery for _, x in gpu.seen if x.recovery is not None]
    return RECOVERY_ADVICE[said[-1] if said else RecoveryAction.NONE]


def _gpu(gpu: _Gpu, num_with_31: int) -> Finding:
    lead = _lead(gpu)
    assert lead is not None
    known, codes = xid(lead), gpu.codes
    sentence, advice, fault_class = _judged(gpu, known, num_with_31)
    if lead != 154 and 154 in codes:
        action, said = _verdict(gpu)
        sentence += f"; the driver's own verdict: {action}"
        if action is not XidAction.IGNORE and _RANK.get(action, 0) >= _RANK[known.immediate]:
            advice = said
    evidence = [
        Evidence(
            kind="xid",
            text=_of_xid(gpu, code),
            values={"xid": float(code), "num_lines": float(len(seen)), "first_seconds": seen[0].at},
        )
        for code, seen in codes.items()
    ]
    evidence += [Evidence(kind="line", text=s.text) for s, _ in _chosen(gpu, lead)]
    evidence.append(Evidence(kind=ADVICE, text=advice))
    at = codes[lead][0].at
    return Finding(
        detector=DETECTOR,
        suspects=(Suspect(node=NodeId(gpu.node)),),
        fault_class=fault_class,
        onset=min(gpu.seen[0][0].at, at),
        detected_at=at,
        confidence=_CONFIDENCE_FATAL if _fatal(gpu, known) else _CONFIDENCE,
        because=f"{gpu.title}: {sentence}",
        evidence=tuple(evidence),
        about=f":{gpu.pci}",
    )


_CONFIDENCE_FATAL, _CONFIDENCE = 0.95, 0.8


def _chosen(gpu: _Gpu, lead: int) -> list[tuple[Seen, XidLine]]:
    """Lines to show: the newest of the leading code, then the first of each other."""
    of_lead = [(s, x) for s, x in gpu.seen if x.code == lead][-NUM_LINES_SHOWN // 2 :]
    others = [pairs[0] for code, pairs in _grouped(gpu.seen, lambda _, x: x.code).items() if code != lead]
    return sorted([*of_lead, *others[: NUM_LINES_SHOWN // 2]], key=lambda pair: pair[0].at)


def _fatal(gpu: _Gpu, known: Xid) -> bool:
    lines = [x for _, x in gpu.seen if x.code == known.code]
    if known.immediate is XidAction.WORKFLOW_NVLINK5_ERR and all(x.nvlink is not None for x in lines):
        return any(x.nvlink is not None and x.nvlink.fatal for x in lines)
    return known.fatal


def _judged(gpu: _Gpu, known: Xid, num_with_31: int) -> tuple[str, str, FaultClass]:
    """Sentence, advice and class of what leads."""
    codes = gpu.codes
    seen = codes[known.code]
    fatal = "fatal" if _fatal(gpu, known) else "not fatal"
    sentence = f"XID {known.code} ({known.meaning}), {fatal}, {_times(seen)}"
    advice, fault_class = known.advice, known.fault_class
    lines = [x for _, x in gpu.seen if x.code == known.code]
    if known.code == FELL_OFF:
        num_later = sum(s.at >= seen[0].at and x.code != FELL_OFF for s, x in gpu.seen)
        sentence += "; the GPU is lost" + (f", {num_later} later line(s) are the consequence" if num_later else "")
    elif known.code == 154:
        action, advice = _verdict(gpu)
        sentence += f"; the driver asks for {action}"
    elif known.code == 45:
        sentence += "; no other XID came with it"
        advice = XID_ADVICE[XidAction.RESTART_FM]
    elif known.code == 48 and codes.keys() & {63, 64}:
        advice = XID_ADVICE[XidAction.RESET_GPU]
    elif known.code == 74 and (words := ", ".join(dict.fromkeys(w for x in lines if (w := nvlink_error(x.registers))))):
        sentence += f"; its registers say: {words}"
    elif known.code == 31:
        if num_with_31 >= NUM_REPEATS:
            sentence += f"; {num_with_31} GPUs report it: it is the application"
        elif _most_in_a_day([s.at for s in seen]) >= NUM_REPEATS:
            fault_class, advice = FaultClass.GPU, "run extended diagnostics on this GPU"
            sentence += "; it came back within a day, on this GPU alone"
    elif known.code == 13:
        places = Counter(x.place for x in lines if x.place)
        if len(places) == 1 and places.total() >= NUM_REPEATS and len(_bursts([s.at for s in seen])) >= NUM_REPEATS:
            fault_class, advice = FaultClass.GPU, "run extended diagnostics on this GPU"
            sentence += f"; always at {next(iter(places))}"
        elif len(places) > 1:
            sentence += f"; at {len(places)} places of the chip: it is the application"
    if known.fatal and _most_in_a_day([s.at for s in seen]) >= NUM_FATAL_BURSTS:
        sentence += f"; {NUM_FATAL_BURSTS} or more times within a day"
        advice = XID_ADVICE[XidAction.CONTACT_SUPPORT]
    if not known.known:
        sentence += "; no catalogue that rolecall knows has it"
    return sentence, advice, fault_class


def _of_xid(gpu: _Gpu, code: int) -> str:
    """What the catalogue says of a code, and what the lines add."""
    known, lines = xid(code), [x for _, x in gpu.seen if x.code == code]
    words = [f"XID {code} {known.mnemonic}: {known.meaning}"]
    words.append(f"class {known.fault_class}")
    words.append(
        f"NVIDIA's action {known.immediate or 'none given'}, to investigate {known.investigatory or 'none given'}"
    )
    if known.second_opinion:
        words.append(f"gpud: {known.second_opinion}")
    if code == 45 and len(gpu.codes) > 1:
        words.append("follows another XID")
    if code in (171, 172) and 48 in gpu.codes:
        words.append("detail of XID 48")
    if links := sorted({x.nvlink.link for x in lines if x.nvlink is not None and x.nvlink.link is not None}):
        units = sorted({x.nvlink.unit for x in lines if x.nvlink is not None})
        words.append(f"NVLink {', '.join(map(str, links[:NUM_LINES_SHOWN]))}, {', '.join(units[:NUM_LINES_SHOWN])}")
    if victims := sorted({f"{x.name or '?'} ({x.pid})" for x in lines if x.pid is not None}):
        words.append(f"in process {', '.join(victims[:NUM_LINES_SHOWN])}")
    words.append(_times([s for s, x in gpu.seen if x.code == code]))
    return "; ".join(words)


def _times(seen: Sequence[Seen]) -> str:
    return "once" if len(seen) == 1 else f"{len(seen)} times in {_span(seen[-1].at - seen[0].at)}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


# --- switches, links, and the machine


def _explained_by(gpu: _Gpu, at: Sequence[float]) -> bool:
    """Whether it reports nothing but NVLink errors, and those beside an error of the switch."""
    codes = gpu.codes.keys() - {45, 154}
    if not codes or any(xid(c).immediate not in _OF_NVLINK for c in codes):
        return False
    return all(any(abs(s.at - t) <= BURST_SECONDS for t in at) for s, _ in gpu.seen)


_OF_NVLINK = (XidAction.WORKFLOW_NVLINK_ERR, XidAction.WORKFLOW_NVLINK5_ERR)


def _of_sxid(code: int) -> str:
    return f"SXid {code} ({sxid(code).meaning})"


def _switch(node: str, switch: int, pairs: list[tuple[Seen, SxidLine]], victims: list[_Gpu]) -> Finding:
    codes = _grouped(pairs, lambda _, f: f.code)
    worst = max(codes, key=lambda code: sxid(code).action is XidAction.RESTART_BM)
    links = sorted({f.link for _, f in pairs if f.link is not None})
    on_links = f" on link {', '.join(map(str, links[:NUM_LINES_SHOWN]))}" if links else ""
    because = f"NVSwitch {switch} of node {node}: {_of_sxid(worst)}{on_links}, fatal, {_times([s for s, _ in pairs])}"
    if victims:
        because += f"; the NVLink errors of {len(victims)} GPU(s) are the consequence"
    evidence = [Evidence(kind="sxid", text=_of_sxid(c), values={"num_lines": float(len(p))}) for c, p in codes.items()]
    evidence += [Evidence(kind="xid", text=f"{g.title}: {_of_xid(g, c)}") for g in victims for c in g.codes]
    advice = sxid(worst).advice
    if links:
        advice += "; every GPU on that link is concerned"
    return _finding(node, FaultClass.NETWORK, because, [s for s, _ in pairs], advice, f"nvswitch{switch}", evidence)


def _oom(node: str, pairs: list[tuple[Seen, OomKill]]) -> Finding:
    who = ", ".join(f"{f.name} ({f.pid}, {f.rss_bytes / (1 << 30):.1f} GiB)" for _, f in pairs[:NUM_LINES_SHOWN])
    more = f" and {len(pairs) - NUM_LINES_SHOWN} more" if len(pairs) > NUM_LINES_SHOWN else ""
    in_cgroup = all(f.of_cgroup for _, f in pairs)
    where = "its cgroup's limit was reached" if in_cgroup else "the machine was out of memory"
    because = f"node {node}: the kernel killed {who}{more}: {where}"
    advice = "raise the memory limit, or make the process need less" if in_cgroup else "place less on this node"
    return _finding(node, FaultClass.RESOURCE_EXHAUSTED, because, [s for s, _ in pairs], advice, "oom")


def _link(node: str, name: str, pairs: list[tuple[Seen, LinkChange]]) -> Finding | None:
    """Down for good, or flapping."""
    downs = [s for s, f in pairs if not f.up]
    if not downs:
        return None
    flaps = max(sum(a.at <= b.at <= a.at + FLAP_SECONDS for b in downs) for a in downs)
    if not pairs[-1][1].up:
        because = f"node {node}: link {name} went down and did not come up again"
    elif flaps >= NUM_FLAPS:
        because = f"node {node}: link {name} flaps: {flaps} times down within {FLAP_SECONDS / 60:.0f} min"
    else:
        return None
    advice = "check cable, transceiver and switch port; place nothing that needs this link on the node"
    return _finding(node, FaultClass.NETWORK, because, downs, advice, name)


_HARDWARE = {
    "machine_check": "an uncorrected machine check",
    "memory": "an uncorrected error of its memory",
    "pcie": "an uncorrected PCIe error",
    "firmware": "an uncorrected hardware error (told by the firmware)",
}


def _hardware(node: str, what: str, pairs: list[tuple[Seen, HardwareError]]) -> Finding:
    devices = ", ".join(list(dict.fromkeys(f.device for _, f in pairs if f.device))[:NUM_LINES_SHOWN])
    because = f"node {node} has {_HARDWARE[what]}{f' at {devices}' if devices else ''}, {_times([s for s, _ in pairs])}"
    advice = "place nothing on this node, and have its hardware inspected"
    return _finding(node, FaultClass.NODE_LOST, because, [s for s, _ in pairs], advice, what)


_FAULTS: dict[str, tuple[FaultClass, str, str]] = {
    "soft_lockup": (FaultClass.HANG, "a CPU is stuck in the kernel", "reboot the node"),
    "hard_lockup": (FaultClass.HANG, "a CPU is stuck and takes no interrupts", "reboot the node"),
    "hung_task": (
        FaultClass.HANG,
        "tasks wait in the kernel and cannot be killed",
        "see what they wait for: disk, NFS, driver",
    ),
    "rcu_stall": (FaultClass.HANG, "a CPU does not answer the others", "reboot the node"),
    "panic": (FaultClass.NODE_LOST, "the kernel panicked", "place nothing on this node until the cause is found"),
    "oops": (FaultClass.NODE_LOST, "the kernel failed inside", "reboot the node"),
    "segfault": (FaultClass.CRASH, "processes died of a segmentation fault", "look at the library that is named"),
    "disk_error": (FaultClass.NODE_LOST, "a disk fails", "place nothing on this node, and replace the disk"),
    "filesystem_error": (FaultClass.NODE_LOST, "a file system is damaged", "place nothing on this node, and check it"),
    "nic_fault": (FaultClass.NETWORK, "a network adapter fails", "place nothing on this node, and inspect the adapter"),
    "nic_cable": (
        FaultClass.NETWORK,
        "a cable of a network adapter is unplugged or bad",
        "check cable and transceiver",
    ),
    "pcie_link_down": (
        FaultClass.NODE_LOST,
        "a PCIe device is gone",
        "place nothing on this node, and inspect the slot",
    ),
    "cpu_throttled": (FaultClass.SLOW, "CPUs are too hot and slow themselves down", "check fans and air flow"),
    "gpu_init_failed": (FaultClass.GPU, "the driver cannot initialise a GPU", "reset the GPU, else reboot the node"),
}
"""Class, sentence and advice of each of `kernel_lines.FAULTS`."""


def _fault(node: str, what: str, pairs: list[tuple[Seen, KernelFault]]) -> Finding:
    fault_class, words, advice = _FAULTS[what]
    who = [f"{f.name} ({f.pid})" if f.pid is not None else f.device for _, f in pairs]
    places = ", ".join(list(dict.fromkeys(w for w in who if w))[:NUM_LINES_SHOWN])
    because = f"node {node}: {words}{f': {places}' if places else ''}, {_times([s for s, _ in pairs])}"
    return _finding(node, fault_class, because, [s for s, _ in pairs], advice, what)


def _finding(
    node: str,
    fault_class: FaultClass,
    because: str,
    seen: Sequence[Seen],
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
        confidence=_CONFIDENCE,
        because=because,
        evidence=(*evidence, *lines, Evidence(kind=ADVICE, text=advice)),
        about=f":{about}",
    )
