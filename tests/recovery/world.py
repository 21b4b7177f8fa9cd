"""One small world for tests of the loop: database, fake clock, fake fleet, and as many watches as are wanted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall.core.clock import FakeClock
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import RunStarted
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.recovery.incidents import Incident, fold
from rolecall.recovery.interfaces import EvidenceCollector
from rolecall.recovery.loop import Watch
from rolecall.testing.recovery_world import FLEET, FakeDetector, FakeRuntime, FakeSource, RecordingNotifier
from tests.recovery.simulated_kill import KillableActuator, KillableJournal, KillSwitch

TICK_SECONDS = 0.25
ACT = {"mode": "act", "horizon_seconds": 3600.0, "verification_timeout_seconds": 20.0}


class World:
    def __init__(self, path: Path, *, free_nodes: int | None = None, **config: Any) -> None:
        """`free_nodes`: nodes of the run without a replica; None: the run does not tell its nodes, and each reward
        worker has one of its own."""
        self.url = f"sqlite:///{path / 'journal.db'}"
        self.clock = FakeClock()
        self.journal = Journal(self.url, clock=self.clock)
        self.config = RecoveryConfig(**{**ACT, **config})
        self.runtime = FakeRuntime(self.journal, self.clock, shared_head=free_nodes is not None)
        if free_nodes is not None:
            nodes = {str(d.node) for d in self.journal.desired().values()}
            nodes |= {f"node-{len(FLEET) + n}" for n in range(free_nodes)}
            self.journal.append(RunStarted(seed=0, config_digest="", roles={}, nodes=tuple(sorted(nodes))))
        self.detector = FakeDetector(self.runtime)
        self.notifier = RecordingNotifier()
        self.switch = KillSwitch()
        self.actuators: list[KillableActuator] = []
        self.num_watches = 0
        self.evidence_collector: EvidenceCollector | None = None
        self.others: list[Callable[[], object]] = []  # what people do: asked before each look of the watches

    def watch(self, config: RecoveryConfig | None = None, holder: str = "") -> Watch:
        """A fresh watch process: own connection, own memory, own holder name."""
        self.num_watches += 1
        journal = KillableJournal(self.url, clock=self.clock, switch=self.switch)
        actuator = KillableActuator(RayRuntime(journal), self.switch)
        self.actuators.append(actuator)
        return Watch(
            journal,
            FakeSource(self.clock),
            self.detector,
            actuator,
            config or self.config,
            self.notifier,
            self.clock,
            holder or f"host:{self.num_watches}:1",
            run_id="test-run",
            evidence_collector=self.evidence_collector,
        )

    def step(self, *watches: Watch, seconds: float = TICK_SECONDS) -> None:
        self.clock.advance(seconds)
        self.runtime.tick()
        for do in self.others:
            do()
        for watch in watches:
            watch.tick()

    def until(self, predicate: Callable[[], object], *watches: Watch, seconds: float = 60.0) -> None:
        ends = self.clock.monotonic() + seconds
        while not predicate():
            assert self.clock.monotonic() < ends, f"not within {seconds} s of fake time: {self.story()}"
            self.step(*watches)

    def run(self, seconds: float, *watches: Watch) -> None:
        ends = self.clock.monotonic() + seconds
        while self.clock.monotonic() < ends:
            self.step(*watches)

    def events(self, *kinds: EventKind) -> list[Event]:
        return self.journal.events(kinds=kinds or None)

    def kinds(self, incident_id: str | None = None) -> list[str]:
        return [str(e.kind) for e in self.journal.events(incident_id=incident_id) if e.incident_id]

    def incidents(self) -> list[Incident]:
        return list(fold(self.journal.events()).values())

    def only(self) -> Incident:
        (incident,) = self.incidents()
        return incident

    def desired(self, replica: str) -> int:
        return {str(r): d.incarnation for r, d in self.journal.desired().items()}[replica]

    def all_closed(self) -> bool:
        found = self.incidents()
        return bool(found) and all(i.outcome is not None for i in found)

    def story(self) -> str:
        return "\n".join(
            f"{e.event_id} {e.kind} {e.incident_id or ''} {str(e.payload.to_body())[:150]}" for e in self.events()
        )
