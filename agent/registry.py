"""Which processes of this node are known to be which ranks, and what is kept of each.

A process is believed when the kernel says that it is the sender (SO_PEERCRED), and its secret is the one given at the
spawn of that rank and incarnation. Verified registrations are kept in `registrations.json`, so that a restarted agent
goes on watching without asking; a process that died meanwhile gets its EXITED event then. A promoted standby changes
its identity on its page: the proof there needs the secret of the new identity.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.process.exits import ExitStatus, ExitWatch, WatchRefused, guess_cause, requested_exit
from rolecall.agent.collectors.process.process import ProcessProbe
from rolecall.agent.events import EventLog
from rolecall.agent.identity import ClaimRejected, Registration, proven, sender, verified
from rolecall.agent.processes.state_pages import PageReader, PageState, PageUnreadable
from rolecall.agent.reporter.page_layout import page_name
from rolecall.core.clock import Clock
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.rundir import write_atomically
from rolecall.core.telemetry import AgentEventKind

logger = logging.getLogger(__name__)

NUM_EXITS_MAX = 4096
"""Places and causes whose exits are counted; an agent that has seen more counts those that it knows."""
NUM_PROCESSES_MAX = 256
"""Live registered processes; further ones are refused."""
REFUSED_SECONDS = 5.0
"""At least so long between two events of refused claims."""
EXCEPTIONS_MAX, EXCEPTIONS_SECONDS = 30, 60.0
"""Exceptions of one process that are told within so long: one that raises in a loop must not wash everybody's events out
of the log. What comes beyond is counted as refused; the newest is told from the page once there is room."""
DEAD_SHOWN_SECONDS = 10.0
"""A dead process stays among the samples (alive: false) for so long, then it is forgotten and its page removed."""


@dataclass(slots=True)
class Tracked:
    """What is kept of one registered process. Owned by the registry; `page` is the last good one."""

    registration: Registration
    probe: ProcessProbe
    reader: PageReader | None
    page: PageState | None = None
    page_ok: bool = False
    exceptions_told: int = 0
    exceptions_told_at: deque[float] = field(default_factory=lambda: deque(maxlen=EXCEPTIONS_MAX))
    finished_told: bool = False
    exited_at: float | None = None
    status: ExitStatus = field(default_factory=ExitStatus)


class Registry:
    """Owns the known processes. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        node: NodeId,
        data_dir: Path,
        token: str,
        events: EventLog,
        exits: ExitWatch,
        clock: Clock,
        oom_kills: Callable[[], int] = lambda: 0,
        proc: Path = Path("/proc"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._node, self._token, self._clock = node, token, clock
        self._events, self._exits, self._oom_kills = events, exits, oom_kills
        self._proc, self._cgroup_root = proc, cgroup_root
        self._pages = data_dir / "pages"
        self._file = data_dir / "registrations.json"
        self._lock = threading.RLock()
        self.num_exits: dict[tuple[str, str, str, str], int] = {}
        """How often a process of this role, replica and rank ended for this cause, as far as this agent saw it."""
        self._tracked: dict[ProcessId, Tracked] = {}
        self._oom_kills_seen = oom_kills()
        self.num_refused = 0
        self._refused_at = float("-inf")
        self.num_torn = 0

    # --- what processes say

    def register(self, peer_pid: int, message: dict[str, Any]) -> None:
        """A process says who it is. Saying it again changes nothing; saying something else is a promotion.

        Raises:
            Refusal: with the reason; counted.
        """
        try:
            self._register(peer_pid, message)
        except ClaimRejected as e:
            self._refused(peer_pid, str(e))
            raise

    def _refused(self, peer_pid: int, reason: str) -> None:
        """Counted; told as an event, but not more often than each REFUSED_SECONDS: who asks in a loop fills no disk."""
        with self._lock:
            self.num_refused += 1
            now = self._clock.monotonic()
            if now - self._refused_at < REFUSED_SECONDS:
                return
            self._refused_at = now
        self._events.append(AgentEventKind.REFUSED, detail={"reason": reason, "pid": str(peer_pid)})

    def _register(self, peer_pid: int, message: dict[str, Any]) -> None:
        said = verified(peer_pid, message, self._node, self._token)
        with self._lock:
            known = self._tracked.get(said.process)
            if known is not None and known.registration.found:
                self._speaks(known, said)
                return
            if known is not None:
                if known.registration != said:
                    self._others_in(said)
                    self._change(known, said)
                return
            self._admit(said, {})

    def _admit(self, said: Registration, detail: dict[str, str]) -> None:
        """One process more. Raises Refusal: too many, its place is taken, or it is gone."""
        if self.num_live() >= NUM_PROCESSES_MAX:
            raise ClaimRejected(f"{NUM_PROCESSES_MAX} processes are registered already")
        before = self._others_in(said)
        tracked = self._track(said)
        try:
            self._watch(tracked)
        except WatchRefused as e:
            self._forget(tracked)
            raise ClaimRejected(str(e)) from None
        for other in before:
            # Found processes of one place share an incarnation: the dead one must not be shown beside its successor.
            if said.found and other.exited_at is not None:
                self._forget(other)
        self._events.append(AgentEventKind.REGISTERED, **said.facts(), detail=detail)
        self._save()

    def _others_in(self, said: Registration) -> list[Tracked]:
        """Dead processes that had its place. Raises Refusal: a living one has it."""
        others = [t for p, t in self._tracked.items() if t.registration.slot == said.slot and p != said.process]
        for other in others:
            if other.exited_at is None and self._lives(other):
                raise ClaimRejected(
                    f"{said.replica}:{said.rank}#{said.incarnation} is process {other.registration.process}"
                )
        return others

    def discover(self, found: Registration, detail: dict[str, str]) -> None:
        """A rule says who a process is that has said nothing. `detail`: of the event, how it was found.

        Raises:
            Refusal: it is known already, its place is taken by a living process, there are too many, or it is gone.
        """
        with self._lock:
            if found.process in self._tracked:
                raise ClaimRejected(f"process {found.process} is known already")
            self._admit(found, detail)

    def registrations(self) -> tuple[Registration, ...]:
        """Of all live processes."""
        with self._lock:
            return tuple(t.registration for t in self._tracked.values() if t.exited_at is None)

    def _speaks(self, known: Tracked, said: Registration) -> None:
        """A process that was found by a rule turns out to know rolecall: from now on its own word counts."""
        self._forget(known)
        self._track(said)  # its exit is watched already, under the same name
        detail = {"was": known.registration.replica}
        self._events.append(AgentEventKind.REGISTERED, **said.facts(), detail=detail)
        self._save()

    def exception(self, peer_pid: int, message: dict[str, Any]) -> None:
        """A registered process reports an exception. The same number again changes nothing.

        Raises:
            Refusal: the sender is not registered, or the message is malformed.
        """
        tracked = self._known(peer_pid, message)
        number, detail = message.get("number"), message.get("detail")
        if type(number) is not int or not isinstance(detail, dict):
            raise ClaimRejected("exception needs number and detail")
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in detail.items()) or len(detail) > 16:
            raise ClaimRejected("detail must be at most 16 strings")
        with self._lock:
            self._tell_exception(tracked, number, {**detail, "number": str(number)})

    def finished(self, peer_pid: int, message: dict[str, Any]) -> None:
        """A registered process says that its coming exit is wanted. Raises Refusal as `exception` does."""
        tracked = self._known(peer_pid, message)
        with self._lock:
            self._tell_finished(tracked, str(message.get("reason", "")))

    def _known(self, peer_pid: int, message: dict[str, Any]) -> Tracked:
        with self._lock:
            tracked = self._tracked.get(sender(peer_pid, message, self._node))
        if tracked is None:
            raise ClaimRejected(f"process {peer_pid} is not registered")
        return tracked

    def _tell_exception(self, tracked: Tracked, number: int, detail: dict[str, str]) -> None:
        if number > tracked.exceptions_told:
            now, told_at = self._clock.monotonic(), tracked.exceptions_told_at
            if len(told_at) == EXCEPTIONS_MAX and now - told_at[0] < EXCEPTIONS_SECONDS:
                self.num_refused += 1
                return
            told_at.append(now)
            tracked.exceptions_told = number
            self._events.append(AgentEventKind.EXCEPTION, **tracked.registration.facts(), detail=detail)

    def _tell_finished(self, tracked: Tracked, reason: str) -> None:
        if not tracked.finished_told:
            tracked.finished_told = True
            self._events.append(AgentEventKind.FINISHED, **tracked.registration.facts(), detail={"reason": reason})

    # --- what is kept

    def _track(self, registration: Registration) -> Tracked:
        process = registration.process
        reader = None
        try:
            if not registration.found:
                reader = PageReader(self._pages / page_name(process.pid, process.start_ticks))
        except OSError as e:
            logger.warning("%s has no state page: %s", registration.replica, e)
        probe = ProcessProbe(process.pid, proc=self._proc, cgroup_root=self._cgroup_root)
        tracked = Tracked(registration=registration, probe=probe, reader=reader)
        self._tracked[process] = tracked
        return tracked

    def _watch(self, tracked: Tracked) -> None:
        process = tracked.registration.process
        self._exits.watch(process.pid, process.start_ticks, lambda status: self.ended(process, status))

    def _lives(self, tracked: Tracked) -> bool:
        """The exit watch may be a moment behind."""
        state = tracked.probe.read().proc_state
        return state not in ("?", "Z", "X")

    def _change(self, tracked: Tracked, said: Registration) -> None:
        before = tracked.registration
        tracked.registration = said
        detail = {"was": before.replica, "was_incarnation": str(before.incarnation)}
        self._events.append(AgentEventKind.REGISTERED, **said.facts(), detail=detail)
        self._save()

    def _forget(self, tracked: Tracked) -> None:
        self._tracked.pop(tracked.registration.process, None)
        tracked.probe.close()
        if tracked.reader is not None:
            tracked.reader.close()
            tracked.reader.path.unlink(missing_ok=True)

    def _save(self) -> None:
        live = [asdict(t.registration) for t in self._tracked.values() if t.exited_at is None]
        try:
            write_atomically(self._file, json.dumps(live) + "\n")
        except OSError as e:
            logger.warning("%s: %s; a restarted agent would not know these processes", self._file, e)

    def adopt(self) -> None:
        """After a restart: goes on with the processes that were registered, and tells of those that died meanwhile.

        Raises:
            WatchRefused: one that may live cannot be watched. To go on would be to say that it died, or to forget it.
        """
        try:
            kept = [self._renamed(Registration.from_dict(d)) for d in json.loads(self._file.read_text())]
        except FileNotFoundError:
            kept = []
        except (OSError, ValueError, TypeError, KeyError) as e:
            logger.warning("%s is damaged, processes must register again: %s", self._file, e)
            kept = []
        with self._lock:
            for registration in kept[:NUM_PROCESSES_MAX]:
                tracked = self._track(registration)
                self._recall(tracked)
                try:
                    self._watch(tracked)
                except WatchRefused as e:
                    if not e.gone:
                        raise
                    self._ended(tracked, ExitStatus(), away=True)
            self._save()
            self._remove_foreign_pages()

    def _renamed(self, kept: Registration) -> Registration:
        """Under the node's name of now: agent.yaml may have another since."""
        return replace(kept, process=replace(kept.process, node=self._node))

    def _recall(self, tracked: Tracked) -> None:
        """What was told of this process before the restart is not told again."""
        for event in self._events.after(0, limit=1 << 30).events:
            if event.process == tracked.registration.process:
                if event.kind is AgentEventKind.EXCEPTION and event.detail.get("number", "").isdecimal():
                    tracked.exceptions_told = max(tracked.exceptions_told, int(event.detail["number"]))
                tracked.finished_told |= event.kind is AgentEventKind.FINISHED

    def _remove_foreign_pages(self) -> None:
        """Pages of processes that are gone and that nobody will ask for, and answers that nobody fetched."""
        for path in self._pages.glob("*.*flight*"):
            path.unlink(missing_ok=True)
        known = {page_name(p.pid, p.start_ticks) for p in self._tracked}
        for path in self._pages.glob("*.page"):
            pid, _, ticks = path.stem.partition("-")
            if path.name in known or not (pid.isdecimal() and ticks.isdecimal()):
                continue
            if not (self._proc / pid).exists():
                path.unlink(missing_ok=True)

    # --- looking and ending

    def poll(self, tracked: Tracked) -> None:
        """Reads the page: keeps the last good one, follows a promotion, tells what did not come over the socket."""
        if tracked.reader is None:
            return
        try:
            page = tracked.reader.read()
        except (PageUnreadable, OSError):
            tracked.page_ok = False
            self.num_torn += 1
            return
        process = tracked.registration.process
        if (page.pid, page.start_ticks) != (process.pid, process.start_ticks):
            tracked.page_ok = False  # somebody else's page under this name
            self.num_torn += 1
            return
        tracked.page, tracked.page_ok = page, True
        if (page.replica, page.rank, page.incarnation) != tracked.registration.slot:
            self._follow(tracked, page)
        if page.exception is not None:
            self._tell_exception(tracked, page.exception.number, page.exception.detail())
        if page.finished:
            self._tell_finished(tracked, page.finish_reason)

    def _follow(self, tracked: Tracked, page: PageState) -> None:
        said = proven(page, self._node, self._token)
        if said is None:
            return
        try:
            self._others_in(said)
        except ClaimRejected as e:
            self._refused(page.pid, str(e))
            return
        self._change(tracked, said)

    def processes(self) -> tuple[Tracked, ...]:
        """Those to be sampled: the live ones, and the dead for DEAD_SHOWN_SECONDS."""
        with self._lock:
            now = self._clock.monotonic()
            for tracked in list(self._tracked.values()):
                if tracked.exited_at is not None and now - tracked.exited_at > DEAD_SHOWN_SECONDS:
                    self._forget(tracked)
            return tuple(self._tracked.values())

    def live_process(self, pid: int) -> Registration | None:
        """The registration of a live process."""
        with self._lock:
            for tracked in self._tracked.values():
                if tracked.registration.process.pid == pid and tracked.exited_at is None:
                    return tracked.registration
        return None

    def num_live(self) -> int:
        """Without the lock, which is held while a registration is written to a disk that may hang: a scrape asks this."""
        return sum(t.exited_at is None for t in tuple(self._tracked.values()))

    def locked(self) -> threading.RLock:
        """Held by the sampler while it reads a process, so that none ends in the middle of it."""
        return self._lock

    def ended(self, process: ProcessId, status: ExitStatus) -> None:
        """Called by the exit watch."""
        with self._lock:
            tracked = self._tracked.get(process)
            if tracked is not None and tracked.exited_at is None:
                self._ended(tracked, status)
                self._save()

    def _ended(self, tracked: Tracked, status: ExitStatus, away: bool = False) -> None:
        self.poll(tracked)  # its last words come before its exit
        if tracked.registration.found and (wanted := requested_exit(status)):
            self._tell_finished(tracked, wanted)  # it cannot say so itself
        tracked.exited_at, tracked.status = self._clock.monotonic(), status
        detail = {"cause": self._cause(tracked, status)}
        who = tracked.registration
        place = who.role, who.replica, str(who.rank), detail["cause"]
        if place in self.num_exits or len(self.num_exits) < NUM_EXITS_MAX:
            self.num_exits[place] = self.num_exits.get(place, 0) + 1
        if tracked.page is not None:
            detail |= {"last_phase": tracked.page.phase, "step": str(tracked.page.step)}
        if status.signal is not None:
            detail["signal"] = str(status.signal)
        if status.code is not None:
            detail["code"] = str(status.code)
        if away:
            detail["noticed"] = "after a restart of the agent"
        if not (away and self._events.has(AgentEventKind.EXITED, tracked.registration.process)):
            self._events.append(AgentEventKind.EXITED, **tracked.registration.facts(), detail=detail)

    def _cause(self, tracked: Tracked, status: ExitStatus) -> str:
        before, self._oom_kills_seen = self._oom_kills_seen, self._oom_kills()
        oom = self._oom_kills_seen > before
        return guess_cause(status, finished=tracked.finished_told, raised=tracked.exceptions_told > 0, oom=oom)
