"""How machines follow their peers: habit, gain, lag and lead are learned and taken out; a fault is not."""

import numpy as np
import pytest

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.following import GAIN_SPREADS, GAIN_SURE, PeerCorrelation

MACHINES, TICKS = 9, 1500


def fleet_wave(ticks: int = TICKS) -> Floats:
    """(T,): a training step of 10 ticks, 6 of them high."""
    return np.where(np.arange(ticks) % 10 < 6, 20.0, 0.0).astype(np.float32)


def followed(own: Floats, wave: Floats, *, learning: Floats | None = None) -> tuple[PeerCorrelation, Floats, Floats]:
    """Deviations (T, N): the middle of their interval, and half its width. `own` (T, N)."""
    following, known = PeerCorrelation(1, MACHINES), np.ones((1, MACHINES), dtype=np.bool_)
    everyone = np.ones(MACHINES, dtype=np.bool_)
    middles, widths = [], []
    for t in range(len(own)):
        values = (wave[t] + own[t])[None, :].astype(np.float32)
        middle = np.median(values, axis=1)
        learns = everyone if learning is None else learning[t].astype(np.bool_)
        low, high, *_ = following.tick(values - middle[:, None], known, middle, learns)
        middles.append((low[0] + high[0]) / 2)
        widths.append((high[0] - low[0]) / 2)
    return following, np.array(middles), np.array(widths)


def noise(seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((TICKS, MACHINES)).astype(np.float32)


def test_a_machine_that_is_late_or_early_has_no_spikes_left_at_the_edges_of_a_step() -> None:
    wave, own = fleet_wave(), noise()
    step = np.diff(wave, prepend=wave[0])
    own[:, 2] -= 0.4 * step  # late: it still shows some of what was before
    own[:, 6] += 0.4 * np.append(step[1:], 0)  # early
    following, z, _ = followed(own, wave)
    assert following.lag[0, 2] == pytest.approx(-0.4, abs=0.1)
    assert following.lead[0, 6] == pytest.approx(0.4, abs=0.1)
    late = np.abs(z[1000:])
    at_edges = step[1000:] != 0
    assert late[at_edges, 2].mean() < 1.6 * late[at_edges, 0].mean()


def test_the_lead_tells_how_much_of_the_last_deviation_was_the_step_that_came() -> None:
    wave, own = fleet_wave(), noise()
    step = np.diff(wave, prepend=wave[0])
    own[:, 6] += 0.4 * np.append(step[1:], 0)
    following, known, everyone = (
        PeerCorrelation(1, MACHINES),
        np.ones((1, MACHINES), np.bool_),
        np.ones(MACHINES, np.bool_),
    )
    left = []
    last = np.zeros(MACHINES, dtype=np.float32)
    for t in range(TICKS):
        values = (wave[t] + own[t])[None, :].astype(np.float32)
        middle = np.median(values, axis=1)
        low, high, lead, edge, _ = following.tick(values - middle[:, None], known, middle, everyone)
        if edge[0, 0] and t > 1000:
            left.append((abs(last[6]), abs(last[6] - lead[0, 6])))
        last = ((low + high) / 2)[0]
    before, after = np.mean(left, axis=0)
    assert after < 0.5 * before


def test_gains_are_learned_from_moves_and_limited_to_what_peers_have() -> None:
    wave, own = np.repeat(np.random.default_rng(3).normal(0, 20, TICKS // 50), 50).astype(np.float32), noise()
    own += np.outer(wave, np.linspace(-0.04, 0.04, MACHINES)).astype(np.float32)
    own[:, 8] += 2.0 * wave
    following, z, _ = followed(own, wave)
    assert following.gain[0, :8] - following.gain[0, 4] == pytest.approx(np.linspace(-0.04, 0.03, 8), abs=0.012)
    usual = 1.4826 * np.median(np.abs(following.gain))
    assert following.gain[0, 8] == pytest.approx(GAIN_SPREADS * usual, rel=0.1)
    assert np.abs(z[1000:, :8]).mean() < 1.3


def test_a_clock_that_is_wrong_by_more_than_a_tick_is_not_held_for_a_weak_answer() -> None:
    """Nor is the machine accused for it when the fleet goes to another level."""
    wave, own = fleet_wave(), noise()
    own[:, 5] += np.roll(wave, 3) - wave
    moved = np.where(np.arange(TICKS) >= 1300, 60.0, 0.0).astype(np.float32)
    following, z, _ = followed(own, wave + moved)
    assert following.gain_max[0, 0] == np.float32(GAIN_SURE)
    in_place = (np.arange(TICKS) > 1310) & (np.roll(wave, 3) == wave)
    assert np.abs(z[in_place, 5]).mean() < 0.6


def test_a_fleet_that_never_moved_teaches_no_gain_and_a_new_move_leaves_room() -> None:
    wave = np.zeros(TICKS, dtype=np.float32)
    wave[1200:] = 40.0
    _, _, width = followed(noise(), wave)
    still, _, _ = followed(noise(), np.zeros(TICKS, dtype=np.float32))
    assert np.abs(still.gain).max() < 0.1
    assert width[1201].min() > 1.0
    assert width[1190].max() < 0.1
    assert width[1450].max() < width[1201].max()


def test_a_standing_fault_does_not_become_the_habit_of_a_machine_that_is_not_learned_from() -> None:
    own, learning = noise(), np.ones((TICKS, MACHINES), dtype=np.float32)
    own[1000:, 3] += 8.0
    learning[1003:, 3] = 0.0
    _, z, _ = followed(own, np.zeros(TICKS, dtype=np.float32), learning=learning)
    assert z[1400:, 3].mean() == pytest.approx(8.0, abs=0.8)


def test_one_wild_sample_hardly_moves_habit_or_scale() -> None:
    own = noise()
    wild = own.copy()
    wild[1000, 3] += 1e6
    (a, *_), (b, *_) = (followed(x, np.zeros(TICKS, dtype=np.float32)) for x in (own, wild))
    assert abs(a.habit[0, 3] - b.habit[0, 3]) < 0.01 and abs(a.size[0, 3] - b.size[0, 3]) < 0.02


def test_a_scale_is_there_within_a_few_ticks() -> None:
    own = 100 * noise()
    _, z, _ = followed(own[:40], np.zeros(40, dtype=np.float32))
    assert 0.5 < np.abs(z[16:]).mean() < 1.5


@pytest.mark.parametrize(
    ("wave", "who", "by", "stays"),
    [
        ("still", "peers", 30.0, True),
        ("still", "it", 30.0, False),
        ("steps", "peers", 10.0, False),  # they often go as far
    ],
)
def test_who_stayed_is_reported_where_its_peers_went_where_they_never_were(
    wave: str, who: str, by: float, stays: bool
) -> None:
    rng = np.random.default_rng(12)
    values = rng.standard_normal((600, MACHINES)).astype(np.float32)
    values += fleet_wave(600)[:, None] if wave == "steps" else 0
    values[590:, : 8 if who == "peers" else None][:, 0 if who == "peers" else 8 :] += by
    following, known = PeerCorrelation(1, MACHINES), np.ones((1, MACHINES), dtype=np.bool_)
    reported = []
    for v in values:
        middle = np.median(v[None, :], axis=1)
        reported.append(
            following.tick(v[None, :] - middle[:, None], known, middle, np.ones(MACHINES, np.bool_)).stayed[0]
        )
    after = np.array(reported[590:])
    assert after[:, 8].all() if stays else not after[:, 8].any()
    assert not after[:, :8].any()
