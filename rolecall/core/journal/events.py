"""What the journal remembers. One frozen `Event` a line, whose `body` is plain JSON named by `kind`.

`incident_id` and `caused_by` (an event id) let any action walk back to the sample that caused it.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self


class EventKind(StrEnum):
    # the run (rl_runtime)
    RUN_STARTED = "run_started"  # seed, config_digest, roles, nodes
    RUN_ENDED = "run_ended"  # outcome, because
    REPLICA_STARTING = "replica_starting"  # replica, incarnation, node
    REPLICA_READY = "replica_ready"  # replica, incarnation, node, pid, start_ticks, from_standby
    REPLICA_LOST = "replica_lost"  # replica, incarnation, because
    REPLICA_STOPPED = "replica_stopped"  # replica, incarnation, because: ended on purpose
    EPOCH_ADVANCED = "epoch_advanced"  # epoch, members, because
    STEP_COMMITTED = "step_committed"  # step, epoch, groups, microbatches, reward, loss, seconds, staleness
    STEP_INTERRUPTED = "step_interrupted"  # step, epoch, because
    WEIGHTS_ADMITTED = "weights_admitted"  # replica, incarnation, policy_version, proof, holder, bytes
    WEIGHTS_REJECTED = "weights_rejected"  # replica, incarnation, policy_version, part, tensor, because
    REQUESTS_REASSIGNED = "requests_reassigned"  # from, to, num_requests, tokens_kept, tokens_lost
    CHECKPOINT_WRITTEN = "checkpoint_written"  # path, step
    COMPONENT_RESTARTED = "component_restarted"  # what (agent, watch), node, because
    # diagnosis and recovery
    LEASE_ACQUIRED = "lease_acquired"  # holder, fence
    INCIDENT_OPENED = "incident_opened"  # diagnosis, window digest
    INCIDENT_UPDATED = "incident_updated"  # diagnosis: what is known grew
    PLAN_CREATED = "plan_created"  # plan
    PLAN_BLOCKED = "plan_blocked"  # digest, guard, because
    PLAN_PROPOSED = "plan_proposed"  # plan, expires_at: waits for a person
    PLAN_APPROVED = "plan_approved"  # digest, by
    PLAN_REJECTED = "plan_rejected"  # digest, by, because
    PLAN_EXPIRED = "plan_expired"  # digest, because
    HOLD_PLACED = "hold_placed"  # digest, by, because, until: nothing of this plan begins before
    HOLD_LIFTED = "hold_lifted"  # digest, by, because
    ACTION_STARTED = "action_started"  # plan
    ACTION_DONE = "action_done"  # digest, result
    ACTION_FAILED = "action_failed"  # digest, because
    INCIDENT_VERIFIED = "incident_verified"  # because: what progress was seen
    INCIDENT_CLOSED = "incident_closed"  # outcome: resolved, tolerated, observed, refuted, gave_up; because
    ONCALL_PAGED = "oncall_paged"  # because, channel
    DIAGNOSIS_REVIEWED = (
        "diagnosis_reviewed"  # verdict: right, wrong; by, because; the newest counts, also after the close
    )
    EVIDENCE_COLLECTED = "evidence_collected"  # because, files, told, findings, missing, seconds
    RECOVERY_PAUSED = "recovery_paused"  # by, because
    RECOVERY_RESUMED = "recovery_resumed"  # by
    NODE_QUARANTINED = "node_quarantined"  # node, by, because: nothing is placed there
    NODE_DRAINED = "node_drained"  # node, by, because, incidents: those that were opened to move its replicas away
    NODE_RETURNED_TO_SERVICE = "node_returned_to_service"  # node, by, because: it may take replicas again
    BURN_IN_FINISHED = "burn_in_finished"  # node, by, passed, seconds, checks: each name, passed, because, values
    JOB_STOP_REQUESTED = "job_stop_requested"  # because


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    seq: int  # position in the journal, from 1
    kind: EventKind
    wall_at: float
    body: dict[str, Any] = field(default_factory=dict)
    incident_id: str | None = None
    caused_by: str | None = None
    key: str | None = None  # appending the same key again changes nothing
    hash: str = ""

    @property
    def event_id(self) -> str:
        return f"e{self.seq}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": str(self.kind)}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        return cls(**{**d, "kind": EventKind(d["kind"])})
