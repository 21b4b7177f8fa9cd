"""`rolecall simulate fleet`: writes simulated tasks as recordings with labels.

    OUT/case-000/recording.parquet   what `rolecall diagnose` reads
    OUT/case-000/label.json          faulty node, onset and end, and the simulation's parameters

A task is written in pieces, so that memory does not grow with its length.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from rolecall.core.errors import CommandRefused
from rolecall.detector.simulation.fleet import EPOCH_SECONDS, INTERVAL_SECONDS, METRICS, SimulatedTask, chunks, fleet
from rolecall.detector.sources import recording

NUM_MACHINES_MAX_DEFAULT = 128
"""Minder's largest tasks have 1,500 machines; such a recording is half a gigabyte."""
GRACE_SECONDS = 60.0
"""An alarm counts as correct until this long after the fault's end."""
REPEAT_GAP_SECONDS = 300.0
"""Alarms of one node closer together count as one."""


def simulate_fleet(
    out: Path,
    *,
    seed: int,
    num_tasks: int,
    num_healthy: int = 0,
    num_machines_max: int = NUM_MACHINES_MAX_DEFAULT,
    progress: Callable[[str], None] = lambda line: None,
) -> int:
    """Writes `num_tasks` cases with a fault, then `num_healthy` without; returns their number.

    Raises:
        CommandRefused: an invalid number, or `out` is not empty.
    """
    if num_tasks < 0 or num_healthy < 0 or num_tasks + num_healthy < 1:
        raise CommandRefused(
            f"cannot simulate {num_tasks} faulty and {num_healthy} healthy tasks: at least one is needed"
        )
    if seed < 0:
        raise CommandRefused(f"the seed must be 0 or more, not {seed}")
    try:
        tasks = fleet(seed=seed, num_tasks=num_tasks, num_healthy=num_healthy, num_machines_max=num_machines_max)
    except ValueError as e:
        raise CommandRefused(str(e)) from e
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise CommandRefused(f"{out} is not empty: name a new or empty folder")
        for task in tasks:
            case = out / f"case-{task.index:03d}"
            case.mkdir()
            num_samples = write_recording(case / "recording.parquet", task)
            (case / recording.LABEL_JSON).write_text(json.dumps(label(task), indent=1) + "\n")
            progress(f"{case.name}: {task.num_machines} machines, {task.num_ticks} s, {num_samples:,} samples")
    except OSError as e:
        raise CommandRefused(f"{out}: {e.strerror or e}") from e
    return len(tasks)


def write_recording(path: Path, task: SimulatedTask) -> int:
    """Returns the number of samples. Raises OSError."""
    parts, num_samples = [], 0
    try:
        for i, part in enumerate(chunks(task)):
            parts.append(path.with_name(f"part-{i:04d}.parquet"))
            num_samples += recording.write(parts[-1], [part])
        partial = path.with_name(path.name + ".partial")
        pl.scan_parquet(parts).sink_parquet(partial, compression="zstd")
        partial.replace(path)
    finally:
        for part_path in parts:
            part_path.unlink(missing_ok=True)
    return num_samples


def label(task: SimulatedTask) -> dict[str, Any]:
    fault, shape = task.fault, task.shape
    events = []
    if fault:
        events.append(
            {
                "node": shape.machines[fault.machine].node,
                "onset": fault.onset,
                "end": fault.end,
                "kind": fault.kind,
                "how": str(fault.how),
                "effect_sigmas": fault.effect_sigmas,
                "metrics": [METRICS[m].name for m in fault.metrics],
                "victims": [
                    {"node": shape.machines[v.machine].node, "share": v.share, "delay_seconds": v.delay_seconds}
                    for v in fault.victims
                ],
            }
        )
    return {
        "healthy": fault is None,
        "interval_seconds": INTERVAL_SECONDS,
        "score_from": EPOCH_SECONDS,
        "events": events,
        "ignore": [],
        "early_tolerance_seconds": 0,
        "grace_seconds": GRACE_SECONDS,
        "repeat_gap_seconds": REPEAT_GAP_SECONDS,
        "source": f"rolecall simulate fleet, seed {task.seed}, task {task.index}, mix {task.mix}",
        "licence": "generated",
    }
