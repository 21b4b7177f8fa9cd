"""Trajectories in the making: which engine generates what, and every token that was ever streamed (design law 6).

A group (all samples of one prompt) is generating -> finished -> scored -> assigned, and is closed when it was trained
or dropped. Its requests live on one engine at a time; when that engine is lost they go on elsewhere from the tokens
that the table holds. Tokens are taken only up to the policy version that the engine has proven: nothing unproven
enters (law 2). An engine keeps tokens until it is told to forget them, which happens when the group is closed, so a
controller that restarts finds them all. Pure: no clock, no calls; the caller does what `unsent` and `to_forget` say.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import nan

from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.protocol import Group, Request, Sample, TokenChunk

EngineKey = tuple[ReplicaId, int]
"""(replica, incarnation): an engine that was replaced is another engine."""


class GroupPhase(StrEnum):
    GENERATING = "generating"
    FINISHED = "finished"  # all samples ended; to be scored
    SCORED = "scored"  # may be trained
    ASSIGNED = "assigned"  # part of the running step


@dataclass(slots=True)
class Trajectory:
    """One request and what has been streamed of it."""

    request: Request  # without prefix
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False
    engine: EngineKey | None = None
    sent: bool = False  # the engine has confirmed that it holds the request

    def with_prefix(self) -> Request:
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

    @property
    def num_tokens(self) -> int:
        return sum(len(t.tokens) for t in self.trajectories)

    @property
    def version_min(self) -> int | None:
        """Oldest policy version among its tokens; None while it has none."""
        return min((v for t in self.trajectories for v in t.versions), default=None)

    def as_group(self) -> Group:
        """What is scored and trained. A reward that is not known yet is NaN: it can never pass for one."""
        rewards = self.rewards or (nan,) * len(self.trajectories)
        samples = tuple(
            Sample(
                request_id=t.request.request_id,
                tokens=tuple(t.tokens),
                logprobs=tuple(t.logprobs),
                versions=tuple(t.versions),
                reward=reward,
            )
            for t, reward in zip(self.trajectories, rewards, strict=True)
        )
        return Group(group_id=self.group_id, prompt_tokens=self.prompt_tokens, samples=samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What left an engine that was lost."""

    group_ids: tuple[GroupId, ...]
    num_requests: int
    tokens_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An engine as a place for work."""

    key: EngineKey
    version: int  # policy version it has proven
    may_serve: bool  # proven, alive, and answering
    num_requests: int
    is_due: bool = False  # it will have the newest version in a moment


def least_loaded(engines: Iterable[EngineLoad]) -> EngineLoad | None:
    """Where the next group goes: fewest unfinished requests, then newest weights, then by name.

    Only engines that may serve count: a dead one has no load, and would attract everything.
    """
    able = [e for e in engines if e.may_serve]
    return min(able, key=lambda e: (e.num_requests, -e.version, e.key), default=None)


def staleness_if_issued(step: int, groups_ahead: int, groups_per_step: int, engine_version: int) -> int:
    """Versions between a group's first token and its step, if everything ahead of it is trained first.

    `step`: the one being formed or trained, whose policy version has the same number.
    """
    return step + groups_ahead // groups_per_step - engine_version


class TrajectoryTable:
    """All open groups. Owned by the controller's loop."""

    def __init__(self) -> None:
        self.groups: dict[GroupId, OpenGroup] = {}
        self._by_request: dict[str, Trajectory] = {}
        self._forget: dict[EngineKey, list[str]] = defaultdict(list)

    # --- opening, closing ---------------------------------------------------------------------------------------

    def open(self, group_id: GroupId, prompt_tokens: tuple[int, ...], requests: Sequence[Request]) -> OpenGroup:
        """A group that nobody generates yet."""
        assert group_id not in self.groups, f"{group_id} is open already"
        group = OpenGroup(group_id, prompt_tokens, [Trajectory(r) for r in requests])
        self.groups[group_id] = group
        self._by_request.update((t.request.request_id, t) for t in group.trajectories)
        return group

    def close(self, group_id: GroupId) -> OpenGroup:
        """The group was trained or dropped: its engines may forget it."""
        group = self.groups.pop(group_id)
        for t in group.trajectories:
            del self._by_request[t.request.request_id]
            if t.engine is not None and t.sent:
                self._forget[t.engine].append(t.request.request_id)
        return group

    def forget_stray(self, engine: EngineKey, request_ids: Iterable[str]) -> None:
        """An engine holds requests of groups that are closed, or that went on elsewhere."""
        self._forget[engine].extend(request_ids)

    def to_forget(self, engine: EngineKey) -> list[str]:
        """Requests that the engine may forget; each is named once."""
        return self._forget.pop(engine, [])

    # --- placing ------------------------------------------------------------------------------------------------

    def place(self, group_id: GroupId, engine: EngineKey) -> int:
        """Gives the group's unfinished, homeless requests to an engine. Returns their number."""
        homeless = [t for t in self.groups[group_id].trajectories if not t.finished and t.engine is None]
        for t in homeless:
            t.engine, t.sent = engine, False
        return len(homeless)

    def homeless(self) -> list[GroupId]:
        """Groups with unfinished requests that no engine has, oldest first."""
        return sorted(
            g.group_id for g in self.groups.values() if any(t.engine is None and not t.finished for t in g.trajectories)
        )

    def unsent(self, engine: EngineKey) -> list[Request]:
        """What the engine must be given, each with the tokens that others made of it."""
        return [t.with_prefix() for t in self._unfinished_on(engine) if not t.sent]

    def mark_sent(self, engine: EngineKey, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            t = self._by_request.get(request_id)
            if t is not None and t.engine == engine:
                t.sent = True
            else:
                # Closed or moved while the call was under way: the engine holds it in vain.
                self._forget[engine].append(request_id)

    def resend(self, engine: EngineKey, request_ids: Iterable[str]) -> None:
        """The engine does not know requests that it confirmed: they are given to it again, with their tokens."""
        for request_id in request_ids:
            t = self._by_request.get(request_id)
            if t is not None and t.engine == engine and not t.finished:
                t.sent = False

    def num_unfinished(self, engine: EngineKey) -> int:
        return sum(1 for _ in self._unfinished_on(engine))

    def _unfinished_on(self, engine: EngineKey) -> Iterable[Trajectory]:
        return (t for t in self._by_request.values() if t.engine == engine and not t.finished)

    # --- tokens -------------------------------------------------------------------------------------------------

    def offsets(self, engine: EngineKey) -> dict[str, int]:
        """Request -> number of tokens streamed so far, of those that the engine works on."""
        return {t.request.request_id: len(t.tokens) for t in self._unfinished_on(engine) if t.sent}

    def take(self, engine: EngineKey, chunks: Iterable[TokenChunk], proven_version: int) -> list[GroupId]:
        """Adds what an engine streamed. Returns the groups that are finished by it.

        Ignored: requests that are not this engine's (any more), chunks with a gap before them, tokens that stand
        already, and everything from the first token of a version that the engine has not proven.
        """
        finished: list[GroupId] = []
        for chunk in chunks:
            t = self._by_request.get(chunk.request_id)
            if t is None or t.engine != engine or t.finished or chunk.offset > len(t.tokens):
                continue
            start = len(t.tokens) - chunk.offset
            stop = next((i for i, v in enumerate(chunk.versions) if v > proven_version), len(chunk.tokens))
            if start < stop:
                t.tokens.extend(chunk.tokens[start:stop])
                t.logprobs.extend(chunk.logprobs[start:stop])
                t.versions.extend(chunk.versions[start:stop])
            if chunk.finished and stop == len(chunk.tokens):
                t.finished = True
                group = self.groups[t.request.group_id]
                if all(other.finished for other in group.trajectories):
                    group.phase = GroupPhase.FINISHED
                    finished.append(group.group_id)
        return finished

    def adopt(
        self, engine: EngineKey, held: Iterable[tuple[Request, TokenChunk]], proven_version: int
    ) -> list[GroupId]:
        """Re-adopts what an engine holds, after a restart of the controller. Returns the groups finished by it.

        Where two engines hold a request (it had moved), the one with more tokens keeps it.
        """
        finished: list[GroupId] = []
        for request, chunk in held:
            t = self._by_request.get(request.request_id)
            if t is None or t.finished or (t.engine is not None and len(chunk.tokens) <= len(t.tokens)):
                self._forget[engine].append(request.request_id)
                continue
            if t.engine is not None:
                self._forget[t.engine].append(request.request_id)
            t.tokens, t.logprobs, t.versions = [], [], []
            t.engine, t.sent = engine, True
            finished += self.take(engine, [chunk], proven_version)
        return finished

    # --- losing an engine ---------------------------------------------------------------------------------------

    def leave(self, engine: EngineKey, *, alive: bool = False) -> Moved:
        """Takes all unfinished requests away from an engine: they become homeless and keep their tokens.

        `alive`: it can still be told to forget them. Otherwise it is lost, with all that it holds.
        """
        leaving = list(self._unfinished_on(engine))
        if alive:
            self._forget[engine].extend(t.request.request_id for t in leaving if t.sent)
        else:
            for t in self._by_request.values():
                if t.engine == engine:
                    t.engine, t.sent = None, False
            self._forget.pop(engine, None)
        for t in leaving:
            t.engine, t.sent = None, False
        return Moved(
            group_ids=tuple(sorted({t.request.group_id for t in leaving})),
            num_requests=len(leaving),
            tokens_kept=sum(len(t.tokens) for t in leaving),
        )

    # --- scoring and training -----------------------------------------------------------------------------------

    def in_phase(self, phase: GroupPhase) -> list[OpenGroup]:
        """Groups in a phase, oldest first."""
        return sorted((g for g in self.groups.values() if g.phase is phase), key=lambda g: g.group_id)

    def score(self, group_id: GroupId, rewards: Sequence[float]) -> None:
        group = self.groups[group_id]
        assert group.phase is GroupPhase.FINISHED and len(rewards) == len(group.trajectories)
        group.rewards, group.phase = tuple(rewards), GroupPhase.SCORED

    def assign(self, group_ids: Iterable[GroupId]) -> None:
        for group_id in group_ids:
            group = self.groups[group_id]
            assert group.phase is GroupPhase.SCORED, f"{group_id} is {group.phase}"
            group.phase = GroupPhase.ASSIGNED

    def unassign(self, group_ids: Iterable[GroupId]) -> None:
        for group_id in group_ids:
            group = self.groups.get(group_id)
            if group is not None and group.phase is GroupPhase.ASSIGNED:
                group.phase = GroupPhase.SCORED

    def too_stale(self, step: int, staleness_max: int) -> list[OpenGroup]:
        """Groups that can be trained neither in `step` nor later: their oldest token is too old by then."""
        return [
            g
            for g in sorted(self.groups.values(), key=lambda g: g.group_id)
            if g.phase is not GroupPhase.ASSIGNED and g.version_min is not None and step - g.version_min > staleness_max
        ]

    def waiting(self, proven: Mapping[EngineKey, int]) -> dict[GroupId, int]:
        """Version of the oldest token of each group that no step has yet.

        `proven`: the version of each engine, by which a group without tokens is judged: its first ones are of it.
        """
        found = {g.group_id: _oldest(g, proven) for g in self.groups.values() if g.phase is not GroupPhase.ASSIGNED}
        return {group_id: version for group_id, version in found.items() if version is not None}

    def truncate_after(self, version: int) -> None:
        """Back to an older policy: tokens of versions beyond `version` are of a policy that never was.

        Every unfinished trajectory leaves its engine, which goes on with that policy until it is updated.
        """
        for group in self.groups.values():
            for t in group.trajectories:
                keep = next((i for i, v in enumerate(t.versions) if v > version), None)
                if keep is not None:
                    del t.tokens[keep:], t.logprobs[keep:], t.versions[keep:]
                    t.finished, group.phase, group.rewards = False, GroupPhase.GENERATING, ()
                if not t.finished and t.engine is not None:
                    self._forget[t.engine].append(t.request.request_id)
                    t.engine, t.sent = None, False


def _oldest(group: OpenGroup, proven: Mapping[EngineKey, int]) -> int | None:
    if group.version_min is not None:
        return group.version_min
    engines = (t.engine for t in group.trajectories if t.engine is not None)
    return min((proven[e] for e in engines if e in proven), default=None)


def mean_reward(groups: Iterable[Group]) -> float:
    """Mean over all samples."""
    rewards = [s.reward for g in groups for s in g.samples]
    return sum(rewards) / len(rewards)


def reached_staleness(step: int, groups: Iterable[Group]) -> int:
    """Largest distance between a step and the version of a token trained in it."""
    return max((step - v for g in groups for s in g.samples for v in s.versions), default=0)
