"""Real runs with real faults, and long ones without: the numbers of the README.

    python -m benchmarks.recovery.soak                            ten seeds, three faults each: 25 minutes (`make soak`)
    python -m benchmarks.recovery.soak --healthy 3 --minutes 20   three failure-free runs of 20 minutes
    python -m benchmarks.recovery.soak --cold --seeds 3           a rollout killed where no standby is configured
    python -m benchmarks.recovery.soak --report-only              the report again; --commit NAME: of another commit

Every run is a whole `rolecall demo` in its own process, with the kernel's process state hidden from the detectors. The
kinds of hang and of slowness take turns over the seeds. Beside each run a recorder keeps what its agents say
(`runs/<id>/samples.jsonl.gz`, under 1 % of a CPU): `benchmarks.detection.slowness` reads it. If there is no
failure-free run of the same configuration to compare with, one is made first.

One JSON line a run is added to `results/soak.jsonl`, under the commit checked out when the soak began; the report is
made from the lines of one commit, so that counts add up over calls, and lines of earlier commits stay.
"""

import argparse
import sys
from collections import defaultdict
from typing import Any

from benchmarks import common
from benchmarks.recovery.soak import report as soak_report
from benchmarks.recovery.soak.run import RUN_MINUTES_MAX, SETTINGS, one_run

HANGS = ("stop", "gil", "lock", "read")
SLOWS = ("duty", "delay", "quota")
LINES = common.RESULTS / "soak.jsonl"
COLD_FAULTS = "rollout-kill"


def faults_of(seed: int) -> str:
    return f"rollout-kill,trainer-hang:{HANGS[seed % len(HANGS)]},rollout-slow:{SLOWS[seed % len(SLOWS)]}"


def add_line(line: dict[str, Any]) -> None:
    common.add_line(LINES, line)
    print(f"seed {line['seed']}, {line['faults']}: exit {line['exit_code']} after {line['seconds']:.0f} s", flush=True)


def soak(args: argparse.Namespace, commit: str) -> None:
    """All runs of this call."""
    settings = [*SETTINGS, *([soak_report.COLD_SETTING] if args.cold else []), *args.settings]
    common_to_all: dict[str, Any] = {
        "commit": commit,
        "steps": args.steps,
        "settings": settings,
        "record": not args.no_record,
    }
    if args.healthy:
        for seed in range(args.first_seed, args.first_seed + args.healthy):
            minutes = args.minutes + RUN_MINUTES_MAX
            add_line(one_run(seed, "none", minutes=minutes, hold=args.minutes, **common_to_all))
        return
    comparable = (
        x["faults"] == "none" and x["commit"] == commit and x.get("settings") == settings and not x["exit_code"]
        for x in common.read_lines(LINES)
    )
    if not args.cold and not any(comparable):
        add_line(one_run(args.first_seed, "none", minutes=RUN_MINUTES_MAX, hold=0.0, **common_to_all))
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        faults = args.faults or (COLD_FAULTS if args.cold else faults_of(seed))
        add_line(one_run(seed, faults, minutes=RUN_MINUTES_MAX, hold=0.0, **common_to_all))


def write_report(commit: str) -> list[dict[str, Any]]:
    """Prints and writes the report of one commit's lines, and returns these."""
    by_commit: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in common.read_lines(LINES):
        by_commit[line["commit"]].append(line)
    lines = by_commit[commit]
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    used = sorted({setting for x in lines for setting in x.get("settings", SETTINGS)})
    text = common.header("Soak: faults injected into real runs", f"rolecall demo, {', '.join(used)}", seeds, commit)
    text += soak_report.report(lines, by_commit)
    common.publish("soak", text)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--healthy", type=int, default=0, help="this many failure-free runs instead")
    parser.add_argument("--minutes", type=float, default=20.0, help="length of a failure-free run")
    parser.add_argument("--faults", default="", help="instead of the usual three")
    parser.add_argument("--cold", action="store_true", help="no standby configured; a rollout is killed")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="any setting of the job")
    parser.add_argument("--no-record", action="store_true", help="keep no recording of the runs")
    parser.add_argument("--report-only", action="store_true", help="no run: the report of the lines there are")
    parser.add_argument("--commit", default="", help="whose lines to report")
    args = parser.parse_args()
    commit = args.commit or common.commit()
    if not args.report_only:
        soak(args, commit)
    lines = write_report(commit)
    return 0 if lines and all(x["exit_code"] == 0 for x in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
