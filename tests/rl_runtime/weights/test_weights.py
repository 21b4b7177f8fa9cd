"""The weight port among good peers: its leases, and what a puller keeps when its holder dies."""

import functools
import pickle
import threading
from collections.abc import Callable

import pytest
import torch

from rolecall.core.clock import SystemClock
from rolecall.core.errors import WireError
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.weights.digest import build_manifest
from rolecall.rl_runtime.weights.pull import PartialTransfer, TransferFailed, TransferProblem, pull_state
from tests.rl_runtime.weight_port import (
    ROLLOUT,
    TOKEN,
    TRAINER,
    Start,
    get,
    get_any,
    make_weights,
    num_bytes,
    same,
    until_sent,
)
from tests.support import PATIENCE_SECONDS


def test_pulled_weights_are_those_published_and_bytes_are_counted(start: Start) -> None:
    server, weights = start(), make_weights()
    manifest = build_manifest(4, weights, [-1.0])
    server.publish(manifest, weights)
    pieces = get(server.holder(TRAINER, 1), manifest)
    assert same(pieces.tensors, weights)
    total = num_bytes(weights)
    until_sent(server, {("policy", 4, "rollout/1"): total})
    assert pieces.bytes_by_holder == {TRAINER: total} and pieces.main_holder == TRAINER


def test_a_snapshot_does_not_change_with_the_trainer(start: Start) -> None:
    server, weights = start(), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    for tensor in weights.values():
        tensor.add_(1.0)
    assert same(get(server.holder(TRAINER, 1), manifest).tensors, make_weights())


def test_tensors_of_every_kind_travel(start: Start) -> None:
    server = start()
    odd = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3, 3).to(torch.bfloat16),
        "large": torch.randn(1 << 20),
        "flag": torch.tensor([True, False]),
    }
    manifest = build_manifest(0, odd, [])
    server.publish(manifest, odd)
    assert same(get(server.holder(TRAINER, 1), manifest).tensors, odd)


def test_the_newest_two_versions_are_kept(start: Start) -> None:
    server = start()
    manifests = [build_manifest(v, make_weights(v), []) for v in range(4)]
    for v, manifest in enumerate(manifests):
        server.publish(manifest, make_weights(v))
    assert server.versions() == (2, 3)
    with pytest.raises(TransferFailed, match="version 1 is not here") as failed:
        get(server.holder(TRAINER, 1), manifests[1])
    assert failed.value.problem is TransferProblem.ABSENT


def test_same_number_with_other_weights_is_not_served(start: Start) -> None:
    server = start()
    server.publish(build_manifest(1, make_weights(1), []), make_weights(1))
    with pytest.raises(TransferFailed, match="its digest differs"):
        get(server.holder(TRAINER, 1), build_manifest(1, make_weights(2), []))


def test_a_trainer_whose_canary_differs_in_the_last_place_serves_the_same_version(start: Start) -> None:
    """It is computed, and another machine may round otherwise; what is transferred is the same to the bit."""
    server = start()
    server.publish(build_manifest(1, make_weights(), [-1.0]), make_weights())
    assert same(get(server.holder(TRAINER, 1), build_manifest(1, make_weights(), [-1.0000001])).tensors, make_weights())


def test_names_of_another_model_cannot_be_published(start: Start) -> None:
    with pytest.raises(WireError, match="not those of the manifest"):
        start().publish(build_manifest(0, make_weights(), []), make_weights(num=4))


def test_the_whole_state_is_transferred_with_its_meta(start: Start) -> None:
    server, state = start(), {**make_weights(), "adam.step": torch.tensor(7, dtype=torch.int64)}
    server.state_provider = lambda: (state, '{"step": 7}')
    got, meta = pull_state(server.holder(TRAINER, 2), token=TOKEN, puller="trainer/1", timeout_seconds=PATIENCE_SECONDS)
    assert same(got, state) and meta == '{"step": 7}'
    until_sent(server, {("state", -1, "trainer/1"): num_bytes(state)})


def test_a_trainer_without_state_reports_it(start: Start) -> None:
    server = start()
    server.state_provider = lambda: None
    with pytest.raises(TransferFailed, match="no state is held here") as failed:
        pull_state(server.holder(TRAINER, 1), token=TOKEN, puller="trainer/1", timeout_seconds=PATIENCE_SECONDS)
    assert failed.value.problem is TransferProblem.ABSENT


# --- one puller at a time, and relays


class Waiting(SystemClock):
    """A puller's clock that reports when the puller waits, because every holder was busy or had nothing."""

    def __init__(self) -> None:
        self.has_waited = threading.Event()

    def sleep(self, seconds: float) -> None:
        self.has_waited.set()
        super().sleep(seconds)


class Hold:
    """A server's hook that blocks its puller: `inside` is set on entry, `go` releases it."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()

    def __call__(self, puller: str, name: str) -> None:
        self.inside.set()
        assert self.go.wait(PATIENCE_SECONDS)


def in_thread(what: Callable[[], PartialTransfer], got: list[PartialTransfer]) -> threading.Thread:
    thread = threading.Thread(target=lambda: got.append(what()))
    thread.start()
    return thread


def test_one_puller_at_a_time_and_the_others_hear_it_at_once(start: Start) -> None:
    hold = Hold()
    server, weights = start(on_tensor=hold, lease_seconds=PATIENCE_SECONDS), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    holder, got = server.holder(TRAINER, 1), list[PartialTransfer]()
    first = in_thread(lambda: get(holder, manifest), got)
    assert hold.inside.wait(PATIENCE_SECONDS)
    with pytest.raises(TransferFailed, match="rollout/1 is being served") as failed:
        get(holder, manifest, puller="rollout/2")  # answered while the first one is held
    assert failed.value.problem is TransferProblem.BUSY
    hold.go.set()
    first.join(PATIENCE_SECONDS)
    assert same(got[0].tensors, weights)
    assert same(get_any([holder], manifest, puller="rollout/2").tensors, weights)


def test_pull_any_waits_for_a_busy_source(start: Start) -> None:
    hold = Hold()
    server, weights = start(on_tensor=hold, lease_seconds=PATIENCE_SECONDS), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    holder, got, clocks = server.holder(TRAINER, 1), list[PartialTransfer](), [Waiting() for _ in range(3)]
    threads = [in_thread(lambda: get(holder, manifest, puller="rollout/0"), got)]
    assert hold.inside.wait(PATIENCE_SECONDS)
    for i, clock in enumerate(clocks, start=1):
        wait = functools.partial(get_any, [holder], manifest, puller=f"rollout/{i}", clock=clock)
        threads.append(in_thread(wait, got))
    assert all(clock.has_waited.wait(PATIENCE_SECONDS) for clock in clocks) and got == []
    hold.go.set()
    for t in threads:
        t.join(PATIENCE_SECONDS)
    assert len(got) == 4 and all(same(p.tensors, weights) for p in got)


def test_a_rollout_that_was_served_serves_the_next_when_the_trainer_is_gone(start: Start) -> None:
    trainer, relay, weights = start(), start(), make_weights()
    manifest = build_manifest(9, weights, [])
    trainer.publish(manifest, weights)
    first = get(trainer.holder(TRAINER, 1), manifest, puller="rollout/0")
    relay.publish(manifest, first.tensors, copy=False)
    trainer.close()
    holders = [trainer.holder(TRAINER, 1), relay.holder(ROLLOUT, 1)]
    late = get_any(holders, manifest)
    total = num_bytes(weights)
    assert same(late.tensors, weights)
    assert late.bytes_by_holder == {ROLLOUT: total}
    until_sent(relay, {("policy", 9, "rollout/1"): total})
    until_sent(trainer, {("policy", 9, "rollout/0"): total})


def test_pull_continues_at_the_missing_tensor_when_its_source_dies(start: Start) -> None:
    weights = make_weights()
    manifest = build_manifest(2, weights, [])
    served = list[str]()

    def die_at_the_fourth(puller: str, name: str) -> None:
        served.append(name)
        if len(served) == 4:
            dying.close(wait_seconds=0.0)

    dying, other = start(on_tensor=die_at_the_fourth), start()
    for server in (dying, other):
        server.publish(manifest, weights)
    holders = [dying.holder(TRAINER, 1), other.holder(ROLLOUT, 1)]
    pieces = get_any(holders, manifest)
    sizes = {n: t.numel() * 4 for n, t in weights.items()}
    names = sorted(weights)
    assert same(pieces.tensors, weights)
    assert pieces.bytes_by_holder == {
        TRAINER: sum(sizes[n] for n in names[:3]),
        ROLLOUT: sum(sizes[n] for n in names[3:]),
    }


def test_a_byte_that_changes_on_its_way_is_noticed_and_the_tensor_comes_from_another_holder(start: Start) -> None:
    weights = make_weights()
    manifest = build_manifest(2, weights, [])
    second = sorted(weights)[1]
    bad, good = start(on_tensor=lambda puller, name: -1.0 if name == second else None), start()
    for server in (bad, good):
        server.publish(manifest, weights)
    with pytest.raises(TransferFailed, match=f"{second}: bytes received have another digest") as failed:
        get(bad.holder(TRAINER, 1), manifest)
    assert failed.value.problem is TransferProblem.CORRUPT
    told = list[tuple[ReplicaId, str]]()
    holders = [bad.holder(TRAINER, 1), good.holder(ROLLOUT, 1)]
    pieces = get_any(holders, manifest, on_corrupt=lambda holder, reason: told.append((holder.replica, reason)))
    assert same(pieces.tensors, weights) and pieces.bytes_by_holder.keys() == {TRAINER, ROLLOUT}
    assert told == [(TRAINER, f"{second}: bytes received have another digest")]


def test_pieces_kept_on_the_error_are_not_asked_for_again(start: Start) -> None:
    weights = make_weights()
    manifest = build_manifest(2, weights, [])
    served = list[str]()

    def die_at_the_third(puller: str, name: str) -> None:
        served.append(name)
        if len(served) == 3:
            dying.close(wait_seconds=0.0)

    dying = start(on_tensor=die_at_the_third)
    dying.publish(manifest, weights)
    with pytest.raises(TransferFailed, match="2 of 5 tensors are kept") as failed:
        get(dying.holder(TRAINER, 1), manifest)
    asked = list[str]()
    other = start(on_tensor=lambda puller, name: asked.append(name))
    other.publish(manifest, weights)
    pieces = get(other.holder(ROLLOUT, 1), manifest, pieces=failed.value.pieces)
    assert same(pieces.tensors, weights) and asked == sorted(weights)[2:]


def test_the_error_survives_pickling_without_the_tensors(start: Start) -> None:
    weights = make_weights()
    manifest = build_manifest(2, weights, [])
    pieces = PartialTransfer.of(manifest)
    pieces.tensors["layer.0.weight"] = weights["layer.0.weight"]
    error = TransferFailed(holder=None, problem=TransferProblem.LOST, reason="gone", pieces=pieces)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.problem is TransferProblem.LOST and not copy.pieces.tensors


def test_pieces_of_another_version_are_not_mixed_in(start: Start) -> None:
    server = start()
    old, new = build_manifest(1, make_weights(1), []), build_manifest(2, make_weights(2), [])
    server.publish(old, make_weights(1))
    server.publish(new, make_weights(2))
    pieces = get(server.holder(TRAINER, 1), old)
    assert same(get_any([server.holder(TRAINER, 1)], new, pieces=pieces).tensors, make_weights(2))


def test_an_absent_holder_is_requested_again_while_another_is_busy(start: Start) -> None:
    """How weights spread: one source, and each served puller becomes the next one."""
    weights = make_weights()
    manifest = build_manifest(1, weights, [])
    hold, clock, got = Hold(), Waiting(), list[PartialTransfer]()
    trainer, relay = start(on_tensor=hold, lease_seconds=PATIENCE_SECONDS), start()
    trainer.publish(manifest, weights)
    source = trainer.holder(TRAINER, 1)
    blocker = in_thread(lambda: get(source, manifest, puller="rollout/0"), list[PartialTransfer]())
    assert hold.inside.wait(PATIENCE_SECONDS)
    late = in_thread(lambda: get_any([source, relay.holder(ROLLOUT, 1)], manifest, clock=clock), got)
    assert clock.has_waited.wait(PATIENCE_SECONDS)  # the trainer is busy, the relay has nothing yet
    relay.publish(manifest, weights)
    late.join(PATIENCE_SECONDS)
    hold.go.set()
    blocker.join(PATIENCE_SECONDS)
    assert got[0].bytes_by_holder.keys() == {ROLLOUT}


def test_one_source_that_serves_two_reaches_seven_through_those_it_served(start: Start) -> None:
    """Relay property (RobustRL): in k rounds one source updates 2^k - 1. Here it is kept from finishing with its second
    puller until all others are served, so these can only have had the weights from each other."""
    weights = make_weights()
    manifest = build_manifest(1, weights, [])
    names = [ReplicaId(f"rollout/{i}") for i in range(7)]
    served, pullers, sources = threading.Semaphore(0), list[str](), list[ReplicaId]()

    def hold_the_second(puller: str, name: str) -> None:
        if puller not in pullers:
            pullers.append(puller)
            if len(pullers) == 2:
                assert all(served.acquire(timeout=PATIENCE_SECONDS) for _ in range(len(names) - 1))

    trainer, relays = start(on_tensor=hold_the_second, lease_seconds=PATIENCE_SECONDS), [start() for _ in names]
    trainer.publish(manifest, weights)
    holders = [trainer.holder(TRAINER, 1), *(r.holder(n, 1) for r, n in zip(relays, names, strict=True))]

    def one(i: int) -> None:
        pieces = get_any([h for h in holders if h.replica != names[i]], manifest, puller=names[i])
        relays[i].publish(manifest, pieces.tensors, copy=False)
        sources.append(pieces.main_holder)
        served.release()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(7)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE_SECONDS)
    assert len(sources) == 7 and sources.count(TRAINER) == 2, sources
