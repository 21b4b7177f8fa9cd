"""Diagnoses GPUs, switches, links, memory and the machine from kernel logs: one finding per fault. Pure: facts in,
findings out.

An event that is not a fault by itself becomes a remark. PCIe errors of a GPU that has a finding belong to that finding.

A faulty GPU is named by its worst XID, after NVIDIA's catalog (ties: the earliest):
  a GPU that fell off the bus is lost, and its other messages are consequences;
  45 follows the XID before it, and alone points to the fabric manager; 171 and 172 are details of a 48;
  for NVLink codes the line decides: the registers of a 74, unit and status of a 144 to 150 (`formats.xid.nvlink`);
  154 is the driver's verdict on the events before it: its action is the advice;
  codes that NVIDIA marks as ignorable only make remarks.
Repeats (thresholds from NVIDIA/NVSentinel): the same fatal XID in five bursts within a day is for support; a 31 twice a
day on one GPU alone, or a 13 twice at one location on the chip, is for diagnostics of that GPU; on several GPUs or at
several locations it is the application; ECC errors of a 74 more than twice on one link are for support. A fatal error
of an NVSwitch explains simultaneous NVLink errors of its node's GPUs.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rolecall.core.diagnosis import NO_TIME, Diagnosis, Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.text import counted, node_text
from rolecall.detector.artifacts.kernel_log.logs import (
    SAME_SECONDS,
    KernelLog,
    KernelLogFact,
    time_remarks,
    with_known_zones,
)
from rolecall.formats.kernel_log.messages import HardwareError, KernelFault, KernelLinkChange, OomKill
from rolecall.formats.kernel_log.nvidia import GpuLost, SxidLine, XidLine, normal_pci
from rolecall.formats.xid.nvlink import NUM_ECC_TOLERATED, SIGNS, NvlinkRegisterError
from rolecall.formats.xid.xid import ADVICE as XID_ADVICE
from rolecall.formats.xid.xid import RECOVERY_ADVICE, RecoveryAction, Xid, XidAction, sxid, xid

DETECTOR = "kernel-log"
ADVICE = "kernel_advice"
"""Evidence of this kind is an advice that replaces the general advice of the fault class
(`diagnosis.with_advice`): NVIDIA's action is specific, and restarting only the process would keep the GPU in
use."""
F = FaultClass
NUM_LINES_SHOWN = 8
CONFIDENCE_FATAL, CONFIDENCE = 0.95, 0.8

Fact = TypeVar("Fact")
Key = TypeVar("Key", bound=Hashable)


def in_order(logs: Sequence[KernelLog]) -> list[KernelLogFact]:
    """Facts by time; those without a zone follow the others, and those with only seconds since boot come last. Facts
    that several files hold (kern.log and the journal) appear once: what one clock has of a node and text is dropped if
    a better one has it, too."""
    full = _full_names(logs)
    named = [replace(s, node=full[s.node]) if s.node in full else s for log in logs for s in log.seen]
    of_log = [i for i, log in enumerate(logs) for _ in log.seen]
    seen = sorted(zip(with_known_zones(named), of_log, strict=True), key=lambda pair: (pair[0].clock, pair[0].at))
    if len(logs) < 2:
        return [signal for signal, _ in seen]
    best: dict[tuple[str, str], int] = {}
    kept: dict[tuple[str, str], tuple[float, int]] = {}
    found = []
    for signal, i in seen:
        key = signal.node, signal.text
        if best.setdefault(key, signal.clock) != signal.clock:
            continue
        at, of = kept.get(key, (float("-inf"), i))
        if of != i and signal.at - at < SAME_SECONDS:
            continue
        kept[key] = signal.at, i
        found.append(signal)
    return found


def _full_names(logs: Sequence[KernelLog]) -> dict[str, str]:
    """The name with its domain (`gpu7.cluster`) of nodes that other lines call by the short one."""
    nodes = {s.node for log in logs for s in log.seen} | {node for log in logs for node, _ in log.uuids}
    full: dict[str, set[str]] = {}
    for name in nodes:
        full.setdefault(name.partition(".")[0], set()).add(name)
    longer = {short: names - {short} for short, names in full.items() if short in names}
    return {short: names.pop() for short, names in longer.items() if len(names) == 1}


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
    if len(seen) == 1:
        return "once"
    if not seen[0].timed or len({s.clock for s in seen}) > 1:
        return f"{len(seen)} times, over an unknown period"
    seconds = seen[-1].at - seen[0].at
    minutes = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
    return f"{len(seen)} times in {f'{max(seconds, 1):.0f} s' if seconds < 120 else minutes}"


def times_known(seen: Sequence[KernelLogFact]) -> tuple[Evidence, ...]:
    """Evidence that the log has no times for a finding."""
    return () if all(s.timed for s in seen) else (Evidence(kind=NO_TIME, text="the log has no time for it"),)


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
        evidence=(*evidence, *times_known(seen), *lines, Evidence(kind=ADVICE, text=advice)),
        about=f":{about}",
    )


BURST_SECONDS = 180.0
"""Lines with one code within this time are one occurrence (NVSentinel)."""
REPEAT_SECONDS = 86_400.0
NUM_FATAL_BURSTS = 5
NUM_REPEATS = 2
FELL_OFF = 79

_RANK = {
    XidAction.IGNORE: 0,
    XidAction.XID_154: 1,
    XidAction.WORKFLOW_XID_45: 1,
    XidAction.RESTART_APP: 2,
    XidAction.XID_154_EVAL: 2,
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
"""Severity: a reboot supersedes a reset, which supersedes an application error."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """XIDs of one GPU, oldest first, and the same by code. A GPU lost without an XID gets a 79."""

    node: str
    pci: str
    seen: tuple[tuple[KernelLogFact, XidLine], ...]
    codes: Mapping[int, list[KernelLogFact]]
    lines: Mapping[int, list[XidLine]]
    uuid: str = ""

    @property
    def title(self) -> str:
        uuid = f" ({self.uuid})" if self.uuid else ""
        return f"GPU {self.pci}{uuid} of {node_text(self.node)}"


def gpus_of(seen: Sequence[KernelLogFact], logs: Sequence[KernelLog]) -> list[Gpu]:
    full = _full_names(logs)
    uuids = {(full.get(node, node), pci): uuid for log in logs for (node, pci), uuid in log.uuids.items()}
    lines = of(seen, XidLine)
    with_xid = {(s.node, x.pci) for s, x in lines if x.code == FELL_OFF}
    for signal in seen:
        # Beside its XID 79 the driver writes another line of the same loss.
        if isinstance(signal.fact, GpuLost) and (signal.node, signal.fact.pci) not in with_xid:
            lines.append((signal, XidLine(pci=signal.fact.pci, code=FELL_OFF, text=signal.text)))
    lines.sort(key=lambda pair: (pair[0].clock, pair[0].at))
    gpus = []
    for (node, pci), pairs in grouped(lines, lambda signal, x: (signal.node, x.pci)).items():
        by_code = grouped(pairs, lambda _, x: x.code)
        codes = {code: [s for s, _ in of_code] for code, of_code in by_code.items()}
        of_codes = {code: [x for _, x in of_code] for code, of_code in by_code.items()}
        gpus.append(Gpu(node, pci, tuple(pairs), codes, of_codes, uuids.get((node, pci), "")))
    return gpus


def _bursts(seen: Sequence[KernelLogFact]) -> list[float]:
    """Start time of each occurrence. Of several clocks, of the one that has most of them."""
    begun: dict[int, list[float]] = {}
    last: dict[int, float] = {}
    for s in seen:
        if s.at - last.get(s.clock, float("-inf")) > BURST_SECONDS:
            begun.setdefault(s.clock, []).append(s.at)
        last[s.clock] = s.at
    return max(begun.values(), key=len, default=[])


def _most_in_a_day(seen: Sequence[KernelLogFact]) -> int:
    """Maximum number of occurrences within 24 hours."""
    begun = _bursts(seen)
    return max((bisect_left(begun, a + REPEAT_SECONDS) - i for i, a in enumerate(begun)), default=0)


def _worst(lines: Sequence[XidLine]) -> XidLine:
    """Of one code's lines, the first with the most severe action."""
    return max(lines, key=lambda x: (x.fatal, _RANK[x.action]))


def leading_code(gpu: Gpu) -> int | None:
    """The code that names the finding: the worst, then the earliest. None: all are ignorable."""
    first = {code: (seen[0].clock, seen[0].at) for code, seen in gpu.codes.items()}
    ranks = {code: _RANK[_worst(lines).action] for code, lines in gpu.lines.items()}
    if 154 in ranks:
        ranks[154] = _RANK[_verdict(gpu)[0]] if len(first) == 1 else 0
    worst = max(ranks.values())
    return min((c for c, rank in ranks.items() if rank == worst), key=lambda c: first[c]) if worst else None


def _verdict(gpu: Gpu) -> tuple[XidAction, str]:
    """The action that the newest 154 requests."""
    said = [x.recovery for _, x in gpu.seen if x.recovery is not None]
    return RECOVERY_ADVICE[said[-1] if said else RecoveryAction.NONE]


def gpu_finding(gpu: Gpu, num_with_31: int) -> Finding:
    lead = leading_code(gpu)
    assert lead is not None
    known, codes = xid(lead), gpu.codes
    worst = _worst(gpu.lines[lead])
    sentence, advice, fault_class = _judged(gpu, known, num_with_31)
    if lead != 154 and 154 in codes:
        action, said = _verdict(gpu)
        sentence += f"; the driver requests: {action}"
        if action is not XidAction.IGNORE and _RANK.get(action, 0) >= _RANK[worst.action]:
            advice = said
    evidence = [
        Evidence(
            kind="xid",
            text=of_xid(gpu, code),
            values={"xid": float(code), "num_lines": float(len(seen)), "first_seconds": seen[0].at},
        )
        for code, seen in codes.items()
    ]
    # The newest lines of the leading code, then the first of each other code.
    shown = codes[lead][-NUM_LINES_SHOWN // 2 :]
    shown = sorted([*shown, *[s[0] for c, s in codes.items() if c != lead][: NUM_LINES_SHOWN // 2]], key=lambda s: s.at)
    lines = [Evidence(kind="line", text=s.text) for s in shown]
    evidence += [*times_known(codes[lead]), *lines, Evidence(kind=ADVICE, text=advice)]
    at, clock = codes[lead][0].at, codes[lead][0].clock
    return Finding(
        detector=DETECTOR,
        suspects=(Suspect(node=NodeId(gpu.node)),),
        fault_class=fault_class,
        onset=min(s.at for s, _ in gpu.seen if s.clock == clock),
        detected_at=at,
        confidence=CONFIDENCE_FATAL if worst.fatal else CONFIDENCE,
        because=f"{gpu.title}: {sentence}",
        evidence=tuple(evidence),
        about=f":{gpu.pci}",
    )


def _judged(gpu: Gpu, known: Xid, num_with_31: int) -> tuple[str, str, FaultClass]:
    """Text, advice and fault class for the leading code."""
    codes = gpu.codes
    seen, lines = codes[known.code], gpu.lines[known.code]
    worst = _worst(lines)
    sentence = f"XID {known.code} ({known.meaning}), {'fatal' if worst.fatal else 'not fatal'}, {times(seen)}"
    advice, fault_class = worst.advice, known.fault_class
    if known.code == FELL_OFF:
        num_later = sum(s.at >= seen[0].at and x.code != FELL_OFF for s, x in gpu.seen)
        sentence += "; the GPU is lost" + (
            f", with {counted(num_later, 'later line')} as a consequence" if num_later else ""
        )
    elif known.code == 154:
        action, advice = _verdict(gpu)
        sentence += f"; the driver requests {action}"
    elif known.code == 45:
        sentence += "; no other XID with it"
        advice = XID_ADVICE[XidAction.RESTART_FM]
    elif known.code == 48 and codes.keys() & {63, 64}:
        advice = XID_ADVICE[XidAction.RESET_GPU]
    elif known.code == 74:
        said, advice = _registers(lines, alone=len(codes) == 1)
        sentence += said
    elif worst.nvlink is not None:
        sentence += f"; {_table(worst)}"
    elif known.code == 31:
        if num_with_31 >= NUM_REPEATS:
            sentence += f"; {num_with_31} GPUs report it: the application is the cause"
        elif _most_in_a_day(seen) >= NUM_REPEATS:
            fault_class, advice = FaultClass.GPU, "run extended diagnostics on this GPU"
            sentence += "; it recurred within a day, on this GPU alone"
    elif known.code == 13:
        places = Counter(x.place for x in lines if x.place)
        if len(places) == 1 and places.total() >= NUM_REPEATS and len(_bursts(seen)) >= NUM_REPEATS:
            fault_class, advice = FaultClass.GPU, "run extended diagnostics on this GPU"
            sentence += f"; always at {next(iter(places))}"
        elif len(places) > 1:
            sentence += f"; at {len(places)} locations on the chip: the application is the cause"
    if worst.fatal and _most_in_a_day(seen) >= NUM_FATAL_BURSTS:
        sentence += f"; {NUM_FATAL_BURSTS} or more times within a day"
        advice = XID_ADVICE[XidAction.CONTACT_SUPPORT]
    if not known.known:
        sentence += "; not in NVIDIA's catalogue"
    return sentence, advice, fault_class


def _registers(lines: Sequence[XidLine], *, alone: bool) -> tuple[str, str]:
    """Additional text for a 74, and the advice, by the worst sign and its number on that link."""
    on_links = Counter(x.link for x in lines if NvlinkRegisterError.ECC in x.nvlink_register_errors)
    found = sorted({sign for x in lines for sign in x.nvlink_register_errors}, key=list(NvlinkRegisterError).index)
    if not found:
        return "", XID_ADVICE[XidAction.WORKFLOW_NVLINK_ERR]
    weighty = [
        sign for sign in found if sign not in (NvlinkRegisterError.HARMLESS, NvlinkRegisterError.THRESHOLD)
    ] or found
    words = f"; its registers report: {', '.join(dict.fromkeys(SIGNS[sign][0] for sign in reversed(weighty)))}"
    link, times_seen = max(on_links.items(), key=lambda item: item[1], default=(None, 0))
    if times_seen > NUM_ECC_TOLERATED:
        where = "" if link is None else f" {link}"
        return f"{words}, {times_seen} times on link{where}", XID_ADVICE[XidAction.CONTACT_SUPPORT]
    if alone and weighty[-1] is NvlinkRegisterError.CONSEQUENCE:
        return f"{words}, and no other error came with it", XID_ADVICE[XidAction.CONTACT_SUPPORT]
    return words, SIGNS[weighty[-1]][1]


def _table(line: XidLine) -> str:
    """The entry in NVIDIA's table of 144 to 150 for the line."""
    assert line.nvlink is not None
    said, row = "fatal" if line.nvlink.fatal else "not fatal", line.nvlink.assessment
    if row is None:
        return f"NVIDIA's table has no entry for it: the line ({said}) decides"
    words = f"NVIDIA's table (driver {row.driver}): {row.action}, {row.severity}, to investigate {row.investigatory}"
    return words if row.fatal == line.nvlink.fatal else f"{words}, but the line says {said}: the more severe one counts"


def of_xid(gpu: Gpu, code: int) -> str:
    """The catalog's description of a code, with details from the lines."""
    known, lines = xid(code), gpu.lines[code]
    words = [
        f"XID {code} {known.mnemonic}: {known.meaning}",
        f"class {known.fault_class}",
        f"NVIDIA's catalogue: {_action(known.immediate)}",
    ]
    if known.investigatory not in (XidAction.NONE, XidAction.IGNORE):
        words.append(f"to find the cause: {_action(known.investigatory)}")
    if known.second_opinion:
        words.append(f"gpud rates it {known.second_opinion}; NVIDIA's catalogue takes precedence")
    if code == 45 and len(gpu.codes) > 1:
        words.append("follows another XID")
    if code in (171, 172) and 48 in gpu.codes:
        words.append("detail of XID 48")
    if links := sorted({x.nvlink.link for x in lines if x.nvlink is not None and x.nvlink.link is not None}):
        units = sorted({x.nvlink.unit for x in lines if x.nvlink is not None})
        words.append(f"NVLink {', '.join(map(str, links[:NUM_LINES_SHOWN]))}, {', '.join(units[:NUM_LINES_SHOWN])}")
    if (worst := _worst(lines)).nvlink is not None:
        words.append(_table(worst))
    if victims := sorted({f"{x.name} ({x.pid})" if x.name else str(x.pid) for x in lines if x.pid is not None}):
        words.append(f"in process {', '.join(victims[:NUM_LINES_SHOWN])}")
    words.append(times(gpu.codes[code]))
    return "; ".join(words)


def _action(action: XidAction) -> str:
    """In words, with NVIDIA's name for it."""
    return XID_ADVICE[action] + (f" ({action})" if action else "")


def explained_by(gpu: Gpu, at: Sequence[float]) -> bool:
    """Whether the GPU reports only NVLink errors, all close in time to an error of the switch. `at`: in order."""
    codes = gpu.codes.keys() - {45, 154}
    if not codes or any(xid(c).immediate not in _OF_NVLINK for c in codes):
        return False
    # The first error of the switch that is not too early for the line is not too late either.
    after = ((s, bisect_left(at, s.at - BURST_SECONDS)) for s, _ in gpu.seen)
    return all(s.timed and i < len(at) and at[i] <= s.at + BURST_SECONDS for s, i in after)


_OF_NVLINK = (XidAction.WORKFLOW_NVLINK_ERR, XidAction.WORKFLOW_NVLINK5_ERR)


def of_sxid(code: int) -> str:
    return f"SXid {code} ({sxid(code).meaning})"


def switch_finding(node: str, switch: int, pairs: list[tuple[KernelLogFact, SxidLine]], victims: list[Gpu]) -> Finding:
    codes = grouped(pairs, lambda _, f: f.code)
    worst = max(codes, key=lambda code: sxid(code).action is XidAction.RESTART_BM)
    links = sorted({f.link for _, f in pairs if f.link is not None})
    on_links = f" on link {', '.join(map(str, links[:NUM_LINES_SHOWN]))}" if links else ""
    because = (
        f"NVSwitch {switch} of {node_text(node)}: {of_sxid(worst)}{on_links}, fatal, {times([s for s, _ in pairs])}"
    )
    if not any(f.fatal for _, f in codes[worst]):
        because += "; the line says non-fatal, but NVIDIA's documents require a reset or reboot"
    if victims:
        because += f"; the NVLink errors of {counted(len(victims), 'GPU')} are its consequence"
    evidence = [Evidence(kind="sxid", text=of_sxid(c), values={"num_lines": float(len(p))}) for c, p in codes.items()]
    evidence += [Evidence(kind="xid", text=f"{g.title}: {of_xid(g, c)}") for g in victims for c in g.codes]
    advice = sxid(worst).advice
    if links:
        advice += "; every GPU on that link is affected"
    return finding(node, FaultClass.NETWORK, because, [s for s, _ in pairs], advice, f"nvswitch{switch}", evidence)


NUM_FLAPS = 2
FLAP_SECONDS = 300.0
"""One link flap is tolerated, two within this time are not (ByteRobust)."""


def oom_finding(node: str, pairs: list[tuple[KernelLogFact, OomKill]]) -> Finding:
    who = ", ".join(f"{f.name} ({f.pid}, {f.rss_bytes / (1 << 30):.1f} GiB)" for _, f in pairs[:NUM_LINES_SHOWN])
    more = f" and {len(pairs) - NUM_LINES_SHOWN} more" if len(pairs) > NUM_LINES_SHOWN else ""
    in_cgroup = all(f.of_cgroup for _, f in pairs)
    where = "its cgroup's memory limit was reached" if in_cgroup else "the node was out of memory"
    because = f"{node_text(node)}: the kernel killed {who}{more}: {where}"
    advice = (
        "raise the memory limit, or lower the memory use of the process" if in_cgroup else "schedule less on this node"
    )
    return finding(node, FaultClass.RESOURCE_EXHAUSTED, because, [s for s, _ in pairs], advice, "oom")


def link_finding(node: str, name: str, pairs: list[tuple[KernelLogFact, KernelLinkChange]]) -> Finding | None:
    """A link that is down permanently, or flaps."""
    downs = [s for s, f in pairs if not f.up]
    if not downs:
        return None
    at = sorted(s.at for s in downs)
    flaps = max((bisect_right(at, s.at + FLAP_SECONDS) - bisect_left(at, s.at) for s in downs if s.timed), default=0)
    if not pairs[-1][1].up:
        because = f"{node_text(node)}: link {name} went down and stayed down"
    elif flaps >= NUM_FLAPS:
        because = f"{node_text(node)}: link {name} flaps: {flaps} times down within {FLAP_SECONDS / 60:.0f} min"
    else:
        return None
    advice = "check cable, transceiver and switch port; schedule nothing that needs this link on the node"
    return finding(node, FaultClass.NETWORK, because, downs, advice, name)


_HARDWARE = {
    "machine_check": "an uncorrected machine check",
    "memory": "an uncorrected memory error",
    "pcie": "an uncorrected PCIe error",
    "firmware": "an uncorrected hardware error (reported by the firmware)",
}


def hardware_finding(node: str, what: str, pairs: list[tuple[KernelLogFact, HardwareError]]) -> Finding:
    devices = ", ".join(list(dict.fromkeys(f.device for _, f in pairs if f.device))[:NUM_LINES_SHOWN])
    because = (
        f"{node_text(node)} has {_HARDWARE[what]}{f' at {devices}' if devices else ''}, {times([s for s, _ in pairs])}"
    )
    advice = "schedule nothing on this node, and have its hardware inspected"
    return finding(node, FaultClass.NODE_LOST, because, [s for s, _ in pairs], advice, what)


_FAULTS: dict[str, tuple[FaultClass, str, str]] = {
    "soft_lockup": (F.HANG, "a CPU is stuck in the kernel", "reboot the node"),
    "hard_lockup": (F.HANG, "a CPU is stuck and takes no interrupts", "reboot the node"),
    "hung_task": (F.HANG, "tasks are stuck in the kernel", "find what they wait for: disk, NFS or a driver"),
    "rcu_stall": (F.HANG, "a CPU does not answer the others", "reboot the node"),
    "panic": (F.NODE_LOST, "the kernel panicked", "schedule nothing on this node until the cause is found"),
    "oops": (F.NODE_LOST, "kernel oops", "reboot the node"),
    "segfault": (F.CRASH, "processes died of a segmentation fault", "check the library that is named"),
    "disk_error": (F.NODE_LOST, "a disk is failing", "schedule nothing on this node, and replace the disk"),
    "filesystem_error": (F.NODE_LOST, "a file system is damaged", "schedule nothing on this node, and check it"),
    "nic_fault": (F.NETWORK, "a NIC is failing", "schedule nothing on this node, and inspect the NIC"),
    "nic_cable": (F.NETWORK, "the cable of a NIC is unplugged or bad", "check cable and transceiver"),
    "nic_power": (
        *(F.NETWORK, "the PCIe slot of a NIC gives it too little power"),
        "compare the NIC's bandwidth with its peers; if lower, check slot, riser and firmware, else it is benign",
    ),
    "nic_hot": (
        F.NETWORK,
        "a NIC is too hot and will shut down if it gets hotter",
        "check fans, air flow and heat sink",
    ),
    "nic_register_error": (
        *(F.NETWORK, "the firmware of a NIC refuses accesses to its registers"),
        "update firmware and driver together; if its links fail too, reset the NIC or reboot",
    ),
    "gpu_peer_memory": (
        *(F.NETWORK, "GPUDirect RDMA lost GPU memory that was registered with a NIC"),
        "restart the job's processes on this node; if it happens again, reload nvidia-peermem and update the driver",
    ),
    "nvlink_detect_failed": (
        *(F.GPU, "the driver cannot determine which NVLinks are connected"),
        "drain the node and reset its GPUs, else reboot; if it happens again, have the NVLinks inspected",
    ),
    "raid_degraded": (
        *(F.NODE_LOST, "a RAID array lost a disk"),
        "save its data, replace the disk and rebuild the array (mdadm --detail)",
    ),
    "nvme_no_path": (
        *(F.NODE_LOST, "an NVMe disk has no path left"),
        "check its controllers and, for NVMe over fabrics, the network to its target (nvme list-subsys)",
    ),
    "buffer_io_error": (
        *(F.NODE_LOST, "reads or writes of a block device fail"),
        "check the device (smartctl, nvme smart-log) and what it is attached to; then its file system",
    ),
    "nfs_server": (
        *(F.NETWORK, "an NFS server does not answer, and processes that use it hang"),
        "check the server and the network to it; hard mounts continue when it answers",
    ),
    "file_max": (
        *(F.RESOURCE_EXHAUSTED, "all file handles of the node are in use"),
        "raise fs.file-max, and find the process that leaks files (lsof)",
    ),
    "pcie_link_down": (F.NODE_LOST, "a PCIe device is gone", "schedule nothing on this node, and inspect the slot"),
    "cpu_throttled": (F.SLOW, "CPUs are thermally throttled", "check fans and air flow"),
    "gpu_init_failed": (F.GPU, "the driver cannot initialise a GPU", "reset the GPU, else reboot the node"),
}
"""Fault class, text and advice of each of `messages.FAULTS`."""

REMARKED = frozenset({"nic_power"})
"""Some healthy machines report these at every boot: worth a look, and no diagnosis by itself."""


def lasting(faults: Sequence[tuple[KernelLogFact, KernelFault]]) -> list[tuple[KernelLogFact, KernelFault]]:
    """Without those that the kernel later reported as over."""
    ended = {(s.node, f.what, f.device): i for i, (s, f) in enumerate(faults) if f.over}
    return [(s, f) for i, (s, f) in enumerate(faults) if i > ended.get((s.node, f.what, f.device), -1)]


def fault_finding(node: str, what: str, pairs: list[tuple[KernelLogFact, KernelFault]]) -> Finding:
    fault_class, words, advice = _FAULTS[what]
    who = [f"{f.name} ({f.pid})" if f.pid is not None else f.device for _, f in pairs]
    places = ", ".join(list(dict.fromkeys(w for w in who if w))[:NUM_LINES_SHOWN])
    because = f"{node_text(node)}: {words}{f': {places}' if places else ''}, {times([s for s, _ in pairs])}"
    return finding(node, fault_class, because, [s for s, _ in pairs], advice, what)


NUM_REMARKS_MAX = 50


def diagnose(logs: Sequence[KernelLog]) -> list[Finding]:
    """One finding per fault."""
    seen = in_order(logs)
    gpus = gpus_of(seen, logs)
    found, explained = list[Finding](), set[tuple[str, str]]()
    for (node, switch), pairs in grouped(of(seen, SxidLine), lambda s, f: (s.node, f.switch)).items():
        fatal = [(s, f) for s, f in pairs if f.fatal or sxid(f.code).fatal]
        if fatal:
            at = sorted(s.at for s, _ in fatal)
            victims = [g for g in gpus if g.node == node and explained_by(g, at)]
            found.append(switch_finding(node, switch, fatal, victims))
            explained |= {(g.node, g.pci) for g in victims}
    num_with_31 = sum(31 in g.codes for g in gpus)
    faulty = [g for g in gpus if leading_code(g) is not None]
    found += [gpu_finding(g, num_with_31) for g in faulty if (g.node, g.pci) not in explained]
    found += [oom_finding(node, pairs) for node, pairs in grouped(of(seen, OomKill), lambda s, _: s.node).items()]
    links = grouped(of(seen, KernelLinkChange), lambda s, f: (s.node, f.interface))
    found += [f for (node, name), pairs in links.items() if (f := link_finding(node, name, pairs)) is not None]
    of_gpus = {(g.node, g.pci) for g in faulty}
    uncorrected = [(s, f) for s, f in of(seen, HardwareError) if not f.corrected and not _is_of(s, f.device, of_gpus)]
    hardware = grouped(uncorrected, lambda s, f: (s.node, f.what))
    found += [hardware_finding(node, what, pairs) for (node, what), pairs in hardware.items()]
    faults = [(s, f) for s, f in of(seen, KernelFault) if f.what not in REMARKED and not _is_of(s, f.device, of_gpus)]
    by_what = grouped(lasting(faults), lambda s, f: (s.node, f.what))
    return found + [fault_finding(node, what, pairs) for (node, what), pairs in by_what.items()]


def remarks(logs: Sequence[KernelLog]) -> tuple[str, ...]:
    """Events that are no fault by themselves, and the reliability of the times."""
    seen, said = in_order(logs), list[str]()
    for gpu in gpus_of(seen, logs):
        if leading_code(gpu) is None:
            said += [f"{gpu.title}: {of_xid(gpu, code)}: not a fault by itself" for code in gpu.codes]
    sxids = grouped(of(seen, SxidLine), lambda s, f: (s.node, f.switch, f.code))
    for (node, switch, code), pairs in sxids.items():
        if not sxid(code).fatal and not any(f.fatal for _, f in pairs):
            often = times([s for s, _ in pairs])
            said.append(
                f"NVSwitch {switch} of {node_text(node)}: {of_sxid(code)}, not fatal, {often}; {sxid(code).advice}"
            )
    corrected = [(s, f) for s, f in of(seen, HardwareError) if f.corrected]
    for (node, what), lines in grouped(corrected, lambda s, f: (s.node, f.what)).items():
        said.append(f"{node_text(node)}: {counted(len(lines), 'line')} of corrected hardware errors ({what})")
    for (node, name), changes in grouped(of(seen, KernelLinkChange), lambda s, f: (s.node, f.interface)).items():
        if any(not f.up for _, f in changes) and link_finding(node, name, changes) is None:
            downs = [s for s, f in changes if not f.up]
            why = "a single flap is tolerated" if len(downs) == 1 or downs[0].timed else times(downs)
            said.append(f"{node_text(node)}: link {name} went down and recovered: {why}")
    faults = of(seen, KernelFault)
    stand = {id(s) for s, _ in lasting(faults)}
    noted = [(s, f) for s, f in faults if not f.over and (f.what in REMARKED or id(s) not in stand)]
    for (node, what), alike in grouped(noted, lambda s, f: (s.node, f.what)).items():
        devices = ", ".join(list(dict.fromkeys(f.device for _, f in alike))[:NUM_LINES_SHOWN])
        rest = _FAULTS[what][2] if what in REMARKED else "it is over"
        said.append(f"{node_text(node)}: {_FAULTS[what][1]}: {devices}, {times([s for s, _ in alike])}; {rest}")
    if len(said) > NUM_REMARKS_MAX:
        said = [*said[:NUM_REMARKS_MAX], f"{len(said) - NUM_REMARKS_MAX:,} more of this kind"]
    return (*said, *time_remarks(logs))


def summary(logs: Sequence[KernelLog]) -> str:
    """One sentence that describes the input."""
    seen = in_order(logs)
    num_nodes, num_xids = len({s.node for s in seen}), len(of(seen, XidLine))
    content = (
        f"{counted(len(seen), 'event')} on {counted(num_nodes, 'node')}, {counted(num_xids, 'XID')}"
        if seen
        else "no event"
    )
    return f"{counted(sum(log.num_lines for log in logs), 'kernel line')}, {content}"


def with_advice(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis of one of these findings, with that finding's advice."""
    advice = [e.text for e in diagnosis.evidence if e.kind == ADVICE]
    if DETECTOR not in diagnosis.detectors or not advice:
        return diagnosis
    return replace(diagnosis, advice=advice[0], evidence=tuple(e for e in diagnosis.evidence if e.kind != ADVICE))


def _is_of(s: KernelLogFact, device: str, gpus: set[tuple[str, str]]) -> bool:
    """Whether the device is a GPU that has its own finding."""
    return ":" in device and (s.node, normal_pci(device)) in gpus
