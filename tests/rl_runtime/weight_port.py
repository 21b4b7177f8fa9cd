"""Helpers of the tests of the weight port: small weights, and the two ways to pull them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.protocol.messages import Holder, Manifest
from rolecall.rl_runtime.weights.port import TensorServer
from rolecall.rl_runtime.weights.pull import PartialTransfer, PullSettings, attempt, fitting, pull_any
from tests.support import PATIENCE_SECONDS, eventually

TOKEN = "a token of this run"
TRAINER, ROLLOUT = ReplicaId("trainer/0"), ReplicaId("rollout/0")
Start = Callable[..., TensorServer]


def make_weights(seed: int = 0, num: int = 5) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(16, 8 + i, generator=g) for i in range(num)}


def num_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in weights.values())


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def _terms(options: dict[str, Any]) -> dict[str, Any]:
    return {"token": TOKEN, "puller": "rollout/1", "timeout_seconds": PATIENCE_SECONDS, **options}


def get(
    holder: Holder, manifest: Manifest, *, pieces: PartialTransfer | None = None, **options: Any
) -> PartialTransfer:
    """One attempt at one holder: raises when it serves another puller."""
    pieces = fitting(pieces, manifest)
    attempt(holder, pieces, PullSettings(**_terms(options)))
    return pieces


def get_any(holders: Sequence[Holder], manifest: Manifest, **options: Any) -> PartialTransfer:
    """From any holder. Also the way to pull from one server a second time: its lease on the first pull ends in its
    own thread, which may be after the first puller has everything."""
    return pull_any(holders, manifest, **_terms(options))


def until_sent(server: TensorServer, wanted: Mapping[tuple[str, int, str], int]) -> None:
    """Waits for the server's count: it counts a tensor when the last byte is written, in a thread of its own, and by
    then the puller may have read that byte and gone on. (Counted before, a tensor that never left would count, too.)"""
    eventually(lambda: server.bytes_sent() == wanted, f"{wanted} to be counted as sent")
