"""What to prepare for a job: standbys, checkpoint period, and the ETTR to expect (`rolecall doctor JOB --plan`). Pure.

Young's checkpoint period is sqrt(2 c M): c seconds that a checkpoint stops the job, M seconds between two losses of the
work since a checkpoint; Daly adds higher orders (J. Daly, FGCS 2006, eq. 37). Beside them stands the period that loses
least in simulation, which also knows that a step cannot be divided and that an arm may need no checkpoint for most
faults.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rolecall.core.config.job import JobConfig
from rolecall.simulate.settings import ArmSettings, Mode, RoleSize, SimulationSettings
from rolecall.simulate.standbys import standbys
from rolecall.simulate.study import ArmResult, accounts, result

EVERY_STEPS = (1, 2, 5, 10, 20, 50, 100)
"""Periods that are compared, in steps."""


def young_seconds(checkpoint_seconds: float, seconds_between_losses: float) -> float:
    return math.sqrt(2 * checkpoint_seconds * seconds_between_losses)


def daly_seconds(checkpoint_seconds: float, seconds_between_losses: float) -> float:
    """Work between two checkpoints."""
    c, m = checkpoint_seconds, seconds_between_losses
    if c >= 2 * m:
        return m
    ratio = c / (2 * m)
    return young_seconds(c, m) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - c


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """`every_steps`: the checkpoint period that loses least. `loads_per_day`: how often work since a checkpoint is
    lost. Young's and Daly's seconds are null where that never happened in the simulated time."""

    every_steps: int
    loads_per_day: float
    young_seconds: float | None
    daly_seconds: float | None
    expected: ArmResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    settings: SimulationSettings
    num_seeds: int
    standbys: Mapping[str, int]
    arms: Mapping[str, ArmPlan]

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpus": self.settings.gpus,
            "mode": str(self.settings.mode),
            "days": self.settings.days,
            "step_seconds": self.settings.step_seconds,
            "seeds": self.num_seeds,
            "standbys": dict(self.standbys),
            "arms": {name: asdict(arm) for name, arm in self.arms.items()},
        }


def settings_of_job(job: JobConfig, base: SimulationSettings) -> SimulationSettings:
    """`base` with the replicas, ranks and run mode of a job file. A hybrid has a GPU for each rank of its larger half,
    which belong to `trainer`. Rollouts may be `staleness_max` steps ahead in mode async, else as far as in `base`."""
    runtime, hybrids = job.runtime, job.num_hybrids
    gpus_of_trainer = max(runtime.trainer_ranks, runtime.rollout_ranks if hybrids else 0)
    return base.changed(
        mode=Mode(runtime.mode),
        trainer=RoleSize(replicas=job.roles.trainer, gpus_per_replica=gpus_of_trainer).model_dump(),
        rollout=RoleSize(replicas=job.roles.rollout - hybrids, gpus_per_replica=runtime.rollout_ranks).model_dump(),
        ahead_steps=base.ahead_steps if hybrids else float(runtime.staleness_max),
    )


def recommend(
    settings: SimulationSettings, num_seeds: int, seed: int = 0, periods: Sequence[int] = EVERY_STEPS
) -> FleetPlan:
    """Raises ValueError: no period is given."""
    return FleetPlan(
        settings=settings,
        num_seeds=num_seeds,
        standbys=standbys(settings),
        arms={name: _arm(settings, name, arm, num_seeds, seed, periods) for name, arm in settings.arms.items()},
    )


def _arm(
    settings: SimulationSettings, name: str, arm: ArmSettings, num_seeds: int, seed: int, periods: Sequence[int]
) -> ArmPlan:
    found = {
        every: accounts(settings, arm.model_copy(update={"checkpoint_every_steps": every}), num_seeds, seed)
        for every in periods
    }
    best = min(found, key=lambda every: sum(a.lost_gpu_seconds for a in found[every]))
    seconds = sum(a.seconds for a in found[best])
    loads = sum(a.num_checkpoint_loads for a in found[best])
    cost = settings.checkpoint.blocking_seconds
    return ArmPlan(
        every_steps=best,
        loads_per_day=statistics.fmean(a.num_checkpoint_loads for a in found[best]) / settings.days,
        young_seconds=young_seconds(cost, seconds / loads) if loads else None,
        daly_seconds=daly_seconds(cost, seconds / loads) if loads else None,
        expected=result(name, found[best]),
    )
