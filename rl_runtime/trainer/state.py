"""A trainer's state: policy, critic (if any) and commit record, under one lock that keeps reads consistent.

The optimizers are the only writers and run with the lock held; exports, policy snapshots and digests are copies made
under the same lock. Exported tensors are named `weight/<name>`, `exp_avg/<name>` and `exp_avg_sq/<name>`, the critic's
with the prefix `critic/`. Only the policy is sent to the engines. Copies of its newest former versions stay here for
`agreement` and are not exported.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import NonFiniteValue, ProofMismatch, StaleIncarnation
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.payloads import ChainHead
from rolecall.rl_runtime.algorithms.agreement import VERSIONS_KEPT
from rolecall.rl_runtime.algorithms.objective import Divisors, token_logprobs
from rolecall.rl_runtime.protocol.messages import CommitRecord, first_commit
from rolecall.rl_runtime.tasks.tokenizer import Vocabulary
from rolecall.rl_runtime.trainer.model import make_critic, make_model
from rolecall.rl_runtime.trainer.network import Network

META_FORMAT: Final = 2
META_FORMATS: Final = (1, META_FORMAT)
"""Format 1 had no critic; a state without one reads the same in both."""
CRITIC: Final = "critic/"


class TrainerState:
    def __init__(
        self,
        policy: Network,
        critic: Network | None,
        commit: CommitRecord,
        *,
        replica: ReplicaId,
        versions_kept: int = 0,
    ) -> None:
        """`versions_kept`: number of former policy versions to keep."""
        self.policy, self.critic = policy, critic
        self.former: Mapping[int, dict[str, torch.Tensor]] = {}  # version -> weights; only the working thread reads it
        self._versions_kept = versions_kept
        self._replica = replica
        self._networks = (policy,) if critic is None else (policy, critic)
        self.num_parameters = sum(n.num_parameters for n in self._networks)
        self._commit = commit
        self._lock = threading.RLock()
        self._weights_digest = self._digest_weights()

    @property
    def commit(self) -> CommitRecord:
        return self._commit

    @property
    def weights_digest(self) -> str:
        """SHA-256 over all weights in the order of their names, the policy's before the critic's."""
        return self._weights_digest

    def apply(self, sums: torch.Tensor, divisors: Divisors, commit: CommitRecord) -> float:
        """Divides the step's sums (flat: policy, then critic), clips, steps the optimizers and stores the record,
        atomically for readers. Returns the norm of the policy's gradient before clipping.

        Raises:
            NotFinite: a gradient overflows its parameters' dtype; nothing was changed.
        """
        end = self.policy.num_parameters
        with self._lock:
            norm = self.policy.take_gradient(sums[:end], divisors.policy)
            norms = [norm]
            if self.critic is not None:
                norms.append(self.critic.take_gradient(sums[end:], divisors.value))
            if not bool(torch.isfinite(torch.tensor(norms)).all()):
                for network in self._networks:
                    network.drop_gradient()
                raise NonFiniteValue(replica=self._replica, step=commit.step, what="the sum of finite gradients")
            self._remember()
            for network in self._networks:
                network.step()
            self._commit = commit
            self._weights_digest = self._digest_weights()
        return norm

    def _remember(self) -> None:
        """Keeps a copy of the policy before the optimizer step makes it a former version."""
        version, kept = self._commit.policy_version, self._versions_kept
        if kept:
            old = {v: w for v, w in self.former.items() if v > version - kept}
            self.former = {**old, version: self.policy.weights()}

    def policy_tensors(self, version: int) -> dict[str, torch.Tensor]:
        with self._lock:
            if version != self._commit.policy_version:
                raise StaleIncarnation(
                    replica=self._replica, wanted=f"version {self._commit.policy_version}", got=f"version {version}"
                )
            return self.policy.weights()

    def canary_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        row = torch.tensor([list(tokens)], dtype=torch.int64)
        with self._lock, torch.no_grad():
            logprobs, _ = token_logprobs(self.policy.module(input_ids=row, use_cache=False).logits, row)
        return tuple(float(x) for x in logprobs[0, 1:])

    def export(self) -> tuple[dict[str, torch.Tensor], str]:
        """Copies of all tensors, and the matching meta."""
        with self._lock:
            tensors = {name: t.clone() for network in self._networks for name, t in network.tensors()}
            meta = {
                "format": META_FORMAT,
                "optimizer_step": self.policy.optimizer_step,
                "commit": asdict(self._commit),
            }
        return tensors, json.dumps(meta, sort_keys=True)

    def load(self, tensors: dict[str, torch.Tensor], meta: str) -> None:
        """Checks everything first, then replaces the state.

        Raises:
            ProofMismatch: names the tensor, or the meta.
        """
        steps, commit = self._parsed_meta(meta)
        self._check_tensors(tensors)
        with self._lock, torch.no_grad():
            for network in self._networks:
                for name, mine in network.tensors():
                    mine.copy_(tensors[name])
                network.set_optimizer_step(steps)
            self.former = {}  # they may belong to a discarded policy
            self._commit = commit
            self._weights_digest = self._digest_weights()

    def _parsed_meta(self, meta: str) -> tuple[int, CommitRecord]:
        try:
            steps, commit = parse_meta(meta)
        except ValueError as e:
            raise self._mismatch("(meta)", str(e)) from e
        return steps, commit

    def _check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        has_critic = any(name.startswith(CRITIC) for name in tensors)
        if has_critic != (self.critic is not None):
            said = "it holds a critic, this job's algorithm has none" if has_critic else "it holds no critic"
            raise self._mismatch(f"{CRITIC}*", f"{said}: the state is that of another algorithm")
        wanted = {name: t for network in self._networks for name, t in network.tensors()}
        for name in sorted(wanted.keys() ^ tensors.keys()):
            raise self._mismatch(name, "missing" if name in wanted else "not of this model")
        for name, mine in wanted.items():
            got = tensors[name]
            if got.shape != mine.shape or got.dtype != mine.dtype:
                want = f"{mine.dtype} {tuple(mine.shape)}"
                raise self._mismatch(name, f"expected {want}, got {got.dtype} {tuple(got.shape)}")

    def _mismatch(self, tensor: str, reason: str) -> ProofMismatch:
        return ProofMismatch(replica=self._replica, part="state", tensor=tensor, reason=reason)

    def _digest_weights(self) -> str:
        total = hashlib.sha256()
        for network in self._networks:
            for p in network.parameters:
                total.update(p.detach().contiguous().view(torch.uint8).numpy().data)
        return total.hexdigest()


def first_state(
    job: JobConfig, vocab: Vocabulary, *, replica: ReplicaId, dtype: torch.dtype = torch.float32
) -> TrainerState:
    """A run's initial state: a function of the job alone, so that every replica creates the same bits.

    Raises:
        ConfigError: the model folder cannot be loaded.
    """
    a = job.algorithm
    policy = Network(
        make_model(job.model, vocab, job.seed).to(dtype),
        learning_rate=a.learning_rate,
        grad_norm_max=a.grad_norm_max,
    )
    critic = None
    if a.has_critic:
        critic = Network(
            make_critic(job.model, vocab, job.seed).to(dtype),
            learning_rate=a.value_learning_rate,
            grad_norm_max=a.grad_norm_max,
            prefix=CRITIC,
        )
    kept = min(VERSIONS_KEPT, job.runtime.staleness_max)
    return TrainerState(policy, critic, first_commit(), replica=replica, versions_kept=kept)


def parse_meta(meta: str) -> tuple[int, CommitRecord]:
    """(number of optimizer steps, commit record) of an export.

    Raises:
        ValueError: it is not a valid meta; the message gives the reason.
    """
    try:
        d: dict[str, Any] = json.loads(meta)
        if d["format"] not in META_FORMATS:
            raise ValueError(f"format {d['format']}, this version reads {META_FORMATS}")
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
