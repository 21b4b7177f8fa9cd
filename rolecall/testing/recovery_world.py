"""A fleet, a detector and an operator for tests of the control loop: real journal, fake clock, no processes.

`FakeRuntime` plays supervisor and controller: it reads desired records and starts incarnations, each after a delay,
unless scripted to die during start. `FakeDetector` knows the scripted faults and reports them after its delay, while
they last."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis, Fate, ReplicaLoad, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ReplicaId, split_replica
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import NO_PROCESS, Actual, Desired, ReplicaState
from rolecall.recovery.interfaces import Message

FLEET = ("controller/0", "reward/0", "reward/1", "rollout/0", "rollout/1", "rollout/2", "trainer/0", "trainer/1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeObservation:
    """An observation without content."""

    wall_at: float


class FakeSource:
    """Polls without waiting."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def poll(self, timeout_seconds: float) -> FakeObservation:
        del timeout_seconds
        return FakeObservation(wall_at=self._clock.wall())


@dataclass(slots=True)
class _FakeReplicaProcess:
    incarnation: int
    state: ReplicaState
    next_at: float  # monotonic seconds of its next change of state
    fault: FaultClass | None = None
    fault_at: float = 0.0
    dies_in: ReplicaState | None = None  # ends instead of leaving this state
    was_ready: bool = False


class FakeRuntime:
    """Reads Desired from `journal`, writes Actual. One process a replica, `node-<n>` each its own node."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        replicas: Sequence[str] = FLEET,
        *,
        ready_seconds: float = 1.0,
        serving_seconds: float = 1.0,
        shared_head: bool = False,
    ) -> None:
        """`shared_head`: reward workers run on the first node, as in the bundled runtime."""
        self.journal, self.clock = journal, clock
        self.ready_seconds, self.serving_seconds = ready_seconds, serving_seconds
        self.starts_that_die: dict[str, int] = {}  # replica -> how many of its next starts end before they are ready
        self.starts_that_die_ready: dict[str, int] = {}  # the same, ready and before they work
        self.starts_that_hang: dict[str, int] = {}  # replica -> how many of its next starts never get ready
        self.refusing: dict[str, str] = {}  # node -> why it takes no process
        self.reports_losses = True
        self.processes: dict[str, _FakeReplicaProcess] = {}
        self.replaced: list[tuple[str, int]] = []  # (replica, incarnation that was taken down), in order
        for number, replica in enumerate(replicas):
            on_head = shared_head and replica.startswith("reward/")
            node = NodeId(f"node-{0 if on_head else number}")
            journal.set_desired(Desired(replica=ReplicaId(replica), incarnation=1, node=node))
            self.processes[replica] = _FakeReplicaProcess(
                incarnation=1, state=ReplicaState.SERVING, next_at=0.0, was_ready=True
            )
            self._write(replica, node)

    def inject(self, replica: str, fault: FaultClass) -> None:
        """The current process of `replica` gets this fault."""
        process = self.processes[replica]
        process.fault, process.fault_at = fault, self.clock.monotonic()
        if fault is FaultClass.CRASH:
            process.state = ReplicaState.LOST
            if self.reports_losses:
                self._write(replica, because="its process exited")

    def healthy(self, replica: str) -> bool:
        process = self.processes[replica]
        return process.state is ReplicaState.SERVING and process.fault is None

    def tick(self) -> None:
        """Reconciles once."""
        now = self.clock.monotonic()
        for replica, desired in self.journal.desired().items():
            process = self.processes.get(replica)
            if desired.lent:
                self._end(replica, process)
            elif process is None or desired.incarnation > process.incarnation:
                self._start(replica, desired, now)
            elif now >= process.next_at and process.state in (ReplicaState.STARTING, ReplicaState.READY):
                self._advance(replica, process, now)

    def _end(self, replica: str, process: _FakeReplicaProcess | None) -> None:
        if process is not None and process.state not in (ReplicaState.STOPPED, ReplicaState.LOST):
            self.replaced.append((replica, process.incarnation))
            process.state = ReplicaState.STOPPED
            self._write(replica, because="replaced")

    def _start(self, replica: str, desired: Desired, now: float) -> None:
        before = self.processes.get(replica)
        if before is not None:
            self.replaced.append((replica, before.incarnation))
            before.state = ReplicaState.STOPPED
            self._write(replica, because="replaced")
        hangs = self.starts_that_hang.get(replica, 0)
        dies = 0 if hangs else self.starts_that_die.get(replica, 0)
        self.starts_that_hang[replica] = max(0, hangs - 1)
        self.starts_that_die[replica] = max(0, dies - 1) if dies else self.starts_that_die.get(replica, 0)
        self.processes[replica] = _FakeReplicaProcess(
            incarnation=desired.incarnation,
            state=ReplicaState.STARTING,
            next_at=float("inf") if hangs else now + self.ready_seconds,
            dies_in=ReplicaState.STARTING if dies else self._dies_ready(replica),
        )
        self._write(replica, desired.node)
        if desired.node in self.refusing:
            self.processes[replica].state = ReplicaState.LOST
            self._write(replica, because=f"{NO_PROCESS}{self.refusing[desired.node]}")

    def _dies_ready(self, replica: str) -> ReplicaState | None:
        left = self.starts_that_die_ready.get(replica, 0)
        self.starts_that_die_ready[replica] = max(0, left - 1)
        return ReplicaState.READY if left else None

    def _advance(self, replica: str, process: _FakeReplicaProcess, now: float) -> None:
        if process.state is process.dies_in:
            self.inject(replica, FaultClass.CRASH)
            return
        starting = process.state is ReplicaState.STARTING
        process.state, process.was_ready = ReplicaState.READY if starting else ReplicaState.SERVING, True
        process.next_at = now + self.serving_seconds
        self._write(replica)

    def _write(self, replica: str, node: NodeId | None = None, because: str = "") -> None:
        process = self.processes[replica]
        name = ReplicaId(replica)
        where = node or self.journal.actual()[(name, process.incarnation)].node
        self.journal.set_actual(
            Actual(
                replica=name,
                incarnation=process.incarnation,
                node=where,
                state=process.state,
                pid=int(process.was_ready),
                because=because,
            )
        )


class FakeDetector:
    """Reports the faults of `FakeRuntime`'s processes `delay_seconds` after their start, while they last."""

    def __init__(self, runtime: FakeRuntime, *, delay_seconds: float = 0.5, gain_ratio: float | None = 4.0) -> None:
        self.runtime, self.delay_seconds, self.gain_ratio = runtime, delay_seconds, gain_ratio
        self.extra: list[Diagnosis] = []  # reported as well, while listed here
        self.silent = False
        self.forgotten: list[tuple[str, int]] = []
        self.without_process: set[str] = set()  # replicas
        self.known_to_have_worked: set[tuple[str, int]] = set()
        self.without_work: set[str] = set()  # replicas
        self.known_loads: dict[str, ReplicaLoad] = {}

    def observe(self, observation: Any) -> list[Diagnosis]:
        del observation
        if self.silent:
            return []
        now, found = self.runtime.clock.monotonic(), []
        for replica, process in sorted(self.runtime.processes.items()):
            if process.fault is not None and now >= process.fault_at + self.delay_seconds:
                offset = self.runtime.clock.wall() - now
                found.append(
                    diagnosis(
                        process.fault,
                        (replica, process.incarnation),
                        onset=process.fault_at + offset,
                        detected_at=process.fault_at + self.delay_seconds + offset,
                        gain_ratio=self.gain_ratio if process.fault is FaultClass.SLOW else None,
                    )
                )
        return [*found, *self.extra]

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        process = self.runtime.processes[replica]
        moves = self.runtime.healthy(replica) and process.incarnation >= incarnation_min
        return moves, f"{replica}#{process.incarnation} {'works' if moves else 'does not work'}"

    def waits(self, replica: str, incarnation_min: int) -> bool:
        del incarnation_min
        return replica in self.without_work

    def has_worked(self, replica: str, incarnation: int) -> bool:
        return (replica, incarnation) in self.known_to_have_worked

    def fate(self, suspect: Suspect) -> tuple[Fate, str]:
        if suspect.replica in self.without_process:
            return Fate.ENDED, f"no process of {suspect.replica} is left"
        works, seen = self.progressing(suspect.replica, suspect.incarnation or 0)
        return Fate.WORKS if works else Fate.UNKNOWN, seen

    def survives(self, role: str, since: float) -> bool:
        del role, since
        return not self.without_process

    def forget(self, replica: str, below_incarnation: int) -> None:
        self.forgotten.append((replica, below_incarnation))

    def unforget(self, replica: str, incarnation: int) -> None:
        self.forgotten = [(r, below) for r, below in self.forgotten if r != replica or below <= incarnation]

    def loads(self) -> Mapping[str, ReplicaLoad]:
        return self.known_loads

    def window(self, suspects: Iterable[Suspect] = ()) -> Mapping[str, Any]:
        return {"at": self.runtime.clock.wall()}


def diagnosis(
    fault_class: FaultClass, *who: tuple[str, int], because: str = "", onset: float = 0.0, **more: Any
) -> Diagnosis:
    """A diagnosis of (replica, incarnation) pairs; `node-<index>` by default."""
    suspects = tuple(
        Suspect(node=NodeId(f"node-{replica}".replace("/", "-")), role=split_replica(replica)[0], replica=replica,
                incarnation=incarnation)
        for replica, incarnation in who
    )  # fmt: skip
    names = ", ".join(f"{r}#{i}" for r, i in who)
    fixed: dict[str, Any] = {"detected_at": onset, "confidence": 0.9, "detectors": ("fake",), **more}
    return Diagnosis(
        suspects=suspects, fault_class=fault_class, onset=onset, because=because or f"{names}: {fault_class}", **fixed
    )


@dataclass(slots=True)
class RecordingNotifier:
    """Receives every notification at once."""

    channel: str = "test"
    settled_seq: int = 0
    messages: list[Message] = field(default_factory=list)
    heartbeats: list[Mapping[str, Any]] = field(default_factory=list)

    def offer(self, message: Message) -> bool:
        self.messages.append(message)
        self.settled_seq = max(self.settled_seq, message.seq)
        return True

    def heartbeat(self, facts: Mapping[str, Any]) -> None:
        self.heartbeats.append(facts)

    def close(self, seconds: float) -> None:
        del seconds
