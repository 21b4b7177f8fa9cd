"""Section `optimizer` of a job file: AdamW and the schedule of its learning rate."""

import math
from typing import Annotated, Literal

from pydantic import Field

from rolecall.core.config.section import Ratio, Section


class OptimizerConfig(Section):
    """AdamW of policy and critic. The learning rates are `algorithm.learning_rate` and `value_learning_rate`."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean gradient."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the mean squared gradient."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the mean squared gradient."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) do not decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, up to `num_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate grows linearly from 0."""
    final_share: Ratio = 0.0
    """Share of the learning rate at the end of `linear` and `cosine`."""

    def learning_rate_share(self, step: int, num_steps: int) -> float:
        """Share of the learning rate in optimizer step `step`, from 0; a function of the job alone, so that every
        replica and every resumed run has the same."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        rest = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final_share + (1 - self.final_share) * rest
