"""Temperature, top-k and top-p against a plain reading of their definitions."""

import math
from typing import Any

import pytest
import torch

from rolecall.core.config.data import SamplingConfig
from rolecall.rl_runtime.algorithms.objective import token_logprobs
from rolecall.rl_runtime.algorithms.sampled_distribution import comparable, sampled_logits


def distribution(logits: list[float], *, temperature: float, top_k: int, top_p: float) -> list[float]:
    scaled = [x / temperature for x in logits]
    kept = set(range(len(scaled)))
    if 0 < top_k < len(scaled):
        least = sorted(scaled, reverse=True)[top_k - 1]
        kept = {i for i in kept if scaled[i] >= least}
    total = sum(math.exp(scaled[i]) for i in kept)
    probability = {i: math.exp(scaled[i]) / total for i in kept}
    chosen, before = set(), 0.0
    for i in sorted(kept, key=lambda i: -probability[i]):
        if before < top_p or not chosen:
            chosen.add(i)
        before += probability[i]
    rest = sum(probability[i] for i in chosen)
    return [probability[i] / rest if i in chosen else 0.0 for i in range(len(scaled))]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": t, "top_k": k, "top_p": p} for t in (0.7, 1.0, 1.6) for k in (0, 1, 3, 50) for p in (0.3, 0.9, 1.0)
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_distribution_is_the_defined_one(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(1, 4, 9, generator=generator, dtype=torch.float64)
    for t in range(3):
        wanted = distribution(logits[0, t].tolist(), **settings)
        for token in [i for i, p in enumerate(wanted) if p > 0]:
            tokens = torch.zeros(1, 4, dtype=torch.int64)
            tokens[0, t + 1] = token
            logprobs, _ = token_logprobs(sampled_logits(logits, tokens, SamplingConfig(**settings)), tokens)
            assert logprobs[0, t + 1].exp().item() == pytest.approx(wanted[token], rel=1e-6)


def test_a_token_of_other_weights_has_a_finite_log_probability_and_gradient() -> None:
    logits = torch.tensor([[[5.0, 0.0, -4.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    tokens = torch.tensor([[0, 2]])
    logprobs, entropy = token_logprobs(sampled_logits(logits, tokens, SamplingConfig(top_k=1)), tokens)
    assert logprobs[0, 1].item() == pytest.approx(-4 - math.log(math.exp(5) + math.exp(-4)), rel=1e-5)
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_without_settings_nothing_is_changed() -> None:
    logits = torch.randn(2, 3, 5)
    assert sampled_logits(logits, torch.zeros(2, 3, dtype=torch.int64), SamplingConfig()) is logits


def test_tokens_at_an_edge_that_rounding_may_move_are_not_compared() -> None:
    # Probabilities 0.5, 0.3, 0.2: top-p 0.8 is an edge to the last digit, 0.7 is none.
    logits = torch.tensor([[[0.5, 0.3, 0.2]] * 2]).log()
    found = {p: comparable(logits, SamplingConfig(top_p=p)).tolist() for p in (0.7, 0.8, 0.8005, 0.9)}
    assert found == {0.7: [[True, True]], 0.8: [[True, False]], 0.8005: [[True, False]], 0.9: [[True, True]]}
    tied = torch.tensor([[[2.0, 1.0, 1.0, 0.0]] * 2])
    assert [comparable(tied, SamplingConfig(top_k=k)).tolist()[0][1] for k in (1, 2, 3, 4)] == [True, False, True, True]
    assert comparable(tied, SamplingConfig()).all()


def test_bfloat16_logits_are_scaled_in_float32_and_have_wider_edges() -> None:
    exact = torch.tensor([[[9.3, 8.1, 2.7], [0.0, 0.0, 0.0]]])
    logits, tokens = exact.bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
    found = sampled_logits(logits, tokens, SamplingConfig(temperature=0.7))
    assert torch.equal(found, logits.float() / 0.7) and not torch.equal(found, (logits / 0.7).float())
    near = 1 / (1 + math.exp(float(logits[0, 0, 1] - logits[0, 0, 0]))) + 0.01  # the first token's share, nearly
    settings = SamplingConfig(top_p=near)
    assert [comparable(x, settings)[0, 1].item() for x in (logits.float(), logits)] == [True, False]
    settings = SamplingConfig(top_k=1)
    apart = torch.tensor([[[8.125, 8.0, 2.0], [0.0, 0.0, 0.0]]])
    assert [comparable(x, settings)[0, 1].item() for x in (apart, apart.bfloat16())] == [True, False]
