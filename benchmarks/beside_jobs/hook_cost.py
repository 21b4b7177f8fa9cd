"""What torch's hooks of `rolecall exec` cost a step, in the process that trains.

    python -m benchmarks.beside_jobs.hook_cost   200 pairs of blocks, minutes on an idle machine

One process trains a small model; the hooks are taken out and put back between blocks of steps, which come in pairs in
random order. The difference is what the hooks cost, torch's calls of them included. The page lies in a file, as with an
agent, and the reporter's thread beats all the time. A larger model takes long steps, for the share: pairs are added
until the interval is narrow enough.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from benchmarks import common
from benchmarks.intervals import median_interval
from rolecall.agent.autostart.training import TrainingWatch
from rolecall.agent.reporter import reporter

BAR_MICROSECONDS, BAR_SHARE = 10.0, 0.005
BOOTSTRAP_ROUNDS = 1_000
SHARE_HALF_WIDTH, SHARE_PAIRS = 0.003, 50
"""Pairs of long steps are added by so many, until half of the interval is this narrow or the time is over."""


class Loop:
    """A training loop whose hooks can be taken out and put back."""

    def __init__(self, width: int, batch: int) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = torch.randn(batch, width)
        self.watch = TrainingWatch(reporter, torch, time.monotonic, starts=False)
        self._places: list[dict[int, Any]] = []
        self.hooked = True
        handle = optimizers.register_optimizer_step_post_hook(self.watch.after_optimizer)
        self.steps(5)  # rank, modules and the order of gradients are known after the third
        parameters = [p for p in self.model.parameters() if p._post_accumulate_grad_hooks]
        self._places = [
            self.model._forward_pre_hooks,
            self.model._forward_hooks,
            self.model._forward_hooks_always_called,
            *(p._post_accumulate_grad_hooks for p in parameters),
            optimizers._global_optimizer_post_hooks,
        ]
        self._kept = [dict(place) for place in self._places]
        self.handle = handle
        assert all(self._kept), "everything is hooked"
        self.switch(False)  # another loop has its own

    def switch(self, hooked: bool) -> None:
        for place, kept in zip(self._places, self._kept, strict=True):
            place.clear()
            if hooked:
                place.update(kept)

    def steps(self, number: int) -> float:
        """Seconds of a step, the mean."""
        began = time.perf_counter()
        for _ in range(number):
            self.optimizer.zero_grad()
            self.model(self.batch).sum().backward()
            self.optimizer.step()
        return (time.perf_counter() - began) / number


def pairs(loop: Loop, number: int, steps: int, rng: random.Random) -> list[tuple[float, float]]:
    """(with, without), seconds of a step."""
    found = []
    for _ in range(number):
        seconds = {}
        for hooked in rng.sample((True, False), 2):
            loop.switch(hooked)
            seconds[hooked] = loop.steps(steps)
        found.append((seconds[True], seconds[False]))
    loop.switch(False)
    return found


def enough_pairs(loop: Loop, seconds: float, rng: random.Random) -> list[float]:
    """(with / without) - 1, until their interval is narrow enough."""
    found: list[float] = []
    until = time.monotonic() + seconds
    while not found or time.monotonic() < until:
        found += [a / b - 1 for a, b in pairs(loop, SHARE_PAIRS, 4, rng)]
        low, high = median_interval(found, rng, BOOTSTRAP_ROUNDS)
        if high - low <= 2 * SHARE_HALF_WIDTH:
            break
    return found


def described(values: list[float], form: str, rng: random.Random) -> tuple[float, str]:
    """(median, `median | low to high`)."""
    middle, low, high = statistics.median(values), *median_interval(values, rng, BOOTSTRAP_ROUNDS)
    return middle, f"{form.format(middle)} | {form.format(low)} to {form.format(high)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--share-seconds", type=float, default=900.0, help="at most, for the pairs of long steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        reporter._page.move_to(Path(folder) / "page")
        small, large = Loop(32, 8), Loop(1024, 1536)
        costs = [(a - b) * 1e6 for a, b in pairs(small, options.pairs, 100, rng)]
        step = statistics.median(large.steps(4) for _ in range(10))
        relative = enough_pairs(large, options.share_seconds, rng)
    lines = common.header(
        "What the hooks of `rolecall exec` cost a step",
        f"one process, one thread; n = {len(costs)} pairs of 100 steps, {len(relative)} pairs of 4 long ones",
        str(options.seed),
    )
    cost, cost_text = described(costs, "{:.1f}", rng)
    _, share_text = described(relative, "{:+.2%}", rng)
    lines += [
        "Medians with their 95 % bootstrap intervals.",
        "",
        "| what | median | interval | bar |",
        "|---|---|---|---|",
        f"| microseconds of a step | {cost_text} | {BAR_MICROSECONDS:g} |",
        f"| share of a step of {step * 1e3:.0f} ms | {share_text} | {BAR_SHARE:.1%} |",
        f"| the same, from the microseconds | {cost / step / 1e6:+.3%} | | {BAR_SHARE:.1%} |",
    ]
    common.publish("hook_cost", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
