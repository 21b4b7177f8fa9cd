"""Alerts on the training itself: signs that the policy has collapsed, or that what is generated teaches nothing.

They look at the run as its journal has it (core/policy_health.py), so at jobs that rolecall runs. The detector's own finding of a
collapse looks closer and comes first; these stand where it is off, and where it cannot know whether a sign is meant. No
machine is at fault in any of them.
"""

from rolecall.dashboards.grafana.rules.rule import Alert, RuleGroup, Severity
from rolecall.dashboards.grafana.rules.watch import RUNNING, SAID_BY

ALL = 0.95
"""Of answers, for "all": single ones get through by chance."""
FILTERED = 0.85
"""Of groups: with `refills_max` 10 and `at_refill_limit: fail` a run ends before more than 0.9 of them are."""
KL_HIGH_NATS = 0.2
"""A token: importance weights spread by a factor of two. Single steps of a healthy demo reach 0.07 with stale tokens."""
SHUT = 0.1
"""Of its mean over six hours: entropy that falls so fast does not fall by learning."""

_TRAINING = (
    Alert(
        name="RolecallEntropyCollapsed",
        # While a policy learns, its reward rises as its entropy falls: that is above its own mean.
        expr=f"""avg_over_time(rolecall_run_entropy_nats[10m]) < {SHUT} * avg_over_time(rolecall_run_entropy_nats[6h])
        and on (job, instance) avg_over_time(rolecall_run_reward[10m]) <= avg_over_time(rolecall_run_reward[6h])
        {RUNNING}""",
        hold="5m",
        severity=Severity.CRITICAL,
        summary=f"the policy's entropy has collapsed, {SAID_BY}",
        description='It is {{ $value | printf "%.4f" }} nats a token, less than a tenth of its mean over six hours, and the '
        "reward has not risen for it: one answer for everything, from which nothing is learned.",
    ),
    Alert(
        name="RolecallPolicyRanAway",
        expr=f"avg_over_time(rolecall_run_kl_sampler_nats[10m]) > {KL_HIGH_NATS} {RUNNING}",
        hold="5m",
        severity=Severity.CRITICAL,
        summary=f"the policy is far from who makes its tokens, {SAID_BY}",
        description='KL to the sampler is {{ $value | printf "%.2f" }} nats a token in the mean of ten minutes; healthy runs '
        "stay below 0.1. Steps are too large, tokens too old, or engines and trainers compute different things.",
    ),
    Alert(
        name="RolecallAllTruncated",
        expr=f"min_over_time(rolecall_run_truncated_ratio[10m]) > {ALL} {RUNNING}",
        hold="10m",
        severity=Severity.WARNING,
        summary=f"{{{{ $value | humanizePercentage }}}} of the answers are cut off, {SAID_BY}",
        description="At the longest response, in every step of ten minutes: what is rewarded is no longer an answer.",
    ),
    Alert(
        name="RolecallAllFiltered",
        expr=f"min_over_time(rolecall_run_filtered_ratio[10m]) > {FILTERED} {RUNNING}",
        hold="10m",
        severity=Severity.WARNING,
        summary=f"{{{{ $value | humanizePercentage }}}} of the groups teach nothing, {SAID_BY}",
        description="Dynamic sampling drops them, in every step of ten minutes: all right or all wrong. Engines generate, "
        "and hardly anything is trained on.",
    ),
)

TRAINING_GROUPS = (RuleGroup(name="rolecall-training", rules=_TRAINING),)
