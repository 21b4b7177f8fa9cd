"""A machine's place among its peers: what three machines prove and what twelve do."""

import numpy as np
import pytest

from rolecall.detector.panels.panel import Floats, Machine, PanelShape
from rolecall.detector.panels.sequential.peer_place import (
    BLOCK_TICKS,
    LONG_BLOCKS,
    PeerPlace,
    _combined,
    _t_tail,
)
from rolecall.detector.panels.sequential.priors import shipped
from rolecall.detector.panels.sequential.profile import PanelProfile, UsualPlaces


def panel_shape(metrics: int, machines: int) -> PanelShape:
    return PanelShape(
        role="trainer",
        metrics=tuple(f"metric_{m}" for m in range(metrics)),
        machines=tuple(Machine(node=f"m{n}") for n in range(machines)),
        interval_seconds=1.0,
    )


def after(values: Floats, *, counted: list[int] | None = None, profile: PanelProfile | None = None) -> PeerPlace:
    """`values` (M, T, N)."""
    m, ticks, n = values.shape
    shape = panel_shape(m, n)
    usual = UsualPlaces.of(shape, shipped().log_spreads(shape.metrics), profile)
    place = PeerPlace(np.ones(m, dtype=np.bool_), n, usual)
    peers = np.ones(n, dtype=np.bool_)
    if counted is not None:
        peers[:] = False
        peers[counted] = True
    for t in range(ticks):
        now = values[:, t]
        known = np.isfinite(now)
        middle = np.nan_to_num(np.nanmedian(np.where(known.any(axis=1)[:, None], now, 0), axis=1))
        place.tick(np.where(known, now - middle[:, None], 0).astype(np.float32), known, middle, peers)
    return place


def healthy(seed: int, machines: int, metrics: int, ticks: int = 40) -> Floats:
    rng = np.random.default_rng(seed)
    offset = 0.5 * rng.standard_normal((metrics, 1, machines))
    return np.asarray(100 + offset + rng.standard_normal((metrics, ticks, machines)), dtype=np.float32)


def test_the_tail_is_students() -> None:
    # Abramowitz and Stegun, table 26.10: quantiles of t with 8 degrees of freedom
    tail = _t_tail(np.array([0.0, 1.860, 2.306, 3.355, 5.041, 1e6]), 8)
    assert tail == pytest.approx([1.0, 0.1, 0.05, 0.01, 0.001, 1e-9], rel=2e-3)


def test_more_machines_prove_more() -> None:
    evidence = []
    for machines in (3, 12):
        values = healthy(1, machines, 2, ticks=64)
        values[1, :, 0] += 30
        place = after(values)
        assert place.relative.argmax() == 0
        evidence.append(float(place.relative[0]))
    assert evidence[0] < evidence[1] and evidence[1] > 1


def test_metrics_with_large_offsets_in_a_panel_make_a_large_offset_less_surprising() -> None:
    values = healthy(2, 6, 12)
    values[0, :, 0] += 12
    alone = after(values).relative[0]
    rng = np.random.default_rng(3)
    values[1:] += 8 * rng.standard_normal((11, 1, 6)).astype(np.float32)
    assert after(values).relative[0] < alone


def test_a_duplicate_of_a_metric_adds_nothing() -> None:
    values = healthy(4, 6, 6)
    values[0, :, 0] += 6
    values = np.concatenate([values, values[:1] * 3])
    place = after(values)
    assert {0, 6} & set(place.metrics[0]) and not {0, 6} <= set(place.metrics[0])


def test_two_metrics_prove_more_than_one_and_choosing_them_costs() -> None:
    apart = np.eye(20, dtype=np.bool_)
    surprise = np.full(20, 0.1)
    surprise[3] = 7.0
    one = _combined(surprise, apart, 20)
    surprise[9] = 7.0
    two = _combined(surprise, apart, 20)
    assert two[0] < one[0] and two[1] == [3, 9]
    assert _combined(surprise, apart, 5)[0] < two[0]


def test_where_several_are_out_of_place_none_is_named() -> None:
    values = healthy(5, 12, 3)
    values[1, :, 0] += 25
    assert after(values).relative[0] > 1
    for machine in (1, 2, 3):
        values[machine % 3, :, machine] -= 15
    assert (after(values).relative <= 1).all()


def test_many_metrics_that_are_somewhat_far_prove_more_than_the_farthest_three() -> None:
    apart = np.eye(40, dtype=np.bool_)
    surprise = np.full(40, 0.1)
    surprise[:3] = 3.5
    few = _combined(surprise, apart, 40)
    surprise[:12] = 3.5
    many = _combined(surprise, apart, 40)
    assert many[0] < few[0] - 5 and len(many[1]) == 3


def test_one_evaluation_is_not_enough() -> None:
    values = healthy(6, 12, 2, ticks=6 * BLOCK_TICKS)
    values[1, :, 0] += 30
    assert after(values[:, : 4 * BLOCK_TICKS]).relative[0] == 1
    assert after(values[:, : 5 * BLOCK_TICKS]).relative[0] > 1


def test_missing_samples_and_a_machine_without_any_are_no_evidence() -> None:
    values = healthy(7, 12, 3, ticks=4 * LONG_BLOCKS * BLOCK_TICKS // 3)
    values[:, :, 4] = np.nan
    values[2] = np.nan
    values[0, ::3, 5] = np.nan
    place = after(values)
    assert place.relative[4] == 0 and (place.relative <= 1).all()


def test_machines_that_do_not_count_are_judged_but_are_no_peers() -> None:
    values = healthy(8, 12, 2)
    values[1, :, 0] += 20
    assert after(values, counted=list(range(1, 12))).relative[0] > 1
