"""What the runtime's processes say to each other. Plain frozen values, no tensors: Ray carries them, tests build them.

Tensors (weights, optimizer state) never travel here: they go point to point over the weight port
(`rl_runtime/weights/port.py`). Every call that changes something carries the incarnation it is meant for; an old one is
refused (StaleIncarnation).
"""

from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.payloads import ChainHead
from rolecall.core.journal.store import GENESIS
from rolecall.rl_runtime.protocol.policy_health import PolicyHealth


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sample to generate. `prefix_*` is what other engines made of it before: generation continues behind it."""

    request_id: str  # "<group_id>.<sample index>"
    group_id: GroupId
    prompt_tokens: tuple[int, ...]
    max_response_tokens: int  # in all, the prefix counted
    seed: int
    prefix_tokens: tuple[int, ...] = ()
    prefix_logprobs: tuple[float, ...] = ()
    prefix_versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of one request from `offset` on; offsets count from the first new token of all, the prefix included.

    Each token has its log-probability under, and the number of, the policy version that made it.
    """

    request_id: str
    offset: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finished: bool
    finish_reason: str = ""  # "stop" (end token) or "length"; never an infrastructure reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledTokens:
    """Answer of `tokens_since`. `unknown`: requests that this engine does not hold (it is another incarnation)."""

    replica: ReplicaId
    incarnation: int
    policy_version: int
    chunks: tuple[TokenChunk, ...]
    unknown: tuple[str, ...] = ()


class EndReason(StrEnum):
    """Why a sample's tokens end where they do. Never an infrastructure reason."""

    STOP = "stop"  # the model ended its answer
    LENGTH = "length"  # the task's longest response
    TRUNCATED = "truncated"  # here its window ends; generation continues in the next one, and there is no reward yet


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A trajectory, or what there is of it, whatever engines and versions made it; with its reward once it is over."""

    request_id: str
    tokens: tuple[int, ...]  # of the whole response
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float  # as the task gave it; means nothing while the answer is not complete
    end: EndReason = EndReason.STOP
    first_fresh: int = 0  # tokens before this one were used by earlier steps: context, not trained on again

    @property
    def is_over(self) -> bool:
        return self.end is not EndReason.TRUNCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """All samples of one prompt, ready to train on."""

    group_id: GroupId
    prompt_tokens: tuple[int, ...]
    samples: tuple[TrainingSample, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.samples)

    @property
    def num_fresh(self) -> int:
        """Without what precedes a window: over its windows an answer's tokens count once."""
        return sum(max(0, len(s.tokens) - s.first_fresh) for s in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Unit of training work. Its id is "<step>.<number>"; a step has exactly B of them."""

    microbatch_id: str
    groups: tuple[PromptGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """Part of the trainer's state: replicated and checkpointed with it, the truth after a death."""

    step: int  # the optimizer step that this state includes, -1 before the first
    epoch: int
    microbatch_ids: tuple[str, ...]  # sorted
    group_ids: tuple[GroupId, ...]  # sorted
    gradient_digest: str
    ledger: ChainHead  # ledger's head when the step was assigned

    @property
    def policy_version(self) -> int:
        """Initial weights are version 0; each optimizer step adds one."""
        return self.step + 1


def first_commit() -> CommitRecord:
    """The record of weights that no step has touched."""
    return CommitRecord(
        step=-1,
        epoch=0,
        microbatch_ids=(),
        group_ids=(),
        gradient_digest="",
        ledger=ChainHead(position=0, hash=GENESIS),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a trainer answers once a step is committed."""

    replica: ReplicaId
    incarnation: int
    commit: CommitRecord
    loss: float  # the policy's, divided by what the gradient was divided by
    grad_norm: float  # of the policy, before clipping
    reward: float | None  # mean over the complete answers; None: no answer was
    num_tokens: int  # that the policy was trained on
    health: PolicyHealth
    seconds: float
    my_microbatches: tuple[str, ...]
    log_ratio_max: float | None
    """Largest |trainer log-prob - rollout log-prob| under the weights that made the token: an alarm if large. Of all
    tokens of the weights that were trained, and of a share of those of former versions (`agreement`). None: there was
    neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A server of tensors, and its address. `stream` is `policy` (weights by version) or `state` (a trainer's whole
    state)."""

    replica: ReplicaId
    incarnation: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str  # torch name without prefix: float32, bfloat16, int64
    shape: tuple[int, ...]
    digest: str  # SHA-256 of the raw little-endian bytes, hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What version `policy_version` consists of, published by a trainer after commit."""

    policy_version: int
    tensors: tuple[TensorEntry, ...]  # sorted by name
    canary_logprobs: tuple[float, ...]  # trainer's log-probabilities of the fixed canary: the first anchor of proof (c)
    digest: str  # over all entries


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProof:
    """Three-part proof that an engine returned itself, for (incarnation, epoch, policy version).

    Invariant Proof before service (docs/invariants.md).
    """

    replica: ReplicaId
    incarnation: int
    epoch: int
    policy_version: int
    manifest_digest: str
    received_digest: str  # (a) over digests of the bytes received, equal to the manifest's digest
    storage_digest: str  # (b) over digests of its own parameter storage after loading
    covered: int  # parameters that (b) could read back
    uncovered: tuple[str, ...]  # parameters that cannot be read back, by name
    canary_logprobs: tuple[float, ...]  # (c)
    holder: ReplicaId  # source of the bytes
    bytes_received: int
    seconds: float
    layout: str = (
        ""  # digest of names, shapes and dtypes of the storage: only replicas of one layout compare in (b), (c)
    )
    storage: tuple[tuple[str, str], ...] = ()  # (parameter, digest) for each one covered: so that (b) can name it
    received_wrong: tuple[str, ...] = ()  # tensors whose received bytes are not the manifest's; empty in a true proof


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInfo:
    replica: ReplicaId
    incarnation: int
    pid: int
    start_ticks: int
    policy_version: int  # -1: no proven weights
    holder: Holder
    num_requests: int
    tokens_generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInfo:
    replica: ReplicaId
    incarnation: int
    pid: int
    start_ticks: int
    has_state: bool  # False: must copy from a survivor or a checkpoint before it may join
    commit: CommitRecord
    holder: Holder
    computed: tuple[str, ...]  # microbatches of the running step whose gradients it holds
    joined_epoch: int
