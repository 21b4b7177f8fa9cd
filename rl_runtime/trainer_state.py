"""A trainer's state: weights, AdamW's moments and the commit record. One lock, so that a reader sees one step's.

The optimizer is the only writer and runs with the lock held; exports, policy snapshots and digests are copies made
under the same lock. In exports tensors are named `weight/<name>`, `exp_avg/<name>` and `exp_avg_sq/<name>`.
"""

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import torch

from rolecall.core.config_algorithm import AlgorithmConfig
from rolecall.core.errors import ProofMismatch, StaleIncarnation
from rolecall.core.ids import ReplicaId
from rolecall.core.journal import ChainHead
from rolecall.rl_runtime.grpo import token_logprobs
from rolecall.rl_runtime.protocol import CommitRecord

META_FORMAT: Final = 1
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
ADAM_BETAS: Final = (0.9, 0.999)


class TrainerState:
    def __init__(self, model: Any, algorithm: AlgorithmConfig, commit: CommitRecord, *, replica: ReplicaId) -> None:
        self.model = model
        self._replica = replica
        named = sorted(model.named_parameters())  # a tied parameter appears once
        self.names: tuple[str, ...] = tuple(n for n, _ in named)
        self.parameters: tuple[torch.nn.Parameter, ...] = tuple(p for _, p in named)
        self.num_parameters = sum(p.numel() for p in self.parameters)
        self._grad_norm_max = algorithm.grad_norm_max
        self._optimizer = torch.optim.AdamW(
            self.parameters, lr=algorithm.learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True
        )
        for p in self.parameters:  # made now and not in the first step: a state of step 0 can be copied, too
            self._optimizer.state[p] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        self._commit = commit
        self._lock = threading.RLock()
        self._weights_digest = self._digest_weights()

    @property
    def commit(self) -> CommitRecord:
        return self._commit

    @property
    def weights_digest(self) -> str:
        """SHA-256 over all weights in the order of their names."""
        return self._weights_digest

    def apply(self, gradient: torch.Tensor, commit: CommitRecord) -> float:
        """Clips `gradient` (flat, in the order of names), steps the optimizer, takes over the record: all or nothing
        for readers. Returns the norm before clipping."""
        start = 0
        with self._lock:
            for p in self.parameters:
                p.grad = gradient[start : start + p.numel()].view_as(p).to(p.dtype)
                start += p.numel()
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self._grad_norm_max)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._commit = commit
            self._weights_digest = self._digest_weights()
        return float(norm)

    def policy_tensors(self, version: int) -> dict[str, torch.Tensor]:
        with self._lock:
            if version != self._commit.policy_version:
                raise StaleIncarnation(
                    replica=self._replica, wanted=f"version {self._commit.policy_version}", got=f"version {version}"
                )
            return {n: p.detach().clone() for n, p in zip(self.names, self.parameters, strict=True)}

    def canary_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        row = torch.tensor([list(tokens)], dtype=torch.int64)
        with self._lock, torch.no_grad():
            logprobs, _ = token_logprobs(self.model(input_ids=row, use_cache=False).logits, row)
        return tuple(float(x) for x in logprobs[0, 1:])

    def export(self) -> tuple[dict[str, torch.Tensor], str]:
        """Copies of all tensors, and the meta that belongs to them."""
        with self._lock:
            tensors = {f"{WEIGHT}/{n}": p.detach().clone() for n, p in zip(self.names, self.parameters, strict=True)}
            for n, p in zip(self.names, self.parameters, strict=True):
                for moment in MOMENTS:
                    tensors[f"{moment}/{n}"] = self._optimizer.state[p][moment].detach().clone()
            steps = int(self._optimizer.state[self.parameters[0]]["step"])
            meta = {"format": META_FORMAT, "optimizer_step": steps, "commit": asdict(self._commit)}
        return tensors, json.dumps(meta, sort_keys=True)

    def load(self, tensors: dict[str, torch.Tensor], meta: str) -> None:
        """Checks everything first, then becomes a copy.

        Raises:
            ProofMismatch: naming the tensor, or the meta.
        """
        steps, commit = self._parsed_meta(meta)
        self._check_tensors(tensors)
        with self._lock, torch.no_grad():
            for n, p in zip(self.names, self.parameters, strict=True):
                p.copy_(tensors[f"{WEIGHT}/{n}"])
                for moment in MOMENTS:
                    self._optimizer.state[p][moment].copy_(tensors[f"{moment}/{n}"])
                self._optimizer.state[p]["step"].fill_(float(steps))
            self._commit = commit
            self._weights_digest = self._digest_weights()

    def _parsed_meta(self, meta: str) -> tuple[int, CommitRecord]:
        try:
            steps, commit = parse_meta(meta)
        except ValueError as e:
            raise self._mismatch("(meta)", str(e)) from e
        return steps, commit

    def _check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        wanted = {
            f"{kind}/{n}": p for kind in (WEIGHT, *MOMENTS) for n, p in zip(self.names, self.parameters, strict=True)
        }
        for name in sorted(wanted.keys() ^ tensors.keys()):
            raise self._mismatch(name, "missing" if name in wanted else "not of this model")
        for name, p in wanted.items():
            got = tensors[name]
            if got.shape != p.shape or got.dtype != p.dtype:
                want = f"{p.dtype} {tuple(p.shape)}"
                raise self._mismatch(name, f"expected {want}, got {got.dtype} {tuple(got.shape)}")

    def _mismatch(self, tensor: str, reason: str) -> ProofMismatch:
        return ProofMismatch(replica=self._replica, part="state", tensor=tensor, reason=reason)

    def _digest_weights(self) -> str:
        total = hashlib.sha256()
        for p in self.parameters:
            total.update(p.detach().contiguous().view(torch.uint8).numpy().data)
        return total.hexdigest()


def parse_meta(meta: str) -> tuple[int, CommitRecord]:
    """(number of optimizer steps, commit record) of an export.

    Raises:
        ValueError: it is not such a meta; the reason is the message.
    """
    try:
        d: dict[str, Any] = json.loads(meta)
        if d["format"] != META_FORMAT:
            raise ValueError(f"format {d['format']}, expected {META_FORMAT}")
        c: dict[str, Any] = d["commit"]
        commit = CommitRecord(
            step=int(c["step"]),
            epoch=int(c["epoch"]),
            microbatch_ids=tuple(c["microbatch_ids"]),
            group_ids=tuple(c["group_ids"]),
            gradient_digest=str(c["gradient_digest"]),
            ledger=ChainHead(position=int(c["ledger"]["position"]), hash=str(c["ledger"]["hash"])),
        )
        return int(d["optimizer_step"]), commit
    except (KeyError, TypeError) as e:
        raise ValueError(f"{type(e).__name__}: {e}") from e
