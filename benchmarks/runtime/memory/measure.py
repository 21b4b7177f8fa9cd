"""The largest memory of each process of a case."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runtime.memory.cases import Case
from benchmarks.runtime.memory.processes import ANSWER_SECONDS, engine_process, holder_process, running, trainer_process
from rolecall.core.config.job import JobConfig
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.journal.store import GENESIS
from rolecall.core.rundir import RunDir

SAMPLE_SECONDS = 0.005
NUM_STEPS = 5
"""The third is the first with all versions that a trainer keeps; two more show that nothing grows."""
NUM_VERSIONS = 3
NUM_REQUESTS = 32
LEDGER = ChainHead(position=0, hash=GENESIS)


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
