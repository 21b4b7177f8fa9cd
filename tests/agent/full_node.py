"""An agent on a stand-in of a GPU node on which every collector has something to read."""

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from rolecall.core.rundir import registration_secret
from tests.agent.collectors.test_engine_metrics import NEW as VLLM_PAGE
from tests.agent.collectors.test_network import interface
from tests.agent.nvml import STATE_VARIABLE, Machine, build
from tests.agent.page_server import PageServer, http_page
from tests.agent.processes import TOKEN
from tests.agent.ras_server import RasServer, answers
from tests.formats.test_nccl_inspector import line
from tests.formats.test_nccl_ras import communicator, rank, raw
from tests.infiniband_tree import port
from tests.support import PATIENCE_SECONDS, eventually

XID = (
    "Nov 22 10:00:00 n kernel: [  100.000001] NVRM: Xid (PCI:0000:1a:00): 79, pid='<unknown>', name=<unknown>, GPU has "
    "fallen off the bus.\n"
)
OOM = (
    "Nov 22 10:00:01 n kernel: [  101.000001] Out of memory: Killed process 4711 (python3) total-vm:9kB, anon-rss:8kB\n"
)
REPORTS = """
import sys
from rolecall.agent.reporter import reporter
folder, secret = sys.argv[1:]
reporter.start(replica="trainer/0", rank=0, incarnation=1, secret=secret, node_dir=folder)
reporter.enter_phase("compute")
reporter.set_step(3)
print("ready", flush=True)
sys.stdin.read()
"""
EVERY = (
    *("gpu", "gpu_events", "kernel_log", "xids", "network", "infiniband", "storage", "nccl_ras", "nccl_inspector"),
    *("jobs", "ray", "orphans", "engines", "host", "process"),
)


class FullNode:
    """`settings`: changes to its agent.yaml. `before`: a command that runs the agent's."""

    def __init__(self, folder: Path, before: Sequence[str] = (), **settings: Any) -> None:
        self.folder, self.data = folder, folder / "data"
        self.data.mkdir()
        self.machine = Machine(folder / "machine", 2)
        self.kernel_log = folder / "kern.log"
        self.kernel_log.write_text("")
        for n in range(2):
            port(
                folder / "sys/class/infiniband",
                f"mlx5_{n}",
                counters={"port_rcv_data": 5},
                hw_counters={"np_cnp_sent": 1},
            )
        interface(folder / "sys/class/net", "eth0", rx_bytes=1000, tx_bytes=2000)
        self._inspector = folder / "inspector"
        self._inspector.mkdir()
        (self._inspector / "n-pid1.log").write_text("")
        self.ras = RasServer(answers(raw(communicator(*(rank(n, 0, 0, 0, 0, 5) for n in range(2))))))
        self.engine = PageServer(http_page(VLLM_PAGE))
        (folder / "token").write_text(TOKEN)
        file = {
            "node": "node-1",
            "port": 0,
            "data_dir": str(self.data),
            "token_file": str(folder / "token"),
            "sys": str(folder / "sys"),
            "interval_seconds": 0.1,
            "gpu": {"library": str(build(folder)), "interval_seconds": 0.2},
            "kernel_log": {"path": str(self.kernel_log)},
            "network": {"interval_seconds": 0.2, "interfaces": ["eth0"]},
            "infiniband": {"interval_seconds": 0.2},
            "storage": {"interval_seconds": 0.2},
            "nccl_ras": {"address": self.ras.address, "interval_seconds": 0.5},
            "nccl_inspector": {"enabled": True, "folder": str(self._inspector), "interval_seconds": 0.2},
            "engines": {"servers": [{"url": self.engine.url.removesuffix("/metrics"), "replica": "rollout/0"}]},
            **settings,
        }
        (folder / "agent.yaml").write_text(yaml.safe_dump(file))
        self.log = folder / "agent.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "rolecall.agent", "--config", str(folder / "agent.yaml")],
                stderr=log,
                env={**os.environ, STATE_VARIABLE: str(self.machine.path)},
            )
        address_file = self.data / "agent.json"
        eventually(lambda: address_file.exists() or self.process.poll() is not None, "the agent serves")
        assert self.process.poll() is None, self.log.read_text()
        self.url = str(json.loads(address_file.read_text())["url"])
        self.netloc = urlsplit(self.url).netloc

    def happen(self) -> None:
        """An XID, an OOM kill and lines of the Inspector."""
        with self.kernel_log.open("a") as f:
            f.write(XID + OOM)
        with (self._inspector / "n-pid1.log").open("ab") as f:
            f.write(line(0, 1, 500.0) * 3)
        self.machine.event(1, 31)

    def get(self, path: str, authorization: str = "", tls: ssl.SSLContext | None = None) -> tuple[int, str]:
        host, port_ = self.netloc.split(":")
        if tls is None:
            connection = http.client.HTTPConnection(host, int(port_), timeout=PATIENCE_SECONDS)
        else:
            connection = http.client.HTTPSConnection("localhost", int(port_), timeout=PATIENCE_SECONDS, context=tls)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_SECONDS)
        self.ras.close()
        self.engine.close()


@contextlib.contextmanager
def reporting(node: FullNode) -> Iterator[subprocess.Popen[str]]:
    """A training process that reports, registered with the agent."""
    secret = registration_secret(TOKEN, "trainer/0", 0, 1)
    command = [sys.executable, "-c", REPORTS, str(node.data), secret]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


@contextlib.contextmanager
def full_node(folder: Path, before: Sequence[str] = (), **settings: Any) -> Iterator[FullNode]:
    node = FullNode(folder, before, **settings)
    try:
        yield node
    finally:
        node.close()
