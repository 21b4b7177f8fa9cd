"""What the benchmark of the memory estimate makes of its measurements."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runtime.memory import cases, measure, report
from rolecall.rl_runtime.memory_estimate import MIB, trainer_need


def records_of(name: str, *shares: float) -> list[dict[str, Any]]:
    """Measured: these shares of the estimate."""
    [case] = [c for c in cases.CASES if c.name == name]
    job = case.job(Path(), 0)
    size = cases.size_of(job)
    ranks = [trainer_need(job, size, rank).host_bytes for rank in range(job.runtime.trainer_ranks)]
    return [
        {
            "case": name,
            "seed": seed,
            "commit": "c",
            "size": asdict(size),
            "measured": {"trainer": [int(share * n) for n in ranks]},
        }
        for seed, share in enumerate(shares)
    ]


def test_the_error_is_that_of_the_median_of_each_rank() -> None:
    rows = report.rows_of(records_of("2 ranks, 51 M", 0.7, 0.8, 2.0))
    assert [(row.role, row.rank, row.error) for row in rows] == [
        ("trainer", rank, pytest.approx(1 / 0.8 - 1, rel=1e-6)) for rank in (0, 1)
    ]


def test_the_report_keeps_the_cases_that_constants_were_chosen_by_apart() -> None:
    lines = report.report([*records_of("grpo, 11 M", 0.5), *records_of("grpo, 25 M", 1.0)])
    checked, tuned = (
        next(x for x in lines if x.startswith(f"1 processes: relative error {n}")) for n in ("0.0", "100")
    )
    assert checked.endswith("beyond 15%: 0") and tuned.endswith("beyond 15%: 1")
    assert lines.index(checked) < lines.index(tuned)


def test_memory_of_this_process_is_read_without_its_file_pages() -> None:
    pid = os.getpid()
    before = measure.own_bytes(pid)
    held = bytearray(b"x" * (256 * MIB))
    assert measure.own_bytes(pid) - before >= 192 * MIB and held  # other memory may become free meanwhile
