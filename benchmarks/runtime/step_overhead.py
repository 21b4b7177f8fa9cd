"""What vote, digests and snapshots cost a trainer's step: the example's model and batch, in one trainer process.

    python -m benchmarks.runtime.step_overhead             30 pairs of steps; idle machine, about half an hour
    python -m benchmarks.runtime.step_overhead --pairs 3   a short trial, which writes no report

Before: `examples/smollm2/prepare.py` has written the model's folder (`--model`).

A pair is one step with everything and one of the plain loop: the same gradients, their float64 sum, division, clipping
and AdamW, and nothing else. Within the step with everything each part is timed by itself (time in a part that it calls
is the other part's). The share of a step is the parts' time divided by the whole step's; the pairs are a check of it.
The answers are random tokens, so that no engine is needed; all are of the current version, as in a run whose engines
are up to date.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.intervals import median_interval
from rolecall.core.config.job import JobConfig, load_job, parse_job
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.journal.store import GENESIS
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.algorithms.batching import form_microbatches
from rolecall.rl_runtime.protocol.messages import Microbatch, PromptGroup, TrainingSample
from rolecall.rl_runtime.protocol.spawn import make_spawn
from rolecall.rl_runtime.tasks.dataset_task import DatasetTask
from rolecall.rl_runtime.trainer import trainer
from rolecall.rl_runtime.trainer.service import TrainerService

EXAMPLE = common.ROOT / "examples" / "smollm2"
SHARE_MAX = 0.03
"""The bar: vote, digests and snapshots take at most this share of a step."""
NAME = ReplicaId("trainer/0")
LEDGER = ChainHead(position=0, hash=GENESIS)
WARM_STEPS = 1
PAIRS_MIN = 12
"""Of a report; fewer are a trial."""


class Parts:
    """Seconds by part since the last `take`, of functions replaced by timed ones."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # of each open call: seconds in the calls within it

    def time(self, owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            self._inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                took = self._clock() - began
                self._seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        found, self._seconds = dict(self._seconds), defaultdict(float)
        return found


def job_of(model: str, data: Path) -> JobConfig:
    value = load_job(EXAMPLE / "job.yaml").model_dump(mode="json")
    value["model"]["path"], value["data"]["path"] = model, str(data)
    value["roles"]["trainer"], value["evaluation"] = 1, None
    return parse_job(value)


def microbatches_of(task: DatasetTask, job: JobConfig, step: int, rng: random.Random) -> list[Microbatch]:
    """The example's prompts with random answers, of up to the longest length and random rewards."""

    def sample(group: str, index: int) -> TrainingSample:
        tokens = tuple(rng.randrange(task.vocab.size) for _ in range(rng.randint(2, job.max_response_tokens)))
        return TrainingSample(
            request_id=f"{group}.{index}",
            tokens=tokens,
            logprobs=tuple(rng.uniform(-12.0, -10.0) for _ in tokens),
            versions=(step,) * len(tokens),
            reward=rng.random(),
        )

    algorithm, groups = job.algorithm, []
    for number in range(step * algorithm.groups_per_step, (step + 1) * algorithm.groups_per_step):
        prompt = task.prompt(number)
        samples = tuple(sample(prompt.group_id, index) for index in range(algorithm.group_size))
        groups.append(PromptGroup(group_id=prompt.group_id, prompt_tokens=prompt.tokens, samples=samples))
    return list(form_microbatches(step, groups, algorithm.microbatches_per_step))


def timed(service: TrainerService) -> Parts:
    """Times each part of the service's steps from now on."""
    parts, state = Parts(), service.replica.state
    group = service.replica._group
    assert group is not None
    for owner, name, part in (
        (trainer, "local_digest", "digest of the gradient"),
        (group, "all_reduce", "copy of the sum for the reduce"),
        (service.replica, "_reduce_and_vote", "ballots"),
        (service.replica, "_refuse_disagreement", "ballots"),
        (service.replica, "_refuse_unusual", "ballots"),
        (state, "_digest_weights", "digest of the weights"),
        (state, "_remember", "previous version"),
        (state, "policy_snapshot", "copy of the policy"),
        (state, "canary_logprobs", "canary"),
        (service, "_publish", "manifest and publication"),
    ):
        parts.time(owner, name, part)
    # Bound before it was replaced.
    service.replica._on_publish = service._publish
    return parts


def whole_step(service: TrainerService, step: int, mine: Sequence[Microbatch]) -> float:
    began = time.perf_counter()
    service.train_step(1, 1, step, mine, [m.microbatch_id for m in mine], LEDGER, [NAME])
    return time.perf_counter() - began


def plain_step(service: TrainerService, mine: Sequence[Microbatch]) -> float:
    """The same loop without votes, digests and copies."""
    import torch

    replica, state = service.replica, service.replica.state
    began = time.perf_counter()
    sums = torch.zeros(state.num_parameters, dtype=torch.float64, device=replica.ranks.device)
    for microbatch in mine:
        gradient, _ = replica._gradients.of(state, microbatch)
        sums += gradient
    state.policy.take_gradient(sums, 1.0)
    state.policy.step(1.0)
    return time.perf_counter() - began


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def report(
    job: JobConfig, seed: int, num_parameters: int, steps: Sequence[tuple[float, float, dict[str, float]]], more: str
) -> list[str]:
    """`steps`: (whole step, plain step, parts), seconds."""
    rng = random.Random(seed)
    shares = [sum(parts.values()) / whole for whole, _, parts in steps]
    pairs = [whole / plain - 1 for whole, plain, _ in steps]
    middle, lower, upper = common.middle_and_spread(shares)
    low, high = median_interval(shares, rng)
    met = "met" if high <= SHARE_MAX else "not met by the whole interval" if middle <= SHARE_MAX else "**not met**"
    around = median_interval(pairs, rng)
    names = sorted(
        {n for *_, p in steps for n in p}, key=lambda n: -statistics.median(p.get(n, 0.0) for *_, p in steps)
    )
    config = json.dumps({"algorithm": job.algorithm.model_dump(mode="json"), "data": "examples/smollm2"})
    return [
        *common.header("Vote, digests and snapshots in a trainer's step", config, str(seed)),
        (
            f"- {num_parameters / 1e6:.1f} M parameters, one trainer on one thread (digests: two); "
            f"{len(steps)} pairs of steps; a step has {job.algorithm.groups_per_step} groups of "
            f"{job.algorithm.group_size} samples"
        ),
        f"- whole step {common.summary([s[0] for s in steps])} s, plain loop {common.summary([s[1] for s in steps])} s",
        (
            f"- share of a step: {100 * middle:.2f} % (median; 95 % bootstrap interval {100 * low:.2f} to "
            f"{100 * high:.2f} %; quartiles {100 * lower:.2f} to {100 * upper:.2f} %); bar "
            f"{100 * SHARE_MAX:.0f} %: {met}"
        ),
        (
            f"- check by pairs: the whole step is longer by {100 * statistics.median(pairs):+.2f} % (median; 95 % "
            f"bootstrap interval {100 * around[0]:+.2f} to {100 * around[1]:+.2f} %)"
        ),
        more,
        "",
        "| part | seconds, median (worst) | share of a step |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(p.get(name, 0.0) for *_, p in steps):.3f} "
            f"({max(p.get(name, 0.0) for *_, p in steps):.3f}) | "
            f"{100 * statistics.median(p.get(name, 0.0) / whole for whole, _, p in steps):.2f} % |"
            for name in names
        ),
    ]


def measure(model: str, pairs: int, seed: int, minutes: float) -> list[str]:
    rng = random.Random(seed)
    ends = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [sys.executable, str(EXAMPLE / "data.py"), str(folder / "train.jsonl"), str(folder / "held-out.jsonl")]
        subprocess.run(argv, check=True, timeout=600, stdout=subprocess.DEVNULL)
        job = job_of(model, folder / "train.jsonl")
        task = DatasetTask(job)
        service = TrainerService(make_spawn(create_run_dir(folder, "r"), NAME, 1, NodeId("node-1")), job)
        service.join(1, 1, 0, 1, "127.0.0.1", 0)
        for step in range(WARM_STEPS):
            whole_step(service, step, microbatches_of(task, job, step, rng))
        parts, steps = timed(service), list[tuple[float, float, dict[str, float]]]()
        for step in range(WARM_STEPS, WARM_STEPS + pairs):
            if time.monotonic() > ends:
                break
            mine = microbatches_of(task, job, step, rng)
            plain = plain_step(service, mine) if rng.random() < 0.5 else None
            parts.take()
            whole = whole_step(service, step, mine)
            taken = parts.take()
            plain = plain_step(service, mine) if plain is None else plain
            steps.append((whole, plain, taken))
            print(
                f"pair {len(steps)}: whole {whole:.2f} s, plain {plain:.2f} s, parts {sum(taken.values()):.3f} s",
                flush=True,
            )
        peak = peak_gib()
        began = time.perf_counter()
        service.write_checkpoint(str(folder / "checkpoints"), service.take_snapshot())
        saved = time.perf_counter() - began
        more = (
            f"- memory at its peak {peak:.1f} GiB, with a checkpoint, which takes {saved:.1f} s, {peak_gib():.1f} GiB"
        )
        num_parameters = service.replica.state.num_parameters
        service.close()
    if not steps:
        raise SystemExit(f"no pair of steps in {minutes:.0f} minutes")
    return report(job, seed, num_parameters, steps, more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model", help="folder that prepare.py wrote")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further pair begins")
    args = parser.parse_args()
    lines = measure(str(args.model.resolve()), args.pairs, args.seed, args.minutes)
    print("\n".join(lines))
    if args.pairs >= PAIRS_MIN:
        common.write("step_overhead", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
