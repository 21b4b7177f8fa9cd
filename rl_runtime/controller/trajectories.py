"""Open trajectories: which engine generates what, and every streamed token.

Holds invariants Tokens are kept and Proof before service (docs/invariants.md).

A group (all samples of one prompt) is generating -> finished -> scored -> assigned, and is closed when it was trained
or dropped. Its requests live on one engine at a time; when that engine is lost they continue elsewhere from the tokens
that the table holds. Tokens are taken only up to the policy version that the engine has proven.
A request may be a *window* of an answer: earlier windows' tokens stand before its own (`first_fresh`), and
where its limit cuts the answer (`EndReason.TRUNCATED`) the next window continues. What is cut is worth no reward yet,
and is ready to be trained on at once. An engine keeps tokens until they are acknowledged, which happens when the group
is closed and an engine has the next window if there is one, so a controller that restarts finds them all. Pure: no
clock, no calls; the caller does what `unsent` and `to_forget` say.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rolecall.core.ids import GroupId
from rolecall.rl_runtime.controller.open_group import UNTRAINED, EngineKey, GroupPhase, OpenGroup, Trajectory
from rolecall.rl_runtime.protocol.messages import GenerationRequest, PromptGroup, TokenChunk
from rolecall.rl_runtime.tasks.task import group_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ReassignedRequests:
    """What left an engine that was lost."""

    group_ids: tuple[GroupId, ...]
    num_requests: int
    tokens_kept: int


NOTHING: Final = ReassignedRequests(group_ids=(), num_requests=0, tokens_kept=0)


class TrajectoryTable:
    """All open groups. Owned by the controller's loop."""

    def __init__(self) -> None:
        self.groups: dict[GroupId, OpenGroup] = {}
        self._by_request: dict[str, Trajectory] = {}
        self._forget: dict[EngineKey, list[str]] = defaultdict(list)

    # --- opening, closing ---------------------------------------------------------------------------------------

    def open(
        self,
        group_id: GroupId,
        prompt_tokens: tuple[int, ...],
        requests: Sequence[GenerationRequest],
        *,
        first_fresh: int = 0,
        is_window: bool = False,
    ) -> OpenGroup:
        """A group without an engine: it waits for its turn."""
        assert group_id not in self.groups, f"{group_id} is open already"
        made = [Trajectory(r, first_fresh=first_fresh, is_window=is_window) for r in requests]
        group = OpenGroup(group_id, prompt_tokens, made)
        self.groups[group_id] = group
        self._by_request.update((t.request.request_id, t) for t in group.trajectories)
        return group

    def close(self, group_id: GroupId) -> OpenGroup:
        """The group was trained or dropped: its engines may forget it."""
        group = self.groups.pop(group_id)
        for t in group.trajectories:
            del self._by_request[t.request.request_id]
            self._let_go(t)
            if t.engine is not None and t.sent and not self._is_needed(t.engine, t.request.request_id):
                self._forget[t.engine].append(t.request.request_id)
        return group

    def _is_needed(self, engine: EngineKey, request_id: str) -> bool:
        """Whether the next window stands on this one, and no engine has it yet."""
        return any(t.context == (engine, request_id) for t in self._by_request.values())

    def _let_go(self, t: Trajectory) -> None:
        """An engine has the window, or it is over: what precedes it may be forgotten where that is closed."""
        if t.context is not None and t.context[1] not in self._by_request:
            self._forget[t.context[0]].append(t.context[1])
        t.context = None

    def forget_stray(self, engine: EngineKey, request_ids: Iterable[str]) -> None:
        """An engine holds requests of groups that are closed, or that went on elsewhere."""
        self._forget[engine].extend(request_ids)

    def to_forget(self, engine: EngineKey) -> list[str]:
        """Requests that the engine may forget; each is named once."""
        return self._forget.pop(engine, [])

    # --- placing ------------------------------------------------------------------------------------------------

    def place(self, group_id: GroupId, engine: EngineKey) -> int:
        """Gives the group's unfinished, unassigned requests to an engine. Returns their number."""
        group = self.groups[group_id]
        group.waits = False
        unassigned = [t for t in group.trajectories if not t.finished and t.engine is None]
        for t in unassigned:
            t.engine, t.sent = engine, False
        return len(unassigned)

    def unassigned(self) -> dict[GroupId, int]:
        """Number of unfinished requests without an engine, of each group that had one, oldest first."""
        counts = {
            g.group_id: sum(t.engine is None and not t.finished for t in g.trajectories)
            for g in sorted(self.groups.values(), key=lambda g: g.group_id)
            if not g.waits
        }
        return {g: n for g, n in counts.items() if n}

    def unsent(self, engine: EngineKey) -> list[GenerationRequest]:
        """What the engine must be given, each with the tokens that others made of it."""
        return [t.with_prefix() for t in self._unfinished_on(engine) if not t.sent]

    def mark_sent(self, engine: EngineKey, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            t = self._by_request.get(request_id)
            if t is not None and t.engine == engine:
                t.sent = True
                self._let_go(t)
            else:
                # Closed or moved while the call was in progress: the engine holds it for nothing.
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
            stop = min(stop, t.request.max_response_tokens - chunk.offset)
            if start < stop:
                t.tokens.extend(chunk.tokens[start:stop])
                t.logprobs.extend(chunk.logprobs[start:stop])
                t.versions.extend(chunk.versions[start:stop])
            whole = stop == len(chunk.tokens)
            t.note_end(chunk, whole=whole)
            if t.ended_before:
                t.again()
            if chunk.finished and whole and not t.finished:
                # It is wanted with another seed, or longer than this engine was asked for: it is submitted again.
                t.sent = False
                self._forget[engine].append(t.request.request_id)
            if t.finished and self._is_finished(t.request.group_id):
                finished.append(t.request.group_id)
        return finished

    def _is_finished(self, group_id: GroupId) -> bool:
        """Whether all samples ended; then it is to be scored, unless it is a window without an end of the answer."""
        group = self.groups[group_id]
        if not all(t.finished for t in group.trajectories):
            return False
        group.phase = GroupPhase.SCORED if group.is_cut else GroupPhase.FINISHED
        return True

    def end_with(self, group_id: GroupId, other: OpenGroup) -> None:
        """A window whose tokens a later one of the same answer still has: it takes them from there.

        As far as they go: all of them, and it ends where the later one begins; or some, and it continues behind them.
        """
        (t,), (later,) = self.groups[group_id].trajectories, other.trajectories
        if t.engine is not None and t.sent:
            self._forget[t.engine].append(t.request.request_id)
        t.engine, t.sent = None, False
        t.become(later, t.request.max_response_tokens)
        if len(t.tokens) == t.request.max_response_tokens:
            t.cut()
            self.groups[group_id].waits = False
            self._is_finished(group_id)

    def adopt(
        self, engine: EngineKey, held: Iterable[tuple[GenerationRequest, TokenChunk]], proven_version: int
    ) -> list[GroupId]:
        """Re-adopts what an engine holds, after a restart of the controller. Returns the groups finished by it.

        Where two engines hold a request (it had moved), the one with more tokens keeps it.
        """
        finished: list[GroupId] = []
        for request, chunk in held:
            t = self._by_request.get(request.request_id)
            if t is None and self._inherit(engine, request, chunk, proven_version):
                continue
            if t is None or t.finished or (t.engine is not None and len(chunk.tokens) <= len(t.tokens)):
                self._forget[engine].append(request.request_id)
                continue
            if t.engine is not None:
                self._forget[t.engine].append(request.request_id)
            t.tokens, t.logprobs, t.versions = [], [], []
            t.engine, t.sent = engine, True
            self._let_go(t)
            self.groups[t.request.group_id].waits = False
            finished += self.take(engine, [chunk], proven_version)
            if not t.finished and any(v > proven_version for v in chunk.versions):
                # These may be of a discarded policy: the run went back, and the controller died before it told the
                # engine. Later that version number belongs to another policy. It continues from what is proven now.
                t.sent = False
                self._forget[engine].append(request.request_id)
        return finished

    def _inherit(self, engine: EngineKey, request: GenerationRequest, chunk: TokenChunk, proven_version: int) -> bool:
        """Whether an engine holds a window that is closed, and what precedes a later one that has none."""
        number = group_number(request.group_id)
        proven = next((i for i, v in enumerate(chunk.versions) if v > proven_version), len(chunk.tokens))
        later = (
            t
            for t in self._by_request.values()
            if group_number(t.request.group_id) == number and t.engine is None and not t.tokens
        )
        heir = max((t for t in later if 0 < t.first_fresh <= proven), key=lambda t: t.first_fresh, default=None)
        if heir is None:
            return False
        stop = heir.first_fresh
        heir.tokens, heir.logprobs = list(chunk.tokens[:stop]), list(chunk.logprobs[:stop])
        heir.versions, heir.context = list(chunk.versions[:stop]), (engine, request.request_id)
        return True

    # --- losing an engine ---------------------------------------------------------------------------------------

    def cut(self, engine: EngineKey) -> ReassignedRequests:
        """Ends what an engine leaves unfinished where it stands, to be trained on as it is.

        What has no token of its own yet is left; so is what must reach the next window, which has begun.
        """
        open_ended = (t for t in self._unfinished_on(engine) if not self.groups[t.request.group_id].followed)
        leaving = [t for t in open_ended if len(t.tokens) > t.first_fresh]
        for t in leaving:
            t.cut()
            self._is_finished(t.request.group_id)
        return _moved(leaving)

    def leave(self, engine: EngineKey, *, alive: bool = False) -> ReassignedRequests:
        """Takes all unfinished requests away from an engine: they become unassigned and keep their tokens.

        `alive`: the engine can still forget them. Otherwise it is lost, with all that it holds.
        """
        leaving = list(self._unfinished_on(engine))
        if alive:
            self._forget[engine].extend(t.request.request_id for t in leaving if t.sent)
        else:
            for t in self._by_request.values():
                if t.engine == engine:
                    t.engine, t.sent = None, False
                if t.context is not None and t.context[0] == engine:
                    t.context = None
            self._forget.pop(engine, None)
        for t in leaving:
            t.engine, t.sent = None, False
        return _moved(leaving)

    def mark_followed(self, group_id: GroupId) -> None:
        """The window's end is final: the next one is in the ledger."""
        self.groups[group_id].followed = True

    # --- scoring and training -----------------------------------------------------------------------------------

    def in_phase(self, phase: GroupPhase) -> list[OpenGroup]:
        """Groups in a phase, oldest first."""
        return sorted((g for g in self.groups.values() if g.phase is phase), key=lambda g: g.group_id)

    def score(self, group_id: GroupId, rewards: Sequence[float]) -> None:
        group = self.groups[group_id]
        assert group.phase is GroupPhase.FINISHED and len(rewards) == len(group.trajectories)
        group.rewards, group.phase = tuple(rewards), GroupPhase.SCORED

    def judge(self, group_ids: Iterable[GroupId], phase: GroupPhase) -> None:
        """What dynamic sampling makes of scored groups: they are accepted, or set aside."""
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
        """They are scored again, and no more: dynamic sampling judges them again, because their tokens may change."""
        for group_id in group_ids:
            group = self.groups.get(group_id)
            if group is not None and group.phase is GroupPhase.ASSIGNED:
                group.phase = GroupPhase.SCORED

    def too_stale(self, step: int, staleness_max: int) -> list[OpenGroup]:
        """Groups that can be trained neither in `step` nor later: even their newest token is too old by then.

        Older tokens of a group are left out by the loss, one by one; so a long answer, whose first tokens are old when
        its last one comes, is not lost for that. One that is being generated gets newer tokens yet.
        """
        return [
            g
            for g in sorted(self.groups.values(), key=lambda g: g.group_id)
            if g.phase in UNTRAINED and g.version_max is not None and step - g.version_max > staleness_max
        ]

    def waiting(self, proven: Mapping[EngineKey, int]) -> dict[GroupId, int]:
        """Version of the newest token of each group that a step may still take.

        `proven`: the version of each engine, of which the next tokens of an unfinished group are.
        """
        over = (GroupPhase.ASSIGNED, GroupPhase.FILTERED)
        found = {g.group_id: _newest(g, proven) for g in self.groups.values() if g.phase not in over}
        return {group_id: version for group_id, version in found.items() if version is not None}

    def truncate_after(self, version: int) -> None:
        """Back to an older policy: tokens of versions beyond `version` are of a discarded policy.

        Every unfinished trajectory leaves its engine, which continues with that policy until it is updated.
        """
        for group in self.groups.values():
            for t in group.trajectories:
                self._let_go(t)
                keep = next((i for i, v in enumerate(t.versions) if v > version), None)
                if keep is not None:
                    del t.tokens[keep:], t.logprobs[keep:], t.versions[keep:]
                    t.end, group.phase, group.rewards = None, GroupPhase.GENERATING, ()
                if not t.finished and t.engine is not None:
                    self._forget[t.engine].append(t.request.request_id)
                    t.engine, t.sent = None, False
            # More is open now than the next steps can take: what has nothing yet is not begun before its time, when it
            # would only wait until it is too old. And a window waits for what precedes it to be made again.
            group.waits = group.waits or group.is_untouched


def _newest(group: OpenGroup, proven: Mapping[EngineKey, int]) -> int | None:
    coming = (proven.get(t.engine) for t in group.trajectories if t.engine is not None and not t.finished)
    return max((v for v in (group.version_max, *coming) if v is not None), default=None)


def _moved(leaving: Sequence[Trajectory]) -> ReassignedRequests:
    return ReassignedRequests(
        group_ids=tuple(sorted({t.request.group_id for t in leaving})),
        num_requests=len(leaving),
        tokens_kept=sum(len(t.tokens) for t in leaving),
    )


def mean_reward(groups: Iterable[PromptGroup]) -> float | None:
    """Mean over all complete samples; None where none is."""
    rewards = [s.reward for g in groups for s in g.samples if s.is_over]
    return sum(rewards) / len(rewards) if rewards else None


def reached_staleness(step: int, groups: Iterable[PromptGroup], staleness_max: int) -> int:
    """Largest distance between a step and the version of a token trained in it; older ones are left out by the loss."""
    fresh = (step - v for g in groups for s in g.samples for v in s.versions[s.first_fresh :])
    return max((d for d in fresh if d <= staleness_max), default=0)
