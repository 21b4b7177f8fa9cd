"""`rolecall watch agents --config`: a real job loses a replica, a real watch evicts its pod over HTTP, and the incident has
what NVSentinel says of the node. Kubernetes is the fake of the actuators' tests, whose kubelet ends real processes.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted, EvidenceCollected, IncidentClosed
from rolecall.testing.watched_job import WatchedJob
from tests.recovery.actuators.kubernetes_fake import NAMESPACE, FakeKubernetes, served
from tests.support import eventually
from tests.watch.serving import serving

K = EventKind
NODE = "node-1"
REPLICAS = ("rollout/0", "rollout/1", "rollout/2")
CONFIG = """
recovery: {{mode: act, verification_timeout_seconds: 30}}
roles: [rollout]
actuator:
  kind: kubernetes
  namespace: {namespace}
  selector: "app=rollout,replica={{index}}"
  api: {url}
  token_path: {token}
nvsentinel: {{api: "{url}", token_path: "{token}"}}
"""


class Kubelet(FakeKubernetes):
    """An eviction kills the process that its pod holds."""

    def __init__(self, pid_of: Callable[[str], int]) -> None:
        super().__init__()
        self._pid_of = pid_of

    def _end(self, name: str) -> None:
        os.kill(self._pid_of(f"rollout/{name.removeprefix('rollout-')}"), signal.SIGKILL)
        super()._end(name)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[WatchedJob]:
    yield from serving(WatchedJob(tmp_path / "job", REPLICAS))


@pytest.mark.slow
def test_a_stopped_replica_is_evicted_and_its_incident_has_what_nvsentinel_says(
    job: WatchedJob, tmp_path: Path
) -> None:
    fake = Kubelet(lambda replica: job.pids()[replica][1])
    for n in range(len(REPLICAS)):
        labels = {"app": "rollout", "replica": str(n)}
        fake.pod(f"rollout-{n}", NODE, started_at=time.time() - 3600, labels=labels)
    fake.quarantine(NODE)
    token = tmp_path / "token"
    token.write_text("secret")
    with served(fake, "secret") as url:
        job.start_watch(CONFIG.format(namespace=NAMESPACE, url=url, token=token))
        eventually(lambda: len(job.pids()) == len(REPLICAS), "all replicas are counted")
        before, uid = job.pids(), fake.uid("rollout-1")
        eventually(lambda: job.has_learned, "their deadlines are learned")
        os.kill(before["rollout/1"][1], signal.SIGSTOP)
        eventually(lambda: job.events(K.INCIDENT_CLOSED), "the incident is closed")
        eventually(lambda: job.events(K.EVIDENCE_COLLECTED), "its evidence is written")
    (closed,) = job.events(K.INCIDENT_CLOSED)
    assert closed.as_(IncidentClosed).outcome == "resolved", closed
    (call,), (reply,) = job.events(K.CALL_STARTED), job.events(K.CALL_ENDED)
    assert call.as_(CallStarted).words == "evict pod rollout-1" and reply.as_(CallEnded).status == 201
    assert fake.ended == [uid] and fake.cordoned == [NODE], "a hang does not stay with its node: no cordon of ours"
    after = job.pids()
    assert after["rollout/1"][0] == 2
    assert {r: p for r, p in after.items() if r != "rollout/1"} == {r: p for r, p in before.items() if r != "rollout/1"}
    (evidence,) = job.events(K.EVIDENCE_COLLECTED)
    assert evidence.as_(EvidenceCollected).statements[0].startswith(f"NVSentinel has cordoned {NODE} at 2026-11-06")
