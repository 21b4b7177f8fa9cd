"""Fitting the base rates: a trace whose bursts, repeat offenders and repair times are known gives them back."""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation import fit_base_rates
from benchmarks.simulation.fit_base_rates import burst_sizes, faults_by_server, fit_offenders, read


def event(server: str, at: float, kind: str, what: str = "GPU") -> dict[str, Any]:
    fault = {"Level": "Hardware Failure", "Class": what, "Desc": "a fault"}
    return {"node_id": server, "event_time": at, "event_type": f"fault_{kind}", "fault_type": fault}


def trace(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text(json.dumps(events))
    return path


def test_each_start_is_paired_with_its_end(tmp_path: Path) -> None:
    found = read(
        trace(
            tmp_path / "t.json",
            event("a", 1.0, "start"),
            event("a", 1.5, "start", "NIC"),
            event("a", 4.0, "end"),
            event("b", 2.0, "start"),
            event("a", 9.0, "end", "NIC"),
        )
    )
    assert [(f.server, f.began, f.ended, f.kind) for f in found[:2]] == [("a", 1.0, 4.0, "GPU"), ("a", 1.5, 9.0, "NIC")]
    assert found[2].server == "b" and math.isnan(found[2].ended), "the trace ends before the fault"


def test_a_burst_is_of_servers_and_ends_with_a_gap(tmp_path: Path) -> None:
    minute = 60 / 86_400
    starts = [("a", 0.0), ("b", minute), ("b", 2 * minute), ("c", 10 * minute), ("d", 1.0)]
    faults = read(trace(tmp_path / "t.json", *(event(server, at, "start") for server, at in starts)))
    assert dict(burst_sizes(faults, 90.0)) == {2: 1, 1: 2}
    assert dict(burst_sizes(faults, 3_600.0)) == {3: 1, 1: 1}


def test_faults_of_one_server_within_a_day_are_one(tmp_path: Path) -> None:
    starts = [("a", 0.0), ("a", 0.5), ("a", 3.0), ("b", 1.0)]
    faults = read(trace(tmp_path / "t.json", *(event(server, at, "start") for server, at in starts)))
    assert faults_by_server(faults, num_servers=4) == [2, 1, 0, 0]


def test_repeat_offenders_are_found_where_there_are_some(seed: int) -> None:
    rng = random.Random(seed)

    def poisson(rate: float) -> int:
        number, left = 0, rng.expovariate(1.0)
        while left < rate:
            number, left = number + 1, left + rng.expovariate(1.0)
        return number

    mixed = fit_offenders([poisson(10.0 if n % 5 == 0 else 1.0) for n in range(2_000)])
    assert mixed.share == pytest.approx(0.2, abs=0.03) and mixed.factor == pytest.approx(10.0, rel=0.15)
    equal = fit_offenders([poisson(1.5) for _ in range(2_000)])
    assert equal.log_likelihood - equal.log_likelihood_equal < 5 < mixed.log_likelihood - mixed.log_likelihood_equal


def test_without_the_trace_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["fit_base_rates.py", "--data", str(tmp_path)])
    assert fit_base_rates.main() == 0
    assert "does not exist: nothing was fitted" in capsys.readouterr().out
