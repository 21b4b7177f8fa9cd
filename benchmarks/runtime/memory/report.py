"""Estimate beside measurement, for each process."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.runtime.memory.cases import ALGORITHM, CASES, LLAMAS, MIB, TASK, Case
from benchmarks.runtime.memory.measure import NUM_STEPS, NUM_VERSIONS
from rolecall.rl_runtime.memory_estimate import ModelSize, needs

ERROR_MAX = 0.15
"""The bar: relative error of the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: Case
    role: str
    rank: int
    estimated: int
    measured: tuple[int, ...]

    @property
    def error(self) -> float:
        return self.estimated / statistics.median(self.measured) - 1


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One for each process of each case that was measured."""
    rows = []
    for case in CASES:
        own = [r for r in records if r["case"] == case.name]
        if not own:
            continue
        job, size = case.job(Path(), 0), ModelSize(**own[0]["size"])
        by_role = {need.role: need.ranks for need in needs(job, size)}
        rows += [
            Row(
                case=case,
                role=role,
                rank=rank,
                estimated=by_role[role][rank].host_bytes,
                measured=tuple(r["measured"][role][rank] for r in own),
            )
            for role, ranks in own[0]["measured"].items()
            for rank in range(len(ranks))
        ]
    return rows


def line(row: Row) -> str:
    middle, low, high = common.middle_and_spread([m / MIB for m in row.measured])
    spread = f"{middle:.0f} ({low:.0f} to {high:.0f}; n={len(row.measured)})"
    where = f"{row.role} rank {row.rank}"
    return f"| {row.case.name} | {where} | {row.estimated / MIB:.0f} | {spread} | {100 * row.error:+.1f} % |"


def table(rows: Sequence[Row]) -> list[str]:
    worst = max(rows, key=lambda r: abs(r.error))
    outside = sum(abs(r.error) > ERROR_MAX for r in rows)
    return [
        (
            f"{len(rows)} processes: relative error {statistics.median(abs(r.error) for r in rows):.1%} (median), "
            f"{abs(worst.error):.1%} at most ({worst.case.name}, {worst.role} rank {worst.rank}); beyond "
            f"{ERROR_MAX:.0%}: {outside}"
        ),
        "",
        "| case | process | estimate, MiB | measured, MiB: median (quartiles; n) | error |",
        "|---|---|---|---|---|",
        *map(line, rows),
        "",
    ]


def report(records: Sequence[Mapping[str, Any]]) -> list[str]:
    rows, seeds = rows_of(records), sorted({r["seed"] for r in records})
    commits = ", ".join(sorted({r["commit"] for r in records}))
    config = f"task {json.dumps(dict(TASK))}, algorithm {json.dumps(dict(ALGORITHM))}, folders {json.dumps(LLAMAS)}"
    return [
        *common.header("Estimate of memory against the measured peak", config, ", ".join(map(str, seeds))),
        f"- measured at {commits}; the estimate is that of the commit above",
        (
            f"- {NUM_STEPS} steps and a checkpoint (trainers), {NUM_VERSIONS} versions (engines), four steps (runs); "
            f"float32 where nothing else is said"
        ),
        "- measured: peak of RssAnon + RssShmem, without file pages, which processes share",
        f"- not measured: {', '.join(c.name for c in CASES if all(r.case is not c for r in rows)) or 'none'}",
        "",
        "## Cases that no constant was chosen by",
        "",
        *table([r for r in rows if not r.case.tuned]),
        "## Cases that constants were chosen by",
        "",
        *table([r for r in rows if r.case.tuned]),
    ]
