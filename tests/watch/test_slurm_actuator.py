"""A real Slurm: a replica that is a Slurm job of its own is requeued, and leaves its node where the fault stays there."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.core.config.actuators import SlurmActuator
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted, IncidentClosed
from rolecall.recovery.actuators.calls import Call, Reply
from rolecall.recovery.actuators.external import calls_of
from rolecall.recovery.actuators.targets.slurm import Slurm
from rolecall.testing.slurm_cluster import SlurmCluster, SlurmJobs, missing
from tests.recovery.actuators.driving import Driven, drive, member, order
from tests.support import PATIENCE_SECONDS, eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")]

K = EventKind
CONFIG = "recovery: {mode: act, verification_timeout_seconds: 240}\nroles: [rollout]\nactuator: {kind: slurm}\n"
REPLICAS = ("rollout/0", "rollout/1", "rollout/2")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    it = SlurmCluster(tmp_path / "slurm", num_nodes=3)
    try:
        it.start()
        yield it
    finally:
        it.close()


@pytest.fixture
def job(tmp_path: Path, cluster: SlurmCluster) -> Iterator[SlurmJobs]:
    it = SlurmJobs(tmp_path / "job", cluster, REPLICAS)
    try:
        it.start_agent()
        eventually(lambda: it.agent_url, "the agents serve")
        it.start_replicas()
        yield it
    finally:
        it.close()


def test_a_stopped_replica_is_requeued_and_nothing_else(job: SlurmJobs, cluster: SlurmCluster) -> None:
    job.start_watch(CONFIG)
    eventually(lambda: len(job.pids()) == len(REPLICAS), "all replicas are counted")
    before = job.pids()
    eventually(lambda: job.has_learned, "their deadlines are learned")
    os.kill(before["rollout/1"][1], signal.SIGSTOP)

    # Slurm may hold a job for two minutes after its end, on a busy machine.
    eventually(lambda: job.events(K.INCIDENT_CLOSED), "the incident is closed", seconds=4 * PATIENCE_SECONDS)
    (closed,) = job.events(K.INCIDENT_CLOSED)
    assert closed.as_(IncidentClosed).outcome == "resolved", closed
    calls = [e.as_(CallStarted).call for e in job.events(K.CALL_STARTED)]
    number = job.jobs["rollout/1"]
    assert calls == [f"scontrol requeue {number}", f"scontrol update jobid={number} starttime=now"]
    assert [e.as_(CallEnded).status for e in job.events(K.CALL_ENDED)] == [0, 0]
    after = job.pids()
    assert after["rollout/1"][0] == 2
    assert {r: p for r, p in after.items() if r != "rollout/1"} == {r: p for r, p in before.items() if r != "rollout/1"}
    assert {r: cluster.restarts(n) for r, n in job.jobs.items()} == {"rollout/0": 0, "rollout/1": 1, "rollout/2": 0}


# --- calls alone, without agents and a watch ----------------------------------------------------------------------


def perform(job: str, node: str, *, unit: str = "job", leave_node: bool = False) -> Driven:
    """`job`: with its step, as its processes tell it."""
    target = Slurm(SlurmActuator.model_validate({"kind": "slurm", "unit": unit}))
    return drive(target.replace(order(member("rollout/1", node, job=job, at=time.time()), leave_node=leave_node)), make)


def make(call: Call) -> Reply:
    threading.Event().wait(call.after_seconds)
    return call.make()


@pytest.fixture
def reachable(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


STEP = "#!/bin/sh\nsrun --ntasks=1 sleep 1000\n"
STEPS = """#!/bin/sh
for n in 1 2; do
  (until srun --exact --ntasks=1 --mem=0 sleep 1000; do :; done) &
done
wait
"""


def test_a_job_leaves_its_drained_node_and_an_older_plan_then_ends_nothing(reachable: SlurmCluster) -> None:
    cluster = reachable
    number = cluster.submit(STEP, "--requeue", "--ntasks=1")
    eventually(lambda: cluster.steps(number) == ["0"], "its step runs")
    (node,) = cluster.nodes_of(number)
    target = Slurm(SlurmActuator(kind="slurm"))
    given = order(member("rollout/1", node, job=f"{number}.0", at=time.time()), leave_node=True)
    calls, end = calls_of(target, given)
    assert [c.words for c in calls] == [
        f"drain Slurm node {node}",
        f"requeue Slurm job {number}, rollout/1",
        f"let Slurm job {number} start now",
    ]
    assert cluster.restarts(number) == 0 and "DRAIN" not in cluster.run("scontrol", "show", "node", node)

    it = drive(target.replace(given), make)
    assert it.done == end == f"Slurm job {number} was requeued; {node} drains", it
    assert "DRAIN" in cluster.run("scontrol", "show", "node", node)
    assert "rolecall inc-1-x: it hangs in 'generate'" in cluster.run("scontrol", "show", "node", node)
    eventually(lambda: cluster.steps(number) == ["0"], "its step runs again")
    (now,) = cluster.nodes_of(number)
    assert now != node and cluster.restarts(number) == 1

    for place in (node, now):
        older = order(member("rollout/1", place, job=f"{number}.0", at=cluster.started_at(number) - 3.0))
        assert "started after rank 0" in drive(target.replace(older), make).error
    assert "does not run on" in perform(f"{number}.0", node).error
    assert cluster.restarts(number) == 1


def test_of_an_array_one_job_is_requeued(reachable: SlurmCluster) -> None:
    cluster = reachable
    first = cluster.submit(STEP, "--requeue", "--ntasks=1", "--array=0-2")
    eventually(lambda: len(cluster.run("squeue", "--noheader", "--states=R").split("\n")) == 4, "all run")
    eventually(lambda: cluster.steps(first) == ["0"], "its step runs")
    (node,) = cluster.nodes_of(first)
    it = perform(f"{first}.0", node)
    assert it.done.startswith(f"Slurm job {first}_") and it.done.endswith(" was requeued"), it
    text = cluster.run("scontrol", "show", "job", str(first))
    assert sorted(part[0] for part in text.split("Restarts=")[1:]) == ["0", "0", "1"]


def test_a_step_is_ended_and_started_again_by_its_script(reachable: SlurmCluster) -> None:
    cluster = reachable
    number = cluster.submit(STEPS, "--ntasks=2")
    eventually(lambda: len(cluster.steps(number)) == 2, "both steps run")
    (node,) = cluster.nodes_of(number)
    it = perform(f"{number}.1", node, unit="step")
    assert it.done == f"Slurm step {number}.1 has ended", it
    eventually(lambda: cluster.steps(number) == ["0", "2"], "another step has taken its place")
    assert "no Slurm step" in perform(f"{number}.1", node, unit="step").error


def test_what_may_not_be_requeued_goes_on(reachable: SlurmCluster) -> None:
    cluster = reachable
    number = cluster.submit(STEP, "--no-requeue", "--ntasks=1")
    eventually(lambda: cluster.steps(number) == ["0"], "its step runs")
    (node,) = cluster.nodes_of(number)
    it = perform(f"{number}.0", node, leave_node=True)
    assert "may not be requeued" in it.error and not it.changing
    assert "no Slurm job 4711" in perform("4711.0", node).error
