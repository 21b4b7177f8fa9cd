"""Payloads of the run: replicas, steps, weights, requests, checkpoints. The runtime writes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from rolecall.core.journal.payloads.contract import CONTROLLER, SESSION, SUPERVISOR, K, Payload, event


@event(K.RUN_STARTED, SUPERVISOR)
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


@event(K.RUN_ENDED, SESSION)
class RunEnded(Payload):
    """The run is over, unless `rolecall up` continues it; else only late evidence and reviews are written after it."""

    outcome: Annotated[str, "`completed`, `stopped`, `failed` or `interrupted`"]
    because: Annotated[str, "why it ended"]
    faults_wanted: Annotated[int, "faults that the session requested"] = 0


@event(K.REPLICA_STARTING, SUPERVISOR)
class ReplicaStarting(Payload):
    """An incarnation of a replica is being created."""

    replica: Annotated[str, "`role/index`"]
    incarnation: Annotated[int, "from 1; grows with every start"]
    node: Annotated[str, "node on which it starts"]
    because: Annotated[str, "why it is started"]


@event(K.REPLICA_READY, SUPERVISOR)
class ReplicaReady(Payload):
    """A replica's process has started; it does not serve yet."""

    replica: Annotated[str, "`role/index`"]
    incarnation: Annotated[int, "from 1"]
    node: Annotated[str, "node on which it runs"]
    because: Annotated[str, "why it was started"]
    pid: Annotated[int, "process id"]
    start_ticks: Annotated[int, "start time of the process, clock ticks since boot"]
    from_standby: Annotated[str, "the standby that became this replica; empty when it was started anew"]


@event(K.REPLICA_LOST, f"{SUPERVISOR}, {CONTROLLER}")
class ReplicaLost(Payload):
    """An incarnation has died, or was fenced."""

    replica: Annotated[str, "`role/index`"]
    incarnation: Annotated[int, "the incarnation that is lost"]
    because: Annotated[str, "how it was detected"]
    node: Annotated[str, "node on which it ran"]


@event(K.REPLICA_STOPPED, SUPERVISOR)
class ReplicaStopped(Payload):
    """An incarnation was stopped intentionally."""

    replica: Annotated[str, "`role/index`"]
    incarnation: Annotated[int, "the incarnation that was stopped"]
    because: Annotated[str, "why it was stopped"]
    node: Annotated[str, "node on which it ran"]


@event(K.EPOCH_ADVANCED, f"{CONTROLLER}, through the journal")
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


@event(K.STEP_COMMITTED, CONTROLLER)
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


@event(K.STEP_INTERRUPTED, CONTROLLER)
class StepInterrupted(Payload):
    """An attempt at a step failed; the remaining trainers repeat the step."""

    step: Annotated[int, "step that was interrupted"]
    epoch: Annotated[int, "epoch that failed"]
    because: Annotated[str, "errors of the replicas that failed first"]
    lost: Annotated[tuple[str, ...], "trainers that are lost"]
    attempt: Annotated[int, "number of the attempt, from 1; 0 when all trainers were lost"] = 0
    refused_checkpoints: Annotated[tuple[str, ...], "checkpoints that could not be used, with reasons"] = ()


@event(K.MICROBATCH_RECOMPUTED, CONTROLLER)
class MicrobatchRecomputed(Payload):
    """A microbatch whose loss or gradient was not finite was computed again within its step."""

    step: Annotated[int, "optimizer step"]
    microbatch: Annotated[str, "the microbatch"]
    groups: Annotated[tuple[str, ...], "its prompt groups"]
    from_replica: Annotated[str, "trainer at which it was not finite first"]
    by: Annotated[str, "trainer that computed it again; `from_replica` itself if there is no other"]
    finite: Annotated[bool, "whether it was finite then: if so the first trainer is suspect, else the data or the code"]


@event(K.MICROBATCH_COMPARED, CONTROLLER)
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


@event(K.REWARDS_COMPARED, CONTROLLER)
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


@event(K.WEIGHTS_ADMITTED, CONTROLLER)
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


@event(K.WEIGHTS_REJECTED, CONTROLLER)
class WeightsRejected(Payload):
    """An engine's proof does not match the manifest; it does not serve this version."""

    replica: Annotated[str, "engine that loaded the weights"]
    incarnation: Annotated[int, "its incarnation"]
    policy_version: Annotated[int, "version that it should hold"]
    part: Annotated[str, "part of the proof that failed"]
    tensor: Annotated[str, "tensor that differs, where one is known"]
    because: Annotated[str, "what differs"]


@event(K.REQUESTS_REASSIGNED, CONTROLLER)
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


@event(K.CHECKPOINT_WRITTEN, CONTROLLER)
class CheckpointWritten(Payload):
    """A checkpoint is complete on disk."""

    path: Annotated[str, "its directory"]
    step: Annotated[int, "last step that it includes"]


@event(K.EVALUATION_FINISHED, CONTROLLER)
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


@event(K.COMPONENT_RESTARTED, f"{SUPERVISOR}, {SESSION}")
class ComponentRestarted(Payload):
    """A component of rolecall ended and was restarted."""

    what: Annotated[str, "`agent`, `watch`, or `supervisor`: the whole run was started again"]
    node: Annotated[str, "node of the agent; empty for the others"]
    because: Annotated[str, "how it ended"]

    @property
    def continues_run(self) -> bool:
        """An earlier `run_ended` is not the end of the run."""
        return self.what == "supervisor"
