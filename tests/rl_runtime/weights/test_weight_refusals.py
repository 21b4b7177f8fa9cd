"""The weight port among peers that lie, break off, hang or know no token: refused by name, and the others are
served."""

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from rolecall.core.clock import SystemClock
from rolecall.core.errors import WireError
from rolecall.rl_runtime.protocol.messages import Holder, Manifest
from rolecall.rl_runtime.weights.digest import build_manifest
from rolecall.rl_runtime.weights.port import TensorServer
from rolecall.rl_runtime.weights.pull import TransferFailed, TransferProblem, _checked_index
from rolecall.rl_runtime.weights.wire import MAC_BYTES, MAGIC, NONCE_BYTES, AuthenticatedConnection, _mac
from tests.rl_runtime.weight_port import ROLLOUT, TOKEN, TRAINER, Start, get, get_any, make_weights, same
from tests.support import PATIENCE_SECONDS, eventually

# --- bad holders


def test_the_error_names_every_unreachable_holder(start: Start) -> None:
    gone = start()
    gone.close()
    with pytest.raises(TransferFailed, match="trainer/0: lost: cannot connect"):
        get_any([gone.holder(TRAINER, 1)], build_manifest(0, make_weights(), []))


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
    assert same(get_any(holders, manifest).tensors, weights)


def test_another_shape_is_refused_before_it_is_read(start: Start) -> None:
    server, weights = start(), make_weights()
    manifest = build_manifest(0, weights, [])
    lying = build_manifest(0, {n: t.t().contiguous() for n, t in weights.items()}, [])
    # A dishonest holder offers other shapes under the digest of the true manifest.
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
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts without an answer
        stopped = Holder(replica=TRAINER, incarnation=1, host="127.0.0.1", port=silent.getsockname()[1])
        # Had it cost all of the deadline, there would be nothing left for the good one.
        pieces = get_any([stopped, good.holder(ROLLOUT, 1)], manifest, timeout_seconds=10.0)
    assert same(pieces.tensors, weights) and pieces.bytes_by_holder.keys() == {ROLLOUT}


def test_a_stream_that_breaks_off_names_the_tensor(start: Start) -> None:
    weights = {"w": torch.randn(4 << 20)}  # larger than the socket's buffers
    manifest = build_manifest(0, weights, [])

    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            wire = AuthenticatedConnection(sock, peer="puller", clock=SystemClock(), is_server=True)
            until = soon()
            wire.answer_handshake(TOKEN.encode(), until)
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
        thread.join(PATIENCE_SECONDS)


def test_a_holder_with_another_token_is_not_believed(start: Start) -> None:
    weights = make_weights()
    manifest = build_manifest(0, weights, [])
    server = start()
    server.publish(manifest, weights)
    with pytest.raises(TransferFailed):
        get(server.holder(TRAINER, 1), manifest, token="another token")
    eventually(lambda: any("wrong token" in r for r in server.refusals()), "refusal of the wrong token")
    assert same(get_any([server.holder(TRAINER, 1)], manifest).tensors, weights)


# --- bad pullers: refused by name, and the server continues


def raw(server: TensorServer) -> socket.socket:
    sock = socket.create_connection((server.host, server.port), timeout=PATIENCE_SECONDS)
    assert sock.recv(4 + NONCE_BYTES, socket.MSG_WAITALL)[:4] == MAGIC
    return sock


def signed_in(server: TensorServer) -> AuthenticatedConnection:
    sock = socket.create_connection((server.host, server.port), timeout=PATIENCE_SECONDS)
    wire = AuthenticatedConnection(sock, peer="server", clock=SystemClock(), is_server=False)
    wire.start_handshake(TOKEN.encode(), soon())
    return wire


def soon() -> float:
    return time.monotonic() + PATIENCE_SECONDS


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
        "is not written role/index",
    ),
    "unknown tensor": (_unknown_tensor, "asks for"),
}


@pytest.mark.parametrize("fault", sorted(BAD_PULLERS))
def test_a_bad_puller_is_refused_by_name_and_the_server_continues(start: Start, fault: str) -> None:
    act, sentence = BAD_PULLERS[fault]
    server, weights = start(), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    with act(server) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        eventually(lambda: any(sentence in r for r in server.refusals()), f"refusal because: {sentence}")
        assert next(r for r in server.refusals() if sentence in r).startswith(address)
    assert same(get_any([server.holder(TRAINER, 1)], manifest).tensors, weights)


def test_a_slow_client_is_disconnected_and_others_are_served_meanwhile(start: Start) -> None:
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
        eventually(lambda: any("handshake" in r and "timed out" in r for r in server.refusals()), "cut off")
        stop.set()
        thread.join(PATIENCE_SECONDS)


def test_a_puller_that_falls_silent_loses_its_lease(start: Start) -> None:
    server, weights = start(lease_seconds=2.0), make_weights()
    manifest = build_manifest(0, weights, [])
    server.publish(manifest, weights)
    wire = signed_in(server)
    with wire.sock:
        wire.send({"op": "open", "stream": "policy", "version": 0, "puller": "rollout/9"}, soon())
        assert wire.receive(soon())["digest"] == manifest.digest
        got = get_any([server.holder(TRAINER, 1)], manifest)
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
