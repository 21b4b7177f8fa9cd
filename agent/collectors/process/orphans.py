"""Engine processes of this node whose server is gone, as events; `rolecall node orphans` lists the same.

An engine's core or worker names itself (vLLM: `VLLM::EngineCore`, `VLLM::Worker_TP0`; SGLang: `sglang::scheduler_TP0`)
and is a child of its server. When that dies without ending it (an actor of Ray without process group cleanup, SIGKILL),
the kernel gives it to an init process: then its parent is one. Seen in vLLM's issue 55510, with 115 GiB of GPU memory.
One that was an orphan in two polls is reported (`orphaned_engine`), and once more when it has ended (`orphan_gone`).
"""

import os
import re
from pathlib import Path

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact
from rolecall.agent.collectors.counters import read_at_most, stat_of
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEventKind

INTERVAL_SECONDS = 10.0
ENGINE = re.compile(r"^(VLLM::(EngineCore|Worker|DPCoordinator)|sglang::(scheduler|detokenizer))", re.IGNORECASE)
INITS = frozenset(
    ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "pause", "raylet", "slurmstepd", "s6-svscan")
) | {"sh", "bash", "dash", "sleep", "tail", "ray"}  # the first process of a container without one; `ray start`
"""Names of processes that inherit those whose parent has died: none of them is the server of an engine, which is a
Python process."""
GRACE_SECONDS = 10
TITLE_BYTES_MAX = 4096
ORPHANS_MAX = 64
"""Reported at once; further ones wait."""


def is_orphan(title: str, parent_name: str) -> bool:
    """Of a process by its first argument and the name of its parent."""
    return parent_name in INITS and ENGINE.match(title) is not None


def end_command(pid: int, start_ticks: int) -> str:
    """Ends the process and its descendants, and no other process that has its PID by then."""
    return f"rolecall node end {pid} --start-ticks {start_ticks} --grace {GRACE_SECONDS}"


class OrphansCollector:
    """Mutable; `read` is called from one thread."""

    name = "orphans"

    def __init__(self, node: NodeId, *, interval_seconds: float = INTERVAL_SECONDS, proc: Path = Path("/proc")) -> None:
        self._node, self._proc = node, proc
        self.interval_seconds = interval_seconds
        self._seen: dict[ProcessId, tuple[str, str]] = {}  # in the previous poll: title, adopted by
        self._reported: set[ProcessId] = set()

    def close(self) -> None:
        self._seen.clear()

    def read(self, at: float) -> CollectorReading:
        del at
        now = self._orphans()
        facts = [
            Fact(kind=AgentEventKind.ORPHAN_GONE, detail={}, process=process) for process in self._reported - now.keys()
        ]
        self._reported &= now.keys()
        for process in [p for p in now if p in self._seen and p not in self._reported][:ORPHANS_MAX]:
            title, adopted_by = now[process]
            self._reported.add(process)
            detail = {
                "title": title,
                "adopted_by": adopted_by,
                "command": end_command(process.pid, process.start_ticks),
            }
            facts.append(Fact(kind=AgentEventKind.ORPHANED_ENGINE, detail=detail, process=process))
        self._seen = now
        return CollectorReading(facts=tuple(facts))

    def _orphans(self) -> dict[ProcessId, tuple[str, str]]:
        """Raises CollectorUnavailable: there is no /proc."""
        try:
            pids = [int(name) for name in os.listdir(self._proc) if name.isdecimal()]
        except OSError as e:
            raise CollectorUnavailable(f"{self._proc}: {e.strerror}") from None
        stats = {pid: stat for pid in pids if (stat := stat_of(self._proc, pid)) is not None}
        found: dict[ProcessId, tuple[str, str]] = {}
        for pid, stat in stats.items():
            above = stats.get(stat.parent)
            if above is None or above.name not in INITS or stat.has_ended:
                continue
            title = (
                read_at_most(f"{self._proc}/{pid}/cmdline", TITLE_BYTES_MAX).split(b"\0")[0].decode("utf-8", "replace")
            )
            if is_orphan(title, above.name):
                process = ProcessId(node=self._node, pid=pid, start_ticks=stat.start_ticks)
                found[process] = title, f"{above.name} ({stat.parent})"
        return found
