"""Exactly once over a user's dataset: `python -m benchmarks.runtime.dataset_audit`.

A dataset of 17 rows, one of them too long, and twelve steps, which take several epochs, on a simulated fleet with the
real controller, journal and ledger. Each controller is killed before or after a seeded effect (a write to journal or
ledger, or a call to a replica); its successor continues. Counted: rows that an epoch lacks or has twice, groups that
are trained twice, and groups without an end.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import common
from rolecall.core.journal.ledger import Ledger
from tests.rl_runtime.controller.test_controller_dataset import NUM_ROWS, Rows
from tests.rl_runtime.loop import World, small_job

DEATHS = 3
EFFECTS = 400


def run_one(seed: int) -> tuple[int, int, int, int, int]:
    """(kills, groups, lost, doubled, epochs)."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        world = World(
            small_job(), Path(folder), seed, deaths=[rng.randrange(1, EFFECTS) for _ in range(DEATHS)], source=Rows
        ).run()
        audit = world.check()
        lines = list(Ledger(world.journal.store).lines())
        world.journal.close()
    issued = Counter(line["reason"].partition(" row ")[2] for line in lines if line["state"] == "issued")
    epochs = Counter(int(origin.split()[2]) for origin in issued)
    lost = sum(NUM_ROWS - epochs[e] for e in range(max(epochs))) + audit.unaccounted
    doubled = sum(n - 1 for n in issued.values()) + audit.duplicates
    return len(world.controllers) - 1, len(issued), lost, doubled, len(epochs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=70, help="runs, each with up to three kills")
    parser.add_argument("--first", type=int, default=1000)
    args = parser.parse_args()
    rows = []
    for n in range(args.seeds):
        rows.append(run_one(args.first + n))
        if n % 10 == 9:
            print(f"{n + 1} of {args.seeds} runs, {sum(r[0] for r in rows)} kills", file=sys.stderr, flush=True)
    kills, groups, lost, doubled, epochs = (sum(r[k] for r in rows) for k in range(5))
    seeds = f"{args.first} to {args.first + args.seeds - 1}"
    lines = [
        *common.header("Exactly once over a dataset", config=f"{NUM_ROWS} rows, 12 steps of 8 groups", seeds=seeds),
        "| runs | kills of a controller | groups issued | epochs begun | lost | doubled |",
        "|---|---|---|---|---|---|",
        f"| {len(rows)} | {kills} | {groups} | {epochs} | {lost} | {doubled} |",
        "",
        "Bar: 200 kills, 0 lost, 0 doubled. " + ("Met." if kills >= 200 and not lost + doubled else "Not met."),
    ]
    common.write("dataset_audit", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
