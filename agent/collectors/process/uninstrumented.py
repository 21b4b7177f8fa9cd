"""Discovers the processes of uninstrumented jobs and registers them with the agent.

Rules (`discovery.py`) identify a process; this module reads `/proc`. A poll lists the PIDs and reads new ones: a known
process (same PID, same start time) that matches no rule costs nothing except once in `ROTATION` polls, when its name
and start time are compared. Young processes are read again, because they may still call exec or set a title, and idle
Ray workers as long as they are idle."""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, LoggedOnce
from rolecall.agent.collectors.counters import read_at_most, stat_of, variables
from rolecall.agent.collectors.process.discovery import (
    SLOTS_PER_NODE,
    Discovery,
    Match,
    ProcessFacts,
    job_number,
    node_index,
    parse_labels,
)
from rolecall.agent.identity import ClaimRejected, Registration
from rolecall.core.errors import InvalidId
from rolecall.core.ids import NodeId, ProcessId, replica_id
from rolecall.core.rundir import RUN_ENV
from rolecall.core.telemetry import UNCOUNTED

logger = logging.getLogger(__name__)

PIDS_MAX = 1 << 16
"""Processes examined per node; further ones are ignored with a warning."""
READS_MAX = 512
"""Command lines read per poll; the rest of a busy node follows in later polls."""
ROTATION = 8
"""A settled process is checked for PID reuse, a new name and a place that was taken once in this many polls."""
YOUNG_SECONDS = 30.0
"""Time after its first sighting during which a process is read at each poll."""
ANCESTORS_MAX = 16
COMMAND_BYTES_MAX = 16 * 1024
ENVIRON_BYTES_MAX = 256 * 1024
LABELS_BYTES_MAX = 64 * 1024
KERNEL_THREADS = 2
"""PID of kthreadd, the parent of all threads of the kernel."""
LAUNCHED = ("torchrun", "slurm")
"""Rules whose processes are children of their launcher."""
RAY_TITLE, RAY_WORKER = "ray::", "default_worker.py"
RAY_WORKER_ARGUMENTS = 4
"""The script is among the first arguments: `python -u .../default_worker.py ...`; a raylet names it later."""


class ProcessRegistrar(Protocol):
    """The agent's registry, as seen by discovery."""

    def discover(self, found: Registration, detail: dict[str, str]) -> None: ...

    def registrations(self) -> tuple[Registration, ...]: ...


@dataclass(slots=True)
class _Seen:
    """State of one process."""

    pid: int
    parent: int
    start_ticks: int
    name: str
    first_at: float
    title: str = ""
    environ: dict[str, str] = field(default_factory=dict)  # of a Ray worker, from before it set a title
    is_kernel: bool = False
    is_job: bool = False  # it or an ancestor was discovered: never examined again
    is_refused: bool = False  # for now, as while its rank's former process lives

    def restless(self, at: float) -> bool:
        """It may still change its identity."""
        if self.is_kernel or self.is_job:
            return False
        return at - self.first_at < YOUNG_SECONDS or self.title.startswith((RAY_TITLE, RAY_WORKER))


class UninstrumentedJobCollector:
    """Mutable; `read` is called from one thread."""

    name = "jobs"

    def __init__(
        self,
        registry: ProcessRegistrar,
        node: NodeId,
        discovery: Discovery,
        *,
        interval_seconds: float = 2.0,
        proc: Path = Path("/proc"),
    ) -> None:
        self._registry, self._node, self._proc = registry, node, str(proc)
        self.interval_seconds = interval_seconds
        self._discovery = discovery
        index = self._discovery.node_index
        self._node_index = node_index(node) if index is None else index
        self._names = self._discovery.names | {RUN_ENV}
        self._seen: dict[int, _Seen] = {}
        self._num_polls = 0
        self._logged = LoggedOnce()

    def close(self) -> None:
        self._seen.clear()

    def read(self, at: float) -> CollectorReading:
        """One poll. The registry reports the processes discovered."""
        try:
            pids = sorted(int(name) for name in os.listdir(self._proc) if name.isdecimal())
        except OSError as e:
            raise CollectorUnavailable(f"{self._proc}: {e.strerror}") from None
        if len(pids) > PIDS_MAX:
            self._log_once(f"{len(pids)} processes: only {PIDS_MAX} of them are examined")
        here = set(pids[:PIDS_MAX])
        for gone in self._seen.keys() - here:
            del self._seen[gone]
        due = [seen for seen in (self._due(pid, at) for pid in pids[:PIDS_MAX]) if seen is not None]
        # Parents start before their children: the child of a discovered process is its helper.
        due.sort(key=lambda seen: (seen.start_ticks, seen.pid))
        for seen in due[READS_MAX:]:
            if seen.first_at == at:
                del self._seen[seen.pid]  # treat it as new in the next poll
        known = {r.process.pid: r for r in self._registry.registrations()}
        for seen in due[:READS_MAX]:
            self._examine(seen, known)
        self._num_polls += 1
        return CollectorReading()

    def _due(self, pid: int, at: float) -> _Seen | None:
        """The process, if it must be examined in this poll."""
        seen = self._seen.get(pid)
        if seen is not None and not seen.restless(at) and (pid + self._num_polls) % ROTATION:
            return None
        stat = stat_of(self._proc, pid)
        if stat is None or stat.has_ended:
            return None
        name, parent, start_ticks = stat.name, stat.parent, stat.start_ticks
        if seen is None or seen.start_ticks != start_ticks:
            is_kernel = parent == KERNEL_THREADS or pid == KERNEL_THREADS
            seen = self._seen[pid] = _Seen(pid, parent, start_ticks, name, at, is_kernel=is_kernel)
        elif seen.is_job or seen.is_kernel or not (seen.restless(at) or seen.name != name or seen.is_refused):
            return None
        seen.name = name
        return None if seen.is_kernel else seen

    def _examine(self, seen: _Seen, known: dict[int, Registration]) -> None:
        process = ProcessId(node=self._node, pid=seen.pid, start_ticks=seen.start_ticks)
        if (registered := known.get(seen.pid)) is not None and registered.process == process:
            seen.is_job = True
            return
        if self._of_a_job(seen):
            seen.is_job = True
            return
        raw = read_at_most(f"{self._proc}/{seen.pid}/cmdline", COMMAND_BYTES_MAX).rstrip(b"\0")
        if not raw:
            return  # gone, or a zombie
        arguments = tuple(part.decode("utf-8", "replace") for part in raw.split(b"\0"))
        is_worker = any(argument.endswith(RAY_WORKER) for argument in arguments[:RAY_WORKER_ARGUMENTS])
        seen.title = RAY_WORKER if is_worker else arguments[0]
        if is_worker or seen.title.startswith(RAY_TITLE):
            seen.environ |= self._environ(seen.pid) or {}
        facts = ProcessFacts(arguments=arguments)
        rules = self._discovery.may_find(facts)
        if not rules:
            return
        environ = {**seen.environ, **(self._environ(seen.pid) or {})}
        if RUN_ENV in environ:
            return  # of an instrumented run: it registers itself
        if not environ and any(rule.environ for rule in rules) and _refused(f"{self._proc}/{seen.pid}/environ"):
            self._log_once(
                f"the environment of some processes that may be ranks ({rules[0].name}) cannot be read: run the agent "
                "as their user or as root"
            )
        labels = self._labels(seen.pid) if any(rule.labels for rule in rules) or self._discovery.labels_file else {}
        match = self._discovery.find(ProcessFacts(arguments=arguments, environ=environ, labels=labels))
        if match is not None:
            self._register(seen, process, match)

    def _of_a_job(self, seen: _Seen) -> bool:
        """Whether an ancestor was discovered: then it is a helper, which inherited the ancestor's environment."""
        parent = seen.parent
        for _ in range(ANCESTORS_MAX):
            above = self._seen.get(parent)
            if above is None:
                return False
            if above.is_job:
                return True
            parent = above.parent
        return False

    def _register(self, seen: _Seen, process: ProcessId, match: Match) -> None:
        if match.replica is None:
            # The lowest free number of this role on this node: a successor takes the number of a dead process.
            taken = {r.replica for r in self._registry.registrations() if r.role == match.role}
            first = self._node_index * SLOTS_PER_NODE
            slots = range(first, first + SLOTS_PER_NODE)
            replica = next((n for n in slots if f"{match.role}/{n}" not in taken), None)
        else:
            replica = self._number(match, match.replica)
        if replica is None:
            seen.is_refused = True
            self._log_once(f"more than {SLOTS_PER_NODE} unnumbered processes of role {match.role}")
            return
        detail = {"found_by": match.rule}
        if match.replica is None:
            detail["numbered_by"] = "start order on its node"
        elif replica != match.replica:
            detail["numbered_by"] = "its job"
        if match.job:
            detail["job"] = match.job
        if match.rule in LAUNCHED:
            detail["launcher_pid"] = str(seen.parent)
        name = f"{match.role}/{replica} rank {match.rank}"
        try:
            found = Registration(
                process=process,
                replica=replica_id(match.role, replica),
                role=match.role,
                rank=match.rank,
                incarnation=UNCOUNTED,
                found=True,
                job=match.job,
            )
            self._registry.discover(found, detail)
        except (InvalidId, ClaimRejected) as e:
            seen.is_refused = isinstance(e, ClaimRejected) and e.for_now
            self._log_once(f"process {seen.pid} ({name}, by rule {match.rule}) is not watched: {e}")
            return
        seen.is_job = True

    def _number(self, match: Match, given: int) -> int:
        """The rule's number; one derived from the job if a live process of another job on this node has it."""
        if not match.job or self._discovery.by_job:
            return job_number(match.job) if match.job else given
        replica = replica_id(match.role, given)
        others = {r.job for r in self._registry.registrations() if r.replica == replica}
        return job_number(match.job) if others - {match.job, ""} else given

    def _log_once(self, text: str) -> None:
        if self._logged.is_new(text):
            logger.warning("%s", text)

    # Reads of /proc: processes may vanish at any time.

    def _environ(self, pid: int) -> dict[str, str] | None:
        """Variables that the rules use; None: unreadable, or overwritten by a title."""
        raw = read_at_most(f"{self._proc}/{pid}/environ", ENVIRON_BYTES_MAX)
        if b"=" not in raw:
            return None
        return variables(raw, self._names)

    def _labels(self, pid: int) -> dict[str, str]:
        if not self._discovery.labels_file:
            return {}
        path = f"{self._proc}/{pid}/root/{self._discovery.labels_file.lstrip('/')}"
        return parse_labels(read_at_most(path, LABELS_BYTES_MAX).decode("utf-8", "replace"))


def _refused(path: str) -> bool:
    """Whether the file exists and access is denied."""
    try:
        with open(path, "rb") as f:
            f.read(1)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return False
