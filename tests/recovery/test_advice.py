"""What the page of a watched job tells the engineer to do."""

from dataclasses import replace

import pytest

from rolecall.core.diagnosis import Diagnosis, Evidence, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.detector.base.findings import EXIT, LOG_FILE
from rolecall.recovery.advice import what_to_do

NODE = NodeId("vm")


def _suspect(rank: int, node: NodeId = NODE) -> Suspect:
    return Suspect(
        node=node, role="trainer", replica="trainer/0", rank=rank, incarnation=0,
        process=ProcessId(node=node, pid=100 + rank, start_ticks=rank),
    )  # fmt: skip


def _diagnosis(fault: FaultClass, because: str = "", ranks: int = 1, advice: str = "", settle: str = "") -> Diagnosis:
    suspects = tuple(_suspect(n) for n in range(1, ranks + 1))
    return Diagnosis(
        suspects=suspects, fault_class=fault, onset=0.0, detected_at=0.0, confidence=0.9, because=because,
        detectors=("x",), advice=advice, settle=settle,
    )  # fmt: skip


def _exited(**values: float) -> Diagnosis:
    return replace(_diagnosis(FaultClass.CRASH), evidence=(Evidence(kind=EXIT, text="exited", values=values),))


@pytest.mark.parametrize(
    ("diagnosis", "says"),
    [
        (
            _diagnosis(FaultClass.HANG, "process stopped (state T), no heartbeat"),
            "trainer/0 rank 1 (pid 101) on vm is stopped: kill -CONT 101 there, or restart the job",
        ),
        (
            _diagnosis(FaultClass.HANG, "2 processes stopped (state T)", ranks=2),
            "rank 2 (pid 102) on vm are stopped: kill -CONT 101 102 there, or restart the job",
        ),
        (
            replace(
                _diagnosis(FaultClass.HANG, "3 processes stopped (state T)"),
                suspects=(_suspect(1), _suspect(2, NodeId("vm-2")), _suspect(3)),
            ),
            "are stopped: kill -CONT 101 103 on vm, kill -CONT 102 on vm-2, or restart the job",
        ),
        (_diagnosis(FaultClass.HANG, "held (state t)", ranks=2), "on vm are held by a debugger or tracer"),
        (_diagnosis(FaultClass.HANG, "no heartbeat"), "read the stack of trainer/0 rank 1 (pid 101) on vm"),
        (
            _diagnosis(FaultClass.CRASH),
            "trainer/0 rank 1 (pid 101) on vm (its launcher's output, or a file in the --log-dir of torchrun), then",
        ),
        (_diagnosis(FaultClass.CRASH, ranks=6), "and 2 more processes (its launcher's output"),
        (
            replace(_diagnosis(FaultClass.CRASH), evidence=(Evidence(kind=LOG_FILE, text="/logs/1/stderr.log"),)),
            "rank 1 (pid 101) on vm (/logs/1/stderr.log), then restart the job",
        ),
        (
            _exited(signal=9.0),
            "signal 9 often comes from the kernel's out-of-memory killer: `dmesg` or `journalctl -k`",
        ),
        (_exited(signal=9.0, oom=1.0), "then restart the job with more memory"),
        (_diagnosis(FaultClass.USER_CODE, ranks=0, advice="fix the code"), "fix the code"),
        (_diagnosis(FaultClass.SLOW), "see what else runs on vm"),
        (_diagnosis(FaultClass.GPU), "restart the job without vm and have it checked"),
        (_diagnosis(FaultClass.CANNOT_TELL, advice="wait", settle="stacks"), "wait; to settle it: stacks"),
        (_diagnosis(FaultClass.CANNOT_TELL, ranks=2), "if none comes within minutes, restart the job"),
    ],
)
def test_the_engineer_is_told_what_to_do(diagnosis: Diagnosis, says: str) -> None:
    assert says in what_to_do(diagnosis)


@pytest.mark.parametrize("fault", list(FaultClass))
def test_every_class_has_an_answer(fault: FaultClass) -> None:
    for ranks in (0, 1, 2):
        assert what_to_do(_diagnosis(fault, ranks=ranks, advice=fault.spec.advice))
