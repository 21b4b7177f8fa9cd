"""The journal's event contract: the kinds of event, and one frozen payload a kind, in one table.

Writers append payloads, readers get them back as `Event.payload`; no other code reads the JSON of a stored body. A body
that does not match its payload (a field is missing, unknown or of another type) means that this event is damaged.

To change a payload: a new field with a default keeps the version, because stored bodies without it can still be read;
anything else raises `version`. `docs/reference/events.md` is generated from this module (tools/reference_pages.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError

from rolecall.core.diagnosis import Diagnosis, Finding, Plan


class EventKind(StrEnum):
    # the run (rl_runtime)
    RUN_STARTED = "run_started"
    RUN_ENDED = "run_ended"
    REPLICA_STARTING = "replica_starting"
    REPLICA_READY = "replica_ready"
    REPLICA_LOST = "replica_lost"
    REPLICA_STOPPED = "replica_stopped"
    EPOCH_ADVANCED = "epoch_advanced"
    STEP_COMMITTED = "step_committed"
    STEP_INTERRUPTED = "step_interrupted"
    MICROBATCH_RECOMPUTED = "microbatch_recomputed"
    MICROBATCH_COMPARED = "microbatch_compared"
    REWARDS_COMPARED = "rewards_compared"
    WEIGHTS_ADMITTED = "weights_admitted"
    WEIGHTS_REJECTED = "weights_rejected"
    REQUESTS_REASSIGNED = "requests_reassigned"
    CHECKPOINT_WRITTEN = "checkpoint_written"
    EVALUATION_FINISHED = "evaluation_finished"
    COMPONENT_RESTARTED = "component_restarted"
    # diagnosis and recovery
    LEASE_ACQUIRED = "lease_acquired"
    INCIDENT_OPENED = "incident_opened"
    INCIDENT_UPDATED = "incident_updated"
    PLAN_CREATED = "plan_created"
    PLAN_BLOCKED = "plan_blocked"
    PLAN_PROPOSED = "plan_proposed"
    PLAN_APPROVED = "plan_approved"
    PLAN_REJECTED = "plan_rejected"
    PLAN_EXPIRED = "plan_expired"
    HOLD_PLACED = "hold_placed"
    HOLD_LIFTED = "hold_lifted"
    ACTION_STARTED = "action_started"
    ACTION_DONE = "action_done"
    ACTION_FAILED = "action_failed"
    INCIDENT_VERIFIED = "incident_verified"
    INCIDENT_CLOSED = "incident_closed"
    ONCALL_PAGED = "oncall_paged"
    DIAGNOSIS_REVIEWED = "diagnosis_reviewed"
    EVIDENCE_COLLECTED = "evidence_collected"
    RECOVERY_PAUSED = "recovery_paused"
    RECOVERY_RESUMED = "recovery_resumed"
    NODE_QUARANTINED = "node_quarantined"
    NODE_DRAINED = "node_drained"
    NODE_RETURNED_TO_SERVICE = "node_returned_to_service"
    NODE_LENT = "node_lent"
    LENDER_RESUMED = "lender_resumed"
    CALL_STARTED = "call_started"
    CALL_ENDED = "call_ended"
    BURN_IN_FINISHED = "burn_in_finished"
    JOB_STOP_REQUESTED = "job_stop_requested"


K = EventKind
SCHEMA_FIELD = "schema"
"""Key of a body's version in the stored JSON; a body of version 1 has none."""
NO_ANSWER_STATUS, NOT_SENT_STATUS = -1, -1000
"""In place of a status, of a call (`CallEnded`): it may have had its effect or not; it had none. Commands that a signal
ended have its negative number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Base of all payloads. `kind` is set when a payload is registered."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    kind: ClassVar[K]

    @property
    def reason(self) -> str:
        """Why it happened, or why its plan was made; empty for kinds without a reason."""
        return str(getattr(getattr(self, "plan", self), "because", ""))

    def to_body(self) -> dict[str, Any]:
        """The stored JSON: every field, also those with a default."""
        body = {name: plain_value(getattr(self, name)) for name in PAYLOADS[self.kind].names}
        version = PAYLOADS[self.kind].version
        return body if version == 1 else {**body, SCHEMA_FIELD: version}


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSpec:
    """A row of the table. `owner`: the part of rolecall that writes events of this kind."""

    kind: K
    payload: type[Payload]
    version: int
    owner: str
    names: tuple[str, ...]  # of the fields

    @property
    def summary(self) -> str:
        return " ".join((self.payload.__doc__ or "").split())

    def read(self, body: Mapping[str, Any]) -> Payload:
        """
        Raises:
            ValueError, TypeError, KeyError: not a body of this kind and version; the text names the field.
        """
        if SCHEMA_FIELD in body or self.version != 1:
            version = body.get(SCHEMA_FIELD, 1)
            if version != self.version:
                raise ValueError(f"{self.kind} has version {version!r}, this rolecall reads {self.version}")
            body = {name: value for name, value in body.items() if name != SCHEMA_FIELD}
        try:
            found: Payload = _adapter(self.kind).validator.validate_python(body)
        except ValidationError as e:
            raise ValueError(f"{self.kind}: {_problems(e)}") from None
        return found


@cache
def _adapter(kind: K) -> TypeAdapter[Any]:
    """Built at the first event of a kind, because building all of them would slow down every import of the journal."""
    return TypeAdapter(PAYLOADS[kind].payload)


PAYLOADS: dict[K, PayloadSpec] = {}
"""The table. Complete: a test compares it with `EventKind`."""

P = TypeVar("P", bound=Payload)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _event(kind: K, owner: str, *, version: int = 1) -> Callable[[type[P]], type[P]]:
    """Makes a class a frozen dataclass, and registers it as the payload of a kind."""

    def register(cls: type[P]) -> type[P]:
        payload = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        payload.kind = kind
        names = tuple(f.name for f in fields(payload))
        PAYLOADS[kind] = PayloadSpec(kind=kind, payload=payload, version=version, owner=owner, names=names)
        return payload

    return register


def _stored(of: type[Any]) -> PlainValidator:
    """Reads a value that has its own `to_dict` and `from_dict`."""
    return PlainValidator(lambda value: value if isinstance(value, of) else of.from_dict(value))


def plain_value(value: Any) -> Any:
    """As JSON stores it."""
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "to_dict"):
        return plain_value(value.to_dict())
    if isinstance(value, Mapping):
        return {str(k): plain_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number, and a NaN loss must neither be dropped nor stop its writer
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False))


StoredDiagnosis = Annotated[Diagnosis, _stored(Diagnosis)]
StoredFinding = Annotated[Finding, _stored(Finding)]
StoredPlan = Annotated[Plan, _stored(Plan)]

SUPERVISOR, CONTROLLER, WATCH = "supervisor", "controller", "watch"
OPERATOR, SESSION = "operator command", "session"


@_event(K.RUN_STARTED, SUPERVISOR)
class RunStarted(Payload):
    """The run's directory is written; replicas are about to be placed."""

    seed: Annotated[int, "seed of the job"]
    config_digest: Annotated[str, "digest of the job file"]
    roles: Annotated[Mapping[str, int], "role -> number of replicas, standbys included"]
    nodes: Annotated[tuple[str, ...], "nodes of the run"]
    num_steps: Annotated[int | None, "optimizer steps that the job runs for"] = None
    ranks: Annotated[Mapping[str, int], "role -> ranks of each replica, where it has several"] = field(
        default_factory=dict
    )
    mode: Annotated[str, "`async`, `semi_sync` or `sync`"] = "async"
    gpus: Annotated[Mapping[str, int], "node -> GPUs; empty: the job computes on CPUs"] = field(default_factory=dict)
    memory_bytes: Annotated[Mapping[str, int], "role -> host memory of a replica at its peak, an estimate"] = field(
        default_factory=dict
    )

    @property
    def num_hybrids(self) -> int:
        """Trainers that share their node with the rollout of the same number."""
        return 0 if self.mode == "async" else self.roles.get("trainer", 0)


@_event(K.RUN_ENDED, SESSION)
class RunEnded(Payload):
    """The run is over; only late evidence and reviews are written after it."""

    outcome: Annotated[str, "`done`, `failed` or `interrupted`"]
    because: Annotated[str, "why it ended"]
    faults_wanted: Annotated[int, "faults that the session requested"] = 0


@_event(K.REPLICA_STARTING, SUPERVISOR)
class ReplicaStarting(Payload):
    """An incarnation of a replica is being created."""

    replica: Annotated[str, "`role/index`"]
    incarnation: Annotated[int, "from 1; grows with every start"]
    node: Annotated[str, "node on which it starts"]
    because: Annotated[str, "why it is started"]


@_event(K.REPLICA_READY, SUPERVISOR)
class ReplicaReady(Payload):
    """A replica's process has started; it does not serve yet."""

    replica: Annotated[str, "`role/index`"]
    incarnation: Annotated[int, "from 1"]
    node: Annotated[str, "node on which it runs"]
    because: Annotated[str, "why it was started"]
    pid: Annotated[int, "process id"]
    start_ticks: Annotated[int, "start time of the process, clock ticks since boot"]
    from_standby: Annotated[str, "the standby that became this replica; empty when it was started anew"]


@_event(K.REPLICA_LOST, f"{SUPERVISOR}, {CONTROLLER}")
class ReplicaLost(Payload):
    """An incarnation has died, or was fenced."""

    replica: Annotated[str, "`role/index`"]
    incarnation: Annotated[int, "the incarnation that is lost"]
    because: Annotated[str, "how it was detected"]
    node: Annotated[str, "node on which it ran"]


@_event(K.REPLICA_STOPPED, SUPERVISOR)
class ReplicaStopped(Payload):
    """An incarnation was stopped intentionally."""

    replica: Annotated[str, "`role/index`"]
    incarnation: Annotated[int, "the incarnation that was stopped"]
    because: Annotated[str, "why it was stopped"]
    node: Annotated[str, "node on which it ran"]


@_event(K.EPOCH_ADVANCED, f"{CONTROLLER}, through the journal")
class EpochAdvanced(Payload):
    """The trainers' membership changed. Written in the transaction that stores the epoch."""

    epoch: Annotated[int, "number of the new epoch, from 1"]
    members: Annotated[tuple[tuple[str, int], ...], "(replica, incarnation) of each trainer, sorted"]
    because: Annotated[str, "what changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainHead:
    """Last link of a hash chain: how many entries it has, and the hash that covers them all."""

    position: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetProgress:
    """How far a run is in its dataset. Reasons are short texts without numbers."""

    rows: int
    rows_seen: int
    dropped: Mapping[str, int]

    @property
    def epoch(self) -> int:
        """From 0."""
        return self.rows_seen // max(1, self.rows)

    @property
    def epoch_share(self) -> float:
        """Of the running epoch, 0 to 1."""
        return self.rows_seen / max(1, self.rows) - self.epoch


@_event(K.STEP_COMMITTED, CONTROLLER)
class StepCommitted(Payload):
    """An optimizer step is part of the trainers' state."""

    step: Annotated[int, "optimizer step, from 0"]
    epoch: Annotated[int, "epoch that computed it"]
    policy_version: Annotated[int, "version of the weights after it: `step + 1`"]
    groups: Annotated[tuple[str, ...], "prompt groups that it trained on"]
    microbatches: Annotated[tuple[str, ...], "microbatches that it trained on"]
    reward: Annotated[float | None, "mean reward; null if unknown after a restart of the controller"]
    loss: Annotated[float | None, "loss; null when no trainer still has the result"]
    grad_norm: Annotated[float | None, "norm of the gradient before clipping; null as for `loss`"]
    log_ratio_max: Annotated[
        float | None,
        "largest difference of log-probabilities between trainer and engine, nats; null when none was compared",
    ]
    health: Annotated[
        Mapping[str, float | None], "policy-health metrics by name; null: the step had nothing to measure"
    ]
    tokens: Annotated[int, "tokens trained on"]
    seconds: Annotated[float, "wall time of the step, seconds"]
    attempts: Annotated[int, "number of attempts; 0 when a restarted controller found it committed"]
    staleness: Annotated[int, "largest age of a trained token, in policy versions"]
    gradient_digest: Annotated[str, "digest of the reduced gradient, equal on all trainers"]
    ledger: Annotated[ChainHead, "head of the ledger when the step was assigned"]
    versions: Annotated[Mapping[str, int], "rollout replica -> policy version that it serves"]
    log_ratios: Annotated[
        Mapping[str, float], "`log_ratio_max` by engine, `role/index#incarnation`; only those that were compared"
    ] = field(default_factory=dict)
    dataset: Annotated[
        DatasetProgress | None,
        "rows of the dataset, rows whose groups were issued so far over all epochs, and groups dropped so far by "
        "reason; null for a built-in task",
    ] = None


@_event(K.STEP_INTERRUPTED, CONTROLLER)
class StepInterrupted(Payload):
    """An attempt at a step failed; the remaining trainers repeat the step."""

    step: Annotated[int, "step that was interrupted"]
    epoch: Annotated[int, "epoch that failed"]
    because: Annotated[str, "errors of the replicas that failed first"]
    lost: Annotated[tuple[str, ...], "trainers that are lost"]
    attempt: Annotated[int, "number of the attempt, from 1; 0 when all trainers were lost"] = 0
    refused_checkpoints: Annotated[tuple[str, ...], "checkpoints that could not be used, with reasons"] = ()


@_event(K.MICROBATCH_RECOMPUTED, CONTROLLER)
class MicrobatchRecomputed(Payload):
    """A microbatch whose loss or gradient was not finite was computed again within its step."""

    step: Annotated[int, "optimizer step"]
    microbatch: Annotated[str, "the microbatch"]
    groups: Annotated[tuple[str, ...], "its prompt groups"]
    from_replica: Annotated[str, "trainer at which it was not finite first"]
    by: Annotated[str, "trainer that computed it again; `from_replica` itself if there is no other"]
    finite: Annotated[bool, "whether it was finite then: if so the first trainer is suspect, else the data or the code"]


@_event(K.MICROBATCH_COMPARED, CONTROLLER)
class MicrobatchCompared(Payload):
    """A microbatch of a committed step had a loss or gradient norm far outside those of the run."""

    step: Annotated[int, "optimizer step"]
    microbatch: Annotated[str, "the microbatch"]
    groups: Annotated[tuple[str, ...], "its prompt groups"]
    from_replica: Annotated[str, "trainer that computed it first"]
    loss: Annotated[float, "its loss there"]
    grad_norm: Annotated[float, "norm of its gradient there, before clipping"]
    because: Annotated[str, "what is unusual, and the limit"]
    by: Annotated[str, "trainer that computed it again; `from_replica` itself if there is no other; empty: none did"]
    loss_again: Annotated[float | None, "its loss at `by`, used by the committed step"]
    grad_norm_again: Annotated[float | None, "norm of its gradient at `by`"]
    verdict: Annotated[
        str,
        "`wrong`: different, usual numbers at `by`, so the first trainer is suspect; `same`: the data or the policy; "
        "`unclear`: different, also unusual numbers; `several`: several trainers had some in one step, so it was not "
        "computed again",
    ]


@_event(K.REWARDS_COMPARED, CONTROLLER)
class RewardsCompared(Payload):
    """Reward workers gave the same answers different rewards."""

    group: Annotated[str, "prompt group"]
    rewards: Annotated[
        Mapping[str, tuple[float, ...]],
        "scorer, `role/index#incarnation` -> reward of each sample; the controller scores if there is no third worker",
    ]
    odd: Annotated[
        str,
        "scorer that two others contradict, or whose rewards are not finite where another's are; empty: all differ",
    ]
    used: Annotated[
        tuple[float, ...], "rewards used for training: those of the two, or the finite ones; else the first ones"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionProof:
    """An engine's proof of its weights; see `WeightProof` of the runtime's protocol."""

    manifest_digest: str
    received_digest: str
    storage_digest: str
    covered: int
    uncovered: tuple[str, ...]
    canary_logprobs: tuple[float, ...]


@_event(K.WEIGHTS_ADMITTED, CONTROLLER)
class WeightsAdmitted(Payload):
    """An engine proved that it holds a policy version; it may serve it."""

    replica: Annotated[str, "engine that loaded the weights"]
    incarnation: Annotated[int, "its incarnation"]
    epoch: Annotated[int, "epoch of the trainers that published the version"]
    policy_version: Annotated[int, "version that it holds now"]
    holder: Annotated[str, "replica that sent the bytes"]
    bytes: Annotated[int, "bytes received"]
    seconds: Annotated[float, "time to receive, load and prove, seconds"]
    proof: Annotated[AdmissionProof, "digests, coverage and canary log-probabilities"]


@_event(K.WEIGHTS_REJECTED, CONTROLLER)
class WeightsRejected(Payload):
    """An engine's proof does not match the manifest; it does not serve this version."""

    replica: Annotated[str, "engine that loaded the weights"]
    incarnation: Annotated[int, "its incarnation"]
    policy_version: Annotated[int, "version that it should hold"]
    part: Annotated[str, "part of the proof that failed"]
    tensor: Annotated[str, "tensor that differs, where one is known"]
    because: Annotated[str, "what differs"]


@_event(K.REQUESTS_REASSIGNED, CONTROLLER)
class RequestsReassigned(Payload):
    """Unfinished requests moved to other engines, or to a new controller."""

    from_replica: Annotated[str, "replica that held them"]
    to: Annotated[tuple[str, ...], "replicas that took them; empty: they wait for one"]
    num_requests: Annotated[int, "requests that moved"]
    num_groups: Annotated[int, "prompt groups that they belong to"]
    tokens_kept: Annotated[int, "streamed tokens that the requests keep"]
    because: Annotated[str, "why they moved"]
    from_incarnation: Annotated[int | None, "its incarnation; null when it was a controller"] = None
    num_cut: Annotated[int, "requests that are cut and trained on; their next windows continue elsewhere"] = 0
    tokens_lost: Annotated[int, "tokens that were generated but not streamed"] = 0


@_event(K.CHECKPOINT_WRITTEN, CONTROLLER)
class CheckpointWritten(Payload):
    """A checkpoint is complete on disk."""

    path: Annotated[str, "its directory"]
    step: Annotated[int, "last step that it includes"]


@_event(K.EVALUATION_FINISHED, CONTROLLER)
class EvaluationFinished(Payload):
    """The policy was evaluated on held-out prompts. Its answers are never trained on and not in the ledger."""

    step: Annotated[int, "committed steps when it began: the policy version that it is of; 0: before the first step"]
    version_min: Annotated[int, "oldest policy version that generated one of its tokens; -1: no answer was scored"]
    version_max: Annotated[int, "newest policy version: training went on meanwhile"]
    prompts: Annotated[int, "prompts that were scored"]
    samples: Annotated[int, "answers to each prompt; 1: greedy"]
    reward: Annotated[float | None, "mean reward; null: no prompt was scored"]
    reward_low: Annotated[float | None, "lower end of its 95 % interval over prompts; null with fewer than 2"]
    reward_high: Annotated[float | None, "upper end"]
    pass_at: Annotated[Mapping[str, float], "k -> share of prompts of which one of k answers passes, unbiased estimate"]
    unscored: Annotated[Mapping[str, int], "reason -> prompts that have no score, which no number above includes"]
    response_length: Annotated[float | None, "mean tokens of an answer"]
    seconds: Annotated[float, "wall time, seconds"]


@_event(K.COMPONENT_RESTARTED, f"{SUPERVISOR}, {SESSION}")
class ComponentRestarted(Payload):
    """A component of rolecall ended and was restarted."""

    what: Annotated[str, "`agent`, `watch`, or `supervisor`: the whole run was started again"]
    node: Annotated[str, "node of the agent; empty for the others"]
    because: Annotated[str, "how it ended"]


@_event(K.LEASE_ACQUIRED, WATCH)
class LeaseAcquired(Payload):
    """A watch may act from now on; the previous one may not."""

    holder: Annotated[str, "host and pid of the watch"]
    fence: Annotated[int, "fencing number, one more than the last"]
    mode: Annotated[str, "`observe`, `approve` or `act`"]


@_event(K.INCIDENT_OPENED, f"{WATCH}, {OPERATOR}")
class IncidentOpened(Payload):
    """A fault was diagnosed, or an operator asked for a replica to be replaced."""

    diagnosis: Annotated[StoredDiagnosis, "the fault, its suspects and the evidence"]
    window: Annotated[str, "name of the stored input of the detectors"]


@_event(K.INCIDENT_UPDATED, WATCH)
class IncidentUpdated(Payload):
    """The diagnosis of an incident changed. Those before it stay part of the incident."""

    diagnosis: Annotated[StoredDiagnosis, "the newest diagnosis, which decides on the response"]
    relation: Annotated[
        str, "how it is related to those before it: more is known of the fault, or it is a second one"
    ] = ""


@_event(K.PLAN_CREATED, WATCH)
class PlanCreated(Payload):
    """Policy decided on the response to an incident."""

    plan: Annotated[StoredPlan, "action and targets; an approval is bound to its digest"]
    page_oncall: Annotated[bool, "on-call is paged when the plan is to do nothing"]
    outcome: Annotated[str, "outcome of the incident when the plan is to do nothing"]
    question: Annotated[Mapping[str, Any], "input of policy (`PolicyInput`), so that the decision can be replayed"]


@_event(K.PLAN_BLOCKED, WATCH)
class PlanBlocked(Payload):
    """A guard blocks a plan. Written once for each guard and plan."""

    digest: Annotated[str, "digest of the plan"]
    guard: Annotated[str, "name of the guard"]
    because: Annotated[str, "limit that would be exceeded"]


@_event(K.PLAN_PROPOSED, WATCH)
class PlanProposed(Payload):
    """A plan waits for an operator's approval."""

    digest: Annotated[str, "digest of the plan"]
    plan: Annotated[StoredPlan, "the plan"]
    expires_at: Annotated[float, "when the proposal expires, wall seconds"]


@_event(K.PLAN_APPROVED, OPERATOR)
class PlanApproved(Payload):
    """An operator approved a proposal."""

    digest: Annotated[str, "digest of the plan"]
    by: Annotated[str, "user"]


@_event(K.PLAN_REJECTED, OPERATOR)
class PlanRejected(Payload):
    """An operator rejected a plan that had not begun."""

    digest: Annotated[str, "digest of the plan"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason, may be empty"]


@_event(K.PLAN_EXPIRED, WATCH)
class PlanExpired(Payload):
    """A proposal was not approved in time, or its fault is over."""

    digest: Annotated[str, "digest of the plan"]
    because: Annotated[str, "which of the two"]


@_event(K.HOLD_PLACED, OPERATOR)
class HoldPlaced(Payload):
    """An operator holds a plan: nothing of it begins before `until`."""

    digest: Annotated[str, "digest of the plan"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason"]
    until: Annotated[float, "end of the hold, wall seconds"]


@_event(K.HOLD_LIFTED, OPERATOR)
class HoldLifted(Payload):
    """An operator ended a hold early."""

    digest: Annotated[str, "digest of the plan"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason, may be empty"]


@_event(K.ACTION_STARTED, WATCH)
class ActionStarted(Payload):
    """The guards let a plan pass; the actuator is called next."""

    digest: Annotated[str, "digest of the plan"]
    plan: Annotated[StoredPlan, "the plan"]
    approved_by: Annotated[str, "user that approved it; empty when no approval was needed"] = ""


@_event(K.ACTION_DONE, WATCH)
class ActionDone(Payload):
    """The actuator performed a plan; verification begins."""

    digest: Annotated[str, "digest of the plan"]
    result: Annotated[Mapping[str, Any], "`done`, `because` and the actuator's own facts"]


@_event(K.ACTION_FAILED, WATCH)
class ActionFailed(Payload):
    """An action was refused, timed out, or its replacement died."""

    digest: Annotated[str, "digest of the plan"]
    failure: Annotated[str, "which of them (`ActionFailure`)"]
    because: Annotated[str, "what happened"]


@_event(K.INCIDENT_VERIFIED, WATCH)
class IncidentVerified(Payload):
    """The replacements make progress."""

    digest: Annotated[str, "digest of the plan"]
    because: Annotated[str, "progress that was observed"]
    serving_at: Annotated[float, "when the last replacement began to serve, wall seconds"]


@_event(K.INCIDENT_CLOSED, WATCH)
class IncidentClosed(Payload):
    """Nothing more is done about an incident."""

    outcome: Annotated[str, "`IncidentOutcome`: resolved, self_recovered, tolerated, ended or escalated"]
    because: Annotated[str, "why"]


@_event(K.ONCALL_PAGED, f"{WATCH}, {SESSION}")
class OncallPaged(Payload):
    """On-call is paged, or would be: without a notification channel the reason is only logged. Once for each topic of
    an incident."""

    because: Annotated[str, "reason of the page"]
    channel: Annotated[str, "`NotifyFormat` of the channel, or `log`: no notification channel is configured"]
    topic: Annotated[str, "its topic, such as the name of a guard"]


@_event(K.DIAGNOSIS_REVIEWED, OPERATOR)
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


@_event(K.EVIDENCE_COLLECTED, WATCH)
class EvidenceCollected(Payload):
    """The agents of an incident's nodes answered the requests for evidence."""

    because: Annotated[str, "collected evidence, and its result"]
    files: Annotated[tuple[EvidenceFileRecord, ...], "name below the run's directory, bytes, sha256 and kind"]
    statements: Annotated[tuple[str, ...], "findings of the evidence, one sentence each"]
    findings: Annotated[tuple[StoredFinding, ...], "findings based on it"]
    missing: Annotated[tuple[str, ...], "evidence that could not be collected, and why"]
    seconds: Annotated[float, "duration of the collection, seconds"]


@_event(K.RECOVERY_PAUSED, OPERATOR)
class RecoveryPaused(Payload):
    """No action begins until recovery is resumed."""

    by: Annotated[str, "user"]
    because: Annotated[str, "reason"]


@_event(K.RECOVERY_RESUMED, OPERATOR)
class RecoveryResumed(Payload):
    """Actions may begin again."""

    by: Annotated[str, "user"]


@_event(K.NODE_QUARANTINED, f"{OPERATOR}, {WATCH}")
class NodeQuarantined(Payload):
    """No replica is placed on a node any more; those on it continue."""

    node: Annotated[str, "the node"]
    by: Annotated[str, "user, or the watch"]
    because: Annotated[str, "reason"]


@_event(K.NODE_DRAINED, OPERATOR)
class NodeDrained(Payload):
    """The replicas of a quarantined node are moved to other nodes."""

    node: Annotated[str, "the node"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason"]
    incidents: Annotated[tuple[str, ...], "incidents opened to move its replicas"]


@_event(K.NODE_RETURNED_TO_SERVICE, OPERATOR)
class NodeReturnedToService(Payload):
    """A quarantine ended: the node may take replicas again."""

    node: Annotated[str, "the node"]
    by: Annotated[str, "user"]
    because: Annotated[str, "reason"]


@_event(K.NODE_LENT, WATCH)
class NodeLent(Payload):
    """A healthy replica ends and lends its node to one that has lost its own."""

    replica: Annotated[str, "the lender"]
    incarnation: Annotated[int, "its incarnation that ends"]
    node: Annotated[str, "its node"]
    to: Annotated[str, "the replica that gets it"]
    because: Annotated[str, "why this replica"]


@_event(K.LENDER_RESUMED, WATCH)
class LenderResumed(Payload):
    """A node is free: a replica that had lent its own is started again."""

    replica: Annotated[str, "the lender"]
    incarnation: Annotated[int, "its incarnation that is started"]
    node: Annotated[str, "the free node"]
    because: Annotated[str, "why it runs again"]


@_event(K.CALL_STARTED, WATCH)
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


@_event(K.CALL_ENDED, WATCH)
class CallEnded(Payload):
    """Reply to that call."""

    actuator: Annotated[str, "its name"]
    status: Annotated[
        int,
        "exit code or HTTP status; -1: no answer, so it may have had its effect or not; -1000: not sent, so it had none",
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


@_event(K.BURN_IN_FINISHED, OPERATOR)
class BurnInFinished(Payload):
    """A burn-in of a node is complete: load with known results, which are compared."""

    node: Annotated[str, "the node"]
    by: Annotated[str, "user"]
    passed: Annotated[bool, "no check failed, and at least one could be run"]
    seconds: Annotated[float, "duration, seconds"]
    checks: Annotated[tuple[BurnInCheck, ...], "name, passed (null: not possible here), because and values of each"]


@_event(K.JOB_STOP_REQUESTED, WATCH)
class JobStopRequested(Payload):
    """Recovery asks the runtime to stop the job."""

    because: Annotated[str, "why"]
