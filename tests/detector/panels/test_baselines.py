"""The baselines: each names an outlier and no one in a healthy panel; the arithmetic of the frame."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rolecall.detector.panels import peer_scores
from rolecall.detector.panels.baselines import BASELINES
from rolecall.detector.panels.panel import Machine, Panel, PanelShape, findings
from rolecall.detector.panels.peer_scores import TailThreshold

ASKED = 10.0
FAST = [name for name in BASELINES if name != "isolation-forest"]
"""A forest takes 20 ms a tick: it is tried once."""
INTERVAL_SECONDS = 30.0
NUM_TICKS, ONSET_TICK = 320, 280


def peers(
    seed: int, *, num_machines: int = 8, num_ticks: int = NUM_TICKS, fault: tuple[int, int, float] | None = None
) -> Panel:
    """Three metrics of machines that do the same: a wave, a noise of 1 with some memory, some missing samples. `fault`:
    machine, metric and by how much it is off from tick `ONSET_TICK` on."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((3, num_ticks, num_machines))
    for t in range(1, num_ticks):
        noise[:, t] = 0.5 * noise[:, t - 1] + math.sqrt(0.75) * noise[:, t]
    values = noise + 10 * np.sin(np.arange(num_ticks) / 5)[None, :, None] + np.array([0, 100, -50])[:, None, None]
    if fault:
        values[fault[1], ONSET_TICK:, fault[0]] += fault[2]
    values[rng.random(values.shape) < 0.02] = np.nan
    shape = PanelShape(
        role="trainer",
        metrics=("a", "b", "c"),
        machines=tuple(Machine(node=f"m{n:02d}") for n in range(num_machines)),
        interval_seconds=INTERVAL_SECONDS,
    )
    at = 1000.0 + INTERVAL_SECONDS * np.arange(num_ticks)
    return Panel(shape=shape, at=at, values=values.astype(np.float32))


def onset_of(panel: Panel) -> float:
    return float(panel.at[ONSET_TICK])


def permuted(panel: Panel, order: Sequence[int], factors: Sequence[float]) -> Panel:
    """The same machines in another order, each metric in another unit."""
    shape = replace(panel.shape, machines=tuple(panel.shape.machines[n] for n in order))
    values = panel.values[:, :, list(order)] * np.array(factors, dtype=np.float32)[:, None, None]
    return Panel(shape=shape, at=panel.at, values=values)


def truncated(panel: Panel, num_ticks: int) -> Panel:
    return Panel(shape=panel.shape, at=panel.at[:num_ticks], values=panel.values[:, :num_ticks])


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_names_an_outlier_and_no_one_else(name: str) -> None:
    panel = truncated(peers(seed=1, fault=(3, 1, 15.0)), ONSET_TICK + 20)
    if name not in FAST:
        panel.values[:, ONSET_TICK:, 3] += 30  # to a forest a single metric says little
    found = findings(BASELINES[name](ASKED), panel)
    assert [s.node for f in found for s in f.suspects] == ["m03"]
    assert 0 <= found[0].detected_at - onset_of(panel) <= 20 * panel.shape.interval_seconds
    assert found[0].onset <= found[0].detected_at
    assert "m03" in found[0].because


@pytest.mark.parametrize("name", FAST)
def test_a_baseline_names_no_one_in_a_healthy_panel(name: str) -> None:
    assert findings(BASELINES[name](ASKED), peers(seed=2)) == []


@pytest.mark.parametrize("name", FAST)
@given(order=st.permutations(range(8)), factors=st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3))
@settings(max_examples=3)
def test_neither_the_order_of_machines_nor_the_unit_of_a_metric_matters(
    name: str, order: Sequence[int], factors: Sequence[float]
) -> None:
    panel = peers(seed=3, fault=(2, 0, 12.0))
    reported = [
        [f.suspects for f in findings(BASELINES[name](ASKED), p)] for p in (panel, permuted(panel, order, factors))
    ]
    assert reported[0] == reported[1] != []


@pytest.mark.parametrize("name", ["mahalanobis", "robust-z"])
def test_what_is_said_does_not_depend_on_what_comes_later(name: str) -> None:
    panel = peers(seed=3, fault=(2, 0, 12.0))
    whole = findings(BASELINES[name](ASKED), panel)
    cut = next(i for i, at in enumerate(panel.at) if at == whole[0].detected_at)
    assert findings(BASELINES[name](ASKED), truncated(panel, cut)) == []
    assert findings(BASELINES[name](ASKED), truncated(panel, cut + 1)) == whole[:1]


@pytest.mark.parametrize("name", FAST)
def test_empty_constant_and_tiny_panels_name_no_one(name: str) -> None:
    panel = peers(seed=4, num_machines=4)
    for values in (np.full_like(panel.values, np.nan), np.full_like(panel.values, 3e38), panel.values[:, :, :3]):
        ticks = Panel(shape=panel.shape, at=panel.at, values=values)
        few = truncated(ticks, 270)
        assert findings(BASELINES[name](ASKED), few) == []


def _filled_by_hand(window: NDArray[np.float32]) -> NDArray[np.float32]:
    out = window.copy()
    for m in range(window.shape[1]):
        for n in range(window.shape[2]):
            known = [t for t in range(len(window)) if not np.isnan(window[t, m, n])]
            for t in range(len(window)):
                nearest = min(known, key=lambda k: (abs(k - t), k), default=0)
                out[t, m, n] = window[nearest, m, n] if len(known) >= len(window) // 2 else np.nan
    return out


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
@settings(max_examples=30)
def test_a_missing_sample_is_the_nearest_in_time(seed: int, missing: float) -> None:
    rng = np.random.default_rng(seed)
    window = rng.random((8, 2, 3), dtype=np.float32)
    window[rng.random(window.shape) < missing] = np.nan
    np.testing.assert_array_equal(peer_scores.nearest_filled(window), _filled_by_hand(window))


@pytest.mark.parametrize("num", [4, 63, 150])
def test_distances_are_those_of_all_pairs(num: int) -> None:
    points = np.random.default_rng(num).random((8, 2, num), dtype=np.float32)
    points[3, 1, 0] = np.nan
    found = peer_scores.mean_distances(points)
    first = np.linalg.norm(points[:, 0, :, None] - points[:, 0, None, :], axis=0).sum(axis=1) / (num - 1)
    np.testing.assert_allclose(found[0], first, rtol=1e-3)
    if num == 4:
        assert np.isnan(found[1]).all(), "three machines are too few"
    else:
        assert np.isnan(found[1, 0])
        rest = np.linalg.norm(points[:, 1, 1:, None] - points[:, 1, None, 1:], axis=0).sum(axis=1) / (num - 2)
        np.testing.assert_allclose(found[1, 1:], rest, rtol=1e-3)


@given(st.lists(st.floats(0, 100), min_size=4, max_size=12))
def test_a_score_is_in_standard_deviations_of_the_others_and_orders_as_the_z_score_does(distances: list[float]) -> None:
    values = np.array([distances])
    everybody = np.ones(len(distances), dtype=np.bool_)
    found = peer_scores.against_others(values, everybody, spread_min=1e-3)[0]
    for i, v in enumerate(distances):
        others = np.delete(values[0], i)
        assert found[i] == pytest.approx((v - others.mean()) / max(others.std(ddof=1), 1e-3), rel=1e-3, abs=1e-3)
    assert values[0, found.argmax()] == pytest.approx(max(distances))


def test_who_is_no_peer_is_compared_and_does_not_count() -> None:
    values, everybody = np.array([[1.0, 2.0, 3.0, 4.0, 50.0]]), np.array([True, True, True, True, False])
    found = peer_scores.against_others(values, everybody, spread_min=1e-3)[0]
    assert found[3] == pytest.approx(2.0)
    assert found[4] == pytest.approx((50 - 2.5) / np.std([1, 2, 3, 4], ddof=1))


@pytest.mark.parametrize("probability", [1e-2, 1e-3])
def test_the_threshold_is_exceeded_as_often_as_asked(probability: float) -> None:
    """Blocks of one tick, scores with an exponential tail: what the threshold assumes."""
    rng, above = np.random.default_rng(5), []
    for _ in range(40):
        tail = TailThreshold(1, probability)
        for _ in range(100):
            tail.add(rng.exponential(size=(1, 10)))
        above.append(math.exp(-tail.thresholds()[0]))
    assert probability / 3 < np.mean(above) < probability * 3


def test_the_threshold_of_a_block_is_that_of_its_smallest_score() -> None:
    tail = TailThreshold(3, 0.5)
    for t in range(90):
        tail.add(np.full((1, 1), 100.0 if t % 3 else t / 90))
    assert max(m.max() for m in tail.minima) < 1.0
    assert tail.thresholds()[0] < 2.0
    assert TailThreshold(3, 0.5).thresholds()[0] == math.inf, "nothing was seen"


def test_surprise_has_an_exponential_tail_however_few_the_peers() -> None:
    """Student's t of N - 2 degrees of freedom becomes nearly exponential: halving times alike in body and tail."""
    rng = np.random.default_rng(6)
    for num in (4, 8, 100):
        values = rng.standard_normal((40_000 // num * 10, num))
        sigmas = peer_scores.against_others(values, np.ones(num, dtype=np.bool_), spread_min=1e-9)
        found = np.sort(peer_scores.surprise(sigmas, num - 1).ravel())
        a, b, c = (found[int(len(found) * (1 - p))] for p in (1e-1, 1e-2, 1e-3))
        assert 0.6 < (c - b) / (b - a) < 1.6
