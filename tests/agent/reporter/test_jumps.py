"""A number of the training jumps when it leaves its own recent range, and a level that stays is no jump for long."""

from random import Random

import pytest

from rolecall.agent.reporter.jumps import NUM_REMEMBERED, OutlierDetector


def _after(values: list[float]) -> OutlierDetector:
    it = OutlierDetector()
    reported = [it.jumps(v) for v in values]
    assert not any(reported)
    return it


def _noise(mean: float, sigma: float, num: int = 200) -> list[float]:
    rng = Random(5)
    return [rng.gauss(mean, sigma) for _ in range(num)]


@pytest.mark.parametrize(
    ("usual", "value", "jumps"),
    [
        (_noise(1.0, 0.1), 5.0, True),
        (_noise(1.0, 0.1), -3.0, True),
        (_noise(1.0, 0.1), 1.6, False),
        (_noise(0.0, 1e-3), 0.1, True),
        ([0.99] * 100, 1.05, False),
        ([0.99] * 100, 0.2, True),
        ([0.0] * 100, 1.0, True),
        ([1.0] * (NUM_REMEMBERED - 1), 1e9, False),
        (_noise(1.0, 0.1), 1e308, True),
    ],
    ids=["up", "down", "noise", "around 0", "steady, a little", "steady, far", "always 0", "too early to tell", "vast"],
)
def test_outliers_are_jumps(usual: list[float], value: float, jumps: bool) -> None:
    assert _after(usual).jumps(value) is jumps


@pytest.mark.parametrize("first", [0.0, 1.0, -1e308])
def test_one_spike_is_one_jump_and_a_new_level_is_learned(first: float) -> None:
    it = _after([first] * 100)
    assert it.jumps(1e3) and not it.jumps(first)
    flags = [it.jumps(1e3) for _ in range(2000)]
    assert flags[0] and not any(flags[-100:])


def test_a_slow_change_is_none() -> None:
    rng = Random(6)
    _after([10.0 * 0.99**n + rng.gauss(0.0, 0.05) for n in range(1000)])
