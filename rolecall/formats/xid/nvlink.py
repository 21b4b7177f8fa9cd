"""Meaning of an NVLink XID line beyond its code: unit and status of 144 to 150, registers of 74.

NVIDIA's table for 144 to 150 is keyed by unit, first word and status. Drivers before R575 and from R575 on encode the
unit differently in the first word; no unit has the same bits in both, so the encoding identifies the driver. Where line
and table disagree about fatal, the worse counts. Without a matching row the line decides."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from rolecall.formats.xid.nvlink_table import (
    ANY,
    LINK_DOWN,
    LINK_DOWN_UNIT,
    NONFATAL,
    PROMOTED_BITS,
    PROMOTED_STATUS,
    PROMOTED_UNIT,
    REGISTER_SIGNS,
    UNITS,
)
from rolecall.formats.xid.xid import XidAction

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
        action=XidAction(action),
        investigatory=XidAction(investigatory),
        severity=severity,
        driver=DRIVERS[driver],
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
        NvlinkRegisterError.HARMLESS: ("nothing of weight", "nothing: it is counted"),
        NvlinkRegisterError.THRESHOLD: (
            "many corrected ECC errors, none uncorrected",
            "go on; NVIDIA's field diagnostics can check the link",
        ),
        NvlinkRegisterError.CONSEQUENCE: (
            "a consequence of another error",
            "follow the error that came with it; if there is none, call NVIDIA's support",
        ),
        NvlinkRegisterError.REPEATED: (
            "an error that matters when it repeats",
            "reset the GPU; if it comes back, call NVIDIA's support",
        ),
        NvlinkRegisterError.DIAGNOSE: (
            "an error that matters when it repeats",
            "reset the GPU; if it comes back, run NVIDIA's field diagnostics and call NVIDIA's support",
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
            "reset the GPU; more than twice on one link: call NVIDIA's support",
        ),
        NvlinkRegisterError.FABRIC: (
            "a consequence of another error, for which the fabric is to be reset",
            "reset the fabric, then follow the error that came with it; if there is none, call NVIDIA's support",
        ),
        NvlinkRegisterError.UNEXPECTED: ("bits that NVIDIA does not expect", "call NVIDIA's support"),
    }
)
"""Description and advice (NVIDIA's WORKFLOW_NVLINK_ERR)."""

NUM_ECC_TOLERATED = 2
"""Per link; more are a case for NVIDIA's support."""


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
