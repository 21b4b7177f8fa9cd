"""Policy-health metrics of a step, as in the journal: meaning and normal range of each.

The metrics of trainers and of the run, both dashboards and the report are generated from this table. The values come
from rl_runtime/protocol/policy_health.py. A step has only measured values: a step without a finished answer has no
length. A missing value stays missing, because 0 would be a finding.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rolecall.core.journal.payloads.run import StepCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHealthMetric:
    name: str  # field of rl_runtime's PolicyHealth and, where a trainer reports it, of ProcessSample
    metric: str  # behind `rolecall_run_`, and `rolecall_train_` where a trainer reports it
    help: str
    normal: str  # its normal range, for newcomers

    @property
    def is_extreme(self) -> bool:
        """Over several steps it is aggregated by the maximum, not the mean."""
        return self.name.endswith("_max")


LOG_RATIO_ALARM: Final = 0.02
"""Nats. With the same weights in float32, log-probabilities agree to 1e-5 between machines; one matrix with noise of
0.3 of its deviation gives 0.02 in most steps, long before rewards change. Engines of another precision always differ
more and are compared with their own history."""
LOG_RATIO_ALARMS: Final = {"float32": LOG_RATIO_ALARM, "bfloat16": 1.0}
"""By the dtype that engines and trainers compute with, where one step decides. A bfloat16 logit between 8 and 16 is
rounded to a sixteenth, on both sides: the largest difference in 128 tokens of SmolLM2-135M was 0.37 (measured)."""

SIGNS = (
    PolicyHealthMetric(
        name="entropy",
        metric="entropy_nats",
        help="Mean entropy of the policy over the trained tokens",
        normal="Falls slowly while the policy learns, to nearly 0 when it has converged. Nearly 0 at a low reward: the "
        "policy has collapsed and learns nothing more. A lasting rise: its output becomes random.",
    ),
    PolicyHealthMetric(
        name="clip_fraction_low",
        metric="clip_low_ratio",
        help="Trained tokens whose ratio was clipped from below",
        normal="Usually a few percent, more in the first steps. Persistently more: the policy has diverged from the "
        "sampler.",
    ),
    PolicyHealthMetric(
        name="clip_fraction_high",
        metric="clip_high_ratio",
        help="Trained tokens whose ratio was clipped from above",
        normal="As from below; with a wider upper bound it is the smaller of the two.",
    ),
    PolicyHealthMetric(
        name="clip_fraction_dual",
        metric="clip_dual_ratio",
        help="Trained tokens with a negative advantage whose ratio was clipped from above",
        normal="Nearly 0. More: wrong tokens have become far likelier since they were sampled, or engine and trainer "
        "disagree.",
    ),
    PolicyHealthMetric(
        name="ratio_mean",
        metric="ratio_mean",
        help="Mean importance ratio of the policy to the sampler",
        normal="Usually close to 1, whatever the staleness.",
    ),
    PolicyHealthMetric(
        name="ratio_std",
        metric="ratio_std",
        help="Standard deviation of the importance ratios",
        normal="Usually below 1, larger with staleness; single steps may be above.",
    ),
    PolicyHealthMetric(
        name="ratio_max",
        metric="ratio_max",
        help="Largest importance ratio of a trained token",
        normal="Below about 10; single tokens may be far above.",
    ),
    PolicyHealthMetric(
        name="kl_sampler",
        metric="kl_sampler_nats",
        help="KL from the sampler to the policy, per token",
        normal="Usually near or below 0.1 after the first steps; stale tokens raise single steps. A lasting rise: the "
        "policy diverges from its engines.",
    ),
    PolicyHealthMetric(
        name="kl_reference",
        metric="kl_reference_nats",
        help="KL to the reference policy, a token; absent without one",
        normal="Grows slowly; only with a reference policy.",
    ),
    PolicyHealthMetric(
        name="capped_fraction",
        metric="capped_ratio",
        help="Trained tokens whose importance weight was truncated",
        normal="A few percent at most; absent where weights are not truncated.",
    ),
    PolicyHealthMetric(
        name="rejected_fraction",
        metric="rejected_ratio",
        help="Trained tokens left out for their ratio to the sampler, or for that of their answer",
        normal="A few percent at most; absent without rejection. More: engine and trainer disagree, or the bounds are "
        "too narrow for the staleness.",
    ),
    PolicyHealthMetric(
        name="stale_fraction",
        metric="stale_ratio",
        help="Fresh tokens that were too old to be trained on",
        normal="Usually 0, more around a fault: discarded tokens were generated for nothing.",
    ),
    PolicyHealthMetric(
        name="response_length",
        metric="response_tokens",
        help="Mean tokens of the step's finished answers",
        normal="Depends on the task. A drop to a few tokens or a rise to the limit: the policy exploits the reward.",
    ),
    PolicyHealthMetric(
        name="response_length_max",
        metric="response_tokens_max",
        help="Most tokens of one of these answers",
        normal="At most the longest response that the job allows; early answers often reach it.",
    ),
    PolicyHealthMetric(
        name="truncated_fraction",
        metric="truncated_ratio",
        help="Share of these answers truncated at max_response_tokens",
        normal="Often nearly all until the policy learns to stop, then a few percent. If it stays high, the reward "
        "scores incomplete responses.",
    ),
    PolicyHealthMetric(
        name="filtered_fraction",
        metric="filtered_ratio",
        help="Share of the step's generated groups dropped by dynamic sampling",
        normal="High at the start (all wrong) and at the end (all right). If nearly all are filtered, steps take very "
        "long.",
    ),
    PolicyHealthMetric(
        name="value_loss",
        metric="value_loss",
        help="Loss of the critic; absent without one",
        normal="Falls at first, then follows the rewards.",
    ),
    PolicyHealthMetric(
        name="value_clip_fraction",
        metric="value_clip_ratio",
        help="The critic's tokens whose value was clipped; absent without value_clip or with one update a step",
        normal="A few percent.",
    ),
    PolicyHealthMetric(
        name="explained_variance",
        metric="explained_variance",
        help="Share of the returns' variance that the critic explains, 1 at best; absent without one",
        normal="Rises towards 1. At 0 the critic predicts no better than the mean; below 0, worse.",
    ),
    PolicyHealthMetric(
        name="log_ratio_max",
        metric="log_ratio_max",
        help="Largest difference of log-probabilities between trainer and engine on the same version",
        normal="For the same weights only rounding, below 0.01 at equal precision. More: one of the two computes wrong "
        "values. No value for steps whose tokens all come from weights that no trainer holds any more.",
    ),
)
BY_NAME = {sign.name: sign for sign in SIGNS}


def policy_health_of(step: "StepCommitted") -> dict[str, float]:
    """Policy-health metrics of a committed step, by name; only those measured."""
    reported = {"log_ratio_max": step.log_ratio_max, **step.health}
    found = {name: reported.get(name) for name in BY_NAME}
    return {name: value for name, value in found.items() if value is not None and not math.isnan(value)}
