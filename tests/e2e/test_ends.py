"""However a run ends, nothing of it is left (Ctrl-C: test_operating.py); and a mistake in user code evicts nobody."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import alive, demo_run, rolecall
from tests.support import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]


def test_down_removes_what_kill_9_left(tmp_path: Path) -> None:
    with demo_run(tmp_path, "kill-9", ["--faults", "none", "--steps", "100000"]) as run:
        run.until_step(0, 200)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(10)
        assert alive(run.observer) != []
        down = rolecall("down", str(run.path))
        assert down.returncode == 0, down.stderr
        eventually(lambda: alive(run.observer) == [], "all processes of the run to be gone")
        again = rolecall("down", str(run.path))
        assert again.returncode == 0 and "ended 0" in again.stdout


def test_exception_on_all_ranks_stops_the_job_and_evicts_nobody(tmp_path: Path) -> None:
    with demo_run(tmp_path, "user-code", ["--faults", "trainer-exception", "--steps", "60"]) as run:
        assert run.wait(300) == 1
        report = run.report()
    (incident,) = report["incidents"]
    assert incident["fault_class"] == "user_code" and incident["action"] == "stop_job"
    assert "InjectedError" in incident["because"]
    assert len(run.observer.serving) >= 8
    assert all(incarnation == 1 for _, incarnation in run.observer.serving), "a replica was replaced"
    assert report["audit"]["ok"]
