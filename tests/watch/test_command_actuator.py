"""`rolecall watch agents --config`: a real job that rolecall did not start loses a replica, and a command replaces it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted, IncidentClosed
from rolecall.testing.watched_job import WatchedJob
from tests.support import eventually
from tests.watch.serving import serving

K = EventKind
CONFIG = """
recovery: {mode: act, verification_timeout_seconds: 30}
roles: [rollout]
actuator:
  kind: command
  replace: [/bin/sh, -c, 'echo "$ROLECALL_ACTION_KEY ended $0" && kill -KILL "$0"', "{pid}"]
"""
REPLICAS = ("rollout/0", "rollout/1", "rollout/2")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[WatchedJob]:
    yield from serving(WatchedJob(tmp_path / "job", REPLICAS))


def test_a_stopped_replica_is_replaced_and_nothing_else(job: WatchedJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.start_watch(CONFIG)
    eventually(lambda: len(job.pids()) == len(REPLICAS), "all replicas are counted")
    before = job.pids()
    assert {incarnation for incarnation, _ in before.values()} == {1}
    eventually(lambda: job.has_learned, "their deadlines are learned")
    assert main(["replace", "rollout/1", "--dry-run", "--run", str(job.run.path)]) == 0
    assert f'kill -KILL "$0"\' {before["rollout/1"][1]}\n' in capsys.readouterr().out
    assert job.pids() == before, "nothing was called"
    os.kill(before["rollout/1"][1], signal.SIGSTOP)

    eventually(lambda: job.events(K.INCIDENT_CLOSED), "the incident is closed")
    (closed,) = job.events(K.INCIDENT_CLOSED)
    assert closed.as_(IncidentClosed).outcome == "resolved", closed
    (call,) = job.events(K.CALL_STARTED)
    assert call.as_(CallStarted).call.endswith(f" {before['rollout/1'][1]}")
    (reply,) = job.events(K.CALL_ENDED)
    assert reply.as_(CallEnded).status == 0 and f"ended {before['rollout/1'][1]}" in reply.as_(CallEnded).text
    after = job.pids()
    assert after["rollout/1"][0] == 2 and after["rollout/1"][1] != before["rollout/1"][1]
    assert {r: p for r, p in after.items() if r != "rollout/1"} == {r: p for r, p in before.items() if r != "rollout/1"}
