"""`rolecall watch agents --config`: a real job that rolecall did not start loses a replica, and a command replaces it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from rolecall.cli.main import main
from rolecall.core.errors import JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import CallEnded, CallStarted, IncidentClosed
from rolecall.core.rundir import RunDir
from tests.support import PATIENCE_SECONDS, eventually

K = EventKind
T = TypeVar("T")
WORKER = """
import time
from rolecall import reporter
reporter.start()
for n in range(10**9):
    with reporter.step(n):
        time.sleep(0.02)
"""
SUPERVISOR = 'while :; do "$0" -c "$1"; done'
"""Starts the worker again when it ends, as the launchers of rollouts do."""
CONFIG = """
recovery: {{mode: {mode}, verification_timeout_seconds: 30}}
actuator:
  kind: command
  replace: [/bin/sh, -c, 'echo "$ROLECALL_ACTION_KEY ended $0" && kill -KILL "$0"', "{{pid}}"]
"""
NUM_REPLICAS = 3


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = folder / "agent"
        self.data_dir.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "ROLECALL_AGENT_DIR": str(self.data_dir)}

    def begin(self) -> None:
        agent = ["-m", "rolecall.agent", "--node", "node-1", "--data-dir", str(self.data_dir), "--port", "0"]
        self.start([sys.executable, *agent])
        eventually((self.data_dir / "agent.json").exists, "the agent says where it listens")
        for n in range(NUM_REPLICAS):
            argv = ["/bin/sh", "-c", SUPERVISOR, sys.executable, WORKER]
            self.start(argv, ROLECALL_REPLICA=f"rollout/{n}", ROLECALL_ROLE="rollout", ROLECALL_RANK="0")

    def start(self, argv: list[str], **environ: str) -> None:
        environment = {**self.environment, **environ}
        self.started.append(subprocess.Popen(argv, env=environment, start_new_session=True))

    def watch(self, mode: str) -> None:
        config = self.folder / "watch.yaml"
        config.write_text(CONFIG.format(mode=mode))
        url = json.loads((self.data_dir / "agent.json").read_text())["url"]
        argv = ["watch", "agents", url, "--id", "job", "--runs", str(self.folder / "runs"), "--config", str(config)]
        self.start([sys.executable, "-m", "rolecall", *argv, "--json"])

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "runs" / "job")

    def read(self, ask: Callable[[Journal], T], otherwise: T) -> T:
        try:
            with closing(Journal(self.run.database_url, create=False)) as journal:
                return ask(journal)
        except JournalError:  # the watch has not created it
            return otherwise

    def events(self, kind: EventKind) -> list[Event]:
        return self.read(lambda journal: journal.events(kinds=[kind]), [])

    def pids(self) -> dict[str, tuple[int, int]]:
        """replica -> (incarnation, PID), as the journal has it."""
        return self.read(lambda j: {str(a.replica): (a.incarnation, a.pid) for a in j.current().values()}, {})

    def close(self) -> None:
        for process in reversed(self.started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_SECONDS)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    it = Job(tmp_path)
    try:
        it.begin()
        yield it
    finally:
        it.close()


def test_a_stopped_replica_is_replaced_and_nothing_else(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.watch("act")
    eventually(lambda: len(job.pids()) == NUM_REPLICAS, "all replicas are counted")
    before = job.pids()
    assert {incarnation for incarnation, _ in before.values()} == {1}
    eventually(lambda: _has_learned(job), "their deadlines are learned")
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


def _has_learned(job: Job) -> bool:
    """The detectors' state is written."""
    return (job.run.path / "detector.json").exists()
