"""Which agents an incident requests which evidence from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.diagnosis import FaultClass as F
from rolecall.core.faults import EvidenceKind
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import ProcessSample
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import suspect
from rolecall.watch.evidence.requests import NUM_FLIGHT_MAX, NUM_STACKS_MAX, select_evidence

ROLLOUT = ("rollout/0", 0)


def subject(replica: str, rank: int, node: str, *, collectives: int = 0, phase: str = "compute") -> MonitoredProcess:
    role = replica.partition("/")[0]
    process = ProcessId(node=NodeId(node), pid=100 + rank, start_ticks=1)
    sample = ProcessSample(
        process=process, role=role, replica=replica, rank=rank, incarnation=1, at=1.0, wall_at=2.0, alive=True,
        page_ok=True, phase=phase, collectives_entered=collectives,
    )  # fmt: skip
    return MonitoredProcess(replica, role, rank, 1, node, process, seen_wall=2.0, sample=sample)


def job(num: int = 6, **more: int) -> list[MonitoredProcess]:
    """Trainer ranks two to a node, and a rollout."""
    ranks = [subject("trainer/0", n, f"node-{n // 2}", collectives=3, **more) for n in range(num)]
    return [*ranks, subject(*ROLLOUT, "node-9")]


def of(fault: F, *suspects: Suspect) -> Diagnosis:
    return Diagnosis(
        suspects=suspects, fault_class=fault, onset=1.0, detected_at=2.0, confidence=0.9, because="because"
    )


def reported(fault: F, suspects: Sequence[Suspect], fleet: Sequence[MonitoredProcess]) -> dict[str, list[object]]:
    """kind -> ranks, or nodes."""
    found: dict[str, list[object]] = {}
    for ask in select_evidence(of(fault, *suspects), fleet):
        found.setdefault(str(ask.kind), []).append(ask.node if ask.who is None else ask.who.rank)
    return found


ALL_RANKS: list[object] = [0, 1, 2, 3, 4, 5]
HANG = {"stacks": [2, 0, 1], "flight_recorder": ALL_RANKS, "nccl_ras": ["node-1"], "kernel_log": ["node-1"]}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (F.HANG, HANG),
        (F.NETWORK, HANG),
        (F.CANNOT_TELL, HANG),
        (F.SLOW, {"stacks": [2, 0, 1], "kernel_log": ["node-1"]}),
        (F.CRASH, {"kernel_log": ["node-1"]}),
        (F.GPU, {"kernel_log": ["node-1"]}),
        (F.USER_CODE, {}),
    ],
)
def test_evidence_requested_for_each_fault_class(fault: F, expected: dict[str, list[object]]) -> None:
    fleet = job()
    assert reported(fault, [suspect(fleet[2])], fleet) == expected, "peers are of other nodes"


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        pytest.param({"phase": "wait"}, [37], id="it has not begun the step"),
        pytest.param({"exchanges": 4}, [37], id="it has begun fewer exchanges"),
        pytest.param({"exchanges": 5}, [], id="nobody is behind"),
    ],
)
def test_of_many_suspects_those_that_others_may_wait_for_come_first_and_then_one_of_each_node(
    fields: dict[str, Any], first: list[object]
) -> None:
    fleet = [subject("trainer/0", n, f"node-{n // 8}", phase="step") for n in range(64)]
    for s in fleet:
        assert s.sample is not None
        s.sample = replace(s.sample, **{"exchanges": 5} | (fields if s.rank == 37 else {}))
    stacks = reported(F.CANNOT_TELL, [suspect(s) for s in fleet], fleet)["stacks"]
    one_of_each_node: list[object] = [*range(0, 64, 8), *range(1, 64, 8)]
    assert stacks == [*first, *one_of_each_node][:NUM_STACKS_MAX]


def test_a_replica_and_a_node_stand_for_their_processes() -> None:
    fleet = job()
    replica = Suspect(node=NodeId("node-0"), role="trainer", replica="trainer/0", incarnation=1)
    assert reported(F.HANG, [replica], fleet)["stacks"] == ALL_RANKS
    node = Suspect(node=NodeId("node-1"))
    assert reported(F.HANG, [node], fleet)["stacks"] == [2, 3, 0, 1]
    earlier = replace(replica, incarnation=0)
    assert reported(F.HANG, [earlier], fleet) == {"nccl_ras": ["node-0"], "kernel_log": ["node-0"]}


def test_exited_processes_and_roles_without_collectives_are_not_queried() -> None:
    fleet = job()
    fleet[0].exit_wall = 1.0
    assert reported(F.HANG, [suspect(fleet[2])], fleet)["stacks"] == [2, 1, 4]
    rollout = fleet[-1]
    assert "flight_recorder" not in reported(F.HANG, [suspect(rollout)], [rollout, subject("rollout/1", 0, "node-8")])
    unpaged = [subject("trainer/0", n, "node-0", collectives=1, phase="") for n in range(2)]
    assert "flight_recorder" not in reported(F.HANG, [suspect(unpaged[0])], unpaged)


def test_a_new_watch_requests_evidence_of_the_named_suspects() -> None:
    (ask, *_) = select_evidence(of(F.HANG, suspect(job()[2])), [])
    assert (ask.kind, ask.node, ask.suspected) == (EvidenceKind.STACKS, "node-1", True)
    assert reported(F.HANG, [replace(suspect(job()[2]), process=None)], []) == {
        "nccl_ras": ["node-1"],
        "kernel_log": ["node-1"],
    }


def test_each_kind_is_bounded() -> None:
    fleet = job(200)
    found = reported(F.CANNOT_TELL, [suspect(s) for s in fleet[:-1]], fleet)
    assert [len(found[str(kind)]) for kind in EvidenceKind] == [NUM_STACKS_MAX, NUM_FLIGHT_MAX, 1, 4]
