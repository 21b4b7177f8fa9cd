"""Totals of incidents and of the run for a watch's `/metrics`: a fold of the journal's events, each read once.

A scrape never reads the journal: the watch's poller feeds new events in. Lines that are unreadable or lack required
fields are skipped; the others count.
"""

from collections import Counter
from dataclasses import dataclass, field

from rolecall.core.config.job import JobConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.journal.evaluations import EvaluationHistory
from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads.recovery import (
    ActionDone,
    ActionFailed,
    ActionStarted,
    DiagnosisReviewed,
    IncidentClosed,
    IncidentOpened,
    NodeQuarantined,
    NodeReturnedToService,
    PlanApproved,
    PlanBlocked,
    PlanCreated,
    PlanExpired,
    PlanRejected,
)
from rolecall.core.journal.payloads.run import (
    CheckpointWritten,
    ComponentRestarted,
    DatasetProgress,
    EpochAdvanced,
    RequestsReassigned,
    RunEnded,
    RunStarted,
    StepCommitted,
    WeightsAdmitted,
)
from rolecall.recovery.incidents import OPERATOR
from rolecall.views.ettr import EttrAccumulator, Step, step_of
from rolecall.views.mfu import MfuMeter

NUM_ROLES_MAX = 64
"""Roles with their own counters; a further one counts as none, since agents, which are untrusted, report the roles."""


@dataclass
class RunAccount:
    """All totals since the journal's first line. Owned by one thread."""

    lost_time: EttrAccumulator
    mfu: MfuMeter
    events: Counter[str] = field(default_factory=Counter)  # by kind
    started_at: float | None = None  # or continued by `rolecall up`, the newest time
    ended: bool = False
    step: Step | None = None
    staleness: float | None = None
    signs: dict[str, float] = field(default_factory=dict)  # of the newest step (core/policy_health.py)
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    dataset: DatasetProgress | None = None
    num_tokens: int = 0
    epoch: int = 0
    requests_reassigned: int = 0
    tokens_kept: int = 0
    tokens_lost: int = 0
    checkpoint_at: float | None = None
    policy_versions: dict[str, int] = field(default_factory=dict)  # replica -> newest proven version
    opened: Counter[tuple[str, str]] = field(default_factory=Counter)  # by role of the first suspect, fault class
    found: Counter[str] = field(default_factory=Counter)  # by detector
    closed: Counter[str] = field(default_factory=Counter)  # by outcome
    detection_seconds: dict[str, "DurationTotal"] = field(default_factory=dict)  # by role
    resolution_seconds: dict[str, "DurationTotal"] = field(default_factory=dict)
    plans: Counter[str] = field(default_factory=Counter)  # by action
    held: Counter[str] = field(default_factory=Counter)  # by guard
    decided: Counter[str] = field(default_factory=Counter)
    actions: Counter[tuple[str, str]] = field(default_factory=Counter)  # by action, outcome
    quarantined: set[str] = field(default_factory=set)
    reviews: dict[str, str] = field(default_factory=dict)  # incident -> newest operator verdict
    _roles: set[str] = field(default_factory=set)

    def take(self, event: Event) -> None:
        """Raises the errors of a malformed event body; the event is counted nevertheless."""
        self.events[str(event.kind)] += 1
        summary = self.lost_time.take(event)
        seconds = summary.since_finding(summary.resolved_at) if summary is not None and summary.resolved else None
        if summary is not None and seconds is not None:
            self.resolution_seconds.setdefault(self._role(summary.incident.diagnosis), DurationTotal()).add(seconds)
        self.mfu.take(event)
        self.evaluations.take(event)
        which = str(event.incident_id)
        match event.payload:
            case RunStarted():
                self.started_at = event.wall_at
            case RunEnded():
                self.ended = True
            case ComponentRestarted(continues_run=True):
                self.ended, self.started_at = False, event.wall_at
            case StepCommitted() as committed:
                self.step = step_of(committed, event.wall_at)
                self.num_tokens += committed.tokens
                self.signs = dict(self.step.signs)
                self.staleness = committed.staleness
                self.dataset = committed.dataset
            case EpochAdvanced(epoch=epoch):
                self.epoch = epoch
            case RequestsReassigned() as moved:
                self.requests_reassigned += moved.num_requests
                self.tokens_kept += moved.tokens_kept
                self.tokens_lost += moved.tokens_lost
            case CheckpointWritten():
                self.checkpoint_at = event.wall_at
            case WeightsAdmitted() as admitted:
                self.policy_versions[admitted.replica] = admitted.policy_version
            case NodeQuarantined(node=node):
                self.quarantined.add(node)
            case NodeReturnedToService(node=node):
                self.quarantined.discard(node)
            case IncidentOpened(diagnosis=diagnosis):
                role = self._role(diagnosis)
                self.opened[role, str(diagnosis.fault_class)] += 1
                self.found.update(diagnosis.detectors)
                if OPERATOR not in diagnosis.detectors:  # an operator request has no onset
                    took = max(0.0, diagnosis.detected_at - diagnosis.onset)
                    self.detection_seconds.setdefault(role, DurationTotal()).add(took)
            case IncidentClosed(outcome=outcome):
                self.closed[outcome] += 1
            case PlanCreated(plan=plan):
                self.plans[str(plan.action)] += 1
            case PlanBlocked(guard=guard):
                self.held[guard] += 1
            case PlanApproved() | PlanRejected() | PlanExpired():
                self.decided[str(event.kind).removeprefix("plan_")] += 1
            case ActionStarted():
                self.actions[self._action(which), "started"] += 1
            case ActionDone():
                self.actions[self._action(which), "done"] += 1
            case ActionFailed(failure=failure):
                self.actions[self._action(which), failure] += 1
            case DiagnosisReviewed(verdict=verdict):
                self.reviews[which] = verdict

    def _role(self, diagnosis: Diagnosis) -> str:
        """Of the first suspect; without suspects, of the faulty code; else empty."""
        role = next((s.role for s in diagnosis.suspects if s.role), diagnosis.role_at_fault)
        if len(self._roles) < NUM_ROLES_MAX:
            self._roles.add(role)
        return role if role in self._roles else ""

    def _action(self, incident_id: str) -> str:
        """Of the newest plan; empty if it could not be read."""
        incident = self.lost_time.open_incidents.get(incident_id)
        return str(incident.attempt.plan.action) if incident and incident.attempt else ""


@dataclass(slots=True)
class DurationTotal:
    """Durations: total, number, and the newest."""

    seconds: float = 0.0
    number: int = 0
    newest: float = 0.0

    def add(self, seconds: float) -> None:
        self.seconds, self.number, self.newest = self.seconds + seconds, self.number + 1, seconds


def run_account(job: JobConfig) -> RunAccount:
    lost_time = EttrAccumulator(num_rollouts=job.roles.rollout, num_trainers=job.roles.trainer)
    return RunAccount(lost_time=lost_time, mfu=MfuMeter(job))
