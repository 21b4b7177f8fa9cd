"""A job of DeepSpeed that knows nothing of rolecall: python deepspeed_job.py STAGE ACCUMULATION STEPS

It prints its last loss, and what the state page of the process shows if there is one.
"""

import sys
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch

stage, accumulation, steps = map(int, sys.argv[1:])
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
groups = [
    {"params": [p for name, p in model.named_parameters() if name.endswith(kind)], "weight_decay": decay}
    for kind, decay in (("weight", 0.1), ("bias", 0.0))
]
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(groups, lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    },
)
for _ in range(steps * accumulation):
    loss = engine(torch.ones(4, 16, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
reporter: Any = sys.modules.get("rolecall.agent.reporter.reporter")
page = reporter._page if reporter else None
print("loss", float(loss))
print("page", *((page.q[reporter.at.W_STEP], page.q[reporter.at.W_PROGRESS], page.phase) if page else ()))
