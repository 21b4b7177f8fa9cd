"""Lifetime of each replica incarnation and its process, from the journal. Pure.

These give the lanes of the report's timeline, and `pids_kept`: every process that no plan named kept its PID (invariant
Smallest blast radius, docs/invariants.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from rolecall.core.ids import ReplicaId, role_of
from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads.run import (
    EpochAdvanced,
    ReplicaLost,
    ReplicaReady,
    ReplicaStarting,
    ReplicaStopped,
    WeightsAdmitted,
)
from rolecall.core.membership import Actual, ReplicaState, is_standby

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
        return role_of(self.replica)

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

        return {k.removesuffix("_at"): after(v) if k.endswith("_at") else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PidsKept:
    """Whether processes were kept. `named`: replicas that a started plan named; `violations`: sentences, empty if there
    are none."""

    ok: bool
    num_kept: int
    named: tuple[str, ...]
    violations: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {"num_kept": self.num_kept, "named": list(self.named), "violations": list(self.violations)}


def incarnation_records(
    events: Iterable[Event], actual: Mapping[tuple[ReplicaId, int], Actual]
) -> dict[Key, IncarnationRecord]:
    found: dict[Key, IncarnationRecord] = {}
    for event in events:
        match event.payload:
            case EpochAdvanced(members=members):
                for replica, incarnation in members:
                    if not replica.startswith("rollout/"):
                        _note(found, (replica, incarnation), "serving_at", event.wall_at)
            case ReplicaStarting() as said:
                _note(found, (said.replica, said.incarnation), "starting_at", event.wall_at, node=said.node)
            case ReplicaReady() as said:
                process = {"node": said.node, "pid": said.pid, "start_ticks": said.start_ticks}
                standby = bool(said.from_standby)
                which = said.replica, said.incarnation
                _note(found, which, "ready_at", event.wall_at, **process, from_standby=standby)
            case WeightsAdmitted() as said:
                _note(found, (said.replica, said.incarnation), "serving_at", event.wall_at)
            case ReplicaLost() | ReplicaStopped() as said:
                which = said.replica, said.incarnation
                because = (which in found and found[which].because) or said.because
                stamp = "lost_at" if isinstance(said, ReplicaLost) else "stopped_at"
                _note(found, which, stamp, event.wall_at, because=because)
    for record in actual.values():
        key = (str(record.replica), record.incarnation)
        life = found.get(key, IncarnationRecord(replica=key[0], incarnation=key[1]))
        if not life.pid:
            life = replace(life, node=str(record.node), pid=record.pid, start_ticks=record.start_ticks)
        if life.serving_at is None and record.state is ReplicaState.SERVING:
            life = replace(life, serving_at=record.changed_at)
        found[key] = life
    return dict(sorted(found.items(), key=lambda kv: (replica_order(kv[0][0]), kv[0][1])))


def _note(found: dict[Key, IncarnationRecord], which: Key, stamp: str, at: float, **facts: Any) -> None:
    """The first time of each kind is kept, of other facts the newest."""
    life = found.get(which) or IncarnationRecord(replica=which[0], incarnation=which[1])
    if getattr(life, stamp) is None:
        facts[stamp] = at
    found[which] = replace(life, **facts)


def replica_order(replica: str) -> tuple[str, int]:
    """Sort key: role, then number."""
    role, _, index = replica.partition("/")
    return role, int(index) if index.isdigit() else 0


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
    elsewhere = {life.process for life in known.values() if not is_standby(life.replica)}

    def went_on(life: IncarnationRecord) -> bool:
        """A standby's process that continues under the name of the replica it replaced."""
        return is_standby(life.replica) and life.process in elsewhere

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
        kept += not changes and not lost_early and not is_standby(replica)
    return PidsKept(ok=not wrong, num_kept=kept, named=tuple(sorted(_name(k) for k in named)), violations=tuple(wrong))


def _name(key: Key) -> str:
    return f"{key[0]}#{key[1]}"
