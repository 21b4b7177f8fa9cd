"""All monitored processes: one `MonitoredProcess` per (replica, rank, incarnation), updated from samples and events.

It resolves identities: a newer incarnation closes the older one, a promoted standby is the same process under another
name, incarnations forgotten by recovery stay forgotten until it says otherwise. It makes no findings. All times come
from the observation.

A watcher of a thousand nodes has sixteen thousand processes and several polls per second: a lookup per sample or per
poll must not scan all of them (`ProcessIndex`, docs/decisions/0021).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.errors import CorruptTransfer, EngineDisagrees, NonFiniteMicrobatch, WrongNumbers
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import UNCOUNTED, AgentEvent, AgentEventKind, ProcessSample, is_instrumented, job_of
from rolecall.core.text import spans
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.monitored_process import Key, MonitoredProcess, ProgressGaps, advance, first
from rolecall.formats.ray_logs import RayReason

WRONG_NUMBERS = frozenset(e.__name__ for e in (NonFiniteMicrobatch, WrongNumbers, EngineDisagrees, CorruptTransfer))
"""Exceptions that report what a replica computed or sent."""
NO_PROCESSES: Mapping[Key, MonitoredProcess] = MappingProxyType({})


class ProcessIndex:
    """The subjects that are not closed, in insertion order. `changes` increases whenever one is added, removed or
    exits; values derived from an older count are stale."""

    def __init__(self) -> None:
        self.changes = 0
        self._all: dict[Key, MonitoredProcess] = {}
        self._by_role: dict[str, dict[Key, MonitoredProcess]] = {}
        self._by_replica: dict[str, dict[Key, MonitoredProcess]] = {}
        self._gone: dict[Key, MonitoredProcess] = {}
        self._sizes: dict[str, int] = {}
        self._sizes_of = -1

    def __iter__(self) -> Iterator[MonitoredProcess]:
        return iter(self._all.values())

    def add(self, subject: MonitoredProcess) -> None:
        """Replaces an existing process with the same key."""
        before = self._all.get(subject.key)
        if before is not None:
            self.remove(before)
        self._all[subject.key] = subject
        self._by_role.setdefault(subject.role, {})[subject.key] = subject
        self._by_replica.setdefault(subject.replica, {})[subject.key] = subject
        if subject.gone:
            self._gone[subject.key] = subject
        self.changes += 1

    def remove(self, subject: MonitoredProcess) -> None:
        """No effect if it is not in the index."""
        if self._all.get(subject.key) is not subject:
            return
        del self._all[subject.key]
        self._gone.pop(subject.key, None)
        for index, name in ((self._by_role, subject.role), (self._by_replica, subject.replica)):
            del index[name][subject.key]
            if not index[name]:
                del index[name]
        self.changes += 1

    def note_gone(self, subject: MonitoredProcess) -> None:
        """Records that its process has exited."""
        if self._all.get(subject.key) is subject:
            self._gone[subject.key] = subject
            self.changes += 1

    def of_role(self, role: str) -> Mapping[Key, MonitoredProcess]:
        return self._by_role.get(role, NO_PROCESSES)

    def of_replica(self, replica: str) -> Mapping[Key, MonitoredProcess]:
        return self._by_replica.get(replica, NO_PROCESSES)

    @property
    def gone(self) -> Mapping[Key, MonitoredProcess]:
        """Subjects whose process has exited, in order of detection."""
        return self._gone

    def sizes(self) -> Mapping[str, int]:
        """Number of replicas with a live process, per role."""
        if self._sizes_of != self.changes:
            replicas: dict[str, set[str]] = {}
            for s in self:
                if not s.gone:
                    replicas.setdefault(s.role, set()).add(s.replica)
            self._sizes = {role: len(names) for role, names in replicas.items()}
            self._sizes_of = self.changes
        return self._sizes


SUBJECTS_MAX = 65_536
"""Maximum number of tracked processes, past incarnations included: `agents.AGENTS_MAX` nodes of sixteen ranks."""
EXCEPTIONS_MAX = 256
"""Exception reports kept for the user-code rule."""
CLOSED_SECONDS = 120.0
"""Retention of a past incarnation after its successor registered or it was forgotten."""
UNCOUNTED_GONE_SECONDS = 900.0
"""How long the exit of a process that rolecall did not start is reported unless it is replaced."""
VANISHED_SECONDS = 30.0
"""A process that its answering agent has not shown for this long is gone: it ended while that agent was down."""
BREAK_SECONDS = 15.0
"""An agent that did not respond for this long may have started again, and not have found its processes yet. Watches of
many nodes ask each of them every 10 s."""
DEAD_SAMPLE_SECONDS = 1.0
"""How long to wait for the exit event after a sample reports a process as dead: the event has the announced exit or the
signal. After that the sample alone counts."""
OLD_EVENT_SECONDS = 900.0
"""Older events of processes without samples are ignored: a starting watcher receives all events retained by its agents,
up to days of them. Equal to the time for which an exit is reported (`UNCOUNTED_GONE_SECONDS`)."""
REPEATED_SECONDS = 5.0
"""An older event was not received when it was written: its agent repeats it to a watch that starts. Exceptions that
were minutes apart are not simultaneous then."""
OFFSET_STEP_SECONDS = 5.0
"""An increase of the measured offset by this much means that a clock was set. If only one response was late, the next
one corrects it."""
OFFSET_UNCERTAINTY_SECONDS = 1.0
"""Clock offsets below this are treated as zero: they cannot be separated from the response delay."""


@dataclass(slots=True)
class ReceivedException:
    event: AgentEvent
    received_wall: float
    worked: int  # units finished by its process at that time


@dataclass(slots=True)
class MonitoredProcesses:
    """Mutable; owned by one Detector."""

    mask_proc_state: bool = False
    of_runtime: bool = False  # the bundled one, of which a run is one job; else of jobs that rolecall did not start
    foreign: bool = False  # all of them, even if a watch counts their incarnations; else those without an incarnation
    subjects: dict[Key, MonitoredProcess] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)  # replica -> newest known incarnation
    forgotten: dict[str, int] = field(default_factory=dict)  # replica -> lowest incarnation that is not forgotten
    exceptions: deque[ReceivedException] = field(default_factory=lambda: deque(maxlen=EXCEPTIONS_MAX))
    wrong_numbers: deque[ReceivedException] = field(default_factory=lambda: deque(maxlen=EXCEPTIONS_MAX))
    """Of microbatches: no crash, and no error of the code until another replica repeats it."""
    unreachable: tuple[tuple[str, float, str], ...] = ()
    raylets_gone: dict[str, float] = field(default_factory=dict)  # node -> wall
    offsets: dict[str, float] = field(default_factory=dict)  # node -> clock offset
    walls: dict[str, float] = field(default_factory=dict)  # node -> its wall clock in the newest response
    oom_kills: dict[str, int] = field(default_factory=dict)
    available_bytes: dict[str, int] = field(default_factory=dict)  # node -> memory that it could give to processes
    oom_wall: dict[str, float] = field(default_factory=dict)
    began_wall: float = 0.0  # time of the first observation
    observed_wall: float = 0.0  # time of the newest observation
    answered: dict[str, float] = field(default_factory=dict)  # node -> time of the newest response of its agent
    answering: dict[str, float] = field(default_factory=dict)  # node -> since when it has responded, without a break
    changed_wall: float = 0.0  # last change of the set of processes
    gaps: ProgressGaps = field(default_factory=ProgressGaps)
    quiet: set[Key] = field(default_factory=set)  # learning is suspended for these
    roster: ProcessIndex = field(init=False, default_factory=ProcessIndex)
    sampled: list[MonitoredProcess] = field(init=False, default_factory=list)  # sampled in the newest observation
    by_process: dict[ProcessId, Key] = field(init=False, default_factory=dict)
    before: dict[Key, MonitoredProcess | None] = field(init=False, default_factory=dict)
    """Copies of the processes that changed since the last reset, from before the change; None: new. See history.py."""
    _dead: dict[Key, MonitoredProcess] = field(init=False, default_factory=dict)  # dead in a sample, no exit event
    _closed: dict[Key, MonitoredProcess] = field(init=False, default_factory=dict)
    _unpaged: list[MonitoredProcess] = field(init=False, default_factory=list)
    _unpaged_of: int = field(init=False, default=-1)  # value of roster.changes at computation

    def __post_init__(self) -> None:
        for subject in self.subjects.values():
            if subject.closed_wall:
                self._closed[subject.key] = subject
                if subject.process is not None:
                    self.by_process.setdefault(subject.process, subject.key)
                continue
            if subject.process is not None:
                self.by_process[subject.process] = subject.key
            self.roster.add(subject)
            if subject.dead_wall and not subject.gone:
                self._dead[subject.key] = subject

    def current(self) -> Iterator[MonitoredProcess]:
        return iter(self.roster)

    def closed(self) -> Iterable[MonitoredProcess]:
        """Past incarnations still within retention."""
        return self._closed.values()

    def unpaged(self) -> Sequence[MonitoredProcess]:
        """Current processes without a state page."""
        if self._unpaged_of != self.roster.changes:
            self._unpaged_of = self.roster.changes
            self._unpaged = [s for s in self.roster if not s.reports]
        return self._unpaged

    def changes(self, subject: MonitoredProcess) -> None:
        """Call before modifying `subject`."""
        if subject.key not in self.before:
            self.before[subject.key] = subject.copied()

    def peers(self, subject: MonitoredProcess) -> list[MonitoredProcess]:
        """Of the same role and job."""
        here = self.roster.of_role(subject.role).values()
        return [s for s in here if s.group == subject.group and s.key != subject.key]

    def ingest(self, observation: Observation) -> None:
        now = observation.wall_at
        self.began_wall = self.began_wall or now
        if now - self.observed_wall > BREAK_SECONDS:  # a new watch: every agent gets time to respond
            self.answered = {s.node: now for s in self.roster}
            self.answering = dict(self.answered)
        self.observed_wall = now
        self.unreachable = observation.unreachable
        self.sampled = []
        for node in observation.left:
            self._leave(node, now)
        for batch in observation.batches:
            if now - self.answered.get(batch.node, 0.0) > BREAK_SECONDS:
                self.answering[batch.node] = now
            self.answered[batch.node] = now
            # The smallest observed delay is the best estimate; it may rise slowly to follow clock drift.
            seen, known = now - batch.wall_at, self.offsets.get(batch.node)
            smallest = seen if known is None or seen - known > OFFSET_STEP_SECONDS else min(seen, known + 1e-3)
            self.offsets[batch.node] = smallest if abs(smallest) > OFFSET_UNCERTAINTY_SECONDS else 0.0
            self.walls[batch.node] = batch.wall_at
            for sample in batch.processes:
                self._take_sample(sample, now)
            for host in batch.hosts:
                if host.oom_kills > self.oom_kills.get(host.node, host.oom_kills):
                    self.oom_wall[host.node] = now
                self.oom_kills[host.node] = host.oom_kills
                self.available_bytes[host.node] = host.memory_available_bytes
        for event in observation.events:
            self._take_event(event, now)
        self._close_vanished(observation, now)
        self._sweep(now)

    def forget(self, replica: str, below_incarnation: int, now: float) -> None:
        """Closes older incarnations: their exits are expected, their findings end."""
        self.forgotten[replica] = max(below_incarnation, self.forgotten.get(replica, 0))
        self._close_older(replica, below_incarnation, now)

    def unforget(self, replica: str, incarnation: int) -> None:
        """This incarnation was not replaced: its next sample opens it again."""
        self.forgotten[replica] = min(incarnation, self.forgotten.get(replica, 0))

    def wall_of(self, event: AgentEvent) -> float:
        """When it happened, by the watcher's clock."""
        return event.wall_at + self.offsets.get(event.node, 0.0)

    def is_past(self, event: AgentEvent) -> bool:
        """Whether it happened before this watch began, in a job of which nothing is left."""
        at = self.wall_of(event)
        if event.incarnation != UNCOUNTED or at >= self.began_wall:
            return False
        return not any(not s.gone and s.first_wall <= at for s in self.roster.of_replica(event.replica).values())

    def is_succeeded(self, event: AgentEvent) -> bool:
        """Whether another process now has the rank that the event is about."""
        return event.process is not None and self._is_succeeded(
            (event.replica, event.rank, event.incarnation), event.process
        )

    def age(self, event: AgentEvent) -> float:
        """Seconds since it was written, by its node's clock; 0 if unknown."""
        return max(0.0, self.walls.get(event.node, event.wall_at) - event.wall_at)

    def _leave(self, node: str, now: float) -> None:
        for s in [s for s in self.roster if s.node == node]:
            self._close(s, now)
        of_nodes = self.offsets, self.walls, self.answered, self.answering, self.raylets_gone
        for known in (*of_nodes, self.oom_kills, self.oom_wall, self.available_bytes):
            known.pop(node, None)

    def _join(self, subject: MonitoredProcess, job: str) -> None:
        """Of two jobs with the same role in one run, neither is late for the other's collectives, or slow against it.
        The first has the role as its group, and leaves what was learned to its successor; the other one has the name of
        a replica. Processes of the same replica are of one job, which has another rendezvous when it starts again; a
        process whose job is not known is compared with the first."""
        if self.of_runtime or job in ("", subject.job):
            return
        subject.job = job
        self.roster.changes += 1
        replica, role = self.roster.of_replica(subject.replica), self.roster.of_role(subject.role)

        def others(index: Mapping[Key, MonitoredProcess]) -> Iterator[MonitoredProcess]:
            return (s for s in index.values() if s.job and s is not subject and not s.gone)

        # The replica comes first: it is small where jobs are many.
        mate = next((s for s in chain(others(replica), others(role)) if s.job == job), next(others(replica), None))
        if mate is not None:
            subject.group = mate.group
            return
        is_second = any(s.group == subject.role for s in others(role))
        subject.group = subject.replica if is_second else subject.role
        self.gaps.keep({s.group for s in self.subjects.values()})

    def _close_older(self, replica: str, below_incarnation: int, now: float) -> None:
        for s in list(self.roster.of_replica(replica).values()):
            if s.incarnation < below_incarnation:
                self._close(s, now)

    def _close(self, subject: MonitoredProcess, now: float) -> None:
        self.changes(subject)
        subject.closed_wall = now
        self.roster.remove(subject)
        self._closed[subject.key] = subject
        self._dead.pop(subject.key, None)

    def _lost(self, subject: MonitoredProcess, now: float) -> None:
        self.changes(subject)
        subject.exit_wall = now
        self.changed_wall = now
        self._dead.pop(subject.key, None)
        self.roster.note_gone(subject)

    # --- samples

    def _take_sample(self, sample: ProcessSample, now: float) -> None:
        if self.mask_proc_state and sample.proc_state != "?":
            sample = replace(sample, proc_state="?")
        if not sample.alive and self._is_succeeded((sample.replica, sample.rank, sample.incarnation), sample.process):
            return
        # What is forgotten and runs is followed unseen, so that nothing is missing if it is watched again.
        forgotten = sample.incarnation < self.forgotten.get(sample.replica, 0)
        place = sample.replica, sample.rank, sample.incarnation
        subject = self._closed.get(place) if forgotten else self._find(sample, now)
        if subject is None or subject.gone or subject.process != sample.process:
            return
        self.changes(subject)
        subject.offset_seconds = self.offsets.get(subject.node, 0.0)
        if not sample.alive:
            subject.dead_wall = subject.dead_wall or now
            if not subject.closed_wall:
                self._dead[subject.key] = subject
            return
        if subject.closed_wall and not forgotten and self.by_process.get(sample.process) == subject.key:
            # It had vanished, or its node had left the list, and is back; or it was forgotten, and not replaced.
            subject.closed_wall = 0.0
            del self._closed[subject.key]
            self.roster.add(subject)
        previous, subject.sample = subject.sample, sample
        subject.seen_wall = now
        if not forgotten:
            self.sampled.append(subject)
        if previous is None or is_instrumented(previous) != is_instrumented(sample):
            first(subject, sample)
            self._unpaged_of = -1  # it is now known whether it writes a page
        elif sample.at > previous.at:
            learns = not forgotten and subject.key not in self.quiet
            advance(subject, previous, sample, self.gaps if learns else None, now)

    def _is_succeeded(self, place: Key, process: ProcessId) -> bool:
        """Whether another process already has this key: processes not started by rolecall share an incarnation."""
        there = self.subjects.get(place)
        return there is not None and there.process not in (None, process)

    def _find(self, of: ProcessSample | AgentEvent, now: float) -> MonitoredProcess | None:
        """Its subject, created if missing; None if its incarnation is closed or the limit is reached."""
        if of.incarnation < self.forgotten.get(of.replica, 0) or of.incarnation < self.newest.get(of.replica, 0):
            return None
        process, key = of.process, (of.replica, of.rank, of.incarnation)
        subject = self.subjects.get(key)
        if subject is not None and (process is None or subject.process in (None, process)):
            if subject.process is None and process is not None:
                self.changes(subject)
                subject.process = process
                self.by_process[process] = key
            return subject
        if len(self.subjects) >= SUBJECTS_MAX:
            return None
        node = str(process.node) if process else ""
        first = self.wall_of(of) if isinstance(of, AgentEvent) else now
        subject = MonitoredProcess(
            *(of.replica, of.role, of.rank, of.incarnation, node, process),
            seen_wall=now,
            first_wall=min(first, now),
            foreign=self.foreign,
        )
        self.newest[of.replica] = of.incarnation
        self._close_older(of.replica, of.incarnation, now)
        if process is not None:
            before = self.subjects.get(self.by_process.get(process, key))
            if before is not None and before.key != key:
                # A promoted standby: the same process under another name. Close the old name, keep the history.
                self._close(before, now)
                subject.beats_seen = before.beats_seen
                subject.sample = before.sample
            self.by_process[process] = key
        if key in self.subjects:
            self.changes(self.subjects[key])
        self.before.setdefault(key, None)
        self.subjects[key] = subject
        self._closed.pop(key, None)
        self._dead.pop(key, None)
        self.roster.add(subject)
        self.changed_wall = now
        return subject

    # --- events

    def _take_event(self, event: AgentEvent, now: float) -> None:
        if self.age(event) > OLD_EVENT_SECONDS and (event.process is None or event.process not in self.by_process):
            return
        if event.kind == AgentEventKind.RAYLET_EXITED:
            self.raylets_gone[event.node] = min(now, self.wall_of(event))
            return
        if event.kind == AgentEventKind.EXCEPTION and event.replica:
            subject = self.subjects.get((event.replica, event.rank, event.incarnation))
            is_number = event.detail.get("type", "").rpartition(".")[2] in WRONG_NUMBERS
            age = self.age(event)
            at = now - age if age > REPEATED_SECONDS else now
            received = ReceivedException(event, at, subject.worked if subject else 0)
            (self.wrong_numbers if is_number else self.exceptions).append(received)
        if not event.replica:
            return
        subject = self._by_event(event, now)
        if subject is None:
            return
        self.changes(subject)
        subject.seen_wall = now
        if event.kind == AgentEventKind.REGISTERED and event.process == subject.process:
            subject.first_wall = min(subject.first_wall, self.wall_of(event))
            self._join(subject, job_of(event))
        if event.kind == AgentEventKind.FINISHED:
            subject.finished = True
        elif event.kind == AgentEventKind.RAY_WORKER_ENDED and event.process == subject.process:
            subject.ray_event = subject.ray_event or event
            # What the job or Ray ended on purpose is no crash. Exit code 0 of a worker says nothing: Ray exits with it
            # after a failed __init__ and after sys.exit(3), too.
            reason = RayReason(event.detail.get("reason", ""))
            subject.finished = reason.is_intended or (subject.finished and reason is RayReason.NO_WORD)
        elif event.kind == AgentEventKind.EXITED and subject.exit_event is None:
            subject.exit_event = event
            self._lost(subject, subject.exit_wall or now)
            self.changed_wall = now

    def _by_event(self, event: AgentEvent, now: float) -> MonitoredProcess | None:
        if event.process is not None and event.kind != AgentEventKind.REGISTERED:
            # A process may have been promoted since the agent last read its name, so the process id takes precedence.
            known = self.subjects.get(self.by_process.get(event.process, ("", 0, 0)))
            if known is not None and known.process == event.process:
                return None if known.closed_wall else known
        place = event.replica, event.rank, event.incarnation
        taken = event.process is not None and self._is_succeeded(place, event.process)
        if event.kind != AgentEventKind.REGISTERED and taken and not self.subjects[place].gone:
            return None  # late, or replayed to a starting watcher
        subject = self._find(event, now)
        if subject is not None and not subject.node:
            self.changes(subject)
            subject.node = event.node
        return subject

    # --- housekeeping

    def _close_vanished(self, observation: Observation, now: float) -> None:
        """Closes processes whose exit nobody saw: their agent, which samples, shows them no longer, or their node is
        not listed any more. Only of jobs that rolecall did not start: a replica of the runtime is replaced by name."""
        if self.of_runtime:
            return
        silent = {node for node, _, _ in observation.unreachable}
        sampling = {batch.node for batch in observation.batches if batch.processes or batch.hosts}
        for s in [s for s in self.roster if now - s.seen_wall > VANISHED_SECONDS]:
            since = self.answering if s.node in sampling else self.answered
            is_over = now - since.get(s.node, now) > VANISHED_SECONDS and s.node not in silent
            if is_over and s.sample is not None and not s.gone:
                self._close(s, now)

    def _sweep(self, now: float) -> None:
        for subject in list(self._dead.values()):
            if now - subject.dead_wall >= DEAD_SAMPLE_SECONDS:
                self._lost(subject, now)
        for subject in list(self.roster.gone.values()):
            if subject.incarnation == UNCOUNTED and now - subject.exit_wall >= UNCOUNTED_GONE_SECONDS:
                self._close(subject, now)  # no event reports its replacement
        old = [s for s in self._closed.values() if now - max(s.closed_wall, s.seen_wall) > CLOSED_SECONDS]
        for subject in old:
            self.changes(subject)
            del self.subjects[subject.key], self._closed[subject.key]
            if subject.process is not None and self.by_process.get(subject.process) == subject.key:
                del self.by_process[subject.process]


def waiting(subjects: Sequence[MonitoredProcess]) -> str:
    """Clause for `because`: `trainer/0, trainer/2 are waiting`."""
    return f"{names(subjects)} {'is' if len(subjects) == 1 else 'are'} waiting"


def names(subjects: Iterable[MonitoredProcess]) -> str:
    """`trainer/0 ranks 0-3, trainer/1`."""
    ranks: dict[str, list[int]] = {}
    for s in subjects:
        ranks.setdefault(s.replica, []).append(s.rank)
    return ", ".join(f"{replica}{_ranks(numbers)}" for replica, numbers in sorted(ranks.items()))


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) > 1:
        return f" ranks {spans(numbers)}"
    return f" rank {numbers[0]}" if numbers[0] else ""


def suspect(subject: MonitoredProcess) -> Suspect:
    return Suspect(
        node=NodeId(subject.node),
        role=subject.role,
        replica=subject.replica,
        rank=subject.rank,
        incarnation=subject.incarnation,
        process=subject.process,
    )


def finding(
    detector: str,
    suspects: list[MonitoredProcess],
    fault_class: FaultClass,
    *,
    onset: float,
    now: float,
    confidence: float,
    because: str,
    evidence: tuple[Evidence, ...] = (),
    about: str = "",
) -> Finding:
    ordered = sorted(suspects, key=lambda s: s.key)
    return Finding(
        detector=detector,
        suspects=tuple(suspect(s) for s in ordered),
        fault_class=fault_class,
        onset=min(onset, now),
        detected_at=now,
        confidence=confidence,
        because=because,
        evidence=evidence,
        about=about,
    )
