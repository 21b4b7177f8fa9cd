"""The learned band of microbatch numbers, and a trainer that leaves it.

pytest tests/rl_runtime/trainer/test_band.py
"""

import math
import random
from dataclasses import replace

import pytest

from rolecall.agent.processes.state_pages import ReportedException, parse_page
from rolecall.agent.reporter import reporter
from rolecall.core.errors import WrongNumbers
from rolecall.core.ids import replica_id
from rolecall.rl_runtime.protocol.messages import CheckVerdict, MicrobatchNumbers, UnusualMicrobatches
from rolecall.rl_runtime.trainer.band import (
    REMEMBERED,
    WARM_UP,
    LearnedBand,
    band_after,
    compare,
    differ,
    unusual_microbatches,
)
from rolecall.rl_runtime.trainer.reduce import CommitVote
from tests.rl_runtime.trainer.test_reduce import ballot, votes
from tests.rl_runtime.trainer_process import LEDGER, Spied, make_microbatches, tiny_job

JOB = tiny_job()
NAME = replica_id("trainer", 0)


def numbers(loss: float = 0.0, grad_norm: float = 1.0) -> MicrobatchNumbers:
    return MicrobatchNumbers(loss=loss, grad_norm=grad_norm)


def learned(count: int = 100, seed: int = 0) -> LearnedBand:
    """Losses with spread 0.05, gradient norms over an order of magnitude."""
    rng = random.Random(seed)
    return LearnedBand().after(numbers(rng.gauss(0, 0.05), math.exp(rng.gauss(0, 0.5))) for _ in range(count))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (numbers(), ""),
        (numbers(0.3, 4.0), ""),
        (numbers(-0.3, 0.001), ""),
        (numbers(0.0, 100.0), "gradient norm 100, usually"),
        (numbers(0.0, math.inf), "gradient norm inf, usually"),
        (numbers(2.0, 1.0), "loss 2, usually"),
        (numbers(-2.0, 1.0), "loss -2, usually"),
        (numbers(2.0, 0.0), ""),  # all answers of its groups earned the same
        (numbers(2.0, math.nan), ""),  # what is not finite is refused elsewhere
    ],
)
def test_only_numbers_far_from_those_of_the_run_are_outside(value: MicrobatchNumbers, text: str) -> None:
    assert learned().outside(value).startswith(text) and bool(learned().outside(value)) == bool(text)


def test_nothing_is_outside_before_enough_is_learned() -> None:
    assert learned(WARM_UP - 1).outside(numbers(9.0, 900.0)) == ""
    assert learned(WARM_UP).outside(numbers(9.0, 900.0))


@pytest.mark.parametrize("wrong", [numbers(9.0, 1.0), numbers(0.0, 900.0)])
def test_what_was_not_judged_in_the_warm_up_does_not_widen_the_band(wrong: MicrobatchNumbers) -> None:
    healthy = learned(WARM_UP + 20).learned
    band = LearnedBand().after([*healthy[:10], wrong])
    assert wrong in band.learned, "too few others to tell"
    band = band.after(healthy[10:])
    assert band.learned == healthy and band.outside(wrong)


def test_healthy_numbers_are_hardly_ever_outside() -> None:
    found = sum(bool(learned(64, seed).outside(n)) for seed in range(20) for n in learned(100, seed + 100).learned)
    assert found == 0


def test_equal_losses_leave_room_for_rounding() -> None:
    band = LearnedBand().after([numbers(1e-9)] * 50)
    assert band.outside(numbers(-1e-9)) == "" and band.outside(numbers(0.1))


def test_the_band_drops_the_oldest_and_skips_zero_gradients() -> None:
    band = learned(REMEMBERED).after([numbers(1.0, 0.0), numbers(0.5, 2.0), numbers(0.1, math.inf), numbers(math.nan)])
    assert len(band.learned) == REMEMBERED and band.learned[-1] == numbers(0.5, 2.0)


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        (numbers(0.5, 800.0), numbers(0.5, 800.0), False),
        (numbers(0.5, 800.0), numbers(0.501, 802.0), False),
        (numbers(0.5, 800.0), numbers(0.5, 0.8), True),
        (numbers(5.0, 1.0), numbers(0.1, 1.0), True),
        (numbers(1e-7, 1.0), numbers(-1e-7, 1.0), False),
    ],
)
def test_rounding_is_no_difference(one: MicrobatchNumbers, other: MicrobatchNumbers, differs: bool) -> None:
    assert differ(one, other) is differ(other, one) is differs


def with_unusual(vote: CommitVote, **value_of: MicrobatchNumbers) -> CommitVote:
    """`value_of`: numbers by microbatch, `m1` for 7.1: unusual ones."""
    changed = {f"7.{name[1:]}": value for name, value in value_of.items()}
    return replace(
        vote,
        microbatches=tuple(
            replace(s, numbers=changed[s.microbatch_id], unusual="far") if s.microbatch_id in changed else s
            for s in vote.microbatches
        ),
    )


@pytest.mark.parametrize(
    ("again", "verdict"),
    [(None, CheckVerdict.WRONG), (numbers(0.1, 800.0), CheckVerdict.SAME), (numbers(0.1, 90.0), CheckVerdict.UNCLEAR)],
)
def test_the_second_computation_settles_it(again: MicrobatchNumbers | None, verdict: CheckVerdict) -> None:
    first, second = votes()
    before = unusual_microbatches([first, with_unusual(second, m1=numbers(0.1, 800.0))])
    assert [(u.replica, u.microbatch_id, u.because) for u in before] == [("trainer/1", "7.1", "far")]
    everything = ballot(0, ["7.0", "7.1", "7.2", "7.3"])
    if again is not None:
        everything = with_unusual(everything, m1=again)
    (found,) = compare([everything], before)
    assert (found.verdict, found.by, found.again) == (verdict, "trainer/0", again or numbers(0.1, 1.0))
    after = band_after(learned(), [everything], [found])
    assert len(after.learned) == 100 + (3 if verdict is CheckVerdict.UNCLEAR else 4)
    assert bool(after.outside(numbers(0.1, 800.0))) is (verdict is not CheckVerdict.SAME)


def test_what_was_proven_right_is_usual_while_it_is_remembered() -> None:
    band = learned().after([numbers(3.0, 100.0)])
    assert band.outside(numbers(-5.0, 190.0)) == "" and band.outside(numbers(7.0)) and band.outside(numbers(0.0, 210.0))
    forgotten = band.after(learned(REMEMBERED, seed=1).learned)
    assert forgotten.outside(numbers(3.0)) and forgotten.outside(numbers(0.0, 100.0))


def test_a_policy_that_has_learned_its_task_is_hardly_ever_computed_twice() -> None:
    """Nearly all groups earn the same, so that gradients are tiny, but for one in thirty."""
    rng, band, checks = random.Random(0), LearnedBand(), 0
    for _ in range(4000):
        size = 0.02 if rng.random() < 1 / 30 else 2e-4
        new = numbers(rng.gauss(0, 1e-4), size * math.exp(rng.gauss(0, 0.5)))
        checks += bool(band.outside(new))
        band = band.after([new])
    assert checks <= 12, f"{checks} of 4,000"
    assert band.outside(numbers(0.0, 2.0))


def test_several_trainers_at_once_are_no_machine() -> None:
    first, second = votes()
    ballots = [with_unusual(first, m0=numbers(0.1, 800.0)), with_unusual(second, m1=numbers(0.1, 800.0))]
    found = compare(ballots, ())
    assert [(c.first.replica, c.verdict, c.by) for c in found] == [
        ("trainer/0", CheckVerdict.SEVERAL, ""),
        ("trainer/1", CheckVerdict.SEVERAL, ""),
    ]
    assert compare(votes(), ()) == ()
    after = band_after(learned(), ballots, found)
    assert len(after.learned) == 104, "a lasting new level is learned by median and spread"
    assert after.outside(numbers(0.1, 800.0)), "but nobody has computed them twice: they prove nothing"
    confirmed = after.after([numbers(0.1, 800.0001)])
    assert confirmed.outside(numbers(0.1, 800.0)) == ""


def test_what_was_computed_once_is_forgotten_with_the_rest() -> None:
    band = learned().after([numbers(3.0, 100.0), numbers(0.1, 900.0)], unproven=[numbers(3.0, 100.0)])
    assert band.unproven == (numbers(3.0, 100.0),)
    assert band.outside(numbers(3.0, 1.0)) and band.outside(numbers(0.0, 1000.0)) == "", "the other one is proven"
    assert band.after(learned(REMEMBERED, seed=1).learned).unproven == ()


def test_a_new_level_that_all_have_becomes_usual() -> None:
    band = learned()
    for n in range(REMEMBERED):
        new = numbers(0.0, 1000.0 + n / 10)
        band = band.after([new], unproven=[new] if band.outside(new) else [])
    assert band.outside(numbers(0.0, 1000.0)) == ""


def reported() -> ReportedException | None:
    """The last exception on this process's page."""
    return parse_page(reporter.page_bytes()).exception


def trained(factors: dict[int, float], steps: int) -> tuple[Spied, list[UnusualMicrobatches]]:
    """A single trainer after `steps`; `factors`: by how much it errs in its n-th microbatch."""
    calls = iter(range(10_000))
    trainer = Spied(replica=NAME, incarnation=1, job=JOB, on_microbatch=lambda: factors.get(next(calls)))
    trainer.join(1, 1, 0, 1, "127.0.0.1", 0)
    raised: list[UnusualMicrobatches] = []
    for step in range(steps):
        work = make_microbatches(JOB, step)
        ids = [m.microbatch_id for m in work]
        try:
            trainer.train_step(1, 1, step, work, ids, LEDGER, [NAME])
        except UnusualMicrobatches as e:
            raised.append(e)
            assert trainer.state.commit.step == step - 1 and trainer.computed(step) == ()
            trainer.train_step(1, 1, step, work, ids, LEDGER, [NAME], e.microbatches)
    return trainer, raised


STEPS = WARM_UP // 4 + 1


def test_wrong_numbers_of_a_trainer_do_not_enter_its_step() -> None:
    healthy, _ = trained({}, STEPS)
    before = reported()
    trainer, raised = trained({WARM_UP + 1: 1000.0}, STEPS)
    (error,) = raised
    step = STEPS - 1
    assert str(error).startswith(f"trainer/0, step {step}: microbatch {step}.1 is unusual: ")
    assert trainer.last_result is not None
    (compared,) = trainer.last_result.compared
    assert compared.verdict is CheckVerdict.WRONG and compared.by == NAME
    assert compared.again is not None
    assert compared.first.numbers.grad_norm == pytest.approx(1000 * compared.again.grad_norm)
    assert trainer.exported()[1] == healthy.exported()[1], "commit and band are those of a healthy run"
    report = reported()
    assert report is not None and report.number == (before.number if before else 0) + 1
    assert (WrongNumbers.parse(report.message) or ())[:3] == ("trainer/0", 1, f"step {step}")


def test_unusual_data_is_trained_on_as_it_is() -> None:
    trainer, _ = trained({}, STEPS - 1)
    trainer.state.band = LearnedBand(tuple(replace(n, grad_norm=n.grad_norm / 1e6) for n in trainer.state.band.learned))
    work = make_microbatches(JOB, STEPS - 1)
    ids = [m.microbatch_id for m in work]
    before = reported()
    with pytest.raises(UnusualMicrobatches) as raised:
        trainer.train_step(1, 1, STEPS - 1, work, ids, LEDGER, [NAME])
    result = trainer.train_step(1, 1, STEPS - 1, work, ids, LEDGER, [NAME], raised.value.microbatches)
    assert {c.verdict for c in result.compared} == {CheckVerdict.SAME} and len(result.compared) == 4
    work = make_microbatches(JOB, STEPS)
    trainer.train_step(1, 1, STEPS, work, [m.microbatch_id for m in work], LEDGER, [NAME])  # the new level is usual
    assert reported() == before
