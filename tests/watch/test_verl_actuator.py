"""A watch replaces a rollout of a verl job through the job's control address: real processes, agent, watch and HTTP; the
job's side of it runs here, with stand-ins for verl's replicas."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rolecall.cli.main import main
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted, IncidentClosed
from rolecall.integrations.verl_control import Control
from rolecall.integrations.verl_replacements import Replacements
from rolecall.testing.watched_job import WatchedJob
from tests.integrations.verl_fake import Balancer, FakeCluster, Manager, Replica
from tests.support import eventually
from tests.watch.serving import serving

K = EventKind
NUM_REPLICAS = 3
CONFIG = """
recovery: {{mode: {mode}, verification_timeout_seconds: 30}}
roles: [rollout]
actuator: {{kind: verl, url: "http://127.0.0.1:{port}", token_path: "{token}", begin_seconds: 60, poll_seconds: 0.1}}
"""


class Processes(FakeCluster):
    """Engines are processes of the job, which a shell starts again when they end."""

    def processes(self, replica: Replica) -> list[dict[str, Any]]:
        found = super().processes(replica)
        with suppress(ProcessLookupError):
            os.kill(replica.pid, 0)
            return found
        return [{**one, "alive": False} for one in found]

    def end(self, replica: Replica) -> None:
        super().end(replica)
        os.kill(replica.pid, signal.SIGKILL)


class VerlJob(WatchedJob):
    """With a trainer that updates weights all the time, and the control address."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, tuple(f"rollout/{n}" for n in range(NUM_REPLICAS)))
        self.token = folder / "token"
        self.token.write_text("s3cret")
        self.token.chmod(0o600)
        self.updates = Manager([Replica(n, f"e{n}") for n in range(NUM_REPLICAS)])
        self.balancer, self.cluster = Balancer(self.updates), Processes()
        self.replacements = Replacements(
            self.cluster, lambda _: self.balancer, lambda _: True, time.monotonic, self._in_a_thread
        )
        self.control = Control("127.0.0.1", 0, self.token)
        self.control.serve(self.replacements)
        self._ends = threading.Event()
        self._trainer = threading.Thread(target=self._train, daemon=True)

    def _in_a_thread(self, act: Any) -> None:
        threading.Thread(target=act, daemon=True).start()

    def train(self) -> None:
        """Once the processes are counted."""
        for replica in self.updates.replicas:
            replica.pid = self.pids()[f"rollout/{replica.replica_rank}"][1]
        self._trainer.start()

    def _train(self) -> None:
        while not self._ends.wait(0.2):
            self.updates.update(self.replacements)

    def config(self, mode: str) -> str:
        assert self.control.server is not None
        return CONFIG.format(mode=mode, port=self.control.server.server_address[1], token=self.token)

    def close(self) -> None:
        self._ends.set()
        if self._trainer.is_alive():
            self._trainer.join(10)
        if self.control.server is not None:
            self.control.server.shutdown()
            self.control.server.server_close()
        super().close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[VerlJob]:
    yield from serving(VerlJob(tmp_path / "job"))


def test_a_stopped_rollout_is_replaced_by_the_job_at_its_weight_updates(
    job: VerlJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start_watch(job.config("act"))
    eventually(lambda: len(job.pids()) == NUM_REPLICAS, "all replicas are counted")
    job.train()
    before = job.pids()
    eventually(lambda: job.has_learned, "their deadlines are learned")
    assert main(["replace", "rollout/1", "--dry-run", "--run", str(job.run.path)]) == 0
    shown = capsys.readouterr().out
    assert "/v1/replacements/" in shown and '{"instance": "e1", "replica": 1, "within_seconds": 60.0}' in shown
    assert "s3cret" not in shown
    assert job.pids() == before and job.cluster.ended == [], "nothing was ordered"
    os.kill(before["rollout/1"][1], signal.SIGSTOP)

    eventually(lambda: job.events(K.INCIDENT_CLOSED), "the incident is closed")
    (closed,) = job.events(K.INCIDENT_CLOSED)
    assert closed.as_(IncidentClosed).outcome == "resolved", closed
    (call,) = job.events(K.CALL_STARTED)
    assert call.as_(CallStarted).call.startswith("PUT http://127.0.0.1:")
    (reply,) = job.events(K.CALL_ENDED)
    assert reply.as_(CallEnded).status == 200
    assert job.cluster.ended == ["e1"] and job.updates.updated[-1] == ["e0", "e2", "new-1"]
    assert job.balancer.engines == {"e0", "e2", "new-1"}
    after = job.pids()
    assert after["rollout/1"][0] == 2
    assert {r: p for r, p in after.items() if r != "rollout/1"} == {r: p for r, p in before.items() if r != "rollout/1"}


def test_a_rollout_that_shares_its_devices_is_left_to_on_call(job: VerlJob, capsys: pytest.CaptureFixture[str]) -> None:
    for replica in job.updates.replicas:
        replica.mode = "hybrid"
    job.start_watch(job.config("observe"))
    eventually(lambda: len(job.pids()) == NUM_REPLICAS, "all replicas are counted")
    job.train()
    eventually(lambda: job.updates.updated, "weights are updated")
    assert main(["replace", "rollout/1", "--dry-run", "--run", str(job.run.path)]) != 0
    shown = capsys.readouterr()
    assert "it shares its devices with the trainer (mode hybrid), and cannot be replaced alone" in shown.out + shown.err
