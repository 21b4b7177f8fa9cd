"""Alerts on the watch itself: it is down, stalled, without data, or cannot read the journal.

Metrics that come from the journal are the same at every watch of a run, so each watch raises the alert and Alertmanager
groups them.
"""

from rolecall.dashboards.grafana.rules.rule import WATCH_JOB, Alert, RuleGroup, Severity

GROUP = RuleGroup(
    name="rolecall-watch",
    rules=(
        Alert(
            name="RolecallWatchDown",
            expr=f'up{{job="{WATCH_JOB}"}} == 0',
            hold="1m",
            severity=Severity.CRITICAL,
            summary="Watch {{ $labels.instance }} is down",
            description="Prometheus has not scraped {{ $labels.instance }} for a minute. While it is down, faults of "
            "its run are neither detected nor recovered, unless a second watch takes over.",
        ),
        Alert(
            name="RolecallDetectionDown",
            expr="rolecall_watch_blind == 1",
            hold="1m",
            severity=Severity.CRITICAL,
            summary="{{ $labels.instance }} cannot diagnose: its data source or its detectors fail",
            description="Nothing is diagnosed until this is fixed. The log of the watch names the failing part and the "
            "error.",
        ),
        Alert(
            name="RolecallWatchStalled",
            expr="time() - rolecall_watch_tick_timestamp_seconds > 60",
            hold="30s",
            severity=Severity.CRITICAL,
            summary="The main loop of {{ $labels.instance }} is stuck",
            description="The watch answers scrapes, but its last tick ended {{ $value | humanizeDuration }} ago. A "
            "tick normally takes well under a second.",
        ),
        Alert(
            name="RolecallWatchTickErrors",
            expr="increase(rolecall_watch_tick_failures_total[5m]) > 5",
            hold="1m",
            severity=Severity.WARNING,
            summary="Ticks of {{ $labels.instance }} fail",
            description='{{ $value | printf "%.0f" }} ticks failed in the last 5 minutes: recovery is late or does not '
            "happen.",
        ),
        Alert(
            name="RolecallJournalUnreadable",
            expr="time() - rolecall_watch_journal_read_timestamp_seconds > 60",
            hold="1m",
            severity=Severity.CRITICAL,
            summary="{{ $labels.instance }} cannot read the journal",
            description="The last successful read was {{ $value | humanizeDuration }} ago. Recovery is suspended, and "
            "every metric of incidents and of the run is that old.",
        ),
        Alert(
            name="RolecallTelemetryStale",
            expr="rolecall_watch_observed_age_seconds > 15",
            hold="2m",
            severity=Severity.WARNING,
            summary="{{ $labels.instance }} works on stale telemetry",
            description="The oldest agent response in its latest poll is {{ $value | humanizeDuration }} old. Faults "
            "are detected that much later.",
        ),
        Alert(
            name="RolecallAgentUnreachable",
            expr="time() - rolecall_watch_agent_unreachable_timestamp_seconds > 300",
            severity=Severity.WARNING,
            summary="The watch cannot reach the agent of {{ $labels.node }}",
            description="{{ $labels.instance }} has had no response for {{ $value | humanizeDuration }}. Ranks on "
            "{{ $labels.node }} are not monitored.",
        ),
    ),
)
