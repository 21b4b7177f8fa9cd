"""The reward: 1 for the right number at the end, less the further it is away, 0 without a number."""

import re


def right(response: str, answer: str) -> float:
    numbers = re.findall(r"-?\d+", response)
    return 1 / (1 + abs(int(numbers[-1]) - int(answer))) if numbers else 0.0
