"""The most recent observations of a detector and the state before them: a window that replays to the same diagnosis.

Two segments of half the configured length each; when a third begins the oldest is dropped. A segment stores the learned
state at its start. Copying all subjects at that moment would block the detector for seconds with sixteen thousand of
them, so each is copied before its first change (`MonitoredProcesses.before`). The window of a large fleet is restricted
to the suspects and some of their peers; the whole would be hundreds of megabytes of JSON.

Windows are plain JSON. Only the classes listed here are encoded or constructed; nothing is unpickled. A dataclass
becomes {"@": name, ...}, a mapping [["k", "v"], ...] under "@map", a tuple, set or deque a tagged list.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any

from rolecall.core.diagnosis import Diagnosis, Finding, Suspect
from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import AgentEvent, ProcessSample
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.monitored_process import (
    Key,
    MonitoredProcess,
    NotFinite,
    ProgressClocks,
    ProgressGaps,
    SlowMeter,
)
from rolecall.detector.live.processes import MonitoredProcesses, ReceivedException
from rolecall.detector.live.stages.evidence.nccl_ras import StalledCommunicator
from rolecall.detector.live.stages.evidence.panels import PanelFault
from rolecall.detector.live.stages.nodes.full_disk import FullDisk
from rolecall.detector.live.stages.numbers.collapse import CollapseWatch, TrainingHistory
from rolecall.detector.live.stages.progress.engine import EngineProgress
from rolecall.detector.live.stages.progress.skipped import UsualCollectives
from rolecall.detector.live.stages.progress.slow import LoadBaseline, SlowState
from rolecall.formats.node_faults import NodeFault

PLAIN: dict[str, type] = {
    c.__name__: c
    for c in (
        *(
            CollapseWatch,
            EngineProgress,
            FullDisk,
            LoadBaseline,
            MonitoredProcess,
            MonitoredProcesses,
            NodeFault,
            NotFinite,
        ),
        *(PanelFault, ProcessId, ProgressClocks, ProgressGaps, ReceivedException, SlowMeter, SlowState),
        *(StalledCommunicator, UsualCollectives),
    )
}
"""Encoded field by field; derived fields (`init=False`) are recomputed."""
OWN: dict[str, tuple[type, Callable[[dict[str, Any]], Any]]] = {
    "AgentEvent": (AgentEvent, AgentEvent.from_dict),
    "Diagnosis": (Diagnosis, Diagnosis.from_dict),
    "Finding": (Finding, Finding.from_dict),
    "ProcessSample": (ProcessSample, ProcessSample.from_dict),
    "TrainingHistory": (TrainingHistory, TrainingHistory.from_dict),
}
"""Classes with their own `to_dict` and `from_dict`."""


def encode(value: Any) -> Any:
    if value is None or (isinstance(value, (str, bool, int)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"@": "float", "v": repr(value)}
    if isinstance(value, Enum):
        return str(value)
    name = type(value).__name__
    if name in OWN:
        return {"@": name, "v": value.to_dict()}
    if name in PLAIN and is_dataclass(value):
        return {"@": name, **{f.name: encode(getattr(value, f.name)) for f in fields(value) if f.init}}
    if isinstance(value, dict):
        return {"@": "map", "v": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, deque):
        return {"@": "deque", "n": value.maxlen, "v": [encode(v) for v in value]}
    if isinstance(value, (set, frozenset)):
        return {"@": "set", "v": [encode(v) for v in sorted(value)]}
    if isinstance(value, tuple):
        return {"@": "tuple", "v": [encode(v) for v in value]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    raise TypeError(f"detector state holds a {name}, which has no stored form")


def decode(value: Any) -> Any:
    """Raises ValueError on an unknown tag."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("@")
    if tag == "map":
        return {decode(k): decode(v) for k, v in value["v"]}
    if tag == "deque":
        return deque((decode(v) for v in value["v"]), maxlen=value["n"])
    if tag == "set":
        return {decode(v) for v in value["v"]}
    if tag == "tuple":
        return tuple(decode(v) for v in value["v"])
    if tag == "float":
        return float(value["v"])
    if tag in OWN:
        return OWN[tag][1](value["v"])
    if tag in PLAIN:
        wanted = {f.name for f in fields(PLAIN[tag]) if f.init}
        return PLAIN[tag](**{k: decode(v) for k, v in value.items() if k in wanted})
    raise ValueError(f"unknown tag {tag!r} in stored detector state")


OBSERVATIONS_KEPT_MAX = 4096
"""Maximum number of observations in a window, regardless of its length."""
SAMPLES_KEPT_MAX = 500_000
"""Maximum number of process samples, 0.8 KiB each: half a minute of sixteen thousand ranks."""
SUBJECTS_WHOLE_MAX = 1024
"""Windows with more subjects than this are narrowed."""
PEERS_KEPT = 256
"""Peers per affected role in a narrowed window."""


@dataclass(slots=True)
class _HistorySegment:
    began: float
    learned: dict[str, Any]
    before: dict[Key, MonitoredProcess | None] = field(default_factory=dict)
    observations: deque[Observation] = field(default_factory=deque)
    num_samples: int = 0

    def full(self, now: float, seconds: float) -> bool:
        return (
            now - self.began > seconds
            or len(self.observations) >= OBSERVATIONS_KEPT_MAX // 2
            or self.num_samples >= SAMPLES_KEPT_MAX // 2
        )


class ObservationHistory:
    """History of one detector. Call `add` before the fleet ingests the observation."""

    def __init__(self, window_seconds: float) -> None:
        self._seconds = window_seconds / 2
        self._halves: deque[_HistorySegment] = deque(maxlen=2)

    def add(self, observation: Observation, fleet: MonitoredProcesses, learned: Callable[[], dict[str, Any]]) -> None:
        """`learned` returns all state except the subjects, as JSON."""
        newest = self._halves[-1] if self._halves else None
        if newest is None or newest.full(observation.wall_at, self._seconds):
            newest = _HistorySegment(observation.wall_at, learned())
            self._halves.append(newest)
            fleet.before = newest.before
        newest.observations.append(observation)
        newest.num_samples += sum(len(b.processes) for b in observation.batches)

    def window(
        self, fleet: MonitoredProcesses, suspects: Iterable[Suspect] = ()
    ) -> tuple[dict[str, Any] | None, list[Any]]:
        """The initial state (None before the first observation) and the observations since, both as JSON."""
        if not self._halves:
            return None, []
        # Every process in its state at the start of the older segment; None: it was created since.
        then: dict[Key, MonitoredProcess | None] = dict(fleet.subjects)
        for half in reversed(self._halves):
            then |= half.before
        subjects = {key: s for key, s in then.items() if s is not None}
        if len(fleet.subjects) <= SUBJECTS_WHOLE_MAX:
            keep = None
            kept: Iterable[MonitoredProcess] = subjects.values()
        else:
            keep = _concerned(fleet, tuple(suspects))
            kept = [s for key, s in subjects.items() if key in keep]
        start = {**self._halves[0].learned, "subjects": [encode(s) for s in kept]}
        observations = (o for half in self._halves for o in half.observations)
        return start, [(o if keep is None else _narrowed(o, keep)).to_dict() for o in observations]


def _concerned(fleet: MonitoredProcesses, suspects: tuple[Suspect, ...]) -> set[Key]:
    """Keys of the suspects' processes and of some peers of each affected role."""
    replicas, nodes = {s.replica for s in suspects if s.replica}, {str(s.node) for s in suspects if s.node}
    accused = [s for s in fleet.subjects.values() if s.replica in replicas or s.node in nodes]
    roles = {s.role for s in accused} or {s.role for s in fleet.current()}
    peers = (s for role in sorted(roles) for s in islice(fleet.roster.of_role(role).values(), PEERS_KEPT))
    return {s.key for s in (*accused, *peers)}


def _narrowed(o: Observation, keep: set[Key]) -> Observation:
    kept = ((b, tuple(p for p in b.processes if (p.replica, p.rank, p.incarnation) in keep)) for b in o.batches)
    return replace(o, batches=tuple(replace(b, processes=processes) for b, processes in kept if processes))
