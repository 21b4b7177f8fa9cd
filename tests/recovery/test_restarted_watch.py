"""What a restarted watch does not know yet: a fault that its detectors have not had the time to see is not over."""

from pathlib import Path

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import IncidentState
from rolecall.recovery.loop import REDISCOVERY_SECONDS
from rolecall.recovery.operators import commands
from tests.recovery.world import World

S = IncidentState


@pytest.mark.parametrize("mode", ["act", "approve"])
def test_a_plan_that_has_not_begun_waits_until_the_detectors_could_have_seen_its_fault(
    tmp_path: Path, mode: str
) -> None:
    """A slow replica works: that the diagnosis is absent proves nothing yet."""
    world = World(tmp_path, mode=mode)
    first = world.watch()
    if mode == "act":
        world.journal.set_flag("paused", "bob: upgrade")
    world.runtime.inject("rollout/1", FaultClass.SLOW)
    world.run(3, first)
    attempt, state = world.only().attempt, world.only().state
    assert attempt is not None and state is (S.PLANNED if mode == "act" else S.PROPOSED)
    commands.hold_plan(RunDir(tmp_path), attempt.plan.digest, "alice", "let me get a dump", 3600.0, world.clock)
    world.journal.set_flag("paused", None)
    slow = world.runtime.processes["rollout/1"]
    slow.fault = None
    world.clock.advance(world.config.lease_seconds + 1)  # the first watch was killed
    again = world.watch()
    world.run(REDISCOVERY_SECONDS / 2, again)  # it does not see the fault yet
    assert world.only().state is state
    slow.fault = FaultClass.SLOW
    world.run(REDISCOVERY_SECONDS, again)
    assert world.only().state is state and world.runtime.replaced == [], "the same incident, on hold as before"
    slow.fault = None
    world.until(lambda: world.only().state is not state, again)
    assert world.runtime.replaced == []
