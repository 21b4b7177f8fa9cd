"""One trained network: its parameters in a fixed order, and their AdamW optimizer.

A trainer has one for the policy and, if the algorithm has a critic, another one for that. Each has its own learning
rate, moments and gradient-norm clipping, so that a large critic gradient does not shrink the policy's step. Tensors are
exported as `weight/<name>`, `exp_avg/<name>` and `exp_avg_sq/<name>`, after the network's prefix.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
ADAM_BETAS: Final = (0.9, 0.999)


class Network:
    def __init__(self, module: Any, *, learning_rate: float, grad_norm_max: float, prefix: str = "") -> None:
        self.module, self.prefix = module, prefix
        named = sorted(module.named_parameters())  # a tied parameter appears once
        self.names: tuple[str, ...] = tuple(n for n, _ in named)
        self.parameters: tuple[torch.nn.Parameter, ...] = tuple(p for _, p in named)
        self.num_parameters = sum(p.numel() for p in self.parameters)
        self._grad_norm_max = grad_norm_max
        self._optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True
        )
        for p in self.parameters:  # created before the first step, so that the state of step 0 can be copied too
            self._optimizer.state[p] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    @property
    def optimizer_step(self) -> int:
        return int(self._optimizer.state[self.parameters[0]]["step"])

    def take_gradient(self, sums: torch.Tensor, divisor: float) -> float:
        """Divides `sums` (flat, float64), sets each parameter's gradient to its part, and clips the norm.

        Divided in float64 and rounded once, so that another order of addition rounds to the same step. Returns the norm
        before clipping; if it is not finite, the gradient must not be applied.
        """
        start = 0
        for p in self.parameters:
            part = sums[start : start + p.numel()].view_as(p)
            p.grad = (part / divisor).to(p.dtype)
            start += p.numel()
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, self._grad_norm_max))

    def drop_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Applies the gradient set by `take_gradient`."""
        self._optimizer.step()
        self.drop_gradient()

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies, under the module's parameter names."""
        return {n: p.detach().clone() for n, p in zip(self.names, self.parameters, strict=True)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights and moments without copying, under their export names."""
        for n, p in zip(self.names, self.parameters, strict=True):
            yield f"{self.prefix}{WEIGHT}/{n}", p.detach()
            for moment in MOMENTS:
                yield f"{self.prefix}{moment}/{n}", self._optimizer.state[p][moment]

    def set_optimizer_step(self, steps: int) -> None:
        for p in self.parameters:
            self._optimizer.state[p]["step"].fill_(float(steps))
