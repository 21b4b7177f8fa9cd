"""The catalogue obeys its own law, covers every field of the samples, and the docs are made from it."""

import math
from dataclasses import fields
from pathlib import Path

import pytest

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.metrics.catalogue import (
    BY_NAME,
    CATALOGUE,
    host_values,
    process_values,
)
from rolecall.core.metrics.metric import GPU, RANK, Metric, MetricScope, MetricType
from rolecall.core.telemetry import GpuSample, HostSample, ProcessSample
from tools.reference_pages import metrics_page

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
UNITS = ("seconds", "bytes", "ratio", "nats", "celsius", "watts", "joules", "hertz", "bytes_per_second")
LABELS_ALLOWED = frozenset(
    {*RANK, "phase", "state", "probe", "kind", "version"}
    | {*GPU, "uuid", "name", "link", "error", "reason", "xid", "action", "gpu_instance", "compute_instance", "profile"}
    | {"nic", "port", "interface", "priority", "mount", "device", "resource", "communicator", "collective"}
    | {"run", "mode", "fault", "outcome", "guard", "decision", "verdict", "detector", "k", "server"}
)
"""Every label that a metric may carry. All are bounded by the topology or by a closed set."""


def _sample(**changes: object) -> ProcessSample:
    values = {
        "process": ProcessId(node=NodeId("node-1"), pid=7, start_ticks=9),
        "role": "trainer",
        "replica": "trainer/0",
        "rank": 0,
        "incarnation": 2,
        "at": 100.0,
        "wall_at": 1_000_100.0,
        "alive": True,
        "page_ok": True,
    }
    return ProcessSample(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_every_metric_obeys_the_naming_law(metric: Metric) -> None:
    assert metric.name.startswith("rolecall_")
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    stem = metric.name.removesuffix("_total")
    if metric.unit:
        assert metric.unit in UNITS
        assert stem.endswith("_" + metric.unit)
    else:
        assert not stem.endswith(tuple("_" + u for u in UNITS))
    if metric.subject not in (MetricScope.WATCH, MetricScope.RUN):
        assert metric.labels[0] == "node"
    assert set(metric.labels) <= LABELS_ALLOWED
    assert metric.help and not metric.help.endswith(".") and "|" not in metric.help


@pytest.mark.parametrize(
    "metric", [m for m in CATALOGUE if m.subject in (MetricScope.PROCESS, MetricScope.HOST)], ids=lambda m: m.name
)
def test_sources_are_fields(metric: Metric) -> None:
    of = {MetricScope.PROCESS: ProcessSample, MetricScope.HOST: HostSample}[metric.subject]
    assert metric.source in {f.name for f in fields(of)}


def test_names_are_unique_and_no_field_is_forgotten() -> None:
    assert len(BY_NAME) == len(CATALOGUE)
    # OpenMetrics names a counter's family without `_total`: no gauge may have that name.
    assert len({m.name.removesuffix("_total") for m in CATALOGUE}) == len(CATALOGUE)
    identity = {"process", "role", "replica", "rank", "at", "wall_at", "node", "gpu", "uuid", "pids", "joined_by"}
    of_samples = {f.name for sample in (ProcessSample, HostSample, GpuSample) for f in fields(sample)}
    assert of_samples - identity - {m.source for m in CATALOGUE} == set()


def test_docs_are_made_from_the_table() -> None:
    assert DOCS.read_text() == metrics_page(), "run: make docs"


def test_process_values_have_states_as_labels_and_omit_unknown_values() -> None:
    values = list(process_values(_sample(phase="reduce", proc_state="T", tokens=5, phase_since=90.0)))
    shown = {v.metric.name: v for v in values}
    assert all(len(v.labels) == len(v.metric.labels) for v in values)
    assert shown["rolecall_process_phase"].labels == ("node-1", "trainer", "trainer/0", "0", "reduce")
    assert shown["rolecall_process_state"].labels[-1] == "T"
    assert shown["rolecall_process_tokens_total"].value == 5
    assert shown["rolecall_process_up"].value == 1
    # Node-monotonic times come out as seconds since 1970; one that was never set is absent.
    assert shown["rolecall_process_phase_start_timestamp_seconds"].value == 1_000_090.0
    assert "rolecall_process_progress_timestamp_seconds" not in shown
    assert "rolecall_train_loss" not in shown
    assert not any(math.isnan(v.value) for v in values)


def test_host_values_give_every_host_metric() -> None:
    sample = HostSample(
        node=NodeId("node-1"),
        at=1.0,
        wall_at=2.0,
        cpu_count=2,
        cpu_busy_seconds=3.5,
        load_1m=0.5,
        memory_total_bytes=10,
        memory_available_bytes=4,
    )
    values = {v.metric.name: v.value for v in host_values(sample)}
    assert values["rolecall_host_cpu_busy_seconds_total"] == 3.5
    assert set(values) == {m.name for m in CATALOGUE if m.subject is MetricScope.HOST}
