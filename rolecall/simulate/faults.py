"""When faults and false alarms happen, drawn before a run: every arm meets the same ones. Pure; seeded.

Faults of a role are a Poisson process of rate (faults per GPU-hour x GPUs), in calendar time: machines also break while
the job stands still. Each source has a random stream of its own, so that false alarms, say, leave the faults as they
are. Repeat offenders: candidates are drawn at the rate that a fleet of offenders would have, and the simulator accepts
each with the probability that its machine's own rate allows (thinning), because which machine works where depends on
the recoveries so far.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rolecall.simulate.settings import HOUR_SECONDS, FaultSettings, RoleSize, SimulationSettings

TRAINER, ROLLOUT = "trainer", "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Times of the stages of one recovery, where they are known (a measured run). `fill`: after a restart of the job,
    until the first trajectories are there to train on; meanwhile trainers stand ready, and count as effective."""

    detect: float
    decide: float = 0.0
    restart: float = 0.0
    reconnect: float = 0.0
    regroup: float = 0.0
    fill: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`gpu`: index within the role. `num_machines`: neighbours that are lost, from the GPU's machine on; 0: the process
    alone. `accept`, `replaced_by`: uniform numbers for the thinning and for the machine that replaces it.
    `until_commit`: of a trainer: no trainer counts as effective until the interrupted step is committed.
    """

    at: float
    role: str
    gpu: int
    num_machines: int = 1
    is_implicit: bool = False
    is_false_alarm: bool = False
    accept: float = 0.0
    replaced_by: float = 1.0
    stages: StageSeconds | None = None
    until_commit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`faults` in order of time; `offenders`: (role, machine) at the start."""

    faults: tuple[Fault, ...]
    offenders: frozenset[tuple[str, int]] = frozenset()


def machine_rates(faults: FaultSettings) -> tuple[float, float]:
    """(rate of an ordinary machine, rate of an offender), in units of the mean rate."""
    ordinary = 1.0 / (1.0 + faults.offender_share * (faults.offender_factor - 1.0))
    return ordinary, ordinary * faults.offender_factor


def draw_scenario(settings: SimulationSettings, seed: int) -> Scenario:
    """Faults and false alarms of one run. The same settings and seed give the same scenario on every machine."""
    rates = {TRAINER: settings.faults.trainer_per_gpu_hour, ROLLOUT: settings.faults.rollout_per_gpu_hour}
    found, offenders = list[Fault](), set[tuple[str, int]]()
    for role, size in ((TRAINER, settings.trainer), (ROLLOUT, settings.rollout)):
        if not size.replicas:
            continue
        found += _faults(settings, role, size, rates[role], random.Random(f"faults of {role} {seed}"))
        found += _false_alarms(settings, role, size, random.Random(f"false alarms of {role} {seed}"))
        if settings.faults.offender_share:
            rng = random.Random(f"offenders of {role} {seed}")
            machines = range(settings.machines_of(size))
            offenders |= {(role, m) for m in machines if rng.random() < settings.faults.offender_share}
    found.sort(key=lambda fault: fault.at)
    return Scenario(faults=tuple(found), offenders=frozenset(offenders))


def _times(per_second: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """A Poisson process."""
    at = 0.0
    while per_second > 0 and (at := at + rng.expovariate(per_second)) < seconds:
        yield at


def _faults(
    settings: SimulationSettings, role: str, size: RoleSize, per_gpu_hour: float, rng: random.Random
) -> Iterator[Fault]:
    faults = settings.faults
    highest = machine_rates(faults)[1] if faults.offender_share else 1.0
    sizes, weights = list(faults.burst_sizes), list(faults.burst_sizes.values())
    for at in _times(per_gpu_hour * size.gpus * highest / HOUR_SECONDS, settings.seconds, rng):
        gpu, of_machine = rng.randrange(size.gpus), rng.random() < faults.machine_share
        burst = rng.choices(sizes, weights)[0]
        yield Fault(
            at=at,
            role=role,
            gpu=gpu,
            num_machines=burst if of_machine else 0,
            is_implicit=rng.random() < faults.implicit_share,
            accept=rng.random(),
            replaced_by=rng.random(),
        )


def _false_alarms(settings: SimulationSettings, role: str, size: RoleSize, rng: random.Random) -> Iterator[Fault]:
    per_day = settings.faults.false_alarms_per_1000_machine_days * settings.machines_of(size) / 1000
    for at in _times(per_day / (24 * HOUR_SECONDS), settings.seconds, rng):
        yield Fault(
            at=at, role=role, gpu=rng.randrange(size.gpus), is_false_alarm=True, accept=0.0, replaced_by=rng.random()
        )
