"""An agent with every collector at work: what it exposes is taken by promtool and by a real Prometheus, its labels are
bounded, and without privileges it runs and reports unreadable probes."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.core.metrics.catalogue import BY_NAME
from tests.agent.full_node import EVERY, FullNode, full_node, reporting
from tests.agent.http.test_web_config import HASH, PASSWORD, basic, certificate
from tests.prometheus_server import prometheus
from tests.support import PATIENCE_SECONDS, eventually

pytestmark = pytest.mark.xdist_group("full node")  # one worker runs them all: the node starts once

DEPLOY = Path(__file__).parents[3] / "deploy"
SERIES = re.compile(r"^(rolecall_\w+)\{(.*)\} \S+(?: \d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"(?:,|$)')


def probes_up(text: str) -> dict[str, float]:
    return {m[1]: float(m[2]) for m in re.finditer(r'^rolecall_probe_up\{.*probe="(\w+)"\} (\S+)', text, re.MULTILINE)}


def all_up(node: FullNode) -> bool:
    up = probes_up(node.get("/metrics")[1])
    return set(up) == set(EVERY) and all(up.values())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FullNode]:
    with full_node(tmp_path_factory.mktemp("node")) as it, reporting(it) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        eventually(lambda: all_up(it), "every collector reads")
        it.happen()
        eventually(lambda: "rolecall_xid_events_total{" in it.get("/metrics")[1], "the XIDs are counted")
        eventually(
            lambda: "rolecall_nccl_inspector_operations_total{" in it.get("/metrics")[1], "the Inspector is read"
        )
        eventually(lambda: 'rolecall_kernel_oom_kills_total{node="node-1"} 1' in it.get("/metrics")[1], "the OOM kill")
        eventually(lambda: "rolecall_process_step{" in it.get("/metrics")[1], "the process reports")
        yield it


def test_promtool_takes_our_own_names(node: FullNode) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here: the Debian package `prometheus` has it")
    text = node.get("/metrics")[1]
    done = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    exposed = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    assert len(exposed) > 150, "every collector has something on the page"
    assert exposed <= set(BY_NAME)


# --- labels

PATTERNS = {
    "node": r"node-1",
    "gpu": r"\d+|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}",
    "role": r"[a-z0-9_.-]{1,63}",
    "replica": r"[a-z0-9_.-]{1,63}/\d+",
    "rank": r"\d+",
}
"""Others must be short words: a name of a device, a code, a kind."""
WORD = r"[\w .:/@+-]{0,64}"


def test_labels_are_bounded_and_hold_no_text(node: FullNode) -> None:
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for one in node.get("/metrics")[1].splitlines():
        if one.startswith("#"):
            continue
        found = SERIES.match(one)
        assert found, one
        for name, value in LABEL.findall(found[2]):
            values[found[1], name].add(value)
    for (metric, name), seen in values.items():
        pattern = PATTERNS.get(name, WORD)
        wrong = [v for v in seen if not re.fullmatch(pattern, v)]
        assert not wrong, (metric, name, wrong)
        assert len(seen) <= 64, (metric, name)
    assert "fallen off the bus" not in node.get("/metrics")[1]


def test_labels_of_the_catalogue_are_a_closed_set() -> None:
    """Each is an index, a device or one of few words. Text of messages, PIDs and request ids would be without bound."""
    who = {"node", "role", "replica", "rank"}
    devices = {"gpu", "uuid", "gpu_instance", "compute_instance", "nic", "port", "interface", "link", "device", "mount"}
    codes = {"xid", "error", "priority", "version"}
    words = {
        "phase",
        "state",
        "name",
        "action",
        "reason",
        "profile",
        "kind",
        "resource",
        "collective",
        "probe",
        "k",
        "server",
    }
    sessions = {"communicator"}  # as many as live at a time, and bounded by the collector
    of_watch = {"run", "mode", "fault", "outcome", "guard", "decision", "verdict", "detector"}
    known = who | devices | codes | words | sessions | of_watch
    assert {name for metric in BY_NAME.values() for name in metric.labels} == known


# --- without rights

NO_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
"""Without one capability. As another user the interpreter itself may be out of reach, in root's home."""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root alone has rights to give up")
def test_without_privileges_it_runs_and_reports_unreadable_probes(tmp_path: Path) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    roots = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, env=rank
    )
    try:
        with full_node(tmp_path, NO_RIGHTS, kernel_log={"path": "/dev/kmsg"}) as it:

            def rest_up() -> bool:
                up = probes_up(it.get("/metrics")[1])
                return set(up) == set(EVERY) and {name for name, value in up.items() if not value} == {"kernel_log"}

            eventually(rest_up, "all the others read")
            events = json.loads(it.get("/v1/events")[1])["events"]
            [down] = [e for e in events if e["kind"] == "probe_down"]
            assert down["detail"]["probe"] == "kernel_log" and "CAP_SYSLOG" in down["detail"]["reason"]
            message = "the environment of some processes that may be ranks (torchrun) cannot be read: run the agent as"
            eventually(lambda: message in it.log.read_text(), "processes with unknown ranks are reported")
            assert it.get("/healthz")[0] == 200
    finally:
        roots.communicate(timeout=PATIENCE_SECONDS)


# --- Prometheus


def _config(folder: Path, node: FullNode, **of_agents: Any) -> Path:
    """deploy/prometheus.yaml as it is, but for where its lists lie and how often it asks."""
    value = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    (folder / "nodes.yaml").write_text(yaml.safe_dump([{"targets": [node.netloc.replace("127.0.0.1", "localhost")]}]))
    # Those of the agents; no watch is here.
    value["scrape_configs"] = [
        s for s in value["scrape_configs"] if s["job_name"] in ("rolecall-agent", "rolecall-dcgm")
    ]
    for scrape in value["scrape_configs"]:
        scrape |= {"scrape_interval": "1s", "scrape_timeout": "1s", **of_agents}
        assert scrape["file_sd_configs"] == [{"files": ["/etc/prometheus/rolecall/*.yaml"]}]
        scrape["file_sd_configs"] = [{"files": [str(folder / "nodes.yaml")]}]
    (folder / "deploy.yaml").write_text(yaml.safe_dump(value))
    return folder / "deploy.yaml"


def _scraped(folder: Path, config: Path) -> None:
    with prometheus(folder, config=config) as server:
        for job in ("rolecall-agent", "rolecall-dcgm"):
            eventually(lambda j=job: server.count(f'up{{job="{j}"}} == 1'), f"{job} is scraped")
        assert server.count('rolecall_gpu_power_watts{job="rolecall-agent",node="node-1"}') == 2
        assert server.count('DCGM_FI_DEV_POWER_USAGE{job="rolecall-dcgm",gpu="1"}') == 1
        assert server.count('rolecall_probe_up{job="rolecall-agent"} == 1') == len(EVERY)
        assert server.count('scrape_samples_scraped{job="rolecall-agent"} > 200') == 1
        assert not server.count('{__name__=~"DCGM_.*",job="rolecall-agent"}')


def test_a_real_prometheus_scrapes_it_as_configured_in_deploy(node: FullNode, tmp_path: Path) -> None:
    _scraped(tmp_path, _config(tmp_path, node))


def test_a_real_prometheus_scrapes_it_over_tls_with_a_user(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    certificate(folder)
    (folder / "web.yml").write_text(
        f"tls_server_config: {{cert_file: node.crt, key_file: node.key}}\nbasic_auth_users: {{prometheus: {HASH}}}\n"
    )
    (tmp_path / "password").write_text(PASSWORD)
    with full_node(folder, web_config_file="web.yml") as it:
        tls = ssl.create_default_context(cafile=folder / "node.crt")
        assert it.get("/metrics", tls=tls)[0] == 401

        def all_there() -> bool:
            up = probes_up(it.get("/metrics", basic("prometheus", PASSWORD), tls)[1])
            return set(up) == set(EVERY) and all(up.values())

        eventually(all_there, "every collector reads")
        commented = re.findall(
            r"^    # (scheme: .*|tls_config: .*|basic_auth: .*)$",
            (DEPLOY / "prometheus.yaml").read_text(),
            re.MULTILINE,
        )
        secure = yaml.safe_load("\n".join(commented))
        assert set(secure) == {"scheme", "tls_config", "basic_auth"}
        secure["tls_config"]["ca_file"] = str(folder / "node.crt")
        secure["basic_auth"]["password_file"] = str(tmp_path / "password")
        _scraped(tmp_path, _config(tmp_path, it, **secure))
