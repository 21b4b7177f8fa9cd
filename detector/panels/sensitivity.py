"""The smallest effect that detectors would have named in a healthy panel, found by trying it out.

A trial adds a lasting shift to one metric of one machine, in a copy of the panel, and runs the same detectors over it.
The smallest of `SPREADS` that names the machine is found by bisection: a larger shift is not harder to see. Machines,
metrics and directions are drawn at random, half of the trials begin at the first sample and half in the middle. The
effect that is reported is named in at least four of five trials.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Panel, PanelDetector, Tracker

SPREADS = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 24.0)
"""Shifts that are tried, in spreads of the metric."""
NUM_TRIALS = 5
"""For each onset."""
NAMED_SHARE = 0.8
NUM_SPREAD_VALUES = 10_000_000
"""Of a metric, for its spread: of a larger panel, only every second tick counts, or every third, and so on."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a Gaussian per median absolute deviation."""


class Onset(StrEnum):
    FIRST_SAMPLE = "from the first sample on"
    MIDDLE = "from the middle on"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestEffect:
    """`spreads`: the smallest shift that `NAMED_SHARE` of the trials name, `ticks`: at the latest so many ticks after
    its onset. Both None: not even the largest of `SPREADS` is. `num_named`: trials that name the shift, or the largest
    one; `num_trials`: those that ended in time, without all `NUM_TRIALS` of which it says nothing."""

    panel: str
    onset: Onset
    spreads: float | None
    ticks: int | None
    num_named: int
    num_trials: int

    @property
    def is_complete(self) -> bool:
        """Whether all trials ended in time: fewer say nothing."""
        return self.num_trials == NUM_TRIALS

    @property
    def text(self) -> str:
        if not self.is_complete:
            return f"{self.panel}: the smallest shift {self.onset} that would have been named was not found in time"
        trials = f"{self.num_named} of {self.num_trials} trials"
        if self.spreads is None:
            return f"{self.panel}: a shift of {SPREADS[-1]:g} spreads {self.onset} is named in only {trials}"
        where = f"of one metric on one machine, {self.onset} and for {self.ticks} ticks or longer"
        return f"{self.panel}: a shift of {self.spreads:g} spreads {where}, would have been named ({trials})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`unit`: one spread of the metric, negative for a shift downwards."""

    onset: Onset
    metric: int
    machine: int
    unit: float


def spreads_of(panel: Panel) -> NDArray[np.float64]:
    """(M,): of each metric, the robust standard deviation of its distances to the mean of the machines, over machines
    and ticks; it holds both how far machines stand apart and how they vary. NaN where nothing differs."""
    num_machines = len(panel.shape.machines)
    of_distance = MAD_TO_SIGMA / math.sqrt(1 - 1 / num_machines) if num_machines > 1 else math.nan
    spreads = np.full(len(panel.values), np.nan)
    every = -(-len(panel.at) * num_machines // NUM_SPREAD_VALUES)
    for metric, values in enumerate(panel.values[:, ::every]):
        seen = values[np.isfinite(values).any(axis=1)].astype(np.float64)
        if not len(seen):
            continue
        apart = np.abs(seen - np.nanmean(seen, axis=1, keepdims=True))
        spreads[metric] = of_distance * float(np.nanmedian(apart))
    return np.where(spreads > 0, spreads, np.nan)


def trials_of(panel: Panel, rng: np.random.Generator, num: int = NUM_TRIALS) -> list[Trial]:
    """`num` trials for each onset, alternating; none if no metric has a spread."""
    spreads = spreads_of(panel)
    metrics = np.flatnonzero(np.isfinite(spreads))
    if not len(metrics):
        return []
    trials = []
    for onset in [*Onset] * num:
        metric, machine = int(rng.choice(metrics)), int(rng.integers(len(panel.shape.machines)))
        unit = float(spreads[metric]) * float(rng.choice((-1.0, 1.0)))
        trials.append(Trial(onset=onset, metric=metric, machine=machine, unit=unit))
    return trials


def not_tried(panel: Panel) -> tuple[SmallestEffect, ...]:
    """Of a panel for whose trials there is no time."""
    return tuple(_effect(panel.shape.name, onset, ()) for onset in Onset)


def smallest_effects(
    panel: Panel,
    detectors: Sequence[PanelDetector],
    rng: np.random.Generator,
    stopped: Callable[[], bool],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[SmallestEffect, ...]:
    """One for each onset. `stopped` is asked at each tick; a trial that it ends does not count. Empty if no metric of
    the panel has a spread."""
    found: dict[Onset, list[tuple[float, int]]] = {onset: [] for onset in Onset}
    trials = trials_of(panel, rng)
    begun = _begun(panel, detectors, stopped) if trials else {}
    for number, trial in enumerate(trials, start=1):
        progress(f"{panel.shape.name}: the smallest effect that would be named, trial {number} of {len(trials)}")
        smallest = _smallest(panel, begun[trial.onset], trial, stopped)
        if stopped():
            break
        found[trial.onset].append(smallest)
    return tuple(_effect(panel.shape.name, onset, its) for onset, its in found.items()) if trials else ()


def _effect(panel: str, onset: Onset, smallest: Sequence[tuple[float, int]]) -> SmallestEffect:
    """`smallest`: of each trial, the smallest named shift (infinite: none), and after how many ticks."""
    spreads, ticks = None, None
    if smallest:
        enough = sorted(smallest)[math.ceil(NAMED_SHARE * len(smallest)) - 1][0]
        if math.isfinite(enough):
            spreads, ticks = enough, max(t for x, t in smallest if x <= enough)
    num_named = sum(x <= (spreads or SPREADS[-1]) for x, _ in smallest)
    return SmallestEffect(
        panel=panel, onset=onset, spreads=spreads, ticks=ticks, num_named=num_named, num_trials=len(smallest)
    )


def _begun(panel: Panel, detectors: Sequence[PanelDetector], stopped: Callable[[], bool]) -> dict[Onset, list[Tracker]]:
    """The detectors' trackers as they are at each onset: the same for all of its trials."""
    trackers = [d.track(panel.shape) for d in detectors]
    begun = {Onset.FIRST_SAMPLE: deepcopy(trackers), Onset.MIDDLE: trackers}
    for at, values in islice(panel.ticks(), len(panel.at) // 2):
        if stopped():
            break
        for tracker in trackers:
            tracker.tick(at, values)
    return begun


def _smallest(panel: Panel, begun: Sequence[Tracker], trial: Trial, stopped: Callable[[], bool]) -> tuple[float, int]:
    low, high, best = 0, len(SPREADS), (math.inf, 0)
    while low < high and not stopped():
        middle = (low + high) // 2
        ticks = _ticks_until_named(panel, begun, trial, SPREADS[middle], stopped)
        if ticks is None:
            low = middle + 1
        else:
            high, best = middle, (SPREADS[middle], ticks)
    return best


def _ticks_until_named(
    panel: Panel, begun: Sequence[Tracker], trial: Trial, spreads: float, stopped: Callable[[], bool]
) -> int | None:
    """From the onset; None if the machine alone is never named, or `stopped`."""
    onset = 0 if trial.onset is Onset.FIRST_SAMPLE else len(panel.at) // 2
    who = (panel.shape.suspect(trial.machine),)
    trackers = deepcopy(begun)
    shift = np.float32(spreads * trial.unit)
    for ticks, (at, values) in enumerate(islice(panel.ticks(), onset, None), start=1):
        if stopped():
            return None
        shifted = values.copy()
        shifted[trial.metric, trial.machine] += shift
        # All trackers see each tick.
        reported = [f for tracker in trackers for f in tracker.tick(at, shifted)]
        if any(f.suspects == who for f in reported):
            return ticks
    return None
