"""The job of `torchrun.py`: ordinary data-parallel training with torchrun. It knows nothing of rolecall.

    torchrun --standalone --nproc-per-node 4 benchmarks/beside_jobs/torchrun_job.py '{"shape": "plain", "steps": 100}'

Sleeping stands for the accelerator's work, so that many ranks fit on few cores. A step loads a batch (40 ms), runs a
forward (30 ms) and a backward pass (60 ms) of a small model in DistributedDataParallel, and sums the loss for the log.
With `scale` each of these takes that many times as long.

With `fault` in its argument, rank `rank` writes the wall time to the file `mark` in step `at` and then does it, at
`place`: `load`, `forward`, `backward` or `between` (after the optimizer's step). For `oom` it first waits, at work,
until the file `mark` + `.go` exists: its memory is limited from outside until then.
"""

import ctypes
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LOAD_SECONDS, FORWARD_SECONDS, BACKWARD_SECONDS = 0.04, 0.03, 0.06
FEATURES, BATCH = 64, 32
SLOW_FACTOR = 2.0
OOM_BYTES = 512 << 20
EVALUATION_STEPS, EVALUATION_SECONDS = 60, 12.0
CHECKPOINT_STEPS, CHECKPOINT_SECONDS = 60, 9.0
EPOCH_STEPS, RELOAD_SECONDS = 80, 6.0
WARM_UP_STEPS, WARM_UP_FACTOR = 40, 10.0
GENERATION_SECONDS, GENERATION_PASSES, FIRST_GENERATION_FACTOR = 0.2, 20, 5.0
ACCUMULATION_MAX = 64
PR_SET_PDEATHSIG = 1


@dataclass
class Plan:
    """What is asked of the job. `seconds`: it ends itself after so long."""

    shape: str = "plain"
    steps: int = 10**9
    seconds: float = 600.0
    seed: int = 0
    scale: float = 1.0
    fault: str = ""
    rank: int = -1
    at: int = 30
    place: str = "forward"
    mark: str = ""


class Faults:
    """Does the fault of the plan when its step and place are reached; on other ranks nothing."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._is_here = plan, bool(plan.fault) and plan.rank == rank
        self._step, self._begun, self._ready = -1, False, False
        self.load_factor = self.compute_factor = 1.0

    def begin_step(self, step: int) -> None:
        self._step = step
        if not self._is_here or self._begun or step < self._plan.at:
            return
        if self._plan.fault == "slow compute":
            self._mark()
            self.compute_factor = SLOW_FACTOR
        elif self._plan.fault == "slow loader":
            self._mark()
            self.load_factor = SLOW_FACTOR

    def skips(self) -> bool:
        """Whether this rank leaves the next collective out."""
        if self._is_due("skip"):
            self._mark()
            return True
        return False

    def reach(self, place: str) -> None:
        plan = self._plan
        if place != plan.place:
            return
        if self._is_due("oom"):
            self._exhaust_memory()
        for fault in ("stop", "lock", "gil", "kill", "raise"):
            if self._is_due(fault):
                self._mark()
                getattr(self, f"_{fault}")()

    def _is_due(self, fault: str) -> bool:
        plan = self._plan
        return self._is_here and not self._begun and plan.fault == fault and self._step >= plan.at

    def _mark(self) -> None:
        self._begun = True
        path = Path(self._plan.mark)
        path.with_suffix(".new").write_text(json.dumps({"at": time.time(), "pid": os.getpid()}))
        path.with_suffix(".new").rename(path)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def _gil(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")  # never ends, and keeps the interpreter

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _raise(self) -> None:
        raise RuntimeError("device-side assert triggered on this rank alone")

    def _exhaust_memory(self) -> None:
        ready, go = Path(self._plan.mark + ".pid"), Path(self._plan.mark + ".go")
        if not self._ready:
            ready.write_text(str(os.getpid()))
            self._ready = True
        if go.exists():
            self._mark()
            held = [b"1" * (4 << 20) for _ in range(OOM_BYTES >> 22)]
            del held


class Passed(torch.autograd.Function):
    """The accelerator's time of a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, net: "Net") -> torch.Tensor:
        ctx.net = net
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        net: Net = ctx.net
        net.faults.reach("backward")
        time.sleep(BACKWARD_SECONDS * net.work * net.faults.compute_factor)
        return gradients[0], None


class Net(torch.nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(FEATURES, FEATURES) for _ in range(3)))
        self.faults, self.work = faults, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.faults.reach("forward")
        time.sleep(FORWARD_SECONDS * self.work * self.faults.compute_factor)
        return Passed.apply(self.layers(x), self)  # type: ignore[no-any-return,no-untyped-call]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return EPOCH_STEPS * BATCH

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.randn(FEATURES)


def batches(plan: Plan, faults: Faults) -> Iterator[torch.Tensor]:
    while plan.shape != "epochs":
        time.sleep(LOAD_SECONDS * plan.scale * faults.load_factor)
        faults.reach("load")
        yield torch.randn(BATCH, FEATURES)
    while True:
        time.sleep(RELOAD_SECONDS)
        yield from DataLoader(Rows(), batch_size=BATCH, num_workers=1)


def evaluate(net: torch.nn.Module) -> None:
    net.eval()
    until = time.monotonic() + EVALUATION_SECONDS
    with torch.no_grad():
        while time.monotonic() < until:
            net(torch.randn(BATCH, FEATURES))
    net.train()


def generate(net: torch.nn.Module, seconds: float) -> None:
    """As RL does before each step, with responses of different lengths."""
    net.eval()
    with torch.no_grad():
        for _ in range(GENERATION_PASSES):
            net(torch.randn(BATCH, FEATURES))
            time.sleep(seconds / GENERATION_PASSES)
    net.train()


def save_checkpoint(net: Net) -> None:
    """To a slow disk."""
    until = time.monotonic() + CHECKPOINT_SECONDS
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < until:
            torch.save(net.layers.state_dict(), file)
            os.fsync(file.fileno())
            file.seek(0)
            time.sleep(0.2)


def work_of(plan: Plan, step: int, rng: random.Random) -> float:
    """Of this step's passes, in usual ones."""
    if plan.shape == "lengths":
        return min(8.0, math.exp(rng.gauss(0.0, 0.7)))
    if plan.shape == "warm-up":
        return 1.0 + (WARM_UP_FACTOR - 1) * max(0.0, 1 - step / WARM_UP_STEPS)
    return 1.0


def accumulation_of(plan: Plan, step: int) -> int:
    """Microbatches of a step: 1 to 64, doubled from time to time."""
    return min(ACCUMULATION_MAX, 2 ** (step // 30)) if plan.shape == "accumulation" else 1


def train(plan: Plan) -> None:
    rank = dist.get_rank()
    faults, rng = Faults(plan, rank), random.Random(f"{plan.seed} {rank}")
    net = Net(faults)
    model: Any = DistributedDataParallel(net)
    called: Any = model
    if plan.shape == "compile":
        called = compiled()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    if plan.shape == "two optimizers":
        critic = DistributedDataParallel(torch.nn.Linear(FEATURES, 1))
        of_critic = torch.optim.SGD(critic.parameters(), lr=1e-3)
    began = time.monotonic()
    source = batches(plan, faults)
    for step in range(plan.steps):
        if not plan.fault:
            over = torch.tensor(float(time.monotonic() - began > plan.seconds))
            dist.all_reduce(over)
            if over:
                return
        faults.begin_step(step)
        if plan.shape == "generation":
            net.work = 0.0
            factor = math.exp(rng.gauss(0.0, 0.4)) * (1.0 if step else FIRST_GENERATION_FACTOR)
            generate(net, GENERATION_SECONDS * plan.scale * factor)
        net.work = work_of(plan, step, rng) * plan.scale
        optimizer.zero_grad()
        number = accumulation_of(plan, step)
        for n in range(number):
            batch = next(source)
            if plan.shape == "compile":
                batch = batch[: 8 + step // 40 % 24]
                loss = called(batch).square().mean() + model(batch).square().mean()
            elif n < number - 1:
                with model.no_sync():
                    model(batch).square().mean().backward()
                continue
            else:
                loss = called(batch).square().mean()
        loss.backward()
        optimizer.step()
        if plan.shape == "two optimizers":
            of_critic.zero_grad()
            critic(batch).square().mean().backward()
            of_critic.step()
        faults.reach("between")
        if not faults.skips():
            dist.all_reduce(loss.detach())
        if plan.shape == "evaluation" and step % EVALUATION_STEPS == EVALUATION_STEPS - 1:
            evaluate(net)
        if plan.shape == "checkpoint" and step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
            if rank == 0:
                save_checkpoint(net)
            if step // CHECKPOINT_STEPS % 2:  # else the others go on, and wait in the next step
                dist.barrier()


def compiled() -> Any:
    """A module that is compiled again for new shapes."""
    layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.GELU(), torch.nn.Linear(FEATURES, 1))
    return torch.compile(layers, dynamic=False)


def end_with_launcher() -> None:
    """A rank that hangs does not stay when the benchmark ends torchrun."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # torchrun ended before
        sys.exit(1)


if __name__ == "__main__":
    end_with_launcher()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Plan(**json.loads(sys.argv[1])))
    dist.destroy_process_group()
