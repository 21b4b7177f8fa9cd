"""Signs of a policy's health, that do not depend on how a step was cut or how large it was.

Every microbatch gives sums and extremes; they add up over microbatches and replicas, and only then means are taken. So
the same step has the same health on one replica and on four. What a step had none of is None, and never 0.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

ROUNDING = 1e-12
"""Share of a mean square below which a variance that was taken from sums is indistinguishable from 0."""
_MAXIMA = frozenset({"ratio_max", "length_max", "log_ratio_max"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSums:
    """Of one microbatch, or of several together. Tokens are those that the policy was trained on."""

    tokens: int = 0
    entropy: float = 0.0  # nats
    clipped_low: int = 0  # tokens whose clip took the gradient away, by side
    clipped_high: int = 0
    ratio: float = 0.0  # to the policy that made the token
    ratio_squared: float = 0.0
    ratio_max: float = 0.0
    kl_sampler: float = 0.0  # r - 1 - log r, never below 0: estimates KL(sampler || policy)
    kl_reference: float = 0.0
    reference_tokens: int = 0  # those that the policy of the run's beginning was asked about: all or none
    capped: int = 0  # importance weights that were truncated
    stale: int = 0  # fresh tokens that were too old to be trained on
    samples: int = 0
    ended: int = 0  # samples whose answer is complete
    truncated: int = 0  # of these, those that the longest response cut off
    reward: float = 0.0  # of complete answers, as the task gave it
    length: int = 0  # tokens of complete answers
    length_max: int = 0
    value_tokens: int = 0
    value_loss: float = 0.0
    returns: float = 0.0
    returns_squared: float = 0.0
    value_error: float = 0.0  # V - return
    value_error_squared: float = 0.0
    log_ratio_max: float = -1.0  # of tokens, by the very weights that made them; -1: none was asked

    def __add__(self, other: Self) -> Self:
        joined = {}
        for f in fields(self):
            a, b = getattr(self, f.name), getattr(other, f.name)
            joined[f.name] = max(a, b) if f.name in _MAXIMA else a + b
        return type(self)(**joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHealth:
    """Of one optimizer step. None: the step had nothing to measure it on."""

    entropy: float | None  # nats a token
    clip_fraction_low: float | None
    clip_fraction_high: float | None
    ratio_mean: float | None
    ratio_std: float | None
    ratio_max: float | None
    kl_sampler: float | None  # nats a token
    kl_reference: float | None
    capped_fraction: float | None
    stale_fraction: float | None
    response_length: float | None  # mean tokens of the complete answers
    response_length_max: int | None
    truncated_fraction: float | None
    value_loss: float | None
    explained_variance: float | None  # of the returns, by the critic before the step
    filtered_fraction: float | None = None  # of the groups generated for the step; the sampler's

    def to_dict(self) -> dict[str, Any]:
        """What there is, by name."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        return cls(**{f.name: d.get(f.name) for f in fields(cls)})


def health(sums: HealthSums, *, filtered_fraction: float | None = None) -> PolicyHealth:
    """Means of the sums."""
    s = sums
    tokens, ended, values = s.tokens or None, s.ended or None, s.value_tokens or None
    return PolicyHealth(
        entropy=s.entropy / tokens if tokens else None,
        clip_fraction_low=s.clipped_low / tokens if tokens else None,
        clip_fraction_high=s.clipped_high / tokens if tokens else None,
        ratio_mean=s.ratio / tokens if tokens else None,
        ratio_std=math.sqrt(_variance(s.ratio, s.ratio_squared, tokens)) if tokens else None,
        ratio_max=s.ratio_max if tokens else None,
        kl_sampler=s.kl_sampler / tokens if tokens else None,
        kl_reference=s.kl_reference / s.reference_tokens if s.reference_tokens else None,
        capped_fraction=s.capped / tokens if tokens else None,
        stale_fraction=s.stale / (s.tokens + s.stale) if s.tokens + s.stale else None,
        response_length=s.length / ended if ended else None,
        response_length_max=s.length_max if ended else None,
        truncated_fraction=s.truncated / ended if ended else None,
        value_loss=s.value_loss / values if values else None,
        explained_variance=_explained(s, values) if values else None,
        filtered_fraction=filtered_fraction,
    )


def _explained(s: HealthSums, values: int) -> float | None:
    """1 - Var(V - return) / Var(return); None where all returns are equal."""
    spread = _variance(s.returns, s.returns_squared, values)
    # Returns are made of values: equal ones differ by the rounding of those, however small they are themselves.
    if spread <= ROUNDING * s.value_error_squared / values:
        return None
    return 1.0 - _variance(s.value_error, s.value_error_squared, values) / spread


def _variance(total: float, squares: float, count: int) -> float:
    """From sums; 0 where what is left is their rounding."""
    mean_square = squares / count
    found = mean_square - (total / count) ** 2
    return found if found > ROUNDING * mean_square else 0.0
