from dataclasses import replace

import pytest
import torch
from blake3 import blake3

from rolecall.core.errors import WireError
from rolecall.rl_runtime.weights.digest import (
    DTYPES,
    LANES,
    PIECE_BYTES,
    THREADED_BYTES,
    build_manifest,
    check_manifest,
    device_digest,
    entries_digest,
    entries_of,
    local_digest,
    manifest_digest,
    raw_bytes,
    tensor_digest,
    tensor_entry,
)


def weights() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}


def test_digest_is_blake3_of_the_little_endian_bytes() -> None:
    t = torch.tensor([1, -2], dtype=torch.int32)
    assert tensor_digest(t) == blake3(b"\x01\x00\x00\x00\xfe\xff\xff\xff").hexdigest()
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"  # the published test vector
    assert tensor_digest(torch.zeros(0)) == empty


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_that_may_travel_has_bytes(dtype: str) -> None:
    t = torch.zeros(3, 2).to(DTYPES[dtype])
    assert len(raw_bytes(t)) == 6 * DTYPES[dtype].itemsize
    assert tensor_entry("t", t).dtype == dtype


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3)])
def test_scalars_and_empty_tensors_have_digests(shape: tuple[int, ...]) -> None:
    assert tensor_digest(torch.zeros(shape)) == blake3(bytes(4 * torch.zeros(shape).numel())).hexdigest()


def test_a_view_has_the_digest_of_its_copy() -> None:
    t = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert tensor_digest(t.t()) == tensor_digest(t.t().contiguous()) != tensor_digest(t)


def test_one_bit_and_the_sign_of_zero_show() -> None:
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))


def test_a_long_tensors_digest_is_of_all_its_bytes() -> None:
    long = torch.zeros(2 * THREADED_BYTES + 24, dtype=torch.uint8)
    before = tensor_digest(long)
    assert before == blake3(bytes(len(long))).hexdigest(), "threads change nothing"
    for place in (0, THREADED_BYTES, 2 * THREADED_BYTES + 23):
        changed = long.clone()
        changed[place] = 1
        assert tensor_digest(changed) != before


def test_complex_tensors_may_not_travel() -> None:
    with pytest.raises(WireError, match="complex64 may not travel"):
        tensor_entry("t", torch.zeros(1, dtype=torch.complex64))


def test_manifest_is_sorted_and_holds() -> None:
    manifest = build_manifest(3, weights(), [-1.0, -2.5])
    assert [e.name for e in manifest.tensors] == ["a", "b"]
    check_manifest(manifest)
    assert manifest_digest(3, entries_of(weights())) == manifest.digest


@pytest.mark.parametrize("what", ["version", "tensor left out", "entry twice"])
def test_altered_manifest_is_refused(what: str) -> None:
    manifest = build_manifest(3, weights(), [-1.0])
    altered = {
        "version": replace(manifest, policy_version=4),
        "tensor left out": replace(manifest, tensors=manifest.tensors[:1]),
        "entry twice": replace(manifest, tensors=manifest.tensors * 2),
    }[what]
    with pytest.raises(WireError, match="manifest of version"):
        check_manifest(altered)


def test_names_and_shapes_do_not_run_into_each_other() -> None:
    one = tensor_entry("a|float32", torch.zeros(1))
    assert entries_digest([one]) != entries_digest([replace(one, name="a", dtype="float32|float32")])


@pytest.mark.parametrize("fault", ["skipped", "swapped", "stale", "bit", "unused row", "added", "reshaped"])
def test_part_a_sees_every_change_of_the_bytes(fault: str) -> None:
    layers = {"layer.0": torch.randn(4, 4), "layer.1": torch.randn(4, 4), "embed": torch.randn(8, 4)}
    manifest = build_manifest(1, layers, [])
    got = {n: t.clone() for n, t in layers.items()}
    match fault:
        case "skipped":
            del got["embed"]
        case "swapped":
            got["layer.0"], got["layer.1"] = got["layer.1"], got["layer.0"]
        case "stale":
            got["layer.0"] = layers["layer.0"] * 0.999
        case "bit":
            got["layer.0"].view(torch.int32)[2, 1] ^= 1
        case "unused row":
            got["embed"][7] *= 5
        case "added":
            got["extra"] = torch.zeros(1)
        case "reshaped":
            got["embed"] = got["embed"].reshape(4, 8)
    assert manifest_digest(manifest.policy_version, entries_of(got)) != manifest.digest


def reference_digest(raw: bytes) -> str:
    """`device_digest` in plain integers, from SplitMix64's published constants."""
    mask = (1 << 64) - 1
    words = [int.from_bytes(raw[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(raw), 8)]

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    sums = (sum(mixed((w + lane * n) & mask) for n, w in enumerate(words, 1)) & mask for lane in LANES)
    return "".join(f"{total:016x}" for total in sums)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1001])
def test_the_device_digest_is_that_of_plain_integers(size: int) -> None:
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert device_digest(raw) == reference_digest(raw.numpy().tobytes())


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_device_digest_reads_every_dtype_at_any_place_in_memory(dtype: str) -> None:
    t = torch.randn(37, 3, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    for view in (t, t[1:], t.t(), t[0, 0], t[:0]):
        assert device_digest(view) == reference_digest(raw_bytes(view).tobytes())


def test_the_device_digest_shows_every_change_across_pieces() -> None:
    long = torch.zeros(PIECE_BYTES + 24, dtype=torch.uint8)
    before = device_digest(long)
    seen = {before}
    for place in (0, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 23):
        changed = long.clone()
        changed[place] = 1
        seen.add(device_digest(changed))
    assert len(seen) == 5
    swapped = torch.arange(64, dtype=torch.int64)
    order = torch.tensor([*range(1, 64), 0])
    assert device_digest(swapped) != device_digest(swapped[order]), "the sums depend on the place of a word"
    assert device_digest(torch.tensor([0.0])) != device_digest(torch.tensor([-0.0]))


def test_the_vote_keeps_blake3_on_a_cpu() -> None:
    t = torch.arange(5.0)
    assert local_digest(t) == tensor_digest(t) != device_digest(t)


@pytest.mark.gpu
def test_the_device_digest_on_a_gpu_is_that_on_a_cpu() -> None:
    t = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    assert local_digest(t.cuda()) == device_digest(t)
