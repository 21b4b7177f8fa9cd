"""What the benchmarks of a real model make of their measurements."""

import random
import types

import pytest

from benchmarks.learning import own_model
from benchmarks.runtime import step_overhead


def record(seed: int, *, faults: bool, seconds: float, gain: float = 0.5) -> dict[str, object]:
    return {
        "seed": seed,
        "faults": faults,
        "committed_at": [10.0, 20.0, 10.0 + seconds],
        "before": {"greedy": [0.1, 0.2]},
        "after": {"greedy": [0.1 + gain, 0.2 + gain]},
    }


def test_gains_are_of_each_prompt_and_their_interval_is_around_the_mean() -> None:
    records = [record(0, faults=False, seconds=1.0), record(1, faults=False, seconds=1.0, gain=0.25)]
    gains = own_model.gains_of(records, "greedy")
    assert gains == [pytest.approx([0.5, 0.5]), pytest.approx([0.25, 0.25])]
    low, high = own_model.bootstrap(gains, random.Random(0), rounds=500)
    assert (low, high) == (pytest.approx(0.25), pytest.approx(0.5)), "as far as the seeds differ"
    assert own_model.bootstrap([[0.0, 1.0] * 8], random.Random(0), rounds=500)[0] < 0.5


def test_faults_cost_what_the_same_seed_takes_longer_with_them() -> None:
    records = [
        record(0, faults=True, seconds=130.0),
        record(0, faults=False, seconds=100.0),
        record(1, faults=True, seconds=900.0),  # no run without faults to compare with
    ]
    assert own_model.fault_costs(records) == [pytest.approx(30.0)]


def test_time_within_a_part_is_not_the_outer_parts() -> None:
    now = [0.0]

    def inner() -> None:
        now[0] += 2.0

    def outer() -> None:
        now[0] += 1.0
        owner.inner()

    owner = types.SimpleNamespace(inner=inner, outer=outer)
    parts = step_overhead.Parts(lambda: now[0])
    parts.time(owner, "inner", "inner")
    parts.time(owner, "outer", "outer")
    owner.outer()
    owner.inner()
    assert parts.take() == {"outer": 1.0, "inner": 4.0}
    assert parts.take() == {}
