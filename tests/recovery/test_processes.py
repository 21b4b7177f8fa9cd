"""Two real watch processes on one database: one acts; it is killed in the middle of a cure, and the other goes on."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rolecall.core.clock import SystemClock
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import write_atomically
from rolecall.recovery.incidents import IncidentOutcome, IncidentState, fold
from rolecall.testing.recovery_world import FakeRuntime, diagnosis
from tests.events import filled
from tests.recovery.test_loop import A_CURE
from tests.support import PATIENCE_SECONDS, eventually

K = EventKind
ROOT = Path(__file__).parent.parent.parent
LEASE_SECONDS = 4.0
"""Longer than a loaded machine keeps a process from renewing: a lease lost by chance would be a succession too many."""


class Stage:
    def __init__(self, path: Path) -> None:
        self._database = path / "journal.db"
        url = f"sqlite:///{self._database}"
        self.journal = Journal(url)
        self.runtime = FakeRuntime(self.journal, SystemClock(), ready_seconds=0.1, serving_seconds=0.1)
        self._diagnoses = path / "diagnoses.json"
        self.say()
        self._command = [
            sys.executable,
            "-m",
            "tests.recovery.watch_process",
            url,
            str(self._diagnoses),
            str(LEASE_SECONDS),
        ]
        self._log = (path / "watch.log").open("wb")
        self.processes: list[subprocess.Popen[bytes]] = []

    def say(self, *standing: Diagnosis) -> None:
        write_atomically(self._diagnoses, json.dumps([d.to_dict() for d in standing]))

    def start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, cwd=ROOT, stdout=self._log, stderr=self._log)
        self.processes.append(process)
        return process

    def stop_outside_a_write(self, process: subprocess.Popen[bytes]) -> None:
        """A process that stops inside a transaction keeps SQLite's write lock, and with it everyone from the database."""

        def stopped() -> bool:
            process.send_signal(signal.SIGSTOP)
            with closing(sqlite3.connect(self._database, timeout=0.5, isolation_level=None)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    process.send_signal(signal.SIGCONT)
                    return False
                connection.execute("ROLLBACK")
                return True

        eventually(stopped, "the process stops outside a transaction")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
        self._log.close()
        self.journal.close()

    def num(self, kind: EventKind) -> int:
        return len(self.journal.events(kinds=[kind]))

    def resolved(self, name: str) -> bool:
        self.runtime.tick()
        incident = fold(self.journal.events()).get(name)
        return (
            incident is not None
            and incident.state is IncidentState.CLOSED
            and incident.outcome is IncidentOutcome.RESOLVED
        )


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def test_one_acts_and_when_it_is_killed_the_other_finishes(stage: Stage) -> None:
    first = stage.start()
    eventually(lambda: stage.num(K.LEASE_ACQUIRED) == 1, "the first takes the lease")
    second = stage.start()
    now = SystemClock().wall()
    stage.say(diagnosis(FaultClass.HANG, ("rollout/1", 1), onset=now))
    eventually(lambda: stage.num(K.ACTION_STARTED) == 1, "the first acts")
    lease = stage.journal.lease("watch")
    assert lease is not None and lease.holder.split(":")[1] == str(first.pid)
    # It dies before the runtime has even looked at what it wrote.
    first.send_signal(signal.SIGKILL)
    assert first.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    eventually(lambda: stage.resolved("inc-1-rollout-1"), "the second finishes the cure")
    assert [e.payload.fence for e in stage.journal.events(kinds=[K.LEASE_ACQUIRED])] == [1, 2]
    stage.say(diagnosis(FaultClass.CRASH, ("trainer/0", 1), onset=SystemClock().wall()))
    eventually(lambda: stage.resolved("inc-2-trainer-0"), "the second acts by itself")
    for name in ("inc-1-rollout-1", "inc-2-trainer-0"):
        assert [str(e.kind) for e in stage.journal.events(incident_id=name)] == A_CURE
    assert stage.runtime.replaced == [("rollout/1", 1), ("trainer/0", 1)]
    assert second.poll() is None
    stage.journal.verify()


def test_one_that_was_stopped_and_goes_on_does_not_act_beside_its_successor(stage: Stage) -> None:
    first = stage.start()
    eventually(lambda: stage.num(K.LEASE_ACQUIRED) == 1, "the first takes the lease")
    stage.stop_outside_a_write(first)
    stage.start()
    eventually(lambda: stage.num(K.LEASE_ACQUIRED) == 2, "the second succeeds it")
    os.kill(first.pid, signal.SIGCONT)
    stage.say(diagnosis(FaultClass.CRASH, ("rollout/1", 1), onset=SystemClock().wall()))
    eventually(lambda: stage.resolved("inc-1-rollout-1"), "resolved once")
    assert [str(e.kind) for e in stage.journal.events(incident_id="inc-1-rollout-1")] == A_CURE
    assert stage.num(K.LEASE_ACQUIRED) == 2 and first.poll() is None


def test_a_run_that_ends_ends_its_watch(stage: Stage) -> None:
    process = stage.start()
    eventually(lambda: stage.num(K.LEASE_ACQUIRED) == 1, "it takes the lease")
    stage.journal.append(filled(K.RUN_ENDED, {"outcome": "done", "because": "all steps are done"}))
    assert process.wait(PATIENCE_SECONDS) == 0
    lease = stage.journal.lease("watch")
    assert lease is not None and lease.holder == "", "given back"
