"""Is the estimate of memory (`rl_runtime/memory_estimate.py`) right? Estimate against measured peak, for each rank.

    python benchmarks/memory.py                   all cases; idle machine, about half an hour
    python benchmarks/memory.py --only "2 ranks"  cases with this in their name
    python benchmarks/memory.py --report-only     the report again, with the estimate as it is now

Each measurement is a line of `results/memory.jsonl` as soon as it is over.

A trainer case starts the processes of one or two trainers as their actors do, and makes five steps whose samples all
have the longest length, the last one beside the copy for a checkpoint, which is then written. An engine case starts
an engine, gives it three versions of the weights and lets it generate meanwhile. The case of a run is a whole
`rolecall run`; its reward workers, controller and standby are measured, too.

Measured is the largest RssAnon + RssShmem of /proc/PID/status, read every few milliseconds: the memory that only this
process has. VmHWM would count file pages, too: of libraries, which all processes share, and of a model folder while it
is read, which the kernel gives back when memory is short.

The constants were chosen by the cases marked `tuned`; the others check them.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import psutil

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.payloads import ChainHead
from rolecall.core.journal.store import GENESIS
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.memory_estimate import ModelSize, built_in_size, folder_size, needs
from rolecall.rl_runtime.model_folder import read_config, weight_shapes

ERROR_MAX = 0.15
"""The bar: relative error of the estimate."""
SAMPLE_SECONDS = 0.005
ANSWER_SECONDS = 900.0
NUM_STEPS = 5
"""The third is the first with all versions that a trainer keeps; two more show that nothing grows."""
NUM_VERSIONS = 3
NUM_REQUESTS = 32
LEDGER = ChainHead(position=0, hash=GENESIS)
MIB = 1 << 20
TASK: Mapping[str, Any] = {"num_digits": 24}  # 54 tokens of prompt and answer
ALGORITHM: Mapping[str, Any] = {"group_size": 4, "groups_per_microbatch": 1, "microbatches_per_step": 2}


def built_in(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads // 2,
        "head_dim": 64,
    }


M11, M25, M51 = built_in(384, 1024, 6, 6), built_in(512, 1536, 8, 8), built_in(640, 2048, 10, 10)
LLAMAS: Mapping[str, Mapping[str, Any]] = {
    "llama-20m": {"vocab_size": 16_000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4},
    "llama-58m": {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8},
    "llama-118m": {"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10},
}
"""Random folders of this architecture, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`settings`: of the job file, by section. `tuned`: constants were chosen by it."""

    name: str
    kind: str  # trainer, engine or run
    model: str | Mapping[str, Any]  # name of a folder, or section `model`
    tuned: bool = False
    trainers: int = 1
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def job(self, folders: Path, seed: int) -> JobConfig:
        model = {"path": str(folders / self.model)} if isinstance(self.model, str) else dict(self.model)
        value: dict[str, Any] = {
            "seed": seed,
            "model": model,
            "task": {**TASK},
            "algorithm": {"name": "grpo", **ALGORITHM},
            "roles": {"trainer": self.trainers, "rollout": 1, "reward": 1},
            "runtime": {"nodes": 1 + self.trainers + 2, "standbys": 1, "group_timeout_seconds": 600},
        }
        for section, changes in self.settings.items():
            value[section] = {**value.get(section, {}), **changes}
        return parse_job(value)


KL, PPO = {"algorithm": {"kl_coefficient": 0.01}}, {"algorithm": {"name": "ppo"}}
BF16, TWO, TP2 = {"model": {"dtype": "bfloat16"}}, {"runtime": {"trainer_ranks": 2}}, {"runtime": {"rollout_ranks": 2}}
LORA: dict[str, Any] = {"lora": {"rank": 8}}
CASES = (
    Case(name="grpo, 11 M", kind="trainer", model=M11, tuned=True),
    Case(name="grpo, 25 M", kind="trainer", model=M25),
    Case(name="grpo, 51 M", kind="trainer", model=M51, tuned=True),
    Case(name="grpo, folder of 58 M", kind="trainer", model="llama-58m"),
    Case(
        name="1728 tokens a pass, 11 M",
        kind="trainer",
        model=M11,
        settings={"algorithm": {"groups_per_microbatch": 8}},
    ),
    Case(name="grpo with reference, folder of 20 M", kind="trainer", model="llama-20m", tuned=True, settings=KL),
    Case(name="grpo with reference, 25 M", kind="trainer", model=M25, settings=KL),
    Case(name="ppo, 25 M", kind="trainer", model=M25, tuned=True, settings=PPO),
    Case(name="ppo, folder of 20 M", kind="trainer", model="llama-20m", settings=PPO),
    Case(name="bfloat16, folder of 20 M", kind="trainer", model="llama-20m", tuned=True, settings=BF16),
    Case(name="bfloat16, folder of 58 M", kind="trainer", model="llama-58m", settings=BF16),
    Case(name="LoRA, folder of 58 M", kind="trainer", model="llama-58m", tuned=True, settings=LORA),
    Case(name="LoRA and bfloat16, folder of 118 M", kind="trainer", model="llama-118m", settings={**LORA, **BF16}),
    Case(
        name="top-p, folder of 20 M",
        kind="trainer",
        model="llama-20m",
        tuned=True,
        settings={"sampling": {"top_p": 0.9}, "algorithm": {"groups_per_microbatch": 2}},
    ),
    Case(
        name="two updates, folder of 20 M",
        kind="trainer",
        model="llama-20m",
        settings={"algorithm": {"mini_batches": 2, "microbatch_tokens_max": 120}},
    ),
    Case(
        name="gradient checkpointing, folder of 20 M",
        kind="trainer",
        model="llama-20m",
        settings={"model": {"gradient_checkpointing": True}, "algorithm": {"group_size": 8}},
    ),
    Case(name="two trainers, 11 M", kind="trainer", model=M11, tuned=True, trainers=2),
    Case(name="two trainers, 25 M", kind="trainer", model=M25, trainers=2),
    Case(name="2 ranks, folder of 20 M", kind="trainer", model="llama-20m", tuned=True, settings=TWO),
    Case(name="2 ranks, 51 M", kind="trainer", model=M51, tuned=True, settings=TWO),
    Case(name="2 ranks, folder of 58 M", kind="trainer", model="llama-58m", settings=TWO),
    Case(name="2 ranks, LoRA, folder of 118 M", kind="trainer", model="llama-118m", settings={**LORA, **TWO}),
    Case(
        name="2 ranks, ppo with reference, 25 M",
        kind="trainer",
        model=M25,
        settings={**TWO, "algorithm": {"name": "ppo", "kl_coefficient": 0.01}},
    ),
    Case(name="engine, 25 M", kind="engine", model=M25, tuned=True),
    Case(name="engine, folder of 118 M", kind="engine", model="llama-118m"),
    Case(name="engine, bfloat16, folder of 118 M", kind="engine", model="llama-118m", settings=BF16),
    Case(
        name="engine, 256 MiB of cache, 51 M",
        kind="engine",
        model=M51,
        settings={"runtime": {"kv_cache_bytes": 256 * MIB}},
    ),
    Case(name="engine of 2 ranks, folder of 58 M", kind="engine", model="llama-58m", tuned=True, settings=TP2),
    Case(name="engine of 2 ranks, 25 M", kind="engine", model=M25, settings=TP2),
    Case(name="a run, 0.9 M", kind="run", model={}, tuned=True),
)


def write_folder(folder: Path, name: str) -> None:
    """In a process of its own: transformers stays in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary, write_tokenizer

    shape = dict(LLAMAS[name])
    heads = shape["hidden_size"] // 64
    kv = max(n for n in (1, 2, 3, 4) if heads % n == 0)
    config = LlamaConfig(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(str(folder / name))
    write_tokenizer(folder / name, local_vocabulary())


def size_of(job: JobConfig) -> ModelSize:
    from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary

    if job.model.path is None:
        return built_in_size(job.model, local_vocabulary(job.task.name).size)
    folder = Path(job.model.path)
    return folder_size(weight_shapes(folder), read_config(folder), job.lora)


# What is measured: processes of the runtime, driven over a pipe.


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


class Peaks:
    """The largest memory of each process that `pids` names, in a thread."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self.bytes: dict[int, int] = {}
        self._pids, self._ends = pids, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        looked_at, pids = float("-inf"), list[int]()
        while not self._ends.wait(SAMPLE_SECONDS):
            if time.monotonic() - looked_at > 0.5:
                with suppress(psutil.Error):
                    pids = list(self._pids())
                looked_at = time.monotonic()
            for pid in pids:
                with suppress(OSError):
                    self.bytes[pid] = max(self.bytes.get(pid, 0), own_bytes(pid))

    def close(self) -> None:
        self._ends.set()
        self._thread.join(10)


def own_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    rows = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))
    return sum(int(value.split()[0]) << 10 for value in rows.values())


@contextmanager
def running(body: Callable[..., None], run: RunDir, job: JobConfig, number: int) -> Iterator[list[Process]]:
    found = [Process(body, run, index, job) for index in range(number)]
    try:
        yield found
    finally:
        for process in found:
            process.close()


Measured = dict[str, list[int]]
"""Role -> peak of each rank of its first replica."""


def measure_trainer(case: Case, job: JobConfig, run: RunDir) -> Measured:
    with running(trainer_process, run, job, case.trainers) as trainers:
        peaks = Peaks(lambda: [pid for t in trainers for pid in t.ranks()])
        for trainer in trainers:
            trainer.answer()
        host, port = trainers[0].ask("open_store", 1)
        for rank, trainer in enumerate(trainers):
            trainer.send("join", 1, 1, rank, len(trainers), host, port)
        for trainer in trainers:
            trainer.answer()
        names = [ReplicaId(f"trainer/{i}") for i in range(len(trainers))]
        copied = -1
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                copied = trainers[0].ask("take_snapshot")  # a slow disk keeps it as long
            microbatches = microbatches_of(job, step)
            ids = [m.microbatch_id for m in microbatches]
            for number, trainer in enumerate(trainers):
                trainer.send("train_step", 1, 1, step, microbatches[number :: len(trainers)], ids, LEDGER, names)
            for trainer in trainers:
                trainer.answer()
        trainers[0].ask("write_checkpoint", str(run.checkpoints), copied)
        pids = trainers[0].ranks()
        peaks.close()
    return {"trainer": [peaks.bytes[pid] for pid in pids]}


def microbatches_of(job: JobConfig, step: int) -> list[Any]:
    """Samples of the longest length, with random answers: the gradient does not ask where they came from."""
    from rolecall.rl_runtime.algorithms.batching import form_microbatches
    from rolecall.rl_runtime.protocol.messages import PromptGroup, TrainingSample
    from rolecall.rl_runtime.tasks.task import make_task
    from rolecall.rl_runtime.tasks.tokenizer import vocabulary

    vocab = vocabulary(job.model, job.task.name)
    task, rng = make_task(job.task, vocab, job.seed), random.Random(f"{job.seed}.{step}")
    groups = []
    for number in range(step * job.algorithm.groups_per_step, (step + 1) * job.algorithm.groups_per_step):
        prompt = task.prompt(number)
        length = job.max_tokens - len(prompt.tokens)
        samples = tuple(
            TrainingSample(
                request_id=f"{prompt.group_id}.{index}",
                tokens=tuple(rng.randrange(vocab.size) for _ in range(length)),
                logprobs=tuple(rng.uniform(-3.0, -1.5) for _ in range(length)),
                versions=(step,) * length,
                reward=rng.random(),
            )
            for index in range(job.algorithm.group_size)
        )
        groups.append(PromptGroup(group_id=prompt.group_id, prompt_tokens=prompt.tokens, samples=samples))
    return list(form_microbatches(step, groups, job.algorithm.microbatches_per_step))


def measure_engine(_case: Case, job: JobConfig, run: RunDir) -> Measured:
    from rolecall.core.ids import GroupId
    from rolecall.rl_runtime.protocol.messages import GenerationRequest

    (run.path / "run.json").write_text(json.dumps({"config": job.model_dump(mode="json")}))
    argv = [sys.executable, "-m", "rolecall.rl_runtime.trainer.model", str(run.path)]
    subprocess.run(argv, check=True, timeout=ANSWER_SECONDS)
    with running(holder_process, run, job, 1) as [holder], running(engine_process, run, job, 1) as [engine]:
        holder.answer()
        peaks = Peaks(engine.ranks)
        engine.answer()
        length = job.max_tokens - job.max_response_tokens
        for version in range(NUM_VERSIONS):
            manifest, at = holder.ask("publish", version)
            engine.ask("update_weights", 1, 1, manifest, [at])
            requests = [
                GenerationRequest(
                    request_id=f"g{version:08d}.{n}",
                    group_id=GroupId(f"g{version:08d}"),
                    prompt_tokens=tuple(1 + (n + i) % 15 for i in range(length)),
                    max_response_tokens=job.max_response_tokens,
                    seed=n,
                )
                for n in range(NUM_REQUESTS)
            ]
            engine.ask("submit", 1, requests)
            time.sleep(2.0)  # some steps of generation
        pids = engine.ranks()
        peaks.close()
    return {"rollout": [peaks.bytes[pid] for pid in pids]}


ACTORS: Mapping[str, str] = {
    "TrainerActor": "trainer",
    "RolloutActor": "rollout",
    "RewardActor": "reward",
    "ControllerActor": "controller",
}


def measure_run(_case: Case, job: JobConfig, run: RunDir) -> Measured:
    """Of a role: the largest of its processes. A standby is an actor of the class for rollouts."""
    value = job.model_dump(mode="json") | {"num_steps": 4, "checkpoint": {"every_steps": 2, "keep": 1}}
    value["name"] = "memory"
    path = run.path / "job.json"
    path.write_text(json.dumps(value))
    argv = [sys.executable, "-m", "rolecall", "run", str(path), "--runs", str(run.path), "--id", "inner"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
    roles: dict[int, str] = {}

    def pids() -> list[int]:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                title = " ".join(child.cmdline())
                role = next((role for name, role in ACTORS.items() if name in title), "")
                if role:
                    roles[child.pid] = role
        return list(roles)

    peaks = Peaks(pids)
    try:
        process.wait(2 * ANSWER_SECONDS)
    finally:
        peaks.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    found: Measured = {}
    for pid, role in roles.items():
        found[role] = [max(peaks.bytes.get(pid, 0), *found.get(role, [0]))]
    return found


MEASURES: Mapping[str, Callable[[Case, JobConfig, RunDir], Measured]] = {
    "trainer": measure_trainer,
    "engine": measure_engine,
    "run": measure_run,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: Case
    role: str
    rank: int
    estimated: int
    measured: tuple[int, ...]

    @property
    def error(self) -> float:
        return self.estimated / statistics.median(self.measured) - 1


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One for each process of each case that was measured."""
    rows = []
    for case in CASES:
        own = [r for r in records if r["case"] == case.name]
        if not own:
            continue
        job, size = case.job(Path(), 0), ModelSize(**own[0]["size"])
        by_role = {need.role: need.ranks for need in needs(job, size)}
        rows += [
            Row(
                case=case,
                role=role,
                rank=rank,
                estimated=by_role[role][rank].host_bytes,
                measured=tuple(r["measured"][role][rank] for r in own),
            )
            for role, ranks in own[0]["measured"].items()
            for rank in range(len(ranks))
        ]
    return rows


def line(row: Row) -> str:
    middle, low, high = common.middle_and_spread([m / MIB for m in row.measured])
    spread = f"{middle:.0f} ({low:.0f} to {high:.0f}; n={len(row.measured)})"
    where = f"{row.role} rank {row.rank}"
    return f"| {row.case.name} | {where} | {row.estimated / MIB:.0f} | {spread} | {100 * row.error:+.1f} % |"


def table(rows: Sequence[Row]) -> list[str]:
    worst = max(rows, key=lambda r: abs(r.error))
    outside = sum(abs(r.error) > ERROR_MAX for r in rows)
    return [
        (
            f"{len(rows)} processes: relative error {statistics.median(abs(r.error) for r in rows):.1%} (median), "
            f"{abs(worst.error):.1%} at most ({worst.case.name}, {worst.role} rank {worst.rank}); beyond "
            f"{ERROR_MAX:.0%}: {outside}"
        ),
        "",
        "| case | process | estimate, MiB | measured, MiB: median (quartiles; n) | error |",
        "|---|---|---|---|---|",
        *map(line, rows),
        "",
    ]


def report(records: Sequence[Mapping[str, Any]]) -> list[str]:
    rows, seeds = rows_of(records), sorted({r["seed"] for r in records})
    commits = ", ".join(sorted({r["commit"] for r in records}))
    config = f"task {json.dumps(dict(TASK))}, algorithm {json.dumps(dict(ALGORITHM))}, folders {json.dumps(LLAMAS)}"
    return [
        *common.header("Estimate of memory against the measured peak", config, ", ".join(map(str, seeds))),
        f"- measured at {commits}; the estimate is that of the commit above",
        (
            f"- {NUM_STEPS} steps and a checkpoint (trainers), {NUM_VERSIONS} versions (engines), four steps (runs); "
            f"float32 where nothing else is said"
        ),
        "- measured: peak of RssAnon + RssShmem, without file pages, which processes share",
        f"- not measured: {', '.join(c.name for c in CASES if all(r.case is not c for r in rows)) or 'none'}",
        "",
        "## Cases that no constant was chosen by",
        "",
        *table([r for r in rows if not r.case.tuned]),
        "## Cases that constants were chosen by",
        "",
        *table([r for r in rows if r.case.tuned]),
    ]


def measure(cases: Sequence[Case], seeds: Sequence[int], records: Path) -> None:
    """Appends a line to `records` for each case and seed."""
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name)
        for folder in sorted({c.model for c in cases if isinstance(c.model, str)}):
            context = multiprocessing.get_context("spawn").Process(target=write_folder, args=(folders, folder))
            context.start()
            context.join(ANSWER_SECONDS)
        for seed, case in product(seeds, cases):
            job = case.job(folders, seed)
            with tempfile.TemporaryDirectory() as inside:
                measured = MEASURES[case.kind](case, job, create_run_dir(Path(inside), "r"))
            found = {
                "case": case.name,
                "seed": seed,
                "commit": common.commit(),
                "size": asdict(size_of(job)),
                "measured": measured,
            }
            with records.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print("\n".join(map(line, rows_of([found]))), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tuned", action=argparse.BooleanOptionalAction, help="only cases of this kind")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--records", type=Path, default=common.RESULTS / "memory.jsonl")
    parser.add_argument("--report-only", action="store_true", help="the report of what has been measured")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if not args.report_only:
        chosen = [c for c in CASES if args.only in c.name and args.tuned in (None, c.tuned)]
        measure(chosen, args.seeds, args.records)
    lines = report([json.loads(text) for text in args.records.read_text().splitlines()])
    print("\n".join(lines))
    common.write("memory", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
