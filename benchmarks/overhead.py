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
from pathlib import Path

import common

from rolecall.core.events import EventKind
from rolecall.core.journal import Journal

SETTLE_SECONDS = 4.0
"""Left out at the beginning of a block: queues fill and caches warm."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def find(run: Path) -> dict[str, list[int]]:
    """PIDs of the run's agents and watch, by kind."""
    found: dict[str, list[int]] = {"agent": [], "watch": []}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
            argv = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"ROLECALL_RUN={run}".encode() not in environ.split(b"\0"):
            continue
        if b"rolecall.agent" in argv:
            found["agent"].append(int(entry))
        elif b"watch" in argv:
            found["watch"].append(int(entry))
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
    return total


def watching(run: Path, pids: Sequence[int], on: bool) -> None:
    switch = run / "reporter.off"
    if on:
        switch.unlink(missing_ok=True)
    else:
        switch.touch()
    for pid in pids:
        os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)


def step_seconds(journal: Journal, since: float, until: float) -> float:
    """Mean time between commits of the steps committed within (since, until), wall seconds."""
    at = [e.wall_at for e in journal.events(kinds=[EventKind.STEP_COMMITTED]) if since <= e.wall_at <= until]
    return (at[-1] - at[0]) / (len(at) - 1)


def bootstrap(values: Sequence[float], rng: random.Random, rounds: int = 10_000) -> tuple[float, float]:
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def reporter_call_microseconds(calls: int = 200_000) -> float:
    """Cost of one `progress` call on a page, by itself."""
    from rolecall.agent import reporter

    began = time.perf_counter()
    for _ in range(calls):
        reporter.progress(busy_seconds=0.01, tokens=3)
    return (time.perf_counter() - began) / calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    run_id = f"overhead-{int(time.time())}"
    run = common.ROOT / "runs" / run_id
    minutes = args.pairs * 2 * args.block_seconds / 60 + 6
    settings = ["algorithm.learning_rate=0", "task.fixed_length=true", "recovery.mode=observe"]
    argv = [sys.executable, "-m", "rolecall", "demo", "--faults", "none", "--plain", "--id", run_id]
    argv += ["--seed", str(args.seed), "--hold-minutes", f"{minutes:.1f}", "--minutes-max", f"{minutes + 5:.1f}"]
    for setting in settings:
        argv += ["--set", setting]
    process = subprocess.Popen(argv, cwd=common.ROOT, stdout=subprocess.DEVNULL)
    ratios: list[float] = []
    journal: Journal | None = None
    pids: dict[str, list[int]] = {"agent": [], "watch": []}
    try:
        deadline = time.monotonic() + 240
        while journal is None or len(journal.events(kinds=[EventKind.STEP_COMMITTED])) < 20:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the run did not get going")
            time.sleep(1.0)
            if journal is None and (run / "run.json").exists():
                journal = Journal(f"sqlite:///{run / 'journal.db'}", create=False)
        pids = find(run)
        everyone = pids["agent"] + pids["watch"]
        used = {kind: 0.0 for kind in pids}
        on_seconds = 0.0
        for pair in range(args.pairs):
            order = [True, False] if rng.random() < 0.5 else [False, True]
            means: dict[bool, float] = {}
            for on in order:
                watching(run, everyone, on)
                before = {kind: cpu_seconds(p) for kind, p in pids.items()}
                began = time.time()
                time.sleep(args.block_seconds)
                means[on] = step_seconds(journal, began + SETTLE_SECONDS, time.time())
                if on:
                    on_seconds += args.block_seconds
                    for kind, p in pids.items():
                        used[kind] += cpu_seconds(p) - before[kind]
            ratios.append(means[True] / means[False] - 1)
            print(
                f"pair {pair}: on {means[True]:.4f} s, off {means[False]:.4f} s, {100 * ratios[-1]:+.2f} %", flush=True
            )
        watching(run, everyone, True)
    finally:
        for pid in pids["agent"] + pids["watch"]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        process.wait(90)
    low, high = bootstrap(ratios, rng)
    per_node = used["agent"] / on_seconds / max(1, len(pids["agent"]))
    lines = [
        *common.header("What watching costs a step", ", ".join(settings), str(args.seed)),
        f"- {args.pairs} pairs of {args.block_seconds:.0f} s blocks, first {SETTLE_SECONDS:.0f} s of each left out",
        (
            f"- step time with watching: median {100 * statistics.median(ratios):+.2f} % "
            f"(95 % bootstrap interval {100 * low:+.2f} to {100 * high:+.2f} %; pairs {100 * min(ratios):+.2f} to {100 * max(ratios):+.2f} %)"
        ),
        f"- agent: {per_node:.4f} CPU seconds per second and node; watch: {used['watch'] / on_seconds:.4f} per job of this size",
        f"- one reporter call: {reporter_call_microseconds():.2f} microseconds, about one per microbatch and engine step",
    ]
    path = common.write("overhead", lines)
    print("\n".join(lines), f"\nwritten to {path.relative_to(common.ROOT)}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
