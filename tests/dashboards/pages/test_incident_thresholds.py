"""The detection threshold, checked with the real detector on both sides of the boundary."""

from typing import Any

import pytest

from rolecall.dashboards.pages.incidents.what_if import ThresholdBoundary, threshold_boundary
from rolecall.detector.live.engine import LiveDetector
from tests.dashboards.incident_cases import found


@pytest.mark.parametrize(("fault", "replica"), [("stopped", "trainer/1"), ("duty_cycle", "rollout/1")])
def test_the_boundary_separates_detected_from_undetected(fault: str, replica: str) -> None:
    d, window = found(fault, replica)
    e = threshold_boundary(window, d)
    assert isinstance(e, ThresholdBoundary) and e.undetected_at is not None
    assert e.now <= e.detected_at < e.undetected_at

    def detected(value: float) -> bool:
        changed = {**window, "config": {**window["config"], e.setting: value}}
        return any(x.key == d.key for diagnoses in LiveDetector.replay_window(changed) for x in diagnoses)

    assert detected(e.detected_at)
    assert not detected(e.undetected_at)
    assert f"{e.undetected_at:.3g}" in e.text


@pytest.mark.parametrize("window", [{}, {"version": 99, "config": {"hang_floor_seconds": 2.5}}, {"config": 7}])
def test_a_window_that_cannot_be_read_says_so(window: dict[str, Any]) -> None:
    d, _ = found("stopped", "trainer/1")
    reported = threshold_boundary(window, d)
    assert isinstance(reported, str) and "cannot be read" in reported


def test_what_no_threshold_decides_says_so() -> None:
    d, window = found("kill", "rollout/1")
    assert threshold_boundary(window, d) == "No detector threshold decides about crash."
