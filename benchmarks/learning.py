"""Do GRPO, DAPO, PPO and T-PPO learn, what does each part of DAPO do, and does T-PPO reach a reward sooner than PPO?

    python benchmarks/learning.py curves        GRPO, DAPO, PPO, T-PPO on the default job, from random weights
    python benchmarks/learning.py smaller       the same on a smaller model and shorter answers
    python benchmarks/learning.py parts         DAPO's four parts switched on one by one, on long_addition
    python benchmarks/learning.py race          PPO and T-PPO with a real engine, the same time for both
    python benchmarks/learning.py report        the report and its picture, of all that was carried out at this commit

Each run is a line of benchmarks/results/learning.jsonl as soon as it is over. What is there already at this commit
is not done again, so an interrupted part goes on where it stopped. Two runs at a time, each on one thread; the
two of a pair of the race at the same time.
"""

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two runs use both cores

import common
import learning_report
import learning_runs
from learning_runs import CURVES, PARTS, RACE, SMALLER, Run
from pictures import bands

RECORDS = common.RESULTS / "learning.jsonl"
WORKERS = 2
RUN_SECONDS_MAX = 3600.0
"""A run that takes longer, on a machine however busy, hangs."""


def wanted(args: argparse.Namespace) -> list[list[Run]]:
    """Runs of the part, in batches: one begins when the one before is over."""
    if args.part == RACE:
        runs = learning_runs.race(seconds=args.seconds, exam_every=args.exam_every, seeds=args.seeds)
        return [[run for run in runs if run.seed == seed] for seed in args.seeds]
    make = {CURVES: learning_runs.curves, SMALLER: learning_runs.smaller, PARTS: learning_runs.parts}[args.part]
    return [make(steps=args.steps, seconds=args.seconds, seeds=args.seeds)]


def carry_out(batches: Sequence[Sequence[Run]], *, commit: str, path: Path, minutes: float) -> int:
    """Adds a line of each run to `path`. Returns how many were not carried out."""
    ends = time.monotonic() + 60 * minutes
    batches = [learning_runs.missing(batch, learning_runs.read(path, [commit])) for batch in batches]
    left = sum(map(len, batches))
    for batch in filter(None, batches):
        # A process of its own for each engine; else the import of torch is paid once a worker.
        alone = 1 if any(run.with_engine for run in batch) else None
        with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), max_tasks_per_child=alone) as pool:
            for run, future in over(
                batch, lambda run: pool.submit(learning_runs.carried_out, run, commit), lambda: time.monotonic() < ends
            ):
                if (error := future.exception()) is not None:  # the others are worth having all the same
                    print(f"{run.part}, {run.name}, seed {run.seed}: {type(error).__name__}: {error}", file=sys.stderr)
                    continue
                record = future.result()
                with path.open("a") as out:
                    out.write(json.dumps(record, separators=(",", ":")) + "\n")
                left -= 1
                print(_told(run, record, left), flush=True)
    return left


def over(
    runs: Iterable[Run], begin: Callable[[Run], Future[dict[str, Any]]], may_begin: Callable[[], bool]
) -> Iterator[tuple[Run, Future[dict[str, Any]]]]:
    """Runs as they end, `WORKERS` at a time. When no more may begin, those that have begun are waited for."""
    left, going = deque(runs), dict[Future[dict[str, Any]], Run]()
    while True:
        while left and len(going) < WORKERS and may_begin():
            run = left.popleft()
            going[begin(run)] = run
        if not going:
            return
        done, _ = wait(going, timeout=RUN_SECONDS_MAX, return_when=FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"no run ended within {RUN_SECONDS_MAX:.0f} s")
        for future in done:
            yield going.pop(future), future


def _told(run: Run, record: dict[str, Any], left: int) -> str:
    steps = record["columns"]["reward"]
    reward, exact = record["final"]
    return (
        f"{run.part}, {run.name}, seed {run.seed}: {len(steps)} steps, {sum(record['columns']['cpu_seconds']):.0f} "
        f"CPU s, examined: reward {reward:.3f}, exact {exact:.3f}; load {record['load'][1]}; {left} left"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(CURVES, SMALLER, PARTS, RACE, "report"))
    parser.add_argument("--steps", type=int, default=100, help="of each run but the race's")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="of each run: the race's time, else a limit of CPU"
    )
    parser.add_argument("--exam-every", type=int, default=10, help="steps between examinations of the race")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(learning_runs.SEEDS))
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further run begins")
    parser.add_argument(
        "--commits", nargs="+", default=[], help="of which the report is, if not of the one checked out"
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--no-file", action="store_true", help="print the report only")
    args = parser.parse_args(argv)
    if args.part != "report":
        left = carry_out(wanted(args), commit=common.commit(), path=args.records, minutes=args.minutes)
        return 1 if left else 0
    commits = args.commits or [common.commit()]
    records = learning_runs.read(args.records, commits)
    if not records:
        print(f"{args.records}: no record of {', '.join(commits)}: carry out a part first", file=sys.stderr)
        return 2
    lines = learning_report.report(records)
    print("\n".join(lines))
    if not args.no_file:
        drawn = ("Lines are medians over seeds, bands their quartiles and, paler, extremes.", "")
        path = common.write("learning", [*lines, *drawn, f"![Curves of learning]({learning_report.picture_name()})"])
        path.with_name(learning_report.picture_name()).write_text(bands(learning_report.panels(records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
