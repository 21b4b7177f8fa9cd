"""Parses kernel messages of NVIDIA's drivers: XIDs, lost or identified GPUs, NVSwitch errors.

Formats: the open driver's `NVRM: Xid` and `SXid`, before R575 and from R575 on. Real lines and near-misses of each are
in tests/formats/test_kernel_log.py."""

import re
from dataclasses import dataclass

from rolecall.formats.xid.nvlink import CODES, SIGNS, NvlinkRegisterError, Ruling, assess_line, reason, register_errors
from rolecall.formats.xid.xid import ADVICE, RECOVERY_ADVICE, RecoveryAction, XidAction, xid

_PCI = r"(?:PCI:)?((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?"
"""Without a domain it is domain 0, as lspci(8) writes it too."""


def normal_pci(address: str) -> str:
    """`PCI:00000000:3B:00.0`, `PCI:3B:00` -> `0000:3b:00`: domain (four digits, more where they are needed), bus,
    device."""
    address = address.removeprefix("PCI:").lower()
    domain, _, rest = (address if address.count(":") > 1 else f"0:{address}").partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest.partition('.')[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink5:
    """Link information of an XID 144 to 150. `subcode`: bits 20 to 25 of the first word."""

    unit: str  # `NETIR_LINK_EVT`, with `/` and a sub-unit where there is one
    fatal: bool  # according to the line
    link: int | None
    subcode: int
    interrupt: int  # first word
    status: int  # second word, 0 where the line has none (old drivers)
    assessment: Ruling | None = None  # NVIDIA's table has a row for it


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
    link: int | None = None  # of XID 74

    @property
    def instance(self) -> dict[str, str]:
        """`gpu_instance` and `compute_instance` of the affected MIG instance, as far as given."""
        words = dict(word.split(":") for word in self.partition.split())
        named = {"gpu_instance": words.get("GPU-I", ""), "compute_instance": words.get("GPU-CI", "")}
        return {name: str(int(number)) for name, number in named.items() if number}

    @property
    def nvlink_register_errors(self) -> tuple[NvlinkRegisterError, ...]:
        """Of XID 74: what its registers say, the least first."""
        return register_errors(self.registers)

    @property
    def action(self) -> XidAction:
        """The catalogue's for the code; where the line decides (74, 144 to 150, 154), what comes of it."""
        if self.nvlink is not None:
            said = self.nvlink.assessment
            fatal = self.nvlink.fatal or (said is not None and said.fatal)
            if said is not None and said.fatal == fatal and not (fatal and said.action is XidAction.IGNORE):
                return said.action
            # The table also has rows that are link fatal with action IGNORE: a lost link is never ignored.
            return XidAction.WORKFLOW_NVLINK5_ERR if fatal else XidAction.IGNORE
        if self.nvlink_register_errors and set(self.nvlink_register_errors) <= {
            NvlinkRegisterError.HARMLESS,
            NvlinkRegisterError.THRESHOLD,
        }:
            return XidAction.IGNORE
        if self.recovery is not None:
            return RECOVERY_ADVICE[self.recovery][0]
        return xid(self.code).immediate

    @property
    def fatal(self) -> bool:
        """The GPU cannot be worked with until something was done. Where line and table disagree, the worse."""
        if self.action is XidAction.IGNORE:
            return False
        if self.recovery is not None:
            return True
        if self.nvlink is not None:
            return self.nvlink.fatal or (self.nvlink.assessment is not None and self.nvlink.assessment.fatal)
        return xid(self.code).fatal

    @property
    def advice(self) -> str:
        """What an operator does about this line."""
        if self.recovery is not None:
            return RECOVERY_ADVICE[self.recovery][1]
        if self.nvlink_register_errors:
            return SIGNS[self.nvlink_register_errors[-1]][1]
        said = xid(self.code).advice if self.nvlink is None else ADVICE[self.action]
        if self.nvlink is None or self.nvlink.assessment is None:
            return said
        more = self.nvlink.assessment.investigatory
        return said if more in (self.action, XidAction.IGNORE, XidAction.NONE) else f"{said}; then: {ADVICE[more]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SxidLine:
    """`nvidia-nvswitchN: SXid`. `fatal`: according to the line."""

    switch: int
    pci: str
    code: int
    fatal: bool
    link: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """It fell off the bus, reported without an XID: counts as XID 79."""

    pci: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNamed:
    """`uuid`: of the GPU at this address. Empty: the first of three lines, the last of which reports the loss."""

    pci: str
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInitFailed:
    """The driver could not bring it up."""

    pci: str


NvidiaFact = XidLine | SxidLine | GpuLost | GpuNamed | GpuInitFailed

# NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS ..
# NVRM: Xid (0000:03:00): 14, Channel 00000001
# NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No
_XID = re.compile(
    rf"NVRM: Xid \({_PCI}((?: GPU-C?I:\d{{1,3}}){{0,2}})\): ([1-9]\d{{0,3}})(?:,\s*(.*))?$", re.DOTALL | re.ASCII
)
_XID_PROCESS = re.compile(r"pid=(\d{1,10}|'?<unknown>'?)(?:, name=([^,]{0,64}|<unknown>))?(?:,\s*|$)")
# 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x004505c6 0x00000000 ..)     from R575 on
# 149, NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]                    before
_NVLINK5 = re.compile(
    r"(MSE Degraded|[A-Z][A-Z0-9_]{2,40}(?:/[A-Z][A-Z0-9_]{0,40})?)\s+(Fatal|Non-?fatal)\s+XC ?[01]\s+i ?\d{1,3}\s+"
    r"Link (\d{1,3}|-\d?)\s*[(\[]0x([0-9a-fA-F]{1,8})(?: 0x([0-9a-fA-F]{1,8}))?[ )\]]"
)
_RECOVERY = re.compile(r"GPU recovery action changed from 0x[0-9a-fA-F]{1,8} \(.{0,60}?\) to 0x([0-9a-fA-F]{1,8}) ")
_GPC_TPC = re.compile(r"\bGPC (\d{1,2}), TPC (\d{1,2})\b")
# NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)
_NVLINK_REGISTERS = re.compile(r"(?:\blink (\d{1,3}) ?)?\((0x[0-9a-fA-F]{1,8}(?:,\s*0x[0-9a-fA-F]{1,8}){0,7})\)")

_GPU_OFF_BUS = re.compile(rf"NVRM: GPU (?:at )?{_PCI}: GPU has fallen off the bus\b")
_GPU_UUID = re.compile(rf"NVRM: GPU at {_PCI}: (GPU-[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})\b")
_GPU_FIRST_OF_THREE = re.compile(rf"NVRM: The NVIDIA GPU {_PCI}")
_GPU_LAST_OF_THREE = re.compile(r"NVRM: .*\bfallen off the bus and is not responding to commands", re.DOTALL)
_GPU_INIT = re.compile(rf"NVRM: GPU (?:at )?{_PCI}: RmInitAdapter failed!")

# nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)
# Lines of the same event that follow (`Severity 0 Engine instance ..`, `Data {0x..}`) carry neither word.
_SXID = re.compile(
    rf"nvidia-nvswitch(\d{{1,3}}): SXid \({_PCI}\): (\d{{1,6}}), (Fatal|Non-?fatal)\b,?\s*(?:Link (-?\d{{1,3}})\s*)?(.*)$",
    re.DOTALL | re.IGNORECASE | re.ASCII,
)


def _xid(match: re.Match[str]) -> XidLine:
    code, rest = int(match[3]), match[4] or ""
    pid, name = None, ""
    if process := _XID_PROCESS.match(rest):
        pid = int(process[1]) if process[1].isdecimal() else None
        name = "" if (process[2] or "").strip("'") == "<unknown>" else process[2] or ""
        rest = rest[process.end() :]
    place = _GPC_TPC.search(rest) if code == 13 else None
    registers = _NVLINK_REGISTERS.search(rest) if code == 74 else None
    change = _RECOVERY.search(rest) if code == 154 else None
    return XidLine(
        pci=normal_pci(match[1]),
        code=code,
        text=rest.strip(),
        partition=match[2].strip(),
        pid=pid,
        name=name,
        nvlink=_nvlink5(code, rest) if code in CODES else None,
        recovery=RecoveryAction.of_number(int(change[1], 16)) if change else None,
        place=f"GPC {int(place[1])}, TPC {int(place[2])}" if place else "",
        registers=tuple(int(r, 16) for r in registers[2].split(",")) if registers else (),
        link=int(registers[1]) if registers and registers[1] else None,
    )


def _nvlink5(code: int, text: str) -> NvLink5 | None:
    match = _NVLINK5.search(text)
    if match is None:
        return None
    interrupt, status = int(match[4], 16), int(match[5], 16) if match[5] else 0
    return NvLink5(
        unit=match[1],
        fatal=match[2] == "Fatal",
        link=int(match[3]) if match[3].isdecimal() else None,
        subcode=reason(interrupt),
        interrupt=interrupt,
        status=status,
        assessment=assess_line(code, match[1], interrupt, status),
    )


def parse_nvidia(message: str) -> NvidiaFact | None:
    """The fact in a message that begins with `NVRM: `; None: not of interest."""
    if match := _XID.match(message):
        return _xid(match)
    if match := _GPU_OFF_BUS.match(message):
        return GpuLost(pci=normal_pci(match[1]))
    if match := _GPU_UUID.match(message):
        return GpuNamed(pci=normal_pci(match[1]), uuid=match[2])
    if match := _GPU_INIT.match(message):
        return GpuInitFailed(pci=normal_pci(match[1]))
    last = _GPU_LAST_OF_THREE.match(message)
    if match := _GPU_FIRST_OF_THREE.match(message):
        # One record with line breaks in /dev/kmsg, three lines in text.
        return GpuLost(pci=normal_pci(match[1])) if last else GpuNamed(pci=normal_pci(match[1]))
    return GpuLost(pci="") if last else None


def parse_nvswitch(message: str) -> SxidLine | None:
    """A message that begins with `nvidia-nvswitch`."""
    match = _SXID.match(message)
    if match is None:
        return None
    return SxidLine(
        switch=int(match[1]),
        pci=normal_pci(match[2]),
        code=int(match[3]),
        fatal=match[4].lower() == "fatal",
        link=int(match[5]) if match[5] else None,
        text=match[6].strip(),
    )
