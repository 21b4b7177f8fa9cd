"""Runs the controller's loop on a simulated fleet, with controllers that can be killed before or after any effect."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.core.clock import FakeClock
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.ids import NodeId, ReplicaId, RunId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Audit, GroupState, Ledger, audit
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.rl_runtime.controller.batch_assembler import PromptSource
from rolecall.rl_runtime.controller.controller import Controller, RunOutcome
from rolecall.rl_runtime.controller.trajectories import TrajectoryTable
from rolecall.rl_runtime.protocol.messages import PromptGroup
from rolecall.rl_runtime.protocol.spawn import ActorSpec
from rolecall.rl_runtime.tasks.task import Prompt, group_id
from tests.rl_runtime.scripted_responses import ScriptedResponses
from tests.rl_runtime.simulated_fleet import FakeCertifier, SimulatedFleet
from tests.rl_runtime.simulated_loop import run_simulated

CONTROLLER = ReplicaId("controller/0")
RUN_SECONDS_MAX = 900.0


class Killed(BaseException):
    """The controller's process is no more. Not an Exception: nothing may tolerate it."""


class Mortality:
    """Counts a controller's effects and lets it die at one of them; a dead one has no effects any more."""

    def __init__(self, dies_at: int | None) -> None:
        self.dies_at, self.effects, self.dead = dies_at, 0, False

    def __call__(self, what: str) -> None:
        self.effects += 1
        if self.dies_at is not None and self.effects >= self.dies_at:
            self.dead = True
        if self.dead:
            raise Killed(what)


class MortalJournal(Journal):
    """A journal whose owner may die before or after each write."""

    mortality: Callable[[str], None] = staticmethod(lambda _: None)

    def append(self, *args: Any, **kwargs: Any) -> Any:
        return self._mortal(super().append, *args, **kwargs)

    def set_actual(self, *args: Any, **kwargs: Any) -> Any:
        return self._mortal(super().set_actual, *args, **kwargs)

    def grow_epoch(self, *args: Any, **kwargs: Any) -> Any:
        return self._mortal(super().grow_epoch, *args, **kwargs)

    def set_flag(self, *args: Any, **kwargs: Any) -> Any:
        return self._mortal(super().set_flag, *args, **kwargs)

    def _mortal(self, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.mortality("before a journal write")
        result = write(*args, **kwargs)
        self.mortality("after a journal write")
        return result


class MortalLedger(Ledger):
    mortality: Callable[[str], None] = staticmethod(lambda _: None)
    lines_found: list[int] | None = None
    """How many lines there were, each time that they were all read: once in a controller's life."""

    def lines(self) -> Any:
        found = super().lines()
        if self.lines_found is not None:
            self.lines_found.append(len(found))
        return found

    def write(self, lines: Any) -> ChainHead:
        self.mortality("before a ledger write")
        head = super().write(lines)
        self.mortality("after a ledger write")
        return head


class Prompts:
    """Two tokens that name the group."""

    runs_foreign_code = False

    def __init__(self, answers: ScriptedResponses) -> None:
        self.max_response_tokens = answers.longest
        self._answers = answers

    def prompt(self, number: int) -> Prompt:
        return Prompt(group_id=group_id(number), tokens=(1, number))

    def rewards(self, group: PromptGroup) -> list[float]:
        return [self._answers.reward(s.tokens) for s in group.samples]

    def origin(self, number: int) -> str:
        return ""

    num_rows = 0

    def held_out(self, number: int) -> Prompt:
        return Prompt(group_id=group_id(number), tokens=(2, number))

    def num_held_out(self, wanted: int | None) -> int:
        return wanted or 0


def small_job(**changes: Any) -> JobConfig:
    """12 steps of 4 microbatches of 2 groups of 2 samples."""
    value: dict[str, Any] = {
        "num_steps": 12,
        "algorithm": {"group_size": 2, "microbatches_per_step": 4, "groups_per_microbatch": 2},
        "checkpoint": {"every_steps": 5},
    }
    for path, v in changes.items():
        section, _, key = path.partition("__")
        if key:
            value.setdefault(section, {})[key] = v
        else:
            value[section] = v
    return parse_job(value)


@dataclass
class World:
    """One run: fleet, border, and the controllers that came one after the other."""

    job: JobConfig
    path: Path
    seed: int
    clock: FakeClock = field(default_factory=FakeClock)
    deaths: list[int] = field(default_factory=list)
    """After how many effects each controller dies; when it is used up, they live."""
    recovers: bool = True
    answers: ScriptedResponses = field(default_factory=ScriptedResponses)
    source: Callable[[ScriptedResponses], PromptSource] = Prompts
    table: Callable[[], TrajectoryTable] = TrajectoryTable
    script: Callable[["World"], Any] | None = None
    """A coroutine function that hurts the fleet while the run continues."""
    outcome: RunOutcome | None = None
    controllers: list[Controller] = field(default_factory=list)
    mortalities: list[Mortality] = field(default_factory=list)
    lines_found: list[int] = field(default_factory=list)
    """Lines of the ledger when each controller began."""

    def run(self) -> "World":
        run_simulated(self.clock, self._run())
        return self

    async def _run(self) -> None:
        self.journal = Journal(self.url, clock=self.clock)
        self.fleet = SimulatedFleet(self.job, self.journal, self.seed, recovers=self.recovers, answers=self.answers)
        self.rng = random.Random(self.seed + 1)
        self.fleet.start_all()
        script = asyncio.ensure_future(self.script(self)) if self.script else None
        try:
            async with asyncio.timeout(RUN_SECONDS_MAX):
                for incarnation in range(1, 100):
                    if await self._live(incarnation):
                        break
                    await asyncio.sleep(self.rng.uniform(0.1, 2.0))
            if script is not None and script.done():
                script.result()
        finally:
            if script is not None:
                script.cancel()
                await asyncio.gather(script, return_exceptions=True)
            await self.fleet.close()

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path / 'journal.db'}"

    async def _live(self, incarnation: int) -> bool:
        """One controller's life; False when it was killed."""
        node = NodeId("node-0")
        self.journal.set_desired(Desired(replica=CONTROLLER, incarnation=incarnation, node=node))
        ready = Actual(replica=CONTROLLER, incarnation=incarnation, node=node, state=ReplicaState.READY)
        self.journal.set_actual(ready)
        mortality = Mortality(self.deaths.pop(0) if self.deaths else None)
        self.mortalities.append(mortality)
        journal = MortalJournal(self.url, clock=self.clock)
        ledger = MortalLedger(journal.store, clock=self.clock)
        journal.mortality = ledger.mortality = mortality
        ledger.lines_found = self.lines_found
        spawn = ActorSpec(
            run_dir=str(self.path),
            run_id=RunId("sim"),
            replica=CONTROLLER,
            incarnation=incarnation,
            node=node,
            secret="",
            database_url=self.url,
        )
        controller = Controller(
            spawn,
            self.job,
            connect=lambda record: self.fleet.connect(record, mortality),
            source=self.source(self.answers),
            verifier=FakeCertifier(),
            journal=journal,
            ledger=ledger,
            clock=self.clock,
            table=self.table(),
        )
        self.controllers.append(controller)
        try:
            self.outcome = await controller.run()
        except Killed:
            return False
        finally:
            journal.close()
        return self.outcome is not None

    # --- looking at what happened

    def events(self, kind: EventKind) -> list[dict[str, Any]]:
        return [e.payload.to_body() for e in self.journal.events(kinds=[kind])]

    def audit(self) -> Audit:
        lines = Ledger(self.journal.store).lines()
        anchors = [(f"step {b['step']}", ChainHead(**b["ledger"])) for b in self.events(EventKind.STEP_COMMITTED)]
        return audit(lines, anchors, ended=True)

    def check(self) -> Audit:
        """Invariants of every completed run, after any faults."""
        assert not self.fleet.problems, self.fleet.problems
        assert self.outcome is not None and self.outcome.outcome == "completed", self.outcome
        found = self.audit()
        assert found.ok, found.problems
        assert found.unaccounted == 0 and found.duplicates == 0
        self.journal.verify()
        self._check_steps()
        return found

    def _check_steps(self) -> None:
        algorithm = self.job.algorithm
        trained: dict[int, set[str]] = {}
        for group, (state, step) in Ledger(self.journal.store).groups().items():
            if state is GroupState.TRAINED:
                trained.setdefault(step, set()).add(group)
        assert sorted(trained) == list(range(self.outcome.steps if self.outcome else 0))
        newest = {b["step"]: b for b in self.events(EventKind.STEP_COMMITTED)}
        for step, groups in trained.items():
            assert len(groups) == algorithm.groups_per_step
            commits = list(self.fleet.optimizer[step].values())
            for commit in commits:
                wanted = [f"{step}.{n}" for n in range(algorithm.microbatches_per_step)]
                assert list(commit.microbatch_ids) == sorted(wanted)
            assert groups in [set(c.group_ids) for c in commits], "the trained groups differ from the ledger"
            assert set(newest[step]["groups"]) == groups
        # A run that went back may end before it has made the undone steps again.
        self._check_lineage({step: newest[step]["gradient_digest"] for step in trained})

    def _check_lineage(self, digests: Mapping[int, str]) -> None:
        """Each step was computed on the state of the one before, and the ledger knows which checkpoints have them."""
        before, ledger = "first", Ledger(self.journal.store)
        for step, digest in sorted(digests.items()):
            assert self.fleet.parents[digest] == before, f"step {step} was computed on a state that was discarded"
            before = digest
        for step, (commit, lineage) in self.fleet.checkpoints.items():
            included = ledger.includes(step, commit.group_ids, commit.ledger)
            assert included == (step < 0 or lineage == digests.get(step)), f"checkpoint of step {step}"
