"""A fault's record shows whether it was injected at its checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.ids import process_start_ticks
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.faults.injector import InjectionTarget, _Injection
from rolecall.rl_runtime.faults.process_side import ENGINE_STEP
from rolecall.rl_runtime.processes import run_environment
from rolecall.views.incidents import parse_injections

WORKER = """
import sys, time
from rolecall.rl_runtime.faults.process_side import Injection
injection = Injection(sys.argv[1], True)
while True:
    injection.checkpoint(sys.argv[2])
    time.sleep(0.002)
"""


@pytest.mark.parametrize(("aimed_at", "met"), [(ENGINE_STEP, True), ("somewhere else", False), ("", True)])
def test_a_checkpoint_that_was_not_reached_is_recorded(tmp_path: Path, aimed_at: str, met: bool) -> None:
    run = create_run_dir(tmp_path, "r")
    argv = [sys.executable, "-c", WORKER, str(run.path), ENGINE_STEP]
    with subprocess.Popen(argv, env=run_environment(run.path)) as worker:
        ticks = process_start_ticks(worker.pid)
        assert ticks is not None
        victim = InjectionTarget(target="rollout/0", pid=worker.pid, start_ticks=ticks)
        # The wait for an event that never happens uses a clock that jumps.
        clock = SystemClock() if met else FakeClock()
        record = _Injection(run, "rollout-kill", aimed_at, "kill", 10.0, clock).perform([victim])
        assert worker.wait(20) == -9
    assert record["met"] is met
    (fault,) = parse_injections(run.injections_path.read_text())
    assert fault.met is met and fault.to_dict()["met"] is met


def test_a_line_of_an_injector_that_did_not_aim_counts_as_met() -> None:
    line = {"kind": "rollout-kill", "target": "rollout/0", "injected_at": 1.0}
    assert [f.met for f in parse_injections(json.dumps(line) + "\n")] == [True]
