"""A trainer's state: policy, critic (if any), commit record and learned band, under one lock that keeps reads
consistent.

The optimizers are the only writers and run with the lock held; exports, policy snapshots and digests are copies made
under the same lock. Exported tensors are named `weight/<name>`, `exp_avg/<name>` and `exp_avg_sq/<name>`, the critic's
with the prefix `critic/`. Only the policy is sent to the engines. Copies of its newest previous versions stay here for
`agreement` and are not exported.

A step of several updates moves a second state, the draft, and readers see the state before the step until the last
update is applied.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch.func import functional_call

from rolecall.core.config.job import JobConfig
from rolecall.core.config.optimizer import OptimizerConfig
from rolecall.core.errors import NonFiniteValue, ProofMismatch, StaleIncarnation
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.rl_runtime.algorithms.agreement import VERSIONS_KEPT
from rolecall.rl_runtime.algorithms.objective import Divisors, token_logprobs
from rolecall.rl_runtime.model_layers import adapted_layers, is_adapter, plain_name
from rolecall.rl_runtime.protocol.messages import CommitRecord, MicrobatchNumbers, TensorEntry, first_commit
from rolecall.rl_runtime.tasks.tokenizer import Vocabulary
from rolecall.rl_runtime.tensor_parallel import CUT, Style
from rolecall.rl_runtime.trainer.band import LearnedBand
from rolecall.rl_runtime.trainer.model import VALUE_HEAD, compute_in, make_critic, make_model
from rolecall.rl_runtime.trainer.ranks import ALONE, TENSOR, Ranks
from rolecall.rl_runtime.weights.digest import DTYPES, entries_digest, entries_of, local_digest, tensor_entry

META_FORMAT: Final = 2
META_FORMATS: Final = (1, META_FORMAT)
"""Format 1 had no critic; a state without one reads the same in both."""
CRITIC: Final = "critic/"
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
EXPORTED: Final = (WEIGHT, *MOMENTS)


class Network:
    """One trained network: its trained parameters in a fixed order, and their AdamW optimizer.

    `parameters` are those that gradients are taken of, `masters` those that the optimizer changes: the same, except for
    bfloat16, where a parameter is the rounded copy of a float32 master. With adapters, only these are trained.

    Of several ranks, `masters` are this rank's part of the parameters. FSDP2 shards the masters themselves: in bfloat16
    they are rounded where a layer is gathered, so that there are no rounded copies; frozen weights, which have no
    masters, are kept rounded.

    A trainer has one for the policy and, if the algorithm has a critic, another one for that. Each has its own learning
    rate, moments and gradient-norm clipping, so that a large critic gradient does not shrink the policy's step. Tensors
    are exported as `weight/<name>`, `exp_avg/<name>` and `exp_avg_sq/<name>`, after the network's prefix.
    """

    def __init__(
        self,
        module: Any,
        *,
        learning_rate: float,
        grad_norm_max: float,
        optimizer: OptimizerConfig = OptimizerConfig(),
        prefix: str = "",
        dtype: torch.dtype | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`dtype`: of the weights to compute with; None: the module's own. `ranks`: that share the network."""
        self.module, self.prefix, self._ranks = module, prefix, ranks
        module.to(ranks.device)
        before = {n: p.data for n, p in module.named_parameters() if p.requires_grad}
        has_frozen = any(not p.requires_grad for p in module.parameters())
        self._gathered_in = dtype if ranks.num_shards > 1 and not has_frozen else None
        if dtype is not None and self._gathered_in is None:
            compute_in(module, dtype)
        self._styles: dict[str, Style] = {}
        if ranks.size > 1:
            exact = [m for n, m in module.named_children() if n == VALUE_HEAD]
            self._styles = ranks.shard(module, self._gathered_in, exact)
        everything = sorted(module.named_parameters())  # a tied parameter appears once
        named = [(n, p) for n, p in everything if p.requires_grad]
        # First those that tensor ranks cut, then those that have a part of the gradient at each of them.
        named.sort(key=lambda pair: (self.cut(pair[0]) is None, pair[0] not in self._styles))
        self.names: tuple[str, ...] = tuple(n for n, _ in named)
        self.parameters: tuple[torch.nn.Parameter, ...] = tuple(p for _, p in named)
        self.masters: tuple[torch.nn.Parameter, ...] = tuple(
            self._master(n, p, before[n]) for n, p in zip(self.names, self.parameters, strict=True)
        )
        del before  # whole tensors
        self.num_parameters = sum(master.numel() for master in self.masters)
        """Number that this rank holds."""
        is_cut = [self.cut(n) is not None for n in self.names]
        self._counted = [m for m, cut in zip(self.masters, is_cut, strict=True) if cut or not ranks.tensor_index]
        self.num_cut = sum(m.numel() for m, cut in zip(self.masters, is_cut, strict=True) if cut)
        """Of these, the number that no other tensor rank holds; they come first."""
        self._num_styled = sum(m.numel() for n, m in zip(self.names, self.masters, strict=True) if n in self._styles)
        self._adapted = adapted_layers(module, ranks.local, ranks.gathered)
        self._sent = [(n, plain_name(n), p) for n, p in everything if not is_adapter(n)]
        self._changing = {id(p) for p in (*self.parameters, *(layer.weight for layer in self._adapted))}
        self._unchanging: dict[str, torch.Tensor] = {}  # of several ranks: weights gathered once
        self._grad_norm_max, self._learning_rate = grad_norm_max, learning_rate
        matrices, vectors = ([p for p in self.masters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
        self._optimizer = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": decay}
                for group, decay in ((matrices, optimizer.weight_decay), (vectors, 0.0))
                if group
            ],
            lr=learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            fused=True,
        )
        for parameter in self.masters:  # before the first step, so that the state of step 0 can be copied too
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _master(self, name: str, parameter: Any, before: torch.Tensor) -> torch.nn.Parameter:
        """`before`: the whole parameter's data before it was rounded."""
        if parameter.dtype != before.dtype:
            part = self._ranks.part(before, self.cut(name))
            return torch.nn.Parameter(part.clone() if part.numel() < before.numel() else part)
        if self._ranks.num_shards > 1:
            return torch.nn.Parameter(self._ranks.local(parameter))
        found: torch.nn.Parameter = parameter
        return found

    def cut(self, name: str) -> int | None:
        """Dimension of the parameter that tensor ranks share; None: each of them holds it whole."""
        style = self._styles.get(name)
        return None if style is None else CUT.get(style)

    def complete(self, gradient: torch.Tensor) -> None:
        """Makes a flat gradient that of all tensor ranks, in place: the same bits where they hold the same parameter.

        All of them call it.
        """
        if self._ranks.tensor_index:
            gradient[self._num_styled :] = 0  # counted once
        self._ranks.sum(gradient[self.num_cut :], over=TENSOR)

    @property
    def optimizer_step(self) -> int:
        return int(self._optimizer.state[self.masters[0]]["step"])

    def take_gradient(self, sums: torch.Tensor, divisor: float) -> float:
        """Divides `sums` (flat, float64), sets each master's gradient to its part, and clips the norm.

        Divided in float64 and rounded once, so that another order of addition rounds to the same step. Returns the norm
        before clipping; if it is not finite, the gradient must not be applied.
        """
        start = 0
        for p in self.masters:
            part = sums[start : start + p.numel()].view_as(p)
            p.grad = (part / divisor).to(p.dtype)
            start += p.numel()
        gradients = [p.grad for p in self._counted if p.grad is not None]
        norm = self._ranks.norm(float(torch.nn.utils.get_total_norm(gradients)))
        total = torch.tensor(norm, dtype=self.masters[0].dtype)
        torch.nn.utils.clip_grads_with_norm_(self.masters, self._grad_norm_max, total)
        return norm

    def drop_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, learning_rate_share: float) -> None:
        """Applies the gradient set by `take_gradient`, with this share of the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * learning_rate_share
        self._optimizer.step()
        self.drop_gradient()
        self.masters_changed()

    @torch.no_grad()
    def masters_changed(self) -> None:
        """Brings the weights to compute with up to date; call it after each change of the masters."""
        for p, master in zip(self.parameters, self.masters, strict=True):
            if p.dtype != master.dtype:
                p.copy_(master)
        for layer in self._adapted:
            layer.merge()

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights to compute with, adapters merged, on the host, under the names of the model folder;
        what never changes is not copied again. Of several ranks all call it, and the first one gets the weights."""
        if self._ranks.size > 1:
            found = dict(self._unchanging)
            for own, n, p in self._sent:
                if n not in found:
                    whole = self._ranks.gathered(p.to(self._gathered_in or p.dtype), self.cut(own))
                    found[n] = whole.to("cpu", copy=True) if self._ranks.is_first else torch.empty(0)
                    if id(p) not in self._changing:
                        self._unchanging[n] = found[n]
            return {n: found[n] for _, n, _ in self._sent if self._ranks.is_first}
        return {n: p.detach().to("cpu", copy=id(p) in self._changing) for _, n, p in self._sent}

    def under_own_names(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`weights`, under the names that the module's parameters have with adapters."""
        return {own: weights[n] for own, n, _ in self._sent}

    def kept_rows(self) -> dict[str, torch.Tensor]:
        """Copies on the host of this rank's rows of the weights to compute with, under the module's own names; of
        those that change."""
        changing = ((own, p) for own, _, p in self._sent if id(p) in self._changing)
        return {own: self._ranks.local(p).to("cpu", self._gathered_in or p.dtype, copy=True) for own, p in changing}

    @torch.no_grad()
    def logits_under(self, weights: Mapping[str, torch.Tensor], tokens_st: torch.Tensor) -> torch.Tensor:
        """Logits under other weights, under the module's own names; of several ranks this one's rows of them, which
        take the place of its own for one forward pass. The network stays as it is."""
        inputs = {"input_ids": tokens_st, "use_cache": False}
        if self._ranks.size == 1:
            there = {name: weight.to(self._ranks.device) for name, weight in weights.items()}
            found: torch.Tensor = functional_call(self.module, there, kwargs=inputs).logits
            return found
        mine = {own: self._ranks.local(p) for own, _, p in self._sent if own in weights}
        now = {own: rows.clone() for own, rows in mine.items()}
        try:
            _copy(weights, mine)
            logits: torch.Tensor = self.module(**inputs).logits
        finally:
            _copy(now, mine)
        return logits

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Masters and moments without copying, under their export names."""
        for n, p in zip(self.names, self.masters, strict=True):
            yield f"{self.prefix}{WEIGHT}/{n}", p.detach()
            for moment in MOMENTS:
                yield f"{self.prefix}{moment}/{n}", self._optimizer.state[p][moment]

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`, of all ranks together: copies on the host, made one by one. All ranks call it."""
        places = [(p.shape, self.cut(n)) for n, p in zip(self.names, self.parameters, strict=True) for _ in EXPORTED]
        for (name, local), (shape, cut) in zip(self.tensors(), places, strict=True):
            yield name, self._ranks.whole(local, shape, cut).to("cpu", copy=True)

    def parts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank holds of whole `tensors`, by their export names; those of others are left out."""
        cuts = {f"{self.prefix}{kind}/{n}": self.cut(n) for n in self.names for kind in EXPORTED}
        return {name: self._ranks.part(tensors[name], cut) for name, cut in cuts.items() if name in tensors}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Becomes what these `tensors` say, after `steps` optimizer steps."""
        for name, mine in self.tensors():
            mine.copy_(tensors[name])
        for p in self.masters:
            self._optimizer.state[p]["step"].fill_(float(steps))
        self.masters_changed()

    @property
    def sends_masters(self) -> bool:
        """Whether the weights sent to engines are the masters themselves, under the same names."""
        return (
            self._ranks.size == 1
            and self._ranks.device.type == "cpu"
            and len(self._sent) == len(self.masters)
            and all(p is master for p, master in zip(self.parameters, self.masters, strict=True))
        )

    def frozen_digest(self) -> str:
        """SHA-256 over all parameters that are not trained, before any step; "" if all are. All ranks call it."""
        trained = {id(p) for p in self.parameters}
        frozen = [(own, n, p) for own, n, p in self._sent if id(p) not in trained]
        entries = (tensor_entry(n, self._ranks.gathered(p, self.cut(own))) for own, n, p in frozen)
        return entries_digest(entries) if frozen else ""


def _copy(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    for name, mine in into.items():
        mine.copy_(tensors[name])


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    version: int
    weights: Mapping[str, torch.Tensor]
    entries: tuple[TensorEntry, ...]


class TrainerState:
    def __init__(
        self,
        policy: Network,
        critic: Network | None,
        commit: CommitRecord,
        *,
        replica: ReplicaId,
        versions_kept: int = 0,
        learning_rate_share: Callable[[int], float] = lambda _step: 1.0,
        ranks: Ranks = ALONE,
        reference: str = "",
    ) -> None:
        """`versions_kept`: number of previous policy versions to keep. `learning_rate_share`: in an optimizer step.
        `ranks`: that share the networks; a state holds this rank's rows of them. `reference`: digest of the reference
        policy, if the objective needs one; a state that was trained with another one is refused."""
        self._learning_rate_share, self._ranks = learning_rate_share, ranks
        self.policy, self.critic = policy, critic
        # Version -> weights, of several ranks this rank's rows; only the working thread reads it.
        self.previous: Mapping[int, dict[str, torch.Tensor]] = {}
        self._versions_kept = versions_kept
        self.replica = replica
        self._networks = (policy,) if critic is None else (policy, critic)
        self.num_parameters = sum(n.num_parameters for n in self._networks)
        self.commit, self.band = commit, LearnedBand()
        self._lock = threading.RLock()
        self._frozen, self._reference = policy.frozen_digest(), reference
        self._snapshot: PolicySnapshot | None = None  # of the newest version that was asked for
        self._entries: tuple[TensorEntry, ...] = ()  # of the policy's masters
        self.weights_digest = self._digest_weights()
        """SHA-256 over the entries (name, dtype, shape, `local_digest` of the bytes) of all masters of policy and
        critic, and over the weights that adapters are added to."""

    def become(self, other: "TrainerState") -> None:
        """Of a draft: becomes a bitwise copy of the committed state."""
        for mine, theirs in zip(self._networks, other._networks, strict=True):
            mine.take(dict(theirs.tensors()), theirs.optimizer_step)
        self.commit, self.band, self.previous = other.commit, other.band, other.previous
        self.weights_digest = other.weights_digest

    def update(self, sums: torch.Tensor, divisors: Divisors, step: int) -> float:
        """Of a draft: one of the step's updates but the last. As in `apply`, without a commit."""
        norm = self._take_gradients(sums, divisors, step)
        self._move(step)
        self.weights_digest = self._digest_weights()
        return norm

    def apply(
        self,
        sums: torch.Tensor,
        divisors: Divisors,
        commit: CommitRecord,
        band: LearnedBand,
        draft: "TrainerState | None" = None,
    ) -> float:
        """Divides the sums of the step's last update (flat: policy, then critic), clips, steps the optimizers and
        stores record and band, atomically for readers. Returns the norm of the policy's gradient before clipping.

        `draft`: the state after the step's earlier updates, if it has several; they exchange their networks.

        Raises:
            NonFiniteValue: a gradient overflows its parameters' dtype; nothing was changed.
        """
        after = draft or self
        with self._lock:
            norm = after._take_gradients(sums, divisors, commit.step)
            self._remember()
            after._move(commit.step)
            if draft is not None:
                self.policy, draft.policy = draft.policy, self.policy
                self.critic, draft.critic = draft.critic, self.critic
                self._networks, draft._networks = draft._networks, self._networks
            self._ranks.agree()  # a commit is visible only when all ranks have applied it
            self.commit, self.band = commit, band
            self.weights_digest = self._digest_weights()
        return norm

    def complete(self, gradient: torch.Tensor) -> float:
        """Makes the flat gradient of a microbatch that of all tensor ranks, in place. Returns its norm over all ranks,
        which all call it."""
        if self._ranks.num_tensor > 1:
            for network, part in self._parts(gradient):
                network.complete(part)
        counted = gradient
        if self._ranks.tensor_index:
            counted = torch.cat([part[: network.num_cut] for network, part in self._parts(gradient)])
        return self._ranks.norm(float(torch.linalg.vector_norm(counted, dtype=torch.float64)))

    def _parts(self, flat: torch.Tensor) -> list[tuple[Network, torch.Tensor]]:
        sizes = [network.num_parameters for network in self._networks]
        return list(zip(self._networks, torch.split(flat, sizes), strict=True))

    def _take_gradients(self, sums: torch.Tensor, divisors: Divisors, step: int) -> float:
        end = self.policy.num_parameters
        norm = self.policy.take_gradient(sums[:end], divisors.policy)
        norms = [norm]
        if self.critic is not None:
            norms.append(self.critic.take_gradient(sums[end:], divisors.value))
        if not bool(torch.isfinite(torch.tensor(norms)).all()):
            for network in self._networks:
                network.drop_gradient()
            raise NonFiniteValue(replica=self.replica, step=step, what="the sum of finite gradients")
        return norm

    def _move(self, step: int) -> None:
        for network in self._networks:
            network.step(self._learning_rate_share(step))

    def _remember(self) -> None:
        """Keeps a copy of the policy before the optimizer step makes it a previous version."""
        version, kept = self.commit.policy_version, self._versions_kept
        if kept:
            old = {v: w for v, w in self.previous.items() if v > version - kept}
            if self._ranks.size > 1:
                weights = self.policy.kept_rows()
            else:  # shares the memory of what is published
                weights = self.policy.under_own_names(self.policy_snapshot(version)[0])
            self.previous = {**old, version: weights}

    def previous_logits(self, version: int, tokens_st: torch.Tensor) -> torch.Tensor:
        """Logits under a kept previous version; all ranks call it."""
        with self._lock:
            return self.policy.logits_under(self.previous[version], tokens_st)

    def policy_tensors(self, version: int) -> dict[str, torch.Tensor]:
        """The weights of `policy_snapshot`."""
        return self.policy_snapshot(version)[0]

    def policy_snapshot(self, version: int) -> tuple[dict[str, torch.Tensor], tuple[TensorEntry, ...]]:
        """An immutable copy of the weights of policy version `version`, as they are computed with and sent to engines
        (in the job's dtype, adapters merged, Hugging Face names), and their entries.

        One copy serves all callers. Where masters are sent as they are, the entries are those of the commit's vote,
        computed from the weights themselves: a copy that differs is refused by every puller.

        Raises:
            StaleIncarnation: this replica has another version.
        """
        with self._lock:
            if version != self.commit.policy_version:
                raise StaleIncarnation(
                    replica=self.replica, wanted=f"version {self.commit.policy_version}", got=f"version {version}"
                )
            if self._snapshot is None or self._snapshot.version != version:
                weights = self.policy.weights()
                entries = self._entries if self.policy.sends_masters else entries_of(weights)
                self._snapshot = PolicySnapshot(version, weights, entries)
            return dict(self._snapshot.weights), self._snapshot.entries

    def canary_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of each of `tokens` but the first, under the current weights."""
        row = torch.tensor([list(tokens)], dtype=torch.int64, device=self._ranks.device)
        with self._lock, torch.no_grad():
            logprobs, _ = token_logprobs(self.policy.module(input_ids=row, use_cache=False).logits, row)
        return tuple(float(x) for x in logprobs[0, 1:])

    def export(self, *, whole: bool = False) -> tuple[dict[str, torch.Tensor], str]:
        """The state for a replacement: copies of all tensors on the host, of several ranks this rank's rows, and the
        matching JSON meta. `whole`: of all ranks together, at the first one; then all call it.
        """
        with self._lock:
            if whole and self._ranks.size > 1:
                found = (named for network in self._networks for named in network.whole_tensors())
                tensors = {name: t for name, t in found if self._ranks.is_first}
            else:
                named = (pair for network in self._networks for pair in network.tensors())
                tensors = {name: t.to("cpu", copy=True) for name, t in named}
            meta = {
                "format": META_FORMAT,
                "optimizer_step": self.policy.optimizer_step,
                "commit": asdict(self.commit),
                "band": _numbers(self.band.learned),
                **({"band_unproven": _numbers(self.band.unproven)} if self.band.unproven else {}),
                **({"frozen": self._frozen} if self._frozen else {}),
                **({"reference": self._reference} if self._reference else {}),
            }
        return tensors, json.dumps(meta, sort_keys=True)

    def load(self, tensors: dict[str, torch.Tensor], meta: str, *, whole: bool = False) -> None:
        """Checks everything first, then replaces the state. `whole`: the tensors are of all ranks together.

        Raises:
            ProofMismatch: names the tensor, or the meta.
        """
        tensors, steps, commit, band = self.checked(tensors, meta, whole=whole)
        with self._lock:
            for network in self._networks:
                network.take(tensors, steps)
            self.previous, self._snapshot = {}, None  # they may belong to a discarded policy
            self.commit, self.band = commit, band
            self.weights_digest = self._digest_weights()

    def checked(
        self, tensors: dict[str, torch.Tensor], meta: str, *, whole: bool = False
    ) -> tuple[dict[str, torch.Tensor], int, CommitRecord, LearnedBand]:
        """What `load` would become: this rank's tensors, and the meta's parts. Raises ProofMismatch: as in `load`."""
        if whole:
            mine = {name: t for network in self._networks for name, t in network.parts(tensors).items()}
            tensors = {name: mine.get(name, t) for name, t in tensors.items()}
        try:
            steps, commit, band = parse_meta(meta)
        except ValueError as e:
            raise self._mismatch("(meta)", str(e)) from e
        self._check_tensors(tensors)
        written = json.loads(meta)
        if written.get("frozen", "") != self._frozen:
            raise self._mismatch("(frozen)", "its adapters belong to other weights: the model folder has changed")
        if self._reference and written.get("reference", self._reference) != self._reference:
            raise self._mismatch("(reference)", "trained with another reference policy: the model folder has changed")
        return tensors, steps, commit, band

    def _check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        has_critic = any(name.startswith(CRITIC) for name in tensors)
        if has_critic != (self.critic is not None):
            difference = "it holds a critic, this job's algorithm has none" if has_critic else "it holds no critic"
            raise self._mismatch(f"{CRITIC}*", f"{difference}: the state is that of another algorithm")
        wanted = {name: t for network in self._networks for name, t in network.tensors()}
        for name in sorted(wanted.keys() ^ tensors.keys()):
            raise self._mismatch(name, "missing" if name in wanted else "not of this model")
        for name, mine in wanted.items():
            got = tensors[name]
            if got.shape != mine.shape or got.dtype != mine.dtype:
                want = f"{mine.dtype} {tuple(mine.shape)}"
                raise self._mismatch(name, f"expected {want}, got {got.dtype} {tuple(got.shape)}")

    def _mismatch(self, tensor: str, reason: str) -> ProofMismatch:
        return ProofMismatch(replica=self.replica, part="state", tensor=tensor, reason=reason)

    def _digest_weights(self) -> str:
        self._entries, *critic = (
            entries_of(dict(zip(n.names, n.masters, strict=True)), local_digest) for n in self._networks
        )
        prefixed = (replace(e, name=f"{CRITIC}{e.name}") for entries in critic for e in entries)
        masters = entries_digest((*self._entries, *prefixed))
        return hashlib.sha256((self._frozen + masters).encode()).hexdigest() if self._frozen else masters


def first_state(
    job: JobConfig,
    vocab: Vocabulary,
    *,
    replica: ReplicaId,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks = ALONE,
    reference: str = "",
) -> TrainerState:
    """A run's initial state: a function of the job alone, so that every replica creates the same bits. `reference`: see
    `TrainerState`.

    Raises:
        ConfigError: the model folder cannot be loaded.
    """
    algorithm = job.algorithm
    computed = DTYPES[job.model.dtype] if job.model.dtype != "float32" else None
    policy = Network(
        make_model(job.model, vocab, job.seed, job.lora).to(dtype),
        learning_rate=algorithm.learning_rate,
        grad_norm_max=algorithm.grad_norm_max,
        optimizer=job.optimizer,
        dtype=computed,
        ranks=ranks,
    )
    critic = None
    if algorithm.has_critic:
        critic = Network(
            make_critic(job.model, vocab, job.seed, job.lora).to(dtype),
            learning_rate=algorithm.value_learning_rate,
            grad_norm_max=algorithm.grad_norm_max,
            optimizer=job.optimizer,
            prefix=CRITIC,
            dtype=computed,
            ranks=ranks,
        )
    return TrainerState(
        policy,
        critic,
        first_commit(),
        replica=replica,
        versions_kept=min(VERSIONS_KEPT, job.runtime.staleness_max),
        learning_rate_share=partial(job.optimizer.learning_rate_share, num_steps=job.num_steps),
        ranks=ranks,
        reference=reference,
    )


def _numbers(found: Iterable[MicrobatchNumbers]) -> list[list[float]]:
    return [[n.loss, n.grad_norm] for n in found]


def parse_meta(meta: str) -> tuple[int, CommitRecord, LearnedBand]:
    """(number of optimizer steps, commit record, learned band) of an export; older ones have no band.

    Raises:
        ValueError: it is not a valid meta; the message gives the reason.
    """
    try:
        parsed: dict[str, Any] = json.loads(meta)
        if parsed["format"] not in META_FORMATS:
            raise ValueError(f"format {parsed['format']}, this version reads {META_FORMATS}")
        record: dict[str, Any] = parsed["commit"]
        commit = CommitRecord(
            step=int(record["step"]),
            epoch=int(record["epoch"]),
            microbatch_ids=tuple(record["microbatch_ids"]),
            group_ids=tuple(record["group_ids"]),
            gradient_digest=str(record["gradient_digest"]),
            ledger=ChainHead(position=int(record["ledger"]["position"]), hash=str(record["ledger"]["hash"])),
        )
        learned, unproven = (
            tuple(MicrobatchNumbers(loss=float(a), grad_norm=float(b)) for a, b in parsed.get(name, ()))
            for name in ("band", "band_unproven")
        )
        return int(parsed["optimizer_step"]), commit, LearnedBand(learned, unproven)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{type(e).__name__}: {e}") from e
