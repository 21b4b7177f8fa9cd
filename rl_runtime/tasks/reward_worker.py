"""Reward worker without Ray: scores finished groups with the task.

A reward depends on tokens only. An error here is raised, and another worker scores the answer (invariant Infrastructure
is not reward, docs/invariants.md).
"""

from collections.abc import Callable, Sequence

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import StaleIncarnation
from rolecall.core.ids import ReplicaId
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.protocol.messages import Conversation, Observation, PromptGroup
from rolecall.rl_runtime.tasks.task import Task, make_task
from rolecall.rl_runtime.tasks.tokenizer import vocabulary

LATE_SECONDS_MIN = 0.05
"""Shorter waits of a caller are the time that its messages take on a busy machine: 13 ms at a load of 30 on 2 cores."""


def task_of(job: JobConfig) -> Task:
    """The job's task or dataset: prompts by number, rewards of their answers.

    Raises:
        ConfigError: the model folder or the dataset cannot be used, or a character of the task is missing.
    """
    if job.data is not None:
        # Both need transformers, which takes seconds.
        if job.environment is not None:
            from rolecall.rl_runtime.tasks.environment_task import EnvironmentTask

            return EnvironmentTask(job)
        from rolecall.rl_runtime.tasks.dataset_task import DatasetTask

        return DatasetTask(job)
    return make_task(job.task, vocabulary(job.model, job.task.name), job.seed)


class RewardWorker:
    """One worker. Every worker gives the same answer; live environments only save their replay."""

    def __init__(
        self,
        *,
        replica: ReplicaId,
        incarnation: int,
        job: JobConfig,
        clock: Clock | None = None,
        on_group: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`on_group` is called before each group, for fault injection; a returned number scales the rewards."""
        self._replica, self._incarnation = replica, incarnation
        self._task, self._clock, self._on_group = task_of(job), clock or SystemClock(), on_group
        self._last_seconds = 0.0  # of work for the last answer
        reporter.enter_phase(Phase.WAIT)

    def score(self, incarnation: int, groups: Sequence[PromptGroup], waited_seconds: float = 0.0) -> list[list[float]]:
        """One reward per sample of each group. `waited_seconds`: how long the caller waited for the answer before this
        one; 0 or less: unknown. What exceeds the work is reported as work: a worker that often stands still, and is
        idle for most of the time, does not see it itself.

        Raises StaleIncarnation: meant for another incarnation.
        """
        self._check(incarnation)
        late_seconds, self._last_seconds = waited_seconds - self._last_seconds, 0.0
        if late_seconds < LATE_SECONDS_MIN:
            late_seconds = 0.0
        rewards = []
        with reporter.phase(Phase.SCORE):
            for group in groups:
                factor = self._on_group()
                started = self._clock.monotonic()
                right = self._rewards(group)
                rewards.append([*right] if factor is None else [factor * (1.0 + reward) for reward in right])
                seconds = self._clock.monotonic() - started
                self._last_seconds += seconds
                reporter.progress(1, busy_seconds=seconds + late_seconds, tokens=group.num_tokens)
                late_seconds = 0.0
        return rewards

    def observe(self, incarnation: int, conversations: Sequence[Conversation]) -> list[Observation]:
        """What the environment answers to each. Raises StaleIncarnation: meant for another incarnation."""
        self._check(incarnation)
        started = self._clock.monotonic()
        with reporter.phase(Phase.WAIT):
            answers = self._task.observe(conversations)
        reporter.progress(1, busy_seconds=self._clock.monotonic() - started)
        return answers

    def _check(self, incarnation: int) -> None:
        if incarnation != self._incarnation:
            raise StaleIncarnation(replica=self._replica, wanted=f"#{self._incarnation}", got=f"#{incarnation}")

    def _rewards(self, group: PromptGroup) -> Sequence[float]:
        if not self._task.runs_foreign_code:
            return self._task.rewards(group)
        # The function has a deadline of its own: until then this worker waits, and does not hang.
        with reporter.phase(Phase.WAIT):
            return self._task.rewards(group)
