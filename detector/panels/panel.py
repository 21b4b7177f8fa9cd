"""A panel: the series of comparable machines on one grid of ticks, the input of every panel detector.

Machines of a panel are peers: same job, same role, same phase. Recordings, Prometheus servers and the fleet simulator
all yield panels, so tests on recordings run the same code as production. A detector gets one tick at a time; its output
at a tick depends only on that tick and earlier ones.

A live source yields the ticks of all its panels, oldest first: a Prometheus server (detector/sources/prometheus.py),
the agents of a run (detector/sources/agent_panels.py), or a recording (detector/sources/recording.py).
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.ids import NodeId
from rolecall.core.text import node_text

Floats = NDArray[np.float32]
Times = NDArray[np.float64]

FALSE_ALARMS_PER_1000_MACHINE_DAYS = 100.0
"""The published operating point of panel detectors: one false alarm in ten days of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Machine:
    """One column of a panel: a replica, or one of its ranks or GPUs if the recording distinguishes them."""

    node: str
    replica: str = ""
    rank: int | None = None
    gpu: int | None = None

    @property
    def name(self) -> str:
        """For text: `trainer/1 rank 3 gpu 0 (node m07)`."""
        rank = f" rank {self.rank}" if self.rank is not None else ""
        gpu = f" gpu {self.gpu}" if self.gpu is not None else ""
        return (
            f"{self.replica}{rank}{gpu} ({node_text(self.node)})"
            if self.replica
            else f"{node_text(self.node)}{rank}{gpu}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelShape:
    """Known before the first tick. `interval_seconds`: nominal time between ticks."""

    role: str
    metrics: tuple[str, ...]
    machines: tuple[Machine, ...]
    interval_seconds: float
    job: str = ""
    phase: str = ""
    further_ranks: bool = False
    """Without the first ranks of replicas, which do more than the others."""

    @property
    def name(self) -> str:
        """For text: `role trainer, phase compute`."""
        job = f"job {self.job}, " if self.job else ""
        further = ", further ranks" if self.further_ranks else ""
        return f"{job}role {self.role}{further}" + (f", phase {self.phase}" if self.phase else "")

    def suspect(self, machine: int) -> Suspect:
        """The machine of this column as a suspect."""
        m = self.machines[machine]
        return Suspect(node=NodeId(m.node), role=self.role, replica=m.replica, rank=m.rank, gpu=m.gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`at`: (T,) seconds, increasing. `values`: (M, T, N) float32 of metric, tick, machine; NaN is missing, and no
    value is infinite."""

    shape: PanelShape
    at: Times
    values: Floats

    def ticks(self) -> Iterator[tuple[float, Floats]]:
        """(seconds, values (M, N)) in order."""
        for t in range(len(self.at)):
            yield float(self.at[t]), self.values[:, t, :]


class Tracker(Protocol):
    """State of a detector on one panel."""

    def tick(self, at: float, values: Floats) -> list[Finding]:
        """Processes the next tick (seconds; values (M, N), NaN is missing); returns findings that begin with it.

        `values` is only read, and only during the call. A persistent fault is reported once.
        """
        ...


class PanelDetector(Protocol):
    """Settings, and optionally models: creates one tracker per panel."""

    @property
    def name(self) -> str: ...

    def track(self, shape: PanelShape) -> Tracker: ...


def findings(detector: PanelDetector, panel: Panel) -> list[Finding]:
    """All findings of an online detector over a whole panel, in order."""
    tracker = detector.track(panel.shape)
    return [f for at, values in panel.ticks() for f in tracker.tick(at, values)]


Stopped = Callable[[], bool]
"""Whether to stop now. Sources poll it at least every PAUSE_SECONDS."""
PanelKey = tuple[str, str, str, bool, bool]
"""Job, role, phase, and whether its machines have a rank and a gpu; as in recordings."""
PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelTick:
    """`values`: (M, N) float32 of metric and machine of `shape`; NaN is missing, and no value is infinite."""

    shape: PanelShape
    at: float
    values: Floats


class PanelSource(Protocol):
    def ticks(self, stopped: Stopped) -> Iterator[PanelTick]:
        """Ticks of all panels, each panel's in order. Ends when there are no more, or soon after `stopped()`.

        The shape of a panel may change from tick to tick. Raises UnreadableInput.
        """
        ...


def panel_key(shape: PanelShape) -> PanelKey:
    first = shape.machines[0]
    return shape.job, shape.role, shape.phase, first.rank is not None, first.gpu is not None


def ticks_of(panels: Sequence[Panel]) -> Iterator[PanelTick]:
    """The ticks of several panels in time order."""

    def of(panel: Panel) -> Iterator[PanelTick]:
        return (PanelTick(shape=panel.shape, at=at, values=values) for at, values in panel.ticks())

    return heapq.merge(*map(of, panels), key=lambda tick: tick.at)


def pause(clock: Clock, seconds: float, stopped: Stopped) -> None:
    """Sleeps, and returns early if stopped."""
    until = clock.monotonic() + seconds
    while not stopped() and (left := until - clock.monotonic()) > 0:
        clock.sleep(min(left, PAUSE_SECONDS))


Standing = tuple[NDArray[np.floating[Any]], float]
"""Scores (N,) at the last tick (NaN: unknown), and the threshold (infinite while there is none)."""


@runtime_checkable
class ScoredTracker(Protocol):
    """A tracker that exposes each machine's score and the threshold."""

    @property
    def scores(self) -> NDArray[np.floating[Any]]: ...

    @property
    def threshold(self) -> float: ...


def standing(tracker: Tracker) -> Standing | None:
    """None for a tracker without scores."""
    return (tracker.scores, tracker.threshold) if isinstance(tracker, ScoredTracker) else None


@runtime_checkable
class SeriesTracker(Protocol):
    """A tracker that follows each series over time. One whose samples are more than `NEAR_TICKS` apart hardly counts;
    of fewer than `machines_min` machines, none is judged."""

    machines_min: ClassVar[int]


NEAR_TICKS = 2


@dataclass(slots=True)
class SeenValues:
    """Whether a panel's series have values, and whether any of them ever changed: a series that never does says
    nothing about its machine. The first value of each is compared with the later ones. `compared` (N,): ticks at which
    each machine had a value of a metric that two others had as well, of `num_ticks` since its machines are the same.
    `near` (M, N): samples of each series at most `NEAR_TICKS` after the one before; `far`: the others but the first."""

    present: bool = False
    varies: bool = False
    compared: NDArray[np.int64] | None = None
    num_ticks: int = 0
    near: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))
    far: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))
    _apart: Floats = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))  # ticks since the last sample
    _first: Floats | None = None

    def tick(self, values: Floats) -> None:
        """Values (M, N) of one tick."""
        known = np.isfinite(values)
        if self.compared is None or len(self.compared) != values.shape[1]:
            self.compared, self.num_ticks = np.zeros(values.shape[1], dtype=np.int64), 0
        if self.near.shape != values.shape:
            self.near, self.far = np.zeros((2, *values.shape), dtype=np.int32)
            self._apart = np.full(values.shape, np.inf, dtype=np.float32)
        self.num_ticks += 1
        self.compared += known[known.sum(axis=1) > 2].any(axis=0)
        self._apart += 1
        self.near += known & (self._apart <= NEAR_TICKS)
        self.far += known & (self._apart > NEAR_TICKS) & np.isfinite(self._apart)
        self._apart[known] = 0
        if self.varies:
            return
        first = values if self._first is None or self._first.shape != values.shape else self._first
        self.present |= not bool(np.isnan(values).all())
        self.varies = bool((np.isfinite(first) & np.isfinite(values) & (first != values)).any())
        self._first = np.where(np.isnan(first), values, first)

    def rare(self, axis: int) -> list[int]:
        """Metrics (axis 0) or machines (1) most of whose series have samples that are mostly far apart."""
        rare, told = self.far > self.near, self.far + self.near > 0
        return [int(i) for i in np.flatnonzero(2 * rare.sum(axis=1 - axis) > told.sum(axis=1 - axis))]


def cannot_tell(shape: PanelShape, detector: str, tracker: Tracker, seen: SeenValues | None = None) -> str:
    """Why there is no verdict on this panel, and what would settle it; "" if there is one. `seen`: all of its values
    so far, where they are known."""
    num, stands = len(shape.machines), standing(tracker)
    if num == 1:
        return f"cannot tell for {shape.name}: one machine has no peers; two more would settle it"
    if num == 2:
        said = "of two peers that differ, only one that moved can be named"
        return f"cannot tell which for {shape.name}: {said}; a third would settle it"
    if seen is not None and not seen.present:
        return f"cannot tell for {shape.name}: none of its {num} machines has a value; samples of them would settle it"
    if seen is not None and not seen.varies:
        still = f"no metric ({_listed(shape.metrics)}) of its {num} machines ever changes, so nothing can differ"
        return f"cannot tell for {shape.name}: {still}; a longer time, or metrics that follow the work, would settle it"
    if stands is not None and math.isinf(stands[1]):
        if isinstance(tracker, SeriesTracker) and num < tracker.machines_min:
            few = f"detector {detector} needs {tracker.machines_min} machines, and there are {num}"
            return f"cannot tell for {shape.name}: {few}; more of them, or detector sequential, would settle it"
        so_far = f"detector {detector} has not seen enough of its {num} machines to know what is usual"
        return f"cannot tell for {shape.name}: {so_far}; a longer time would settle it"
    if seen is not None and seen.compared is not None:
        enough = min(COMPARED_TICKS_MIN, (seen.num_ticks + 1) // 2)
        alone = [m.name for m, ticks in zip(shape.machines, seen.compared, strict=True) if ticks < enough]
        if alone:
            few = f"have values of one metric beside two others at fewer than {enough} of {seen.num_ticks} ticks"
            who = f"{len(alone)} of its {num} machines ({_listed(alone)})"
            return f"cannot tell for {shape.name}: {who} {few}; times and metrics that overlap would settle it"
    if seen is not None and isinstance(tracker, SeriesTracker):
        rare = f"have samples more than {NEAR_TICKS} ticks apart, which say little to detector {detector}"
        if metrics := [shape.metrics[m] for m in seen.rare(axis=0)]:
            who = f"{len(metrics)} of its {len(shape.metrics)} metrics ({_listed(metrics)})"
            return f"cannot tell for {shape.name}: {who} {rare}; a recording of these alone would settle it"
        if machines := [shape.machines[n].name for n in seen.rare(axis=1)]:
            who = f"{len(machines)} of its {num} machines ({_listed(machines)})"
            return f"cannot tell for {shape.name}: {who} {rare}; samples as frequent as their peers' would settle it"
    return ""


COMPARED_TICKS_MIN = 16
"""The first ticks after which detector `sequential` judges."""
NUM_NAMES_SHOWN = 4


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NUM_NAMES_SHOWN
    return ", ".join(names[:NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
