"""Diagnoses a node's memory, links, hardware and kernel from kernel logs: one finding per fault.

Pure: facts in, findings out.
"""

from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.kernel_log.grouping import NUM_LINES_SHOWN, finding, times
from rolecall.detector.artifacts.kernel_log.logs import KernelLogFact
from rolecall.formats.kernel_log.messages import HardwareError, KernelFault, KernelLinkChange, OomKill

NUM_FLAPS = 2
FLAP_SECONDS = 300.0
"""One link flap is tolerated, two within this time are not (ByteRobust)."""


def oom_finding(node: str, pairs: list[tuple[KernelLogFact, OomKill]]) -> Finding:
    who = ", ".join(f"{f.name} ({f.pid}, {f.rss_bytes / (1 << 30):.1f} GiB)" for _, f in pairs[:NUM_LINES_SHOWN])
    more = f" and {len(pairs) - NUM_LINES_SHOWN} more" if len(pairs) > NUM_LINES_SHOWN else ""
    in_cgroup = all(f.of_cgroup for _, f in pairs)
    where = "its cgroup's memory limit was reached" if in_cgroup else "the node was out of memory"
    because = f"node {node}: the kernel killed {who}{more}: {where}"
    advice = (
        "raise the memory limit, or lower the memory use of the process" if in_cgroup else "schedule less on this node"
    )
    return finding(node, FaultClass.RESOURCE_EXHAUSTED, because, [s for s, _ in pairs], advice, "oom")


def link_finding(node: str, name: str, pairs: list[tuple[KernelLogFact, KernelLinkChange]]) -> Finding | None:
    """A link that is down permanently, or flaps."""
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
    because = f"node {node} has {_HARDWARE[what]}{f' at {devices}' if devices else ''}, {times([s for s, _ in pairs])}"
    advice = "schedule nothing on this node, and have its hardware inspected"
    return finding(node, FaultClass.NODE_LOST, because, [s for s, _ in pairs], advice, what)


_FAULTS: dict[str, tuple[FaultClass, str, str]] = {
    "soft_lockup": (FaultClass.HANG, "a CPU is stuck in the kernel", "reboot the node"),
    "hard_lockup": (FaultClass.HANG, "a CPU is stuck and takes no interrupts", "reboot the node"),
    "hung_task": (
        FaultClass.HANG,
        "tasks wait in the kernel and cannot be killed",
        "see what they wait for: disk, NFS, driver",
    ),
    "rcu_stall": (FaultClass.HANG, "a CPU does not answer the others", "reboot the node"),
    "panic": (FaultClass.NODE_LOST, "the kernel panicked", "schedule nothing on this node until the cause is found"),
    "oops": (FaultClass.NODE_LOST, "kernel oops", "reboot the node"),
    "segfault": (FaultClass.CRASH, "processes died of a segmentation fault", "check the library that is named"),
    "disk_error": (FaultClass.NODE_LOST, "a disk is failing", "schedule nothing on this node, and replace the disk"),
    "filesystem_error": (
        FaultClass.NODE_LOST,
        "a file system is damaged",
        "schedule nothing on this node, and check it",
    ),
    "nic_fault": (
        FaultClass.NETWORK,
        "a network adapter is failing",
        "schedule nothing on this node, and inspect the adapter",
    ),
    "nic_cable": (
        FaultClass.NETWORK,
        "a cable of a network adapter is unplugged or bad",
        "check cable and transceiver",
    ),
    "pcie_link_down": (
        FaultClass.NODE_LOST,
        "a PCIe device is gone",
        "schedule nothing on this node, and inspect the slot",
    ),
    "cpu_throttled": (FaultClass.SLOW, "CPUs are thermally throttled", "check fans and air flow"),
    "gpu_init_failed": (FaultClass.GPU, "the driver cannot initialise a GPU", "reset the GPU, else reboot the node"),
}
"""Fault class, text and advice of each of `messages.FAULTS`."""


def fault_finding(node: str, what: str, pairs: list[tuple[KernelLogFact, KernelFault]]) -> Finding:
    fault_class, words, advice = _FAULTS[what]
    who = [f"{f.name} ({f.pid})" if f.pid is not None else f.device for _, f in pairs]
    places = ", ".join(list(dict.fromkeys(w for w in who if w))[:NUM_LINES_SHOWN])
    because = f"node {node}: {words}{f': {places}' if places else ''}, {times([s for s, _ in pairs])}"
    return finding(node, fault_class, because, [s for s, _ in pairs], advice, what)
