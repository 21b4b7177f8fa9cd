"""Recordings of a real training job of ours with one faulty worker, for judging the detectors of machine metrics.

    python benchmarks/own_recordings.py draw                     writes the list of cases, which is committed first
    python benchmarks/own_recordings.py record                   runs the cases that have no recording yet; needs root
    python benchmarks/own_recordings.py record --part 0/2        every second of them: two parts may run at a time
    python benchmarks/own_recordings.py judge --detectors sequential,minder,mahalanobis

`own_job.py` says what the job is and how each fault is made. The folder holds `cases.csv`, one Parquet recording a case
(as `rolecall diagnose` reads it, values with four digits), and one line a case in `recorded.jsonl`: when it was made,
on what host, and with how much other load.
"""

import argparse
import csv
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch: a worker has one thread
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import common
import numpy as np
import own_job
from own_job import Case, Fault

from rolecall.detector.panels.panel import Floats, Machine, Panel, PanelShape
from rolecall.detector.sources import recording

FOLDER = common.ROOT / "benchmarks" / "data" / "own"
CASES, RECORDED = "cases.csv", "recorded.jsonl"
NUM_TICKS = 240
ONSET_SECONDS = (60, 140)
DIGITS = 4
RECORD_SECONDS_MAX = 600.0
SEED = 1101

PLAN: tuple[tuple[int, Fault, float, bool], ...] = (
    # workers, fault, severity in its unit, whether it is there from the start
    (12, Fault.CPU_HOG, 3.0, True),
    (4, Fault.NONE, 0.0, True),
    (6, Fault.CPU_QUOTA, 0.15, False),
    (8, Fault.NONE, 0.0, True),
    (4, Fault.DISK, 1.0, True),
    (12, Fault.NONE, 0.0, True),
    (8, Fault.NETWORK, 15.0, False),
    (6, Fault.MEMORY, 4.0, True),
    (6, Fault.NONE, 0.0, True),
    (8, Fault.CPU_HOG, 0.3, False),
    (12, Fault.CPU_QUOTA, 0.08, True),
    (4, Fault.CPU_HOG, 6.0, False),
    (6, Fault.NETWORK, 8.0, True),
    (8, Fault.DISK, 0.4, False),
    (12, Fault.NONE, 0.0, True),
    (4, Fault.MEMORY, 1.0, False),
    (6, Fault.EVERYONE, 0.2, False),
    (8, Fault.CPU_QUOTA, 0.3, True),
    (12, Fault.DISK, 2.0, True),
    (4, Fault.NONE, 0.0, True),
    (8, Fault.MEMORY, 0.3, True),
    (6, Fault.NONE, 0.0, True),
    (4, Fault.CPU_QUOTA, 0.45, False),
    (12, Fault.NETWORK, 30.0, False),
    (8, Fault.NONE, 0.0, True),
    (6, Fault.CPU_HOG, 1.0, True),
)


def drawn(seed: int) -> list[Case]:
    """The plan with a worker and an onset for each fault."""
    cases = []
    for i, (num_workers, fault, severity, from_start) in enumerate(PLAN):
        rng = random.Random(f"{seed} {i}")
        worker, onset = rng.randrange(num_workers), rng.randrange(*ONSET_SECONDS)
        cases.append(
            Case(
                name=f"{i:02}-{fault.value.replace('_', '-')}-{num_workers}",
                seed=seed + i,
                num_workers=num_workers,
                fault=fault,
                severity=severity,
                worker=-1 if fault.is_healthy else worker,
                onset_seconds=0 if from_start else onset,
                num_ticks=NUM_TICKS,
            )
        )
    return cases


def write_cases(path: Path, cases: Sequence[Case]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Case)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(c) for c in cases)


def read_cases(path: Path) -> list[Case]:
    with path.open(newline="") as file:
        return [
            Case(
                name=row["name"],
                seed=int(row["seed"]),
                num_workers=int(row["num_workers"]),
                fault=Fault(row["fault"]),
                severity=float(row["severity"]),
                worker=int(row["worker"]),
                onset_seconds=int(row["onset_seconds"]),
                num_ticks=int(row["num_ticks"]),
            )
            for row in csv.DictReader(file)
        ]


def panel(case: Case, began_at: float, values: Floats) -> Panel:
    """`began_at`: when the first second began, Unix seconds. `values`: (METRICS, ticks, workers)."""
    shape = PanelShape(
        job=case.name,
        role="trainer",
        metrics=own_job.METRICS,
        machines=tuple(Machine(node=node(rank), replica=f"trainer/{rank}") for rank in range(case.num_workers)),
        interval_seconds=1.0,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.where(values != 0, DIGITS - 1 - np.floor(np.log10(np.abs(values))), 0)
        rounded = np.round(values * 10.0**digits) / 10.0**digits
    at = round(began_at) + 1 + np.arange(case.num_ticks, dtype=np.float64)
    return Panel(shape=shape, at=at, values=rounded.astype(np.float32))


def node(rank: int) -> str:
    return f"worker-{rank:02}"


def record(folder: Path, part: int, num_parts: int) -> None:
    """Each case in a process of its own, since it enters a network namespace."""
    for case in read_cases(folder / CASES)[part::num_parts]:
        if not (folder / f"{case.name}.parquet").exists():
            command = [sys.executable, __file__, "record", "--folder", str(folder), "--case", case.name]
            done = subprocess.run(command, timeout=RECORD_SECONDS_MAX, check=False)
            print(f"{datetime.now(UTC):%H:%M:%S} {case.name}: exit code {done.returncode}", flush=True)


def record_one(folder: Path, case: Case) -> None:
    loads = [os.getloadavg()[0]]
    commit = common.commit()
    with tempfile.TemporaryDirectory(prefix="own-job-", dir=folder) as scratch:
        began_at, values = own_job.record(case, Path(scratch))
    loads.append(os.getloadavg()[0])
    recording.write(folder / f"{case.name}.parquet", [panel(case, began_at, values)])
    fact: dict[str, Any] = {
        "name": case.name,
        "began_at": datetime.fromtimestamp(began_at, UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "host": common.hardware(),
        "kernel": platform.release(),
        "load_before": loads[0],
        "load_after": loads[1],
        "step_seconds_median": round(float(np.nanmedian(values[own_job.METRICS.index("step_seconds")])), 4),
    }
    with (folder / RECORDED).open("a") as file:
        file.write(json.dumps(fact) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw, make = commands.add_parser("draw"), commands.add_parser("record")
    for command in (draw, make):
        command.add_argument("--folder", type=Path, default=FOLDER)
    make.add_argument("--part", default="0/1", help="which of how many parts of the list")
    make.add_argument("--case", default="", help="only this one, in this process")
    args = parser.parse_args()
    if args.command == "draw":
        args.folder.mkdir(parents=True, exist_ok=True)
        write_cases(args.folder / CASES, drawn(SEED))
    elif args.case:
        record_one(args.folder, next(c for c in read_cases(args.folder / CASES) if c.name == args.case))
    else:
        part, num_parts = map(int, args.part.split("/"))
        record(args.folder, part, num_parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
