"""One diagnosis per fault: earliest says when, causes explain symptoms, nothing said is taken back."""

from dataclasses import replace

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.live.fusion import SAME_FAULT_SECONDS, merged


def finding(
    node: str, at: float, fault: FaultClass = FaultClass.SLOW, *, by: str = "a", rank: int | None = None
) -> Finding:
    return Finding(
        detector=by,
        suspects=(Suspect(node=NodeId(node), rank=rank),),
        fault_class=fault,
        onset=at - 5,
        detected_at=at,
        confidence=0.5,
        because=f"{by} says {node}",
        evidence=(Evidence(kind=by, text=f"{by} {at}"),),
    )


def reported(findings: list[Finding]) -> list[tuple[str, float, str]]:
    return [(d.suspects[0].node, d.detected_at, str(d.fault_class)) for d in merged(findings)]


def test_two_detectors_of_one_fault_are_one_diagnosis_reported_when_it_was_first_known() -> None:
    [d] = merged([finding("n1", 130, by="b"), finding("n1", 100)])
    assert (d.detected_at, d.onset, d.because, d.detectors) == (100, 95, "a says n1", ("a",))


def test_others_and_later_ones_are_faults_of_their_own() -> None:
    later = 100 + SAME_FAULT_SECONDS + 1
    assert reported([finding("n1", 100), finding("n2", 101), finding("n1", later)]) == [
        ("n1", 100, "slow"),
        ("n2", 101, "slow"),
        ("n1", later, "slow"),
    ]


def test_a_cause_explains_what_follows_it_and_nothing_before() -> None:
    hang, slow = finding("n1", 100, FaultClass.HANG), finding("n1", 110)
    assert reported([slow, hang]) == [("n1", 100, "hang")]
    early = finding("n1", 90)
    assert reported([early, hang]) == [("n1", 90, "slow"), ("n1", 100, "hang")]
    assert reported([finding("n2", 110), hang]) == [("n1", 100, "hang"), ("n2", 110, "slow")]


def test_a_finding_that_names_a_node_settles_a_tie() -> None:
    unsure = finding("n1", 120, FaultClass.CANNOT_TELL)
    assert reported([unsure, finding("n1", 100, FaultClass.CRASH)]) == [("n1", 100, "crash")]
    assert reported([unsure, finding("n2", 100, FaultClass.CRASH)]) == [
        ("n2", 100, "crash"),
        ("n1", 120, "cannot_tell"),
    ]


def test_a_rank_of_which_nothing_else_is_known_is_the_one_that_another_detector_knows_more_of() -> None:
    def of(node: str, at: float, *ranks: int | None, role: str = "") -> Finding:
        replica = f"{role}/0" if role else ""
        suspects = tuple(Suspect(node=NodeId(f"{node}{r}"), role=role, replica=replica, rank=r) for r in ranks)
        return replace(finding(node, at, FaultClass.HANG), suspects=suspects)

    dumps, stacks = of("rank-", 100, 3), of("trainer/0-rank-", 101, 3, role="trainer")
    assert [d.detected_at for d in merged([dumps, stacks])] == [100]
    assert len(merged([dumps, of("m", 101, 4, role="trainer")])) == 2, "another rank"
    both = [
        replace(f, suspects=(*f.suspects, Suspect(node=NodeId("m"), role="trainer", rank=4))) for f in (dumps, stacks)
    ]
    assert len(merged(both)) == 1, "one by its rank, one by its node"
    two = of("m", 100, 0, role="trainer")
    two = replace(two, suspects=(replace(two.suspects[0], node=NodeId("n")), *two.suspects))
    assert len(merged([two, of("m", 101, 0, role="trainer")])) == 2, "each node has a rank 0"
    assert len(merged([of("rank-", 100, 3, 4), stacks])) == 2, "one of two"
    assert len(merged([stacks, of("m", 101, 3, role="rollout")])) == 2, "the third of another role"
    assert len(merged([of("m", 100, None), of("n", 101, None, role="trainer")])) == 2, "ranks that no one knows"


def test_order_does_not_matter_and_a_prefix_stays_a_prefix() -> None:
    found = [finding(f"n{i % 3}", 100.0 + 90 * i, by="ab"[i % 2]) for i in range(12)]
    whole = reported(found)
    assert reported(found[::-1]) == whole
    for k in range(len(found)):
        assert reported(found[:k]) == [d for d in whole if d[1] <= 100.0 + 90 * (k - 1)][: len(reported(found[:k]))]
