"""Flight Recorder dumps of 4,096 ranks with one culprit: is it the right one, and how long does it take?

    python -m benchmarks.detection.flight_recorder                          the report: 4,096 ranks x 2,000 entries
    python -m benchmarks.detection.flight_recorder --ranks 256 --no-stock   smaller, without PyTorch's own analyser

A job of tensor (8), pipeline (4) and data parallel groups beside the group of all runs its program, each operation
blocking, until one rank misbehaves. The dumps that its ranks would leave then are written to a temporary folder, byte
for byte as PyTorch's pickler writes them (compared with dumps of a gloo job), with stack frames. They are read again,
in full and by the fast way: the status of all first, then the entries of those who matter. PyTorch's `fr_trace`
analyses the dumps of a smaller job beside it.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.detection.flight_recorder.job import NUM_PLACES, PP, PREFIX, SCENARIOS, TP, Layout, play, write_dumps
from rolecall.detector.artifacts.flight_recorder import diagnosis as flight_recorder
from rolecall.detector.artifacts.flight_recorder import dumps as flight_dumps


def measure(folder: Path, world_size: int, fast: bool, num_processes: int) -> dict[str, Any]:
    """In this process and its readers, from nothing to the findings."""
    begun = time.perf_counter()
    paths = sorted(folder.iterdir())
    if fast:
        wanted = partial(flight_recorder.entries_wanted, world_size=world_size)
        dumps, unreadable = flight_dumps.read_as_needed(paths, wanted, num_processes=num_processes)
    else:
        dumps, unreadable = flight_dumps.read_many(paths, num_processes=num_processes)
    read_seconds = time.perf_counter() - begun
    found = flight_recorder.diagnose(dumps, world_size=world_size)
    seconds = time.perf_counter() - begun
    mine, theirs = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "seconds": seconds,
        "read_seconds": read_seconds,
        "cpu_seconds": mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime,
        "peak_gib": (mine.ru_maxrss + num_processes * theirs.ru_maxrss) / 2**20,
        "num_unreadable": len(unreadable),
        "num_parsed": sum(d.entries is not None for d in dumps),
        "num_entries": sum(len(d.entries) for d in dumps if d.entries is not None),
        "findings": [[str(f.fault_class), [s.rank for s in f.suspects], f.because] for f in found],
    }


def _machine_busy_seconds() -> float:
    """CPU seconds that all processes have used, and that the host has taken, since boot."""
    user, nice, system, _, _, *rest = (int(t) for t in Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def measured(folder: Path, world_size: int, fast: bool, num_processes: int) -> dict[str, Any]:
    """In a process of its own: memory is what this reading took. `others_cpu_seconds`: what all else took meanwhile."""
    command = [sys.executable, "-m", "benchmarks.detection.flight_recorder", "--measure", str(folder.resolve())]
    command += ["--ranks", str(world_size), "--processes", str(num_processes), *(["--fast"] if fast else [])]
    before = _machine_busy_seconds()
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, check=True, timeout=1200)
    busy = _machine_busy_seconds() - before
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "others_cpu_seconds": max(0.0, busy - result["cpu_seconds"])}


STOCK_SECONDS_MAX = 300


def stock(folder: Path) -> tuple[float, str, set[int]]:
    """PyTorch's analyser: seconds, how it ended, and all ranks that it calls missing or culprit."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", PREFIX]
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--allow-incomplete-ranks"],
            capture_output=True,
            text=True,
            timeout=STOCK_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return STOCK_SECONDS_MAX, "gave up", set()
    seconds = time.perf_counter() - begun
    text = done.stdout + done.stderr
    named = {
        int(r) for found in re.findall(r"missing ranks: \{([0-9, ]*)\}", text) for r in found.split(",") if r.strip()
    }
    named |= {int(r) for r in re.findall(r"Culprit rank ([0-9]+)", text)}
    last = (done.stderr.strip().splitlines() or ["?"])[-1][:80]
    return seconds, "ended" if done.returncode == 0 else f"failed: {last}", named


def named(result: dict[str, Any]) -> str:
    return "; ".join(f"{fault} {ranks if len(ranks) < 6 else len(ranks)}" for fault, ranks, _ in result["findings"])


def right(result: dict[str, Any], scenario: str, culprit: int) -> bool:
    """The culprit and only it, in one finding of the right class."""
    fault = "hang" if scenario in ("hang", "dead rank") else "user_code"
    return [f[:2] for f in result["findings"]] == [[fault, [culprit]]]


def run(num_ranks: int, num_entries: int, culprit: int, num_processes: int, scratch: Path) -> list[str]:
    layout = Layout(num_ranks)
    lines = [
        "| scenario | dumps | full: s | CPU s | others' CPU s | peak GiB | right | fast: s | CPU s | others' CPU s | "
        "peak GiB" + " | parsed whole | right |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    sentences = []
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory(dir=scratch) as name:
            folder = Path(name)
            print(f"{scenario}: writing", flush=True)
            story = play(layout, scenario, culprit)
            size = write_dumps(folder, layout, story, num_entries, partial(print, flush=True))
            full = measured(folder, num_ranks, False, num_processes)
            fast = measured(folder, num_ranks, True, num_processes)
        assert full["num_parsed"] == len(story.dumped) and not full["num_unreadable"] + fast["num_unreadable"]
        assert full["num_entries"] == len(story.dumped) * num_entries
        cells = [scenario, f"{len(story.dumped):,} x {num_entries:,}, {size / 2**30:.2f} GiB"]
        for result in (full, fast):
            cells += [f"{result[k]:.1f}" for k in ("seconds", "cpu_seconds", "others_cpu_seconds")]
            cells += [f"{result['peak_gib']:.2f}"]
            cells += [f"{result['num_parsed']:,}"] if result is fast else []
            cells += ["yes" if right(result, scenario, culprit) else f"NO: {named(result)}"]
        lines.append(f"| {' | '.join(cells)} |")
        sentences.append(f"- {scenario}: {full['findings'][0][2] if full['findings'] else 'nothing'}")
        print(lines[-1], flush=True)
    return [*lines, "", "What it says (full):", "", *sentences]


def run_stock(num_ranks: int, num_entries: int, scratch: Path) -> list[str]:
    lines = [
        "| ranks x entries | pipeline | scenario | fr_trace: seconds | it names | ours, full: seconds | it names |",
        "|---|---|---|---|---|---|---|",
    ]
    culprit = num_ranks // 3
    for pp in (1, PP):
        layout = Layout(num_ranks, pp)
        for scenario in SCENARIOS:
            with tempfile.TemporaryDirectory(dir=scratch) as name:
                folder = Path(name)
                story = play(layout, scenario, culprit)
                write_dumps(folder, layout, story, num_entries, lambda text: None)
                seconds, how, ranks = stock(folder)
                ours = measured(folder, num_ranks, False, 2)
            told = f"{sorted(ranks)}" if len(ranks) < 6 else f"{len(ranks)} ranks"
            told += f", {'with' if culprit in ranks else 'without'} the culprit {culprit}"
            cells = [f"{num_ranks} x {num_entries:,}", str(pp), scenario, f"{seconds:.1f} ({how})", told]
            cells += [f"{ours['seconds']:.1f}", named(ours)]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--culprit", type=int, default=1234)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="needs 2 GB")
    parser.add_argument("--stock-ranks", type=int, default=128, help="size of the job that PyTorch's analyser gets")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--no-report", action="store_true", help="print only")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fast", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.ranks, args.fast, args.processes)))
        return
    lines = run(args.ranks, args.entries, args.culprit, args.processes, args.scratch)
    config = (
        f"{args.ranks} ranks x {args.entries} entries, each of {NUM_PLACES} places with a stack of ten frames, "
        f"{args.processes} processes"
    )
    report = common.header("Flight Recorder: who holds up the job", config, f"none; culprit is rank {args.culprit}")
    report += [
        (
            f"Tensor parallel {TP}, pipeline {PP}, data parallel {args.ranks // TP // PP}; NCCL-like dumps. Wall seconds "  # noqa: E501
            f"from the"
        ),
        (
            "first file to the findings in a process started for it, readers included; dumps lie in the page cache. "
            "Peak: resident"
        ),
        (
            f"memory of the parent plus {args.processes} times the largest reader. Others' CPU seconds: what the rest of "  # noqa: E501
            f"the machine"
        ),
        "used meanwhile; wall seconds grow with it, and on a machine of its own are about half of the CPU seconds.",
        "",
        *lines,
    ]
    if not args.no_stock:
        report += [
            "",
            (
                "PyTorch's analyser (`fr_trace --allow-incomplete-ranks`, one process, its import of torch included) on "  # noqa: E501
                "the dumps"
            ),
            (
                "of smaller jobs of the same kind, with and without the pipeline's point-to-point traffic; named is "
                "whoever it"
            ),
            f"calls missing or culprit. It was given {STOCK_SECONDS_MAX} s:",
            "",
        ]
        report += run_stock(args.stock_ranks, args.entries, args.scratch)
    if args.no_report:
        print("\n".join(report))
    else:
        print(common.write("flight_recorder", report))


if __name__ == "__main__":
    main()
