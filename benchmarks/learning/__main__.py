"""Do GRPO, DAPO, PPO and T-PPO learn, what does each part of DAPO do, and does T-PPO reach a reward sooner than PPO?

    python -m benchmarks.learning curves    GRPO, DAPO, PPO, T-PPO on the default job, from random weights
    python -m benchmarks.learning smaller   the same on a smaller model and shorter answers
    python -m benchmarks.learning parts     DAPO's four parts switched on one by one, on long_addition
    python -m benchmarks.learning race      PPO and T-PPO with a real engine, the same time for both
    python -m benchmarks.learning report    the report and its picture, of all that was carried out at this commit

Each run is a line of benchmarks/results/learning.jsonl as soon as it is over. What is there already at this commit
is not done again, so an interrupted part goes on where it stopped. Two runs at a time, each on one thread; the
two of a pair of the race at the same time.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two runs use both cores

from benchmarks import common
from benchmarks.learning import report as learning_report
from benchmarks.learning import runs as learning_runs
from benchmarks.learning.runs import CURVES, PARTS, RACE, SMALLER, Run
from benchmarks.learning.workers import carry_out
from benchmarks.pictures import bands

RECORDS = common.RESULTS / "learning.jsonl"


def wanted(args: argparse.Namespace) -> list[list[Run]]:
    """Runs of the part, in batches: one begins when the one before is over."""
    if args.part == RACE:
        runs = learning_runs.race(seconds=args.seconds, exam_every=args.exam_every, seeds=args.seeds)
        return [[run for run in runs if run.seed == seed] for seed in args.seeds]
    make = {CURVES: learning_runs.curves, SMALLER: learning_runs.smaller, PARTS: learning_runs.parts}[args.part]
    return [make(steps=args.steps, seconds=args.seconds, seeds=args.seeds)]


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
