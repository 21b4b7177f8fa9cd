"""A machine's place among its peers: what three machines prove and what twelve do."""

from dataclasses import replace

import numpy as np
import pytest

from rolecall.detector.panels.panel import Floats, Machine, PanelShape
from rolecall.detector.panels.sequential.peer_place import (
    BLOCK_TICKS,
    LONG_BLOCKS,
    SHORT_BLOCKS,
    Alike,
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
    place = PeerPlace(m, n, usual, 1.0)
    peers = np.ones(n, dtype=np.bool_)
    if counted is not None:
        peers[:] = False
        peers[counted] = True
    for t in range(ticks):
        now = values[:, t]
        known = np.isfinite(now)
        middle = np.nan_to_num(np.nanmedian(np.where(known.any(axis=1)[:, None], now, 0), axis=1))
        place.tick(
            np.where(known, now - middle[:, None], 0).astype(np.float32),
            known,
            middle,
            peers,
            np.ones(m, dtype=np.bool_),
        )
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


def test_a_jump_that_fades_as_noise_does_is_no_change_and_one_that_stays_is() -> None:
    rng = np.random.default_rng(8)
    noise = np.zeros((2, 240, 8))
    for t in range(1, 240):
        noise[:, t] = 0.94 * noise[:, t - 1] + 0.3 * rng.standard_normal((2, 8))
    found = {}
    for rho in (0.94, 1.0):
        values = noise.copy()
        values[0, 200:, 3] += 30 * rho ** np.arange(40)
        found[rho] = max(float(after(values[:, :t]).relative[3]) for t in range(216, 240, BLOCK_TICKS))
    assert found[0.94] < 0.8
    assert found[1.0] > 1


def apart(num: int) -> Alike:
    return Alike(
        pairs=np.eye(num, dtype=np.bool_), rho=np.zeros((num, 1), dtype=np.float32), num_distinct=num, weight=num
    )


def test_two_metrics_prove_more_than_one_and_choosing_them_costs() -> None:
    surprise = np.full(20, 0.1)
    surprise[3] = 7.0
    one, _ = _combined(0, surprise, apart(20))
    surprise[9] = 7.0
    two, _ = _combined(0, surprise, apart(20))
    assert two.log_p < one.log_p and two.metrics == [3, 9]
    assert _combined(0, surprise, replace(apart(20), num_distinct=5))[0].log_p < two.log_p


def test_where_several_are_out_of_place_none_is_named() -> None:
    values = healthy(5, 12, 3)
    values[1, :, 0] += 25
    assert after(values).relative[0] > 1
    for machine in (1, 2, 3):
        values[machine % 3, :, machine] -= 15
    assert (after(values).relative <= 1).all()


def test_many_metrics_that_are_somewhat_far_prove_more_than_the_farthest_three() -> None:
    surprise = np.full(40, 0.1)
    surprise[:20] = 3.5
    few, many = _combined(0, surprise, apart(40))
    assert many.log_p < few.log_p - 5 and len(many.metrics) == 3
    _, dependent = _combined(0, surprise, replace(apart(40), weight=10.0))
    assert dependent.log_p > many.log_p + 3


def test_a_peer_with_one_odd_metric_does_not_hide_a_machine_with_many() -> None:
    values = healthy(11, 3, 30, ticks=64)
    values[:15, :, 0] += 6
    alone = after(values)
    values[20, :, 1] += 60
    place = after(values)
    assert place.relative.argmax() == 0 and place.relative[0] > 0.8 * alone.relative[0] > 0.8


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


@pytest.mark.parametrize("machines", [3, 4, 12])
def test_a_machine_that_leaves_its_level_is_found_whatever_the_offsets_are(machines: int) -> None:
    values = healthy(9, machines, 4, ticks=80)
    values += 20 * np.random.default_rng(10).standard_normal((4, 1, machines)).astype(np.float32)
    assert (after(values).relative <= 1).all()
    values[2, 50:, 1] += 25
    place = after(values)
    assert place.relative[1] > 1 and place.changed[1] and place.metrics[1] == [2]
    assert place.away(2, 1) == pytest.approx(25 / place.unit[2, 1], rel=0.3)
    assert not place.changed[[0, *range(2, machines)]].any()


def test_a_wild_first_block_is_no_change_afterwards() -> None:
    values = healthy(11, 4, 3, ticks=(SHORT_BLOCKS + 8) * BLOCK_TICKS)
    values[1, :BLOCK_TICKS, 2] += 200
    assert not after(values).changed.any()


def test_changes_that_all_machines_keep_making_are_usual() -> None:
    values = healthy(12, 6, 2, ticks=600)
    rng = np.random.default_rng(13)
    values += np.repeat(12 * rng.standard_normal((2, 20, 6)), 30, axis=1).astype(np.float32)
    restless = after(values[:, :570])
    calm = after(healthy(12, 6, 2, ticks=570))
    values[1, 546:570, 0] += 25
    assert after(values[:, :570]).relative[0] < 1 and (restless.relative <= 1).all() and (calm.relative <= 1).all()


def test_the_one_that_does_all_the_work_at_the_moment_is_not_out_of_place() -> None:
    """As in `exathlon`: idle executors beside one that is busy in bursts."""
    rng = np.random.default_rng(14)
    idle = rng.exponential(0.6, (1, 64, 4)).astype(np.float32)
    idle[0, :, 1] = rng.exponential(30.0, 64)
    assert after(idle).relative[1] <= 1
    steady = 5 + rng.standard_normal((1, 64, 4)).astype(np.float32) / 5
    steady[0, :, 1] += 30
    place = after(steady)
    assert place.relative[1] > 1 and place.away(0, 1) == pytest.approx(30 / place.unit[0, 1], rel=0.1)


def test_a_machine_far_in_most_metrics_is_found_where_no_three_prove_it() -> None:
    values = healthy(15, 4, 60, ticks=64)
    far = values.copy()
    far[:30, :, 2] += 4
    assert after(values).relative[2] <= 1 < after(far).relative[2]


def test_after_a_machine_of_few_has_gone_metrics_are_still_distinct() -> None:
    values = healthy(16, 4, 6, ticks=2500)
    values[:, :, 3] += 4
    values[:, 200:, 3] = np.nan
    place = after(values)
    residual = values[:, 500:, :3] - np.median(values[:, 500:, :3], axis=2, keepdims=True)
    assert place.distinct.all() and place.mean[:, :3] == pytest.approx(residual.mean(axis=1), abs=0.3)


@pytest.mark.parametrize("begins", [12, 40])
@pytest.mark.parametrize("before", [np.nan, 100.0])
def test_a_metric_that_begins_later_is_judged(begins: int, before: float) -> None:
    values = healthy(17, 8, 2, ticks=300)
    values[0, :begins] = before
    assert (after(values).relative <= 1).all()
    values[0, begins:, 2] += 50
    assert after(values).relative[2] > 1


@pytest.mark.parametrize("machines", [4, 8])
def test_no_machine_changed_because_another_joins(machines: int) -> None:
    values = healthy(18, machines, 3, ticks=560)
    values += 60 * np.random.default_rng(19).standard_normal((3, 1, machines)).astype(np.float32)
    values[:, :400, 1] = np.nan
    for ticks in range(404, 560, 12):
        assert not after(values[:, :ticks]).changed.any()


def test_huge_values_raise_no_warning() -> None:
    values = 1e-6 * healthy(20, 3, 2, ticks=200)
    values[0, 60:, 0], values[0, 60:, 1] = 1e15, -1e15
    assert np.isfinite(after(values).change_squares).all()
