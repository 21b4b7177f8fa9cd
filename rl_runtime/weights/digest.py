"""Digests of tensors, and the manifest that lists the tensors of a policy version.

A tensor's digest is the BLAKE3 of its raw bytes in little-endian row-major order only; its entry has name, dtype and
shape, and a manifest's digest (SHA-256) covers version and entries. Digests are equal exactly when the bits are: -0.0
and 0.0 differ, and so do two NaNs with different payloads. There is no floating-point tolerance.

A trainer hashes several gigabytes in each step of a large model: BLAKE3 takes a third of the time of SHA-256, and a
tree of chunks can be hashed in threads (decision 0002).

What trainers compare in a vote stays on their devices: `local_digest` of a tensor on a GPU is computed there (decision
0032). It detects faults, not attacks, and never leaves the vote.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch
from blake3 import blake3

from rolecall.core.errors import WireError
from rolecall.rl_runtime.protocol.messages import Manifest, TensorEntry

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Dtypes that may be transferred: a closed list, because a name from the network must never reach getattr."""

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}

THREADED_BYTES: Final = 8 << 20
"""Shorter inputs take no longer to hash than threads take to start."""
NUM_THREADS_MAX: Final = 4

LANES: Final = (-0x61C8864680B583EB, -0x2E8AB3DC5A1C7A2D)
"""Odd weights of a word's position in the two sums of `device_digest`, as signed 64-bit numbers. The first is that of
SplitMix64 (Steele et al., OOPSLA 2014)."""
MIXING: Final = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""SplitMix64's shifts and multipliers."""
LAST_SHIFT: Final = 31
PIECE_BYTES: Final = 64 << 20
"""Hashed at once on a device: bounds the memory of intermediate results."""


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy if it is contiguous and on the CPU.

    Raises:
        RuntimeError: on a big-endian machine, whose bytes would need swapping (no such machine runs vLLM).
    """
    if sys.byteorder != "little":
        raise RuntimeError("tensor digests are defined over little-endian bytes; this machine is big-endian")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> str:
    """BLAKE3 of the tensor's raw bytes, hex: of a long one in threads. The GIL is released meanwhile."""
    raw = raw_bytes(tensor)
    long = len(raw) >= THREADED_BYTES
    return blake3(raw, max_threads=min(NUM_THREADS_MAX, len(os.sched_getaffinity(0))) if long else 1).hexdigest()


def device_digest(tensor: torch.Tensor) -> str:
    """128 bits over the tensor's raw bytes, computed on its device: hex, the same on every device.

    For each of two lanes the sum, modulo 2^64, of mix(word + lane * position) over the 64-bit words, the last one
    padded with zeros. `mix` is a bijection, so that any change of one word changes both sums; integer sums do not
    depend on their order. Dtype and shape are not covered: they belong to the entry.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    totals = [0, 0]
    for start in range(0, flat.numel(), PIECE_BYTES):
        piece = flat[start : start + PIECE_BYTES]
        if piece.numel() % 8 or piece.storage_offset() % 8:  # not words in memory
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).clone()
        words = piece.view(torch.int64)
        positions = torch.arange(start // 8 + 1, start // 8 + 1 + len(words), device=words.device)
        sums = torch.stack([_mixed(positions.mul(lane).add_(words)).sum() for lane in LANES])
        totals = [total + part for total, part in zip(totals, sums.tolist(), strict=True)]
    return "".join(f"{total % (1 << 64):016x}" for total in totals)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """In place. SplitMix64's finalizer: each of the 2^64 words has another result."""
    for shift, multiplier in MIXING:
        words.bitwise_xor_(_shifted(words, shift)).mul_(multiplier)
    return words.bitwise_xor_(_shifted(words, LAST_SHIFT))


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, filled with zeros: of signed words torch copies the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def local_digest(tensor: torch.Tensor) -> str:
    """For comparisons between trainers on devices of one kind: computed where the tensor is."""
    return tensor_digest(tensor) if tensor.device.type == "cpu" else device_digest(tensor)


def tensor_entry(
    name: str, tensor: torch.Tensor, digest_of: Callable[[torch.Tensor], str] = tensor_digest
) -> TensorEntry:
    """Name, dtype, shape and digest of one tensor. Raises WireError: the dtype is not transferable."""
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise WireError(f"{name}: dtype {tensor.dtype} may not travel")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), digest=digest_of(tensor))


def entries_of(
    tensors: Mapping[str, torch.Tensor], digest_of: Callable[[torch.Tensor], str] = tensor_digest
) -> tuple[TensorEntry, ...]:
    """Entries of all tensors, sorted by name."""
    return tuple(tensor_entry(name, tensors[name], digest_of) for name in sorted(tensors))


def entries_digest(entries: Iterable[TensorEntry]) -> str:
    """SHA-256 over the entries in the order of their names. Separators make the encoding unambiguous."""
    total = hashlib.sha256()
    for e in sorted(entries, key=lambda e: e.name):
        shape = ",".join(str(n) for n in e.shape)
        total.update(f"{len(e.name.encode())}:{e.name}|{e.dtype}|{shape}|{e.digest}\n".encode())
    return total.hexdigest()


def manifest_digest(policy_version: int, entries: Iterable[TensorEntry]) -> str:
    """Digest of a manifest: version and entries.

    Excludes the canary's log-probabilities: they are computed, so two trainers with the same bits on different machines
    may differ in the last place, yet each must be able to serve the other's version.
    """
    return hashlib.sha256(f"{policy_version}|{entries_digest(entries)}".encode()).hexdigest()


def build_manifest(
    policy_version: int,
    tensors: Mapping[str, torch.Tensor],
    canary_logprobs: Sequence[float],
    entries: tuple[TensorEntry, ...] | None = None,
) -> Manifest:
    """The manifest that a trainer publishes after a commit.

    Args:
        policy_version: 0 for the initial weights.
        tensors: weights under their Hugging Face names.
        canary_logprobs: the trainer's log-probabilities of `proof.CANARY`: the anchor of proof part (c).
        entries: of these tensors, if known; null: computed.
    """
    entries = entries_of(tensors) if entries is None else entries
    return Manifest(
        policy_version=policy_version,
        tensors=entries,
        canary_logprobs=tuple(float(x) for x in canary_logprobs),
        digest=manifest_digest(policy_version, entries),
    )


def check_manifest(manifest: Manifest) -> None:
    """Checks that a manifest has a correct digest and lists each tensor once.

    Raises:
        WireError: names the failed check.
    """
    names = [e.name for e in manifest.tensors]
    if not names:
        raise WireError(f"manifest of version {manifest.policy_version} names no tensor")
    if len(set(names)) != len(names):
        raise WireError(f"manifest of version {manifest.policy_version} names a tensor twice")
    wanted = manifest_digest(manifest.policy_version, manifest.tensors)
    if wanted != manifest.digest:
        raise WireError(
            f"manifest of version {manifest.policy_version}: digest is {manifest.digest[:12]}, content {wanted[:12]}"
        )
