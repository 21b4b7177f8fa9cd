"""A tensor-parallel engine: one engine in each rank's process, all told the same calls in the same order.

vLLM supports this as its external launcher: schedulers are deterministic, so all ranks compute the same batches, and
their workers form one tensor-parallel group. Each rank is therefore a process of ours, with its own state page, and no
engine process outlives its replica. The first rank answers.
"""

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from safetensors.torch import save as bytes_of

from rolecall.agent.reporter import reporter
from rolecall.core.clock import SystemClock
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.exchanges import UnitOfWork, share
from rolecall.rl_runtime.faults import process_side as faults
from rolecall.rl_runtime.processes import ray_dir
from rolecall.rl_runtime.protocol.spawn import ActorSpec
from rolecall.rl_runtime.rank_processes import FurtherRanks, Next, RankStart
from rolecall.rl_runtime.rollout.engine import EnginePlace, EngineSettings, NewTokens, VllmEngine, import_vllm
from rolecall.rl_runtime.rollout.worker_extension import Storage

ANSWER_SECONDS: Final = 20.0
"""Wait for a further rank to load weights or to read them back, once the first one has."""


class MultiRankEngine(VllmEngine):
    """In the process of the first rank."""

    def __init__(self, settings: EngineSettings, place: EnginePlace, ranks: FurtherRanks) -> None:
        self._ranks = ranks
        reporter.exchange()
        super().__init__(settings, place)

    def add(
        self, request_id: str, tokens: Sequence[int], *, num_new_max: int, seed: int, temperature: float | None = None
    ) -> None:
        self._ranks.tell("add", request_id, tuple(tokens), num_new_max, seed, temperature)
        super().add(request_id, tokens, num_new_max=num_new_max, seed=seed, temperature=temperature)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._ranks.tell("abort", list(request_ids))
        super().abort(request_ids)

    def step(self) -> list[NewTokens]:
        self._ranks.tell("step")
        reporter.exchange()
        return super().step()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        # In memory that the other ranks map: a pipe would carry every byte to each of them.
        with os.fdopen(os.memfd_create("rolecall-weights"), "wb") as memory:
            memory.write(bytes_of({name: t.contiguous() for name, t in tensors.items()}))
            memory.flush()
            self._ranks.tell("load", f"/proc/{os.getpid()}/fd/{memory.fileno()}")
            found = set(super().load(tensors))
            return sorted(found.union(*self._ranks.answers(ANSWER_SECONDS)))

    def sleep(self) -> None:
        self._ranks.tell("sleep")
        super().sleep()

    def wake(self) -> None:
        self._ranks.tell("wake")
        super().wake()

    def storage(self) -> list[Storage]:
        self._ranks.tell("storage")
        return [*super().storage(), *self._ranks.answers(ANSWER_SECONDS)]

    def canary(self) -> tuple[float, ...]:
        self._ranks.tell("canary")
        reporter.exchange()
        return super().canary()

    def close(self) -> None:
        self._ranks.finish()  # the process exits next; taking down a group waits for ranks that are gone


def first_place(spawn: ActorSpec, settings: EngineSettings, ranks: FurtherRanks) -> EnginePlace:
    """Of the first rank; the others begin with theirs."""
    folder = ray_dir(spawn.run.path) or Path(tempfile.gettempdir())  # removed with the run
    file = str(folder / f"engine-{os.getpid()}:{secrets.token_hex(4)}")
    ranks.tell("begin", settings, file)
    return EnginePlace(rank=0, file=file)


def further_rank(start: RankStart, next_call: Next, answer: Callable[[Any], None]) -> None:
    import_vllm()
    _, (settings, file) = next_call()
    reporter.exchange()
    engine = VllmEngine(settings, EnginePlace(rank=start.rank, file=file))
    injection, clock = start.injection(), SystemClock()
    reporter.enter_phase(Phase.IDLE)
    while True:
        name, args = next_call()
        match name:
            case "step":
                with reporter.phase(Phase.GENERATE):
                    unit = UnitOfWork(clock)
                    injection.factor(faults.ENGINE_STEP)
                    reporter.exchange()
                    num_tokens = sum(len(new.tokens) for new in engine.step())
                    unit.done(share(num_tokens, start.rank, start.size))
            case "add":
                request_id, tokens, num_new_max, seed, temperature = args
                try:
                    engine.add(request_id, tokens, num_new_max=num_new_max, seed=seed, temperature=temperature)
                except ValueError:
                    pass  # the first rank has the same, and answers
            case "load":
                answer(engine.load(load_file(*args)))
            case "storage":
                answer(*engine.storage())
            case "canary":
                reporter.exchange()
                engine.canary()
            case _:
                getattr(engine, name)(*args)
