"""A small job of verl's own classes: three replicas that generate all the time, and a weight update every second.

    python -m tests.integrations.real.verl_job FOLDER driver|rollouter

It writes FOLDER/status.json after each step. While FOLDER/hold exists, no update begins; it ends with FOLDER/stop.
"""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import verl  # noqa: F401 it loads the plugin
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

from tests.integrations.real.verl_stub import Manager, Rollouter, Trainers, config_of

REPLICAS, REQUESTS, TOKENS = 3, 6, 40
PAUSE_SECONDS = 1.0
END_SECONDS = 600.0
"""It ends by itself then, whatever became of the test."""


class Requests:
    """Clients that ask without an end, in a thread. `answers`: number of tokens, and the replicas that made them."""

    def __init__(self, client: Any) -> None:
        self.client, self.answers, self.failed = client, list[tuple[int, list[int]]](), list[str]()
        threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True).start()

    async def _all(self) -> None:
        await asyncio.gather(*[self._ask(n) for n in range(REQUESTS)])

    async def _ask(self, number: int) -> None:
        for n in range(10**6):
            try:
                done = await self.client.generate(
                    request_id=f"r{number}-{n}", prompt_ids=[1, 2], sampling_params={"max_tokens": TOKENS}
                )
                self.answers.append((len(done.token_ids), sorted(set(done.token_ids))))
            except Exception as e:  # noqa: BLE001 it is told
                self.failed.append(f"{type(e).__name__}: {e}"[:200])
                await asyncio.sleep(PAUSE_SECONDS)


def main(folder: Path, where: str) -> None:
    ray.init(address="local", num_cpus=16, num_gpus=REPLICAS, include_dashboard=False, log_to_driver=False)
    config = config_of(REPLICAS)
    rollouter = None
    if where == "rollouter":
        rollouter = ray.remote(Rollouter).options(max_concurrency=100).remote()
        ray.get(rollouter.start.remote(REPLICAS))
        replicas = ray.get(rollouter.get_replicas.remote())
        client, balancer = ray.get(
            rollouter.__ray_call__.remote(lambda self: (self.client, self.manager.global_load_balancer))
        )
    else:
        manager = Manager.create(config)
        replicas, balancer = manager.get_replicas(), manager.global_load_balancer
        client = manager.get_client(client_cls=FullyAsyncLLMServerClient)
    updates = CheckpointEngineManager(config.actor_rollout_ref.rollout.checkpoint_engine, Trainers(), replicas)
    requests, step, ends_at = Requests(client), 0, time.monotonic() + END_SECONDS
    longest = 0.0
    while not (folder / "stop").exists() and time.monotonic() < ends_at:
        if not (folder / "hold").exists():
            step += 1
            began = time.monotonic()
            assert updates.update_weights(step) == {"sent": step}
            longest = max(longest, time.monotonic() - began)
        if rollouter is None:
            lists = {
                "replicas": [r.replica_rank for r in manager.rollout_replicas],
                "addresses": list(manager.server_addresses),
                "handles": len(manager.server_handles),
            }
        else:
            lists = ray.get(rollouter.shown.remote())
        status = {
            "step": step,
            "longest": longest,
            "lists": lists,
            "updated": sorted(r.replica_rank for r in updates.replicas),
            "pids": {r.replica_rank: pid_of(r.server_handle) for r in updates.replicas},
            "states": {r.replica_rank: state_of(r.server_handle) for r in updates.replicas},
            "balancer": sorted(ray.get(balancer.get_all_servers.remote())),
            "answers": requests.answers[-40:],
            "num_answers": len(requests.answers),
            "failed": requests.failed,
        }
        if not (folder / "hold").exists():
            status["versions"] = ray.get([r.server_handle.get_version.remote() for r in updates.replicas])
        written = folder / "status.new"
        written.write_text(json.dumps(status))
        os.replace(written, folder / "status.json")
        time.sleep(PAUSE_SECONDS)
    ray.shutdown()


def pid_of(actor: Any) -> int:
    return int(ray._private.state.actors(actor._actor_id.hex())["Pid"])


def state_of(actor: Any) -> str:
    return str(ray._private.state.actors(actor._actor_id.hex())["State"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
