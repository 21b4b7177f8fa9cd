"""Controller-to-replica calls: one small Protocol at the edge, and typed ports with a deadline on every short call.

A client carries a call to one incarnation of one replica. It raises the remote method's exception, or `ReplicaExited`
when the process is gone (Ray: the actor died; tests: a scripted death). A call that exceeds its deadline raises
`DeadlineExceeded` with the replica and the method. Whether it took effect is then unknown, so all calls are idempotent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from rolecall.core.errors import DeadlineExceeded, NonFiniteValue, RolecallError
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.membership import Actual
from rolecall.rl_runtime.protocol.checkpoints import CheckpointInfo, WrittenCheckpoint
from rolecall.rl_runtime.protocol.messages import (
    CommitRecord,
    ComputedMicrobatch,
    Conversation,
    GenerationRequest,
    Holder,
    Manifest,
    Microbatch,
    Observation,
    PromptGroup,
    PulledTokens,
    RolloutInfo,
    StepResult,
    TokenChunk,
    TrainerInfo,
    WeightProof,
)

T = TypeVar("T")

CONTROL_SECONDS = 3.0
"""Deadline of calls that only read or record; each actor has separate threads for them."""
SNAPSHOT_SECONDS = 120.0
LOAD_SECONDS = 900.0
"""Deadline of the reading of a checkpoint, twice: it is verified first."""
WRITE_SECONDS = 1800.0
"""Deadline of the writing of a checkpoint, which nothing waits for while training goes on."""


class ReplicaExited(RolecallError):
    """The process of a replica has exited: its calls will never be answered."""

    def __init__(self, *, replica: ReplicaId, incarnation: int, because: str) -> None:
        self.replica, self.incarnation, self.because = replica, incarnation, because
        super().__init__(f"{replica}#{incarnation} is gone: {because}")


def is_code_error(error: BaseException) -> bool:
    """Whether the job's code raised it. Lost peers, stale messages and deadlines belong to the runtime."""
    return isinstance(error, NonFiniteValue) or (isinstance(error, Exception) and not isinstance(error, RolecallError))


class ReplicaClient(Protocol):
    """One incarnation of one replica, independent of the transport."""

    replica: ReplicaId
    incarnation: int

    async def call(self, method: str, *args: Any) -> Any:
        """Calls the replica's method. Raises its exception, or `ReplicaExited`."""

    async def timed_call(self, method: str, *args: Any) -> tuple[Any, float]:
        """`call`, and the seconds until the answer arrived. The time until this process's event loop then took it is
        not included: that is no lateness of the replica."""


Connect = Callable[[Actual], ReplicaClient]
"""Creates a client for an `actual` record. Raises `ReplicaExited` when there is no such process."""


async def within(call: Awaitable[T], seconds: float, waited_for: str) -> T:
    """The call's answer.

    Raises:
        DeadlineExceeded: no answer in time. A `TimeoutError` raised by the call itself is passed on.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise DeadlineExceeded(waited_for=waited_for, seconds=seconds)
    return task.result()


@dataclass(frozen=True, slots=True)
class RoleClient:
    """Calls common to all roles."""

    client: ReplicaClient

    @property
    def replica(self) -> ReplicaId:
        return self.client.replica

    @property
    def incarnation(self) -> int:
        return self.client.incarnation

    def __str__(self) -> str:
        return f"{self.replica}#{self.incarnation}"

    async def _ask(self, seconds: float, method: str, *args: Any) -> Any:
        return await within(self.client.call(method, *args), seconds, f"{self} {method}")

    async def ready(self) -> tuple[int, int]:
        return cast(tuple[int, int], await self._ask(CONTROL_SECONDS, "ready"))


class TrainerPort(RoleClient):
    __slots__ = ()

    async def info(self) -> TrainerInfo:
        return cast(TrainerInfo, await self._ask(CONTROL_SECONDS, "info"))

    async def open_store(self, epoch: int) -> tuple[str, int]:
        return cast(tuple[str, int], await self._ask(CONTROL_SECONDS, "open_store", epoch))

    async def join(self, epoch: int, rank: int, size: int, store: tuple[str, int], seconds: float) -> None:
        await self._ask(seconds, "join", self.incarnation, epoch, rank, size, *store)

    async def train_step(
        self,
        epoch: int,
        step: int,
        mine: Sequence[Microbatch],
        all_ids: Sequence[str],
        ledger: ChainHead,
        members: Sequence[ReplicaId],
        first: Sequence[ComputedMicrobatch] = (),
    ) -> StepResult:
        """Without a deadline: the caller watches how many microbatches `info` counts."""
        args = (self.incarnation, epoch, step, list(mine), list(all_ids), ledger, list(members), list(first))
        return cast(StepResult, await self.client.call("train_step", *args))

    async def copy_from(self, holder: Holder, seconds: float) -> None:
        await self._ask(seconds, "copy_from", holder)

    async def idle(self, seconds: float) -> None:
        """Returns when the working thread is free; a trainer whose working thread hangs still answers `info`."""
        await self._ask(seconds, "idle")

    async def list_checkpoints(self, folder: str) -> tuple[CheckpointInfo, ...]:
        """All checkpoints in `folder`, as this trainer sees it."""
        return cast(tuple[CheckpointInfo, ...], await self._ask(SNAPSHOT_SECONDS, "list_checkpoints", folder))

    async def load_checkpoint(self, path: str) -> None:
        """Takes the state of the checkpoint at `path`; empty: the run's initial state."""
        await self._ask(LOAD_SECONDS, "load_checkpoint", path)

    async def take_snapshot(self) -> int:
        """Copies its state, for `write_checkpoint`. Returns the step of the state."""
        return cast(int, await self._ask(SNAPSHOT_SECONDS, "take_snapshot"))

    async def write_checkpoint(self, folder: str, step: int) -> WrittenCheckpoint:
        """Writes a checkpoint of the snapshot of `step`."""
        return cast(WrittenCheckpoint, await self._ask(WRITE_SECONDS, "write_checkpoint", folder, step))

    async def remove_checkpoints(self, paths: Sequence[str]) -> None:
        """What cannot be removed stays."""
        await self._ask(WRITE_SECONDS, "remove_checkpoints", list(paths))

    async def last_result(self) -> StepResult | None:
        return cast("StepResult | None", await self._ask(CONTROL_SECONDS, "last_result"))

    async def reset_step(self, step: int) -> None:
        await self._ask(CONTROL_SECONDS, "reset_step", step)

    async def commit_record(self) -> CommitRecord:
        return cast(CommitRecord, await self._ask(CONTROL_SECONDS, "commit_record"))

    async def manifest(self, policy_version: int) -> Manifest:
        return cast(Manifest, await self._ask(CONTROL_SECONDS, "manifest", policy_version))


class RolloutPort(RoleClient):
    """Calls of the pump (`submit`, `tokens_since`, `ack`) have no deadline here: an unanswered one stays the only call
    in flight to that engine until it answers or is fenced, and the pump monitors it.
    """

    __slots__ = ()

    async def info(self) -> RolloutInfo:
        return cast(RolloutInfo, await self._ask(CONTROL_SECONDS, "info"))

    async def list_requests(self) -> list[tuple[GenerationRequest, TokenChunk]]:
        held = await self._ask(CONTROL_SECONDS, "list_requests", self.incarnation)
        return cast(list[tuple[GenerationRequest, TokenChunk]], held)

    async def update_weights(
        self, epoch: int, manifest: Manifest, holders: Sequence[Holder], seconds: float
    ) -> WeightProof:
        args = (self.incarnation, epoch, manifest, list(holders))
        return cast(WeightProof, await self._ask(seconds, "update_weights", *args))

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        await self.client.call("submit", self.incarnation, list(requests))

    async def tokens_since(self, offsets: dict[str, int]) -> PulledTokens:
        return cast(PulledTokens, await self.client.call("tokens_since", self.incarnation, offsets))

    async def drain(self, offsets: dict[str, int], seconds: float) -> PulledTokens:
        """The last tokens of an engine that is replaced alive, even if it does not stop within `seconds`."""
        return cast(PulledTokens, await self._ask(seconds * 2, "drain", self.incarnation, offsets, seconds))

    async def sleep(self, offsets: dict[str, int], seconds: float) -> PulledTokens:
        """The engine stops generating until the next `update_weights`. Returns the last tokens."""
        args = (self.incarnation, offsets, seconds)
        return cast(PulledTokens, await self._ask(seconds + CONTROL_SECONDS, "sleep", *args))

    async def ack(self, request_ids: Sequence[str]) -> None:
        """The engine drops these requests and aborts those still running."""
        await self.client.call("ack", self.incarnation, list(request_ids))


class RewardPort(RoleClient):
    __slots__ = ()

    async def score(
        self, groups: Sequence[PromptGroup], seconds: float, waited_seconds: float = 0.0
    ) -> tuple[list[list[float]], float]:
        """The rewards, and the seconds until they arrived. `waited_seconds`: those of the call before this one; 0: the
        caller does not say."""
        call = self.client.timed_call("score", self.incarnation, list(groups), waited_seconds)
        return cast(tuple[list[list[float]], float], await within(call, seconds, f"{self} score"))

    async def observe(self, conversations: Sequence[Conversation], seconds: float) -> list[Observation]:
        """What the environment answers to each."""
        answer = await self._ask(seconds, "observe", self.incarnation, list(conversations))
        return cast(list[Observation], answer)
