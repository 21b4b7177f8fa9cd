"""The record of one run: its rewards, and what was spent until some reward.

A reward is a mean over `SMOOTH_STEPS` steps, of all answers that ended in them. A run that ended because dynamic
sampling found nothing more to teach keeps its last reward. Whatever a run did not reach counts as later than all that
was reached.
"""

import math
import statistics
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from benchmarks.learning.runs import NOT_FILLED

SMOOTH_STEPS = 5
LAST_STEPS = 10
"""What a run ended with is the mean of so many steps."""
Record = dict[str, Any]


def known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def smoothed(record: Record) -> list[float]:
    """Reward by step; 0 until the first answer has ended."""
    rewards, found = record["columns"]["reward"], list[float]()
    for i in range(len(rewards)):
        last = known(rewards[max(0, i + 1 - SMOOTH_STEPS) : i + 1])
        found.append(statistics.fmean(last) if last else found[-1] if found else 0.0)
    return found


def ended_with(record: Record, column: str) -> float:
    last = known(record["columns"][column][-LAST_STEPS:])
    return statistics.fmean(last) if last else math.nan


def total(record: Record, column: str) -> list[float]:
    """Up to and with each step. `step` counts steps, `seconds` is generating and training together."""
    columns = record["columns"]
    if column == "step":
        return [float(i + 1) for i in range(len(columns["reward"]))]
    if column == "seconds":
        return list(accumulate(w + t for w, t in zip(columns["write_seconds"], columns["train_seconds"], strict=True)))
    return list(accumulate(columns[column]))


def reached(record: Record, goal: float) -> int | None:
    """Index of the first step at which the reward is that high, with as many steps as it is a mean of behind it."""
    return next((i for i, r in enumerate(smoothed(record)) if i >= SMOOTH_STEPS - 1 and r >= goal), None)


def reward_at(record: Record, column: str, amount: float) -> float | None:
    """Reward once so much was spent; None: the run ended before, and not because all was learnt."""
    spent, rewards = total(record, column), smoothed(record)
    for have, reward in zip(spent, rewards, strict=True):
        if have >= amount:
            return reward
    return rewards[-1] if rewards and record["ended"].startswith(NOT_FILLED) else None


def spent_until(record: Record, goal: float, column: str) -> float | None:
    at = reached(record, goal)
    return None if at is None else total(record, column)[at]


def examined_at(record: Record, goal: float) -> float | None:
    return next((seconds for _, seconds, reward, _ in record["exams"] if reward >= goal), None)


def slots(record: Record) -> list[float]:
    """Places for a token that the engine steps of each step had."""
    columns = record["columns"]
    return [f * s for f, s in zip(columns["forwards"], columns["samples"], strict=True)]


def generation_rate(record: Record) -> float:
    return float(sum(record["columns"]["tokens"]) / sum(record["columns"]["write_seconds"]))
