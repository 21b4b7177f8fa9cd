"""Meaning of NVIDIA's XID and SXid codes, and the action for each.

NVIDIA's catalogue (`Xid-Catalog.xlsx`, codes 1 to 172; included in leptonai/gpud and NVIDIA/NVSentinel) is
authoritative. Where gpud differs, its opinion is listed as a second opinion without effect. Fatal follows NVSentinel:
everything except application faults, codes to ignore and pointers to another code. The rows are in `table.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from rolecall.core.faults import FaultClass
from rolecall.formats.xid.table import NOTES, SXID_ROWS, UNUSED_ROWS, XID_ROWS


class XidAction(StrEnum):
    """Actions of NVIDIA's catalogue, immediate and investigatory."""

    NONE = ""  # the catalogue gives none (yet)
    IGNORE = "IGNORE"
    RESTART_APP = "RESTART_APP"
    RESET_GPU = "RESET_GPU"
    RESTART_VM = "RESTART_VM"
    RESTART_BM = "RESTART_BM"
    RESET_FABRIC = "RESET_FABRIC"
    RESTART_FM = "RESTART_FM"
    CHECK_MECHANICALS = "CHECK_MECHANICALS"
    CONTACT_SUPPORT = "CONTACT_SUPPORT"
    UPDATE_SWFW = "UPDATE_SWFW"
    CHECK_APP = "CHECK_APP/CUDA"
    CHECK_UVM = "CHECK_UVM"
    INVESTIGATE_SW = "INVESTIGATE_SW"
    INVESTIGATE_SW_USER = "INVESTIGATE_SW_USER"
    INVESTIGATE_LINK_SI = "INVESTIGATE_LINK_SI"
    SYMPATHETIC_REPORT_SOLO = "SYMPATHETIC_REPORT_SOLO"
    WORKFLOW_XID_13 = "WORKFLOW_XID_13"
    WORKFLOW_XID_31 = "WORKFLOW_XID_31"
    WORKFLOW_XID_45 = "WORKFLOW_XID_45"
    WORKFLOW_XID_48 = "WORKFLOW_XID_48"
    WORKFLOW_NVLINK_ERR = "WORKFLOW_NVLINK_ERR"
    WORKFLOW_NVLINK5_ERR = "WORKFLOW_NVLINK5_ERR"
    XID_137_FLOW = "XID_137_FLOW"
    XID_154 = "XID_154"
    XID_154_EVAL = "XID_154_EVAL"
    CHECK_NVLINK_FAILURE_FLOW = "CHECK_NVLINK_FAILURE_FLOW"
    REPORT_ISSUE = "REPORT_ISSUE"
    INVESTIGATE_SW_USER_LINK_SI = "INVESTIGATE_SW_USER_LINK_SI"
    INVESTIGATE_PEER_DEVICE = "INVESTIGATE_PEER_DEVICE"
    INVESTIGATE_HOST = "INVESTIGATE_HOST"
    INVESTIGATE_LINK_SI_AND_CABLES = "INVESTIGATE_LINK_SI_AND_CABLES"


ADVICE: Mapping[XidAction, str] = MappingProxyType(
    {
        XidAction.NONE: "inspect it: NVIDIA's catalogue has no action",
        XidAction.IGNORE: "nothing: it is only counted",
        XidAction.RESTART_APP: "restart the process; the GPU and its machine stay",
        XidAction.RESET_GPU: "drain the GPU and reset it (nvidia-smi --gpu-reset), then verify; else reboot",
        XidAction.RESTART_VM: "reboot the virtual machine",
        XidAction.RESTART_BM: "drain the machine and reboot it",
        XidAction.RESET_FABRIC: "reset the fabric partition or reboot, then have the hardware inspected",
        XidAction.RESTART_FM: "restart the fabric manager",
        XidAction.CHECK_MECHANICALS: "have the power cables and the seat of the board checked",
        XidAction.CONTACT_SUPPORT: "take the GPU out of use and contact NVIDIA's support",
        XidAction.UPDATE_SWFW: "update driver and firmware",
        XidAction.CHECK_APP: "find the fault in the application (compute-sanitizer, cuda-gdb)",
        XidAction.CHECK_UVM: "check the driver's unified-memory messages at the same time",
        XidAction.INVESTIGATE_SW: "find the fault in the software: driver, firmware, application",
        XidAction.INVESTIGATE_SW_USER: "find the fault in the software that uses NVLink",
        XidAction.INVESTIGATE_LINK_SI: "have the link's signal integrity checked",
        XidAction.SYMPATHETIC_REPORT_SOLO: "a consequence of another error; alone, report it",
        XidAction.WORKFLOW_XID_13: "check the application first; the same GPC and TPC twice: extended diagnostics",
        XidAction.WORKFLOW_XID_31: "check the application first; the same GPU twice in a day: extended diagnostics",
        XidAction.WORKFLOW_XID_45: "follow the XID that came before it; if there is none, restart the fabric manager",
        XidAction.WORKFLOW_XID_48: "reset the GPU; if XID 63 or 64 follows, drain it first",
        XidAction.WORKFLOW_NVLINK_ERR: "reset the GPU; if it recurs, have the link inspected",
        XidAction.WORKFLOW_NVLINK5_ERR: "reset the GPU if the line says Fatal; if it recurs, have the link inspected",
        XidAction.XID_137_FLOW: "check the application first, then at the NVLink errors of its peers",
        XidAction.XID_154: "follow the driver's request in the line",
        XidAction.XID_154_EVAL: "follow the XID 154 next to it; if there is none, restart the process",
        XidAction.CHECK_NVLINK_FAILURE_FLOW: "find a link that went down in the 30 s before it; if there is none, "
        "report it",
        XidAction.REPORT_ISSUE: "if it comes more than once a day, report it to NVIDIA",
        XidAction.INVESTIGATE_SW_USER_LINK_SI: "find what took the link down, then have its signal integrity checked",
        XidAction.INVESTIGATE_PEER_DEVICE: "check the device at the other end of the link: it took the link down",
        XidAction.INVESTIGATE_HOST: "check the other logs of the host: something else failed first",
        XidAction.INVESTIGATE_LINK_SI_AND_CABLES: "check cables, transceivers, seats and temperature of the link",
    }
)
"""The operator's step for every action of the catalogue."""

NOT_FATAL = frozenset(
    {XidAction.IGNORE, XidAction.RESTART_APP, XidAction.WORKFLOW_XID_45, XidAction.CHECK_UVM, XidAction.XID_154}
)
"""NVSentinel's severities of the catalogue's actions. For NVLink codes the line decides (`XidLine.fatal`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One code. `known`: it is in the catalogue."""

    code: int
    mnemonic: str
    meaning: str
    immediate: XidAction
    investigatory: XidAction
    fault_class: FaultClass
    second_opinion: str = ""
    """gpud's actions and the type of its event, where it has them: `REBOOT+HW_INSPECT / Fatal`."""
    known: bool = True

    @property
    def fatal(self) -> bool:
        """The GPU is unusable until it is repaired. For codes without an action the catalogue's remark decides, else
        gpud's reboot."""
        if self.immediate is XidAction.NONE:
            return NOTES[self.code][0] if self.code in NOTES else "REBOOT" in self.second_opinion
        return self.immediate not in NOT_FATAL

    @property
    def advice(self) -> str:
        if self.immediate is XidAction.NONE and self.code in NOTES:
            return NOTES[self.code][1]
        return ADVICE[self.immediate]


class RecoveryAction(StrEnum):
    """The driver's recommended recovery action, by number: in XID 154 and NVML's field GET_GPU_RECOVERY_ACTION."""

    NONE = "none"
    GPU_RESET = "gpu_reset"
    NODE_REBOOT = "node_reboot"
    DRAIN_P2P = "drain_p2p"
    DRAIN_AND_RESET = "drain_and_reset"
    RECOVER_IMEX_DOMAIN = "recover_imex_domain"
    BUS_RESET = "bus_reset"
    SYSTEM_REBOOT = "system_reboot"
    UNKNOWN = "unknown"

    @classmethod
    def of_number(cls, number: int) -> "RecoveryAction":
        return _BY_NUMBER[number] if 0 <= number < len(_BY_NUMBER) else cls.UNKNOWN


_BY_NUMBER = tuple(a for a in RecoveryAction if a is not RecoveryAction.UNKNOWN)

RECOVERY_ADVICE: Mapping[RecoveryAction, tuple[XidAction, str]] = MappingProxyType(
    {
        RecoveryAction.NONE: (XidAction.IGNORE, "nothing: the driver withdrew its request"),
        RecoveryAction.GPU_RESET: (XidAction.RESET_GPU, ADVICE[XidAction.RESET_GPU]),
        RecoveryAction.NODE_REBOOT: (XidAction.RESTART_BM, ADVICE[XidAction.RESTART_BM]),
        RecoveryAction.DRAIN_P2P: (XidAction.RESET_GPU, "end the work that uses this GPU over NVLink, then inspect it"),
        RecoveryAction.DRAIN_AND_RESET: (XidAction.RESET_GPU, ADVICE[XidAction.RESET_GPU]),
        RecoveryAction.RECOVER_IMEX_DOMAIN: (XidAction.RESET_FABRIC, "recover the IMEX domain of the node"),
        RecoveryAction.BUS_RESET: (XidAction.RESET_GPU, "drain the GPU and reset its PCIe bus"),
        RecoveryAction.SYSTEM_REBOOT: (XidAction.RESTART_BM, ADVICE[XidAction.RESTART_BM]),
        RecoveryAction.UNKNOWN: (XidAction.CONTACT_SUPPORT, "see the driver's documentation"),
    }
)
"""The recovery action as a catalogue action and as advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sxid:
    """One NVSwitch code. A fatal one affects every GPU on the link that its line names."""

    code: int
    meaning: str
    group: str  # `benign`, `reset`, `potentially fatal`, `always fatal`, `host`
    action: XidAction
    advice: str
    known: bool = True

    @property
    def fatal(self) -> bool:
        return self.group in ("reset", "potentially fatal", "always fatal")


def xid(code: int) -> Xid:
    """Meaning of `code`; an unknown code is fatal and a case for NVIDIA's support."""
    return XIDS.get(code) or Xid(
        code=code,
        mnemonic=f"XID_{code}",
        meaning="not in NVIDIA's catalogue",
        immediate=XidAction.CONTACT_SUPPORT,
        investigatory=XidAction.CONTACT_SUPPORT,
        fault_class=FaultClass.GPU,
        known=False,
    )


def sxid(code: int) -> Sxid:
    """Meaning of `code`; for an unknown code the line's Fatal or Non-fatal decides."""
    return SXIDS.get(code) or Sxid(
        code=code,
        meaning="not in NVIDIA's catalogue",
        group="unknown",
        action=XidAction.CONTACT_SUPPORT,
        advice="see the line: it says whether it is fatal",
        known=False,
    )


_SXID_ACTIONS = {
    "benign": (XidAction.IGNORE, "count it, and watch its rate"),
    # Lines call these non-fatal. NVIDIA's Fabric Manager user guide asks for a restart of the virtual machine or a
    # reset of GPUs and NVSwitches all the same, and NVSentinel has them as fatal.
    "reset": (
        XidAction.RESET_FABRIC,
        (
            "restart the virtual machine, or drain the node and reset its GPUs and NVSwitches together (nvidia-smi "
            "--gpu-reset), else reboot; follow the error that came before it, if there is one"
        ),
    ),
    "potentially fatal": (XidAction.RESET_FABRIC, ADVICE[XidAction.RESET_FABRIC]),
    "always fatal": (XidAction.RESTART_BM, "reboot the host: the whole fabric is affected"),
    "host": (XidAction.IGNORE, "check temperatures and power"),
}

XIDS: Mapping[int, Xid] = MappingProxyType(
    {
        code: Xid(
            code=code,
            mnemonic=mnemonic,
            meaning="unused in NVIDIA's catalogue",
            immediate=XidAction.CONTACT_SUPPORT,
            investigatory=XidAction.NONE,
            fault_class=FaultClass.GPU,
        )
        for code, mnemonic in UNUSED_ROWS.items()
    }
    | {
        code: Xid(
            code=code,
            mnemonic=mnemonic,
            meaning=meaning,
            immediate=XidAction(immediate),
            investigatory=XidAction(investigatory),
            fault_class=FaultClass(fault_class),
            second_opinion=second_opinion,
        )
        for code, mnemonic, meaning, immediate, investigatory, fault_class, second_opinion in XID_ROWS
    }
)
"""By code, 1 to 172: all of NVIDIA's catalogue; and 173."""

SXIDS: Mapping[int, Sxid] = MappingProxyType(
    {
        code: Sxid(
            code=code, meaning=meaning, group=group, action=_SXID_ACTIONS[group][0], advice=_SXID_ACTIONS[group][1]
        )
        for group, rows in SXID_ROWS.items()
        for code, meaning in rows.items()
    }
)
"""By code."""
