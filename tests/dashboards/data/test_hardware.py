"""Hardware of nodes from Prometheus, in answers of its own tool and of a server that refuses a query."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rolecall.core.errors import UnreadableInput
from rolecall.dashboards.data import hardware
from rolecall.dashboards.data.hardware import Sample, fleet_metrics

STARTED = 'rolecall_agent_start_timestamp_seconds{job="rolecall",instance="%s",node="%s"}'
UP = 'up{job="rolecall",instance="%s"}'


@pytest.mark.parametrize(("up", "value"), [("1x80", 1), ("1x40 0x40", 0)])
def test_a_node_that_was_renamed_is_one_node(up: str, value: int, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: the Debian package `prometheus` has it")
    series = {
        STARTED % ("a:9477", "old"): "100x10 stale",
        STARTED % ("a:9477", "new"): "_x11 165x20 stale",
        STARTED % ("b:9477", "other"): "50x80",
        UP % "a:9477": up,
        UP % "b:9477": "1x80",
    }
    expected = [
        {"labels": f'{{job="rolecall",instance="{instance}",node="{node}"}}', "value": number}
        for instance, node, number in (("a:9477", "new", value), ("b:9477", "other", 1))
    ]
    test = {
        "interval": "15s",
        "input_series": [{"series": s, "values": v} for s, v in series.items()],
        "promql_expr_test": [{"expr": hardware.AGENTS, "eval_time": "15m", "exp_samples": expected}],
    }
    path = tmp_path / "tests.yaml"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_query_that_is_refused_costs_only_its_own_answer() -> None:
    refused = {hardware.AGENTS}

    def ask(expression: str) -> list[Sample]:
        if expression in refused:
            raise UnreadableInput(where="http://p", reason="many-to-many matching not allowed (status 422)")
        return [({"node": "n-1", "gpu": "0"}, 0.0)] if expression == hardware.GPUS else []

    found = fleet_metrics(ask, "run")
    assert found.lost_gpus == {"n-1": ("0",)}
    (error,) = found.errors
    assert "many-to-many" in error
    refused |= {hardware.COUNTS, hardware.LAST_SEEN, hardware.GPUS, hardware.DCGM}
    with pytest.raises(UnreadableInput):
        fleet_metrics(ask, "run")
