"""A black box beside a run: it looks at processes and at the database file, and at nothing that rolecall says of itself.

Every 50 ms it lists all processes that carry the run's marker in their environment, as (pid, start time), and reads
three tables through sqlite3. From that alone it says when a fault was injected (by itself), found and cured, and who
kept its process. A test compares this with `report.json`.
"""

import os
import signal
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

PERIOD_SECONDS = 0.05
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    pid: int
    start_ticks: int
    title: str
    first_at: float
    last_at: float


@dataclass(frozen=True)
class Between:
    """Something appeared after one look (`not_before`) and was there at the next (`seen`). Wall seconds."""

    not_before: float
    seen: float

    def agrees(self, at: float, within: float) -> bool:
        """Whether `at` lies in the interval, or not more than `within` outside of it."""
        return self.not_before - within <= at <= self.seen + within


@dataclass
class Observer:
    """Watches one run directory from outside until `stop()`."""

    run_dir: Path
    processes: dict[tuple[int, int], Seen] = field(default_factory=dict)
    opened: dict[str, "Between"] = field(default_factory=dict)  # incident -> when its row appeared
    serving: dict[tuple[str, int], "Between"] = field(default_factory=dict)  # (replica, incarnation) -> when it served
    pids: dict[tuple[str, int], int] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    sockets_elsewhere: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._marker = f"ROLECALL_RUN={self.run_dir}".encode()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._last_seq = 0
        self._looked_at = time.time()
        self._not_ours: set[tuple[int, int]] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._look_at_processes()
            self._look_at_database()
            self._stop.wait(PERIOD_SECONDS)

    def _look_at_processes(self) -> None:
        now = time.time()
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            pid = int(entry)
            try:
                start = _start_ticks(pid)
                key = (pid, start)
                if key in self._not_ours:
                    continue
                if key not in self.processes:
                    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if self._marker not in environ:
                        self._not_ours.add(key)
                        continue
                    title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    self.processes[key] = Seen(pid, start, title, now, now)
                if _is_zombie(pid):
                    continue
                self.processes[key].last_at = now
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended while we looked

    def _look_at_database(self) -> None:
        path = self.run_dir / "journal.db"
        if not path.exists():
            return
        try:
            db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0.2)
        except sqlite3.OperationalError:
            return
        now = time.time()
        try:
            for seq, kind, incident in db.execute(
                "select seq, kind, incident_id from events where seq > ? order by seq", (self._last_seq,)
            ):
                self._last_seq = seq
                if kind == "incident_opened":
                    self.opened.setdefault(incident, Between(self._looked_at, time.time()))
                elif kind == "step_committed":
                    self.steps[len(self.steps)] = now
            for replica, incarnation, pid, state in db.execute("select replica, incarnation, pid, state from actual"):
                self.pids[(replica, incarnation)] = pid
                if state == "serving":
                    self.serving.setdefault((replica, incarnation), Between(self._looked_at, time.time()))
            self._looked_at = now
        except sqlite3.OperationalError:
            pass  # locked or not made yet: the next look will see it
        finally:
            db.close()

    def kill(self, replica: str, incarnation: int) -> float:
        """SIGKILL of a replica's process, by us. Returns when."""
        pid = self.pids[(replica, incarnation)]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    def listening_elsewhere(self) -> list[str]:
        """Listening TCP sockets of the run's processes that are not on loopback, as `pid address:port`."""
        inodes = {}
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    inodes[fields[9]] = fields[1]
        found = []
        for pid, _ in list(self.processes):
            try:
                links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            for link in links:
                local = (
                    inodes.get(link.removeprefix("socket:[").removesuffix("]")) if link.startswith("socket:") else None
                )
                if local is not None and not _is_loopback(local.split(":")[0]):
                    found.append(f"{pid} {local}")
        return found


def _start_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def _is_zombie(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return stat[stat.rindex(b")") + 2 :].split()[0] in (b"Z", b"X")


def _is_loopback(address: str) -> bool:
    # /proc/net/tcp writes addresses in host order, words of four bytes: 0100007F is 127.0.0.1.
    if len(address) == 8:
        return address.endswith("7F")
    return address in ("00000000000000000000000001000000",) or (
        address.startswith("0000000000000000FFFF0000") and address.endswith("7F")
    )
