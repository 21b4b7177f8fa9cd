"""Content of the Overview page, computed from a journal snapshot: state of the run, replica states, open incidents,
notices, key figures, fault bands. Pure.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from rolecall.core.diagnosis import ActionKind, Suspect
from rolecall.core.ids import role_of
from rolecall.core.journal.evaluations import EvaluationPoint
from rolecall.core.journal.payloads.recovery import OncallPaged
from rolecall.core.journal.payloads.run import EvaluationFinished
from rolecall.core.membership import ReplicaState, is_standby
from rolecall.core.text import counted, in_words, percent, plain, seconds, utc
from rolecall.dashboards.data.incident_titles import (
    GLYPHS,
    MODE_OBSERVE,
    SEVERITIES,
    Severity,
    severity,
    title,
)
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.progress import Bucket
from rolecall.dashboards.data.reader import JournalSnapshot
from rolecall.dashboards.data.run_state import KIND_OF, step_of
from rolecall.dashboards.pages.charts import FaultBand, thinned
from rolecall.dashboards.pages.operations.plans import PlanStatus, plan_row
from rolecall.dashboards.pages.overview.watched_job import course_buckets, figures_of
from rolecall.dashboards.pages.status import NOT_YET_KNOWN, ONLY_OBSERVED, doing, status_of
from rolecall.dashboards.pages.style import STATES
from rolecall.recovery.incidents import UNDER_REPAIR, Incident, paged_text
from rolecall.reports.charts import ROLE_ORDER, key_of
from rolecall.views.ettr import waiting_trainers
from rolecall.views.lifetimes import replica_order
from rolecall.views.observed_ranks import ObservedRank
from rolecall.views.snapshot import LENT, ReplicaRow

LOST_ROWS_MAX = 8
"""Causes of lost time that are listed; the rest is one row."""
SEVERITY = {state: n for n, state in enumerate(STATES)}
BANDS_MAX = 10
"""Faults that charts show, the newest; more cannot be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSummary:
    """One role's replicas by index, each with a state of `STATES`, and the number in each state, worst first."""

    name: str
    cells: tuple[ReplicaRow, ...]
    counts: tuple[tuple[str, int], ...]
    ranks: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Replica -> (name, state) of each of its ranks, where they are known."""

    @property
    def unhealthy(self) -> list[ReplicaRow]:
        usual = ("healthy", "standby", "ended")
        return sorted((c for c in self.cells if c.state not in usual), key=lambda c: SEVERITY[c.state])


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    incident_id: str
    title: str
    severity: Severity
    suspects: str
    nodes: str
    because: str
    stage: str
    doing: str
    cost: str
    asks: str  # required operator action; empty: none
    paged: str  # what paging on-call did; empty: nobody was to be paged
    opened_at: float

    @property
    def kind(self) -> str:
        return KIND_OF[self.severity]

    @property
    def glyph(self) -> str:
        return GLYPHS[self.severity]


def roles(snapshot: JournalSnapshot) -> tuple[RoleSummary, ...]:
    suspects, replaced = _suspects_and_targets(snapshot.projection.open_incidents())
    by_role: dict[str, list[ReplicaRow]] = {}
    named = {(s.replica, s.rank) for i in snapshot.projection.open_incidents() for s in i.diagnosis.suspects}
    ranks = _ranks(snapshot, named)
    counted = {r.replica for r in snapshot.run.replicas}
    others = [r for r in snapshot.observed if r.replica not in counted]
    rows = (*snapshot.run.replicas, *_observed_rows(others, snapshot.sampled_at))
    for row in rows:
        state = state_of(row, suspects, replaced, snapshot.quarantined, ended=snapshot.run.ended != "")
        by_role.setdefault(role_of(row.replica), []).append(replace(row, state=state))
    order = {role: n for n, role in enumerate(ROLE_ORDER)}
    found = []
    for name in sorted(by_role, key=lambda r: (order.get(r, len(order)), r)):
        counts = Counter(c.state for c in by_role[name])
        ranked = tuple(sorted(counts.items(), key=lambda kv: SEVERITY[kv[0]]))
        known = {c.replica: ranks[c.replica] for c in by_role[name] if len(ranks.get(c.replica, ())) > 1}
        known |= _ranks_of_role(by_role[name], snapshot.run.ranks.get(name, 1), named)
        found.append(RoleSummary(name=name, cells=tuple(by_role[name]), counts=ranked, ranks=known))
    return tuple(found)


def _observed_rows(observed: Sequence[ObservedRank], now: float) -> tuple[ReplicaRow, ...]:
    """Replicas of a watched job whose incarnations are not counted."""
    by_replica: dict[str, list[ObservedRank]] = {}
    for rank in observed:
        by_replica.setdefault(rank.replica, []).append(rank)
    rows = []
    for name in sorted(by_replica, key=replica_order):
        ranks = by_replica[name]
        alive = all(r.alive_at(now) for r in ranks)
        nodes = ", ".join(dict.fromkeys(r.node for r in ranks))
        rows.append(ReplicaRow(replica=name, node=nodes, incarnation=0, state="serving" if alive else "lost"))
    return tuple(rows)


def _ranks_of_role(
    cells: Iterable[ReplicaRow], number: int, named: AbstractSet[tuple[str, int | None]]
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Of replicas of a run of rolecall: they live and die as one, but a diagnosis names a rank."""

    def state(cell: ReplicaRow, rank: int) -> str:
        if {(cell.replica, rank), (cell.replica, None)} & named:
            return "suspect"
        return "healthy" if cell.state == "suspect" else cell.state

    if number == 1:
        return {}
    return {c.replica: tuple((f"rank {n} on {c.node}", state(c, n)) for n in range(number)) for c in cells}


def _ranks(
    snapshot: JournalSnapshot, named: AbstractSet[tuple[str, int | None]]
) -> dict[str, tuple[tuple[str, str], ...]]:
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for r in snapshot.observed:
        state = "healthy" if r.alive_at(snapshot.sampled_at) else "lost"
        state = "suspect" if (r.replica, r.rank) in named else state
        found[r.replica] = (*found.get(r.replica, ()), (f"rank {r.rank} on {r.node}, pid {r.pid}", state))
    return found


def _suspects_and_targets(open_: Iterable[Incident]) -> tuple[dict[str, int | None], dict[str, int]]:
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
    """The most important state of a replica, one of `STATES`."""
    if row.state == LENT:
        return "ended" if ended else "lent"
    if row.state == ReplicaState.STOPPED:
        return "ended" if ended else "lost"
    if ended and row.serves:
        return "ended"  # of a run that is over nothing serves or stands by, whatever its last record says
    if row.replica in replaced and (row.incarnation <= replaced[row.replica] or not row.serves):
        return "being replaced"
    if row.replica in suspects and suspects[row.replica] in (None, row.incarnation):
        return "suspect"
    if row.state == ReplicaState.LOST:
        return "lost"
    if row.node in quarantined:
        return "quarantined"
    if not row.serves:
        return "starting"
    return "standby" if is_standby(row.replica) else "healthy"


def open_incident(incident: Incident, snapshot: JournalSnapshot) -> OpenIncident:
    mode = snapshot.mode_of(incident)
    ended = snapshot.run.ended != ""
    stage = status_of(incident, mode, snapshot.at, ended=ended)
    diagnosis = incident.diagnosis
    paged = ""
    if incident.page_reason:
        # Most reasons begin with the diagnosis; that of a watched job ends with what rolecall would do.
        rest = incident.page_reason.removeprefix(diagnosis.because).removeprefix("; ")
        told = not rest or stage == ONLY_OBSERVED
        paged = paged_text(incident.page_channel) + ("" if told else f": {rest}")
    unwatched = "" if snapshot.watched or ended else "No watch holds the lease, so nothing is done. Last: "
    return OpenIncident(
        incident_id=incident.incident_id,
        title=title(incident, step_of(incident, snapshot)),
        severity=severity(incident),
        suspects=", ".join(dict.fromkeys(_suspect_name(s, snapshot) for s in diagnosis.suspects)) or "none",
        nodes=", ".join(dict.fromkeys(str(s.node) for s in diagnosis.suspects if s.node)),
        because=diagnosis.because,
        stage=stage,
        doing=unwatched + doing(incident, mode, snapshot.until, ended=ended),
        cost=_cost(incident, snapshot),
        asks=_asks(incident, snapshot),
        paged=paged,
        opened_at=incident.opened_at,
    )


def _suspect_name(suspect: Suspect, snapshot: JournalSnapshot) -> str:
    """Of a job that rolecall only watches with its rank: all its ranks may be one replica."""
    return f"{suspect.name} rank {suspect.rank}" if snapshot.observed and suspect.rank is not None else suspect.name


def curve_of(snapshot: JournalSnapshot) -> tuple[Bucket, ...]:
    """Of the run's committed steps; of a job that rolecall only watches, of the steps that its watch saw."""
    return snapshot.trends.curve or course_buckets(snapshot.course)


def _cost(incident: Incident, snapshot: JournalSnapshot) -> str:
    """The replica-seconds so far, as on the incident's page."""
    lost = [
        replace(loss, until=min(loss.until, snapshot.until), stalled_until=min(loss.stalled_until, snapshot.until))
        for loss in snapshot.trends.still_open
        if loss.incident_id == incident.incident_id
    ]
    if not lost:
        return NOT_YET_KNOWN
    trainers = (r.replica for r in snapshot.run.replicas if r.replica.startswith("trainer/"))
    waited = sum(spent for _, spent in waiting_trainers(lost, trainers))
    so_far = "" if snapshot.run.ended else " so far"
    return f"{sum(loss.until - loss.since for loss in lost) + waited:,.1f} replica-seconds{so_far}"


def _asks(incident: Incident, snapshot: JournalSnapshot) -> str:
    """What the operator is to decide; empty: nothing."""
    mode = snapshot.mode_of(incident)
    row = None if snapshot.run.ended else plan_row(incident, mode, snapshot.at)
    if row is None or row.status is not PlanStatus.AWAITS_APPROVAL or mode == MODE_OBSERVE:
        return ""
    left = row.seconds_left(snapshot.at)
    within = "" if left is None else f" within {seconds(left)}"
    return f"Approve or reject this plan{within}: {row.attempt.plan.words}."


def open_incidents(snapshot: JournalSnapshot) -> list[OpenIncident]:
    """The open incidents: those that need the operator first, then the most severe, then the newest."""
    found = [open_incident(i, snapshot) for i in snapshot.projection.open_incidents()]
    return sorted(found, key=lambda t: (not (t.asks or t.paged), SEVERITIES.index(t.severity), -t.opened_at))


def fault_bands(snapshot: JournalSnapshot) -> tuple[FaultBand, ...]:
    """The newest faults as bands over the steps of the curve, lettered in their order."""
    curve = curve_of(snapshot)
    if not curve:
        return ()
    times = [b.at for b in curve]

    def position(at: float) -> float:
        return float(curve[min(bisect_left(times, at), len(curve) - 1)].last_step)

    found = sorted(snapshot.projection.incidents.values(), key=lambda i: i.opened_at)[-BANDS_MAX:]
    bands = []
    for number, incident in enumerate(i for i in found if i.first_diagnosis.onset <= times[-1] or i.closed_at is None):
        ended = incident.verified_at or incident.closed_at
        first = position(incident.first_diagnosis.onset)
        last = curve[-1].last_step + 1.0 if ended is None else position(ended)
        name = title(incident, step_of(incident, snapshot))
        bands.append(FaultBand(key=key_of(number), title=name, first_step=first, last_step=max(last, first + 0.5)))
    return tuple(bands)


def recent_events(snapshot: JournalSnapshot) -> list[list[str]]:
    """The newest events, newest first: age (of an ended run the time in UTC), and what, about what, why."""
    rows, incidents = [], snapshot.projection.incidents
    known = [i for e in snapshot.trends.recent if (i := incidents.get(e.incident_id or ""))]
    diagnoses = {d.because for i in known for d in (i.first_diagnosis, i.diagnosis) if d.because}
    for event in reversed(snapshot.trends.recent):
        about = str(getattr(event.payload, "replica", "") or getattr(event.payload, "node", "") or "")
        diagnosis = getattr(event.payload, "diagnosis", None)
        why = diagnosis.because if diagnosis is not None else _beyond(event.payload.reason, diagnoses)
        what = in_words(event.kind)
        if isinstance(event.payload, OncallPaged):
            what = f"{paged_text(event.payload.channel)},"
        where = ", ".join(filter(None, (about, event.incident_id)))
        text = f"{what} {where}".strip() + (f": {why}" if why else "")
        when = utc(event.wall_at)[5:19] if snapshot.run.ended else age(snapshot.at - event.wall_at)
        rows.append([when, plain(text[:1].upper() + text[1:], 240)])
    return rows


def _beyond(reason: str, diagnoses: Iterable[str]) -> str:
    """A reason without the diagnosis, which the opening of the incident gives."""
    for diagnosis in diagnoses:
        reason = reason.replace(f"{diagnosis}; ", "").replace(diagnosis, "")
    return reason.strip(" :;,")


def notices(snapshot: JournalSnapshot) -> list[tuple[str, str, str, str]]:
    """Notices for the top of the page: (kind, headline, details, advice)."""
    found = []
    run = snapshot.run
    if run.paused and not run.ended:
        found.append(
            ("warn", "Recovery is paused.", run.paused, "Detection continues. `rolecall resume RUN` resumes recovery.")
        )
    if snapshot.projection.broken:
        names = ", ".join(sorted(snapshot.projection.broken)[:5])
        head = f"Set aside: {counted(len(snapshot.projection.broken), 'incident or event', 'incidents or events')}."
        found.append(("warn", head, f"They cannot be read: {names}", "`rolecall incidents --run RUN` shows why."))
    if run.started_at is None and not run.replicas and not snapshot.projection.incidents and not snapshot.observed:
        found.append(("note", "The run has not started yet.", "This page updates when its first process starts.", ""))
    return found


def versions(snapshot: JournalSnapshot) -> tuple[int, list[tuple[int, int]], int] | None:
    """(latest policy version, [(versions behind, number of rollouts)], number of lost rollouts); None if no rollout has
    weights. A rollout is one version behind while the latest weights are being transferred; one that is lost has no
    version."""
    with_weights = [r for r in snapshot.run.replicas if r.replica.startswith("rollout/") and r.policy_version >= 0]
    if not with_weights:
        return None
    newest = max(snapshot.run.policy_version, *(r.policy_version for r in with_weights))
    gone = (ReplicaState.LOST,) if snapshot.run.ended else (ReplicaState.LOST, ReplicaState.STOPPED)
    living = [r.policy_version for r in with_weights if r.state not in gone]
    return newest, sorted(Counter(newest - v for v in living).items()), len(with_weights) - len(living)


def learning_figures(snapshot: JournalSnapshot) -> list[tuple[str, str, str]]:
    """Of the newest evaluation and of the dataset: label, value, note."""
    evaluations, data = snapshot.trends.evaluations, snapshot.trends.dataset
    rows = []
    if evaluations:
        result = evaluations[-1].result
        missing = "; ".join(f"{num} not scored: {plain(reason, 60)}" for reason, num in result.unscored.items())
        within = "" if result.reward_low is None else f"95 %: {result.reward_low:.3f} to {result.reward_high:.3f}"
        at = f"step {result.step}, {counted(result.prompts, 'prompt')}"
        reward = "not scored" if result.reward is None else f"{result.reward:.3f}"
        rows.append(("held-out reward", reward, ", ".join(filter(None, (within, at, missing)))))
        rows += [(f"pass@{plain(k, 6)}", percent(share, 1), at) for k, share in list(result.pass_at.items())[-2:]]
    if data is not None and data.rows > 0:
        dropped = ", ".join(f"{num:,} {plain(reason, 40)}" for reason, num in sorted(data.dropped.items()))
        seen = f"{percent(data.epoch_share)} of its {data.rows:,} rows; {data.rows_seen:,} seen"
        rows.append(("epoch of the dataset", str(data.epoch + 1), seen))
        rows.append(("groups dropped", f"{sum(data.dropped.values()):,}", dropped or "none"))
    return rows


Curves = dict[str, list[dict[str, float]]]


def evaluation_lines(evaluations: Sequence[EvaluationPoint]) -> list[tuple[str, Curves]]:
    """Charts over steps: title, and its lines with their points."""

    def line(value: Callable[[EvaluationFinished], float | None]) -> list[dict[str, float]]:
        known = ((p.result.step, value(p.result)) for p in thinned(evaluations))
        return [{"step": step, "value": v} for step, v in known if v is not None and math.isfinite(v)]

    return [
        (
            "held-out reward, with 95 % interval",
            {
                "mean": line(lambda r: r.reward),
                "low": line(lambda r: r.reward_low),
                "high": line(lambda r: r.reward_high),
            },
        ),
        ("held-out response length, tokens", {"length": line(lambda r: r.response_length)}),
    ]


def headline_figures(snapshot: JournalSnapshot) -> list[tuple[str, str, str]]:
    """Key figures: label, value, note."""
    run, account = snapshot.run, snapshot.trends.account
    lags = versions(snapshot)
    behind = ""
    if lags is not None:
        notes = [_behind(num, lag) for lag, num in lags[1] if lag]
        notes += [f"{counted(lags[2], 'rollout')} lost"] if lags[2] else []
        behind = ", ".join(notes) or "all rollouts up to date"
    lost = "no step yet" if snapshot.history.whole else f"loading history: {snapshot.history.percent} %"
    at_most = ""
    if account is not None:
        total, counted_in = sum(account.lost.values()), {loss.incident_id for loss in snapshot.trends.still_open}
        lost = f"{seconds(total)} lost to faults"
        unknown = sum(i.incident_id not in counted_in for i in snapshot.projection.open_incidents())
        if unknown:
            at_most, missing = "≤ ", f"the cost of {counted(unknown, 'open incident')} is not known yet"
            lost = f"{lost}; {missing}" if total else missing
    ettr = "" if account is None or account.ettr is None else f"{at_most}{percent(account.ettr, 1)}"
    curve = snapshot.trends.curve
    rate = run.tokens_per_second
    if run.ended and run.started_at is not None and curve:
        span = curve[-1].at - (account.start if account else run.started_at)
        rate = sum(b.tokens for b in curve) / span if span > 0 and snapshot.history.whole else None
    rated = "over the whole run" if run.ended else f"in the last {seconds(round(run.rate_seconds))}"
    step, of = (f"{run.step + 1:,}" if run.step >= 0 else ""), f"of {run.num_steps:,}" if run.num_steps else "committed"
    rows = [
        ("step", step, of),
        ("reward of the newest step", _short(run.rewards[-1]) if run.rewards else "", _trend(run.rewards)),
        ("tokens per second", "" if rate is None else f"{rate:,.0f}", rated),
        ("time per step", seconds(run.step_seconds, ""), "between commits, mean of the last five steps"),
        ("policy version", "" if lags is None else str(lags[0]), behind),
        ("ETTR of the whole run", ettr, f"effective training time ratio; {lost}"),
        *figures_of(snapshot),
    ]
    return [row for row in rows if row[1]]


def _behind(num: int, lag: int) -> str:
    return f"{counted(num, 'rollout')} {lag} behind"


def _short(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "NaN"


def _trend(rewards: Sequence[float]) -> str:
    known = [r for r in rewards if math.isfinite(r)]
    if len(known) < 20:
        return ""
    before, now = known[-20:-10], known[-10:]
    change = sum(now) / 10 - sum(before) / 10
    return f"{'▲' if change >= 0 else '▼'} {abs(change):.3f} in 10 steps"


def lost_rows(snapshot: JournalSnapshot) -> list[list[str]]:
    """Lost time: role, fault, seconds of the whole run, share of its time; largest first."""
    account = snapshot.trends.account
    if account is None or account.end <= account.start:
        return []
    span = account.end - account.start
    ranked = sorted(account.lost.items(), key=lambda kv: -kv[1])
    rows = [
        [role, in_words(fault), seconds(lost), percent(lost / span, 2)]
        for (role, fault), lost in ranked[:LOST_ROWS_MAX]
        if lost > 0
    ]
    rest = sum(lost for _, lost in ranked[LOST_ROWS_MAX:])
    return rows + ([["other", "", seconds(rest), percent(rest / span, 2)]] if rest > 0 else [])
