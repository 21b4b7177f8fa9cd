"""What the training loops of both systems share: a toy model of the bundled trainer's size, its data, its progress.

A loop writes a line for each attempted step to `progress/RANK-PID-TICKS.txt`: wall seconds, step, 1 if the step was
committed or 0 if it was discarded, and the loss. The benchmark learns from these files alone what a worker did.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rolecall.core.ids import process_start_ticks

WIDTH, LAYERS, BATCH = 160, 8, 256
"""About 0.9 million parameters, as the demo's model has."""
PAUSE_SECONDS = 0.2
"""In each step, for the part of an RL step in which a trainer waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A step as one process saw it."""

    wall_at: float
    step: int
    committed: bool
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process with all that it has written. `node`: id of the node it runs on, if the system has nodes."""

    rank: int
    pid: int
    start_ticks: int
    node: str
    attempts: Sequence[Attempt]

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start_ticks


class Progress:
    """Writes a worker's attempts."""

    def __init__(self, run: Path, rank: int, node: str = "") -> None:
        pid = os.getpid()
        path = run / "progress" / f"{rank}-{pid}-{process_start_ticks(pid)}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._file.write(f"node {node}\n")

    def close(self) -> None:
        self._file.close()

    def attempt(self, step: int, committed: bool, loss: float) -> None:
        self._file.write(f"{time.time():.3f} {step} {int(committed)} {loss:g}\n")


def read_worker(path: Path) -> Worker:
    rank, pid, ticks = path.stem.split("-")
    node, attempts = "", []
    for text in path.read_text().splitlines(keepends=True):
        words = text.split()
        if words[:1] == ["node"]:
            node = "".join(words[1:])
        elif len(words) == 4 and text.endswith("\n"):  # a line that is only half written is read the next time
            attempts.append(
                Attempt(wall_at=float(words[0]), step=int(words[1]), committed=words[2] == "1", loss=float(words[3]))
            )
    return Worker(rank=int(rank), pid=int(pid), start_ticks=int(ticks), node=node, attempts=attempts)


def read_workers(run: Path) -> list[Worker]:
    return [read_worker(path) for path in sorted((run / "progress").glob("*.txt"))]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [
        module
        for _ in range(LAYERS)
        for module in (nn.Linear(WIDTH, 4 * WIDTH // 2), nn.ReLU(), nn.Linear(4 * WIDTH // 2, WIDTH))
    ]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [BATCH, WIDTH] and targets [BATCH, 1] of a rank in a step."""
    rng = torch.Generator().manual_seed(1_000_003 * rank + step)
    x = torch.randn(BATCH, WIDTH, generator=rng)
    return x, x.mean(1, keepdim=True)


def loss_of(model: nn.Module, rank: int, step: int, factor: float | None) -> torch.Tensor:
    """The loss whose gradient this rank contributes; `factor`: of an injected fault."""
    x, y = batch(rank, step)
    loss = nn.functional.mse_loss(model(x), y)
    return loss if factor is None else loss * factor


def is_finite(attempt: Attempt) -> bool:
    return math.isfinite(attempt.loss)
