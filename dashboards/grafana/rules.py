"""The alert and recording rules, and the files that Prometheus loads (`rule_files`).

A rule whose expression names an unknown metric, or a label that the metric does not have, raises ValueError when it is
built: Prometheus would accept it and never fire.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any

import yaml

from rolecall.dashboards.data.run_state import FIRST_STEP_SECONDS
from rolecall.dashboards.grafana.promql import RECORDED, SCOPE_LABELS, labels_of, selectors
from rolecall.formats.xid.xid import SXIDS, XIDS

WATCH_JOB = "rolecall-watch"
AGENT_JOBS = "rolecall|rolecall-agent"
"""Scrape jobs as deploy/prometheus.yaml and a run's targets.json name them. Only `up` depends on the names."""
_ALERT_NAME = re.compile(r"Rolecall[A-Z][A-Za-z]+")
_RECORD_NAME = re.compile(r"[a-z_]+:rolecall_[a-z0-9_]+:[a-z0-9_]+")

UNLESS_ENDED = "unless on (job, instance) (rolecall_run_ended == 1)"
UNLESS_TRAINED = "unless on (job, instance) (rolecall_run_step + 1 == rolecall_run_steps_wanted)"
"""All steps are done: the last evaluation and checkpoint remain."""
OBSERVE_MODE = 'on (job, instance) (rolecall_watch_mode{mode="observe"} == 1)'
MISSING_WATCH = f"""
max by (job) (
  present_over_time(up{{job="{WATCH_JOB}"}}[1d]) unless on (job, instance) present_over_time(rolecall_run_ended[1d])
)
unless on (job) present_over_time(up{{job="{WATCH_JOB}"}}[5m])
and on () (rolecall_process_up == 1)
"""
"""Not where agents run without any watch, between two jobs, or after a run of rolecall, whose targets end with it."""
REPORTED_BY = "(reported by {{ $labels.instance }})"
GPU_OF_NODE = "GPU {{ $labels.gpu }} of {{ $labels.node }}"
ALERT = "{alert}"
"""Where the name of an alert goes in the URL of its runbook."""
LINE_CHARS_MAX = 118
TRUNCATED_RATIO_MAX = 0.95
"""Of responses, for "nearly all": a few end in time by chance."""
FILTERED_RATIO_MAX = 0.85
"""Of groups. With `refills_max` 10 and `at_refill_limit: fail` a run fails once more than 0.9 of them are filtered."""
KL_MAX_NATS = 0.2
"""Per token: importance weights then spread by a factor of two. Steps of a healthy demo reach 0.07 with stale
tokens."""
ENTROPY_COLLAPSE_RATIO = 0.1
"""Of its mean over six hours. Learning alone does not lower entropy that fast."""
HARMLESS_XIDS = "|".join(str(code) for code, one in sorted(XIDS.items()) if not one.fatal)
"""Application errors and informational codes. A code that no catalogue lists is not among them."""
FATAL_SXIDS = "|".join(str(code) for code, one in sorted(SXIDS.items()) if one.fatal)
FATAL_PORT_EVENTS = "excessive_buffer_overrun_errors|local_link_integrity_errors|rnr_nak_retry_err"
"""Fatal on any increase. RolecallLinkDown and RolecallLinkFlapping cover ports that go down."""


class Severity(StrEnum):
    CRITICAL = "critical"  # the run is losing time, or recovery does not work: page on-call
    WARNING = "warning"  # it will, or hardware needs service: handle in working hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    expr: str
    hold: str = "0s"
    """How long the expression must hold before the alert fires (`for`)."""
    severity: Severity
    summary: str
    description: str

    def __post_init__(self) -> None:
        check(self.expr)


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules by name that Prometheus evaluates in order, every `interval`: alerts, and expressions that it records.

    The name of a recorded one is level:metric:operation, Prometheus' convention.
    """

    name: str
    rules: Mapping[str, Alert] | Mapping[str, str]
    interval: str = "15s"

    def __post_init__(self) -> None:
        for name, rule in self.rules.items():
            if isinstance(rule, Alert):
                if not _ALERT_NAME.fullmatch(name):
                    raise ValueError(f"{name}: expected RolecallName")
            elif not _RECORD_NAME.fullmatch(name):
                raise ValueError(f"{name}: expected level:rolecall_metric:operation")
            else:
                check(rule)


def check(expr: str) -> None:
    """Raises ValueError: an unknown metric, or a label that a metric does not have."""
    found = list(selectors(expr))
    if not found and "up{" not in expr:
        raise ValueError(f"no rolecall metric in: {expr}")
    for one in found:
        if unknown := set(one.labels) - labels_of(one.metric) - SCOPE_LABELS:
            raise ValueError(f"{one.metric} has no label {', '.join(sorted(unknown))}: {expr}")


critical = partial(Alert, severity=Severity.CRITICAL)
warning = partial(Alert, severity=Severity.WARNING)

WATCH = RuleGroup(
    "rolecall-watch",
    {
        "RolecallWatchDown": critical(
            expr=f'up{{job="{WATCH_JOB}"}} == 0',
            hold="1m",
            summary="Watch {{ $labels.instance }} is down",
            description="Prometheus has not scraped {{ $labels.instance }} for a minute. While it is down, faults of "
            "its run are neither detected nor recovered, unless a second watch takes over.",
        ),
        "RolecallWatchMissing": critical(
            expr=MISSING_WATCH,
            hold="1m",
            summary="No watch is left, and ranks are running",
            description="Prometheus has had no target of a watch for five minutes, as where its pod does not start; it "
            "had one within the last day. Faults of ranks that the agents see are neither detected nor recovered.",
        ),
        "RolecallDetectionDown": critical(
            expr="rolecall_watch_blind == 1",
            hold="1m",
            summary="{{ $labels.instance }} cannot diagnose: its data source or its detectors fail",
            description="Nothing is diagnosed until this is fixed. The log of the watch names the failing part and the "
            "error.",
        ),
        "RolecallWatchStalled": critical(
            expr="time() - rolecall_watch_tick_timestamp_seconds > 60",
            hold="30s",
            summary="The main loop of {{ $labels.instance }} is stuck",
            description="The watch answers scrapes, but its last tick ended {{ $value | humanizeDuration }} ago. A "
            "tick normally takes well under a second.",
        ),
        "RolecallWatchTickErrors": warning(
            expr="increase(rolecall_watch_tick_failures_total[5m]) > 5",
            hold="1m",
            summary="Ticks of {{ $labels.instance }} fail",
            description='{{ $value | printf "%.0f" }} ticks failed in the last 5 minutes: recovery is late or does not '
            "happen.",
        ),
        "RolecallJournalUnreadable": critical(
            expr="time() - rolecall_watch_journal_read_timestamp_seconds > 60",
            hold="1m",
            summary="{{ $labels.instance }} cannot read the journal",
            description="The last successful read was {{ $value | humanizeDuration }} ago. Recovery is suspended, and "
            "every metric of incidents and of the run is that old.",
        ),
        "RolecallTelemetryStale": warning(
            expr="rolecall_watch_observed_age_seconds > 15",
            hold="2m",
            summary="{{ $labels.instance }} works on stale telemetry",
            description="The oldest agent response in its latest poll is {{ $value | humanizeDuration }} old. Faults "
            "are detected that much later.",
        ),
        "RolecallAgentUnreachable": warning(
            expr="time() - rolecall_watch_agent_unreachable_timestamp_seconds > 300",
            summary="The watch cannot reach the agent of {{ $labels.node }}",
            description="{{ $labels.instance }} has had no response for {{ $value | humanizeDuration }}. Ranks on "
            "{{ $labels.node }} are not monitored.",
        ),
    },
)
"""Alerts on the watch itself: it is down, stalled, without data, or cannot read the journal.

Metrics that come from the journal are the same at every watch of a run, so each watch raises the alert and Alertmanager
groups them."""

RECOVERY = RuleGroup(
    "rolecall-recovery",
    {
        "RolecallNoRecoveryLeader": critical(
            expr=f"""time() - rolecall_watch_lease_expires_timestamp_seconds > 30
            unless {OBSERVE_MODE} {UNLESS_ENDED}""",
            hold="1m",
            summary=f"No watch holds the run's recovery lease {REPORTED_BY}",
            description="The lease has expired and no watch has acquired it for a minute. Faults are neither recorded "
            "nor repaired, and rolecall pages nobody.",
        ),
        "RolecallOncallPaged": critical(
            expr="increase(rolecall_oncall_pages_total[10m]) > 0",
            summary=f"rolecall needs an operator {REPORTED_BY}",
            description="Automatic recovery is exhausted or not allowed, the job was stopped, or a hold expired. "
            "`rolecall incidents --run RUN` shows the reason.",
        ),
        "RolecallPlanAwaitsApproval": warning(
            expr="rolecall_plans_waiting > 0",
            hold="1m",
            summary=f"recovery plans awaiting approval: {{{{ $value }}}} {REPORTED_BY}",
            description="The fault persists until an operator approves or rejects the plan. "
            "`rolecall incidents --run RUN` shows the plan and its digest.",
        ),
        "RolecallPlanExpiresSoon": critical(
            expr="rolecall_plans_waiting_deadline_timestamp_seconds - time() < 120 and on (job, instance) "
            "rolecall_plans_waiting > 0",
            summary=f"A recovery plan expires in {{{{ $value | humanizeDuration }}}} {REPORTED_BY}",
            description="An expired plan is dropped and the fault persists. Run "
            "`rolecall approve DIGEST --run RUN` or `rolecall reject DIGEST --run RUN --reason ...`.",
        ),
        "RolecallFaultObserved": critical(
            expr=f"rolecall_incident_open == 1 and {OBSERVE_MODE}",
            hold="1m",
            summary="{{ $labels.fault }} of {{ $labels.replica }} on {{ $labels.node }}; the watch is in observe mode",
            description="The fault has lasted a minute, and {{ $labels.instance }} takes no action in observe mode: an "
            "operator must fix it, unless it is an orphaned engine process and orphans.mode acts. "
            "`rolecall incidents --run RUN` shows the diagnosis and the evidence.",
        ),
        "RolecallIncidentOpenTooLong": critical(
            expr=f"time() - rolecall_incident_opened_timestamp_seconds > 900 unless {OBSERVE_MODE}",
            summary="{{ $labels.fault }} of {{ $labels.replica }} is still not resolved",
            description="The incident on {{ $labels.node }} has been open for {{ $value | humanizeDuration }}. "
            "Recovery normally takes seconds to minutes.",
        ),
        "RolecallIncidentUnhandled": critical(
            expr="rolecall_watch_unhandled > 0 or rolecall_incidents_broken > 0",
            hold="5m",
            summary="{{ $labels.instance }} fails to handle incidents: {{ $value }}",
            description="Handling fails on every tick, or the incident was set aside because its journal events "
            "contradict each other. No further action is taken for it.",
        ),
        "RolecallNotificationErrors": critical(
            expr="increase(rolecall_watch_notifications_failed_total[15m]) > 0",
            summary="{{ $labels.instance }} cannot deliver notifications",
            description='Notifications not delivered after all retries: {{ $value | printf "%.0f" }}. On-call is '
            "not being paged by rolecall.",
        ),
        "RolecallEvictionLimitReached": critical(
            expr="(rolecall_evictions_last_hour > 0) >= rolecall_evictions_limit",  # a limit of 0 allows none
            summary=f"The eviction limit is reached {REPORTED_BY}",
            description="{{ $value }} replicas were evicted within an hour. rolecall now pages on-call instead of "
            "evicting: many faults at once usually have one common cause.",
        ),
        "RolecallActionErrors": critical(
            expr="sum by (job, instance) "
            '(increase(rolecall_actions_total{outcome=~"refused|died|not_started|no_progress"}[30m])) >= 3',
            summary=f"Recovery actions fail {REPORTED_BY}",
            description='{{ $value | printf "%.0f" }} actions of the last 30 minutes did not fix the fault: refused, '
            "replacement died or was not started, or no progress.",
        ),
        "RolecallRecoveryPaused": warning(
            expr=f"rolecall_watch_paused == 1 {UNLESS_ENDED}",
            hold="1h",
            summary=f"Automatic recovery has been paused for an hour {REPORTED_BY}",
            description="An operator paused recovery and may have forgotten to resume it. No fault is recovered "
            "meanwhile.",
        ),
        "RolecallQuarantineStale": warning(
            expr=f"rolecall_nodes_quarantined > 0 {UNLESS_ENDED}",
            hold="12h",
            summary="nodes in quarantine for 12 hours: {{ $value }}",
            description="No replica is placed on them. Run a burn-in and return them to service, or open a hardware "
            "ticket.",
        ),
    },
)
"""Alerts on recovery: on-call was paged, a plan needs approval, an incident is not resolved, a limit is reached."""

RUN = RuleGroup(
    "rolecall-run",
    {
        "RolecallRunStalled": critical(
            expr=f"""(time() - rolecall_run_step_timestamp_seconds
            > clamp_min(10 * avg_over_time(rolecall_run_step_seconds[1h]), 300)
            unless rolecall_run_step_timestamp_seconds < rolecall_run_start_timestamp_seconds
            or time() - rolecall_run_start_timestamp_seconds > {FIRST_STEP_SECONDS:.0f}
            unless rolecall_run_step_timestamp_seconds >= rolecall_run_start_timestamp_seconds)
            {UNLESS_ENDED} {UNLESS_TRAINED}""",
            hold="30s",
            summary=f"No step was committed for {{{{ $value | humanizeDuration }}}} {REPORTED_BY}",
            description="That is more than ten times the mean step time of the last hour, and more than five minutes; "
            "or more than an hour since the start of a run, or its start by `rolecall up`, without a step.",
        ),
        "RolecallEttrLow": warning(
            expr=f"""delta(rolecall_run_effective_seconds[1h]) / (delta(rolecall_run_training_seconds[1h]) > 1200) < 0.8
            {UNLESS_ENDED}""",
            hold="10m",
            summary=f"ETTR of the last hour is {{{{ $value | humanizePercentage }}}} {REPORTED_BY}",
            description="More than a fifth of the hour was lost to faults. `rolecall_run_lost_seconds` shows to which "
            "ones.",
        ),
        "RolecallTrainingNonFinite": critical(
            expr="increase(rolecall_train_unfinite_total[10m]) > 0",
            summary="Loss, gradient norm or reward of {{ $labels.replica }} is NaN or infinite",
            description='Times in 10 minutes on {{ $labels.node }}: {{ $value | printf "%.0f" }}. Possible causes: '
            "an unstable recipe, bad data, or a GPU that computes wrong results.",
        ),
        "RolecallRoleDown": critical(
            expr=f"""sum by (job, instance, role) (rolecall_replicas{{state=~"ready|serving", role!~".*standby"}}) == 0
            and on (job, instance, role) rolecall_replicas_wanted > 0
            and on (job, instance) rolecall_run_step >= 0 {UNLESS_ENDED}""",
            hold="1m",
            summary="No replica of role {{ $labels.role }} is serving",
            description="Every replica of {{ $labels.role }} is lost, starting or stopped: the run makes no progress.",
        ),
        "RolecallRoleDegraded": warning(
            expr=f"""sum by (job, instance, role) (rolecall_replicas{{state=~"ready|serving"}})
            / on (job, instance, role) (rolecall_replicas_wanted > 0) < 0.75
            and on (job, instance) rolecall_run_step >= 0 {UNLESS_ENDED}""",
            hold="10m",
            summary="Only {{ $value | humanizePercentage }} of the {{ $labels.role }} replicas are serving",
            description="Fewer than three quarters of the desired replicas for ten minutes: replacements do not become "
            "ready.",
        ),
    },
)
"""Alerts on the progress of a run: stalled, low ETTR, non-finite values, missing replicas. An ended run raises none."""

TRAINING = RuleGroup(
    "rolecall-training",
    {
        "RolecallEntropyCollapsed": critical(
            # While a policy learns, entropy falls and reward rises: a reward above its own mean excuses low entropy.
            expr=f"""avg_over_time(rolecall_run_entropy_nats[10m])
            < {ENTROPY_COLLAPSE_RATIO} * avg_over_time(rolecall_run_entropy_nats[6h])
            and on (job, instance) avg_over_time(rolecall_run_reward[10m]) <= avg_over_time(rolecall_run_reward[6h])
            {UNLESS_ENDED}""",
            hold="5m",
            summary=f"Policy entropy has collapsed {REPORTED_BY}",
            description='Entropy is {{ $value | printf "%.4f" }} nats per token, less than a tenth of its mean over '
            "six hours, and the reward has not risen. The policy gives the same response to every prompt and stops "
            "learning.",
        ),
        "RolecallPolicyDiverged": critical(
            expr=f"avg_over_time(rolecall_run_kl_sampler_nats[10m]) > {KL_MAX_NATS} {UNLESS_ENDED}",
            hold="5m",
            summary=f"The policy has diverged from the sampler {REPORTED_BY}",
            description='KL divergence to the sampler averages {{ $value | printf "%.2f" }} nats per token over ten '
            "minutes; healthy runs stay below 0.1. Possible causes: steps too large, tokens too stale, or inference "
            "and training compute different log probabilities.",
        ),
        "RolecallResponsesTruncated": warning(
            expr=f"min_over_time(rolecall_run_truncated_ratio[10m]) > {TRUNCATED_RATIO_MAX} {UNLESS_ENDED}",
            hold="10m",
            summary=f"{{{{ $value | humanizePercentage }}}} of the responses are truncated {REPORTED_BY}",
            description="In every step of the last ten minutes nearly all responses hit the length limit, so the "
            "reward scores incomplete responses.",
        ),
        "RolecallGroupsFiltered": warning(
            expr=f"min_over_time(rolecall_run_filtered_ratio[10m]) > {FILTERED_RATIO_MAX} {UNLESS_ENDED}",
            hold="10m",
            summary=f"{{{{ $value | humanizePercentage }}}} of the prompt groups are filtered {REPORTED_BY}",
            description="In every step of the last ten minutes dynamic sampling dropped nearly all groups, because all "
            "their responses had the same reward. Most generated tokens are not trained on.",
        ),
    },
)
"""Alerts on policy health: collapsed entropy, divergence from the sampler, batches without a training signal.

They read the run's metrics from its journal (core/policy_health.py), so they cover jobs that rolecall runs. The
collapse detector is more sensitive and usually fires first; these alerts cover runs where it is disabled, and cases in
which only the user knows whether the value is intended. None of them points to a faulty machine."""

AGENTS = RuleGroup(
    "rolecall-agents",
    {
        "RolecallAgentDown": warning(
            expr=f'up{{job=~"{AGENT_JOBS}"}} == 0',
            hold="2m",
            summary="Agent {{ $labels.instance }} is down",
            description="Prometheus has not scraped it for two minutes: the agent or its whole node is down.",
        ),
        "RolecallAgentStalled": warning(
            expr="increase(rolecall_agent_rounds_total[2m]) == 0",
            hold="1m",
            summary="The agent of {{ $labels.node }} has stopped collecting",
            description="It answers scrapes but has finished no collection round for two minutes: its metrics are "
            "stale.",
        ),
        "RolecallAgentSlow": warning(
            expr="rolecall_agent_round_seconds > 2",
            hold="5m",
            summary="The agent of {{ $labels.node }} collects slowly",
            description="A collection round takes {{ $value | humanizeDuration }}; milliseconds are normal. The node "
            "is short of CPU, or a probe is slow.",
        ),
        "RolecallProbeDown": warning(
            expr='rolecall_probe_up{probe!~"nccl_ras|nccl_inspector|engines"} == 0',
            hold="10m",
            summary="Probe {{ $labels.probe }} of {{ $labels.node }} fails",
            description="It has failed for ten minutes. Faults that only this probe detects go unnoticed on "
            "{{ $labels.node }}.",
        ),
        "RolecallClockSkew": warning(
            expr="max by (job, instance, node) (rolecall_process_progress_timestamp_seconds) - time() > 5",
            hold="5m",
            summary="The clock of {{ $labels.node }} is {{ $value | humanizeDuration }} ahead",
            description="The node reports progress in Prometheus' future: one of the two clocks is wrong, and logs of "
            "the node cannot be correlated with those of other nodes.",
        ),
        "RolecallOomKill": warning(
            expr="increase(rolecall_host_oom_kills_total[10m]) > 0",
            summary="The OOM killer ran on {{ $labels.node }}",
            description='Processes killed in 10 minutes: {{ $value | printf "%.0f" }}. A replica that is '
            "restarted on the same node will likely be killed again.",
        ),
    },
)
"""Alerts on the node agents."""

GPUS = RuleGroup(
    "rolecall-gpus",
    {
        "RolecallGpuLost": critical(
            expr="rolecall_gpu_up == 0",
            hold="30s",
            summary=f"{GPU_OF_NODE} is lost",
            description="All NVML calls on it fail: it fell off the bus, or the driver gave it up.",
        ),
        "RolecallXid": critical(
            expr=f'time() - rolecall_xid_last_timestamp_seconds{{xid!~"{HARMLESS_XIDS}"}} < 900',
            summary=f"XID {{{{ $labels.xid }}}} on {GPU_OF_NODE}",
            description="Reported {{ $value | humanizeDuration }} ago. NVIDIA's catalogue requires an action for this "
            "code; `rolecall diagnose` on the kernel log shows which.",
        ),
        "RolecallNvswitchError": critical(
            expr=f"""(rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}}
            - (rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}} offset 15m or
            rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}} * 0)) > 0""",
            summary="Fatal SXid {{ $labels.error }} of {{ $labels.device }} on {{ $labels.node }}",
            description="A fatal NVSwitch error affects every GPU on that link and can disable NVLink on the node.",
        ),
        "RolecallGpuResetNeeded": warning(
            expr='rolecall_gpu_remapped_rows_pending == 1 or rolecall_gpu_recovery_action{action!="none"} == 1',
            hold="1m",
            summary=f"{GPU_OF_NODE} needs a reset",
            description="A memory row remap is pending, or the driver recommends {{ $labels.action }}. The GPU keeps "
            "working until then.",
        ),
        "RolecallGpuReplacementNeeded": critical(
            expr="rolecall_gpu_remapped_rows_failed == 1 or rolecall_gpu_sram_threshold_exceeded == 1",
            hold="1m",
            summary=f"{GPU_OF_NODE} must be replaced",
            description="Its memory cannot be repaired: row remapping failed, or SRAM errors exceeded NVIDIA's "
            "threshold.",
        ),
        "RolecallGpuThrottled": warning(
            expr="rate(rolecall_gpu_thermal_throttle_seconds_total[10m]) > 0.2",
            hold="10m",
            summary=f"{GPU_OF_NODE} is thermally throttled",
            description="Its clocks are throttled {{ $value | humanizePercentage }} of the time. In synchronous "
            "training every rank waits for it.",
        ),
        "RolecallNvlinkDown": warning(
            expr="""rolecall_gpu_nvlinks_active
            < on (job, instance, node) group_left max by (job, instance, node) (rolecall_gpu_nvlinks_active)""",
            hold="2m",
            summary=f"{GPU_OF_NODE} has fewer active NVLinks than its neighbours",
            description="{{ $value }} links are up, other GPUs of the node have more. Collectives run at the speed of "
            "the slowest GPU.",
        ),
    },
)
"""Alerts on GPUs, NVLink and NVSwitch. Thresholds follow NVIDIA's catalogue, NVSentinel and ByteRobust.

The watch opens incidents for faults that affect its run. These alerts cover hardware that needs service, also when
no run uses it."""

NETWORK = RuleGroup(
    "rolecall-network",
    {
        "RolecallLinkDown": critical(
            expr="""(rolecall_infiniband_up == 0 and rolecall_infiniband_downs_total > 0)
            or (rolecall_nic_up == 0 and rolecall_nic_downs_total > 0)""",
            hold="1m",
            summary="{{ $labels.nic }}{{ $labels.interface }} of {{ $labels.node }} is down",
            description="The port was up after the agent started and is down now. Ports that were never up raise no "
            "alert.",
        ),
        "RolecallLinkFlapping": warning(
            expr="""increase(rolecall_infiniband_downs_total[5m]) >= 1.5
            or increase(rolecall_nic_downs_total[5m]) >= 1.5""",
            summary="{{ $labels.nic }}{{ $labels.interface }} of {{ $labels.node }} is flapping",
            description="The link went down at least twice in five minutes. A single flap raises no alert.",
        ),
        "RolecallPortErrors": warning(
            expr=f"""increase(rolecall_infiniband_events_total{{name=~"{FATAL_PORT_EVENTS}"}}[10m]) > 0
            or increase(rolecall_infiniband_events_total{{name="symbol_error"}}[1h]) > 120
            or rate(rolecall_infiniband_events_total{{name="link_error_recovery"}}[5m]) * 300 > 25""",
            summary="{{ $labels.name }} on port {{ $labels.port }} of {{ $labels.nic }}, {{ $labels.node }}",
            description='{{ $value | printf "%.0f" }} errors: more than a healthy link produces.',
        ),
    },
)
"""Alerts on network and InfiniBand ports. Thresholds are NVSentinel's."""

HOSTS = RuleGroup(
    "rolecall-hosts",
    {
        "RolecallHardwareError": warning(
            expr="""(rolecall_kernel_hardware_errors_total{state="uncorrected"}
            - (rolecall_kernel_hardware_errors_total{state="uncorrected"} offset 15m
            or rolecall_kernel_hardware_errors_total{state="uncorrected"} * 0)) > 0""",
            summary="Uncorrected hardware error ({{ $labels.kind }}) on {{ $labels.node }}",
            description="Uncorrected errors in the kernel log in the last 15 minutes: {{ $value }}.",
        ),
        "RolecallDiskFull": critical(
            expr="""rolecall_filesystem_available_bytes / rolecall_filesystem_size_bytes < 0.05
            or rolecall_filesystem_files_free / rolecall_filesystem_files < 0.05""",
            hold="2m",
            summary="{{ $labels.mount }} on {{ $labels.node }} has {{ $value | humanizePercentage }} left",
            description="The file system is running out of space or inodes. Checkpoints, logs and the journal will "
            "fail to write.",
        ),
        "RolecallFilesystemUnavailable": critical(
            expr="""rolecall_filesystem_up == 0
            or (rolecall_filesystem_readonly == 1
            and min_over_time(rolecall_filesystem_readonly[6h]) == 0)""",
            hold="1m",
            summary="{{ $labels.mount }} on {{ $labels.node }} is unavailable",
            description="The file system fails, hangs, or became read-only within the last six hours. Processes that "
            "write to it hang or crash.",
        ),
    },
)
"""Alerts on hosts: hardware errors and file systems."""

ROLES = RuleGroup("rolecall-roles", RECORDED)
"""Recording rules: pace and slowness of the ranks of each role."""

GROUPS: Mapping[str, tuple[RuleGroup, ...]] = MappingProxyType(
    {
        "rolecall-alerts.yaml": (WATCH, RECOVERY, RUN, TRAINING, AGENTS, GPUS, NETWORK, HOSTS),
        "rolecall-records.yaml": (ROLES,),
    }
)
"""File name -> its groups."""


def rules_yaml(runbooks: str = "") -> dict[str, str]:
    """File name -> YAML. `runbooks`: URL of a copy of docs/runbooks, or of a page with `{alert}` in place of its name;
    `runbook_url` of each alert. "": the annotation `runbook` names the file, and nothing is linked."""
    return {
        name: yaml.safe_dump(
            {"groups": [_group(g, runbooks) for g in groups]}, sort_keys=False, allow_unicode=True, width=LINE_CHARS_MAX
        )
        for name, groups in GROUPS.items()
    }


def _group(group: RuleGroup, runbooks: str) -> dict[str, Any]:
    rules = [
        _alert(name, rule, runbooks) if isinstance(rule, Alert) else {"record": name, "expr": _one_line(rule)}
        for name, rule in group.rules.items()
    ]
    return {"name": group.name, "interval": group.interval, "rules": rules}


def _alert(name: str, alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": _one_line(alert.expr),
        "for": alert.hold,
        "labels": {"severity": str(alert.severity)},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            **_runbook(name, runbooks),
        },
    }


def _runbook(name: str, runbooks: str) -> dict[str, str]:
    if not runbooks:
        return {"runbook": f"docs/runbooks/{name}.md"}
    page = runbooks if ALERT in runbooks else f"{runbooks.rstrip('/')}/{ALERT}.md"
    return {"runbook_url": page.replace(ALERT, name)}


def _one_line(expr: str) -> str:
    return " ".join(expr.split())
