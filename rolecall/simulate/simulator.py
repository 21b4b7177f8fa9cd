"""One simulated run: events, not ticks. Pure.

**Work.** `x` is the trainers' work in seconds of a run without faults, checkpoints included; a step takes
`step_seconds + blocking_seconds / checkpoint_every_steps` of it. With shares a_t and a_r of the trainers and rollouts
alive, rollouts work at a_r and trainers at a_t while trajectories wait between them (`ahead`, in the unit of x, at most
`ahead_steps`); when none wait, trainers are as fast as rollouts, and when the limit is reached, rollouts as slow as
trainers. Between two events all rates are constant.

**Faults.** A fault's replicas are down through its stages: detect, decide, idle (no machine yet), restart, reconnect.
What else stops depends on the fault domain:

    replica   trainers: all, until the survivors have regrouped. Lost: the failed replicas' share of the open step.
              If no trainer survives: as `role`, from the newest checkpoint.
    role      trainers: all, to the end. Lost: trainers' work since the newest checkpoint, but not the trajectories.
              A rollout: that one.
    job       trainers: all, until the decision; then everything restarts from the newest checkpoint. Lost: all work
              since then, with all trajectories.

**Account.** Each GPU-second of the fleet has one use (`Use`); their sum is GPUs x seconds. Work that is lost moves from
`useful` to `recompute`. Standbys are counted beside it.
"""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rolecall.simulate.faults import ROLLOUT, TRAINER, Fault, Scenario, machine_rates
from rolecall.simulate.settings import ArmSettings, FaultDomain, RoleSize, SimulationSettings

EPSILON_SECONDS = 1e-6
"""Times and work closer together are equal."""


class Use(StrEnum):
    """What a GPU-second was spent on."""

    USEFUL = "useful"
    CHECKPOINT = "checkpoint"
    DETECT = "detect"
    DECIDE = "decide"
    IDLE = "idle"
    RESTART = "restart"
    RECONNECT = "reconnect"
    RECOMPUTE = "recompute"


LOSSES = tuple(use for use in Use if use is not Use.USEFUL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one run. `gpu_seconds` adds up to `gpus` x `seconds`.

    `effective_gpu_seconds`: numerator of ETTR; in `..._of_paper` a lost rollout costs nothing while others work. Both
    count work that is done again, as RobustRL does. Two things differ from `rolecall/views/ettr.py`: after a
    trainer's fault, trainers count again once they have regrouped or restarted, there once the interrupted step is
    committed (here for faults with `until_commit`); here the time of checkpoints does not count, there it does.
    `num_checkpoint_loads`: times that work since a checkpoint was lost.
    """

    seconds: float
    gpus: int
    gpu_seconds: Mapping[Use, float]
    effective_gpu_seconds: float
    effective_gpu_seconds_of_paper: float
    standby_gpu_seconds: float
    num_steps: float
    num_faults: int
    num_false_alarms: int
    num_checkpoint_loads: int

    @property
    def ettr(self) -> float:
        return self.effective_gpu_seconds / (self.gpus * self.seconds)

    @property
    def ettr_of_paper(self) -> float:
        return self.effective_gpu_seconds_of_paper / (self.gpus * self.seconds)

    @property
    def goodput(self) -> float:
        """Share of the GPU time whose work is kept."""
        return self.gpu_seconds[Use.USEFUL] / (self.gpus * self.seconds)

    @property
    def lost_gpu_seconds(self) -> float:
        return sum(self.gpu_seconds[use] for use in LOSSES)


Stages = tuple[tuple[float, Use], ...]
"""(end of the stage, its use of the GPUs), in order of time."""


def simulate(
    settings: SimulationSettings,
    arm: ArmSettings,
    scenario: Scenario,
    *,
    standbys: Mapping[str, int],
    num_steps: float | None = None,
) -> Account:
    """Runs `settings.days`, or until `num_steps` steps are done if that is earlier.

    `standbys`: role -> warm standby machines at the start.
    """
    run = _Run(settings, arm, scenario, standbys, num_steps)
    run.go(scenario)
    return run.account()


class _Standbys:
    """Warm machines of one role. Owned by one run."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._returns = list[float]()

    def take(self, wanted: int, at: float, back_at: float) -> bool:
        """Takes as many of `wanted` as there are, each back at `back_at`. Returns whether that was all."""
        while self._returns and self._returns[0] <= at:
            heapq.heappop(self._returns)
            self.number += 1
        taken = min(self.number, wanted)
        self.number -= taken
        for _ in range(taken):
            heapq.heappush(self._returns, back_at)
        return taken == wanted


class _Run:
    """State of one run; `go` advances it to its end."""

    def __init__(
        self,
        settings: SimulationSettings,
        arm: ArmSettings,
        scenario: Scenario,
        standbys: Mapping[str, int],
        num_steps: float | None,
    ) -> None:
        self.settings, self.arm = settings, arm
        self.sizes: dict[str, RoleSize] = {TRAINER: settings.trainer, ROLLOUT: settings.rollout}
        self.trainer_gpus, self.rollout_gpus = settings.trainer.gpus, settings.rollout.gpus
        # Work of one step, and its useful part: checkpoints are spread over the steps between them.
        self.step = settings.step_seconds + settings.checkpoint.blocking_seconds / arm.checkpoint_every_steps
        self.useful_share = settings.step_seconds / self.step
        self.cycle = self.step * arm.checkpoint_every_steps
        self.ahead_max = settings.ahead * self.step
        self.restart = {
            TRAINER: arm.restart_trainer.of(settings.gpus),
            ROLLOUT: arm.restart_rollout.of(settings.gpus),
        }
        self.regroup = arm.regroup.of(settings.gpus)
        self.standbys = {role: _Standbys(standbys.get(role, 0)) for role in self.sizes}
        self.num_standbys = sum(standbys.values())
        self.offenders = set(scenario.offenders)
        self.end = settings.seconds
        self.work_wanted = math.inf if num_steps is None else num_steps * self.step

        self.at = 0.0
        self.work = self.ahead = 0.0  # x, and what rollouts have generated beyond it
        self.loaded = 0.0  # x of the checkpoint last loaded
        self.commit_due = 0.0  # x before which trainers do not count as effective
        self.down: dict[str, dict[int, Stages]] = {TRAINER: {}, ROLLOUT: {}}
        self.stalled: Stages = ()  # all trainers
        self.restarting: Stages = ()  # everything
        self.decisions: list[tuple[float, int, Stages, float]] = []  # (at, number, stages of the restart, fill), a heap
        self.filled_at = 0.0  # trainers have nothing to train before
        self.uses = dict.fromkeys(Use, 0.0)
        self.effective = self.effective_of_paper = 0.0
        self.num_faults = self.num_false_alarms = self.num_loads = 0

    def go(self, scenario: Scenario) -> None:
        for fault in scenario.faults:
            if not self._accepts(fault):
                continue
            self._decide_until(fault.at)
            if self.at >= self.end - EPSILON_SECONDS:
                return
            self._meet(fault)
        self._decide_until(self.end)

    def account(self) -> Account:
        return Account(
            seconds=self.at,
            gpus=self.settings.gpus,
            gpu_seconds=dict(self.uses),
            effective_gpu_seconds=self.effective,
            effective_gpu_seconds_of_paper=self.effective_of_paper,
            standby_gpu_seconds=self.num_standbys * self.settings.gpus_per_machine * self.at,
            num_steps=self.work / self.step,
            num_faults=self.num_faults,
            num_false_alarms=self.num_false_alarms,
            num_checkpoint_loads=self.num_loads,
        )

    # Time

    def _decide_until(self, at: float) -> None:
        """Advances to `at`, with the restarts of the job on the way."""
        while self.decisions and self.decisions[0][0] <= min(at, self.end):
            decided_at, _, stages, fill = heapq.heappop(self.decisions)
            self._advance(decided_at)
            if self.at >= self.end - EPSILON_SECONDS:
                return
            self._lose_everything()
            self.restarting = _later(self.restarting, stages)
            self.filled_at = max(self.filled_at, stages[-1][0] + fill)
        self._advance(min(at, self.end))

    def _advance(self, until: float) -> None:
        while self.at < until - EPSILON_SECONDS:
            self._forget_what_is_over()
            interval = min(until, self._next_end()) - self.at
            interval = self._spend(interval)
            self.at += interval
            if self.work >= self.work_wanted - EPSILON_SECONDS:
                self.end = self.at
                return

    def _forget_what_is_over(self) -> None:
        at = self.at + EPSILON_SECONDS
        if self.restarting and self.restarting[-1][0] <= at:
            self.restarting = ()
        if self.stalled and self.stalled[-1][0] <= at:
            self.stalled = ()
        for down in self.down.values():
            for replica in [r for r, stages in down.items() if stages[-1][0] <= at]:
                del down[replica]

    def _next_end(self) -> float:
        """When the next stage of anything ends."""
        return min((_stage(stages, self.at)[0] for stages in self._under_way()), default=math.inf)

    def _under_way(self) -> Iterator[Stages]:
        for stages in (self.restarting, self.stalled):
            if stages:
                yield stages
        for down in self.down.values():
            yield from down.values()

    def _spend(self, interval: float) -> float:
        """Accounts for `interval`, or for less if a rate changes before its end; returns the seconds accounted for."""
        if self.restarting:
            self.uses[_stage(self.restarting, self.at)[1]] += self.settings.gpus * interval
            return interval
        trainers, rollouts = self._alive(TRAINER), self._alive(ROLLOUT)
        if self.stalled:
            trainers = 0.0
        if self.at < self.filled_at - EPSILON_SECONDS:
            interval = min(interval, self.filled_at - self.at)
            trained, generated = self._rates(0.0, rollouts)
        else:
            trained, generated = self._rates(trainers, rollouts)
        interval = min(interval, self._until_rates_change(trained, generated))

        if self.stalled:
            self.uses[_stage(self.stalled, self.at)[1]] += self.trainer_gpus * interval
        else:
            self._spend_down(TRAINER, interval)
        self._spend_down(ROLLOUT, interval)
        busy = (trained * self.trainer_gpus + generated * self.rollout_gpus) * interval
        alive = (trainers * self.trainer_gpus + rollouts * self.rollout_gpus) * interval
        effective = alive
        if self._awaits_commit:
            effective = rollouts * self.rollout_gpus * interval
        checkpoints = busy * (1 - self.useful_share)
        self.uses[Use.USEFUL] += busy - checkpoints
        self.uses[Use.CHECKPOINT] += checkpoints
        self.uses[Use.IDLE] += alive - busy
        self.effective += effective - checkpoints
        lost_rollouts = (1 - rollouts) * self.rollout_gpus * interval if rollouts else 0.0
        self.effective_of_paper += effective + lost_rollouts - checkpoints
        self.work += trained * interval
        self.ahead = max(0.0, self.ahead + (generated - trained) * interval)
        return interval

    def _alive(self, role: str) -> float:
        """Share of the role's replicas."""
        number = self.sizes[role].replicas
        return (number - len(self.down[role])) / number if number else 1.0

    def _rates(self, trainers: float, rollouts: float) -> tuple[float, float]:
        """(trained, generated) in work per second."""
        if not self.rollout_gpus:
            return trainers, trainers
        trained = min(trainers, rollouts) if self.ahead <= EPSILON_SECONDS else trainers
        if self.ahead > self.ahead_max + EPSILON_SECONDS:
            return trained, 0.0
        if self.ahead >= self.ahead_max - EPSILON_SECONDS:
            return trained, min(trained, rollouts)
        return trained, rollouts

    def _until_rates_change(self, trained: float, generated: float) -> float:
        times = [math.inf]
        if trained > 0:
            times.append((self.work_wanted - self.work) / trained)
            if self._awaits_commit:
                times.append((self.commit_due - self.work) / trained)
        if generated > trained:
            times.append((self.ahead_max - self.ahead) / (generated - trained))
        elif generated < trained:
            limit = self.ahead_max if self.ahead > self.ahead_max + EPSILON_SECONDS else 0.0
            times.append((self.ahead - limit) / (trained - generated))
        return max(EPSILON_SECONDS, min(times))

    @property
    def _awaits_commit(self) -> bool:
        return self.work < self.commit_due - EPSILON_SECONDS

    def _spend_down(self, role: str, interval: float) -> None:
        for stages in self.down[role].values():
            self.uses[_stage(stages, self.at)[1]] += self.sizes[role].gpus_per_replica * interval

    # Faults

    def _accepts(self, fault: Fault) -> bool:
        """Thinning: whether the machine's own rate has this candidate."""
        faults = self.settings.faults
        if fault.is_false_alarm or not faults.offender_share:
            return True
        ordinary, highest = machine_rates(faults)
        machine = fault.role, fault.gpu // self.settings.gpus_per_machine
        return machine in self.offenders or fault.accept < ordinary / highest

    def _meet(self, fault: Fault) -> None:
        self.num_false_alarms += fault.is_false_alarm
        self.num_faults += not fault.is_false_alarm
        detect, decide = self._noticed(fault)
        stall: Stages = ((self.at + detect, Use.DETECT), (self.at + detect + decide, Use.DECIDE))
        wait = self._replace_machines(fault)
        replicas = self._replicas(fault)
        if fault.until_commit and fault.role == TRAINER:
            self.commit_due = (math.floor(self.work / self.step + EPSILON_SECONDS) + 1) * self.step
        if self.arm.fault_domain is FaultDomain.JOB:
            self._go_down(fault.role, replicas, stall)
            if fault.role == TRAINER:
                self.stalled = _later(self.stalled, stall)
            again = self._recovery(fault, TRAINER, stall[-1][0], wait)
            fill = 0.0 if fault.stages is None else fault.stages.fill
            heapq.heappush(self.decisions, (stall[-1][0], self.num_faults + self.num_false_alarms, again, fill))
            return
        recovery = stall + self._recovery(fault, fault.role, stall[-1][0], wait)
        if fault.role == ROLLOUT:
            self._go_down(ROLLOUT, replicas, recovery)
            return
        survivors = self.sizes[TRAINER].replicas - len(self.down[TRAINER].keys() | replicas)
        if self.arm.fault_domain is FaultDomain.REPLICA and survivors:
            self._lose_open_step(replicas)
            regroup = self.regroup if fault.stages is None else fault.stages.regroup
            self.stalled = _later(self.stalled, (*stall, (stall[-1][0] + regroup, Use.RECONNECT)))
            self._go_down(TRAINER, replicas, recovery)
        else:
            self._lose_training()
            self.stalled = _later(self.stalled, recovery)
            if self.arm.fault_domain is FaultDomain.REPLICA:
                self._go_down(TRAINER, replicas, recovery)

    def _noticed(self, fault: Fault) -> tuple[float, float]:
        """(detect, decide) in seconds."""
        detection = self.settings.detection
        if fault.stages is not None:
            return fault.stages.detect, fault.stages.decide
        if fault.is_false_alarm:
            return 0.0, detection.decide_seconds
        implicit = detection.implicit.trainer if fault.role == TRAINER else detection.implicit.rollout
        return implicit if fault.is_implicit else detection.explicit_seconds, detection.decide_seconds

    def _recovery(self, fault: Fault, role: str, since: float, wait: float) -> Stages:
        """From the decision to work. `role`: whose times count."""
        arm = self.arm
        restart, reconnect = self.restart[role], arm.reconnect.trainer if role == TRAINER else arm.reconnect.rollout
        if fault.stages is not None:
            restart, reconnect = fault.stages.restart, fault.stages.reconnect
        started = since + wait + restart
        return ((since + wait, Use.IDLE), (started, Use.RESTART), (started + reconnect, Use.RECONNECT))

    def _replace_machines(self, fault: Fault) -> float:
        """Takes standbys; returns the seconds until there is a machine for each that is lost."""
        if not fault.num_machines:
            return 0.0
        machines, role = self.settings.machines, fault.role
        if self.settings.faults.retire_offenders and fault.replaced_by >= self.settings.faults.offender_share:
            self.offenders -= {(role, machine) for machine in self._machines(fault)}
        away = machines.burn_in_seconds if fault.is_false_alarm else machines.repair_seconds
        complete = self.standbys[role].take(len(self._machines(fault)), self.at, self.at + away)
        return 0.0 if complete or fault.stages is not None else machines.provision_seconds

    def _machines(self, fault: Fault) -> range:
        first = fault.gpu // self.settings.gpus_per_machine
        return range(first, min(first + fault.num_machines, self.settings.machines_of(self.sizes[fault.role])))

    def _replicas(self, fault: Fault) -> set[int]:
        size, per_machine = self.sizes[fault.role], self.settings.gpus_per_machine
        if not fault.num_machines:
            return {fault.gpu // size.gpus_per_replica}
        machines = self._machines(fault)
        last = min(machines.stop * per_machine, size.gpus) - 1
        return set(range(machines.start * per_machine // size.gpus_per_replica, last // size.gpus_per_replica + 1))

    def _go_down(self, role: str, replicas: set[int], stages: Stages) -> None:
        for replica in replicas:
            self.down[role][replica] = _later(self.down[role].get(replica, ()), stages)

    # Lost work

    def _lose_open_step(self, replicas: set[int]) -> None:
        """The share of these trainers in the open step; what trainer GPUs have generated for it is kept."""
        alive = self.sizes[TRAINER].replicas - len(self.down[TRAINER])
        share = len(replicas - self.down[TRAINER].keys()) / alive if alive else 0.0
        self._train_again(max(0.0, self.work % self.step - self.settings.generates * self.step) * share)

    def _lose_training(self) -> None:
        """Trainers' work since the newest checkpoint. Trajectories are kept."""
        since = self._load_newest_checkpoint()
        open_step = self.work % self.step
        kept = min(open_step, since, self.settings.generates * self.step)
        self._train_again(since - kept)

    def _train_again(self, lost: float) -> None:
        self.work -= lost
        if self.rollout_gpus:
            self.ahead += lost
        self._recompute(lost * self.trainer_gpus)

    def _lose_everything(self) -> None:
        lost = self._load_newest_checkpoint()
        self._recompute(lost * self.trainer_gpus + (lost + self.ahead) * self.rollout_gpus)
        self.work -= lost
        self.ahead = 0.0

    def _load_newest_checkpoint(self) -> float:
        """Returns the work since then. What was loaded before is written, however little work was done after it."""
        written = self.work - self.settings.checkpoint.write_seconds
        self.loaded = max(self.loaded, math.floor((written + EPSILON_SECONDS) / self.cycle) * self.cycle)
        self.num_loads += 1
        return max(0.0, self.work - self.loaded)

    def _recompute(self, gpu_work: float) -> None:
        lost = gpu_work * self.useful_share
        self.uses[Use.USEFUL] -= lost
        self.uses[Use.RECOMPUTE] += lost


def _stage(stages: Stages, at: float) -> tuple[float, Use]:
    """The stage at `at`; the last one if all are over."""
    return next((stage for stage in stages if stage[0] > at + EPSILON_SECONDS), stages[-1])


def _later(one: Stages, other: Stages) -> Stages:
    """Of two recoveries of the same thing, the one that ends later."""
    return one if one and one[-1][0] > other[-1][0] else other
