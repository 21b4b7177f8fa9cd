"""What does a fault cost when one replica is replaced, and what when the whole job is restarted?

    python -m benchmarks.recovery.ettr                                                      all arms, three seeds; hours
    python -m benchmarks.recovery.ettr --steps 20 --microbatches 8 --percent 10 --seeds 1   a trial
    python -m benchmarks.recovery.ettr --report-only                                        the report again

Arms, each with the same job, seed and schedule of kills:

    none   no faults: the seconds to N steps to compare with
    role   the replica is replaced (recovery.scope: replica)
    warm   the job is restarted from its newest checkpoint on the running cluster (recovery.scope: job)
    cold   mode observe: once the fault is found everything is ended (supervisor killed, `rolecall down`) and started
           again (`rolecall up`), the cluster too

PERCENT of the steps meet a fault, as in RobustRL's sweep (arXiv 2512.22492): with 10, one falls into each ten steps, at
a random one of them and a random moment of it, killing a trainer, a rollout, or either. ETTR is the project's own
accounting (rolecall/views/ettr.py): by the paper's formula, and with lost rollouts counted too. Work that is trained
again counts as effective in both, so seconds to N steps are the honest number.

Arms take turns within a seed. Each run is a line of `results/ettr.jsonl`; what is there for this commit and these
settings is not run again. No run begins after --minutes.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping

from benchmarks import common
from benchmarks.recovery.ettr.report import report
from benchmarks.recovery.ettr.run import one_run
from benchmarks.recovery.ettr.schedule import ARMS, ROLES

LINES = common.RESULTS / "ettr.jsonl"
TRIES_MAX = 2
"""A run that fails is tried once more."""


def planned(options: argparse.Namespace) -> Iterator[tuple[str, int, float, str]]:
    """(arm, seed, percent, roles) of every run: arms take turns, and none is always first."""
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        if "none" in options.arms:
            yield "none", seed, 0.0, ""
        arms = [arm for arm in options.arms if arm != "none"]
        for number, percent in enumerate(options.percent):
            for arm in arms[(seed + number) % len(arms) :] + arms[: (seed + number) % len(arms)] if arms else []:
                yield arm, seed, percent, options.roles


def run_all(options: argparse.Namespace, settings: Mapping[str, float], of_commit: str, ends_at: float) -> None:
    for arm, seed, percent, roles in planned(options):
        key = {"commit": of_commit, "arm": arm, "seed": seed, "percent": percent, "roles": roles, "settings": settings}
        before = [x for x in common.read_lines(LINES) if {name: x[name] for name in key} == key]
        if any(x["ok"] for x in before) or len(before) >= TRIES_MAX:
            continue
        if time.monotonic() > ends_at:
            print("out of time: call again to go on", flush=True)
            return
        line = key | one_run(arm, seed, percent, roles, int(settings["microbatches"]), options)
        common.add_line(LINES, line)
        shown = {name: line.get(name) for name in ("ok", "exit_code", "seconds", "seconds_to_n", "ettr", "num_faults")}
        print(f"{arm}, seed {seed}, {percent:g} % {roles}: {shown}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[24], help="of a step: set how long it takes")
    parser.add_argument("--checkpoint-every", type=int, default=1, help="steps")
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--percent", type=float, nargs="+", default=[10.0, 5.0, 2.0])
    parser.add_argument("--roles", choices=ROLES, default="both", help="what is killed")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--run-minutes", type=float, default=240.0, help="limit of one run")
    parser.add_argument("--minutes", type=float, default=1440.0, help="no run begins after so long")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--commit", nargs="*", default=[], help="whose lines to report; none: of this one")
    options = parser.parse_args()
    if not all(0 < percent <= 50 for percent in options.percent):
        parser.error("--percent: expected more than 0 and at most 50: a fault in every second step")
    of_commit = common.commit()
    shown = options.commit or [of_commit]
    names = ("steps", "microbatches", "checkpoint_every", "standbys")
    every = [{**{name: getattr(options, name) for name in names}, "microbatches": n} for n in options.microbatches]
    ends_at = time.monotonic() + 60 * options.minutes
    for settings in every if not options.report_only else ():
        run_all(options, settings, of_commit, ends_at)
    lines = [x for x in common.read_lines(LINES) if x["commit"] in shown and x["settings"] in every]
    if not lines:
        print("no run of these commits with these settings")
        return 1
    print(common.write("ettr", report(lines, ", ".join(shown))))
    return 0 if all(x["ok"] for x in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
