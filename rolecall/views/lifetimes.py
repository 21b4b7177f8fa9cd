"""Lifetime of each replica incarnation and its process, from the journal. Pure.

These give the lanes of the report's timeline, and `pids_kept`: every process that no plan named kept its PID (invariant
Smallest blast radius, docs/invariants.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import (
    EpochAdvanced,
    ReplicaLost,
    ReplicaReady,
    ReplicaStarting,
    ReplicaStopped,
    WeightsAdmitted,
)
from rolecall.core.membership import STANDBY_ROLE, Actual, ReplicaState

Key = tuple[str, int]
"""(replica, incarnation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationRecord:
    """One incarnation of one replica. Times are wall seconds, None if it did not happen."""

    replica: str
    incarnation: int
    node: str = ""
    pid: int = 0
    start_ticks: int = 0
    from_standby: bool = False
    starting_at: float | None = None
    ready_at: float | None = None
    serving_at: float | None = None
    """Rollout: the first proof of its weights. Others: first membership in an epoch."""
    lost_at: float | None = None
    stopped_at: float | None = None
    because: str = ""

    @property
    def role(self) -> str:
        return self.replica.partition("/")[0]

    @property
    def process(self) -> tuple[str, int, int] | None:
        return (self.node, self.pid, self.start_ticks) if self.pid else None

    @property
    def ended_at(self) -> float | None:
        ends = [t for t in (self.lost_at, self.stopped_at) if t is not None]
        return min(ends) if ends else None

    def to_dict(self, zero: float) -> dict[str, Any]:
        """Layout in the report: times in seconds after `zero`."""

        def after(at: float | None) -> float | None:
            return None if at is None else round(at - zero, 3)

        return {
            "replica": self.replica,
            "incarnation": self.incarnation,
            "node": self.node,
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "from_standby": self.from_standby,
            "starting": after(self.starting_at),
            "ready": after(self.ready_at),
            "serving": after(self.serving_at),
            "lost": after(self.lost_at),
            "stopped": after(self.stopped_at),
            "because": self.because,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PidsKept:
    """Whether processes were kept. `named`: replicas that a started plan named; `violations`: sentences, empty if there
    are none."""

    ok: bool
    num_kept: int
    named: tuple[str, ...]
    violations: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_kept": self.num_kept,
            "named": list(self.named),
            "violations": list(self.violations),
        }


def incarnation_records(
    events: Iterable[Event], actual: Mapping[tuple[ReplicaId, int], Actual]
) -> dict[Key, IncarnationRecord]:
    """All incarnations in the journal."""
    found: dict[Key, IncarnationRecord] = {}
    for event in events:
        said = event.payload
        match said:
            case EpochAdvanced():
                for replica, incarnation in said.members:
                    _note(found, replica, incarnation, "serving_at", event.wall_at, only_if_not=("rollout",))
            case ReplicaStarting() | ReplicaReady() | WeightsAdmitted() | ReplicaLost() | ReplicaStopped():
                which = said.replica, said.incarnation
                _note(found, *which, _STAMPS[event.kind], event.wall_at)
                if isinstance(said, ReplicaReady):
                    found[which] = replace(
                        found[which],
                        node=said.node,
                        pid=said.pid,
                        start_ticks=said.start_ticks,
                        from_standby=bool(said.from_standby),
                    )
                elif isinstance(said, ReplicaStarting):
                    found[which] = replace(found[which], node=said.node)
                elif isinstance(said, ReplicaLost | ReplicaStopped):
                    found[which] = replace(found[which], because=found[which].because or said.because)
            case _:
                pass
    for record in actual.values():
        key = (str(record.replica), record.incarnation)
        life = found.get(key, IncarnationRecord(replica=key[0], incarnation=key[1]))
        if not life.pid:
            life = replace(life, node=str(record.node), pid=record.pid, start_ticks=record.start_ticks)
        if life.serving_at is None and record.state is ReplicaState.SERVING:
            life = replace(life, serving_at=record.changed_at)
        found[key] = life
    return dict(sorted(found.items(), key=lambda kv: (kv[0][0].partition("/")[0], _index(kv[0][0]), kv[0][1])))


_STAMPS = {
    EventKind.REPLICA_STARTING: "starting_at",
    EventKind.REPLICA_READY: "ready_at",
    EventKind.WEIGHTS_ADMITTED: "serving_at",
    EventKind.REPLICA_LOST: "lost_at",
    EventKind.REPLICA_STOPPED: "stopped_at",
}


def _note(
    found: dict[Key, IncarnationRecord],
    replica: str,
    incarnation: int,
    stamp: str,
    at: float,
    only_if_not: tuple[str, ...] = (),
) -> None:
    """The first time of each kind is kept."""
    life = found.setdefault((replica, incarnation), IncarnationRecord(replica=replica, incarnation=incarnation))
    if getattr(life, stamp) is None and life.role not in only_if_not:
        changes: dict[str, Any] = {stamp: at}
        found[replica, incarnation] = replace(life, **changes)


def _index(replica: str) -> int:
    tail = replica.rpartition("/")[2]
    return int(tail) if tail.isdigit() else 0


def pids_kept(
    known: Mapping[Key, IncarnationRecord],
    ready: Sequence[ReplicaReady],
    named: frozenset[Key],
    struck: frozenset[Key],
    work_ended_at: float,
) -> PidsKept:
    """Whether each process that no plan named kept its PID.

    `ready`: an incarnation must not show two processes in these. `named`: targets of started plans. `struck`:
    incarnations hit by the injector, whose loss is no violation. Losses after `work_ended_at` (the last committed step)
    belong to the end of the run.
    """
    wrong: list[str] = []
    seen: dict[Key, tuple[int, int]] = {}
    for said in ready:
        key, process = (said.replica, said.incarnation), (said.pid, said.start_ticks)
        if seen.setdefault(key, process) != process:
            wrong.append(f"{_name(key)} was pid {seen[key][0]} and became pid {process[0]} under the same incarnation")
    elsewhere = {life.process for life in known.values() if life.role != STANDBY_ROLE}

    def went_on(life: IncarnationRecord) -> bool:
        """A standby's process that continues under the name of the replica it replaced."""
        return life.role == STANDBY_ROLE and life.process in elsewhere

    by_replica: dict[str, list[IncarnationRecord]] = {}
    for life in known.values():
        by_replica.setdefault(life.replica, []).append(life)
    kept = 0
    for replica, its in by_replica.items():
        changes = [(a, b) for a, b in pairwise(its) if a.process != b.process]
        for a, b in changes:
            if (replica, a.incarnation) not in named and not went_on(a):
                became = f"became {_name((replica, b.incarnation))} (pid {b.pid}), and no plan named it"
                wrong.append(f"{_name((replica, a.incarnation))} (pid {a.pid}) {became}")
        last = its[-1]
        key = (replica, last.incarnation)
        lost_early = last.lost_at is not None and last.lost_at < work_ended_at
        if lost_early and key not in named and key not in struck and not went_on(last):
            wrong.append(f"{_name(key)} (pid {last.pid}) was lost, and no plan named it: {last.because}")
        kept += not changes and not lost_early and last.role != STANDBY_ROLE
    return PidsKept(ok=not wrong, num_kept=kept, named=tuple(sorted(_name(k) for k in named)), violations=tuple(wrong))


def _name(key: Key) -> str:
    return f"{key[0]}#{key[1]}"
