"""The chaos schedule's faults of a trainer, in jobs of other systems: torchft and Ray Train.

    PYTHONPATH=FOLDER python -m benchmarks.recovery.peers faults --system torchft    FOLDER: with torchft's packages
    python -m benchmarks.recovery.peers faults --system ray-train --count 11
    python -m benchmarks.recovery.peers schedule
    python -m benchmarks.recovery.peers report

Three workers train a model of the bundled trainer's size, data-parallel over gloo, each system with its own defaults.
torchft: a lighthouse, and three replica groups of one rank, each under torchrun. Ray Train: one TorchTrainer with
`max_failures=-1` and a checkpoint every five steps, on a local cluster of five nodes. The faults are those of
`benchmarks.recovery.chaos` against a trainer, in the same seeded order. A fault has 120 s to be found and cured; a job
that is not whole after it is ended, and another one is started. Each fault is a line of `results/chaos_peers.jsonl`; a
piece takes the next ones without a line. The report has, beside them, rolecall's lines of `results/chaos.jsonl`. What
counts as found, named and cured: `scoring.py`.
"""

import argparse
import sys
from importlib.util import find_spec

from benchmarks import common
from benchmarks.recovery.peers.report import write_report
from benchmarks.recovery.peers.run import LINES, run_piece
from benchmarks.recovery.peers.schedule import SYSTEMS, kinds, left_out, piece, trainer_faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "schedule", "report"))
    parser.add_argument("--system", choices=SYSTEMS, default="torchft")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--count", type=int, default=11, help="faults of the piece: 1 to 100")
    parser.add_argument("--kind", action="append", default=[], choices=kinds(), help="only faults of these kinds")
    parser.add_argument("--note", default="", help="on the circumstances, for the head of the report")
    args = parser.parse_args()
    if not 1 <= args.count <= 100:
        parser.error(f"--count: {args.count}: expected 1 to 100")
    if args.what == "schedule":
        for fault in trainer_faults(args.seed)[: args.count]:
            print(f"{fault.number:3} {fault.name}: {fault.kind}:{fault.how}")
        for name, reason in left_out():
            print(f"  - {name}: {reason}")
        return 0
    if args.what == "faults":
        if args.system == "torchft" and find_spec("torchft") is None:
            parser.error(
                "torchft is not installed: pip install --target FOLDER torchft-nightly, then PYTHONPATH=FOLDER"
            )
        facts = {"commit": common.commit(), "seed": args.seed, "host": common.hardware()}
        run_piece(args.system, piece(args.system, args.seed, common.read_lines(LINES), args.count, args.kind), facts)
    return write_report(args.note)


if __name__ == "__main__":
    sys.exit(main())
