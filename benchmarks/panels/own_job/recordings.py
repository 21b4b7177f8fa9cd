"""Recordings of a real training job of ours with one faulty worker, for judging the detectors of machine metrics.

    python -m benchmarks.panels.own_job.recordings draw                writes the list of cases, committed first
    python -m benchmarks.panels.own_job.recordings record              runs the cases without a recording; needs root
    python -m benchmarks.panels.own_job.recordings record --part 0/2   every second of them: two parts may run at a time
    python -m benchmarks.panels.own_job.recordings judge --detectors sequential+step-time,minder

`job.py` says what the job is and how each fault is made. The folder holds `cases.csv`, one Parquet recording a case
(as `rolecall diagnose` reads it, values with four digits), and one line a case in `recorded.jsonl`: when it was made,
on what host, and with how much other load. The list of cases was committed before any detector saw a recording.

Every detector sees a recording tick by tick. An alarm is a machine named, counted once. It is right when it names the
faulty worker from the onset (or the first sample) on; every other alarm is wrong. `NAME+step-time` is what `rolecall
diagnose --detector NAME` runs.
"""

import argparse
import csv
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch: a worker has one thread
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np

from benchmarks import common
from benchmarks.common import table
from benchmarks.intervals import binomial_interval
from benchmarks.panels.fleet.report import delay_quantile
from benchmarks.panels.own_job import job as own_job
from benchmarks.panels.own_job.job import Case, Fault
from rolecall.detector.live.fusion import merged
from rolecall.detector.panels.panel import (
    FALSE_ALARMS_PER_1000_MACHINE_DAYS,
    Floats,
    Machine,
    Panel,
    PanelDetector,
    PanelShape,
    findings,
)
from rolecall.detector.panels.registry import detector
from rolecall.detector.panels.step_time import StepTime
from rolecall.detector.sources import recording

FOLDER = common.ROOT / "benchmarks" / "data" / "own"
CASES, RECORDED = "cases.csv", "recorded.jsonl"
ONSET_SECONDS = (60, 140)
DIGITS = 4
RECORD_SECONDS_MAX = 600.0
SEED = 1101
DETECTORS = ("sequential+step-time", "sequential", "step-time", "minder", "mahalanobis")

PLAN: tuple[tuple[int, Fault, float, bool, int], ...] = (
    # workers, fault, severity in its unit, whether it is there from the start, ticks
    (12, Fault.CPU_HOG, 3.0, True, 240),
    (4, Fault.NONE, 0.0, True, 240),
    (6, Fault.CPU_QUOTA, 0.15, False, 240),
    (8, Fault.NONE, 0.0, True, 240),
    (4, Fault.DISK, 1.0, True, 360),
    (12, Fault.NONE, 0.0, True, 300),
    (8, Fault.NETWORK, 15.0, False, 360),
    (6, Fault.MEMORY, 4.0, True, 360),
    (6, Fault.NONE, 0.0, True, 300),
    (8, Fault.CPU_HOG, 0.3, False, 360),
    (12, Fault.CPU_QUOTA, 0.08, True, 360),
    (4, Fault.CPU_HOG, 6.0, False, 360),
    (6, Fault.NETWORK, 8.0, True, 360),
    (8, Fault.DISK, 0.4, False, 360),
    (12, Fault.NONE, 0.0, True, 300),
    (4, Fault.MEMORY, 1.0, False, 360),
    (6, Fault.EVERYONE, 0.2, False, 300),
    (8, Fault.CPU_QUOTA, 0.3, True, 360),
    (12, Fault.DISK, 2.0, True, 360),
    (4, Fault.NONE, 0.0, True, 300),
    (8, Fault.MEMORY, 0.3, True, 360),
    (6, Fault.NONE, 0.0, True, 300),
    (4, Fault.CPU_QUOTA, 0.45, False, 360),
    (12, Fault.NETWORK, 30.0, False, 360),
)


def drawn(seed: int) -> list[Case]:
    """The plan with a worker and an onset for each fault."""
    cases = []
    for i, (num_workers, fault, severity, from_start, num_ticks) in enumerate(PLAN):
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
                num_ticks=num_ticks,
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
            command = [sys.executable, "-m", "benchmarks.panels.own_job.recordings", "record", "--case", case.name]
            command += ["--folder", str(folder.resolve())]
            done = subprocess.run(command, cwd=common.ROOT, timeout=RECORD_SECONDS_MAX, check=False)
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
    common.add_line(folder / RECORDED, fact)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """`seconds`: after the first sample."""

    node: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one detector on one recording. `delay_seconds`: from the onset, None if the faulty worker was not named."""

    case: Case
    delay_seconds: float | None
    wrong: tuple[Alarm, ...]


def verdict(case: Case, alarms: Sequence[Alarm]) -> Verdict:
    """`alarms`: each machine's counts once as right and once as wrong, the earliest first."""
    right, wrong = None, dict[str, Alarm]()
    for alarm in sorted(alarms, key=lambda a: a.seconds):
        if not case.fault.is_healthy and alarm.node == node(case.worker) and alarm.seconds >= case.onset_seconds:
            right = alarm if right is None else right
        else:
            wrong.setdefault(alarm.node, alarm)
    delay = right.seconds - case.onset_seconds if right else None
    return Verdict(case=case, delay_seconds=delay, wrong=tuple(wrong.values()))


def detectors(name: str, asked: float) -> list[PanelDetector]:
    """Of a name like `sequential+step-time`. Raises ConfigError."""
    step_time = StepTime(false_alarms_per_1000_machine_days=asked)
    return [
        step_time if part == StepTime.name else detector(part, false_alarms_per_1000_machine_days=asked)
        for part in name.split("+")
    ]


def judge(case: Case, panel: Panel, name: str, asked: float) -> Verdict:
    found = [f for each in detectors(name, asked) for f in findings(each, panel)]
    told = [(d.detected_at - panel.at[0], s.node) for d in merged(found) for s in d.suspects]
    return verdict(case, [Alarm(node=n, seconds=float(seconds)) for seconds, n in told])


def effect(case: Case, panel: Panel) -> tuple[str, float]:
    """The metric in which the faulty worker's mean since the onset is farthest from the median of its peers' means, and
    how far: in spreads (standard deviation, over ticks, of what the peers differ from their median). Infinite where no
    peer ever differs. No detector has a part in it."""
    since = panel.at >= panel.at[0] + case.onset_seconds
    hit = [m.node for m in panel.shape.machines].index(node(case.worker))
    far = {}
    for name, values in zip(panel.shape.metrics, panel.values[:, since].astype(np.float64), strict=True):
        peers = np.delete(values, hit, axis=1)
        peers = peers[~np.isnan(peers).all(axis=1)]
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.nanmean(values[:, hit]) - np.nanmedian(np.nanmean(peers, axis=0))
            far[name] = abs(away) / np.nanstd(peers - np.nanmedian(peers, axis=1, keepdims=True))
    farthest = max(far, key=lambda m: np.nan_to_num(far[m], posinf=np.inf))
    return farthest, float(far[farthest])


def report(panels: Sequence[tuple[Case, Panel]], names: Sequence[str], asked: float) -> list[str]:
    verdicts = {name: [judge(case, p, name, asked) for case, p in panels] for name in names}
    lines = HOW_MADE.split("\n")
    lines += table(HEAD, [row(name, mine) for name, mine in verdicts.items()])
    by: list[tuple[str, Callable[[Case], str]]] = [
        ("fault", lambda c: c.fault.value),
        ("number of workers", lambda c: str(c.num_workers)),
        ("onset", lambda c: "healthy" if c.fault.is_healthy else "later" if c.onset_seconds else "from the start"),
    ]
    with_alarms = {
        name: mine for name, mine in verdicts.items() if any(v.wrong or v.delay_seconds is not None for v in mine)
    }
    for what, key in by:
        rows = []
        for name, mine in with_alarms.items():
            for value in dict.fromkeys(key(case) for case, _ in panels):
                rows.append(row(f"{name}, {value}", [v for v in mine if key(v.case) == value]))
        lines += [f"## By {what}, detectors that named anyone", "", *table(HEAD, rows)]
    lines += [
        "## Each case",
        "",
        "What each detector named, and after how many seconds from the onset; wrong ones with a minus",
        "",
    ]
    rows = []
    for i, (case, p) in enumerate(panels):
        metric, spreads = ("", 0.0) if case.fault.is_healthy else effect(case, p)
        largest = f"{metric}, {spreads:.1f}" if metric else "-"
        rows.append(
            [case.name, f"{case.severity:g}", str(case.onset_seconds), largest, *(_told(verdicts[n][i]) for n in names)]
        )
    lines += table(("case", "severity", "onset, s", "largest effect, spreads", *names), rows)
    return lines


HOW_MADE = """\
A data-parallel training job (gloo) of 4 to 12 worker processes, each with a CPU share, disk limits and a network
namespace of its own, all on the host above. In faulty recordings one worker has busy neighbours in its share, a smaller
share, its memory reclaimed, or a slower disk or link; `benchmarks/panels/own_job/job.py` has the details and the units
of severity. The list of cases was committed before any detector saw a recording. `NAME+step-time` is what `rolecall
diagnose --detector NAME` runs.

Limits: two recordings ran at a time, on two cores with other work going on, so that all workers are disturbed at times.
Workers of a job are processes on one host, not machines. `minder` and `mahalanobis` learn their threshold during the
first 600 ticks at 1 s and say nothing before: every recording is shorter, so their rows show that and nothing about
their statistic. Healthy time is too short to measure a rate of false alarms. A weak fault may show in no metric at all:
the last table has the largest effect of each.
"""
HEAD = (
    "",
    "faults",
    "named",
    "recall [95 %]",
    "wrong",
    "precision [95 %]",
    "F1",
    "delay P50, ticks = s",
    "healthy",
    "flagged [95 %]",
)


def row(label: str, mine: Sequence[Verdict]) -> list[str]:
    faulty, healthy = [v for v in mine if not v.case.fault.is_healthy], [v for v in mine if v.case.fault.is_healthy]
    num_named = sum(v.delay_seconds is not None for v in faulty)
    num_wrong = sum(len(v.wrong) for v in mine)
    middle = delay_quantile([v.delay_seconds for v in faulty], 0.5)
    f1 = 2 * num_named / (num_named + num_wrong + len(faulty)) if faulty else math.nan
    return [
        label,
        str(len(faulty)),
        str(num_named),
        _share(num_named, len(faulty)),
        str(num_wrong),
        _share(num_named, num_named + num_wrong) if faulty else "-",
        "-" if math.isnan(f1) else f"{f1:.2f}",
        "-" if math.isnan(middle) else "missed" if math.isinf(middle) else f"{middle:.0f}",
        str(len(healthy)),
        _share(sum(bool(v.wrong) for v in healthy), len(healthy)),
    ]


def _share(count: int, total: int) -> str:
    if not total:
        return "-"
    low, high = binomial_interval(count, total)
    return f"{count / total:.2f} [{low:.2f}, {high:.2f}]"


def _told(mine: Verdict) -> str:
    right = [] if mine.delay_seconds is None else [f"{mine.delay_seconds:.0f}"]
    return ", ".join(right + [f"-{a.node} at {a.seconds:.0f}" for a in mine.wrong]) or "nobody"


def header(folder: Path, panels: Sequence[tuple[Case, Panel]], names: Sequence[str], asked: float) -> list[str]:
    made = common.read_lines(folder / RECORDED)
    ticks = sum(len(p.at) for _, p in panels)
    machine_days = sum(len(p.at) * len(p.shape.machines) * p.shape.interval_seconds for _, p in panels) / 86_400
    num_faulty = sum(not case.fault.is_healthy for case, _ in panels)
    lines = common.header("Own recordings", f"{', '.join(names)}; asked {asked:g}", f"{SEED} (cases)")
    loads = [x for fact in made for x in (fact["load_before"], fact["load_after"])]
    begun, commits, hosts = (sorted({fact[key] for fact in made}) for key in ("began_at", "commit", "host"))
    num = (
        f"{len(panels)} recordings, {num_faulty} with a fault; {ticks:,} ticks of 1 s, {machine_days:.2f} machine-days"
    )
    made_on = f"{begun[0]} to {begun[-1]}, commit {', '.join(commits)}, {', '.join(hosts)}"
    return [
        *lines[:-1],
        f"- n: {num}, {len(own_job.METRICS)} metrics",
        f"- recorded {made_on}, load average {min(loads):.1f} to {max(loads):.1f}",
        "",
    ]


def read(folder: Path) -> list[tuple[Case, Panel]]:
    """Cases that have a recording, with it."""
    found = []
    for case in read_cases(folder / CASES):
        path = folder / f"{case.name}.parquet"
        if path.exists():
            (one,) = recording.read(path).panels
            found.append((case, one))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw, make = commands.add_parser("draw"), commands.add_parser("record")
    for command in (draw, make):
        command.add_argument("--folder", type=Path, default=FOLDER)
    look = commands.add_parser("judge")
    look.add_argument("--folder", type=Path, default=FOLDER)
    look.add_argument("--detectors", default=",".join(DETECTORS))
    look.add_argument("--asked", type=float, default=FALSE_ALARMS_PER_1000_MACHINE_DAYS)
    look.add_argument("--dry", action="store_true", help="print the report, do not write it")
    make.add_argument("--part", default="0/1", help="which of how many parts of the list")
    make.add_argument("--case", default="", help="only this one, in this process")
    args = parser.parse_args()
    if args.command == "draw":
        args.folder.mkdir(parents=True, exist_ok=True)
        write_cases(args.folder / CASES, drawn(SEED))
    elif args.command == "judge":
        np.seterr(all="ignore")
        names = args.detectors.split(",")
        panels = read(args.folder)
        lines = [*header(args.folder, panels, names, args.asked), *report(panels, names, args.asked)]
        print("\n".join(lines))
        if not args.dry:
            print(f"written: {common.write('own_recordings', lines)}", file=sys.stderr)
    elif args.case:
        record_one(args.folder, next(c for c in read_cases(args.folder / CASES) if c.name == args.case))
    else:
        part, num_parts = map(int, args.part.split("/"))
        record(args.folder, part, num_parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
