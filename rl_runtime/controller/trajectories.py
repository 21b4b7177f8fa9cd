"""Open trajectories: their assignment to engines, and every streamed token.

Holds invariants Tokens are kept and Proof before service (docs/invariants.md).

A group (all samples of one prompt) is generating -> finished -> scored -> assigned, and is closed when it was trained
or dropped; a held-out one is generating -> finished -> evaluated, and is closed with its evaluation. The requests of a
group live on one engine at a time; when that engine is lost they continue elsewhere from the tokens in the table.
Tokens are taken only up to the policy version that the engine has proven. A request may be a *window* of
an answer: earlier windows' tokens precede its own (`first_fresh`), and if its limit cuts the answer
(`EndReason.TRUNCATED`), the next window continues it. A cut window has no reward yet and can be trained on at once. An
engine keeps tokens until they are acknowledged, which happens when the group is closed and an engine has the next
window if there is one, so a controller that restarts finds them all. Pure: no clock, no calls; the caller sends
`unsent` and `to_forget` to the engines.

With an environment a trajectory is a conversation. It `awaits` the environment before the model's first turn and after
each one that may not be the last; its answer (`observe`) becomes tokens behind those of the model, and the request
continues from all of them, at the same engine if that lives. The engine keeps a turn until it has the next one.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from math import nan
from typing import Final

from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.protocol.messages import (
    ENVIRONMENT_VERSION,
    Conversation,
    EndReason,
    GenerationRequest,
    Observation,
    PromptGroup,
    TokenChunk,
    TrainingSample,
    num_generated,
)
from rolecall.rl_runtime.tasks.task import group_number, is_held_out

EngineKey = tuple[ReplicaId, int]
"""(replica, incarnation): a replacement is a different engine."""


class GroupPhase(StrEnum):
    GENERATING = "generating"
    FINISHED = "finished"  # all samples ended; awaits scoring
    SCORED = "scored"  # trainable: its rewards are known, or it is a window that ended in the middle of an answer
    ACCEPTED = "accepted"  # dynamic sampling: it has a learning signal
    FILTERED = "filtered"  # dynamic sampling: no learning signal; reserved for a batch that cannot be filled otherwise
    ASSIGNED = "assigned"  # part of the running step
    EVALUATED = "evaluated"  # held out: its rewards are known


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
    max_turns: int = 0  # of the model, in a conversation with an environment; 0: there is none
    awaits: bool = False  # the environment is to answer
    holds_turn: bool = False  # its engine has tokens of it, though not yet the request of this turn

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
        """Ends its window here permanently, also for regenerated tokens, because the next window begins here."""
        self.end, self.is_window = EndReason.TRUNCATED, True
        self.request = replace(self.request, max_response_tokens=len(self.tokens))

    def note_end(self, chunk: TokenChunk, *, whole: bool) -> None:
        """Sets the end reason if its tokens end here. `whole`: all of the chunk was taken."""
        at_limit = len(self.tokens) >= self.request.max_response_tokens
        if chunk.finished and whole and chunk.finish_reason != "length":
            if self.num_turns < self.max_turns and not at_limit:
                self.awaits = True
            else:
                self.end = EndReason.STOP
        elif self.is_window and at_limit:
            # Its engine may hold more tokens, from before the next window began here.
            self.cut()
        elif chunk.finished and whole and at_limit:
            self.end = EndReason.LENGTH

    @property
    def num_turns(self) -> int:
        """Turns of the model so far, the current one included."""
        made = [v != ENVIRONMENT_VERSION for v in self.versions]
        return sum(here and not before for here, before in zip(made, [False, *made], strict=False))

    @property
    def is_held(self) -> bool:
        """Whether its engine may have tokens of it."""
        return self.sent or self.holds_turn

    def as_conversation(self) -> Conversation:
        return Conversation(
            request_id=self.request.request_id,
            group_id=self.request.group_id,
            tokens=tuple(self.tokens),
            versions=tuple(self.versions),
        )

    def observe(self, observation: Observation) -> None:
        """Takes the environment's answer. Without room for an answer to it, the conversation ends before it."""
        self.awaits = False
        if observation.done:
            self.end = EndReason.STOP
        elif len(self.tokens) + len(observation.tokens) >= self.request.max_response_tokens:
            self.end = EndReason.LENGTH
        else:
            num = len(observation.tokens)
            self.tokens += observation.tokens
            self.logprobs += [0.0] * num
            self.versions += [ENVIRONMENT_VERSION] * num
            self.sent, self.holds_turn = False, self.sent

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
    def is_held_out(self) -> bool:
        """Of an evaluation: never trained on."""
        return is_held_out(self.group_id)

    @property
    def first_fresh(self) -> int:
        return self.trajectories[0].first_fresh

    @property
    def is_cut(self) -> bool:
        return any(t.end is EndReason.TRUNCATED for t in self.trajectories)

    @property
    def is_untouched(self) -> bool:
        """Whether no engine has generated any of its own tokens, or its context is incomplete."""
        return all(num_generated(t.versions) < max(t.first_fresh, 1) for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        """Without those of an environment."""
        return sum(num_generated(t.versions) for t in self.trajectories)

    @property
    def version_max(self) -> int | None:
        """Newest policy version among its trainable tokens; None without tokens."""
        versions = (v for t in self.trajectories for v in t.fresh_versions if v != ENVIRONMENT_VERSION)
        return max(versions, default=None)

    def oldest_since(self, version: int) -> int:
        """Oldest version not older than `version`, whose tokens expire next. -1 if there is none."""
        versions = (v for t in self.trajectories for v in t.fresh_versions if v != ENVIRONMENT_VERSION)
        return min((v for v in versions if v >= version), default=-1)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReassignedRequests:
    """Requests and tokens affected by the loss of an engine."""

    group_ids: tuple[GroupId, ...]
    num_requests: int
    tokens_kept: int


NOTHING: Final = ReassignedRequests(group_ids=(), num_requests=0, tokens_kept=0)


def _num_proven(chunk: TokenChunk, proven_version: int) -> int:
    """Tokens before the first one of a version that the engine has not proven, or of none at all."""
    proven = (v == ENVIRONMENT_VERSION or 0 <= v <= proven_version for v in chunk.versions)
    return next((i for i, is_proven in enumerate(proven) if not is_proven), len(chunk.tokens))


class TrajectoryTable:
    """All open groups. Owned by the controller's loop."""

    def __init__(self) -> None:
        self._max_turns = 0
        self.groups: dict[GroupId, OpenGroup] = {}
        self._by_request: dict[str, Trajectory] = {}
        self._placed: dict[EngineKey, dict[str, Trajectory]] = defaultdict(dict)
        """Open requests by engine; some may have ended, or have left it since."""
        self._forget: dict[EngineKey, list[str]] = defaultdict(list)

    def open(
        self,
        group_id: GroupId,
        prompt_tokens: tuple[int, ...],
        requests: Sequence[GenerationRequest],
        *,
        first_fresh: int = 0,
        is_window: bool = False,
    ) -> OpenGroup:
        """Adds a group without an engine, to be placed in order."""
        assert group_id not in self.groups, f"{group_id} is open already"
        turns, awaits = self._max_turns, self._max_turns > 0
        made = [
            Trajectory(r, first_fresh=first_fresh, is_window=is_window, max_turns=turns, awaits=awaits)
            for r in requests
        ]
        group = OpenGroup(group_id, prompt_tokens, made)
        self.groups[group_id] = group
        self._by_request.update((t.request.request_id, t) for t in group.trajectories)
        return group

    def close(self, group_id: GroupId) -> OpenGroup:
        """The group was trained or dropped: its engines may drop it."""
        group = self.groups.pop(group_id)
        for trajectory in group.trajectories:
            del self._by_request[trajectory.request.request_id]
            if trajectory.engine is not None:
                self._placed[trajectory.engine].pop(trajectory.request.request_id, None)
            self._let_go(trajectory)
            if trajectory.engine is not None and trajectory.is_held:
                held = trajectory.engine, trajectory.request.request_id
                # Kept while the next window depends on this one and no engine has it yet.
                depended_on = group.is_cut or group.followed
                if not (depended_on and any(t.context == held for t in self._by_request.values())):
                    self._forget[trajectory.engine].append(trajectory.request.request_id)
        return group

    def _let_go(self, trajectory: Trajectory) -> None:
        """An engine has the window, or it is over: closed requests of its context may be dropped."""
        if trajectory.context is not None and trajectory.context[1] not in self._by_request:
            self._forget[trajectory.context[0]].append(trajectory.context[1])
        trajectory.context = None

    def forget_unassigned(self, engine: EngineKey, request_ids: Iterable[str]) -> None:
        """An engine holds requests of groups that are closed or continued elsewhere."""
        self._forget[engine].extend(request_ids)

    def to_forget(self, engine: EngineKey) -> list[str]:
        """Requests that the engine may drop; each is returned once."""
        return self._forget.pop(engine, [])

    def place(self, group_id: GroupId, engine: EngineKey) -> int:
        """Assigns the group's unfinished, unassigned requests to an engine. Returns their number."""
        group = self.groups[group_id]
        group.waits = False
        unassigned = [t for t in group.trajectories if not t.finished and t.engine is None]
        for t in unassigned:
            t.engine, t.sent = engine, False
            self._placed[engine][t.request.request_id] = t
        return len(unassigned)

    def unassigned(self) -> dict[GroupId, int]:
        """Number of unfinished requests without an engine, per group that had one, oldest first."""
        counts = {
            g.group_id: sum(t.engine is None and not t.finished for t in g.trajectories)
            for g in sorted(self.groups.values(), key=lambda g: g.group_id)
            if not g.waits
        }
        return {g: n for g, n in counts.items() if n}

    def unsent(self, engine: EngineKey, requests_max: int = sys.maxsize) -> list[GenerationRequest]:
        """Requests to submit to the engine, each with the tokens generated by others: the first ones placed, until it
        has `requests_max` that are unfinished."""
        held = self._unfinished_on(engine)
        room = max(0, requests_max - sum(t.sent for t in held))
        return [t.with_prefix() for t in islice((t for t in held if not t.sent and not t.awaits), room)]

    def mark_sent(self, engine: EngineKey, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            t = self._by_request.get(request_id)
            if t is not None and t.engine == engine:
                t.sent, t.holds_turn = True, False
                self._let_go(t)
            else:
                # Closed or moved during the call: the engine holds it needlessly.
                self._forget[engine].append(request_id)

    def resend(self, engine: EngineKey, request_ids: Iterable[str]) -> None:
        """The engine no longer knows requests that it confirmed: they are submitted again, with their tokens."""
        for request_id in request_ids:
            t = self._by_request.get(request_id)
            if t is not None and t.engine == engine and not t.finished:
                t.sent = False

    def num_unfinished(self, engine: EngineKey) -> int:
        return len(self._unfinished_on(engine))

    def _unfinished_on(self, engine: EngineKey) -> Collection[Trajectory]:
        placed = self._placed[engine]
        for request_id in [r for r, t in placed.items() if t.engine != engine or t.finished]:
            del placed[request_id]
        return placed.values()

    def offsets(self, engine: EngineKey) -> dict[str, int]:
        """Request -> number of tokens streamed so far, for the engine's active requests."""
        return {t.request.request_id: len(t.tokens) for t in self._unfinished_on(engine) if t.sent and not t.awaits}

    def take(self, engine: EngineKey, chunks: Iterable[TokenChunk], proven_version: int) -> list[GroupId]:
        """Adds streamed tokens. Returns the groups that they finish, or of which they end a turn.

        Ignored: requests not, or no longer, assigned to this engine, chunks after a gap, known tokens, earlier turns,
        and everything from the first token of a version that the engine has not proven.
        """
        finished: list[GroupId] = []
        for chunk in chunks:
            trajectory = self._by_request.get(chunk.request_id)
            if (
                trajectory is None
                or trajectory.engine != engine
                or trajectory.finished
                or trajectory.awaits
                or chunk.offset > len(trajectory.tokens)
                or (trajectory.max_turns and chunk.offset + len(chunk.tokens) < len(trajectory.tokens))
            ):
                continue
            start = len(trajectory.tokens) - chunk.offset
            stop = min(_num_proven(chunk, proven_version), trajectory.request.max_response_tokens - chunk.offset)
            if start < stop:
                trajectory.tokens.extend(chunk.tokens[start:stop])
                trajectory.logprobs.extend(chunk.logprobs[start:stop])
                trajectory.versions.extend(chunk.versions[start:stop])
                trajectory.makers.add(engine)
            whole = stop == len(chunk.tokens)
            trajectory.note_end(chunk, whole=whole)
            if trajectory.ended_before:
                trajectory.again()
            if trajectory.awaits:
                finished.append(trajectory.request.group_id)
            elif chunk.finished and whole and not trajectory.finished:
                # It is needed with another seed, or longer than requested from this engine: it is submitted again.
                trajectory.sent = False
                self._forget[engine].append(trajectory.request.request_id)
            if trajectory.finished and self._is_finished(trajectory.request.group_id):
                finished.append(trajectory.request.group_id)
        return finished

    def _is_finished(self, group_id: GroupId) -> bool:
        """Whether all samples ended; the group is then scored, unless its window ends inside an answer."""
        group = self.groups[group_id]
        if not all(t.finished for t in group.trajectories):
            return False
        group.phase = GroupPhase.SCORED if group.is_cut else GroupPhase.FINISHED
        return True

    def end_with(self, group_id: GroupId, other: OpenGroup) -> None:
        """Copies lost tokens from a later window of the answer; a complete window ends where that one begins."""
        (trajectory,), (later,) = self.groups[group_id].trajectories, other.trajectories
        if trajectory.engine is not None and trajectory.sent:
            self._forget[trajectory.engine].append(trajectory.request.request_id)
        trajectory.engine, trajectory.sent = None, False
        trajectory.become(later, trajectory.request.max_response_tokens)
        if len(trajectory.tokens) == trajectory.request.max_response_tokens:
            trajectory.cut()
            self.groups[group_id].waits = False
            self._is_finished(group_id)

    def adopt(
        self, engine: EngineKey, held: Iterable[tuple[GenerationRequest, TokenChunk]], proven_version: int
    ) -> list[GroupId]:
        """Adopts requests after a restart; the engine with more tokens keeps one. Returns finished groups."""
        finished: list[GroupId] = []
        for request, chunk in held:
            trajectory = self._by_request.get(request.request_id)
            if trajectory is None and self._inherit(engine, request, chunk, proven_version):
                continue
            if (
                trajectory is None
                or trajectory.finished
                or (trajectory.engine is not None and len(chunk.tokens) <= len(trajectory.tokens))
            ):
                self._forget[engine].append(request.request_id)
                continue
            if trajectory.engine is not None:
                self._forget[trajectory.engine].append(request.request_id)
            trajectory.tokens, trajectory.logprobs, trajectory.versions = [], [], []
            trajectory.makers = {None} if request.prefix_tokens else set()
            trajectory.engine, trajectory.sent = engine, True
            self._placed[engine][request.request_id] = trajectory
            trajectory.awaits = trajectory.holds_turn = False
            self._let_go(trajectory)
            self.groups[trajectory.request.group_id].waits = False
            finished += self.take(engine, [chunk], proven_version)
            if not trajectory.finished and _num_proven(chunk, proven_version) < len(chunk.tokens):
                # These may be of a discarded policy: the run returned to a checkpoint, and the controller died before
                # it notified the engine. That version number later belongs to another policy. The request continues
                # from the proven tokens.
                trajectory.sent = False
                self._forget[engine].append(request.request_id)
        return finished

    def _inherit(self, engine: EngineKey, request: GenerationRequest, chunk: TokenChunk, proven_version: int) -> bool:
        """Whether an engine holds a closed window that provides the context of a later one without one."""
        if is_held_out(request.group_id):
            return False
        number = group_number(request.group_id)
        proven = _num_proven(chunk, proven_version)
        later = (
            t
            for t in self._by_request.values()
            if not is_held_out(t.request.group_id)
            and group_number(t.request.group_id) == number
            and t.engine is None
            and not t.tokens
        )
        successor = max((t for t in later if 0 < t.first_fresh <= proven), key=lambda t: t.first_fresh, default=None)
        if successor is None:
            return False
        stop = successor.first_fresh
        successor.tokens, successor.logprobs = list(chunk.tokens[:stop]), list(chunk.logprobs[:stop])
        successor.versions, successor.context = list(chunk.versions[:stop]), (engine, request.request_id)
        successor.makers = {None} if request.prefix_tokens else {engine}
        return True

    def cut(self, engine: EngineKey) -> ReassignedRequests:
        """Cuts an engine's unfinished requests that have own tokens and need not reach a next window."""
        groups = ((t, self.groups[t.request.group_id]) for t in self._unfinished_on(engine))
        open_ended = (t for t, group in groups if not (group.followed or group.is_held_out))
        leaving = [t for t in open_ended if len(t.tokens) > t.first_fresh]
        for t in leaving:
            t.cut()
            self._is_finished(t.request.group_id)
        return _moved(leaving)

    def leave(self, engine: EngineKey, *, alive: bool = False) -> ReassignedRequests:
        """Unassigns an engine's unfinished requests, which keep their tokens. `alive`: it can still drop them."""
        leaving = list(self._unfinished_on(engine))
        if alive:
            self._forget[engine].extend(trajectory.request.request_id for trajectory in leaving if trajectory.is_held)
        else:
            for trajectory in self._by_request.values():
                if trajectory.engine == engine:
                    trajectory.engine, trajectory.sent, trajectory.holds_turn = None, False, False
                if trajectory.context is not None and trajectory.context[0] == engine:
                    trajectory.context = None
            self._forget.pop(engine, None)
            self._placed.pop(engine, None)
        for trajectory in leaving:
            trajectory.engine, trajectory.sent, trajectory.holds_turn = None, False, False
        return _moved(leaving)

    def expect_conversations(self, max_turns: int) -> None:
        """The job has an environment: trajectories opened from now on are conversations of at most so many turns."""
        self._max_turns = max_turns

    def awaiting(self) -> list[Trajectory]:
        """Conversations that await their environment, oldest group first; none before its group is placed."""
        groups = sorted(self.groups.values(), key=lambda g: g.group_id)
        return [t for g in groups if not g.waits for t in g.trajectories if t.awaits]

    def is_current(self, asked: Conversation) -> bool:
        """Whether the conversation still awaits an answer to these tokens: it may be closed, or rolled back."""
        trajectory = self._by_request.get(asked.request_id)
        return trajectory is not None and trajectory.awaits and trajectory.as_conversation() == asked

    def observe(self, asked: Conversation, observation: Observation) -> EndReason | None:
        """Adds what the environment answered to a current conversation. Returns why it ends there, if it does."""
        trajectory = self._by_request[asked.request_id]
        trajectory.observe(observation)
        if trajectory.finished:
            self._is_finished(asked.group_id)
        return trajectory.end

    def mark_followed(self, group_id: GroupId) -> None:
        """The window's end is final: the next one is in the ledger."""
        self.groups[group_id].followed = True

    def in_phase(self, phase: GroupPhase) -> list[OpenGroup]:
        """Groups in a phase, oldest first."""
        return sorted((g for g in self.groups.values() if g.phase is phase), key=lambda g: g.group_id)

    def score(self, group_id: GroupId, rewards: Sequence[float]) -> None:
        group = self.groups[group_id]
        assert group.phase is GroupPhase.FINISHED and len(rewards) == len(group.trajectories)
        group.rewards = tuple(rewards)
        group.phase = GroupPhase.EVALUATED if group.is_held_out else GroupPhase.SCORED

    def judge(self, group_ids: Iterable[GroupId], phase: GroupPhase) -> None:
        """Records the verdict of dynamic sampling on scored groups: accepted or reserved."""
        for group_id in group_ids:
            group = self.groups[group_id]
            assert group.phase is GroupPhase.SCORED, f"{group_id} is {group.phase}"
            group.phase = phase

    def assign(self, group_ids: Iterable[GroupId]) -> None:
        for group_id in group_ids:
            group = self.groups[group_id]
            assert group.phase in UNTRAINED - {GroupPhase.FINISHED}, f"{group_id} is {group.phase}"
            group.phase = GroupPhase.ASSIGNED

    def unassign(self, group_ids: Iterable[GroupId]) -> None:
        """Returns them to the scored phase: dynamic sampling judges them again, because their tokens may change."""
        for group_id in group_ids:
            group = self.groups.get(group_id)
            if group is not None and group.phase is GroupPhase.ASSIGNED:
                group.phase = GroupPhase.SCORED

    def too_stale(self, step: int, staleness_max: int) -> list[OpenGroup]:
        """Groups that can be trained neither in `step` nor later, because even their newest token is too old.

        The loss skips old tokens individually, so a long answer is not dropped because its first tokens are too old. A
        group that is being generated will still get newer tokens.
        """
        return [
            g
            for g in sorted(self.groups.values(), key=lambda g: g.group_id)
            if g.phase in UNTRAINED
            and not g.is_held_out
            and g.version_max is not None
            and step - g.version_max > staleness_max
        ]

    def waiting(self, proven: Mapping[EngineKey, int]) -> dict[GroupId, int]:
        """Newest version that each group has or, if unfinished, will get from its engine (`proven`)."""
        found: dict[GroupId, int] = {}
        for group in self.groups.values():
            if group.phase not in (GroupPhase.ASSIGNED, GroupPhase.FILTERED) and not group.is_held_out:
                coming = (proven.get(t.engine) for t in group.trajectories if t.engine is not None and not t.finished)
                if known := [v for v in (group.version_max, *coming) if v is not None]:
                    found[group.group_id] = max(known)
        return found

    def truncate_after(self, version: int) -> None:
        """Returns to an older policy: removes tokens of versions beyond `version`, which belong to a discarded policy.

        Every unfinished trajectory leaves its engine, which continues with that policy until it is updated.
        """
        for group in self.groups.values():
            for trajectory in group.trajectories:
                self._let_go(trajectory)
                keep = next((i for i, v in enumerate(trajectory.versions) if v > version), None)
                if keep is not None:
                    del trajectory.tokens[keep:], trajectory.logprobs[keep:], trajectory.versions[keep:]
                    trajectory.end, group.phase, group.rewards = None, GroupPhase.GENERATING, ()
                    trajectory.awaits = trajectory.max_turns > 0 and not trajectory.tokens
                if not trajectory.finished and trajectory.engine is not None:
                    self._forget[trajectory.engine].append(trajectory.request.request_id)
                    trajectory.engine, trajectory.sent, trajectory.holds_turn = None, False, False
            # More is open now than the next steps can take: groups without tokens are not started early, because they
            # would only become too old. A window waits until its context is generated again.
            group.waits = group.waits or group.is_untouched


def _moved(leaving: Sequence[Trajectory]) -> ReassignedRequests:
    return ReassignedRequests(
        group_ids=tuple(sorted({t.request.group_id for t in leaving})),
        num_requests=len(leaving),
        tokens_kept=sum(len(t.tokens) for t in leaving),
    )


def mean_reward(groups: Iterable[PromptGroup]) -> float | None:
    """Mean over all complete samples; None without any."""
    rewards = [s.reward for g in groups for s in g.samples if s.is_over]
    return sum(rewards) / len(rewards) if rewards else None


def reached_staleness(step: int, groups: Iterable[PromptGroup], staleness_max: int) -> int:
    """Largest distance between a step and the version of a token trained in it; the loss skips older ones."""
    fresh = (step - v for g in groups for s in g.samples for v in s.versions[s.first_fresh :] if v >= 0)
    return max((d for d in fresh if d <= staleness_max), default=0)
