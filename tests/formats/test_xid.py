"""Every code of NVIDIA's catalogue is decoded, and what NVIDIA says decides."""

import pytest

from rolecall.core.faults import FaultClass
from rolecall.formats.kernel_log.messages import parse_message
from rolecall.formats.kernel_log.nvidia import XidLine
from rolecall.formats.xid.table import NOTES, UNUSED_ROWS, XID_ROWS
from rolecall.formats.xid.xid import ADVICE, RECOVERY_ADVICE, SXIDS, XIDS, RecoveryAction, XidAction, sxid, xid

CODE_MAX = 173
"""Of the catalogue (172) and what came later: each code up to it has a row, in use or not."""


@pytest.mark.parametrize("code", range(1, CODE_MAX + 1))
def test_every_code_is_decoded_from_its_line_with_class_and_action(code: int) -> None:
    fact = parse_message(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=4711, name=python3, some text")
    assert isinstance(fact, XidLine)
    assert (fact.code, fact.pci, fact.pid, fact.name, fact.text) == (code, "0000:3b:00", 4711, "python3", "some text")
    known = xid(fact.code)
    assert known.code == code and known.known and known.mnemonic and known.meaning
    assert known.fault_class in (FaultClass.GPU, FaultClass.USER_CODE, FaultClass.NETWORK)
    assert ADVICE[known.immediate] and ADVICE[known.investigatory]


def test_the_table_has_each_code_once_and_the_rest_is_unused() -> None:
    codes = [row[0] for row in XID_ROWS]
    assert codes == sorted(set(codes)) and len(codes) == 112
    assert sorted(XIDS) == list(range(1, CODE_MAX + 1)) and len(UNUSED_ROWS) == CODE_MAX - len(codes)
    assert set(UNUSED_ROWS) == set(XIDS) - set(codes)
    assert all(XIDS[code].immediate is XidAction.CONTACT_SUPPORT for code in UNUSED_ROWS)
    mnemonics = [known.mnemonic for known in XIDS.values()]
    assert len(set(mnemonics)) == len(mnemonics) and not any(m.startswith("XID_") for m in mnemonics)


def test_of_codes_without_an_action_the_catalogues_remark_decides() -> None:
    without = {c: known for c, known in XIDS.items() if known.immediate is XidAction.NONE}
    assert set(NOTES) < set(without) == set(range(162, 174))
    assert {c for c, known in without.items() if known.fatal} == {166, 167, 169, 172, 173}
    assert "no reset is needed" in xid(163).advice and "REBOOT" in xid(163).second_opinion, "NVIDIA decides"
    assert xid(167).advice == ADVICE[XidAction.NONE]


@pytest.mark.parametrize(
    ("code", "immediate", "fault_class", "fatal"),
    [
        (13, XidAction.RESTART_APP, FaultClass.USER_CODE, False),
        (31, XidAction.RESTART_APP, FaultClass.USER_CODE, False),
        (43, XidAction.IGNORE, FaultClass.USER_CODE, False),
        (45, XidAction.WORKFLOW_XID_45, FaultClass.GPU, False),
        (48, XidAction.WORKFLOW_XID_48, FaultClass.GPU, True),
        (63, XidAction.IGNORE, FaultClass.GPU, False),
        (64, XidAction.RESET_GPU, FaultClass.GPU, True),
        (74, XidAction.WORKFLOW_NVLINK_ERR, FaultClass.NETWORK, True),
        (79, XidAction.RESTART_BM, FaultClass.GPU, True),
        (94, XidAction.RESTART_APP, FaultClass.GPU, False),
        (95, XidAction.RESET_GPU, FaultClass.GPU, True),
        (119, XidAction.RESET_GPU, FaultClass.GPU, True),
        (142, XidAction.CONTACT_SUPPORT, FaultClass.GPU, True),
        (149, XidAction.WORKFLOW_NVLINK5_ERR, FaultClass.NETWORK, True),
        (151, XidAction.RESTART_VM, FaultClass.GPU, True),
        (154, XidAction.XID_154, FaultClass.GPU, False),
        (162, XidAction.NONE, FaultClass.GPU, False),
        (172, XidAction.NONE, FaultClass.GPU, True),
    ],
)
def test_actions_of_nvidias_catalogue(code: int, immediate: XidAction, fault_class: FaultClass, fatal: bool) -> None:
    known = xid(code)
    assert (known.immediate, known.fault_class, known.fatal) == (immediate, fault_class, fatal)


def test_engines_are_numbered_in_their_order() -> None:
    names = {code: XIDS[code].mnemonic for code in (39, 41, 70, 77, 85, 126, 135, 82, 105, 83, 98)}
    wanted = ["CE0", "CE2", "CE3", "CE8", "CE9", "CE10", "CE19", "NVJPG0", "NVJPG7", "NVDEC1", "NVDEC7"]
    assert list(names.values()) == [f"ROBUST_CHANNEL_{w}_ERROR" for w in wanted]


def test_a_second_opinion_stands_beside_and_decides_nothing() -> None:
    known = xid(63)
    assert (
        known.immediate is XidAction.IGNORE and not known.fatal and known.second_opinion == "REBOOT+HW_INSPECT / Fatal"
    )


def test_a_code_beyond_the_catalogue_is_fatal_and_for_support() -> None:
    known = xid(999)
    assert not known.known and known.fatal and known.immediate is XidAction.CONTACT_SUPPORT


@pytest.mark.parametrize("code", SXIDS)
def test_every_sxid_has_meaning_and_advice(code: int) -> None:
    known = sxid(code)
    assert known.known and known.code == code and known.meaning and known.advice


def test_sxids_by_group() -> None:
    assert len(SXIDS) == 93
    assert sxid(20034).fatal and sxid(20034).action is XidAction.RESET_FABRIC
    assert sxid(12020).fatal and sxid(12020).action is XidAction.RESTART_BM
    assert not sxid(11012).fatal and not sxid(20001).fatal and not sxid(10005).fatal
    for code in (10004, 11004, 12028, 19084, 20009, 20012):
        assert sxid(code).fatal and sxid(code).action is XidAction.RESET_FABRIC
        assert (
            "restart the virtual machine" in sxid(code).advice and "reset its GPUs and NVSwitches" in sxid(code).advice
        )
    assert not sxid(99999).known and not sxid(99999).fatal


def test_the_drivers_verdicts_are_numbered_as_in_nvml() -> None:
    wanted = "none gpu_reset node_reboot drain_p2p drain_and_reset recover_imex_domain bus_reset system_reboot unknown"
    assert [str(RecoveryAction.of_number(n)) for n in range(9)] == wanted.split()
    assert RecoveryAction.of_number(-1) is RecoveryAction.UNKNOWN
    assert set(RECOVERY_ADVICE) == set(RecoveryAction)
    assert RECOVERY_ADVICE[RecoveryAction.NODE_REBOOT][0] is XidAction.RESTART_BM
