"""One simulated run: small numbers by hand, formulas of renewal theory, and what holds for every run."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.simulate.faults import ROLLOUT, TRAINER, Fault, Scenario, draw_scenario
from rolecall.simulate.settings import ARMS, ArmSettings, ByRole, FaultDomain, ScaledSeconds, SimulationSettings
from rolecall.simulate.simulator import Account, Use, simulate

DETECT, DECIDE, RESTART, RECONNECT, REGROUP = 10.0, 10.0, 100.0, 20.0, 20.0
RECOVERY = DETECT + DECIDE + RESTART + RECONNECT


def arm(domain: FaultDomain, every_steps: int = 2) -> ArmSettings:
    return ArmSettings(
        fault_domain=domain,
        checkpoint_every_steps=every_steps,
        restart_trainer=ScaledSeconds(seconds=RESTART),
        restart_rollout=ScaledSeconds(seconds=RESTART),
        reconnect=ByRole(trainer=RECONNECT, rollout=RECONNECT),
        regroup=ScaledSeconds(seconds=REGROUP),
    )


def settings(*, trainers: int = 4, rollouts: int = 4, seconds: float = 1000.0, **changes: Any) -> SimulationSettings:
    """Replicas of one GPU, each on its own machine; steps of 100 s; checkpoints cost nothing."""
    value = {
        "mode": "async" if rollouts else "sync",
        "generation_share": 0.0,
        "trainer": {"replicas": trainers, "gpus_per_replica": 1},
        "rollout": {"replicas": rollouts, "gpus_per_replica": 1},
        "gpus_per_machine": 1,
        "days": seconds / 86_400,
        "step_seconds": 100.0,
        "checkpoint": {"blocking_seconds": 0.0, "write_seconds": 0.0},
        "detection": {
            "explicit_seconds": DETECT,
            "implicit": {"trainer": DETECT, "rollout": DETECT},
            "decide_seconds": DECIDE,
        },
    }
    return SimulationSettings.model_validate(value | changes)


def run(of: SimulationSettings, domain: FaultDomain, *faults: Fault, every_steps: int = 2, **kwargs: Any) -> Account:
    standbys = kwargs.pop("standbys", {})
    return simulate(of, arm(domain, every_steps), Scenario(faults=faults), standbys=standbys, **kwargs)


def process(at: float, role: str = TRAINER, gpu: int = 0) -> Fault:
    """A fault that leaves the machine."""
    return Fault(at=at, role=role, gpu=gpu, num_machines=0)


def machine(at: float, role: str = TRAINER, gpu: int = 0, number: int = 1) -> Fault:
    return Fault(at=at, role=role, gpu=gpu, num_machines=number)


def hours(account: Account, **uses: float) -> None:
    """The uses that are named have these GPU-seconds, `useful` what is left, and all others none."""
    lost = {Use(name): value for name, value in uses.items()}
    whole = account.gpus * account.seconds
    expected = dict.fromkeys(Use, 0.0) | {Use.USEFUL: whole - sum(lost.values())} | lost
    assert dict(account.gpu_seconds) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("domain", FaultDomain)
def test_without_faults_all_time_counts(domain: FaultDomain) -> None:
    account = run(settings(), domain)
    assert account.ettr == account.ettr_of_paper == account.goodput == pytest.approx(1.0)
    assert account.num_steps == pytest.approx(10)


@pytest.mark.parametrize("every_steps", [1, 2, 5])
def test_without_faults_only_checkpoints_cost(every_steps: int) -> None:
    of = settings(checkpoint={"blocking_seconds": 10.0, "write_seconds": 0.0}, seconds=100_000.0)
    account = run(of, FaultDomain.JOB, every_steps=every_steps)
    assert account.ettr == account.goodput == pytest.approx(100 * every_steps / (100 * every_steps + 10))


def test_one_replica_restarts_alone() -> None:
    account = run(settings(), FaultDomain.REPLICA, process(150.0))
    # All four trainers stand still for 40 s; then one is down for 100 s more. Half a step of one trainer is lost.
    hours(
        account, detect=4 * DETECT, decide=4 * DECIDE, reconnect=4 * REGROUP + RECONNECT, restart=80.0, recompute=50.0
    )
    assert account.ettr == pytest.approx(1 - (4 * 40 + 100) / 8000)
    assert account.num_checkpoint_loads == 0


def test_all_trainers_restart_from_the_checkpoint_and_rollouts_go_on() -> None:
    account = run(settings(), FaultDomain.ROLE, process(250.0))
    # Steps 0 and 1 are in a checkpoint; 50 s of four trainers are lost. Rollouts work 100 s ahead at most: they wait
    # for 40 of the 140 s, and for 50 s more while trainers catch up.
    hours(account, detect=40.0, decide=40.0, restart=400.0, reconnect=80.0, recompute=200.0, idle=4 * (40 + 50))
    assert account.ettr == pytest.approx(1 - 4 * RECOVERY / 8000), "live rollouts count, as in the paper"
    assert account.num_checkpoint_loads == 1


def test_the_whole_job_restarts_from_the_checkpoint() -> None:
    account = run(settings(), FaultDomain.JOB, process(350.0))
    # Rollouts generate for 20 s until the decision. Lost: 150 s of all, and these 20 s.
    hours(account, detect=40.0, decide=40.0, restart=800.0, reconnect=160.0, recompute=150 * 8 + 20 * 4)
    assert account.ettr == pytest.approx(1 - (4 * 20 + 8 * 120) / 8000)


def test_a_checkpoint_counts_once_it_is_written() -> None:
    of = settings(checkpoint={"blocking_seconds": 0.0, "write_seconds": 30.0})
    lost = [run(of, FaultDomain.JOB, process(at, ROLLOUT)).gpu_seconds[Use.RECOMPUTE] for at in (205.0, 218.0)]
    # Decided 20 s later, with three of four rollouts until then: at a work of 220 s the newest checkpoint that can be
    # loaded is the start, at 233 s that of 200 s.
    assert lost == pytest.approx([220 * 8, 33 * 8])


@pytest.mark.parametrize("domain", [FaultDomain.ROLE, FaultDomain.JOB])
def test_a_checkpoint_that_was_loaded_can_be_loaded_again(domain: FaultDomain) -> None:
    of = settings(rollouts=0, checkpoint={"blocking_seconds": 0.0, "write_seconds": 30.0})
    account = run(of, domain, process(250.0), process(400.0))
    # The first fault takes the work back from 250 to 200 s, from which it goes on at 390 s; the second, at 210 s of
    # work, takes it back to the same checkpoint.
    assert account.gpu_seconds[Use.RECOMPUTE] == pytest.approx(4 * (50 + 10))


def test_a_lost_rollout_slows_the_trainers_once_nothing_waits() -> None:
    account = run(settings(), FaultDomain.REPLICA, process(150.0, ROLLOUT))
    # 140 s at three quarters: the trainers wait for a quarter of the time.
    hours(account, detect=10.0, decide=10.0, restart=100.0, reconnect=20.0, idle=RECOVERY)
    assert account.ettr == pytest.approx(1 - RECOVERY / 8000)
    assert account.ettr_of_paper == pytest.approx(1.0), "in the paper a lost rollout costs nothing"


def test_what_rollouts_generated_ahead_carries_trainers_over_a_lost_rollout() -> None:
    before = run(settings(), FaultDomain.ROLE, process(150.0), every_steps=1)
    both = run(settings(), FaultDomain.ROLE, process(150.0), process(600.0, ROLLOUT), every_steps=1)
    assert both.num_steps == pytest.approx(before.num_steps), "the trainers lose nothing"


def test_a_replica_without_survivors_loads_the_checkpoint() -> None:
    account = run(settings(), FaultDomain.REPLICA, machine(250.0, number=4), standbys={TRAINER: 4})
    assert account.num_checkpoint_loads == 1
    assert account.gpu_seconds[Use.RECOMPUTE] == pytest.approx(4 * 50)


def test_in_sync_mode_what_was_generated_for_the_open_step_is_kept() -> None:
    of = settings(rollouts=0, generation_share=0.7)
    lost = [run(of, FaultDomain.ROLE, process(200.0 + t)).gpu_seconds[Use.RECOMPUTE] for t in (50.0, 90.0)]
    assert lost == pytest.approx([0.0, 4 * 20])
    assert run(of, FaultDomain.JOB, process(250.0)).gpu_seconds[Use.RECOMPUTE] == pytest.approx(4 * 50)


def test_without_a_standby_the_replica_waits_for_a_machine() -> None:
    of = settings(machines={"provision_seconds": 200.0, "repair_seconds": 400.0}, seconds=2000.0)
    faults = [machine(100.0, ROLLOUT), machine(300.0, ROLLOUT, 1), machine(900.0, ROLLOUT, 2)]
    down = [run(of, FaultDomain.REPLICA, *faults, standbys={ROLLOUT: n}).ettr for n in (0, 1, 2)]
    # One standby: the second fault finds none, the third the machine of the first, repaired after 400 s.
    lost = [3 * RECOVERY + 3 * 200, 3 * RECOVERY + 200, 3 * RECOVERY]
    assert down == pytest.approx([1 - x / 16_000 for x in lost])


def test_an_evicted_healthy_machine_is_soon_a_standby_again() -> None:
    of = settings(machines={"repair_seconds": 5_000.0, "burn_in_seconds": 100.0}, seconds=2000.0)
    alarm = Fault(at=100.0, role=ROLLOUT, gpu=0, is_false_alarm=True)
    account = run(of, FaultDomain.REPLICA, alarm, machine(500.0, ROLLOUT), standbys={ROLLOUT: 1})
    assert account.ettr == pytest.approx(1 - (2 * RECOVERY - DETECT) / 16_000), "nobody waits, nothing is detected"
    assert (account.num_faults, account.num_false_alarms) == (1, 1)


def test_a_machine_takes_all_replicas_on_it() -> None:
    of = settings(rollouts=8, gpus_per_machine=4)
    one, all_of_it = (run(of, FaultDomain.REPLICA, fault, standbys={ROLLOUT: 1}) for fault in (process(100.0, ROLLOUT, 5), machine(100.0, ROLLOUT, 5)))  # fmt: skip
    assert all_of_it.gpu_seconds[Use.RESTART] == pytest.approx(4 * one.gpu_seconds[Use.RESTART])


def test_a_fault_during_a_restart_begins_it_again() -> None:
    account = run(settings(rollouts=0), FaultDomain.JOB, process(200.0), process(280.0))
    assert account.ettr == pytest.approx(1 - (80 + RECOVERY) / 1000)


def test_a_run_ends_with_its_last_step() -> None:
    account = run(settings(), FaultDomain.JOB, process(250.0), num_steps=5)
    assert account.seconds == pytest.approx(500 + RECOVERY + 50)
    assert account.num_steps == pytest.approx(5)


# What the theory says


def test_one_component_is_up_as_often_as_renewal_theory_says(seed: int) -> None:
    """Faults also happen during a recovery and begin it again: the share of time without a fault in the last D seconds
    is exp(-rate D)."""
    of = settings(
        trainers=1,
        rollouts=0,
        seconds=2e6,
    )
    rate = 1 / 1000.0
    rng = random.Random(seed)
    times, at = list[float](), 0.0
    while (at := at + rng.expovariate(rate)) < of.seconds:
        times.append(at)
    account = run(of, FaultDomain.JOB, *map(process, times))
    assert account.ettr == pytest.approx(math.exp(-rate * RECOVERY), abs=0.015)
    assert account.num_faults == len(times)


def test_the_checkpoint_period_of_young_loses_less_than_shorter_and_longer_ones(seed: int) -> None:
    of = settings(
        trainers=1,
        rollouts=0,
        seconds=2e6,
        step_seconds=10.0,
        checkpoint={"blocking_seconds": 5.0, "write_seconds": 0.0},
    )
    between = 10_000.0
    rng = random.Random(seed)
    faults = [process(rng.uniform(0, of.seconds)) for _ in range(round(of.seconds / between))]
    faults.sort(key=lambda f: f.at)
    young = math.sqrt(2 * 5.0 * between)
    lost = [
        run(of, FaultDomain.JOB, *faults, every_steps=max(1, round(young * factor / 10))).lost_gpu_seconds
        for factor in (0.25, 1.0, 4.0)
    ]
    assert lost[1] < lost[0] and lost[1] < lost[2]


# What holds for every run

roles = st.sampled_from([TRAINER, ROLLOUT])
any_faults = st.lists(
    st.builds(
        Fault,
        at=st.floats(0, 4000),
        role=roles,
        gpu=st.integers(0, 3),
        num_machines=st.integers(0, 5),
        is_implicit=st.booleans(),
        is_false_alarm=st.booleans(),
    ),
    max_size=25,
).map(lambda faults: sorted(faults, key=lambda f: f.at))


@given(
    faults=any_faults,
    domain=st.sampled_from(FaultDomain),
    ahead=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    blocking=st.sampled_from([0.0, 7.0]),
    every_steps=st.integers(1, 4),
    standbys=st.integers(0, 3),
    generation=st.sampled_from([0.0, 0.5]),
)
def test_the_uses_add_up_to_the_whole(
    faults: Sequence[Fault],
    domain: FaultDomain,
    ahead: float,
    blocking: float,
    every_steps: int,
    standbys: int,
    generation: float,
) -> None:
    of = settings(
        seconds=4000.0,
        ahead_steps=ahead,
        generation_share=generation,
        checkpoint={"blocking_seconds": blocking, "write_seconds": 5.0},
    )
    pool = {TRAINER: standbys, ROLLOUT: standbys}
    account = run(of, domain, *faults, every_steps=every_steps, standbys=pool)
    assert account.seconds == pytest.approx(4000.0)
    assert sum(account.gpu_seconds.values()) == pytest.approx(account.gpus * account.seconds)
    assert all(value > -1e-3 for value in account.gpu_seconds.values())
    assert account.goodput <= account.ettr + 1e-9 and account.ettr <= account.ettr_of_paper + 1e-9 <= 1 + 1e-8
    # Kept work of the trainers is what the steps are made of.
    assert account.num_steps * of.step_seconds * 4 <= account.gpu_seconds[Use.USEFUL] + 1e-3


@given(times=st.lists(st.floats(0, 4000), max_size=12), more=st.lists(st.floats(0, 4000), max_size=6))
def test_a_fault_more_never_raises_ettr_of_restarts(times: list[float], more: list[float]) -> None:
    of = settings(rollouts=0, seconds=4000.0)
    few = run(of, FaultDomain.JOB, *map(process, sorted(times)))
    many = run(of, FaultDomain.JOB, *map(process, sorted([*times, *more])))
    assert many.ettr <= few.ettr + 1e-9


@given(at=st.floats(0, 700), slower=st.floats(0.1, 50), domain=st.sampled_from(FaultDomain), role=roles)
def test_later_detection_never_raises_ettr(at: float, slower: float, domain: FaultDomain, role: str) -> None:
    fast = settings()
    slow = fast.changed(detection=fast.detection.model_dump() | {"explicit_seconds": DETECT + slower})
    assert run(slow, domain, process(at, role)).ettr <= run(fast, domain, process(at, role)).ettr + 1e-9


@pytest.mark.parametrize("name", ARMS)
def test_more_frequent_faults_lower_ettr_and_goodput_of_every_arm(name: str) -> None:
    def mean(rate: float) -> tuple[float, float]:
        of = SimulationSettings.model_validate(
            {"days": 10, "faults": {"trainer_per_gpu_hour": rate, "rollout_per_gpu_hour": rate}}
        )
        found = [simulate(of, of.arms[name], draw_scenario(of, n), standbys={}) for n in range(4)]
        return sum(a.ettr for a in found), sum(a.goodput for a in found)

    ettr, goodput = zip(*map(mean, (1e-6, 1e-5, 1e-4)), strict=True)
    assert list(ettr) == sorted(ettr, reverse=True) and list(goodput) == sorted(goodput, reverse=True)


def test_the_same_seed_gives_the_same_run() -> None:
    of = SimulationSettings.model_validate(
        {
            "days": 5,
            "faults": {
                "burst_sizes": {1: 0.9, 4: 0.1},
                "offender_share": 0.1,
                "offender_factor": 8.0,
                "false_alarms_per_1000_machine_days": 20.0,
            },
        }
    )
    for found in of.arms.values():
        first, again, other = (
            simulate(of, found, draw_scenario(of, seed), standbys={TRAINER: 1, ROLLOUT: 1}) for seed in (1, 1, 2)
        )
        assert first == again != other


def test_role_based_recovery_gains_more_the_more_often_machines_fail() -> None:
    """The trend of RobustRL's sweep from one to five faults."""

    def gain(num_faults: int) -> float:
        of = settings(seconds=20_000.0)
        faults = [process(20_000.0 * (n + 0.3) / num_faults) for n in range(num_faults)]
        by_role, by_job = (run(of, domain, *faults, every_steps=5) for domain in (FaultDomain.ROLE, FaultDomain.JOB))
        return by_role.ettr - by_job.ettr

    gains = [gain(n) for n in (1, 2, 5, 10)]
    assert gains == sorted(gains) and gains[0] > 0


def test_stage_times_of_a_fault_replace_those_of_the_arm() -> None:
    from rolecall.simulate.faults import StageSeconds

    stages = StageSeconds(detect=1.0, decide=2.0, restart=3.0, reconnect=4.0, regroup=5.0)
    account = run(settings(), FaultDomain.REPLICA, replace(process(100.0, ROLLOUT), stages=stages))
    assert account.ettr == pytest.approx(1 - 10 / 8000)
