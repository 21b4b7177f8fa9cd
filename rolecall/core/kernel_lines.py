"""What one message of the kernel says: XIDs, lost GPUs, NVSwitch errors, OOM kills, links, hardware errors, lockups.

Pure: a message in (without its time stamp, see `kernel_stamps.py`), a fact or None out. Each pattern begins at the first
character, so that a message that merely quotes another one says nothing. Formats: the open NVIDIA driver (`NVRM: Xid`,
`SXid`), Linux mm/oom_kill.c, kernel/watchdog.c, kernel/hung_task.c, drivers/edac, drivers/pci/pcie/aer.c,
arch/x86/kernel/cpu/mce, drivers/firmware/efi/cper.c and the network drivers named below. Real lines and near-misses of
each stand in tests/core/test_kernel_lines.py.
"""

import re
from dataclasses import dataclass

from rolecall.core.xid import RecoveryAction

MESSAGE_CHARS_MAX = 4096
"""Of one message so much is looked at; the kernel itself cuts a record at 1 KiB (2 KiB from 6.x on)."""

_PCI = r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?"
_PCI_BARE = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"


def normal_pci(address: str) -> str:
    """`PCI:00000000:3B:00.0` -> `0000:3b:00`: domain (four digits, more where they are needed), bus, device."""
    domain, _, rest = address.removeprefix("PCI:").lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest.partition('.')[0]}"


# --- facts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink5:
    """What an XID 144 to 150 says of its link. `subcode`: bits 20 to 25 of the first word."""

    unit: str  # `NETIR_LINK_EVT`, with `/` and a sub-unit where there is one
    fatal: bool
    link: int | None
    subcode: int
    interrupt: int  # first word
    status: int  # second word, 0 where the line has none (drivers before R575)


@dataclass(frozen=True, slots=True, kw_only=True)
class XidLine:
    """`NVRM: Xid`. `pci` as `normal_pci` writes it; `partition`: MIG instance, or empty."""

    pci: str
    code: int
    text: str
    partition: str = ""
    pid: int | None = None
    name: str = ""
    nvlink: NvLink5 | None = None
    recovery: RecoveryAction | None = None  # of XID 154
    place: str = ""  # of XID 13: `GPC 0, TPC 3`
    registers: tuple[int, ...] = ()  # of XID 74


@dataclass(frozen=True, slots=True, kw_only=True)
class SxidLine:
    """`nvidia-nvswitchN: SXid`. `fatal` as the line says."""

    switch: int
    pci: str
    code: int
    fatal: bool
    link: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """It fell off the bus, said without an XID: counts as XID 79."""

    pci: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNamed:
    """`uuid`: of the GPU at this address. Empty: the first of three lines of which the last says that it is lost."""

    pci: str
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """`of_cgroup`: its cgroup was out of memory; else the whole machine (or not said, by old kernels)."""

    pid: int
    name: str
    of_cgroup: bool
    rss_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
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
    """Another fault: `what` is one of FAULTS. `pid` and `name` of the process that it struck, where it says so."""

    what: str
    pid: int | None = None
    name: str = ""
    device: str = ""


KernelFact = XidLine | SxidLine | GpuLost | GpuNamed | OomKill | LinkChange | HardwareError | KernelFault


# --- NVIDIA ---------------------------------------------------------------------------------------------------------

# NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS ..
# NVRM: Xid (0000:03:00): 14, Channel 00000001
# NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No
_XID = re.compile(rf"NVRM: Xid \({_PCI}((?: GPU-C?I:\d{{1,3}}){{0,2}})\): ([1-9]\d{{0,3}})(?:,\s*(.*))?$", re.DOTALL)
_XID_PROCESS = re.compile(r"pid=(\d{1,10}|'?<unknown>'?)(?:, name=([^,]{0,64}|<unknown>))?(?:,\s*|$)")
# 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x004505c6 0x00000000 ..)     from R575 on
# 149, NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]                    before
_NVLINK5 = re.compile(
    r"([A-Z][A-Z0-9_]{2,40}(?:/[A-Z][A-Z0-9_]{0,40})?)\s+(Fatal|Non-?fatal)\s+XC ?[01]\s+i ?\d{1,3}\s+"
    r"Link (\d{1,3}|-+)\s*[(\[]0x([0-9a-fA-F]{1,8})(?: 0x([0-9a-fA-F]{1,8}))?[ )\]]"
)
NVLINK5_CODES = range(144, 151)
_RECOVERY = re.compile(r"GPU recovery action changed from 0x[0-9a-fA-F]{1,8} \(.{0,60}?\) to 0x([0-9a-fA-F]{1,8}) ")
_GPC_TPC = re.compile(r"\bGPC (\d{1,2}), TPC (\d{1,2})\b")
_NVLINK_REGISTERS = re.compile(r"\((0x[0-9a-fA-F]{1,8}(?:,\s*0x[0-9a-fA-F]{1,8}){0,7})\)")

_GPU_OFF_BUS = re.compile(rf"NVRM: GPU (?:at )?{_PCI}: GPU has fallen off the bus\b")
_GPU_UUID = re.compile(rf"NVRM: GPU at {_PCI}: (GPU-[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})\b")
_GPU_FIRST_OF_THREE = re.compile(rf"NVRM: The NVIDIA GPU {_PCI}")
_GPU_LAST_OF_THREE = re.compile(r"NVRM: .*\bfallen off the bus and is not responding to commands", re.DOTALL)
_GPU_INIT = re.compile(rf"NVRM: GPU (?:at )?{_PCI}: RmInitAdapter failed!")

# nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)
# Lines of the same event that follow (`Severity 0 Engine instance ..`, `Data {0x..}`) carry neither word.
_SXID = re.compile(
    rf"nvidia-nvswitch(\d{{1,3}}): SXid \({_PCI}\): (\d{{1,6}}), (Fatal|Non-?fatal),?\s*(?:Link (-?\d{{1,3}})\s*)?(.*)$",
    re.DOTALL | re.IGNORECASE,
)


def _xid(m: re.Match[str]) -> XidLine:
    code, rest = int(m[3]), m[4] or ""
    pid, name = None, ""
    if process := _XID_PROCESS.match(rest):
        pid = int(process[1]) if process[1].isdecimal() else None
        name = "" if (process[2] or "").strip("'") == "<unknown>" else process[2] or ""
        rest = rest[process.end() :]
    place = _GPC_TPC.search(rest) if code == 13 else None
    registers = _NVLINK_REGISTERS.search(rest) if code == 74 else None
    change = _RECOVERY.search(rest) if code == 154 else None
    return XidLine(
        pci=normal_pci(m[1]),
        code=code,
        text=rest.strip(),
        partition=m[2].strip(),
        pid=pid,
        name=name,
        nvlink=_nvlink5(rest) if code in NVLINK5_CODES else None,
        recovery=RecoveryAction.of_number(int(change[1], 16)) if change else None,
        place=f"GPC {int(place[1])}, TPC {int(place[2])}" if place else "",
        registers=tuple(int(r, 16) for r in registers[1].split(",")) if registers else (),
    )


def _nvlink5(text: str) -> NvLink5 | None:
    m = _NVLINK5.search(text)
    if m is None:
        return None
    interrupt = int(m[4], 16)
    return NvLink5(
        unit=m[1],
        fatal=m[2] == "Fatal",
        link=int(m[3]) if m[3].isdecimal() else None,
        subcode=(interrupt >> 20) & 0x3F,
        interrupt=interrupt,
        status=int(m[5], 16) if m[5] else 0,
    )


NVLINK_ERROR_BITS: dict[str, int] = {
    "ECC or parity error": 1 << 4 | 1 << 5,
    "signal integrity": 1 << 21 | 1 << 22,
    "hardware": 1 << 8 | 1 << 9 | 1 << 12 | 1 << 16 | 1 << 17 | 1 << 24 | 1 << 28,
    "not explained by NVIDIA": 1 << 1 | 1 << 20,
}
"""Bits of the first register in an XID 74 (NVIDIA's XID documentation, as NVSentinel reads it)."""


def nvlink_error(registers: tuple[int, ...]) -> str:
    """What the registers of an XID 74 say, in words; empty where they say nothing that is known."""
    first = registers[0] if registers else 0
    return ", ".join(words for words, bits in NVLINK_ERROR_BITS.items() if first & bits)


def _sxid(m: re.Match[str]) -> SxidLine:
    return SxidLine(
        switch=int(m[1]),
        pci=normal_pci(m[2]),
        code=int(m[3]),
        fatal=m[4].lower() == "fatal",
        link=int(m[5]) if m[5] else None,
        text=m[6].strip(),
    )


def _nvidia(message: str) -> KernelFact | None:
    if m := _XID.match(message):
        return _xid(m)
    if m := _GPU_OFF_BUS.match(message):
        return GpuLost(pci=normal_pci(m[1]))
    if m := _GPU_UUID.match(message):
        return GpuNamed(pci=normal_pci(m[1]), uuid=m[2])
    if m := _GPU_INIT.match(message):
        return KernelFault(what="gpu_init_failed", device=normal_pci(m[1]))
    last = _GPU_LAST_OF_THREE.match(message)
    if m := _GPU_FIRST_OF_THREE.match(message):
        # One record with line breaks in /dev/kmsg, three lines in text.
        return GpuLost(pci=normal_pci(m[1])) if last else GpuNamed(pci=normal_pci(m[1]))
    return GpuLost(pci="") if last else None


# --- memory ---------------------------------------------------------------------------------------------------------

# Memory cgroup out of memory: Killed process 812 (python3) total-vm:9kB, anon-rss:8kB, file-rss:1kB, ..
# Out of memory: Killed process 812 (python3) total-vm:..     Out of memory (oom_kill_allocating_task): Killed ..
# Killed process 812 (python3) total-vm:..   before Linux 5.1, after "Out of memory: Kill process 812 .. score 9 or .."
_OOM = re.compile(
    r"(?:(Memory cgroup )?[Oo]ut of memory(?: \(\w{1,40}\))?: )?Killed process (\d{1,10}) \((.{0,64})\),? "
    r"(?:UID[ :]?\d+, )?total-vm:\d+kB, anon-rss:(\d{1,15})kB"
)


def _oom(m: re.Match[str]) -> OomKill:
    return OomKill(pid=int(m[2]), name=m[3], of_cgroup=m[1] is not None, rss_bytes=int(m[4]) * 1024)


# --- links ----------------------------------------------------------------------------------------------------------

_INTERFACE = r"([A-Za-z][\w.@-]{0,31})"
# mlx5_core 0000:41:00.0 ens1f0np0: Link down    tg3 0000:02:00.0 eth0: Link is down
# ice 0000:17:00.0 ens1f0: NIC Link is up 100 Gbps, ..   igb 0000:07:00.0 eth0: igb: eth0 NIC Link is Down
_LINK = re.compile(
    rf"\w{{1,32}} ({_PCI_BARE}) {_INTERFACE}: (?:\w{{1,32}}: \S{{1,32}} )?(?:NIC )?[Ll]ink (?:is )?([Uu]p|[Dd]own)\b"
)
# e1000e: eth0 NIC Link is Up 1000 Mbps    mlx4_en: eth2: Link Down
_LINK_OLD = re.compile(rf"(?:e1000e?|ixgbe|igb|mlx4_en): {_INTERFACE}:? (?:NIC )?Link (?:is )?(Up|Down)\b")
# IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready    (of Ethernet the driver says it itself)
_LINK_IB = re.compile(r"(?:IPv6: )?ADDRCONF\(NETDEV_CHANGE\): (ib[\w.]{1,31}): link becomes ready")


def _link(message: str) -> LinkChange | None:
    if m := _LINK.match(message):
        return LinkChange(up=m[3].lower() == "up", interface=m[2], nic=m[1].lower())
    if m := _LINK_OLD.match(message):
        return LinkChange(up=m[2] == "Up", interface=m[1])
    if m := _LINK_IB.match(message):
        return LinkChange(up=True, interface=m[1])
    return None


# --- hardware errors ------------------------------------------------------------------------------------------------

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
    if m := _MCE_BANK.match(message):
        # Corrected ones are told of by the line "events logged" already.
        uncorrected = int(m[2], 16) & MCE_UNCORRECTED
        return HardwareError(what="machine_check", corrected=False, device=f"bank {m[1]}") if uncorrected else None
    if _MCE_LOGGED.match(message):
        return HardwareError(what="machine_check", corrected=True)
    if m := _EDAC.match(message):
        return HardwareError(what="memory", corrected=m[2] == "CE", device=m[1])
    if m := _GHES.match(message):
        return HardwareError(what="firmware", corrected=m[1] in ("corrected", "info"))
    if m := _AER.match(message):
        return HardwareError(what="pcie", corrected=m[2] == "Correct", device=(m[3] or m[1]).lower())
    if m := _MEMORY_FAILURE.match(message):
        return HardwareError(what="memory", corrected=False, device=m[1])
    return None


# --- other faults ---------------------------------------------------------------------------------------------------

_NAME = r"(?P<name>.{0,64})"
_FAULTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "soft_lockup",
        re.compile(
            rf"(?:NMI )?(?:watchdog: )?BUG: soft lockup - (?P<device>CPU#\d{{1,5}}) stuck for \d{{1,9}}s! "
            rf"\[{_NAME}:(?P<pid>\d{{1,10}})\]"
        ),
    ),
    (
        "hard_lockup",
        re.compile(
            r"(?:NMI )?watchdog: (?:CPU\d{1,5}: )?(?:NMI )?Watchdog detected hard LOCKUP on (?P<device>cpu \d{1,5})"
        ),
    ),
    (
        "hung_task",
        re.compile(rf"INFO: task {_NAME}:(?P<pid>\d{{1,10}}) blocked (?:in I/O wait )?for more than \d{{1,9}} seconds"),
    ),
    ("rcu_stall", re.compile(r"(?:rcu: )?INFO: rcu_\w{1,20} (?:self-)?detected (?:expedited )?stalls? on CPU")),
    ("panic", re.compile(r"Kernel panic - not syncing: ")),
    ("oops", re.compile(r"BUG: (?:unable to handle |kernel NULL pointer )|Oops: \w|kernel BUG at ")),
    (
        "segfault",
        re.compile(rf"{_NAME}\[(?P<pid>\d{{1,10}})\]: segfault at .{{1,200}} in (?P<device>[\w.+-]{{1,80}})\["),
    ),
    (
        "disk_error",
        re.compile(
            r"(?:blk_update_request: )?(?:critical (?:medium|target) error|I/O error), dev (?P<device>[\w!-]{1,32}), sector "
        ),
    ),
    (
        "disk_error",
        re.compile(
            r"nvme (?P<device>nvme\d{1,4}): (?:I/O .{1,80} timeout|controller is down; will reset|Device not ready"
            r"|Removing after probe failure)"
        ),
    ),
    ("filesystem_error", re.compile(r"(?:EXT4-fs error \(device |BTRFS error \(device )(?P<device>[\w!-]{1,32})")),
    (
        "filesystem_error",
        re.compile(
            r"(?:EXT4-fs|XFS) \((?P<device>[\w!-]{1,32})\): (?:Remounting filesystem read-only|Corruption "
            r"|[Ll]og I/O [Ee]rror|Filesystem has been shut down)"
        ),
    ),
    (
        "nic_fault",
        re.compile(
            rf"mlx5_core (?P<pci>{_PCI_BARE})(?: \S{{1,32}})?: (?:\w{{1,40}}:\d{{1,6}}:\(pid \d{{1,10}}\): )?"
            r"(?:Fatal error \d|device's health compromised|handling bad device here|\S{1,60} timeout\. Will cause a leak)"
        ),
    ),
    (
        "nic_cable",
        re.compile(
            rf"mlx5_core (?P<pci>{_PCI_BARE}): Port module event(?:\[error\])?: module \d{{1,3}}, Cable (?:unplugged|error)"
        ),
    ),
    ("nic_fault", re.compile(r"NETDEV WATCHDOG: (?P<device>[\w.@-]{1,32})\b.{0,80}: transmit queue \d{1,5} timed out")),
    (
        "pcie_link_down",
        re.compile(rf"pcieport (?P<pci>{_PCI_BARE}): pciehp: Slot\(\S{{1,32}}\): (?:Link Down|Card not present)"),
    ),
    (
        "cpu_throttled",
        re.compile(r"(?:mce: )?(?P<device>CPU\d{1,5}): (?:Core|Package) temperature (?:is )?above threshold"),
    ),
)
FAULTS: tuple[str, ...] = (*dict.fromkeys(what for what, _ in _FAULTS), "gpu_init_failed")
"""All that KernelFault.what may be."""


def _fault(message: str) -> KernelFault | None:
    for what, pattern in _FAULTS:
        if m := pattern.match(message):
            said = m.groupdict()
            device = said.get("pci") or said.get("device") or ""
            pid = int(said["pid"]) if said.get("pid") else None
            return KernelFault(what=what, pid=pid, name=said.get("name") or "", device=device)
    return None


def parse_message(message: str) -> KernelFact | None:
    """What it says; None: nothing that is looked for. Never raises, whatever the text."""
    message = message[:MESSAGE_CHARS_MAX].rstrip()
    if message.startswith("NVRM: "):
        return _nvidia(message)
    if message.startswith("nvidia-nvswitch"):
        m = _SXID.match(message)
        return _sxid(m) if m else None
    if m := _OOM.match(message):
        return _oom(m)
    return _link(message) or _hardware(message) or _fault(message)


THREE_LINES = 4
"""A GPU that is named is the one that fell off the bus in one of so many lines after."""
NUM_GPUS_MAX = 64


class KernelReader:
    """Messages in their order: joins what stands in several lines, and keeps which GPU has which UUID."""

    def __init__(self) -> None:
        self.uuids: dict[str, str] = {}  # by PCI address
        self._named, self._lines_left = "", 0

    def take(self, message: str) -> KernelFact | None:
        """The fact that this message completes. `GpuNamed` is kept here, and never given."""
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
