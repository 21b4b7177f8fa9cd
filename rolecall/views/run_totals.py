"""Totals of incidents and of the run for a watch's `/metrics`: a fold of the journal's events, each read once.

A scrape never reads the whole journal: `JournalReader` reads only new events, a few pages per poll, so that a poll is
short even with millions of lines. Lines that are unreadable or lack required fields are skipped; the others count.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from rolecall.core.config.job import JobConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import (
    ActionDone,
    ActionFailed,
    ActionStarted,
    CheckpointWritten,
    DiagnosisReviewed,
    EpochAdvanced,
    IncidentClosed,
    IncidentOpened,
    NodeQuarantined,
    NodeReturnedToService,
    PlanApproved,
    PlanBlocked,
    PlanCreated,
    PlanExpired,
    PlanRejected,
    RequestsReassigned,
    RunEnded,
    RunStarted,
    StepCommitted,
    WeightsAdmitted,
)
from rolecall.core.journal.rows import DamagedLine
from rolecall.recovery.incidents.incident import OPERATOR
from rolecall.views.ettr import Step, step_of
from rolecall.views.ettr_accumulator import EttrAccumulator
from rolecall.views.incidents import IncidentSummary

PAGE_EVENTS = 5_000
PAGES_A_LOOK = 20
"""Maximum pages per poll; the next poll continues."""
NUM_PLANS_REMEMBERED = 1_000
"""Some events refer to a plan only by its digest."""
NUM_ROLES_MAX = 64
"""Roles with their own counters; a further one counts as none, since agents, which are untrusted, report the roles."""

_K = EventKind


@dataclass
class RunAccount:
    """All totals since the journal's first line. Owned by one thread."""

    lost_time: EttrAccumulator
    events: Counter[str] = field(default_factory=Counter)  # by kind
    started_at: float | None = None
    ended: bool = False
    step: Step | None = None
    staleness: float | None = None
    signs: dict[str, float] = field(default_factory=dict)  # of the newest step (core/policy_health.py)
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
    finding_seconds: dict[str, "DurationTotal"] = field(default_factory=dict)  # by role
    cure_seconds: dict[str, "DurationTotal"] = field(default_factory=dict)
    plans: Counter[str] = field(default_factory=Counter)  # by action
    held: Counter[str] = field(default_factory=Counter)  # by guard
    decided: Counter[str] = field(default_factory=Counter)
    actions: Counter[tuple[str, str]] = field(default_factory=Counter)  # by action, outcome
    quarantined: set[str] = field(default_factory=set)
    marks: dict[str, str] = field(default_factory=dict)  # incident -> newest operator verdict
    _roles: set[str] = field(default_factory=set)
    _plans: dict[tuple[str, str], ActionKind] = field(default_factory=dict)  # (incident, digest) -> action

    def take(self, event: Event) -> None:
        """Raises the errors of a malformed event body; the event is counted nevertheless."""
        self.events[str(event.kind)] += 1
        story = self.lost_time.take(event)
        if story is not None:
            self._closed(story)
        self._take_run(event)
        self._take_incident(event)

    def _take_run(self, event: Event) -> None:
        match event.payload:
            case RunStarted():
                self.started_at = event.wall_at
            case RunEnded():
                self.ended = True
            case StepCommitted() as committed:
                self.step = step_of(committed, event.wall_at)
                self.num_tokens += committed.tokens
                self.signs = dict(self.step.signs)
                self.staleness = committed.staleness
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

    def _take_incident(self, event: Event) -> None:
        which = str(event.incident_id)
        match event.payload:
            case IncidentOpened(diagnosis=diagnosis):
                self._opened(diagnosis)
            case IncidentClosed(outcome=outcome):
                self.closed[outcome] += 1
            case PlanCreated(plan=plan):
                self.plans[str(plan.action)] += 1
                self._remember(event, plan)
            case PlanBlocked(guard=guard):
                self.held[guard] += 1
            case PlanApproved() | PlanRejected() | PlanExpired():
                self.decided[str(event.kind).removeprefix("plan_")] += 1
            case ActionStarted(digest=digest):
                self.actions[self._action(which, digest), "started"] += 1
            case ActionDone(digest=digest):
                self.actions[self._action(which, digest), "done"] += 1
            case ActionFailed(digest=digest, failure=failure):
                self.actions[self._action(which, digest), failure] += 1
            case DiagnosisReviewed(verdict=verdict):
                self.marks[which] = verdict

    def _opened(self, d: Diagnosis) -> None:
        role = self._role(d)
        self.opened[role, str(d.fault_class)] += 1
        self.found.update(d.detectors)
        if OPERATOR not in d.detectors:  # an operator request has no onset
            self.finding_seconds.setdefault(role, DurationTotal()).add(max(0.0, d.detected_at - d.onset))

    def _closed(self, story: IncidentSummary) -> None:
        seconds = story.since_finding(story.cured_at)
        if story.resolved and seconds is not None:
            self.cure_seconds.setdefault(self._role(story.diagnosis), DurationTotal()).add(seconds)

    def _role(self, d: Diagnosis) -> str:
        role = role_of(d)
        if len(self._roles) < NUM_ROLES_MAX:
            self._roles.add(role)
        return role if role in self._roles else ""

    def _remember(self, event: Event, plan: Plan) -> None:
        if len(self._plans) >= NUM_PLANS_REMEMBERED:
            del self._plans[next(iter(self._plans))]
        self._plans[str(event.incident_id), plan.digest] = plan.action

    def _action(self, incident_id: str, digest: str) -> str:
        return str(self._plans.get((incident_id, digest), ""))


@dataclass(slots=True)
class DurationTotal:
    """Durations: total, number, and the newest."""

    seconds: float = 0.0
    number: int = 0
    newest: float = 0.0

    def add(self, seconds: float) -> None:
        self.seconds, self.number, self.newest = self.seconds + seconds, self.number + 1, seconds


def role_of(d: Diagnosis) -> str:
    """Role of the first suspect; without suspects, that of the faulty code; else empty."""
    return next((s.role for s in d.suspects if s.role), d.role_at_fault)


def run_account(job: JobConfig) -> RunAccount:
    return RunAccount(lost_time=EttrAccumulator(num_rollouts=job.roles.rollout, num_trainers=job.roles.trainer))


class JournalReader:
    """Reads the journal incrementally: each poll continues after the previous one."""

    def __init__(self, journal: Journal, account: RunAccount) -> None:
        self._journal, self.account = journal, account
        self._seen_seq = 0

    def look(self) -> bool:
        """Processes new events; False if more remain than one poll reads.

        Raises:
            JournalError: the journal cannot be read.
        """
        for _ in range(PAGES_A_LOOK):
            damaged: list[DamagedLine] = []
            events = self._journal.events(after=self._seen_seq, limit=PAGE_EVENTS, damaged=damaged)
            for event in events:
                # Deliberate: an invalid event from a foreign writer must not hide the others.
                with suppress(Exception):
                    self.account.take(event)
            self._seen_seq = max([self._seen_seq, *(e.seq for e in events[-1:]), *(d.seq for d in damaged)])
            if len(events) + len(damaged) < PAGE_EVENTS:
                return True
        return False
