"""NVIDIA's table of the XIDs 144 to 150 and the registers of 74: each row is found, from lines of both generations."""

from itertools import combinations

import pytest

from rolecall.formats.xid.nvlink import (
    ANY,
    CODES,
    DRIVERS,
    LINK_DOWN,
    LINK_DOWN_UNIT,
    PROMOTED_BITS,
    PROMOTED_STATUS,
    REGISTER_SIGNS,
    SIGNS,
    UNITS,
    NvlinkRegisterError,
    assess_line,
    register_errors,
)
from rolecall.formats.xid.xid import ADVICE, XidAction

ROWS = [(u, r, driver) for u in UNITS for r in u[4] for driver in (0, 1)]


@pytest.mark.parametrize(("unit", "row", "driver"), ROWS)
def test_every_table_row_is_found_in_every_line_format(
    unit: tuple[int, tuple[str, ...], int, int, tuple[object, ...]], row: tuple[int, str, str, str], driver: int
) -> None:
    code, names, before, later, _ = unit
    status = 0 if row[0] == ANY else row[0]
    found = assess_line(code, names[min(driver, len(names) - 1)], later if driver else before, status)
    assert found is not None
    assert (found.action, found.investigatory, found.severity) == (XidAction(row[1]), XidAction(row[2]), row[3])
    assert ADVICE[found.action] and ADVICE[found.investigatory]
    assert found.driver == DRIVERS[driver] or before == later == 0


@pytest.mark.parametrize("driver", [0, 1])
@pytest.mark.parametrize("why", LINK_DOWN)
def test_every_reason_of_a_link_that_went_down(why: int, driver: int) -> None:
    code, names, *bits = LINK_DOWN_UNIT
    found = assess_line(code, names[driver], why << 20 | bits[driver], 0x1234)
    assert found is not None and found.driver == DRIVERS[driver]
    assert (found.action, found.investigatory, found.severity) == tuple(LINK_DOWN[why])
    assert found.fatal


def test_the_table_is_whole() -> None:
    """As many rows as the catalogue has of each code: one of its two for 150 stands for two statuses."""
    assert {u[0] for u in UNITS} | {LINK_DOWN_UNIT[0]} == set(CODES)
    num_rows = {code: sum(len(u[4]) for u in UNITS if u[0] == code) for code in CODES}
    assert num_rows == {144: 6, 145: 33, 146: 20, 147: 2, 148: 1, 149: 10, 150: 3}
    assert len(LINK_DOWN) == 21


def test_no_unit_is_taken_for_another_or_for_the_other_generations() -> None:
    for a, b in combinations(UNITS, 2):
        if a[0] == b[0] and not set(a[1]) & set(b[1]):
            assert a[2] != b[2] or a[0] == 150
            assert a[3] != b[3] or a[0] == 150
    for code, names, before, later, _ in UNITS:
        assert before & 0x7F != later or code == 150, names


@pytest.mark.parametrize(
    ("code", "unit", "interrupt", "status"),
    [
        (145, "RLW_REMAP", 0x4, 0x40000000),  # no such status
        (145, "RLW_REMAP", 0x5, 0x40),  # another unit's bits
        (145, "RLW_REMAP", 0x282, 0x40),  # of drivers before R575 ten bits are the unit's
        (145, "SAW_MVB", 0x4, 0x40),  # another unit's name
        (145, "RLW_REMAP", 0x00100004, 0x40),  # a reason, where none is known
        (149, "NETIR_LINK_EVT", 0x00300011, 0),  # reason 3 is none
        (149, "NETIR_MFDE_EVENT", 0x14, 0x2),  # a number, no set of bits
        (143, "RLW_REMAP", 0x4, 0x40),
        (144, "", 0, 0),
    ],
)
def test_lines_without_a_table_entry(code: int, unit: str, interrupt: int, status: int) -> None:
    assert assess_line(code, unit, interrupt, status) is None


def test_of_several_bits_the_worst_decides() -> None:
    found = assess_line(145, "RLW_REMAP", 0x4, 0x100 | 0x40)
    assert found is not None and found.action is XidAction.RESET_GPU


@pytest.mark.parametrize("driver", [0, 1])
@pytest.mark.parametrize("status", PROMOTED_STATUS)
def test_a_promoted_error_asks_for_a_reset(driver: int, status: int) -> None:
    bits = (0b0011000010, 0b0000110)[driver]
    plain, promoted = (assess_line(145, "RLW_RXPIPE", b, status) for b in (bits, bits | PROMOTED_BITS[driver]))
    assert plain is not None and promoted is not None
    assert (plain.action, promoted.action) == (XidAction.IGNORE, XidAction.RESET_GPU)
    assert promoted.fatal and not plain.fatal


# --- XID 74


@pytest.mark.parametrize("register", range(7))
@pytest.mark.parametrize("bit", range(32))
def test_every_bit_of_the_registers_of_74(register: int, bit: int) -> None:
    words = [0] * 7
    words[register] = 1 << bit
    wanted = {b: sign for sign, bits in REGISTER_SIGNS.get(register, ()) for b in bits}
    if register not in REGISTER_SIGNS:
        assert register_errors(tuple(words)) == ()
    else:
        assert register_errors(tuple(words)) == (NvlinkRegisterError(wanted.get(bit, "unexpected")),)


@pytest.mark.parametrize(
    ("register", "bits", "sign"),
    [
        (0, (0, 23, 30), NvlinkRegisterError.HARMLESS),
        (0, (1, 20), NvlinkRegisterError.CONSEQUENCE),
        (0, (4, 5), NvlinkRegisterError.ECC),
        (0, (9, 28), NvlinkRegisterError.CONNECTION),
        (0, (21, 22), NvlinkRegisterError.SIGNAL),
        (0, (27, 29), NvlinkRegisterError.REPEATED),
        (2, (0, 1, 2, 6), NvlinkRegisterError.ECC),
        (2, (13,), NvlinkRegisterError.UNEXPECTED),
        (2, (16, 19), NvlinkRegisterError.DIAGNOSE),
        (3, (18,), NvlinkRegisterError.FABRIC),
        (4, (28,), NvlinkRegisterError.ECC),
        (4, (20, 29), NvlinkRegisterError.THRESHOLD),
    ],
)
def test_register_bits_as_in_nvidias_documents(register: int, bits: tuple[int, ...], sign: NvlinkRegisterError) -> None:
    words = [0] * 7
    words[register] = sum(1 << b for b in bits)
    assert register_errors(tuple(words)) == (sign,)


def test_signs_come_the_least_first_and_each_has_its_words() -> None:
    assert register_errors((1 << 0 | 1 << 4 | 1 << 21,)) == (
        NvlinkRegisterError.HARMLESS,
        NvlinkRegisterError.SIGNAL,
        NvlinkRegisterError.ECC,
    )
    assert register_errors(()) == register_errors((0,) * 7) == ()
    assert set(SIGNS) == set(NvlinkRegisterError) and all(words and advice for words, advice in SIGNS.values())
