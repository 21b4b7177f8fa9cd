"""Invariant Proof before service (docs/invariants.md): the weight proof that a rollout must provide, and its verifier.

Three parts, each detecting faults that the others cannot:

(a) digest of the bytes received, against the trainer's manifest;
(b) digest of the engine's own parameter storage after loading, per parameter: against the received bytes where a
    parameter is just its concatenated sources (the engine checks that first), and bitwise equal among replicas of one
    layout;
(c) log-probabilities of a fixed canary: within a tolerance of the trainer's for the first replica of a version and
    layout, bitwise equal to those of a certified one from then on.

| fault                                         | (a)  | (b)  | (c)  |
|-----------------------------------------------|------|------|------|
| tensor not received, or its bytes altered     | sees | sees | sees |
| tensor received but skipped in loading        | -    | sees | sees |
| two layers swapped in loading                 | -    | sees | sees |
| a tensor of the previous version in storage   | -    | sees | if the step moved the canary beyond the tolerance |
| a bit flipped after loading                   | -    | sees | if it changes a log-probability of the canary |
| a vocabulary row that the canary does not use | -    | sees | -    |
| right storage, wrong computation (kernel, KV) | -    | -    | sees |
| a parameter that cannot be read back          | -    | - (listed as uncovered, never as covered) | sees |

`ProofVerifier` only compares values: no I/O, no clock, no engine. The same proofs in the same order give the same
verdicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rolecall.rl_runtime.protocol.messages import Manifest, WeightProof

CANARY: Final[tuple[int, ...]] = (1, 3, 7, 4, 12, 5, 9, 15, 6, 10, 13, 8, 11, 14, 3, 3, 5, 8, 13, 2, 1, 4, 9, 6)
"""The fixed sequence of ids below 16, which every vocabulary has; each id except 0 (padding) occurs at least once."""

CANARY_TOLERANCE: Final[dict[str, float]] = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""How far the first replica may be from the trainer in the mean over the canary, by dtype of the weights, each
log-probability as a share of max(1, |log-probability|).

Trainer and engine compute the same values in a different order: measured 5e-7 to 1.6e-6 in float32. One step at
learning rate 2e-4 moves the canary by 7e-3, at 1e-6 by 7e-5: 2e-5 lies between, 12 times the noise. In half precision
the order of sums alone moves log-probabilities by 1e-3 to 1e-2 in small models. To a real model the canary is nonsense,
with log-probabilities near -20, and single tokens are far off, so none is judged alone: for SmolLM2-135M in float32,
engine and trainer differ by 1.6e-6 in the mean and by 1.6e-5 at the worst token, each of them from float64 by 7e-6 and
6e-5; in bfloat16 by 0.03 and 0.11, two attention kernels of one library by 0.02 and 0.14 (measured). In half precision
only parts (a) and (b) can distinguish neighbouring versions.
"""

NUM_ANCHORS_MAX: Final = 64
"""Certified (version, layout) pairs to keep; a late replica of a dropped pair gets a new anchor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofDecision:
    """Whether a replica may serve, and why. `part` and `tensor` name the failure; both empty when admitted."""

    admitted: bool
    because: str
    part: str = ""
    tensor: str = ""


class ProofVerifier:
    """Decides on proofs, and stores the first certified one of each (manifest, layout)."""

    def __init__(self) -> None:
        self._anchors: dict[tuple[str, str], WeightProof] = {}  # (manifest, layout) -> the first certified proof

    def judge(
        self, manifest: Manifest, proof: WeightProof, *, incarnation: int | None = None, epoch: int | None = None
    ) -> ProofDecision:
        """Whether this replica may serve `manifest`. `incarnation`, `epoch`: expected values, if known."""
        for what, wanted, got in (
            ("policy version", manifest.policy_version, proof.policy_version),
            ("manifest", manifest.digest, proof.manifest_digest),
            ("incarnation", incarnation, proof.incarnation),
            ("epoch", epoch, proof.epoch),
        ):
            if wanted is not None and wanted != got:
                return _refused("a", "(all)", f"proof is for {what} {got}, wanted is {wanted}")
        if proof.received_digest != manifest.digest:
            return _refused("a", "(all)", "digest of the bytes received is not the manifest's")
        key = (manifest.digest, proof.layout)
        anchor = self._anchors.get(key)
        if anchor is None:
            if reason := canary_outside(manifest.tensors[0].dtype, manifest.canary_logprobs, proof.canary_logprobs):
                return _refused("c", "(canary)", reason)
            self._anchors[key] = proof
            while len(self._anchors) > NUM_ANCHORS_MAX:
                del self._anchors[next(iter(self._anchors))]
            return ProofDecision(
                admitted=True,
                because=f"{proof.replica}#{proof.incarnation} is the first of version {proof.policy_version} and this "
                f"layout: bytes equal the manifest, canary within tolerance of the trainer's",
            )
        return _equal(anchor, proof) or ProofDecision(
            admitted=True,
            because=f"{proof.replica}#{proof.incarnation} equals {anchor.replica} in storage and canary, "
            f"version {proof.policy_version}",
        )


def _refused(part: str, tensor: str, because: str) -> ProofDecision:
    return ProofDecision(admitted=False, because=because, part=part, tensor=tensor)


def canary_outside(dtype: str, anchor: Sequence[float], got: Sequence[float]) -> str:
    """Why `got` differs from the trainer's canary, or "" within the tolerance. NaN is never within."""
    if len(anchor) != len(got):
        return f"canary has {len(got)} log-probabilities, the trainer's {len(anchor)}"
    tolerance = CANARY_TOLERANCE.get(dtype, max(CANARY_TOLERANCE.values()))
    shares = [abs(a - b) / max(1.0, abs(a)) for a, b in zip(anchor, got, strict=True)]
    if shares and not sum(shares) / len(shares) <= tolerance:
        return (
            f"log-probabilities of the canary differ from the trainer's by {sum(shares) / len(shares):.3g} of "
            f"themselves in the mean (tolerance {tolerance:g} in {dtype})"
        )
    return ""


def _equal(certified: WeightProof, proof: WeightProof) -> ProofDecision | None:
    if certified.uncovered != proof.uncovered or certified.covered != proof.covered:
        odd = sorted(set(certified.uncovered) ^ set(proof.uncovered)) or ["(count)"]
        return _refused("b", odd[0], f"covers other parameters than {certified.replica} of the same layout")
    if certified.storage_digest != proof.storage_digest:
        theirs = dict(certified.storage)
        odd = [name for name, digest in proof.storage if theirs.get(name) != digest]
        return _refused(
            "b", odd[0] if odd else "(all)", f"storage differs from that of {certified.replica}, of the same layout"
        )
    for i, (a, b) in enumerate(zip(certified.canary_logprobs, proof.canary_logprobs, strict=False)):
        if a != b:
            return _refused("c", "(canary)", f"log-probability {i} is {b!r}, that of {certified.replica} is {a!r}")
    if len(certified.canary_logprobs) != len(proof.canary_logprobs):
        return _refused("c", "(canary)", f"has another length than that of {certified.replica}")
    return None
