"""The recorded metrics that Grafana's tests run on: a real Prometheus takes them, and nothing of the catalogue is
missing."""

import gzip
from pathlib import Path

import pytest

from rolecall.core.metrics.catalogue import CATALOGUE
from rolecall.core.metrics.metric import MetricScope
from tests.dashboards.openmetrics import Recording
from tests.dashboards.prometheus_of_demo import FILE, DemoPrometheus, QueryFailed, prometheus_of

BYTES_MAX = 1_500_000


def test_a_range_has_points_and_an_instant_has_the_last(demo_prometheus: DemoPrometheus) -> None:
    (steps,) = demo_prometheus.query_range("rolecall_run_step")
    assert steps.labels["job"] == "rolecall-watch" and len(steps.points) > 10
    (now,) = demo_prometheus.query("rolecall_run_step")
    assert now.value == steps.points[-1][1] > 0
    assert demo_prometheus.query("vector(1)")[0].value == demo_prometheus.query("1")[0].value == 1
    with pytest.raises(QueryFailed, match="parse error"):
        demo_prometheus.query("sum(")


def test_every_job_answered(demo_prometheus: DemoPrometheus) -> None:
    up = demo_prometheus.query("max by (job) (max_over_time(up[1h]))")
    assert {v.labels["job"]: v.value for v in up} == {"rolecall-agent": 1, "rolecall-watch": 1, "dcgm": 1}


ABSENT_IN_A_CALM_DEMO = {
    "rolecall_watch_agent_unreachable_timestamp_seconds",
    "rolecall_plans_waiting_deadline_timestamp_seconds",
}
"""Shown only while something is wrong that does not go wrong in the recorded run."""
ABSENT_WITH_ITS_ALGORITHM = {
    *("rolecall_run_value_loss", "rolecall_run_explained_variance"),  # of a critic
    "rolecall_run_kl_reference_nats",
    "rolecall_run_filtered_ratio",  # of dynamic sampling
    "rolecall_run_log_ratio_max",  # of steps with tokens of weights that a trainer holds
    "rolecall_run_value_clip_ratio",  # of a critic
    "rolecall_run_rejected_ratio",  # of rejection
}
NEWER_THAN_THE_RECORDING = {"rolecall_run_clip_dual_ratio"}
ABSENT_WITHOUT_A_DATASET = {
    m.name for m in CATALOGUE if m.name.startswith(("rolecall_run_evaluation_", "rolecall_run_dataset_"))
}
ABSENT_WITHOUT_A_PEAK = {"rolecall_run_mfu_ratio"}
"""The demo's job file has no peak FLOP/s: on a CPU there is none to compare with."""


def test_what_a_watch_serves_is_there(demo_prometheus: DemoPrometheus) -> None:
    wanted = {m.name for m in CATALOGUE if m.subject in (MetricScope.WATCH, MetricScope.RUN)}
    absent = ABSENT_IN_A_CALM_DEMO | ABSENT_WITH_ITS_ALGORITHM | ABSENT_WITHOUT_A_PEAK | NEWER_THAN_THE_RECORDING
    absent |= ABSENT_WITHOUT_A_DATASET
    assert wanted - demo_prometheus.names() <= absent


def test_without_a_metric_it_is_missing_and_nothing_else(demo_prometheus: DemoPrometheus, tmp_path: Path) -> None:
    gone = {"rolecall_run_tokens_total", "rolecall_run_step"}
    with prometheus_of(tmp_path, without=gone) as other:
        assert demo_prometheus.names() - other.names() == gone


def test_the_file_is_small() -> None:
    assert FILE.stat().st_size < BYTES_MAX


def test_scrapes_become_families_in_order_of_time(tmp_path: Path) -> None:
    recording = Recording()
    page = b'# TYPE a_total counter\n# TYPE b gauge\na_total{x="1\\n\\"2"} 3\nb 1\n'
    for at in (10.0, 15.0, 15.0):
        recording.scraped(at, "j", "i", page)
    recording.scraped(20.0, "j", "i", None)
    recording.write(tmp_path / "x.gz")
    text = gzip.decompress((tmp_path / "x.gz").read_bytes()).decode()
    assert text.endswith("# EOF\n")
    assert '# TYPE a counter\na_total{instance="i",job="j",x="1\\n\\"2"} 3.0 10.000\n' in text
    assert [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("b{")] == ["10.000", "15.000"]
    assert 'up{instance="i",job="j"} 0.0 20.000' in text
