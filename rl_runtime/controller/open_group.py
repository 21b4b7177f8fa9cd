"""One open group: its requests, every token that was streamed of them, and why those end where they do. Pure.

A request may be a window of an answer: tokens before `first_fresh` are other windows', and where the window's limit
cuts the answer (`EndReason.TRUNCATED`) the next one continues. Placement and lifecycle
are decided in `trajectories.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import nan
from typing import Final

from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.protocol.messages import EndReason, GenerationRequest, PromptGroup, TokenChunk, TrainingSample

EngineKey = tuple[ReplicaId, int]
"""(replica, incarnation): an engine that was replaced is another engine."""


class GroupPhase(StrEnum):
    GENERATING = "generating"
    FINISHED = "finished"  # all samples ended; to be scored
    SCORED = "scored"  # may be trained: its rewards are known, or it is a window that ended in the middle of an answer
    ACCEPTED = "accepted"  # dynamic sampling: it has a learning signal
    FILTERED = "filtered"  # dynamic sampling: no learning signal; kept in case the batch cannot be filled otherwise
    ASSIGNED = "assigned"  # part of the running step


UNTRAINED = frozenset({GroupPhase.FINISHED, GroupPhase.SCORED, GroupPhase.ACCEPTED, GroupPhase.FILTERED})
"""Everything is generated, no step has it."""

NO_REWARD: Final = 0.0
"""Placeholder in a sample whose answer is not complete; never read. Not NaN, which is unequal to itself: a trainer
compares a plan that is repeated with what it has computed, and would throw its gradient away."""


AGAIN_MAX: Final = 16
"""How often a lost prefix of a window is generated again because the new answer ended before the window."""
SEED_MAX: Final = 2**31


@dataclass(slots=True)
class Trajectory:
    """One request and what has been streamed of it."""

    request: GenerationRequest  # without prefix
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    end: EndReason | None = None  # None: it is being generated
    engine: EngineKey | None = None
    sent: bool = False  # the engine has confirmed that it holds the request
    first_fresh: int = 0  # tokens before this one belong to earlier windows
    context: tuple[EngineKey, str] | None = None
    """(engine, request) that keeps what precedes this window, until an engine has the window itself."""
    num_regenerated: int = 0
    is_window: bool = False  # its limit is not the task's: an answer that reaches it is cut, and continues elsewhere

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def fresh_versions(self) -> Sequence[int]:
        """Of the tokens that no earlier window had; of all where it has none of its own."""
        return self.versions[self.first_fresh :] or (self.versions if self.finished else [])

    def cut(self) -> None:
        """Ends its window here, for good: what is generated again later ends here as well, for the next window has
        begun after it."""
        self.end, self.is_window = EndReason.TRUNCATED, True
        self.request = replace(self.request, max_response_tokens=len(self.tokens))

    def note_end(self, chunk: TokenChunk, *, whole: bool) -> None:
        """Why its tokens end here, if they do. `whole`: all of the chunk was taken."""
        at_limit = len(self.tokens) >= self.request.max_response_tokens
        if chunk.finished and whole and chunk.finish_reason != "length":
            self.end = EndReason.STOP
        elif self.is_window and at_limit:
            # Its engine may hold more, from before the next window began here.
            self.cut()
        elif chunk.finished and whole and at_limit:
            self.end = EndReason.LENGTH

    @property
    def ended_before(self) -> bool:
        """What stood before this window was lost, and made again it was an answer that ends before the window."""
        return self.end is EndReason.STOP and len(self.tokens) <= self.first_fresh and self.num_regenerated < AGAIN_MAX

    def again(self) -> None:
        """From the prompt, with other random numbers.

        The answer that the window belongs to did reach it. If one that does not were taken in its place, answers would
        be the fewer the longer they are.
        """
        self.request = replace(self.request, seed=(self.request.seed + 1) % SEED_MAX)
        self.tokens, self.logprobs, self.versions, self.end = [], [], [], None
        self.num_regenerated += 1

    def reach(self, longest: int) -> None:
        """Where it ended, no window is to begin any more: should it be made again, it continues to the answer's end."""
        self.is_window = False
        self.request = replace(self.request, max_response_tokens=longest)

    def become(self, other: "Trajectory", stop: int | None = None) -> None:
        """Takes over the first tokens of another window of the same answer."""
        self.tokens, self.logprobs, self.versions = other.tokens[:stop], other.logprobs[:stop], other.versions[:stop]

    def take_context(self, before: "Trajectory") -> None:
        """Takes over all that precedes this window."""
        self.become(before)
        if before.engine is not None and before.sent:
            self.context = before.engine, before.request.request_id

    def with_prefix(self) -> GenerationRequest:
        return replace(
            self.request,
            prefix_tokens=tuple(self.tokens),
            prefix_logprobs=tuple(self.logprobs),
            prefix_versions=tuple(self.versions),
        )


@dataclass(slots=True)
class OpenGroup:
    group_id: GroupId
    prompt_tokens: tuple[int, ...]
    trajectories: list[Trajectory]
    phase: GroupPhase = GroupPhase.GENERATING
    rewards: tuple[float, ...] = ()
    waits: bool = True
    """Nothing of it is there, or nothing of its own, and no engine has it: it is given to one when its turn comes."""
    followed: bool = False
    """A window whose end is final: the next one stands in the ledger."""

    @property
    def first_fresh(self) -> int:
        return self.trajectories[0].first_fresh

    @property
    def is_cut(self) -> bool:
        return any(t.end is EndReason.TRUNCATED for t in self.trajectories)

    @property
    def is_untouched(self) -> bool:
        """Whether no engine has made anything of it, or not even all that precedes it."""
        return all(len(t.tokens) < max(t.first_fresh, 1) for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(len(t.tokens) for t in self.trajectories)

    @property
    def version_min(self) -> int | None:
        """Oldest policy version among the tokens that it would train; None while it has none."""
        return min((v for t in self.trajectories for v in t.fresh_versions), default=None)

    @property
    def version_max(self) -> int | None:
        """The newest."""
        return max((v for t in self.trajectories for v in t.fresh_versions), default=None)

    def oldest_since(self, version: int) -> int:
        """The oldest version that is not older than this one: whose tokens are next to be too old. -1 if there is
        none."""
        return min((v for t in self.trajectories for v in t.fresh_versions if v >= version), default=-1)

    def as_group(self) -> PromptGroup:
        """What is scored and trained. A reward that is not known yet is NaN: it can never pass for one."""
        rewards = self.rewards or (nan,) * len(self.trajectories)
        samples = tuple(
            TrainingSample(
                request_id=t.request.request_id,
                tokens=tuple(t.tokens),
                logprobs=tuple(t.logprobs),
                versions=tuple(t.versions),
                reward=NO_REWARD if t.end is EndReason.TRUNCATED else reward,
                end=t.end or EndReason.TRUNCATED,
                first_fresh=t.first_fresh,
            )
            for t, reward in zip(self.trajectories, rewards, strict=True)
        )
        return PromptGroup(group_id=self.group_id, prompt_tokens=self.prompt_tokens, samples=samples)
