from dataclasses import replace

import pytest
import torch
from blake3 import blake3

from rolecall.core.errors import WireError
from rolecall.rl_runtime.weights.digest import (
    DTYPES,
    THREADED_BYTES,
    build_manifest,
    check_manifest,
    entries_digest,
    entries_of,
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
