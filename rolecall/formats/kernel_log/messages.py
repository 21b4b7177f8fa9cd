"""Parses kernel messages: XIDs, lost GPUs, NVSwitch errors, OOM kills, links, hardware errors, lockups.

Pure: a message (without its timestamp, see `timestamps.py`) to a fact or None. Patterns are anchored at the first
character, so that a message that quotes another one does not match. Formats: NVIDIA's drivers (`nvidia.py`),
Linux mm/oom_kill.c, kernel/watchdog.c, kernel/hung_task.c, drivers/edac, drivers/pci/pcie/aer.c,
arch/x86/kernel/cpu/mce, drivers/firmware/efi/cper.c, drivers/net/ethernet/mellanox/mlx5/core/{events,cmd}.c,
drivers/md/raid{1,5,10}.c, drivers/nvme/host/multipath.c, fs/buffer.c, fs/file_table.c, net/sunrpc/clnt.c and the network
drivers named below; NVIDIA's nvidia-peermem.c and kernel_nvlink.c. Real lines and near-misses of
each are in tests/formats/test_kernel_log.py.
"""

import re
from dataclasses import dataclass

from rolecall.formats.kernel_log.nvidia import (
    GpuInitFailed,
    GpuLost,
    GpuNamed,
    SxidLine,
    XidLine,
    parse_nvidia,
    parse_nvswitch,
)
from rolecall.formats.kernel_log.timestamps import continues

MESSAGE_CHARS_MAX = 4096
"""Parsed length of a message; the kernel truncates a record at 1 KiB (2 KiB from 6.x on)."""

_PCI_BARE = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """`of_cgroup`: its cgroup was out of memory; else the whole machine (or unknown, on old kernels)."""

    pid: int
    name: str
    of_cgroup: bool
    rss_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLinkChange:
    up: bool
    interface: str
    nic: str = ""  # PCI address, or empty


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareError:
    """`what`: `machine_check`, `memory`, `pcie`, `firmware`. `device`: bank, memory controller or PCI address."""

    what: str
    corrected: bool
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFault:
    """Another fault: `what` is one of FAULTS. `pid` and `name` of the affected process, where given. `over`: the kernel
    says that it has ended."""

    what: str
    pid: int | None = None
    name: str = ""
    device: str = ""
    over: bool = False


KernelFact = XidLine | SxidLine | GpuLost | GpuNamed | OomKill | KernelLinkChange | HardwareError | KernelFault


# Memory cgroup out of memory: Killed process 812 (python3) total-vm:9kB, anon-rss:8kB, file-rss:1kB, ..
# Out of memory: Killed process 812 (python3) total-vm:..     Out of memory (oom_kill_allocating_task): Killed ..
# Killed process 812 (python3) total-vm:..   before Linux 5.1, after "Out of memory: Kill process 812 .. score 9 or .."
_OOM = re.compile(
    r"(?:(Memory cgroup )?[Oo]ut of memory(?: \(\w{1,40}\))?: )?Killed process (\d{1,10}) \((.{0,64})\),? "
    r"(?:UID[ :]?\d+, )?total-vm:\d+kB, anon-rss:(\d{1,15})kB"
)

_INTERFACE = r"([A-Za-z][\w.@-]{0,31})"
# mlx5_core 0000:41:00.0 ens1f0np0: Link down    tg3 0000:02:00.0 eth0: Link is down
# ice 0000:17:00.0 ens1f0: NIC Link is up 100 Gbps, ..   igb 0000:07:00.0 eth0: igb: eth0 NIC Link is Down
_LINK = re.compile(
    rf"\w{{1,32}} ({_PCI_BARE}) {_INTERFACE}: (?:\w{{1,32}}: \S{{1,32}} )?(?:NIC )?[Ll]ink (?:is )?([Uu]p|[Dd]own)\b"
)
# e1000e: eth0 NIC Link is Up 1000 Mbps    mlx4_en: eth2: Link Down
_LINK_OLD = re.compile(rf"(?:e1000e?|ixgbe|igb|mlx4_en): {_INTERFACE}:? (?:NIC )?Link (?:is )?(Up|Down)\b")
# IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready    (for Ethernet the driver logs it)
_LINK_IB = re.compile(r"(?:IPv6: )?ADDRCONF\(NETDEV_CHANGE\): (ib[\w.]{1,31}): link becomes ready")


def _link(message: str) -> KernelLinkChange | None:
    if match := _LINK.match(message):
        return KernelLinkChange(up=match[3].lower() == "up", interface=match[2], nic=match[1].lower())
    if match := _LINK_OLD.match(message):
        return KernelLinkChange(up=match[2] == "Up", interface=match[1])
    if match := _LINK_IB.match(message):
        return KernelLinkChange(up=True, interface=match[1])
    return None


_MCE_BANK = re.compile(
    r"(?:mce: )?\[Hardware Error\]: CPU \d{1,5}: Machine Check(?: Exception)?: [0-9a-f]{1,16} Bank (\d{1,3}): ([0-9a-f]{1,16})\b"
)
MCE_UNCORRECTED = 1 << 61
"""Bit UC of a bank's status (Intel SDM volume 3, IA32_MCi_STATUS)."""
_MCE_LOGGED = re.compile(r"(?:mce: )?\[Hardware Error\]: Machine check events logged")
_EDAC = re.compile(r"EDAC (MC\d{1,3}): \d{1,9} (CE|UE) ")
_GHES = re.compile(r"(?:\{\d{1,9}\})?\[Hardware Error\]: event severity: (\w{1,20})")
_AER = re.compile(
    rf"[\w-]{{1,32}} ({_PCI_BARE}): AER: (?:Multiple )?(Correct|Uncorrect)(?:ed|able)(?: \(\S{{1,20}}\))? "
    rf"error (?:message )?received(?:: | from |$)(?:({_PCI_BARE}))?"
)
_MEMORY_FAILURE = re.compile(r"Memory failure: (0x[0-9a-f]{1,16}): recovery action for ")


def _hardware(message: str) -> HardwareError | None:
    if match := _MCE_BANK.match(message):
        # Corrected ones are already reported by the line "events logged".
        uncorrected = int(match[2], 16) & MCE_UNCORRECTED
        return HardwareError(what="machine_check", corrected=False, device=f"bank {match[1]}") if uncorrected else None
    if _MCE_LOGGED.match(message):
        return HardwareError(what="machine_check", corrected=True)
    if match := _EDAC.match(message):
        return HardwareError(what="memory", corrected=match[2] == "CE", device=match[1])
    if match := _GHES.match(message):
        return HardwareError(what="firmware", corrected=match[1] in ("corrected", "info"))
    if match := _AER.match(message):
        return HardwareError(what="pcie", corrected=match[2] == "Correct", device=(match[3] or match[1]).lower())
    if match := _MEMORY_FAILURE.match(message):
        return HardwareError(what="memory", corrected=False, device=match[1])
    return None


_NAME = r"(?P<name>.{0,64})"
_MLX5 = rf"mlx5_core (?P<pci>{_PCI_BARE})(?: \S{{1,32}})?: (?:\w{{1,60}}:\d{{1,6}}:\(pid \d{{1,10}}\): )?"
"""Errors and warnings of the driver name function, line and process; older drivers and notes do not."""
_PATTERNS = (
    (
        "soft_lockup",
        (
            rf"(?:NMI )?(?:watchdog: )?BUG: soft lockup - (?P<device>CPU#\d{{1,5}}) stuck for \d{{1,9}}s! "
            rf"\[{_NAME}:(?P<pid>\d{{1,10}})\]"
        ),
    ),
    (
        "hard_lockup",
        r"(?:NMI )?watchdog: (?:CPU\d{1,5}: )?(?:NMI )?Watchdog detected hard LOCKUP on (?P<device>cpu \d{1,5})",
    ),
    ("hung_task", rf"INFO: task {_NAME}:(?P<pid>\d{{1,10}}) blocked (?:in I/O wait )?for more than \d{{1,9}} seconds"),
    ("rcu_stall", r"(?:rcu: )?INFO: rcu_\w{1,20} (?:self-)?detected (?:expedited )?stalls? on CPU"),
    ("panic", r"Kernel panic - not syncing: "),
    ("oops", r"BUG: (?:unable to handle |kernel NULL pointer )|Oops: \w|kernel BUG at "),
    (
        "disk_error",
        r"(?:blk_update_request: )?(?:critical (?:medium|target) error|I/O error), dev (?P<device>[\w!-]{1,32}), sector ",
    ),
    (
        "disk_error",
        (
            r"nvme (?P<device>nvme\d{1,4}): (?:I/O .{1,80} timeout|controller is down; will reset|Device not ready"
            r"|Removing after probe failure)"
        ),
    ),
    ("filesystem_error", r"(?:EXT4-fs error \(device |BTRFS error \(device )(?P<device>[\w!-]{1,32})"),
    (
        "filesystem_error",
        (
            r"(?:EXT4-fs|XFS) \((?P<device>[\w!-]{1,32})\): (?:Remounting filesystem read-only|Corruption "
            r"|[Ll]og I/O [Ee]rror|Filesystem has been shut down)"
        ),
    ),
    (
        "nic_fault",
        (
            rf"{_MLX5}(?:Fatal error \d|device's health compromised|handling bad device here|"
            r"\S{1,60} timeout\. Will cause a leak)"
        ),
    ),
    ("nic_cable", rf"{_MLX5}Port module event(?:\[error\])?: module \d{{1,3}}, Cable (?:unplugged|error)"),
    ("nic_power", rf"{_MLX5}Detected insufficient power on the PCIe slot \("),
    ("nic_hot", rf"{_MLX5}High temperature on sensors with bit set "),
    (
        "nic_register_error",
        rf"{_MLX5}ACCESS_REG\(0x[0-9a-f]{{1,4}}\) op_mod\(0x[0-9a-f]{{1,4}}\) (?:uid\(\d{{1,9}}\) )?failed",
    ),
    ("gpu_peer_memory", r"nvidia[-_]peermem \w{1,60}:\d{1,6} ERROR "),
    (
        "nvlink_detect_failed",
        (
            r"NVRM: (?:(?P<device>GPU\d{1,3}) )?(?:knvlinkUpdatePostRxDetectLinkMask_\w{1,20}: Failed to update Rx Detect "
            r"Link mask|knvlinkDiscoverPostRxDetLinks_\w{1,20}: Getting peer[01]'s postRxDetLinkMask failed)"
        ),
    ),
    (
        "raid_degraded",
        (
            r"md/raid\d{0,2}:(?P<device>md[\w.-]{1,32}): (?:Disk failure on |not enough operational "
            r"|Cannot continue operation)"
        ),
    ),
    (
        "raid_degraded",  # started with fewer disks than it should have
        (
            r"md/raid\d{0,2}:(?P<device>md[\w.-]{1,32}): (?:raid level \d{1,2} )?active with (?P<active>\d{1,3}) out of "
            r"(?!(?P=active) )\d{1,3} (?:mirrors|devices)"
        ),
    ),
    ("nvme_no_path", r"(?:block )?(?P<device>nvme\w{1,16}): no (?:usable|available) path - (?:requeuing|failing) I/O"),
    ("buffer_io_error", r"Buffer I/O error on (?:dev|device) (?P<device>[\w!-]{1,32}), logical block \d{1,20}"),
    (
        "nfs_server",
        r"(?:nfs|lockd): server (?P<device>\S{1,253}) (?:not responding, (?:still trying|timed out)|(?P<over>OK)$)",
    ),
    ("file_max", r"VFS: file-max limit \d{1,20} reached"),
    ("nic_fault", r"NETDEV WATCHDOG: (?P<device>[\w.@-]{1,32})\b.{0,80}: transmit queue \d{1,5} timed out"),
    ("pcie_link_down", rf"pcieport (?P<pci>{_PCI_BARE}): pciehp: Slot\(\S{{1,32}}\): (?:Link Down|Card not present)"),
    ("cpu_throttled", r"(?:mce: )?(?P<device>CPU\d{1,5}): (?:Core|Package) temperature (?:is )?above threshold"),
)
_FAULTS = tuple((what, re.compile(pattern)) for what, pattern in _PATTERNS)
FAULTS: tuple[str, ...] = (*dict.fromkeys(what for what, _ in _FAULTS), "segfault", "gpu_init_failed")
"""All that KernelFault.what may be."""

_SEGFAULT = re.compile(
    rf"{_NAME}\[(?P<pid>\d{{1,10}})\]: segfault at .{{1,200}} in (?P<device>[\w.+-]{{1,80}})\[", re.DOTALL
)


def _fault(message: str) -> KernelFault | None:
    for what, pattern in _FAULTS:
        if m := pattern.match(message):
            fields = m.groupdict()
            device = fields.get("pci") or fields.get("device") or ""
            pid = int(fields["pid"]) if fields.get("pid") else None
            over = bool(fields.get("over"))
            return KernelFault(what=what, pid=pid, name=fields.get("name") or "", device=device, over=over)
    return None


# python3[4711]: segfault at ..      python3 invoked oom-killer: ..
_OF_A_PROCESS = re.compile(r".{0,64}?(?:(\[\d{1,10}\]: segfault at )| invoked oom-killer: )", re.DOTALL)
"""Lines that begin with the name that a process gave itself, which may read like any other line (15 characters of
it)."""


def parse_message(message: str) -> KernelFact | None:
    """The fact in this message; None: not of interest. Never raises."""
    message = message[:MESSAGE_CHARS_MAX].rstrip()
    if match := _OF_A_PROCESS.match(message):
        m = _SEGFAULT.match(message) if match[1] else None
        return KernelFault(what="segfault", pid=int(m["pid"]), name=m["name"], device=m["device"]) if m else None
    if message.startswith("NVRM: "):
        found = parse_nvidia(message)
        if found is None:
            return _fault(message)
        return KernelFault(what="gpu_init_failed", device=found.pci) if isinstance(found, GpuInitFailed) else found
    if message.startswith("nvidia-nvswitch"):
        return parse_nvswitch(message)
    if match := _OOM.match(message):
        return OomKill(pid=int(match[2]), name=match[3], of_cgroup=match[1] is not None, rss_bytes=int(match[4]) * 1024)
    return _link(message) or _hardware(message) or _fault(message)


THREE_LINES = 4
"""A GPU that is named is the one that fell off the bus in one of so many lines after."""
NUM_GPUS_MAX = 64
LINES_OF_RECORD_MAX = 64


class KernelReader:
    """Takes messages in order: joins multi-line messages, and keeps each GPU's UUID."""

    def __init__(self) -> None:
        self.uuids: dict[str, str] = {}  # by PCI address
        self._named, self._lines_left = "", 0

    def take(self, message: str) -> KernelFact | None:
        """The fact that this message completes; of a record of several lines the first. `GpuNamed` is kept and never
        returned."""
        first, *rest = message[:MESSAGE_CHARS_MAX].split("\n", LINES_OF_RECORD_MAX)
        fact = self._take(message)
        if fact is None and rest and not _OF_A_PROCESS.match(message):
            lines = (line.strip() for line in rest)
            fact = next((f for line in lines if continues(first, line) and (f := self._take(line))), None)
        return fact

    def _take(self, message: str) -> KernelFact | None:
        fact = parse_message(message)
        self._lines_left -= 1
        if isinstance(fact, GpuNamed):
            if not fact.uuid:
                self._named, self._lines_left = fact.pci, THREE_LINES
            elif len(self.uuids) < NUM_GPUS_MAX or fact.pci in self.uuids:
                self.uuids[fact.pci] = fact.uuid
            return None
        if isinstance(fact, GpuLost) and not fact.pci:
            named, self._named = self._named if self._lines_left > 0 else "", ""
            return GpuLost(pci=named) if named else None
        return fact
