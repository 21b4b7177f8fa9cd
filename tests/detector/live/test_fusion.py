"""Fusion as a table: which findings are one fault, who is named for it, and what is reported about the rest."""

from dataclasses import replace

import pytest

from rolecall.core.diagnosis import Diagnosis, Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, split_replica
from rolecall.detector.base.findings import GAIN, OF_GPU, PANEL
from rolecall.detector.live.fusion import fuse, on_panels_alone, to_diagnosis
from rolecall.detector.live.stages.evidence.panels import unexplained

F = FaultClass
SIZES = {"rollout": 3, "trainer": 2}


def _suspect(replica: str, incarnation: int = 1) -> Suspect:
    node = NodeId("node-" + replica.replace("/", "-"))
    return Suspect(node=node, role=split_replica(replica)[0], replica=replica, incarnation=incarnation)


def _found(fault: FaultClass, *replicas: str, about: str = "") -> Finding:
    return Finding(
        detector="test",
        suspects=tuple(_suspect(r) for r in replicas),
        fault_class=fault,
        onset=10.0,
        detected_at=12.0,
        confidence=0.9,
        because=f"{', '.join(replicas)} {fault}",
        about=about,
    )


def _node(fault: FaultClass, replica: str) -> Finding:
    """Of a node that no one runs on, as far as is known."""
    return replace(_found(fault, replica), suspects=(Suspect(node=_suspect(replica).node),))


def _told(*findings: Finding, sizes: dict[str, int] = SIZES) -> list[tuple[str, list[str]]]:
    return [
        (str(d.fault_class), [s.replica or s.node for s in d.suspects])
        for d in fuse(list(findings), {}, sizes, now=13.0)
    ]


@pytest.mark.parametrize(
    ("findings", "reported"),
    [
        pytest.param(
            [_found(F.CRASH, "rollout/0"), _found(F.SLOW, "rollout/0"), _found(F.SLOW, "rollout/1")],
            [("crash", ["rollout/0"]), ("slow", ["rollout/1"])],
            id="the dead are not slow, another one may be",
        ),
        pytest.param(
            [_found(F.HANG, "trainer/1"), _found(F.CANNOT_TELL, "trainer/0", "trainer/1")],
            [("hang", ["trainer/1"])],
            id="an accusation of one ends the tie that it was part of",
        ),
        pytest.param(
            [_found(F.CRASH, "trainer/0"), _found(F.HANG, "trainer/0")],
            [("crash", ["trainer/0"])],
            id="who is gone does not hang",
        ),
        pytest.param(
            [_found(F.CRASH, "trainer/0"), _found(F.HANG, "trainer/0", "trainer/1")],
            [("crash", ["trainer/0"]), ("hang", ["trainer/0", "trainer/1"])],
            id="a hang of more than the dead stays",
        ),
        pytest.param(
            [_found(F.NETWORK, "trainer/1"), _node(F.CANNOT_TELL, "trainer/1"), _node(F.CANNOT_TELL, "rollout/0")],
            [("network", ["trainer/1"]), ("cannot_tell", ["node-rollout-0"])],
            id="a node that is cut off is silent for that reason, another is not",
        ),
        pytest.param(
            [_found(F.USER_CODE, about="trainer:f1"), _found(F.CRASH, "trainer/0"), _found(F.HANG, "trainer/1")],
            [("user_code", [])],
            id="user code explains deaths and hangs of its role",
        ),
        pytest.param(
            [_found(F.USER_CODE, about="trainer:f1"), _found(F.CRASH, "rollout/0"), _found(F.SLOW, "trainer/0")],
            [("user_code", []), ("crash", ["rollout/0"]), ("slow", ["trainer/0"])],
            id="user code explains nothing of another role, and no slowness",
        ),
        pytest.param(
            [_found(F.SLOW, "rollout/2"), _found(F.CRASH, "trainer/0"), _found(F.SLOW, "rollout/0")],
            [("crash", ["trainer/0"]), ("cannot_tell", ["rollout/0", "rollout/2"])],
            id="a slow majority accuses no one",
        ),
        pytest.param(
            [_found(F.SLOW, "trainer/1")],
            [("slow", ["trainer/1"])],
            id="one of two is no majority",
        ),
        pytest.param([], [], id="nothing"),
    ],
)
def test_fusion(findings: list[Finding], reported: list[tuple[str, list[str]]]) -> None:
    assert _told(*findings) == reported


def test_half_of_a_role_is_no_majority() -> None:
    slow = [_found(F.SLOW, "rollout/0"), _found(F.SLOW, "rollout/1")]
    assert _told(*slow, sizes={"rollout": 4}) == [("slow", ["rollout/0"]), ("slow", ["rollout/1"])]
    assert _told(*slow, sizes={"rollout": 3}) == [("cannot_tell", ["rollout/0", "rollout/1"])]


def test_a_slow_majority_has_an_onset_and_states_what_would_settle_it() -> None:
    earlier = replace(_found(F.SLOW, "rollout/0"), onset=4.0)
    (reported,) = fuse([_found(F.SLOW, "rollout/1"), earlier], {}, SIZES, now=13.0)
    assert (reported.onset, reported.detected_at, reported.confidence < 0.5) == (4.0, 13.0, True)
    assert "majority" in reported.because and "a replica on a node of its own" in reported.settle
    assert [e.text for e in reported.evidence] == ["rollout/1 slow", "rollout/0 slow"]


def test_the_end_of_a_process_that_was_reported_as_hung_is_no_second_fault() -> None:
    hang = to_diagnosis(_found(F.HANG, "trainer/0"))
    (reported,) = fuse([_found(F.CRASH, "trainer/0")], {hang.key: hang}, SIZES, now=13.0)
    assert reported is hang


def test_the_same_object_stands_while_it_stands() -> None:
    finding = _found(F.CRASH, "rollout/0")
    (first,) = fuse([finding], {}, SIZES, now=13.0)
    (again,) = fuse([replace(finding, because="in other words", detected_at=14.0)], {first.key: first}, SIZES, now=14.0)
    assert again is first


def _of_rank(rank: int, because: str = "", detector: str = "stall") -> Finding:
    found = _found(F.HANG, "trainer/0")
    suspects = tuple(replace(s, rank=rank) for s in found.suspects)
    return replace(found, detector=detector, suspects=suspects, because=because or f"rank {rank} hangs")


def _ranks(diagnoses: list[Diagnosis]) -> list[list[int | None]]:
    return [[s.rank for s in d.suspects] for d in diagnoses]


def test_several_ranks_of_a_replica_are_one_diagnosis_of_all() -> None:
    (one,) = first = fuse([_of_rank(1)], {}, SIZES, now=13.0)
    (both,) = second = fuse([_of_rank(1, "in other words"), _of_rank(3)], {one.key: one}, SIZES, now=14.0)
    assert (_ranks(first), _ranks(second)) == ([[1]], [[1, 3]])
    assert both.because == "rank 1 hangs; rank 3 hangs" and both.key != one.key
    assert fuse([_of_rank(1), _of_rank(3)], {both.key: both}, SIZES, now=15.0)[0] is both
    (many,) = fuse([_of_rank(n) for n in range(9)], {both.key: both}, SIZES, now=16.0)
    assert len(many.suspects) == 9 and many.because.endswith("rank 3 hangs; and 5 more of its ranks")


def test_a_diagnosis_ends_when_the_fault_is_another_ranks() -> None:
    (one,) = fuse([_of_rank(1)], {}, SIZES, now=13.0)
    assert _ranks(fuse([_of_rank(3)], {one.key: one}, SIZES, now=14.0)) == [[3]]


def test_another_detectors_view_of_a_standing_fault_names_no_further_rank() -> None:
    (one,) = fuse([_of_rank(1)], {}, SIZES, now=13.0)
    found = [_of_rank(3, detector="collective"), _of_rank(1)]
    assert fuse(found, {one.key: one}, SIZES, now=14.0) == [one]


# --- what panels of metrics say, beside findings of other kinds


def _panel(replica: str, incarnation: int = 1, node: str = "") -> Finding:
    who = _suspect(replica, incarnation)
    return replace(
        _found(F.SLOW, replica), detector=f"{PANEL}test", suspects=(replace(who, node=NodeId(node or who.node)),)
    )


def _left(of_panels: list[Finding], *findings: Finding, sizes: dict[str, int] = SIZES) -> list[str]:
    return [f.suspects[0].replica for f in unexplained(of_panels, list(findings), sizes)]


@pytest.mark.parametrize("fault", [F.HANG, F.CRASH, F.SLOW, F.NETWORK, F.CANNOT_TELL])
def test_whatever_names_a_replica_explains_what_its_metrics_do(fault: FaultClass) -> None:
    assert _left([_panel("rollout/0"), _panel("rollout/1")], _found(fault, "rollout/1")) == ["rollout/0"]


def test_a_node_that_is_lost_explains_what_runs_on_it_and_nothing_elsewhere() -> None:
    lost = _node(F.NODE_LOST, "rollout/1")
    assert _left([_panel("rollout/1"), _panel("rollout/0")], lost) == ["rollout/0"]


def test_two_replicas_of_one_node_are_one_fault_reported_of_the_first() -> None:
    here = [_panel("rollout/1", node="n"), _panel("trainer/0", node="n"), _panel("trainer/1")]
    assert _left(here) == ["rollout/1", "trainer/1"]


def test_panel_findings_about_most_of_a_role_are_void() -> None:
    two = [_panel("rollout/0"), _panel("rollout/1")]
    assert _left([*two, _panel("trainer/0")]) == ["trainer/0"]
    assert _left(two, sizes={"rollout": 4}) == ["rollout/0", "rollout/1"]


def test_panel_findings_do_not_void_measured_slowdowns() -> None:
    measured = _found(F.SLOW, "rollout/1")
    reported = fuse([measured], {}, SIZES, 13.0, unexplained([_panel("rollout/0")], [measured], SIZES))
    assert [(str(d.fault_class), d.suspects[0].replica, on_panels_alone(d)) for d in reported] == [
        ("slow", "rollout/1", False),
        ("slow", "rollout/0", True),
    ]


def test_a_measured_slowdown_replaces_a_panel_finding() -> None:
    (first,) = fuse([], {}, SIZES, 13.0, [_panel("rollout/0")])
    assert on_panels_alone(first) and first.gain_ratio is None and "nothing is replaced" in first.advice
    measured = replace(_found(F.SLOW, "rollout/0"), evidence=(Evidence(kind=GAIN, text="", values={"ratio": 3.0}),))
    (then,) = fuse([measured], {first.key: first}, SIZES, 20.0)
    assert (then.key, then.gain_ratio, on_panels_alone(then)) == (first.key, 3.0, False)
    (still,) = fuse([measured], {then.key: then}, SIZES, 21.0)
    assert still is then


def test_gpu_evidence_of_a_panel_is_kept_when_the_slowdown_is_measured() -> None:
    of_gpu = Evidence(kind=OF_GPU, text="GPU 3: SM clock 1200 MHz (peers 1755 MHz)", values={"gpu": 3.0})
    said = replace(_panel("rollout/0"), evidence=(Evidence(kind="metric:x", text="x"), of_gpu))
    (first,) = fuse([], {}, SIZES, 13.0, [said])
    (then,) = fuse([_found(F.SLOW, "rollout/0")], {first.key: first}, SIZES, 20.0)
    assert not on_panels_alone(then) and then.evidence[-1] == of_gpu
    assert [e.kind for e in then.evidence].count("metric:x") == 0
