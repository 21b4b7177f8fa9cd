"""From prompt numbers to optimizer steps: which groups are issued when, and which of them make the next step.

A group is issued only while it can still be trained within `staleness_max` versions if everything ahead of it is
trained first; that bounds what is in flight. A step takes the oldest scored groups. Before it goes ahead it waits a
little for older ones, if without them more would be left than the next steps can take before they are too old; those
that became too old are dropped, with their length.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from rolecall.core.clock import Clock
from rolecall.core.config import JobConfig
from rolecall.core.ids import GroupId
from rolecall.core.journal import ChainHead
from rolecall.core.ledger import GroupState
from rolecall.rl_runtime.batching import form_microbatches
from rolecall.rl_runtime.books import Books
from rolecall.rl_runtime.generation import Generation
from rolecall.rl_runtime.protocol import Request
from rolecall.rl_runtime.task import Prompt, group_id, group_number
from rolecall.rl_runtime.tasks import set_or_timeout
from rolecall.rl_runtime.training import Plan
from rolecall.rl_runtime.trajectories import (
    EngineKey,
    GroupPhase,
    OpenGroup,
    TrajectoryTable,
    least_loaded,
    staleness_if_issued,
)

TURN_SECONDS = 0.1
"""How often a step is looked for when nothing wakes the loop."""
PATIENCE_SECONDS = 2.0
"""How long a full step waits for groups that would otherwise become too old."""
RESCORE_SECONDS = 60.0
"""How long a restarted controller waits until the groups of the running step are scored again."""
TOO_STALE, NOT_WHOLE = "stale", "its step lost tokens with an engine and the controller"


class PromptSource(Protocol):
    """Where prompts come from: the same for a number in every process."""

    @property
    def max_new_tokens(self) -> int: ...

    def prompt(self, number: int) -> Prompt: ...


def request_seed(job_seed: int, number: int, sample: int) -> int:
    """Seed of one sample: the same whichever engine, or controller, asks for it."""
    return (job_seed * 1_000_003 + number * 8_191 + sample) % (2**31)


class Supply:
    """Issues groups and forms steps. `step` is the one being formed or trained; its policy version has its number."""

    def __init__(
        self,
        *,
        books: Books,
        table: TrajectoryTable,
        generation: Generation,
        source: PromptSource,
        job: JobConfig,
        clock: Clock,
        wake: asyncio.Event,
    ) -> None:
        self._books, self._table, self._generation = books, table, generation
        self._source, self._job, self._clock, self._wake = source, job, clock, wake
        self._num_groups = job.algorithm.groups_per_step
        self._staleness_max = job.runtime.staleness_max
        self.step = 0
        self.next_number = 0
        self.hold = False
        """Steps beyond `num_steps` are wanted."""
        self.flowing = False
        """Groups may be issued."""

    def wants_more(self) -> bool:
        return self.step < self._job.num_steps or self.hold

    # --- groups -------------------------------------------------------------------------------------------------

    def open(self, group: GroupId) -> OpenGroup:
        """A group with nothing generated yet; everything about it follows from its number."""
        number = group_number(group)
        prompt = self._source.prompt(number)
        requests = [
            Request(
                request_id=f"{group}.{n}",
                group_id=group,
                prompt_tokens=prompt.tokens,
                max_new_tokens=self._source.max_new_tokens,
                seed=request_seed(self._job.seed, number, n),
            )
            for n in range(self._job.algorithm.group_size)
        ]
        return self._table.open(group, prompt.tokens, requests)

    def issue(self) -> None:
        """Issues as many groups as can be trained in time. The ledger knows them before an engine does."""
        self._generation.place_homeless()
        placed = self._placements() if self.flowing else []
        if not placed:
            return
        self._books.issued(g for g, _ in placed)
        self.next_number += len(placed)
        for group, key in placed:
            self.open(group)
            self._generation.place(group, key)

    def _placements(self) -> list[tuple[GroupId, EngineKey]]:
        loads = {e.key: e for e in self._generation.loads()}
        # Groups stuck with an engine that does not answer will hardly be trained: they do not hold up the others.
        ahead = sum(1 for g in self._table.groups if not self._generation.is_stuck(g))
        placed: list[tuple[GroupId, EngineKey]] = []
        while self.hold or self.step + ahead // self._num_groups < self._job.num_steps:
            in_time = [
                e
                for e in loads.values()
                if staleness_if_issued(self.step, ahead, self._num_groups, e.version) <= self._staleness_max
            ]
            engine = least_loaded(in_time)
            coming = least_loaded(e for e in loads.values() if e.is_due)
            # Updates go round one after the other: the first to have a version must not get everybody's share.
            if engine is None or (coming is not None and coming.num_requests < engine.num_requests):
                break
            placed.append((group_id(self.next_number + len(placed)), engine.key))
            num_requests = engine.num_requests + self._job.algorithm.group_size
            loads[engine.key] = replace(engine, num_requests=num_requests)
            ahead += 1
        return placed

    def give_up(self, group: GroupId, reason: str) -> None:
        """A group that nobody will train on, with its reason."""
        self._drop([self._table.groups[group]], reason)

    def _drop(self, groups: Sequence[OpenGroup], reason: str) -> None:
        self._books.dropped([(g.group_id, g.num_tokens) for g in groups], reason)
        for group in groups:
            self._table.close(group.group_id)
        self._generation.wake_all()
        self._wake.set()

    # --- steps --------------------------------------------------------------------------------------------------

    async def form_step(self, disturbed: Callable[[], bool]) -> Plan | None:
        """The next step, once there are groups enough. None when no more are wanted, or something else comes first."""
        full_since: float | None = None
        while self.wants_more() and not disturbed():
            self._drop_stale()
            self.issue()
            # Oldest policy first, then by number: engines finish in another order than they were given groups.
            scored = sorted(self._table.in_phase(GroupPhase.SCORED), key=lambda g: (g.version_min or 0, g.group_id))
            if len(scored) >= self._num_groups:
                now = self._clock.monotonic()
                full_since = now if full_since is None else full_since
                if not self._worth_waiting(scored[: self._num_groups]) or now - full_since >= PATIENCE_SECONDS:
                    return self._decide(scored[: self._num_groups])
            else:
                full_since = None
            await set_or_timeout(self._wake, TURN_SECONDS)
        return None

    def _drop_stale(self) -> None:
        stale = self._table.too_stale(self.step, self._staleness_max)
        if stale:
            self._drop(stale, TOO_STALE)

    def _worth_waiting(self, chosen: Sequence[OpenGroup]) -> bool:
        """Whether, after a step of `chosen`, more groups would be left than can be trained before they are too old."""
        proven = {e.key: e.version for e in self._generation.engines.values()}
        taken = {g.group_id for g in chosen}
        left = {
            g: v for g, v in self._table.waiting(proven).items() if g not in taken and not self._generation.is_stuck(g)
        }
        for later in range(self._staleness_max + 1):
            # These must be trained by step `self.step + later`; the next of them is not before the step after this one.
            due = [g for g, v in left.items() if v + self._staleness_max <= self.step + later]
            if len(due) > later * self._num_groups and any(not self._is_scored(g) for g in due):
                return True
        return False

    def _is_scored(self, group: GroupId) -> bool:
        return self._table.groups[group].phase is GroupPhase.SCORED

    def _decide(self, groups: Sequence[OpenGroup]) -> Plan:
        head = self._books.assigned(self.step, [(g.group_id, g.num_tokens) for g in groups])
        return self._plan(groups, head)

    def _plan(self, groups: Sequence[OpenGroup], head: ChainHead, *, resumed: bool = False) -> Plan:
        self._table.assign(g.group_id for g in groups)
        whole = [g.as_group() for g in groups]
        microbatches = form_microbatches(self.step, whole, self._job.algorithm.microbatches_per_step)
        return Plan(step=self.step, microbatches=microbatches, ledger=head, resumed=resumed)

    async def resume_step(self) -> Plan | None:
        """The step that the controller before left unfinished, with the same microbatches, if its groups are whole.

        Otherwise its groups are returned, and partial gradients of it are of no use to anybody.
        """
        assigned = self._books.ledger.groups([GroupState.ASSIGNED])
        groups = await self._scored_again(assigned) if self._is_whole(assigned) else None
        if groups:
            return self._plan(groups, self._books.ledger.head(), resumed=True)
        still = self._books.ledger.groups([GroupState.ASSIGNED])
        if still:
            self._books.returned(self.step, still, NOT_WHOLE)
        return None

    def _is_whole(self, assigned: dict[GroupId, tuple[GroupState, int]]) -> bool:
        if len(assigned) != self._num_groups or any(step != self.step for _, step in assigned.values()):
            return False
        groups = [self._table.groups.get(g) for g in assigned]
        return all(g is not None and all(t.finished for t in g.trajectories) for g in groups)

    async def _scored_again(self, assigned: Collection[GroupId]) -> list[OpenGroup] | None:
        deadline = self._clock.monotonic() + RESCORE_SECONDS
        while self._clock.monotonic() < deadline:
            groups = [self._table.groups[g] for g in assigned if g in self._table.groups]
            if len(groups) < len(assigned):
                return None
            if all(g.phase is GroupPhase.SCORED for g in groups):
                return groups
            await set_or_timeout(self._wake, TURN_SECONDS)
        return None
