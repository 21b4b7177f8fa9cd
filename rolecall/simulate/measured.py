"""The ETTR that the simulator predicts for a run that was measured: its step time, faults and stage times go in. Pure.

Comparing it with the run's own report (`rolecall/views/ettr.py`) validates the simulator. Both count no trainer from a
trainer's fault until the interrupted step is committed, where `until_commit` says so. The simulator subtracts the time
of checkpoints, the report does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.simulate.faults import ROLLOUT, TRAINER, Fault, Scenario, StageSeconds
from rolecall.simulate.settings import ArmSettings, Mode, SimulationSettings
from rolecall.simulate.simulator import Account, simulate

DAYS_MAX = 3650.0
"""A run ends with its last step; the settings need some limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFault:
    """`step`: when it happened, in steps done: 20.5 is the middle of step 20, counted from 0."""

    step: float
    role: str
    replica: int
    stages: StageSeconds
    until_commit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """`step_seconds`: of steps without faults. `mode`, `ahead_steps`: as in the settings of a simulation."""

    num_steps: int
    step_seconds: float
    num_trainers: int
    num_rollouts: int
    faults: Sequence[MeasuredFault]
    mode: Mode = Mode.ASYNC
    ahead_steps: float | None = None
    checkpoint_every_steps: int = 1
    checkpoint_seconds: float = 0.0


def simulate_measured(run: MeasuredRun, arm: ArmSettings) -> Account:
    """`arm`: only its fault domain counts; the stage times are those of each fault. Every replica has one GPU.

    Raises:
        ValueError: a fault names a replica that the run does not have, or a step outside the run.
    """
    replicas = {TRAINER: run.num_trainers, ROLLOUT: run.num_rollouts}
    for fault in run.faults:
        if not 0 <= fault.replica < replicas.get(fault.role, 0):
            raise ValueError(f"fault at step {fault.step}: there is no {fault.role}/{fault.replica}")
        if not 0 <= fault.step < run.num_steps:
            raise ValueError(f"fault at step {fault.step}: the run has {run.num_steps} steps")
    settings = SimulationSettings.model_validate(
        {
            "mode": run.mode,
            "trainer": {"replicas": run.num_trainers, "gpus_per_replica": 1},
            "rollout": {"replicas": run.num_rollouts, "gpus_per_replica": 1},
            "gpus_per_machine": 1,
            "step_seconds": run.step_seconds,
            "ahead_steps": run.ahead_steps,
            "checkpoint": {"blocking_seconds": run.checkpoint_seconds, "write_seconds": 0.0},
            "days": DAYS_MAX,
        }
    )
    used = arm.model_copy(update={"checkpoint_every_steps": run.checkpoint_every_steps})
    faults = list[Fault]()

    def until(num_steps: float) -> Account:
        return simulate(settings, used, Scenario(faults=tuple(faults)), standbys={}, num_steps=num_steps)

    for fault in sorted(run.faults, key=lambda f: f.step):
        # The time at which the run gets there depends on the faults before.
        at = until(fault.step).seconds if fault.step else 0.0
        faults.append(
            Fault(
                at=at,
                role=fault.role,
                gpu=fault.replica,
                num_machines=0,
                stages=fault.stages,
                until_commit=fault.until_commit,
            )
        )
    return until(run.num_steps)
