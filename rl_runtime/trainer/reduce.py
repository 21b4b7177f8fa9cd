"""One explicit all-reduce per optimizer update, and the vote before it.

Each trainer first adds up the gradients of its own microbatches. Then one bucketed all-reduce runs on a *copy* of that
sum. The local gradients stay intact, so that after a loss the survivors add the lost microbatches and reduce again in
the next epoch (ReCoVer's snapshot, without its per-bucket rewind: the whole copy is discarded). Sums are kept and
reduced in float64, so that the order of additions, which a loss changes, shows only beyond float32, and the resulting
step equals the failure-free one. Sums are not divided before the vote: the ballots carry token counts, and each member
divides by their total afterwards.

A process group lives for one epoch: a `TCPStore` on its lowest rank, a `ProcessGroupGloo` over it, no global
`init_process_group`. The store listens on its trainer's address, and each member's gloo device on the member's address;
no other interface is used. Every failure of a collective is `PeerLost`. A wait for a stopped peer ends when that peer
is killed, or at the group's timeout; abort() and shutdown() do not end it.
"""

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Final, Self

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import ProcessGroupGloo as _ProcessGroupGloo

from rolecall.agent.reporter import reporter
from rolecall.core.errors import PeerLost, StaleIncarnation
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.rl_runtime.protocol.messages import MicrobatchNumbers
from rolecall.rl_runtime.protocol.policy_health import HealthSums

logger = logging.getLogger(__name__)

ProcessGroupGloo: Any = _ProcessGroupGloo  # torch's stubs lack its options and its collectives

BUCKET_BYTES: Final = 2 << 20
"""Small enough to locate a stall by bucket, large enough to hide gloo's latency (0.3 ms)."""
BALLOT_BYTES_MAX: Final = 32 << 20
"""Larger ballots are rejected before any allocation. The largest step of a job file, on one member, takes 18 MB."""
LOOPBACK: Final = "127.0.0.1"


def nothing(*_args: object) -> None:
    """The default hook; does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchStats:
    """One microbatch's contribution to an update besides its gradient. Sums and extremes, nothing is divided."""

    microbatch_id: str
    group_ids: tuple[GroupId, ...]
    policy_loss: float
    health: HealthSums
    finite: bool  # losses and gradients
    numbers: MicrobatchNumbers
    unusual: str = ""  # why its trainer found the numbers unusual (`band`)
    log_ratios: Mapping[str, float] = field(default_factory=dict)  # see StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitVote:
    """One member's ballot for an optimizer update; the last one of a step is for its commit."""

    replica: ReplicaId
    incarnation: int
    epoch: int
    step: int
    microbatches: tuple[MicrobatchStats, ...]
    gradient_digest: str  # digest of the reduced gradient
    weights_digest: str  # digest of the weights before the update: members that have diverged must not continue
    ledger: ChainHead
    update: int = 0  # of the step, from 0

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        d: dict[str, Any] = json.loads(raw)
        return cls(
            **{**d, "microbatches": tuple(map(_stats_of, d["microbatches"])), "ledger": ChainHead(**d["ledger"])}
        )


def _stats_of(d: dict[str, Any]) -> MicrobatchStats:
    return MicrobatchStats(
        **{
            **d,
            "group_ids": tuple(d["group_ids"]),
            "health": HealthSums(**d["health"]),
            "numbers": MicrobatchNumbers(**d["numbers"]),
        }
    )


def disagreement(ballots: Sequence[CommitVote], *, members: Sequence[str], all_ids: Sequence[str]) -> str:
    """Why these ballots must not be committed; empty if they agree. Pure, and the same at every member.

    Agreement: one ballot from each member, one epoch, step, update, ledger head, gradient and weights, and the
    microbatches of all together are exactly `all_ids`, those of the update, each once.
    """
    voters = sorted(b.replica for b in ballots)
    if voters != sorted(members):
        return f"voters are {voters}, members {sorted(members)}"
    first = ballots[0]
    for name in ("epoch", "step", "update", "ledger", "gradient_digest", "weights_digest"):
        for other in ballots[1:]:
            if getattr(other, name) != getattr(first, name):
                mine, theirs = str(getattr(first, name))[:60], str(getattr(other, name))[:60]
                return f"{name}: {first.replica} has {mine}, {other.replica} has {theirs}"
    owners: dict[str, str] = {}
    for ballot in ballots:
        for stats in ballot.microbatches:
            before = owners.setdefault(stats.microbatch_id, ballot.replica)
            if before != ballot.replica:
                return f"microbatch {stats.microbatch_id}: computed by both {before} and {ballot.replica}"
    missing, surplus = sorted(set(all_ids) - set(owners)), sorted(set(owners) - set(all_ids))
    if missing or surplus:
        return f"microbatches missing: {missing or 'none'}, not of this step: {surplus or 'none'}"
    return ""


class EpochStore:
    """The rendezvous of one epoch, on its lowest rank. Discarded with the epoch."""

    def __init__(self, host: str, timeout_seconds: float) -> None:
        # Our own socket, because TCPStore by default listens on all addresses.
        listener = socket.create_server((host, 0), backlog=128)
        self.host, self.port = host, int(listener.getsockname()[1])
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            None,
            True,
            timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store owns and closes it

    def close(self) -> None:
        self._store = None


class ReduceGroup:
    """The trainers of one epoch. Used by one thread. After its first failure, every call fails at once."""

    def __init__(
        self,
        *,
        epoch: int,
        rank: int,
        size: int,
        host: str,
        port: int,
        timeout_seconds: float,
        address: str = LOOPBACK,
        shard: int = 0,
    ) -> None:
        """Connects to all members. `host`, `port`: the epoch's store; `address`: where other members reach this one;
        `shard`: the rank in its replica that each member is, whose shards are reduced.

        Raises:
            PeerLost: not all members arrived within `timeout_seconds`, or one disconnected.
        """
        self.epoch, self.rank, self.size = epoch, rank, size
        self._failure = ""
        self._group: Any = None
        if size == 1:
            return
        timeout = timedelta(seconds=timeout_seconds)
        try:
            store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
            options = ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            self._group = ProcessGroupGloo(PrefixStore(f"epoch-{epoch}-{shard}", store), rank, size, options)
        except RuntimeError as e:
            raise self._lost("joining", e) from e

    def all_reduce(
        self, local: torch.Tensor, *, bucket_bytes: int = BUCKET_BYTES, on_bucket: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """The sum over all members, in a new tensor; `local` (flat) is unchanged. Alone: `local` itself, which must not
        be changed then. Sums of a GPU are reduced in pinned memory of the host (decision 0032).

        Raises:
            PeerLost: a peer disconnected, or the timeout expired. The partial result is discarded.
        """
        snapshot = local if self.size == 1 else _copy_on_host(local)
        stride = max(1, bucket_bytes // local.element_size())
        for number, start in enumerate(range(0, snapshot.numel(), stride)):
            on_bucket()
            with reporter.collective():
                self._all_reduce_in_place(snapshot[start : start + stride], f"bucket {number}")
        return snapshot.to(local.device)

    def gather(self, message: bytes, *, on_bucket: Callable[[], None] = nothing) -> list[bytes]:
        """Every member's message, by rank. Raises PeerLost: as in `all_reduce`."""
        on_bucket()
        if self.size == 1:
            self._refuse_if_failed()
            return [message]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(message)
        with reporter.collective():
            self._all_reduce_in_place(lengths, "vote lengths")
        if int(lengths.max()) > BALLOT_BYTES_MAX:
            raise self._lost("vote", RuntimeError(f"a ballot of {int(lengths.max())} bytes"))
        # One row per member; the other members' rows are zero here, so that a sum acts as a gather.
        rows = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
        rows[self.rank, : len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        with reporter.collective():
            self._all_reduce_in_place(rows, "vote")
        return [bytes(rows[r, : int(lengths[r])].numpy().tobytes()) for r in range(self.size)]

    def close(self, because: str = "the group is closed") -> None:
        """Closes the group in a daemon thread, because a broken gloo group can block; waiting peers fail at once."""
        group, self._group = self._group, None
        self._failure = self._failure or because
        if group is not None:
            holder = [group]
            del group
            threading.Thread(target=holder.clear, name=f"close-epoch-{self.epoch}", daemon=True).start()

    def _all_reduce_in_place(self, tensor: torch.Tensor, what: str) -> None:
        self._refuse_if_failed()
        if self.size == 1:
            return
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as e:
            raise self._lost(what, e) from e

    def _refuse_if_failed(self) -> None:
        if self._failure:
            raise PeerLost(epoch=self.epoch, because=self._failure)

    def _lost(self, what: str, error: RuntimeError) -> PeerLost:
        # Close synchronously: a third member may wait for this one without knowing about the lost peer.
        self.close(f"{what}: {_first_line(error)}")
        logger.warning("epoch %d: %s", self.epoch, self._failure)
        return PeerLost(epoch=self.epoch, because=self._failure)


def _copy_on_host(local: torch.Tensor) -> torch.Tensor:
    if local.device.type == "cpu":
        return local.clone()
    return torch.empty_like(local, device="cpu", pin_memory=True).copy_(local)


def refuse_stale(replica: str, what: str, wanted: int, got: int) -> None:
    """Checks one number of a message against this replica's. Raises StaleIncarnation: they differ."""
    if wanted != got:
        raise StaleIncarnation(replica=replica, wanted=f"{what} {wanted}", got=f"{what} {got}")


def _first_line(error: RuntimeError) -> str:
    """First line of the message: torch appends a C++ stack."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
