"""The registered processes of this node: identity, state and exit of each rank.

A registration is accepted if the kernel confirms the sender (SO_PEERCRED) and the secret is the one issued for that
rank and incarnation. Registrations are kept in `registrations.json`, so that a restarted agent continues; a process
that died in between gets its EXITED event then. A promoted standby changes the identity on its page, with a proof that
needs the secret of the new identity."""

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.base import LoggedOnce
from rolecall.agent.collectors.counters import read_at_most, stat_of
from rolecall.agent.collectors.process.discovery import job_number
from rolecall.agent.collectors.process.exits import ExitStatus, ExitWatch, WatchRefused, guess_cause, requested_exit
from rolecall.agent.collectors.process.process import ProcessProbe
from rolecall.agent.collectors.process.ray_workers import RAYLET, parent_name
from rolecall.agent.data_dir import remove
from rolecall.agent.events import EventLog
from rolecall.agent.file_owners import owners_of_files
from rolecall.agent.identity import (
    DETAIL_CHARACTERS_MAX,
    NUM_DETAILS_MAX,
    ClaimRejected,
    Registration,
    detail_of,
    proven,
    sender,
    verified,
)
from rolecall.agent.processes.state_pages import PageReader, PageState, PageUnreadable
from rolecall.agent.processes.workload import POD_UID, SLURM_STEP, workload_of
from rolecall.agent.reporter.page_layout import INTERPRETER_ENDED, page_name
from rolecall.core.clock import Clock
from rolecall.core.ids import NodeId, ProcessId, replica_id
from rolecall.core.rundir import write_atomically
from rolecall.core.telemetry import UNCOUNTED, AgentEventKind

logger = logging.getLogger(__name__)

NUM_EXITS_MAX = 4096
"""Bound on counted pairs of rank and cause; further ones are not counted."""
NUM_PROCESSES_MAX = 256
"""Live registered processes; further ones are refused until one of them ends."""
REFUSED_SECONDS = 5.0
"""Minimum time between two REFUSED events."""
EXCEPTIONS_MAX, EXCEPTIONS_SECONDS = 30, 60.0
"""Rate limit of EXCEPTION events per process, so that one that raises in a loop does not displace the events of others.
Exceptions beyond it are counted as refused; the newest is reported from the page later."""
ANCESTORS_MAX = 16
LOG_FILE_CHARACTERS_MAX = 300
PROC_BYTES_MAX = 16_384
DEAD_SHOWN_SECONDS = 10.0
"""How long a dead process stays among the samples (alive: false) before it is dropped and its page removed."""


@dataclass(slots=True)
class Tracked:
    """State of one registered process. Owned by the registry; `page` is the last consistent one."""

    registration: Registration
    claimed: tuple[str, int, int]  # replica, rank and incarnation as the process itself states them
    probe: ProcessProbe
    reader: PageReader | None
    page: PageState | None = None
    page_ok: bool = False
    exceptions_reported: int = 0
    exceptions_reported_at: deque[float] = field(default_factory=lambda: deque(maxlen=EXCEPTIONS_MAX))
    finish_reported: bool = False
    log_file: str = ""  # its standard error goes there; empty: a terminal or a pipe, or not known
    of_raylet: bool = False  # a child of a raylet: a worker of Ray
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
        """Exits by role, replica, rank and cause, as seen by this agent."""
        self._tracked: dict[ProcessId, Tracked] = {}
        self._oom_kills_seen = oom_kills()
        self.num_refused = 0
        self._refused_at = float("-inf")
        self._refusals = LoggedOnce()
        self._numbered = LoggedOnce()
        self.num_torn = 0

    def register(self, peer_pid: int, message: dict[str, Any]) -> None:
        """Registers a process. Idempotent; a different identity is a promotion.

        Raises:
            ClaimRejected: with the reason; counted.
        """
        try:
            claim, detail = verified(peer_pid, message, self._node, self._token), detail_of(message)
            with self._lock:
                known = self._tracked.get(claim.process)
                if known is None:
                    self._supersede(claim)
                claimed, claim = claim.slot, self._separated(claim, known)
                if known is None:
                    self._admit(claim, detail, claimed)
                elif known.registration.found:
                    self._forget(known)
                    self._track(claim, claimed)  # its own claim replaces the rule's; its exit is already watched
                    self._announce(claim, {**detail, "was": known.registration.replica})
                elif known.registration != claim:
                    self._others_in(claim)
                    self._change(known, claim, claimed)
        except ClaimRejected as e:
            self._refused(peer_pid, str(e))
            raise

    def _refused(self, peer_pid: int, reason: str) -> None:
        """Counts a rejected claim. A claim that is repeated is one event, and there is at most one per REFUSED_SECONDS,
        so that a loop cannot fill the disk."""
        with self._lock:
            self.num_refused += 1
            now = self._clock.monotonic()
            if now - self._refused_at < REFUSED_SECONDS or not self._refusals.is_new(f"{peer_pid} {reason}"):
                return
            self._refused_at = now
        self._events.append(AgentEventKind.REFUSED, detail={"reason": reason, "pid": str(peer_pid)})

    def _separated(self, claim: Registration, known: Tracked | None) -> Registration:
        """The claim, under a number made of its job if a live process of another job has a rank of this replica. Two
        jobs on one node both call their ranks `trainer/0`. A process keeps the name that it was given."""
        if claim.incarnation != UNCOUNTED or not claim.job:
            return claim
        other_name = replace(claim, replica=replica_id(claim.role, job_number(claim.job)))
        living = [t.registration for t in self._tracked.values() if t.exited_at is None]
        if known is not None and not known.registration.found and known.claimed == claim.slot:
            return replace(claim, replica=known.registration.replica)
        if any(r.job == claim.job and r.replica == other_name.replica for r in living):
            return other_name
        others = {r.job for r in living if r.replica == claim.replica and r.process != claim.process}
        return other_name if others - {claim.job, ""} else claim

    def _admit(self, claim: Registration, detail: dict[str, str], claimed: tuple[str, int, int] | None = None) -> None:
        """Adds a process. Raises ClaimRejected: too many, its rank is taken, or it has ended."""
        if self.num_live() >= NUM_PROCESSES_MAX:
            raise ClaimRejected(f"{NUM_PROCESSES_MAX} processes are registered already", for_now=True)
        before = self._others_in(claim)
        tracked = self._track(claim, claimed)
        try:
            self._watch(tracked)
        except WatchRefused as e:
            self._forget(tracked)
            raise ClaimRejected(str(e), for_now=not e.gone) from None
        for other in before:
            # Processes that rolecall did not start share an incarnation: drop the dead one in favour of its successor.
            if claim.incarnation == UNCOUNTED and other.exited_at is not None:
                self._forget(other)
        self._announce(claim, detail)

    def _announce(self, claim: Registration, detail: dict[str, str]) -> None:
        number = f"{claim.role}/{job_number(claim.job)}" if claim.job else ""
        if claim.replica == number and self._numbered.is_new(f"{claim.job} {claim.replica}"):
            logger.info(
                "job %s: its ranks are watched as %s, a number made of the job, so that no other job on this node has "
                "the same name; if jobs share nodes, set jobs.rules.by_job on each of them",
                *(claim.job, claim.replica),
            )
        # An actuator may end that pod or step: the kernel names it, never the process.
        told = {k: v for k, v in detail.items() if k not in (POD_UID, SLURM_STEP)}
        known = {**told, **self._workload(claim.process.pid)}
        self._events.append(AgentEventKind.REGISTERED, **claim.facts(), detail=known)
        self._save()

    def _workload(self, pid: int) -> Mapping[str, str]:
        return workload_of(read_at_most(f"{self._proc}/{pid}/cgroup", PROC_BYTES_MAX).decode("utf-8", "replace"))

    def _user(self, pid: int) -> str:
        """Empty: it has ended, or is in a pod, since each pod of a job may have users of its own."""
        if POD_UID in self._workload(pid):
            return ""
        lines = read_at_most(f"{self._proc}/{pid}/status", PROC_BYTES_MAX).splitlines()
        return next((line.split()[1].decode() for line in lines if line.startswith(b"Uid:")), "")

    def _others_in(self, claim: Registration) -> list[Tracked]:
        """Dead processes of the same rank and incarnation. Raises ClaimRejected: a live one exists."""
        others = [t for p, t in self._tracked.items() if t.registration.slot == claim.slot and p != claim.process]
        for other in others:
            # The kernel decides, because the exit watch may lag.
            if other.exited_at is None and other.probe.read().proc_state not in ("?", "Z", "X"):
                raise ClaimRejected(
                    f"{claim.replica}:{claim.rank}#{claim.incarnation} is process {other.registration.process}",
                    for_now=True,
                )
        return others

    def _supersede(self, claim: Registration) -> None:
        """Forgets processes that a rule took for ranks, because they have a rank's environment, and that have only
        started the ranks."""
        above = _ancestors(self._proc, claim.process.pid)
        for other in list(self._tracked.values()):
            registration = other.registration
            if registration.found and registration.role == claim.role and registration.process.pid in above:
                self._forget(other)

    def discover(self, found: Registration, detail: dict[str, str]) -> None:
        """Registers a process that a discovery rule identified. `detail`: of the event, how it was discovered.

        Raises:
            ClaimRejected: already registered, its rank is taken by a live process, it has started registered ranks, its
                job is another user's, too many, or it has ended.
        """
        with self._lock:
            if found.process in self._tracked:
                raise ClaimRejected(f"process {found.process} is already registered")
            ranks = (r for r in self.registrations() if not r.found and r.role == found.role)
            if any(found.process.pid in _ancestors(self._proc, r.process.pid) for r in ranks):
                raise ClaimRejected("the ranks that it has started are registered")
            self._check_user(found)
            self._admit(found, detail)

    def _check_user(self, found: Registration) -> None:
        """A rule goes by the environment, in which any user can name the job of another. Raises ClaimRejected; the
        first time it is an event."""
        pids = (r.process.pid for r in self.registrations() if found.job and r.job == found.job)
        user, other = self._user(found.process.pid), next((u for u in map(self._user, pids) if u), "")
        if user and other and user != other:
            reason = f"job {found.job} is of the user with number {other}, the process of {user}"
            self._refused(found.process.pid, reason)
            raise ClaimRejected(reason, for_now=True)

    def registrations(self) -> tuple[Registration, ...]:
        """Of all live processes."""
        with self._lock:
            return tuple(t.registration for t in self._tracked.values() if t.exited_at is None)

    def exception(self, peer_pid: int, message: dict[str, Any]) -> None:
        """A registered process reports an exception. Idempotent by number.

        Raises:
            ClaimRejected: the sender is not registered, or the message is malformed.
        """
        tracked = self._known(peer_pid, message)
        number, detail = message.get("number"), message.get("detail")
        if type(number) is not int or not isinstance(detail, dict):
            raise ClaimRejected("exception needs number and detail")
        if not all(isinstance(text, str) for pair in detail.items() for text in pair) or len(detail) > NUM_DETAILS_MAX:
            raise ClaimRejected(f"detail must be at most {NUM_DETAILS_MAX} strings")
        if any(len(name) > DETAIL_CHARACTERS_MAX for name in detail):  # values are cut, like those of every event
            raise ClaimRejected(f"names in detail must have at most {DETAIL_CHARACTERS_MAX} characters")
        with self._lock:
            self._report_exception(tracked, number, {**detail, "number": str(number)})

    def finished(self, peer_pid: int, message: dict[str, Any]) -> None:
        """A registered process announces an intended exit. Raises ClaimRejected as `exception` does."""
        tracked = self._known(peer_pid, message)
        with self._lock:
            self._report_finished(tracked, str(message.get("reason", "")))

    def _known(self, peer_pid: int, message: dict[str, Any]) -> Tracked:
        with self._lock:
            tracked = self._tracked.get(sender(peer_pid, message, self._node))
        if tracked is None:
            raise ClaimRejected(f"process {peer_pid} is not registered")
        return tracked

    def _report_exception(self, tracked: Tracked, number: int, detail: dict[str, str]) -> None:
        if number > tracked.exceptions_reported:
            now, reported_at = self._clock.monotonic(), tracked.exceptions_reported_at
            if len(reported_at) == EXCEPTIONS_MAX and now - reported_at[0] < EXCEPTIONS_SECONDS:
                self.num_refused += 1
                return
            reported_at.append(now)
            tracked.exceptions_reported = number
            self._events.append(AgentEventKind.EXCEPTION, **tracked.registration.facts(), detail=detail)

    def _report_finished(self, tracked: Tracked, reason: str) -> None:
        if not tracked.finish_reported:
            tracked.finish_reported = True
            self._events.append(AgentEventKind.FINISHED, **tracked.registration.facts(), detail={"reason": reason})

    def _track(self, registration: Registration, claimed: tuple[str, int, int] | None = None) -> Tracked:
        process = registration.process
        reader = None
        try:
            if not registration.found:
                owners = owners_of_files(self._proc, process.pid, self._pages)
                reader = PageReader(self._pages / page_name(process.pid, process.start_ticks), owners)
        except OSError as e:
            logger.warning("%s has no state page: %s", registration.replica, e)
        probe = ProcessProbe(process.pid, proc=self._proc, cgroup_root=self._cgroup_root)
        tracked = Tracked(
            registration=registration,
            claimed=claimed or registration.slot,
            probe=probe,
            reader=reader,
            log_file=_log_file(self._proc / str(process.pid)),
            of_raylet=parent_name(self._proc, process.pid) == RAYLET,
        )
        self._tracked[process] = tracked
        return tracked

    def _watch(self, tracked: Tracked) -> None:
        process = tracked.registration.process
        self._exits.watch(process.pid, process.start_ticks, lambda status: self.ended(process, status))

    def _change(self, tracked: Tracked, claim: Registration, claimed: tuple[str, int, int]) -> None:
        before = tracked.registration
        tracked.registration, tracked.claimed = claim, claimed
        self._announce(claim, {"was": before.replica, "was_incarnation": str(before.incarnation)})

    def _forget(self, tracked: Tracked) -> None:
        self._tracked.pop(tracked.registration.process, None)
        tracked.probe.close()
        if tracked.reader is not None:
            tracked.reader.close()
            remove(tracked.reader.path)

    def _save(self) -> None:
        live = [asdict(t.registration) for t in self._tracked.values() if t.exited_at is None]
        try:
            write_atomically(self._file, json.dumps(live) + "\n")
        except OSError as e:
            logger.warning("%s: %s; after a restart the agent will not know these processes", self._file, e)

    def adopt(self) -> None:
        """After a restart: resumes the registered processes, and reports those that died in between.

        Raises:
            WatchRefused: a process that may be alive cannot be watched; continuing would report it dead or lose it.
        """
        try:
            kept = [Registration.from_dict(d) for d in json.loads(self._file.read_text())]
        except FileNotFoundError:
            kept = []
        except (OSError, ValueError, TypeError, KeyError) as e:
            logger.warning("%s is damaged, waiting for processes to register again: %s", self._file, e)
            kept = []
        with self._lock:
            for registration in kept[:NUM_PROCESSES_MAX]:
                # agent.yaml may have changed the node's name.
                process = replace(registration.process, node=self._node)
                tracked = self._track(replace(registration, process=process))
                self._recall(tracked)
                try:
                    self._watch(tracked)
                except WatchRefused as e:
                    if not e.gone:
                        raise
                    tracked.log_file, tracked.of_raylet = "", False  # of whatever has its PID now
                    self._ended(tracked, ExitStatus(), away=True)
            self._save()
            self._remove_foreign_pages()

    def _recall(self, tracked: Tracked) -> None:
        """Restores which events of this process were reported before the restart."""
        for event in self._events.after(0, limit=1 << 30).events:
            if event.process == tracked.registration.process:
                if event.kind is AgentEventKind.EXCEPTION and event.detail.get("number", "").isdecimal():
                    tracked.exceptions_reported = max(tracked.exceptions_reported, int(event.detail["number"]))
                tracked.finish_reported |= event.kind is AgentEventKind.FINISHED

    def _remove_foreign_pages(self) -> None:
        """Removes pages of ended processes and unfetched Flight Recorder responses."""
        for path in self._pages.glob("*.*flight*"):
            remove(path)
        known = {page_name(p.pid, p.start_ticks) for p in self._tracked}
        for path in self._pages.glob("*.page"):
            pid, _, ticks = path.stem.partition("-")
            if path.name in known or not (pid.isdecimal() and ticks.isdecimal()):
                continue
            if not (self._proc / pid).exists():
                remove(path)

    def poll(self, tracked: Tracked) -> None:
        """Reads the page: keeps the last consistent one, follows a promotion, reports unsent events."""
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
            tracked.page_ok = False  # another process's page under this name
            self.num_torn += 1
            return
        tracked.page, tracked.page_ok = page, True
        if (page.replica, page.rank, page.incarnation) != tracked.claimed:
            self._follow(tracked, page)
        if page.exception is not None:
            self._report_exception(tracked, page.exception.number, page.exception.detail())
        if page.finished and page.finish_reason != INTERPRETER_ENDED:
            self._report_finished(tracked, page.finish_reason)

    def _follow(self, tracked: Tracked, page: PageState) -> None:
        claim = proven(page, self._node, self._token)
        if claim is None:
            return
        claimed, claim = claim.slot, self._separated(replace(claim, job=tracked.registration.job), tracked)
        if claim == tracked.registration:  # adopted after a restart of the agent, under the name that it was given
            tracked.claimed = claimed
            return
        try:
            self._others_in(claim)
        except ClaimRejected as e:
            self._refused(page.pid, str(e))
            return
        self._change(tracked, claim, claimed)

    def processes(self) -> tuple[Tracked, ...]:
        """Processes to sample: live ones, and dead ones for DEAD_SHOWN_SECONDS."""
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
        """Lock-free for the scrape: the lock is held during writes to a disk that may hang."""
        return sum(t.exited_at is None for t in tuple(self._tracked.values()))

    def locked(self) -> threading.RLock:
        """Held by the sampler while it reads a process, so that its exit is not handled in between."""
        return self._lock

    def ended(self, process: ProcessId, status: ExitStatus) -> None:
        """Called by the exit watch."""
        with self._lock:
            tracked = self._tracked.get(process)
            if tracked is not None and tracked.exited_at is None:
                self._ended(tracked, status)
                self._save()

    def _ended(self, tracked: Tracked, status: ExitStatus, away: bool = False) -> None:
        self.poll(tracked)  # its last report comes before its exit
        if tracked.registration.incarnation == UNCOUNTED:  # nobody announces its exit
            wanted = requested_exit(status)
            if status == ExitStatus() and tracked.page is not None and tracked.page.finished:
                wanted = tracked.page.finish_reason
            if wanted:
                self._report_finished(tracked, wanted)
        tracked.exited_at, tracked.status = self._clock.monotonic(), status
        before, self._oom_kills_seen = self._oom_kills_seen, self._oom_kills()
        oom, raised = self._oom_kills_seen > before, tracked.exceptions_reported > 0
        cause = guess_cause(status, finished=tracked.finish_reported, raised=raised, oom=oom)
        detail, who = {"cause": cause}, tracked.registration
        place = who.role, who.replica, str(who.rank), cause
        if place in self.num_exits or len(self.num_exits) < NUM_EXITS_MAX:
            self.num_exits[place] = self.num_exits.get(place, 0) + 1
        if tracked.page is not None:
            page = tracked.page
            detail |= {"last_phase": page.phase, "step": str(page.step)}
            if page.collectives_issued >= 0:
                numbers = page.collectives_issued, page.collectives_at_step, page.collectives_at_begin
                detail["collectives"] = " ".join(map(str, (page.progress, *numbers)))
        detail |= status.detail()
        if tracked.log_file:
            detail["log_file"] = tracked.log_file
        if tracked.of_raylet:
            detail["ray"] = "worker"  # its logs tell more (collectors/process/ray_workers.py)
        if away:
            detail["noticed"] = "after a restart of the agent"
        if not (away and self._events.has(AgentEventKind.EXITED, tracked.registration.process)):
            self._events.append(AgentEventKind.EXITED, **tracked.registration.facts(), detail=detail)


def _ancestors(proc: Path, pid: int) -> set[int]:
    found: set[int] = set()
    while len(found) < ANCESTORS_MAX and (stat := stat_of(proc, pid)) is not None:
        pid = stat.parent
        found.add(pid)
    return found


def _log_file(process: Path) -> str:
    """The file of standard error; empty: a terminal, a pipe, a deleted file, or it cannot be read."""
    link = process / "fd" / "2"
    try:
        path, is_file = os.readlink(link), link.is_file()
    except OSError:
        return ""
    known = is_file and not path.endswith(" (deleted)") and len(path) <= LOG_FILE_CHARACTERS_MAX
    return path if known else ""
