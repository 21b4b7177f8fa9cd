"""The simulator's ETTR for a run that was measured."""

import pytest

from rolecall.simulate.faults import ROLLOUT, TRAINER, StageSeconds
from rolecall.simulate.measured import MeasuredFault, MeasuredRun, simulate_measured
from rolecall.simulate.settings import ARMS
from rolecall.simulate.simulator import Account
from rolecall.views.ettr import Loss, ettr

STAGES = StageSeconds(detect=4.0, decide=0.5, restart=9.0, reconnect=1.0, regroup=0.7)
SECONDS = 14.5
STALL = 5.2


def measured(*faults: MeasuredFault) -> MeasuredRun:
    return MeasuredRun(num_steps=50, step_seconds=2.0, num_trainers=2, num_rollouts=3, faults=faults, ahead_steps=2.0)


def test_a_measured_run_has_the_ettr_of_its_own_report() -> None:
    faults = [
        MeasuredFault(step=10.0, role=TRAINER, replica=1, stages=STAGES),
        MeasuredFault(step=30.0, role=ROLLOUT, replica=2, stages=STAGES),
    ]
    account = simulate_measured(measured(*faults), ARMS["replica"])
    # The same losses, by the accounting of a real run: the first at 20 s, the second later by what the first cost.
    assert 100 + STALL < account.seconds < 100 + 2 * SECONDS
    losses = [
        Loss(replica="trainer/1", since=20.0, until=20 + SECONDS, stalled_until=20 + STALL),
        Loss(replica="rollout/2", since=80.0, until=80 + SECONDS),
    ]
    assert account.ettr == pytest.approx(ettr(0.0, account.seconds, losses, num_rollouts=3, num_trainers=2), abs=1e-3)


def test_trainers_count_again_once_the_interrupted_step_is_committed() -> None:
    fault = MeasuredFault(step=10.5, role=TRAINER, replica=1, stages=STAGES, until_commit=True)
    account = simulate_measured(measured(fault), ARMS["replica"])
    # The survivor trains the half step that is left, and its half of what the other had done, at half the pace.
    commit = STALL + 2 * (1.0 + 0.5)
    losses = [Loss(replica="trainer/1", since=21.0, until=21 + SECONDS, stalled_until=21 + commit)]
    assert account.ettr == pytest.approx(ettr(0.0, account.seconds, losses, num_rollouts=3, num_trainers=2), abs=1e-3)


def test_after_a_restart_of_the_job_trainers_wait_for_trajectories() -> None:
    def run(fill: float) -> Account:
        stages = StageSeconds(detect=1.0, restart=9.0, fill=fill)
        fault = MeasuredFault(step=10.5, role=ROLLOUT, replica=1, stages=stages)
        return simulate_measured(measured(fault), ARMS["restart_warm"])

    at_once, later = run(0.0), run(6.0)
    assert later.seconds == pytest.approx(at_once.seconds + 6.0)
    assert later.effective_gpu_seconds == pytest.approx(at_once.effective_gpu_seconds + 6.0 * 5)


def test_without_faults_nothing_is_lost() -> None:
    account = simulate_measured(measured(), ARMS["restart_warm"])
    assert account.ettr == 1.0 and account.seconds == pytest.approx(100.0)


def test_a_fault_is_met_at_its_step_whatever_happened_before() -> None:
    early = MeasuredFault(step=10.0, role=TRAINER, replica=0, stages=STAGES)
    late = MeasuredFault(step=40.5, role=TRAINER, replica=0, stages=STAGES)
    both = simulate_measured(measured(late, early), ARMS["restart_warm"])
    alone = simulate_measured(measured(late), ARMS["restart_warm"])
    assert both.num_faults == 2
    # Half a step is done again because of the second, none because of the first.
    assert alone.seconds == pytest.approx(100 + 14.5 + 1.0)
    assert both.seconds == pytest.approx(100 + 2 * 14.5 + 1.0)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (MeasuredFault(step=1.0, role=TRAINER, replica=2, stages=STAGES), "there is no trainer/2"),
        (MeasuredFault(step=1.0, role="reward", replica=0, stages=STAGES), "there is no reward/0"),
        (MeasuredFault(step=50.0, role=TRAINER, replica=0, stages=STAGES), "the run has 50 steps"),
    ],
)
def test_a_fault_that_the_run_cannot_have_is_refused(fault: MeasuredFault, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        simulate_measured(measured(fault), ARMS["replica"])
