"""In place of an inference engine and a transport of weights, behind verl's own classes. Imported by Ray's workers.

Real: RolloutReplica with `init_standalone`, its workers (CheckpointEngineWorker), LLMServerManager, the load balancer, the
client, and CheckpointEngineManager. Stand-ins: the server that generates, what sends and receives tensors, the trainer.
"""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

MODULE = "tests.integrations.real.verl_stub"
BACKEND = "stub"


def server_name(replica: int) -> str:
    return f"stub_server_{replica}"


class Server:
    """An engine that answers `tokens` tokens of its version of the weights, one each 50 ms."""

    def __init__(self, replica: int) -> None:
        self.replica, self.version, self.aborted = replica, -1, asyncio.Event()

    def address(self) -> str:
        return f"127.0.0.1:{10_000 + self.replica}"

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version

    async def generate(self, request_id: str, sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        done: list[int] = []
        while len(done) < sampling_params["max_tokens"]:
            if self.aborted.is_set():
                return self._output(done, "aborted")
            done.append(self.replica)
            await asyncio.sleep(0.05)
        return self._output(done, "completed")

    def _output(self, tokens: list[int], reason: str) -> TokenOutput:
        known = {"global_steps": self.version}
        return TokenOutput(token_ids=tokens, log_probs=[0.0] * len(tokens), stop_reason=reason, extra_fields=known)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.aborted.set()
        await asyncio.sleep(0.1)

    async def resume_generation(self) -> None:
        self.aborted.clear()

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...


class Adapter:
    """What verl's worker hands the weights to."""

    def __init__(self, replica: int) -> None:
        self.replica_rank, self.is_leader_rank = replica, True

    async def update_weights(self, weights: Any, global_steps: int, **_: Any) -> None:
        async for _weight in weights:
            pass
        await ray.get_actor(server_name(self.replica_rank)).set_version.remote(global_steps)


@CheckpointEngineRegistry.register(BACKEND)
class Engine(CheckpointEngine):
    def __init__(self, bucket_size: int, **_: Any) -> None:
        del bucket_size

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Any) -> Any:
        return {"rank": [0] * actor_wg_world_size}, {"rank": list(range(rollout_world_size))}

    def init_process_group(self, **_: Any) -> None: ...

    def finalize(self) -> None: ...

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None: ...

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Any]:
        for number in range(2):
            yield f"layer.{number}", None


class Replica(RolloutReplica):  # type: ignore[misc]
    """As verl's vLLMReplica, with the server above."""

    def get_ray_class_with_init_args(self) -> Any:
        return RayClassWithInitArgs(
            cls=ray.remote(CheckpointEngineWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            server_adapter=Adapter(self.replica_rank),
        )

    async def launch_servers(self) -> None:
        options = {"name": server_name(self.replica_rank), "max_concurrency": 100, "num_cpus": 0}
        server = ray.remote(Server).options(**options).remote(self.replica_rank)
        self.servers, self._server_handle = [server], server
        self._server_address = await server.address.remote()


class Manager(LLMServerManager):  # type: ignore[misc]
    rollout_replica_class = Replica


def config_of(num_replicas: int) -> Any:
    engine = CheckpointEngineConfig(backend=BACKEND, custom_backend_module=MODULE)
    rollout = RolloutConfig(
        name="vllm",
        nnodes=1,
        n_gpus_per_node=num_replicas,
        tensor_model_parallel_size=1,
        response_length=40,
        checkpoint_engine=engine,
    )
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout, model=SimpleNamespace()))


class Trainers:
    """The worker group that sends."""

    world_size = 1

    def execute_checkpoint_engine(self, method: Any = None, **_: Any) -> list[Any]:
        return [ray.put(None) for _one in method]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        return [ray.put({"sent": global_steps})]


class Rollouter:
    """As verl's FullyAsyncRollouter: the servers are managed in an actor, and weights are sent from elsewhere."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    async def start(self, num_replicas: int) -> None:
        from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

        self.manager = await Manager.create(config_of(num_replicas))
        self.client = self.manager.get_client(client_cls=FullyAsyncLLMServerClient)

    def get_replicas(self) -> Any:
        return self.manager.get_replicas()

    def _update_max_concurrent_samples(self) -> None:
        self.counted.append(len(self.manager.get_replicas()))

    def shown(self) -> dict[str, Any]:
        return {
            "counted": self.counted,
            "replicas": [r.replica_rank for r in self.manager.rollout_replicas],
            "addresses": self.manager.server_addresses,
            "handles": len(self.manager.server_handles),
        }
