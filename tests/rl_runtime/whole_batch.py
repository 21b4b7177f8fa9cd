"""A step computed once, in float64, of the whole batch: no padding, no microbatches, no replicas, no divisors.

Each answer goes through the model alone. What its tokens are worth, and what every token's loss gives back, is asked of
the equations (`reference_math.py`); autograd only carries that to the weights. Clip and AdamW are written out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall.core.config.job import JobConfig
from rolecall.rl_runtime.protocol.messages import PromptGroup, TrainingSample
from rolecall.rl_runtime.tasks.task import make_task
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.model import make_model
from rolecall.rl_runtime.trainer.state import CRITIC, Network, TrainerState
from tests.rl_runtime.objective_rig import method_of
from tests.rl_runtime.reference_math import Answer, Step, step

CLIP_EPS, ADAM_EPS = 1e-6, 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """By parameter, the critic's names behind `critic/`."""

    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]  # after the step
    losses: Step


@dataclass(slots=True, kw_only=True)
class _Row:
    sample: TrainingSample
    logprobs: Tensor
    entropies: Tensor
    values: Tensor  # one more than tokens


def whole_step(job: JobConfig, state: TrainerState, groups: Sequence[PromptGroup]) -> Whole:
    """The step that `state` (float64; not changed) must make of `groups`."""
    vocab = vocabulary(job.model, job.task.name)
    reference = make_model(job.model, vocab, job.seed).double() if job.algorithm.kl_coefficient > 0 else None
    rows, answers = [], []
    for group in groups:
        found = [_row(state, group, s) for s in group.samples]
        rows += found
        answers.append([_answer(job, state, reference, group, r) for r in found])
    method = method_of(job.algorithm, make_task(job.task, vocab, job.seed).max_response_tokens)
    losses = step(answers, method)
    policy = sum(
        _dot(r.logprobs, a) + _dot(r.entropies, b)
        for r, a, b in zip(rows, losses.by_logprob, losses.by_entropy, strict=True)
    )
    assert isinstance(policy, Tensor)
    gradients, weights = _moved(state.policy, policy, job.algorithm.grad_norm_max, job.algorithm.learning_rate)
    if state.critic is not None:
        value = sum(_dot(r.values, v) for r, v in zip(rows, losses.by_value, strict=True))
        assert isinstance(value, Tensor)
        more = _moved(state.critic, value, job.algorithm.grad_norm_max, job.algorithm.value_learning_rate)
        gradients |= {f"{CRITIC}{n}": g for n, g in more[0].items()}
        weights |= {f"{CRITIC}{n}": w for n, w in more[1].items()}
    return Whole(gradients=gradients, weights=weights, losses=losses)


def _dot(tokens: Tensor, derivatives: Sequence[float]) -> Tensor:
    return (tokens * torch.tensor(derivatives, dtype=torch.float64)).sum()


def _row(state: TrainerState, group: PromptGroup, sample: TrainingSample) -> _Row:
    """The models' outputs for one answer, token by token."""
    tokens = (*group.prompt_tokens, *sample.tokens)
    start = len(group.prompt_tokens)
    logprobs, entropies = _logprobs(state.policy.module, tokens, start)
    values = torch.zeros(len(sample.tokens) + 1, dtype=torch.float64)
    if state.critic is not None:
        values = state.critic.module(torch.tensor([tokens]))[0, start - 1 :]
    return _Row(sample=sample, logprobs=logprobs, entropies=entropies, values=values)


def _logprobs(model: Any, tokens: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    logprobs_sv = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0, start - 1 : -1], dim=-1)
    picked = logprobs_sv[torch.arange(len(logprobs_sv)), torch.tensor(tokens[start:])]
    return picked, -(logprobs_sv.exp() * logprobs_sv).sum(-1)


def _answer(job: JobConfig, state: TrainerState, reference: Any, group: PromptGroup, row: _Row) -> Answer:
    s, version = row.sample, state.commit.policy_version
    frozen: list[float] = []
    if reference is not None:
        frozen = _logprobs(reference, (*group.prompt_tokens, *s.tokens), len(group.prompt_tokens))[0].tolist()
    return Answer(
        logprobs=row.logprobs.tolist(),
        sampler_logprobs=s.logprobs,
        trained=[t >= s.first_fresh and version - v <= job.runtime.staleness_max for t, v in enumerate(s.versions)],
        reward=s.reward,
        cut=not s.is_over,
        values=row.values.tolist(),
        entropies=row.entropies.tolist(),
        reference_logprobs=frozen,
    )


def _moved(
    network: Network, loss: Tensor, norm_max: float, learning_rate: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients before the clip, and the weights behind AdamW's step."""
    found: Any = torch.autograd.grad(loss, network.parameters, retain_graph=True)
    norm = math.sqrt(sum(float((g * g).sum()) for g in found))
    scale = min(1.0, norm_max / (norm + CLIP_EPS))
    exported = dict(network.tensors())
    n, b1, b2 = network.optimizer_step + 1, 0.9, 0.999
    weights = {}
    for name, g in zip(network.names, found, strict=True):
        at = {kind: exported[f"{network.prefix}{kind}/{name}"] for kind in ("weight", "exp_avg", "exp_avg_sq")}
        m = (b1 * at["exp_avg"] + (1 - b1) * scale * g) / (1 - b1**n)
        v = (b2 * at["exp_avg_sq"] + (1 - b2) * (scale * g) ** 2) / (1 - b2**n)
        weights[name] = at["weight"] - learning_rate * m / (v.sqrt() + ADAM_EPS)
    return dict(zip(network.names, found, strict=True)), weights
