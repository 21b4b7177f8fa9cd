"""Scrape addresses of a run's watch and agents, as files in the run's directory.

    RUN/watch.json               {"url", "pid", "start_ticks"} of a watch that serves `/metrics`
    RUN/prometheus/targets.json  the agents and that watch, for Prometheus' `file_sd_configs`

A watch writes both, and updates `targets.json` when an agent restarts on another port. Of several watches the first one
announces its address; when it dies, the next one does. `watch.json` is removed with the watch; `targets.json` stays
until the end of the run, so that Prometheus sees a watch or agent that is down, and the session removes it
(`withdraw`).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rolecall.core.errors import ConfigError
from rolecall.core.ids import process_start_ticks
from rolecall.core.rundir import RunDir, write_atomically

WATCH_FILE, TARGETS_FILE = "watch.json", "targets.json"
AGENT_JOB, WATCH_JOB = "rolecall-agent", "rolecall-watch"
"""`job` labels, as in deploy/prometheus.yaml."""
LOOPBACK = "127.0.0.1"


class ListenAddress(NamedTuple):
    host: str
    port: int


def parse_address(text: str) -> ListenAddress:
    """`HOST:PORT`, `[IPv6]:PORT`; port 0 is any free one. Raises ConfigError: it is neither. The host is required:
    nothing listens on all interfaces by default."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != text or parts.username is not None:
        raise ConfigError([f"--metrics: {text!r} is not HOST:PORT, as {LOOPBACK}:9478 or [::1]:9478"])
    return ListenAddress(host, port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEndpoint:
    """A process and the URL it serves."""

    url: str
    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return process_start_ticks(self.pid) == self.start_ticks


def own(url: str) -> ServedEndpoint:
    pid = os.getpid()
    return ServedEndpoint(url=url, pid=pid, start_ticks=process_start_ticks(pid) or 0)


def serving(run: RunDir) -> ServedEndpoint | None:
    """The live watch in `watch.json`."""
    try:
        value = json.loads((run.path / WATCH_FILE).read_text())
        found = ServedEndpoint(url=str(value["url"]), pid=int(value["pid"]), start_ticks=int(value["start_ticks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.alive else None


class EndpointAnnouncement:
    """Owned by one thread of one watch."""

    def __init__(self, run: RunDir, me: ServedEndpoint) -> None:
        self._run, self._me = run, me
        self._written: list[dict[str, Any]] | None = None

    def announce(self, agents: Mapping[str, str]) -> None:
        """`agents`: node -> URL. Raises OSError: a file cannot be written."""
        now = serving(self._run)
        if now is None:
            write_atomically(self._run.path / WATCH_FILE, json.dumps(asdict(self._me)) + "\n")
        elif now != self._me:
            self._written = None
            return
        groups = targets(self._run.run_id, agents, self._me.url)
        if groups != self._written:
            path = targets_path(self._run)
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps(groups, indent=1) + "\n")
            self._written = groups

    def close(self) -> None:
        if serving(self._run) == self._me:
            (self._run.path / WATCH_FILE).unlink(missing_ok=True)


def targets(run_id: str, agents: Mapping[str, str], watch_url: str) -> list[dict[str, Any]]:
    """Groups for `file_sd_configs`. `instance` is a name, not an address: it stays when a restart changes the port."""
    named = [(AGENT_JOB, node, url) for node, url in sorted(agents.items())]
    return [
        {"targets": [urlsplit(url).netloc], "labels": {"job": job, "instance": f"{run_id}/{name}"}}
        for job, name, url in [*named, (WATCH_JOB, "watch", watch_url)]
    ]


def withdraw(run: RunDir) -> None:
    """Removes the targets of a finished run."""
    targets_path(run).unlink(missing_ok=True)


def targets_path(run: RunDir) -> Path:
    return run.path / "prometheus" / TARGETS_FILE
