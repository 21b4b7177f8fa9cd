"""Log likelihood ratios of level shifts: they rise with a shift that stays, not with an outlier, and date it."""

import numpy as np
import pytest

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.level_shifts import (
    BETA_MIN,
    LENGTHS,
    LEVEL_MAX,
    LEVEL_MIN,
    LEVEL_PRIOR,
    OTHERS_SHARE,
    LevelShifts,
    ShiftChannel,
    _episode,
)
from rolecall.detector.panels.sequential.tails import BLOCK_TICKS
from rolecall.detector.panels.sequential.whitening import Whitening

MACHINES, TICKS, ONSET = 12, 1400, 1200


def process(seed: int, phi: float, dof: float) -> Floats:
    """(T, N): AR(1) with Student-t innovations, robust standard deviation 1."""
    rng = np.random.default_rng(seed)
    z = np.zeros((TICKS, MACHINES), dtype=np.float32)
    pushed = rng.standard_t(dof, z.shape).astype(np.float32)
    for t in range(1, TICKS):
        z[t] = phi * z[t - 1] + pushed[t]
    return np.asarray(z / np.median(np.abs(z)) * 0.6745, dtype=np.float32)


def run(z: Floats, until: int = TICKS, *, stayed: int = MACHINES) -> tuple[Floats, LevelShifts]:
    """Scores (T, N) of a fleet of which all blocks before the onset are healthy. Machine `stayed` is from then on away
    from its peers because they went."""
    past, shifts = Whitening(1, MACHINES), LevelShifts(1, MACHINES)
    known, everyone = np.ones((1, MACHINES), np.bool_), np.ones(MACHINES, np.bool_)
    edge = np.zeros((1, 1), np.bool_)
    scores, others_went = [], np.zeros((1, MACHINES), np.bool_)
    for t in range(until):
        others_went[:, stayed:] = t >= ONSET
        now = z[t][None, :]
        new = past.tick(now, now, known, everyone, edge)
        scores.append(shifts.tick(now, now, known, others_went, new, past)[0])
        if t % BLOCK_TICKS == BLOCK_TICKS - 1:
            maxima = shifts.end_block()
            if 100 < t < ONSET:
                shifts.learn(maxima)
    return np.array(scores), shifts


@pytest.mark.parametrize(("phi", "dof", "soon"), [(0.0, 30.0, 10), (0.0, 2.5, 12), (0.6, 4.0, 20), (0.94, 3.0, 40)])
def test_a_shift_that_stays_is_seen_soon_and_dated(phi: float, dof: float, soon: int) -> None:
    z = process(1, phi, dof)
    z[ONSET:, 3] += 7.0
    scores, shifts = run(z, ONSET + soon)
    assert scores[-1, 3] > 12 > scores[ONSET + soon - 1, [0, 1, 2, 4, 5]].max()
    assert abs(shifts.age(0, 3) - soon) <= 3


@pytest.mark.parametrize(("phi", "dof"), [(0.0, 30.0), (0.94, 3.0)])
def test_an_outlier_that_fades_as_usual_is_no_shift(phi: float, dof: float) -> None:
    z = process(2, phi, dof)
    z[ONSET:, 3] += 15.0 * phi ** np.arange(TICKS - ONSET)
    scores, _ = run(z)
    assert scores[ONSET:, 3].max() < 10


def test_a_slow_ramp_is_seen() -> None:
    z = process(3, 0.9, 4.0)
    z[ONSET:, 3] += np.minimum(np.arange(TICKS - ONSET) / 60, 1) * 8.0
    scores, _ = run(z)
    assert scores[ONSET + 60, 3] > 12 > scores[ONSET, 3]


@pytest.mark.parametrize(("phi", "dof"), [(0.0, 30.0), (0.0, 2.5), (0.9, 3.0)])
def test_scores_of_a_healthy_fleet_are_as_rare_as_they_say(phi: float, dof: float) -> None:
    scores, shifts = run(process(4, phi, dof))
    blocks = scores[640:1280].reshape(-1, BLOCK_TICKS, MACHINES).max(axis=1).ravel()
    for p in (0.1, 0.02):
        assert (blocks > -np.log(p)).mean() <= 3 * p  # three lengths, one score
    assert (shifts.beta >= BETA_MIN).all()


def test_a_machine_that_is_forgotten_begins_again() -> None:
    z = process(5, 0.0, 30.0)
    z[ONSET:, 3] += 8.0
    _, shifts = run(z, ONSET + 20)
    shifts.earlier += 1.0
    state = (shifts.sums, shifts.trough, shifts.peak, shifts.earlier)
    others = [x[..., 4].copy() for x in state]
    shifts.forget(np.arange(MACHINES) == 3)
    assert all((x[..., 3] == 0).all() for x in state)
    assert all((x[..., 4] == before).all() for x, before in zip(state, others, strict=True))


def test_a_blip_long_before_does_not_date_a_shift() -> None:
    z = process(10, 0.0, 30.0)
    z[ONSET - 300 : ONSET - 297, 3] += 6.0
    z[ONSET:, 3] += 6.0
    _, shifts = run(z, ONSET + 20)
    assert abs(shifts.age(0, 3) - 20) <= 3


def test_what_earlier_episodes_left_fades_to_nothing() -> None:
    z = process(11, 0.0, 30.0)
    z[200:212, 3] += 20.0
    _, shifts = run(z, 240)
    now, age, location, earlier = shifts.sums[0], shifts.ages[0], shifts.location[0], shifts.earlier
    assert earlier[0, 3] > 10
    for _ in range(10_000):
        _, _, earlier, _ = _episode(now, age, now, now, earlier, age, location)
    assert earlier[0, 3] == 0


def test_block_maxima_of_before_go_when_there_are_enough_new_ones() -> None:
    shifts = LevelShifts(1, MACHINES)
    high = np.full((len(LENGTHS) + 1, 1, MACHINES), 50.0, dtype=np.float32)
    rng = np.random.default_rng(0)
    for _ in range(6):
        shifts.learn(high + rng.exponential(1.0, high.shape).astype(np.float32))
    assert (shifts.location > 25).all()
    shifts.renew(60)
    for _ in range(30):
        shifts.learn(rng.exponential(1.0, high.shape).astype(np.float32))
    assert (shifts.location < 10).all() and len(shifts.blocks) == 30


def test_no_machines_teach_nothing() -> None:
    shifts = LevelShifts(2, MACHINES)
    before = shifts.beta.copy()
    shifts.learn(np.zeros((len(LENGTHS) + 1, 2, 0), dtype=np.float32))
    assert (shifts.beta == before).all() and not shifts.blocks


@pytest.mark.parametrize(("unrest", "least"), [(1.0, LEVEL_MIN), (8.0, LEVEL_MAX)])
def test_smaller_shifts_are_looked_for_where_healthy_machines_stand_off_less(unrest: float, least: float) -> None:
    z = process(6, 0.0, 30.0)
    minute = np.arange(TICKS) // 60
    for n in range(MACHINES):  # unequal work: one minute in eight a machine stands off
        z[:, n] += np.where((minute + n) % 8 == 0, unrest - 1, 0)
    _, young = run(z, 100)
    assert young.least == LEVEL_PRIOR
    _, shifts = run(z)
    assert shifts.least[0, 0] == pytest.approx(least, rel=0.3)


def test_a_machine_that_stayed_where_it_was_is_not_suspected_at_once() -> None:
    z = process(7, 0.0, 30.0)
    z[ONSET:, MACHINES - 1] += 8.0
    scores, _ = run(z, ONSET + 12)
    assert scores[-1, MACHINES - 1] > 30
    scores, _ = run(z, ONSET + 12, stayed=MACHINES - 1)
    assert scores[-1, MACHINES - 1] < 10


def test_what_comes_and_goes_adds_up_and_is_dated_from_its_first_time() -> None:
    z = process(8, 0.9, 3.0)
    on = (np.arange(TICKS) - ONSET) // 15 % 2 == 0
    z[ONSET:, 3] += np.where(on[ONSET:], 12.0, 0)
    first = run(z, ONSET + 15)[0][-1, 3]
    scores, shifts = run(z, ONSET + 135)
    assert scores[-1, 3] > 1.5 * first > scores[ONSET:, :3].max()
    assert abs(shifts.age(0, 3) - 135) <= 3


def test_outliers_of_a_wild_metric_do_not_add_up() -> None:
    scores, shifts = run(process(9, 0.9, 2.2))
    assert shifts.earlier[0].max() < 2 and np.quantile(scores[ONSET:], 0.99) < 8


def test_sums_do_not_stay_up_where_nothing_stands() -> None:
    """With a clock badly set much is left unexplained at each edge, no forecast is better than the other, and W must
    not keep what was long ago."""
    past, shifts = Whitening(1, MACHINES), LevelShifts(1, MACHINES)
    shifts.sums[:, 0, 3:5] = 30.0
    known, no = np.ones((1, MACHINES), np.bool_), np.zeros((1, MACHINES), np.bool_)
    wide = np.full((1, MACHINES), 20.0, np.float32)
    for _ in range(100):
        new = past.tick(-wide, wide, known, known[0], no[:, :1])
        shifts.levels[2, 0, 4] = 3.0  # only this one stands
        shifts.tick(-wide, wide, known, no, new, past)
    assert shifts.sums[:, 0, 3].max() < 3 and shifts.sums[:, 0, 4].min() > 15


def test_an_episode_that_ends_slowly_does_not_raise_the_score() -> None:
    shifts = LevelShifts(1, MACHINES)
    shifts.earlier[0, 3], shifts.trough[0, 3], shifts.sums[:, 0, 3] = 20.0, 12.0, 12.0
    past = Whitening(1, MACHINES)
    nothing, known = np.zeros((1, MACHINES), np.float32), np.ones((1, MACHINES), np.bool_)
    new = past.tick(nothing, nothing, known, known[0], np.zeros((1, 1), np.bool_))
    shifts.tick(nothing, nothing, known, np.zeros_like(known), new, past)
    assert shifts.earlier[0, 3] > 15 and shifts.maxima[:-1, 0, 3].max() <= 12.0


def test_duplicates_of_a_metric_add_nothing_to_its_evidence() -> None:
    rng = np.random.default_rng(5)
    values = np.repeat(rng.standard_normal((1, 400, 6)), 3, axis=0).astype(np.float32)
    values[:, 300:, 2] += 8.0
    known, machines = np.ones((3, 6), np.bool_), np.ones(6, np.bool_)
    several = []
    for distinct in ([True, False, False], [True, True, True]):
        channel = ShiftChannel(3, 6)
        for t in range(320):
            middle = np.median(values[:, t], axis=1)
            residual = values[:, t] - middle[:, None]
            single, together = channel.tick(residual, known, middle, machines, machines, np.array(distinct))
        assert single[2] > 10
        several.append(together[2] / single[2])
    assert several == pytest.approx([1.0, 1 + 2 * OTHERS_SHARE])
