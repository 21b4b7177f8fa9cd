"""A process that hosts one rollout replica with a real engine, for tests to call, to hurt and to kill.

Run by `test_engine.py`: python engine_host.py SOCKET, with the connection's key in $ENGINE_HOST_KEY. It answers
(name, arguments) with ("ok", value) or ("error", exception); faults of loading are planted in here by name.
"""

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

from rolecall.core.clock import SystemClock
from rolecall.core.config.job import parse_job
from rolecall.core.ids import NodeId
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.protocol.spawn import make_spawn
from rolecall.rl_runtime.rank_processes import FurtherRanks
from rolecall.rl_runtime.rollout.engine import VllmEngine
from rolecall.rl_runtime.rollout.multi_rank_engine import MultiRankEngine, first_place, further_rank
from rolecall.rl_runtime.rollout.rollout import RolloutReplica

Weights = Iterable[tuple[str, torch.Tensor]]
SWAPPED = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight")
NORM = "model.layers.1.input_layernorm.weight"
UNUSED_ROW = 0  # padding: neither the canary nor any prompt has it


def model_of(engine: VllmEngine) -> Any:
    return engine._llm.model_executor.driver_worker.worker.model_runner.get_model()


def skip(model: Any, load: Callable[[Weights], set[str]], tensors: Weights) -> set[str]:
    """The loader omits one tensor, and reports it."""
    return load((n, t) for n, t in tensors if n != NORM) - {NORM}


def swap(model: Any, load: Callable[[Weights], set[str]], tensors: Weights) -> set[str]:
    """The loader mistakes two layers for each other."""
    other = {SWAPPED[0]: SWAPPED[1], SWAPPED[1]: SWAPPED[0]}
    return load((other.get(n, n), t) for n, t in tensors)


def stale(model: Any, load: Callable[[Weights], set[str]], tensors: Weights) -> set[str]:
    """The loader keeps one tensor of the previous version, and reports it as loaded."""
    before = dict(model.named_parameters())[NORM].detach().clone()
    loaded = load(tensors)
    dict(model.named_parameters())[NORM].data.copy_(before)
    return loaded


PLANTED_IN_LOADING = {"skip": skip, "swap": swap, "stale": stale}


class Host:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.delay_seconds = 0.0
        clock = SystemClock()
        begun = clock.monotonic()
        if run := arguments.pop("run", ""):
            spawn = make_spawn(RunDir(Path(run)), arguments["replica"], arguments["incarnation"], NodeId("node-1"))
            body = f"{further_rank.__module__}:{further_rank.__name__}"
            ranks = FurtherRanks(spawn, parse_job({}), size=arguments["settings"].num_ranks, body=body)
            place = first_place(spawn, arguments["settings"], ranks)
            arguments |= {
                "make_engine": partial(MultiRankEngine, place=place, ranks=ranks),
                "on_promotion": ranks.become,
            }
        self.replica = RolloutReplica(on_step=lambda: clock.sleep(self.delay_seconds), **arguments)
        self.start_seconds = clock.monotonic() - begun

    def in_engine(self, what: Callable[[VllmEngine], Any]) -> Any:
        return self.replica._thread.call(what, 60.0, "do what a test asks")

    def started(self) -> tuple[int, float]:
        return os.getpid(), self.start_seconds

    def num_threads(self) -> int:
        found: int = self.in_engine(lambda engine: torch.get_num_threads())
        return found

    def slow_down(self, seconds: float) -> None:
        self.delay_seconds = seconds

    def plant_in_next_load(self, fault: str, *, blind: bool = False) -> None:
        """The fault happens once. `blind`: the check of storage against the bytes received is off, so that only
        comparison with other replicas can see it."""

        def plant(engine: VllmEngine) -> None:
            model = model_of(engine)
            true_load = model.load_weights

            def faulty(tensors: Weights) -> set[str]:
                model.load_weights = true_load
                if blind:
                    engine._llm.model_executor.driver_worker.worker._rolecall_expected.clear()
                return PLANTED_IN_LOADING[fault](model, true_load, tensors)

            model.load_weights = faulty

        self.in_engine(plant)

    def damage_storage(self, fault: str, *, blind: bool = False) -> None:
        """Changes parameters after they were loaded and proven."""

        def damage(engine: VllmEngine) -> None:
            parameters = dict(model_of(engine).named_parameters())
            if fault == "bit":
                parameters["model.layers.2.self_attn.qkv_proj.weight"].data.view(torch.int32)[3, 5] ^= 1
            else:
                parameters["model.embed_tokens.weight"].data[UNUSED_ROW] *= 5
            if blind:
                engine._llm.model_executor.driver_worker.worker._rolecall_expected.clear()

        self.in_engine(damage)

    def load_at_further_ranks_only(self, path: str) -> None:
        def load(engine: VllmEngine) -> None:
            assert isinstance(engine, MultiRankEngine)
            engine._ranks.tell("load", path)
            engine._ranks.answers(60.0)

        self.in_engine(load)

    def bytes_sent(self) -> dict[tuple[str, int, str], int]:
        return self.replica.server.bytes_sent()


def main() -> None:
    with Client(sys.argv[1], authkey=bytes.fromhex(os.environ["ENGINE_HOST_KEY"])) as connection:
        host = Host(connection.recv())
        while True:
            try:
                name, arguments, options = connection.recv()
            except EOFError:
                break
            try:
                target = getattr(host, name, None) or getattr(host.replica, name)
                connection.send(("ok", target(*arguments, **options)))
            except Exception as e:  # noqa: BLE001 deliberate: the test is to see it
                connection.send(("error", e))
    host.replica.close()


if __name__ == "__main__":
    main()
