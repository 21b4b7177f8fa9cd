"""The next step of an incident: one journal event, or one call of the actuator. Pure; the loop performs it and repeats.

Each event is keyed by (incident, attempt, what), so it is written once even if a watch dies before or after it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolecall.core.diagnosis import ActionKind, Fate, Plan
from rolecall.core.faults import Remedy
from rolecall.core.ids import split_replica
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.recovery import (
    ActionDone,
    ActionFailed,
    ActionStarted,
    IncidentClosed,
    IncidentUpdated,
    IncidentVerified,
    NodeQuarantined,
    OncallPaged,
    PlanBlocked,
    PlanExpired,
    PlanProposed,
)
from rolecall.core.membership import NO_PROCESS, ReplicaState, is_standby
from rolecall.recovery.fleet_view import DEAD, LIVING, FleetView
from rolecall.recovery.guards import AT_ONCE, COMMITS, LENDER, GuardResult, Progress, Situation, check
from rolecall.recovery.incidents import (
    NOT_STARTED,
    UNDER_REPAIR,
    ActionFailure,
    Attempt,
    Decision,
    Incident,
    IncidentOutcome,
    IncidentState,
)
from rolecall.recovery.policy import FULL_DISK, ORPHAN, PolicyInput, leaves_node, without_node

TRAINER = "trainer"
CONTROLLER = "controller"
JOIN_FACTOR = 10
"""Steps may be longer than the timeout of a verification, and trainers and engines of hybrids join between two."""
CLEAR_SECONDS = 5.0
"""Seconds without the diagnosis, with its suspects making progress, after which the fault counts as self recovered."""

UNSEEN_SECONDS = 30.0
"""The same in mode observe for what makes no progress: a node, or a replica without processes. Longer than the pause
between two answers of an agent in a large fleet, and than a launcher takes to restart a job."""

K, S = EventKind, IncidentState
BY_WATCH = "watch"
"""`by` of an automatic quarantine."""
UPDATE_TOPIC = "update"
"""Topic of the second page of an observed incident, when evidence has decided what the first could not say."""
FAILED_TOPIC = "failed"
"""Topic of its page when an action that was begun in another mode has failed."""
NODE = "node"
"""Guard of a plan whose node was taken while it waited."""
QUARANTINE_TOPIC = "quarantine"
"""Topic of the page when too many nodes would be quarantined."""
OPERATOR_VETO = frozenset({K.HOLD_PLACED, K.PLAN_REJECTED})
"""Commands that, when written concurrently, stop a plan from starting or expiring: the step is computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Write this event, unless its key exists already."""

    payload: Payload
    key: str
    unless: frozenset[EventKind] = frozenset()  # concurrent commands that void this step


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """Run the policy and write its plan."""

    question: PolicyInput
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Perform:
    """Call the actuator."""

    plan: Plan
    number: int


Move = Append | Decide | Perform


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`resolved`, or `failure`, or `incomplete` (what ended besides the targets is not back in time), or none of these
    yet. `serving_at`: when the last replacement began to serve, wall seconds."""

    because: str
    resolved: bool = False
    failure: ActionFailure | None = None
    incomplete: bool = False
    serving_at: float = 0.0


def next_step(incident: Incident, situation: Situation, question: PolicyInput) -> Move | None:
    """The step to make now; None: wait."""
    if incident.state is S.CLOSED:
        return None
    if situation.ended is not None and incident.state is not S.VERIFYING:
        outcome = IncidentOutcome.ENDED if situation.observing else IncidentOutcome.ESCALATED
        return _close(incident, outcome, f"the run ended before it was resolved: {situation.ended}")
    if incident.state is S.OPEN or incident.attempt is None:
        return Decide(question=question, key=f"{incident.incident_id}:plan:{len(incident.attempts) + 1}")
    if incident.state is S.PLANNED:
        return _from_planned(incident, incident.attempt, situation, question)
    if incident.state is S.PROPOSED:
        return _from_proposed(incident, incident.attempt, situation, question)
    if incident.state is S.ACTING:
        return _from_acting(incident, incident.attempt, situation)
    return _from_verifying(incident, incident.attempt, situation)


def _from_planned(incident: Incident, attempt: Attempt, situation: Situation, question: PolicyInput) -> Move | None:
    # While rolecall only observes, the incident lasts as long as its fault; nobody else would show it.
    moot = attempt.outcome == IncidentOutcome.SELF_RECOVERED
    # It ends by the hand of whoever was paged, which can be seen.
    lasts = bool({FULL_DISK, ORPHAN} & {*incident.diagnosis.detectors})
    if attempt.plan.action is ActionKind.TOLERATE and (moot or not situation.observing):
        if attempt.page_oncall:
            paged = _page_oncall(incident, "nothing_helps", attempt.plan.because, situation)
            if paged is not None:
                return paged
        over = _over(incident, situation) if lasts else None
        if over is not None:
            return _close(incident, *over)
        return None if lasts else _close(incident, IncidentOutcome(attempt.outcome), attempt.plan.because)
    if attempt.decision is Decision.REJECTED:
        return _rejected(incident, attempt, situation)
    over = _over(incident, situation)
    if over is not None:
        return _close(incident, *over)
    paged = _hold_ended(incident, attempt, situation)
    if paged is not None:
        return paged
    verdict = _check(incident, attempt, situation, question)
    if verdict.passed:
        # A request approves the replacement that it names, not a restart of what is healthy.
        requested = incident.requested_by_operator and not attempt.plan.action.is_restart
        if situation.config.mode == "approve" and not requested:
            expires_at = situation.now + situation.config.approval_timeout_seconds
            proposed = PlanProposed(digest=attempt.plan.digest, plan=attempt.plan, expires_at=expires_at)
            return _about(incident, attempt, "proposed", proposed)
        return _start(incident, attempt)
    if verdict.guard == COMMITS:
        return _escalate(incident, COMMITS, f"{incident.diagnosis.because}; {verdict.because}", situation)
    if verdict.guard in (LENDER, NODE):
        return _decide_anew(incident, attempt, verdict)
    timeout_seconds = situation.config.approval_timeout_seconds
    due_at = max(incident.opened_at, attempt.hold.until if attempt.hold else 0.0) + timeout_seconds
    if incident.requested_by_operator and verdict.guard in attempt.held_by and situation.now > due_at:
        because = f"the request was blocked for {timeout_seconds:.0f} s: {verdict.because}"
        return _escalate(incident, "request_held", because, situation)
    return _blocked(incident, attempt, verdict, situation)


def _from_proposed(incident: Incident, attempt: Attempt, situation: Situation, question: PolicyInput) -> Move | None:
    if attempt.decision is Decision.REJECTED:
        return _rejected(incident, attempt, situation)
    over = _over(incident, situation)
    if attempt.decision is Decision.EXPIRED:
        if over is not None:
            return _close(incident, *over)
        return _escalate(incident, "expired", f"the plan expired: {attempt.decision_because}", situation)
    if over is not None:
        return _expire(incident, attempt, over[1])
    paged = _hold_ended(incident, attempt, situation)
    if paged is not None:
        return paged
    if situation.now > (attempt.expires_at or 0.0):
        seconds = situation.config.approval_timeout_seconds
        what = "approved but blocked by a guard" if attempt.decision is Decision.APPROVED else "not approved"
        return _expire(incident, attempt, f"{what} for {seconds:.0f} s")
    if attempt.decision is not Decision.APPROVED:
        return None
    verdict = _check(incident, attempt, situation, question)
    if verdict.passed:
        return _start(incident, attempt, approved_by=attempt.decided_by)
    if verdict.guard == COMMITS:
        return _escalate(incident, COMMITS, f"{incident.diagnosis.because}; {verdict.because}", situation)
    if verdict.guard in (LENDER, NODE):
        return _decide_anew(incident, attempt, verdict)
    return _blocked(incident, attempt, verdict, situation)


def _check(incident: Incident, attempt: Attempt, situation: Situation, question: PolicyInput) -> GuardResult:
    """The guards, and at last whether the plan still has the nodes that it counts on."""
    verdict = check(attempt.plan, incident, situation)
    homeless = without_node(question, attempt.plan) if verdict.passed else ()
    if not homeless:
        return verdict
    return GuardResult(NODE, f"no node is left for {', '.join(str(t.replica) for t in homeless)}")


def _decide_anew(incident: Incident, attempt: Attempt, verdict: GuardResult) -> Append:
    """What the plan counts on has changed while it waited. One that is approved is made, and then proposed, again."""
    updated = IncidentUpdated(diagnosis=incident.diagnosis, relation=f"planned again, because {verdict.because}")
    return _about(incident, attempt, "decided_anew", updated)


def _from_acting(incident: Incident, attempt: Attempt, situation: Situation) -> Move | None:
    # After a restart it is unknown whether the action was performed. Performing is idempotent, so it is repeated; but
    # an action that has had no effect yet does not start during a pause.
    views = [(t, situation.fleet.find(t.replica)) for t in attempt.plan.targets]
    not_yet = any(view is not None and view.desired_incarnation == t.incarnation for t, view in views)
    begins = not_yet or (attempt.plan.action is ActionKind.STOP_JOB and situation.stopping is None)
    begins |= attempt.plan.action is ActionKind.END_ORPHAN
    if begins and situation.begun and situation.observing:
        because = f"it was begun, and is left half done because mode is observe: {attempt.plan.words}"
        return failed(incident, attempt, ActionFailure.REFUSED, because)
    if begins and not situation.begun and (situation.paused is not None or situation.observing):
        return None
    return Perform(plan=attempt.plan, number=attempt.number)


def _from_verifying(incident: Incident, attempt: Attempt, situation: Situation) -> Move | None:
    if attempt.plan.action is ActionKind.STOP_JOB:
        return _escalate(incident, "job_stopped", attempt.plan.because, situation)
    if incident.verified_at is not None:
        return _close(incident, IncidentOutcome.RESOLVED, attempt.plan.because)
    if attempt.plan.action is ActionKind.END_ORPHAN:
        return _orphan_gone(incident, attempt, situation)
    # A slow start that is cut short begins again, so each attempt after such a failure waits longer.
    num_slow = sum(a.failure is ActionFailure.NO_PROGRESS for a in incident.attempts)
    done_at = attempt.done_at or situation.now
    counted_from = _counted_from(incident, attempt.plan, situation, done_at)
    seen = verify(
        attempt.plan,
        fleet=situation.fleet,
        progress=situation.progress,
        besides=_ended_besides(incident, attempt.plan) if situation.fleet.places.scheduled else (),
        waiting=situation.waiting,
        own_faults=situation.worked - incident.at_fault(attempt.plan),
        done_at=counted_from,
        now=situation.now,
        verification_timeout_seconds=situation.config.verification_timeout_seconds * (1 + num_slow),
    )
    if seen.resolved:
        verified = IncidentVerified(digest=attempt.plan.digest, because=seen.because, serving_at=seen.serving_at)
        return _about(incident, attempt, "verified", verified)
    if situation.ended is not None:
        return _close(incident, IncidentOutcome.ESCALATED, f"the run ended before it was resolved: {situation.ended}")
    if seen.incomplete:
        # One more end of the targets would not bring it back.
        return _escalate(incident, "not_back", f"{attempt.plan.words}: {seen.because}", situation)
    if seen.failure is not None:
        before = f"; {counted_from - done_at:.0f} s without a controller do not count" if counted_from > done_at else ""
        return failed(incident, attempt, seen.failure, f"{seen.because}{before}")
    return None


def _counted_from(incident: Incident, plan: Plan, situation: Situation, done_at: float) -> float:
    """When the time of its verification begins. Only a controller makes replacements serve: the time does not run while
    an incident of the controller is open, and not before that one is back. It does if that incident waits for this one
    (a restart of the job), or was closed without a controller: then on-call was paged of it."""
    fleet = situation.fleet
    controllers = {str(c.replica): c for c in fleet.of_role(CONTROLLER)}
    if fleet.places.scheduled or not controllers or controllers.keys() & {t.replica for t in plan.targets}:
        return done_at
    serving = [c.changed_at for c in controllers.values() if c.living and c.state is ReplicaState.SERVING]
    if serving:
        return max([done_at, *(at for at in serving if at <= situation.now)])  # the clock may have been set back
    awaited = (
        i
        for i in situation.incidents
        if i.state is not S.CLOSED and controllers.keys() & {*i.named, *i.handled}
        if i.incident_id != incident.incident_id and not (i.attempt and AT_ONCE in i.attempt.held_by)
    )
    return situation.now if any(awaited) else done_at


def _ended_besides(incident: Incident, plan: Plan) -> list[tuple[str, int, int]]:
    """(replica, incarnation, least) of all that has to serve besides the targets: what ended with them, now or in
    earlier attempts, and other targets of those. `least`: the incarnation that will do at the timeout: where it is not
    known what ends too, all that may is named, and some of it runs on."""
    made = [a.plan for a in incident.attempts if a.started_at is not None and a.failure is not ActionFailure.REFUSED]
    found = {str(t.replica): (t.incarnation + 1, t.incarnation) for p in made for t in p.also_ends}
    found |= {str(t.replica): (t.incarnation + 1, t.incarnation + 1) for p in made for t in p.targets}
    return [(r, *wanted) for r, wanted in sorted(found.items()) if r not in {t.replica for t in plan.targets}]


def _orphan_gone(incident: Incident, attempt: Attempt, situation: Situation) -> Append | None:
    """Its agent no longer sees it."""
    plan, waited = attempt.plan, situation.now - (attempt.done_at or situation.now)
    if situation.absent_seconds >= CLEAR_SECONDS:
        because = f"process {plan.process.pid if plan.process else '?'} is gone"
        verified = IncidentVerified(digest=plan.digest, because=because, serving_at=situation.now)
        return _about(incident, attempt, "verified", verified)
    if situation.ended is not None:
        return _close(incident, IncidentOutcome.ESCALATED, f"the run ended before it was resolved: {situation.ended}")
    if waited > situation.config.verification_timeout_seconds:
        return failed(
            incident, attempt, ActionFailure.NO_PROGRESS, f"the process still runs {waited:.0f} s after it was ended"
        )
    return None


def failed(incident: Incident, attempt: Attempt, failure: str, because: str) -> Append:
    payload = ActionFailed(digest=attempt.plan.digest, failure=str(failure), because=because)
    return _about(incident, attempt, "failed", payload)


def done(incident: Incident, attempt: Attempt, result: Mapping[str, Any]) -> Append:
    return _about(incident, attempt, "done", ActionDone(digest=attempt.plan.digest, result=dict(result)))


def decision_key(incident_id: str, number: int) -> str:
    """Approval, rejection and expiry of one proposal share this key: the first one written is the decision."""
    return f"{incident_id}:decision:{number}"


def _start(incident: Incident, attempt: Attempt, approved_by: str = "") -> Append:
    started = ActionStarted(digest=attempt.plan.digest, plan=attempt.plan, approved_by=approved_by)
    return replace(_about(incident, attempt, "started", started), unless=OPERATOR_VETO)


def _blocked(incident: Incident, attempt: Attempt, verdict: GuardResult, situation: Situation) -> Append | None:
    if verdict.guard not in attempt.held_by:
        blocked = PlanBlocked(digest=attempt.plan.digest, guard=verdict.guard, because=verdict.because)
        return _about(incident, attempt, f"held:{verdict.guard}", blocked)
    if not verdict.page_oncall:
        return None
    because = f"{incident.diagnosis.because}; {verdict.because}"
    topic = verdict.guard
    # Nobody acts on a job that rolecall only observes but the one who was paged: what was found since is for them.
    if situation.observing and incident.failures:
        topic = FAILED_TOPIC
    elif situation.observing and topic in incident.page_topics and _decided_since(incident):
        topic = UPDATE_TOPIC
    return _page_oncall(incident, topic, because, situation)


def _decided_since(incident: Incident) -> bool:
    """Whether the newest diagnosis names another fault or other processes than the first."""
    first, newest = incident.first_diagnosis, incident.diagnosis
    return (first.fault_class, first.suspects) != (newest.fault_class, newest.suspects)


def _rejected(incident: Incident, attempt: Attempt, situation: Situation) -> Append:
    reason = f": {attempt.decision_because}" if attempt.decision_because else ""
    return _escalate(incident, "rejected", f"rejected by {attempt.decided_by}{reason}", situation)


def _hold_ended(incident: Incident, attempt: Attempt, situation: Situation) -> Append | None:
    """One notification that a hold ended, before its plan continues."""
    hold = attempt.hold
    if hold is None or hold.lifted or hold.active(situation.now):
        return None
    because = f"the hold by {hold.by} ended ({hold.because}): {attempt.plan.words} continues: {attempt.plan.because}"
    return _page_oncall(incident, f"hold_over:{hold.number}", because, situation)


def _expire(incident: Incident, attempt: Attempt, because: str) -> Append:
    name = incident.incident_id
    key = f"{name}:expired:{attempt.number}" if attempt.decision else decision_key(name, attempt.number)
    return Append(payload=PlanExpired(digest=attempt.plan.digest, because=because), key=key, unless=OPERATOR_VETO)


def _about(incident: Incident, attempt: Attempt, what: str, payload: Payload) -> Append:
    return Append(payload=payload, key=f"{incident.incident_id}:{what}:{attempt.number}")


def _close(incident: Incident, outcome: IncidentOutcome, because: str) -> Append:
    return Append(payload=IncidentClosed(outcome=str(outcome), because=because), key=f"{incident.incident_id}:closed")


def _escalate(incident: Incident, topic: str, because: str, situation: Situation) -> Append:
    """Page on-call, then close."""
    return _page_oncall(incident, topic, because, situation) or _close(incident, IncidentOutcome.ESCALATED, because)


def _page_oncall(incident: Incident, topic: str, because: str, situation: Situation) -> Append | None:
    """One page per topic; None if it was sent."""
    if topic in incident.page_topics:
        return None
    paged = OncallPaged(topic=topic, because=because, channel=situation.channel)
    return Append(payload=paged, key=f"{incident.incident_id}:page:{topic}")


def restart_waits(incident: Incident) -> bool:
    """Whether its plan is a restart that has not begun."""
    return incident.state in NOT_STARTED and incident.attempt is not None and incident.attempt.plan.action.is_restart


def needs_node(incident: Incident) -> bool:
    """Whether an open incident is at work on the fleet, or may need a free node."""
    if incident.state in UNDER_REPAIR or incident.state is S.OPEN:
        return True
    return incident.attempt is not None and incident.attempt.plan.action is ActionKind.REPLACE_NODE


def superseded(incident: Incident, incidents: Sequence[Incident]) -> str:
    """The incident that is the root cause of this one: a failure of the job's own code takes replicas with it."""
    if incident.diagnosis.fault_class.spec.remedy is Remedy.STOP:
        return ""
    for other in incidents:
        code = other.diagnosis.fault_class.spec.remedy is Remedy.STOP and other.opened_at >= incident.opened_at
        roles = {split_replica(r)[0] for r in incident.named}
        if code and (other.named.keys() & incident.named.keys() or other.diagnosis.role_at_fault in roles):
            return other.incident_id
    return ""


def _over(incident: Incident, situation: Situation) -> tuple[IncidentOutcome, str] | None:
    """How and why the fault ended without an action; None while it has not, or that is unknown."""
    root_cause = superseded(incident, situation.incidents)
    if root_cause:
        outcome = IncidentOutcome.ENDED if situation.observing else IncidentOutcome.SELF_RECOVERED
        return outcome, f"caused by {root_cause}: the job's own code failed"
    clear = situation.absent_seconds >= CLEAR_SECONDS
    unseen = situation.absent_seconds >= (UNSEEN_SECONDS if situation.observing else CLEAR_SECONDS)
    if not incident.diagnosis.suspects:
        if not unseen:
            return None
        if not situation.code_survives:
            return IncidentOutcome.ENDED, "the processes whose code failed have ended"
        return IncidentOutcome.SELF_RECOVERED, "no longer diagnosed"
    # A retry concerns the incarnation that our own attempt started, not the one first named.
    current = {**incident.named, **incident.touched}
    outcome, reasons = IncidentOutcome.SELF_RECOVERED, []
    for suspect in incident.diagnosis.suspects:
        incarnation = current.get(suspect.replica)
        view = situation.fleet.find(suspect.replica) if suspect.replica else None
        if view is not None and incarnation is not None and view.incarnation > incarnation:
            standby = is_standby(suspect.replica)  # ready is all that it gets, until a promotion uses it up
            used_up = standby and view.state is ReplicaState.STOPPED and view.started
            if not used_up and view.state not in (LIVING if standby else (ReplicaState.SERVING,)):
                return None
            is_now = "was ready" if used_up else f"is {view.state}"
            reasons.append(f"{suspect.replica}#{view.incarnation} replaced it and {is_now}")
            continue
        if situation.fates is not None:
            fate, seen = situation.fates.get(suspect, (Fate.UNKNOWN, ""))
        else:
            moves, seen = situation.progress.get(suspect.replica, (False, ""))
            fate = Fate.WORKS if moves else Fate.UNKNOWN
        if incident.requested_by_operator:
            return None
        if not suspect.replica and unseen:
            reasons.append(f"{suspect.node}: no longer diagnosed")
        elif suspect.replica and fate is Fate.ENDED and unseen:
            outcome = IncidentOutcome.ENDED
            reasons.append(seen)
        elif suspect.replica and fate is Fate.WORKS and clear:
            reasons.append(seen)
        else:
            return None
    return outcome, "; ".join(reasons)


def verify(
    plan: Plan,
    *,
    fleet: FleetView,
    progress: Progress,
    done_at: float,
    now: float,
    verification_timeout_seconds: float,
    besides: Collection[tuple[str, int, int]] = (),
    waiting: frozenset[str] = frozenset(),
    own_faults: frozenset[str] = frozenset(),
) -> Verification:
    """State of the performed plan at `now` (wall seconds): the replacement serves and makes progress, or it failed.

    The runtime reports serving (for a rollout: after the proof of its weights), the detector reports progress. A
    replacement that died fails the action at once. `waiting`: replicas that are healthy and have no work. One that
    serves and still waits at the timeout has not failed; a trainer, or an engine beside one, that is ready may have to
    wait for the end of a long step, `JOIN_FACTOR` times as long. So may a standby that starts: nobody waits for it, and
    the runtime and the detectors end a start that takes too long; and a replica of a job that rolecall did not start:
    nobody has proved there that it serves, only its work shows it. `own_faults`: healthy replicas that a restart took
    down and that have worked since: the end of one is not the restart's failure. `besides`: as of
    `_ended_besides`; whether that works is another diagnosis.
    """
    timed_out = now - done_at > verification_timeout_seconds
    too_late = now - done_at > JOIN_FACTOR * verification_timeout_seconds
    all_join = True
    seen: list[str] = []
    missing: list[str] = []
    serving_at = 0.0
    for target in plan.targets:
        wanted = target.incarnation + 1
        view = fleet.find(target.replica)
        name = f"{target.replica}#{wanted}"
        # A standby does no work until it is promoted: being ready is all that can be verified.
        standby = is_standby(target.replica)
        if view is None:
            missing.append(f"{name} is no longer part of the run")
            all_join = False
        elif view.incarnation >= wanted and view.state in DEAD and target.replica in own_faults:
            seen.append(f"{name} has worked; its end is another fault")
        elif standby and view.incarnation >= wanted and view.state is ReplicaState.STOPPED and view.started:
            seen.append(f"{name} was ready: {view.because}")  # a promotion has used it up
        elif view.incarnation >= wanted and view.state in DEAD and view.because.startswith(NO_PROCESS):
            because = f"{target.replica}#{view.incarnation} was {view.because}"
            return Verification(because=because, failure=ActionFailure.NOT_STARTED)
        elif view.incarnation >= wanted and view.state in DEAD:
            because = (
                f"{target.replica}#{view.incarnation} died before its first progress: {view.because or view.state}"
            )
            return Verification(because=because, failure=ActionFailure.DIED)
        elif view.incarnation < wanted or view.state not in (LIVING if standby else (ReplicaState.SERVING,)):
            missing.append(f"{name} is {view.state if view.incarnation >= wanted else 'not started'}")
            joins_later = view.role == TRAINER or view.partner is not None
            is_ready = view.incarnation >= wanted and view.state is ReplicaState.READY
            starts = standby and view.incarnation >= wanted and view.state is ReplicaState.STARTING
            all_join &= starts or (joins_later and is_ready and target.replica in waiting)
        elif standby:
            seen.append(f"{name} is ready")
        else:
            progressing, text = progress.get(target.replica, (False, "no data on its progress"))
            waits = not progressing and target.replica in waiting
            if waits and timed_out and not fleet.places.scheduled:
                progressing, text = True, f"serves and waits for work; {text}"
            all_join &= progressing or (waits and fleet.places.scheduled)
            (seen if progressing else missing).append(f"{name}: {text}")
        serving_at = max(serving_at, view.changed_at if view else 0.0)
    not_back = [
        f"{replica}#{wanted}, which was ended too, is not back"
        for replica, wanted, least in besides
        if (view := fleet.find(replica)) is None
        or view.incarnation < (least if timed_out else wanted)
        or view.state is not ReplicaState.SERVING
    ]
    if not missing and not not_back:
        return Verification(because="; ".join(seen), resolved=True, serving_at=serving_at)
    because = f"after {now - done_at:.1f} s " + "; ".join([*missing, *not_back])
    if not_back:
        return Verification(because=because, incomplete=timed_out)
    failed_to_work = timed_out and (too_late or not all_join)
    return Verification(because=because, failure=ActionFailure.NO_PROGRESS if failed_to_work else None)


def events_before_plan(
    incident: Incident,
    plan: Plan,
    *,
    quarantined: Collection[str],
    known: Collection[str],
    share_max: float,
    channel: str,
) -> list[Append]:
    """Events to write before `plan` is performed: the quarantine of a faulty node that a replica leaves.

    Only nodes that the diagnosis names: a retry may leave a node that is no suspect. And only a limited share of all
    nodes: a false positive about a whole rack must not leave a run without nodes. `quarantined`: nodes in quarantine;
    `known`: all nodes of the run.
    """
    leaves = plan.action is ActionKind.REPLACE_NODE or plan.action.is_restart
    if not leaves or not leaves_node(incident.diagnosis) or not share_max:
        return []
    faulty = {str(t.node) for t in plan.targets} & {str(s.node) for s in incident.diagnosis.suspects}
    take, left = to_quarantine(faulty, quarantined, known, share_max)
    name = incident.incident_id
    because = f"{name}: {incident.diagnosis.because}"
    quarantines = [NodeQuarantined(node=node, by=BY_WATCH, because=because) for node in take]
    events = [Append(payload=quarantine, key=f"{name}:quarantine:{quarantine.node}") for quarantine in quarantines]
    if left:
        because = (
            f"{', '.join(left)} should be quarantined, but {len(quarantined) + len(take)} of {len(known)} nodes "
            f"already are: the limit is {share_max:.0%}"
        )
        paged = OncallPaged(topic=QUARANTINE_TOPIC, because=because, channel=channel)
        events.append(Append(payload=paged, key=f"{name}:page:{QUARANTINE_TOPIC}"))
    return events


def to_quarantine(
    faulty: Collection[str], quarantined: Collection[str], known: Collection[str], share_max: float
) -> tuple[list[str], list[str]]:
    """Splits faulty nodes into those to quarantine and those beyond the limit."""
    take: list[str] = []
    left: list[str] = []
    for node in sorted(set(faulty) - set(quarantined)):
        within = len({*quarantined, *take, node}) <= share_max * len({*known, node})
        (take if within else left).append(node)
    return take, left
