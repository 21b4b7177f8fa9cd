"""Writes arithmetic questions as JSON lines: `python data.py TRAIN HELD_OUT [NUM_TRAIN] [NUM_HELD_OUT] [SEED]`.

Questions are of `basic_arithmetic` (`reasoning-gym`), as "Calculate -5 + 6.". None is in a file twice, or in both.
"""

import json
import sys

import reasoning_gym

NUM_ENTRIES = 10_000
"""Drawn from `reasoning-gym`: enough to meet nearly every question with two numbers of one digit."""


def main(train: str, held_out: str, num_train: int = 500, num_held_out: int = 200, seed: int = 1) -> int:
    entries = reasoning_gym.create_dataset(
        "basic_arithmetic",
        size=NUM_ENTRIES,
        seed=seed,
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=1,
        operators=["+", "-"],
    )
    # One question for each calculation: brackets would only repeat others.
    distinct = list({entry["question"]: entry for entry in entries if "(" not in entry["question"]}.values())
    for path, part in ((held_out, distinct[:num_held_out]), (train, distinct[num_held_out:][:num_train])):
        with open(path, "w", encoding="utf-8") as f:
            for entry in part:
                print(json.dumps({key: entry[key] for key in ("question", "answer", "metadata")}), file=f)
        print(f"{len(part)} questions in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
