"""What holds on an NVIDIA GPU? Digests, commits and copies on it, the step's overhead, and the tools that watch it.

    python -m benchmarks.runtime.gpu           the report, about 10 minutes; needs one GPU of 60 GiB and the CUDA lock
    python -m benchmarks.runtime.gpu --trial   a tiny model on the CPU, to see that the script works; writes no report

Where there is no GPU, the report says so.

The model has the shape of Qwen3-0.6B without its vocabulary (440 M parameters), random, in bfloat16 with float32
masters. Two replicas in two processes share the GPU: control and reduce over gloo, everything else on the GPU. One is
replaced by a third one, which copies the state of a survivor and joins the next step. The plain loop computes the same
gradients, adds them up in float64, clips, and steps AdamW. Raw readings of NVML and GPM go to `tests/agent/nvml/`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.runtime.step_overhead import plain_step
from rolecall.core.config.job import DeviceName, JobConfig, ModelConfig, parse_job
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.device import device_of, found_hardware
from rolecall.rl_runtime.protocol.spawn import make_spawn
from rolecall.rl_runtime.trainer.model import write_model_folder
from rolecall.rl_runtime.trainer.ranks import Ranks
from rolecall.rl_runtime.trainer.service import TrainerService
from rolecall.rl_runtime.weights.digest import device_digest, tensor_digest
from tests.agent.nvml.record import record
from tests.rl_runtime.multi_rank_process import MultiRankProcess, join, tell_step
from tests.rl_runtime.trainer_process import LEDGER, make_microbatches

SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
OVERHEAD_MAX = 0.05
DIGEST_BYTES = 2 << 30
BURN_IN_SECONDS = 120
NAME = ReplicaId("trainer/0")


def job_of(folder: Path, shape: dict[str, int]) -> JobConfig:
    """A step is 2,048 answers of up to 68 tokens, computed 4,096 tokens at a time."""
    sizes = (8, 16, 16) if shape is SHAPE else (4, 1, 2)
    batch = dict(zip(("microbatches_per_step", "groups_per_microbatch", "group_size"), sizes, strict=True))
    head_dim = 128 if shape is SHAPE else 32
    write_model_folder(folder, ModelConfig.model_validate({**shape, "head_dim": head_dim}), seed=0)
    return parse_job(
        {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "task": {"num_digits": 64},
            "algorithm": {"name": "grpo", "microbatch_tokens_max": 4096, **batch},
            "runtime": {"transfer_timeout_seconds": 120.0},
        }
    )


def seconds_of(call: Callable[[], Any]) -> float:
    """With everything that it left to the GPU."""
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def digests(device: DeviceName, num_bytes: int) -> Iterator[str]:
    words = torch.randint(-(2**62), 2**62, (num_bytes // 8,), generator=torch.Generator().manual_seed(0))
    there = words.to(device, copy=True)
    assert device_digest(there) == device_digest(words), "the digest depends on the device"
    there[-1] ^= 1
    assert device_digest(there) != device_digest(words), "the digest does not show a flipped bit"
    here = min(seconds_of(lambda: device_digest(there)) for _ in range(3))
    copied = min(seconds_of(lambda: tensor_digest(there)) for _ in range(3))
    size = num_bytes / 1e9
    yield f"- digest of {size:.1f} GB: on the device {size / here:.1f} GB/s, copied and BLAKE3 {size / copied:.1f} GB/s"
    yield "- equal to that of the CPU; a flipped bit shows"


def overhead(run: RunDir, job: JobConfig, device: DeviceName, pairs: int) -> Iterator[str]:
    spawn = make_spawn(run, NAME, 1, NodeId("node-1"), device=device)
    service = TrainerService(spawn, job, ranks=Ranks(device=device))
    service.join(1, 1, 0, 1, "127.0.0.1", 0)
    steps: list[tuple[float, float]] = []
    for step in range(pairs + 1):  # the first one warms up
        mine = make_microbatches(job, step)
        ids = [m.microbatch_id for m in mine]

        def whole(step: int = step, mine: Any = mine, ids: Any = ids) -> None:
            service.train_step(1, 1, step, mine, ids, LEDGER, [NAME])

        def plain(mine: Any = mine) -> None:
            plain_step(service, mine)

        order = (plain, whole) if step % 2 else (whole, plain)
        took = {call: seconds_of(call) for call in order}
        steps.append((took[whole], took[plain]))
    shares = [whole / plain - 1 for whole, plain in steps[1:]]
    middle, low, high = common.middle_and_spread(shares)
    met = "met" if middle <= OVERHEAD_MAX else "**not met**"
    yield f"- {service.replica.state.num_parameters / 1e6:.0f} M parameters, {pairs} pairs of steps, in turn"
    wholes, plains = (common.summary([pair[i] for pair in steps[1:]], 3) for i in (0, 1))
    yield f"- step {wholes} s, plain loop {plains} s"
    quartiles = f"quartiles {100 * low:+.1f} to {100 * high:+.1f} %"
    yield f"- overhead {100 * middle:+.1f} % (median; {quartiles}); bar {100 * OVERHEAD_MAX:.0f} %: {met}"
    if device == "cuda":
        yield f"- peak memory of the GPU {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    service.close()


def commit_and_copy(run: RunDir, job: JobConfig, device: DeviceName) -> Iterator[str]:
    with ExitStack() as stack:
        made = [MultiRankProcess(run, i, job, n, device=device) for i, n in ((0, 1), (1, 1), (1, 2))]
        for one in made:
            stack.callback(one.close)
            one.answer()
        survivor, victim, replacement = made

        def step(number: int, epoch: int, *members: MultiRankProcess) -> float:
            def together() -> None:
                tell_step(job, epoch, number, *members)
                assert len({member.answer().commit for member in members}) == 1, "the members disagree"

            join(epoch, *members)
            return seconds_of(together)

        step(0, 1, survivor, victim)
        yield f"- two replicas commit one step: {step(1, 2, survivor, victim):.2f} s"
        victim.process.kill()
        copied = seconds_of(lambda: replacement.ask("copy_from", survivor.ask("info").holder))
        yield f"- a replacement copies the state in {copied:.1f} s"
        yield f"- and commits the next step with the survivor: {step(2, 3, survivor, replacement):.2f} s"


def tools(device: DeviceName) -> Iterator[str]:
    """The agent's collector, doctor and burn-in, on this machine."""
    if device == "cuda":
        state = record()
        path = common.ROOT / "tests" / "agent" / "nvml" / f"{common.hardware()}.state.json"
        path.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
        known = sum(1 for key in state if key.startswith("0."))
        yield f"- NVML and GPM: {known} readings of GPU 0, raw in `{path.relative_to(common.ROOT)}`"
        tests = ["-m", "pytest", "-q", "-m", "gpu", "tests/agent", "tests/rl_runtime"]
        yield f"- tests marked `gpu`: {_output(*tests).splitlines()[-1]}"
    seconds = BURN_IN_SECONDS if device == "cuda" else 1
    for argv in (["doctor"], ["node", "burn-in", "--seconds", str(seconds)]):
        yield f"- `rolecall {' '.join(argv)}`:\n\n```text\n{_output('-m', 'rolecall', *argv)}\n```\n"


def _output(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv], cwd=common.ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    return done.stdout.strip() or done.stderr.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--trial", action="store_true", help="a tiny model on the CPU, without a report")
    args = parser.parse_args()
    device = device_of(None, found_hardware())
    header = common.header("Trainer and tools on an NVIDIA GPU", json.dumps(SHAPE), "0")
    if device == "cpu" and not args.trial:
        lines = [*header, "Not run on a GPU: this machine has none that the installed torch can use."]
        print("\n".join(lines), f"written to {common.write('gpu', lines)}", sep="\n")
        return 0
    device, shape = ("cpu", TINY) if args.trial else ("cuda", SHAPE)
    lines = header
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = job_of(folder / "model", shape)
        for title, part in (
            ("Digest", digests(device, 1 << 20 if args.trial else DIGEST_BYTES)),
            ("Two replicas on one device", commit_and_copy(create_run_dir(folder, "two"), job, device)),
            ("Step", overhead(create_run_dir(folder, "alone"), job, device, 2 if args.trial else args.pairs)),
            ("Tools", tools(device)),
        ):
            lines += ["", f"## {title}", "", *part]
    print("\n".join(lines))
    if not args.trial:
        common.write("gpu", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
