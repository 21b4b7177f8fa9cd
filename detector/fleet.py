"""Everybody under watch: one `Subject` per (replica, rank, incarnation), fed by samples and events.

Here names are kept straight: a newer incarnation ends the older one, a promoted standby is the same process under
another name, what recovery has forgotten stays forgotten. Nothing here judges. All time comes from the observation.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind, ProcessSample
from rolecall.detector.learned import Gaps
from rolecall.detector.observation import Observation
from rolecall.detector.subject import Key, Subject, advance, first

SUBJECTS_MAX = 8192
"""Processes remembered at once, past incarnations included."""
EXCEPTIONS_MAX = 256
"""Exception reports remembered for the user-code rule."""
CLOSED_SECONDS = 120.0
"""How long a past incarnation is remembered after its successor came or it was forgotten."""
UNPAGED_GONE_SECONDS = 900.0
"""How long the exit of a process of a job that knows nothing of us is told, unless another takes its place."""
DEAD_SAMPLE_SECONDS = 1.0
"""A sample says that a process is dead, and no event has: the event (with its goodbye before it, or its signal) gets
so long to arrive before the sample counts alone."""
OFFSET_UNCERTAINTY_SECONDS = 1.0
"""A clock offset of a node below this is not told apart from the delay of its answer, and read as none."""


@dataclass(slots=True)
class SeenException:
    event: AgentEvent
    received_wall: float
    worked: int  # units its process had finished then


@dataclass(slots=True)
class Fleet:
    """Mutable; owned by one Detector."""

    mask_proc_state: bool = False
    subjects: dict[Key, Subject] = field(default_factory=dict)
    by_process: dict[ProcessId, Key] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)  # replica -> newest incarnation heard of
    forgotten: dict[str, int] = field(default_factory=dict)  # replica -> incarnations below this are over
    exceptions: deque[SeenException] = field(default_factory=lambda: deque(maxlen=EXCEPTIONS_MAX))
    unreachable: tuple[tuple[str, float, str], ...] = ()
    raylets_gone: dict[str, float] = field(default_factory=dict)  # node -> wall
    offsets: dict[str, float] = field(default_factory=dict)
    oom_kills: dict[str, int] = field(default_factory=dict)
    oom_wall: dict[str, float] = field(default_factory=dict)
    changed_wall: float = 0.0  # when the set of processes last changed
    gaps: Gaps = field(default_factory=Gaps)
    quiet: set[Key] = field(default_factory=set)  # under a finding: nothing is learned from these

    def current(self) -> Iterator[Subject]:
        return (s for s in self.subjects.values() if not s.closed_wall)

    def peers(self, subject: Subject) -> list[Subject]:
        return [s for s in self.current() if s.role == subject.role and s.key != subject.key]

    def ingest(self, observation: Observation) -> None:
        now = observation.wall_at
        self.unreachable = observation.unreachable
        for batch in observation.batches:
            self._measure_offset(batch.node, now - batch.wall_at)
            for sample in batch.processes:
                self._take_sample(sample, now)
            for host in batch.hosts:
                if host.oom_kills > self.oom_kills.get(host.node, host.oom_kills):
                    self.oom_wall[host.node] = now
                self.oom_kills[host.node] = host.oom_kills
        for event in observation.events:
            self._take_event(event, now)
        self._sweep(now)

    def forget(self, replica: str, below_incarnation: int, now: float) -> None:
        """What is known of older incarnations is over: their exits are expected, their findings end."""
        self.forgotten[replica] = max(below_incarnation, self.forgotten.get(replica, 0))
        for s in self.current():
            if s.replica == replica and s.incarnation < below_incarnation:
                s.closed_wall = now

    # --- samples

    def _take_sample(self, sample: ProcessSample, now: float) -> None:
        if self.mask_proc_state and sample.proc_state != "?":
            sample = _masked(sample)
        if not sample.alive and self._is_succeeded(sample):
            return
        subject = self._find(sample.process, sample.replica, sample.role, sample.rank, sample.incarnation, now)
        if subject is None or subject.gone:
            return
        subject.offset_seconds = self.offsets.get(subject.node, 0.0)
        if not sample.alive:
            subject.dead_wall = subject.dead_wall or now
            return
        previous, subject.sample = subject.sample, sample
        subject.seen_wall = now
        if previous is None:
            first(subject, sample)
        elif sample.at > previous.at:
            advance(subject, previous, sample, None if subject.key in self.quiet else self.gaps, now)

    def _is_succeeded(self, sample: ProcessSample) -> bool:
        """Another process stands in its place already: those that rolecall did not start share an incarnation."""
        there = self.subjects.get((sample.replica, sample.rank, sample.incarnation))
        return there is not None and there.process not in (None, sample.process)

    def _find(
        self, process: ProcessId | None, replica: str, role: str, rank: int, incarnation: int, now: float
    ) -> Subject | None:
        """The subject of this name, made if need be; None when its incarnation is over."""
        if incarnation < self.forgotten.get(replica, 0) or incarnation < self.newest.get(replica, 0):
            return None
        key = (replica, rank, incarnation)
        subject = self.subjects.get(key)
        if subject is not None and (process is None or subject.process in (None, process)):
            if subject.process is None and process is not None:
                subject.process = process
                self.by_process[process] = key
            return subject
        if len(self.subjects) >= SUBJECTS_MAX:
            return None
        return self._make(process, replica, role, rank, incarnation, now)

    def _make(
        self, process: ProcessId | None, replica: str, role: str, rank: int, incarnation: int, now: float
    ) -> Subject:
        key = (replica, rank, incarnation)
        node = str(process.node) if process else ""
        subject = Subject(replica, role, rank, incarnation, node, process, seen_wall=now)
        self.newest[replica] = incarnation
        for older in self.current():
            if older.replica == replica and older.incarnation < incarnation:
                older.closed_wall = now
        if process is not None:
            before = self.subjects.get(self.by_process.get(process, key))
            if before is not None and before.key != key:
                # A promoted standby: the same process under another name. Its old name is over, its history is not.
                before.closed_wall = now
                subject.beats_seen = before.beats_seen
                subject.sample = before.sample
            self.by_process[process] = key
        self.subjects[key] = subject
        self.changed_wall = now
        return subject

    # --- events

    def _take_event(self, event: AgentEvent, now: float) -> None:
        if event.kind == AgentEventKind.RAYLET_EXITED:
            self.raylets_gone[event.node] = now
            return
        if event.kind == AgentEventKind.EXCEPTION and event.replica:
            subject = self.subjects.get((event.replica, event.rank, event.incarnation))
            self.exceptions.append(SeenException(event, now, subject.worked if subject else 0))
        if not event.replica:
            return
        subject = self._by_event(event, now)
        if subject is None:
            return
        subject.seen_wall = now
        if event.kind == AgentEventKind.FINISHED:
            subject.finished = True
        elif event.kind == AgentEventKind.EXITED and subject.exit_event is None:
            subject.exit_event = event
            subject.exit_wall = subject.exit_wall or now
            self.changed_wall = now

    def _by_event(self, event: AgentEvent, now: float) -> Subject | None:
        if event.process is not None and event.kind != AgentEventKind.REGISTERED:
            # A process may have been promoted since the agent last read its name: the process decides.
            known = self.subjects.get(self.by_process.get(event.process, ("", 0, 0)))
            if known is not None and known.process == event.process:
                return None if known.closed_wall else known
        subject = self._find(event.process, event.replica, event.role, event.rank, event.incarnation, now)
        if subject is not None and not subject.node:
            subject.node = event.node
        return subject

    # --- housekeeping

    def _measure_offset(self, node: str, seen: float) -> None:
        """The smallest delay seen is closest to the offset; it may creep up slowly, for clocks drift."""
        known = self.offsets.get(node)
        smallest = seen if known is None else min(seen, known + 1e-3)
        self.offsets[node] = smallest if abs(smallest) > OFFSET_UNCERTAINTY_SECONDS else 0.0

    def _sweep(self, now: float) -> None:
        for s in self.current():
            if s.dead_wall and not s.gone and now - s.dead_wall >= DEAD_SAMPLE_SECONDS:
                s.exit_wall = now
                self.changed_wall = now
            if s.gone and not s.reports and now - s.exit_wall >= UNPAGED_GONE_SECONDS:
                s.closed_wall = now  # nothing will say that its place is not to be filled again
        old = [s for s in self.subjects.values() if s.closed_wall and now - s.closed_wall > CLOSED_SECONDS]
        for s in old:
            del self.subjects[s.key]
            if s.process is not None and self.by_process.get(s.process) == s.key:
                del self.by_process[s.process]


def _masked(sample: ProcessSample) -> ProcessSample:
    return replace(sample, proc_state="?")


def names(subjects: Iterable[Subject]) -> str:
    return ", ".join(sorted(s.replica for s in subjects))
