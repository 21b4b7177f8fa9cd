"""`/metrics` of `rolecall watch`, from values alone: the state of the newest tick, and the totals folded from the
journal.

Counters of closed sets begin at 0 instead of with their first event, which a rate would miss. External names (suspects,
run, job) are cut to `NAME_CHARS_MAX`, and at most `NUM_SUSPECTS_MAX` open incidents are shown, so that an agent that
invents names cannot fill a Prometheus.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rolecall import __version__
from rolecall.core.config.job import JobConfig
from rolecall.core.diagnosis import ActionKind
from rolecall.core.faults import FAULTS
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Lease
from rolecall.core.membership import ReplicaState
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.policy_health import BY_NAME as SIGNS_BY_NAME
from rolecall.recovery.fleet_view import FleetView
from rolecall.recovery.guards import AT_ONCE, HOLD, HOUR_SECONDS, num_evictions
from rolecall.recovery.incidents import (
    UNDECIDED,
    UNDER_REPAIR,
    ActionFailure,
    Decision,
    Incident,
    IncidentOutcome,
    IncidentState,
    evictions,
)
from rolecall.views.run_totals import RunAccount

MODES = ("observe", "approve", "act")
WANTED = "wanted"
"""State of a replica whose desired incarnation has no record yet."""
LENT = "lent"
"""State of a replica that has lent its node to another one."""
STATES = (WANTED, LENT, *map(str, ReplicaState))
NAME_CHARS_MAX = 120
NUM_SUSPECTS_MAX = 1_000
NUM_UNREACHABLE_MAX = 1_000
VERDICTS = ("right", "wrong")
OUTCOMES = ("started", "done", *map(str, ActionFailure))
RECENT_SECONDS = 120.0
"""With one scrape per minute, each incident is seen twice."""
K = TypeVar("K")
Who = tuple[str, str, str, str]
"""(node, role, replica, fault class)."""
ACTIONS = tuple(a for a in ActionKind if a is not ActionKind.TOLERATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TickView:
    """State of the newest tick. Replaced as a whole by the loop, read by the renderer."""

    started_at: float  # wall seconds, like the others
    mode: str
    num_ticks: int = 0
    num_failures: int = 0
    ended_at: float = 0.0
    seconds: float = 0.0  # of the newest tick, excluding its wait
    busy_seconds: float = 0.0
    detection_seconds: float = 0.0
    acting: bool = False
    observed_age_seconds: float = math.nan
    num_agents: int = 0
    unreachable: tuple[tuple[str, float], ...] = ()  # (node, onset)
    num_processes: int = 0
    standing: Mapping[str, int] = field(default_factory=dict)  # fault class -> diagnoses
    blind: bool = False
    num_unhandled: int = 0
    num_notifications_failed: int = 0
    cpu_seconds: float = 0.0
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalView:
    """Result of the newest journal poll, besides the account that it folds."""

    read_at: float
    lease: Lease | None
    paused: bool
    incidents: Mapping[str, Incident]
    num_broken: int
    fleet: FleetView


def _value(name: str, value: float, *labels: str) -> MetricValue:
    return MetricValue(BY_NAME[f"rolecall_{name}"], tuple(label[:NAME_CHARS_MAX] for label in labels), float(value))


def tick_values(tick: TickView) -> Iterator[MetricValue]:
    yield _value("watch_build_info", 1.0, __version__)
    plain = {
        "watch_start_timestamp_seconds": tick.started_at,
        "watch_acting": tick.acting,
        "watch_ticks_total": tick.num_ticks,
        "watch_tick_failures_total": tick.num_failures,
        "watch_tick_seconds": tick.seconds,
        "watch_tick_busy_seconds_total": tick.busy_seconds,
        "watch_detection_seconds_total": tick.detection_seconds,
        "watch_processes": tick.num_processes,
        "watch_blind": tick.blind,
        "watch_unhandled": tick.num_unhandled,
        "watch_notifications_failed_total": tick.num_notifications_failed,
        "watch_cpu_seconds_total": tick.cpu_seconds,
        "watch_resident_memory_bytes": tick.resident_bytes,
    }
    for name, value in plain.items():
        yield _value(name, value)
    yield from _known("watch_tick_timestamp_seconds", tick.ended_at or None)
    yield from _known("watch_observed_age_seconds", tick.observed_age_seconds)
    for mode in MODES:
        yield _value("watch_mode", mode == tick.mode, mode)
    yield _value("watch_agents", max(0, tick.num_agents - len(tick.unreachable)), "reached")
    yield _value("watch_agents", len(tick.unreachable), "unreachable")
    for node, since in tick.unreachable[:NUM_UNREACHABLE_MAX]:
        yield _value("watch_agent_unreachable_timestamp_seconds", since, node)
    for fault in FAULTS:
        yield _value("watch_diagnoses", tick.standing.get(fault, 0), fault)


def journal_values(view: JournalView, account: RunAccount, job: JobConfig, now: float) -> Iterator[MetricValue]:
    """Values that are the same for every watch of a run. `now`: wall seconds."""
    yield _value("watch_journal_read_timestamp_seconds", view.read_at)
    yield _value("watch_fence", view.lease.fence if view.lease else 0)
    yield _value("watch_lease_expires_timestamp_seconds", view.lease.expires_at if view.lease else 0.0)
    yield _value("watch_paused", view.paused)
    for kind in EventKind:
        yield _value("journal_events_total", account.events[kind], kind)
    yield from _incident_values(view, now)
    yield from _counted(account, sorted(job.roles.counts()))
    yield _value("evictions_limit", job.recovery.evictions_per_hour_max)
    yield _value("nodes_quarantined", len(account.quarantined))
    for verdict in VERDICTS:
        yield _value("diagnoses_reviewed", sum(v == verdict for v in account.reviews.values()), verdict)


def _incident_values(view: JournalView, now: float) -> Iterator[MetricValue]:
    still_open = [i for i in view.incidents.values() if i.state is not IncidentState.CLOSED]
    states = Counter(i.state for i in still_open)
    for state in sorted({*UNDECIDED, *UNDER_REPAIR}):
        yield _value("incidents_open", states[state], state)
    yield _value("incidents_broken", view.num_broken)
    oldest: dict[Who, float] = {}
    for incident in still_open:
        for suspect in _suspects(incident):
            oldest[suspect] = min(incident.opened_at, oldest.get(suspect, math.inf))
    newest: dict[Who, float] = {}
    for incident in view.incidents.values():
        # A dismissed incident counts as closed and has no closing time.
        if incident.state is not IncidentState.CLOSED or now - (incident.closed_at or 0.0) < RECENT_SECONDS:
            for suspect in _suspects(incident):
                newest[suspect] = max(incident.opened_at, newest.get(suspect, 0.0))
    for suspect, opened_at in sorted(oldest.items(), key=lambda kv: kv[1])[:NUM_SUSPECTS_MAX]:
        yield _value("incident_open", 1.0, *suspect)
        yield _value("incident_opened_timestamp_seconds", opened_at, *suspect)
    for suspect, opened_at in sorted(newest.items(), key=lambda kv: -kv[1])[:NUM_SUSPECTS_MAX]:
        yield _value("incident_recent_timestamp_seconds", opened_at, *suspect)
    waiting = [
        i.attempt.expires_at
        for i in still_open
        if i.state is IncidentState.PROPOSED and i.attempt is not None and i.attempt.decision is None
    ]
    yield _value("plans_waiting", len(waiting))
    yield from _known("plans_waiting_deadline_timestamp_seconds", min((t for t in waiting if t), default=None))
    since = now - HOUR_SECONDS
    yield _value("evictions_last_hour", num_evictions(evictions(view.incidents.values(), since), view.fleet))


def _suspects(incident: Incident) -> Iterable[Who]:
    d = incident.diagnosis
    fault = str(d.fault_class)
    return [(s.node, s.role, s.replica, fault) for s in d.suspects] or [("", d.role_at_fault, "", fault)]


def _counted(account: RunAccount, roles: list[str]) -> Iterator[MetricValue]:
    for cause in _with(account.opened, ((role, str(fault)) for role in roles for fault in FAULTS)):
        yield _value("incidents_opened_total", account.opened[cause], *cause)
    for detector, number in sorted(account.found.items()):
        yield _value("incidents_found_total", number, detector)
    for name, tally, closed_set in (
        ("incidents_closed_total", account.closed, IncidentOutcome),
        ("plans_total", account.plans, ActionKind),
        ("plans_held_total", account.held, GUARDS),
        ("plans_decided_total", account.decided, Decision),
    ):
        for key in _with(tally, map(str, closed_set)):
            yield _value(name, tally[key], key)
    for pair in _with(account.actions, ((str(a), o) for a in ACTIONS for o in OUTCOMES)):
        yield _value("actions_total", account.actions[pair], *pair)
    yield _value("oncall_pages_total", account.events[EventKind.ONCALL_PAGED])
    for what, took in (("detection", account.detection_seconds), ("resolution", account.resolution_seconds)):
        for role in sorted({*roles, *took}):
            one = took.get(role)
            yield _value(f"incident_{what}_seconds_total", one.seconds if one else 0.0, role)
            yield _value(f"incident_{what}s_total", one.number if one else 0, role)
            if one is not None:
                yield _value(f"incident_newest_{what}_seconds", one.newest, role)


GUARDS = (
    *("mode", "paused", "stopping", "incarnation", "majority", "last_living", "retries", "evictions", "role_share"),
    *(AT_ONCE, HOLD),
)
"""Guards of recovery/guards.py have a series before their first hold; other guards get one at that point."""


def _with(counted: Mapping[K, int], known: Iterable[K]) -> list[K]:
    """The union of the known and the counted keys."""
    return list(dict.fromkeys([*known, *sorted(counted, key=str)]))


def run_values(
    view: JournalView, account: RunAccount, job: JobConfig, run_id: str, now: float, *, ours: bool
) -> Iterator[MetricValue]:
    """`ours`: rolecall started the run, so its journal has steps and replicas."""
    yield _value("run_info", 1.0, run_id, job.name)
    if not ours:
        return
    step = account.step
    yield _value("run_ended", account.ended)
    yield _value("run_step", step.step if step else -1)
    yield _value("run_steps_wanted", job.num_steps)
    yield _value("run_steps_committed_total", account.events[EventKind.STEP_COMMITTED])
    yield _value("run_steps_interrupted_total", account.events[EventKind.STEP_INTERRUPTED])
    yield _value("run_tokens_total", account.num_tokens)
    yield _value("run_epoch", account.epoch)
    yield _value("run_requests_moved_total", account.requests_reassigned)
    yield _value("run_tokens_kept_total", account.tokens_kept)
    yield _value("run_tokens_lost_total", account.tokens_lost)
    yield from _known("run_start_timestamp_seconds", account.started_at)
    yield from _known("run_checkpoint_timestamp_seconds", account.checkpoint_at)
    yield from _known("run_staleness", account.staleness)
    for role, ratio in account.mfu.newest.items():
        yield _value("run_mfu_ratio", ratio, role)
    if step is not None:
        yield _value("run_step_timestamp_seconds", step.at)
        yield from _known("run_step_seconds", step.seconds)
        yield from _known("run_reward", step.reward)
        yield from _known("run_loss", step.loss)
        for name, value in account.signs.items():
            yield _value(f"run_{SIGNS_BY_NAME[name].metric}", value)
    yield from _learning_values(account)
    if (spent := account.lost_time.account(now)) is not None:
        yield from _known("run_ettr_ratio", spent.ettr)
        yield _value("run_training_seconds", spent.training_seconds)
        yield _value("run_effective_seconds", spent.effective_seconds)
        for (role, fault), seconds in sorted(spent.lost.items()):
            yield _value("run_lost_seconds", seconds, role, fault)
    yield from _replica_values(view.fleet, account)


def _learning_values(account: RunAccount) -> Iterator[MetricValue]:
    """Of the newest evaluation, and of the dataset."""
    if (newest := account.evaluations.newest) is not None:
        result = newest.result
        yield _value("run_evaluation_timestamp_seconds", newest.at)
        yield _value("run_evaluation_step", result.step)
        yield from _known("run_evaluation_reward", result.reward)
        yield from _known("run_evaluation_reward_low", result.reward_low)
        yield from _known("run_evaluation_reward_high", result.reward_high)
        yield from _known("run_evaluation_response_length", result.response_length)
        yield _value("run_evaluation_prompts", result.prompts)
        yield _value("run_evaluation_seconds", result.seconds)
        for k, share in result.pass_at.items():
            yield _value("run_evaluation_pass_ratio", share, k)
        for reason, num in result.unscored.items():
            yield _value("run_evaluation_unscored", num, reason)
    if (data := account.dataset) is not None:
        yield _value("run_dataset_rows", data.rows)
        yield _value("run_dataset_rows_seen_total", data.rows_seen)
        yield _value("run_dataset_epoch", data.epoch)
        yield _value("run_dataset_epoch_ratio", data.epoch_share)
        for reason, num in data.dropped.items():
            yield _value("run_dataset_groups_dropped_total", num, reason)


def _replica_values(fleet: FleetView, account: RunAccount) -> Iterator[MetricValue]:
    tally: Counter[tuple[str, str]] = Counter()
    wanted: Counter[str] = Counter()
    for replica in fleet.replicas:
        there = replica.incarnation >= replica.desired_incarnation and replica.state is not None
        state = LENT if replica.lent else str(replica.state) if there else WANTED
        tally[replica.role, state] += 1
        wanted[replica.role] += not replica.lent
        yield _value("replica_state", 1.0, replica.role, replica.replica, state)
        yield _value("replica_incarnation", replica.desired_incarnation, replica.role, replica.replica)
        version = account.policy_versions.get(replica.replica)
        yield from _known("replica_policy_version", version, replica.role, replica.replica)
    for role in sorted(wanted):
        yield _value("replicas_wanted", wanted[role], role)
        for state in STATES:
            yield _value("replicas", tally[role, state], role, state)


def _known(name: str, value: float | None, *labels: str) -> Iterator[MetricValue]:
    """Nothing for an unknown value: a gap is correct, 0 or NaN is not."""
    if value is not None and not math.isnan(value):
        yield _value(name, value, *labels)
