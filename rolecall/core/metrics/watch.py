"""Rows of the metric catalogue: `rolecall watch` itself, the incidents that it handles, and the run that it watches.

What is folded from the journal (incidents, plans, the run) is the same at every watch of a run and goes on where it was
when a watch is restarted: of several watches take the maximum, never the sum.

What more knowledge may correct is a gauge, although it mostly grows: a fault is found after it began, so the time that
counted as effective until then becomes lost. `delta()` and differences are right on both; `rate()` is not.
"""

from rolecall.core.metrics.metric import NODE, Metric, MetricScope, MetricType
from rolecall.core.policy_health import SIGNS

_G, _C = MetricType.GAUGE, MetricType.COUNTER
_FAULT = ("role", "fault")
_SUSPECT = (*NODE, "role", "replica", "fault")
_REPLICA = ("role", "replica")


def _watch(name: str, type_: MetricType, unit: str, help_: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"rolecall_{name}", type=type_, unit=unit, help=help_, labels=labels, subject=MetricScope.WATCH)


def _run(name: str, type_: MetricType, unit: str, help_: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"rolecall_{name}", type=type_, unit=unit, help=help_, labels=labels, subject=MetricScope.RUN)


_ITSELF = (
    _watch("watch_build_info", _G, "", "1; joins the version of this watch", ("version",)),
    _watch("watch_start_timestamp_seconds", _G, "seconds", "When this watch started, seconds since 1970"),
    _watch("watch_acting", _G, "", "1 while this watch holds the lease and may act, 0 while it only observes"),
    _watch("watch_fence", _G, "", "Fencing number of the newest lease in the journal; 0: there was none"),
    _watch(
        "watch_lease_expires_timestamp_seconds",
        _G,
        "seconds",
        "When the lease expires unless it is renewed, seconds since 1970; in the past: no watch acts; 0: it was "
        "released",
    ),
    _watch("watch_paused", _G, "", "1 while recovery is paused"),
    _watch("watch_mode", _G, "", "1 for the mode of this watch: observe, approve, act", ("mode",)),
    _watch("watch_ticks_total", _C, "", "Ticks that this watch has finished"),
    _watch("watch_tick_failures_total", _C, "", "Ticks that ended with an error"),
    _watch("watch_tick_timestamp_seconds", _G, "seconds", "When the newest tick ended, seconds since 1970"),
    _watch("watch_tick_seconds", _G, "seconds", "Duration of the newest tick, without waiting for data"),
    _watch("watch_tick_busy_seconds_total", _C, "seconds", "Duration of all ticks, without waiting for data"),
    _watch(
        "watch_judging_seconds_total",
        _C,
        "seconds",
        "Time that the detectors took, part of watch_tick_busy_seconds_total",
    ),
    _watch(
        "watch_observed_age_seconds",
        _G,
        "seconds",
        "Age of the oldest agent's newest answer when detectors read it; agents that do not answer are left out",
    ),
    _watch("watch_agents", _G, "", "Agents by state: reached, unreachable", ("state",)),
    _watch(
        "watch_agent_unreachable_timestamp_seconds",
        _G,
        "seconds",
        "Since when the agent of a node has not answered, seconds since 1970; absent while it answers",
        NODE,
    ),
    _watch("watch_processes", _G, "", "Processes of the job that the detectors know"),
    _watch("watch_diagnoses", _G, "", "Current diagnoses, by fault class", ("fault",)),
    _watch("watch_blind", _G, "", "1 while source or detectors fail: nothing is diagnosed"),
    _watch("watch_unhandled", _G, "", "Incidents and diagnoses whose handling fails repeatedly"),
    _watch("watch_calls_failed_total", _C, "", "Notifications that could not be delivered"),
    _watch("watch_cpu_seconds_total", _C, "seconds", "CPU time of this watch"),
    _watch("watch_resident_memory_bytes", _G, "bytes", "Resident memory of this watch"),
    _watch(
        "watch_journal_read_timestamp_seconds",
        _G,
        "seconds",
        "When the journal was last read for the metrics below, seconds since 1970; an old value: it cannot be read",
    ),
    _watch("journal_events_total", _C, "", "Events in the journal, by kind", ("kind",)),
)

_INCIDENTS = (
    _watch("incident_open", _G, "", "1 while an incident is open, for each suspect", _SUSPECT),
    _watch(
        "incident_opened_timestamp_seconds",
        _G,
        "seconds",
        "When the suspect's oldest open incident was opened, seconds since 1970; absent if there is none",
        _SUSPECT,
    ),
    _watch(
        "incident_recent_timestamp_seconds",
        _G,
        "seconds",
        "When the suspect's newest incident was opened, seconds since 1970; until two minutes after its end, so that "
        "no scrape misses a short one",
        _SUSPECT,
    ),
    _watch("incidents_open", _G, "", "Open incidents by state: open, planned, proposed, acting, verifying", ("state",)),
    _watch("incidents_broken", _G, "", "Incidents set aside because their events are inconsistent or cannot be read"),
    _watch("incidents_opened_total", _C, "", "Incidents opened, by role of the first suspect (empty: none)", _FAULT),
    _watch(
        "incidents_found_total",
        _C,
        "",
        "Incidents opened, by each detector that contributed to the diagnosis",
        ("detector",),
    ),
    _watch("incidents_closed_total", _C, "", "Incidents closed, by outcome", ("outcome",)),
    _watch(
        "incident_finding_seconds_total",
        _C,
        "seconds",
        "Detection time (diagnosed onset to finding), summed over incidents",
        ("role",),
    ),
    _watch("incident_findings_total", _C, "", "Incidents in incident_finding_seconds_total", ("role",)),
    _watch("incident_newest_finding_seconds", _G, "seconds", "Detection time of the newest incident", ("role",)),
    _watch(
        "incident_cure_seconds_total",
        _C,
        "seconds",
        "From finding to verified work of the replacement, summed over resolved incidents",
        ("role",),
    ),
    _watch("incident_cures_total", _C, "", "Incidents in incident_cure_seconds_total", ("role",)),
    _watch(
        "incident_newest_cure_seconds",
        _G,
        "seconds",
        "From finding to verified work of the replacement, newest resolved incident",
        ("role",),
    ),
    _watch("plans_total", _C, "", "Plans made", ("action",)),
    _watch("plans_held_total", _C, "", "Plans held by a guard, by guard", ("guard",)),
    _watch("plans_waiting", _G, "", "Plans that wait for approval"),
    _watch(
        "plans_waiting_deadline_timestamp_seconds",
        _G,
        "seconds",
        "When the first waiting plan expires, seconds since 1970; absent if none waits",
    ),
    _watch("plans_decided_total", _C, "", "Decisions on plans that waited: approved, rejected, expired", ("decision",)),
    _watch(
        "actions_total",
        _C,
        "",
        "Actions by outcome: started; done (verifying begins); refused, died, no_progress (failed)",
        ("action", "outcome"),
    ),
    _watch("evictions_last_hour", _G, "", "Replicas taken down by actions that were started within the last hour"),
    _watch("evictions_limit", _G, "", "Evictions per hour beyond which rolecall stops acting and pages on-call"),
    _watch("persons_called_total", _C, "", "Pages to on-call"),
    _watch("nodes_quarantined", _G, "", "Quarantined nodes"),
    _watch(
        "diagnoses_marked",
        _G,
        "",
        "Incidents by the newest mark of their diagnosis: right, wrong",
        ("verdict",),
    ),
)

_OF_RUN = (
    _run("run_info", _G, "", "1; joins the run's id and the job's name", ("run", "name")),
    _run("run_start_timestamp_seconds", _G, "seconds", "When the run started, seconds since 1970"),
    _run("run_ended", _G, "", "1 once the run is over"),
    _run("run_step", _G, "", "Newest optimizer step that is committed, -1 before the first"),
    _run("run_steps_wanted", _G, "", "Steps of the job file"),
    _run("run_step_timestamp_seconds", _G, "seconds", "When the newest step was committed, seconds since 1970"),
    _run("run_step_seconds", _G, "seconds", "Duration of the newest committed step"),
    _run("run_steps_committed_total", _C, "", "Commits of steps; a step that was undone and repeated counts twice"),
    _run("run_steps_interrupted_total", _C, "", "Steps interrupted by a fault"),
    _run("run_tokens_total", _C, "", "Tokens in committed steps"),
    _run("run_reward", _G, "", "Mean reward of the newest committed step"),
    _run("run_loss", _G, "", "Loss of the newest committed step"),
    *(_run(f"run_{sign.metric}", _G, sign.unit, sign.help) for sign in SIGNS),
    _run("run_epoch", _G, "", "Newest membership epoch"),
    _run("run_staleness", _G, "", "Largest staleness in the newest committed step, policy versions"),
    _run("run_requests_moved_total", _C, "", "Requests moved from a lost rollout to others"),
    _run("run_tokens_kept_total", _C, "", "Tokens kept by moved requests"),
    _run("run_tokens_lost_total", _C, "", "Tokens lost by moved requests"),
    _run("run_checkpoint_timestamp_seconds", _G, "seconds", "When the newest checkpoint was written, since 1970"),
    _run(
        "run_ettr_ratio",
        _G,
        "ratio",
        "Effective training time ratio so far, as the report defines it: effective seconds over training seconds",
    ),
    _run(
        "run_training_seconds",
        _G,
        "seconds",
        "Time since trainers and rollouts were first together, to now or to the run's last committed step",
    ),
    _run(
        "run_effective_seconds",
        _G,
        "seconds",
        "Effective part of the training seconds, by the share of replicas at work",
    ),
    _run(
        "run_lost_seconds",
        _G,
        "seconds",
        "Lost part of the training seconds, by role and fault; effective and lost seconds add up to training seconds",
        _FAULT,
    ),
    _run("replicas_wanted", _G, "", "Desired replicas of the role", ("role",)),
    _run("replicas", _G, "", "Replicas of the role by state", ("role", "state")),
    _run(
        "replica_state",
        _G,
        "",
        "1 for the state of the replica: wanted, starting, ready, serving, lost, stopped",
        (*_REPLICA, "state"),
    ),
    _run(
        "replica_incarnation",
        _G,
        "",
        "Which incarnation of the replica is wanted; grows with each replacement",
        _REPLICA,
    ),
    _run("replica_policy_version", _G, "", "Newest policy version that the rollout has proven to hold", _REPLICA),
)

WATCH_METRICS: tuple[Metric, ...] = (*_ITSELF, *_INCIDENTS)
RUN_METRICS: tuple[Metric, ...] = _OF_RUN
