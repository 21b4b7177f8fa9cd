"""Formats ranks and counts."""

from collections.abc import Iterable

NUM_PARTS = 6
"""Maximum number of ranks and ranges in a sentence."""


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2 and 5`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [p for a, b in runs for p in ([f"{a}-{b}"] if b > a + 1 else [str(r) for r in range(a, b + 1)])]
    words = parts[:NUM_PARTS]
    more = len(ordered) - sum(_span(p) for p in words)
    if more:
        words.append(f"{more} more")
    listed = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"rank{'s' if len(ordered) != 1 else ''} {listed}"


def _span(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1


def count_text(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
