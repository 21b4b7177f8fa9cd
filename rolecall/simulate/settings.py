"""What a simulated run consists of: one frozen model per part. Defaults of rates and times name their published source
or say that they are assumed.

Sources: [Llama 3] arXiv 2407.21783, section 3.3.4; [ByteRobust] arXiv 2509.16293; [RobustRL] arXiv 2512.22492;
[FT-HSDP] arXiv 2602.00277; [DeadPool] arXiv 2607.01646; [trace] 584 faults of 400 GPU servers in 349 days (InfiniteHBD,
SIGCOMM 2025), fitted by `benchmarks/simulation/fit_base_rates.py`; [assumed] our plausible choice.
"""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from rolecall.core.config.job import problems_of, read_yaml_file
from rolecall.core.config.section import PositiveInt, Ratio, Section
from rolecall.core.errors import ConfigError

DAY_SECONDS, HOUR_SECONDS = 86_400.0, 3_600.0

NonNegative = Annotated[float, Field(ge=0, le=1e9)]
SimulatedSeconds = Annotated[float, Field(ge=0, le=365 * DAY_SECONDS)]


class Mode(StrEnum):
    ASYNC = "async"
    SEMI_SYNC = "semi_sync"
    SYNC = "sync"


class FaultDomain(StrEnum):
    """What one fault takes down."""

    REPLICA = "replica"
    ROLE = "role"
    JOB = "job"


BURST_SIZES: dict[int, float] = {1: 396, 2: 25, 3: 2, 4: 1, 5: 2, 6: 1, 9: 1}
"""Machines -> number of bursts, of those that began within 5 min of each other. [trace]"""
AHEAD_STEPS = {Mode.ASYNC: 1.0, Mode.SEMI_SYNC: 0.5, Mode.SYNC: 0.0}
"""Steps that rollouts generate ahead while no trainer works. [RobustRL]: async trains one step behind, semi-sync lets
trainers help with half of the prompts; in sync mode there is no rollout beside the trainers."""
GENERATION_SHARE = {Mode.ASYNC: 0.0, Mode.SEMI_SYNC: 0.5, Mode.SYNC: 0.7}
"""Share of a step in which trainer GPUs generate. Semi-sync: [RobustRL], the switch at 50 %; sync: [assumed]."""


DRAWN_MAX = 1_000_000
"""Faults and false alarms of one run: minutes of simulation. 100,000 GPUs have 143,000 faults in ten years."""


class RoleSize(Section):
    replicas: Annotated[int, Field(ge=0, le=1_000_000)]
    """Replicas of this role."""
    gpus_per_replica: Annotated[int, Field(ge=1, le=100_000)] = 8
    """GPUs of each replica."""

    @property
    def gpus(self) -> int:
        return self.replicas * self.gpus_per_replica


class ByRole(Section):
    """Seconds of one stage, by the role that lost a replica."""

    trainer: SimulatedSeconds
    """After a fault of a trainer."""
    rollout: SimulatedSeconds
    """After a fault of a rollout."""


class ScaledSeconds(Section):
    """A time that grows with the fleet: seconds + per_doubling x log2(GPUs / at_gpus), above `at_gpus`."""

    seconds: SimulatedSeconds
    """Measured on `at_gpus` GPUs and fewer."""
    at_gpus: PositiveInt = 1
    """Size of the fleet on which it was measured."""
    per_doubling: SimulatedSeconds = 0.0
    """Added by each doubling of the fleet."""

    def of(self, gpus: int) -> float:
        return self.seconds + self.per_doubling * max(0.0, math.log2(max(1, gpus) / self.at_gpus))


class FaultSettings(Section):
    """How often something breaks, and how much at once."""

    trainer_per_gpu_hour: Annotated[float, Field(ge=0, le=1)] = 1.97e-5
    """Faults of trainers per GPU-hour. [Llama 3]: 419 unexpected interruptions in 54 days on 16,384 GPUs."""
    rollout_per_gpu_hour: Annotated[float, Field(ge=0, le=1)] = 1.31e-5
    """Faults of rollouts per GPU-hour. [RobustRL]: 8.8 failures of inference a week on 4,000 GPUs."""
    machine_share: Ratio = 0.78
    """Share of the faults after which the machine must be replaced; after others the process starts again there.
    [Llama 3]: 78 % were confirmed or suspected hardware."""
    implicit_share: Ratio = 0.133
    """Share of the faults that report nothing: hangs, slowness, NaN. [ByteRobust] table 1: 6,096 of 45,783."""
    burst_sizes: dict[Annotated[int, Field(ge=1, le=100_000)], Annotated[float, Field(gt=0)]] = BURST_SIZES
    """Neighbouring machines that one fault of a machine takes: number -> weight. [trace]"""
    offender_share: Annotated[float, Field(ge=0, lt=1)] = 0.337
    """Share of the machines that fail more often than the others. [trace]"""
    offender_factor: Annotated[float, Field(ge=1, le=1000)] = 6.8
    """How many times as often; the mean rate stays that of the role. [trace]"""
    retire_offenders: bool = False
    """true: such a machine is replaced for good by an arbitrary one when it fails. false: it returns after repair."""
    false_alarms_per_1000_machine_days: NonNegative = 0.0
    """Evictions of healthy machines."""


class DetectionSettings(Section):
    """From the fault to the decision."""

    explicit_seconds: SimulatedSeconds = 10.0
    """Detection of a fault that reports itself. [ByteRobust] table 3: interval of the GPU checks."""
    implicit: ByRole = ByRole(trainer=300.0, rollout=60.0)
    """Detection of one that does not. [RobustRL]: TensorCore activity 0 for 5 min, throughput 0 for 60 s."""
    without_detector_seconds: SimulatedSeconds = 1_800.0
    """How long one stays unnoticed without a detector. [ByteRobust]: NCCL's timeout, 30 to 60 min."""
    decide_seconds: SimulatedSeconds = 10.0
    """From detection to action. [ByteRobust] table 6: 10 s for an unavailable GPU."""


class MachineSettings(Section):
    """Where replacements come from."""

    trainer_standbys: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Warm standby machines for trainers: image, container and self-check are done. null: the P99 rule."""
    rollout_standbys: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """The same for rollouts."""
    provision_seconds: SimulatedSeconds = 220.0
    """Until the scheduler delivers a machine when no standby is left. [ByteRobust]: rescheduling takes 0.49 times a
    requeue (545 s on 256 machines), less the 51 s that a restart in place takes."""
    repair_seconds: SimulatedSeconds = 25.2 * HOUR_SECONDS
    """Until a faulty machine is a standby again. [trace]: the median; the mean is six times as long."""
    burn_in_seconds: SimulatedSeconds = 600.0
    """Until a healthy machine that was evicted is a standby again. [ByteRobust] table 6: selective stress test."""


class CheckpointSettings(Section):
    blocking_seconds: SimulatedSeconds = 3.0
    """How long a checkpoint stops the step. [RobustRL]: GPU to host memory."""
    write_seconds: SimulatedSeconds = 10.0
    """After that, until it can be loaded. [RobustRL]: host memory to disk."""


class ArmSettings(Section):
    """One way to recover."""

    fault_domain: FaultDomain
    """replica: the failed one alone, the others continue. role: all trainers, or one rollout. job: everything."""
    checkpoint_every_steps: PositiveInt = 1
    """Steps between checkpoints."""
    restart_trainer: ScaledSeconds
    """Start of a trainer until its state is loaded; for domain job, of the whole job."""
    restart_rollout: ScaledSeconds = ScaledSeconds(seconds=0.0)
    """Start of a rollout until its engine is ready; no meaning for domain job."""
    reconnect: ByRole
    """Until the replacement has current weights and works; for domain job, the trainer's counts."""
    regroup: ScaledSeconds = ScaledSeconds(seconds=0.0)
    """(replica) How long surviving trainers stand still after the decision, until they work without the lost one."""

    @field_validator("restart_trainer", "restart_rollout", "regroup", mode="before")
    @classmethod
    def _plain_number(cls, value: Any) -> Any:
        return {"seconds": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


ARMS = {
    # Engine start 49 s and weights 10 s: [RobustRL], recovery of a rollout machine. Trainer: its 8B trainer restart.
    # Survivors: [DeadPool] resumes in under 40 s on 512 GPUs, [FT-HSDP] in 3 min on 100,000: 18 s a doubling.
    # Checkpoints are only for the loss of all trainers: every 20 steps, as in a job file.
    "replica": ArmSettings(
        fault_domain=FaultDomain.REPLICA,
        checkpoint_every_steps=20,
        restart_trainer=ScaledSeconds(seconds=173.0),
        restart_rollout=ScaledSeconds(seconds=49.0),
        reconnect=ByRole(trainer=10.0, rollout=10.0),
        regroup=ScaledSeconds(seconds=40.0, at_gpus=512, per_doubling=18.0),
    ),
    # [RobustRL]: all trainers restart in 173 s (8B) from a checkpoint of each step, on 128 GPUs. Growth: a restart in
    # place takes 46 s on 128 machines and 65 s on 1,024 [ByteRobust].
    "role": ArmSettings(
        fault_domain=FaultDomain.ROLE,
        checkpoint_every_steps=1,
        restart_trainer=ScaledSeconds(seconds=173.0, at_gpus=128, per_doubling=6.3),
        restart_rollout=ScaledSeconds(seconds=49.0),
        reconnect=ByRole(trainer=10.0, rollout=10.0),
    ),
    # [RobustRL] measured ByteRobust's way for its 8B job: 277.8 s in place. Same growth. Like
    # it, a checkpoint each step.
    "restart_warm": ArmSettings(
        fault_domain=FaultDomain.JOB,
        checkpoint_every_steps=1,
        restart_trainer=ScaledSeconds(seconds=277.8, at_gpus=128, per_doubling=6.3),
        reconnect=ByRole(trainer=10.0, rollout=10.0),
    ),
    # The same start after a requeue, which takes 454 s on 2,048 GPUs and 768 s on 16,384 [ByteRobust], less the 46 s
    # of the restart in it.
    "restart_cold": ArmSettings(
        fault_domain=FaultDomain.JOB,
        checkpoint_every_steps=1,
        restart_trainer=ScaledSeconds(seconds=277.8 + 454 - 46, at_gpus=2_048, per_doubling=105.0),
        reconnect=ByRole(trainer=10.0, rollout=10.0),
    ),
}


class SimulationSettings(Section):
    """One RL run on a fleet that meets faults."""

    mode: Mode = Mode.ASYNC
    """async, semi_sync: trainers and rollouts have machines of their own. sync: all GPUs do both in turn, and belong to
    `trainer`."""
    trainer: RoleSize = RoleSize(replicas=32, gpus_per_replica=64)
    """Trainers."""
    rollout: RoleSize = RoleSize(replicas=256, gpus_per_replica=8)
    """Rollout engines. [RobustRL]: as many GPUs as the trainers have, eight for each engine."""
    gpus_per_machine: PositiveInt = 8
    """GPUs of one machine. No machine is shared by roles."""
    days: Annotated[float, Field(gt=0, le=3650)] = 30.0
    """Simulated time."""
    step_seconds: Annotated[float, Field(gt=0, le=DAY_SECONDS)] = 360.0
    """A step without faults. [RobustRL]: 100 steps of the 8B job take about ten hours (saved hours over saved share).
    """
    ahead_steps: NonNegative | None = None
    """Steps that rollouts generate ahead while trainers stand still. null: by mode, 1, 0.5 and 0."""
    generation_share: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of a step in which trainer GPUs generate. null: by mode, 0, 0.5 and 0.7."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    faults: FaultSettings = FaultSettings()
    detection: DetectionSettings = DetectionSettings()
    machines: MachineSettings = MachineSettings()
    arms: dict[str, ArmSettings] = ARMS
    """Ways to recover, by name; a file names those that are compared."""

    @model_validator(mode="after")
    def _roles(self) -> "SimulationSettings":
        problems = []
        if self.trainer.replicas < 1:
            problems.append("trainer.replicas: at least one is needed")
        if self.mode is Mode.SYNC and self.rollout.replicas:
            problems.append("rollout.replicas: in sync mode all GPUs belong to trainer: 0 is needed")
        if self.mode is not Mode.SYNC and not self.rollout.replicas:
            problems.append(f"rollout.replicas: {self.mode} needs at least one")
        if not self.arms:
            problems.append("arms: at least one is needed")
        if not self.faults.burst_sizes:
            problems.append("faults.burst_sizes: at least one is needed")
        if (expected := self._num_drawn) > DRAWN_MAX:
            many = f"about {expected:,.0f} faults and false alarms in each run, {DRAWN_MAX:,} can be simulated"
            problems.append(f"faults: {many}: lower the rates, the GPUs or the days")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def _num_drawn(self) -> float:
        """Expected faults and false alarms of one run."""
        faults = self.faults
        per_hour = self.trainer.gpus * faults.trainer_per_gpu_hour + self.rollout.gpus * faults.rollout_per_gpu_hour
        machines = self.machines_of(self.trainer) + self.machines_of(self.rollout)
        return self.days * (24 * per_hour + machines * faults.false_alarms_per_1000_machine_days / 1000)

    @property
    def gpus(self) -> int:
        return self.trainer.gpus + self.rollout.gpus

    @property
    def seconds(self) -> float:
        return self.days * DAY_SECONDS

    @property
    def ahead(self) -> float:
        return AHEAD_STEPS[self.mode] if self.ahead_steps is None else self.ahead_steps

    @property
    def generates(self) -> float:
        return GENERATION_SHARE[self.mode] if self.generation_share is None else self.generation_share

    def machines_of(self, size: RoleSize) -> int:
        """Machines of a role."""
        return math.ceil(size.gpus / self.gpus_per_machine)

    def changed(self, **changes: Any) -> "SimulationSettings":
        """A validated copy. Raises ConfigError: with every problem."""
        return parse_settings({**self.model_dump(), **changes})


def resized(settings: SimulationSettings, gpus: int | None = None, mode: Mode | None = None) -> SimulationSettings:
    """The same job on another number of GPUs or in another mode: whole replicas in the same proportion.

    Raises:
        ConfigError: there are too few GPUs for one replica of each role.
    """
    mode = mode or settings.mode
    total = settings.gpus if gpus is None else gpus
    trainer, rollout = settings.trainer, settings.rollout
    share = trainer.gpus / settings.gpus if rollout.replicas else 0.5
    if mode is Mode.SYNC:
        replicas = total // trainer.gpus_per_replica
        trainers, rollouts = replicas, 0
        least = trainer.gpus_per_replica
    else:
        rollout = rollout if rollout.replicas else RoleSize(replicas=1, gpus_per_replica=settings.gpus_per_machine)
        room = total - rollout.gpus_per_replica
        trainers = max(1, min(round(total * share / trainer.gpus_per_replica), room // trainer.gpus_per_replica))
        rollouts = (total - trainers * trainer.gpus_per_replica) // rollout.gpus_per_replica
        least = trainer.gpus_per_replica + rollout.gpus_per_replica
    if total < least:
        raise ConfigError([f"--gpus: {total} are too few: one replica of each role needs {least}"])
    return settings.changed(
        mode=mode,
        trainer={"replicas": trainers, "gpus_per_replica": trainer.gpus_per_replica},
        rollout={"replicas": rollouts, "gpus_per_replica": rollout.gpus_per_replica},
    )


def parse_settings(value: Any, source: str = "") -> SimulationSettings:
    """Raises ConfigError: with every problem, each `path: reason`."""
    if value is not None and not isinstance(value, dict):
        raise ConfigError([f"(top): expected a mapping, got {type(value).__name__}"], source)
    try:
        return SimulationSettings.model_validate(value or {})
    except ValidationError as e:
        raise ConfigError(problems_of(e), source) from None


def load_settings(path: Path) -> SimulationSettings:
    """Reads a YAML file. Raises ConfigError: it cannot be read, is not YAML, or has problems."""
    return parse_settings(read_yaml_file(path), str(path))
