"""Meaning of an NVLink XID line beyond its code: unit and status of 144 to 150, registers of 74.

NVIDIA's table for 144 to 150 is keyed by unit, first word and status. Drivers before R575 and from R575 on encode the
unit differently in the first word; no unit has the same bits in both, so the encoding identifies the driver. Where line
and table disagree about fatal, the worse counts. Without a matching row the line decides."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

from rolecall.formats.xid.xid import XidAction

# "XID 144-150 Decode", and the text of WORKFLOW_NVLINK_ERR for XID 74. Numbers and words for actions are NVIDIA's.

NONFATAL, FATAL, LINK_FATAL = "non-fatal", "fatal", "link fatal"
ANY = -1
"""A row for every status."""

Row = tuple[int, str, str, str]  # error status (`ANY`: each), immediate action, investigatory action, severity

_COUNTED = ("IGNORE", "IGNORE", NONFATAL)
_TO_SUPPORT = ("IGNORE", "CONTACT_SUPPORT", NONFATAL)
_RESET = ("RESET_GPU", "CONTACT_SUPPORT", FATAL)
_OF_154 = ("XID_154_EVAL", "CONTACT_SUPPORT", NONFATAL)
_OF_154_LINK = ("XID_154_EVAL", "CHECK_NVLINK_FAILURE_FLOW", NONFATAL)
_OF_154_ONLY = ("XID_154_EVAL", "IGNORE", NONFATAL)
_SOFTWARE: Row = (0x80000000, *_TO_SUPPORT)  # raised by software, in every unit of 145 to 148 but one

_TLW: tuple[Row, ...] = ((0x1, *_COUNTED), (0x2, *_TO_SUPPORT), (0x4, *_RESET), _SOFTWARE)

UNITS: tuple[tuple[int, tuple[str, ...], int, int, tuple[Row, ...]], ...] = (
    # XID, names in the line (before R575, from R575 on), bits 0 to 9 before R575, bits 0 to 6 from R575 on, rows
    (
        144,
        ("SAW_MVB",),
        0b0000100001,
        0b0000001,
        (
            (0x1, *_TO_SUPPORT),
            (0x2, *_RESET),
            (0x4, *_COUNTED),
            (0x8, *_TO_SUPPORT),
            (0x10, *_RESET),
            (0x20, *_COUNTED),
        ),
    ),
    (145, ("RLW_CTRL",), 0b0001100010, 0b0000011, (_SOFTWARE,)),
    (
        145,
        ("RLW_REMAP",),
        0b0010000010,
        0b0000100,
        (
            (0x1, *_OF_154),
            (0x2, *_OF_154),
            (0x4, *_OF_154_LINK),
            (0x8, *_OF_154_LINK),
            (0x10, *_OF_154_LINK),
            (0x20, *_OF_154_LINK),
            (0x40, *_RESET),
            (0x80, *_RESET),
            (0x100, *_COUNTED),
            (0x200, *_COUNTED),
            _SOFTWARE,
        ),
    ),
    (145, ("RLW_RSPCOL",), 0b0010100010, 0b0000101, ((0x1, *_COUNTED), (0x2, *_RESET), _SOFTWARE)),
    (
        145,
        ("RLW_RXPIPE",),
        0b0011000010,
        0b0000110,
        ((0x1, *_TO_SUPPORT), (0x2, *_TO_SUPPORT), (0x4, *_TO_SUPPORT), (0x8, *_TO_SUPPORT), _SOFTWARE),
    ),
    (
        145,
        ("RLW_SRC_TRACK",),
        0b0011100010,
        0b0000111,
        (
            (0x1, *_RESET),
            (0x2, *_COUNTED),
            (0x4, *_OF_154_ONLY),
            (0x8, *_OF_154_ONLY),
            (0x10, *_RESET),
            (0x20, *_RESET),
            _SOFTWARE,
        ),
    ),
    (
        145,
        ("RLW_TAGSTATE",),
        0b0100000010,
        0b0001000,
        ((0x1, *_COUNTED), (0x2, *_RESET), (0x10000, *_COUNTED), (0x20000, *_RESET), (0x100000, *_RESET), _SOFTWARE),
    ),
    (146, ("TLW_CTRL",), 0b0100100011, 0b0001001, _TLW),
    (146, ("TLW_RX", "TLW_RX_PIPE0"), 0b0101000011, 0b0001010, _TLW),
    (146, ("TLW_RX", "TLW_RX_PIPE1"), 0b0101000011, 0b0001011, _TLW),
    (146, ("TLW_TX", "TLW_TX_PIPE0"), 0b0101100011, 0b0001100, _TLW),
    (146, ("TLW_TX", "TLW_TX_PIPE1"), 0b0101100011, 0b0001101, _TLW),
    (147, ("TREX",), 0b0110000100, 0b0001110, ((0x1, *_TO_SUPPORT), _SOFTWARE)),
    (148, ("NVLPW_CTRL", "NVLPW"), 0b0000000101, 0b0001111, (_SOFTWARE,)),
    (
        149,
        ("NETIR", "NETIR_INT"),
        0b0000000110,
        0b0011000,
        ((ANY, "RESET_GPU", "SYMPATHETIC_REPORT_SOLO", LINK_FATAL),),
    ),
    (
        149,
        ("NETIR_BER_EVENT",),
        0b1000100110,
        0b0010011,
        tuple((status, "IGNORE", "INVESTIGATE_LINK_SI_AND_CABLES", NONFATAL) for status in range(4)),
    ),
    (
        149,
        ("NETIR_MFDE_EVENT",),
        0b1001000110,
        0b0010100,
        ((0x1, *_RESET), (0x3, *_COUNTED), (0x4, *_RESET), (0x5, *_RESET), (0x7, *_RESET)),
    ),
    (150, ("MSE Degraded", "MSE_DEGRADED"), 0, 0, ((0x0, *_RESET), (0xFFFFFFFF, *_RESET))),
    (150, ("MSE_WATCHDOG",), 0, 0, ((0x0, *_RESET),)),
)
"""Of a unit that is none of these, or a status without a row, the line's own Fatal or Nonfatal decides."""

PROMOTED_UNIT = "RLW_RXPIPE"
PROMOTED_STATUS = (0x1, 0x2, 0x4)
PROMOTED_BITS = (1 << 10, 1 << 7)
"""In this unit these statuses ask for RESET_GPU where this bit of the first word is set (before R575, from R575 on)."""

LINK_DOWN_UNIT = (149, ("NETIR_LINK_EVT", "NETIR_LINK_DOWN"), 0b0111000110, 0b0010001)
LINK_DOWN: dict[int, tuple[str, str, str]] = {
    0b000000: ("RESET_GPU", "SYMPATHETIC_REPORT_SOLO", LINK_FATAL),
    0b000001: ("RESET_GPU", "REPORT_ISSUE", LINK_FATAL),
    **dict.fromkeys((0b000010, 0b000100, 0b001010), ("RESET_GPU", "INVESTIGATE_LINK_SI", LINK_FATAL)),
    **dict.fromkeys((0b001111, 0b010001, 0b010110), ("RESET_GPU", "INVESTIGATE_SW_USER", LINK_FATAL)),
    **dict.fromkeys((0b010000, 0b010010), ("RESET_GPU", "INVESTIGATE_SW_USER_LINK_SI", LINK_FATAL)),
    **dict.fromkeys((0b010101, *range(0b100000, 0b100110)), ("RESET_GPU", "INVESTIGATE_PEER_DEVICE", LINK_FATAL)),
    0b100110: ("IGNORE", "INVESTIGATE_SW_USER", LINK_FATAL),
    0b101000: ("IGNORE", "INVESTIGATE_HOST", FATAL),
    **dict.fromkeys((0b101010, 0b101011), ("RESET_GPU", "INVESTIGATE_LINK_SI_AND_CABLES", LINK_FATAL)),
}
"""By bits 20 to 25 of the first word: why the link went down. Its status says nothing."""

REGISTER_SIGNS: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = {
    0: (
        ("harmless", (0, 23, 30)),
        ("consequence", (1, 20)),
        ("ecc", (4, 5)),
        ("connection", (8, 9, 12, 16, 17, 24, 28)),
        ("signal", (21, 22)),
        ("repeated", (27, 29)),
    ),
    2: (("ecc", (0, 1, 2, 6)), ("unexpected", (13,)), ("diagnose", (16, 19)), ("repeated", (17, 18))),
    3: (("consequence", (16, 17)), ("fabric", (18,))),
    4: (("ecc", (18, 19, 21, 22, 24, 25, 27, 28)), ("threshold", (20, 23, 26, 29))),
}
"""Of an XID 74: by register (the first, third, fourth and fifth of its seven say something) what its bits are a sign
of. NVIDIA gives them for Hopper; other bits are `unexpected`."""

CODES = range(144, 151)
LINE_DECIDES = frozenset({74, 154, *CODES})
"""Codes whose severity and action depend on the line (154: the driver's recommendation)."""
DRIVERS = ("before R575", "R575 or later")
_UNIT_MASKS = (0x3FF, 0x7F)
_FLAGS = range(144, 149)
"""Codes whose status is a bit mask; for the others it is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """NVIDIA's assessment of one line. `severity`: `non-fatal`, `fatal` (the GPU), `link fatal`; `driver`: generation
    that wrote it."""

    action: XidAction
    investigatory: XidAction
    severity: str
    driver: str

    @property
    def fatal(self) -> bool:
        return self.severity != NONFATAL


def reason(interrupt: int) -> int:
    """Bits 20 to 25 of the first word: the sub-code."""
    return (interrupt >> 20) & 0x3F


def assess_line(code: int, unit: str, interrupt: int, status: int) -> Ruling | None:
    """`unit`: name in the line. `interrupt`, `status`: its first two words. None: NVIDIA's table has no such row."""
    said = {unit, *unit.split("/")}
    down_code, down_names, *down_bits = LINK_DOWN_UNIT
    if code == down_code and said & set(down_names):
        driver = _driver(interrupt, down_bits[0], down_bits[1])
        row = LINK_DOWN.get(reason(interrupt))
        return None if driver is None or row is None else _ruling(row, driver)
    if reason(interrupt):
        return None
    for row_code, names, before, later, rows in UNITS:
        if row_code != code or not said & set(names):
            continue
        driver = _driver(interrupt, before, later)
        if driver is None:
            continue
        if PROMOTED_UNIT in names and status & sum(PROMOTED_STATUS) and interrupt & PROMOTED_BITS[driver]:
            return _ruling(("RESET_GPU", "CONTACT_SUPPORT", "fatal"), driver)
        found = [r[1:] for r in rows if r[0] in (ANY, status) or (code in _FLAGS and r[0] & status)]
        if found:
            return max((_ruling(r, driver) for r in found), key=lambda r: (r.fatal, r.action is XidAction.XID_154_EVAL))
    return None


def _driver(interrupt: int, before: int, later: int) -> int | None:
    """The driver generation of DRIVERS that writes this unit."""
    for driver, bits in enumerate((before, later)):
        if interrupt & _UNIT_MASKS[driver] == bits:
            return driver
    return None


def _ruling(row: tuple[str, str, str], driver: int) -> Ruling:
    action, investigatory, severity = row
    return Ruling(
        action=XidAction(action), investigatory=XidAction(investigatory), severity=severity, driver=DRIVERS[driver]
    )


class NvlinkRegisterError(StrEnum):
    """Meaning of a bit in the registers of an XID 74, in order of severity."""

    HARMLESS = "harmless"
    THRESHOLD = "threshold"
    CONSEQUENCE = "consequence"
    REPEATED = "repeated"
    DIAGNOSE = "diagnose"
    SIGNAL = "signal"
    CONNECTION = "connection"
    ECC = "ecc"
    FABRIC = "fabric"
    UNEXPECTED = "unexpected"


SIGNS: Mapping[NvlinkRegisterError, tuple[str, str]] = MappingProxyType(
    {
        NvlinkRegisterError.HARMLESS: ("nothing significant", "nothing: it is only counted"),
        NvlinkRegisterError.THRESHOLD: (
            "many corrected ECC errors, none uncorrected",
            "go on; NVIDIA's field diagnostics can check the link",
        ),
        NvlinkRegisterError.CONSEQUENCE: (
            "a consequence of another error",
            "follow the error that came with it; if there is none, contact NVIDIA's support",
        ),
        NvlinkRegisterError.REPEATED: (
            "an error that matters when it repeats",
            "reset the GPU; if it comes back, contact NVIDIA's support",
        ),
        NvlinkRegisterError.DIAGNOSE: (
            "an error that matters when it repeats",
            "reset the GPU; if it comes back, run NVIDIA's field diagnostics and contact NVIDIA's support",
        ),
        NvlinkRegisterError.SIGNAL: (
            "signal integrity",
            (
                "follow the errors that came with it; else check the link's mechanical connections and run field "
                "diagnostics"
            ),
        ),
        NvlinkRegisterError.CONNECTION: (
            "hardware of the link",
            "check and re-seat the link's mechanical connections; if it comes back, run field diagnostics",
        ),
        NvlinkRegisterError.ECC: (
            "ECC or parity error",
            "reset the GPU; more than twice on one link: contact NVIDIA's support",
        ),
        NvlinkRegisterError.FABRIC: (
            "a consequence of another error, for which the fabric is to be reset",
            "reset the fabric, then follow the error that came with it; if there is none, contact NVIDIA's support",
        ),
        NvlinkRegisterError.UNEXPECTED: ("bits that NVIDIA does not expect", "contact NVIDIA's support"),
    }
)
"""Description and advice (NVIDIA's WORKFLOW_NVLINK_ERR)."""

NUM_ECC_TOLERATED = 2
"""Per link; more are a case for NVIDIA's support."""


@lru_cache(maxsize=4096)
def register_errors(registers: tuple[int, ...]) -> tuple[NvlinkRegisterError, ...]:
    """Errors in the registers of an XID 74, least severe first; empty if none."""
    found = set[NvlinkRegisterError]()
    for index, groups in REGISTER_SIGNS.items():
        word = registers[index] if index < len(registers) else 0
        for sign, bits in groups:
            mask = sum(1 << b for b in bits)
            if word & mask:
                found.add(NvlinkRegisterError(sign))
            word &= ~mask
        if word:
            found.add(NvlinkRegisterError.UNEXPECTED)
    return tuple(sign for sign in NvlinkRegisterError if sign in found)
