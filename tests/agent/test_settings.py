"""`agent.yaml`: every key explained, what is unknown refused, and an agent that runs from one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from rolecall.agent.collectors.process.exits import ExitWatch
from rolecall.agent.daemon import main
from rolecall.agent.events import EventLog
from rolecall.agent.registry import Registry
from rolecall.agent.settings import (
    AgentFile,
    collectors_of,
    default_agent_file,
    explain,
    load_agent_file,
)
from rolecall.core.clock import FakeClock
from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId
from tests.agent.http.test_web_config import HASH, PASSWORD, basic
from tests.support import PATIENCE_SECONDS, eventually

QUIET = {name: {"enabled": False} for name in ("gpu", "kernel_log", "nccl_ras", "jobs")}
"""Hardware that this machine need not have."""


def test_the_explained_file_is_the_default_and_each_key_of_its_own_has_a_meaning() -> None:
    assert AgentFile.model_validate(yaml.safe_load(explain())) == AgentFile()
    sections = ("gpu", "kernel_log", "network", "infiniband", "storage", "nccl_ras", "nccl_inspector", "jobs")
    for name, field in AgentFile.model_fields.items():
        assert field.description or name in (*sections, "port")


def test_problems_are_reported_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(
        "node: 'Not A Node'\nport: 70000\ngpus: {}\nkernel_log: {interval_seconds: 0}\nnode_exporter: {hostname: a}\n"
    )
    with pytest.raises(ConfigError) as e:
        load_agent_file(path)
    message = str(e.value)
    assert "5 problems" in message
    unknown = ("gpus: unknown key", "node_exporter.hostname: unknown key")  # they would be ignored
    for key in ("node: ", "port: ", "kernel_log.interval_seconds: ", *unknown):
        assert key in message


def test_a_host_whose_name_cannot_be_a_nodes_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu." + "x" * 60)
    (tmp_path / "agent.yaml").write_text("port: 0\n")
    with pytest.raises(ConfigError, match="node: "):
        load_agent_file(tmp_path / "agent.yaml")


@pytest.mark.parametrize("text", ["dcgm_exporter: {enabled: true}", "node_exporter: {enabled: true}"])
def test_nothing_is_reported_twice(tmp_path: Path, text: str) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="would both report"):
        load_agent_file(path)


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "expected a mapping"), ("{", "not YAML"), ("\xff", "not a text file")]
)
def test_an_invalid_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "agent.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        load_agent_file(path)


def test_a_wrong_file_ends_the_command_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    assert main(["--explain"]) == 0
    assert f"data_dir: {AgentFile().data_dir}" in capsys.readouterr().out


@contextmanager
def running(path: Path, *options: str) -> Iterator[str]:
    """`rolecall agent --config`; yields its address."""
    with started(["--config", str(path), *options], Path(yaml.safe_load(path.read_text())["data_dir"])) as url:
        yield url


@contextmanager
def started(options: list[str], data_dir: Path, environ: dict[str, str] | None = None) -> Iterator[str]:
    command = [sys.executable, "-m", "rolecall.agent", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    address_file = data_dir / "agent.json"
    try:
        eventually(lambda: address_file.exists() or process.poll() is not None, "the agent serves")
        assert process.poll() is None, process.communicate()[1]
        yield json.loads(address_file.read_text())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0


def test_without_a_configuration_the_agent_reads_the_whole_node(tmp_path: Path) -> None:
    """The data directory and the port are given, so that tests running side by side share neither."""
    with started(["--data-dir", str(tmp_path / "data"), "--port", "0"], tmp_path / "data") as url:
        eventually(lambda: "rolecall_probe_up{" in get(url + "/metrics")[1], "collectors report")
        page = get(url + "/metrics")[1]
    assert f'node="{socket.gethostname().lower()}"' in page
    assert {f'probe="{p}"' for p in ("gpu", "network", "storage", "kernel_log")} <= set(
        re.findall(r'probe="\w+"', page)
    )
    assert (tmp_path / "data" / "token").stat().st_mode & 0o777 == 0o640


def test_a_node_of_slurm_may_have_capitals(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("node: GPU-7\n")
    assert load_agent_file(tmp_path / "agent.yaml").node == default_agent_file("GPU-7").node == "gpu-7"


def test_a_host_name_that_is_no_node_name_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "_bad")
    with pytest.raises(ConfigError, match=r"node: .*_bad.*; name this node with --node"):
        default_agent_file()


def get(url: str, authorization: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": authorization} if authorization else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def test_an_agent_runs_from_a_file_and_makes_its_own_token(tmp_path: Path) -> None:
    path, data = tmp_path / "agent.yaml", tmp_path / "data"
    path.write_text(yaml.safe_dump({"node": "node-7", "port": 0, "data_dir": str(data), **QUIET}))
    with running(path) as url:
        status, text = get(url + "/metrics")
        assert status == 200 and 'rolecall_agent_build_info{node="node-7"' in text
        assert get(url + "/metrics/dcgm") == (200, "")
    token = (data / "token").read_text()
    assert len(token) == 65 and (data / "token").stat().st_mode & 0o777 == 0o640
    with running(path):
        pass
    assert (data / "token").read_text() == token


def test_the_paces_of_the_file_arrive(tmp_path: Path) -> None:
    sections = ("gpu", "kernel_log", "network", "infiniband", "storage", "nccl_ras", "nccl_inspector", "jobs")
    paces = {name: 7.0 + n for n, name in enumerate(sections)}
    text = "".join(f"{name}: {{enabled: true, interval_seconds: {pace}}}\n" for name, pace in paces.items())
    (tmp_path / "agent.yaml").write_text("node: node-1\n" + text)
    node, clock = NodeId("node-1"), FakeClock()
    events = EventLog(tmp_path / "events.jsonl", node, clock)
    exits = ExitWatch()
    registry = Registry(node=node, data_dir=tmp_path, token="t", events=events, exits=exits, clock=clock)
    found = collectors_of(load_agent_file(tmp_path / "agent.yaml"), node, tmp_path, registry)
    assert paces.items() <= {c.name: c.interval_seconds for c in found}.items()
    exits.stop()
    events.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nccl_ras: {address: 'no port'}", "nccl_ras: "),
        ("gpu: {enabled: false}\ndcgm_exporter: {enabled: true, url: 'ftp://x'}", "dcgm_exporter: "),
        ("jobs: {rules: {rules: 3}}", "jobs.rules.rules"),
        ("engines: {servers: [{url: 'http://127.0.0.1:8000', replica: rollout}]}", "engines.servers.0.replica"),
    ],
)
def test_a_value_that_a_collector_refuses_is_a_mistake_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(f"node: node-7\nport: 0\ndata_dir: {tmp_path / 'data'}\n{text}\n")
    assert main(["--config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_token_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, path = tmp_path / "data", tmp_path / "agent.yaml"
    data.mkdir()
    (data / "token").write_text("\n")
    path.write_text(yaml.safe_dump({"node": "node-7", "port": 0, "data_dir": str(data), **QUIET}))
    assert main(["--config", str(path)]) == 2
    assert "token: empty" in capsys.readouterr().err


def test_users_are_asked_for_and_the_port_can_be_overruled(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text(f"basic_auth_users: {{prometheus: {HASH}}}\n")
    path = tmp_path / "agent.yaml"
    file = {"node": "node-7", "port": 1, "data_dir": str(tmp_path / "data"), "web_config_file": "web.yml", **QUIET}
    path.write_text(yaml.safe_dump(file))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(path, "--port", str(port)) as url:
        assert url == f"http://127.0.0.1:{port}"
        assert get(url + "/metrics")[0] == 401
        assert get(url + "/metrics", basic("prometheus", PASSWORD))[0] == 200
        for authorization in ("", basic("prometheus", "wrong")):  # as a kubelet asks; and it learns nothing else
            assert get(url + "/healthz", authorization) == (200, '{"ok":true}')
            assert get(url + "/healthz?x=1", authorization)[0] == 400
            for path in ("/metrics/dcgm", "/v1/samples", "/v1/events", "/v1/evidence/stacks?pid=1", "/none"):
                assert get(url + path, authorization)[0] == 401
        assert '"node":"node-7"' in get(url + "/healthz", basic("prometheus", PASSWORD))[1]


def test_a_second_agent_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump({"node": "node-7", "port": 0, "data_dir": str(tmp_path / "data"), **QUIET}))
    with running(path):
        second = subprocess.run(
            [sys.executable, "-m", "rolecall.agent", "--config", str(path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            env=dict(os.environ),
            check=False,
        )
        assert second.returncode == 2 and "uses this directory" in second.stderr
