"""A job of Ray Train that rolecall can watch: python examples/ray_train/train.py [--steps N]

Two workers train a small model on the CPU. If one is lost, Ray Train starts both again, from the first step.
"""

import argparse
import time
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from rolecall.integrations.ray_train import RolecallCallback, reported

REPORT_STEPS = 50


def train_func(config: dict[str, Any]) -> None:
    model = prepare_model(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for n in range(config["steps"]):
        optimizer.zero_grad()
        loss = model(torch.randn(256, 64)).square().mean()
        time.sleep(0.05)  # a longer computation
        loss.backward()  # averages the gradients of all ranks
        optimizer.step()
        time.sleep(0.05)  # loads the next batch
        if n % REPORT_STEPS == 0:
            ray.train.report({"loss": loss.item()})


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=6000)
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        reported(train_func),
        train_loop_config={"steps": options.parse_args().steps},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(callbacks=[RolecallCallback()], failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
