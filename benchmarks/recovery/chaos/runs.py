"""A run with a piece of the schedule, and a run without faults."""

import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.recovery.chaos.injection import ONE_FAULT_SECONDS, START_SECONDS, Piece
from benchmarks.recovery.chaos.lines import add_line
from benchmarks.recovery.chaos.schedule import Fault
from benchmarks.recovery.soak import run as soak
from rolecall.core.errors import RolecallError
from rolecall.core.rundir import RunDir
from rolecall.views.audit import audit_run

NUM_NODES = 9
"""More than there are replicas: spare ones are `SPARE_NODES`."""
SETTINGS = (
    *soak.SETTINGS,
    *soak.UNGUARDED,
    f"runtime.nodes={NUM_NODES}",
    "runtime.startup_timeout_seconds=300",  # of a standby, on a busy machine
    "recovery.verification_timeout_seconds=300",
    "runtime.reward_check_share=0.2",  # a wrong worker is compared within seconds
    # At the demo's rate the toy has learned its task after 300 steps, and its policy collapses after 500: no fault.
    "algorithm.learning_rate=1e-4",
)
DISK_BYTES = 512 << 20
FAULT_MINUTES = 3.0
"""Of one fault and its recovery, at most, on average."""
LAST_LINE_SECONDS = 200.0
"""For the line of the last fault, after the end of the run: an injection may have to end first."""


@contextmanager
def disk_of_its_own(path: Path) -> Iterator[None]:
    """Mounts a small file system at `path`, where this process may; keeps what matters of the runs on it."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=10)
    if mounted.returncode:
        print(f"no disk can be filled: {mounted.stderr.strip()}", flush=True)
        yield
        return
    try:
        yield
    finally:
        left_out = shutil.ignore_patterns("*.sock", "checkpoints", "model", "inject")
        for run in [p for p in path.iterdir() if p.is_dir()]:
            with suppress(shutil.Error):  # some file cannot be copied: the others are
                shutil.copytree(run, common.RUNS / run.name, ignore=left_out, dirs_exist_ok=True)
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=10)


def run_faults(
    faults: Sequence[Fault], facts: Mapping[str, Any], settings: Sequence[str], ends: threading.Event
) -> None:
    minutes = (START_SECONDS + ONE_FAULT_SECONDS) / 60 + FAULT_MINUTES * len(faults)
    beside = Piece(faults, facts, minutes * 60, ends)
    runs = common.RUNS / "small-disk"
    with disk_of_its_own(runs):
        line = soak.one_run(
            int(facts["seed"]),
            "none",
            commit=str(facts["commit"]),
            steps=20,
            minutes=minutes + soak.RUN_MINUTES_MAX,
            hold=minutes,
            settings=[*SETTINGS, *settings],
            record=False,
            beside=beside,
            runs=runs,
        )
        beside.is_done.wait(LAST_LINE_SECONDS)
        if not line["audit"]:  # it was interrupted, and wrote no report
            with suppress(RolecallError):
                line["audit"] = audit_run(RunDir(runs / line["run_id"])).summary()
    kept = ("run_id", "exit_code", "wall_seconds", "audit", "ettr", "output_tail")
    add_line(
        {
            "line": "piece",
            **facts,
            **{name: line[name] for name in kept if name in line},
            "num_wanted": len(faults),
            "num_injected": beside.num_injected,
            "failure": beside.failure,
        }
    )


def run_quiet(minutes: float, facts: Mapping[str, Any], settings: Sequence[str]) -> None:
    line = soak.one_run(
        int(facts["seed"]),
        "none",
        commit=str(facts["commit"]),
        steps=20,
        minutes=minutes + soak.RUN_MINUTES_MAX,
        hold=minutes,
        settings=[*SETTINGS, *settings],
        record=False,
    )
    evicted = [t for i in line["incidents"] if i["replacements"] or i["action_failed"] for t in i["plan_targets"]]
    kept = ("run_id", "exit_code", "wall_seconds", "audit", "output_tail")
    add_line(
        {
            "line": "quiet",
            **facts,
            **{name: line[name] for name in kept if name in line},
            "evicted": evicted,
            "incidents": [f"{i['fault_class']}: {i['because']}" for i in line["incidents"]],
        }
    )
