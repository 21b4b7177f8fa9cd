"""What the default detector costs: `python -m benchmarks.panels.speed`. An array (metric, time, machine) in memory.

One tick of 21 metrics at 1 Hz for fleets of 1,000 to 10,000 machines: median and worst over a quarter of an hour, which
holds everything that happens seldom (ends of blocks, tails). Then a cold window of 15 minutes from its first tick to
its last, and the resident memory of the process without the array (0: within what a larger fleet had before). How the
median tick grows with the fleet: the exponent of a power law through all sizes, and a picture. What is compiled is
loaded before, or compiled where this is the first time on this computer; that time is reported by itself.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks import common
from benchmarks.pictures import growth
from rolecall.detector.panels.panel import Machine, PanelShape
from rolecall.detector.panels.sequential.detector import Sequential
from rolecall.detector.panels.sequential.elementwise import COMPILED_MACHINES, NUM_THREADS

NUM_METRICS = 21
NUM_TICKS = 900
SIZES = (1_000, 2_000, 5_000, 10_000)
TICK_SECONDS_MAX, COLD_SECONDS_MAX, MEMORY_BYTES_MAX = 0.06, 5.0, 2 << 30
READY_TICKS = 100  # after which all that is compiled has been used


def measured(size: int, seed: int, num_ticks: int = NUM_TICKS) -> tuple[float, float, float, float, int]:
    """(median tick, 99th percentile, worst, all ticks together, seconds; memory, bytes)."""
    before = common.resident_bytes()
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((NUM_METRICS, num_ticks, size), dtype=np.float32)
    values += np.arange(1, NUM_METRICS + 1, dtype=np.float32)[:, None, None] * 10
    shape = PanelShape(
        role="trainer",
        metrics=tuple(f"m{i}" for i in range(NUM_METRICS)),
        machines=tuple(Machine(node=f"n{i}") for i in range(size)),
        interval_seconds=1.0,
    )
    tracker = Sequential().track(shape)
    took: list[float] = []
    for t in range(num_ticks):
        began = time.perf_counter()
        tracker.tick(float(t), values[:, t])
        took.append(time.perf_counter() - began)
    middle, high = (float(x) for x in np.quantile(took, [0.5, 0.99]))
    return middle, high, max(took), sum(took), common.resident_bytes() - before - values.nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=sorted(SIZES, reverse=True))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = f"sequential, {NUM_METRICS} metrics, {NUM_TICKS} ticks of 1 s, {NUM_THREADS} threads"
    compiling, steady = (measured(COMPILED_MACHINES, args.seed, READY_TICKS)[3] for _ in range(2))
    lines = common.header("Cost of the default detector", config, str(args.seed))
    lines += ["| machines | tick P50 | P99 | worst | cold window of 15 minutes | memory | per machine and tick |"]
    lines += ["|---|---|---|---|---|---|---|"]
    curves: dict[str, dict[float, float]] = {"median tick": {}, "99th percentile": {}}
    for size in args.sizes:
        middle, high, worst, whole, memory = measured(size, args.seed)
        curves["median tick"][size], curves["99th percentile"][size] = 1e3 * middle, 1e3 * high
        lines.append(
            f"| {size:,} | {1e3 * middle:.1f} ms | {1e3 * high:.1f} ms | {1e3 * worst:.1f} ms | {whole:.2f} s | "
            f"{memory / 2**20:.0f} MiB | {1e6 * whole / NUM_TICKS / size:.2f} us |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    lines += [
        "",
        (
            f"Bars at 10,000 machines: a tick {1e3 * TICK_SECONDS_MAX:.0f} ms, a cold window {COLD_SECONDS_MAX:.0f} s, "
            f"memory {MEMORY_BYTES_MAX >> 30} GiB."
        ),
        f"Loading or compiling, once: {compiling - steady:.1f} s.",
    ]
    if len(args.sizes) > 1:
        sizes, ticks = np.array([*curves["median tick"].items()]).T
        exponent = float(np.polyfit(np.log(sizes), np.log(ticks), 1)[0])
        lines += [
            "",
            f"The median tick grows like the number of machines to the power of {exponent:.2f} (1: linearly).",
            "",
        ]
    path = common.publish("speed", lines)
    picture = path.with_suffix(".svg")
    picture.write_text(growth(f"Time of one tick, 21 metrics, {NUM_THREADS} threads", "machines", "ms", curves))
    path.write_text("\n".join([*lines, f"![Time of one tick against machines]({picture.name})"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
