"""The course of the learning rate, and what the optimizer makes of it."""

import math

import pytest
import torch

from rolecall.core.config.job import parse_job
from rolecall.core.config.optimizer import OptimizerConfig
from rolecall.rl_runtime.trainer.state import Network


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, {0: 1.0, 99: 1.0}),
        ({"warmup_steps": 4}, {0: 0.2, 3: 0.8, 4: 1.0, 99: 1.0}),
        ({"schedule": "linear"}, {0: 1.0, 50: 0.5, 100: 0.0, 300: 0.0}),
        ({"schedule": "linear", "warmup_steps": 20, "final_share": 0.1}, {20: 1.0, 60: 0.55, 100: 0.1}),
        ({"schedule": "cosine"}, {0: 1.0, 25: (1 + math.sqrt(0.5)) / 2, 50: 0.5, 100: 0.0}),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(settings: dict[str, object], shares: dict[int, float]) -> None:
    config = parse_job({"optimizer": settings}).optimizer
    for step, share in shares.items():
        assert config.learning_rate_share(step, 100) == pytest.approx(share)


def test_only_matrices_decay_and_the_share_scales_the_step() -> None:
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.bias.fill_(1.0)
    network = Network(module, learning_rate=0.1, grad_norm_max=1.0, optimizer=OptimizerConfig(weight_decay=0.5))
    network.take_gradient(torch.zeros(8, dtype=torch.float64), 1.0)
    network.step(0.5)
    assert module.weight[0, 0].item() == pytest.approx(1 - 0.1 * 0.5 * 0.5)
    assert module.bias[0].item() == 1.0
