"""Why a registered process that is a worker of Ray has ended, by Ray's own logs of this node.

A worker is a child of a raylet, whose command line names the session's log folder. The logs are read only once a worker
has ended, and only their ends. The job and Ray are not touched, and Ray need not be installed here. The statement is an
event (`ray_worker_ended`) that follows the exit; a worker of which Ray's logs say nothing gets one, too, after
`WORD_SECONDS`.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rolecall.agent.collectors.base import CollectorReading, Fact, LoggedOnce
from rolecall.agent.collectors.counters import read_at_most, stat_of
from rolecall.agent.identity import Registration
from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.ray_logs import RayReason, death_of, worker_of

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.25
WORD_SECONDS = 0.75
"""How long the raylet may take to write what it did."""
COMMAND_BYTES_MAX = 64 * 1024
LOG_BYTES_MAX = 256 * 1024
"""Of the end of each log: a kill by the memory monitor takes 5 KB, the tracebacks of an actor a few more."""
NUM_FILES_MAX = 100_000
RAYLET = "raylet"


@dataclass(slots=True)
class RayWorker:
    """`pid`: as Ray sees it, in its own PID namespace. `raylet`: PID and start time. `ended_at`: when it was missing
    first, monotonic seconds."""

    registration: Registration
    pid: int
    raylet: tuple[int, int]
    logs: Path
    ended_at: float | None = None


class RayWorkersCollector:
    """Mutable; `read` is called from one thread. `registrations`: of the live processes."""

    name = "ray"

    def __init__(
        self,
        registrations: Callable[[], tuple[Registration, ...]],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        proc: Path = Path("/proc"),
    ) -> None:
        self._registrations, self._proc = registrations, proc
        self.interval_seconds = interval_seconds
        self._workers: dict[ProcessId, RayWorker] = {}
        self._others: set[ProcessId] = set()  # no workers of Ray
        self._logged = LoggedOnce()

    def close(self) -> None:
        self._workers.clear()

    def read(self, at: float) -> CollectorReading:
        living = {r.process: r for r in self._registrations()}
        self._others &= living.keys()
        for process, registration in living.items():
            if process in self._workers:
                self._workers[process].registration = registration  # it may have registered itself since
            elif process not in self._others:
                worker = self._worker(registration)
                if worker is None:
                    self._others.add(process)
                else:
                    self._workers[process] = worker
        facts = []
        for process, worker in list(self._workers.items()):
            if process in living:
                continue
            worker.ended_at = at if worker.ended_at is None else worker.ended_at
            fact = self._fact(worker, is_late=at - worker.ended_at >= WORD_SECONDS)
            if fact is not None:
                facts.append(fact)
                del self._workers[process]
        return CollectorReading(facts=tuple(facts))

    def _worker(self, registration: Registration) -> RayWorker | None:
        """None: it is no worker of Ray, or has ended."""
        pid = registration.process.pid
        own = stat_of(self._proc, pid)
        raylet = stat_of(self._proc, own.parent) if own is not None else None
        if own is None or raylet is None or raylet.name != RAYLET:
            return None
        logs = self._log_folder(own.parent)
        if logs is None:
            return None
        return RayWorker(registration, self._pid_inside(pid), (own.parent, raylet.start_ticks), logs)

    def _log_folder(self, raylet: int) -> Path | None:
        words = read_at_most(f"{self._proc}/{raylet}/cmdline", COMMAND_BYTES_MAX).split(b"\0")
        options = dict(w.decode("utf-8", "replace").partition("=")[::2] for w in words if w.startswith(b"--"))
        named = options.get("--log_dir") or (options["--session_dir"] + "/logs" if "--session_dir" in options else "")
        if not named.startswith("/"):
            return None
        # Of a raylet in a container the folder is seen through its root.
        inside = self._proc / str(raylet) / "root" / named.lstrip("/")
        try:
            return inside if not Path(named).is_dir() and inside.is_dir() else Path(named)
        except OSError:
            return Path(named)

    def _pid_inside(self, pid: int) -> int:
        """The PID in its innermost namespace."""
        for line in read_at_most(f"{self._proc}/{pid}/status", COMMAND_BYTES_MAX).splitlines():
            if line.startswith(b"NSpid:") and (last := line.split()[-1]).isdigit():
                return int(last)
        return pid

    def _fact(self, worker: RayWorker, *, is_late: bool) -> Fact | None:
        """None: Ray may still tell why."""
        name, worker_id = self._worker_file(worker)
        raylet = stat_of(self._proc, worker.raylet[0])
        lives = raylet is not None and raylet.start_ticks == worker.raylet[1] and not raylet.has_ended
        death = death_of(
            self._end_of(worker.logs / name) if name else "",
            self._end_of(worker.logs / "raylet.out"),
            pid=worker.pid,
            raylet_lives=lives,
            raylet_pid=worker.raylet[0],
            gcs_log=self._end_of(worker.logs / "gcs_server.out", is_optional=True),
            worker=worker_id,
        )
        if death.reason is RayReason.NO_WORD and not is_late:
            return None
        detail = {"reason": str(death.reason), "text": death.text, "line": death.line}
        if name:
            detail["log_file"] = str(worker.logs / name)
        return Fact(
            kind=AgentEventKind.RAY_WORKER_ENDED,
            detail={k: v for k, v in detail.items() if v},
            **worker.registration.facts(),
        )

    def _worker_file(self, worker: RayWorker) -> tuple[str, str]:
        """(file name, worker ID) of the newest log, because an earlier worker may have had its PID. Empty: there is
        none."""
        found, newest = ("", ""), 0.0
        try:
            with os.scandir(worker.logs) as entries:
                for number, entry in enumerate(entries):
                    known = worker_of(entry.name)
                    if known is not None and known[1] == worker.pid and (at := entry.stat().st_mtime) > newest:
                        found, newest = (entry.name, known[0]), at
                    if number >= NUM_FILES_MAX:
                        break
        except OSError as e:
            self._complain(worker.logs, e)
        return found

    def _end_of(self, path: Path, *, is_optional: bool = False) -> str:
        try:
            # The job may write to this folder: follow no symlink, wait for no pipe.
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as f:
                about = os.fstat(f.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                f.seek(max(0, about.st_size - LOG_BYTES_MAX))
                return f.read(LOG_BYTES_MAX).decode("utf-8", "replace")
        except OSError as e:
            if not is_optional:
                self._complain(path, e)
            return ""

    def _complain(self, path: Path, error: OSError) -> None:
        if self._logged.is_new(str(path.parent)):
            logger.warning(
                "%s: %s: why workers of Ray end is not known; run the agent as Ray's user or as root",
                *(path, error.strerror),
            )


def parent_name(proc: Path, pid: int) -> str:
    """Empty: the process, or its parent, is gone."""
    of = stat_of(proc, pid)
    parent = stat_of(proc, of.parent) if of is not None else None
    return parent.name if parent is not None else ""
