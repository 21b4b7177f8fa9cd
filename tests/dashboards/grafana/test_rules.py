"""Alert and recording rules, evaluated by Prometheus' own tool: each alert fires, and does not by a hair."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.dashboards.grafana.rules import GROUPS, Alert, RuleGroup, Severity, check, rules_yaml
from tests.dashboards.grafana.rules_cases import ALERTS, CASES, NODE, WATCH, Case

_SERIES = re.compile(r"(\w+)\{(.*)\}")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
MISSING = "RolecallWatchMissing"
_USED = re.compile(r"\$labels\.(\w+)")


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool here: the Debian package `prometheus` has it")
    return found


def _run(promtool: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run([promtool, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def _written(folder: Path) -> list[str]:
    for name, text in rules_yaml().items():
        (folder / name).write_text(text)
    return list(rules_yaml())


def _full(labels: str) -> str:
    return labels.replace("@W", WATCH).replace("@N", NODE)


def _firing(case: Case, labels: str) -> dict[str, str]:
    fixed = {"alertname": case.alert, "alertstate": "firing", "severity": str(ALERTS[case.alert].severity)}
    return {**fixed, **dict(_LABEL.findall(_full(labels)))}


def _as_promtool(case: Case) -> dict[str, object]:
    expected = []
    for labels in case.fires:
        reported = ",".join(f'{k}="{v}"' for k, v in _firing(case, labels).items())
        expected.append({"labels": f"ALERTS{{{reported}}}", "value": 1})
    query = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    return {
        "name": f"{case.alert}: {case.what}",
        "interval": "15s",
        "input_series": [{"series": _full(s), "values": v} for s, v in case.series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": case.at, "exp_samples": expected}],
    }


def test_promtool_accepts_the_files(promtool: str, tmp_path: Path) -> None:
    reported = _run(promtool, "check", "rules", "--lint=all", "--lint-fatal", *_written(tmp_path), cwd=tmp_path)
    assert f"{len(ALERTS)} rules found" in reported


def _tried(promtool: str, folder: Path, name: str, **changed: str) -> str:
    """Runs the histories of one alert against a file that holds nothing else, which is quicker by far."""
    (rule,) = [
        {**rule, **changed}
        for text in rules_yaml().values()
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
        if rule.get("alert") == name
    ]
    (folder / "rule.yaml").write_text(json.dumps({"groups": [{"name": "one", "interval": "15s", "rules": [rule]}]}))
    tests = [_as_promtool(c) for c in CASES if c.alert == name]
    (folder / "tests.yaml").write_text(
        json.dumps({"rule_files": ["rule.yaml"], "evaluation_interval": "15s", "tests": tests})
    )
    return _run(promtool, "test", "rules", "tests.yaml", cwd=folder)


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_fires_when_it_must_and_not_otherwise(name: str, promtool: str, tmp_path: Path) -> None:
    assert "SUCCESS" in _tried(promtool, tmp_path, name)


def test_a_watch_that_is_long_gone_is_not_missed(promtool: str, tmp_path: Path) -> None:
    """With six minutes in place of a day: each evaluation of a day costs."""
    with pytest.raises(AssertionError, match="got: nil"):
        _tried(promtool, tmp_path, MISSING, expr=ALERTS[MISSING].expr.replace("[1d]", "[6m]"))


def test_promtool_fails_if_an_alert_does_not_fire_or_always_fires(promtool: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="got: nil"):
        _tried(promtool, tmp_path, "RolecallGpuLost", expr="rolecall_gpu_upp == 0")
    with pytest.raises(AssertionError, match="exp: nil"):
        _tried(promtool, tmp_path, "RolecallGpuLost", **{"for": "0s"})


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_is_tried_both_ways_and_its_text_uses_labels_that_it_has(name: str) -> None:
    cases = [c for c in CASES if c.alert == name]
    firing = [c for c in cases if c.fires]
    assert firing and len(firing) < len(cases), "a case that fires and one that does not"
    had = set().union(*(_firing(c, labels) for c in firing for labels in c.fires))
    alert = ALERTS[name]
    used = set(_USED.findall(alert.summary + alert.description))
    assert used <= had, f"{used - had} would be empty"


def _series() -> Iterator[tuple[str, set[str]]]:
    for case in CASES:
        for series in case.series:
            found = _SERIES.fullmatch(_full(series))
            assert found is not None, series
            yield found[1], {k for k, _ in _LABEL.findall(found[2])} - {"job", "instance"}


def test_the_histories_are_of_series_that_rolecall_serves() -> None:
    # Else an alert and its test could share a misspelt label.
    for name, labels in _series():
        if name != "up":
            assert labels == set(BY_NAME[name].labels), name


def test_a_misspelt_metric_or_label_is_refused() -> None:
    with pytest.raises(ValueError, match="rolecall_gpu_upp"):
        Alert(expr="rolecall_gpu_upp == 0", severity=Severity.WARNING, summary="", description="")
    with pytest.raises(ValueError, match="no label node_name"):
        check('rolecall_gpu_up{node_name="a"} == 0')
    with pytest.raises(ValueError, match="level:rolecall_metric:operation"):
        RuleGroup("x", {"rolecall_x": "sum(rolecall_gpu_up)"})
    with pytest.raises(ValueError, match="no rolecall metric"):
        check("vector(1)")


def test_names_are_once_and_files_are_the_same_each_time() -> None:
    names = [name for made in GROUPS.values() for g in made for name in g.rules]
    assert len(names) == len(set(names))
    assert rules_yaml() == rules_yaml()
    for text in rules_yaml().values():
        assert yaml.safe_load(text)["groups"]


@pytest.mark.parametrize(
    ("runbooks", "url"),
    [
        ("https://wiki.example/rolecall/", "https://wiki.example/rolecall/RolecallXid.md"),
        ("https://docs.example/{alert}.html", "https://docs.example/RolecallXid.html"),
        ("", None),
    ],
)
def test_an_alert_links_its_runbook_where_its_url_is_known(runbooks: str, url: str | None) -> None:
    (text, _) = rules_yaml(runbooks).values()
    rules = {r["alert"]: r["annotations"] for group in yaml.safe_load(text)["groups"] for r in group["rules"]}
    assert rules["RolecallXid"].get("runbook_url") == url
    assert all(annotations.get("runbook_url", "https://").startswith("https://") for annotations in rules.values())
    assert rules["RolecallXid"].get("runbook") == (None if url else "docs/runbooks/RolecallXid.md")


def test_recorded_pace_is_that_of_ranks_at_work(promtool: str, tmp_path: Path) -> None:
    of_rank = '{@N,role="rollout",replica="rollout/%d",rank="0"}'
    busy = {0: 15, 1: 15, 2: 45, 3: 0}  # busy seconds and units in 15 s; the last one idles
    series = [
        {"series": _full(f"rolecall_process_{name}_total{of_rank % n}"), "values": f"0+{value}x40"}
        for n, seconds in busy.items()
        for name, value in (("busy_seconds", seconds), ("work_units", 15 if seconds else 0), ("progress", n))
    ]
    ratio = '{job="rolecall",role="rollout",replica="rollout/%d",rank="0"}'
    slowness = "rank:rolecall_process_unit_slowness:ratio1m"
    role = '{job="rolecall",role="rollout"}'
    expected = {
        slowness: [(ratio % 0, 1), (ratio % 1, 1), (ratio % 2, 3)],
        "role:rolecall_process_unit_seconds:median1m": [(role, 1)],
        "role:rolecall_process_progress:min_rate1m": [(role, 0)],
        "role:rolecall_process_progress:median_rate1m": [(role, 0.1)],
    }
    asked = [
        {"expr": n, "eval_time": "5m", "exp_samples": [{"labels": n + labels, "value": v} for labels, v in samples]}
        for n, samples in expected.items()
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": asked}
    names = _written(tmp_path)
    (tmp_path / "tests.yaml").write_text(
        json.dumps({"rule_files": names[1:], "evaluation_interval": "15s", "tests": [test]})
    )
    assert "SUCCESS" in _run(promtool, "test", "rules", "tests.yaml", cwd=tmp_path)
