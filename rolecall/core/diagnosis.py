"""Values passed from detector to recovery: findings, diagnoses, plans. Frozen, and they round-trip as JSON.

A finding is one detector's statement. Fusion merges findings into at most one diagnosis per fault. A plan is recovery's
response to a diagnosis; an approval is bound to its hash.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self, TypeVar

from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ProcessId, ReplicaId
from rolecall.core.text import in_words


class ActionKind(StrEnum):
    TOLERATE = "tolerate"
    REPLACE_REPLICA = "replace_replica"
    REPLACE_NODE = "replace_node"
    RESTART_ROLE = "restart_role"
    RESTART_JOB = "restart_job"
    STOP_JOB = "stop_job"
    END_ORPHAN = "end_orphan"

    @property
    def is_restart(self) -> bool:
        """It ends and starts healthy replicas too: all of a role, or all of the job."""
        return self in (ActionKind.RESTART_ROLE, ActionKind.RESTART_JOB)


class Fate(StrEnum):
    """What became of a process."""

    WORKS = "works"
    ENDED = "ended"
    UNKNOWN = "unknown"  # it does not work, or cannot be seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Subject of a finding, as exactly as the evidence allows: undetermined fields stay empty."""

    node: NodeId
    role: str = ""
    replica: str = ""
    rank: int | None = None
    incarnation: int | None = None
    gpu: int | None = None
    process: ProcessId | None = None

    @property
    def name(self) -> str:
        """`rollout/1#2`, or the node if no replica is named. Replicas of a job that rolecall did not start have no
        incarnation number."""
        if not self.replica:
            return str(self.node)
        return f"{self.replica}#{self.incarnation}" if self.incarnation else self.replica

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        process = ProcessId(**record["process"]) if record.get("process") else None
        return cls(**{**record, "process": process})


NO_TIME = "no_time"
"""Evidence of this kind means that the input has no times: those of its diagnosis are meaningless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation behind a finding. `values` holds the numbers that `text` quotes, units in their names."""

    kind: str
    text: str
    values: dict[str, float] = field(default_factory=dict)


def _suspects(record: dict[str, Any]) -> tuple[Suspect, ...]:
    return tuple(Suspect.from_dict(s) for s in record["suspects"])


def _evidence(record: dict[str, Any]) -> tuple[Evidence, ...]:
    return tuple(Evidence(**e) for e in record["evidence"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One detector's statement: suspects, fault class, onset, confidence, evidence. Times are wall seconds."""

    detector: str
    suspects: tuple[Suspect, ...]
    fault_class: FaultClass
    onset: float
    detected_at: float
    confidence: float  # 0..1
    because: str
    evidence: tuple[Evidence, ...] = ()
    about: str = ""  # see `Diagnosis.about`

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fault_class": str(self.fault_class)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        fixed = {
            "suspects": _suspects(record),
            "evidence": _evidence(record),
            "fault_class": FaultClass(record["fault_class"]),
        }
        return cls(**{**record, **fixed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Findings fused into one sentence. `settle`: the evidence that would settle a `cannot_tell`."""

    suspects: tuple[Suspect, ...]
    fault_class: FaultClass
    onset: float
    detected_at: float
    confidence: float
    because: str
    evidence: tuple[Evidence, ...] = ()
    detectors: tuple[str, ...] = ()
    advice: str = ""
    settle: str = ""
    gain_ratio: float | None = None
    """SLOW only: how many times slower than its peers the suspect works."""
    about: str = ""
    """Cause that no suspect identifies: `<role>:<exception type>:<fingerprint of its frames>` of user code; `:collapse`
    of a policy, which blames no role's code."""

    @property
    def key(self) -> str:
        """Identity of the fault: the same suspects' incarnations with the same class are the same fault, unless
        they are of another rank (`further_ranks`)."""
        who = ",".join(sorted(f"{s.replica or s.node}#{s.incarnation}" for s in self.suspects))
        return f"{self.fault_class}:{who}{self.about}"

    def further_ranks(self, known: Iterable[Suspect]) -> list[tuple[str, int]]:
        """(replica, rank) that it accuses and that `known` does not name, of replicas in `known`. Where a rank is not
        known, it may be any of its replica; `cannot_tell` accuses none."""
        ranks: dict[str, set[int | None]] = {}
        for s in known:
            ranks.setdefault(s.replica, set()).add(s.rank)
        named = {(s.replica, s.rank) for s in self.suspects if s.rank is not None and s.replica in ranks}
        is_accused = self.fault_class is not FaultClass.CANNOT_TELL
        return sorted(w for w in named if is_accused and ranks[w[0]].isdisjoint((w[1], None)))

    @property
    def role_at_fault(self) -> str:
        """The role whose code fails; empty for a fault of machines."""
        return self.about.partition(":")[0]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fault_class": str(self.fault_class)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        fixed: dict[str, Any] = {
            "suspects": _suspects(record),
            "evidence": _evidence(record),
            "fault_class": FaultClass(record["fault_class"]),
            "detectors": tuple(record["detectors"]),
        }
        return cls(**{**record, **fixed})


Told = TypeVar("Told", Diagnosis, Finding)


def moved(told: Told, seconds: float) -> Told:
    """The same on a wall clock that was set by so much."""
    return replace(told, onset=told.onset + seconds, detected_at=told.detected_at + seconds) if seconds else told


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What the newest samples show of one replica. None: not known."""

    requests: int | None = None  # unfinished ones that it holds
    tokens: int | None = None  # of these, and of finished ones that nobody has acknowledged yet
    rss_bytes: int = 0  # of all its ranks
    available_bytes: int | None = None  # memory that its node could still give to processes

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        return cls(**{k: v for k, v in record.items() if k in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """A failure unit at planning time; a later incarnation is not a target."""

    replica: ReplicaId
    incarnation: int
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    incident_id: IncidentId
    action: ActionKind
    targets: tuple[PlanTarget, ...]
    because: str
    also_hit: tuple[str, ...] = ()
    """Other replicas that the action would disturb, as text."""
    lent: tuple[PlanTarget, ...] = ()
    """Healthy replicas that end and lend their nodes to targets, until nodes are free for them."""
    also_ends: tuple[PlanTarget, ...] = ()
    """Replicas that end with the targets though nothing is wrong with them: the guards count them."""
    process: ProcessId | None = None
    """Of an action on one process that belongs to no replica."""

    @property
    def ends(self) -> frozenset[str]:
        """All replicas that the action ends but lenders, which have a guard of their own."""
        return frozenset(str(t.replica) for t in (*self.targets, *self.also_ends))

    @property
    def intent(self) -> str:
        """What it does, to follow `would`: `replace trainer/1#1 on node-3`."""
        # Replicas of a job that rolecall did not start have no incarnation number.
        names = (f"{t.replica}{f'#{t.incarnation}' if t.incarnation else ''} on {t.node}" for t in self.targets)
        what = ", ".join(names)
        match self.action:
            case ActionKind.TOLERATE:
                return f"take no action ({self.because})"
            case ActionKind.REPLACE_REPLICA:
                return f"replace {what}"
            case ActionKind.REPLACE_NODE:
                lent = ", ".join(f"{t.node}, which {t.replica}#{t.incarnation} lends" for t in self.lent)
                return f"move {what} to {lent or 'another node'}"
            case ActionKind.RESTART_ROLE:
                return f"restart all replicas of a role: {what}"
            case ActionKind.RESTART_JOB:
                return "restart the job from its newest checkpoint"
            case ActionKind.END_ORPHAN if self.process is not None:
                return f"end the orphaned process {self.process.pid} on {self.process.node}"
        return f"{in_words(self.action)} {what}".rstrip()

    @property
    def words(self) -> str:
        """`replace replica of rollout/1#2`, `restart job`."""
        if self.action is ActionKind.RESTART_JOB:
            return in_words(self.action)
        if self.process is not None:
            return f"{in_words(self.action)}: process {self.process.pid} on {self.process.node}"
        targets = ", ".join(f"{t.replica}#{t.incarnation}" if t.incarnation else t.replica for t in self.targets)
        lent = ", ".join(f"{t.replica}#{t.incarnation}" for t in self.lent)
        borrowing = f" by that of {lent}" if lent else ""
        return f"{in_words(self.action)} of {targets}{borrowing}" if targets else in_words(self.action)

    @property
    def digest(self) -> str:
        """An approval is bound to it: action, targets and lenders with incarnations, and the incident."""
        what = [self.incident_id, str(self.action), [[t.replica, t.incarnation, t.node] for t in self.targets]]
        what += [[[t.replica, t.incarnation, t.node] for t in self.lent]] if self.lent else []
        what += [str(self.process)] if self.process is not None else []
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "action": str(self.action), "digest": self.digest}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        fixed: dict[str, Any] = {
            "action": ActionKind(record["action"]),
            "targets": tuple(PlanTarget(**t) for t in record["targets"]),
            "also_hit": tuple(record["also_hit"]),
            "lent": tuple(PlanTarget(**t) for t in record.get("lent", ())),  # absent in older journals, as the next
            "also_ends": tuple(PlanTarget(**t) for t in record.get("also_ends", ())),
            "process": ProcessId(**record["process"]) if record.get("process") else None,
        }
        return cls(**{**{k: v for k, v in record.items() if k != "digest"}, **fixed})
