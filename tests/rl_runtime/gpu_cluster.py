"""A Ray cluster whose nodes say that they have GPUs, as a script: `python gpu_cluster.py FOLDER`.

Prints which GPUs each rank saw, as JSON: {"trainer/0#1 rank 0": "4,5", ...}. Ray counts GPUs and never opens one.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall.core.clock import SystemClock
from rolecall.core.config.job import parse_job
from rolecall.core.ids import NodeId, ReplicaId, process_start_ticks
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.cluster.actor_operations import ActorProcess, RayActorOperations
from rolecall.rl_runtime.cluster.local_cluster import Cluster
from rolecall.rl_runtime.processes import RunProcess, kill_process, rank_name, stop_run, wait_gone
from rolecall.rl_runtime.protocol.spawn import ActorSpec, actor_name, make_spawn
from rolecall.rl_runtime.rank_processes import FurtherRanks, Next, RankStart

GPUS = {NodeId("node-0"): (), NodeId("node-1"): ("4", "5", "6", "7"), NodeId("node-2"): ("2", "GPU-a")}
JOB = {"runtime": {"nodes": 3, "trainer_ranks": 2, "rollout_ranks": 2}}
SECONDS = 60.0


def seen(spawn: ActorSpec, rank: int) -> tuple[str, str]:
    return rank_name(spawn.replica, spawn.incarnation, rank), os.environ.get("CUDA_VISIBLE_DEVICES", "unset")


def further_rank(start: RankStart, next_call: Next, answer: Callable[[Any], None]) -> None:
    answer(seen(start.spawn, start.rank))
    next_call()


class Visible:
    """An actor that computes nothing; one of a role that computes has a second rank."""

    def __init__(self, spawn: ActorSpec, job: dict[str, Any]) -> None:
        found = [seen(spawn, 0)]
        if spawn.device == "cuda":
            body = "tests.rl_runtime.gpu_cluster:further_rank"
            self._ranks = FurtherRanks(spawn, parse_job(job), size=2, body=body)
            found += self._ranks.answers(SECONDS)
        with (Path(spawn.run_dir) / "seen").open("a") as f:
            f.writelines(json.dumps(pair) + "\n" for pair in found)

    def ready(self) -> tuple[int, int]:
        return os.getpid(), process_start_ticks(os.getpid()) or 0


def main(root: str) -> None:
    clock = SystemClock()
    run = create_run_dir(Path(root), "r")
    cluster = Cluster(run, list(GPUS), clock, GPUS)
    roles = ("trainer", "rollout", "reward")
    actors = RayActorOperations(parse_job(JOB), lambda: dict.fromkeys(roles, Visible))
    try:
        cluster.start()
        cluster.connect()
        replaced = start(actors, run, "trainer/0", 1, "node-1")
        start(actors, run, "trainer/1", 1, "node-1")
        start(actors, run, "rollout/0", 1, "node-2")
        start(actors, run, "reward/0", 1, "node-0")
        start(actors, run, "reward/1", 1, "node-1")
        kill_process(replaced.pid, replaced.start_ticks, signal.SIGKILL)
        gone = RunProcess(pid=replaced.pid, start_ticks=replaced.start_ticks, name="trainer/0")
        assert not wait_gone([gone], SECONDS, clock)
        actors.forget(actor_name(run.run_id, "trainer/0", 1))
        start(actors, run, "trainer/0", 2, "node-1")
    finally:
        cluster.stop()
        stop_run(run.path)
    print(json.dumps(dict(map(json.loads, (run.path / "seen").read_text().splitlines()))))


def start(actors: RayActorOperations, run: RunDir, replica: str, incarnation: int, node: str) -> ActorProcess:
    device = "cpu" if replica.startswith("reward") else "cuda"
    spawn = make_spawn(run, ReplicaId(replica), incarnation, NodeId(node), device=device)
    return actors.start(spawn, SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
