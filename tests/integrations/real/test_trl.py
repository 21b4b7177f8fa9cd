"""TRL's GRPO with a random model, the callback, an agent and a watch: examples/trl/train.py, as the how-to runs it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.shell import Shell
from tests.support import eventually

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

SECONDS = 240.0
"""torch and TRL are imported, and 40 steps of about a tenth of a second are made, on a machine that may be busy."""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    it = Shell(tmp_path, {"HF_HUB_OFFLINE": "1"})
    yield it
    it.close()


def test_steps_phases_and_rewards_are_seen_and_a_reward_function_that_hangs_is_named(shell: Shell) -> None:
    shell.start("rolecall agent", "agent.log")
    eventually(lambda: "serves at http://127.0.0.1:9477" in shell.read("agent.log"), "the agent serves", seconds=60)
    shell.start("python examples/trl/train.py --hang-at 40", "job.log")
    shell.start("rolecall watch agents http://127.0.0.1:9477 --id my-job", "watch.log")
    phases: set[str] = set()

    def scores_forever() -> bool:
        page = shell.page()
        if page is not None:
            phases.add(page.phase)
        return page is not None and page.step == 40 and page.phase == "score"

    eventually(scores_forever, "the reward function of step 40 is called", seconds=SECONDS)
    assert {"generate", "score", "step"} <= phases, f"{phases}\n{shell.read('job.log')[-2000:]}"
    page = shell.page()
    assert 0.0 <= page.reward <= 1.0 and page.entropy > 0.0 and page.response_length > 0.0 and page.healths == 39
    shell.start(
        "until rolecall incidents --run my-job | grep -q 'reward function'; do sleep 1; done; "
        "rolecall incidents --run my-job > incidents.log; rolecall status --run my-job",
        "status.log",
    )
    eventually(lambda: "trainer/0" in shell.read("status.log"), "the incident is listed", seconds=SECONDS)
    assert "is hung in its reward function: no progress in score of step 40" in " ".join(
        shell.read("incidents.log").split()
    )


def test_without_an_agent_the_job_trains(shell: Shell) -> None:
    environ = {**os.environ, "ROLECALL_AGENT_DIR": str(shell.folder / "none"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "examples/trl/train.py", "--steps", "3"],
        cwd=shell.folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("no agent runs at") == 1, "it warns once"
