"""Real processes for the agent's tests: a child that reports, and an agent."""

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request

from rolecall.agent.node import AgentSettings
from rolecall.core.ids import NodeId, process_start_ticks
from rolecall.core.rundir import registration_secret
from tests.support import PATIENCE_SECONDS, eventually

TOKEN = "a token of tests"
NODE = NodeId("node-1")
CHILD = Path(__file__).with_name("child.py")


def http_request(path: str, **query: str) -> Request:
    """A request for a handler that is called without a server."""
    return Request(
        {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": urlencode(query).encode()}
    )


def secret(replica: str, rank: int = 0, incarnation: int = 1) -> str:
    return registration_secret(TOKEN, replica, rank, incarnation)


class Child:
    """A process that uses the reporter, on command."""

    def __init__(self, node_dir: Path | None = None) -> None:
        self.node_dir = node_dir
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self.process.pid
        self.start_ticks = process_start_ticks(self.pid) or 0

    def do(self, *lines: str) -> None:
        """Runs each line in the child and waits for it."""
        for line in lines:
            self.execute(line)
            assert self.process.stdout is not None
            answer = self.process.stdout.readline()
            assert answer == "ok\n", (answer, self.process.stderr and self.process.stderr.read())

    def execute(self, line: str) -> None:
        """Runs a line that does not come back."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def start(self, replica: str, rank: int = 0, incarnation: int = 1, given_secret: str | None = None) -> None:
        given_secret = secret(replica, rank, incarnation) if given_secret is None else given_secret
        where = {"replica": replica, "rank": rank, "incarnation": incarnation, "secret": given_secret}
        self.do(f"reporter.start(**{where!r}, node_dir={str(self.node_dir)!r})")

    @property
    def page(self) -> Path:
        assert self.node_dir is not None
        return self.node_dir / "pages" / f"{self.pid}-{self.start_ticks}.page"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def warning(self) -> str:
        """The next line that it writes to stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def close(self) -> str:
        """Kills it; what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        return self.process.communicate(timeout=PATIENCE_SECONDS)[1]


class AgentProcess:
    """`python -m rolecall.agent` with its own directory."""

    def __init__(self, node_dir: Path, *options: str) -> None:
        self.node_dir = node_dir
        token = node_dir.parent / "token"
        token.write_text(TOKEN)
        collectors = [] if "--config" in options else ["--ranks-only"]
        command = [sys.executable, "-m", "rolecall.agent", *collectors, "--node", NODE, "--data-dir", str(node_dir)]
        self.process = subprocess.Popen(
            [*command, "--token-file", str(token), "--interval", "0.05", *options], stderr=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        eventually(lambda: self._ready() or self.process.poll() is not None, "the agent serves")
        assert self.process.poll() is None, self.process.communicate()[1]
        self.netloc = json.loads((node_dir / "agent.json").read_text())["url"].removeprefix("http://")

    def _ready(self) -> bool:
        try:
            return bool(json.loads((self.node_dir / "agent.json").read_text())["pid"] == self.pid)
        except (OSError, ValueError):
            return False

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.netloc, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if "json" in answer.headers["Content-Type"] else body.decode()
        finally:
            connection.close()

    def events(self, after: int = 0, wait: float = 0.0) -> list[dict[str, Any]]:
        status, batch = self.get(f"/v1/events?after={after}&wait={wait}")
        assert status == 200, batch
        return list(batch["events"])

    def newest(self, replica: str) -> dict[str, Any] | None:
        """The newest sample of a replica."""
        found = [p for p in self.get("/v1/samples?since=0")[1]["processes"] if p["replica"] == replica]
        return found[-1] if found else None

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.communicate(timeout=PATIENCE_SECONDS)


def settings(node_dir: Path) -> AgentSettings:
    return AgentSettings(node=NODE, data_dir=node_dir, token=TOKEN, interval_seconds=0.05)


def own_start_ticks() -> int:
    return process_start_ticks(os.getpid()) or 0
