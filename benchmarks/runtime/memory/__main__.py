"""Is the estimate of memory (`rl_runtime/memory_estimate.py`) right? Estimate against measured peak, for each rank.

    python -m benchmarks.runtime.memory                    all cases; idle machine, about half an hour
    python -m benchmarks.runtime.memory --only "2 ranks"   cases with this in their name
    python -m benchmarks.runtime.memory --report-only      the report again, with the estimate as it is now

Each measurement is a line of `results/memory.jsonl` as soon as it is over.

A trainer case starts the processes of one or two trainers as their actors do, and makes five steps whose samples all
have the longest length, the last one beside the copy for a checkpoint, which is then written. An engine case starts
an engine, gives it three versions of the weights and lets it generate meanwhile. The case of a run is a whole
`rolecall run`; its reward workers, controller and standby are measured, too.

Measured is the largest RssAnon + RssShmem of /proc/PID/status, read every few milliseconds: the memory that only this
process has. VmHWM would count file pages, too: of libraries, which all processes share, and of a model folder while it
is read, which the kernel gives back when memory is short.

The constants were chosen by the cases marked `tuned`; the others check them.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from benchmarks import common
from benchmarks.runtime.memory.cases import CASES, Case, size_of, write_folder
from benchmarks.runtime.memory.measure import MEASURES
from benchmarks.runtime.memory.processes import ANSWER_SECONDS
from benchmarks.runtime.memory.report import line, report, rows_of
from rolecall.core.rundir import create_run_dir


def measure(cases: Sequence[Case], seeds: Sequence[int], records: Path) -> None:
    """Appends a line to `records` for each case and seed."""
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name)
        for folder in sorted({c.model for c in cases if isinstance(c.model, str)}):
            context = multiprocessing.get_context("spawn").Process(target=write_folder, args=(folders, folder))
            context.start()
            context.join(ANSWER_SECONDS)
        for seed, case in product(seeds, cases):
            job = case.job(folders, seed)
            with tempfile.TemporaryDirectory() as inside:
                measured = MEASURES[case.kind](case, job, create_run_dir(Path(inside), "r"))
            found = {
                "case": case.name,
                "seed": seed,
                "commit": common.commit(),
                "size": asdict(size_of(job)),
                "measured": measured,
            }
            common.add_line(records, found)
            print("\n".join(map(line, rows_of([found]))), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tuned", action=argparse.BooleanOptionalAction, help="only cases of this kind")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--records", type=Path, default=common.RESULTS / "memory.jsonl")
    parser.add_argument("--report-only", action="store_true", help="the report of what has been measured")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if not args.report_only:
        chosen = [c for c in CASES if args.only in c.name and args.tuned in (None, c.tuned)]
        measure(chosen, args.seeds, args.records)
    lines = report(common.read_lines(args.records))
    common.publish("memory", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
