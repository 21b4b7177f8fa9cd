"""Hours of trouble on a fake clock: faults at random moments, also during cures; replacements that die or never work;
two watches that are killed at any write, stopped past their lease, or blind; pauses. After every tick the invariants
are checked; in the end every fault is resolved, or an operator was called.

pytest --seed 17 tests/recovery/test_simulation.py     # other seeds; a failing one is in the test's name
"""

import random
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.recovery.guards import HOUR_SECONDS
from rolecall.recovery.incidents import UNDER_REPAIR, IncidentOutcome
from rolecall.recovery.loop import Watch
from rolecall.recovery.projection import IncidentProjection
from rolecall.testing.recovery_world import FLEET
from tests.events import filled
from tests.recovery.simulated_kill import SimulatedKill
from tests.recovery.world import World

K = EventKind
NUM_SEEDS = 8
STEP_SECONDS = 1.0
TROUBLE_SECONDS = 160.0
QUIET_SECONDS = 600.0
STILL_SECONDS = 60.0
"""When nothing was written for so long (verification takes 15 s at most), nothing more will come."""
FAULTS = (FaultClass.CRASH, FaultClass.CRASH, FaultClass.HANG, FaultClass.SLOW)
KEEPS_OUT = "reward/1"
"""Nothing ever happens to this one, so nothing may be done to it, but by a restart of its role or of the job."""
TRAINERS = ("trainer/0", "trainer/1")
COMMIT_SECONDS = 10.0


class Slot:
    """A place where a watch runs: killed, it is started again after a while, like a service."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.watch: Watch | None = world.watch()
        self.back_at = 0.0
        self.num_kills = 0

    def tick(self) -> None:
        if self.watch is None and self.world.clock.monotonic() >= self.back_at:
            self.watch = self.world.watch()
        if self.watch is None:
            return
        try:
            self.watch.tick()
        except SimulatedKill:
            self.world.switch.dies_at = None
            self.watch = None
            self.num_kills += 1
            self.back_at = self.world.clock.monotonic() + 3.0


class Simulation:
    def __init__(self, path: Path, seed: int, **config: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.world = World(
            path,
            replicas_at_once_max=rng.choice([1, 1, 2]),
            evictions_per_hour_max=rng.choice([2, 6, 30]),
            retries_per_replica_max=rng.choice([1, 3]),
            verification_timeout_seconds=15.0,
            **config,
        )
        self.slots = [Slot(self.world), Slot(self.world)]
        self.book = IncidentProjection()
        self.fence = 0
        self.paused = False
        self.actions_before_pause = 0
        self.num_faults = 0
        self.commits_at = 0.0
        self.last_write = (0, 0.0)
        self.restarted: set[str] = set()  # replicas that a restart of a role or of the job took down

    # --- trouble ---

    def trouble(self) -> None:
        rng, world = self.rng, self.world
        if rng.random() < 0.05:
            self.fault()
        if rng.random() < 0.01:
            world.runtime.starts_that_hang[rng.choice(FLEET[:-1])] = 1
        if rng.random() < 0.05 and world.switch.dies_at is None:
            world.switch.dies_at = len(world.switch.points) + rng.randrange(12)
        if rng.random() < 0.02:
            sleeper = rng.choice(self.slots).watch
            if sleeper is not None and sleeper.acting:
                # Stopped and woken: it believes that it holds the lease until a write is refused.
                sleeper._renew_at = float("inf")
                world.journal.clock.sleep(world.config.lease_seconds + 1)
        if rng.random() < 0.05:
            world.detector.silent = not world.detector.silent
        if rng.random() < 0.04:
            self.pause(not self.paused)

    def fault(self) -> None:
        replica = self.rng.choice([r for r in FLEET if r != KEEPS_OUT])
        if self.world.runtime.processes[replica].fault is None:
            if self.rng.random() < 0.3:
                self.world.runtime.starts_that_die[replica] = self.rng.choice([1, 1, 3])
            self.world.runtime.inject(replica, self.rng.choice(FAULTS))
            self.num_faults += 1

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self.world.journal.set_flag("paused", "chaos" if paused else None)
        self.actions_before_pause = len(self.world.runtime.replaced)

    # --- running ---

    def run(self, seconds: float, trouble: bool) -> None:
        ends = self.world.clock.monotonic() + seconds
        while self.world.clock.monotonic() < ends:
            if trouble:
                self.trouble()
            self.world.step(seconds=STEP_SECONDS)
            if trouble:
                self.commit()
            # In turns, so that each may be first.
            self.slots.reverse()
            for slot in self.slots:
                slot.tick()
            self.validate()
            if not trouble and self.settled():
                return

    def commit(self) -> None:
        """The trainers commit a step where all work."""
        if self.world.clock.monotonic() >= self.commits_at and all(map(self.world.runtime.healthy, TRAINERS)):
            self.commits_at = self.world.clock.monotonic() + COMMIT_SECONDS
            self.world.journal.append(filled(K.STEP_COMMITTED))

    def settled(self) -> bool:
        well = all(self.world.runtime.healthy(r) for r in FLEET)
        now, position = self.world.clock.monotonic(), self.world.journal.head().position
        if position != self.last_write[0]:
            self.last_write = (position, now)
        return (well and not self.book.open_incidents()) or now - self.last_write[1] > STILL_SECONDS

    def calm(self) -> None:
        self.world.switch.dies_at = None
        self.world.detector.silent = False
        self.pause(False)

    # --- invariants ---

    def validate(self) -> None:
        world = self.world
        self.book.refresh(world.journal)
        assert not self.book.broken, self.book.broken
        started = [
            (i, a, t) for i in self.book.incidents.values() for a in i.attempts if a.started_at for t in a.plan.targets
        ]
        every = {(str(t.replica), t.incarnation) for _, _, t in started}
        at_fault = [(a, str(t.replica), t.incarnation) for i, a, t in started if t.replica in i.at_fault(a.plan)]
        named = [(r, n) for _, r, n in at_fault]
        assert len(set(named)) == len(named), f"two actions on one incarnation: {named}"
        replaced = world.runtime.replaced
        assert len(set(replaced)) == len(replaced) and set(replaced) <= every, "touched without a plan"
        restarts = [t for _, a, t in started if a.plan.action.is_restart]
        self.restarted |= {str(t.replica) for t in restarts}
        self.validate_limits(
            [a.started_at or 0.0 for a, _, _ in at_fault],
            [r for a, r, _ in at_fault if not a.plan.action.is_restart],
        )
        last = self.last_fence()
        assert all(d.fence <= last for d in world.journal.desired().values())
        if self.paused:
            # One whose record was written before the pause may still be carried out by the runtime.
            at_once = len(FLEET) if restarts else world.config.replicas_at_once_max + 1  # and the controller
            assert len(replaced) <= self.actions_before_pause + at_once
        assert world.desired(KEEPS_OUT) == 1 or KEEPS_OUT in self.restarted

    def validate_limits(self, started: list[float], replacements: list[str]) -> None:
        config, now = self.world.config, self.world.clock.wall()
        assert sum(at > now - HOUR_SECONDS for at in started) <= config.evictions_per_hour_max
        for replica in FLEET:
            assert replacements.count(replica) <= config.retries_per_replica_max
        busy = [i for i in self.book.incidents.values() if i.state in UNDER_REPAIR]
        if any(i.attempts[-1].plan.action.is_restart for i in busy):
            assert len(busy) == 1, "a restart is alone"
        else:
            under = {r for i in busy for r in i.under_repair if r != "controller/0"}  # it waits for no other one
            assert len(under) <= config.replicas_at_once_max, under

    def last_fence(self) -> int:
        fences = [e.payload.fence for e in self.world.events(K.LEASE_ACQUIRED)]
        assert fences == sorted(set(fences)), "fencing numbers only grow"
        assert not fences or fences[-1] >= self.fence
        self.fence = fences[-1] if fences else 0
        return self.fence

    def all_cured_or_told(self) -> None:
        reported = {r for i in self.book.incidents.values() if i.page_topics for r in (*i.named, *i.touched)}
        for replica in FLEET:
            assert self.world.runtime.healthy(replica) or replica in reported, (
                f"{replica} is forgotten:\n{self.world.story()}"
            )
        for incident in self.book.incidents.values():
            if incident.outcome is IncidentOutcome.ESCALATED:
                assert incident.page_topics
        heard = {m.seq for m in self.world.notifier.messages if m.kind == "oncall_paged"}
        assert {e.seq for e in self.world.events(K.ONCALL_PAGED)} == heard, "every call is heard"
        self.world.journal.verify()


@pytest.mark.parametrize("number", range(NUM_SEEDS))
def test_trouble(tmp_path: Path, seed: int, number: int) -> None:
    simulation = Simulation(tmp_path, seed * 1000 + number)
    simulation.run(TROUBLE_SECONDS, trouble=True)
    simulation.calm()
    simulation.run(QUIET_SECONDS, trouble=False)
    simulation.all_cured_or_told()
    assert simulation.num_faults > 0 and simulation.world.runtime.replaced


def test_the_trouble_is_real(tmp_path: Path) -> None:
    """Over some seeds (always the same) every kind of trouble happened and every kind of end was reached."""
    kills, outcomes, fences, retried = 0, set(), 0, 0
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        simulation = Simulation(tmp_path / str(number), number)
        simulation.run(TROUBLE_SECONDS / 2, trouble=True)
        kills += sum(slot.num_kills for slot in simulation.slots)
        incidents = simulation.book.incidents.values()
        outcomes |= {i.outcome for i in incidents}
        retried += any(len(i.attempts) > 1 for i in incidents)
        fences += simulation.fence
    assert kills >= 5 and fences > 10 and retried > 0
    assert {IncidentOutcome.RESOLVED, IncidentOutcome.ESCALATED} <= outcomes
