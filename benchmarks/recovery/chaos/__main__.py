"""Every kind of fault against every role, in a seeded order, and hours without any: the chaos scoreboard.

    python -m benchmarks.recovery.chaos faults --count 20         the next 20 of the schedule: 15 to 25 minutes
    python -m benchmarks.recovery.chaos quiet --minutes 60        an hour without faults
    python -m benchmarks.recovery.chaos schedule                  the cells, and why the others are not there
    python -m benchmarks.recovery.chaos report [--commit NAMES]   the report again

The schedule is a list of 1,000 faults that depends on the seed alone: every cell (kind of fault, role) once in random
order, then again. A piece is one run of the bundled job, mode act, that takes the next faults without a line in
`results/chaos.jsonl`. A fault comes when the run is whole, no incident is open and two more steps are committed. Each
injected fault is a line, written just before the next injection or at the end of the piece: what happens between two
faults counts with the first of them. If the run ends before that, or the journal cannot be read, the fault counts as
not named and not cured. The first injection of a fault counts, whatever came of it. Files of several machines are
joined by appending one to the other.

Named right: an incident names the process or node that was hit and nothing else, with a class that fits the fault; for
agent and watch, their restart is recorded. Cured: the replacement serves, or the incident is closed without one.
Innocent: a process of the run that was neither hit nor in a plan and is gone. In a plan: a replica that was replaced
although it was not hit. Alarm: an incident that names anything but what was hit. Elsewhere: a fault that did not meet
its target in the work that it should interrupt; it is no part of the share that is named right. Doubled and lost:
prompt groups trained twice, or issued and neither trained nor dropped with a reason, by the audit of the piece.

The run's directory is on a small file system of its own, so that its disk can be filled; where this process may not
mount one, that fault is not injected, and its line says so. Nodes in quarantine are returned after each fault, as by an
operator; a lost node stays lost, and a piece ends before the spare nodes do. SIGTERM ends a piece after the fault that
was injected last.
"""

import argparse
import signal
import sys
import threading

from benchmarks import common
from benchmarks.recovery.chaos.lines import read_lines
from benchmarks.recovery.chaos.report import write_report
from benchmarks.recovery.chaos.runs import run_faults, run_quiet
from benchmarks.recovery.chaos.schedule import cells, not_there, piece

COUNT_MAX = 150
"""Of a piece: a run lasts ten hours at most."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "quiet", "schedule", "report"))
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--count", type=int, default=20, help="faults of the piece")
    parser.add_argument("--first", type=int, default=0, help="fault to begin at, where several runs share a seed")
    parser.add_argument("--pieces", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of a run without faults")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="any setting of the job")
    parser.add_argument("--commit", default="", help="whose lines to report; one or more, by commas")
    args = parser.parse_args()
    if not 1 <= args.count <= COUNT_MAX:
        parser.error(f"--count: {args.count}: expected 1 to {COUNT_MAX}")
    if args.first < 0:
        parser.error(f"--first: {args.first}: expected 0 or more")
    if args.what == "schedule":
        for number, (name, role, kind, how) in enumerate(cells()):
            print(f"{number:3} {name}, {role}: {kind}:{how}")
        for name, roles, reason in not_there():
            print(f"  - {name}, {', '.join(roles)}: {reason}")
        return 0
    commit = common.commit()
    facts = {"commit": commit, "seed": args.seed, "host": common.hardware()}
    ends = threading.Event()
    if args.what == "faults":
        signal.signal(signal.SIGTERM, lambda *_: ends.set())
    for _ in range(args.pieces):
        if ends.is_set():
            break
        if args.what == "quiet":
            run_quiet(args.minutes, facts, args.settings)
        elif args.what == "faults":
            faults = piece(args.seed, read_lines(), args.count, args.first)
            if not faults:
                print("no fault of the schedule is left")
                break
            run_faults(faults, facts, args.settings, ends)
    return write_report(args.commit.split(",") if args.commit else [commit])


if __name__ == "__main__":
    sys.exit(main())
