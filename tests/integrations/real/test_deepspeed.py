"""The hooks of `rolecall exec` in a real job of DeepSpeed: its ZeRO steps the optimizer once for each parameter group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.agent.autostart.environment import job_environment

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

JOB = Path(__file__).with_name("deepspeed_job.py")
STEPS, GROUPS = 10, 2


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), (2, 4), (3, 1)])
def test_steps_of_zero_are_counted_once_and_change_nothing(tmp_path: Path, stage: int, accumulation: int) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environ = {**os.environ, **rank, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    def run(more: dict[str, str]) -> list[list[str]]:
        argv = [sys.executable, str(JOB), str(stage), str(accumulation), str(STEPS)]
        done = subprocess.run(
            argv, env={**environ, **more}, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return [line.split() for line in done.stdout.splitlines() if line.startswith(("loss ", "page"))]

    (_, plain), nothing = run({})
    (_, hooked), (_, step, progress, phase) = run(job_environment(environ))
    assert plain == hooked and nothing == ["page"]
    # Before the model is hooked, each parameter group counts.
    assert STEPS <= int(step) == int(progress) < STEPS + GROUPS and phase == "wait"
