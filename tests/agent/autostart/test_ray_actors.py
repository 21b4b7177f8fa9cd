"""Ranks of actors of a real Ray that learn their rank after torch is imported, under `rolecall env`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.core.journal.events import EventKind
from tests.integrations.shell import Shell
from tests.support import eventually

pytest.importorskip("ray")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

JOB = Path(__file__).with_name("ray_actors_job.py")
SECONDS = 240.0
"""Ray starts five actors that import torch, on a machine that may be busy."""
TRAINERS = {(role, rank) for role in ("trainer/0", "critic/0") for rank in (0, 1)}


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp") as short:  # Ray's sockets have short names only
        it = Shell(tmp_path, {"RAY_TMPDIR": short, "RAY_worker_niceness": "0"})
        yield it
        it.close()


def test_policy_and_critic_are_ranks_of_two_roles_and_engines_are_found(shell: Shell) -> None:
    shell.start("rolecall agent", "agent.log")
    eventually(lambda: "serves at" in shell.read("agent.log"), "the agent serves")
    shell.start(f'(eval "$(rolecall env)"; python {JOB})', "job.log")
    shell.start("rolecall watch agents http://127.0.0.1:9477 --id my-job", "watch.log")

    def train() -> bool:
        ranks = shell.ranks()
        return all(key in ranks and ranks[key].step >= 40 for key in TRAINERS)

    eventually(train, f"all actors train: {shell.ranks()}\n{shell.read('job.log')[-2000:]}", seconds=SECONDS)
    ranks = shell.ranks()
    assert {ranks[key].reports_by for key in TRAINERS} == {"hooks"}
    [rollout] = [r for r in ranks.values() if (r.replica, r.rank) not in TRAINERS]
    assert rollout.replica.startswith("rollout/") and rollout.reports_by == "openrlhf-rollout"
    shell.enter(f"kill -STOP {ranks['critic/0', 1].pid}")
    eventually(lambda: shell.events(EventKind.INCIDENT_OPENED), "the stopped rank is named", seconds=SECONDS)
    told = " ".join(shell.enter("rolecall incidents --run my-job").split())
    assert "critic/0 rank 1 (node-1, " in told and "process stopped" in told and "inc-2" not in told, told
