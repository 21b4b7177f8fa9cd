"""Model FLOPs utilisation (MFU) of trainers and rollouts, from committed steps (PaLM, arXiv 2204.02311, appendix B).

    FLOPs per token   trainer 6 N + 12 L H Q T, rollout a third of it: a forward pass
    MFU               tokens x FLOPs per token / (seconds x replicas x peak FLOP/s of a replica)

N: parameters without the embedding; L layers, H heads of size Q, T mean tokens of an answer. Seconds are those of the
step for trainers, and since the commit before for rollouts, whose tokens are counted when they are trained on. Prompts,
recomputed activations, filtered and dropped answers count for nothing, so this is a lower bound. A role without a peak
in the job file has no MFU.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from rolecall.core.config.job import JobConfig, ModelConfig
from rolecall.core.ids import split_replica
from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads.run import EpochAdvanced, StepCommitted

TRAINER, ROLLOUT = "trainer", "rollout"
WINDOW_STEPS: Final = 16
"""The newest this many steps are compared with the best stretch of as many."""
DECLINE: Final = 0.8
"""A newest median below this share of the best one is a decline: steps of one run differ by less."""


def num_parameters(model: ModelConfig) -> int | None:
    """Without the embedding; None if the job file does not say."""
    if model.path is not None:
        return model.num_parameters
    hidden, heads, kv_heads, size = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    attention = 2 * hidden * heads * size + 2 * hidden * kv_heads * size + 2 * size
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    return model.num_layers * layer + hidden


def training_flops_per_token(model: ModelConfig, answer_tokens: float) -> float | None:
    """Forward and backward pass. Of a model folder, without attention: its shape is not in the job file."""
    parameters = num_parameters(model)
    if parameters is None:
        return None
    shape = 0 if model.path is not None else model.num_layers * model.num_heads * model.head_dim
    return 6.0 * parameters + 12.0 * shape * answer_tokens


@dataclass(slots=True)
class MfuMeter:
    """MFU of each step, by role. Takes the events of a journal in order."""

    job: JobConfig
    replicas: Mapping[str, int] = field(default_factory=dict)  # of the newest epoch, by role
    newest: dict[str, float] = field(default_factory=dict)
    _committed_at: float | None = None

    def take(self, event: Event) -> dict[str, float] | None:
        """The step's MFU by role if the event is a commit; None otherwise."""
        match event.payload:
            case EpochAdvanced(members=members):
                self.replicas = Counter(split_replica(replica)[0] for replica, _ in members)
            case StepCommitted() as step:
                before, self._committed_at = self._committed_at, event.wall_at
                self.newest = self._of(step, event.wall_at - before if before is not None else 0.0)
                return self.newest
        return None

    def _of(self, step: StepCommitted, since_last_seconds: float) -> dict[str, float]:
        per_token = training_flops_per_token(self.job.model, step.health.get("response_length") or 0.0)
        if per_token is None:
            return {}
        wanted, runtime = self.job.roles.counts(), self.job.runtime
        rows = (
            (TRAINER, per_token, step.seconds, runtime.trainer_peak_flops),
            (ROLLOUT, per_token / 3.0, since_last_seconds, runtime.rollout_peak_flops),
        )
        found = {}
        for role, flops, seconds, peak in rows:
            if peak is not None and seconds > 0.0:
                count = self.replicas.get(role) or wanted[role]
                found[role] = step.tokens * flops / (seconds * count * peak)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMfu:
    """Of one run and role: ratios. `best` and `newest`: medians of `WINDOW_STEPS` steps, at most of all there are."""

    median: float
    best: float
    newest: float

    @property
    def decline(self) -> str:
        """In words; empty without one."""
        if self.newest >= DECLINE * self.best:
            return ""
        return f"fell from {self.best:.2%} to {self.newest:.2%}, medians of {WINDOW_STEPS} steps"


def role_mfu(of_steps: Sequence[Mapping[str, float]]) -> dict[str, RoleMfu]:
    """`of_steps`: by role, oldest first."""
    found = {}
    for role in sorted({role for step in of_steps for role in step}):
        values = [step[role] for step in of_steps if role in step]
        windows = _medians(values)
        found[role] = RoleMfu(median=median(values), best=max(windows), newest=windows[-1])
    return found


def mfu_courses(of_steps: Mapping[int, Mapping[str, float]]) -> dict[str, list[tuple[int, float]]]:
    """(step, median of the `WINDOW_STEPS` steps that end with it), by role. `of_steps`: by step, oldest first."""
    found = {}
    for role in sorted({role for step in of_steps.values() for role in step}):
        known = [(step, by_role[role]) for step, by_role in of_steps.items() if role in by_role]
        windows = _medians([value for _, value in known])
        found[role] = [(step, value) for (step, _), value in zip(known[-len(windows) :], windows, strict=True)]
    return found


def _medians(values: Sequence[float]) -> list[float]:
    """Of each `WINDOW_STEPS` values in a row; of all, if there are fewer."""
    ends = range(min(len(values), WINDOW_STEPS), len(values) + 1)
    return [median(values[max(0, end - WINDOW_STEPS) : end]) for end in ends]
