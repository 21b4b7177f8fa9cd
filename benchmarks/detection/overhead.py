"""What watching costs a step (`make bench`): blocks with and without it, in turn, within one run.

One failure-free run at learning rate 0 with responses of fixed length. In an off block the agents, `watch` and every
reporter's side thread stand still (SIGSTOP, and the file `reporter.off` in the run directory); in an on block all work.
Blocks come in pairs of random order; the first seconds of each are left out. The cost of a pair is the ratio of its
mean step times minus one; printed are the median over pairs and a bootstrap interval. The calls that training makes
into the reporter's page stay on in both: their cost is measured by itself and added.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import common
from benchmarks.intervals import median_interval
from rolecall.agent.reporter import reporter
from rolecall.core.clock import SystemClock
from rolecall.core.ids import ProcessId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.detector.sources.agents import AgentsSource
from rolecall.rl_runtime.processes import find_processes
from rolecall.watch.run import agent_urls

SETTINGS = (
    "algorithm.learning_rate=0",
    "task.fixed_length=true",
    "recovery.mode=observe",
    "recovery.lease_seconds=600",  # else the watch, which stands still in off blocks, is killed and started again
)

SETTLE_SECONDS = 4.0
"""Left out at the beginning of a block: queues fill and caches warm."""
STEPS_MIN = 3
"""Commits in a block, at least, for it to have a step time."""
WARM_STEPS = 20
"""Before the first block: by then batches have their usual size."""
START_SECONDS = 300.0
"""The run must have come so far within this."""
CALLS_SECONDS = 10.0
"""Calls into the reporter are counted over so long."""
CALLS_PER_PHASE = 2
"""Entering a phase and leaving it."""
COST_MAX = 0.01
"""The bar: watching may lengthen a step by this share."""


def find(run: Path) -> dict[str, list[int]]:
    """PIDs of the run's agents and watch, by kind."""
    found: dict[str, list[int]] = {"agent": [], "watch": []}
    for process in find_processes(run):
        try:
            argv = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if b"rolecall.agent" in argv:
            found["agent"].append(process.pid)
        elif b"watch" in argv:
            found["watch"].append(process.pid)
    return found


def watching(run: Path, pids: Sequence[int], on: bool) -> None:
    switch = run / "reporter.off"
    if on:
        switch.unlink(missing_ok=True)
    else:
        switch.touch()
    for pid in pids:
        os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)


def step_seconds(journal: Journal, since: float, until: float) -> tuple[float, int]:
    """(mean time between commits of the steps committed within (since, until), how many). Raises SystemExit on none."""
    at = [e.wall_at for e in journal.events(kinds=[EventKind.STEP_COMMITTED]) if since <= e.wall_at <= until]
    if len(at) < STEPS_MIN:
        raise SystemExit(f"{len(at)} steps in {until - since:.0f} s: blocks must be longer")
    return (at[-1] - at[0]) / (len(at) - 1), len(at) - 1


def reporter_call_microseconds(calls: int = 200_000) -> float:
    """Cost of one `progress` call on a page, by itself."""
    began = time.perf_counter()
    for _ in range(calls):
        reporter.progress(busy_seconds=0.01, tokens=3)
    return (time.perf_counter() - began) / calls * 1e6


def reporter_calls_per_second(run: Path) -> float:
    """Of the busiest process: units of work and phases that it reports. Watching must be on."""
    clock = SystemClock()
    source = AgentsSource(lambda: agent_urls(RunDir(run)), clock)
    first: dict[ProcessId, tuple[float, int]] = {}
    most = 0.0
    source.start()
    try:
        until = clock.monotonic() + CALLS_SECONDS
        while clock.monotonic() < until:
            for batch in source.poll(1.0).batches:
                for s in batch.processes:
                    calls = s.progress + CALLS_PER_PHASE * s.phase_entries
                    at, before = first.setdefault(s.process, (s.at, calls))
                    if s.at - at > CALLS_SECONDS / 2:
                        most = max(most, (calls - before) / (s.at - at))
    finally:
        source.close()
    return most


@dataclass
class Blocks:
    """What the blocks of one run gave."""

    on: list[float] = field(default_factory=list)  # mean step time of each block
    off: list[float] = field(default_factory=list)
    steps: int = 0
    cpu: dict[str, float] = field(default_factory=lambda: {"agent": 0.0, "watch": 0.0})  # in on blocks
    on_seconds: float = 0.0

    @property
    def costs(self) -> list[float]:
        """Of each pair: by what share a step is longer with watching."""
        return [on / off - 1 for on, off in zip(self.on, self.off, strict=True)]


def started(process: subprocess.Popen[bytes], run: Path) -> Journal:
    """Waits until the run has made its first steps; its journal."""
    journal: Journal | None = None
    deadline = time.monotonic() + START_SECONDS
    while journal is None or len(journal.events(kinds=[EventKind.STEP_COMMITTED])) < WARM_STEPS:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run did not get going")
        time.sleep(1.0)
        if journal is None and (run / "run.json").exists():
            journal = Journal(f"sqlite:///{run / 'journal.db'}", create=False)
    return journal


def measure(
    run: Path, journal: Journal, pids: dict[str, list[int]], pairs: int, seconds: float, rng: random.Random
) -> Blocks:
    """All pairs of blocks."""
    blocks = Blocks()
    everyone = [pid for kind in pids.values() for pid in kind]
    for pair in range(pairs):
        for on in rng.sample([True, False], 2):
            watching(run, everyone, on)
            before = {kind: sum(map(common.cpu_seconds, p)) for kind, p in pids.items()}
            began = time.time()
            time.sleep(seconds)
            mean, steps = step_seconds(journal, began + SETTLE_SECONDS, time.time())
            (blocks.on if on else blocks.off).append(mean)
            blocks.steps += steps
            if on:
                blocks.on_seconds += time.time() - began
                for kind, p in pids.items():
                    blocks.cpu[kind] += sum(map(common.cpu_seconds, p)) - before[kind]
        print(
            f"pair {pair}: on {blocks.on[-1]:.4f} s, off {blocks.off[-1]:.4f} s, {100 * blocks.costs[-1]:+.2f} %",
            flush=True,
        )
    watching(run, everyone, True)
    return blocks


def report(args: argparse.Namespace, blocks: Blocks, num_agents: int, calls: float, rng: random.Random) -> list[str]:
    costs, call = blocks.costs, reporter_call_microseconds()
    low, high = median_interval(costs, rng)
    own = calls * call * 1e-6
    total = statistics.median(costs) + own
    met = "met" if high + own <= COST_MAX else "not met by the whole interval" if total <= COST_MAX else "**not met**"
    per_node = blocks.cpu["agent"] / blocks.on_seconds / max(1, num_agents)
    middle, lower, upper = common.middle_and_spread(costs)
    return [
        *common.header("What watching costs a step", ", ".join(SETTINGS), str(args.seed)),
        (
            f"- {args.pairs} pairs of {args.block_seconds:.0f} s blocks, first {SETTLE_SECONDS:.0f} s of each left "
            f"out; {blocks.steps} steps"
        ),
        (
            f"- step time: {statistics.median(blocks.on):.4f} s with watching, {statistics.median(blocks.off):.4f} s "
            f"without (medians)"
        ),
        (
            f"- a step is longer with watching by {100 * middle:+.2f} % (median of pairs; 95 % bootstrap interval "
            f"{100 * low:+.2f} to "
            f"{100 * high:+.2f} %; quartiles {100 * lower:+.2f} to {100 * upper:+.2f} %; worst pair "
            f"{100 * max(costs):+.2f} %)"
        ),
        (
            f"- one reporter call: {call:.2f} microseconds; the busiest process makes {calls:.0f} a second: "
            f"{100 * own:.3f} % more"
        ),
        f"- together {100 * total:+.2f} %; bar {100 * COST_MAX:.0f} %: {met}",
        (
            f"- agent: {per_node:.4f} CPU seconds per second and node, {num_agents} nodes; "
            f"watch: {blocks.cpu['watch'] / blocks.on_seconds:.4f} per job of this size"
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left running
    rng = random.Random(args.seed)
    run_id = f"overhead-{int(time.time())}"
    run = common.RUNS / run_id
    minutes = args.pairs * 2 * args.block_seconds / 60 + START_SECONDS / 60 + 1
    argv = [sys.executable, "-m", "rolecall", "demo", "--faults", "none", "--plain", "--id", run_id]
    argv += ["--seed", str(args.seed), "--hold-minutes", f"{minutes:.1f}", "--minutes-max", f"{minutes + 5:.1f}"]
    for setting in SETTINGS:
        argv += ["--set", setting]
    process = subprocess.Popen(argv, cwd=common.ROOT, stdout=subprocess.DEVNULL)
    pids: dict[str, list[int]] = {}
    try:
        journal = started(process, run)
        pids = find(run)
        blocks = measure(run, journal, pids, args.pairs, args.block_seconds, rng)
        calls = reporter_calls_per_second(run)
    finally:
        for kind in pids.values():
            watching(run, [pid for pid in kind if Path(f"/proc/{pid}").exists()], True)
        process.terminate()
        process.wait(90)
    lines = report(args, blocks, len(pids["agent"]), calls, rng)
    common.publish("overhead", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
