"""State of a running job for the terminal: one frozen value derived from the journal. Pure except for
`RunSnapshotProjection`, which one loop owns: it keeps its state, so that each poll processes only new events.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import PlanProposed
from rolecall.core.journal.payloads.run import (
    ComponentRestarted,
    EpochAdvanced,
    EvaluationFinished,
    RunEnded,
    RunStarted,
    StepCommitted,
)
from rolecall.core.membership import Actual, Desired, ReplicaState, hybrid_partner, is_standby
from rolecall.core.policy_health import policy_health_of
from rolecall.core.text import in_words
from rolecall.recovery.durations import IncidentDurations, durations
from rolecall.recovery.incidents import Incident
from rolecall.views.lifetimes import replica_order

RATE_SECONDS, RATE_STEPS = 15.0, 3.0
"""Tokens per second are averaged over this time, or over this many steps if those take longer: a stall shows within
it."""
REWARDS_KEPT = 2000
LENT = "lent"
"""State of a replica that has lent its node to another one and does not run."""
CLOSED_SHOWN = 3

_K = EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    replica: str
    node: str
    incarnation: int
    state: str  # of `ReplicaState`; or "wanted": desired, but not running yet; or "lent": it has lent its node
    policy_version: int = -1
    partner: str = ""  # the other replica of its hybrid

    @property
    def serves(self) -> bool:
        standby = is_standby(self.replica) and self.state == ReplicaState.READY
        return standby or self.state == ReplicaState.SERVING


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRow:
    incident_id: str
    suspects: tuple[str, ...]
    fault_class: str
    because: str
    stage: str  # opened, planned, held, proposed, acting, verifying; or the outcome once closed
    detail: str  # the newest text: of the plan, the guard, the verification
    durations: IncidentDurations
    closed_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """Times are wall seconds."""

    now: float
    started_at: float | None = None
    continued_at: float | None = None
    """When `rolecall up` started it again, the newest time."""
    step: int = -1
    num_steps: int | None = None
    epoch: int = 0
    policy_version: int = -1
    """The version produced by the last committed step."""
    rewards: tuple[float, ...] = ()
    signs: Mapping[str, float] = field(default_factory=dict)
    """Policy health metrics (core/policy_health.py) that the last committed step reported."""
    loss: float | None = None
    held_out_reward: float | None = None
    """Of the newest evaluation."""
    tokens_per_second: float | None = None
    rate_seconds: float = RATE_SECONDS
    """Averaging time of `tokens_per_second`."""
    step_seconds: float | None = None
    replicas: tuple[ReplicaRow, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Role -> ranks of each replica, where it has several."""
    mode: str = "async"
    num_hybrids: int = 0
    open_incidents: tuple[IncidentRow, ...] = ()
    closed_incidents: tuple[IncidentRow, ...] = ()  # newest last
    paused: str = ""
    ended: str = ""
    ended_at: float | None = None
    note: str = ""  # current activity before training starts

    @property
    def elapsed_seconds(self) -> float:
        return 0.0 if self.started_at is None else max(0.0, self.now - self.started_at)


_STAGES: Mapping[EventKind, str] = {
    _K.PLAN_CREATED: "planned",
    _K.PLAN_BLOCKED: "held",
    _K.PLAN_PROPOSED: "waits for approval",
    _K.HOLD_PLACED: "held by an operator",
    _K.HOLD_LIFTED: "hold lifted",
    _K.ACTION_STARTED: "acting",
    _K.ACTION_DONE: "verifying",
    _K.ACTION_FAILED: "action failed",
    _K.INCIDENT_VERIFIED: "verified",
}


@dataclass
class RunSnapshotProjection:
    num_steps: int | None = None
    shell_name: str = ""
    """Names the run in a command line (`RunDir.shell_name`)."""
    seq: int = 0
    newest: RunSnapshot = RunSnapshot(now=0.0)
    """What the events say; what depends on the time of display is added by `snapshot`."""
    versions: Mapping[str, object] = field(default_factory=dict)
    """Policy versions of the rollouts, as reported by the last committed step."""
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=REWARDS_KEPT))
    commits: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=400))
    incident_news: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Incident -> its stage and newest text."""

    def read(self, events: Iterable[Event]) -> None:
        for event in events:
            self.seq = max(self.seq, event.seq)
            self._read(event)

    def _read(self, event: Event) -> None:
        match event.payload:
            case RunStarted(num_steps=num_steps, ranks=ranks) as started:
                self.newest = replace(
                    self.newest,
                    started_at=event.wall_at,
                    ranks=ranks,
                    mode=started.mode,
                    num_hybrids=started.num_hybrids,
                )
                self.num_steps = self.num_steps or num_steps
            case RunEnded(outcome=outcome):
                self.newest = replace(self.newest, ended=outcome, ended_at=event.wall_at)
            case ComponentRestarted(continues_run=True):
                self.newest = replace(self.newest, continued_at=event.wall_at, ended="", ended_at=None)
                self.commits.clear()  # the outage is no part of a step
            case EpochAdvanced(epoch=epoch):
                self.newest = replace(self.newest, epoch=epoch)
            case StepCommitted() as committed:
                self.newest = replace(
                    self.newest,
                    step=committed.step,
                    policy_version=committed.policy_version,
                    signs=policy_health_of(committed),
                    loss=committed.loss,
                )
                self.versions = committed.versions
                self.commits.append((event.wall_at, committed.tokens))
                if committed.reward is not None:
                    self.rewards.append(committed.reward)
            case EvaluationFinished(reward=reward):
                self.newest = replace(self.newest, held_out_reward=reward)
            case _ if event.incident_id and event.kind in _STAGES:
                self._note(event.incident_id, event)

    def _note(self, incident_id: str, event: Event) -> None:
        said = event.payload
        text = said.reason
        if isinstance(said, PlanProposed):
            where = f" --run {self.shell_name}" if self.shell_name else ""
            text = f"rolecall approve {said.digest}{where}, or reject: {text}"
        _, before = self.incident_news.get(incident_id, ("", ""))
        self.incident_news[incident_id] = (_STAGES[event.kind], text or before)

    def _row(self, incident: Incident, now: float) -> IncidentRow:
        stage, detail = self.incident_news.get(incident.incident_id, ("found", ""))
        return IncidentRow(
            incident_id=incident.incident_id,
            suspects=tuple(s.name for s in incident.diagnosis.suspects),
            fault_class=in_words(incident.diagnosis.fault_class),
            because=incident.diagnosis.because,
            stage=in_words(incident.outcome or stage),
            detail=incident.because or detail,
            durations=durations(incident, now),
            closed_at=incident.closed_at,
        )

    def snapshot(
        self,
        now: float,
        desired: Mapping[ReplicaId, Desired],
        current: Mapping[ReplicaId, Actual],
        paused: str | None,
        note: str = "",
        incidents: Iterable[Incident] = (),
    ) -> RunSnapshot:
        """The value to show at `now` (wall seconds)."""
        rows = [self._row(i, now) for i in incidents]
        versions_at = self.commits[-1][0] if self.commits else 0.0
        replicas = replica_rows(desired, current, self.versions, versions_at)
        hybrids = self.newest.num_hybrids
        closed = sorted((row for row in rows if row.closed_at is not None), key=lambda row: row.closed_at or 0.0)
        return replace(
            self.newest,
            now=now,
            num_steps=self.num_steps,
            rewards=tuple(self.rewards),
            tokens_per_second=self.tokens_per_second(now),
            rate_seconds=self._rate_seconds(),
            step_seconds=self._step_seconds(),
            replicas=tuple(replace(r, partner=hybrid_partner(r.replica, hybrids) or "") for r in replicas),
            open_incidents=tuple(row for row in rows if row.closed_at is None),
            closed_incidents=tuple(closed[-CLOSED_SHOWN:]),
            paused=paused or "",
            note=note,
        )

    def tokens_per_second(self, now: float) -> float | None:
        """Over the last seconds or steps; None without enough data."""
        if not self.commits:
            return None
        since = max(now - self._rate_seconds(), self.commits[0][0])
        seconds = now - since
        return sum(tokens for at, tokens in self.commits if at > since) / seconds if seconds > 1.0 else None

    def _rate_seconds(self) -> float:
        return max(RATE_SECONDS, RATE_STEPS * (self._step_seconds() or 0.0))

    def _step_seconds(self) -> float | None:
        last = list(self.commits)[-6:]
        return (last[-1][0] - last[0][0]) / (len(last) - 1) if len(last) > 1 else None


def replica_rows(
    desired: Mapping[ReplicaId, Desired],
    current: Mapping[ReplicaId, Actual],
    versions: Mapping[str, object] | None = None,
    versions_at: float = 0.0,
) -> tuple[ReplicaRow, ...]:
    """Every desired or actual replica, by role and number.

    `versions`: policy versions as of `versions_at`; a record has only the version with which its replica started.
    """
    rows = []
    for replica in {*desired, *current}:
        wanted, there = desired.get(replica), current.get(replica)
        if there is not None and (wanted is None or there.incarnation >= wanted.incarnation):
            version = there.policy_version
            if versions and (versions_at > there.changed_at or there.state != ReplicaState.SERVING):
                served = versions.get(replica)
                version = served if isinstance(served, int) else version
            rows.append(
                ReplicaRow(
                    replica=replica,
                    node=there.node,
                    incarnation=there.incarnation,
                    state=str(there.state),
                    policy_version=version,
                )
            )
        elif wanted is not None and wanted.lent:
            # The incarnation that ended: the next one is not started as long as it has no node.
            rows.append(ReplicaRow(replica=replica, node="", incarnation=wanted.incarnation - 1, state=LENT))
        elif wanted is not None:
            rows.append(ReplicaRow(replica=replica, node=wanted.node, incarnation=wanted.incarnation, state="wanted"))
    return tuple(sorted(rows, key=lambda row: replica_order(row.replica)))
