"""A panel: the series of comparable machines on one grid of ticks, the input of every panel detector.

Machines of a panel are peers: same job, same role, same phase. Recordings, Prometheus servers and the fleet simulator
all yield panels, so tests on recordings run the same code as production. A detector gets one tick at a time; its output
at a tick depends only on that tick and earlier ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.ids import NodeId

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
        return f"{self.replica}{rank}{gpu} (node {self.node})" if self.replica else f"node {self.node}{rank}{gpu}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelShape:
    """Known before the first tick. `interval_seconds`: nominal time between ticks."""

    role: str
    metrics: tuple[str, ...]
    machines: tuple[Machine, ...]
    interval_seconds: float
    job: str = ""
    phase: str = ""

    @property
    def name(self) -> str:
        """For text: `role trainer, phase compute`."""
        job = f"job {self.job}, " if self.job else ""
        return f"{job}role {self.role}" + (f", phase {self.phase}" if self.phase else "")

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
