"""Snapshots of policy versions served by a holder, and the leases to read them.

The newest two published are kept (double buffer), so that a puller that requested one version still finds it when the
next is published. A lease names the one puller that a source serves at a time (RobustRL: each source is pulled by
exactly one rollout) and keeps its snapshot alive past two further publications; it ends when released, or when it
expired and another puller wants the source. No I/O here; the clock is passed in.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from rolecall.core.clock import Clock
from rolecall.core.errors import WireError
from rolecall.rl_runtime.protocol.messages import TensorEntry

NUM_KEPT: Final = 2


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
            self._snapshots = [*others, snapshot][-NUM_KEPT:]

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
