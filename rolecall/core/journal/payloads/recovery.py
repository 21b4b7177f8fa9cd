"""Payloads of diagnosis and recovery: incidents, plans, actions, nodes, operator commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from rolecall.core.journal.payloads.contract import (
    OPERATOR,
    SESSION,
    WATCH,
    K,
    Payload,
    StoredDiagnosis,
    StoredFinding,
    StoredPlan,
    event,
)

NO_ANSWER_STATUS, NOT_SENT_STATUS = -1, -1000
"""In place of a status, of a call (`CallEnded`): it may have had its effect or not; it had none. Commands that a signal
ended have its negative number."""


@event(K.LEASE_ACQUIRED, WATCH)
class LeaseAcquired(Payload):
    """A watch may act from now on; the previous one may not."""

    holder: Annotated[str, "host and pid of the watch"]
    fence: Annotated[int, "fencing number, one more than the last"]
    mode: Annotated[str, "`observe`, `approve` or `act`"]
    orphans_mode: Annotated[str, "the same of incidents of orphans; empty: as `mode`"] = ""


@event(K.INCIDENT_OPENED, f"{WATCH}, {OPERATOR}")
class IncidentOpened(Payload):
    """A fault was diagnosed, or an operator asked for a replica to be replaced."""

    diagnosis: Annotated[StoredDiagnosis, "the fault, its suspects and the evidence"]
    window: Annotated[str, "name of the stored input of the detectors"]


@event(K.INCIDENT_UPDATED, WATCH)
class IncidentUpdated(Payload):
    """The diagnosis of an incident changed. Those before it stay part of the incident."""

    diagnosis: Annotated[StoredDiagnosis, "the newest diagnosis, which decides on the response"]
    relation: Annotated[
        str, "how it is related to those before it: more is known of the fault, or it is a second one"
    ] = ""


@event(K.PLAN_CREATED, WATCH)
class PlanCreated(Payload):
    """Policy decided on the response to an incident."""

    plan: Annotated[StoredPlan, "action and targets; an approval is bound to its digest"]
    page_oncall: Annotated[bool, "on-call is paged when the plan is to do nothing"]
    outcome: Annotated[str, "outcome of the incident when the plan is to do nothing"]
    question: Annotated[Mapping[str, Any], "input of policy (`PolicyInput`), so that the decision can be replayed"]


@event(K.PLAN_BLOCKED, WATCH)
class PlanBlocked(Payload):
    """A guard blocks a plan. Written once for each guard and plan."""

    digest: Annotated[str, "digest of the plan"]
    guard: Annotated[str, "name of the guard"]
    because: Annotated[str, "limit that would be exceeded"]


@event(K.PLAN_PROPOSED, WATCH)
class PlanProposed(Payload):
    """A plan waits for an operator's approval."""

    digest: Annotated[str, "digest of the plan"]
    plan: Annotated[StoredPlan, "the plan"]
    expires_at: Annotated[float, "when the proposal expires, wall seconds"]


@event(K.PLAN_APPROVED, OPERATOR)
class PlanApproved(Payload):
    """An operator approved a proposal."""

    digest: Annotated[str, "digest of the plan"]
    by: Annotated[str, "user"]


@event(K.PLAN_REJECTED, OPERATOR)
class PlanRejected(Payload):
    """An operator rejected a plan that had not begun."""

    digest: Annotated[str, "digest of the plan"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason, may be empty"]


@event(K.PLAN_EXPIRED, WATCH)
class PlanExpired(Payload):
    """A proposal was not approved in time, or its fault is over."""

    digest: Annotated[str, "digest of the plan"]
    because: Annotated[str, "which of the two"]


@event(K.HOLD_PLACED, OPERATOR)
class HoldPlaced(Payload):
    """An operator holds a plan: nothing of it begins before `until`."""

    digest: Annotated[str, "digest of the plan"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason"]
    until: Annotated[float, "end of the hold, wall seconds"]


@event(K.HOLD_LIFTED, OPERATOR)
class HoldLifted(Payload):
    """An operator ended a hold early."""

    digest: Annotated[str, "digest of the plan"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason, may be empty"]


@event(K.ACTION_STARTED, WATCH)
class ActionStarted(Payload):
    """The guards let a plan pass; the actuator is called next."""

    digest: Annotated[str, "digest of the plan"]
    plan: Annotated[StoredPlan, "the plan"]
    approved_by: Annotated[str, "user that approved it; empty when no approval was needed"] = ""


@event(K.ACTION_DONE, WATCH)
class ActionDone(Payload):
    """The actuator performed a plan; verification begins."""

    digest: Annotated[str, "digest of the plan"]
    result: Annotated[Mapping[str, Any], "`done`, `because` and the actuator's own facts"]


@event(K.ACTION_FAILED, WATCH)
class ActionFailed(Payload):
    """An action was refused, timed out, or its replacement died."""

    digest: Annotated[str, "digest of the plan"]
    failure: Annotated[str, "which of them (`ActionFailure`)"]
    because: Annotated[str, "what happened"]


@event(K.INCIDENT_VERIFIED, WATCH)
class IncidentVerified(Payload):
    """The replacements make progress."""

    digest: Annotated[str, "digest of the plan"]
    because: Annotated[str, "progress that was observed"]
    serving_at: Annotated[float, "when the last replacement began to serve, wall seconds"]


@event(K.INCIDENT_CLOSED, WATCH)
class IncidentClosed(Payload):
    """Nothing more is done about an incident."""

    outcome: Annotated[str, "`IncidentOutcome`: resolved, self_recovered, tolerated, ended or escalated"]
    because: Annotated[str, "why"]


@event(K.ONCALL_PAGED, f"{WATCH}, {SESSION}")
class OncallPaged(Payload):
    """On-call is paged, or would be: without a notification channel the reason is only logged. Once for each topic of
    an incident."""

    because: Annotated[str, "reason of the page"]
    channel: Annotated[str, "`NotifyFormat` of the channel, or `log`: no notification channel is configured"]
    topic: Annotated[str, "its topic, such as the name of a guard"]


@event(K.DIAGNOSIS_REVIEWED, OPERATOR)
class DiagnosisReviewed(Payload):
    """An operator reviewed a diagnosis; the newest review counts, also after the incident is closed."""

    verdict: Annotated[str, "`right` or `wrong`"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason, may be empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFileRecord:
    """A file below the run's directory."""

    name: str
    bytes: int
    sha256: str
    kind: str


@event(K.EVIDENCE_COLLECTED, WATCH)
class EvidenceCollected(Payload):
    """The agents of an incident's nodes answered the requests for evidence."""

    because: Annotated[str, "collected evidence, and its result"]
    files: Annotated[tuple[EvidenceFileRecord, ...], "name below the run's directory, bytes, sha256 and kind"]
    statements: Annotated[tuple[str, ...], "findings of the evidence, one sentence each"]
    findings: Annotated[tuple[StoredFinding, ...], "findings based on it"]
    missing: Annotated[tuple[str, ...], "evidence that could not be collected, and why"]
    seconds: Annotated[float, "duration of the collection, seconds"]


@event(K.RECOVERY_PAUSED, OPERATOR)
class RecoveryPaused(Payload):
    """No action begins until recovery is resumed."""

    by: Annotated[str, "user"]
    because: Annotated[str, "reason"]


@event(K.RECOVERY_RESUMED, OPERATOR)
class RecoveryResumed(Payload):
    """Actions may begin again."""

    by: Annotated[str, "user"]


@event(K.NODE_QUARANTINED, f"{OPERATOR}, {WATCH}")
class NodeQuarantined(Payload):
    """No replica is placed on a node any more; those on it continue."""

    node: Annotated[str, "the node"]
    by: Annotated[str, "user, or the watch"]
    because: Annotated[str, "reason"]


@event(K.NODE_DRAINED, OPERATOR)
class NodeDrained(Payload):
    """The replicas of a quarantined node are moved to other nodes."""

    node: Annotated[str, "the node"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason"]
    incidents: Annotated[tuple[str, ...], "incidents opened to move its replicas"]


@event(K.NODE_RETURNED_TO_SERVICE, OPERATOR)
class NodeReturnedToService(Payload):
    """A quarantine ended: the node may take replicas again."""

    node: Annotated[str, "the node"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason"]


@event(K.NODE_LENT, WATCH)
class NodeLent(Payload):
    """A healthy replica ends and lends its node to one that has lost its own."""

    replica: Annotated[str, "the lender"]
    incarnation: Annotated[int, "its incarnation that ends"]
    node: Annotated[str, "its node"]
    to: Annotated[str, "the replica that gets it"]
    because: Annotated[str, "why this replica"]


@event(K.LENDER_RESUMED, WATCH)
class LenderResumed(Payload):
    """A node is free: a replica that had lent its own is started again."""

    replica: Annotated[str, "the lender"]
    incarnation: Annotated[int, "its incarnation that is started"]
    node: Annotated[str, "the free node"]
    because: Annotated[str, "why it runs again"]


@event(K.CALL_STARTED, WATCH)
class CallStarted(Payload):
    """An actuator is about to make a call that changes another system."""

    actuator: Annotated[str, "its name"]
    call: Annotated[str, "the exact call: a command, or method, URL and body"]
    words: Annotated[str, "what the call does"]

    @property
    def reason(self) -> str:
        return f"{self.words}: {self.call}"


def status_text(status: int) -> str:
    """`status 409`, `no answer` or `not sent`."""
    return {NO_ANSWER_STATUS: "no answer", NOT_SENT_STATUS: "not sent"}.get(status, f"status {status}")


@event(K.CALL_ENDED, WATCH)
class CallEnded(Payload):
    """Reply to that call."""

    actuator: Annotated[str, "its name"]
    status: Annotated[
        int,
        "exit code or HTTP status; -1: no answer, it may have had its effect or not; -1000: not sent, it had none",
    ]
    text: Annotated[str, "output or body, shortened"]

    @property
    def reason(self) -> str:
        status = status_text(self.status)
        return f"{status}: {self.text}" if self.text else status


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInCheck:
    """One part of a burn-in. `passed` None: it could not be run here, see `because`."""

    name: str
    passed: bool | None
    because: str
    values: Mapping[str, Any]


@event(K.BURN_IN_FINISHED, OPERATOR)
class BurnInFinished(Payload):
    """A burn-in of a node is complete: load with known results, which are compared."""

    node: Annotated[str, "the node"]
    by: Annotated[str, "user"]
    passed: Annotated[bool, "no check failed, and at least one could be run"]
    seconds: Annotated[float, "duration, seconds"]
    checks: Annotated[tuple[BurnInCheck, ...], "name, passed (null: not possible here), because and values of each"]


@event(K.JOB_STOP_REQUESTED, WATCH)
class JobStopRequested(Payload):
    """Recovery asks the runtime to stop the job."""

    because: Annotated[str, "why"]
