"""Alerts on the watch, on what waits for people, and on the run.

What is folded from the journal is the same at every watch of a run: an alert then comes once from each, and Alertmanager
groups them. A run that is over alerts nobody.
"""

from rolecall.dashboards.grafana.rules.rule import WATCH_JOB, Alert, RuleGroup, Severity

RUNNING = "unless on (job, instance) (rolecall_run_ended == 1)"
OBSERVING = 'on (job, instance) (rolecall_watch_mode{mode="observe"} == 1)'
SAID_BY = "says {{ $labels.instance }}"

_WATCH = (
    Alert(
        name="RolecallWatchDown",
        expr=f'up{{job="{WATCH_JOB}"}} == 0',
        hold="1m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.instance }} does not answer",
        description="Prometheus has not reached {{ $labels.instance }} for a minute. If it is dead, faults of its run are "
        "neither found nor resolved.",
    ),
    Alert(
        name="RolecallNobodyActs",
        expr=f"""time() - rolecall_watch_lease_expires_timestamp_seconds > 30
        unless {OBSERVING} {RUNNING}""",
        hold="1m",
        severity=Severity.CRITICAL,
        summary=f"no watch holds the lease of the run, {SAID_BY}",
        description="The lease ended and no watch has taken it for a minute: faults are found, and nothing is done about "
        "them.",
    ),
    Alert(
        name="RolecallWatchBlind",
        expr="rolecall_watch_blind == 1",
        hold="1m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.instance }} is blind",
        description="Its source or its detectors fail: nothing is diagnosed. The log of the watch says which, and why.",
    ),
    Alert(
        name="RolecallWatchStalled",
        expr="time() - rolecall_watch_tick_timestamp_seconds > 60",
        hold="30s",
        severity=Severity.CRITICAL,
        summary="{{ $labels.instance }} answers, but its loop stands still",
        description="Its newest tick ended {{ $value | humanizeDuration }} ago; a tick takes well below a second.",
    ),
    Alert(
        name="RolecallWatchTicksFail",
        expr="increase(rolecall_watch_tick_failures_total[5m]) > 5",
        hold="1m",
        severity=Severity.WARNING,
        summary="ticks of {{ $labels.instance }} fail",
        description='{{ $value | printf "%.0f" }} ticks of the last 5 minutes ended with an error: what is found is '
        "acted on late or not at all.",
    ),
    Alert(
        name="RolecallJournalUnread",
        expr="time() - rolecall_watch_journal_read_timestamp_seconds > 60",
        hold="1m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.instance }} cannot read the journal",
        description="For {{ $value | humanizeDuration }}. Without it nothing may act, and every figure of incidents and "
        "of the run is as old.",
    ),
    Alert(
        name="RolecallObservationsOld",
        expr="rolecall_watch_observed_age_seconds > 15",
        hold="2m",
        severity=Severity.WARNING,
        summary="{{ $labels.instance }} judges what is old",
        description="The oldest answer that it judged was {{ $value | humanizeDuration }} old: faults are found so much "
        "later.",
    ),
    Alert(
        name="RolecallAgentUnreachable",
        expr="time() - rolecall_watch_agent_unreachable_timestamp_seconds > 300",
        severity=Severity.WARNING,
        summary="the agent of {{ $labels.node }} does not answer its watch",
        description="{{ $labels.instance }} has not heard it for {{ $value | humanizeDuration }}: the ranks of that node "
        "are not watched.",
    ),
)

_PEOPLE = (
    Alert(
        name="RolecallPersonCalled",
        expr="increase(rolecall_persons_called_total[10m]) > 0",
        severity=Severity.CRITICAL,
        summary=f"rolecall called a person, {SAID_BY}",
        description="It has come to the end of what it may or can do, or goes on after a hold that ended. `rolecall incidents` "
        "has why.",
    ),
    Alert(
        name="RolecallPlanWaits",
        expr="rolecall_plans_waiting > 0",
        hold="1m",
        severity=Severity.WARNING,
        summary=f"{{{{ $value }}}} plan(s) wait for a person's word, {SAID_BY}",
        description="Nothing is done about the fault until somebody approves or rejects; `rolecall incidents` shows the "
        "plan and its digest.",
    ),
    Alert(
        name="RolecallPlanLapsesSoon",
        expr="rolecall_plans_waiting_deadline_timestamp_seconds - time() < 120 and on (job, instance) "
        "rolecall_plans_waiting > 0",
        severity=Severity.CRITICAL,
        summary=f"a plan lapses in {{{{ $value | humanizeDuration }}}}, {SAID_BY}",
        description="Without a word it is dropped and the fault stays. `rolecall approve DIGEST` or `rolecall reject "
        "DIGEST --reason ...`.",
    ),
    Alert(
        name="RolecallFaultObserved",
        expr=f"rolecall_incident_open == 1 and {OBSERVING}",
        hold="1m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.fault }} of {{ $labels.replica }} on {{ $labels.node }}, and nobody acts",
        description="{{ $labels.instance }} only observes: what it found stands for a minute, and is for people to mend. "
        "`rolecall incidents` has the sentence and the evidence.",
    ),
    Alert(
        name="RolecallIncidentOpenLong",
        expr=f"time() - rolecall_incident_opened_timestamp_seconds > 900 unless {OBSERVING}",
        severity=Severity.CRITICAL,
        summary="{{ $labels.fault }} of {{ $labels.replica }} is not resolved",
        description="The incident about {{ $labels.replica }} on {{ $labels.node }} has been open for "
        "{{ $value | humanizeDuration }}; a cure takes seconds to minutes.",
    ),
    Alert(
        name="RolecallIncidentUnhandled",
        expr="rolecall_watch_unhandled > 0 or rolecall_incidents_broken > 0",
        hold="5m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.instance }} cannot handle an incident",
        description="{{ $value }} incident(s) or diagnoses fail each time, or were set aside because their events do not "
        "fit: nothing more is done for them.",
    ),
    Alert(
        name="RolecallCallsFail",
        expr="increase(rolecall_watch_calls_failed_total[15m]) > 0",
        severity=Severity.CRITICAL,
        summary="messages of {{ $labels.instance }} do not arrive",
        description='{{ $value | printf "%.0f" }} message(s) to people could not be delivered: who waits for a call of '
        "rolecall gets none.",
    ),
    Alert(
        name="RolecallEvictionLimit",
        expr="rolecall_evictions_last_hour >= rolecall_evictions_limit",
        severity=Severity.CRITICAL,
        summary=f"the limit of evictions is reached, {SAID_BY}",
        description="{{ $value }} replicas were taken down within an hour. From here on a person is called instead: many "
        "faults at once are rarely many machines.",
    ),
    Alert(
        name="RolecallActionsFail",
        expr='sum by (job, instance) (increase(rolecall_actions_total{outcome=~"refused|died|no_progress"}[30m])) >= 3',
        severity=Severity.CRITICAL,
        summary=f"actions fail, {SAID_BY}",
        description='{{ $value | printf "%.0f" }} actions of the last 30 minutes did not cure what they were for.',
    ),
    Alert(
        name="RolecallPaused",
        expr=f"rolecall_watch_paused == 1 {RUNNING}",
        hold="1h",
        severity=Severity.WARNING,
        summary="acting has been paused for an hour",
        description="Somebody paused {{ $labels.instance }} and may have forgotten it: no fault is resolved meanwhile.",
    ),
    Alert(
        name="RolecallQuarantineForgotten",
        expr=f"rolecall_nodes_quarantined > 0 {RUNNING}",
        hold="12h",
        severity=Severity.WARNING,
        summary="{{ $value }} node(s) in quarantine for half a day",
        description="Nothing is placed on them. They want a burn-in and a way back, or a ticket.",
    ),
)

_RUN = (
    Alert(
        name="RolecallRunStalled",
        expr=f"""time() - rolecall_run_step_timestamp_seconds
        > clamp_min(10 * avg_over_time(rolecall_run_step_seconds[1h]), 300) {RUNNING}""",
        hold="30s",
        severity=Severity.CRITICAL,
        summary=f"no step for {{{{ $value | humanizeDuration }}}}, {SAID_BY}",
        description="That is more than ten of its own steps and more than five minutes.",
    ),
    Alert(
        name="RolecallEttrLow",
        expr=f"""delta(rolecall_run_effective_seconds[1h]) / (delta(rolecall_run_training_seconds[1h]) > 1200) < 0.8
        {RUNNING}""",
        hold="10m",
        severity=Severity.WARNING,
        summary=f"effective training time is {{{{ $value | humanizePercentage }}}} of the last hour, {SAID_BY}",
        description="More than a fifth of the hour was lost to faults; `rolecall_run_lost_seconds` has to which.",
    ),
    Alert(
        name="RolecallTrainingNotFinite",
        expr="increase(rolecall_train_unfinite_total[10m]) > 0",
        severity=Severity.CRITICAL,
        summary="loss, gradient or reward of {{ $labels.replica }} is not finite",
        description='{{ $value | printf "%.0f" }} times in 10 minutes, on {{ $labels.node }}. A GPU that computes wrong '
        "looks like this, and so does an unstable recipe.",
    ),
    Alert(
        name="RolecallRoleGone",
        expr=f"""sum by (job, instance, role) (rolecall_replicas{{state=~"ready|serving", role!="standby"}}) == 0
        and on (job, instance, role) rolecall_replicas_wanted > 0
        and on (job, instance) rolecall_run_step >= 0 {RUNNING}""",
        hold="1m",
        severity=Severity.CRITICAL,
        summary="no {{ $labels.role }} serves",
        description="Every replica of {{ $labels.role }} is lost, starting or stopped: the run stands.",
    ),
    Alert(
        name="RolecallRoleThin",
        expr=f"""sum by (job, instance, role) (rolecall_replicas{{state=~"ready|serving"}})
        / on (job, instance, role) (rolecall_replicas_wanted > 0) < 0.75
        and on (job, instance) rolecall_run_step >= 0 {RUNNING}""",
        hold="10m",
        severity=Severity.WARNING,
        summary="{{ $value | humanizePercentage }} of {{ $labels.role }} serve",
        description="Fewer than three quarters of its replicas for ten minutes: replacements do not come.",
    ),
)

WATCH_GROUPS = (
    RuleGroup(name="rolecall-watch", rules=_WATCH),
    RuleGroup(name="rolecall-people", rules=_PEOPLE),
    RuleGroup(name="rolecall-run", rules=_RUN),
)
