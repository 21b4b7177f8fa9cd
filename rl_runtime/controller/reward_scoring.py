"""Rewards: any responsive worker scores a finished group; on failure, another one does. A failure is never a reward.
A share of the groups is scored by a second worker (`disagreement.py`).

A worker's result counts only if it is one finite number per sample. A group whose scoring fails `ATTEMPTS_MAX` times is
dropped with the reason, in the ledger; the loss of a worker does not count as the group's failure. If group after group
is dropped, the run ends (`NothingScored`) instead of generating for nothing. A worker whose reward is NaN or infinite
where another scorer's of the same answers is finite is reported; where none is finite, the group or the scorer's code
is the cause and nobody is named.
"""

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import DeadlineExceeded, EnvironmentFailed, NothingScored, RewardFailed, WrongNumbers
from rolecall.core.ids import GroupId
from rolecall.core.journal.payloads.run import RewardsCompared
from rolecall.core.membership import Actual, ReplicaState
from rolecall.rl_runtime.controller.background_tasks import RETRY_SECONDS, Tasks, retry_first_call, set_or_timeout
from rolecall.rl_runtime.controller.conversations import Conversations, TurnLimits
from rolecall.rl_runtime.controller.disagreement import Rewards, equal, is_sampled, judge
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.controller.step_plan import membership_changes
from rolecall.rl_runtime.controller.trajectories import EngineKey, GroupPhase, OpenGroup, TrajectoryTable
from rolecall.rl_runtime.protocol.clients import Connect, ReplicaExited, RewardPort
from rolecall.rl_runtime.protocol.membership import MembershipView
from rolecall.rl_runtime.protocol.messages import PromptGroup
from rolecall.rl_runtime.tasks.task import is_held_out
from rolecall.rl_runtime.tasks.user_process import START_SECONDS

logger = logging.getLogger(__name__)

GROUPS_PER_CALL = 8
ATTEMPTS_MAX = 4
"""Wrong answers or exceptions for one group."""
SCORE_SECONDS = 2.0
"""A worker that has not scored a few groups within this is skipped: the groups go to another one."""
LOSSES_MAX = 3
"""Workers that died while scoring one group: after three, the group is considered the cause."""
DROPPED_MAX = 64
"""Groups dropped in a row."""
IDLE_SECONDS = 0.5
WATCHED_GROUPS = 256
"""All groups of a worker that was contradicted are checked, this many."""


Tokens = tuple[tuple[int, ...], ...]
"""Of each sample of a group."""


class InvalidScores(ValueError):
    """A worker's answer does not match the request. `not_finite`: group -> its rewards, where one is NaN or infinite;
    empty if the answer does not match for another reason."""

    def __init__(self, because: str, not_finite: Mapping[GroupId, Rewards] = MappingProxyType({})) -> None:
        self.not_finite = not_finite
        super().__init__(because)


def checked_scores(groups: Sequence[PromptGroup], answer: Sequence[Sequence[float]]) -> list[Rewards]:
    """The answer, if it has one finite number per sample.

    Raises:
        InvalidScores: names the groups for which it does not.
    """
    if len(answer) != len(groups):
        raise InvalidScores(f"{len(answer)} answers for {len(groups)} groups")
    for group, rewards in zip(groups, answer, strict=True):
        if len(rewards) != len(group.samples):
            raise InvalidScores(f"group {group.group_id}: {len(rewards)} rewards for {len(group.samples)} samples")
    found = [tuple(float(r) for r in rewards) for rewards in answer]
    not_finite = {g.group_id: r for g, r in zip(groups, found, strict=True) if not all(map(math.isfinite, r))}
    if not_finite:
        raise InvalidScores(f"group {', '.join(not_finite)}: a reward is not finite", not_finite)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """`seconds`: of one call. `groups`: in one call."""

    seconds: float = SCORE_SECONDS
    attempts: int = ATTEMPTS_MAX
    groups: int = GROUPS_PER_CALL


def scoring_limits(job: JobConfig) -> ScoringLimits:
    """One group in a call where the user's function scores: its failure must not count against other groups."""
    if job.reward is None:
        turns = turn_limits(job)
        if turns is None:
            return ScoringLimits()
        # The environment scores: each conversation may be replayed from its start.
        return ScoringLimits(seconds=turns.replay_seconds(job.algorithm.group_size), attempts=turns.attempts, groups=1)
    # The worker ends a late function and answers; then the group has failed, and not the worker.
    return ScoringLimits(
        seconds=job.reward.timeout_seconds + SCORE_SECONDS + START_SECONDS, attempts=job.reward.attempts, groups=1
    )


def turn_limits(job: JobConfig) -> TurnLimits | None:
    """None: no environment answers."""
    return None if job.environment is None else TurnLimits.of(job.environment, SCORE_SECONDS + START_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCheck:
    """Selects the groups that are scored twice; with only two workers, the controller gives the third opinion."""

    seed: int
    share: float  # 0: none
    here: EngineKey
    score: Callable[[PromptGroup], Sequence[float]] | None
    """None: rewards come from the user's code, which runs in reward workers only."""
    report: Callable[[WrongNumbers], None]
    """Reports a contradicted worker to the agent."""


class RewardScoring:
    """All reward workers of a run."""

    def __init__(
        self,
        *,
        recorder: RunRecorder,
        table: TrajectoryTable,
        connect: Connect,
        tasks: Tasks,
        on_scored: Callable[[], None],
        give_up: Callable[[GroupId, str], None],
        check: RewardCheck,
        limits: ScoringLimits = ScoringLimits(),
        turns: TurnLimits | None = None,
        on_observed: Callable[[], None] = lambda: None,
    ) -> None:
        """`turns`: of conversations with an environment, which the workers answer, too; `on_observed`: one goes on."""
        self._recorder, self._table, self._connect, self._tasks = recorder, table, connect, tasks
        self._on_scored, self._give_up, self._check, self._limits = on_scored, give_up, check, limits
        self._ports: dict[EngineKey, RewardPort] = {}  # of workers that answer
        self._watched: Counter[EngineKey] = Counter()  # contradicted -> number of its groups still to be checked
        self._workers: dict[EngineKey, asyncio.Task[None]] = {}
        self._wakes: dict[EngineKey, asyncio.Event] = {}
        self._resting: set[EngineKey] = set()
        self._used: dict[EngineKey, int] = {}  # sequence number of the last call to each
        self._num_calls = 0
        self._waited: dict[EngineKey, float] = {}  # seconds, for the last answer of each
        self._under_way: set[GroupId] = set()
        self._failed_at: dict[GroupId, list[EngineKey]] = defaultdict(list)
        self._losses: dict[GroupId, int] = defaultdict(int)
        # group -> worker -> the tokens that it judged, and its rewards, of which one is not finite
        self._not_finite: dict[GroupId, dict[EngineKey, tuple[Tokens, Rewards]]] = defaultdict(dict)
        self._dropped = 0  # in a row
        self._on_observed = on_observed
        self._conversations = None if turns is None else Conversations(table, turns, self._drop, self._observed)

    def sync(self, fleet: MembershipView) -> None:
        """Drops lost workers and starts new ones."""
        changes = membership_changes(fleet, "reward", active=self._workers)
        for key in {**changes.lost, **changes.replaced}:
            self._workers[key].cancel()
            self._forget(key)
        for record in changes.joining:
            key = (record.replica, record.incarnation)
            self._wakes[key] = asyncio.Event()
            self._workers[key] = self._tasks.start(self._work(record), f"score {key}")

    def wake(self) -> None:
        """A group is finished."""
        for event in self._wakes.values():
            event.set()

    def _observed(self) -> None:
        self._on_observed()
        self.wake()

    def _forget(self, key: EngineKey) -> None:
        self._workers.pop(key, None)
        self._wakes.pop(key, None)
        self._resting.discard(key)
        self._used.pop(key, None)
        self._waited.pop(key, None)
        self._ports.pop(key, None)
        self._watched.pop(key, None)
        self.wake()

    async def _work(self, record: Actual) -> None:
        key = (record.replica, record.incarnation)
        try:
            port = RewardPort(self._connect(record))
            await self._until_ready(port)
            if not self._recorder.set_state(*key, ReplicaState.SERVING, "answers"):
                self._forget(key)
                return
            self._ports[key] = port
            while True:
                talks = self._conversations
                asked = talks.take(key, self._ports) if talks is not None else []
                groups = [] if asked else self._take(key)
                if talks is not None and asked:
                    try:
                        await talks.answer(port, key, asked)
                    except DeadlineExceeded:
                        await self._until_ready(port)
                elif groups:
                    await self._score(port, key, groups)
                else:
                    self._resting.add(key)
                    await set_or_timeout(self._wakes[key], IDLE_SECONDS)
                    self._resting.discard(key)
        except ReplicaExited as e:
            self._forget(key)
            self._recorder.fence(*key, e.because)

    async def _until_ready(self, port: RewardPort) -> None:
        """Waits for a worker that missed a deadline; it gets no work until it answers.

        Raises:
            ReplicaExited: it exited, or it answers with errors repeatedly.
        """
        failures: Counter[EngineKey] = Counter()
        while True:
            try:
                await port.ready()
                return
            except DeadlineExceeded as e:
                logger.warning("%s", e)
            except ReplicaExited:
                raise
            except Exception as e:  # deliberate: an exception of one worker must not end the controller
                because = await retry_first_call(failures, (port.replica, port.incarnation), e)
                if because:
                    raise ReplicaExited(replica=port.replica, incarnation=port.incarnation, because=because) from e

    def _take(self, key: EngineKey) -> list[OpenGroup]:
        """Finished groups for one worker; none while an idle worker was used less recently.

        Without this rotation the first worker would do everything, and a fault of another one would go unnoticed.
        """
        for other in self._resting:
            if self._used.get(other, 0) < self._used.get(key, 0) and self._free_for(other):
                self._wakes[other].set()
                return []
        free = self._free_for(key)
        if free:
            self._num_calls += 1
            self._used[key] = self._num_calls
        return free[: self._limits.groups]

    def _free_for(self, key: EngineKey) -> list[OpenGroup]:
        """Finished groups that are not being scored; one that failed here is left to other workers, if any."""
        others = len(self._workers) > 1
        free = [g for g in self._table.in_phase(GroupPhase.FINISHED) if g.group_id not in self._under_way]
        if self._conversations is not None:
            free = [g for g in free if self._conversations.belongs_to(g.group_id, key, self._ports)]
        return [g for g in free if not (others and self._failed_at[g.group_id][-1:] == [key])]

    async def _score(self, port: RewardPort, key: EngineKey, open_groups: Sequence[OpenGroup]) -> None:
        groups = [g.as_group() for g in open_groups]
        ids = [g.group_id for g in groups]
        self._under_way.update(ids)
        try:
            waited = self._waited.pop(key, 0.0)
            scores, self._waited[key] = await port.score(groups, self._limits.seconds, waited)
            answer = checked_scores(groups, scores)
        except ReplicaExited as e:
            for group_id in ids:
                self._losses[group_id] += 1
                if self._losses[group_id] >= LOSSES_MAX:
                    self._drop(group_id, f"reward_failed: {LOSSES_MAX} workers died scoring it, last: {e.because}")
            raise
        except EnvironmentFailed as e:
            logger.warning("%s#%d: scoring of %s failed: %s", *key, ", ".join(ids), e)
            for group_id in ids:
                self._note_failure(group_id, key, f"environment_failed: {e.kind}", is_final=e.is_final)
            await asyncio.sleep(RETRY_SECONDS)
        except Exception as e:  # noqa: BLE001 deliberate: retried elsewhere, never a reward
            name = e.kind if isinstance(e, RewardFailed) else type(e).__name__
            logger.warning("%s#%d: scoring of %s failed: %s: %s", *key, ", ".join(ids), name, e)
            if isinstance(e, InvalidScores):
                self._keep_not_finite(key, groups, e)
            for group_id in ids:
                self._note_failure(group_id, key, f"reward_failed: {name}")
            if isinstance(e, DeadlineExceeded):
                self._under_way.difference_update(ids)
                self.wake()
                await self._until_ready(port)
            else:
                await asyncio.sleep(RETRY_SECONDS)
        else:
            pairs = zip(groups, answer, strict=True)
            answer = await asyncio.gather(*(self._compared(key, group, rewards) for group, rewards in pairs))
            for sent, rewards in zip(groups, answer, strict=True):
                self._contradict_not_finite(key, sent, rewards)
                group = self._table.groups.get(sent.group_id)
                # Closed, or regenerated after a rollback: the rewards are for discarded tokens.
                if (
                    group is not None
                    and group.phase is GroupPhase.FINISHED
                    and [tuple(t.tokens) for t in group.trajectories] == [s.tokens for s in sent.samples]
                ):
                    self._table.score(sent.group_id, rewards)
                self._failed_at.pop(sent.group_id, None)
                self._losses.pop(sent.group_id, None)
            if not all(is_held_out(g) for g in ids):
                self._dropped = 0
            self._on_scored()
        finally:
            self._under_way.difference_update(ids)
            self.wake()

    def _note_failure(self, group_id: GroupId, key: EngineKey, reason: str, *, is_final: bool = False) -> None:
        if self._conversations is not None:
            self._conversations.release(group_id)
        self._failed_at[group_id].append(key)
        if is_final or len(self._failed_at[group_id]) >= self._limits.attempts:
            self._drop(group_id, reason)

    def _keep_not_finite(self, key: EngineKey, groups: Sequence[PromptGroup], error: InvalidScores) -> None:
        """Until another scorer has judged the same answers: the controller itself, if there is no other worker."""
        for sent in groups:
            rewards = error.not_finite.get(sent.group_id)
            if rewards is None:
                continue
            self._not_finite[sent.group_id][key] = _tokens(sent), rewards
            if len(self._workers) < 2 and self._check.share and self._check.score is not None:
                own = tuple(self._check.score(sent))
                if all(map(math.isfinite, own)):
                    self._contradict_not_finite(self._check.here, sent, own)

    def _contradict_not_finite(self, by: EngineKey, sent: PromptGroup, rewards: Rewards) -> None:
        """Reports the workers whose rewards of these answers were not finite, while those of `by` are."""
        for odd, (tokens, given) in self._not_finite.pop(sent.group_id, {}).items():
            # Without `share` the scorer may give equal answers different rewards. Against itself none is a second one.
            if self._check.share and odd != by and tokens == _tokens(sent):
                self._name(odd, sent.group_id, {odd: given, by: rewards}, used=rewards)

    def _name(self, odd: EngineKey, group_id: GroupId, answers: Mapping[EngineKey, Rewards], used: Rewards) -> None:
        """Reports a worker that others contradict, and has its next groups checked."""
        self._record(odd, group_id, answers, used)
        if odd in self._workers:
            self._watched[odd] = WATCHED_GROUPS
        given = "; ".join(f"{_shown(r)} at {k[0]}#{k[1]}" for k, r in answers.items())
        self._check.report(
            WrongNumbers(
                replica=odd[0], incarnation=odd[1], unit=f"prompt group {group_id}", because=f"rewards {given}"
            )
        )

    def _record(
        self, odd: EngineKey | None, group_id: GroupId, answers: Mapping[EngineKey, Rewards], used: Rewards
    ) -> None:
        self._recorder.event(
            RewardsCompared(
                group=group_id,
                rewards={f"{replica}#{incarnation}": given for (replica, incarnation), given in answers.items()},
                odd=f"{odd[0]}#{odd[1]}" if odd else "",
                used=used,
            )
        )

    async def _compared(self, key: EngineKey, group: PromptGroup, rewards: Rewards) -> Rewards:
        """The rewards to use: those of worker `key`, unless two others agree on different ones."""
        check, watched = self._check, self._watched[key] > 0
        if not check.share or not (watched or is_sampled(check.seed, group.group_id, check.share)):
            return rewards
        self._watched[key] -= watched
        answers = {key: rewards}
        others = sorted((k for k in self._ports if k != key), key=lambda k: (self._used.get(k, 0), k))
        for other in others:
            if len(answers) == 3 or (len(answers) == 2 and equal(*answers.values())):
                break
            try:
                scores, _ = await self._ports[other].score([group], self._limits.seconds)
                (answers[other],) = checked_scores([group], scores)
            except EnvironmentFailed as e:
                logger.warning("%s#%d gave no second opinion: %s", *other, e)
                if e.is_final:  # the conversation cannot be replayed: its rewards are nobody's
                    self._drop(group.group_id, f"environment_failed: {e.kind}")
                    return rewards
            except Exception as e:  # noqa: BLE001 deliberate: its own loop finds out what is wrong with it
                logger.warning("%s#%d gave no second opinion: %s: %s", *other, type(e).__name__, e)
                if isinstance(e, InvalidScores):
                    self._keep_not_finite(other, [group], e)  # the caller has finite ones
        if len(answers) == 1 or (len(answers) == 2 and equal(*answers.values())):
            return rewards
        if len(answers) == 2 and check.score is not None:
            answers[check.here] = tuple(check.score(group))
        verdict = judge(answers)
        if verdict.odd is None:
            self._record(None, group.group_id, answers, verdict.rewards)
        else:
            self._name(verdict.odd, group.group_id, answers, verdict.rewards)
        return verdict.rewards

    def _drop(self, group_id: GroupId, reason: str) -> None:
        self._failed_at.pop(group_id, None)
        self._losses.pop(group_id, None)
        self._not_finite.pop(group_id, None)
        if group_id in self._table.groups:
            self._give_up(group_id, reason)
            self._dropped += not is_held_out(group_id)
            if self._dropped >= DROPPED_MAX:
                raise NothingScored(groups=self._dropped, last=reason)


def _tokens(group: PromptGroup) -> Tokens:
    return tuple(sample.tokens for sample in group.samples)


def _shown(rewards: Rewards) -> str:
    return ", ".join(f"{r:.4g}" for r in rewards[:8]) + (", ..." if len(rewards) > 8 else "")
