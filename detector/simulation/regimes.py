"""Simulated panels of every size, interval and length: where a detector begins, not where it has seen a long past.

A regime is a number of machines, a number of metrics, and a schedule (interval and length). A case is one recording of
a regime: healthy, or with one faulty machine whose fault began before the first sample, in the first tenth, or later.
`fleet` simulates large tasks at one second with a long healthy past; its noise and gaps are used here, per tick.

Value of metric m at tick t on machine n, with `sigma_m` as in `fleet`:

    level_m + sigma_m * (offset_mn + noise_mtn + gain_mn * shared_mt + effect_mtn)

- Of many metrics most say nothing new, as in real exporters: of 138, 40 are independent, 58 follow one of these (a
  duplicate with a unit of its own and little noise) and 40 stand still. Of those that stand still, some have another
  value on one healthy machine (more memory, another driver): an inventory is no fault.
- One metric in six has offsets that are large against its noise: machines that never were equal.
- An effect of k spreads is k * sqrt(1 + offsets' variance) * sigma_m: a fault exceeds what its metric's offsets are.

Sources: [issue] the specification of this benchmark; all other numbers are our plausible choice. A seed gives the same
cases on every machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats, Machine, Panel, PanelShape
from rolecall.detector.simulation.fleet import (
    CHUNK_TICKS,
    EPOCH_SECONDS,
    FINE,
    MARGIN_SECONDS,
    MISSING_RATIO_SINGLE,
    ROLE,
    SIGMA_OF_LEVEL,
    STEP_SECONDS_MIN,
    Noise,
    Onset,
    common,
    gone,
    skews,
)

NUM_MACHINES = (3, 4, 12, 79, 700)  # [issue]
NUM_METRICS = (2, 21, 138)  # [issue]

INDEPENDENT_MAX, DUPLICATES_SHARE = 40, 0.6
"""Metrics beyond `INDEPENDENT_MAX` say nothing new: this share of them follows another, the others stand still."""
DUPLICATE_NOISE = (0.05, 0.3)
"""Own noise of a duplicate, peer standard deviations."""
STILL_DIFFERS = 0.2
"""Share of still metrics in which one machine has another value."""
LARGE_OFFSET_SHARE, LARGE_OFFSETS = 1 / 6, (4.0, 20.0)
"""Standard deviation of large offsets over machines, peer standard deviations; log-uniform."""
GAIN_SPREAD = 0.02
NUM_METRICS_HIT_MAX = 3
EFFECTS_LARGE, EFFECTS_SMALL = (6.0, 20.0), (2.0, 6.0)
"""[issue] Spreads; log-uniform."""
RAMP_TICKS = 24
INTERMITTENT_TICKS, INTERMITTENT_DUTY = 30, 0.5
LASTS_MIN = 0.3
"""A fault that began later lasts at least this share of the recording, in half of the cases until its end."""
LATE_SHARE, LATE_MAX = 0.1, 0.1
"""Share of cases in which one machine's samples begin later, up to this share of the recording."""
SHIFTS_PER_RECORDING, SHIFT_SIGMAS = 2.0, (2.0, 10.0)
"""Level shifts of the whole panel, in a third of its metrics each."""
DAY_SECONDS = 86_400.0

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    name: str
    interval_seconds: float
    num_ticks: int

    @property
    def seconds(self) -> float:
        return self.interval_seconds * self.num_ticks


SCHEDULES = (  # [issue]
    Schedule(name="15 min at 1 s", interval_seconds=1.0, num_ticks=900),
    Schedule(name="1 h at 15 s", interval_seconds=15.0, num_ticks=240),
    Schedule(name="3 h at 15 s", interval_seconds=15.0, num_ticks=720),
    Schedule(name="2 days at 5 min", interval_seconds=300.0, num_ticks=576),
)


class OnsetTime(StrEnum):
    """When a fault begins: [issue]."""

    BEFORE = "before the first sample"
    FIRST_TENTH = "in the first tenth"
    LATER = "later"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    num_machines: int
    num_metrics: int
    schedule: Schedule

    @property
    def name(self) -> str:
        return f"{self.num_machines} machines, {self.num_metrics} metrics, {self.schedule.name}"


REGIMES = tuple(
    Regime(num_machines=n, num_metrics=m, schedule=s) for n in NUM_MACHINES for m in NUM_METRICS for s in SCHEDULES
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeFault:
    """`start`, `end`: ticks, `start` 0 if it began before the first sample; `effect_spreads` on each of `metrics`
    (indices of independent ones), with `signs`."""

    machine: int
    onset: OnsetTime
    start: int
    end: int
    effect_spreads: float
    metrics: tuple[int, ...]
    signs: tuple[int, ...]
    course: Onset


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeCase:
    """One recording. `index`: its number among the cases of this regime and seed."""

    seed: int
    index: int
    regime: Regime
    fault: RegimeFault | None

    @property
    def shape(self) -> PanelShape:
        machines = tuple(Machine(node=f"m{n:04d}", replica=f"{ROLE}/{n}") for n in range(self.regime.num_machines))
        return PanelShape(
            job=f"case-{self.index:03d}",
            role=ROLE,
            metrics=tuple(f"metric_{m:03d}" for m in range(self.regime.num_metrics)),
            machines=machines,
            interval_seconds=self.regime.schedule.interval_seconds,
        )


def num_independent(num_metrics: int) -> int:
    return min(num_metrics, INDEPENDENT_MAX)


def cases(
    regime: Regime, *, seed: int, num_faulty: int, num_healthy: int, effects: tuple[float, float] = EFFECTS_LARGE
) -> tuple[RegimeCase, ...]:
    """Cases with a fault, in which the three times of onset take turns, then healthy ones."""
    base = [seed, regime.num_machines, regime.num_metrics, SCHEDULES.index(regime.schedule)]
    made = []
    for index in range(num_faulty + num_healthy):
        fault = None
        if index < num_faulty:
            rng = np.random.default_rng([*base, index, round(100 * effects[0])])
            fault = _fault(rng, regime, list(OnsetTime)[index % len(OnsetTime)], effects)
        made.append(RegimeCase(seed=seed, index=index, regime=regime, fault=fault))
    return tuple(made)


def _fault(rng: np.random.Generator, regime: Regime, onset: OnsetTime, effects: tuple[float, float]) -> RegimeFault:
    num_ticks, num = regime.schedule.num_ticks, num_independent(regime.num_metrics)
    hit = rng.choice(num, min(num, int(rng.integers(1, NUM_METRICS_HIT_MAX + 1))), replace=False)
    begin = {
        OnsetTime.BEFORE: 0,
        OnsetTime.FIRST_TENTH: int(rng.integers(1, num_ticks // 10)),
        OnsetTime.LATER: int(rng.integers(num_ticks // 4, round((1 - LASTS_MIN) * num_ticks))),
    }[onset]
    end = num_ticks
    if onset is not OnsetTime.BEFORE and rng.random() < 0.5:
        end = int(rng.integers(begin + round(LASTS_MIN * num_ticks), num_ticks + 1))
    course = list(Onset)[int(rng.choice(3, p=(0.6, 0.2, 0.2)))]
    if onset is OnsetTime.BEFORE and course is Onset.RAMP:
        course = Onset.STEP
    return RegimeFault(
        machine=int(rng.integers(regime.num_machines)),
        onset=onset,
        start=begin,
        end=end,
        effect_spreads=float(effects[0] * (effects[1] / effects[0]) ** rng.random()),
        metrics=tuple(sorted(int(m) for m in hit)),
        signs=tuple(int(s) for s in rng.choice([-1, 1], len(hit))),
        course=course,
    )


def panel(case: RegimeCase) -> Panel:
    """The whole case at once: four bytes per machine, metric and tick."""
    parts = list(chunks(case))
    at, values = np.concatenate([p.at for p in parts]), np.concatenate([p.values for p in parts], axis=1)
    return Panel(shape=parts[0].shape, at=at, values=values)


def chunks(case: RegimeCase) -> Iterator[Panel]:
    """The case in order, `CHUNK_TICKS` at a time; values do not depend on the reader."""
    regime, schedule, shape = case.regime, case.regime.schedule, case.shape
    places = [regime.num_machines, regime.num_metrics, SCHEDULES.index(schedule), case.index, int(case.fault is None)]
    rng = np.random.default_rng([case.seed, *places, 1])
    num, size = num_independent(regime.num_metrics), (num_independent(regime.num_metrics), regime.num_machines)
    noise = Noise(rng, size)
    large = rng.random(num) < LARGE_OFFSET_SHARE
    wide = LARGE_OFFSETS[0] * (LARGE_OFFSETS[1] / LARGE_OFFSETS[0]) ** rng.random(num)
    offset_sigmas = np.where(large, wide, np.sqrt(np.mean(noise.offset**2, axis=1)))
    offset = np.where(large[:, None], wide[:, None] * rng.standard_normal(size), noise.offset)
    level = 10 ** rng.uniform(-1, 11, num)
    sigma = SIGMA_OF_LEVEL * level
    # Offsets of twenty sigma are 40 % of the level: the level grows with them, so that values stay positive.
    level *= 1 + offset_sigmas / 4
    gain = 1 + GAIN_SPREAD * rng.standard_normal(size)
    shared = _shared(rng, schedule, num, regime.num_machines)
    others = _Uninformative(rng, num, regime)
    missing_runs = gone(rng, schedule.num_ticks, regime.num_machines)
    if rng.random() < LATE_SHARE:
        late = int(rng.integers(1, max(2, round(LATE_MAX * schedule.num_ticks))))
        missing_runs[:late, int(rng.integers(regime.num_machines))] = True
    for start in range(0, schedule.num_ticks, CHUNK_TICKS):
        ticks = np.arange(start, min(start + CHUNK_TICKS, schedule.num_ticks))
        own = noise.ahead(rng)[: len(ticks)].transpose(1, 0, 2) + offset[:, None, :]
        own += gain[:, None, :] * shared(ticks)
        if case.fault:
            _hit(own, case.fault, ticks, np.sqrt(1 + offset_sigmas**2))
        values = (level[:, None, None] + sigma[:, None, None] * own).astype(np.float32)
        values = others.extended(rng, values, own)
        missing = rng.random(values.shape, dtype=np.float32) < MISSING_RATIO_SINGLE
        values[missing | missing_runs[ticks][None]] = np.nan
        at = EPOCH_SECONDS + ticks * schedule.interval_seconds
        yield Panel(shape=shape, at=at.astype(np.float64), values=values)


class _Shared:
    """The signal of all machines, peer standard deviations: `(ticks) -> (M, T, N or 1)`."""

    def __init__(self, alike: Floats, skew: NDArray[np.int64] | None) -> None:
        self._alike, self._skew = alike, skew

    def __call__(self, ticks: NDArray[np.int64]) -> Floats:
        if self._skew is None:
            return self._alike[:, ticks, None]
        return self._alike[:, (ticks[:, None] + MARGIN_SECONDS) * FINE + self._skew]


def _shared(rng: np.random.Generator, schedule: Schedule, num: int, num_machines: int) -> _Shared:
    """At one second, the training step's phases as in `fleet`, seen by clocks that differ. At longer intervals its
    average, with what sampling leaves of it, load that follows the day, and level shifts."""
    waves = rng.uniform(-4, 4, num)
    if schedule.interval_seconds < STEP_SECONDS_MIN:
        most = max(num, 3)  # `common` shifts up to a third of the metrics at once
        alike = common(rng, schedule.num_ticks, np.resize(waves, most), rng.uniform(-6, 6, most))
        return _Shared(alike[:num], skews(rng, num_machines))
    ticks = np.arange(schedule.num_ticks)
    seconds = ticks * schedule.interval_seconds
    day = np.sin(2 * np.pi * (seconds / DAY_SECONDS + rng.random()))
    rest = rng.standard_normal(schedule.num_ticks)
    alike = waves[:, None] * day + rng.uniform(0, 1, (num, 1)) * rest
    for _ in range(int(rng.poisson(SHIFTS_PER_RECORDING))):
        hit = rng.choice(num, max(1, num // 3), replace=False)
        size = rng.uniform(*SHIFT_SIGMAS, len(hit)) * rng.choice([-1, 1], len(hit))
        alike[hit] += size[:, None] * (ticks >= rng.integers(schedule.num_ticks))
    return _Shared(alike.astype(np.float32), None)


class _Uninformative:
    """Metrics beyond the independent ones: duplicates of these, and still ones."""

    def __init__(self, rng: np.random.Generator, num: int, regime: Regime) -> None:
        rest = regime.num_metrics - num
        self._num_still = rest - round(DUPLICATES_SHARE * rest)
        num_duplicates = rest - self._num_still
        self._of = rng.integers(num, size=num_duplicates)
        self._noise = rng.uniform(*DUPLICATE_NOISE, num_duplicates)
        self._level = 10 ** rng.uniform(-1, 11, num_duplicates)
        still = np.repeat(10 ** rng.uniform(0, 11, (self._num_still, 1)), regime.num_machines, axis=1)
        for m in np.flatnonzero(rng.random(self._num_still) < STILL_DIFFERS):
            still[m, rng.integers(regime.num_machines)] *= rng.choice([0.5, 0.99, 2.0])
        self._still = still.astype(np.float32)

    def extended(self, rng: np.random.Generator, values: Floats, own: Array) -> Floats:
        """(M, T, N) of all metrics. `values`, `own`: of the independent ones, in units and in peer standard
        deviations."""
        if not len(self._of) and not self._num_still:
            return values
        level, noise = self._level[:, None, None], self._noise[:, None, None]
        size = (len(self._of), *values.shape[1:])
        copies = level * (10 + SIGMA_OF_LEVEL * (own[self._of] + noise * rng.standard_normal(size)))
        still = np.broadcast_to(self._still[:, None, :], (self._num_still, *values.shape[1:]))
        return np.concatenate([values, copies.astype(np.float32), still])


def _hit(own: Array, fault: RegimeFault, ticks: NDArray[np.int64], spreads: Array) -> None:
    """Adds the effect to `own` (M, T, N), peer standard deviations; `spreads` (M,): of each metric, with offsets."""
    since = ticks - fault.start
    there = ((since >= 0) & (ticks < fault.end)).astype(np.float64)
    if fault.course is Onset.RAMP:
        there *= np.minimum(since / RAMP_TICKS, 1.0)
    elif fault.course is Onset.INTERMITTENT:
        there *= np.mod(since, INTERMITTENT_TICKS) < INTERMITTENT_TICKS * INTERMITTENT_DUTY
    for m, sign in zip(fault.metrics, fault.signs, strict=True):
        own[m, :, fault.machine] += sign * fault.effect_spreads * spreads[m] * there


def num_values(cases_: Sequence[RegimeCase]) -> int:
    """Machines times metrics times ticks: what a run over these cases costs."""
    return sum(c.regime.num_machines * c.regime.num_metrics * c.regime.schedule.num_ticks for c in cases_)
