"""Alerts on recovery: on-call was paged, a plan needs approval, an incident is not resolved, a limit is reached."""

from rolecall.dashboards.grafana.rules.rule import (
    OBSERVE_MODE,
    REPORTED_BY,
    UNLESS_ENDED,
    Alert,
    RuleGroup,
    Severity,
)

GROUP = RuleGroup(
    name="rolecall-recovery",
    rules=(
        Alert(
            name="RolecallNoRecoveryLeader",
            expr=f"""time() - rolecall_watch_lease_expires_timestamp_seconds > 30
            unless {OBSERVE_MODE} {UNLESS_ENDED}""",
            hold="1m",
            severity=Severity.CRITICAL,
            summary=f"No watch holds the run's recovery lease {REPORTED_BY}",
            description="The lease has expired and no watch has acquired it for a minute. Faults are detected, but no "
            "recovery action is taken.",
        ),
        Alert(
            name="RolecallOncallPaged",
            expr="increase(rolecall_persons_called_total[10m]) > 0",
            severity=Severity.CRITICAL,
            summary=f"rolecall paged on-call {REPORTED_BY}",
            description="Automatic recovery is exhausted or not allowed, the job was stopped, or a hold expired. "
            "`rolecall incidents` shows the reason.",
        ),
        Alert(
            name="RolecallPlanAwaitsApproval",
            expr="rolecall_plans_waiting > 0",
            hold="1m",
            severity=Severity.WARNING,
            summary=f"{{{{ $value }}}} recovery plan(s) await approval {REPORTED_BY}",
            description="The fault persists until an operator approves or rejects the plan. `rolecall incidents` shows "
            "the plan and its digest.",
        ),
        Alert(
            name="RolecallPlanExpiresSoon",
            expr="rolecall_plans_waiting_deadline_timestamp_seconds - time() < 120 and on (job, instance) "
            "rolecall_plans_waiting > 0",
            severity=Severity.CRITICAL,
            summary=f"A recovery plan expires in {{{{ $value | humanizeDuration }}}} {REPORTED_BY}",
            description="An expired plan is dropped and the fault persists. Run `rolecall approve DIGEST` or "
            "`rolecall reject DIGEST --reason ...`.",
        ),
        Alert(
            name="RolecallFaultObserved",
            expr=f"rolecall_incident_open == 1 and {OBSERVE_MODE}",
            hold="1m",
            severity=Severity.CRITICAL,
            summary="{{ $labels.fault }} of {{ $labels.replica }} on {{ $labels.node }}; the watch is in observe mode",
            description="The fault has lasted a minute, and {{ $labels.instance }} takes no action in observe mode: an "
            "operator must fix it. `rolecall incidents` shows the diagnosis and the evidence.",
        ),
        Alert(
            name="RolecallIncidentOpenTooLong",
            expr=f"time() - rolecall_incident_opened_timestamp_seconds > 900 unless {OBSERVE_MODE}",
            severity=Severity.CRITICAL,
            summary="{{ $labels.fault }} of {{ $labels.replica }} is still not resolved",
            description="The incident on {{ $labels.node }} has been open for {{ $value | humanizeDuration }}. "
            "Recovery normally takes seconds to minutes.",
        ),
        Alert(
            name="RolecallIncidentUnhandled",
            expr="rolecall_watch_unhandled > 0 or rolecall_incidents_broken > 0",
            hold="5m",
            severity=Severity.CRITICAL,
            summary="{{ $labels.instance }} fails to handle {{ $value }} incident(s)",
            description="Handling fails on every tick, or the incident was set aside because its journal events "
            "contradict each other. No further action is taken for it.",
        ),
        Alert(
            name="RolecallNotificationErrors",
            expr="increase(rolecall_watch_calls_failed_total[15m]) > 0",
            severity=Severity.CRITICAL,
            summary="{{ $labels.instance }} cannot deliver notifications",
            description='{{ $value | printf "%.0f" }} notification(s) were not delivered after all retries. On-call is '
            "not being paged by rolecall.",
        ),
        Alert(
            name="RolecallEvictionLimitReached",
            expr="rolecall_evictions_last_hour >= rolecall_evictions_limit",
            severity=Severity.CRITICAL,
            summary=f"The eviction limit is reached {REPORTED_BY}",
            description="{{ $value }} replicas were evicted within an hour. rolecall now pages on-call instead of "
            "evicting: many faults at once usually have one common cause.",
        ),
        Alert(
            name="RolecallActionErrors",
            expr="sum by (job, instance) "
            '(increase(rolecall_actions_total{outcome=~"refused|died|no_progress"}[30m])) >= 3',
            severity=Severity.CRITICAL,
            summary=f"Recovery actions fail {REPORTED_BY}",
            description='{{ $value | printf "%.0f" }} actions of the last 30 minutes did not fix the fault: refused, '
            "replacement died, or no progress.",
        ),
        Alert(
            name="RolecallRecoveryPaused",
            expr=f"rolecall_watch_paused == 1 {UNLESS_ENDED}",
            hold="1h",
            severity=Severity.WARNING,
            summary=f"Automatic recovery has been paused for an hour {REPORTED_BY}",
            description="An operator paused recovery and may have forgotten to resume it. No fault is recovered "
            "meanwhile.",
        ),
        Alert(
            name="RolecallQuarantineStale",
            expr=f"rolecall_nodes_quarantined > 0 {UNLESS_ENDED}",
            hold="12h",
            severity=Severity.WARNING,
            summary="{{ $value }} node(s) have been in quarantine for 12 hours",
            description="No replica is placed on them. Run a burn-in and return them to service, or open a hardware "
            "ticket.",
        ),
    ),
)
