"""Real runs with real faults, and long ones without: the numbers of the README.

    python benchmarks/soak.py                              ten seeds, three faults each, about 25 minutes (`make soak`)
    python benchmarks/soak.py --healthy 3 --minutes 20     three failure-free runs of 20 minutes
    python benchmarks/soak.py --cold --seeds 3             a rollout killed where no standby is configured
    python benchmarks/soak.py --report-only                the report again; --commit NAME: of another commit

Every run is a whole `rolecall demo` in its own process, with the kernel's process state hidden from the detectors. The
kinds of hang and of slowness take turns over the seeds. Beside each run a recorder keeps what its agents say
(`runs/<id>/samples.jsonl.gz`, under 1 % of a CPU): `benchmarks/slowness.py` reads it. If there is no failure-free run
of the same configuration to compare with, one is made first.

One JSON line a run is added to `results/soak.jsonl`, under the commit checked out when the soak began; the report is
made from the lines of one commit, so that counts add up over calls, and lines of earlier commits stay.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import soak_report

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal

HANGS = ("stop", "gil", "lock", "read")
SLOWS = ("duty", "delay", "quota")
LINES = common.RESULTS / "soak.jsonl"
RUNS = common.ROOT / "runs"
RUN_MINUTES_MAX = 12.0
END_SECONDS = 300.0
"""A run that is not over so long after its own limit is ended from outside."""
COLD_FAULTS = "rollout-kill"
SETTINGS = ("detector.mask_proc_state=true",)
KEPT = (
    "audit",
    "ettr",
    "ettr_baseline",
    "false_alarms",
    "incidents",
    "missed",
    "pids_kept",
    "reward_first",
    "reward_last",
    "seconds_to_n_steps",
    "weights_proven",
)
"""Fields of a run's report that its line keeps."""
TIMED_OUT = 124


def faults_of(seed: int) -> str:
    return f"rollout-kill,trainer-hang:{HANGS[seed % len(HANGS)]},rollout-slow:{SLOWS[seed % len(SLOWS)]}"


@contextmanager
def recorded(run: Path, wanted: bool) -> Iterator[None]:
    """Within: a recorder writes down what the run's agents say."""
    if not wanted:
        yield
        return
    recorder = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("recording.py")), str(run)], stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        recorder.terminate()
        recorder.wait(30)


def one_run(
    seed: int,
    faults: str,
    *,
    commit: str,
    steps: int,
    minutes: float,
    hold: float,
    settings: Sequence[str],
    record: bool,
    beside: Callable[[Path, threading.Event], None] | None = None,
    runs: Path = RUNS,
) -> dict[str, Any]:
    """Runs the demo once, in a directory below `runs`, and returns its line for the results file.

    `beside`: called in a thread with the run's directory and what is set when the run is over; it may inject.
    """
    run_id = f"soak-{seed}-{int(time.time())}"
    argv = [sys.executable, "-m", "rolecall", "demo", "--seed", str(seed), "--faults", faults, "--id", run_id]
    argv += ["--steps", str(steps), "--minutes-max", str(minutes), "--hold-minutes", str(hold), "--plain"]
    argv += ["--runs", str(runs)]
    for setting in settings:
        argv += ["--set", setting]
    over = threading.Event()
    if beside is not None:
        argv.append("--allow-injection")
        threading.Thread(target=beside, args=(runs / run_id, over), daemon=True).start()
    began = time.monotonic()
    with recorded(runs / run_id, record):
        code, output = _finish(argv, minutes * 60 + END_SECONDS, runs / run_id)
    over.set()
    path = runs / run_id / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    line = {
        "commit": commit,
        "run_id": run_id,
        "seed": seed,
        "faults": faults,
        "settings": list(settings),
        "config_digest": report.get("config_digest"),
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "wall_seconds": report.get("wall_seconds", 0.0),
        **{name: report.get(name) for name in KEPT},
    }
    for name in ("incidents", "missed", "false_alarms"):
        line[name] = line[name] or []
    if report:
        line |= from_journal(runs / run_id, line["incidents"], report["config"])
    if code:
        line["output_tail"] = output[-2000:].replace(f"{common.ROOT}/", "")
    return line


def _finish(argv: Sequence[str], seconds: float, run: Path) -> tuple[int, str]:
    """(exit code, output). One that does not end is ended, with everything that it started."""
    try:
        done = subprocess.run(argv, check=False, cwd=common.ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        subprocess.run([sys.executable, "-m", "rolecall", "down", str(run)], check=False, cwd=common.ROOT)
        return TIMED_OUT, f"not over after {seconds:.0f} s"
    return done.returncode, done.stdout + done.stderr


def from_journal(run: Path, incidents: Sequence[dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """What the report does not tell: fault to requests going on elsewhere (added to the incidents), and whether the
    (step, microbatch) pairs that entered the optimizer are those of a failure-free run."""
    journal = Journal(f"sqlite:///{run / 'journal.db'}", create=False)
    try:
        moved = journal.events(kinds=[EventKind.REQUESTS_REASSIGNED])
        committed = journal.events(kinds=[EventKind.STEP_COMMITTED])
    finally:
        journal.close()
    for incident in incidents:
        fault = incident.get("fault")
        if fault:
            left = [
                e.wall_at - fault["injected_at"]
                for e in moved
                if (e.payload.from_replica, e.payload.from_incarnation) == (fault["target"], fault["incarnation"])
                and e.wall_at >= fault["injected_at"]
            ]
            incident["requests_moved_seconds"] = round(min(left), 3) if left else None
    entered = [name for e in committed for name in e.payload.microbatches]
    per_step = int(config["algorithm"]["microbatches_per_step"])
    wanted = {f"{step}.{i}" for step in range(len(committed)) for i in range(per_step)}
    return {"microbatches_failure_free": set(entered) == wanted and len(entered) == len(wanted)}


def read_lines() -> Iterator[dict[str, Any]]:
    if LINES.exists():
        for text in LINES.read_text().splitlines():
            yield json.loads(text)


def add_line(line: dict[str, Any]) -> None:
    LINES.parent.mkdir(parents=True, exist_ok=True)
    with LINES.open("a") as f:
        f.write(json.dumps(line) + "\n")
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
        for x in read_lines()
    )
    if not args.cold and not any(comparable):
        add_line(one_run(args.first_seed, "none", minutes=RUN_MINUTES_MAX, hold=0.0, **common_to_all))
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        faults = args.faults or (COLD_FAULTS if args.cold else faults_of(seed))
        add_line(one_run(seed, faults, minutes=RUN_MINUTES_MAX, hold=0.0, **common_to_all))


def write_report(commit: str) -> list[dict[str, Any]]:
    """Prints and writes the report of one commit's lines, and returns these."""
    by_commit: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in read_lines():
        by_commit[line["commit"]].append(line)
    lines = by_commit[commit]
    seeds = ", ".join(str(s) for s in sorted({x["seed"] for x in lines}))
    used = sorted({setting for x in lines for setting in x.get("settings", SETTINGS)})
    text = common.header("Soak: faults injected into real runs", f"rolecall demo, {', '.join(used)}", seeds, commit)
    text += soak_report.report(lines, by_commit)
    path = common.write("soak", text)
    print("\n".join(text), f"\nwritten to {path.relative_to(common.ROOT)}", sep="\n")
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
