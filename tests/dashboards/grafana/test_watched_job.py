"""The dashboard of a watched job, on a real Prometheus that scrapes an agent and `rolecall watch agents`.

The job is two processes: rank 0 of the trainer uses the reporter and a GPU and is stopped, the other one knows nothing
of rolecall and is killed.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.collectors.process.discovery import DEFAULTS
from rolecall.core.rundir import registration_secret
from rolecall.dashboards.grafana.boards.replicas import KERNEL_STATES
from rolecall.dashboards.grafana.boards.watched import GONE, rank_state
from rolecall.dashboards.grafana.export import documents
from rolecall.dashboards.grafana.promql import scoped
from tests.agent.full_node import FullNode, full_node
from tests.agent.processes import TOKEN
from tests.dashboards.grafana.viewing import Viewer, all_panels
from tests.dashboards.prometheus_of_demo import DemoPrometheus
from tests.prometheus_server import prometheus
from tests.support import PATIENCE_SECONDS, eventually

INSTRUMENTED = """
import itertools, sys, time
from rolecall.agent.reporter import reporter
folder, secret = sys.argv[1:]
reporter.start(replica="trainer/0", rank=0, incarnation=1, secret=secret, node_dir=folder)
for n in itertools.count():
    with reporter.step(n):
        sum(range(10_000))
        time.sleep(0.05)
    reporter.update(loss=0.25, reward=0.5)
"""
UNINSTRUMENTED = "while True: sum(range(10_000))"
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OURS = "GRAFANA_TEST_JOB"


def _ours_only(name: str) -> dict[str, Any]:
    """Rules that find the ranks of torchrun of one job: others may run on this machine."""
    (rule,) = [r for r in DEFAULTS if r["name"] == "torchrun"]
    return {"defaults": False, "rules": [{**rule, "environ": {**rule["environ"], OURS: f"^{name}$"}}]}


RUN = "my-job"
EXPLAINED = {
    d["uid"]: {p["title"] for p in all_panels(d) if p["fieldConfig"]["defaults"].get("noValue")}
    for d in documents()
    if d["uid"] not in ("rolecall-watched", "rolecall-gpus", "rolecall-network")
}
"""Panels that say why they are empty, of the dashboards that show more than agents and watch have."""


@contextmanager
def _process(*argv: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *argv], env={**os.environ, **environ}, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def _watched_job(folder: Path) -> Iterator[tuple[FullNode, subprocess.Popen[bytes], subprocess.Popen[bytes], str]]:
    """(its node, the instrumented process, the other one, address of the watch's metrics)."""
    with ExitStack() as stack:
        node = stack.enter_context(full_node(folder, jobs={"rules": _ours_only(folder.name)}))
        secret = registration_secret(TOKEN, "trainer/0", 0, 1)
        instrumented = stack.enter_context(_process("-c", INSTRUMENTED, str(node.data), secret))
        other = stack.enter_context(_process("-S", "-c", UNINSTRUMENTED, **TORCHRUN, **{OURS: folder.name}))
        node.machine.set({"processes": f"{instrumented.pid}:{60 << 30}"}, 0)
        metrics = _free_address()
        watch = ("-m", "rolecall", "watch", "agents", node.url, "--id", RUN, "--metrics", metrics)
        stack.enter_context(_process(*watch, "--runs", str(folder / "runs")))
        yield node, instrumented, other, metrics


@pytest.mark.slow
def test_every_panel_has_data_of_a_watched_job(tmp_path: Path) -> None:
    began = time.time()
    (tmp_path / "prometheus").mkdir()
    with (
        _watched_job(tmp_path) as (node, instrumented, other, metrics),
        prometheus(tmp_path / "prometheus", targets=(node.netloc, metrics)) as server,
    ):
        found = 'count(rolecall_process_up{role="trainer"} == 1) == 2'
        moving = "rate(rolecall_process_work_units_total[10s]) > 0"
        for expression in (found, moving, "rolecall_gpu_rank == 1", "rolecall_watch_processes > 0"):
            eventually(lambda e=expression: server.count(e), expression)
        instrumented.send_signal(signal.SIGSTOP)
        eventually(lambda: server.count("rolecall_incident_open"), "the watch has opened an incident")
        other.kill()
        node.happen()
        for expression in (
            "rolecall_incident_open",
            "rolecall_process_exits_total > 0",
            "rolecall_xid_events_total > 0",
        ):
            # For some scrapes, because the points of a graph are further apart than scrapes.
            eventually(lambda e=expression: server.count(f"count_over_time(({e})[1m:1s]) > 3"), expression)

        shown = DemoPrometheus(server.netloc, began, time.time())
        viewer = Viewer(shown)
        boards = {d["uid"]: d for d in documents()}
        document = boards["rolecall-watched"]
        assert viewer.variables(document)["run"] == (RUN,)
        assert [str(asked) for asked in viewer.look(document) if not asked.points] == []
        chosen = Viewer(shown, {"role": "trainer", "replica": "trainer/0"})
        for uid, explained in EXPLAINED.items():
            seen = list(chosen.look(boards[uid]))
            empty = {asked.panel for asked in seen} - {asked.panel for asked in seen if asked.points}
            assert empty <= explained, uid
        placed = next(a.series for a in chosen.look(boards["rolecall-replica"]) if a.panel == "Placement")
        assert {series["rank"] for series in placed} == {"0", "1"}, "also of the rank without the reporter"
        every = dict.fromkeys(("job", "instance", "role"), ".+")
        states = {
            (v.labels["replica"], v.labels["rank"]): v.value
            for v in shown.query(viewer.filled(scoped(rank_state()), every))
        }
    stopped = 1 + list(KERNEL_STATES).index("T")
    assert states == {("trainer/0", "0"): stopped, ("trainer/0", "1"): GONE}
