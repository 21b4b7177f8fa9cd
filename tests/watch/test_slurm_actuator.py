"""A real Slurm: a replica that is a Slurm job of its own is requeued, and leaves its node where the fault stays there."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads import CallEnded, CallStarted, IncidentClosed
from rolecall.testing.slurm_cluster import SlurmCluster, SlurmJobs, missing
from tests.support import PATIENCE_SECONDS, eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")]

K = EventKind
CONFIG = "recovery: {mode: act, verification_timeout_seconds: 150}\nactuator: {kind: slurm}\n"
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

    eventually(lambda: job.events(K.INCIDENT_CLOSED), "the incident is closed", seconds=3 * PATIENCE_SECONDS)
    (closed,) = job.events(K.INCIDENT_CLOSED)
    assert closed.as_(IncidentClosed).outcome == "resolved", closed
    (call,) = job.events(K.CALL_STARTED)
    assert call.as_(CallStarted).call == f"scontrol requeue {job.jobs['rollout/1']}"
    (reply,) = job.events(K.CALL_ENDED)
    assert reply.as_(CallEnded).status == 0
    after = job.pids()
    assert after["rollout/1"][0] == 2
    assert {r: p for r, p in after.items() if r != "rollout/1"} == {r: p for r, p in before.items() if r != "rollout/1"}
    assert {r: cluster.restarts(n) for r, n in job.jobs.items()} == {"rollout/0": 0, "rollout/1": 1, "rollout/2": 0}
