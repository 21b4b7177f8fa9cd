"""Recovery and supervisor together, with real processes but without Ray: replacements that die one after the other lead
to a restart of their role, and of nothing else."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import SystemClock
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import ReplicaState
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.recovery.incidents import IncidentOutcome, fold
from rolecall.recovery.loop import Watch
from rolecall.rl_runtime.processes import is_alive
from rolecall.testing.recovery_world import FLEET, FakeDetector, FakeRuntime, FakeSource, RecordingNotifier, diagnosis
from tests.rl_runtime.cluster.test_supervisor import Rig
from tests.support import eventually

FAULTY = ("rollout/0", "rollout/1")
S = ReplicaState


class CrashDetector(FakeDetector):
    """Reports every replica that the runtime has lost; all others work."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(FakeRuntime(journal, journal.clock, ()))

    def observe(self, observation: Any) -> list[Diagnosis]:
        desired, current = self.runtime.journal.desired(), self.runtime.journal.current()
        lost = [r for r in current.values() if r.state is S.LOST and r.incarnation == desired[r.replica].incarnation]
        return [diagnosis(FaultClass.CRASH, (r.replica, r.incarnation), onset=r.changed_at) for r in lost]

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        return True, "works"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_rollouts_that_die_again_and_again_restart_their_role_and_no_other(rig: Rig) -> None:
    journal, clock = rig.journal, SystemClock()
    for number, replica in enumerate(FLEET):
        rig.want(replica, node=f"node-{0 if replica.startswith('reward/') else number % 7}")
    for replica in FLEET:
        rig.until(replica, 1, S.READY)
        journal.change_actual(replica, 1, state=S.SERVING)  # as the controller does
    before = journal.current()
    recovery = (CrashDetector(journal), RayRuntime(journal), RecoveryConfig(mode="act"), RecordingNotifier())
    watch = Watch(journal, FakeSource(clock), *recovery, clock, "me")
    for replica in FAULTY:
        os.kill(before[replica].pid, signal.SIGKILL)

    def restarts() -> list[str]:
        started = [e.payload.plan.action for e in journal.events(kinds=[EventKind.ACTION_STARTED])]
        return [action for action in started if action.is_restart]

    def over() -> bool:
        rig.supervisor.tick()
        for record in journal.current().values():
            if record.state is not S.READY:
                continue
            if record.replica in FAULTY and not restarts():
                if is_alive(record.pid, record.start_ticks):
                    os.kill(record.pid, signal.SIGKILL)
            else:
                journal.change_actual(record.replica, record.incarnation, unless=(S.LOST,), state=S.SERVING)
        watch.tick()
        return bool(restarts()) and all(i.outcome is not None for i in fold(journal.events()).values())

    eventually(over, "the incidents to be over")
    assert restarts() == ["restart_role"]
    (climbed,) = [i for i in fold(journal.events()).values() if len(i.attempts) > 1]
    assert [str(a.plan.action) for a in climbed.attempts] == ["replace_replica", "replace_replica", "restart_role"]
    assert climbed.outcome is IncidentOutcome.RESOLVED

    after = journal.current()
    assert {r for r in FLEET if after[r] != before[r]} == {r for r in FLEET if r.startswith("rollout/")}
    assert all(is_alive(record.pid, record.start_ticks) for record in after.values())
    newest = {record.pid for record in after.values()}
    assert all(p.pid in newest or p.wait(5) == -signal.SIGKILL for p in rig.actors.processes.values())
