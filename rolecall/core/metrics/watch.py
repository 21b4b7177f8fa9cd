"""Rows of the metric catalogue: `rolecall watch` itself, the incidents that it handles, and the run that it watches.

Values folded from the journal (incidents, plans, the run) are the same at every watch of a run and continue when a
watch restarts: of several watches take the maximum, never the sum.

A value that may be corrected later is a gauge, although it mostly grows: a fault is detected after it began, so time
that counted as effective becomes lost. `delta()` and differences are right on both; `rate()` is not.
"""

from rolecall.core.metrics.metric import MetricScope, rows
from rolecall.core.policy_health import SIGNS

WATCH_METRICS = rows(
    MetricScope.WATCH,
    (),
    {
        "watch_build_info{version}": "1; joins the version of this watch",
        "watch_start_timestamp_seconds": "When this watch started, seconds since 1970",
        "watch_acting": "1 while this watch holds the lease and may act, 0 while it only observes",
        "watch_fence": "Fencing number of the newest lease in the journal; 0: there was none",
        "watch_lease_expires_timestamp_seconds": "When the lease expires unless it is renewed, seconds since 1970; "
        "in the past: no watch acts; 0: it was released",
        "watch_paused": "1 while recovery is paused",
        "watch_mode{mode}": "1 for the mode of this watch: observe, approve, act; that of orphans may be another",
        "watch_ticks_total": "Ticks that this watch has finished",
        "watch_tick_failures_total": "Ticks that ended with an error",
        "watch_tick_timestamp_seconds": "When the newest tick ended, seconds since 1970",
        "watch_tick_seconds": "Duration of the newest tick, without waiting for data",
        "watch_tick_busy_seconds_total": "Duration of all ticks, without waiting for data",
        "watch_detection_seconds_total": "Time that the detectors took, part of watch_tick_busy_seconds_total",
        "watch_observed_age_seconds": "Age of the oldest agent's newest answer when detectors read it; agents that "
        "do not answer are left out",
        "watch_agents{state}": "Agents by state: reached, unreachable",
        "watch_agent_unreachable_timestamp_seconds{node}": "Since when the agent of a node has not answered, seconds "
        "since 1970; absent while it answers",
        "watch_processes": "Processes of the job that the detectors know",
        "watch_diagnoses{fault}": "Current diagnoses, by fault class",
        "watch_blind": "1 while source or detectors fail: nothing is diagnosed",
        "watch_unhandled": "Incidents and diagnoses whose handling fails repeatedly",
        "watch_notifications_failed_total": "Notifications that could not be delivered",
        "watch_cpu_seconds_total": "CPU time of this watch",
        "watch_resident_memory_bytes": "Resident memory of this watch",
        "watch_journal_read_timestamp_seconds": "When the journal was last read for the metrics below, seconds since "
        "1970; an old value: it cannot be read",
        "journal_events_total{kind}": "Events in the journal, by kind",
        "incident_open{node,role,replica,fault}": "1 while an incident is open, for each suspect",
        "incident_opened_timestamp_seconds{node,role,replica,fault}": "When the suspect's oldest open incident was "
        "opened, seconds since 1970; absent if there is none",
        "incident_recent_timestamp_seconds{node,role,replica,fault}": "When the suspect's newest incident was "
        "opened, seconds since 1970; until two minutes after its end, so that no scrape misses a short one",
        "incidents_open{state}": "Open incidents by state: open, planned, proposed, acting, verifying",
        "incidents_broken": "Incidents set aside because their events are inconsistent or cannot be read",
        "incidents_opened_total{role,fault}": "Incidents opened, by role of the first suspect (empty: none)",
        "incidents_found_total{detector}": "Incidents opened, by each detector that contributed to the diagnosis",
        "incidents_closed_total{outcome}": "Incidents closed, by outcome",
        "incident_detection_seconds_total{role}": "Detection time (diagnosed onset to finding), summed over incidents",
        "incident_detections_total{role}": "Incidents in incident_detection_seconds_total",
        "incident_newest_detection_seconds{role}": "Detection time of the newest incident",
        "incident_resolution_seconds_total{role}": "From finding to verified work of the replacement, summed over "
        "resolved incidents",
        "incident_resolutions_total{role}": "Incidents in incident_resolution_seconds_total",
        "incident_newest_resolution_seconds{role}": "From finding to verified work of the replacement, newest resolved "
        "incident",
        "plans_total{action}": "Plans made",
        "plans_held_total{guard}": "Plans held by a guard, by guard",
        "plans_waiting": "Plans that wait for approval",
        "plans_waiting_deadline_timestamp_seconds": "When the first waiting plan expires, seconds since 1970; absent "
        "if none waits",
        "plans_decided_total{decision}": "Decisions on plans that waited: approved, rejected, expired",
        "actions_total{action,outcome}": "Actions by outcome: started; done (verifying begins); refused, died, "
        "not_started, no_progress (failed)",
        "evictions_last_hour": "Replicas taken down by actions that were started within the last hour",
        "evictions_limit": "Evictions per hour beyond which rolecall stops acting and pages on-call",
        "oncall_pages_total": "Pages to on-call; without a notification channel they are only logged",
        "nodes_quarantined": "Quarantined nodes",
        "diagnoses_reviewed{verdict}": "Incidents by the newest review of their diagnosis: right, wrong",
    },
)
RUN_METRICS = rows(
    MetricScope.RUN,
    (),
    {
        "run_info{run,name}": "1; joins the run's id and the job's name",
        "run_start_timestamp_seconds": "When the run started, or `rolecall up` continued it, seconds since 1970",
        "run_ended": "1 once the run is over",
        "run_step": "Newest optimizer step that is committed, -1 before the first",
        "run_steps_wanted": "Steps of the job file",
        "run_step_timestamp_seconds": "When the newest step was committed, seconds since 1970",
        "run_step_seconds": "Duration of the newest committed step",
        "run_steps_committed_total": "Commits of steps; a step that was undone and repeated counts twice",
        "run_steps_interrupted_total": "Steps interrupted by a fault",
        "run_tokens_total": "Tokens in committed steps",
        "run_mfu_ratio{role}": "Model FLOPs utilisation of trainers and rollouts in the newest step; absent without "
        "the role's peak in the job file",
        "run_reward": "Mean reward of the newest committed step",
        "run_loss": "Loss of the newest committed step",
        **{f"run_{sign.metric}": sign.help for sign in SIGNS},
        "run_evaluation_step": "Committed steps when the newest evaluation on held-out prompts began",
        "run_evaluation_reward": "Mean reward of the newest evaluation; absent if no prompt was scored",
        "run_evaluation_reward_low": "Lower end of its 95 % interval over prompts",
        "run_evaluation_reward_high": "Upper end of its 95 % interval over prompts",
        "run_evaluation_pass_ratio{k}": "Share of its prompts of which one of k answers passes",
        "run_evaluation_prompts": "Prompts that it scored",
        "run_evaluation_unscored{reason}": "Prompts that it could not score, by reason",
        "run_evaluation_response_length": "Mean length of its answers, tokens",
        "run_evaluation_seconds": "Duration of it",
        "run_evaluation_timestamp_seconds": "When it finished, seconds since 1970",
        "run_dataset_rows": "Rows of the dataset; like the next ones, absent for a built-in task",
        "run_dataset_rows_seen_total": "Rows whose prompt groups were issued, over all epochs",
        "run_dataset_epoch": "Epoch of the dataset, from 0",
        "run_dataset_epoch_ratio": "Part of that epoch that is issued",
        "run_dataset_groups_dropped_total{reason}": "Prompt groups dropped, by reason (prompt too long, reward_failed, "
        "filtered, stale)",
        "run_epoch": "Newest membership epoch",
        "run_staleness": "Largest staleness in the newest committed step, policy versions",
        "run_requests_moved_total": "Requests moved from a lost rollout to others",
        "run_tokens_kept_total": "Tokens kept by moved requests",
        "run_tokens_lost_total": "Tokens lost by moved requests",
        "run_checkpoint_timestamp_seconds": "When the newest checkpoint was written, since 1970",
        "run_ettr_ratio": "Effective training time ratio so far, as the report defines it: effective seconds over "
        "training seconds",
        "run_training_seconds": "Time since trainers and rollouts were first together, to now or to the run's last "
        "committed step",
        "run_effective_seconds": "Effective part of the training seconds, by the share of replicas at work",
        "run_lost_seconds{role,fault}": "Lost part of the training seconds, by role and fault; effective and lost "
        "seconds add up to training seconds",
        "replicas_wanted{role}": "Desired replicas of the role",
        "replicas{role,state}": "Replicas of the role by state",
        "replica_state{role,replica,state}": "1 for the state of the replica: wanted, starting, ready, serving, "
        "lost, stopped",
        "replica_incarnation{role,replica}": "Which incarnation of the replica is wanted; grows with each replacement",
        "replica_policy_version{role,replica}": "Newest policy version that the rollout has proven to hold",
    },
)
