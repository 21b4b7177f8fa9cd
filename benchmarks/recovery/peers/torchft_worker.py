"""A replica group of one rank: torchft's manager and its data-parallel wrapper over gloo, started by torchrun.

All timeouts are torchft's own defaults. The lighthouse is in TORCHFT_LIGHTHOUSE; `RANK_OF_GROUP` is the group's number.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.recovery.peers.loop import PAUSE_SECONDS, Progress, loss_of, make_model
from rolecall.rl_runtime.faults.process_side import MICROBATCH, WEIGHTS, Injection


def main() -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    run, group = Path(os.environ["ROLECALL_RUN"]), int(os.environ["RANK_OF_GROUP"])
    injection, of_weights = Injection(run, allowed=True), Injection(run, allowed=True)
    progress = Progress(run, group)
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)

    def state_dict() -> dict[str, Any]:
        of_weights.checkpoint(WEIGHTS)
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        replica_id=f"trainer_{group}_",
        hostname="127.0.0.1",
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, plain)
    while True:
        optimizer.zero_grad()
        time.sleep(PAUSE_SECONDS)
        step = manager.current_step()
        loss = loss_of(wrapped, group, step, injection.factor(MICROBATCH))
        loss.backward()  # type: ignore[no-untyped-call]
        step = manager.current_step()
        optimizer.step()
        progress.attempt(step, manager.current_step() > step, float(loss.detach()))


if __name__ == "__main__":
    main()
