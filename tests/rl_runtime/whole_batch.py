"""A step computed once, in float64, of the whole batch: no padding, no microbatches, no replicas, no divisors.

Each answer goes through the model alone. What its tokens are worth, and what every token's loss gives back, is asked of
the equations (`reference_math.py`); autograd only carries that to the weights. Clip and AdamW are written out.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall.core.config.job import JobConfig
from rolecall.core.ids import replica_id
from rolecall.rl_runtime.protocol.messages import PromptGroup, TrainingSample
from rolecall.rl_runtime.tasks.task import make_task
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.model import make_model
from rolecall.rl_runtime.trainer.state import CRITIC, Network, TrainerState, first_state
from tests.rl_runtime.objective_rig import method_of
from tests.rl_runtime.reference_math import Answer, Step, step

CLIP_EPS, ADAM_EPS = 1e-6, 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """By parameter, the critic's names behind `critic/`."""

    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]  # after the step
    losses: Step
    state: Mapping[str, Tensor]  # weights and moments after the step, under their export names


@dataclass(slots=True, kw_only=True)
class _Row:
    sample: TrainingSample
    logprobs: Tensor
    entropies: Tensor
    values: Tensor  # one more than tokens


def whole_updates(job: JobConfig, state: TrainerState, parts: Sequence[Sequence[PromptGroup]]) -> list[Whole]:
    """The updates that `state` (float64; moved) must make, one after the other, in one step of all `parts`."""
    vocab = vocabulary(job.model, job.task.name)
    before = first_state(job, vocab, replica=replica_id("trainer", 0), dtype=torch.float64)
    before.load(*state.export())
    found = []
    for groups in parts:
        found.append(whole_step(job, state, groups, before))
        meta = json.loads(state.export()[1])
        state.load(dict(found[-1].state), json.dumps({**meta, "optimizer_step": meta["optimizer_step"] + 1}))
    return found


def whole_step(
    job: JobConfig, state: TrainerState, groups: Sequence[PromptGroup], before: TrainerState | None = None
) -> Whole:
    """The step that `state` (float64; not changed) must make of `groups`. `before`: the step's, if it has several
    updates and this is one of them.
    """
    vocab = vocabulary(job.model, job.task.name)
    reference = make_model(job.model, vocab, job.seed).double() if job.algorithm.kl_coefficient > 0 else None
    rows, answers = [], []
    for group in groups:
        found = [_row(state, group, s) for s in group.samples]
        olds = [_row(before, group, s) if before is not None else None for s in group.samples]
        rows += found
        answers.append([_answer(job, state, reference, group, r, o) for r, o in zip(found, olds, strict=True)])
    method = method_of(job.algorithm, make_task(job.task, vocab, job.seed).max_response_tokens)
    losses = step(answers, method)
    policy = sum(
        _dot(r.logprobs, a) + _dot(r.entropies, b)
        for r, a, b in zip(rows, losses.by_logprob, losses.by_entropy, strict=True)
    )
    assert isinstance(policy, Tensor)
    moved = [_moved(state.policy, policy, job.algorithm.grad_norm_max, job.algorithm.learning_rate)]
    if state.critic is not None:
        value = sum(_dot(r.values, v) for r, v in zip(rows, losses.by_value, strict=True))
        assert isinstance(value, Tensor)
        moved.append(_moved(state.critic, value, job.algorithm.grad_norm_max, job.algorithm.value_learning_rate))
    gradients = {n: g for found, _ in moved for n, g in found.items()}
    after = {n: t for _, found in moved for n, t in found.items()}
    weights = {n.replace("weight/", "", 1): t for n, t in after.items() if n.removeprefix(CRITIC).startswith("weight/")}
    return Whole(gradients=gradients, weights=weights, losses=losses, state=after)


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


def _answer(
    job: JobConfig, state: TrainerState, reference: Any, group: PromptGroup, row: _Row, old: _Row | None
) -> Answer:
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
        old_logprobs=old.logprobs.tolist() if old is not None else (),
        old_values=old.values.tolist() if old is not None else (),
    )


def _moved(
    network: Network, loss: Tensor, norm_max: float, learning_rate: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients before the clip, by name behind the network's prefix; weights and moments behind AdamW's step, under
    their export names.
    """
    found: Any = torch.autograd.grad(loss, network.parameters, retain_graph=True)
    norm = math.sqrt(sum(float((g * g).sum()) for g in found))
    scale = min(1.0, norm_max / (norm + CLIP_EPS))
    exported = dict(network.tensors())
    n, b1, b2 = network.optimizer_step + 1, 0.9, 0.999
    after = {}
    for name, g in zip(network.names, found, strict=True):
        weight, mean, square = (f"{network.prefix}{kind}/{name}" for kind in ("weight", "exp_avg", "exp_avg_sq"))
        after[mean] = b1 * exported[mean] + (1 - b1) * scale * g
        after[square] = b2 * exported[square] + (1 - b2) * (scale * g) ** 2
        m, v = after[mean] / (1 - b1**n), after[square] / (1 - b2**n)
        after[weight] = exported[weight] - learning_rate * m / (v.sqrt() + ADAM_EPS)
    return {f"{network.prefix}{name}": g for name, g in zip(network.names, found, strict=True)}, after
