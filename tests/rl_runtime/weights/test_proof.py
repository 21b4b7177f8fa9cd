"""The certifier alone: values in, verdict out."""

import math
from dataclasses import replace

import pytest
import torch

from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.protocol.messages import Manifest, WeightProof
from rolecall.rl_runtime.weights.digest import build_manifest
from rolecall.rl_runtime.weights.proof import CANARY, NUM_ANCHORS_MAX, ProofVerifier

LOGPROBS = (-1.0, -2.0, -12.0)


def make_manifest(version: int = 1) -> Manifest:
    weights = {"a": torch.full((2, 2), float(version)), "b": torch.ones(3)}
    return build_manifest(version, weights, LOGPROBS)


def make_proof(manifest: Manifest, replica: str = "rollout/0", **changes: object) -> WeightProof:
    proof = WeightProof(
        replica=ReplicaId(replica),
        incarnation=1,
        epoch=3,
        policy_version=manifest.policy_version,
        manifest_digest=manifest.digest,
        received_digest=manifest.digest,
        storage_digest="s",
        covered=2,
        uncovered=(),
        canary_logprobs=(-1.000001, -2.0, -12.0001),
        holder=ReplicaId("trainer/0"),
        bytes_received=28,
        seconds=0.1,
        layout="l",
        storage=(("a", "1"), ("b", "2")),
    )
    return replace(proof, **changes)  # type: ignore[arg-type]


def test_canary_fits_the_smallest_vocabulary_and_uses_all_of_it() -> None:
    assert set(CANARY) == set(range(1, 16))


def test_first_is_anchored_to_the_trainer_and_the_second_to_the_first() -> None:
    certifier, manifest = ProofVerifier(), make_manifest()
    first = certifier.judge(manifest, make_proof(manifest), incarnation=1, epoch=3)
    assert first.admitted and "first of version 1" in first.because
    second = certifier.judge(manifest, make_proof(manifest, "rollout/1"))
    assert second.admitted and "equals rollout/0" in second.because


@pytest.mark.parametrize(
    ("dtype", "canary", "why"),
    [
        ("float32", (-1.000001, -2.0, -12.0005), ""),  # rounding in a real model: one token off by 4e-5 of itself
        ("float32", (-1.00003, -2.00006, -12.00036), "differ from the trainer's by 3e-05 of themselves in the mean"),
        ("bfloat16", (-1.05, -2.0, -13.5), ""),  # rounding: 0.06 in the mean, one token far off
        (
            "bfloat16",
            (-1.2, -2.3, -13.0),
            "differ from the trainer's by 0.144 of themselves in the mean (tolerance 0.1 in bfloat16)",
        ),
        ("bfloat16", (-1.0, math.nan, -12.0), "by nan of themselves"),
    ],
)
def test_the_canary_is_judged_in_the_mean(dtype: str, canary: tuple[float, ...], why: str) -> None:
    manifest = build_manifest(1, {"a": torch.ones(2, dtype=getattr(torch, dtype))}, LOGPROBS)
    verdict = ProofVerifier().judge(manifest, make_proof(manifest, canary_logprobs=canary))
    assert verdict.admitted == (not why) and why in verdict.because


REFUSED_FIRST = {
    "other manifest": ({"manifest_digest": "x"}, "a", "(all)", "proof is for manifest"),
    "other version": ({"policy_version": 2}, "a", "(all)", "policy version 2, wanted is 1"),
    "old incarnation": ({"incarnation": 0}, "a", "(all)", "incarnation 0, wanted is 1"),
    "old epoch": ({"epoch": 2}, "a", "(all)", "epoch 2, wanted is 3"),
    "bytes": ({"received_digest": "x"}, "a", "(all)", "not the manifest's"),
    "canary beyond tolerance": (
        {"canary_logprobs": (-1.0001, -2.0, -12.0)},
        "c",
        "(canary)",
        "(tolerance 2e-05 in float32)",
    ),
    "canary NaN": ({"canary_logprobs": (-1.0, math.nan, -12.0)}, "c", "(canary)", "by nan of themselves"),
    "canary too short": ({"canary_logprobs": (-1.0,)}, "c", "(canary)", "has 1 log-probabilities"),
}


@pytest.mark.parametrize("fault", sorted(REFUSED_FIRST))
def test_first_proof_is_refused(fault: str) -> None:
    changes, part, tensor, reason = REFUSED_FIRST[fault]
    certifier, manifest = ProofVerifier(), make_manifest()
    verdict = certifier.judge(manifest, make_proof(manifest, **changes), incarnation=1, epoch=3)
    assert (verdict.admitted, verdict.part, verdict.tensor) == (False, part, tensor)
    assert reason in verdict.because
    # A refused proof is no anchor: the next honest one is the first.
    assert "first of version" in certifier.judge(manifest, make_proof(manifest)).because


REFUSED_LATER = {
    "storage": ({"storage_digest": "t", "storage": (("a", "1"), ("b", "9"))}, "b", "b"),
    "storage, unnamed": ({"storage_digest": "t"}, "b", "(all)"),
    "covers less": ({"covered": 1, "uncovered": ("b",)}, "b", "b"),
    "canary by one bit": ({"canary_logprobs": (-1.000001, -2.0, math.nextafter(-12.0001, 0))}, "c", "(canary)"),
    "canary too short": ({"canary_logprobs": (-1.000001, -2.0)}, "c", "(canary)"),
}


@pytest.mark.parametrize("fault", sorted(REFUSED_LATER))
def test_later_proof_must_equal_a_certified_one(fault: str) -> None:
    changes, part, tensor = REFUSED_LATER[fault]
    certifier, manifest = ProofVerifier(), make_manifest()
    assert certifier.judge(manifest, make_proof(manifest)).admitted
    verdict = certifier.judge(manifest, make_proof(manifest, "rollout/1", **changes))
    assert (verdict.admitted, verdict.part, verdict.tensor) == (False, part, tensor)


def test_another_layout_is_anchored_to_the_trainer_again() -> None:
    certifier, manifest = ProofVerifier(), make_manifest()
    assert certifier.judge(manifest, make_proof(manifest)).admitted
    other = make_proof(manifest, "rollout/1", layout="tensor parallel 2", storage_digest="t")
    assert "first of version" in certifier.judge(manifest, other).because


def test_same_version_after_going_back_is_another_manifest() -> None:
    certifier = ProofVerifier()
    before, after = make_manifest(5), build_manifest(5, {"a": torch.zeros(1)}, LOGPROBS)
    assert certifier.judge(before, make_proof(before)).admitted
    assert not certifier.judge(after, make_proof(before)).admitted
    assert "first of version" in certifier.judge(after, make_proof(after, storage_digest="t")).because


def test_anchors_are_bounded() -> None:
    certifier = ProofVerifier()
    for version in range(NUM_ANCHORS_MAX + 10):
        manifest = make_manifest(version)
        assert certifier.judge(manifest, make_proof(manifest)).admitted
    assert len(certifier._anchors) == NUM_ANCHORS_MAX
