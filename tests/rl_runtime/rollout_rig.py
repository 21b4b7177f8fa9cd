"""A rollout replica around a scripted engine, and the trainer's weight port that it pulls from."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rolecall.core.ids import GroupId
from rolecall.rl_runtime.protocol.messages import GenerationRequest, Holder, Manifest, TokenChunk
from rolecall.rl_runtime.rollout.engine import EngineSettings, NewTokens
from rolecall.rl_runtime.rollout.rollout import RolloutReplica
from rolecall.rl_runtime.rollout.worker_extension import Storage
from rolecall.rl_runtime.weights.digest import build_manifest, entries_digest, entries_of, tensor_digest
from rolecall.rl_runtime.weights.port import TensorServer
from tests.rl_runtime.weight_port import ROLLOUT, TOKEN, TRAINER
from tests.support import PATIENCE_SECONDS, eventually

END = 2


def request(request_id: str = "g.0", num: int = 5, **changes: object) -> GenerationRequest:
    made = GenerationRequest(
        request_id=request_id, group_id=GroupId("g"), prompt_tokens=(1, 3, 4), max_response_tokens=num, seed=11
    )
    return replace(made, **changes)  # type: ignore[arg-type]


class ScriptedEngine:
    """Counts: each token is 3 + its place; the log-probability is minus the first weight. Ends at END after
    `num_max`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.end_tokens = (END,)
        self.going: dict[str, list[int]] = {}
        self.steps_left = math.inf  # steps that make tokens; then it continues stepping, and makes none
        self.storage_tensors: dict[str, torch.Tensor] = {"w": torch.zeros(1)}
        self.claimed: dict[str, str] = {}
        self.loads = 0
        self.tamper: Callable[[dict[str, torch.Tensor]], None] = lambda stored: None
        self.hold, self.hangs = threading.Event(), threading.Event()
        self.hold.set()
        self.fail: Exception | None = None
        self.seeds: dict[str, int] = {}
        self.sleeps = 0

    @property
    def num_in_flight(self) -> int:
        return len(self.going)

    def add(
        self, request_id: str, tokens: Sequence[int], *, num_new_max: int, seed: int, temperature: float | None = None
    ) -> None:
        self.going[request_id] = [0, num_new_max]
        self.seeds[request_id] = seed

    def abort(self, request_ids: Sequence[str]) -> None:
        for r in request_ids:
            self.going.pop(r, None)

    def step(self) -> list[NewTokens]:
        if not self.hold.is_set():
            self.hangs.set()
        assert self.hold.wait(PATIENCE_SECONDS)
        if self.fail is not None:
            raise self.fail
        time.sleep(0.001)  # what a step takes: other threads would starve beside one that never waits
        if self.steps_left <= 0:
            return []
        self.steps_left -= 1
        made = []
        for r, state in list(self.going.items()):
            state[0] += 1
            finished = state[0] >= state[1]
            if finished:
                del self.going[r]
            logprob = -float(self.storage_tensors["w"][0])
            made.append(
                NewTokens(
                    request_id=r, tokens=(3 + state[0] % 8,), logprobs=(logprob,), finish_reason="length" * finished
                )
            )
        return made

    def sleep(self) -> None:
        self.sleeps += 1
        self.storage_tensors = {n: torch.full_like(t, 99.0) for n, t in self.storage_tensors.items()}

    def wake(self) -> None:
        self.sleeps -= 1

    def load(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        self.loads += 1
        self.claimed = {n: tensor_digest(t) for n, t in tensors.items()}
        stored = {n: t.clone() for n, t in tensors.items()}
        self.tamper(stored)
        self.storage_tensors.update(stored)
        return sorted(set(tensors) - set(stored))

    def storage(self) -> list[Storage]:
        entries = entries_of(self.storage_tensors)
        return [
            Storage(
                digest=entries_digest(entries),
                layout="l",
                digests=[(e.name, e.digest) for e in entries],
                uncovered=[],
                wrong=[e.name for e in entries if self.claimed.get(e.name, e.digest) != e.digest],
            )
        ]

    def canary(self) -> tuple[float, ...]:
        return canary_of(self.storage_tensors)

    def close(self) -> None:
        pass


def canary_of(tensors: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
    return (-float(tensors["w"][0]), -float(tensors["v"].sum()))


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([1.0 + version, 7.0]), "v": torch.full((3,), 0.5 * version)}


class Rig:
    """A replica with its scripted engine, and a trainer's weight port."""

    def __init__(self, tmp_path: Path, **options: object) -> None:
        (tmp_path / "config.json").write_text('{"vocab_size": 16}')
        self.engine: ScriptedEngine | None = None
        self.failures: list[BaseException] = []

        def make(settings: EngineSettings) -> ScriptedEngine:
            self.engine = ScriptedEngine(settings)
            return self.engine

        arguments: dict[str, object] = {
            "replica": ROLLOUT,
            "incarnation": 1,
            "token": TOKEN,
            "settings": EngineSettings(model_dir=str(tmp_path), max_model_len=64),
            "transfer_seconds": PATIENCE_SECONDS,
            "make_engine": make,
            "on_failure": self.failures.append,
            **options,
        }
        self.replica = RolloutReplica(**arguments)  # type: ignore[arg-type]
        self.trainer = TensorServer(TOKEN)

    def publish(self, version: int) -> Manifest:
        manifest = build_manifest(version, weights(version), canary_of(weights(version)))
        self.trainer.publish(manifest, weights(version))
        return manifest

    @property
    def holder(self) -> Holder:
        return self.trainer.holder(TRAINER, 1)

    def serve(self, version: int = 0) -> Manifest:
        manifest = self.publish(version)
        self.replica.update_weights(1, 1, manifest, [self.holder])
        return manifest

    def submit(self, *requests: GenerationRequest) -> None:
        self.replica.submit(1, requests)

    def in_flight(self, made: GenerationRequest, *, num_tokens: int = 1) -> None:
        """Submits it; the engine makes so many tokens and no more until `go_on`, however slow the test is."""
        self.scripted.steps_left = num_tokens
        self.submit(made)
        eventually(lambda: len(self.kept(made.request_id)) == num_tokens, f"{num_tokens} tokens")

    def go_on(self) -> None:
        self.scripted.steps_left = math.inf

    def hang(self) -> None:
        """The engine hangs in the midst of a step. Something must be in flight."""
        self.scripted.hold.clear()
        eventually(self.scripted.hangs.is_set, "the engine to hang")

    def kept(self, request_id: str) -> tuple[int, ...]:
        chunk = self.chunk(request_id)
        return chunk.tokens if chunk is not None else ()

    def chunk(self, request_id: str, offset: int = 0) -> TokenChunk | None:
        pulled = self.replica.tokens_since(1, {request_id: offset})
        return pulled.chunks[0] if pulled.chunks else None

    def finished(self, request_id: str) -> TokenChunk:
        def done() -> bool:
            chunk = self.chunk(request_id)
            return chunk is not None and chunk.finished

        eventually(done, f"{request_id} is finished")
        chunk = self.chunk(request_id)
        assert chunk is not None
        return chunk

    @property
    def scripted(self) -> ScriptedEngine:
        assert self.engine is not None
        return self.engine
