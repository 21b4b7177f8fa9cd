"""Diagnoses GPUs, switches, links, memory and the machine from kernel logs: one finding per fault.

`gpu_findings.py` covers GPUs and switches, `machine_findings.py` the rest; an event that is no fault by itself becomes
a remark. PCIe errors of a GPU that has a finding belong to that finding. Pure: facts in, findings out.
"""

from collections.abc import Sequence
from dataclasses import replace

from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.detector.artifacts.kernel_log.gpu_findings import (
    explained_by,
    gpu_finding,
    gpus_of,
    leading_code,
    of_sxid,
    of_xid,
    switch_finding,
)
from rolecall.detector.artifacts.kernel_log.grouping import ADVICE, DETECTOR, grouped, in_order, of, times
from rolecall.detector.artifacts.kernel_log.logs import KernelLog, KernelLogFact, time_remarks
from rolecall.detector.artifacts.kernel_log.machine_findings import (
    fault_finding,
    hardware_finding,
    link_finding,
    oom_finding,
)
from rolecall.formats.kernel_log.messages import HardwareError, KernelFault, KernelLinkChange, OomKill
from rolecall.formats.kernel_log.nvidia import SxidLine, XidLine, normal_pci
from rolecall.formats.xid.xid import sxid

NUM_REMARKS_MAX = 50


def diagnose(logs: Sequence[KernelLog]) -> list[Finding]:
    """One finding per fault."""
    seen = in_order(logs)
    gpus = gpus_of(seen, logs)
    found, explained = list[Finding](), set[tuple[str, str]]()
    for (node, switch), pairs in grouped(of(seen, SxidLine), lambda s, f: (s.node, f.switch)).items():
        fatal = [(s, f) for s, f in pairs if f.fatal or sxid(f.code).fatal]
        if fatal:
            victims = [g for g in gpus if g.node == node and explained_by(g, [s.at for s, _ in fatal])]
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
    faults = [(s, f) for s, f in of(seen, KernelFault) if not _is_of(s, f.device, of_gpus)]
    by_what = grouped(faults, lambda s, f: (s.node, f.what))
    return found + [fault_finding(node, what, pairs) for (node, what), pairs in by_what.items()]


def remarks(logs: Sequence[KernelLog]) -> tuple[str, ...]:
    """Events that are no fault by themselves, and the reliability of the times."""
    seen, said = in_order(logs), list[str]()
    for gpu in gpus_of(seen, logs):
        if leading_code(gpu) is None:
            said += [f"{gpu.title}: {of_xid(gpu, code)}: no fault by itself" for code in gpu.codes]
    sxids = grouped(of(seen, SxidLine), lambda s, f: (s.node, f.switch, f.code))
    for (node, switch, code), pairs in sxids.items():
        if not sxid(code).fatal and not any(f.fatal for _, f in pairs):
            often = times([s for s, _ in pairs])
            said.append(f"NVSwitch {switch} of node {node}: {of_sxid(code)}, not fatal, {often}; {sxid(code).advice}")
    corrected = [(s, f) for s, f in of(seen, HardwareError) if f.corrected]
    for (node, what), lines in grouped(corrected, lambda s, f: (s.node, f.what)).items():
        said.append(f"node {node}: {len(lines)} line(s) of corrected hardware errors ({what})")
    for (node, name), changes in grouped(of(seen, KernelLinkChange), lambda s, f: (s.node, f.interface)).items():
        if any(not f.up for _, f in changes) and link_finding(node, name, changes) is None:
            said.append(f"node {node}: link {name} went down and came up again: a single flap is no fault")
    if len(said) > NUM_REMARKS_MAX:
        said = [*said[:NUM_REMARKS_MAX], f"{len(said) - NUM_REMARKS_MAX:,} more of the kind"]
    return (*said, *time_remarks(logs))


def looked_at(logs: Sequence[KernelLog]) -> str:
    """One sentence that describes the input."""
    seen = in_order(logs)
    num_nodes, num_xids = len({s.node for s in seen}), len(of(seen, XidLine))
    told = (
        f"{len(seen):,} of them tell of something on {num_nodes} node(s), {num_xids:,} XID(s)" if seen else "no event"
    )
    return f"{sum(log.num_lines for log in logs):,} line(s) of the kernel, {told}"


def with_advice(d: Diagnosis) -> Diagnosis:
    """The diagnosis of one of these findings, with that finding's advice."""
    advice = [e.text for e in d.evidence if e.kind == ADVICE]
    if DETECTOR not in d.detectors or not advice:
        return d
    return replace(d, advice=advice[0], evidence=tuple(e for e in d.evidence if e.kind != ADVICE))


def _is_of(s: KernelLogFact, device: str, gpus: set[tuple[str, str]]) -> bool:
    """Whether the device is a GPU that has its own finding."""
    return ":" in device and (s.node, normal_pci(device)) in gpus
