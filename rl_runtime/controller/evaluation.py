"""Evaluation on held-out prompts, beside training: on the same engines and reward workers, from the same table.

A held-out group has an id of its own kind (`h00000020-000007`: policy version, prompt), so the loss or silence of an
engine, reassignment and scoring treat it like any other group. It is in no ledger and no batch. At most
`REQUESTS_AT_ONCE` of its requests are on an engine, so training keeps the rest of it. Engines keep a held-out group
until its evaluation has ended: the controller's successor finds it there and continues the evaluation.

Each token has its policy version, because training goes on meanwhile; the event has the oldest and the newest one.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

from rolecall.core.clock import Clock
from rolecall.core.config.data import EvaluationConfig
from rolecall.core.config.job import JobConfig
from rolecall.core.ids import GroupId
from rolecall.core.journal.evaluations import EvaluationHistory
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.run import EvaluationFinished
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.controller.rollout_pool import RolloutPool
from rolecall.rl_runtime.controller.step_plan import LoopState, least_loaded
from rolecall.rl_runtime.controller.trajectories import GroupPhase, OpenGroup, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import ENVIRONMENT_VERSION, GenerationRequest, PromptGroup
from rolecall.rl_runtime.tasks.task import Prompt, held_out_id, held_out_of, is_held_out

logger = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 32
"""Held-out requests of an evaluation per serving engine: half of those that an engine computes in one step."""
LATE = "not finished in time"
NORMAL_95 = 1.96
"""Standard deviations of a 95 % interval."""
GREEDY = 0.0


class HeldOutSource(Protocol):
    """Held-out prompts by number, from 0."""

    @property
    def max_response_tokens(self) -> int: ...

    def held_out(self, number: int) -> Prompt: ...

    def num_held_out(self, wanted: int | None) -> int: ...


def pass_at(passed: Sequence[int], samples: int) -> dict[str, float]:
    """k -> share of prompts of which one of k answers passes, for powers of 2 and `samples`.

    `passed`: number of answers of each prompt that pass. The unbiased estimate of 2107.03374, section 2.1.
    """
    ks = sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
    none = {k: [math.comb(samples - c, k) / math.comb(samples, k) for c in passed] for k in ks}
    return {str(k): 1.0 - sum(shares) / len(shares) for k, shares in none.items()} if passed else {}


def interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of the mean, by the normal approximation; (None, None) for fewer than 2 values."""
    num = len(values)
    if num < 2:
        return None, None
    mean = sum(values) / num
    half = NORMAL_95 * math.sqrt(sum((v - mean) ** 2 for v in values) / (num - 1) / num)
    return mean - half, mean + half


def summarized(
    groups: Sequence[PromptGroup],
    config: EvaluationConfig,
    *,
    step: int,
    unscored: Mapping[str, int],
    seconds: float,
) -> EvaluationFinished:
    """The result of an evaluation. `groups`: the scored ones. `unscored`: reason -> number of the others."""
    samples = [s for g in groups for s in g.samples]
    versions = [v for s in samples for v in s.versions if v != ENVIRONMENT_VERSION]
    rewards = [sum(s.reward for s in g.samples) / len(g.samples) for g in groups]
    low, high = interval(rewards)
    return EvaluationFinished(
        step=step,
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        prompts=len(groups),
        samples=config.samples,
        reward=sum(rewards) / len(rewards) if rewards else None,
        reward_low=low,
        reward_high=high,
        pass_at=pass_at([sum(s.reward >= config.pass_reward for s in g.samples) for g in groups], config.samples),
        unscored=dict(sorted(unscored.items())),
        response_length=sum(s.num_generated for s in samples) / len(samples) if samples else None,
        seconds=round(seconds, 3),
    )


def held_out_seed(job_seed: int, number: int, sample: int) -> int:
    """Of one sample, the same in each evaluation: what differs between two of them is the policy."""
    digest = hashlib.sha256(f"evaluation/{job_seed}/{number}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4]) % 2**31


@dataclass(slots=True)
class _Running:
    version: int
    started_at: float  # seconds of the controller's monotonic clock
    prompts: int
    next_number: int = 0
    """Prompts below it were opened, or nothing can be generated for them."""
    open: dict[GroupId, OpenGroup] = field(default_factory=dict)
    unscored: Counter[str] = field(default_factory=Counter)


class Evaluation:
    """Starts evaluations when they are due, one at a time; does nothing without a section `evaluation`."""

    def __init__(
        self,
        *,
        job: JobConfig,
        loop: LoopState,
        recorder: RunRecorder,
        table: TrajectoryTable,
        pool: RolloutPool,
        source: HeldOutSource,
        clock: Clock,
    ) -> None:
        self._job, self._loop, self._recorder, self._table = job, loop, recorder, table
        self._pool, self._source, self._clock = pool, source, clock
        self._config, self._left_out = job.evaluation, -1
        self._running: _Running | None = None
        self._history = EvaluationHistory()
        if job.evaluation is not None:
            for event in recorder.journal.events(kinds=[EventKind.EVALUATION_FINISHED, EventKind.STEP_INTERRUPTED]):
                self._history.take(event)

    @property
    def _done(self) -> Collection[int]:
        return self._history.by_step

    @property
    def is_missing(self) -> bool:
        """Whether the newest policy version, which is the run's last one, is not evaluated yet."""
        return self._config is not None and self._loop.step not in self._done

    def turn(self) -> None:
        """Starts an evaluation that is due, gives engines its requests, and records it when all are scored."""
        config, loop = self._config, self._loop
        if config is None or not loop.issuing or loop.stop_because or not self._recorder.sampler.cursor:
            return  # before the first line of the ledger, a successor would not ask engines what they hold
        if self._running is not None and self._running.version > loop.step:
            self.cancel()  # its policy was discarded before this controller took over
        is_due = loop.step % config.every_steps == 0 or not loop.wants_more
        if is_due and loop.step not in self._done:
            if self._running is None:
                self._running = self._begun(loop.step)
            elif loop.step not in (self._running.version, self._left_out) and loop.wants_more:
                self._left_out = loop.step
                logger.warning("no evaluation of version %d: that of %d runs", loop.step, self._running.version)
        if self._running is None:
            return
        self._place(self._running, config)
        late = self._clock.monotonic() - self._running.started_at > config.timeout_seconds
        if late or (
            self._running.next_number == self._running.prompts
            and all(g.phase is GroupPhase.EVALUATED for g in self._running.open.values())
        ):
            self._finish(self._running, config)

    def _begun(self, version: int) -> _Running:
        assert self._config is not None
        return _Running(version, self._clock.monotonic(), self._source.num_held_out(self._config.num_prompts))

    def resume(self, held: Iterable[GroupId]) -> None:
        """Continues the evaluation of which engines hold groups; the table then adopts them."""
        found = [held_out_of(g) for g in held if is_held_out(g)]
        version = max((v for v, _ in found), default=-1)
        if self._config is None or version < 0 or version in self._done:
            return
        self._running = self._begun(version)
        last = max(number for v, number in found if v == version)
        while self._running.next_number <= min(last, self._running.prompts - 1):
            self._open_next(self._running, self._config)

    def _open_next(self, running: _Running, config: EvaluationConfig) -> OpenGroup | None:
        """Opens the next prompt's group; None if nothing can be generated for it."""
        number = running.next_number
        running.next_number += 1
        prompt, group = self._source.held_out(number), held_out_id(running.version, number)
        if prompt.unusable:
            running.unscored[_short(prompt.unusable)] += 1
            return None
        requests = [
            GenerationRequest(
                request_id=f"{group}.{n}",
                group_id=group,
                prompt_tokens=prompt.tokens,
                max_response_tokens=config.max_response_tokens or self._source.max_response_tokens,
                seed=held_out_seed(self._job.seed, number, n),
                temperature=GREEDY if config.samples == 1 else config.temperature,
            )
            for n in range(config.samples)
        ]
        opened = running.open[group] = self._table.open(group, prompt.tokens, requests)
        return opened

    def _place(self, running: _Running, config: EvaluationConfig) -> None:
        """Gives engines with this version or a newer one as many requests as they may have at once."""
        loads = {e.key: e for e in self._pool.loads() if e.may_serve and e.version >= running.version}
        unscored = [g for g in running.open.values() if g.phase is not GroupPhase.EVALUATED]
        room = REQUESTS_AT_ONCE * len(loads) - config.samples * sum(not g.waits for g in unscored)
        new = (self._open_next(running, config) for _ in range(running.prompts - running.next_number))
        for group in chain([g for g in unscored if g.waits], new if room > 0 else ()):
            engine = least_loaded(loads.values())
            if group is not None and engine is not None:
                self._pool.place(group.group_id, engine.key)
                loads[engine.key] = replace(engine, num_requests=engine.num_requests + config.samples)
                room -= config.samples
            if room <= 0:
                break

    def give_up(self, group: GroupId, reason: str) -> None:
        """The group cannot be scored."""
        if self._running is not None and self._running.open.pop(group, None) is not None:
            self._running.unscored[_short(reason)] += 1
            self._close([group])

    def _finish(self, running: _Running, config: EvaluationConfig) -> None:
        scored = [g.as_group() for g in running.open.values() if g.phase is GroupPhase.EVALUATED]
        late = running.prompts - len(scored) - running.unscored.total()
        unscored = running.unscored + Counter({LATE: late})
        seconds = self._clock.monotonic() - running.started_at
        result = summarized(scored, config, step=running.version, unscored=unscored, seconds=seconds)
        event = self._recorder.event(result, key=f"evaluated:{running.version}:{self._history.returns}")
        self._history.take(event)
        self._running = None
        self._close(running.open)

    def cancel(self) -> None:
        """Drops the running evaluation, whose policy is discarded."""
        if self._running is not None:
            self._close(self._running.open)
            self._running = None

    def stop(self, because: str) -> None:
        """The run was asked to end: the running evaluation has no result."""
        if self._running is not None:
            logger.warning("evaluation of version %d dropped without a result: %s", self._running.version, because)
        self.cancel()

    def returned(self) -> None:
        """The run went back to a checkpoint: later policy versions are evaluated again."""
        self.cancel()
        self._history.discard_after(self._loop.step)

    def _close(self, groups: Iterable[GroupId]) -> None:
        for group in groups:
            self._table.close(group)
        self._pool.wake_all()


def _short(reason: str) -> str:
    """A reason without its numbers: `prompt too long`."""
    return reason.partition(":")[0]
