"""Courses of real training, healthy and spoiled by real means, for the benchmark; the tests keep some of them.

A trainer replica learns the built-in task from random weights, step by step, in one process
(`tests/rl_runtime/learning.py`). From step `at` on something is wrong:

    lr               it goes on from its state with a learning rate `factor` times as high
    reward_constant  the reward function gives 0.5 for everything
    reward_sign      the reward function gives 1 - reward
    data             answers are judged by the digits of other prompts
    weights          an engine that writes a third of each step holds one wrong matrix: noise of `factor` standard
    deviations reckless         from the first step: no entropy bonus, and ten times the learning rate

or something lawful happens: `rollback` to the checkpoint of half as many steps, `warmup` of the learning rate. Half of
the steps, at random, are trained on what the newest version wrote, the others on one older.
"""

import random
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.ids import replica_id
from rolecall.detector.live.stages.numbers.collapse import SIGNS
from rolecall.rl_runtime.algorithms.batching import form_microbatches
from rolecall.rl_runtime.algorithms.group_relative import step_statistics
from rolecall.rl_runtime.protocol.messages import PromptGroup
from rolecall.rl_runtime.tasks.task import make_task
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.model import write_model_folder
from rolecall.rl_runtime.trainer.trainer import TrainerReplica
from tests.rl_runtime.learning import BatchGenerator, ModelSequenceGenerator, train_alone

TRAINER = replica_id("trainer", 0)
NOISY_MATRIX = "layers.0.self_attn.q_proj.weight"
OTHER_PROMPTS = 1_000_003
SPOILED = ("lr", "reward_constant", "reward_sign", "data", "weights", "reckless")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    kind: str  # of the list above, or what is particular about a healthy one
    seed: int
    steps: int
    at: int = 0
    factor: float = 1.0
    staleness: int = 1
    digits: int = 6
    hidden_size: int = 64
    algorithm: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spoiled(self) -> bool:
        return self.kind in SPOILED

    def job(self, learning_rate_factor: float = 1.0) -> JobConfig:
        shape = {"hidden_size": self.hidden_size, "intermediate_size": 4 * self.hidden_size}
        given = {
            "seed": self.seed,
            "task": {"num_digits": self.digits},
            "model": shape,
            "algorithm": {**self.algorithm},
        }
        job = parse_job(given)
        rate = min(1.0, job.algorithm.learning_rate * learning_rate_factor)
        return parse_job({**given, "algorithm": {**self.algorithm, "learning_rate": rate}})


class Trained:
    """A trainer that may go on from its own state under another job, or from an older state."""

    def __init__(self, job: JobConfig) -> None:
        self._epoch = 0
        self._start(job)

    def _start(self, job: JobConfig, state: tuple[dict[str, torch.Tensor], str] | None = None) -> None:
        self.job = job
        self._epoch += 1
        self.replica = TrainerReplica(replica=TRAINER, incarnation=1, job=job)
        if state is not None:
            self.replica.load_state(*state)
        self.replica.join(1, self._epoch, 0, 1, "127.0.0.1", 0)

    def go_on(self, job: JobConfig, state: tuple[dict[str, torch.Tensor], str] | None = None) -> None:
        state = state or self.replica.state.export()
        self.replica.close()
        self._start(job, state)

    def step(self, groups: Sequence[PromptGroup]) -> dict[str, float | None]:
        number = self.replica.state.commit.step + 1
        algorithm = self.job.algorithm
        statistics = step_statistics(groups, algorithm, longest=self.job.task.max_response_tokens)
        work = form_microbatches(number, groups, algorithm.microbatches_per_step, statistics)
        result = train_alone(self.replica, number, work, epoch=self._epoch)
        signs = result.health.to_dict()
        return {**signs, "step": number, "reward": result.reward, "log_ratio_max": result.log_ratio_max}


def course(spec: Spec) -> list[dict[str, float]]:
    """Rows of SIGNS, those that are known, one a step in the order in which they were made; a rollback repeats
    steps."""
    coin, noise = random.Random(spec.seed), torch.Generator().manual_seed(spec.seed)
    reckless = spec.kind == "reckless"
    job = spec.job(10.0 if reckless else 1.0 / 8 if spec.kind == "warmup" else 1.0)
    task = make_task(job.task, vocabulary(job.model, job.task.name), job.seed)
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), job.model, seed=0, task=job.task.name)
        writer = ModelSequenceGenerator(Path(folder), eos=task.vocab.eos, seed=spec.seed)
    source, trained = BatchGenerator(job, task, writer), Trained(job)
    kept, rows = trained.replica.state.export(), list[dict[str, float]]()
    versions = deque([(0, trained.replica.state.policy_tensors(0))], maxlen=spec.staleness + 1)
    for number in range(spec.steps):
        on = number >= spec.at > 0
        if spec.kind == "rollback" and number == spec.at // 2:
            kept = trained.replica.state.export()
        if on and number == spec.at:
            if spec.kind == "lr":
                trained.go_on(spec.job(spec.factor))
            if spec.kind == "rollback":
                trained.go_on(job, kept)
                versions.clear()
                _add(versions, trained)
        if spec.kind == "warmup" and number in (10, 20, 30):
            trained.go_on(spec.job({10: 1 / 4, 20: 1 / 2, 30: 1.0}[number]))
        version, weights = versions[-1] if coin.random() < 0.5 else versions[0]
        writer.load(version, weights)
        made = source.generate()
        groups = made.groups
        if on and spec.kind == "weights":
            writer.load(version, _noisy(weights, spec.factor, noise))
            third = len(groups) // 3
            groups = (*source.generate().groups[:third], *groups[third:])
        if on:
            groups = tuple(_judged(g, spec.kind, task, number + i) for i, g in enumerate(groups))
        row = trained.step(groups)
        if job.algorithm.dynamic_sampling:
            row["filtered_fraction"] = made.num_filtered / made.num_groups
        rows.append({k: float(f"{v:.4g}") for k in ("step", *SIGNS) if (v := row.get(k)) is not None})
        _add(versions, trained)
    trained.replica.close()
    return rows


def _add(versions: deque[tuple[int, dict[str, torch.Tensor]]], trained: Trained) -> None:
    version = trained.replica.state.commit.policy_version
    versions.append((version, trained.replica.state.policy_tensors(version)))


def _noisy(weights: Mapping[str, torch.Tensor], factor: float, noise: torch.Generator) -> dict[str, torch.Tensor]:
    wrong = next(name for name in weights if name.endswith(NOISY_MATRIX))
    w = weights[wrong]
    return {**weights, wrong: w + factor * w.std() * torch.randn(w.shape, generator=noise)}


def _judged(group: PromptGroup, kind: str, task: Any, number: int) -> PromptGroup:
    """The group as the broken reward function, or the broken data, sees it."""
    if kind == "reward_constant":
        rewards = [0.5 for _ in group.samples]
    elif kind == "reward_sign":
        rewards = [1.0 - s.reward for s in group.samples]
    elif kind == "data":
        other = task.prompt(OTHER_PROMPTS + number).tokens
        rewards = [task.reward(other, s.tokens) for s in group.samples]
    else:
        return group
    samples = (replace(s, reward=r) for s, r in zip(group.samples, rewards, strict=True))
    return replace(group, samples=tuple(samples))


def specs() -> list[Spec]:
    """What the report is made of, in turns: whoever stops early has some of each."""
    found = []
    for i in range(5):
        begin = 60 + 6 * i
        found += [
            Spec(kind="healthy", seed=300 + i, steps=150, staleness=i % 3),
            Spec(kind="lr", seed=310 + i, steps=begin + 30, at=begin, factor=30.0),
            Spec(kind="healthy dapo", seed=320 + i, steps=100, algorithm={"name": "dapo"}),
            Spec(kind="reward_constant", seed=330 + i, steps=begin + 30, at=begin),
            Spec(kind="healthy, few groups", seed=340 + i, steps=150, algorithm={"groups_per_microbatch": 1}),
            Spec(kind="reward_sign", seed=350 + i, steps=begin + 30, at=begin),
            Spec(kind="rollback", seed=360 + i, steps=130, at=80),
            Spec(kind="data", seed=370 + i, steps=begin + 30, at=begin),
            Spec(kind="warmup", seed=380 + i, steps=110),
            Spec(kind="weights", seed=390 + i, steps=begin + 30, at=begin, factor=(0.3, 0.5, 1.0, 2.0, 3.0)[i]),
            Spec(kind="healthy ppo", seed=400 + i, steps=120, algorithm={"name": "ppo"}),
            Spec(kind="reckless", seed=410 + i, steps=60, algorithm={"entropy_coefficient": 0.0}),
            Spec(kind="healthy tppo", seed=420 + i, steps=120, algorithm={"name": "tppo"}),
            Spec(kind="lr", seed=430 + i, steps=begin + 30, at=begin, factor=10.0),
        ]
    return found
