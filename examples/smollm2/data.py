"""Writes arithmetic questions as JSON lines: `python data.py FILE [NUMBER] [SEED]` (needs `reasoning-gym`)."""

import json
import sys

import reasoning_gym


def main(path: str, size: int = 2000, seed: int = 1) -> int:
    questions = reasoning_gym.create_dataset(
        "basic_arithmetic", size=size, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    with open(path, "w", encoding="utf-8") as f:
        for entry in questions:
            print(json.dumps({key: entry[key] for key in ("question", "answer", "metadata")}), file=f)
    print(f"{size} questions in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
