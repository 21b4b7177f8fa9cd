"""Minder and the baselines: ablations on a simulated fleet, scores on real recordings, time of one call.

    python -m benchmarks.panels.minder                     all parts (about an hour on one core)
    python -m benchmarks.panels.minder --parts call,real   some of: denoisers, own-kind, ablations, real, call
    python -m benchmarks.panels.minder --fit-built-in      trains the denoisers and the priority that minder ships with

The built-in model is fitted on simulated tasks of seed `FIT_SEED`; all else runs on tasks of other seeds. Minder's own
kind of case is what its paper describes; then one thing at a time is as in the fleet. What the ablations vary: no
continuity (the same thresholds, named at once), RAW, CON, INT (Minder, section 6.4), fewer and more metrics. Right and
wrong alarms are counted as in `benchmarks.panels.fleet`. Real recordings: `asd` and `exathlon` of `../shared/data`, by
the event protocol of its `score.py`, with default settings; the part is left out where the folder is absent.
"""

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: the pool already uses every core

from benchmarks import common
from benchmarks.panels.minder.ablations import ablations
from benchmarks.panels.minder.call import call
from benchmarks.panels.minder.denoisers import FIT_SEED, FIT_TASKS, denoisers, fit_built_in
from benchmarks.panels.minder.own_kind import own_kind
from benchmarks.panels.minder.real import real
from rolecall.detector.panels.minder import fit as minder_fit
from rolecall.detector.panels.panel import FALSE_ALARMS_PER_1000_MACHINE_DAYS

PARTS = ("denoisers", "own-kind", "ablations", "real", "call")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--healthy", type=int, default=10)
    parser.add_argument("--machines-max", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--asked", type=float, default=FALSE_ALARMS_PER_1000_MACHINE_DAYS)
    parser.add_argument("--steps", type=int, default=minder_fit.NUM_STEPS)
    parser.add_argument("--fit-tasks", type=int, default=FIT_TASKS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--fit-built-in", action="store_true")
    parser.add_argument("--dry", action="store_true", help="print only, write no report")
    args = parser.parse_args()
    if args.fit_built_in:
        print("\n".join(fit_built_in(args.fit_tasks, args.steps)))
        return 0
    known: dict[str, Callable[[argparse.Namespace], list[str]]] = {
        "denoisers": denoisers,
        "own-kind": own_kind,
        "ablations": ablations,
        "real": real,
        "call": call,
    }
    chosen = [p for p in args.parts.split(",") if p]
    if unknown := [p for p in chosen if p not in known]:
        parser.error(f"no such part: {', '.join(unknown)}")
    config = " ".join(f"{k}={v}" for k, v in vars(args).items())
    lines = common.header("Minder and the baselines", config, f"fleet {args.seed}, fitting {FIT_SEED}")
    for part in chosen:
        told = known[part](args)
        print("\n".join(told), flush=True)
        lines += told
    if not args.dry:
        print(common.write("minder", lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
