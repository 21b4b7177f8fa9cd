"""Time of one call."""

import argparse
import time
from dataclasses import replace

import numpy as np

from benchmarks.common import table
from rolecall.detector.panels.minder import detector as minder
from rolecall.detector.panels.panel import Machine, Panel, PanelShape, findings
from rolecall.detector.panels.registry import BASELINES, detector

CALL_MACHINES, CALL_TICKS, CALL_METRICS = 1500, 900, 7
PAPER_CALL_SECONDS = 3.6


def call(args: argparse.Namespace) -> list[str]:
    """One call of the paper: 15 minutes of 1,500 machines, 7 metrics, from memory to verdict; every tick is judged."""
    rng = np.random.default_rng(args.seed)
    values = rng.standard_normal((CALL_METRICS, CALL_TICKS, CALL_MACHINES), dtype=np.float32)
    values[rng.random(values.shape, dtype=np.float32) < 0.02] = np.nan
    shape = PanelShape(
        role="trainer",
        metrics=tuple(f"m{m}" for m in range(CALL_METRICS)),
        machines=tuple(Machine(node=f"n{n:04d}") for n in range(CALL_MACHINES)),
        interval_seconds=1.0,
    )
    whole = Panel(shape=shape, at=np.arange(CALL_TICKS, dtype=np.float64), values=values)
    rows = []
    for name, method in (
        ("minder", replace(minder.make(args.asked), num_metrics=None)),
        *((n, detector(n, false_alarms_per_1000_machine_days=args.asked)) for n in BASELINES),
    ):
        began, cpu = time.perf_counter(), time.process_time()
        findings(method, whole)
        wall, spent = time.perf_counter() - began, time.process_time() - cpu
        rows.append([name, f"{spent:.1f}", f"{wall:.1f}", f"{1000 * spent / CALL_TICKS:.1f}"])
    head = ("detector", "CPU s, one core", "wall s", "ms a tick")
    return [
        "## One call",
        "",
        (
            f"15 minutes (900 ticks) of {CALL_MACHINES:,} machines, {CALL_METRICS} metrics, 2 % missing, one thread, "
            f"n = 1. The paper: {PAPER_CALL_SECONDS} s on 128 cores, fetching included. Minder's pairwise distances "
            f"cost the "
            "square of the machines."
        ),
        "",
        *table(head, rows),
    ]
