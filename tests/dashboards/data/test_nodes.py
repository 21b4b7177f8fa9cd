"""Nodes by health, their past, and their hardware, from values alone."""

from collections.abc import Sequence
from typing import Any

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.contract import PAYLOADS
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.dashboards.data.hardware import FleetMetrics, codes_of, live_of, merged, of_run, samples
from rolecall.dashboards.data.nodes import (
    DAY,
    GLYPHS,
    HEAT_NODES,
    HOUR,
    MONTH,
    FleetHealth,
    NodeHealth,
    age,
    counted_until,
    fleet_rows,
    heat,
    incidents_by_node,
    natural,
    node_names,
    observed_fleet,
    pasts,
    quarantined,
    repeat_offenders,
)
from rolecall.recovery.fleet_view import FleetView, ReplicaView, fleet_view
from rolecall.recovery.incidents import Incident, fold
from rolecall.views.observed_ranks import ObservedRank
from tests.dashboards.acting_world import diagnosis
from tests.events import made_event

K = EventKind
NOW = 1_700_000_000.0


def _fleet(nodes: Sequence[str]) -> FleetView:
    desired, current = {}, {}
    for n, node in enumerate(nodes):
        replica = ReplicaId(f"rollout/{n}")
        desired[replica] = Desired(replica=replica, incarnation=1, node=NodeId(node))
        current[replica] = Actual(
            replica=replica, incarnation=1, node=NodeId(node), state=ReplicaState.SERVING, changed_at=NOW - 500
        )
    return fleet_view(desired, current)


def _incident(
    name: str, node: str, *, ago: float = 60.0, closed: bool = False, review: str = "", **more: Any
) -> Incident:
    found = diagnosis("rollout/1", more.pop("because", "it ended"), node=node, at=NOW - ago, **more)
    events = [
        made_event(
            seq=1, kind=K.INCIDENT_OPENED, wall_at=NOW - ago, body={"diagnosis": found.to_dict()}, incident_id=name
        )
    ]
    if closed:
        body = {"outcome": "self_recovered", "because": "over"}
        events.append(made_event(seq=2, kind=K.INCIDENT_CLOSED, wall_at=NOW - ago + 1, body=body, incident_id=name))
    if review:
        body = {"verdict": review, "by": "anna", "because": ""}
        events.append(made_event(seq=3, kind=K.DIAGNOSIS_REVIEWED, wall_at=NOW, body=body, incident_id=name))
    return fold(events)[name]


def _said(kind: EventKind, node: str, **body: Any) -> Event:
    said = {"node": node, "by": "carla", "because": "hot", **body}
    known = {name: value for name, value in said.items() if name in PAYLOADS[kind].names}
    return made_event(seq=1, kind=kind, wall_at=NOW, body=known)


def _rows(
    nodes: Sequence[str],
    incidents: Sequence[Incident] = (),
    events: Sequence[Event] = (),
    live: FleetMetrics | None = None,
) -> FleetHealth:
    return fleet_rows(
        _fleet(nodes), incidents_by_node(incidents), pasts(events), codes_of(incidents), live or FleetMetrics(), NOW
    )


@pytest.mark.parametrize(
    ("incidents", "events", "live", "health"),
    [
        ((), (), FleetMetrics(), NodeHealth.HEALTHY),
        ((_incident("i", "node-1"),), (), FleetMetrics(), NodeHealth.SUSPECT),
        ((_incident("i", "node-1", fault_class=FaultClass.GPU),), (), FleetMetrics(), NodeHealth.FAULTY),
        ((_incident("i", "node-1", fault_class=FaultClass.NETWORK),), (), FleetMetrics(), NodeHealth.FAULTY),
        ((_incident("i", "node-1", fault_class=FaultClass.NODE_LOST),), (), FleetMetrics(), NodeHealth.LOST),
        ((), (), FleetMetrics(agents={"node-1": False}), NodeHealth.LOST),
        ((), (), FleetMetrics(lost_gpus={"node-1": ("3",)}), NodeHealth.FAULTY),
        ((), (_said(K.NODE_QUARANTINED, "node-1"),), FleetMetrics(), NodeHealth.QUARANTINED),
        ((_incident("i", "node-1"),), (_said(K.NODE_QUARANTINED, "node-1"),), FleetMetrics(), NodeHealth.SUSPECT),
        ((_incident("i", "node-1", closed=True),), (), FleetMetrics(), NodeHealth.HEALTHY),
        (tuple(_incident(f"i-{n}", "node-1", closed=True) for n in range(3)), (), FleetMetrics(), NodeHealth.OFTEN),
        (
            tuple(_incident(f"i-{n}", "node-1", closed=True, ago=MONTH + 1) for n in range(3)),
            (),
            FleetMetrics(),
            NodeHealth.HEALTHY,
        ),
        ((_incident("i", "node-1", detectors=("operator",)),), (), FleetMetrics(), NodeHealth.HEALTHY),
    ],
)
def test_health(incidents: Sequence[Incident], events: Sequence[Event], live: FleetMetrics, health: NodeHealth) -> None:
    row = _rows(["node-0", "node-1", "node-2"], incidents, events, live).find("node-1")
    assert row is not None
    assert row.health is health
    assert row.because or health is NodeHealth.HEALTHY


@pytest.mark.parametrize(
    ("fault", "events", "why"),
    [
        (FaultClass.HANG, (), "rollout/1 hung: self recovered; the fault was the replica's, not the node's"),
        (FaultClass.GPU, (), "rollout/1 has a GPU fault: self recovered; the node is not quarantined"),
        (
            FaultClass.GPU,
            (K.NODE_QUARANTINED, K.NODE_RETURNED_TO_SERVICE),
            "rollout/1 has a GPU fault: self recovered; carla returned the node to service",
        ),
    ],
)
def test_why_a_node_that_was_suspect_is_in_use(fault: FaultClass, events: Sequence[EventKind], why: str) -> None:
    incident = _incident("i", "node-1", closed=True, fault_class=fault)
    rows = _rows(["node-0", "node-1"], [incident], [_said(kind, "node-1") for kind in events])
    assert [(r.node, r.health, r.because) for r in rows.rows] == [
        ("node-1", NodeHealth.HEALTHY, why),
        ("node-0", NodeHealth.HEALTHY, ""),
    ]
    old = _incident("i", "node-1", closed=True, ago=MONTH + 1)
    assert _rows(["node-1"], [old]).rows[0].because == ""


def test_nodes_of_an_ended_run_have_their_last_health() -> None:
    """They are not lost because their agents ended with it."""
    gone = FleetMetrics(agents={"node-0": False, "node-1": False, "node-2": False})
    events = [_said(K.NODE_QUARANTINED, "node-2")]
    found = fleet_rows(_fleet(["node-0", "node-2"]), {}, pasts(events), (), gone, NOW, ["node-1"], ended=True)
    assert {r.node: r.health for r in found.rows} == {
        "node-0": NodeHealth.HEALTHY,
        "node-1": NodeHealth.IDLE,
        "node-2": NodeHealth.QUARANTINED,
    }
    row = found.find("node-0")
    assert row is not None and row.status == "● healthy at the end" and row.because == ""


def test_the_worst_stands_first_and_every_health_has_a_glyph_of_its_own() -> None:
    found = _rows(
        ["node-10", "node-2", "node-3"],
        [_incident("i", "node-3", fault_class=FaultClass.NODE_LOST)],
        [_said(K.NODE_QUARANTINED, "node-10")],
    )
    assert [r.node for r in found.rows] == ["node-3", "node-10", "node-2"]
    assert len({GLYPHS[h] for h in NodeHealth}) == len(NodeHealth)


def test_incidents_are_counted_in_each_span_against_the_fleets_median() -> None:
    incidents = [
        _incident("a", "node-1", ago=HOUR / 2, closed=True),
        _incident("b", "node-1", ago=DAY / 2, closed=True),
        _incident("c", "node-1", ago=MONTH / 2, closed=True),
        _incident("d", "node-2", ago=DAY / 2, closed=True),
        _incident("e", "node-1", ago=60, closed=True, review="wrong"),
    ]
    found = _rows(["node-0", "node-1", "node-2"], incidents)
    row = found.find("node-1")
    assert row is not None
    assert (row.in_hour, row.in_day, row.in_month) == (1, 2, 3)
    assert (found.median_hour, found.median_day, found.median_month) == (0, 1, 1)


def test_a_run_that_is_over_is_counted_back_from_its_end() -> None:
    incidents = [_incident("a", "node-1", ago=10 * DAY, closed=True)]
    assert counted_until(incidents, _fleet([]), ended=True, now=NOW) == NOW - 10 * DAY + 1
    assert counted_until(incidents, _fleet([]), ended=False, now=NOW) == NOW
    assert counted_until([], _fleet([]), ended=True, now=NOW) == NOW


def test_nodes_are_sorted_as_people_count() -> None:
    assert node_names(_fleet(["node-10", "node-9", "node-1"]), ["node-2"]) == ["node-1", "node-2", "node-9", "node-10"]
    assert sorted(["b1", "a10", "a9", "10", "9", ""], key=natural) == ["", "9", "10", "a9", "a10", "b1"]


@pytest.mark.parametrize(
    ("seconds", "reported"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (3 * DAY, "3 d")]
)
def test_age(seconds: float, reported: str) -> None:
    assert age(seconds) == reported


# --- past ---------------------------------------------------------------------------------------------------------


def test_a_nodes_past_keeps_who_said_what_after_its_return() -> None:
    result = {
        "passed": False,
        "seconds": 3.0,
        "checks": [{"name": "memory", "passed": False, "because": "3 words", "values": {}}],
    }
    events = [
        _said(K.NODE_QUARANTINED, "node-1"),
        _said(K.BURN_IN_FINISHED, "node-1", **result),
        _said(K.NODE_RETURNED_TO_SERVICE, "node-1", because="cooled"),
    ]
    past = pasts(events)["node-1"]
    assert [s.what for s in past.entries] == ["quarantined", "burn-in", "returned to service"]
    assert [s.because for s in past.entries] == ["hot", "failed", "cooled"]
    assert not past.record.quarantined
    assert [b.result.passed for b in past.record.burn_ins] == [False]
    assert quarantined(events[:1])["node-1"].quarantined_by == "carla"
    assert quarantined(events) == {}


# --- hardware -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("because", "evidence", "codes"),
    [
        ("XID 79 on GPU 3 of node-1: it has fallen off the bus", ("XID 79 on GPU 3",), [("XID 79", "3", True)]),
        ("it ended", ("XID 63 on GPU 0: row remapped",), [("XID 63", "0", False)]),
        ("SXid 20034 of NVSwitch 2", (), [("SXid 20034", "", True)]),
        ("FIXID 79 and XID x", ("XID 1234567",), []),
        ("it ended", (), []),
    ],
)
def test_codes_that_an_incident_quotes(
    because: str, evidence: tuple[str, ...], codes: list[tuple[str, str, bool]]
) -> None:
    found = codes_of([_incident("i", "node-1", because=because, evidence=evidence)])
    assert [(c.name, c.gpu, c.fatal) for c in found] == codes
    assert all(c.meaning and c.advice for c in found)


def test_what_several_incidents_quote_is_one_line() -> None:
    incidents = [_incident(f"i-{n}", "node-1", because="XID 79 on GPU 3 of node-1", ago=100 - n) for n in range(3)]
    (line,) = merged(codes_of(incidents))
    assert (line.count, line.at, line.source) == (3, NOW - 98, "3 incidents, latest i-2")


XIDS = [({"node": "node-1", "gpu": "3", "xid": "79"}, 2.0), ({"node": "node-1", "gpu": "0", "xid": "13"}, 0.0)]
DCGM = [({"Hostname": "node-1", "gpu": "1"}, 63.0), ({"Hostname": "node-2", "gpu": "7"}, 48.0)]


def test_prometheus_has_codes_gpus_and_agents_and_dcgm_where_our_agent_is_missing() -> None:
    live = live_of(
        XIDS,
        [({"node": "node-1", "gpu": "3", "xid": "79"}, 123.0)],
        [({"node": "node-1", "gpu": "3"}, 0.0), ({"node": "node-1", "gpu": "4"}, 1.0)],
        [({"instance": "node-1:9400", "node": "node-1"}, 1.0), ({"instance": "node-9:9400"}, 0.0)],
        DCGM,
    )
    assert [(c.node, c.gpu, c.code, c.count, c.at) for c in live.codes] == [
        ("node-1", "3", 79, 2, 123.0),
        ("node-2", "7", 48, 1, None),
    ]
    assert live.lost_gpus == {"node-1": ("3",)}
    assert live.agents == {"node-1": True, "node-9": False}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"result": 5},
        {"result": [5, {}, {"metric": {}, "value": [1, "NaN"]}, {"metric": 1, "value": [1, "2"]}]},
    ],
)
def test_what_is_no_answer_of_prometheus_is_nothing(data: object) -> None:
    assert samples(data) == []


def test_other_runs_of_the_machine_have_the_same_names_and_are_left_out() -> None:
    found = [
        ({"node": "node-1", "instance": "mine/node-1"}, 1.0),
        ({"node": "node-1", "instance": "other/node-1"}, 0.0),
        ({"node": "gpu-7", "instance": "gpu-7:9477"}, 1.0),
    ]
    assert of_run(found, "mine") == [found[0], found[2]]


def test_a_node_that_the_run_has_and_nothing_lives_on_is_idle_and_foreign_ones_are_left_out() -> None:
    live = FleetMetrics(agents={"node-7": True, "elsewhere": False})
    found = fleet_rows(_fleet(["node-1"]), {}, {}, (), live, NOW, ["node-1", "node-7"])
    assert {r.node: r.health for r in found.rows} == {"node-1": NodeHealth.HEALTHY, "node-7": NodeHealth.IDLE}


def test_a_thousand_nodes_and_ten_thousand_incidents() -> None:
    incidents = [_incident(f"i-{n}", f"node-{n % 1000}", ago=n, closed=True) for n in range(10_000)]
    found = _rows([f"node-{n}" for n in range(1000)], incidents)
    assert len(found.rows) == 1000
    assert sum(r.in_month for r in found.rows) == 10_000


def test_the_heat_map_counts_incidents_by_node_and_day_or_hour() -> None:
    found = [_incident("i-1", "a", ago=3 * DAY), _incident("i-2", "a", ago=60.0), _incident("i-3", "b", ago=61.0)]
    crash = str(found[0].diagnosis.fault_class)
    days = heat(incidents_by_node(found), ["c", "b", "a"], NOW)
    assert days.unit == "day" and days.columns == ("11-11", "11-12", "11-13", "11-14"), "without gaps"
    nothing = (0, "")
    assert days.rows == (
        ("a", ((1, crash), nothing, nothing, (1, crash))),
        ("b", (nothing, nothing, nothing, (1, crash))),
        ("c", (nothing,) * 4),
    )
    hours = heat(incidents_by_node(found[1:]), ["a", "b"], NOW)
    assert hours.unit == "hour" and hours.columns == ("11-14 22:00",)
    assert len(heat(incidents_by_node(found), [f"n-{n}" for n in range(99)], NOW).rows) == HEAT_NODES
    assert heat({}, ["a"], NOW).columns == ()


def test_repeat_offenders_have_at_least_three_incidents_the_most_first() -> None:
    found = [_incident(f"i-{n}", "b" if n < 4 else "a" if n < 7 else "c", ago=60.0 + n) for n in range(9)]
    by_node = incidents_by_node(found)
    fleet = fleet_rows(_fleet(["a", "b", "c"]), by_node, {}, (), FleetMetrics(), NOW)
    assert [row[:2] for row in repeat_offenders(fleet, by_node)] == [["b", "4"], ["a", "3"]]


def test_replicas_of_a_watched_job_stand_on_their_nodes() -> None:
    def rank(number: int, node: str, *, alive: bool) -> ObservedRank:
        return ObservedRank("trainer/0", number, node, 1, alive, "compute", 5, NOW, None)

    ranks = [rank(0, "n-2", alive=True), rank(1, "n-10", alive=False), rank(2, "n-2", alive=True)]
    fleet = observed_fleet(ranks, NOW)
    assert [(r.node, r.state) for r in fleet.replicas] == [("n-2", ReplicaState.SERVING), ("n-10", ReplicaState.LOST)]
    found = fleet_rows(fleet, {}, {}, (), FleetMetrics(), NOW)
    assert [(r.node, r.health) for r in found.rows] == [("n-10", NodeHealth.LOST), ("n-2", NodeHealth.HEALTHY)]
    silent = fleet_rows(observed_fleet(ranks, NOW + 60.0), {}, {}, (), FleetMetrics(), NOW + 60.0)
    assert {r.health for r in silent.rows} == {NodeHealth.LOST}, "nobody has seen them for a minute"


def test_a_node_is_lost_with_all_its_replicas_and_suspect_with_one() -> None:
    states = {"a": [ReplicaState.LOST], "b": [ReplicaState.LOST, ReplicaState.SERVING], "c": [ReplicaState.SERVING]}
    views = [
        ReplicaView(
            replica=ReplicaId(f"rollout/{n}"), desired_incarnation=1, incarnation=1, node=NodeId(node), state=state
        )
        for n, (node, state) in enumerate((node, s) for node in states for s in states[node])
    ]
    used_up = ReplicaView(
        replica=ReplicaId("standby/0"), desired_incarnation=1, incarnation=1, node=NodeId("c"),
        state=ReplicaState.STOPPED,
    )  # fmt: skip
    found = fleet_rows(FleetView(replicas=(*views, used_up)), {}, {}, (), FleetMetrics(), NOW)
    assert [(r.node, r.health, r.because) for r in found.rows] == [
        ("a", NodeHealth.LOST, "every replica on it is lost: rollout/0"),
        ("b", NodeHealth.SUSPECT, "rollout/1 lost"),
        ("c", NodeHealth.HEALTHY, ""),
    ]


def test_a_fatal_xid_marks_a_node_until_a_burn_in_or_an_operator_clears_it() -> None:
    fallen = _incident("i", "node-1", closed=True, fault_class=FaultClass.GPU, because="XID 79 on GPU 3: fell off")
    row = _rows(["node-1"], [fallen]).find("node-1")
    assert row is not None and row.health is NodeHealth.XID
    assert row.because == "XID 79 on GPU 3, 11-14 22:12 UTC"
    harmless = _incident("i", "node-1", closed=True, fault_class=FaultClass.GPU, because="XID 43 on GPU 3: stopped")
    assert _rows(["node-1"], [harmless]).rows[0].health is NodeHealth.HEALTHY
    check = {"name": "matmul", "passed": True, "because": "the same bits", "values": {}}
    for passed, health in ((True, NodeHealth.HEALTHY), (False, NodeHealth.XID)):
        tested = _said(K.BURN_IN_FINISHED, "node-1", passed=passed, seconds=9.0, checks=[{**check, "passed": passed}])
        assert _rows(["node-1"], [fallen], [tested]).rows[0].health is health
    back = [_said(K.NODE_QUARANTINED, "node-1"), _said(K.NODE_RETURNED_TO_SERVICE, "node-1")]
    assert _rows(["node-1"], [fallen], back).rows[0].health is NodeHealth.HEALTHY
