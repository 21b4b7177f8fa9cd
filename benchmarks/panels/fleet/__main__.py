"""How soon and how surely do detectors name the faulty machine of a simulated fleet, and how often an innocent one?

    python -m benchmarks.panels.fleet                                                      the default detector
    python -m benchmarks.panels.fleet --detectors sequential,minder,mahalanobis            side by side, same tasks
    python -m benchmarks.panels.fleet --false-alarms-per-1000-machine-days 1,10,100,1000   calibration
    python -m benchmarks.panels.fleet --machine-seconds 0                                  Minder's sizes in full

The fleet is that of `detector/simulation/fleet.py`. Every detector sees each task tick by tick, as a live one would.

An alarm is a machine named. It is right when it names the faulty machine between the fault's onset and 60 s after its
end; further ones of it in that time are free. Every other alarm is false, one that names a neighbour hit by propagation
included: whoever acts on it replaces a healthy machine. False alarms of one machine within 5 minutes of the last are
one. Delays count from the onset of the fault, of a ramp from its beginning; a fault that is missed is later than all
others.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: the pool already uses every core

from benchmarks import common
from benchmarks.panels.fleet.judge import made, run, within
from benchmarks.panels.fleet.report import curve, report
from rolecall.detector.simulation.fleet import fleet

MACHINE_SECONDS = 40e6
"""What a run may cost by default: the largest task is made so small that all tasks together fit."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detectors", default="sequential")
    parser.add_argument("--false-alarms-per-1000-machine-days", default="100", help="one or more, by commas")
    parser.add_argument("--tasks", type=int, default=300, help="with one fault each")
    parser.add_argument("--healthy", type=int, default=60, help="an hour each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--machine-seconds", type=float, default=MACHINE_SECONDS, help="budget; 0: none, Minder's sizes in full"
    )
    parser.add_argument("--model", type=Path, help="minder's, from `rolecall fit`; of tasks of another seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--name", default="fleet", help="of the report")
    args = parser.parse_args()
    rates = [float(x) for x in args.false_alarms_per_1000_machine_days.split(",")]
    wanted = [(name, rate) for name in args.detectors.split(",") for rate in rates]
    for name, rate in wanted:
        made(name, rate, args.model)  # a name that does not exist is told before hours of work
    largest = within(args.machine_seconds, args.seed, args.tasks, args.healthy)
    tasks = fleet(seed=args.seed, num_tasks=args.tasks, num_healthy=args.healthy, num_machines_max=largest)
    runs = run(tasks, wanted, args.model, args.workers, lambda line: print(line, file=sys.stderr, flush=True))
    budget = f"{args.machine_seconds:.3g} machine-seconds at most" if args.machine_seconds else "Minder's sizes in full"
    config = (
        f"{args.detectors}; asked {args.false_alarms_per_1000_machine_days}; {args.tasks} faulty and "
        f"{args.healthy} healthy tasks of at most {largest} machines ({budget})"
    )
    lines = [*common.header("Simulated fleet", config, str(args.seed)), *report(runs)]
    path = common.write(args.name, lines)
    picture = path.with_suffix(".svg")
    picture.write_text(curve(runs))
    path.write_text("\n".join([*lines, f"![Recall against effect]({picture.name})"]) + "\n")
    print("\n".join(lines))
    print(f"written: {path}, {picture}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
