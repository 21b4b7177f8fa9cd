"""How often is a healthy microbatch outside the learned band, and how often one whose numbers are multiplied?

    python -m benchmarks.detection.microbatch_band [--seeds 103 104]

Learns with each algorithm from random weights, in one process (`tests/rl_runtime/learning.py`). What is outside is
computed again by the same trainer and is the same, so the run goes on as one with a controller would.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.rl_runtime.protocol.messages import MicrobatchNumbers
from rolecall.rl_runtime.tasks.reward_worker import task_of
from rolecall.rl_runtime.trainer.band import LOSS_SPREADS, NORM_FACTOR, NORM_SPREADS, WARM_UP, LearnedBand
from rolecall.rl_runtime.trainer.model import write_model_folder
from tests.rl_runtime.learning import ModelSequenceGenerator, learn

FACTORS = (3, 10, 30, 100, 1000)
NUM_STEPS, STALENESS = 140, 2
SMALL = {"hidden_size": 64, "intermediate_size": 128}
DIGITS, ADDITION = {"num_digits": 8}, {"name": "long_addition", "num_digits": 6}
RUNS: dict[str, dict[str, Any]] = {
    "grpo, digit_parity": {"algorithm": {"name": "grpo"}, "task": DIGITS},
    "dapo, digit_parity": {"algorithm": {"name": "dapo"}, "task": DIGITS},
    "ppo, digit_parity": {"algorithm": {"name": "ppo"}, "task": DIGITS},
    "tppo, digit_parity": {"algorithm": {"name": "tppo", "window_tokens": 10}, "task": DIGITS},
    "dapo, long_addition": {"algorithm": {"name": "dapo"}, "task": ADDITION},
    "ppo, long_addition": {"algorithm": {"name": "ppo"}, "task": ADDITION},
    "tppo, long_addition": {"algorithm": {"name": "tppo", "window_tokens": 6}, "task": ADDITION},
}


@dataclass(slots=True)
class Tally:
    judged: int = 0
    outside: list[str] = field(default_factory=list)
    found: Counter[int] = field(default_factory=Counter)  # factor -> microbatches outside when multiplied by it


def measure(job: JobConfig) -> Tally:
    """One healthy run."""
    tally, before = Tally(), LearnedBand()
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), job.model, 0, job.task.name)
        writer = ModelSequenceGenerator(Path(folder), eos=task_of(job).vocab.eos, seed=job.seed)
        for point in learn(job, writer, num_steps=NUM_STEPS, staleness=STALENESS):
            if len(before.learned) >= WARM_UP:
                _judge(tally, before, point.band.learned[-job.algorithm.microbatches_per_step :])
            tally.outside += [f"step {point.step}: {c.first.because}" for c in point.result.compared]
            before = point.band
    return tally


def _judge(tally: Tally, band: LearnedBand, of_step: Sequence[MicrobatchNumbers]) -> None:
    tally.judged += len(of_step)
    for one in of_step:
        for factor in FACTORS:
            wrong = MicrobatchNumbers(loss=one.loss * factor, grad_norm=one.grad_norm * factor)
            tally.found[factor] += bool(band.outside(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[103, 104])
    args = parser.parse_args()
    rows, total = list[str](), Tally()
    details: list[str] = []
    for name, value in RUNS.items():
        for seed in args.seeds:
            tally = measure(parse_job({"seed": seed, "model": SMALL, **value}))
            rows.append(_row(f"{name}, seed {seed}", tally))
            details += [f"- {name}, seed {seed}, {said}" for said in tally.outside]
            print(rows[-1], flush=True)
            total.judged += tally.judged
            total.outside += tally.outside
            total.found += tally.found
    config = f"{NUM_STEPS} steps of 4 microbatches, staleness {STALENESS}; band: loss {LOSS_SPREADS:g} spreads, "
    config += f"gradient norm {NORM_SPREADS:g} spreads and {NORM_FACTOR:g} times the median, from {WARM_UP} on"
    report = common.header("Microbatches outside the learned band", config, ", ".join(map(str, args.seeds)))
    report += [
        "Healthy: microbatches of healthy runs that were outside and computed again. x10: share of the same",
        "microbatches that would be outside if loss and gradient were ten times as large. The band was chosen on runs",
        "of seed 103.",
        "",
        "| run | judged | healthy, outside | " + " | ".join(f"x{factor}" for factor in FACTORS) + " |",
        "|---|" + "---|" * (2 + len(FACTORS)),
        *rows,
        _row("all", total),
        "",
        *details,
    ]
    print(common.write("microbatch_band", report))


def _row(name: str, tally: Tally) -> str:
    shares = " | ".join(f"{tally.found[factor] / max(1, tally.judged):.2f}" for factor in FACTORS)
    return f"| {name} | {tally.judged:,} | {len(tally.outside)} | {shares} |"


if __name__ == "__main__":
    main()
