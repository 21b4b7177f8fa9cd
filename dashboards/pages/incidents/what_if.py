"""Counterfactuals of a recovery decision, and replays of an incident from its stored inputs. Pure.

The policy input of a plan is stored with it. This module evaluates the same functions (policy, guards) again with one
input changed: fault class, mode, horizon, fleet, history. For numbers, bisection finds the value at which the decision
changes. Every line is the result of an evaluation; `Counterfactual.inputs` are the inputs that produce it.

A replay repeats each plan from its policy input, the diagnosis from its telemetry window, and the diagnosis with other
detector thresholds.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget
from rolecall.core.faults import FAULTS, FaultClass, Remedy
from rolecall.core.ids import IncidentId, NodeId, ReplicaId, split_replica
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import IncidentOpened, PlanBlocked, PlanCreated
from rolecall.core.journal.store import canonical
from rolecall.core.membership import is_standby
from rolecall.core.text import in_words, percent, plain
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.recovery.fleet_view import FleetView
from rolecall.recovery.guards import MODE, Situation, check, on_peer_evidence_alone
from rolecall.recovery.incidents import ActionFailure, Attempt, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.operators.queries import decided_then
from rolecall.recovery.policy import FailedAttempt, PolicyInput, decide

COUNTS_MAX = 12
"""Largest number of failures, evictions and suspected peers that is tried."""
BISECTIONS = 60
SHOWN_DIGITS = 3
FACTOR_MAX = 1e4
"""Numbers are varied within this factor."""

K, S = EventKind, IncidentState


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """All inputs of a decision. Times are wall seconds."""

    policy_input: PolicyInput
    incident: Incident
    others: tuple[Incident, ...] = ()
    paused: str | None = None
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedDecision:
    action: ActionKind
    targets: tuple[str, ...]
    first: str
    """`acts`, `needs_approval`, the name of a guard, or an outcome."""
    page_oncall: bool
    because: str

    @property
    def key(self) -> tuple[object, ...]:
        """Decisions with the same key have the same effect on the same replicas."""
        replicas = tuple(t.partition("#")[0] for t in self.targets)
        return (self.action, replicas, self.first, self.page_oncall)

    @property
    def words(self) -> str:
        what = in_words(self.action)
        of = f"{what} of {', '.join(self.targets)}" if self.targets else what
        if self.action is ActionKind.TOLERATE:
            paged = ", on-call is paged" if self.page_oncall else ""
            end = "open until it is over" if self.first == MODE else f"closed as {in_words(self.first)}"
            return f"no action ({end}{paged})"
        if self.first == ACTS:
            return of
        if self.first == NEEDS_APPROVAL:
            return f"{of}, after approval"
        return f"{of}, blocked by guard '{in_words(self.first)}'"


ACTS, NEEDS_APPROVAL = "acts", "needs_approval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    condition: str
    decision: PredictedDecision
    inputs: DecisionInputs

    @property
    def text(self) -> str:
        because = f", because {self.because}" if self.because else ""
        return plain(f"If {self.condition}: {self.decision.words}{because}", 1000)

    @property
    def because(self) -> str:
        """The reason without the diagnosis, which is shown at the top of the page."""
        known = plain(self.inputs.policy_input.diagnosis.because)
        return self.decision.because.replace(known, "").strip(" :;,.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """`actual`: the actual decision. `without_effect`: conditions that do not change it."""

    actual: PredictedDecision
    lines: tuple[Counterfactual, ...]
    without_effect: tuple[str, ...]


def predict(inputs: DecisionInputs) -> PredictedDecision:
    """Policy, then guards, as the watch evaluates them."""
    policy_input, verdict = inputs.policy_input, decide(inputs.policy_input)
    plan = verdict.plan
    if plan.action is ActionKind.TOLERATE and policy_input.config.mode != "observe":
        first, because = str(verdict.outcome), plan.because
    else:
        planned = _planned(inputs.incident, plan, policy_input.diagnosis, inputs.now)
        incidents = (*inputs.others, planned)
        situation = Situation(
            now=inputs.now,
            fleet=policy_input.fleet,
            config=policy_input.config,
            incidents=incidents,
            paused=inputs.paused,
        )
        held = check(plan, planned, situation)
        needs_approval = policy_input.config.mode == "approve" and not planned.requested_by_operator
        first = held.guard or (NEEDS_APPROVAL if needs_approval else ACTS)
        because = plan.because if held.passed else held.because
    return PredictedDecision(
        action=plan.action,
        targets=tuple(f"{t.replica}#{t.incarnation}" for t in plan.targets),
        first=first,
        page_oncall=verdict.page_oncall,
        because=plain(because),
    )


def _planned(incident: Incident, plan: Plan, diagnosis: Diagnosis, now: float) -> Incident:
    attempt = Attempt(number=len(incident.attempts) + 1, plan=plan, page_oncall=False, outcome="tolerated", made_at=now)
    return replace(
        incident,
        state=S.PLANNED,
        diagnosis=diagnosis,
        attempts=(*incident.attempts, attempt),
        outcome=None,
        closed_at=None,
    )


def decision_inputs(material: IncidentPageInputs) -> DecisionInputs | None:
    """The inputs of the latest decision; None: not stored, or not readable."""
    made = [(e.wall_at, e.payload.question) for e in material.events if isinstance(e.payload, PlanCreated)]
    if material.incident is None or not made:
        return None
    try:
        policy_input = PolicyInput.from_dict(dict(made[-1][1]))
    except (KeyError, TypeError, ValueError):
        return None
    at = made[-1][0]
    before = tuple(a for a in material.incident.attempts if a.made_at < at)
    others = tuple(o for i in material.others if (o := as_of(i, at)) is not None)
    incident = replace(material.incident, attempts=before, verified_at=None, closed_at=None, outcome=None, state=S.OPEN)
    return DecisionInputs(policy_input=policy_input, incident=incident, others=others, paused=_paused(material), now=at)


def _paused(material: IncidentPageInputs) -> str | None:
    """Who had paused recovery, from the guard's message about this plan."""
    for event in reversed(material.events):
        if isinstance(event.payload, PlanCreated):
            return None
        if isinstance(event.payload, PlanBlocked) and event.payload.guard == "paused":
            return event.payload.because.removeprefix("paused by ") or "someone"
    return None


def as_of(incident: Incident, at: float) -> Incident | None:
    """Another incident as of time `at`, as far as guards use it; None: it was not open yet."""
    if incident.opened_at > at:
        return None
    if incident.state is S.CLOSED and incident.closed_at is not None and incident.closed_at <= at:
        return incident
    attempts = tuple(
        replace(attempt, started_at=_if_before(attempt.started_at, at), done_at=_if_before(attempt.done_at, at))
        for attempt in incident.attempts
        if attempt.made_at <= at
    )
    if incident.state is S.CLOSED and incident.closed_at is None:
        return replace(incident, attempts=attempts)
    last = attempts[-1] if attempts else None
    state = S.OPEN if last is None else S.PLANNED
    if last is not None and last.started_at is not None:
        state = S.ACTING if last.done_at is None else S.VERIFYING
    return replace(incident, attempts=attempts, state=state, closed_at=None, outcome=None)


def _if_before(moment: float | None, at: float) -> float | None:
    return moment if moment is not None and moment <= at else None


Change = tuple[str, DecisionInputs]
"""A condition and the inputs under it."""


def what_if(inputs: DecisionInputs) -> WhatIf:
    actual = predict(inputs)
    lines: list[Counterfactual] = []
    without_effect: list[str] = []
    tried: list[tuple[str, DecisionInputs | None]] = [*_by_number(inputs, actual), *_by_class(inputs)]
    tried += [*_by_mode(inputs), *_by_count(inputs, actual), *_by_fact(inputs)]
    for condition, changed in tried:
        if changed is None:
            without_effect.append(condition)
            continue
        decision = predict(changed)
        if decision.key == actual.key:
            without_effect.append(condition)
        else:
            lines.append(Counterfactual(condition=condition, decision=decision, inputs=changed))
    return WhatIf(actual=actual, lines=tuple(lines), without_effect=tuple(plain(text, 300) for text in without_effect))


def _of_config(inputs: DecisionInputs, **changes: object) -> DecisionInputs:
    return replace(
        inputs, policy_input=replace(inputs.policy_input, config=inputs.policy_input.config.model_copy(update=changes))
    )


def _of_diagnosis(inputs: DecisionInputs, **changes: object) -> DecisionInputs:
    diagnosis = replace(inputs.policy_input.diagnosis, **changes)  # type: ignore[arg-type]
    return replace(inputs, policy_input=replace(inputs.policy_input, diagnosis=diagnosis))


def _by_mode(inputs: DecisionInputs) -> Iterable[Change]:
    mode = inputs.policy_input.config.mode
    for other in ("observe", "approve", "act"):
        if other != mode:
            yield f"the mode were {other} (now {mode})", _of_config(inputs, mode=other)
    if inputs.paused is None:
        yield "recovery were paused", replace(inputs, paused="someone: wait")
    else:
        yield "recovery were not paused", replace(inputs, paused=None)


def _by_class(inputs: DecisionInputs) -> Iterable[Change]:
    """Other fault classes, grouped by the resulting decision."""
    together: dict[tuple[object, ...], list[FaultClass]] = {}
    for other in FAULTS:
        if other is not inputs.policy_input.diagnosis.fault_class:
            together.setdefault(predict(_of_diagnosis(inputs, fault_class=other)).key, []).append(other)
    for found in together.values():
        names = ", ".join(in_words(c) for c in found)
        yield f"the fault class were {names}", _of_diagnosis(inputs, fault_class=found[0])


def _by_fact(inputs: DecisionInputs) -> Iterable[Change]:
    policy_input = inputs.policy_input
    replicas = policy_input.fleet.replicas
    if policy_input.fleet.standbys():
        without = tuple(r for r in replicas if not is_standby(r.replica))
        yield "there were no warm standby", _with_fleet(inputs, without)
    named = {s.replica for s in policy_input.diagnosis.suspects if s.replica}
    if named:
        newer = tuple(
            replace(r, desired_incarnation=r.desired_incarnation + 1) if r.replica in named else r for r in replicas
        )
        yield "the suspect had already been replaced", _with_fleet(inputs, newer)
        nodes = frozenset(str(r.node) for r in replicas if r.replica in named)
        if nodes - policy_input.lost_nodes:
            known = replace(policy_input, lost_nodes=policy_input.lost_nodes | nodes)
            yield f"{', '.join(sorted(nodes))} were diagnosed as lost", replace(inputs, policy_input=known)
            alone = FleetView(replicas=tuple(r for r in replicas if str(r.node) in nodes))
            yield "all other nodes were unavailable too", replace(inputs, policy_input=replace(known, fleet=alone))


def _with_fleet(inputs: DecisionInputs, replicas: Sequence[object]) -> DecisionInputs:
    return replace(inputs, policy_input=replace(inputs.policy_input, fleet=FleetView(replicas=tuple(replicas))))  # type: ignore[arg-type]


def _by_number(inputs: DecisionInputs, actual: PredictedDecision) -> Iterable[tuple[str, DecisionInputs | None]]:
    """For a slow replica three numbers decide: its slowdown, the remaining time of the job, the cost of a
    replacement."""
    diagnosis, config = inputs.policy_input.diagnosis, inputs.policy_input.config
    if diagnosis.fault_class.spec.remedy is not Remedy.WEIGH:
        return
    ratio, horizon, cost = diagnosis.gain_ratio, config.horizon_seconds, config.replacement_cost_seconds
    if ratio is not None and math.isfinite(ratio) and ratio > 1:
        how = "it were {} times slower"
        yield _flip(actual, ratio, lambda v: _of_diagnosis(inputs, gain_ratio=v), how, f"{ratio:.2f}", low=1.0)

    def with_horizon(v: float) -> DecisionInputs:
        return _of_config(inputs, horizon_seconds=v)

    if horizon is None:
        yield _flip(actual, cost, with_horizon, "a horizon of {} s were set", "none", up_only=True)
    else:
        yield _flip(actual, horizon, with_horizon, "the horizon were {} s", f"{horizon:,.0f} s")
    how = "a replacement cost {} s"
    yield _flip(actual, cost, lambda v: _of_config(inputs, replacement_cost_seconds=v), how, f"{cost:,.0f} s")


def _flip(
    actual: PredictedDecision,
    value: float,
    change: Callable[[float], DecisionInputs],
    condition: str,
    current: str,
    *,
    low: float = 0.0,
    up_only: bool = False,
) -> tuple[str, DecisionInputs | None]:
    """The nearest value that changes the decision, rounded away from the current one so that it still does."""

    def other(v: float) -> bool:
        return predict(change(v)).key != actual.key

    directions = [(value * FACTOR_MAX, "or more")]
    if not up_only:
        directions.insert(0, (max(value / FACTOR_MAX, low + 1e-9), "or less"))
    if up_only and other(value):
        return f"{condition.format(f'{value:,.3g}')} (now {current})", change(value)
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
        return f"{condition.format(f'{flipped:,.6g}')} {word} (now {current})", change(flipped)
    return (
        f"{condition.format('any')} between {value / FACTOR_MAX:.3g} and {value * FACTOR_MAX:.3g} (now {current})",
        None,
    )


def _rounded(value: float, *, up: bool) -> float:
    """Rounded to a few digits, away from the range in which the decision is unchanged."""
    if value <= 0 or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - SHOWN_DIGITS + 1)
    return (math.ceil(value / unit - 1e-9) if up else math.floor(value / unit + 1e-9)) * unit


def _by_count(inputs: DecisionInputs, actual: PredictedDecision) -> Iterable[tuple[str, DecisionInputs | None]]:
    """The smallest count of each that changes the decision."""
    if actual.action is ActionKind.TOLERATE or not actual.targets:
        return
    for failure, (words, _) in _FAILURES.items():
        yield _count(actual, lambda n, f=failure: _failed_before(inputs, f, n), words)  # type: ignore[misc]
    diagnosis, peers = inputs.policy_input.diagnosis, _peers(inputs)
    replica = diagnosis.suspects[0].replica

    def elsewhere(n: int) -> DecisionInputs:
        return _with_others(inputs, (f"other-{k}/0" for k in range(n)), S.CLOSED)

    def again(n: int) -> DecisionInputs:
        return _with_others(inputs, [replica] * n, S.CLOSED)

    def under_repair(n: int) -> DecisionInputs | None:
        return _with_others(inputs, peers[:n], S.VERIFYING) if n <= len(peers) else None

    yield _count(actual, elsewhere, "{} had been replaced in the last hour", "other replica")
    yield _count(actual, again, "it had been replaced {} in the last hour", "time")
    yield _count(actual, under_repair, "{} were being replaced at that moment", "other replica")
    if on_peer_evidence_alone(diagnosis):
        roles = {split_replica(s.replica)[0] for s in diagnosis.suspects if s.replica}
        of_role = [r for r in peers if split_replica(r)[0] in roles]

        def suspected(n: int) -> DecisionInputs | None:
            return _with_others(inputs, of_role[:n], S.PLANNED, diagnosis.fault_class) if n <= len(of_role) else None

        yield _count(actual, suspected, "{} were suspected on peer evidence alone", "other peer")


_FAILURES = {
    ActionFailure.DIED: ("{} had died before doing any work", "it died before doing any work"),
    ActionFailure.NOT_STARTED: ("{} had not been started", "its node could not take it"),
    ActionFailure.NO_PROGRESS: ("{} had made no progress in time", "it made no progress"),
    ActionFailure.REFUSED: ("{} had been refused", "it was refused"),
}
"""The condition, and the reason of such an attempt."""


def _count(
    actual: PredictedDecision, change: Callable[[int], DecisionInputs | None], condition: str, what: str = "replacement"
) -> tuple[str, DecisionInputs | None]:
    for count in range(1, COUNTS_MAX + 1):
        changed = change(count)
        if changed is None:
            return condition.format(f"any {what}" if count == 1 else f"up to {_number(count - 1, what)}"), None
        if predict(changed).key != actual.key:
            return condition.format(_number(count, what)), changed
    return condition.format(f"up to {_number(COUNTS_MAX, what)}"), None


def _number(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _failed_before(inputs: DecisionInputs, failure: ActionFailure, count: int) -> DecisionInputs:
    """The inputs after `n` more failed attempts, on the incarnations that they started."""
    policy_input = inputs.policy_input
    past, fleet = list(policy_input.past), policy_input.fleet
    for _ in range(count):
        plan = decide(replace(policy_input, past=tuple(past), fleet=fleet)).plan
        if not plan.targets:
            break
        past.append(
            FailedAttempt(failure=failure, action=plan.action, targets=plan.targets, because=_FAILURES[failure][1])
        )
        if failure is not ActionFailure.REFUSED:
            made = {t.replica: t.incarnation + 1 for t in plan.targets}
            fleet = FleetView(
                replicas=tuple(
                    replace(r, desired_incarnation=made.get(r.replica, r.desired_incarnation)) for r in fleet.replicas
                )
            )
    # Guards count attempts from the journal; only the policy sees these.
    return replace(inputs, policy_input=replace(policy_input, past=tuple(past), fleet=fleet))


def _with_others(
    inputs: DecisionInputs, replicas: Iterable[str], state: IncidentState, fault_class: FaultClass = FaultClass.CRASH
) -> DecisionInputs:
    """The inputs with one more incident for each replica."""
    more = (_hypothetical(inputs, r, k, state, fault_class) for k, r in enumerate(replicas))
    return replace(inputs, others=(*inputs.others, *more))


def _peers(inputs: DecisionInputs) -> list[str]:
    """Other working replicas; those of the suspects' roles first."""
    named = {s.replica for s in inputs.policy_input.diagnosis.suspects}
    roles = {split_replica(r)[0] for r in named if r}
    rest = [r for r in inputs.policy_input.fleet.replicas if r.replica not in named and not is_standby(r.replica)]
    return [str(r.replica) for r in sorted(rest, key=lambda r: (r.role not in roles, r.replica))]


def _hypothetical(
    inputs: DecisionInputs, replica: str, number: int, state: IncidentState, fault_class: FaultClass
) -> Incident:
    """A hypothetical incident, with what guards use of it."""
    name = f"hypothetical-{number}"
    target = PlanTarget(replica=ReplicaId(replica), incarnation=1, node=NodeId("elsewhere"))
    plan = Plan(
        incident_id=IncidentId(name), action=ActionKind.REPLACE_REPLICA, targets=(target,), because="hypothetical"
    )
    started = None if state is S.PLANNED else inputs.now - 60.0
    attempt = Attempt(
        number=1,
        plan=plan,
        page_oncall=False,
        outcome="tolerated",
        made_at=inputs.now - 61.0,
        started_at=started,
        done_at=started,
    )
    return Incident(
        incident_id=name,
        state=state,
        diagnosis=replace(inputs.policy_input.diagnosis, suspects=(), fault_class=fault_class),
        opened_at=inputs.now - 62.0,
        seen_keys=frozenset(),
        attempts=(attempt,),
        outcome=IncidentOutcome.RESOLVED if state is S.CLOSED else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    what: str
    seen: float
    limit: float
    unit: str

    @property
    def text(self) -> str:
        over = self.seen / self.limit - 1 if self.limit else math.inf
        word = "above" if over >= 0 else "below"
        return plain(
            f"{self.what}: {self.seen:.3g}{self.unit}, {percent(abs(over))} {word} the threshold of "
            f"{self.limit:.3g}{self.unit}. "
            f"With a threshold above {self.seen:.3g}{self.unit} the fault would not have been reported yet.",
            400,
        )


def margins(diagnosis: Diagnosis) -> tuple[Margin, ...]:
    """Comparisons in the evidence: time without progress and its deadline, a score and its threshold."""
    found = []
    for e in diagnosis.evidence:
        values = e.values
        if "deadline_seconds" in values:
            name = "stalled_seconds" if "stalled_seconds" in values else "waited_seconds"
            # A missing heartbeat counts from its own last time, whatever else has stopped.
            seen = max(values.get(name, 0.0), values.get("beat_seconds", 0.0))
            found.append(Margin(what="No progress", seen=seen, limit=values["deadline_seconds"], unit=" s"))
        for name, what in (("cusum", "Cumulative slowness (CUSUM)"), ("score", "Score")):
            if name in values and "threshold" in values:
                found.append(Margin(what=what, seen=values[name], limit=values["threshold"], unit=""))
    return tuple(m for m in found if math.isfinite(m.seen) and math.isfinite(m.limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """`same`: None if nothing that could be replayed is stored."""

    same: bool | None
    lines: tuple[str, ...]


def replay(events: Sequence[Event], window: Mapping[str, Any] | None) -> ReplayResult:
    """Replays from the incident's events and the telemetry window of its diagnosis."""
    plans = [_replayed_plan(e) for e in events if e.kind is K.PLAN_CREATED]
    results = [*plans, _replayed_diagnosis(events, window)]
    known = [same for same, _ in results if same is not None]
    return ReplayResult(same=all(known) if known else None, lines=tuple(plain(line, 1000) for _, line in results))


def _replayed_plan(event: Event) -> tuple[bool | None, str]:
    try:
        policy_input = PolicyInput.from_dict(dict(event.as_(PlanCreated).question))
    except (KeyError, TypeError, ValueError) as error:
        return None, f"{event.event_id}: the policy input of this plan cannot be read ({type(error).__name__}: {error})"
    again = decide(policy_input).to_dict()
    same = canonical(again) == canonical(decided_then(event.as_(PlanCreated)))
    verdict = "same plan" if same else "DIFFERENT plan"
    return same, f"{event.event_id}: {verdict}, {in_words(again['plan']['action'])}, because {again['plan']['because']}"


def _replayed_diagnosis(events: Sequence[Event], window: Mapping[str, Any] | None) -> tuple[bool | None, str]:
    if window is None:
        return None, "no telemetry window is stored, so the diagnosis cannot be replayed"
    try:
        from rolecall.detector.live.engine import LiveDetector
    except ImportError as e:
        return None, f"the diagnosis cannot be replayed on this machine: {e}"
    try:
        first = next(e for e in events if e.kind is K.INCIDENT_OPENED)
        opened = first.as_(IncidentOpened).diagnosis
        replayed = {d.key: d for diagnoses in LiveDetector.replay_window(window) for d in diagnoses}
    except (StopIteration, KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        return None, f"the stored window cannot be read ({type(e).__name__}: {e})"
    again = replayed.get(opened.key)
    if again is None:
        return False, "replaying the stored window does not reproduce this diagnosis"
    return True, f"same diagnosis from the stored window: {again.because}"


THRESHOLD_BISECTIONS = 8
THRESHOLD_FACTOR_MAX = 16.0
"""Largest factor by which a detector setting is raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdBoundary:
    """Neighbouring values of a setting with and without the diagnosis in this window."""

    setting: str
    now: float
    detected_at: float
    undetected_at: float | None
    """None: detected even at the largest value that was tried."""
    text: str


def threshold_boundary(window: Mapping[str, Any], diagnosis: Diagnosis) -> ThresholdBoundary | str:
    """The boundary, or the reason why there is none."""
    threshold = diagnosis.fault_class.spec.threshold
    if threshold is None:
        return f"No detector threshold decides about {in_words(diagnosis.fault_class)}."
    setting, phrase = threshold.setting, threshold.words
    try:
        now = float(window["config"][setting])
        if not _is_diagnosed(window, diagnosis, setting, now):
            return "Replaying the stored window does not reproduce this diagnosis."
        low, high = now, now * THRESHOLD_FACTOR_MAX
        if _is_diagnosed(window, diagnosis, setting, high):
            text = (
                f"With {phrase.format(high)} (configured: {now:.3g}) the fault would still have been detected in "
                f"this window."
            )
            return ThresholdBoundary(setting=setting, now=now, detected_at=high, undetected_at=None, text=text)
        for _ in range(THRESHOLD_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _is_diagnosed(window, diagnosis, setting, middle) else (low, middle)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        return plain(f"The stored window cannot be read ({type(e).__name__}: {e}).", 300)
    text = f"With {phrase.format(high)} (configured: {now:.3g}) the fault would not have been detected in this window."
    if low > now:
        text += f" With {low:.3g} it would have been."
    return ThresholdBoundary(setting=setting, now=now, detected_at=low, undetected_at=high, text=text)


def _is_diagnosed(window: Mapping[str, Any], diagnosis: Diagnosis, setting: str, value: float) -> bool:
    """Whether this diagnosis, or one of the same fault, is made with that setting."""
    from rolecall.detector.live.engine import LiveDetector

    changed = {**window, "config": {**window["config"], setting: value}}
    return any(found.key == diagnosis.key for diagnoses in LiveDetector.replay_window(changed) for found in diagnoses)
