"""Alerts and recording rules on a real Prometheus that holds the metrics of a real demo run with its injected
faults."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.dashboards.grafana.promql import RECORDED, selectors
from rolecall.dashboards.grafana.rules import Alert, rules_yaml
from tests.dashboards.grafana.rules_cases import ALERTS
from tests.dashboards.prometheus_of_demo import DemoPrometheus, Series, prometheus_of
from tests.prometheus_server import prometheus
from tests.support import eventually

NOT_IN_THE_DEMO = {
    "rolecall_plans_waiting_deadline_timestamp_seconds": "the demo acts by itself: no plan waits for an operator",
    "rolecall_watch_agent_unreachable_timestamp_seconds": "every agent was heard all the time",
    "rolecall_run_filtered_ratio": "the demo's algorithm has no dynamic sampling, which alone filters groups",
}
"""Metrics whose series comes only with the fault. Each must be absent from the demo, or it does not belong here."""
STAND_IN = "gpu-1"
"""The node whose GPUs, ports and kernel log are made up, faults among them."""
STEP_SECONDS = 5
_CONSTANT = re.compile(r"\s*(?:==|!=|>=|<=|>|<)\s*-?[\d.]+(?![\w.])")
_OTHER = re.compile(r"\s(?:==|!=|>=|<=|>|<)\s")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def compared(expr: str) -> str:
    """The expression without its thresholds: what it compares, of every series that it reads."""
    return _OTHER.sub(" - ", _CONSTANT.sub("", " ".join(expr.split()))).replace(" unless ", " and ")


def _absent(expr: str) -> bool:
    return any(s.metric in NOT_IN_THE_DEMO for s in selectors(expr))


def test_thresholds_are_taken_out_and_nothing_else() -> None:
    assert compared("time() - a > clamp_min(10 * b[1h], 300) unless on (n) (d == 1)") == (
        "time() - a - clamp_min(10 * b[1h], 300) and on (n) (d)"
    )
    assert compared("rate(a[5m]) * 300 > 25") == "rate(a[5m]) * 300"
    assert compared("a > 0 unless on (n) (b + 1 == c)") == "a and on (n) (b + 1 - c)"


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_the_series_of_an_alert_exist(name: str, demo_prometheus: DemoPrometheus) -> None:
    expr = ALERTS[name].expr
    if _absent(expr):
        pytest.skip("; ".join(why for metric, why in NOT_IN_THE_DEMO.items() if metric in expr))
    assert {s.metric for s in selectors(expr)} <= demo_prometheus.names()
    assert demo_prometheus.query_range(compared(expr)), compared(expr)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_recording_rule_has_something_to_record(name: str, demo_prometheus: DemoPrometheus) -> None:
    assert demo_prometheus.query_range(RECORDED[name])


def test_prometheus_evaluates_every_rule(tmp_path: Path) -> None:
    for name, text in rules_yaml().items():
        (tmp_path / name).write_text(text.replace("interval: 15s", "interval: 1s"))
    config = {"rule_files": [str(tmp_path / name) for name in rules_yaml()]}
    (tmp_path / "with_rules.yml").write_text(json.dumps(config))
    with prometheus(tmp_path, config=tmp_path / "with_rules.yml") as server:
        demo = DemoPrometheus(server.netloc, 0.0, 0.0)

        def health() -> set[tuple[str, str]]:
            groups = demo.get("/api/v1/rules")["groups"]
            return {(r["health"], r.get("lastError", "")) for g in groups for r in g["rules"]}

        eventually(lambda: health() == {("ok", "")}, "every rule was evaluated")
        reported = [r["name"] for g in demo.get("/api/v1/rules")["groups"] for r in g["rules"]]
    assert sorted(reported) == sorted([*ALERTS, *RECORDED])


def test_what_is_called_absent_is(demo_prometheus: DemoPrometheus) -> None:
    assert not set(NOT_IN_THE_DEMO) & demo_prometheus.names()


def test_an_alert_without_its_metric_is_found_out(tmp_path: Path) -> None:
    with prometheus_of(tmp_path, without={"rolecall_gpu_up"}) as demo:
        assert not demo.query_range(compared(ALERTS["RolecallGpuLost"].expr))


def _held(alert: Alert, series: Series) -> bool:
    """Whether it was true for so long without a break that somebody would have been reported."""
    needed = int(alert.hold[:-1]) * _SECONDS[alert.hold[-1]]
    begun = last = None
    for at, _ in series.points:
        begun = at if last is None or at - last > 1.5 * STEP_SECONDS else begun
        last = at
        if begun is not None and at - begun >= needed:
            return True
    return False


def _fired(demo: DemoPrometheus, until: float) -> Iterator[tuple[str, Series]]:
    for name, alert in ALERTS.items():
        for series in demo.query_range(alert.expr, end=until, step=STEP_SECONDS):
            if _held(alert, series):
                yield name, series


def test_no_one_is_reported_while_nothing_is_wrong(demo_prometheus: DemoPrometheus) -> None:
    opened = demo_prometheus.query_range("rolecall_incident_opened_timestamp_seconds")
    faults = demo_prometheus.query_range(ALERTS["RolecallXid"].expr)
    first = min(s.points[0][0] for s in (*opened, *faults))
    assert first - demo_prometheus.start > 30, "there is a healthy part"
    assert [f"{name} {dict(s.labels)}" for name, s in _fired(demo_prometheus, first - STEP_SECONDS)] == []


def test_what_was_done_to_the_stand_in_is_reported_and_what_rolecall_cured_is_not(
    demo_prometheus: DemoPrometheus,
) -> None:
    fired = list(_fired(demo_prometheus, demo_prometheus.end))
    assert {name for name, _ in fired} >= {"RolecallXid", "RolecallLinkFlapping"}
    assert [f"{name} {dict(s.labels)}" for name, s in fired if s.labels.get("node") != STAND_IN] == []


def test_a_flap_is_pending_and_back_before_anybody_is_reported(demo_prometheus: DemoPrometheus) -> None:
    alert = ALERTS["RolecallLinkDown"]
    seen = demo_prometheus.query_range(alert.expr, step=STEP_SECONDS)
    assert "eth0" in {s.labels.get("interface") for s in seen}
    assert not any(_held(alert, s) for s in seen)


def test_an_injected_fault_is_in_front_of_the_alert_that_waits_for_a_cure(demo_prometheus: DemoPrometheus) -> None:
    opened = demo_prometheus.query("rolecall_incidents_opened_total > 0")
    faults = {(v.labels["role"], v.labels["fault"]) for v in opened}
    assert faults == {("rollout", "crash"), ("trainer", "hang"), ("rollout", "slow")}
    seen = demo_prometheus.query_range(compared(ALERTS["RolecallIncidentOpenTooLong"].expr))
    # Those that were resolved within a scrape have no series; a hang takes seconds.
    assert ("trainer", "hang") in {(s.labels["role"], s.labels["fault"]) for s in seen} <= faults
