"""The smallest effect that a detector would have named is found by trying, and is said only as far as it was tried."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.panel import Floats, Panel, PanelShape
from rolecall.detector.panels.sensitivity import (
    NUM_TRIALS,
    SPREADS,
    Onset,
    SmallestEffect,
    _effect,
    smallest_effects,
    spreads_of,
    trials_of,
)
from tests.detector.panel_data import noise


@dataclass(slots=True)
class MeanTracker:
    """Names the machine whose last 16 values lie farther than `limit` from the peers on average."""

    shape: PanelShape
    limit: float
    seen: list[Floats]

    def tick(self, at: float, values: Floats) -> list[Finding]:
        self.seen = [*self.seen, values.copy()][-16:]
        apart = np.abs(np.mean([v - np.median(v, axis=1, keepdims=True) for v in self.seen], axis=0)).max(axis=0)
        return [
            Finding(
                detector="mean",
                suspects=(self.shape.suspect(int(n)),),
                fault_class=FaultClass.SLOW,
                onset=at,
                detected_at=at,
                confidence=0.5,
                because="apart",
            )
            for n in np.flatnonzero(apart > self.limit)
        ]


@dataclass(frozen=True, slots=True)
class Mean:
    limit: float
    name: str = "mean"

    def track(self, shape: PanelShape) -> MeanTracker:
        return MeanTracker(shape, self.limit, [])


def found(panel: Panel, limit: float, stopped: Callable[[], bool] = lambda: False) -> dict[Onset, SmallestEffect]:
    effects = smallest_effects(panel, [Mean(limit)], np.random.default_rng(0), stopped)
    return {effect.onset: effect for effect in effects}


def test_a_spread_holds_how_far_machines_stand_apart_and_how_they_vary() -> None:
    panel = noise(machines=9, metrics=3, ticks=400)
    values = panel.values.copy()
    values[1] += np.linspace(-8, 8, 9, dtype=np.float32)
    values[2] = 5.0
    values[0, 7, 3] = np.nan
    spreads = spreads_of(replace(panel, values=values))
    assert spreads[0] == pytest.approx(1.0, abs=0.05) and 5 < spreads[1] < 8 and np.isnan(spreads[2])


@pytest.mark.parametrize(("limit", "spreads"), [(2.5, 3.0), (5.0, 6.0), (10.0, 12.0), (18.0, 24.0)])
def test_the_smallest_shift_that_is_named_is_the_one_above_the_limit(limit: float, spreads: float) -> None:
    effects = found(noise(ticks=60), limit)
    for effect in effects.values():
        assert effect.spreads == spreads and effect.num_trials == NUM_TRIALS and effect.num_named >= 4
        assert effect.ticks is not None and 1 <= effect.ticks <= 60
        assert f"a shift of {spreads:g} spreads of one metric on one machine" in effect.text
    assert list(effects) == [Onset.FIRST_SAMPLE, Onset.MIDDLE]


def test_a_detector_that_names_nothing_is_said_to_name_nothing() -> None:
    effect = found(noise(ticks=20), 1e9)[Onset.MIDDLE]
    assert effect.spreads is None and effect.ticks is None
    assert effect.text.endswith(f"a shift of {SPREADS[-1]:g} spreads from the middle on is named in only 0 of 5 trials")


@pytest.mark.parametrize(
    ("smallest", "spreads", "ticks", "num_named"),
    [
        ([(4.0, 9), (3.0, 50), (4.0, 7), (6.0, 80), (2.0, 1)], 4.0, 50, 4),
        ([(4.0, 9), (4.0, 9), (4.0, 9), (4.0, 9), (math.inf, 0)], 4.0, 9, 4),
        ([(4.0, 9), (4.0, 9), (4.0, 9), (math.inf, 0), (math.inf, 0)], None, None, 3),
        ([(6.0, 9), (4.0, 70)], 6.0, 70, 2),
        ([], None, None, 0),
    ],
)
def test_four_of_five_trials_decide(
    smallest: list[tuple[float, int]], spreads: float | None, ticks: int | None, num_named: int
) -> None:
    effect = _effect("role trainer", Onset.MIDDLE, smallest)
    assert (effect.spreads, effect.ticks, effect.num_named) == (spreads, ticks, num_named)
    assert effect.num_trials == len(smallest)


def test_only_trials_that_ended_in_time_count() -> None:
    looks = iter(range(100_000))
    effects = found(noise(ticks=60), 3.5, stopped=lambda: next(looks) > 600)
    assert 0 < sum(e.num_trials for e in effects.values()) < 2 * NUM_TRIALS
    effect = found(noise(ticks=60), 3.5, stopped=lambda: True)[Onset.FIRST_SAMPLE]
    assert effect.num_trials == 0 and effect.spreads is None and "was not found in time" in effect.text


def test_a_panel_in_which_nothing_differs_is_not_tried() -> None:
    panel = noise(ticks=20)
    assert found(replace(panel, values=np.ones_like(panel.values)), 3.5) == {}


def test_trials_are_drawn_from_the_seed_and_leave_the_panel_as_it_is() -> None:
    panel = noise(ticks=30)
    before = panel.values.copy()
    assert found(panel, 3.5) == found(panel, 3.5)
    assert np.array_equal(panel.values, before)
    assert trials_of(panel, np.random.default_rng(0)) != trials_of(panel, np.random.default_rng(1))
