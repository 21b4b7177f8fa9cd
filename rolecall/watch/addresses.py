"""Where a run's watch and agents are to be scraped, in files of the run's directory.

    RUN/watch.json               {"url", "pid", "start_ticks"} of a watch that serves `/metrics`
    RUN/prometheus/targets.json  the agents and that watch, for Prometheus' `file_sd_configs`

A watch writes both, and `targets.json` again whenever an agent was restarted on another port. Of several watches the first
one has its address there; when it has died, the next takes its place. `watch.json` is gone with the watch;
`targets.json` stays as long as the run lasts, so that a Prometheus sees that a watch or an agent is down, and who
started the run takes it away at its end (`withdraw`).
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
"""`job` labels, as deploy/prometheus.yaml gives them, too."""
LOOPBACK = "127.0.0.1"


class ListenAddress(NamedTuple):
    host: str
    port: int


def parse_address(text: str) -> ListenAddress:
    """`HOST:PORT`, `[IPv6]:PORT`; port 0 is any free one.

    Raises:
        ConfigError: it is none. A host has to be named: nothing listens everywhere unasked.
    """
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
    """A process and what it serves."""

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
    """The living watch whose address stands in `watch.json`."""
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
        """`agents`: node -> URL.

        Raises:
            OSError: a file cannot be written.
        """
        now = serving(self._run)
        if now is None:
            write_atomically(self._run.path / WATCH_FILE, json.dumps(asdict(self._me)) + "\n")
        elif now != self._me:
            self._written = None
            return
        groups = targets(self._run.run_id, agents, self._me.url)
        if groups != self._written:
            folder = self._run.path / "prometheus"
            folder.mkdir(exist_ok=True)
            write_atomically(folder / TARGETS_FILE, json.dumps(groups, indent=1) + "\n")
            self._written = groups

    def close(self) -> None:
        if serving(self._run) == self._me:
            (self._run.path / WATCH_FILE).unlink(missing_ok=True)


def targets(run_id: str, agents: Mapping[str, str], watch_url: str) -> list[dict[str, Any]]:
    """Groups of `file_sd_configs`. `instance` is a name and no address: it stays when a restart changes the port."""
    named = [(AGENT_JOB, node, url) for node, url in sorted(agents.items())]
    return [
        {"targets": [urlsplit(url).netloc], "labels": {"job": job, "instance": f"{run_id}/{name}"}}
        for job, name, url in [*named, (WATCH_JOB, "watch", watch_url)]
    ]


def withdraw(run: RunDir) -> None:
    """The run is over: there is nothing more to scrape."""
    targets_path(run).unlink(missing_ok=True)


def targets_path(run: RunDir) -> Path:
    return run.path / "prometheus" / TARGETS_FILE
