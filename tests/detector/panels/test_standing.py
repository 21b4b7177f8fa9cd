"""How far each machine is from an alarm: of several channels the one that is nearest to it, whatever the others
lack."""

import math

import numpy as np
import pytest

from rolecall.core.diagnosis import Finding
from rolecall.detector.panels.panel import Floats, PanelShape, SeenValues, cannot_tell, standing
from rolecall.detector.panels.peer_scores import PeerTracker, Scores, TailThreshold
from rolecall.detector.panels.sequential.detector import Sequential
from rolecall.detector.panels.step_time import StepTime
from tests.detector.panel_data import noise


class Given(PeerTracker):
    """Its scores and thresholds are given."""

    def __init__(self, shape: PanelShape, thresholds: Scores) -> None:
        super().__init__(shape, 1, TailThreshold(probability=0.01, block_ticks=1))
        self._thresholds = thresholds

    def look(self, scores: Scores) -> None:
        self._learned(scores)

    def _tick(self, at: float, values: Floats) -> list[Finding]:
        return []


@pytest.mark.parametrize(
    ("thresholds", "scores", "expected"),
    [
        ((2.0,), ((1.0, 3.0, 0.0),), (1.0, 3.0, 0.0)),
        ((2.0, 4.0), ((1.0, 3.0, 0.0), (1.0, 2.0, 8.0)), (0.5, 1.5, 2.0)),
        # A metric that no one has: no scores, and no threshold.
        ((2.0, math.inf), ((1.0, 3.0, 0.0), (math.nan, math.nan, math.nan)), (0.5, 1.5, 0.0)),
        # One that never moved.
        ((2.0, 0.0), ((1.0, 3.0, 0.0), (0.0, 0.0, 1e3)), (0.5, 1.5, math.inf)),
        ((2.0, 4.0), ((math.nan, 3.0, 0.0), (math.nan, 2.0, 8.0)), (math.nan, 1.5, 2.0)),
    ],
)
def test_of_several_channels_the_nearest_to_an_alarm_is_reported(
    thresholds: tuple[float, ...], scores: tuple[tuple[float, ...], ...], expected: tuple[float, ...]
) -> None:
    shape = noise(machines=3, ticks=1).shape
    tracker = Given(shape, np.array(thresholds))
    tracker.look(np.array(scores))
    stands = standing(tracker)
    assert stands is not None and stands[1] == (thresholds[0] if len(thresholds) == 1 else 1.0)
    np.testing.assert_array_equal(stands[0], expected)
    assert cannot_tell(shape, "given", tracker) == ""


def test_without_any_threshold_it_cannot_tell() -> None:
    shape = noise(machines=5, ticks=1).shape
    tracker = Given(shape, np.full(2, np.inf))
    assert "detector given has not seen enough of its 5 machines" in cannot_tell(shape, "given", tracker)


def test_more_time_does_not_help_where_there_are_too_few_machines() -> None:
    shape = noise(machines=3, ticks=1).shape
    said = cannot_tell(shape, "given", Given(shape, np.full(2, np.inf)))
    assert "detector given needs 4 machines, and there are 3" in said and "longer" not in said


@pytest.mark.parametrize(
    ("rare", "said"),
    [
        (np.s_[1:], "2 of its 3 metrics (m1, m2) have samples more than 2 ticks apart, which say little to detector"),
        (np.s_[:, :, 3:], "1 of its 4 machines (trainer/3 (node n003)) have samples more than 2 ticks apart"),
    ],
)
def test_what_is_sampled_too_rarely_is_told(rare: tuple[slice, ...], said: str) -> None:
    panel = noise(machines=4, metrics=3, ticks=96)
    series = panel.values[rare]
    series[:, np.arange(96) % 4 > 0] = np.nan
    tracker, seen = Sequential().track(panel.shape), SeenValues()
    for at, values in panel.ticks():
        seen.tick(values)
        tracker.tick(at, values)
    assert said in cannot_tell(panel.shape, "sequential", tracker, seen)
    steps = StepTime().track(panel.shape)
    assert cannot_tell(panel.shape, "step-time", steps, seen) == "", "it compares each step by itself"
