"""Batches with all outputs of models for them: once as tensors for the implementation, once as the lists of
numbers of `reference_math`. Logits and values that must not matter (padding, prompts) are garbage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.algorithms.group_relative import step_statistics
from rolecall.rl_runtime.algorithms.objective import (
    Batch,
    Objective,
    TokenSelection,
    divisors,
    make_batch,
    objective,
    token_logprobs,
)
from rolecall.rl_runtime.protocol.messages import EndReason, PromptGroup, StepStatistics, TrainingSample
from tests.rl_runtime import reference_math
from tests.rl_runtime.reference_math import Answer, Method

VOCABULARY = 5
PAD = 0
GARBAGE = 1e30
TERMS = TokenSelection(policy_version=7, staleness_max=2, longest=9)

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "aggregation": "sample", "clip_low": 0.2, "clip_high": 0.2, "kl_coefficient": 0.04},
    "dr. grpo": {"name": "grpo", "aggregation": "constant", "divide_by_std": False, "entropy_coefficient": 0.0},
    "grpo, as it comes": {"name": "grpo"},
    "grpo, capped": {"name": "grpo", "aggregation": "token", "importance_cap": 1.3},
    "dapo": {"name": "dapo", "overlong_buffer_tokens": 4, "entropy_coefficient": 0.0},
    "dapo, of less than the longest": {"name": "dapo", "overlong_buffer_tokens": 3, "overlong_limit_tokens": 6},
    "ppo": {"name": "ppo", "gamma": 0.99, "lambda_policy": 0.9, "lambda_value": 0.7},
    "ppo, as it comes": {"name": "ppo"},
    "ppo, capped": {"name": "ppo", "importance_cap": 2.0, "kl_coefficient": 0.1, "aggregation": "sample"},
    "tppo": {"name": "tppo", "gamma": 0.95, "lambda_value": 0.5},
    "tppo, as in the paper": {"name": "tppo", "truncation_value": "previous"},
    "grpo, without dual clip": {"name": "grpo", "dual_clip": None},
    "grpo, dual clip within the clip range": {"name": "grpo", "dual_clip": 1.05, "aggregation": "token"},
    "grpo, sample deviation, k2": {"name": "grpo", "std": "sample", "kl_coefficient": 0.3, "kl_estimator": "k2"},
    "grpo, divergence in the reward": {"name": "grpo", "kl_coefficient": 0.3, "kl_in_reward": True},
    "grpo, weight of the answer, capped": {"name": "grpo", "importance_cap": 1.3, "importance": "sequence"},
    "grpo, tokens rejected": {"name": "grpo", "aggregation": "sample", "rejection": "token", "rejection_low": 0.8},
    "grpo, answers rejected": {"name": "grpo", "aggregation": "token", "rejection": "sequence", "rejection_high": 1.1},
    "grpo, later update": {"name": "grpo", "rejection": "token"},
    "grpo, capped, later update": {"name": "grpo", "importance_cap": 1.5},
    "dr-grpo": {"name": "dr-grpo"},
    "gspo": {"name": "gspo"},
    "gspo, wide": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2, "rejection": "sequence", "rejection_low": 0.7},
    "gspo, later update": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.3},
    "cispo": {"name": "cispo", "rejection": "sequence", "rejection_high": 1.2},
    "rloo": {"name": "rloo"},
    "rloo, divergence in the reward": {"name": "rloo", "kl_coefficient": 0.5, "kl_in_reward": True},
    "reinforce++": {"name": "reinforce++", "overlong_buffer_tokens": 3},
    "reinforce++-baseline": {"name": "reinforce++-baseline", "std": "sample", "kl_coefficient": 0.1},
    "ppo, divergence in the reward": {"name": "ppo", "kl_coefficient": 0.5, "kl_in_reward": True, "gamma": 0.9},
    "ppo, later update": {
        "name": "ppo",
        "ppo_epochs": 2,
        "value_clip": 0.3,
        "kl_coefficient": 0.1,
        "kl_estimator": "k2",
    },
    "tppo, later update": {"name": "tppo", "ppo_epochs": 2, "value_clip": 0.5, "truncation_value": "previous"},
    "tppo, divergence in the reward": {"name": "tppo", "kl_coefficient": 0.2, "kl_in_reward": True},
}
CUTS = tuple(name for name in ALGORITHMS if name.startswith("tppo"))
LATER = tuple(name for name in ALGORITHMS if name.endswith("later update"))
"""Of a step with several updates: weights and values have changed since the first."""


def configured(name: str, groups: int, group_size: int) -> AlgorithmConfig:
    return sized(ALGORITHMS[name], groups, group_size)


def sized(settings: dict[str, Any], groups: int, group_size: int) -> AlgorithmConfig:
    size = 1 if settings["name"] == "tppo" else group_size
    shape = {"microbatches_per_step": 1, "groups_per_microbatch": groups, "group_size": size}
    return AlgorithmConfig.model_validate({**settings, **shape})


def method_of(algorithm: AlgorithmConfig, longest: int) -> Method:
    a = algorithm
    return Method(
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        cap=a.importance_cap,
        aggregation=a.aggregation,
        longest=longest,
        divide_by_std=a.divide_by_std,
        overlong_longest=a.overlong_limit_tokens or longest,
        overlong_buffer_tokens=a.overlong_buffer_tokens,
        entropy=a.entropy_coefficient,
        kl=a.kl_coefficient,
        critic=a.has_critic,
        gamma=a.gamma,
        lambda_policy=a.lambda_policy,
        lambda_value=a.lambda_value,
        truncation_value=a.truncation_value,
        dual_clip=a.dual_clip,
        baseline=a.method.baseline,
        normalized=a.method.normalized,
        bessel=a.std == "sample",
        whole_ratio=a.method.ratio == "sequence",
        whole_weight=a.importance == "sequence",
        kl_estimator=a.kl_estimator,
        kl_in_reward=a.kl_in_reward,
        kl_max=10.0,
        old_weight_cap=2.0,
        rejection=a.rejection,
        rejection_low=a.rejection_low,
        rejection_high=a.rejection_high,
        value_clip=a.value_clip,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomAnswer:
    """One sample, and the models' outputs for it: for T tokens T rows of logits, and T + 1 values."""

    sample: TrainingSample
    logits: list[list[float]]
    reference_logits: list[list[float]]
    values: list[float]
    old_logprobs: list[float]
    old_values: list[float]

    def answer(self, terms: TokenSelection, *, later: bool = False) -> Answer:
        tokens, versions = self.sample.tokens, self.sample.versions
        rows = [reference_math.log_softmax(row) for row in self.logits]
        known = [reference_math.log_softmax(row) for row in self.reference_logits]
        return Answer(
            logprobs=[row[token] for row, token in zip(rows, tokens, strict=True)],
            sampler_logprobs=self.sample.logprobs,
            trained=[
                t >= self.sample.first_fresh and terms.policy_version - version <= terms.staleness_max
                for t, version in enumerate(versions)
            ],
            reward=self.sample.reward,
            cut=self.sample.end is EndReason.TRUNCATED,
            values=self.values,
            entropies=[reference_math.entropy(row) for row in self.logits],
            reference_logprobs=[row[token] for row, token in zip(known, tokens, strict=True)],
            old_logprobs=self.old_logprobs if later else (),
            old_values=self.old_values if later else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Groups of (prompt, samples)."""

    algorithm: AlgorithmConfig
    terms: TokenSelection
    groups: tuple[tuple[tuple[int, ...], tuple[RandomAnswer, ...]], ...]
    later: bool = False
    step: "Case | None" = None
    """Of which this is a microbatch."""

    @property
    def statistics(self) -> StepStatistics | None:
        whole = self.step or self
        return step_statistics(whole.protocol_groups(), self.algorithm, longest=self.terms.longest)

    def protocol_groups(self) -> list[PromptGroup]:
        return [
            PromptGroup(group_id=GroupId(f"g{n:08d}"), prompt_tokens=prompt, samples=tuple(s.sample for s in answer))
            for n, (prompt, answer) in enumerate(self.groups)
        ]

    def rows(self) -> list[tuple[int, RandomAnswer]]:
        """(length of the prompt, what is answer) in the order of the batch's rows."""
        return [(len(prompt), answer) for prompt, group in self.groups for answer in group]

    def answers(self) -> list[list[Answer]]:
        return [[answer.answer(self.terms, later=self.later) for answer in group] for _, group in self.groups]

    def method(self) -> Method:
        return method_of(self.algorithm, self.terms.longest)

    def only(self, numbers: Sequence[int]) -> "Case":
        """The same step's microbatch of these groups alone."""
        return replace(self, groups=tuple(self.groups[n] for n in numbers), step=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The implementation's result for a case: leaves, and sums that depend on them."""

    batch: Batch
    logits: Tensor
    values_after: Tensor
    found: Objective

    def gradients(self, *, policy: float = 1.0, value: float = 1.0) -> tuple[Tensor, Tensor]:
        """Of both sums, each divided by its divisor, by the leaves."""
        loss = self.found.policy / policy
        if self.found.value is not None:
            loss = loss + self.found.value / value
        by_logits, by_values = torch.autograd.grad(
            loss, [self.logits, self.values_after], allow_unused=True, materialize_grads=True
        )
        return by_logits, by_values


def measure(case: Case, *, dtype: torch.dtype = torch.float64, garbage: float = GARBAGE, pad: int = PAD) -> Measured:
    batch = make_batch(
        case.protocol_groups(), case.algorithm, case.terms, pad=pad, dtype=dtype, statistics=case.statistics
    )
    shape = tuple(batch.tokens_st.shape)
    logits, reference = (garbage * _signs(*shape, VOCABULARY).to(dtype) for _ in range(2))
    values, old_values, old = (garbage * _signs(*shape).to(dtype) for _ in range(3))
    for i, (start, answer) in enumerate(case.rows()):
        length = len(answer.sample.tokens)
        if length == 0:
            continue
        logits[i, start - 1 : start - 1 + length] = torch.tensor(answer.logits, dtype=dtype)
        reference[i, start - 1 : start - 1 + length] = torch.tensor(answer.reference_logits, dtype=dtype)
        values[i, start - 1 : start + length] = torch.tensor(answer.values, dtype=dtype)
        old_values[i, start - 1 : start + length] = torch.tensor(answer.old_values, dtype=dtype)
        old[i, start : start + length] = torch.tensor(answer.old_logprobs, dtype=dtype)
    logits.requires_grad_()
    values.requires_grad_()
    logprobs, entropy = token_logprobs(logits, batch.tokens_st)
    found = objective(
        batch,
        case.algorithm,
        case.terms,
        logprobs_st=logprobs,
        entropy_st=entropy,
        values_after_st=values if case.algorithm.has_critic else None,
        reference_logprobs_st=token_logprobs(reference, batch.tokens_st)[0] if case.algorithm.kl_coefficient else None,
        old_logprobs_st=old if case.later else None,
        old_values_after_st=old_values if case.later and case.algorithm.has_critic else None,
    )
    return Measured(batch=batch, logits=logits, values_after=values, found=found)


def expected_gradients(case: Case, like: Measured) -> tuple[Tensor, Tensor]:
    """The reference's, by every logit and value of the batch: 0 except for its lists."""
    wanted = reference_math.step(case.answers(), case.method())
    by_logits, by_values = torch.zeros_like(like.logits), torch.zeros_like(like.values_after)
    for i, (start, answer) in enumerate(case.rows()):
        for t, token in enumerate(answer.sample.tokens):
            slopes = reference_math.logprob_gradient(answer.logits[t], token)
            turns = reference_math.entropy_gradient(answer.logits[t])
            row = [
                wanted.by_logprob[i][t] * a + wanted.by_entropy[i][t] * b for a, b in zip(slopes, turns, strict=True)
            ]
            by_logits[i, start - 1 + t] = torch.tensor(row, dtype=torch.float64)
        length = len(answer.sample.tokens)
        by_values[i, start - 1 : start + length] = torch.tensor(wanted.by_value[i][: length + 1], dtype=torch.float64)
    return by_logits, by_values


def divided(case: Case, measured: Measured) -> tuple[float, float]:
    by = divisors(case.algorithm, measured.found.sums, longest=case.terms.longest)
    value = 0.0 if measured.found.value is None else float(measured.found.value.detach()) / by.value
    return float(measured.found.policy.detach()) / by.policy, value


# --- making samples


def random_answer(
    rng: Random,
    number: int,
    *,
    length: int,
    end: EndReason = EndReason.STOP,
    reward: float | None = None,
    first_fresh: int = 0,
    ages: Sequence[int] | None = None,
    spread: float = 0.4,
    terms: TokenSelection = TERMS,
) -> RandomAnswer:
    """Random logits and values; the sampler's log-probabilities lie about `spread` away from the policy's."""
    tokens = [rng.randrange(VOCABULARY) for _ in range(length)]
    logits = [[rng.gauss(0, 1) for _ in range(VOCABULARY)] for _ in range(length)]
    logprobs = [
        reference_math.log_softmax(row)[token] + rng.gauss(0, spread) for row, token in zip(logits, tokens, strict=True)
    ]
    ages = [rng.randint(0, 3) for _ in range(length)] if ages is None else ages
    sample = TrainingSample(
        request_id=f"r{number}",
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=tuple(terms.policy_version - age for age in ages),
        reward=rng.choice([-1.0, 0.0, 0.3, 1.0]) if reward is None else reward,
        end=end,
        first_fresh=first_fresh,
    )
    reference_logits = [[z + rng.gauss(0, 0.5) for z in row] for row in logits]
    values = [rng.gauss(0, 1) for _ in range(length + 1)]
    rng = Random(number)  # what only later updates have leaves the others as they are
    return RandomAnswer(
        sample=sample,
        logits=logits,
        reference_logits=reference_logits,
        values=values,
        old_logprobs=[
            reference_math.log_softmax(row)[token] + rng.gauss(0, 0.3)
            for row, token in zip(logits, tokens, strict=True)
        ],
        old_values=[v + rng.gauss(0, 0.5) for v in values],
    )


def random_case(name: str, seed: int, *, groups: int | None = None, terms: TokenSelection = TERMS) -> Case:
    return case_of(ALGORITHMS[name], seed, groups=groups, terms=terms, later=name in LATER)


def case_of(
    settings: dict[str, Any],
    seed: int,
    *,
    groups: int | None = None,
    terms: TokenSelection = TERMS,
    later: bool = False,
) -> Case:
    rng = Random(seed)
    count = rng.randint(1, 4) if groups is None else groups
    algorithm = sized(settings, count, rng.randint(2, 4))
    cuts = settings["name"] == "tppo"
    ends = [EndReason.STOP, EndReason.LENGTH, EndReason.TRUNCATED] if cuts else [EndReason.STOP, EndReason.LENGTH]
    made = []
    for g in range(count):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5)))
        samples = []
        for i in range(algorithm.group_size):
            length = rng.randint(1, terms.longest)
            fresh = rng.randint(0, length) if cuts else 0
            samples.append(
                random_answer(rng, 10 * g + i, length=length, end=rng.choice(ends), first_fresh=fresh, terms=terms)
            )
        made.append((prompt, tuple(samples)))
    return Case(algorithm=algorithm, terms=terms, groups=tuple(made), later=later)


def _signs(*shape: int) -> Tensor:
    """+1 and -1 in turns."""
    count = 1
    for n in shape:
        count *= n
    return (1.0 - 2.0 * (torch.arange(count, dtype=torch.float64) % 2)).reshape(shape)
