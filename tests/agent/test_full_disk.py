"""A disk that fills while the agent runs, and has room again: what happens is reported all the while, and later kept."""

import json
import os
import resource
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.processes import NODE, AgentProcess, Child, secret
from tests.support import PATIENCE_SECONDS, eventually

NUM_EVENTS = 24
"""More than fit into what is left of a page of the event file."""


class Quota:
    """No file of the agent's may grow beyond the event file, of which half a line more fits."""

    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir

    def fill(self, pid: int) -> None:
        size = (self.node_dir / "events.jsonl").stat().st_size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))

    def empty(self, pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Tmpfs(Quota):
    """A file system of its own, which another process fills."""

    def fill(self, pid: int) -> None:
        with (self.node_dir / "other").open("wb", buffering=0) as f:
            try:
                while True:
                    f.write(bytes(4096))
            except OSError:
                pass  # full

    def empty(self, pid: int) -> None:
        (self.node_dir / "other").unlink()


@contextmanager
def disk_of(kind: str, node_dir: Path) -> Iterator[Quota]:
    node_dir.mkdir()
    if kind == "a limit on files":
        yield Quota(node_dir)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(node_dir)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield Tmpfs(node_dir)
    finally:
        subprocess.run(["umount", "-l", str(node_dir)], check=True)


def told(agent: AgentProcess) -> list[dict[str, Any]]:
    """What it tells of processes: of the disk itself it tells when it looks."""
    return [e for e in agent.events() if not e["kind"].startswith("disk_")]


def lost(agent: AgentProcess) -> float:
    [line] = [n for n in agent.get("/metrics")[1].splitlines() if n.startswith("rolecall_agent_events_lost_total{")]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("kind", ["a limit on files", "tmpfs"])
def test_a_full_disk_costs_events_on_disk_and_nothing_else(tmp_path: Path, kind: str) -> None:
    node_dir = tmp_path / "node-1"
    with disk_of(kind, node_dir) as disk:
        agent, child = AgentProcess(node_dir), Child(node_dir)
        try:
            child.start("rollout/1")
            eventually(lambda: agent.newest("rollout/1"), "it is registered")
            disk.fill(agent.pid)
            for n in range(2, NUM_EVENTS):
                child.do(f"reporter.become(replica='rollout/1', incarnation={n}, secret={secret('rollout/1', 0, n)!r})")
                eventually(lambda n=n: told(agent)[-1]["incarnation"] == n, f"promotion {n} is reported")
            assert lost(agent) > 0
            assert [e["seq"] for e in agent.events()] == list(range(1, len(agent.events()) + 1))
            assert agent.get("/healthz")[0] == 200
            if kind == "tmpfs":
                eventually(lambda: [e for e in agent.events() if e["kind"] == "disk_full"], "the full disk is reported")
            disk.empty(agent.pid)
            if kind == "tmpfs":
                eventually(lambda: agent.events()[-1]["kind"] == "disk_free", "the room is reported")
                full, free = (e["detail"] for e in agent.events() if e["kind"].startswith("disk_"))
                assert full["path"] == free["path"] == str(node_dir) and full["device"] == free["device"]
                assert int(full["available_bytes"]) < 4096 <= int(free["available_bytes"])
            before = lost(agent)
            child.close()
            eventually(lambda: agent.events()[-1]["kind"] == "exited", "the end is reported")
            reported = agent.events()[-1]
            assert lost(agent) == before
            agent.close()
            kept = [json.loads(line) for line in (node_dir / "events.jsonl").read_text().splitlines()]
            assert reported in kept, "no partial line is before it"
            agent = AgentProcess(node_dir)
            assert agent.events()[-1]["seq"] > reported["seq"], "its numbers continue"
        finally:
            agent.close()
            child.close()


def test_an_agent_starts_on_a_full_disk(tmp_path: Path) -> None:
    """As after a crash: what is needed most is a node that can be seen."""
    node_dir = tmp_path / "node-1"
    with disk_of("tmpfs", node_dir) as disk:
        AgentProcess(node_dir).close()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        disk.fill(0)
        command = [
            sys.executable,
            "-m",
            "rolecall.agent",
            "--ranks-only",
            "--node",
            NODE,
            "--data-dir",
            str(node_dir),
            "--port",
            str(port),
        ]
        with subprocess.Popen([*command, "--token-file", str(tmp_path / "token")], stderr=subprocess.DEVNULL) as agent:
            try:
                eventually(lambda: _is_well(port) or agent.poll() is not None, "it serves")
                assert agent.poll() is None
            finally:
                agent.terminate()


def test_an_agent_ends_as_usual_when_it_can_remove_nothing(tmp_path: Path) -> None:
    """As on a file system that has become read-only. Here its files are folders."""
    agent = AgentProcess(tmp_path / "node-1")
    for name in ("agent.json", "agent.sock"):
        (agent.node_dir / name).unlink()
        (agent.node_dir / name).mkdir()
    agent.close()
    assert agent.process.returncode == 0


def _is_well(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE_SECONDS) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
