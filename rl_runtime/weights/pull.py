"""The pulling side of the weight port: keeps verified tensors and requests missing ones from another holder.

A tensor is allocated only after the holder's header agrees with the manifest (or, for a state, passed the limits), and
counts only after the digest of its received bytes matches. A holder that serves another puller reports so at once;
`pull_any` then tries the next, and waits for a busy one only when no other holder can help. A holder that does not have
the version yet is retried while others are busy, so weights spread from puller to puller instead of from one source.
"""

import json
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import torch

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import DeadlineExceeded, WireError
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.protocol.messages import Holder, Manifest, TensorEntry
from rolecall.rl_runtime.weights.digest import DTYPES, check_manifest, entries_digest, raw_bytes, tensor_digest
from rolecall.rl_runtime.weights.wire import AuthenticatedConnection

CONNECT_SHARE: Final = 0.2
"""Share of the transfer timeout for connecting and the handshake: a stopped holder must not use up all of it."""
PIECE_SHARE: Final = 0.3
"""Share of the transfer timeout that one header, or one MiB of payload, may take."""
BUSY_WAIT_SECONDS: Final = 0.02
"""Pause before busy holders are retried: about the time to transfer 50 MB on loopback."""
NUM_TENSORS_MAX: Final = 100_000
NUM_DIMS_MAX: Final = 8
NAME_CHARS_MAX: Final = 512
STATE_BYTES_MAX: Final = 1 << 40
"""Largest state accepted, 1 TiB: a limit against corrupt headers, not a budget."""


class TransferProblem(StrEnum):
    BUSY = "busy"  # serves another puller: try another holder, or retry
    ABSENT = "absent"  # does not have this version
    LOST = "lost"  # rejected the pull, or disconnected
    TIMEOUT = "timeout"  # too slow, or stopped
    CORRUPT = "corrupt"  # sent bytes that do not match the manifest


class TransferFailed(WireError):
    """A pull did not finish. `pieces` has the verified tensors: pass it to the next `pull` to continue."""

    def __init__(
        self, *, holder: Holder | None, problem: TransferProblem, reason: str, pieces: "PartialTransfer"
    ) -> None:
        self.holder, self.problem, self.reason, self.pieces = holder, problem, reason, pieces
        source = f"{holder.replica}#{holder.incarnation}" if holder is not None else "all holders"
        have = f"{len(pieces.tensors)} of {len(pieces.entries)} tensors"
        super().__init__(f"transfer from {source}: {problem}: {reason} ({have} are kept)")

    def __reduce__(self) -> tuple[Any, ...]:
        # Not pickled: the pieces are useless in another process, and Ray would transfer every byte of them.
        rebuild, (cls, args, facts) = super().__reduce__()
        return rebuild, (cls, args, {**facts, "pieces": replace(self.pieces, tensors={})})


@dataclass(slots=True, kw_only=True)
class PartialTransfer:
    """One puller's verified part of one snapshot. Every tensor in it matches its entry's digest."""

    digest: str  # of the manifest, or of a state's index
    version: int
    entries: tuple[TensorEntry, ...]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    bytes_by_holder: dict[ReplicaId, int] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> "PartialTransfer":
        """An empty transfer for this manifest. Raises WireError: the manifest is inconsistent or exceeds the limits."""
        check_manifest(manifest)
        _check_limits(manifest.tensors)
        return cls(digest=manifest.digest, version=manifest.policy_version, entries=manifest.tensors)

    def missing(self) -> tuple[TensorEntry, ...]:
        return tuple(e for e in self.entries if e.name not in self.tensors)

    @property
    def bytes_received(self) -> int:
        return sum(self.bytes_by_holder.values())

    @property
    def main_holder(self) -> ReplicaId:
        """The holder that provided the most bytes."""
        return max(self.bytes_by_holder, key=lambda r: self.bytes_by_holder[r])


class PullSettings:
    """Settings of one pull, which starts now: puller, token, deadline."""

    def __init__(self, *, token: str, puller: str, timeout_seconds: float, clock: Clock | None = None) -> None:
        self.token, self.puller, self.timeout_seconds = token, puller, timeout_seconds
        self.clock = clock or SystemClock()
        self.deadline = self.clock.monotonic() + timeout_seconds

    @property
    def time_is_up(self) -> bool:
        return self.clock.monotonic() >= self.deadline

    def until(self, share: float) -> float:
        return min(self.deadline, self.clock.monotonic() + share * self.timeout_seconds)


def pull_any(
    holders: Sequence[Holder],
    manifest: Manifest,
    *,
    token: str,
    puller: str,
    timeout_seconds: float,
    pieces: PartialTransfer | None = None,
    clock: Clock | None = None,
    on_corrupt: Callable[[Holder, str], None] = lambda _holder, _reason: None,
) -> PartialTransfer:
    """Pulls all of `manifest` from any of `holders`, in their order, within a total of `timeout_seconds`.

    `on_corrupt`: called for each holder whose bytes are not those of the manifest, with the reason.

    Raises:
        TransferFailed: no holder is left, or the time is up; `holder` is None, and the reason lists each holder's.
        WireError: the manifest is invalid.
    """
    pieces = fitting(pieces, manifest)
    terms = PullSettings(token=token, puller=puller, timeout_seconds=timeout_seconds, clock=clock)
    left, reasons = list(holders), dict[str, str]()
    problem, may_help = TransferProblem.ABSENT, bool(left)
    while may_help and not terms.time_is_up:
        may_help = False
        for holder in tuple(left):
            try:
                attempt(holder, pieces, terms)
                return pieces
            except TransferFailed as e:
                problem = e.problem
                if problem is TransferProblem.CORRUPT:
                    on_corrupt(holder, e.reason)
                reasons[holder.replica] = f"{holder.replica}: {e.problem}: {e.reason}"
                may_help = may_help or e.problem is TransferProblem.BUSY
                if e.problem not in (TransferProblem.BUSY, TransferProblem.ABSENT):
                    left.remove(holder)
        if may_help:
            terms.clock.sleep(BUSY_WAIT_SECONDS)
    if may_help:
        problem = TransferProblem.TIMEOUT
    reason = "; ".join(reasons.values()) or "no holder was named"
    raise TransferFailed(holder=None, problem=problem, reason=reason, pieces=pieces)


def pull_state(
    holder: Holder,
    *,
    token: str,
    puller: str,
    timeout_seconds: float,
    bytes_max: int = STATE_BYTES_MAX,
    clock: Clock | None = None,
) -> tuple[dict[str, torch.Tensor], str]:
    """Pulls a consistent copy of a trainer's whole state: tensors, meta (JSON).

    Raises:
        TransferFailed: no part is kept, because the next holder's state is of another moment.
    """
    terms = PullSettings(token=token, puller=puller, timeout_seconds=timeout_seconds, clock=clock)
    pieces = PartialTransfer(digest="", version=-1, entries=())
    meta = ""

    def opened(answer: dict[str, Any]) -> None:
        nonlocal meta
        meta, pieces.entries = _checked_index(answer, bytes_max)
        pieces.digest = str(answer["digest"])

    attempt(holder, pieces, terms, opened)
    return pieces.tensors, meta


def fitting(pieces: PartialTransfer | None, manifest: Manifest) -> PartialTransfer:
    """`pieces` if they are of this manifest, otherwise an empty transfer."""
    fresh = PartialTransfer.of(manifest)
    return pieces if pieces is not None and pieces.digest == fresh.digest else fresh


def attempt(
    holder: Holder,
    pieces: PartialTransfer,
    terms: PullSettings,
    opened: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Pulls what is missing in `pieces` from one holder. `opened`: receives the answer of a state's holder.

    Raises:
        TransferFailed: with the pieces so far.
    """

    def failed(problem: TransferProblem, reason: str) -> TransferFailed:
        return TransferFailed(holder=holder, problem=problem, reason=reason, pieces=pieces)

    try:
        sock = socket.create_connection(
            (holder.host, holder.port), timeout=max(0.001, terms.until(CONNECT_SHARE) - terms.clock.monotonic())
        )
    except OSError as e:
        raise failed(TransferProblem.LOST, f"cannot connect to {holder.host}:{holder.port}: {e}") from e
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = AuthenticatedConnection(
            sock, peer=f"{holder.replica}#{holder.incarnation}", clock=terms.clock, is_server=False
        )
        try:
            wire.start_handshake(terms.token.encode(), terms.until(CONNECT_SHARE))
            _open(wire, pieces, terms, failed, opened)
            for entry in pieces.missing():
                tensor = _read_tensor(wire, entry, terms, failed)
                pieces.tensors[entry.name] = tensor
                size = tensor.numel() * tensor.element_size()
                pieces.bytes_by_holder[holder.replica] = pieces.bytes_by_holder.get(holder.replica, 0) + size
            wire.send({"op": "done"}, terms.until(PIECE_SHARE))
        except DeadlineExceeded as e:
            raise failed(TransferProblem.TIMEOUT, str(e)) from e
        except TransferFailed:
            raise
        except WireError as e:
            raise failed(TransferProblem.LOST, str(e)) from e


_Failed = Callable[[TransferProblem, str], TransferFailed]


def _open(
    wire: AuthenticatedConnection,
    pieces: PartialTransfer,
    terms: PullSettings,
    failed: _Failed,
    opened: Callable[[dict[str, Any]], None] | None,
) -> None:
    stream = "policy" if opened is None else "state"
    request = {"op": "open", "stream": stream, "version": pieces.version, "puller": terms.puller}
    wire.send(request, terms.until(PIECE_SHARE))
    answer = wire.receive(terms.until(PIECE_SHARE))
    if "error" in answer:
        known = {"busy": TransferProblem.BUSY, "absent": TransferProblem.ABSENT}
        raise failed(known.get(str(answer["error"]), TransferProblem.LOST), str(answer.get("reason"))[:300])
    if opened is not None:
        opened(answer)
    elif answer.get("digest") != pieces.digest:
        # Same version, other weights: the holder or this puller has not yet followed a return to a checkpoint.
        raise failed(TransferProblem.ABSENT, f"holds another version {pieces.version}: its digest differs")


def _read_tensor(
    wire: AuthenticatedConnection, entry: TensorEntry, terms: PullSettings, failed: _Failed
) -> torch.Tensor:
    wire.send({"op": "tensor", "name": entry.name}, terms.until(PIECE_SHARE))
    header = wire.receive(terms.until(PIECE_SHARE))
    size = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    wanted = {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "num_bytes": size}
    if header != wanted:
        raise failed(TransferProblem.CORRUPT, f"{entry.name}: announced as {json.dumps(header)[:200]}")
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    wire.read_payload(raw_bytes(tensor), PIECE_SHARE * terms.timeout_seconds, terms.deadline, entry.name)
    if tensor_digest(tensor) != entry.digest:
        raise failed(TransferProblem.CORRUPT, f"{entry.name}: bytes received have another digest")
    return tensor


def _checked_index(answer: dict[str, Any], bytes_max: int) -> tuple[str, tuple[TensorEntry, ...]]:
    raw, meta = answer.get("entries"), answer.get("meta")
    if not isinstance(raw, list) or not isinstance(meta, str):
        raise WireError("index of the state is malformed")
    entries = []
    for item in raw:
        match item:
            case [str(name), str(dtype), [*shape], str(digest)] if all(type(n) is int for n in shape):
                entries.append(TensorEntry(name=name, dtype=dtype, shape=tuple(shape), digest=digest))
            case _:
                raise WireError(f"index of the state is malformed at {str(item)[:100]!r}")
    _check_limits(entries, bytes_max)
    if entries_digest(entries) != answer.get("digest"):
        raise WireError("index of the state does not have the digest it names")
    return meta, tuple(entries)


def _check_limits(entries: Sequence[TensorEntry], bytes_max: int = STATE_BYTES_MAX) -> None:
    """Checks the limits before any allocation. Raises WireError: names the tensor and the limit."""
    if len(entries) > NUM_TENSORS_MAX:
        raise WireError(f"{len(entries)} tensors are more than {NUM_TENSORS_MAX}")
    total, seen = 0, set[str]()
    for entry in entries:
        if not entry.name or len(entry.name) > NAME_CHARS_MAX or entry.name in seen:
            raise WireError(f"tensor name {entry.name[:80]!r} is empty, too long or there twice")
        if entry.dtype not in DTYPES:
            raise WireError(f"{entry.name}: dtype {entry.dtype[:40]!r} may not travel")
        if len(entry.shape) > NUM_DIMS_MAX or any(n < 0 for n in entry.shape):
            raise WireError(f"{entry.name}: shape {entry.shape[:10]} is not possible")
        seen.add(entry.name)
        total += math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if total > bytes_max:
            raise WireError(f"{entry.name}: tensors so far take {total} bytes, more than {bytes_max}")
