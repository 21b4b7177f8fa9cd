"""Alerts on the node agents."""

from rolecall.dashboards.grafana.rules.rule import AGENT_JOBS, Alert, RuleGroup, Severity

GROUP = RuleGroup(
    name="rolecall-agents",
    rules=(
        Alert(
            name="RolecallAgentDown",
            expr=f'up{{job=~"{AGENT_JOBS}"}} == 0',
            hold="2m",
            severity=Severity.WARNING,
            summary="Agent {{ $labels.instance }} is down",
            description="Prometheus has not scraped it for two minutes: the agent or its whole node is down.",
        ),
        Alert(
            name="RolecallAgentStalled",
            expr="increase(rolecall_agent_rounds_total[2m]) == 0",
            hold="1m",
            severity=Severity.WARNING,
            summary="The agent of {{ $labels.node }} has stopped collecting",
            description="It answers scrapes but has finished no collection round for two minutes: its metrics are "
            "stale.",
        ),
        Alert(
            name="RolecallAgentSlow",
            expr="rolecall_agent_round_seconds > 2",
            hold="5m",
            severity=Severity.WARNING,
            summary="The agent of {{ $labels.node }} collects slowly",
            description="A collection round takes {{ $value | humanizeDuration }}; milliseconds are normal. The node "
            "is short of CPU, or a probe is slow.",
        ),
        Alert(
            name="RolecallProbeDown",
            expr='rolecall_probe_up{probe!~"nccl_ras|nccl_inspector|vllm"} == 0',
            hold="10m",
            severity=Severity.WARNING,
            summary="Probe {{ $labels.probe }} of {{ $labels.node }} fails",
            description="It has failed for ten minutes. Faults that only this probe detects go unnoticed on "
            "{{ $labels.node }}.",
        ),
        Alert(
            name="RolecallClockSkew",
            expr="max by (job, instance, node) (rolecall_process_progress_timestamp_seconds) - time() > 5",
            hold="5m",
            severity=Severity.WARNING,
            summary="The clock of {{ $labels.node }} is {{ $value | humanizeDuration }} ahead",
            description="The node reports progress in Prometheus' future: one of the two clocks is wrong, and logs of "
            "the node cannot be correlated with those of other nodes.",
        ),
        Alert(
            name="RolecallOomKill",
            expr="increase(rolecall_host_oom_kills_total[10m]) > 0",
            severity=Severity.WARNING,
            summary="The OOM killer ran on {{ $labels.node }}",
            description='{{ $value | printf "%.0f" }} process(es) were killed in 10 minutes. A replica that is '
            "restarted on the same node will likely be killed again.",
        ),
    ),
)
