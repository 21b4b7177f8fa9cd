"""An independent observer of a run: it reads processes and the database file, and nothing that rolecall reports of
itself.

Every 50 ms it lists all processes that carry the run's marker in their environment, as (pid, start time), and reads the
journal's tables through sqlite3; every half second it lists their listening sockets. From that alone it determines when
a fault was injected (by itself), found and resolved, and who kept its process. A test compares this with `report.json`.
"""

import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PERIOD_SECONDS = 0.05
SOCKETS_SECONDS = 0.5
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
    """An appearance after one poll (`not_before`) and by the next (`seen`). Wall seconds."""

    not_before: float
    seen: float

    def agrees(self, at: float, within: float) -> bool:
        """Whether `at` is in the interval, or at most `within` outside of it."""
        return self.not_before - within <= at <= self.seen + within


@dataclass
class Observer:
    """Watches one run directory from outside until `stop()`."""

    run_dir: Path
    processes: dict[tuple[int, int], Seen] = field(default_factory=dict)
    opened: dict[str, "Between"] = field(default_factory=dict)  # incident -> when its row appeared
    serving: dict[tuple[str, int], "Between"] = field(default_factory=dict)  # (replica, incarnation) -> when it served
    pids: dict[tuple[str, int], int] = field(default_factory=dict)
    states: dict[tuple[str, int], str] = field(default_factory=dict)  # newest state of each incarnation
    steps: dict[int, float] = field(default_factory=dict)
    listeners: set[int] = field(default_factory=set)  # PIDs that were ever seen to listen, wherever
    listening_elsewhere: set[str] = field(default_factory=set)
    """Listening TCP sockets beyond loopback, at any poll of the whole run: `pid title address:port`."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._marker = f"ROLECALL_RUN={self.run_dir}".encode()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._last_seq = 0
        self._looked_at = time.time()
        self._sockets_at = 0.0
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
            if time.monotonic() - self._sockets_at >= SOCKETS_SECONDS:
                self._sockets_at = time.monotonic()
                self._look_at_sockets()
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
                continue  # it ended during the poll

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
                self.states[(replica, incarnation)] = state
                if state == "serving":
                    self.serving.setdefault((replica, incarnation), Between(self._looked_at, time.time()))
            self._looked_at = now
        except sqlite3.OperationalError:
            pass  # locked or not created yet: the next poll reads it
        finally:
            db.close()

    def kill(self, replica: str, incarnation: int) -> float:
        """SIGKILL of a replica's process, by us. Returns when."""
        pid = self.pids[(replica, incarnation)]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    def _look_at_sockets(self) -> None:
        local = {s.inode: s.local for s in tcp_sockets() if s.state == LISTEN}
        for (pid, _), seen in list(self.processes.items()):
            for inode in socket_inodes(pid):
                if inode in local:
                    self.listeners.add(pid)
                    if not _is_loopback(local[inode].split(":")[0]):
                        self.listening_elsewhere.add(f"{pid} {seen.title[:60]} {local[inode]}")

    # --- the journal, asked by a test ---------------------------------------------------------------------------

    def query(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        """Current rows of the run's database."""
        with closing(sqlite3.connect(f"file:{self.run_dir / 'journal.db'}?mode=ro", uri=True, timeout=5.0)) as db:
            return db.execute(sql, args).fetchall()

    def events(self, kind: str, incident: str | None = None) -> list[dict[str, Any]]:
        """Bodies of the events of a kind, oldest first, each with its `seq`, `at` and `incident`."""
        rows = self.query("select seq, wall_at, incident_id, body from events where kind = ? order by seq", kind)
        reported = [{**json.loads(body), "seq": seq, "at": at, "incident": which} for seq, at, which, body in rows]
        return [e for e in reported if incident is None or e["incident"] == incident]

    def desired(self) -> dict[str, int]:
        """Replica -> incarnation that is wanted now."""
        return dict(self.query("select replica, incarnation from desired"))

    def start_ticks(self, pid: int) -> int:
        return next(start for p, start in list(self.processes) if p == pid)


LISTEN, ESTABLISHED = "0A", "01"


@dataclass(frozen=True)
class Socket:
    """One line of /proc/net/tcp; addresses as written there."""

    inode: str
    state: str
    local: str
    remote: str


def tcp_sockets() -> Iterator[Socket]:
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            yield Socket(inode=words[9], state=words[3], local=words[1], remote=words[2])


def socket_inodes(pid: int) -> set[str]:
    """Of a process that may end meanwhile."""
    found: set[str] = set()
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    for fd in descriptors:
        try:
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # closed during the poll
        if link.startswith("socket:["):
            found.add(link.removeprefix("socket:[").removesuffix("]"))
    return found


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Within: these processes are stopped, so that their data does not change between two reads."""
    held = list(pids)
    try:
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in held:
            with suppress(ProcessLookupError):  # it was killed meanwhile
                os.kill(pid, signal.SIGCONT)


def _start_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether this very process runs: not another one with its PID, and not a zombie."""
    try:
        return _start_ticks(pid) == start_ticks and not _is_zombie(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False


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
