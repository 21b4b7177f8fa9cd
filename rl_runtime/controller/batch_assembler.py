"""From prompt numbers to optimizer steps: when to issue groups, and which of them form the next step.

A group is issued only while it can still be trained within `staleness_max` versions if everything ahead of it is
trained first; this bounds the work in flight. A step takes the oldest scored groups (`step_plan.form_step` decides
which, and when); groups that became too old are dropped, with their length.

With dynamic sampling, scored groups are filtered first (`algorithms/sampler.py`), and a step takes accepted ones only.
A filtered group does not count as pending, so another one is issued for it at once. A healthy run may therefore form no
step for a while; this ends with a full batch, or at the refill limit with an error that explains it.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, count
from typing import Protocol

from rolecall.core.clock import Clock
from rolecall.core.config.job import JobConfig
from rolecall.core.ids import GroupId
from rolecall.core.journal.ledger import GroupState
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.rl_runtime.algorithms.batching import form_microbatches
from rolecall.rl_runtime.algorithms.group_relative import step_statistics
from rolecall.rl_runtime.algorithms.sampler import GroupSignal, classify_rewards, is_at_limit, not_filled, request_seed
from rolecall.rl_runtime.controller import windows
from rolecall.rl_runtime.controller.background_tasks import set_or_timeout
from rolecall.rl_runtime.controller.journal_writer import Judged, RunRecorder
from rolecall.rl_runtime.controller.rollout_pool import RolloutPool
from rolecall.rl_runtime.controller.step_plan import BatchSnapshot, LoopState, StepPlan, place_groups
from rolecall.rl_runtime.controller.trajectories import GroupPhase, OpenGroup, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import GenerationRequest, PromptGroup
from rolecall.rl_runtime.tasks.task import Prompt, group_id, group_number, group_start

TURN_SECONDS = 0.1
"""How often the loop tries to form a step when no event wakes it."""
RESCORE_SECONDS = 60.0
"""How long a restarted controller waits until the groups of the running step are scored again."""
TOO_STALE, NOT_WHOLE = "stale", "tokens of its step were lost with an engine and the controller"


class PromptSource(Protocol):
    """Source of prompts and scorer of answers: every process has the same prompt for a number."""

    @property
    def runs_foreign_code(self) -> bool: ...

    @property
    def max_response_tokens(self) -> int: ...

    def prompt(self, number: int) -> Prompt: ...

    def rewards(self, group: PromptGroup) -> Sequence[float]: ...

    def origin(self, number: int) -> str: ...

    @property
    def num_rows(self) -> int: ...

    def held_out(self, number: int) -> Prompt: ...

    def num_held_out(self, wanted: int | None) -> int: ...


class BatchAssembler:
    """Issues groups, drops them, and assigns them to steps."""

    def __init__(
        self,
        *,
        loop: LoopState,
        recorder: RunRecorder,
        table: TrajectoryTable,
        pool: RolloutPool,
        source: PromptSource,
        job: JobConfig,
        clock: Clock,
        wake: asyncio.Event,
    ) -> None:
        self._loop, self._recorder, self._table, self._pool = loop, recorder, table, pool
        self._source, self._job, self._clock, self._wake = source, job, clock, wake
        self._num_groups = job.algorithm.groups_per_step
        self._staleness_max = job.runtime.staleness_max

    def open(self, group: GroupId, end: int | None = None) -> OpenGroup:
        """A group without tokens; its content follows from its id and the start of the answer's next window."""
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
        if end is not None:
            self._table.mark_followed(group)
        return opened

    def _drop_unusable(self, groups: Sequence[GroupId]) -> list[GroupId]:
        """Drops groups of prompts that nothing can be generated for. Returns the others."""
        reasons = {g: self._source.prompt(group_number(g)).unusable for g in groups}
        for reason in sorted(set(reasons.values()) - {""}):
            self._recorder.dropped([(g, 0) for g in groups if reasons[g] == reason], reason)
        return [g for g in groups if not reasons[g]]

    def reopen(self, groups: Iterable[GroupId], known: Iterable[GroupId]) -> None:
        """Groups of the ledger that must be generated again. `known`: all groups ever issued."""
        void = self._recorder.ledger.dropped_for(windows.NOTHING_FRESH)
        ends = windows.ends(known, void, longest=self._source.max_response_tokens)
        for group in self._drop_unusable(list(groups)):
            self.open(group, ends.get(group))

    def follow(self) -> None:
        """Issues the next window of each answer that was cut, before any other ledger line."""
        cut = windows.windows_to_continue(self._table)
        if not cut:
            return
        self._recorder.issued(windows.successor(g) for g in cut)
        for group in cut:
            self._table.mark_followed(group.group_id)
            # Includes its context: the previous window may be closed before this one is placed.
            self.open(windows.successor(group)).trajectories[0].take_context(group.trajectories[0])

    def issue(self) -> None:
        """Issues as many groups as can be trained in time; writes them to the ledger before an engine gets them."""
        self.follow()
        self._pool.assign_unassigned()
        if not self._loop.issuing:
            return
        # Continued windows come before new groups: a free slot is filled at once, and no answer stays unfinished.
        waiting, void = windows.settle(self._table, self._source.max_response_tokens)
        self._drop(void, windows.NOTHING_FRESH)
        # Groups of late engines and filtered ones will hardly be trained, and delay no others.
        ahead = [g for g in self._table.groups.values() if g.phase is not GroupPhase.FILTERED and not g.is_held_out]
        placed = place_groups(
            self._loop,
            chain(waiting, map(group_id, count(self._recorder.sampler.cursor))),
            self._pool.loads(),
            ahead=sum(1 for g in ahead if not self._pool.is_stuck(g.group_id)),
            groups_per_step=self._num_groups,
            group_size=self._job.algorithm.group_size,
            staleness_max=self._staleness_max,
            together=self._job.num_hybrids > 0,
        )
        new = [g for g, _ in placed if g not in self._table.groups]
        if new:
            self._recorder.issued(new)
        for group in self._drop_unusable(new):
            self.open(group)
        for group, key in placed:
            if group in self._table.groups:
                self._pool.place(group, key)

    def give_up(self, group: GroupId, reason: str) -> None:
        """Drops a group that will not be trained, with the reason."""
        self._drop([self._table.groups[group]], reason)

    def _drop(self, groups: Sequence[OpenGroup], reason: str) -> None:
        if not groups:
            return
        self.follow()
        self._recorder.dropped([(g.group_id, g.num_tokens) for g in groups], reason)
        self._close(g.group_id for g in groups)

    def _close(self, groups: Iterable[GroupId]) -> None:
        for group in groups:
            self._table.close(group)
        self._pool.wake_all()
        self._wake.set()

    def classify_rewards(self) -> None:
        """Accepts scored groups with a learning signal; drops or reserves the others."""
        algorithm = self._job.algorithm
        scored = self._table.in_phase(GroupPhase.SCORED)
        if not (algorithm.dynamic_sampling and self._loop.issuing and scored):
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
        # While a step is trained, the batch of the next one is being filled.
        step = self._loop.step + bool(self._table.in_phase(GroupPhase.ASSIGNED))
        self._recorder.judged(step, accepted, filtered)
        if filtered:
            self._close(g for g, _, _ in filtered)

    def _aside(self) -> list[OpenGroup]:
        """Groups without a learning signal that are reserved to fill a batch, newest first."""
        found = self._table.in_phase(GroupPhase.FILTERED)
        return sorted(found, key=lambda g: (g.version_max or 0, g.group_id), reverse=True)

    def _judged(self, groups: Iterable[OpenGroup]) -> list[Judged]:
        return [(g.group_id, g.num_tokens, classify_rewards(g.rewards, self._job.algorithm.filter_by)) for g in groups]

    def refresh(self) -> None:
        """Filters scored groups, drops those that are too old, and issues those that can be trained."""
        self.classify_rewards()
        stale = self._table.too_stale(self._loop.step, self._staleness_max)
        self._filter(self._judged(g for g in stale if g.phase is GroupPhase.FILTERED))
        self._drop([g for g in stale if g.group_id in self._table.groups], TOO_STALE)
        self.issue()

    def ready(self) -> list[OpenGroup]:
        """Groups that the step being formed can take, oldest first."""
        dynamic = self._job.algorithm.dynamic_sampling
        return self._table.in_phase(GroupPhase.ACCEPTED if dynamic else GroupPhase.SCORED)

    def snapshot(self) -> BatchSnapshot:
        """Input of `form_step`.

        Raises:
            BatchNotFilled: no more groups may be filtered for this step, and `at_refill_limit` is `fail`.
        """
        step, algorithm = self._loop.step, self._job.algorithm
        ready = self.ready()
        # Groups whose tokens expire first come first, then by number: engines finish out of order.
        ready.sort(key=lambda g: (g.oldest_since(step - self._staleness_max), g.group_id))
        aside, at_limit = self._aside(), False
        if algorithm.dynamic_sampling:
            verdicts = self._recorder.sampler.verdicts(step)
            verdicts.update(verdict for _, _, verdict in self._judged(aside))
            at_limit = is_at_limit(algorithm, accepted=len(ready), filtered=verdicts.total())
            if at_limit and algorithm.at_refill_limit == "fail":
                raise not_filled(algorithm, step, accepted=len(ready), verdicts=verdicts)
        newest = self._table.waiting({e.key: e.version for e in self._pool.engines.values()})
        return BatchSnapshot(
            step=step,
            groups_per_step=self._num_groups,
            staleness_max=self._staleness_max,
            ready=[g.group_id for g in ready],
            set_aside=[g.group_id for g in aside],
            at_refill_limit=at_limit,
            newest_versions={g: v for g, v in newest.items() if not self._pool.is_stuck(g)},
            full_since=self._loop.full_since,
        )

    def assign(self, group_ids: Iterable[GroupId]) -> StepPlan:
        """The step of these groups; written to the ledger before a trainer gets it."""
        self.follow()
        groups = [self._table.groups[g] for g in group_ids]
        # The batch is full: the reserved groups are no longer needed.
        taken = self._judged(g for g in groups if g.phase is GroupPhase.FILTERED)
        spared = self._judged(g for g in self._aside() if g not in groups)
        sizes = [(g.group_id, g.num_tokens) for g in groups]
        head = self._recorder.assigned(self._loop.step, sizes, taken=taken, filtered=spared)
        self._close(g for g, _, _ in spared)
        return self._plan(groups, head)

    def _plan(self, groups: Sequence[OpenGroup], head: ChainHead, *, resumed: bool = False) -> StepPlan:
        self._table.assign(g.group_id for g in groups)
        whole = [g.as_group() for g in groups]
        algorithm = self._job.algorithm
        statistics = step_statistics(whole, algorithm, longest=self._source.max_response_tokens)
        microbatches = form_microbatches(self._loop.step, whole, algorithm.microbatches_per_step, statistics)
        return StepPlan(step=self._loop.step, microbatches=microbatches, ledger=head, resumed=resumed)

    async def resume_step(self) -> StepPlan | None:
        """The previous controller's unfinished step if its groups are complete; otherwise returns its groups."""
        assigned = self._recorder.ledger.groups([GroupState.ASSIGNED])
        groups = await self._scored_again(assigned) if self._is_whole(assigned) else None
        if groups:
            return self._plan(groups, self._recorder.ledger.head(), resumed=True)
        still = self._recorder.ledger.groups([GroupState.ASSIGNED])
        if still:
            self._recorder.returned(self._loop.step, still, NOT_WHOLE)
        return None

    def _is_whole(self, assigned: dict[GroupId, tuple[GroupState, int]]) -> bool:
        if len(assigned) != self._num_groups or any(step != self._loop.step for _, step in assigned.values()):
            return False
        groups = [self._table.groups.get(g) for g in assigned]
        # A conversation that its environment ended awaits, after a restart, that the environment says so again.
        return all(g is not None and all(t.finished or t.awaits for t in g.trajectories) for g in groups)

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
