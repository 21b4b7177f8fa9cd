"""The journal's event contract: the kinds of event, and one frozen payload a kind, in one table.

Writers append payloads, readers get them back as `Event.payload`; no other code reads the JSON of a stored body. A body
that does not match its payload (a field is missing, unknown or of another type) means that this event is damaged.

To change a payload: a new field with a default keeps the version, because stored bodies without it can still be read;
anything else raises `version`. `docs/reference/events.md` is generated from the table (tools/reference_pages.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
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
def event(kind: K, owner: str, *, version: int = 1) -> Callable[[type[P]], type[P]]:
    """Makes a class a frozen dataclass, and registers it as the payload of a kind."""

    def register(cls: type[P]) -> type[P]:
        payload = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        payload.kind = kind
        names = tuple(f.name for f in fields(payload))
        PAYLOADS[kind] = PayloadSpec(kind=kind, payload=payload, version=version, owner=owner, names=names)
        return payload

    return register


def stored(of: type[Any]) -> PlainValidator:
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


StoredDiagnosis = Annotated[Diagnosis, stored(Diagnosis)]
StoredFinding = Annotated[Finding, stored(Finding)]
StoredPlan = Annotated[Plan, stored(Plan)]
SUPERVISOR, CONTROLLER, WATCH = "supervisor", "controller", "watch"
OPERATOR, SESSION = "operator command", "session"
