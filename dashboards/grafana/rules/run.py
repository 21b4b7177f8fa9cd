"""Alerts on the progress of a run: stalled, low ETTR, non-finite values, missing replicas. An ended run raises none."""

from rolecall.dashboards.grafana.rules.rule import REPORTED_BY, UNLESS_ENDED, Alert, RuleGroup, Severity

GROUP = RuleGroup(
    name="rolecall-run",
    rules=(
        Alert(
            name="RolecallRunStalled",
            expr=f"""time() - rolecall_run_step_timestamp_seconds
            > clamp_min(10 * avg_over_time(rolecall_run_step_seconds[1h]), 300) {UNLESS_ENDED}""",
            hold="30s",
            severity=Severity.CRITICAL,
            summary=f"No step was committed for {{{{ $value | humanizeDuration }}}} {REPORTED_BY}",
            description="That is more than ten times the mean step time of the last hour, and more than five minutes.",
        ),
        Alert(
            name="RolecallEttrLow",
            expr=f"""delta(rolecall_run_effective_seconds[1h]) / (delta(rolecall_run_training_seconds[1h]) > 1200) < 0.8
            {UNLESS_ENDED}""",
            hold="10m",
            severity=Severity.WARNING,
            summary=f"ETTR of the last hour is {{{{ $value | humanizePercentage }}}} {REPORTED_BY}",
            description="More than a fifth of the hour was lost to faults. `rolecall_run_lost_seconds` shows to which "
            "ones.",
        ),
        Alert(
            name="RolecallTrainingNonFinite",
            expr="increase(rolecall_train_unfinite_total[10m]) > 0",
            severity=Severity.CRITICAL,
            summary="Loss, gradient norm or reward of {{ $labels.replica }} is NaN or infinite",
            description='{{ $value | printf "%.0f" }} time(s) in 10 minutes, on {{ $labels.node }}. Possible causes: '
            "an unstable recipe, bad data, or a GPU that computes wrong results.",
        ),
        Alert(
            name="RolecallRoleDown",
            expr=f"""sum by (job, instance, role) (rolecall_replicas{{state=~"ready|serving", role!="standby"}}) == 0
            and on (job, instance, role) rolecall_replicas_wanted > 0
            and on (job, instance) rolecall_run_step >= 0 {UNLESS_ENDED}""",
            hold="1m",
            severity=Severity.CRITICAL,
            summary="No replica of role {{ $labels.role }} is serving",
            description="Every replica of {{ $labels.role }} is lost, starting or stopped: the run makes no progress.",
        ),
        Alert(
            name="RolecallRoleDegraded",
            expr=f"""sum by (job, instance, role) (rolecall_replicas{{state=~"ready|serving"}})
            / on (job, instance, role) (rolecall_replicas_wanted > 0) < 0.75
            and on (job, instance) rolecall_run_step >= 0 {UNLESS_ENDED}""",
            hold="10m",
            severity=Severity.WARNING,
            summary="Only {{ $value | humanizePercentage }} of the {{ $labels.role }} replicas are serving",
            description="Fewer than three quarters of the desired replicas for ten minutes: replacements do not become "
            "ready.",
        ),
    ),
)
