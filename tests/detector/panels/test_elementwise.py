"""The compiled form of the default detector, for large panels, says the same as the one in numpy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolecall.detector.panels.panel import Panel
from rolecall.detector.panels.sequential import elementwise
from rolecall.detector.panels.sequential.detector import Sequential
from rolecall.detector.panels.sequential.elementwise import log
from rolecall.detector.panels.sequential.order import medians_of, middles
from tests.detector.panel_data import noise

MACHINES = 200


def faulty() -> Panel:
    """A shift, an excursion of all, bursts, gaps, constant and absent metrics, and machines that are late or leave."""
    panel, rng = noise(machines=MACHINES, metrics=9, ticks=420), np.random.default_rng(1)
    values = panel.values.copy()
    values += 3 * rng.standard_normal((len(values), 1, MACHINES)).astype(np.float32)
    values[2, 250:, 30] += 25.0
    values[1, 200:204, 40] += 1e6
    values[:6, 330:345, 50] += 40.0
    values[3, 150:] += 30.0
    values[4, 100:105, ::7] -= 8.0
    values[7] = 5.0
    values[8] = np.nan
    values[:, :160, 60:64] = np.nan
    values[:, 300:, 70] = np.nan
    values[rng.random(values.shape) < 0.02] = np.nan
    return replace(panel, values=values)


def told(panel: Panel) -> tuple[Any, ...]:
    tracker = Sequential().track(panel.shape)
    scores, thresholds, places, found = [], [], [], []
    for at, values in panel.ticks():
        found += tracker.tick(at, values)
        scores.append(tracker.scores.copy())
        thresholds.append(tracker.threshold)
        places.append(tracker.place.relative.copy())
    return np.array(scores), np.array(thresholds), np.array(places), found


@pytest.mark.slow  # compiles
def test_both_forms_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = faulty()
    monkeypatch.setattr(elementwise, "COMPILED_MACHINES", MACHINES)
    scores, thresholds, places, found = told(panel)
    monkeypatch.setattr(elementwise, "COMPILED_MACHINES", MACHINES + 1)
    in_numpy = told(panel)
    assert scores == pytest.approx(in_numpy[0], rel=1e-3, abs=1e-3)
    assert thresholds == pytest.approx(in_numpy[1], rel=1e-4)
    assert places == pytest.approx(in_numpy[2], rel=1e-3, abs=1e-3)
    assert "n030" in names(found)
    assert [(f.because, f.detected_at, f.onset) for f in found] == [
        (f.because, f.detected_at, f.onset) for f in in_numpy[3]
    ]


def names(found: list[Any]) -> set[str]:
    return {s.node for f in found for s in f.suspects}


def test_the_logarithm_is_true() -> None:
    x = np.exp(np.random.default_rng(0).uniform(-80, 80, 10_000)).astype(np.float32)
    assert log(x) == pytest.approx(np.log(x.astype(np.float64)), rel=3e-7, abs=1e-7)


@pytest.mark.parametrize("blocks", [1, 2, 5, 6, 13, 24])
def test_middles_are_medians(blocks: int) -> None:
    x = np.random.default_rng(blocks).standard_normal((blocks, 3, 1500)).astype(np.float32)
    assert middles(x) == pytest.approx(np.median(x, axis=0))
    x[np.random.default_rng(1).random(x.shape) < 0.3] = np.nan
    with np.errstate(all="ignore"):
        known = ~np.isnan(x).all(axis=0)
    assert middles(x)[known] == pytest.approx(np.nanmedian(x[:, known], axis=0))
    assert np.isnan(middles(x)[~known]).all()


@pytest.mark.parametrize("machines", [7, 1500])
def test_medians_of_some_leave_out_the_others(machines: int) -> None:
    rng = np.random.default_rng(machines)
    x, counted = rng.standard_normal((4, machines)).astype(np.float32), rng.random((4, machines)) < 0.6
    counted[3] = False
    expected = [np.median(row[some]) for row, some in zip(x[:3], counted[:3], strict=True)]
    assert medians_of(x, counted)[:, 0] == pytest.approx([*expected, 0.0])
