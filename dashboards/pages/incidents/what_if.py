"""What would have changed the decision: found by asking again, with one thing changed. Pure.

The question that a plan was made from is stored with it. Here it is put again to the same functions (policy, guards, the
next move): with another class, mode, horizon, fleet, past. Where a number decides, the one at which the answer changes is
searched for by bisection. Nothing here is prose about rules: a line is there because an answer came out otherwise, and
`Counterfactual.asked` is the question that gives it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget
from rolecall.core.faults import FAULTS, FaultClass, Remedy
from rolecall.core.ids import IncidentId, NodeId, ReplicaId, split_replica
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads import PlanBlocked, PlanCreated
from rolecall.core.membership import STANDBY_ROLE
from rolecall.core.text import plain
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.recovery.fleet import FleetView
from rolecall.recovery.guards import check, on_peer_evidence_alone
from rolecall.recovery.incidents.incident import ActionFailure, Attempt, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.policy import FailedAttempt, PolicyInput, decide

COUNTS_MAX = 12
"""Past failures, evictions and accused peers are counted up to so many."""
BISECTIONS = 60
SHOWN_DIGITS = 3
FACTOR_MAX = 1e4
"""Numbers are searched within so many times more or less than they were."""

K, S = EventKind, IncidentState


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """All that an answer depends on. Times are wall seconds."""

    question: PolicyInput
    incident: Incident
    others: tuple[Incident, ...] = ()
    paused: str | None = None
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedDecision:
    """What would be done, and what would come of it first."""

    action: ActionKind
    targets: tuple[str, ...]
    first: str
    """`acts`, `asks`, a guard's name, or an outcome."""
    page_oncall: bool
    because: str

    @property
    def key(self) -> tuple[object, ...]:
        """Answers are the same when a person would see the same happen to the same replicas."""
        replicas = tuple(t.partition("#")[0] for t in self.targets)
        return (self.action, replicas, self.first, self.page_oncall)

    @property
    def words(self) -> str:
        what = str(self.action).replace("_", " ")
        of = f"{what} of {', '.join(self.targets)}" if self.targets else what
        if self.action is ActionKind.TOLERATE:
            person = ", and a person is called" if self.page_oncall else ""
            return f"nothing is done (closed as {self.first.replace('_', ' ')}{person})"
        if self.first == ACTS:
            return of
        if self.first == ASKS:
            return f"{of}, once a person has approved it"
        return f"{of} is decided, and the guard '{self.first}' holds it"


ACTS, ASKS = "acts", "asks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """Had it been so, that would have come of it."""

    had: str
    answer: PredictedDecision
    asked: DecisionInputs

    @property
    def text(self) -> str:
        because = f", because {self.because}" if self.because else ""
        return plain(f"Had {self.had}: {self.answer.words}{because}", 1000)

    @property
    def because(self) -> str:
        """What the answer says beyond the diagnosis itself, which stands on top of the page."""
        told = plain(self.asked.question.diagnosis.because)
        return self.answer.because.replace(told, "").strip(" :;,.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """`then`: what was decided, asked again. `unmoved`: changes that were tried and change nothing."""

    then: PredictedDecision
    lines: tuple[Counterfactual, ...]
    unmoved: tuple[str, ...]


def answer(a: DecisionInputs) -> PredictedDecision:
    """Policy, then guards, as the watch would ask them."""
    q, verdict = a.question, decide(a.question)
    plan = verdict.plan
    if plan.action is ActionKind.TOLERATE:
        first, because = str(verdict.outcome), plan.because
    else:
        planned = _planned(a.incident, plan, q.diagnosis, a.now)
        held = check(
            plan,
            planned,
            fleet=q.fleet,
            config=q.config,
            incidents=(*a.others, planned),
            paused=a.paused,
            stopping=None,
            now=a.now,
        )
        asks = q.config.mode == "approve" and not planned.requested_by_operator
        first = held.guard or (ASKS if asks else ACTS)
        because = plan.because if held.passed else held.because
    return PredictedDecision(
        action=plan.action,
        targets=tuple(f"{t.replica}#{t.incarnation}" for t in plan.targets),
        first=first,
        page_oncall=verdict.page_oncall,
        because=plain(because),
    )


def _planned(incident: Incident, plan: Plan, d: Diagnosis, now: float) -> Incident:
    attempt = Attempt(number=len(incident.attempts) + 1, plan=plan, page_oncall=False, outcome="tolerated", made_at=now)
    return replace(
        incident, state=S.PLANNED, diagnosis=d, attempts=(*incident.attempts, attempt), outcome=None, closed_at=None
    )


# --- from the journal -----------------------------------------------------------------------------------------------


def asked(m: IncidentPageInputs) -> DecisionInputs | None:
    """The newest decision as it was asked; None: none is stored, or it cannot be read."""
    made = [(e.wall_at, e.payload.question) for e in m.events if isinstance(e.payload, PlanCreated)]
    if m.incident is None or not made:
        return None
    try:
        question = PolicyInput.from_dict(dict(made[-1][1]))
    except (KeyError, TypeError, ValueError):
        return None
    at = made[-1][0]
    before = tuple(a for a in m.incident.attempts if a.made_at < at)
    others = tuple(o for i in m.others if (o := as_of(i, at)) is not None)
    incident = replace(m.incident, attempts=before, verified_at=None, closed_at=None, outcome=None, state=S.OPEN)
    return DecisionInputs(question=question, incident=incident, others=others, paused=_paused(m), now=at)


def _paused(m: IncidentPageInputs) -> str | None:
    """Who had paused rolecall, as the guard said it of this plan."""
    for e in reversed(m.events):
        if isinstance(e.payload, PlanCreated):
            return None
        if isinstance(e.payload, PlanBlocked) and e.payload.guard == "paused":
            return e.payload.because.removeprefix("paused by ") or "somebody"
    return None


def as_of(i: Incident, at: float) -> Incident | None:
    """Another incident as it stood then, as far as guards look at it; None: it was not open yet."""
    if i.opened_at > at:
        return None
    attempts = tuple(
        replace(a, started_at=_if_before(a.started_at, at), done_at=_if_before(a.done_at, at))
        for a in i.attempts
        if a.made_at <= at
    )
    if i.state is S.CLOSED and (i.closed_at is None or i.closed_at <= at):
        return replace(i, attempts=attempts)
    last = attempts[-1] if attempts else None
    state = S.OPEN if last is None else S.PLANNED
    if last is not None and last.started_at is not None:
        state = S.ACTING if last.done_at is None else S.VERIFYING
    return replace(i, attempts=attempts, state=state, closed_at=None, outcome=None)


def _if_before(moment: float | None, at: float) -> float | None:
    return moment if moment is not None and moment <= at else None


# --- what is changed ------------------------------------------------------------------------------------------------

Change = tuple[str, DecisionInputs]
"""`had ...`, and what is asked then."""


def what_if(a: DecisionInputs) -> WhatIf:
    then = answer(a)
    lines: list[Counterfactual] = []
    unmoved: list[str] = []
    tried = [*_by_number(a, then), *_by_class(a), *_by_person(a), *_by_count(a, then), *_by_fact(a)]
    for had, changed in tried:
        if changed is None:
            unmoved.append(had)
            continue
        otherwise = answer(changed)
        if otherwise.key == then.key:
            unmoved.append(had)
        else:
            lines.append(Counterfactual(had=had, answer=otherwise, asked=changed))
    return WhatIf(then=then, lines=tuple(lines), unmoved=tuple(plain(text, 300) for text in unmoved))


def _of_config(a: DecisionInputs, **changes: object) -> DecisionInputs:
    return replace(a, question=replace(a.question, config=a.question.config.model_copy(update=changes)))


def _of_diagnosis(a: DecisionInputs, **changes: object) -> DecisionInputs:
    return replace(a, question=replace(a.question, diagnosis=replace(a.question.diagnosis, **changes)))  # type: ignore[arg-type]


def _by_person(a: DecisionInputs) -> Iterable[Change]:
    mode = a.question.config.mode
    for other in ("observe", "approve", "act"):
        if other != mode:
            yield f"the mode been {other} (it is {mode})", _of_config(a, mode=other)
    if a.paused is None:
        yield "a person paused rolecall", replace(a, paused="somebody: wait")
    else:
        yield "nobody paused rolecall", replace(a, paused=None)


def _by_class(a: DecisionInputs) -> Iterable[Change]:
    """Other classes, together where they give the same."""
    together: dict[tuple[object, ...], list[FaultClass]] = {}
    for other in FAULTS:
        if other is not a.question.diagnosis.fault_class:
            together.setdefault(answer(_of_diagnosis(a, fault_class=other)).key, []).append(other)
    for found in together.values():
        names = ", ".join(str(c).replace("_", " ") for c in found)
        yield f"the fault been judged {names}", _of_diagnosis(a, fault_class=found[0])


def _by_fact(a: DecisionInputs) -> Iterable[Change]:
    q = a.question
    replicas = q.fleet.replicas
    if q.fleet.standbys():
        without = tuple(r for r in replicas if r.role != STANDBY_ROLE)
        yield "there been no warm standby", _with_fleet(a, without)
    named = {s.replica for s in q.diagnosis.suspects if s.replica}
    if named:
        newer = tuple(
            replace(r, desired_incarnation=r.desired_incarnation + 1) if r.replica in named else r for r in replicas
        )
        yield "the named incarnation been replaced already", _with_fleet(a, newer)
        nodes = frozenset(str(r.node) for r in replicas if r.replica in named)
        if nodes - q.lost_nodes:
            known = replace(q, lost_nodes=q.lost_nodes | nodes)
            yield f"{', '.join(sorted(nodes))} been diagnosed as lost", replace(a, question=known)
            alone = tuple(r for r in replicas if str(r.node) in nodes)
            yield (
                "every other node been away as well",
                replace(a, question=replace(known, fleet=FleetView(replicas=alone))),
            )
    if q.supports:
        yield "rolecall only watched this job", replace(a, question=replace(q, supports=frozenset()))


def _with_fleet(a: DecisionInputs, replicas: Sequence[object]) -> DecisionInputs:
    return replace(a, question=replace(a.question, fleet=FleetView(replicas=tuple(replicas))))  # type: ignore[arg-type]


# --- numbers --------------------------------------------------------------------------------------------------------


def _by_number(a: DecisionInputs, then: PredictedDecision) -> Iterable[tuple[str, DecisionInputs | None]]:
    """Of a slow replica three numbers decide: how slow it is, how long the job goes on, what a replacement costs."""
    d, config = a.question.diagnosis, a.question.config
    if d.fault_class.spec.remedy is not Remedy.WEIGH:
        return
    ratio, horizon, cost = d.gain_ratio, config.horizon_seconds, config.replacement_cost_seconds
    if ratio is not None and math.isfinite(ratio) and ratio > 1:
        how = "it been {} times slower"
        yield _flip(then, ratio, lambda v: _of_diagnosis(a, gain_ratio=v), how, f"{ratio:.2f}", low=1.0)
    if horizon is None:
        yield _flip(
            then,
            cost,
            lambda v: _of_config(a, horizon_seconds=v),
            "a horizon of {} s been set",
            "none is",
            up_only=True,
        )
    else:
        yield _flip(
            then, horizon, lambda v: _of_config(a, horizon_seconds=v), "the horizon been {} s", f"{horizon:,.0f} s"
        )
    yield _flip(
        then, cost, lambda v: _of_config(a, replacement_cost_seconds=v), "a replacement cost {} s", f"{cost:,.0f} s"
    )


def _flip(
    then: PredictedDecision,
    value: float,
    change: Callable[[float], DecisionInputs],
    had: str,
    was: str,
    *,
    low: float = 0.0,
    up_only: bool = False,
) -> tuple[str, DecisionInputs | None]:
    """The value nearest to this one at which the answer is another, rounded away from it, so that it is one."""

    def other(v: float) -> bool:
        return answer(change(v)).key != then.key

    directions = [(value * FACTOR_MAX, "or more")]
    if not up_only:
        directions.insert(0, (max(value / FACTOR_MAX, low + 1e-9), "or less"))
    if up_only and other(value):
        return f"{had.format(f'{value:,.3g}')} (now {was})", change(value)
    for end, word in directions:
        if not other(end):
            continue
        same, flipped = value, end
        for _ in range(BISECTIONS):
            middle = (same + flipped) / 2
            same, flipped = (same, middle) if other(middle) else (middle, flipped)
        shown = low + _rounded(flipped - low, up=end > value)
        if other(shown):
            flipped = shown
        return f"{had.format(f'{flipped:,.6g}')} {word} (now {was})", change(flipped)
    return f"{had.format('any')} between {value / FACTOR_MAX:.3g} and {value * FACTOR_MAX:.3g} (now {was})", None


def _rounded(value: float, *, up: bool) -> float:
    """To a few digits, away from where the answer is the old one."""
    if value <= 0 or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - SHOWN_DIGITS + 1)
    return (math.ceil(value / unit - 1e-9) if up else math.floor(value / unit + 1e-9)) * unit


# --- counts ---------------------------------------------------------------------------------------------------------


def _by_count(a: DecisionInputs, then: PredictedDecision) -> Iterable[tuple[str, DecisionInputs | None]]:
    """The smallest number of each at which the answer is another."""
    if then.action is ActionKind.TOLERATE or not then.targets:
        return
    for failure, words in _FAILURES.items():
        yield _count(then, lambda n, f=failure: _failed_before(a, f, n), words)  # type: ignore[misc]
    yield _count(then, lambda n: _evicted_before(a, n), "{} been replaced within the hour before", "other replica")
    yield _count(then, lambda n: _replaced_before(a, n), "it been replaced {} within the hour before", "time")
    yield _count(then, lambda n: _under_repair(a, n), "{} been under repair at that moment", "other replica")
    if on_peer_evidence_alone(a.question.diagnosis):
        yield _count(then, lambda n: _accused(a, n), "{} been accused by their peers alone, too", "other peer")


_FAILURES = {
    ActionFailure.DIED: "{} ended without any work",
    ActionFailure.NO_PROGRESS: "{} not been seen to work in time",
    ActionFailure.REFUSED: "{} been impossible to perform",
}


def _count(
    then: PredictedDecision, change: Callable[[int], DecisionInputs | None], had: str, what: str = "replacement"
) -> tuple[str, DecisionInputs | None]:
    for n in range(1, COUNTS_MAX + 1):
        changed = change(n)
        if changed is None:
            return had.format(f"any {what}" if n == 1 else f"up to {_number(n - 1, what)}"), None
        if answer(changed).key != then.key:
            return had.format(_number(n, what)), changed
    return had.format(f"up to {_number(COUNTS_MAX, what)}"), None


def _number(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _failed_before(a: DecisionInputs, failure: ActionFailure, n: int) -> DecisionInputs:
    """So many attempts more that failed, on the incarnations that they made."""
    q = a.question
    past, fleet = list(q.past), q.fleet
    for _ in range(n):
        plan = decide(replace(q, past=tuple(past), fleet=fleet)).plan
        if not plan.targets:
            break
        past.append(FailedAttempt(failure=failure, action=plan.action, targets=plan.targets, because=_WHY[failure]))
        if failure is not ActionFailure.REFUSED:
            made = {t.replica: t.incarnation + 1 for t in plan.targets}
            fleet = FleetView(
                replicas=tuple(
                    replace(r, desired_incarnation=made.get(r.replica, r.desired_incarnation)) for r in fleet.replicas
                )
            )
    # Its own limits count attempts of this incident, which guards read from the journal: here only policy is asked.
    return replace(a, question=replace(q, past=tuple(past), fleet=fleet))


_WHY = {
    ActionFailure.DIED: "it ended before it did any work",
    ActionFailure.NO_PROGRESS: "it was not seen to work",
    ActionFailure.REFUSED: "it cannot be done",
}


def _evicted_before(a: DecisionInputs, n: int) -> DecisionInputs:
    return replace(a, others=(*a.others, *(_imagined(a, f"other-{k}/0", k, S.CLOSED) for k in range(n))))


def _replaced_before(a: DecisionInputs, n: int) -> DecisionInputs:
    replica = a.question.diagnosis.suspects[0].replica
    return replace(a, others=(*a.others, *(_imagined(a, replica, k, S.CLOSED) for k in range(n))))


def _peers(a: DecisionInputs) -> list[str]:
    """Others of the suspects' roles first, then everybody else who works."""
    named = {s.replica for s in a.question.diagnosis.suspects}
    roles = {split_replica(r)[0] for r in named if r}
    rest = [r for r in a.question.fleet.replicas if r.replica not in named and r.role != STANDBY_ROLE]
    return [str(r.replica) for r in sorted(rest, key=lambda r: (r.role not in roles, r.replica))]


def _under_repair(a: DecisionInputs, n: int) -> DecisionInputs | None:
    peers = _peers(a)
    if n > len(peers):
        return None
    return replace(a, others=(*a.others, *(_imagined(a, r, k, S.VERIFYING) for k, r in enumerate(peers[:n]))))


def _accused(a: DecisionInputs, n: int) -> DecisionInputs | None:
    roles = {split_replica(s.replica)[0] for s in a.question.diagnosis.suspects if s.replica}
    peers = [r for r in _peers(a) if split_replica(r)[0] in roles]
    if n > len(peers):
        return None
    same = a.question.diagnosis.fault_class
    accused = (_imagined(a, r, k, S.PLANNED, same) for k, r in enumerate(peers[:n]))
    return replace(a, others=(*a.others, *accused))


def _imagined(
    a: DecisionInputs, replica: str, number: int, state: IncidentState, fault_class: FaultClass = FaultClass.CRASH
) -> Incident:
    """Another incident, as far as guards look at it."""
    name = f"imagined-{number}"
    target = PlanTarget(replica=ReplicaId(replica), incarnation=1, node=NodeId("elsewhere"))
    plan = Plan(incident_id=IncidentId(name), action=ActionKind.REPLACE_REPLICA, targets=(target,), because="imagined")
    started = None if state is S.PLANNED else a.now - 60.0
    attempt = Attempt(
        number=1,
        plan=plan,
        page_oncall=False,
        outcome="tolerated",
        made_at=a.now - 61.0,
        started_at=started,
        done_at=started,
    )
    return Incident(
        incident_id=name,
        state=state,
        diagnosis=replace(a.question.diagnosis, suspects=(), fault_class=fault_class),
        opened_at=a.now - 62.0,
        seen_keys=frozenset(),
        attempts=(attempt,),
        outcome=IncidentOutcome.RESOLVED if state is S.CLOSED else None,
    )


# --- how far the evidence was from its threshold --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """One number that was compared with another: how far beyond it lies."""

    what: str
    seen: float
    limit: float
    unit: str

    @property
    def text(self) -> str:
        over = self.seen / self.limit - 1 if self.limit else math.inf
        word = "above" if over >= 0 else "below"
        return plain(
            f"{self.what}: {self.seen:.3g}{self.unit} was seen, the threshold is {self.limit:.3g}{self.unit}: "
            f"{abs(over):.0%} {word} it. With a threshold above {self.seen:.3g}{self.unit} it would not have been said yet.",
            400,
        )


def margins(d: Diagnosis) -> tuple[Margin, ...]:
    """What the evidence compared: a standing time with its deadline, a score or sum with its threshold."""
    found = []
    for e in d.evidence:
        values = e.values
        if "deadline_seconds" in values:
            name = "stalled_seconds" if "stalled_seconds" in values else "waited_seconds"
            # Who gives no sign of life is judged by it, whatever else stands still.
            seen = max(values.get(name, 0.0), values.get("beat_seconds", 0.0))
            found.append(Margin(what="Standing still", seen=seen, limit=values["deadline_seconds"], unit=" s"))
        for name, what in (("cusum", "Sum of slowness"), ("score", "Score")):
            if name in values and "threshold" in values:
                found.append(Margin(what=what, seen=values[name], limit=values["threshold"], unit=""))
    return tuple(m for m in found if math.isfinite(m.seen) and math.isfinite(m.limit))
