"""Messages between the runtime's processes: plain frozen values without tensors, carried by Ray and built by tests.

Tensors (weights, optimizer state) travel point to point over the weight port (`rl_runtime/weights/port.py`). Every call
that changes state carries the incarnation it is meant for; an outdated one is rejected (StaleIncarnation).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from rolecall.core.errors import RolecallError
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.journal.store import GENESIS
from rolecall.rl_runtime.protocol.policy_health import PolicyHealth

ENVIRONMENT_VERSION: Final = -2
"""In place of a policy version, of a token that the environment wrote: context, never trained on or compared. The mark
is part of the tokens everywhere, so whoever takes over a conversation knows whose each token is. Its log-probability
is 0."""


def num_generated(versions: Sequence[int]) -> int:
    """Tokens that the policy generated."""
    return len(versions) - versions.count(ENVIRONMENT_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sample to generate. `prefix_*`: tokens of other engines, of earlier turns and of the environment; generation
    continues after them.
    """

    request_id: str  # "<group_id>.<sample index>"
    group_id: GroupId
    prompt_tokens: tuple[int, ...]
    max_response_tokens: int  # total, including the prefix
    seed: int
    prefix_tokens: tuple[int, ...] = ()
    prefix_logprobs: tuple[float, ...] = ()
    prefix_versions: tuple[int, ...] = ()
    temperature: float | None = None  # None: the job's sampling; 0: greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of one request from `offset` on; offsets count from the first new token, including the prefix.

    Each token has the policy version that generated it, and its log-probability under that version.
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
    """Answer of `tokens_since`. `unknown`: requests that this engine (another incarnation) does not hold."""

    replica: ReplicaId
    incarnation: int
    policy_version: int
    chunks: tuple[TokenChunk, ...]
    unknown: tuple[str, ...] = ()


class EndReason(StrEnum):
    """Why a sample's tokens end where they do. Never an infrastructure reason."""

    STOP = "stop"  # the model ended its answer
    LENGTH = "length"  # the task's longest response
    TRUNCATED = "truncated"  # the window ends here; generation continues in the next one, and there is no reward yet


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A whole or partial trajectory, of any engines and versions; has a reward once the answer is complete."""

    request_id: str
    tokens: tuple[int, ...]  # of the whole response
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float  # from the task; undefined while the answer is not complete
    end: EndReason = EndReason.STOP
    first_fresh: int = 0  # earlier tokens were used by earlier steps: context, not trained on again
    engine: str = field(default="", compare=False)
    """`role/index#incarnation` of the engine that made all of its tokens; empty: several, or unknown."""

    @property
    def is_over(self) -> bool:
        return self.end is not EndReason.TRUNCATED

    @property
    def num_generated(self) -> int:
        return num_generated(self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """All samples of one prompt, ready to train on."""

    group_id: GroupId
    prompt_tokens: tuple[int, ...]
    samples: tuple[TrainingSample, ...]

    @property
    def num_tokens(self) -> int:
        """Without those of an environment."""
        return sum(s.num_generated for s in self.samples)

    @property
    def num_fresh(self) -> int:
        """Number of tokens without a window's context: summed over its windows, an answer's tokens count once."""
        return sum(num_generated(s.versions[s.first_fresh :]) for s in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A sample whose environment is to answer: no token yet, or the model's turn is over."""

    request_id: str
    group_id: GroupId
    tokens: tuple[int, ...]
    versions: tuple[int, ...]  # ENVIRONMENT_VERSION: the environment's


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment's answer to a conversation, or why there is none."""

    tokens: tuple[int, ...] = ()  # with the start of the model's next turn
    done: bool = False
    failure: str = ""
    """A word for the ledger. Not empty: it has not answered."""
    is_final: bool = False  # the failure is the conversation's, wherever it is tried again
    is_alone: bool = True  # the failure cannot be that of another conversation of the call


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """Of the advantages of all samples of a step, before they are normalized. `deviation` is 0 if all are equal."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Unit of training work. Its id is "<step>.<number>"; a step has exactly B of them."""

    microbatch_id: str
    groups: tuple[PromptGroup, ...]
    statistics: StepStatistics | None = None  # where the algorithm normalizes advantages over the step


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """Part of the trainer's state, replicated and checkpointed with it; authoritative after a failure."""

    step: int  # the step that this state includes, -1 before the first
    epoch: int
    microbatch_ids: tuple[str, ...]  # sorted
    group_ids: tuple[GroupId, ...]  # sorted
    gradient_digest: str  # of the reduced gradients of all updates of the step
    ledger: ChainHead  # ledger's head when the step was assigned

    @property
    def policy_version(self) -> int:
        """Initial weights are version 0; each step adds one, however many optimizer updates it has."""
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
class MicrobatchNumbers:
    """Of one microbatch, divided like a step of its own."""

    loss: float  # the policy's
    grad_norm: float  # of the policy and the critic together, before clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedMicrobatch:
    """A microbatch with numbers far outside those of the run (`trainer/band.py`), and the trainer that computed it."""

    replica: ReplicaId
    incarnation: int
    microbatch_id: str
    group_ids: tuple[GroupId, ...]
    numbers: MicrobatchNumbers
    because: str  # the number, and the limit


class CheckVerdict(StrEnum):
    """Result of a second computation of an unusual microbatch."""

    WRONG = "wrong"  # other numbers, which are usual: the first trainer is suspect
    SAME = "same"  # the same numbers: the data or the policy
    UNCLEAR = "unclear"  # other numbers, which are unusual too
    SEVERAL = "several"  # not computed again: several trainers had some in one step, so it is not one machine's fault


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMicrobatch:
    first: ComputedMicrobatch
    by: ReplicaId | Literal[""]  # trainer that computed it again; empty: none did
    again: MicrobatchNumbers | None  # what the step was committed with, if it was computed again
    verdict: CheckVerdict


class UnusualMicrobatches(RolecallError):
    """Raised by all members of a vote: one of them has microbatches outside the band; another is to compute them."""

    def __init__(self, *, step: int, microbatches: Sequence[ComputedMicrobatch]) -> None:
        self.step, self.microbatches = step, tuple(microbatches)
        first = self.microbatches[0]
        more = f" and {len(self.microbatches) - 1} more" if len(self.microbatches) > 1 else ""
        super().__init__(
            f"{first.replica}, step {step}: microbatch {first.microbatch_id}{more} is unusual: {first.because}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A trainer's answer once a step is committed. Loss, norm and health of several updates are means over them."""

    replica: ReplicaId
    incarnation: int
    commit: CommitRecord
    loss: float  # the policy's, divided like the gradient
    grad_norm: float  # of the policy, before clipping
    reward: float | None  # mean over the complete answers; None without any
    num_tokens: int  # tokens that the policy was trained on
    health: PolicyHealth
    seconds: float
    my_microbatches: tuple[str, ...]
    log_ratio_max: float | None
    """Largest |trainer log-prob - rollout log-prob| under the weights that generated the token; a large value raises an
    alarm. Covers all tokens of the trained weights and a share of those of previous versions (`agreement`). None
    without such tokens.
    """
    compared: tuple[ComparedMicrobatch, ...] = ()
    log_ratios: Mapping[str, float] = field(default_factory=dict)
    """`log_ratio_max` by engine (`TrainingSample.engine`); those without a comparable token are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A server of tensors: policy weights by version, and, at a trainer, its state."""

    replica: ReplicaId
    incarnation: int
    host: str
    port: int
    rank_ports: tuple[int, ...] = ()  # of the further ranks of a trainer: each has its shard of the state


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str  # torch name without prefix: float32, bfloat16, int64
    shape: tuple[int, ...]
    digest: str  # BLAKE3 of the raw little-endian bytes, hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The tensors of version `policy_version`, published by a trainer after commit."""

    policy_version: int
    tensors: tuple[TensorEntry, ...]  # sorted by name
    canary_logprobs: tuple[float, ...]  # trainer's log-probabilities of the fixed canary: the first anchor of proof (c)
    digest: str  # over all entries


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProof:
    """An engine's three-part proof for (incarnation, epoch, version): invariant Proof before service."""

    replica: ReplicaId
    incarnation: int
    epoch: int
    policy_version: int
    manifest_digest: str
    received_digest: str  # (a) over digests of the received bytes, equal to the manifest's digest
    storage_digest: str  # (b) over digests of its own parameter storage after loading
    covered: int  # parameters that (b) can read back
    uncovered: tuple[str, ...]  # parameters that cannot be read back, by name
    canary_logprobs: tuple[float, ...]  # (c)
    holder: ReplicaId  # source of the bytes
    bytes_received: int
    seconds: float
    layout: str = ""  # digest of the storage's names, shapes and dtypes: (b) and (c) compare only equal layouts
    storage: tuple[tuple[str, str], ...] = ()  # (parameter, digest) per covered parameter: lets (b) name it


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInfo:
    replica: ReplicaId
    incarnation: int
    policy_version: int  # -1: no proven weights
    holder: Holder
    num_requests: int
    tokens_generated: int
    asleep: bool = False  # generates nothing until its next update


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInfo:
    replica: ReplicaId
    incarnation: int
    has_state: bool  # False: must copy from a survivor or a checkpoint before it may join
    commit: CommitRecord
    holder: Holder
    computed: tuple[str, ...]  # microbatches of the running step whose gradients it holds
    num_computed: int  # microbatches computed since the process started, in any update of any step
    joined_epoch: int
