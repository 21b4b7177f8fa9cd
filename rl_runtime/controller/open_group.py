"""One open group: its requests, their streamed tokens, and their end reasons. Pure.

A request may be a window of an answer: tokens before `first_fresh` belong to other windows. If the window's limit cuts
the answer (`EndReason.TRUNCATED`), the next window continues it. `trajectories.py` decides placement and lifecycle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import nan
from typing import Final

from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.protocol.messages import EndReason, GenerationRequest, PromptGroup, TokenChunk, TrainingSample

EngineKey = tuple[ReplicaId, int]
"""(replica, incarnation): a replacement is a different engine."""


class GroupPhase(StrEnum):
    GENERATING = "generating"
    FINISHED = "finished"  # all samples ended; awaits scoring
    SCORED = "scored"  # trainable: its rewards are known, or it is a window that ended in the middle of an answer
    ACCEPTED = "accepted"  # dynamic sampling: it has a learning signal
    FILTERED = "filtered"  # dynamic sampling: no learning signal; reserved for a batch that cannot be filled otherwise
    ASSIGNED = "assigned"  # part of the running step


UNTRAINED = frozenset({GroupPhase.FINISHED, GroupPhase.SCORED, GroupPhase.ACCEPTED, GroupPhase.FILTERED})
"""Fully generated, not in a step."""

NO_REWARD: Final = 0.0
"""Placeholder in a sample whose answer is not complete; never read. Not NaN, which is unequal to itself: a trainer
compares a retried plan with its computed part and would discard its gradient.
"""


AGAIN_MAX: Final = 16
"""Limit on regenerating a window's lost prefix because the new answer ended before the window."""
SEED_MAX: Final = 2**31


@dataclass(slots=True)
class Trajectory:
    """One request and its streamed tokens."""

    request: GenerationRequest  # without prefix
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    end: EndReason | None = None  # None: still generating
    engine: EngineKey | None = None
    sent: bool = False  # the engine has confirmed that it holds the request
    first_fresh: int = 0  # tokens before this one belong to earlier windows
    context: tuple[EngineKey, str] | None = None
    """(engine, request) that stores this window's context until an engine has the window itself."""
    num_regenerated: int = 0
    makers: set[EngineKey | None] = field(default_factory=set)
    """Engines that made its tokens; None: unknown ones."""
    is_window: bool = False  # an answer that reaches its limit is cut and continues in the next window

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def maker(self) -> str:
        """The engine that made all of its tokens; empty: several, or unknown."""
        if len(self.makers) != 1:
            return ""
        (only,) = self.makers
        return f"{only[0]}#{only[1]}" if only else ""

    @property
    def fresh_versions(self) -> Sequence[int]:
        """Versions of the tokens that are in no earlier window; of all tokens if it has none of its own."""
        return self.versions[self.first_fresh :] or (self.versions if self.finished else [])

    def cut(self) -> None:
        """Ends its window here permanently, because the next window begins here; regenerated tokens end here as
        well.
        """
        self.end, self.is_window = EndReason.TRUNCATED, True
        self.request = replace(self.request, max_response_tokens=len(self.tokens))

    def note_end(self, chunk: TokenChunk, *, whole: bool) -> None:
        """Sets the end reason if its tokens end here. `whole`: all of the chunk was taken."""
        at_limit = len(self.tokens) >= self.request.max_response_tokens
        if chunk.finished and whole and chunk.finish_reason != "length":
            self.end = EndReason.STOP
        elif self.is_window and at_limit:
            # Its engine may hold more tokens, from before the next window began here.
            self.cut()
        elif chunk.finished and whole and at_limit:
            self.end = EndReason.LENGTH

    @property
    def ended_before(self) -> bool:
        """Whether the regenerated context was an answer that ends before this window."""
        return self.end is EndReason.STOP and len(self.tokens) <= self.first_fresh and self.num_regenerated < AGAIN_MAX

    def again(self) -> None:
        """Restarts from the prompt with other random numbers.

        The window's original answer did reach the window. Accepting a shorter answer instead would bias against long
        answers.
        """
        self.request = replace(self.request, seed=(self.request.seed + 1) % SEED_MAX)
        self.tokens, self.logprobs, self.versions, self.end = [], [], [], None
        self.makers = set()
        self.num_regenerated += 1

    def reach(self, longest: int) -> None:
        """No window will begin at its end: if it is regenerated, it continues to the answer's end."""
        self.is_window = False
        self.request = replace(self.request, max_response_tokens=longest)

    def become(self, other: "Trajectory", stop: int | None = None) -> None:
        """Takes over the first tokens of another window of the same answer."""
        self.tokens, self.logprobs, self.versions = other.tokens[:stop], other.logprobs[:stop], other.versions[:stop]
        self.makers = set(other.makers)

    def take_context(self, before: "Trajectory") -> None:
        """Takes over the whole context of this window."""
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
    """Has no tokens, or none of its own, and no engine; placed on an engine in order."""
    followed: bool = False
    """A window whose end is final: the next one is in the ledger."""

    @property
    def first_fresh(self) -> int:
        return self.trajectories[0].first_fresh

    @property
    def is_cut(self) -> bool:
        return any(t.end is EndReason.TRUNCATED for t in self.trajectories)

    @property
    def is_untouched(self) -> bool:
        """Whether no engine has generated any of its own tokens, or its context is incomplete."""
        return all(len(t.tokens) < max(t.first_fresh, 1) for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(len(t.tokens) for t in self.trajectories)

    @property
    def version_max(self) -> int | None:
        """Newest policy version among its trainable tokens; None without tokens."""
        return max((v for t in self.trajectories for v in t.fresh_versions), default=None)

    def oldest_since(self, version: int) -> int:
        """Oldest version not older than `version`, whose tokens expire next. -1 if there is none."""
        return min((v for t in self.trajectories for v in t.fresh_versions if v >= version), default=-1)

    def as_group(self) -> PromptGroup:
        """The group for scoring and training. An unknown reward is NaN, so it cannot pass for a real one."""
        rewards = self.rewards or (nan,) * len(self.trajectories)
        samples = tuple(
            TrainingSample(
                request_id=trajectory.request.request_id,
                tokens=tuple(trajectory.tokens),
                logprobs=tuple(trajectory.logprobs),
                versions=tuple(trajectory.versions),
                reward=NO_REWARD if trajectory.end is EndReason.TRUNCATED else reward,
                end=trajectory.end or EndReason.TRUNCATED,
                first_fresh=trajectory.first_fresh,
                engine=trajectory.maker,
            )
            for trajectory, reward in zip(self.trajectories, rewards, strict=True)
        )
        return PromptGroup(group_id=self.group_id, prompt_tokens=self.prompt_tokens, samples=samples)
