"""The default detector on panels: names the one, early, keeps to what it said, and stays silent on healthy fleets."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.panel import Panel, PanelShape, findings
from rolecall.detector.panels.sequential.detector import (
    BLOCK_TICKS,
    PROPAGATION_SECONDS,
    START_TICKS,
    TOLERATED_SECONDS,
    Sequential,
    SequentialTracker,
)
from rolecall.detector.panels.sequential.tails import Prior, ScoreTail
from tests.detector.panel_data import noise
from tests.support import some

ONSET = 560
"""Tick: after the detector's youth."""


def shifted(panel: Panel, machine: int, by: float, *, metric: int = 1, since: int = ONSET, until: int = 10**9) -> Panel:
    values = panel.values.copy()
    values[metric, since:until, machine] += by
    return replace(panel, values=values)


def nodes(found: list[Finding]) -> list[str]:
    return [s.node for f in found for s in f.suspects]


def permuted(panel: Panel, order: list[int]) -> Panel:
    shape = replace(panel.shape, machines=tuple(panel.shape.machines[i] for i in order))
    return replace(panel, shape=shape, values=np.ascontiguousarray(panel.values[:, :, order]))


def test_a_shift_of_one_metric_of_one_machine_is_named_soon_with_its_metric() -> None:
    panel = shifted(noise(), 3, 5.0)
    found = findings(Sequential(), panel)
    assert nodes(found) == ["n003"]
    [f] = found
    assert 0 <= f.detected_at - panel.at[ONSET] <= 30
    assert panel.at[ONSET] - 64 <= f.onset <= f.detected_at
    assert f.fault_class == FaultClass.SLOW and f.evidence[0].kind == "metric:m1" and "above" in f.evidence[0].text
    assert "trainer/3 (node n003)" in f.because and "7 peers" in f.because


@pytest.mark.parametrize("seeds", some([(range(3),), (range(3, 6),)], [(range(3),)]))
def test_a_healthy_fleet_is_healthy(seeds: range) -> None:
    assert [nodes(findings(Sequential(), noise(seed=s))) for s in seeds] == [[]] * len(seeds)


@pytest.mark.parametrize(("megabytes", "named"), [(2, []), (34, ["n002"])])
def test_memory_that_stood_still_must_move_by_more_than_a_percent(megabytes: float, named: list[str]) -> None:
    panel = noise(machines=4, metrics=3, names=("m0", "rolecall_process_resident_memory_bytes", "m2"))
    offsets = np.random.default_rng(1).uniform(-2e6, 2e6, 4)
    panel.values[1] = (340e6 + offsets).astype(np.float32) + 4096 * np.round(panel.values[1] - 20)
    found = findings(Sequential(), shifted(panel, 2, megabytes * 1e6))
    assert nodes(found) == named


def test_a_leap_of_many_metrics_is_named_at_once_where_there_is_a_history() -> None:
    panel = noise(metrics=9, ticks=900, interval_seconds=60.0)
    values = panel.values.copy()
    values[:6, 800:803, 5] += 40.0
    found = findings(Sequential(), replace(panel, values=values))
    assert nodes(found) == ["n005"] and found[0].detected_at == panel.at[800]


def test_a_leap_is_dated_from_its_first_tick() -> None:
    panel = noise(metrics=9, ticks=900)
    values = panel.values.copy()
    values[:6, 800:806, 5] += np.array([40.0, -40.0] * 3, dtype=np.float32)  # no level: no shift
    [f] = findings(Sequential(), replace(panel, values=values))
    assert f.evidence[-1].text.startswith("score of novelty")
    assert f.onset == panel.at[800] < f.detected_at


def test_what_hits_all_machines_alike_is_no_ones_fault() -> None:
    panel = noise()
    values = panel.values.copy()
    values[2, 500:] += 30.0
    values[4, 600:650] -= 50.0
    values[5] += np.linspace(0, 20, values.shape[1], dtype=np.float32)[:, None]
    assert findings(Sequential(), replace(panel, values=values)) == []


def test_unequal_machines_are_their_habit() -> None:
    panel = noise()
    values = panel.values * np.linspace(0.5, 3, panel.values.shape[2], dtype=np.float32)
    assert findings(Sequential(), replace(panel, values=values)) == []


def test_what_was_said_does_not_depend_on_what_comes_after() -> None:
    panel = shifted(shifted(noise(ticks=800), 3, 6.0, until=600), 6, 8.0, metric=4, since=640)
    whole = findings(Sequential(), panel)
    assert nodes(whole) == ["n003", "n006"]
    for end in (570, 600, 690):
        part = findings(Sequential(), Panel(shape=panel.shape, at=panel.at[:end], values=panel.values[:, :end]))
        assert part == [f for f in whole if f.detected_at <= panel.at[end - 1]]


def test_a_fault_that_stands_is_reported_once_and_one_that_comes_back_again() -> None:
    panel = shifted(noise(ticks=1000), 2, 8.0, until=640)
    assert nodes(findings(Sequential(), panel)) == ["n002"]
    again = shifted(panel, 2, 8.0, since=900)
    assert nodes(findings(Sequential(), again)) == ["n002", "n002"]


def test_neighbours_that_are_hit_later_and_less_are_not_named_while_the_culprit_explains_them() -> None:
    panel = shifted(noise(machines=12), 4, 8.0)
    for n in (5, 6):
        panel = shifted(panel, n, 3.0, since=ONSET + 20)
    found = findings(Sequential(), panel)
    assert nodes(found) == ["n004"]
    assert len(panel.at) - ONSET < PROPAGATION_SECONDS


def test_two_machines_that_fail_at_once_are_both_named() -> None:
    panel = shifted(shifted(noise(machines=12, ticks=1200), 4, 6.0), 9, 6.0, metric=3)
    assert sorted(nodes(findings(Sequential(), panel))) == ["n004", "n009"]


def test_the_majority_is_never_named() -> None:
    panel = noise()
    for n in range(5):
        panel = shifted(panel, n, 9.0)
    assert set(nodes(findings(Sequential(), panel))) <= {"n005", "n006", "n007"}


def test_a_machine_without_peers_is_not_judged() -> None:
    assert findings(Sequential(), shifted(noise(machines=1), 0, 50.0)) == []


@pytest.mark.parametrize("machine", [0, 1])
def test_of_two_machines_the_one_that_moved_is_named(machine: int) -> None:
    panel = noise(machines=2, ticks=ONSET + 120)
    assert nodes(findings(Sequential(), shifted(panel, machine, 15.0))) == [f"n00{machine}"]


def test_of_two_machines_that_moved_together_or_always_differed_none_is_named() -> None:
    panel = noise(machines=2, ticks=ONSET + 120)
    assert findings(Sequential(), shifted(shifted(panel, 0, 15.0), 1, 15.0)) == []
    assert findings(Sequential(), shifted(shifted(panel, 0, 15.0), 1, -15.0)) == []
    assert findings(Sequential(), shifted(panel, 0, 50.0, since=0)) == []


def test_missing_samples_and_machines_are_no_fault() -> None:
    panel = noise(seed=3)
    values = panel.values.copy()
    rng = np.random.default_rng(1)
    values[rng.random(values.shape) < 0.1] = np.nan
    values[:, 300:400, 2] = np.nan  # an agent away
    values[:, :350, 5] = np.nan  # a machine that joins late
    values[3] = np.nan  # a metric no one has
    assert findings(Sequential(), replace(panel, values=values)) == []


def test_a_metric_that_stands_still_breaks_nothing() -> None:
    panel = noise()
    values = panel.values.copy()
    values[0] = 0.0
    values[1] = 7.0
    assert findings(Sequential(), replace(panel, values=values)) == []
    assert nodes(findings(Sequential(), shifted(replace(panel, values=values), 3, 6.0, metric=2))) == ["n003"]


@cache
def verdicts_in_plain_order() -> list[tuple[float, list[str]]]:
    return [(f.detected_at, nodes([f])) for f in findings(Sequential(), shifted(noise(ticks=620), 3, 6.0))]


@settings(max_examples=3, deadline=None)  # beside the tests of its parts (test_peer_place.py, test_whitening.py)
@given(order=st.permutations(range(8)), power=st.integers(-6, 6))
def test_neither_order_nor_units_change_the_verdict(order: list[int], power: int) -> None:
    panel = shifted(noise(ticks=620), 3, 6.0)
    plain = verdicts_in_plain_order()
    assert [n for _, n in plain] == [["n003"]]
    other = permuted(replace(panel, values=panel.values * np.float32(2.0**power)), order)
    assert [(f.detected_at, nodes([f])) for f in findings(Sequential(), other)] == plain


def test_more_false_alarms_asked_for_means_a_lower_threshold() -> None:
    panel = noise()
    thresholds = []
    for asked in (1.0, 100.0, 10_000.0):
        tracker = Sequential(false_alarms_per_1000_machine_days=asked).track(panel.shape)
        for at, values in panel.ticks():
            tracker.tick(at, values)
        thresholds.append(tracker.threshold)
    assert thresholds == sorted(thresholds, reverse=True) and len(set(thresholds)) == 3


def test_a_tail_gives_the_rate_that_is_asked_and_faults_in_it_only_make_it_careful() -> None:
    rng = np.random.default_rng(0)
    healthy, ill = ScoreTail(), ScoreTail()
    for _ in range(60):
        maxima = rng.exponential(2.0, 100).astype(np.float32)
        healthy.add(maxima)
        ill.add(np.concatenate([maxima[2:], np.float32([40.0, 60.0])]))
    asked = 1e-3
    fresh = rng.exponential(2.0, 1_000_000)
    assert 0.25 * asked < float(np.mean(fresh > healthy.threshold(asked))) < 4 * asked
    assert healthy.threshold(asked) < ill.threshold(asked) < 40.0


def test_a_tail_without_history_has_no_threshold_and_a_prior_counts_until_there_is_one() -> None:
    assert ScoreTail().threshold(0.01) == np.inf
    prior = Prior(location=1.0, beta=5.0, weight=1e9)
    tail, plain = ScoreTail(prior), ScoreTail()
    rng = np.random.default_rng(1)
    for _ in range(8):
        maxima = rng.exponential(1.0, 50).astype(np.float32)
        tail.add(maxima)
        plain.add(maxima)
    assert tail.location == pytest.approx(1.0, rel=1e-3) and tail.beta == pytest.approx(5.0, rel=1e-3)
    assert plain.beta == pytest.approx(1.0, rel=0.5)


def test_a_shift_in_the_first_blocks_is_named_although_the_panel_has_no_tail_yet() -> None:
    panel = shifted(noise(machines=12, ticks=4 * BLOCK_TICKS), 3, 12.0, since=60)
    assert nodes(findings(Sequential(), panel)) == ["n003"]


def test_the_first_ticks_are_silent_and_the_threshold_starts_high_and_comes_down() -> None:
    panel = shifted(noise(machines=12, ticks=600), 3, 1000.0, since=0)
    tracker = Sequential().track(panel.shape)
    assert isinstance(tracker, SequentialTracker)
    thresholds = []
    for t, (at, values) in enumerate(panel.ticks()):
        found = tracker.tick(at, values)
        assert t >= START_TICKS - 1 or not found
        thresholds.append(tracker.threshold)
    assert np.isinf(thresholds[: START_TICKS - 1]).all() and np.isfinite(thresholds[START_TICKS:]).all()
    assert thresholds[START_TICKS] > 1.2 * thresholds[200] > 1.2 * thresholds[-1]


@pytest.mark.parametrize(("machines", "metrics"), [(4, 2), (12, 2), (12, 21)])
def test_a_machine_that_differs_from_the_first_sample_on_is_named_within_a_window(machines: int, metrics: int) -> None:
    panel = noise(machines=machines, metrics=metrics, ticks=40)
    level = np.abs(panel.values).max()
    found = findings(Sequential(), shifted(panel, 1, 30.0, metric=1, since=0))
    assert nodes(found) == ["n001"], level
    [f] = found
    assert f.detected_at - panel.at[0] <= 24 and "metric:m1" in {e.kind for e in f.evidence}
    assert (
        any(e.kind == "score" and "place" in e.text for e in f.evidence) and "stands out: m1 out of place" in f.because
    )


@pytest.mark.parametrize(("seeds", "flagged_max"), some([(range(2), 1), (range(8), 2)], [(range(2), 1)]))
def test_few_healthy_panels_of_any_size_are_flagged_from_the_first_tick_on(seeds: range, flagged_max: int) -> None:
    sizes = [(3, 2), (4, 2), (4, 21), (12, 2), (12, 21)]
    flagged = [
        bool(findings(Sequential(), noise(seed=seed, machines=n, metrics=m, ticks=240)))
        for n, m in sizes
        for seed in seeds
    ]
    assert sum(flagged) <= flagged_max, flagged


def test_a_level_that_healthy_peers_need_not_share_is_no_evidence_of_place() -> None:
    for name, named in (("MEM_cached", []), ("activity", ["n001"])):
        panel = noise(machines=12, metrics=2, ticks=40)
        panel = replace(panel, shape=replace(panel.shape, metrics=("m0", name)))
        assert nodes(findings(Sequential(), shifted(panel, 1, 30.0, metric=1, since=0))) == named


def test_several_metrics_far_from_the_peers_at_once_are_named_by_their_number() -> None:
    panel = noise(machines=12, metrics=9, ticks=ONSET + 60)
    for metric in range(4):
        panel = shifted(panel, 5, 9.0, metric=metric)
    [f] = findings(Sequential(), panel)
    assert nodes([f]) == ["n005"]
    text = " ".join(e.text for e in f.evidence)
    assert "far from" in f.because or "robust standard deviations" in text


def test_a_shape_says_what_it_is() -> None:
    shape = PanelShape(role="rollout", phase="generate", job="a", metrics=("x",), machines=(), interval_seconds=1.0)
    assert shape.name == "job a, role rollout, phase generate"


def wild(seed: int, *, machines: int = 8, ticks: int = 1300) -> Panel:
    """Autocorrelated metrics with heavy tails: lone outliers that fade over half a minute."""
    panel = noise(machines=machines, ticks=ticks)
    rng = np.random.default_rng(seed)
    values = rng.standard_t(2.5, panel.values.shape).astype(np.float32)
    for t in range(1, ticks):
        values[:, t] += np.float32(0.9) * values[:, t - 1]
    return replace(panel, values=values + 100)


@pytest.mark.parametrize(("seeds", "named_max"), some([(range(1), 0), (range(4), 1)], [(range(1), 0)]))
def test_outliers_that_fade_are_no_faults_and_a_step_among_them_is(seeds: range, named_max: int) -> None:
    early: list[Finding] = []
    for seed in seeds:
        panel = wild(seed)
        found = findings(Sequential(), shifted(panel, 6, -60.0, since=1200))
        early += [f for f in found if f.detected_at < panel.at[1200]]
        assert nodes(found)[-1:] == ["n006"] and 0 <= found[-1].detected_at - panel.at[1200] <= 30
        assert "m1" in found[-1].evidence[0].text and "below" in found[-1].evidence[0].text
    assert len(early) <= named_max, early


def test_a_machine_that_follows_the_fleet_a_little_less_is_no_fault() -> None:
    panel = noise()
    moves = np.zeros(panel.values.shape[1], dtype=np.float32)
    moves[600:] = 40.0
    share = np.linspace(0.96, 1.04, panel.values.shape[2], dtype=np.float32)
    assert findings(Sequential(), replace(panel, values=panel.values + moves[:, None] * share)) == []


def test_what_comes_late_in_another_metric_is_reported_though_the_first_one_stands() -> None:
    panel = shifted(noise(machines=12, ticks=1200), 4, 8.0)
    same, other = shifted(panel, 7, 4.0, since=ONSET + 60), shifted(panel, 7, 7.0, since=ONSET + 60, metric=3)
    assert nodes(findings(Sequential(), same)) == ["n004"]
    found = findings(Sequential(), other)
    assert nodes(found) == ["n004", "n007"] and found[1].detected_at - found[0].detected_at >= PROPAGATION_SECONDS


@pytest.mark.parametrize("by", [30.0, 300.0, 1e4, 1e10, 1e30])
def test_a_fault_of_any_size_is_named_soon(by: float) -> None:
    panel = shifted(noise(ticks=ONSET + 30), 3, by)
    found = findings(Sequential(), panel)
    assert nodes(found) == ["n003"] and found[0].detected_at - panel.at[ONSET] <= 10


@pytest.mark.parametrize("usual", [0.0, 7.0])
def test_a_counter_that_stood_still_and_moves_on_one_machine_is_named(usual: float) -> None:
    panel = noise(ticks=ONSET + 60)
    panel.values[2] = usual
    panel.values[2, ONSET:, 5] = usual + 1
    found = findings(Sequential(), panel)
    assert nodes(found) == ["n005"] and found[0].evidence[0].kind == "metric:m2"


@pytest.mark.parametrize("exponent", [30, -30])
def test_values_at_the_ends_of_float32_are_no_error_and_hide_no_fault(exponent: int) -> None:
    panel = shifted(noise(ticks=ONSET + 60), 3, 12.0, metric=2)
    values = panel.values.copy()
    values[1] *= np.float32(10.0**exponent)
    values[3, 60] = np.float32(1e38)
    with np.errstate(all="raise", under="ignore"):
        found = findings(Sequential(), replace(panel, values=values))
    assert nodes(found) == ["n003"] and found[0].evidence[0].kind == "metric:m2"


def test_no_one_is_accused_of_what_is_over() -> None:
    panel = shifted(noise(machines=12, ticks=1000), 4, 8.0)
    # Explained by the first one for as long as it lasts; what is remembered of it outlasts the explanation.
    over = shifted(panel, 7, 7.0, since=ONSET + 60, until=ONSET + int(PROPAGATION_SECONDS) - 10, metric=3)
    assert nodes(findings(Sequential(), over)) == ["n004"]


def test_a_fleet_that_goes_where_it_never_was_is_no_fault_and_a_fault_there_is_found() -> None:
    panel = noise(ticks=1500)
    values = panel.values.copy()
    values[2, 700:] += 5000.0
    values[2, 1300:, 6] += 30.0
    found = findings(Sequential(), replace(panel, values=values))
    assert nodes(found) == ["n006"] and found[0].detected_at >= panel.at[1300]


def test_a_machine_that_is_sampled_every_other_tick_is_watched() -> None:
    panel = shifted(noise(ticks=ONSET + 100), 3, 12.0)
    panel.values[:, ::2, 3] = np.nan
    assert nodes(findings(Sequential(), panel)) == ["n003"]


def test_a_wild_first_sample_blinds_no_one() -> None:
    panel = shifted(noise(ticks=1200), 3, 30.0, since=1100)
    panel.values[1, 3, 3] = 1e4
    assert nodes(findings(Sequential(), panel)) == ["n003"]


def test_nothing_is_forgotten_while_nothing_is_sampled() -> None:
    panel = noise(ticks=1600)
    panel.values[:, 600:1500] = np.nan
    tracker = Sequential().track(panel.shape)
    assert isinstance(tracker, SequentialTracker)
    learned = []
    for t, (at, values) in enumerate(panel.ticks()):
        assert tracker.tick(at, values) == []
        if t in (600, 1499):
            model, following = tracker.shifts.whitening, tracker.shifts.following
            of_model = (model.covariances, model.history, model.fades, model.unit_size)
            learned.append([x.copy() for x in (*of_model, following.away_square, following.habit, following.size)])
    for before, after in zip(*learned, strict=True):
        assert (before == after).all()


def test_a_lasting_change_becomes_normal_and_the_next_fault_of_that_machine_is_reported() -> None:
    panel = noise(machines=6, ticks=1300)
    slow = replace(panel, shape=replace(panel.shape, interval_seconds=10.0), at=panel.at[0] + 10.0 * np.arange(1300))
    values = slow.values.copy()
    values += 60 * np.random.default_rng(21).standard_normal((values.shape[0], 1, 6)).astype(np.float32)
    values[1, 300:, 2] += 30
    assert 10 * (1200 - 300) > 2 * TOLERATED_SECONDS
    values[1, 1200:, 2] += 300
    found = findings(Sequential(), replace(slow, values=values))
    assert nodes(found) == ["n002", "n002"]
    assert found[0].detected_at < slow.at[400] and slow.at[1200] <= found[1].detected_at < slow.at[1260]


def departed(panel: Panel, left: int, since: int) -> Panel:
    """Of its machines only the first `left` remain. They stand apart by ten times their noise."""
    values = panel.values + 10 * np.random.default_rng(1).standard_normal(panel.values[:, :1].shape, dtype=np.float32)
    values[:, since:, left:] = np.nan
    return replace(panel, values=values)


@pytest.mark.parametrize(("machines", "left"), [(2, 1), (3, 1), (3, 2), (4, 1), (8, 3)])
@pytest.mark.parametrize("since", [90, 100])
def test_what_happens_to_those_that_are_left_is_no_ones_fault(machines: int, left: int, since: int) -> None:
    panel = noise(machines=machines, ticks=150)
    panel.values[:, 100:] += 30.0
    assert nodes(findings(Sequential(), departed(panel, left, since))) == []


@pytest.mark.parametrize(("machines", "left", "peers"), [(8, 4, "its 3 peers"), (3, 2, "its one peer")])
def test_a_fault_of_one_that_is_left_is_named_among_them(machines: int, left: int, peers: str) -> None:
    panel = departed(noise(machines=machines, metrics=2, ticks=ONSET + 40), left, 500)
    [f] = findings(Sequential(), shifted(panel, 1, 30.0))
    assert nodes([f]) == ["n001"] and peers in f.because and f.detected_at >= panel.at[ONSET]


def test_a_metric_that_only_some_machines_have_is_judged_among_these() -> None:
    panel = noise(machines=20, metrics=4, ticks=40)
    panel.values[2:, :, 9:] = np.nan
    [f] = findings(Sequential(), shifted(panel, 1, 30.0, metric=2, since=0))
    assert nodes([f]) == ["n001"] and f.evidence[0].kind == "metric:m2" and f.detected_at - panel.at[0] <= 24
