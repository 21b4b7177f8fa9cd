"""The weight port: what is served, to whom, and what a puller keeps when its holder dies."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.errors import WireError
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.digest import build_manifest, entries_of
from rolecall.rl_runtime.protocol import Holder, Manifest, TensorEntry
from rolecall.rl_runtime.pull import _checked_index
from rolecall.rl_runtime.snapshots import LeaseOver, Shelf, Snapshot, SnapshotAbsent, SourceBusy
from rolecall.rl_runtime.weights import (
    Pieces,
    TensorServer,
    TransferFailed,
    TransferProblem,
    pull,
    pull_any,
    pull_state,
)
from rolecall.rl_runtime.wire import MAC_BYTES, MAGIC, NONCE_BYTES, Wire, _mac
from tests.support import eventually

TOKEN = "a token of this run"
TRAINER, ROLLOUT = ReplicaId("trainer/0"), ReplicaId("rollout/0")


def make_weights(seed: int = 0, num: int = 5) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(16, 8 + i, generator=g) for i in range(num)}


Start = Callable[..., TensorServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[TensorServer] = []

    def make(**options: object) -> TensorServer:
        servers.append(TensorServer(TOKEN, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield make
    for server in servers:
        server.close()
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("weight")], "threads have ended")


def get(holder: Holder, manifest: Manifest, puller: str = "rollout/1", **options: object) -> Pieces:
    arguments = {"token": TOKEN, "puller": puller, "timeout_seconds": 5.0, **options}
    return pull(holder, manifest, **arguments)  # type: ignore[arg-type]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- the good way


def test_pulled_weights_are_those_published_and_bytes_are_counted(start: Start) -> None:
    server, weights = start(), make_weights()
    manifest = build_manifest(4, weights, [-1.0])
    server.publish(manifest, weights)
    pieces = get(server.holder(TRAINER, 1), manifest)
    assert same(pieces.tensors, weights)
    total = sum(t.numel() * 4 for t in weights.values())
    assert server.bytes_sent() == {("policy", 4, "rollout/1"): total}
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


def test_whole_state_travels_with_its_meta(start: Start) -> None:
    server, state = start(), {**make_weights(), "adam.step": torch.tensor(7, dtype=torch.int64)}
    server.state_provider = lambda: (state, '{"step": 7}')
    copy = pull_state(server.holder(TRAINER, 2), token=TOKEN, puller="trainer/1", timeout_seconds=5.0)
    assert same(copy.tensors, state) and copy.meta == '{"step": 7}' and copy.holder == TRAINER
    assert server.bytes_sent() == {("state", -1, "trainer/1"): copy.bytes_received}


def test_a_trainer_without_state_says_so(start: Start) -> None:
    server = start()
    server.state_provider = lambda: None
    with pytest.raises(TransferFailed, match="no state is held here") as failed:
        pull_state(server.holder(TRAINER, 1), token=TOKEN, puller="trainer/1", timeout_seconds=5.0)
    assert failed.value.problem is TransferProblem.ABSENT


# --- one puller at a time, and relays


def test_one_puller_at_a_time_and_the_others_hear_it_at_once(start: Start) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold(puller: str, name: str) -> None:
        inside.set()
        assert go.wait(20)

    server, weights = start(on_tensor=hold), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    holder, got = server.holder(TRAINER, 1), list[Pieces]()
    first = threading.Thread(target=lambda: got.append(get(holder, manifest)))
    first.start()
    assert inside.wait(5)
    began = time.monotonic()
    with pytest.raises(TransferFailed, match="rollout/1 is being served") as failed:
        get(holder, manifest, "rollout/2")
    assert time.monotonic() - began < 5.0 and failed.value.problem is TransferProblem.BUSY
    go.set()
    first.join(20)
    assert same(got[0].tensors, weights)
    assert same(get(holder, manifest, "rollout/2").tensors, weights)


def test_pull_any_waits_for_a_busy_source(start: Start) -> None:
    server, weights = start(on_tensor=lambda puller, name: time.sleep(0.02)), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    got = list[Pieces]()

    def one(i: int) -> None:
        got.append(
            pull_any([server.holder(TRAINER, 1)], manifest, token=TOKEN, puller=f"rollout/{i}", timeout_seconds=10.0)
        )

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert len(got) == 4 and all(same(p.tensors, weights) for p in got)


def test_a_rollout_that_was_served_serves_the_next_when_the_trainer_is_gone(start: Start) -> None:
    trainer, relay, weights = start(), start(), make_weights()
    manifest = build_manifest(9, weights, [])
    trainer.publish(manifest, weights)
    first = get(trainer.holder(TRAINER, 1), manifest, "rollout/0")
    relay.publish(manifest, first.tensors, copy=False)
    trainer.close()
    holders = [trainer.holder(TRAINER, 1), relay.holder(ROLLOUT, 1)]
    late = pull_any(holders, manifest, token=TOKEN, puller="rollout/1", timeout_seconds=5.0)
    total = sum(t.numel() * 4 for t in weights.values())
    assert same(late.tensors, weights)
    assert late.bytes_by_holder == {ROLLOUT: total}
    assert relay.bytes_sent() == {("policy", 9, "rollout/1"): total}
    assert trainer.bytes_sent() == {("policy", 9, "rollout/0"): total}


def test_pull_goes_on_at_the_missing_tensor_when_its_source_dies(start: Start) -> None:
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
    pieces = pull_any(holders, manifest, token=TOKEN, puller="rollout/1", timeout_seconds=5.0)
    sizes = {n: t.numel() * 4 for n, t in weights.items()}
    names = sorted(weights)
    assert same(pieces.tensors, weights)
    assert pieces.bytes_by_holder == {
        TRAINER: sum(sizes[n] for n in names[:3]),
        ROLLOUT: sum(sizes[n] for n in names[3:]),
    }


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
    pieces = Pieces.of(manifest)
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
    assert same(get(server.holder(TRAINER, 1), new, pieces=pieces).tensors, make_weights(2))


def test_an_absent_holder_is_asked_again_while_another_is_busy(start: Start) -> None:
    """The way weights spread: one source, and whoever has been served becomes the next one."""
    weights = make_weights()
    manifest = build_manifest(1, weights, [])
    inside, go = threading.Event(), threading.Event()

    def hold(puller: str, name: str) -> None:
        inside.set()
        assert go.wait(10)

    trainer, relay = start(on_tensor=hold, lease_seconds=20.0), start()
    trainer.publish(manifest, weights)
    blocker = threading.Thread(target=get, args=(trainer.holder(TRAINER, 1), manifest, "rollout/0"))
    blocker.start()
    assert inside.wait(5)
    got = list[Pieces]()
    holders = [trainer.holder(TRAINER, 1), relay.holder(ROLLOUT, 1)]
    late = threading.Thread(
        target=lambda: got.append(pull_any(holders, manifest, token=TOKEN, puller="rollout/1", timeout_seconds=10.0))
    )
    late.start()
    relay.publish(manifest, weights)
    late.join(5)
    go.set()
    blocker.join(10)
    assert got[0].bytes_by_holder.keys() == {ROLLOUT}


def test_one_source_reaches_seven_pullers_mostly_through_each_other(start: Start) -> None:
    """Relay property (RobustRL): in k rounds one source updates 2^k - 1, so of seven pullers it serves about three."""
    weights = make_weights()
    manifest = build_manifest(1, weights, [])

    def slowly(puller: str, name: str) -> None:
        time.sleep(0.05)

    trainer, relays = start(on_tensor=slowly), [start(on_tensor=slowly) for _ in range(7)]
    trainer.publish(manifest, weights)
    names = [ReplicaId(f"rollout/{i}") for i in range(7)]
    holders = [trainer.holder(TRAINER, 1), *(r.holder(n, 1) for r, n in zip(relays, names, strict=True))]
    got = list[ReplicaId]()

    def one(i: int) -> None:
        others = [h for h in holders if h.replica != names[i]]
        pieces = pull_any(others, manifest, token=TOKEN, puller=names[i], timeout_seconds=20.0)
        relays[i].publish(manifest, pieces.tensors, copy=False)
        got.append(pieces.main_holder)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(7)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert len(got) == 7 and got.count(TRAINER) <= 4, got


# --- bad holders


def test_nobody_there_names_every_holder(start: Start) -> None:
    gone = start()
    gone.close()
    with pytest.raises(TransferFailed, match="trainer/0: lost: cannot connect"):
        pull_any(
            [gone.holder(TRAINER, 1)],
            build_manifest(0, make_weights(), []),
            token=TOKEN,
            puller="rollout/1",
            timeout_seconds=2.0,
        )


def test_a_flipped_bit_at_the_holder_is_corrupt_and_the_next_holder_is_asked(start: Start) -> None:
    weights = make_weights()
    manifest = build_manifest(0, weights, [])
    bad, good = start(), start()
    wrong = {n: t.clone() for n, t in weights.items()}
    wrong["layer.3.weight"].view(torch.int32)[0, 0] ^= 1
    bad.publish(manifest, wrong)
    good.publish(manifest, weights)
    with pytest.raises(TransferFailed, match=r"layer\.3\.weight: bytes received have another digest") as failed:
        get(bad.holder(TRAINER, 1), manifest)
    assert failed.value.problem is TransferProblem.CORRUPT
    holders = [bad.holder(TRAINER, 1), good.holder(ROLLOUT, 1)]
    assert same(pull_any(holders, manifest, token=TOKEN, puller="rollout/1", timeout_seconds=5.0).tensors, weights)


def test_another_shape_is_refused_before_it_is_read(start: Start) -> None:
    server, weights = start(), make_weights()
    manifest = build_manifest(0, weights, [])
    lying = build_manifest(0, {n: t.t().contiguous() for n, t in weights.items()}, [])
    # A holder that lies: it offers other shapes under the digest of the true manifest.
    server.publish(
        Manifest(policy_version=0, tensors=lying.tensors, canary_logprobs=(), digest=manifest.digest), weights
    )
    with pytest.raises(TransferFailed, match="announced as") as failed:
        get(server.holder(TRAINER, 1), manifest)
    assert failed.value.problem is TransferProblem.CORRUPT and not failed.value.pieces.tensors


def test_a_holder_that_stops_answering_costs_a_share_of_the_deadline_only(start: Start) -> None:
    weights = make_weights()
    manifest = build_manifest(0, weights, [])
    good = start()
    good.publish(manifest, weights)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody answers: a stopped process
        stopped = Holder(replica=TRAINER, incarnation=1, host="127.0.0.1", port=silent.getsockname()[1])
        began = time.monotonic()
        pieces = pull_any(
            [stopped, good.holder(ROLLOUT, 1)], manifest, token=TOKEN, puller="rollout/1", timeout_seconds=3.0
        )
    assert same(pieces.tensors, weights) and 0.3 < time.monotonic() - began < 10.0


def test_a_stream_that_breaks_off_names_the_tensor(start: Start) -> None:
    weights = {"w": torch.randn(4 << 20)}  # larger than the socket's buffers
    manifest = build_manifest(0, weights, [])

    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            wire = Wire(sock, peer="puller", clock=SystemClock(), is_server=True)
            until = time.monotonic() + 5
            wire.greet_client(TOKEN.encode(), until)
            wire.receive(until)
            wire.send({"stream": "policy", "version": 0, "digest": manifest.digest}, until)
            wire.receive(until)
            size = 16 << 20
            wire.send({"name": "w", "dtype": "float32", "shape": [4 << 20], "num_bytes": size}, until)
            wire.write(bytes(1000), until, "w")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        holder = Holder(replica=TRAINER, incarnation=1, host="127.0.0.1", port=listener.getsockname()[1])
        with pytest.raises(TransferFailed, match="stream ends after 1000 of 1048576 bytes of w"):
            get(holder, manifest)
        thread.join(5)


def test_a_holder_with_another_token_is_not_believed(start: Start) -> None:
    weights = make_weights()
    manifest = build_manifest(0, weights, [])
    server = start()
    server.publish(manifest, weights)
    with pytest.raises(TransferFailed):
        get(server.holder(TRAINER, 1), manifest, token="another token")
    eventually(lambda: any("wrong token" in r for r in server.refusals()), "refusal of the wrong token")
    assert same(get(server.holder(TRAINER, 1), manifest).tensors, weights)


# --- bad pullers: refused by name, and the server goes on


def raw(server: TensorServer) -> socket.socket:
    sock = socket.create_connection((server.host, server.port), timeout=5)
    assert sock.recv(4 + NONCE_BYTES, socket.MSG_WAITALL)[:4] == MAGIC
    return sock


def signed_in(server: TensorServer) -> Wire:
    sock = socket.create_connection((server.host, server.port), timeout=5)
    wire = Wire(sock, peer="server", clock=SystemClock(), is_server=False)
    wire.greet_server(TOKEN.encode(), time.monotonic() + 5)
    return wire


def soon() -> float:
    return time.monotonic() + 5


def _garbage(server: TensorServer) -> socket.socket:
    sock = raw(server)
    sock.sendall(os.urandom(NONCE_BYTES + MAC_BYTES))
    return sock


def _hangs_up(server: TensorServer) -> socket.socket:
    sock = raw(server)
    sock.sendall(b"x")
    sock.shutdown(socket.SHUT_WR)
    return sock


def _long_header(server: TensorServer) -> socket.socket:
    wire = signed_in(server)
    wire.write((1 << 31).to_bytes(4, "big") + bytes(MAC_BYTES), soon(), "test")
    return wire.sock


def _unsigned(server: TensorServer) -> socket.socket:
    wire = signed_in(server)
    body = b'{"op":"open","stream":"policy","version":0,"puller":"rollout/1"}'
    wire.write(len(body).to_bytes(4, "big") + bytes(MAC_BYTES) + body, soon(), "test")
    return wire.sock


def _replayed(server: TensorServer) -> socket.socket:
    """The first frame, rightly signed, is sent a second time: its number is over."""
    wire = signed_in(server)
    body = b'{"op":"open","stream":"policy","version":0,"puller":"rollout/1"}'
    frame = len(body).to_bytes(4, "big") + _mac(wire._key, b"c", (0).to_bytes(8, "big"), body) + body
    wire.write(frame + frame, soon(), "test")
    return wire.sock


def _request(request: dict[str, object]) -> Callable[[TensorServer], socket.socket]:
    def send(server: TensorServer) -> socket.socket:
        wire = signed_in(server)
        wire.send(request, soon())
        return wire.sock

    return send


def _unknown_tensor(server: TensorServer) -> socket.socket:
    wire = signed_in(server)
    wire.send({"op": "open", "stream": "policy", "version": 0, "puller": "rollout/1"}, soon())
    wire.receive(soon())
    wire.send({"op": "tensor", "name": "../../token"}, soon())
    return wire.sock


BAD_PULLERS = {
    "wrong HMAC": (_garbage, "wrong token"),
    "hangs up in the handshake": (_hangs_up, "stream ends after 1 of 64 bytes of handshake"),
    "header too long": (_long_header, "header of 2147483648 bytes is longer than 4096"),
    "header not signed": (_unsigned, "header is not signed"),
    "frame sent twice": (_replayed, "header is not signed with this session's key"),
    "wrong operation": (_request({"op": "shutdown"}), "first request must open"),
    "wrong stream": (_request({"op": "open", "stream": "files"}), "first request must open"),
    "version is text": (_request({"op": "open", "stream": "policy", "version": "0", "puller": "a/1"}), "integer"),
    "puller is no replica": (
        _request({"op": "open", "stream": "policy", "puller": "<b>"}),
        "does not match role/index",
    ),
    "unknown tensor": (_unknown_tensor, "asks for"),
}


@pytest.mark.parametrize("fault", sorted(BAD_PULLERS))
def test_bad_puller_is_refused_by_name_and_the_server_goes_on(start: Start, fault: str) -> None:
    act, sentence = BAD_PULLERS[fault]
    server, weights = start(), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    with act(server) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        eventually(lambda: any(sentence in r for r in server.refusals()), f"refusal because: {sentence}")
        assert next(r for r in server.refusals() if sentence in r).startswith(address)
    eventually(lambda: _served(server, manifest), "the next puller is served")


def _served(server: TensorServer, manifest: Manifest) -> bool:
    try:
        return len(get(server.holder(TRAINER, 1), manifest).tensors) == len(manifest.tensors)
    except TransferFailed as e:
        assert e.problem is TransferProblem.BUSY, e
        return False


def test_slow_loris_is_cut_off_and_others_are_served_meanwhile(start: Start) -> None:
    server, weights = start(), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    with raw(server) as slow:
        stop = threading.Event()

        def drip() -> None:
            for _ in range(60):
                if stop.wait(0.2):
                    return
                try:
                    slow.sendall(b"x")  # always something, never enough
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        assert same(get(server.holder(TRAINER, 1), manifest).tensors, weights)
        eventually(lambda: any("handshake" in r and "in vain" in r for r in server.refusals()), "cut off")
        stop.set()
        thread.join(5)


def test_a_puller_that_falls_silent_loses_its_lease(start: Start) -> None:
    server, weights = start(lease_seconds=0.3), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    wire = signed_in(server)
    with wire.sock:
        wire.send({"op": "open", "stream": "policy", "version": 0, "puller": "rollout/9"}, soon())
        assert wire.receive(soon())["digest"] == manifest.digest
        got = pull_any([server.holder(TRAINER, 1)], manifest, token=TOKEN, puller="rollout/1", timeout_seconds=5.0)
    assert same(got.tensors, weights)


# --- limits of a state's index


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (["w", "float32", [1 << 40], "d"], "more than"),
        (["w", "float32", [-1], "d"], "is not possible"),
        (["w", "float32", [1] * 9, "d"], "is not possible"),
        (["w", "object", [1], "d"], "may not travel"),
        (["w" * 600, "float32", [1], "d"], "too long"),
        (["w", "float32", ["1"], "d"], "malformed"),
        (["w", "float32", [True], "d"], "malformed"),
        (["w", "float32", [1]], "malformed"),
        (["w", "float32", [1], "d"], "digest it names"),
    ],
)
def test_index_of_a_state_is_checked_before_anything_is_allocated(entry: list[object], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        _checked_index({"entries": [entry], "meta": "", "digest": "0"}, bytes_max=1 << 30)


# --- the shelf alone


def snapshot(version: int) -> Snapshot:
    tensors = {"w": torch.full((1,), float(version))}
    entries: tuple[TensorEntry, ...] = entries_of(tensors)
    return Snapshot(version=version, digest=f"d{version}", entries=entries, tensors=tensors)


def test_lease_keeps_its_snapshot_past_two_publications() -> None:
    shelf = Shelf(FakeClock(), 5.0)
    shelf.publish(snapshot(1))
    lease = shelf.lease(1, "rollout/1")
    for v in (2, 3, 4):
        shelf.publish(snapshot(v))
    assert shelf.versions() == (1, 3, 4) and lease.snapshot.tensors["w"].item() == 1.0
    shelf.release(lease)
    assert shelf.versions() == (3, 4)


def test_lease_ends_when_it_is_not_renewed() -> None:
    clock = FakeClock()
    shelf = Shelf(clock, 5.0)
    shelf.publish(snapshot(1))
    lease = shelf.lease(1, "rollout/1")
    clock.advance(4.0)
    shelf.renew(lease)
    clock.advance(4.0)
    with pytest.raises(SourceBusy, match="rollout/1"):
        shelf.lease(1, "rollout/2")
    clock.advance(1.5)
    shelf.lease(1, "rollout/2")
    with pytest.raises(LeaseOver):
        shelf.renew(lease)
    shelf.release(lease)  # of the one that is over: does not free the other's
    with pytest.raises(SourceBusy, match="rollout/2"):
        shelf.lease(1, "rollout/3")


def test_going_back_to_a_checkpoint_publishes_lower_numbers() -> None:
    shelf = Shelf(FakeClock(), 5.0)
    for v in (6, 7, 5, 6):
        shelf.publish(snapshot(v))
    assert shelf.versions() == (5, 6)


def test_state_snapshot_that_cannot_be_made_leaves_the_source_free() -> None:
    shelf = Shelf(FakeClock(), 5.0)

    def fail() -> Snapshot:
        with pytest.raises(SourceBusy):
            shelf.lease_fresh("trainer/2", lambda: snapshot(0))
        raise SnapshotAbsent("none")

    with pytest.raises(SnapshotAbsent):
        shelf.lease_fresh("trainer/1", fail)
    assert shelf.lease_fresh("trainer/1", lambda: snapshot(0)).snapshot.version == 0
