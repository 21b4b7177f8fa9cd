"""From prompt numbers to optimizer steps: which groups are issued when, and which of them make the next step.

A group is issued only while it can still be trained within `staleness_max` versions if everything ahead of it is
trained first; that bounds what is in flight. A step takes the oldest scored groups. Before it goes ahead it waits a
little for older ones, if without them more would be left than the next steps can take before they are too old; those
that became too old are dropped, with their length.

With dynamic sampling scored groups are judged first (`rl_runtime/algorithms/sampler.py`), and a step takes accepted ones only. A group that
was filtered is ahead of nobody, so another one is issued for it at once: that no step is made for long, because what is
generated teaches nothing, is a lawful state that ends with a full batch, or with the limit of refills and its sentence.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Protocol

from rolecall.core.clock import Clock
from rolecall.core.config.job import JobConfig
from rolecall.core.ids import GroupId
from rolecall.core.journal.ledger import GroupState
from rolecall.core.journal.payloads import ChainHead
from rolecall.rl_runtime.algorithms.batching import form_microbatches
from rolecall.rl_runtime.algorithms.sampler import GroupSignal, classify_rewards, is_at_limit, not_filled, request_seed
from rolecall.rl_runtime.controller import windows
from rolecall.rl_runtime.controller.background_tasks import set_or_timeout
from rolecall.rl_runtime.controller.generation import RolloutPool
from rolecall.rl_runtime.controller.journal_writer import Judged, RunRecorder
from rolecall.rl_runtime.controller.open_group import EngineKey, GroupPhase, OpenGroup
from rolecall.rl_runtime.controller.training import StepPlan
from rolecall.rl_runtime.controller.trajectories import TrajectoryTable, least_loaded, staleness_if_issued
from rolecall.rl_runtime.protocol.messages import GenerationRequest
from rolecall.rl_runtime.tasks.task import Prompt, group_id, group_number, group_start

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
    def max_response_tokens(self) -> int: ...

    def prompt(self, number: int) -> Prompt: ...


class BatchAssembler:
    """Issues groups and forms steps. `step` is the one being formed or trained; its policy version has its number."""

    def __init__(
        self,
        *,
        books: RunRecorder,
        table: TrajectoryTable,
        generation: RolloutPool,
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
        self.hold = False
        """Steps beyond `num_steps` are wanted."""
        self.flowing = False
        """Groups may be issued, and judged."""

    def wants_more(self) -> bool:
        return self.step < self._job.num_steps or self.hold

    @property
    def next_number(self) -> int:
        """The next prompt."""
        return self._books.sampler.cursor

    # --- groups -------------------------------------------------------------------------------------------------

    def open(self, group: GroupId, end: int | None = None) -> OpenGroup:
        """A group with nothing generated yet; everything about it follows from its id, and from where the next window
        of its answer begins, if there is one."""
        number, start = group_number(group), group_start(group)
        prompt, longest = self._source.prompt(number), self._source.max_response_tokens
        window = self._job.algorithm.window_tokens
        limit = windows.limit_of(start, window_tokens=window, longest=longest, end=end)
        requests = [
            GenerationRequest(
                request_id=f"{group}.{n}",
                group_id=group,
                prompt_tokens=prompt.tokens,
                max_response_tokens=limit,
                seed=request_seed(self._job.seed, number, n),
            )
            for n in range(self._job.algorithm.group_size)
        ]
        opened = self._table.open(group, prompt.tokens, requests, first_fresh=start, is_window=limit < longest)
        opened.followed = end is not None
        return opened

    def reopen(self, groups: Iterable[GroupId], known: Iterable[GroupId]) -> None:
        """Groups of the ledger that are to be made again. `known`: all that it ever issued."""
        void = self._books.ledger.dropped_for(windows.NOTHING_FRESH)
        ends = windows.ends(known, void, longest=self._source.max_response_tokens)
        for group in groups:
            self.open(group, ends.get(group))

    def follow(self) -> None:
        """Windows that were cut are followed by the next ones of their answers: in the ledger before anything else."""
        cut = windows.windows_to_continue(self._table)
        if not cut:
            return
        self._books.issued(windows.successor(g) for g in cut)
        for group in cut:
            group.followed = True
            # With what it stands on: the one before it may be closed before its turn comes.
            self.open(windows.successor(group)).trajectories[0].stand_on(group.trajectories[0])

    def issue(self) -> None:
        """Issues as many groups as can be trained in time. The ledger knows them before an engine does."""
        self.follow()
        self._generation.assign_unassigned()
        placed = self._placements() if self.flowing else []
        new = [g for g, _ in placed if g not in self._table.groups]
        if new:
            self._books.issued(new)
        for group, key in placed:
            if group in new:
                self.open(group)
            self._generation.place(group, key)

    def _placements(self) -> list[tuple[GroupId, EngineKey]]:
        loads = {e.key: e for e in self._generation.loads()}
        # Groups stuck with an engine that does not answer will hardly be trained: they do not hold up the others.
        # Nor do those that teach nothing.
        ahead = sum(
            1
            for g in self._table.groups.values()
            if g.phase is not GroupPhase.FILTERED and not self._generation.is_stuck(g.group_id)
        )
        placed: list[tuple[GroupId, EngineKey]] = []
        # Answers that go on come before new ones: a slot that is free is filled at once, and no answer is left lying.
        waiting, void = windows.settle(self._table, self._source.max_response_tokens)
        self._drop(void, windows.NOTHING_FRESH)
        groups = chain(waiting, map(group_id, count(self.next_number)))
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
            placed.append((next(groups), engine.key))
            num_requests = engine.num_requests + self._job.algorithm.group_size
            loads[engine.key] = replace(engine, num_requests=num_requests)
            ahead += 1
        return placed

    def give_up(self, group: GroupId, reason: str) -> None:
        """A group that nobody will train on, with its reason."""
        self._drop([self._table.groups[group]], reason)

    def _drop(self, groups: Sequence[OpenGroup], reason: str) -> None:
        if not groups:
            return
        self.follow()
        self._books.dropped([(g.group_id, g.num_tokens) for g in groups], reason)
        self._close(g.group_id for g in groups)

    def _close(self, groups: Iterable[GroupId]) -> None:
        for group in groups:
            self._table.close(group)
        self._generation.wake_all()
        self._wake.set()

    # --- dynamic sampling ---------------------------------------------------------------------------------------

    def classify_rewards(self) -> None:
        """Accepts scored groups that teach something; the others are dropped, or set aside where they may be needed."""
        algorithm = self._job.algorithm
        scored = self._table.in_phase(GroupPhase.SCORED)
        if not (algorithm.dynamic_sampling and self.flowing and scored):
            return
        judged = self._judged(scored)
        accepted = [j for j in judged if j[2] is GroupSignal.INFORMATIVE]
        filtered = [j for j in judged if j[2] is not GroupSignal.INFORMATIVE]
        if algorithm.at_refill_limit == "take":
            self._table.judge((g for g, _, _ in filtered), GroupPhase.FILTERED)
            filtered = self._judged(self._aside()[self._num_groups :])
        self._table.judge((g for g, _, _ in accepted), GroupPhase.ACCEPTED)
        self._filter(filtered, accepted)

    def _filter(self, filtered: Sequence[Judged], accepted: Sequence[Judged] = ()) -> None:
        self._books.judged(self._forming(), accepted, filtered)
        if filtered:
            self._close(g for g, _, _ in filtered)

    def _forming(self) -> int:
        """The step whose batch is being filled: the next one, while one is trained."""
        return self.step + bool(self._table.in_phase(GroupPhase.ASSIGNED))

    def _aside(self) -> list[OpenGroup]:
        """Groups that teach nothing and may fill a batch all the same, newest first."""
        found = self._table.in_phase(GroupPhase.FILTERED)
        return sorted(found, key=lambda g: (g.version_max or 0, g.group_id), reverse=True)

    def _judged(self, groups: Iterable[OpenGroup]) -> list[Judged]:
        return [(g.group_id, g.num_tokens, classify_rewards(g.rewards, self._job.algorithm.filter_by)) for g in groups]

    def _at_limit(self, accepted: Sequence[OpenGroup]) -> list[OpenGroup]:
        """What fills the batch of a step for which no more groups may be judged; nothing while more may be.

        Raises:
            BatchNotFilled: nothing may fill it.
        """
        algorithm, aside = self._job.algorithm, self._aside()
        verdicts = self._books.sampler.verdicts(self.step)
        verdicts.update(verdict for _, _, verdict in self._judged(aside))
        if not is_at_limit(algorithm, accepted=len(accepted), filtered=verdicts.total()):
            return []
        if algorithm.at_refill_limit == "fail":
            raise not_filled(algorithm, self.step, accepted=len(accepted), verdicts=verdicts)
        missing = self._num_groups - len(accepted)
        return [*accepted, *aside[:missing]] if len(aside) >= missing else []

    # --- steps --------------------------------------------------------------------------------------------------

    async def form_step(self, disturbed: Callable[[], bool]) -> StepPlan | None:
        """The next step, once there are groups enough. None when no more are wanted, or something else comes first."""
        full_since: float | None = None
        while self.wants_more() and not disturbed():
            self.classify_rewards()
            self._drop_stale()
            self.issue()
            scored = self._ready()
            if self._job.algorithm.dynamic_sampling and (filled := self._at_limit(scored)):
                return self._decide(filled)
            if len(scored) >= self._num_groups:
                now = self._clock.monotonic()
                full_since = now if full_since is None else full_since
                if not self._worth_waiting(scored[: self._num_groups]) or now - full_since >= PATIENCE_SECONDS:
                    return self._decide(scored[: self._num_groups])
            else:
                full_since = None
            await set_or_timeout(self._wake, TURN_SECONDS)
        return None

    def _ready(self) -> list[OpenGroup]:
        """What a step may take, those whose tokens are next to be too old first, then by number: engines finish in
        another order than they were given groups."""
        phase = GroupPhase.ACCEPTED if self._job.algorithm.dynamic_sampling else GroupPhase.SCORED
        found = self._table.in_phase(phase)
        return sorted(found, key=lambda g: (g.oldest_since(self.step - self._staleness_max), g.group_id))

    def _drop_stale(self) -> None:
        stale = self._table.too_stale(self.step, self._staleness_max)
        self._filter(self._judged(g for g in stale if g.phase is GroupPhase.FILTERED))
        self._drop([g for g in stale if g.group_id in self._table.groups], TOO_STALE)

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
            if len(due) > later * self._num_groups and any(not self._is_ready(g) for g in due):
                return True
        return False

    def _is_ready(self, group: GroupId) -> bool:
        return self._table.groups[group].phase in (GroupPhase.SCORED, GroupPhase.ACCEPTED)

    def _decide(self, groups: Sequence[OpenGroup]) -> StepPlan:
        self.follow()
        # The batch is full: what was set aside for it is needed no more.
        taken = self._judged(g for g in groups if g.phase is GroupPhase.FILTERED)
        spared = self._judged(g for g in self._aside() if g not in groups)
        sizes = [(g.group_id, g.num_tokens) for g in groups]
        head = self._books.assigned(self.step, sizes, taken=taken, filtered=spared)
        self._close(g for g, _, _ in spared)
        return self._plan(groups, head)

    def _plan(self, groups: Sequence[OpenGroup], head: ChainHead, *, resumed: bool = False) -> StepPlan:
        self._table.assign(g.group_id for g in groups)
        whole = [g.as_group() for g in groups]
        microbatches = form_microbatches(self.step, whole, self._job.algorithm.microbatches_per_step)
        return StepPlan(step=self.step, microbatches=microbatches, ledger=head, resumed=resumed)

    async def resume_step(self) -> StepPlan | None:
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
