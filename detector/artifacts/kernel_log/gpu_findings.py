"""Diagnoses GPUs and NVSwitches from kernel logs: one finding per faulty device, named by its worst XID.

The worst XID follows NVIDIA's catalog (ties: the earliest):
  a GPU that fell off the bus is lost, and its other messages are consequences;
  45 follows the XID before it, and alone points to the fabric manager; 171 and 172 are details of a 48;
  for NVLink codes the line decides: the registers of a 74, unit and status of a 144 to 150 (`formats.xid.nvlink`);
  154 is the driver's verdict on the events before it: its action is the advice;
  codes that NVIDIA marks as ignorable only make remarks.
Repeats (thresholds from NVIDIA/NVSentinel): the same fatal XID in five bursts within a day is for support; a 31 twice a
day on one GPU alone, or a 13 twice at one location on the chip, is for diagnostics of that GPU; on several GPUs or at
several locations it is the application; ECC errors of a 74 more than twice on one link are for support. A fatal error
of an NVSwitch explains simultaneous NVLink errors of its node's GPUs. Pure: facts in, findings out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.artifacts.kernel_log.grouping import (
    ADVICE,
    CONFIDENCE,
    CONFIDENCE_FATAL,
    DETECTOR,
    NUM_LINES_SHOWN,
    finding,
    grouped,
    times,
)
from rolecall.detector.artifacts.kernel_log.logs import KernelLog, KernelLogFact
from rolecall.formats.kernel_log.nvidia import GpuLost, SxidLine, XidLine
from rolecall.formats.xid.nvlink import NUM_ECC_TOLERATED, SIGNS, NvlinkRegisterError
from rolecall.formats.xid.xid import ADVICE as XID_ADVICE
from rolecall.formats.xid.xid import RECOVERY_ADVICE, RecoveryAction, Xid, XidAction, sxid, xid

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
    """XIDs of one GPU, oldest first. A GPU lost without an XID gets a 79."""

    node: str
    pci: str
    seen: tuple[tuple[KernelLogFact, XidLine], ...]
    uuid: str = ""

    @property
    def codes(self) -> dict[int, list[KernelLogFact]]:
        return {code: [s for s, _ in pairs] for code, pairs in grouped(self.seen, lambda _, x: x.code).items()}

    def lines(self, code: int) -> list[XidLine]:
        return [x for _, x in self.seen if x.code == code]

    @property
    def title(self) -> str:
        uuid = f" ({self.uuid})" if self.uuid else ""
        return f"GPU {self.pci}{uuid} of node {self.node}"


def gpus_of(seen: Sequence[KernelLogFact], logs: Sequence[KernelLog]) -> list[Gpu]:
    uuids = {key: uuid for log in logs for key, uuid in log.uuids.items()}
    lines: list[tuple[KernelLogFact, XidLine]] = []
    for s in seen:
        if isinstance(s.fact, XidLine):
            lines.append((s, s.fact))
        elif isinstance(s.fact, GpuLost):
            lines.append((s, XidLine(pci=s.fact.pci, code=FELL_OFF, text=s.text)))
    groups = grouped(lines, lambda s, x: (s.node, x.pci))
    return [Gpu(node, pci, tuple(p), uuids.get((node, pci), "")) for (node, pci), p in groups.items()]


def _bursts(at: Sequence[float]) -> list[float]:
    """Start time of each occurrence."""
    begun: list[float] = []
    last = float("-inf")
    for t in at:
        if t - last > BURST_SECONDS:
            begun.append(t)
        last = t
    return begun


def _most_in_a_day(at: Sequence[float]) -> int:
    """Maximum number of occurrences within 24 hours."""
    begun = _bursts(at)
    return max((sum(a <= b < a + REPEAT_SECONDS for b in begun) for a in begun), default=0)


def _worst(lines: Sequence[XidLine]) -> XidLine:
    """Of one code's lines, the first with the most severe action."""
    return max(lines, key=lambda x: (x.fatal, _RANK[x.action]))


def leading_code(gpu: Gpu) -> int | None:
    """The code that names the finding: the worst, then the earliest. None: all are ignorable."""
    first = {code: seen[0].at for code, seen in gpu.codes.items()}
    ranks = {code: _RANK[_worst(gpu.lines(code)).action] for code in first}
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
    worst = _worst(gpu.lines(lead))
    sentence, advice, fault_class = _judged(gpu, known, num_with_31)
    if lead != 154 and 154 in codes:
        action, said = _verdict(gpu)
        sentence += f"; the driver's own verdict: {action}"
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
    evidence += [Evidence(kind="line", text=s.text) for s, _ in _chosen(gpu, lead)]
    evidence.append(Evidence(kind=ADVICE, text=advice))
    at = codes[lead][0].at
    return Finding(
        detector=DETECTOR,
        suspects=(Suspect(node=NodeId(gpu.node)),),
        fault_class=fault_class,
        onset=min(gpu.seen[0][0].at, at),
        detected_at=at,
        confidence=CONFIDENCE_FATAL if worst.fatal else CONFIDENCE,
        because=f"{gpu.title}: {sentence}",
        evidence=tuple(evidence),
        about=f":{gpu.pci}",
    )


def _chosen(gpu: Gpu, lead: int) -> list[tuple[KernelLogFact, XidLine]]:
    """Lines to show: the newest of the leading code, then the first of each other code."""
    of_lead = [(s, x) for s, x in gpu.seen if x.code == lead][-NUM_LINES_SHOWN // 2 :]
    others = [pairs[0] for code, pairs in grouped(gpu.seen, lambda _, x: x.code).items() if code != lead]
    return sorted([*of_lead, *others[: NUM_LINES_SHOWN // 2]], key=lambda pair: pair[0].at)


def _judged(gpu: Gpu, known: Xid, num_with_31: int) -> tuple[str, str, FaultClass]:
    """Text, advice and fault class for the leading code."""
    codes = gpu.codes
    seen, lines = codes[known.code], gpu.lines(known.code)
    worst = _worst(lines)
    sentence = f"XID {known.code} ({known.meaning}), {'fatal' if worst.fatal else 'not fatal'}, {times(seen)}"
    advice, fault_class = worst.advice, known.fault_class
    if known.code == FELL_OFF:
        num_later = sum(s.at >= seen[0].at and x.code != FELL_OFF for s, x in gpu.seen)
        sentence += "; the GPU is lost" + (f", {num_later} later line(s) are the consequence" if num_later else "")
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
        elif _most_in_a_day([s.at for s in seen]) >= NUM_REPEATS:
            fault_class, advice = FaultClass.GPU, "run extended diagnostics on this GPU"
            sentence += "; it came back within a day, on this GPU alone"
    elif known.code == 13:
        places = Counter(x.place for x in lines if x.place)
        if len(places) == 1 and places.total() >= NUM_REPEATS and len(_bursts([s.at for s in seen])) >= NUM_REPEATS:
            fault_class, advice = FaultClass.GPU, "run extended diagnostics on this GPU"
            sentence += f"; always at {next(iter(places))}"
        elif len(places) > 1:
            sentence += f"; at {len(places)} places of the chip: the application is the cause"
    if worst.fatal and _most_in_a_day([s.at for s in seen]) >= NUM_FATAL_BURSTS:
        sentence += f"; {NUM_FATAL_BURSTS} or more times within a day"
        advice = XID_ADVICE[XidAction.CONTACT_SUPPORT]
    if not known.known:
        sentence += "; not in a catalogue that rolecall knows"
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
    words = f"; its registers say: {', '.join(dict.fromkeys(SIGNS[sign][0] for sign in reversed(weighty)))}"
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
        return f"NVIDIA's table has no row for it: the line itself ({said}) decides"
    words = f"NVIDIA's table (driver {row.driver}): {row.action}, {row.severity}, to investigate {row.investigatory}"
    return words if row.fatal == line.nvlink.fatal else f"{words}, but the line says {said}: the worse counts"


def of_xid(gpu: Gpu, code: int) -> str:
    """The catalog's description of a code, with details from the lines."""
    known, lines = xid(code), gpu.lines(code)
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
    if (worst := _worst(lines)).nvlink is not None:
        words.append(_table(worst))
    if victims := sorted({f"{x.name or '?'} ({x.pid})" for x in lines if x.pid is not None}):
        words.append(f"in process {', '.join(victims[:NUM_LINES_SHOWN])}")
    words.append(times([s for s, x in gpu.seen if x.code == code]))
    return "; ".join(words)


def explained_by(gpu: Gpu, at: Sequence[float]) -> bool:
    """Whether the GPU reports only NVLink errors, all close in time to an error of the switch."""
    codes = gpu.codes.keys() - {45, 154}
    if not codes or any(xid(c).immediate not in _OF_NVLINK for c in codes):
        return False
    return all(any(abs(s.at - t) <= BURST_SECONDS for t in at) for s, _ in gpu.seen)


_OF_NVLINK = (XidAction.WORKFLOW_NVLINK_ERR, XidAction.WORKFLOW_NVLINK5_ERR)


def of_sxid(code: int) -> str:
    return f"SXid {code} ({sxid(code).meaning})"


def switch_finding(node: str, switch: int, pairs: list[tuple[KernelLogFact, SxidLine]], victims: list[Gpu]) -> Finding:
    codes = grouped(pairs, lambda _, f: f.code)
    worst = max(codes, key=lambda code: sxid(code).action is XidAction.RESTART_BM)
    links = sorted({f.link for _, f in pairs if f.link is not None})
    on_links = f" on link {', '.join(map(str, links[:NUM_LINES_SHOWN]))}" if links else ""
    because = f"NVSwitch {switch} of node {node}: {of_sxid(worst)}{on_links}, fatal, {times([s for s, _ in pairs])}"
    if victims:
        because += f"; the NVLink errors of {len(victims)} GPU(s) are its consequence"
    evidence = [Evidence(kind="sxid", text=of_sxid(c), values={"num_lines": float(len(p))}) for c, p in codes.items()]
    evidence += [Evidence(kind="xid", text=f"{g.title}: {of_xid(g, c)}") for g in victims for c in g.codes]
    advice = sxid(worst).advice
    if links:
        advice += "; every GPU on that link is affected"
    return finding(node, FaultClass.NETWORK, because, [s for s, _ in pairs], advice, f"nvswitch{switch}", evidence)
