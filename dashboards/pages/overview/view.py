"""What the page Now shows, as values made from a look: replicas in words, what is done about an incident, what asks for a
person. Pure.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolecall.core.diagnosis import ActionKind
from rolecall.core.membership import STANDBY_ROLE, ReplicaState
from rolecall.core.text import seconds
from rolecall.dashboards.data.reader import JournalSnapshot
from rolecall.dashboards.pages.operations.plans import PlanStatus, plan_rows
from rolecall.dashboards.pages.style import STATES
from rolecall.recovery.incidents.incident import UNDER_REPAIR, Incident, IncidentState
from rolecall.reports.charts import ROLE_ORDER
from rolecall.views.incidents import suspect_name
from rolecall.views.snapshot import ReplicaRow

SEVERITY = {state: n for n, state in enumerate(STATES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replica."""

    replica: str
    state: str  # of `STATES`
    incarnation: int
    node: str
    policy_version: int

    @property
    def role(self) -> str:
        return self.replica.partition("/")[0]

    @property
    def index(self) -> str:
        return self.replica.partition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSummary:
    """One role's replicas, by number, and how many are in which state, worst first."""

    name: str
    cells: tuple[Cell, ...]
    counts: tuple[tuple[str, int], ...]

    @property
    def unhealthy(self) -> list[Cell]:
        """Those that a person wants to see first, worst first."""
        usual = ("healthy", "standby", "ended")
        return sorted((c for c in self.cells if c.state not in usual), key=lambda c: SEVERITY[c.state])


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    """One open incident as it is shown on top."""

    incident_id: str
    fault_class: str
    suspects: str
    because: str
    stage: str
    doing: str
    since: float  # wall seconds: when it came to this stage
    asks: str  # what is asked of a person; empty: nothing
    opened_at: float


def roles(look: JournalSnapshot) -> tuple[RoleSummary, ...]:
    """Every role and its replicas."""
    suspects, replaced = _accused(look.book.open_incidents())
    by_role: dict[str, list[Cell]] = {}
    for row in look.snapshot.replicas:
        state = state_of(row, suspects, replaced, look.quarantined, ended=look.snapshot.ended != "")
        cell = Cell(
            replica=row.replica,
            state=state,
            incarnation=row.incarnation,
            node=row.node,
            policy_version=row.policy_version,
        )
        by_role.setdefault(cell.role, []).append(cell)
    order = {role: n for n, role in enumerate(ROLE_ORDER)}
    found = []
    for name in sorted(by_role, key=lambda r: (order.get(r, len(order)), r)):
        counts = Counter(c.state for c in by_role[name])
        ranked = tuple(sorted(counts.items(), key=lambda kv: SEVERITY[kv[0]]))
        found.append(RoleSummary(name=name, cells=tuple(by_role[name]), counts=ranked))
    return tuple(found)


def _accused(open_: Iterable[Incident]) -> tuple[dict[str, int | None], dict[str, int]]:
    """(replica -> incarnation that is suspect, replica -> incarnation that is being replaced)."""
    suspects: dict[str, int | None] = {}
    replaced: dict[str, int] = {}
    for incident in open_:
        suspects.update(incident.named)
        attempt = incident.attempt
        if incident.state in UNDER_REPAIR and attempt is not None and attempt.plan.action is not ActionKind.TOLERATE:
            replaced.update({str(t.replica): t.incarnation for t in attempt.plan.targets})
    return suspects, replaced


def state_of(
    row: ReplicaRow,
    suspects: Mapping[str, int | None],
    replaced: Mapping[str, int],
    quarantined: frozenset[str],
    *,
    ended: bool,
) -> str:
    """One word of `STATES` for a replica: what a person should know of it first."""
    works = row.state == ReplicaState.SERVING or (
        row.replica.startswith(f"{STANDBY_ROLE}/") and row.state == ReplicaState.READY
    )
    if row.state == ReplicaState.STOPPED:
        return "ended" if ended else "lost"
    if row.replica in replaced and (row.incarnation <= replaced[row.replica] or not works):
        return "being replaced"
    if row.replica in suspects and suspects[row.replica] in (None, row.incarnation):
        return "suspect"
    if row.state == ReplicaState.LOST:
        return "lost"
    if row.node in quarantined:
        return "quarantined"
    if not works:
        return "starting"
    return "standby" if row.replica.startswith(f"{STANDBY_ROLE}/") else "healthy"


def trouble(incident: Incident, look: JournalSnapshot) -> OpenIncident:
    """An open incident: its sentence, what rolecall is doing, since when, and what it asks of a person."""
    stage, doing, since, asks = _doing(incident, look)
    d = incident.diagnosis
    called = f"A person was called: {incident.page_reason}" if incident.page_reason else ""
    return OpenIncident(
        incident_id=incident.incident_id,
        fault_class=str(d.fault_class).replace("_", " "),
        suspects=", ".join(suspect_name(s) for s in d.suspects) or "nobody named",
        because=d.because,
        stage=stage,
        doing=doing if look.watched else f"Nobody acts: no watch holds the lease. {doing}",
        since=since,
        asks=asks or called,
        opened_at=incident.opened_at,
    )


def _doing(i: Incident, look: JournalSnapshot) -> tuple[str, str, float, str]:
    """(stage, what is done, since when, what a person is asked for)."""
    attempt = i.attempt
    if attempt is None:
        return "found", "It decides what to do.", i.opened_at, ""
    action = str(attempt.plan.action).replace("_", " ")
    whom = ", ".join(f"{t.replica}#{t.incarnation}" for t in attempt.plan.targets)
    if i.state is IncidentState.ACTING:
        return "acting", _sentence(action, whom, attempt.plan.because), attempt.started_at or attempt.made_at, ""
    if i.state is IncidentState.VERIFYING:
        said = f"{action} {whom} is done; it waits to see the replacement work."
        return "verifying", said, attempt.done_at or attempt.made_at, ""
    if attempt.failure is not None:
        return "failed", f"{action} {whom} failed: {attempt.failed_because}. It plans again.", attempt.made_at, ""
    rows = plan_rows([i], look.mode, look.at)
    if not rows:
        return "tolerated", attempt.plan.because, attempt.made_at, ""
    row = rows[0]
    asks = ""
    if row.standing is PlanStatus.WAITS:
        left = row.seconds_left(look.at)
        within = "" if left is None else f" within {seconds(left)}"
        asks = f"Approve or veto this plan{within}: {action} {whom}."
    return str(row.standing), _sentence(action, whom, row.because), row.made_at, asks


def _sentence(action: str, whom: str, because: str) -> str:
    """A plan in words. Most say themselves what they do to whom."""
    return because if whom and whom in because else f"{action} {whom}: {because}"


def open_incidents(look: JournalSnapshot) -> list[OpenIncident]:
    """The open incidents, those that ask for a person first, then the newest."""
    told = [trouble(i, look) for i in look.book.open_incidents()]
    return sorted(told, key=lambda t: (not t.asks, -t.opened_at))


def notices(look: JournalSnapshot) -> list[tuple[str, str, str, str]]:
    """(kind, headline, sentence, what to do) of what a person must know before anything else."""
    found = []
    s = look.snapshot
    if s.ended:
        because = look.book.ended or ""
        found.append(("good" if s.ended == "completed" else "warn", f"Ended: {s.ended}.", because, ""))
    elif s.paused:
        found.append(
            ("warn", "All acting is paused.", s.paused, "Watching and diagnosing go on. `rolecall resume` ends it.")
        )
    if not s.ended and not look.watched and (look.lease is not None or s.started_at is not None):
        said = "No watch has ever held the lease: nothing is found or replaced."
        if look.lease is not None:
            since = f" since {seconds(max(0.0, look.at - look.lease.expires_at))}" if look.lease.expires_at else ""
            said = f"No watch holds the lease{since}: nothing is found and nothing is replaced."
        found.append(("bad", "Nobody watches.", said, "Start `rolecall watch` again; `rolecall status` tells more."))
    if look.watched and look.mode == "observe" and not s.ended:
        found.append(
            ("note", "It only watches.", "Mode observe: rolecall says what it would do, and does nothing.", "")
        )
    if look.book.broken:
        names = ", ".join(sorted(look.book.broken)[:5])
        head = f"{len(look.book.broken)} incident(s) or line(s) are set aside."
        found.append(("warn", head, f"They cannot be read: {names}", "`rolecall incidents` says why."))
    if s.started_at is None and not s.replicas and not look.book.incidents:
        found.append(("note", "The run has not begun yet.", "This page fills when its first process starts.", ""))
    return found


def versions(look: JournalSnapshot) -> tuple[int, list[tuple[int, int]]] | None:
    """(newest policy version, [(versions behind, number of rollouts)]) of rollouts that have any; None without one. A rollout
    is one behind while the trainers' newest is on its way."""
    known = [
        r.policy_version for r in look.snapshot.replicas if r.replica.startswith("rollout/") and r.policy_version >= 0
    ]
    if not known:
        return None
    newest = max(look.snapshot.policy_version, *known)
    return newest, sorted(Counter(newest - v for v in known).items())


def headline_figures(look: JournalSnapshot) -> list[tuple[str, str, str]]:
    """The big numbers: what, how much, a word on it."""
    s, account = look.snapshot, look.course.account
    lags = versions(look)
    behind = (
        "" if lags is None else ", ".join(_behind(num, lag) for lag, num in lags[1] if lag) or "every rollout has it"
    )
    curve = look.course.curve
    rate = s.tokens_per_second
    if s.ended and s.started_at is not None and curve:
        span = curve[-1].at - (account.start if account else s.started_at)
        rate = sum(b.tokens for b in curve) / span if span > 0 else None
    rated = "of the whole run" if s.ended else f"in the last {seconds(round(s.rate_seconds))}"
    return [
        ("step", f"{s.step + 1:,}" if s.step >= 0 else "–", f"of {s.num_steps:,}" if s.num_steps else "committed"),
        ("reward", _short(s.rewards[-1]) if s.rewards else "–", _trend(s.rewards)),
        ("tokens a second", "–" if rate is None else f"{rate:,.0f}", rated),
        ("a step takes", seconds(s.step_seconds), "mean of the last five"),
        ("policy version", "–" if lags is None else str(lags[0]), behind),
        ("ETTR", "–" if account is None or account.ettr is None else f"{100 * account.ettr:.1f} %", _ettr_word(look)),
    ]


def _behind(num: int, lag: int) -> str:
    return f"{num} rollout{' is' if num == 1 else 's are'} {lag} behind"


def _ettr_word(look: JournalSnapshot) -> str:
    if look.course.account is not None:
        return f"{seconds(sum(look.course.account.lost.values()))} of work lost"
    return "no step yet" if look.history.whole else f"the history is read: {look.history.percent} %"


def _short(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not a number"


def _trend(rewards: Sequence[float]) -> str:
    known = [r for r in rewards if math.isfinite(r)]
    if len(known) < 20:
        return ""
    before, now = known[-20:-10], known[-10:]
    change = sum(now) / 10 - sum(before) / 10
    return f"{'▲' if change >= 0 else '▼'} {abs(change):.3f} in 10 steps"


def lost_rows(look: JournalSnapshot, most: int = 8) -> list[list[str]]:
    """Where the lost time went: role, fault, seconds of the run's work, share of its time; the largest first."""
    account = look.course.account
    if account is None or account.end <= account.start:
        return []
    span = account.end - account.start
    ranked = sorted(account.lost.items(), key=lambda kv: -kv[1])
    rows = [
        [role, fault.replace("_", " "), seconds(lost), f"{100 * lost / span:.2f} %"]
        for (role, fault), lost in ranked[:most]
        if lost > 0
    ]
    rest = sum(lost for _, lost in ranked[most:])
    return rows + ([["all else", "", seconds(rest), f"{100 * rest / span:.2f} %"]] if rest > 0 else [])


def status_line(look: JournalSnapshot) -> str:
    """The run in a line: what it is doing, for how long, in which epoch."""
    s = look.snapshot
    if s.started_at is None:
        return "not begun" if not s.replicas else "watched; the job tells nothing of its steps"
    if s.ended:
        return f"ended: {s.ended}"
    what = "training" if s.step >= 0 else "starting"
    return f"{what} for {seconds(s.elapsed_seconds)}, epoch {s.epoch}"
