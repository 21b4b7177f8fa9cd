"""Alerts on network and InfiniBand ports. Thresholds are NVSentinel's."""

from rolecall.dashboards.grafana.rules.rule import Alert, RuleGroup, Severity

FATAL_PORT_EVENTS = "excessive_buffer_overrun_errors|local_link_integrity_errors|rnr_nak_retry_err"
"""Fatal on any increase. RolecallLinkDown and RolecallLinkFlapping cover ports that go down."""

GROUP = RuleGroup(
    name="rolecall-network",
    rules=(
        Alert(
            name="RolecallLinkDown",
            expr="""(rolecall_infiniband_up == 0 and rolecall_infiniband_downs_total > 0)
            or (rolecall_nic_up == 0 and rolecall_nic_downs_total > 0)""",
            hold="1m",
            severity=Severity.CRITICAL,
            summary="{{ $labels.nic }}{{ $labels.interface }} of {{ $labels.node }} is down",
            description="The port was up after the agent started and is down now. Ports that were never up raise no "
            "alert.",
        ),
        Alert(
            name="RolecallLinkFlapping",
            expr="""increase(rolecall_infiniband_downs_total[5m]) >= 1.5
            or increase(rolecall_nic_downs_total[5m]) >= 1.5""",
            severity=Severity.WARNING,
            summary="{{ $labels.nic }}{{ $labels.interface }} of {{ $labels.node }} is flapping",
            description="The link went down at least twice in five minutes. A single flap raises no alert.",
        ),
        Alert(
            name="RolecallPortErrors",
            expr=f"""increase(rolecall_infiniband_events_total{{name=~"{FATAL_PORT_EVENTS}"}}[10m]) > 0
            or increase(rolecall_infiniband_events_total{{name="symbol_error"}}[1h]) > 120
            or rate(rolecall_infiniband_events_total{{name="link_error_recovery"}}[5m]) * 300 > 25""",
            severity=Severity.WARNING,
            summary="{{ $labels.name }} on port {{ $labels.port }} of {{ $labels.nic }}, {{ $labels.node }}",
            description='{{ $value | printf "%.0f" }} errors: more than a healthy link produces.',
        ),
    ),
)
