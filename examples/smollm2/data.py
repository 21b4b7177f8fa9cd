"""Writes arithmetic questions as JSON lines: `python data.py TRAIN HELD_OUT [NUM_TRAIN] [NUM_HELD_OUT] [SEED]`.

Questions are of `chain_sum` (`reasoning-gym`), two numbers of one digit, as "4 - 7 =". None is in a file twice, or in
both.
"""

import json
import sys

import reasoning_gym

NUM_ENTRIES = 10_000
"""Drawn from `reasoning-gym`: enough to meet each of the 200 questions."""


def main(train: str, held_out: str, num_train: int = 100, num_held_out: int = 100, seed: int = 1) -> int:
    entries = reasoning_gym.create_dataset(
        "chain_sum", size=NUM_ENTRIES, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    distinct = list({entry["metadata"]["expression"]: entry for entry in entries}.values())
    for path, part in ((held_out, distinct[:num_held_out]), (train, distinct[num_held_out:][:num_train])):
        with open(path, "w", encoding="utf-8") as f:
            for entry in part:
                row = {"question": f"{entry['metadata']['expression']} =", "answer": entry["answer"]}
                print(json.dumps(row), file=f)
        print(f"{len(part)} questions in {path}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(__doc__.splitlines()[0], file=sys.stderr)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
