"""Processes of the runtime, driven over a pipe."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.rundir import RunDir

ANSWER_SECONDS = 900.0


def trainer_process(conn: Connection, run: Path, index: int, value: dict[str, Any]) -> None:
    import ray  # noqa: F401 the actor's process has it, too

    from rolecall.rl_runtime.faults import process_side as faults
    from rolecall.rl_runtime.protocol.spawn import make_spawn
    from rolecall.rl_runtime.rank_processes import FurtherRanks
    from rolecall.rl_runtime.trainer.multi_rank_trainer import MultiRankTrainer, further_rank, make_service
    from rolecall.rl_runtime.trainer.ranks import ALONE

    job = parse_job(value)
    spawn = make_spawn(RunDir(run), ReplicaId(f"trainer/{index}"), 1, NodeId("node-1"))
    injection = partial(faults.Injection, spawn.run_dir, False)
    service: Any
    if job.runtime.trainer_ranks > 1:
        body = f"{further_rank.__module__}:{further_rank.__name__}"
        ranks = FurtherRanks(spawn, job, size=job.runtime.trainer_ranks, body=body)
        service = MultiRankTrainer(spawn, job, ranks, address="127.0.0.1", injection=injection)
    else:
        service = make_service(spawn, job, address="127.0.0.1", ranks=ALONE, injection=injection)
    _serve(conn, lambda name: getattr(service, name))


def engine_process(conn: Connection, run: Path, _index: int, value: dict[str, Any]) -> None:
    import ray  # noqa: F401

    from rolecall.rl_runtime.protocol.spawn import make_spawn
    from rolecall.rl_runtime.rank_processes import FurtherRanks
    from rolecall.rl_runtime.rollout.engine import EngineSettings
    from rolecall.rl_runtime.rollout.multi_rank_engine import MultiRankEngine, first_place, further_rank
    from rolecall.rl_runtime.rollout.rollout import RolloutReplica

    job = parse_job(value)
    spawn = make_spawn(RunDir(run), ReplicaId("rollout/0"), 1, NodeId("node-1"))
    settings = EngineSettings(
        model_dir=str(spawn.run.path / "model"),
        kv_cache_bytes=job.runtime.kv_cache_bytes,
        max_model_len=job.max_tokens,
        seed=job.seed,
        dtype=job.model.dtype,
        fixed_length=True,
        num_ranks=job.runtime.rollout_ranks,
    )
    several: dict[str, Any] = {}
    if settings.num_ranks > 1:
        body = f"{further_rank.__module__}:{further_rank.__name__}"
        ranks = FurtherRanks(spawn, job, size=settings.num_ranks, body=body)
        place = first_place(spawn, settings, ranks)
        several = {"make_engine": partial(MultiRankEngine, place=place, ranks=ranks), "on_promotion": ranks.become}
    replica = RolloutReplica(
        replica=spawn.replica,
        incarnation=1,
        token=spawn.run.token(),
        settings=settings,
        transfer_seconds=ANSWER_SECONDS,
        **several,
    )
    _serve(conn, lambda name: getattr(replica, name))


def holder_process(conn: Connection, run: Path, _index: int, value: dict[str, Any]) -> None:
    """Publishes versions of the model's weights; it is not measured."""
    import torch

    from rolecall.rl_runtime.algorithms.objective import token_logprobs
    from rolecall.rl_runtime.tasks.tokenizer import vocabulary
    from rolecall.rl_runtime.trainer.model import compute_in, make_model
    from rolecall.rl_runtime.weights.digest import DTYPES, build_manifest
    from rolecall.rl_runtime.weights.port import TensorServer
    from rolecall.rl_runtime.weights.proof import CANARY

    job = parse_job(value)
    model = make_model(job.model, vocabulary(job.model, job.task.name), job.seed)
    compute_in(model, DTYPES[job.model.dtype])
    server = TensorServer(RunDir(run).token())

    def publish(version: int) -> tuple[Any, Any]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 1e-3)
            row = torch.tensor([list(CANARY)])
            logprobs, _ = token_logprobs(model(input_ids=row, use_cache=False).logits, row)
        tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
        manifest = build_manifest(version, tensors, [float(x) for x in logprobs[0, 1:]])
        server.publish(manifest, tensors)
        return manifest, server.holder(ReplicaId("trainer/0"), 1)

    _serve(conn, lambda name: {"publish": publish}[name])


def _serve(conn: Connection, method: Callable[[str], Callable[..., Any]]) -> None:
    conn.send(None)
    while True:
        try:
            name, args = conn.recv()
        except EOFError:
            os._exit(0)
        conn.send(method(name)(*args))


class Process:
    """One of them, in a process of its own."""

    def __init__(self, body: Callable[..., None], run: RunDir, index: int, job: JobConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._conn, theirs = context.Pipe()
        value = job.model_dump(mode="json")
        self.process = context.Process(target=body, args=(theirs, run.path, index, value))
        self.process.start()
        theirs.close()

    def send(self, name: str, *args: Any) -> None:
        self._conn.send((name, args))

    def answer(self) -> Any:
        if not self._conn.poll(ANSWER_SECONDS):
            raise SystemExit(f"process {self.process.pid} gave no answer within {ANSWER_SECONDS:g} s")
        return self._conn.recv()

    def ask(self, name: str, *args: Any) -> Any:
        self.send(name, *args)
        return self.answer()

    def ranks(self) -> list[int]:
        """PIDs of its ranks, in order. Those of `multiprocessing` itself are none."""
        assert self.process.pid is not None
        children = psutil.Process(self.process.pid).children()
        further = [c for c in children if "rolecall.rl_runtime.rank_processes" in " ".join(c.cmdline())]
        return [self.process.pid, *(c.pid for c in sorted(further, key=lambda c: c.create_time()))]

    def close(self) -> None:
        self._conn.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


@contextmanager
def running(body: Callable[..., None], run: RunDir, job: JobConfig, number: int) -> Iterator[list[Process]]:
    found = [Process(body, run, index, job) for index in range(number)]
    try:
        yield found
    finally:
        for process in found:
            process.close()
