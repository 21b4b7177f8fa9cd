"""Ranks of one replica that are gone are one fault: who is named first, who beside it, and who is a second suspect."""

import pytest

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.base.findings import EXIT
from rolecall.detector.live.fusion import to_diagnosis
from rolecall.detector.live.stages.exits.crash import NUM_NAMED_MAX, exit_values, folded

T = 1_000_000.0


def gone(
    rank: int,
    node: str,
    at: float = 0.0,
    signal: str = "",
    *,
    oom: bool = False,
    fault_class: FaultClass = FaultClass.CRASH,
    replica: str = "trainer/0",
    incarnation: int = 1,
) -> Finding:
    return Finding(
        detector="crash",
        suspects=(Suspect(node=NodeId(node), role="trainer", replica=replica, rank=rank, incarnation=incarnation),),
        fault_class=fault_class,
        onset=T + at,
        detected_at=T + 10,
        confidence=1.0,
        because=f"rank {rank} is gone",
        evidence=(Evidence(kind=EXIT, text=f"{rank} exited", values=exit_values(signal, oom=oom)),),
    )


def test_the_first_to_go_is_named_and_the_others_beside_it() -> None:
    (f,) = folded([gone(0, "a", 2.0), gone(3, "b", 1.0, "9"), gone(1, "a", 3.0, "6")])
    assert f.because == "rank 3 is gone; exited after it: rank 0 (a), rank 1 (a)"
    assert [s.rank for s in f.suspects] == [3] and [e.text for e in f.evidence] == ["3 exited", "0 exited", "1 exited"]
    assert to_diagnosis(f).key == "crash:trainer/0#1"


def test_whose_hardware_spoke_is_named_though_another_went_first() -> None:
    (f,) = folded([gone(0, "a", 1.0), gone(3, "b", 9.0, fault_class=FaultClass.GPU)])
    assert f.fault_class is FaultClass.GPU and f.because == "rank 3 is gone; exited too: rank 0 (a)"


@pytest.mark.parametrize(
    ("second", "reported"),
    [
        (gone(3, "b", 5.0, "11"), True),
        (gone(3, "b", 5.0, "7"), True),
        (gone(3, "b", 5.0, "9", oom=True), True),
        (gone(3, "b", 5.0, "9"), False),  # a launcher ends the rest of its job so
        (gone(3, "b", 5.0, "15"), False),
        (gone(3, "b", 5.0, "6"), False),  # NCCL's watchdog
        (gone(3, "b", 5.0), False),
        (gone(3, "a", 5.0, "11"), False),  # a node that is named already
    ],
)
def test_a_fault_of_its_own_on_another_node_is_a_second_suspect(second: Finding, reported: bool) -> None:
    (f,) = folded([gone(0, "a", 1.0, "9"), second])
    assert [s.rank for s in f.suspects] == ([0, 3] if reported else [0])
    assert ("independent second fault: rank 3 is gone" in f.because) == reported
    assert to_diagnosis(f).key == ("crash:trainer/0#1,trainer/0#1" if reported else "crash:trainer/0#1")


def test_two_nodes_whose_hardware_spoke_are_both_named() -> None:
    group = [gone(0, "a", 1.0, fault_class=FaultClass.GPU), gone(3, "b", 2.0, fault_class=FaultClass.NETWORK)]
    (f,) = folded([*group, gone(4, "b", 3.0, "11")])
    assert [s.rank for s in f.suspects] == [0, 3] and f.fault_class is FaultClass.GPU
    assert "exited after it: rank 4 (b)" in f.because


def test_what_is_not_the_same_fault_is_left_alone_and_in_its_order() -> None:
    hang = Finding(
        detector="stall",
        suspects=gone(7, "a").suspects,
        fault_class=FaultClass.HANG,
        onset=T,
        detected_at=T,
        confidence=0.9,
        because="rank 7 stands still",
    )
    raised = Finding(
        detector="crash",
        suspects=gone(6, "a").suspects,
        fault_class=FaultClass.CRASH,
        onset=T,
        detected_at=T,
        confidence=0.9,
        because="rank 6 raised and lives",
    )
    others = [hang, gone(0, "a"), raised, gone(1, "a", replica="trainer/1"), gone(2, "a", incarnation=2)]
    assert folded(others) == others
    assert [f.because for f in folded([*others, gone(5, "b", 1.0)])] == [
        "rank 7 stands still",
        "rank 0 is gone; exited after it: rank 5 (b)",
        "rank 6 raised and lives",
        "rank 1 is gone",
        "rank 2 is gone",
    ]


def test_a_large_replica_is_bounded() -> None:
    (f,) = folded([gone(n, f"n{n // 8}", float(n)) for n in range(64)])
    assert f.because.count("(n") == NUM_NAMED_MAX and f.because.endswith(" and 55 more")
    assert len(f.evidence) == 1 + NUM_NAMED_MAX


def test_signals_of_an_exit() -> None:
    assert exit_values("11", oom=False) == {"signal": 11.0}
    assert exit_values("SIGKILL", oom=True) == {"oom": 1.0}
    assert exit_values("", oom=False) == {} == exit_values("²", oom=False)
