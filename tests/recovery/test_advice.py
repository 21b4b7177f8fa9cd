"""What the page of a watched job tells the engineer to do."""

import pytest

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.recovery.advice import what_to_do

NODE = NodeId("vm")


def _diagnosis(fault: FaultClass, because: str = "", ranks: int = 1, advice: str = "", settle: str = "") -> Diagnosis:
    suspects = tuple(
        Suspect(
            node=NODE, role="trainer", replica="trainer/0", rank=n, incarnation=0,
            process=ProcessId(node=NODE, pid=100 + n, start_ticks=n),
        )
        for n in range(1, ranks + 1)
    )  # fmt: skip
    return Diagnosis(
        suspects=suspects, fault_class=fault, onset=0.0, detected_at=0.0, confidence=0.9, because=because,
        detectors=("x",), advice=advice, settle=settle,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("diagnosis", "says"),
    [
        (
            _diagnosis(FaultClass.HANG, "process stopped (state T), no heartbeat"),
            "trainer/0 rank 1 (pid 101) on vm is stopped: kill -CONT 101 there, or restart the job",
        ),
        (_diagnosis(FaultClass.HANG, "no heartbeat"), "read the stack of trainer/0 rank 1 (pid 101) on vm"),
        (_diagnosis(FaultClass.CRASH), "read the log of trainer/0 rank 1 (pid 101) on vm, then restart the job"),
        (_diagnosis(FaultClass.CRASH, ranks=6), "and 2 more processes, then restart the job"),
        (_diagnosis(FaultClass.USER_CODE, ranks=0, advice="fix the code"), "fix the code"),
        (_diagnosis(FaultClass.SLOW), "see what else runs on vm"),
        (_diagnosis(FaultClass.GPU), "restart the job without vm and have it checked"),
        (_diagnosis(FaultClass.CANNOT_TELL, advice="wait", settle="stacks"), "wait; it is settled by stacks"),
        (_diagnosis(FaultClass.CANNOT_TELL, ranks=2), "wait for the second page"),
    ],
)
def test_the_engineer_is_told_what_to_do(diagnosis: Diagnosis, says: str) -> None:
    assert says in what_to_do(diagnosis)


@pytest.mark.parametrize("fault", list(FaultClass))
def test_every_class_has_an_answer(fault: FaultClass) -> None:
    for ranks in (0, 1, 2):
        assert what_to_do(_diagnosis(fault, ranks=ranks, advice=fault.spec.advice))
