"""One whole `rolecall demo` in its own process, and the line of the results file that it leaves."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import common
from rolecall.core.errors import JournalError
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import RequestsReassigned, StepCommitted
from rolecall.core.rundir import RunDir

RUN_MINUTES_MAX = 12.0
END_SECONDS = 300.0
"""A run that is not over so long after its own limit is ended from outside."""
SETTINGS = ("detector.mask_proc_state=true",)
UNGUARDED = ("recovery.evictions_per_hour_max=1000", "recovery.retries_per_replica_max=1000")
"""For runs whose faults are more than the guards allow in an hour."""
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


@contextmanager
def recorded(run: Path, wanted: bool) -> Iterator[None]:
    """Within: a recorder writes down what the run's agents say."""
    if not wanted:
        yield
        return
    recorder = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.detection.slowness.recording", str(run)],
        cwd=common.ROOT,
        stdout=subprocess.DEVNULL,
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
    runs: Path = common.RUNS,
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


def has_trained(run: Path) -> bool:
    """Whether a step was committed; not yet, while the run is being created."""
    try:
        with closing(Journal(RunDir(run).database_url, create=False)) as journal:
            return journal.last(EventKind.STEP_COMMITTED) is not None
    except (JournalError, OSError):
        return False


def from_journal(run: Path, incidents: Sequence[dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """What the report does not tell: fault to requests going on elsewhere (added to the incidents), and whether the
    (step, microbatch) pairs that entered the optimizer are those of a failure-free run."""
    journal = Journal(f"sqlite:///{run / 'journal.db'}", create=False)
    try:
        moved = [(e.wall_at, e.as_(RequestsReassigned)) for e in journal.events(kinds=[EventKind.REQUESTS_REASSIGNED])]
        committed = [e.as_(StepCommitted) for e in journal.events(kinds=[EventKind.STEP_COMMITTED])]
    finally:
        journal.close()
    for incident in incidents:
        fault = incident.get("fault")
        if fault:
            left = [
                at - fault["injected_at"]
                for at, by in moved
                if (by.from_replica, by.from_incarnation) == (fault["target"], fault["incarnation"])
                and at >= fault["injected_at"]
            ]
            incident["requests_moved_seconds"] = round(min(left), 3) if left else None
    entered = [name for step in committed for name in step.microbatches]
    per_step = int(config["algorithm"]["microbatches_per_step"])
    wanted = {f"{number}.{i}" for number in range(len(committed)) for i in range(per_step)}
    return {"microbatches_failure_free": set(entered) == wanted and len(entered) == len(wanted)}
