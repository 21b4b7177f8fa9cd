"""Point-to-point transfer of weights and states: every trainer and rollout serves its tensors, and others pull.

There is no communicator and no group: a puller needs a `Holder` (host, port) and the run's token. Two streams: `policy`
serves immutable snapshots by version, and `state` a trainer's whole state (weights, optimizer, commit record), taken on
demand. A pull transfers tensor by tensor, and a tensor counts only when the SHA-256 of its received bytes matches the
manifest: a puller whose holder dies continues at the first missing tensor with another holder. Frames and
authentication: `wire.py`. The pulling side: `pull.py`.

The newest two snapshots published are kept (double buffer), so that a puller that requested one version still finds it
when the next is published. A lease names the one puller that a source serves at a time (RobustRL: each source is pulled
by exactly one rollout) and keeps its snapshot alive past two further publications; it ends when released, or when it
expired and another puller wants the source.
"""

import functools
import logging
import math
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import DeadlineExceeded, InvalidId, RolecallError, WireError
from rolecall.core.ids import ReplicaId, split_replica
from rolecall.rl_runtime.protocol.messages import Holder, Manifest, TensorEntry
from rolecall.rl_runtime.weights.digest import entries_digest, entries_of, raw_bytes
from rolecall.rl_runtime.weights.wire import AuthenticatedConnection

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 2.0
"""A peer that has not proven the token within this is disconnected; until then it uses one of the few connections."""
NUM_SNAPSHOTS_KEPT: Final = 2
NUM_CONNECTIONS_MAX: Final = 32
NUM_REFUSALS_KEPT: Final = 64
NUM_COUNTERS_MAX: Final = 4096
REQUEST_BYTES_MAX: Final = 4096
"""A request is an operation, a version and a name; longer ones are rejected before they are read."""

StateProvider = Callable[[], tuple[Mapping[str, torch.Tensor], str] | None]
"""Returns (tensors, meta JSON), or None without a state. The tensors must be copies that do not change afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSnapshot:
    """Immutable tensors. `digest` covers all of it; a whole state has version -1 and `meta`."""

    version: int
    digest: str
    entries: tuple[TensorEntry, ...]
    tensors: Mapping[str, torch.Tensor]
    meta: str = ""


NOTHING: Final = TensorSnapshot(version=-1, digest="", entries=(), tensors={})


class SourceBusy(WireError):
    """Another puller is being served; `holds` names it."""

    def __init__(self, *, holds: str) -> None:
        self.holds = holds
        super().__init__(f"busy: {holds} is being served")


class SnapshotAbsent(WireError):
    """This version is not available (not yet, no longer, or never)."""


class SnapshotLeaseExpired(WireError):
    """The lease expired, and another puller has it now."""


@dataclass(slots=True, eq=False)
class SnapshotLease:
    puller: str
    snapshot: TensorSnapshot
    expires_at: float  # monotonic seconds


@dataclass(slots=True)
class SnapshotStore:
    """Snapshots of one stream and its single lease. Thread-safe."""

    clock: Clock
    lease_seconds: float
    _snapshots: list[TensorSnapshot] = field(default_factory=list)  # oldest first, in order of publication
    _lease: SnapshotLease | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, snapshot: TensorSnapshot) -> None:
        """Adds a snapshot and keeps the previously newest one.

        Newest means last published, not highest number: a return to a checkpoint produces lower numbers again, which
        replace stored snapshots of the same number.
        """
        with self._lock:
            others = [s for s in self._snapshots if s.version != snapshot.version]
            self._snapshots = [*others, snapshot][-NUM_SNAPSHOTS_KEPT:]

    def versions(self) -> tuple[int, ...]:
        """Available versions, oldest publication first, including one kept only by a lease."""
        with self._lock:
            kept = [s.version for s in self._snapshots]
            lease = self._live_lease()
            return tuple(([lease.snapshot.version] if lease and lease.snapshot.version not in kept else []) + kept)

    def lease(self, version: int, puller: str) -> SnapshotLease:
        """Grants the lease to `puller`.

        Raises:
            SourceBusy: another lease is alive.
            SnapshotAbsent: the version is not available.
        """

        with self._lock:
            self._refuse_if_leased()
            held = [s for s in self._snapshots if s.version == version]
            if not held:
                raise SnapshotAbsent(f"version {version} is not here, {sorted(s.version for s in self._snapshots)} are")
            self._lease = SnapshotLease(puller=puller, snapshot=held[0], expires_at=self._expiry())
            return self._lease

    def lease_fresh(self, puller: str, make: Callable[[], TensorSnapshot]) -> SnapshotLease:
        """Like `lease`, for a snapshot created on demand (a trainer's whole state): others get `busy` while it is
        created.

        Raises:
            SourceBusy: another lease is alive.
        """
        lease = SnapshotLease(puller=puller, snapshot=NOTHING, expires_at=math.inf)
        with self._lock:
            self._refuse_if_leased()
            self._lease = lease
        try:
            lease.snapshot = make()
        except BaseException:
            self.release(lease)
            raise
        with self._lock:
            lease.expires_at = self._expiry()
        return lease

    def _refuse_if_leased(self) -> None:
        current = self._live_lease()
        if current is not None:
            raise SourceBusy(holds=current.puller)

    def _expiry(self) -> float:
        return self.clock.monotonic() + self.lease_seconds

    def renew(self, lease: SnapshotLease) -> None:
        """Called with each piece that is sent.

        Raises:
            SnapshotLeaseExpired: it expired, and another puller has the source.
        """
        with self._lock:
            if self._lease is not lease:
                raise SnapshotLeaseExpired(f"lease of {lease.puller} on version {lease.snapshot.version} is over")
            lease.expires_at = self._expiry()

    def release(self, lease: SnapshotLease) -> None:
        """Frees the source for the next puller. Harmless if the lease is already over."""
        with self._lock:
            if self._lease is lease:
                self._lease = None

    def _live_lease(self) -> SnapshotLease | None:
        if self._lease is not None and self._lease.expires_at <= self.clock.monotonic():
            self._lease = None
        return self._lease


class TensorServer:
    """Serves one replica's snapshots on its own port and threads.

    Args:
        token: the run's token; a peer without it gets no information.
        host: interface to listen on; loopback by default.
        lease_seconds: how long a puller may be silent before another one is admitted.
        on_tensor: called with (puller, name) before each tensor is sent: hook for tests and fault injection. If it
            returns a number, a byte changes on the way.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        token: str,
        host: str = "127.0.0.1",
        *,
        lease_seconds: float = 5.0,
        clock: Clock | None = None,
        on_tensor: Callable[[str, str], float | None] | None = None,
    ) -> None:
        self._token, self._clock = token.encode(), clock or SystemClock()
        self._lease_seconds, self._on_tensor = lease_seconds, on_tensor
        self._policy, self._state = SnapshotStore(self._clock, lease_seconds), SnapshotStore(self._clock, lease_seconds)
        self.state_provider: StateProvider | None = None
        self._sent: Counter[tuple[str, int, str]] = Counter()
        self._refusals: deque[str] = deque(maxlen=NUM_REFUSALS_KEPT)
        self._lock, self._closed = threading.Lock(), False
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._listener = socket.create_server((host, 0), backlog=NUM_CONNECTIONS_MAX)
        self.host, self.port = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="weight-port", daemon=True)
        self._acceptor.start()

    def publish(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor], *, copy: bool = True) -> None:
        """Publishes a policy version. With `copy=False` the caller must never change these tensors again.

        Raises:
            WireError: the names differ from the manifest's.
        """
        if set(tensors) != {e.name for e in manifest.tensors}:
            raise WireError(f"version {manifest.policy_version}: the tensors given are not those of the manifest")
        kept = {n: t.detach().to("cpu", copy=copy).contiguous() for n, t in tensors.items()}
        self._policy.publish(
            TensorSnapshot(
                version=manifest.policy_version, digest=manifest.digest, entries=manifest.tensors, tensors=kept
            )
        )

    def versions(self) -> tuple[int, ...]:
        """Policy versions available now."""
        return self._policy.versions()

    def holder(self, replica: ReplicaId, incarnation: int) -> Holder:
        """The address at which other replicas reach this server."""
        return Holder(replica=replica, incarnation=incarnation, host=self.host, port=self.port)

    def bytes_sent(self) -> dict[tuple[str, int, str], int]:
        """Payload bytes sent by (stream, version, puller); a state's version is -1."""
        with self._lock:
            return dict(self._sent)

    def refusals(self) -> tuple[str, ...]:
        """The last rejected or failed peers, each a sentence with address and reason."""
        with self._lock:
            return tuple(self._refusals)

    def close(self, wait_seconds: float = 2.0) -> None:
        """Closes every connection and waits for the threads; safe to call twice."""
        with self._lock:
            self._closed = True
            open_now = dict(self._connections)
        for sock in (self._listener, *open_now):
            # A blocked accept or recv in another thread is ended by shutdown, not by close.
            with suppress(OSError):  # no longer connected
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        until = self._clock.monotonic() + wait_seconds
        for thread in (self._acceptor, *open_now.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - self._clock.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # Out of descriptors, or a peer disconnected before accept: the port stays open.
                self._clock.sleep(0.05)
                continue
            peer = f"{address[0]}:{address[1]}"
            thread = threading.Thread(target=self._serve, args=(sock, peer), name=f"weights-{peer}", daemon=True)
            with self._lock:
                full = self._closed or len(self._connections) >= NUM_CONNECTIONS_MAX
                if not full:
                    self._connections[sock] = thread
            if full:
                self._refuse(f"{peer}: {NUM_CONNECTIONS_MAX} connections are open, no more are taken")
                sock.close()
            else:
                thread.start()

    def _refuse(self, sentence: str) -> None:
        if self._closed:
            return
        with self._lock:
            self._refusals.append(sentence)
        logger.warning("weight port %s refuses %s", self.port, sentence)

    def _serve(self, sock: socket.socket, peer: str) -> None:
        wire = AuthenticatedConnection(sock, peer=peer, clock=self._clock, is_server=True)
        lease: tuple[SnapshotStore, SnapshotLease] | None = None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.answer_handshake(self._token, self._clock.monotonic() + HANDSHAKE_SECONDS)
            lease = self._open(wire)
            if lease is not None:
                self._send_tensors(wire, *lease)
        except (WireError, DeadlineExceeded, OSError) as e:
            self._refuse(str(e) if str(e).startswith(peer) else f"{peer}: {e}")
        finally:
            if lease is not None:
                lease[0].release(lease[1])
            with self._lock:
                self._connections.pop(sock, None)
            sock.close()

    def _deadline(self) -> float:
        return self._clock.monotonic() + self._lease_seconds

    def _open(self, wire: AuthenticatedConnection) -> tuple[SnapshotStore, SnapshotLease] | None:
        """Grants a lease and sends the index, or one header with the reason for a rejection."""
        request = wire.receive(self._deadline(), REQUEST_BYTES_MAX)
        stream, version, puller = _checked_open(wire.peer, request)
        store = self._state if stream == "state" else self._policy
        try:
            if stream == "state":
                lease = store.lease_fresh(puller, self._state_snapshot)
            else:
                lease = store.lease(version, puller)
        except SourceBusy as e:
            wire.send({"error": "busy", "reason": str(e)}, self._deadline())
            return None
        except SnapshotAbsent as e:
            wire.send({"error": "absent", "reason": str(e)}, self._deadline())
            return None
        snapshot = lease.snapshot
        head: dict[str, Any] = {"stream": stream, "version": snapshot.version, "digest": snapshot.digest}
        if stream == "state":  # a policy's entries are in its manifest, which the puller has
            head["meta"] = snapshot.meta
            head["entries"] = [[e.name, e.dtype, list(e.shape), e.digest] for e in snapshot.entries]
        try:
            wire.send(head, self._deadline())
        except RolecallError:
            store.release(lease)
            raise
        return store, lease

    def _state_snapshot(self) -> TensorSnapshot:
        given = self.state_provider() if self.state_provider is not None else None
        if given is None:
            raise SnapshotAbsent("no state is held here")
        tensors, meta = given
        entries = entries_of(tensors)
        return TensorSnapshot(version=-1, digest=entries_digest(entries), entries=entries, tensors=tensors, meta=meta)

    def _send_tensors(self, wire: AuthenticatedConnection, store: SnapshotStore, lease: SnapshotLease) -> None:
        """Answers requests for tensors until the puller reports completion or disconnects."""
        entries = {e.name: e for e in lease.snapshot.entries}
        stream = "state" if store is self._state else "policy"
        while True:
            request = wire.receive(self._deadline(), REQUEST_BYTES_MAX)
            if request.get("op") == "done":
                return
            name = request.get("name")
            if request.get("op") != "tensor" or not isinstance(name, str) or name not in entries:
                raise WireError(f"{wire.peer}: asks for {str(request)[:100]!r}, which is not held")
            store.renew(lease)
            payload = raw_bytes(lease.snapshot.tensors[name])
            if self._on_tensor is not None and self._on_tensor(lease.puller, name) is not None:
                payload = memoryview(bytearray(payload))
                payload[0] ^= 0xFF
            entry = entries[name]
            header = {"name": name, "dtype": entry.dtype, "shape": entry.shape, "num_bytes": len(payload)}
            wire.send(header, self._deadline())
            wire.write_payload(payload, self._lease_seconds, name, functools.partial(store.renew, lease))
            self._count(stream, lease, len(payload))

    def _count(self, stream: str, lease: SnapshotLease, num_bytes: int) -> None:
        key = (stream, lease.snapshot.version, lease.puller)
        with self._lock:
            if key not in self._sent and len(self._sent) >= NUM_COUNTERS_MAX:
                del self._sent[next(iter(self._sent))]  # oldest first: dictionaries keep their order
            self._sent[key] += num_bytes


def _checked_open(peer: str, request: dict[str, Any]) -> tuple[str, int, str]:
    stream, version, puller = request.get("stream"), request.get("version", -1), request.get("puller")
    if request.get("op") != "open" or stream not in ("policy", "state"):
        raise WireError(f"{peer}: first request must open `policy` or `state`, not {str(request)[:100]!r}")
    if not isinstance(version, int) or isinstance(version, bool) or not isinstance(puller, str):
        raise WireError(f"{peer}: version and puller must be an integer and a name")
    try:
        split_replica(puller)
    except InvalidId as e:
        raise WireError(f"{peer}: {e}") from e
    return str(stream), version, puller
