"""The most recent observations of a detector and the state before them: a window that replays to the same diagnosis.

The history consists of two segments of half the configured length each. When a third begins the oldest is dropped, so
between half and all of the length is available. A segment stores the learned state at its start. Copying all subjects
at that moment would block the detector for seconds with sixteen thousand of them, so each is copied before its first
change (`MonitoredProcesses.before`); an unchanged subject still has its initial state.

The window of a large fleet is restricted to the suspects and some of their peers; the whole would be hundreds of
megabytes of JSON.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from rolecall.core.diagnosis import Suspect
from rolecall.core.telemetry import SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.codec import encode
from rolecall.detector.live.fleet import MonitoredProcesses
from rolecall.detector.live.subject import Key, MonitoredProcess

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
        subjects = self._subjects_then(fleet)
        if len(fleet.subjects) <= SUBJECTS_WHOLE_MAX:
            keep = None
            kept: Iterable[MonitoredProcess] = subjects.values()
        else:
            keep = _concerned(fleet, tuple(suspects))
            kept = [s for key, s in subjects.items() if key in keep]
        start = {**self._halves[0].learned, "subjects": [encode(s) for s in kept]}
        observations = (o for half in self._halves for o in half.observations)
        return start, [(o if keep is None else _narrowed(o, keep)).to_dict() for o in observations]

    def _subjects_then(self, fleet: MonitoredProcesses) -> Mapping[Key, MonitoredProcess]:
        """Every process in its state at the start of the older segment."""
        then: dict[Key, MonitoredProcess | None] = dict(fleet.subjects)
        for half in reversed(self._halves):
            then |= half.before
        return {key: s for key, s in then.items() if s is not None}


def _concerned(fleet: MonitoredProcesses, suspects: tuple[Suspect, ...]) -> set[Key]:
    """Keys of the suspects' processes and of some peers of each affected role."""
    replicas, nodes = {s.replica for s in suspects if s.replica}, {str(s.node) for s in suspects if s.node}
    accused = [s for s in fleet.subjects.values() if s.replica in replicas or s.node in nodes]
    roles = {s.role for s in accused} or {s.role for s in fleet.current()}
    peers = (s for role in sorted(roles) for s in islice(fleet.roster.of_role(role).values(), PEERS_KEPT))
    return {s.key for s in (*accused, *peers)}


def _narrowed(o: Observation, keep: set[Key]) -> Observation:
    batches = (_narrowed_batch(b, keep) for b in o.batches)
    return replace(o, batches=tuple(b for b in batches if b.processes))


def _narrowed_batch(batch: SampleBatch, keep: set[Key]) -> SampleBatch:
    return replace(batch, processes=tuple(p for p in batch.processes if (p.replica, p.rank, p.incarnation) in keep))
