"""Questions to the simulator, each over several seeds. All compared runs of a seed meet the same faults. Pure.

An interval of ETTR and goodput holds 95 % of the simulated runs: what one's own run may be, not how well the median is
known. A cost is a mean over the runs, and its interval says how well that is known (`Estimate`).
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rolecall.core.errors import ConfigError
from rolecall.simulate.faults import ROLLOUT, TRAINER, draw_scenario
from rolecall.simulate.settings import DAY_SECONDS, HOUR_SECONDS, ArmSettings, SimulationSettings
from rolecall.simulate.simulator import LOSSES, Account, Use, simulate
from rolecall.simulate.standbys import standbys

COVERAGE = 0.95
DETECTION_PROBE_SECONDS = 60.0
"""Detection is made this much slower to see what a second costs: much more than the noise of where in a step the later
faults then lie."""
ALARMS_WANTED = 100
"""False alarms of all seeds together from which the cost of one is computed."""
RESAMPLES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """`low`, `high`: ends of the interval that holds 95 % of the `n` values."""

    n: int
    median: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Quantiles are interpolated: of fewer than 40 values the ends are close to the smallest and the largest."""
    ordered = sorted(values)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    tail = (1 - COVERAGE) / 2
    return Interval(n=len(ordered), median=statistics.median(ordered), low=quantile(tail), high=quantile(1 - tail))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """Of one arm over all seeds. `lost_gpu_hours` by use, mean over seeds, so that the parts add up to the whole;
    `gpu_hours` is that whole, without standbys."""

    arm: str
    ettr: Interval
    ettr_of_paper: Interval
    goodput: Interval
    num_faults: Interval
    num_checkpoint_loads: float
    gpu_hours: float
    useful_gpu_hours: float
    lost_gpu_hours: Mapping[str, float]
    standby_gpu_hours: float


def arm_of(settings: SimulationSettings, name: str) -> ArmSettings:
    """Raises ConfigError: there is no such arm."""
    if name not in settings.arms:
        raise ConfigError([f"--arm: {name!r} is not one of {', '.join(settings.arms)}"])
    return settings.arms[name]


def accounts(settings: SimulationSettings, arm: ArmSettings, num_seeds: int, seed: int = 0) -> list[Account]:
    """One run for each of the seeds `seed`, `seed` + 1, ..."""
    pool = standbys(settings)
    return [simulate(settings, arm, draw_scenario(settings, seed + n), standbys=pool) for n in range(num_seeds)]


def run_arm(settings: SimulationSettings, name: str, num_seeds: int, seed: int = 0) -> ArmResult:
    """Raises ConfigError: there is no such arm."""
    return result(name, accounts(settings, arm_of(settings, name), num_seeds, seed))


def result(name: str, found: Sequence[Account]) -> ArmResult:
    def mean_hours(gpu_seconds: Iterable[float]) -> float:
        return statistics.fmean(gpu_seconds) / HOUR_SECONDS

    return ArmResult(
        arm=name,
        ettr=interval([a.ettr for a in found]),
        ettr_of_paper=interval([a.ettr_of_paper for a in found]),
        goodput=interval([a.goodput for a in found]),
        num_faults=interval([a.num_faults for a in found]),
        num_checkpoint_loads=statistics.fmean(a.num_checkpoint_loads for a in found),
        gpu_hours=mean_hours(a.gpus * a.seconds for a in found),
        useful_gpu_hours=mean_hours(a.gpu_seconds[Use.USEFUL] for a in found),
        lost_gpu_hours={str(use): mean_hours(a.gpu_seconds[use] for a in found) for use in LOSSES},
        standby_gpu_hours=mean_hours(a.standby_gpu_seconds for a in found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over the runs. `low`, `high`: ends of its interval of 95 %, by bootstrap over the runs."""

    value: float
    low: float
    high: float


def estimate(of_runs: Callable[[Sequence[int]], float], num_runs: int) -> Estimate:
    """`of_runs`: the value from the runs with these numbers, of which one may be there several times."""
    rng, runs = random.Random("bootstrap"), range(num_runs)
    drawn = sorted(of_runs(rng.choices(runs, k=num_runs)) for _ in range(RESAMPLES))
    tail = round((1 - COVERAGE) / 2 * RESAMPLES)
    return Estimate(value=of_runs(runs), low=drawn[tail], high=drawn[-1 - tail])


def _lost_per_day(found: Sequence[Account]) -> list[float]:
    """GPU-hours of each run."""
    return [a.lost_gpu_seconds / HOUR_SECONDS / (a.seconds / DAY_SECONDS) for a in found]


def _mean(values: Sequence[float], runs: Sequence[int]) -> float:
    return statistics.fmean(values[n] for n in runs)


def _more(more: Sequence[float], less: Sequence[float], runs: Sequence[int]) -> float:
    """Mean difference of these runs, which meet the same faults in pairs."""
    return _mean(more, runs) - _mean(less, runs)


def detection_value(settings: SimulationSettings, arm: ArmSettings, num_seeds: int, seed: int = 0) -> Estimate:
    """GPU-hours a day that each second of detection costs, over all faults."""
    slower = settings.detection.model_dump()
    slower["explicit_seconds"] += DETECTION_PROBE_SECONDS
    slower["implicit"] = {role: s + DETECTION_PROBE_SECONDS for role, s in slower["implicit"].items()}
    lost = _lost_per_day(accounts(settings, arm, num_seeds, seed))
    later = _lost_per_day(accounts(settings.changed(detection=slower), arm, num_seeds, seed))
    return estimate(lambda runs: _more(later, lost, runs) / DETECTION_PROBE_SECONDS, num_seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """When evicting what a detector names stops paying.

    `gain_gpu_hours_per_day`: saved by finding implicit faults with the detector instead of waiting for a timeout.
    `gpu_hours_per_alarm`: cost of one false alarm. `per_1000_machine_days`: false alarms at which they are equal;
    infinite: a false alarm costs nothing measurable.
    """

    gain_gpu_hours_per_day: Estimate
    gpu_hours_per_alarm: Estimate
    per_1000_machine_days: Estimate


def break_even(settings: SimulationSettings, arm: ArmSettings, num_seeds: int, seed: int = 0) -> BreakEven:
    """From three sets of runs with the same faults: without the detector, with it, and with false alarms."""
    faults, detection = settings.faults.model_dump(), settings.detection.model_dump()
    late = dict.fromkeys((TRAINER, ROLLOUT), settings.detection.without_detector_seconds)
    machines = settings.machines_of(settings.trainer) + settings.machines_of(settings.rollout)
    machine_days = machines * settings.days * num_seeds
    quiet = settings.changed(faults=faults | {"false_alarms_per_1000_machine_days": 0.0})
    alarming = settings.changed(
        faults=faults | {"false_alarms_per_1000_machine_days": 1000 * ALARMS_WANTED / machine_days}
    )
    without = _lost_per_day(accounts(quiet.changed(detection=detection | {"implicit": late}), arm, num_seeds, seed))
    lost = _lost_per_day(accounts(quiet, arm, num_seeds, seed))
    alarmed = accounts(alarming, arm, num_seeds, seed)
    lost_alarmed, num_alarms = _lost_per_day(alarmed), [a.num_false_alarms for a in alarmed]

    def gain(runs: Sequence[int]) -> float:
        return _more(without, lost, runs)

    def per_alarm(runs: Sequence[int]) -> float:
        alarms_a_day = _mean(num_alarms, runs) / settings.days
        return _more(lost_alarmed, lost, runs) / alarms_a_day if alarms_a_day else 0.0

    def limit(runs: Sequence[int]) -> float:
        cost = per_alarm(runs)
        return 1000 * gain(runs) / (cost * machines) if cost > 0 else math.inf

    return BreakEven(
        gain_gpu_hours_per_day=estimate(gain, num_seeds),
        gpu_hours_per_alarm=estimate(per_alarm, num_seeds),
        per_1000_machine_days=estimate(limit, num_seeds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyCost:
    """GPU-hours a day: of the standbys themselves, and lost by the job with so many of them for each role."""

    standbys: Mapping[str, int]
    standby_gpu_hours_per_day: float
    lost_gpu_hours_per_day: Estimate


def standby_costs(
    settings: SimulationSettings, arm: ArmSettings, num_seeds: int, seed: int = 0, largest_factor: float = 2.0
) -> list[StandbyCost]:
    """What each size of the pool costs: none, and parts and multiples of the configured one, both roles alike."""
    pool = standbys(settings)
    found: dict[tuple[int, ...], StandbyCost] = {}
    for factor in (0.0, 0.25, 0.5, 1.0, largest_factor):
        sizes = {role: round(n * factor) for role, n in pool.items()}
        machines = {f"{role}_standbys": n for role, n in sizes.items()}
        changed = settings.changed(machines=settings.machines.model_dump() | machines)
        lost = _lost_per_day(accounts(changed, arm, num_seeds, seed))
        hours = sum(sizes.values()) * settings.gpus_per_machine * 24.0
        found[tuple(sizes.values())] = StandbyCost(
            standbys=sizes,
            standby_gpu_hours_per_day=hours,
            lost_gpu_hours_per_day=estimate(partial(_mean, lost), num_seeds),
        )
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Answers of one arm. `detection_gpu_hours_per_day`: lost by each second of detection."""

    detection_gpu_hours_per_day: Estimate
    eviction: BreakEven
    standbys: Sequence[StandbyCost]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinite numbers: they are null."""
        return asdict(self, dict_factory=lambda items: {k: None if v == math.inf else v for k, v in items})


def costs(settings: SimulationSettings, arm: ArmSettings, num_seeds: int, seed: int = 0) -> Costs:
    return Costs(
        detection_gpu_hours_per_day=detection_value(settings, arm, num_seeds, seed),
        eviction=break_even(settings, arm, num_seeds, seed),
        standbys=standby_costs(settings, arm, num_seeds, seed),
    )
