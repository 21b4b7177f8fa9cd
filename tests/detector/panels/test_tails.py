"""Healthy tails of scores: what the asked rate of false alarms becomes as a threshold."""

import numpy as np
import pytest

from rolecall.detector.panels.sequential.tails import ScoreTail

RATE = 1e-4


def filled(machines: int, blocks: int, seed: int, *, heavy: float = 1.0, faulty: int = 0) -> ScoreTail:
    """Exponential block maxima, of slope `heavy` beyond the highest 2 %; `faulty` machines are always far away."""
    rng, tail = np.random.default_rng(seed), ScoreTail()
    knee = -np.log(0.02)
    for _ in range(blocks):
        maxima = rng.exponential(1.0, machines)
        maxima = np.where(maxima > knee, knee + heavy * (maxima - knee), maxima)
        maxima[:faulty] = 40.0 + rng.exponential(1.0, faulty)
        tail.add(maxima.astype(np.float32))
    return tail


@pytest.mark.parametrize("machines", [12, 1000])
def test_an_exponential_tail_gives_the_asked_rate(machines: int) -> None:
    thresholds = [filled(machines, 40, seed).threshold(RATE) for seed in range(8)]
    assert np.median(thresholds) == pytest.approx(-np.log(RATE), rel=0.15)


def test_a_large_fleet_shows_how_heavy_its_far_tail_is() -> None:
    right = -np.log(0.02) + 2.0 * np.log(0.02 / RATE)
    large = filled(1000, 40, 1, heavy=2.0).threshold(RATE)
    assert large > filled(20, 40, 1, heavy=2.0).threshold(RATE) + 2 and large == pytest.approx(right, rel=0.3)


@pytest.mark.parametrize(("machines", "faulty"), [(100, 2), (1000, 2)])
def test_machines_that_are_faulty_all_the_time_do_not_raise_the_threshold(machines: int, faulty: int) -> None:
    tail, healthy = filled(machines, 40, 2, faulty=faulty), filled(machines, 40, 2)
    assert tail.threshold(RATE) < 1.8 * healthy.threshold(RATE)


def test_nothing_is_said_before_there_is_a_history() -> None:
    tail = ScoreTail()
    assert tail.threshold(RATE) == np.inf
    tail.add(np.ones(1000, dtype=np.float32))
    assert tail.threshold(RATE) == np.inf and (tail.surprise(np.ones(3, dtype=np.float32)) == 0).all()
