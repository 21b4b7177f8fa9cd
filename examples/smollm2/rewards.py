"""The reward: a tenth for any number, all for the right one as the last."""

import re


def right(response: str, answer: str) -> float:
    numbers = re.findall(r"-?\d+", response)
    return 0.1 * bool(numbers) + 0.9 * (bool(numbers) and numbers[-1] == answer)
