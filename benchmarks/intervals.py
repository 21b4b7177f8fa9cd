"""Intervals of 95 %: exact ones of shares and counts, and a bootstrap of medians."""

import random
import statistics
from collections.abc import Sequence

from scipy import stats

CONFIDENCE = 0.95
BOOTSTRAP_ROUNDS = 10_000


def binomial_interval(k: int, n: int) -> tuple[float, float]:
    """Clopper and Pearson's, of a share."""
    tail = (1 - CONFIDENCE) / 2
    low = float(stats.beta.ppf(tail, k, n - k + 1)) if k else 0.0
    high = float(stats.beta.ppf(1 - tail, k + 1, n - k)) if k < n else 1.0
    return low, high


def poisson_interval(k: int) -> tuple[float, float]:
    """Exact (Garwood's) of the mean of a count."""
    tail = (1 - CONFIDENCE) / 2
    low = float(stats.chi2.ppf(tail, 2 * k)) / 2 if k else 0.0
    return low, float(stats.chi2.ppf(1 - tail, 2 * k + 2)) / 2


def poisson_upper(k: int) -> float:
    """Exact upper bound alone, of the mean of a count."""
    return float(stats.chi2.ppf(CONFIDENCE, 2 * k + 2)) / 2


def median_interval(values: Sequence[float], rng: random.Random, rounds: int = BOOTSTRAP_ROUNDS) -> tuple[float, float]:
    """Of the median, by bootstrap."""
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    tail = (1 - CONFIDENCE) / 2
    return medians[round(tail * rounds)], medians[round((1 - tail) * rounds)]
