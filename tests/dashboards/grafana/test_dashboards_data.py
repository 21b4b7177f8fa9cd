"""Every expression of every dashboard is run on a real Prometheus and must find data.

Twice: on the metrics of a real demo run, and on made-up ones of a cluster to which everything has happened, where
nothing may be empty at all. What a healthy run rightly does not have is listed here with its reason; a metric that is
missing for any other reason fails these tests, which is tested, too.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.dashboards.grafana.export import documents
from rolecall.dashboards.grafana.promql import alive, grown, scoped, selectors
from tests.dashboards.grafana import made_up
from tests.dashboards.grafana.viewing import Asked, Viewer, all_panels
from tests.dashboards.openmetrics import Recording
from tests.dashboards.prometheus_of_demo import DemoPrometheus, prometheus_of

DOCUMENTS = {d["uid"]: d for d in documents()}
EXPRESSIONS = {
    (uid, panel["title"], target["refId"]): target["expr"]
    for uid, d in DOCUMENTS.items()
    for panel in all_panels(d)
    for target in panel["targets"]
}
METRICS = sorted({s.metric for e in EXPRESSIONS.values() for s in selectors(e)})
OF_NODE = ("rolecall-gpus", "rolecall-network")
VIEWS = {
    "rolecall-replica": ({"role": "rollout", "replica": "rollout/1"}, {"role": "trainer", "replica": "trainer/0"}),
    **{uid: ({"node": "gpu-1"},) for uid in OF_NODE},
}
"""What people choose where there is a choice; an expression has to find data in one view at least."""

NO_ENGINE = "the demo's engines are no vLLM servers; the stand-in node has one, without traffic or peers"
NO_CRITIC, NO_REFERENCE = "the demo's algorithm has no critic", "the demo's algorithm has no reference policy"
NO_SAMPLING = "the demo's algorithm has no dynamic sampling, which alone filters groups"
NO_PAUSES = "the interfaces that were recorded count no pause frames"
RIGHTLY_EMPTY = {
    "rolecall_gpu_rank": "the demo's ranks use no GPU",
    "rolecall_nic_errors_total": "absent until there was an error",
    "rolecall_nic_paused_seconds_total": NO_PAUSES,
    "rolecall_nic_pauses_received_total": NO_PAUSES,
    "rolecall_nic_pauses_sent_total": NO_PAUSES,
    "rolecall_run_explained_variance": NO_CRITIC,
    "rolecall_run_value_loss": NO_CRITIC,
    "rolecall_run_kl_reference_nats": NO_REFERENCE,
    "rolecall_run_clip_dual_ratio": "the recording is older than this metric",
    "rolecall_run_rejected_ratio": "the demo's job file rejects nothing",
    "rolecall_run_filtered_ratio": NO_SAMPLING,
    "rolecall_run_log_ratio_max": "absent in steps without a token of weights that a trainer holds; this run had "
    "none else",
    "rolecall_run_mfu_ratio": "the demo's job file gives no peak FLOP/s",
    "rolecall_train_filtered_ratio": NO_SAMPLING,
    **{m: "the demo is not evaluated" for m in METRICS if m.startswith("rolecall_run_evaluation_")},
    **{m: "the demo has a built-in task" for m in METRICS if m.startswith("rolecall_run_dataset_")},
    **{m: "made by recording rules, which test_rules.py tries" for m in METRICS if ":" in m},
    **{m: NO_ENGINE for m in METRICS if m.startswith("rolecall_engine_")},
}
"""Metrics of which the demo run has no series, or none that moves, and why that is right. Each has data in the made-up
cluster."""
RIGHTLY_QUIET = {
    "Active diagnoses": "each was acted upon, and stood no more, before the next scrape",
    "Plans blocked by guards in the time range": "no guard had to hold a plan",
    "Decisions on proposed plans in the time range": "the demo acts by itself: no plan waited",
}
"""Tables of what happened, and why it did not in the demo run. Each has a row in the made-up cluster."""


@pytest.fixture(scope="session")
def made_up_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoPrometheus]:
    folder = tmp_path_factory.mktemp("prometheus-made-up")
    with prometheus_of(folder, file=made_up.write(folder / "made_up.om.gz")) as server:
        yield server


def _looks(server: DemoPrometheus, chosen: dict[str, str]) -> dict[str, list[Asked]]:
    viewer = Viewer(server, chosen)
    return {uid: list(viewer.look(document)) for uid, document in DOCUMENTS.items()}


@pytest.mark.parametrize("uid", DOCUMENTS)
def test_every_expression_finds_data_in_a_demo_run(demo_prometheus: DemoPrometheus, uid: str) -> None:
    views = [list(Viewer(demo_prometheus, chosen).look(DOCUMENTS[uid])) for chosen in VIEWS.get(uid, ({},))]
    for seen in zip(*views, strict=True):
        missing = frozenset.intersection(*(asked.empty_metrics for asked in seen)) - set(RIGHTLY_EMPTY)
        assert not missing, f"no series of {sorted(missing)}"
        read = {selector.metric for selector in selectors(seen[0].expression)}
        quiet = seen[0].panel in RIGHTLY_QUIET or read & set(RIGHTLY_EMPTY)
        assert quiet or any(asked.points for asked in seen), str(seen[0])


@pytest.mark.parametrize("uid", DOCUMENTS)
def test_nothing_is_empty_where_everything_has_happened(made_up_prometheus: DemoPrometheus, uid: str) -> None:
    node = {"node": made_up.OURS, "role": "rollout", "replica": "rollout/1"}
    seen = list(Viewer(made_up_prometheus, node).look(DOCUMENTS[uid]))
    assert [str(a) for a in seen if not a.points or a.empty_metrics] == []


@pytest.mark.parametrize("node", [made_up.EXPORTED, made_up.EXPORTED_OLD])
def test_a_node_with_dcgm_exporter_alone_is_shown(made_up_prometheus: DemoPrometheus, node: str) -> None:
    for uid in OF_NODE:
        for asked in Viewer(made_up_prometheus, {"node": node}).look(DOCUMENTS[uid]):
            if any(s.metric.startswith("DCGM_") for s in selectors(asked.expression)):
                assert asked.points, str(asked)
                assert {s.get("node") for s in asked.series} == {node}, str(asked)


def test_units_and_labels_of_both_sources_agree(made_up_prometheus: DemoPrometheus) -> None:
    """A node that reports under both names has each series once, ours."""
    for uid in OF_NODE:
        for asked in Viewer(made_up_prometheus, {"node": made_up.OURS}).look(DOCUMENTS[uid]):
            shown = [tuple(sorted(labels.items())) for labels in asked.series]
            assert len(shown) == len(set(shown)), str(asked)


@pytest.mark.parametrize("uid", DOCUMENTS)
def test_every_variable_has_values(demo_prometheus: DemoPrometheus, uid: str) -> None:
    found = Viewer(demo_prometheus, VIEWS.get(uid, ({},))[0]).variables(DOCUMENTS[uid])
    assert all(found.values()), found


def test_variables_have_the_values_of_what_was_chosen(made_up_prometheus: DemoPrometheus) -> None:
    document = DOCUMENTS["rolecall-gpus"]
    found = Viewer(made_up_prometheus).variables(document)
    assert found["node"] == (made_up.OURS, made_up.EXPORTED, made_up.EXPORTED_OLD)
    assert found["run"] == (made_up.RUN,)
    assert found["gpu"] == ("0", "1")
    nothing = Viewer(made_up_prometheus, {"job": "no-such-job"}).variables(document)
    assert nothing["node"] == nothing["run"] == nothing["gpu"] == ()


@functools.cache
def _readers(metric: str) -> frozenset[tuple[str, str, str]]:
    return frozenset(at for at, e in EXPRESSIONS.items() if any(s.metric == metric for s in selectors(e)))


def test_a_metric_that_is_gone_is_noticed(tmp_path: Path) -> None:
    """All metrics are taken away but those by which variables know servers and names."""
    kept = {
        "rolecall_run_info",
        "rolecall_agent_build_info",
        "rolecall_process_up",
        "rolecall_gpu_up",
        "rolecall_nic_up",
    }
    gone = [m for m in METRICS if m not in kept]
    with prometheus_of(tmp_path, without=gone, file=made_up.write(tmp_path / "made_up.om.gz")) as server:
        looks = _looks(server, {"node": made_up.OURS, "role": "rollout", "replica": "rollout/1"})
    noticed = {(a.board, a.panel, a.ref, m) for asked in looks.values() for a in asked for m in a.empty_metrics}
    expected = {(*at, m) for m in gone for at in _readers(m)}
    assert expected <= noticed
    assert not {m for _, _, _, m in noticed} & kept


def test_one_metric_that_is_gone_is_noticed_where_it_is_read_and_nowhere_else(tmp_path: Path) -> None:
    gone = "rolecall_gpu_tensor_active_ratio"
    with prometheus_of(tmp_path, without={gone}, file=made_up.write(tmp_path / "made_up.om.gz")) as server:
        looks = _looks(server, {"node": made_up.OURS, "role": "rollout", "replica": "rollout/1"})
    noticed = {(a.board, a.panel, a.ref) for asked in looks.values() for a in asked if a.empty_metrics}
    assert noticed == _readers(gone) != frozenset()


def test_a_variable_whose_metric_is_gone_is_noticed(tmp_path: Path) -> None:
    gone = {"rolecall_run_info", "rolecall_process_up"}
    with prometheus_of(tmp_path, without=gone, file=made_up.write(tmp_path / "made_up.om.gz")) as server:
        found = Viewer(server).variables(DOCUMENTS["rolecall-replica"])
    assert {name for name, values in found.items() if not values} == {"run", "watch", "role", "replica"}


def test_the_list_of_what_may_be_empty_names_only_what_is_shown() -> None:
    assert set(RIGHTLY_EMPTY) <= set(METRICS)
    assert set(RIGHTLY_QUIET) <= {panel for _, panel, _ in EXPRESSIONS}


def _of_one_watch(folder: Path, pages: list[str]) -> Path:
    recording = Recording()
    for n, page in enumerate(pages):
        recording.scraped(made_up.START + n * made_up.STEP, "rolecall", "a:9477", page.encode())
    recording.write(folder / "few.om.gz")
    return folder / "few.om.gz"


def test_the_first_event_of_a_kind_counts(tmp_path: Path) -> None:
    """`increase()` does not see it: the series begins with it."""
    old, new = (
        'rolecall_xid_events_total{node="n",gpu="0",xid="31"} 7\n',
        'rolecall_xid_events_total{node="n",gpu="0",xid="79"} 1\n',
    )
    with prometheus_of(tmp_path, file=_of_one_watch(tmp_path, [old] * 4 + [old + new] * 4)) as server:
        viewer = Viewer(server)
        seconds = {"__range": "90s", "job": ".+", "instance": ".+"}
        expression = viewer.filled(scoped(grown("rolecall_xid_events_total", "xid")), seconds)
        assert {v.labels["xid"]: v.value for v in server.query(expression)} == {"31": 0.0, "79": 1.0}
        assert {v.value for v in server.query("increase(rolecall_xid_events_total[90s])")} == {0.0}


def test_what_an_ended_process_had_is_not_shown(tmp_path: Path) -> None:
    labels = 'node="n",role="rollout",replica="rollout/0",rank="0"'
    held = f"rolecall_process_requests_active{{{labels}}} 40\n"
    up, gone = (f"rolecall_process_up{{{labels}}} {n}\n" for n in (1, 0))
    with prometheus_of(tmp_path, file=_of_one_watch(tmp_path, [up + held] * 3 + [gone + held] * 3)) as server:
        expression = Viewer(server).filled(
            scoped(alive("rolecall_process_requests_active")), {"job": ".+", "instance": ".+"}
        )
        assert server.query(expression) == []
        assert [v.value for v in server.query(expression, at=made_up.START + made_up.STEP)] == [40.0]
