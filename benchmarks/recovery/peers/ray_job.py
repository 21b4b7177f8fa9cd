"""A job of Ray Train on a local Ray cluster of its own: data-parallel over gloo, restarted without limit.

    python -m benchmarks.recovery.peers.ray_job NUM_WORKERS

A checkpoint is written by rank 0 every `CHECKPOINT_STEPS`; a restart begins with the newest one. All timeouts are the
defaults of Ray Train and torch. Writes `nodes.json`: id of each worker node -> PID of its raylet.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.recovery.peers.loop import PAUSE_SECONDS, Progress, loss_of, make_model
from rolecall.core.rundir import write_atomically
from rolecall.rl_runtime.faults.process_side import MICROBATCH, WEIGHTS, Injection

CHECKPOINT_STEPS = 5
SPARE_NODES = 1
STORE_BYTES = 80 << 20


def train(config: dict[str, Any]) -> None:
    """Every worker runs this; a restart runs it again in processes that are new."""
    import ray
    import torch
    from ray import train as ray_train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    run, rank = Path(config["run"]), ray_train.get_context().get_world_rank()
    injection = Injection(run, allowed=True)
    progress = Progress(run, rank, ray.get_runtime_context().get_node_id())
    plain, step = make_model(), 0
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    if checkpoint := ray_train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = prepare_model(plain)
    while True:
        optimizer.zero_grad()
        time.sleep(PAUSE_SECONDS)
        loss = loss_of(model, rank, step, injection.factor(MICROBATCH))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        progress.attempt(step, True, float(loss.detach()))
        step += 1
        if step % CHECKPOINT_STEPS:
            continue
        if rank:
            ray_train.report({"step": step})
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.save(
                {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                Path(folder) / "state.pt",
            )
            injection.checkpoint(WEIGHTS)
            ray_train.report({"step": step}, checkpoint=ray_train.Checkpoint.from_directory(folder))


def main(num_workers: int) -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    run = Path(os.environ["ROLECALL_RUN"])
    common = {"object_store_memory": STORE_BYTES, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1, wait=False, **common) for _ in range(num_workers + SPARE_NODES)]
    cluster.wait_for_nodes(timeout=180)
    raylets = {node.node_id: node.all_processes["raylet"][0].process.pid for node in nodes}
    write_atomically(run / "nodes.json", json.dumps(raylets))
    # Ray Train's helpers look for a cluster by themselves; there may be others on this machine.
    ray.init(address=cluster.address, runtime_env={"env_vars": {"RAY_ADDRESS": cluster.address}})
    trainer = TorchTrainer(
        train,
        train_loop_config={"run": str(run)},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="peers",
            storage_path=str(run / "storage"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(int(sys.argv[1]))
