"""Snapshots and the one lease on them, without a socket."""

import pytest
import torch

from rolecall.core.clock import FakeClock
from rolecall.rl_runtime.protocol.messages import TensorEntry
from rolecall.rl_runtime.weights.digest import entries_of
from rolecall.rl_runtime.weights.port import (
    SnapshotAbsent,
    SnapshotLeaseExpired,
    SnapshotStore,
    SourceBusy,
    TensorSnapshot,
)


def snapshot(version: int) -> TensorSnapshot:
    tensors = {"w": torch.full((1,), float(version))}
    entries: tuple[TensorEntry, ...] = entries_of(tensors)
    return TensorSnapshot(version=version, digest=f"d{version}", entries=entries, tensors=tensors)


def test_lease_keeps_its_snapshot_past_two_publications() -> None:
    store = SnapshotStore(FakeClock(), 5.0)
    store.publish(snapshot(1))
    lease = store.lease(1, "rollout/1")
    for v in (2, 3, 4):
        store.publish(snapshot(v))
    assert store.versions() == (1, 3, 4) and lease.snapshot.tensors["w"].item() == 1.0
    store.release(lease)
    assert store.versions() == (3, 4)


def test_lease_ends_when_it_is_not_renewed() -> None:
    clock = FakeClock()
    store = SnapshotStore(clock, 5.0)
    store.publish(snapshot(1))
    lease = store.lease(1, "rollout/1")
    clock.advance(4.0)
    store.renew(lease)
    clock.advance(4.0)
    with pytest.raises(SourceBusy, match="rollout/1"):
        store.lease(1, "rollout/2")
    clock.advance(1.5)
    store.lease(1, "rollout/2")
    with pytest.raises(SnapshotLeaseExpired):
        store.renew(lease)
    store.release(lease)  # of the one that is over: does not free the other's
    with pytest.raises(SourceBusy, match="rollout/2"):
        store.lease(1, "rollout/3")


def test_going_back_to_a_checkpoint_publishes_lower_numbers() -> None:
    store = SnapshotStore(FakeClock(), 5.0)
    for v in (6, 7, 5, 6):
        store.publish(snapshot(v))
    assert store.versions() == (5, 6)


def test_state_snapshot_that_cannot_be_made_leaves_the_source_free() -> None:
    store = SnapshotStore(FakeClock(), 5.0)

    def fail() -> TensorSnapshot:
        with pytest.raises(SourceBusy):
            store.lease_fresh("trainer/2", lambda: snapshot(0))
        raise SnapshotAbsent("none")

    with pytest.raises(SnapshotAbsent):
        store.lease_fresh("trainer/1", fail)
    assert store.lease_fresh("trainer/1", lambda: snapshot(0)).snapshot.version == 0
