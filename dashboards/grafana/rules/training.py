"""Alerts on policy health: collapsed entropy, divergence from the sampler, batches without a training signal.

They read the run's metrics from its journal (core/policy_health.py), so they cover jobs that rolecall runs. The
collapse detector is more sensitive and usually fires first; these alerts cover runs where it is disabled, and cases in
which only the user knows whether the value is intended. None of them points to a faulty machine.
"""

from rolecall.dashboards.grafana.rules.rule import REPORTED_BY, UNLESS_ENDED, Alert, RuleGroup, Severity

TRUNCATED_RATIO_MAX = 0.95
"""Of responses, for "nearly all": a few end in time by chance."""
FILTERED_RATIO_MAX = 0.85
"""Of groups. With `refills_max` 10 and `at_refill_limit: fail` a run fails once more than 0.9 of them are filtered."""
KL_MAX_NATS = 0.2
"""Per token: importance weights then spread by a factor of two. Steps of a healthy demo reach 0.07 with stale
tokens."""
ENTROPY_COLLAPSE_RATIO = 0.1
"""Of its mean over six hours. Learning alone does not lower entropy that fast."""

GROUP = RuleGroup(
    name="rolecall-training",
    rules=(
        Alert(
            name="RolecallEntropyCollapsed",
            # While a policy learns, entropy falls and reward rises: a reward above its own mean excuses low entropy.
            expr=f"""avg_over_time(rolecall_run_entropy_nats[10m])
            < {ENTROPY_COLLAPSE_RATIO} * avg_over_time(rolecall_run_entropy_nats[6h])
            and on (job, instance) avg_over_time(rolecall_run_reward[10m]) <= avg_over_time(rolecall_run_reward[6h])
            {UNLESS_ENDED}""",
            hold="5m",
            severity=Severity.CRITICAL,
            summary=f"Policy entropy has collapsed {REPORTED_BY}",
            description='Entropy is {{ $value | printf "%.4f" }} nats per token, less than a tenth of its mean over '
            "six hours, and the reward has not risen. The policy gives the same response to every prompt and stops "
            "learning.",
        ),
        Alert(
            name="RolecallPolicyDiverged",
            expr=f"avg_over_time(rolecall_run_kl_sampler_nats[10m]) > {KL_MAX_NATS} {UNLESS_ENDED}",
            hold="5m",
            severity=Severity.CRITICAL,
            summary=f"The policy has diverged from the sampler {REPORTED_BY}",
            description='KL divergence to the sampler averages {{ $value | printf "%.2f" }} nats per token over ten '
            "minutes; healthy runs stay below 0.1. Possible causes: steps too large, tokens too stale, or inference "
            "and training compute different log probabilities.",
        ),
        Alert(
            name="RolecallResponsesTruncated",
            expr=f"min_over_time(rolecall_run_truncated_ratio[10m]) > {TRUNCATED_RATIO_MAX} {UNLESS_ENDED}",
            hold="10m",
            severity=Severity.WARNING,
            summary=f"{{{{ $value | humanizePercentage }}}} of the responses are truncated {REPORTED_BY}",
            description="In every step of the last ten minutes nearly all responses hit the length limit, so the "
            "reward scores incomplete responses.",
        ),
        Alert(
            name="RolecallGroupsFiltered",
            expr=f"min_over_time(rolecall_run_filtered_ratio[10m]) > {FILTERED_RATIO_MAX} {UNLESS_ENDED}",
            hold="10m",
            severity=Severity.WARNING,
            summary=f"{{{{ $value | humanizePercentage }}}} of the prompt groups are filtered {REPORTED_BY}",
            description="In every step of the last ten minutes dynamic sampling dropped nearly all groups, because all "
            "their responses had the same reward. Most generated tokens are not trained on.",
        ),
    ),
)
