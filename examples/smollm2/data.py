"""Writes arithmetic questions as JSON lines: `python data.py TRAIN HELD_OUT [NUM_TRAIN] [NUM_HELD_OUT] [SEED]`.

Sums and differences of two numbers of two digits (`chain_sum` of `reasoning-gym`). No question is in a file twice, and
none is in both.
"""

import json
import sys

import reasoning_gym


def main(train: str, held_out: str, num_train: int = 2000, num_held_out: int = 200, seed: int = 1) -> int:
    entries = reasoning_gym.create_dataset(
        "chain_sum", size=2 * (num_train + num_held_out), seed=seed, min_terms=2, max_terms=2, min_digits=2, max_digits=2
    )
    distinct = list({entry["question"]: entry for entry in entries}.values())
    for path, part in ((held_out, distinct[:num_held_out]), (train, distinct[num_held_out:][:num_train])):
        with open(path, "w", encoding="utf-8") as f:
            for entry in part:
                print(json.dumps({key: entry[key] for key in ("question", "answer", "metadata")}), file=f)
        print(f"{len(part)} questions in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
