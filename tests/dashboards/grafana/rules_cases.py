"""What each alert must do, as little histories: fires, and the near miss that must not.

Times are seconds since 0, a sample each 15 s, values in promtool's notation (`1x4` is five times 1). `@W` are the
labels of a watch, `@N` those of an agent. `fires`: the labels of each alert that must be firing at `at`; () for none.
"""

from typing import NamedTuple

from rolecall.dashboards.grafana.rules import GROUPS, Alert

ALERTS = {
    name: rule
    for groups in GROUPS.values()
    for group in groups
    for name, rule in group.rules.items()
    if isinstance(rule, Alert)
}
WATCH = 'job="rolecall-watch",instance="r/watch"'
NODE = 'job="rolecall",instance="n:9477",node="n1"'
GOOD = "0+15x400"
"""A time stamp that goes with the clock."""
STOOD = "0+15x4 60x400"
"""One that stands still from a minute on."""


class Case(NamedTuple):
    alert: str
    what: str
    series: dict[str, str]
    at: str
    fires: tuple[str, ...] = ()


RUNS = {"rolecall_run_ended{@W}": "0x400"}
OVER = {"rolecall_run_ended{@W}": "1x400"}
STEPS = {"rolecall_run_step_seconds{@W}": "6x400", **RUNS}
BEGUN = {
    "rolecall_run_start_timestamp_seconds{@W}": "0x400",
    "rolecall_run_step{@W}": "-1x400",
    "rolecall_run_steps_wanted{@W}": "60x400",
    **RUNS,
}
"""A run without a step."""
CONTINUED = {
    **STEPS,
    "rolecall_run_step_timestamp_seconds{@W}": "60x400",
    "rolecall_run_start_timestamp_seconds{@W}": "0x23 360x400",
}
"""A run whose last step is older than its last start."""
COUNTS = "0x4 1x400"
HANGS = '@W,node="n1",role="rollout",replica="rollout/1",fault="hang"'
OBSERVES = {'rolecall_watch_mode{@W,mode="observe"}': "1x400"}
ACTS = {'rolecall_watch_mode{@W,mode="observe"}': "0x400"}
NO_TARGET = {'up{job="rolecall-watch",instance="rolecall-watch-6f9c-x7k2p"}': "1x4 stale"}
RANK_UP = {'rolecall_process_up{@N,role="trainer",replica="trainer/0",rank="0"}': "1x100"}

CASES = (
    Case("RolecallWatchDown", "gone", {'up{job="rolecall-watch",instance="r/watch"}': "1x4 0x40"}, "4m", ("@W",)),
    Case("RolecallWatchDown", "a scrape missed", {'up{job="rolecall-watch",instance="r/watch"}': "1x4 0x1 1x40"}, "4m"),
    Case("RolecallWatchDown", "another job", {'up{job="web",instance="r/watch"}': "0x40"}, "4m"),
    Case("RolecallWatchMissing", "its pod has no address", {**NO_TARGET, **RANK_UP}, "8m", ('job="rolecall-watch"',)),
    Case("RolecallWatchMissing", "it starts on another node", {**NO_TARGET, **RANK_UP}, "6m"),
    Case("RolecallWatchMissing", "no rank is left", NO_TARGET, "8m"),
    Case("RolecallWatchMissing", "never had one", RANK_UP, "8m"),
    Case(
        "RolecallWatchMissing",
        "another one is there",
        {**NO_TARGET, 'up{job="rolecall-watch",instance="rolecall-watch-6f9c-q2w9z"}': "_x8 1x40", **RANK_UP},
        "8m",
    ),
    Case(
        "RolecallWatchMissing",
        "a run of rolecall and its targets ended",
        {'up{job="rolecall-watch",instance="r/watch"}': "1x4 stale", "rolecall_run_ended{@W}": "0x4 stale", **RANK_UP},
        "8m",
    ),
    Case(
        "RolecallNoRecoveryLeader",
        "ran out",
        {"rolecall_watch_lease_expires_timestamp_seconds{@W}": STOOD},
        "5m",
        ("@W",),
    ),
    Case(
        "RolecallNoRecoveryLeader",
        "another watch takes it",
        {"rolecall_watch_lease_expires_timestamp_seconds{@W}": "0+15x4 60x4 150+15x100"},
        "5m",
    ),
    Case(
        "RolecallNoRecoveryLeader",
        "observe only",
        {
            "rolecall_watch_lease_expires_timestamp_seconds{@W}": STOOD,
            'rolecall_watch_mode{@W,mode="observe"}': "1x100",
        },
        "5m",
    ),
    Case(
        "RolecallNoRecoveryLeader", "over", {"rolecall_watch_lease_expires_timestamp_seconds{@W}": STOOD, **OVER}, "5m"
    ),
    Case("RolecallDetectionDown", "for long", {"rolecall_watch_blind{@W}": COUNTS}, "4m", ("@W",)),
    Case("RolecallDetectionDown", "for a moment", {"rolecall_watch_blind{@W}": "0x4 1x2 0x40"}, "4m"),
    Case("RolecallWatchStalled", "stands", {"rolecall_watch_tick_timestamp_seconds{@W}": STOOD}, "5m", ("@W",)),
    Case("RolecallWatchStalled", "turns", {"rolecall_watch_tick_timestamp_seconds{@W}": GOOD}, "5m"),
    Case("RolecallWatchTickErrors", "many", {"rolecall_watch_tick_failures_total{@W}": "0+1x100"}, "8m", ("@W",)),
    Case("RolecallWatchTickErrors", "a few", {"rolecall_watch_tick_failures_total{@W}": "0x10 4x100"}, "5m"),
    Case(
        "RolecallJournalUnreadable",
        "locked",
        {"rolecall_watch_journal_read_timestamp_seconds{@W}": STOOD},
        "5m",
        ("@W",),
    ),
    Case("RolecallJournalUnreadable", "read", {"rolecall_watch_journal_read_timestamp_seconds{@W}": GOOD}, "5m"),
    Case("RolecallTelemetryStale", "old", {"rolecall_watch_observed_age_seconds{@W}": "2x4 16x40"}, "5m", ("@W",)),
    Case("RolecallTelemetryStale", "as usual", {"rolecall_watch_observed_age_seconds{@W}": "14x40"}, "5m"),
    Case(
        "RolecallAgentUnreachable",
        "for long",
        {'rolecall_watch_agent_unreachable_timestamp_seconds{@W,node="n1"}': "10x60"},
        "6m",
        ('@W,node="n1"',),
    ),
    Case(
        "RolecallAgentUnreachable",
        "a restart",
        {'rolecall_watch_agent_unreachable_timestamp_seconds{@W,node="n1"}': "10x10 stale"},
        "6m",
    ),
    Case("RolecallOncallPaged", "once", {"rolecall_oncall_pages_total{@W}": COUNTS}, "3m", ("@W",)),
    Case("RolecallOncallPaged", "long ago", {"rolecall_oncall_pages_total{@W}": COUNTS}, "15m"),
    Case("RolecallPlanAwaitsApproval", "waits", {"rolecall_plans_waiting{@W}": COUNTS}, "3m", ("@W",)),
    Case("RolecallPlanAwaitsApproval", "approved soon", {"rolecall_plans_waiting{@W}": "0x4 1x2 0x40"}, "3m"),
    Case(
        "RolecallPlanExpiresSoon",
        "two minutes before",
        {
            "rolecall_plans_waiting{@W}": "1x40",
            "rolecall_plans_waiting_deadline_timestamp_seconds{@W}": "600x40",
        },
        "8m15s",
        ("@W",),
    ),
    Case(
        "RolecallPlanExpiresSoon",
        "long before",
        {
            "rolecall_plans_waiting{@W}": "1x40",
            "rolecall_plans_waiting_deadline_timestamp_seconds{@W}": "600x40",
        },
        "7m45s",
    ),
    Case(
        "RolecallFaultObserved", "stands", {f"rolecall_incident_open{{{HANGS}}}": "1x100", **OBSERVES}, "3m", (HANGS,)
    ),
    Case(
        "RolecallFaultObserved", "over by itself", {f"rolecall_incident_open{{{HANGS}}}": "1x2 stale", **OBSERVES}, "3m"
    ),
    Case("RolecallFaultObserved", "rolecall acts", {f"rolecall_incident_open{{{HANGS}}}": "1x100", **ACTS}, "3m"),
    Case(
        "RolecallIncidentOpenTooLong",
        "twenty minutes",
        {
            'rolecall_incident_opened_timestamp_seconds{@W,node="n1",role="rollout",replica="rollout/1",fault="hang"}': "60x100"
        },
        "20m",
        ('@W,node="n1",role="rollout",replica="rollout/1",fault="hang"',),
    ),
    Case(
        "RolecallIncidentOpenTooLong",
        "fourteen minutes",
        {
            'rolecall_incident_opened_timestamp_seconds{@W,node="n1",role="rollout",replica="rollout/1",fault="hang"}': "360x100"
        },
        "20m",
    ),
    Case(
        "RolecallIncidentOpenTooLong",
        "no one may act",
        {f"rolecall_incident_opened_timestamp_seconds{{{HANGS}}}": "60x100", **OBSERVES},
        "20m",
    ),
    Case("RolecallIncidentUnhandled", "fails", {"rolecall_watch_unhandled{@W}": COUNTS}, "8m", ("@W",)),
    Case("RolecallIncidentUnhandled", "broken", {"rolecall_incidents_broken{@W}": COUNTS}, "8m", ("@W",)),
    Case("RolecallIncidentUnhandled", "recovers by itself", {"rolecall_watch_unhandled{@W}": "0x4 1x8 0x40"}, "8m"),
    Case("RolecallNotificationErrors", "one", {"rolecall_watch_notifications_failed_total{@W}": COUNTS}, "3m", ("@W",)),
    Case("RolecallNotificationErrors", "none", {"rolecall_watch_notifications_failed_total{@W}": "1x40"}, "3m"),
    Case(
        "RolecallEvictionLimitReached",
        "reached",
        {"rolecall_evictions_last_hour{@W}": "5x4 6x40", "rolecall_evictions_limit{@W}": "6x40"},
        "3m",
        ("@W",),
    ),
    Case(
        "RolecallEvictionLimitReached",
        "one less",
        {"rolecall_evictions_last_hour{@W}": "5x40", "rolecall_evictions_limit{@W}": "6x40"},
        "3m",
    ),
    Case(
        "RolecallEvictionLimitReached",
        "none allowed and none made",
        {"rolecall_evictions_last_hour{@W}": "0x40", "rolecall_evictions_limit{@W}": "0x40"},
        "3m",
    ),
    Case(
        "RolecallActionErrors",
        "three of two kinds",
        {
            'rolecall_actions_total{@W,action="replace_replica",outcome="died"}': "0x60 2x60",
            'rolecall_actions_total{@W,action="replace_node",outcome="no_progress"}': "0x60 1x60",
        },
        "29m",
        ("@W",),
    ),
    Case(
        "RolecallActionErrors",
        "done is no failure",
        {
            'rolecall_actions_total{@W,action="replace_replica",outcome="done"}': "0x60 9x60",
            'rolecall_actions_total{@W,action="replace_node",outcome="no_progress"}': "0x60 1x60",
        },
        "29m",
    ),
    Case("RolecallRecoveryPaused", "forgotten", {"rolecall_watch_paused{@W}": "1x400", **RUNS}, "61m", ("@W",)),
    Case("RolecallRecoveryPaused", "for a while", {"rolecall_watch_paused{@W}": "1x230 0x400", **RUNS}, "61m"),
    Case("RolecallRecoveryPaused", "over", {"rolecall_watch_paused{@W}": "1x400", **OVER}, "61m"),
    Case("RolecallQuarantineStale", "half a day", {"rolecall_nodes_quarantined{@W}": "1x3000"}, "721m", ("@W",)),
    Case("RolecallQuarantineStale", "back", {"rolecall_nodes_quarantined{@W}": "1x2800 0x100"}, "721m"),
    Case("RolecallRunStalled", "no step", {"rolecall_run_step_timestamp_seconds{@W}": STOOD, **STEPS}, "7m", ("@W",)),
    Case("RolecallRunStalled", "not yet", {"rolecall_run_step_timestamp_seconds{@W}": STOOD, **STEPS}, "5m45s"),
    Case(
        "RolecallRunStalled",
        "slow by nature",
        {"rolecall_run_step_timestamp_seconds{@W}": STOOD, "rolecall_run_step_seconds{@W}": "60x100", **RUNS},
        "10m",
    ),
    Case(
        "RolecallRunStalled",
        "over",
        {"rolecall_run_step_timestamp_seconds{@W}": STOOD, "rolecall_run_step_seconds{@W}": "6x400", **OVER},
        "20m",
    ),
    Case(
        "RolecallRunStalled",
        "last evaluation",
        {
            "rolecall_run_step_timestamp_seconds{@W}": STOOD,
            **STEPS,
            "rolecall_run_step{@W}": "59x100",
            "rolecall_run_steps_wanted{@W}": "60x100",
        },
        "7m",
    ),
    Case("RolecallRunStalled", "continued after an outage", CONTINUED, "59m"),
    Case("RolecallRunStalled", "continued without a step", CONTINUED, "68m", ("@W",)),
    Case(
        "RolecallRunStalled",
        "continued, then stalled",
        {**CONTINUED, "rolecall_run_step_timestamp_seconds{@W}": "60x31 495x100"},
        "14m30s",
        ("@W",),
    ),
    Case("RolecallRunStalled", "no first step", BEGUN, "65m", ("@W",)),
    Case("RolecallRunStalled", "still starting", BEGUN, "59m"),
    Case("RolecallRunStalled", "over without a step", {**BEGUN, **OVER}, "65m"),
    Case(
        "RolecallRunStalled",
        "first step after an hour",
        {
            **BEGUN,
            **STEPS,
            "rolecall_run_step{@W}": "-1x249 0x50",
            "rolecall_run_step_timestamp_seconds{@W}": "_x250 3750x50",
        },
        "64m",
    ),
    Case(
        "RolecallEttrLow",
        "half",
        {"rolecall_run_effective_seconds{@W}": "0+7x300", "rolecall_run_training_seconds{@W}": "0+15x300", **RUNS},
        "70m",
        ("@W",),
    ),
    Case(
        "RolecallEttrLow",
        "nine tenths",
        {"rolecall_run_effective_seconds{@W}": "0+13.5x300", "rolecall_run_training_seconds{@W}": "0+15x300", **RUNS},
        "70m",
    ),
    Case(
        "RolecallEttrLow",
        "too early to say",
        {"rolecall_run_effective_seconds{@W}": "0+1x300", "rolecall_run_training_seconds{@W}": "0+4x300", **RUNS},
        "70m",
    ),
    Case(
        "RolecallTrainingNonFinite",
        "once",
        {'rolecall_train_unfinite_total{@N,role="trainer",replica="trainer/0",rank="0"}': COUNTS},
        "3m",
        ('@N,role="trainer",replica="trainer/0",rank="0"',),
    ),
    Case(
        "RolecallTrainingNonFinite",
        "before",
        {'rolecall_train_unfinite_total{@N,role="trainer",replica="trainer/0",rank="0"}': "3x40"},
        "3m",
    ),
    Case(
        "RolecallEntropyCollapsed",
        "fell, and the reward with it",
        {"rolecall_run_entropy_nats{@W}": "1.2x300 0.02x99", "rolecall_run_reward{@W}": "0.6x300 0.3x99", **RUNS},
        "97m",
        ("@W",),
    ),
    Case(
        "RolecallEntropyCollapsed",
        "fell, and the reward rose for it",
        {"rolecall_run_entropy_nats{@W}": "1.2x300 0.02x99", "rolecall_run_reward{@W}": "0.6x300 0.9x99", **RUNS},
        "97m",
    ),
    Case(
        "RolecallEntropyCollapsed",
        "falls slowly",
        {"rolecall_run_entropy_nats{@W}": "1.2-0.0028x399", "rolecall_run_reward{@W}": "0.6x400", **RUNS},
        "97m",
    ),
    Case(
        "RolecallEntropyCollapsed",
        "over",
        {"rolecall_run_entropy_nats{@W}": "1.2x300 0.02x99", "rolecall_run_reward{@W}": "0.3x400", **OVER},
        "97m",
    ),
    Case(
        "RolecallPolicyDiverged", "high", {"rolecall_run_kl_sampler_nats{@W}": "0.01x40 0.5x80", **RUNS}, "25m", ("@W",)
    ),
    Case(
        "RolecallPolicyDiverged", "one step", {"rolecall_run_kl_sampler_nats{@W}": "0.01x40 3x1 0.01x80", **RUNS}, "12m"
    ),
    Case("RolecallPolicyDiverged", "stale", {"rolecall_run_kl_sampler_nats{@W}": "0.15x120", **RUNS}, "25m"),
    Case("RolecallPolicyDiverged", "over", {"rolecall_run_kl_sampler_nats{@W}": "0.5x120", **OVER}, "25m"),
    Case("RolecallResponsesTruncated", "all", {"rolecall_run_truncated_ratio{@W}": "1x120", **RUNS}, "15m", ("@W",)),
    Case(
        "RolecallResponsesTruncated",
        "all, and steps without an answer between",
        {"rolecall_run_truncated_ratio{@W}": "1x10 _x5 1x10 _x5 1x60", **RUNS},
        "15m",
        ("@W",),
    ),
    Case("RolecallResponsesTruncated", "at first", {"rolecall_run_truncated_ratio{@W}": "1x30 0.9x90", **RUNS}, "15m"),
    Case("RolecallResponsesTruncated", "over", {"rolecall_run_truncated_ratio{@W}": "1x120", **OVER}, "15m"),
    Case("RolecallGroupsFiltered", "all", {"rolecall_run_filtered_ratio{@W}": "0.88x120", **RUNS}, "15m", ("@W",)),
    Case("RolecallGroupsFiltered", "most", {"rolecall_run_filtered_ratio{@W}": "0.8x120", **RUNS}, "15m"),
    Case("RolecallGroupsFiltered", "over", {"rolecall_run_filtered_ratio{@W}": "1x120", **OVER}, "15m"),
    Case(
        "RolecallRoleDown",
        "none left",
        {
            'rolecall_replicas{@W,role="reward",state="serving"}': "2x4 0x40",
            'rolecall_replicas{@W,role="reward",state="ready"}': "0x40",
            'rolecall_replicas_wanted{@W,role="reward"}': "2x40",
            "rolecall_run_step{@W}": "3x40",
            **RUNS,
        },
        "4m",
        ('@W,role="reward"',),
    ),
    Case(
        "RolecallRoleDown",
        "one left",
        {
            'rolecall_replicas{@W,role="reward",state="serving"}': "2x4 1x40",
            'rolecall_replicas_wanted{@W,role="reward"}': "2x40",
            "rolecall_run_step{@W}": "3x40",
            **RUNS,
        },
        "4m",
    ),
    Case(
        "RolecallRoleDown",
        "it only begins",
        {
            'rolecall_replicas{@W,role="reward",state="serving"}': "0x40",
            'rolecall_replicas_wanted{@W,role="reward"}': "2x40",
            "rolecall_run_step{@W}": "-1x40",
            **RUNS,
        },
        "4m",
    ),
    Case(
        "RolecallRoleDown",
        "standbys are not counted",
        {
            'rolecall_replicas{@W,role="standby",state="ready"}': "0x40",
            'rolecall_replicas_wanted{@W,role="standby"}': "1x40",
            'rolecall_replicas{@W,role="trainer-standby",state="ready"}': "0x40",
            'rolecall_replicas_wanted{@W,role="trainer-standby"}': "1x40",
            "rolecall_run_step{@W}": "3x40",
            **RUNS,
        },
        "4m",
    ),
    Case(
        "RolecallRoleDegraded",
        "two of three",
        {
            'rolecall_replicas{@W,role="rollout",state="serving"}': "2x80",
            'rolecall_replicas_wanted{@W,role="rollout"}': "3x80",
            "rolecall_run_step{@W}": "3x80",
            **RUNS,
        },
        "11m",
        ('@W,role="rollout"',),
    ),
    Case(
        "RolecallRoleDegraded",
        "three of four",
        {
            'rolecall_replicas{@W,role="rollout",state="serving"}': "3x80",
            'rolecall_replicas_wanted{@W,role="rollout"}': "4x80",
            "rolecall_run_step{@W}": "3x80",
            **RUNS,
        },
        "11m",
    ),
    Case(
        "RolecallAgentDown",
        "gone, under either name",
        {'up{job="rolecall",instance="n:9477"}': "1x4 0x40", 'up{job="rolecall-agent",instance="n2"}': "0x40"},
        "5m",
        ('job="rolecall",instance="n:9477"', 'job="rolecall-agent",instance="n2"'),
    ),
    Case("RolecallAgentDown", "restarts", {'up{job="rolecall",instance="n:9477"}': "1x4 0x6 1x40"}, "5m"),
    Case("RolecallAgentDown", "reported once", {'up{job="rolecall-dcgm",instance="n:9477"}': "0x40"}, "5m"),
    Case("RolecallAgentStalled", "stands", {"rolecall_agent_rounds_total{@N}": "0+30x8 240x40"}, "8m", ("@N",)),
    Case("RolecallAgentStalled", "slow", {"rolecall_agent_rounds_total{@N}": "0+1x40"}, "8m"),
    Case("RolecallAgentSlow", "lags", {"rolecall_agent_round_seconds{@N}": "2.5x60"}, "6m", ("@N",)),
    Case("RolecallAgentSlow", "once", {"rolecall_agent_round_seconds{@N}": "2.5x10 0.1 2.5x10"}, "5m"),
    Case(
        "RolecallProbeDown",
        "no driver",
        {'rolecall_probe_up{@N,probe="gpu"}': "0x60"},
        "11m",
        ('@N,probe="gpu"',),
    ),
    Case("RolecallProbeDown", "for nine minutes", {'rolecall_probe_up{@N,probe="gpu"}': "0x36 1x20"}, "11m"),
    Case("RolecallProbeDown", "no job, so no RAS", {'rolecall_probe_up{@N,probe="nccl_ras"}': "0x60"}, "11m"),
    Case(
        "RolecallClockSkew",
        "ahead",
        {'rolecall_process_progress_timestamp_seconds{@N,role="trainer",replica="trainer/0",rank="0"}': "10+15x60"},
        "7m",
        ("@N",),
    ),
    Case(
        "RolecallClockSkew",
        "within a scrape",
        {'rolecall_process_progress_timestamp_seconds{@N,role="trainer",replica="trainer/0",rank="0"}': "4+15x60"},
        "7m",
    ),
    Case("RolecallOomKill", "killed", {"rolecall_host_oom_kills_total{@N}": "7x4 8x40"}, "3m", ("@N",)),
    Case("RolecallOomKill", "before", {"rolecall_host_oom_kills_total{@N}": "7x40"}, "3m"),
    Case("RolecallGpuLost", "lost", {'rolecall_gpu_up{@N,gpu="3"}': "1x4 0x40"}, "3m", ('@N,gpu="3"',)),
    Case("RolecallGpuLost", "a scrape missed", {'rolecall_gpu_up{@N,gpu="3"}': "1x8 0 1x40"}, "2m15s"),
    Case(
        "RolecallXid",
        "off the bus, and one that no catalogue has",
        {
            'rolecall_xid_last_timestamp_seconds{@N,gpu="1",xid="79"}': "60x40",
            'rolecall_xid_last_timestamp_seconds{@N,gpu="1",xid="999"}': "60x40",
        },
        "5m",
        ('@N,gpu="1",xid="79"', '@N,gpu="1",xid="999"'),
    ),
    Case(
        "RolecallXid",
        "the application's own, a remapped row",
        {
            'rolecall_xid_last_timestamp_seconds{@N,gpu="1",xid="13"}': "60x40",
            'rolecall_xid_last_timestamp_seconds{@N,gpu="1",xid="31"}': "60x40",
            'rolecall_xid_last_timestamp_seconds{@N,gpu="1",xid="63"}': "60x40",
        },
        "5m",
    ),
    Case("RolecallXid", "long ago", {'rolecall_xid_last_timestamp_seconds{@N,gpu="1",xid="79"}': "60x100"}, "17m"),
    Case(
        "RolecallNvswitchError",
        "the first of its kind",
        {'rolecall_nvswitch_errors_total{@N,device="0",error="22003"}': "_x70 1x10"},
        "18m",
        ('@N,device="0",error="22003"',),
    ),
    Case(
        "RolecallNvswitchError",
        "long ago",
        {'rolecall_nvswitch_errors_total{@N,device="0",error="22003"}': "1x100"},
        "18m",
    ),
    Case(
        "RolecallNvswitchError",
        "corrected",
        {'rolecall_nvswitch_errors_total{@N,device="0",error="11012"}': "_x70 1x10"},
        "18m",
    ),
    Case(
        "RolecallGpuResetNeeded",
        "pending",
        {'rolecall_gpu_remapped_rows_pending{@N,gpu="0"}': COUNTS},
        "4m",
        ('@N,gpu="0"',),
    ),
    Case(
        "RolecallGpuResetNeeded",
        "the driver asks",
        {'rolecall_gpu_recovery_action{@N,gpu="0",action="gpu_reset"}': COUNTS},
        "4m",
        ('@N,gpu="0",action="gpu_reset"',),
    ),
    Case(
        "RolecallGpuResetNeeded",
        "the driver asks nothing",
        {
            'rolecall_gpu_recovery_action{@N,gpu="0",action="none"}': "1x40",
            'rolecall_gpu_remapped_rows_pending{@N,gpu="0"}': "0x40",
        },
        "4m",
    ),
    Case(
        "RolecallGpuReplacementNeeded",
        "failed",
        {'rolecall_gpu_remapped_rows_failed{@N,gpu="0"}': COUNTS},
        "4m",
        ('@N,gpu="0"',),
    ),
    Case(
        "RolecallGpuReplacementNeeded",
        "worn out",
        {'rolecall_gpu_sram_threshold_exceeded{@N,gpu="0"}': COUNTS},
        "4m",
        ('@N,gpu="0"',),
    ),
    Case("RolecallGpuReplacementNeeded", "sound", {'rolecall_gpu_remapped_rows_failed{@N,gpu="0"}': "0x40"}, "4m"),
    Case(
        "RolecallGpuThrottled",
        "a third of the time",
        {'rolecall_gpu_thermal_throttle_seconds_total{@N,gpu="0"}': "0+5x100"},
        "21m",
        ('@N,gpu="0"',),
    ),
    Case(
        "RolecallGpuThrottled",
        "a tenth of the time",
        {'rolecall_gpu_thermal_throttle_seconds_total{@N,gpu="0"}': "0+1.5x100"},
        "21m",
    ),
    Case(
        "RolecallNvlinkDown",
        "one of eighteen",
        {
            'rolecall_gpu_nvlinks_active{@N,gpu="0"}': "18x40",
            'rolecall_gpu_nvlinks_active{@N,gpu="1"}': "18x4 17x40",
        },
        "5m",
        ('@N,gpu="1"',),
    ),
    Case(
        "RolecallNvlinkDown",
        "none of them is wired",
        {
            'rolecall_gpu_nvlinks_active{@N,gpu="0"}': "0x40",
            'rolecall_gpu_nvlinks_active{@N,gpu="1"}': "0x40",
        },
        "5m",
    ),
    Case(
        "RolecallLinkDown",
        "a port of each kind",
        {
            'rolecall_infiniband_up{@N,nic="mlx5_0",port="1"}': "1x4 0x40",
            'rolecall_infiniband_downs_total{@N,nic="mlx5_0",port="1"}': COUNTS,
            'rolecall_nic_up{@N,interface="eth0"}': "1x4 0x40",
            'rolecall_nic_downs_total{@N,interface="eth0"}': COUNTS,
        },
        "4m",
        ('@N,nic="mlx5_0",port="1"', '@N,interface="eth0"'),
    ),
    Case(
        "RolecallLinkDown",
        "never plugged in, and a flap",
        {
            'rolecall_infiniband_up{@N,nic="mlx5_0",port="1"}': "0x40",
            'rolecall_infiniband_downs_total{@N,nic="mlx5_0",port="1"}': "0x40",
            'rolecall_nic_up{@N,interface="eth0"}': "1x4 0x2 1x40",
            'rolecall_nic_downs_total{@N,interface="eth0"}': COUNTS,
        },
        "4m",
    ),
    Case(
        "RolecallLinkFlapping",
        "twice",
        {
            'rolecall_nic_downs_total{@N,interface="eth0"}': "0x20 1x4 2x40",
            'rolecall_infiniband_downs_total{@N,nic="mlx5_0",port="1"}': "0x20 1x4 2x40",
        },
        "8m",
        ('@N,interface="eth0"', '@N,nic="mlx5_0",port="1"'),
    ),
    Case("RolecallLinkFlapping", "once", {'rolecall_nic_downs_total{@N,interface="eth0"}': "0x20 1x40"}, "8m"),
    Case(
        "RolecallPortErrors",
        "one that is always fatal",
        {'rolecall_infiniband_events_total{@N,nic="mlx5_0",port="1",name="local_link_integrity_errors"}': COUNTS},
        "4m",
        ('@N,nic="mlx5_0",port="1",name="local_link_integrity_errors"',),
    ),
    Case(
        "RolecallPortErrors",
        "symbols, beyond 120 an hour",
        {'rolecall_infiniband_events_total{@N,nic="mlx5_0",port="1",name="symbol_error"}': "0+1x300"},
        "61m",
        ('@N,nic="mlx5_0",port="1",name="symbol_error"',),
    ),
    Case(
        "RolecallPortErrors",
        "symbols, a hundred an hour",
        {'rolecall_infiniband_events_total{@N,nic="mlx5_0",port="1",name="symbol_error"}': "0+0.4x300"},
        "61m",
    ),
    Case(
        "RolecallPortErrors",
        "recovers all the time",
        {'rolecall_infiniband_events_total{@N,nic="mlx5_0",port="1",name="link_error_recovery"}': "0+2x40"},
        "6m",
        ('@N,nic="mlx5_0",port="1",name="link_error_recovery"',),
    ),
    Case(
        "RolecallPortErrors",
        "recovers now and then",
        {'rolecall_infiniband_events_total{@N,nic="mlx5_0",port="1",name="link_error_recovery"}': "0+1x40"},
        "6m",
    ),
    Case(
        "RolecallHardwareError",
        "the first",
        {'rolecall_kernel_hardware_errors_total{@N,kind="memory",state="uncorrected"}': "_x70 1x10"},
        "18m",
        ('@N,kind="memory",state="uncorrected"',),
    ),
    Case(
        "RolecallHardwareError",
        "corrected",
        {'rolecall_kernel_hardware_errors_total{@N,kind="memory",state="corrected"}': "_x70 1x10"},
        "18m",
    ),
    Case(
        "RolecallDiskFull",
        "space",
        {
            'rolecall_filesystem_available_bytes{@N,mount="/"}': "9x4 4x40",
            'rolecall_filesystem_size_bytes{@N,mount="/"}': "100x40",
        },
        "4m",
        ('@N,mount="/"',),
    ),
    Case(
        "RolecallDiskFull",
        "files",
        {
            'rolecall_filesystem_files_free{@N,mount="/"}': "4x40",
            'rolecall_filesystem_files{@N,mount="/"}': "100x40",
        },
        "4m",
        ('@N,mount="/"',),
    ),
    Case(
        "RolecallDiskFull",
        "six in a hundred left",
        {
            'rolecall_filesystem_available_bytes{@N,mount="/"}': "6x40",
            'rolecall_filesystem_size_bytes{@N,mount="/"}': "100x40",
        },
        "4m",
    ),
    Case(
        "RolecallFilesystemUnavailable",
        "hangs",
        {'rolecall_filesystem_up{@N,mount="/ckpt"}': "1x4 0x40"},
        "4m",
        ('@N,mount="/ckpt"',),
    ),
    Case(
        "RolecallFilesystemUnavailable",
        "became read-only",
        {'rolecall_filesystem_readonly{@N,mount="/ckpt"}': COUNTS},
        "4m",
        ('@N,mount="/ckpt"',),
    ),
    Case(
        "RolecallFilesystemUnavailable",
        "read-only by nature",
        {'rolecall_filesystem_readonly{@N,mount="/usr"}': "1x40"},
        "4m",
    ),
)
