"""Creates the proof of an engine's weights: received, loaded, and used in computation.

Invariant Proof before service (docs/invariants.md); `rl_runtime/weights/proof.py` judges it.

Called in the engine's thread, between two steps. Every digest is computed from the bytes each time; nothing is cached.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rolecall.core.errors import ProofMismatch
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.protocol.messages import Manifest, WeightProof
from rolecall.rl_runtime.rollout.engine import VllmEngine
from rolecall.rl_runtime.weights.digest import entries_of, received_digest
from rolecall.rl_runtime.weights.port import PartialTransfer
from rolecall.rl_runtime.weights.proof import canary_outside


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSubject:
    """Identity in a proof, known before there is anything to prove."""

    replica: ReplicaId
    incarnation: int
    epoch: int

    def received(self, manifest: Manifest, pieces: PartialTransfer) -> WeightProof:
        """Part (a): digests of the bytes in memory, computed each time.

        Raises:
            ProofMismatch: names the tensor.
        """
        wanted = {e.name: e for e in manifest.tensors}
        found = {e.name: e for e in entries_of(pieces.tensors)}
        wrong = tuple(n for n in sorted(wanted.keys() | found.keys()) if wanted.get(n) != found.get(n))
        if wrong:
            raise ProofMismatch(
                replica=self.replica, part="a", tensor=wrong[0], reason="bytes received are not the manifest's"
            )
        return WeightProof(
            replica=self.replica,
            incarnation=self.incarnation,
            epoch=self.epoch,
            policy_version=manifest.policy_version,
            manifest_digest=manifest.digest,
            received_digest=received_digest(manifest, pieces.tensors),
            storage_digest="",
            covered=0,
            uncovered=(),
            canary_logprobs=(),
            holder=pieces.main_holder if pieces.bytes_by_holder else self.replica,
            bytes_received=pieces.bytes_received,
            seconds=0.0,
            received_wrong=wrong,
        )


def load(engine: VllmEngine, tensors: Mapping[str, torch.Tensor], replica: ReplicaId) -> None:
    not_loaded = engine.load(tensors)
    if not_loaded:
        reason = f"nothing was loaded into {len(not_loaded)} parameters"
        raise ProofMismatch(replica=replica, part="b", tensor=not_loaded[0], reason=reason)


def prove(engine: VllmEngine, manifest: Manifest, proof: WeightProof) -> WeightProof:
    """Parts (b) and (c), from the engine's current state.

    Raises:
        ProofMismatch: storage differs from the received bytes, or the canary from the trainer's.
    """
    ranks = engine.storage()
    for rank in ranks:
        if rank["wrong"]:
            reason = f"storage of {len(rank['wrong'])} parameters is not what was received"
            raise ProofMismatch(replica=proof.replica, part="b", tensor=rank["wrong"][0], reason=reason)
    canary = engine.canary()
    if reason := canary_outside(manifest.tensors[0].dtype, manifest.canary_logprobs, canary):
        raise ProofMismatch(replica=proof.replica, part="c", tensor="(canary)", reason=reason)
    prefix = [f"rank{i}." if len(ranks) > 1 else "" for i in range(len(ranks))]
    storage = tuple((prefix[i] + name, digest) for i, rank in enumerate(ranks) for name, digest in rank["digests"])
    return replace(
        proof,
        storage_digest=_joined([rank["digest"] for rank in ranks]),
        layout=_joined([rank["layout"] for rank in ranks]),
        covered=len(storage),
        uncovered=tuple(prefix[i] + name for i, rank in enumerate(ranks) for name in rank["uncovered"]),
        storage=storage,
        canary_logprobs=canary,
    )


def _joined(digests: Sequence[str]) -> str:
    return hashlib.sha256("|".join(digests).encode()).hexdigest()
