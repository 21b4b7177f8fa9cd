"""ETTR by hour, goals and reviews, from values alone."""

from dataclasses import replace

import pytest

from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.faults import DetectionChannel, FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.dashboards.pages.accounting.statistics import (
    GOAL_SECONDS,
    SLICES_MAX,
    detection,
    evidence_of,
    precision_summary,
    recovery,
    times,
    wilson,
)
from rolecall.recovery.incidents import Incident, fold
from rolecall.views.ettr import UNDETECTED, Step, ettr, losses
from rolecall.views.incidents import IncidentSummary, InjectedFault, MatchedIncidents
from rolecall.views.lifetimes import IncarnationRecord
from rolecall.views.phases import NOT_KNOWN, phases_of_run
from tests.dashboards.acting_world import diagnosis
from tests.events import made_event

K = EventKind
HOUR = 3600.0
ZERO = 1_700_000_000.0 // HOUR * HOUR


def _summary(name: str, replica: str, began: float, serving: float, *, acted: bool = True) -> IncidentSummary:
    """An incident that was resolved when its replacement served; not `acted`: it was closed without an action."""
    target = PlanTarget(replica=ReplicaId(replica), incarnation=1, node=NodeId("node-1"))
    plan = Plan(incident_id=IncidentId(name), action=ActionKind.REPLACE_REPLICA, targets=(target,), because="why")
    acting = [
        (began + 1, K.ACTION_STARTED, {"plan": plan.to_dict()}),
        (serving, K.ACTION_DONE, {"digest": plan.digest}),
        (serving, K.INCIDENT_VERIFIED, {"digest": plan.digest}),
    ]
    said = [
        (began + 1, K.INCIDENT_OPENED, {"diagnosis": diagnosis(replica, "it ended", at=began).to_dict()}),
        (began + 1, K.PLAN_CREATED, {"plan": plan.to_dict()}),
        *(acting if acted else ()),
        (serving, K.INCIDENT_CLOSED, {"outcome": "resolved" if acted else "tolerated"}),
    ]
    events = [
        made_event(seq=seq, kind=kind, wall_at=at, body=body, incident_id=name)
        for seq, (at, kind, body) in enumerate(said, start=1)
    ]
    made = IncarnationRecord(replica=replica, incarnation=2, node="node-1", pid=1, serving_at=serving)
    return IncidentSummary(incident=fold(events)[name], replacements=(made,) if acted else ())


def _step(number: int, at: float) -> Step:
    return Step(step=number, at=at, seconds=1.0, reward=0.5, loss=0.1, epoch=1, num_tokens=10)


def _times(joined: MatchedIncidents, began: float, until: float, committed: tuple[Step, ...] = ()):  # type: ignore[no-untyped-def]
    phases = phases_of_run(joined.summaries, ())
    return times(joined, committed, phases, began=began, until=until, num_rollouts=3, num_trainers=1)


def test_each_hour_by_itself_and_together_the_whole() -> None:
    # One of four replicas is lost for half of the second hour, another for the last quarter of the third.
    joined = MatchedIncidents(
        summaries=(
            _summary("i-1", "rollout/0", ZERO + HOUR, ZERO + 1.5 * HOUR),
            _summary("i-2", "rollout/1", ZERO + 2.75 * HOUR, ZERO + 3 * HOUR),
        ),
    )
    found = _times(joined, ZERO, ZERO + 4 * HOUR)
    assert [s.ettr for s in found.slices] == pytest.approx([1.0, 1 - 0.125, 1 - 0.0625, 1.0])
    assert [s.num_incidents for s in found.slices] == [0, 1, 1, 0]
    whole = ettr(ZERO, ZERO + 4 * HOUR, losses(joined, ZERO + 4 * HOUR), num_rollouts=3, num_trainers=1)
    assert found.ettr == pytest.approx(whole)
    assert found.lost_seconds == pytest.approx(0.1875 * HOUR)
    assert sum(s.lost_seconds for s in found.slices) == pytest.approx(found.lost_seconds)
    assert [(p.name, round(p.share, 3)) for p in found.by_incident] == [("i-1", 0.667), ("i-2", 0.333)]
    # Found at once; when the replacement was ready is not known.
    assert found.by_phase["i-1"] == pytest.approx({"detect": 0.0, "decide": 1.0, NOT_KNOWN: 0.5 * HOUR - 1.0})
    assert sum(sum(lost.values()) for lost in found.by_phase.values()) == pytest.approx(4 * found.lost_seconds)
    assert [p.name for p in found.by_role] == ["rollout"]
    assert [p.name for p in found.by_class] == ["crash"]


def test_the_first_and_the_last_hour_are_counted_as_far_as_the_run_was_there() -> None:
    found = _times(MatchedIncidents(), ZERO + 1800, ZERO + 4 * HOUR + 60)
    assert [s.end - s.start for s in found.slices] == [1800, HOUR, HOUR, HOUR, 60]


@pytest.mark.parametrize(
    ("seconds", "width"), [(60.0, 60.0), (1799.0, 60.0), (1801.0, 300.0), (3 * HOUR, HOUR), (40 * HOUR, HOUR)]
)
def test_a_short_run_is_cut_finer(seconds: float, width: float) -> None:
    assert _times(MatchedIncidents(), ZERO, ZERO + seconds).slice_seconds == width


def test_of_a_very_long_run_the_newest_hours_are_shown() -> None:
    found = _times(MatchedIncidents(), ZERO, ZERO + 2 * SLICES_MAX * HOUR)
    assert len(found.slices) <= SLICES_MAX
    assert found.slices[-1].end == ZERO + 2 * SLICES_MAX * HOUR


def test_each_commit_belongs_to_one_slice_and_the_last_to_the_last() -> None:
    at = (ZERO, ZERO + 59.5, ZERO + 60.0, ZERO + 119.0, ZERO + 120.0)
    found = _times(
        MatchedIncidents(),
        ZERO,
        ZERO + 120.0,
        tuple(_step(n, t) for n, t in enumerate(at)),
    )
    assert [s.num_steps for s in found.slices] == [2, 3]


def test_a_fault_that_no_one_noticed_takes_time_under_its_own_name() -> None:
    fault = InjectedFault(kind="rollout-slow", target="rollout/0", injected_at=ZERO + 60)
    found = _times(MatchedIncidents(summaries=(), missed=(fault,), false_alarms=()), ZERO, ZERO + 120)
    assert [p.name for p in found.by_incident] == [UNDETECTED]
    assert found.lost_seconds == pytest.approx(15.0)


@pytest.mark.parametrize(
    ("fault_class", "detectors", "evidence"),
    [
        (FaultClass.CRASH, ("crash",), DetectionChannel.EXIT),
        (FaultClass.RESOURCE_EXHAUSTED, ("crash",), DetectionChannel.EXIT),
        (FaultClass.GPU, ("node",), DetectionChannel.HARDWARE),
        (FaultClass.NETWORK, ("node",), DetectionChannel.HARDWARE),
        (FaultClass.NETWORK, ("lost",), DetectionChannel.COLLECTIVE),
        (FaultClass.HANG, ("stall",), DetectionChannel.STALL),
        (FaultClass.HANG, ("stall", "nccl"), DetectionChannel.COLLECTIVE),
        (FaultClass.SLOW, ("sequential",), DetectionChannel.SLOW),
        (FaultClass.WRONG_WEIGHTS, ("proof",), DetectionChannel.WRONG),
        (FaultClass.CANNOT_TELL, ("lost",), DetectionChannel.OTHER),
    ],
)
def test_what_found_a_fault(fault_class: FaultClass, detectors: tuple[str, ...], evidence: DetectionChannel) -> None:
    assert evidence_of(diagnosis("rollout/0", "x", fault_class=fault_class, detectors=detectors)) is evidence


def _found_after(seconds: float, *, injected: bool, right: bool = True) -> IncidentSummary:
    d = replace(diagnosis("rollout/0", "x", at=ZERO), detected_at=ZERO + seconds)
    fault = InjectedFault(kind="rollout-kill", target="rollout/0", injected_at=ZERO) if injected else None
    opened = made_event(kind=K.INCIDENT_OPENED, wall_at=ZERO, body={"diagnosis": d.to_dict()}, incident_id="i")
    return IncidentSummary(incident=fold([opened])["i"], fault=fault, diagnosed_correctly=right if injected else None)


def test_detection_against_its_goal_with_true_times_apart_from_estimates() -> None:
    stories = [_found_after(s, injected=True) for s in (0.2, 0.4, 3.0)] + [_found_after(0.5, injected=False)]
    estimated, true = sorted(detection(stories), key=lambda d: d.injected)
    assert (true.num, true.median_seconds, true.worst_seconds) == (3, pytest.approx(0.4, abs=1e-6), 3.0)
    assert true.share == pytest.approx(2 / 3)
    assert true.goal_seconds == GOAL_SECONDS[DetectionChannel.EXIT] == 1.0
    assert (estimated.num, estimated.injected) == (1, False)


def test_a_wrong_name_and_an_operators_request_are_no_detection() -> None:
    asked = IncidentSummary(incident=_incident("i", detectors=("operator",)))
    assert detection([_found_after(1.0, injected=True, right=False), asked]) == ()


def test_recovery_counts_what_was_started_and_what_came_of_it() -> None:
    served = _summary("a", "rollout/0", ZERO, ZERO + 10)
    acted = _summary("b", "rollout/0", ZERO, ZERO + 30)
    unserved = replace(acted, replacements=(), incident=replace(acted.incident, verified_at=None))
    untouched = _summary("c", "rollout/0", ZERO, ZERO + 30, acted=False)
    (row,) = recovery([served, unserved, untouched])
    assert (row.num, row.num_resolved) == (2, 1)
    assert (row.resolved_median, row.resolved_worst) == (10.0, 10.0)


# --- reviews ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "num", "low", "high"),
    # By hand from Wilson's formula; the first two are in every table of it.
    [(10, 10, 0.722, 1.0), (0, 10, 0.0, 0.278), (7, 7, 0.646, 1.0), (1, 2, 0.095, 0.905), (90, 100, 0.826, 0.945)],
)
def test_wilsons_interval(right: int, num: int, low: float, high: float) -> None:
    assert wilson(right, num) == pytest.approx((low, high), abs=0.001)


def test_of_nothing_there_is_no_interval() -> None:
    assert wilson(0, 0) is None


def _incident(name: str, review: str = "", **more: object) -> Incident:
    d = diagnosis("rollout/1", "it ended", **more)  # type: ignore[arg-type]
    events = [made_event(seq=1, kind=K.INCIDENT_OPENED, wall_at=1.0, body={"diagnosis": d.to_dict()}, incident_id=name)]
    if review:
        body = {"verdict": review, "by": "anna", "because": ""}
        events.append(made_event(seq=2, kind=K.DIAGNOSIS_REVIEWED, wall_at=2.0, body=body, incident_id=name))
    return fold(events)[name]


def test_precision_by_class_and_by_detector_and_how_many_are_not_reviewed() -> None:
    found = precision_summary(
        [
            _incident("a", "right"),
            _incident("b", "wrong", fault_class=FaultClass.SLOW, detectors=("sequential", "slow")),
            _incident("c"),
            _incident("d", "right", detectors=("operator",)),
        ]
    )
    assert (found.of_all.num_right, found.of_all.num_reviewed, found.of_all.num_not_reviewed) == (1, 2, 1)
    assert [(p.name, p.num_right, p.num_reviewed, p.num_not_reviewed) for p in found.by_class] == [
        ("crash", 1, 1, 1),
        ("slow", 0, 1, 0),
    ]
    assert [p.name for p in found.by_detector] == ["crash", "sequential", "slow"]


def test_few_marks_are_called_few_and_none_nothing() -> None:
    assert "too few reviews" in precision_summary([_incident("a", "right")]).of_all.sentence
    assert "No diagnosis has been reviewed" in precision_summary([_incident("a")]).of_all.sentence
    many = precision_summary([_incident(f"i-{n}", "right") for n in range(10)]).of_all.sentence
    assert many == "10 of 10 reviewed diagnoses were right: 100 % (95 % interval 72 % to 100 %)"
