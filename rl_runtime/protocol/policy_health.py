"""Policy health metrics that do not depend on a step's split or size.

Every microbatch gives sums and extremes; they are added over microbatches and replicas before means are taken. The same
step therefore has the same health on one replica and on four. A metric without data is None, never 0.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

ROUNDING = 1e-12
"""Fraction of a mean square below which a variance computed from sums is indistinguishable from 0."""
_MAXIMA = frozenset({"ratio_max", "length_max", "log_ratio_max"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSums:
    """Sums of one microbatch or of several. Tokens are those that the policy was trained on."""

    tokens: int = 0
    entropy: float = 0.0  # nats
    clippable: int = 0  # tokens whose ratio is clipped where it is out of range: all or none
    clipped_low: int = 0  # tokens whose gradient was clipped, by side
    clipped_high: int = 0
    clipped_dual: int = 0  # from above, with a negative advantage
    ratio: float = 0.0  # ratio to the policy that sampled the token
    ratio_squared: float = 0.0
    ratio_max: float = 0.0
    kl_sampler: float = 0.0  # r - 1 - log r, never below 0: estimates KL(sampler || policy)
    kl_reference: float = 0.0
    reference_tokens: int = 0  # tokens evaluated under the reference policy: all or none
    weighted: int = 0  # tokens with an importance weight: all or none
    capped: int = 0  # importance weights that were truncated
    judged: int = 0  # tokens that may be rejected: all or none
    rejected: int = 0  # tokens left out for their ratio to the sampler, or for that of their answer
    stale: int = 0  # fresh tokens that were too old to be trained on
    samples: int = 0
    ended: int = 0  # samples whose answer is complete
    truncated: int = 0  # of these, those cut off at the maximum length
    reward: float = 0.0  # of complete answers, from the task
    length: int = 0  # tokens of complete answers
    length_max: int = 0
    value_tokens: int = 0
    value_loss: float = 0.0
    value_clippable: int = 0  # tokens whose value is clipped where it moved too far: all or none
    value_clipped: int = 0
    returns: float = 0.0
    returns_squared: float = 0.0
    value_error: float = 0.0  # V - return
    value_error_squared: float = 0.0
    log_ratio_max: float = -1.0  # of tokens under the weights that sampled them; -1: none compared

    def __add__(self, other: Self) -> Self:
        joined = {}
        for f in fields(self):
            a, b = getattr(self, f.name), getattr(other, f.name)
            joined[f.name] = max(a, b) if f.name in _MAXIMA else a + b
        return type(self)(**joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHealth:
    """Metrics of one optimizer step. None: no data."""

    entropy: float | None  # nats per token
    clip_fraction_low: float | None
    clip_fraction_high: float | None
    clip_fraction_dual: float | None
    ratio_mean: float | None
    ratio_std: float | None
    ratio_max: float | None
    kl_sampler: float | None  # nats per token
    kl_reference: float | None
    capped_fraction: float | None
    rejected_fraction: float | None
    stale_fraction: float | None
    response_length: float | None  # mean tokens of complete answers
    response_length_max: int | None
    truncated_fraction: float | None
    value_loss: float | None
    value_clip_fraction: float | None
    explained_variance: float | None  # of the returns, by the critic before the step
    filtered_fraction: float | None = None  # share of the groups generated for the step; from the sampler

    def to_dict(self) -> dict[str, Any]:
        """The metrics that have a value, by name."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


def health(sums: HealthSums, *, filtered_fraction: float | None = None) -> PolicyHealth:
    """Means of the sums."""
    tokens, ended, values = sums.tokens or None, sums.ended or None, sums.value_tokens or None
    return PolicyHealth(
        entropy=sums.entropy / tokens if tokens else None,
        clip_fraction_low=_share(sums.clipped_low, sums.clippable),
        clip_fraction_high=_share(sums.clipped_high, sums.clippable),
        clip_fraction_dual=_share(sums.clipped_dual, sums.clippable),
        ratio_mean=sums.ratio / tokens if tokens else None,
        ratio_std=math.sqrt(_variance(sums.ratio, sums.ratio_squared, tokens)) if tokens else None,
        ratio_max=sums.ratio_max if tokens else None,
        kl_sampler=sums.kl_sampler / tokens if tokens else None,
        kl_reference=_share(sums.kl_reference, sums.reference_tokens),
        capped_fraction=_share(sums.capped, sums.weighted),
        rejected_fraction=_share(sums.rejected, sums.judged),
        stale_fraction=_share(sums.stale, sums.tokens + sums.stale),
        response_length=sums.length / ended if ended else None,
        response_length_max=sums.length_max if ended else None,
        truncated_fraction=sums.truncated / ended if ended else None,
        value_loss=sums.value_loss / values if values else None,
        value_clip_fraction=_share(sums.value_clipped, sums.value_clippable),
        explained_variance=_explained(sums, values) if values else None,
        filtered_fraction=filtered_fraction,
    )


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def _explained(sums: HealthSums, values: int) -> float | None:
    """1 - Var(V - return) / Var(return); None where all returns are equal."""
    spread = _variance(sums.returns, sums.returns_squared, values)
    # Returns are built from values: equal returns differ by the rounding error of the values, however small they are.
    if spread <= ROUNDING * sums.value_error_squared / values:
        return None
    return 1.0 - _variance(sums.value_error, sums.value_error_squared, values) / spread


def _variance(total: float, squares: float, count: int) -> float:
    """Variance from sums; 0 if the remainder is rounding error."""
    mean_square = squares / count
    found = mean_square - (total / count) ** 2
    return found if found > ROUNDING * mean_square else 0.0
