"""At which threshold the detectors would have kept silent: asked of the real detector, on both sides of the edge."""

from typing import Any

import pytest

from rolecall.dashboards.pages.incidents.thresholds import ThresholdBoundary, edge
from rolecall.detector.live.engine import LiveDetector
from tests.dashboards.incident_cases import found


@pytest.mark.parametrize(("fault", "replica"), [("stopped", "trainer/1"), ("duty_cycle", "rollout/1")])
def test_the_edge_is_one(fault: str, replica: str) -> None:
    d, window = found(fault, replica)
    e = edge(window, d)
    assert isinstance(e, ThresholdBoundary) and e.unsaid_at is not None
    assert e.now <= e.said_at < e.unsaid_at

    def said(value: float) -> bool:
        changed = {**window, "config": {**window["config"], e.setting: value}}
        return any(x.key == d.key for looked in LiveDetector.replay_window(changed) for x in looked)

    assert said(e.said_at)
    assert not said(e.unsaid_at)
    assert f"{e.unsaid_at:.3g}" in e.text


@pytest.mark.parametrize("window", [{}, {"version": 99, "config": {"hang_floor_seconds": 2.5}}, {"config": 7}])
def test_a_window_that_cannot_be_read_says_so(window: dict[str, Any]) -> None:
    d, _ = found("stopped", "trainer/1")
    told = edge(window, d)
    assert isinstance(told, str) and "cannot be read" in told


def test_what_no_threshold_decides_says_so() -> None:
    d, window = found("kill", "rollout/1")
    assert edge(window, d) == "no threshold of the detectors decides of a crash"
