"""Actors of Ray that train a policy and a critic, two ranks each; they learn their rank in `__init__`, as OpenRLHF's do.

It knows nothing of rolecall. Class names are OpenRLHF's.
"""

import os
import time
from typing import Any

import ray
import torch

STEPS = 4000


class DistributedActor:
    def __init__(self, rank: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.model = torch.nn.Linear(64, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def fit(self) -> None:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(self.model)
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            time.sleep(0.1)
            self.optimizer.step()


@ray.remote(num_cpus=0)
class PolicyModelActor(DistributedActor):
    pass


@ray.remote(num_cpus=0)
class CriticModelActor(DistributedActor):
    pass


@ray.remote(num_cpus=0)
class RolloutRayActor:
    def generate(self) -> None:
        time.sleep(STEPS)


def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False)
    actors: list[Any] = [
        group.remote(rank, port)
        for group, port in ((PolicyModelActor, 29601), (CriticModelActor, 29602))
        for rank in (0, 1)
    ]
    engine: Any = RolloutRayActor.remote()
    ray.get([*(a.fit.remote() for a in actors), engine.generate.remote()])


if __name__ == "__main__":
    main()
