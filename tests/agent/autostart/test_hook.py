"""A job's processes under `rolecall exec`, with real torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.agent.autostart.environment import job_environment

JOB = """
import sys
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
reporter = sys.modules["rolecall.agent.reporter.reporter"]
page = reporter._page
print(page.q[reporter.at.W_STEP], page.q[reporter.at.W_PROGRESS], page.phase, reporter.__file__)
"""


def run(tmp_path: Path, script: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs it as a job whose environment has no rolecall."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", **more}
    argv = [sys.executable, "-c", script]
    environ |= job_environment(environ)
    return subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)


def test_the_steps_of_a_job_that_knows_nothing_of_rolecall(tmp_path: Path) -> None:
    done = run(tmp_path, JOB, RANK="0", WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    step, progress, phase, _ = done.stdout.split()
    assert (step, progress, phase) == ("5", "5", "wait")
    assert len(done.stderr.splitlines()) == 1, "without an agent one warning, and the job goes on"


def test_a_process_without_torch_loads_nothing_of_rolecall(tmp_path: Path) -> None:
    script = "import json, sys; print([m for m in sys.modules if m.startswith(('rolecall', 'importlib.util'))])"
    done = run(tmp_path, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rolecall" not in done.stdout


def test_the_job_s_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')\n")
    done = run(tmp_path, "import sitecustomize; print(sitecustomize.__file__)", PYTHONPATH=str(tmp_path / "own"))
    assert done.stdout.split() == ["own", str(tmp_path / "own" / "sitecustomize.py")]


@pytest.mark.parametrize("command", [["exec", "--", "sh", "-c", "echo $ROLECALL_AUTOSTART-$1; exit 7", "x", "--help"]])
def test_exec_runs_the_command_unchanged(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rolecall", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("1---help", 7), done.stderr


def test_a_command_that_cannot_run_is_named() -> None:
    argv = [sys.executable, "-m", "rolecall", "exec", "--", "/no/such/program"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "/no/such/program: No such file" in done.stderr


def test_a_shell_takes_over_the_environment(tmp_path: Path) -> None:
    argv = ["sh", "-c", f'eval "$({sys.executable} -m rolecall env)"; echo "$ROLECALL_AUTOSTART $PYTHONPATH"']
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    enabled, path = done.stdout.split()
    assert enabled == "1" and path.split(os.pathsep)[0].endswith("agent/autostart/hook")
