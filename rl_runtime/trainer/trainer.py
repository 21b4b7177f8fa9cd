"""One trainer replica: model, AdamW, and the partial gradient of the running step.

A step: compute the missing ones of this replica's microbatches and add their gradients up; reduce a copy; vote; and
step the optimizer only when all members agree. Until then no persistent state changes, so a step may be interrupted at
any point and finished in the next epoch, with the lost replicas' microbatches added to the same sum. A replica that
missed a commit copies the whole state from a member that has it.

With `ppo_epochs` or `mini_batches` a step has several updates, each with a reduce and a vote of its own. They move a
draft of the state, which becomes the state with the last one, and is forgotten when the step is interrupted. What was
computed for the first update is kept if the loss came during it; all else is computed again.

Exactly B microbatches enter each step, and each pass over it (ReCoVer's invariant): the vote checks their ids.
Gradients are sums over tokens and are divided once, after the vote, by the totals of the update's microbatches
(`objective.divisors`): never by the number of survivors, never a mean of means.

A critic, if any, runs in the same process and commit: two networks, one reduce, one vote.

A replica of several ranks (`ranks.py`) is one of these objects in each of their processes, with the same calls in the
same order. Its ranks vote each in their own group, and commit only if all of these agree.

No Ray here. `train_step`, `join` and `load_state` belong to one working thread; `info`, `commit_record`, `reset_step`
and all readers of the state may be called from other threads at the same time.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import (
    CommitVoteRejected,
    NonFiniteMicrobatch,
    NonFiniteValue,
    PeerLost,
    ProofMismatch,
    StaleIncarnation,
    WrongNumbers,
    shown_groups,
)
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.algorithms.agreement import is_asked
from rolecall.rl_runtime.algorithms.batching import updates
from rolecall.rl_runtime.exchanges import UnitOfWork, share
from rolecall.rl_runtime.faults.process_side import BACKWARD, VOTE
from rolecall.rl_runtime.protocol.messages import (
    CheckVerdict,
    CommitRecord,
    ComparedMicrobatch,
    ComputedMicrobatch,
    Holder,
    Microbatch,
    MicrobatchNumbers,
    StepResult,
    TrainerInfo,
    UnusualMicrobatches,
)
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.band import band_after, compare, unusual_microbatches
from rolecall.rl_runtime.trainer.model import compute_in, make_model
from rolecall.rl_runtime.trainer.partial_step import Contribution, Gradients, Outputs, PartialStep
from rolecall.rl_runtime.trainer.ranks import ALONE, Ranks
from rolecall.rl_runtime.trainer.reduce import (
    BUCKET_BYTES,
    LOOPBACK,
    CommitVote,
    EpochStore,
    MicrobatchStats,
    ReduceGroup,
    disagreement,
    nothing,
    refuse_stale,
)
from rolecall.rl_runtime.trainer.state import TrainerState, first_state
from rolecall.rl_runtime.trainer.step_totals import StepTotals, update_divisors
from rolecall.rl_runtime.weights.digest import DTYPES, entries_digest, entries_of, local_digest


class TrainerReplica:
    """A data-parallel copy. Hooks serve fault injection and the publishing of versions."""

    def __init__(
        self,
        *,
        replica: ReplicaId,
        incarnation: int,
        job: JobConfig,
        has_state: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        address: str = LOOPBACK,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ALONE,
        clock: Clock | None = None,
        on_microbatch: Callable[[], float | None] = nothing,
        on_bucket: Callable[[], None] = nothing,
        on_stage: Callable[[str], None] = nothing,
        on_publish: Callable[[int], None] | None = None,
    ) -> None:
        """`has_state` False: the fresh weights created here must be replaced (load_state) before this replica may join.

        `address`: of this replica's node, where the other trainers reach its process group.
        `dtype`: of the weights. float64 makes rounding negligible in tests of a step.
        `ranks`: of this replica; the process is one of them.
        `on_microbatch`: called before each; the number that it returns multiplies the microbatch's loss and gradient.
        `on_publish(policy_version)` runs in phase publish after each commit; `policy_tensors` returns the weights.
        """
        torch.set_num_threads(1)
        self.replica, self.incarnation, self.job, self.ranks = replica, incarnation, job, ranks
        self._clock, self._bucket_bytes, self._address = clock or SystemClock(), bucket_bytes, address
        self._on_microbatch, self._on_bucket, self._on_publish = on_microbatch, on_bucket, on_publish
        self._on_stage = on_stage
        self.vocab = vocabulary(job.model, None if job.data else job.task.name)
        self._longest = job.max_response_tokens
        reference, of_reference = None, ""
        if job.algorithm.kl_coefficient > 0:
            reference = make_model(job.model, self.vocab, job.seed)
            of_reference = entries_digest(entries_of(dict(reference.named_parameters())))
            reference = reference.to(ranks.device, dtype).requires_grad_(False)
            if job.model.dtype != "float32":
                compute_in(reference, DTYPES[job.model.dtype])
        fresh = partial(first_state, job, self.vocab, replica=replica, dtype=dtype, ranks=ranks, reference=of_reference)
        self.state = fresh()
        self._draft: TrainerState | None = fresh() if job.algorithm.num_updates > 1 else None
        self._has_state = has_state
        self._gradients = Gradients(
            job.algorithm,
            pad=self.vocab.pad,
            staleness_max=job.runtime.staleness_max,
            longest=self._longest,
            reference=reference,
            sampling=job.sampling,
            ranks=ranks,
            on_backward=partial(on_stage, BACKWARD),
        )
        self._partial = PartialStep(self.state.num_parameters, ranks.device)
        self._stores_lock = threading.Lock()
        self._stores: dict[int, EpochStore] = {}
        self._group: ReduceGroup | None = None
        self._joined_epoch = -1
        self.last_result: StepResult | None = None
        """The answer of the newest committed step, for a controller that restarted before receiving it."""

    # Callable from any thread.

    def take_name(self, replica: ReplicaId, incarnation: int) -> None:
        """Of the replica that this one, a standby, replaces."""
        self.replica, self.incarnation = replica, incarnation
        for state in (self.state, self._draft):
            if state is not None:
                state.replica = replica

    def info(self, holder: Holder) -> TrainerInfo:
        """`holder`: this replica's tensor server."""
        commit = self.state.commit
        computed = self._partial.computed(commit.step + 1)
        return TrainerInfo(
            replica=self.replica,
            incarnation=self.incarnation,
            has_state=self._has_state,
            commit=commit,
            holder=holder,
            computed=computed,
            num_computed=self._partial.num_added,
            joined_epoch=self._joined_epoch,
        )

    def open_store(self, epoch: int) -> tuple[str, int]:
        """Opens the rendezvous of `epoch` on this replica and returns its address; idempotent."""
        if epoch <= self._joined_epoch:
            raise StaleIncarnation(
                replica=self.replica, wanted=f"an epoch after {self._joined_epoch}", got=f"epoch {epoch}"
            )
        with self._stores_lock:
            store = self._stores.get(epoch)
            if store is None:
                store = self._stores[epoch] = EpochStore(self._address, self.job.runtime.group_timeout_seconds)
            return store.host, store.port

    def reset_step(self, step: int) -> None:
        """Discards partial gradients of `step`. Raises StaleIncarnation: that step is committed."""
        refuse_stale(self.replica, "step", self.state.commit.step + 1, step)
        self._partial.clear(step)

    # In the working thread.

    def join(self, incarnation: int, epoch: int, rank: int, size: int, host: str, port: int) -> None:
        """Becomes rank `rank` of `size` in `epoch`.

        Raises:
            StaleIncarnation: meant for another incarnation, an epoch that is over, or this replica has no state yet.
            PeerLost: not all members arrived in time.
        """
        refuse_stale(self.replica, "incarnation", self.incarnation, incarnation)
        if epoch <= self._joined_epoch:
            raise StaleIncarnation(
                replica=self.replica, wanted=f"an epoch after {self._joined_epoch}", got=f"epoch {epoch}"
            )
        if not self._has_state:
            raise StaleIncarnation(replica=self.replica, wanted="state copied first", got=f"join of epoch {epoch}")
        self._leave()
        self._joined_epoch = epoch
        lost, group = "", None
        try:
            group = ReduceGroup(
                epoch=epoch,
                rank=rank,
                size=size,
                host=host,
                port=port,
                timeout_seconds=self.job.runtime.group_timeout_seconds,
                address=self._address,
                shard=self.ranks.rank,
            )
        except PeerLost as e:
            lost = e.because
        if lost := self.ranks.agree(lost):
            if group is not None:
                group.close(lost)
            raise PeerLost(epoch=epoch, because=lost)
        self._group = group
        with self._stores_lock:
            for old in [e for e in self._stores if e < epoch]:
                self._stores.pop(old).close()
        reporter.update(epoch=epoch, policy_version=self.state.commit.policy_version)
        reporter.enter_phase(Phase.WAIT)

    def train_step(
        self,
        incarnation: int,
        epoch: int,
        step: int,
        mine: Sequence[Microbatch],
        all_ids: Sequence[str],
        ledger: ChainHead,
        members: Sequence[ReplicaId],
        first: Sequence[ComputedMicrobatch] = (),
    ) -> StepResult:
        """Computes the missing part of `mine`, reduces, votes, divides, steps the optimizers (once or, update by
        update, several times), commits, and publishes `step` + 1.

        `first`: unusual microbatches of an earlier attempt, to compare with what is computed now; the step is not
        checked for others then.
        After any error the call may be repeated, in a newer epoch and with more microbatches: nothing was committed.

        Raises:
            StaleIncarnation: meant for another incarnation, epoch or step.
            PeerLost: a peer disconnected; local gradients are kept.
            CommitVoteRejected: the members disagree; call `reset_step` and retry.
            NonFiniteMicrobatch: names the replica and microbatch; that replica's partial gradients are discarded.
            UnusualMicrobatches: one replica has microbatches outside the band; its partial gradients are discarded.
            NonFiniteValue: finite gradients whose sum overflows; partial gradients are discarded.
        """
        started = self._clock.monotonic()
        refuse_stale(self.replica, "incarnation", self.incarnation, incarnation)
        refuse_stale(self.replica, "epoch", self._joined_epoch, epoch)
        refuse_stale(self.replica, "step", self.state.commit.step + 1, step)
        assert self._group is not None, "the epoch was checked, so a group was joined"
        reporter.set_step(step)
        algorithm, group = self.job.algorithm, self._group
        with self._leaving_on_error(group, "step"):
            self._refuse_bad_plan(epoch, step, mine, all_ids)
            plan = updates(all_ids, algorithm, step=step, seed=self.job.seed)
            draft = self._draft
            if draft is not None:
                draft.become(self.state)
        old: dict[str, Outputs] = {}
        votes: list[list[CommitVote]] = []
        digests: list[str] = []
        norms: list[float] = []
        for number, ids in enumerate(plan):
            with self._leaving_on_error(group, "step"):
                local = self._compute(draft or self.state, epoch, step, number, mine, ids, all_ids, old)
            ballots, sums = self._reduce_and_vote(group, epoch, step, number, local, ledger, draft or self.state)
            digests.append(self._refuse_disagreement(ballots, epoch, step, ids, members))
            if not first:
                self._refuse_unusual(ballots, step)
            votes.append(ballots)
            by = update_divisors(ballots, algorithm, longest=self._longest)
            if draft is not None and len(votes) < len(plan):
                with self._leaving_on_error(group, "step"), self._optimizing(step):
                    norms.append(draft.update(sums, by, step))
        judged = list(chain(*votes[: algorithm.mini_batches]))
        compared = compare(judged, first)
        tally = StepTotals.of(votes, algorithm, longest=self._longest)
        commit = CommitRecord(
            step=step,
            epoch=epoch,
            microbatch_ids=tuple(sorted(all_ids)),
            group_ids=tally.group_ids,
            gradient_digest=_digest_of(digests),
            ledger=ledger,
        )
        with self._optimizing(step):
            band = band_after(self.state.band, judged, compared)
            norms.append(self.state.apply(sums, by, commit, band, draft))
            self._partial.clear(step + 1)
        grad_norm = sum(norms) / len(norms)
        self.last_result = result = StepResult(
            replica=self.replica,
            incarnation=self.incarnation,
            commit=commit,
            loss=tally.loss,
            grad_norm=grad_norm,
            reward=tally.reward,
            num_tokens=tally.num_tokens,
            health=tally.health,
            seconds=self._clock.monotonic() - started,
            my_microbatches=tuple(sorted(m.microbatch_id for m in mine)),
            log_ratio_max=tally.log_ratio_max,
            compared=compared,
            log_ratios=tally.log_ratios,
        )
        self._report_wrong(compared)
        reporter.update(policy_version=commit.policy_version, grad_norm=grad_norm)
        tally.report()
        if self._on_publish is not None:
            with reporter.phase(Phase.PUBLISH):
                self._on_publish(commit.policy_version)
        return result

    def load_state(self, tensors: dict[str, torch.Tensor], meta: str, *, whole: bool = False) -> None:
        """Becomes a bitwise copy: weights, optimizer state, commit record. `whole`: the tensors are not this rank's
        rows, but of all ranks together.

        Raises:
            ProofMismatch: names, shapes or dtypes differ from this model's, or its ranks have states of different
                steps; nothing was changed.
        """
        mismatch: ProofMismatch | None = None
        try:
            self.state.checked(tensors, meta, whole=whole)
        except ProofMismatch as e:
            mismatch = e
        because = self.ranks.agree("" if mismatch is None else str(mismatch))
        if not because and len(set(self.ranks.gather(meta))) > 1:
            because = "the ranks have states of different steps"
        if because:
            raise mismatch or ProofMismatch(replica=self.replica, part="state", tensor="(ranks)", reason=because)
        with reporter.phase(Phase.COPY):
            self.state.load(tensors, meta, whole=whole)
        self._partial.clear(self.state.commit.step + 1)
        self._has_state = True
        reporter.update(policy_version=self.state.commit.policy_version)

    def close(self) -> None:
        """Leaves the group and closes all stores, without waiting."""
        self._leave()
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _refuse_bad_plan(self, epoch: int, step: int, mine: Sequence[Microbatch], all_ids: Sequence[str]) -> None:
        wanted = self.job.algorithm.microbatches_per_step
        if len(set(all_ids)) != wanted or len(all_ids) != wanted:
            because = f"{len(set(all_ids))} microbatches in the plan, {wanted} make a step"
            raise CommitVoteRejected(epoch=epoch, step=step, because=because)
        foreign = sorted({m.microbatch_id for m in mine} - set(all_ids))
        if foreign or len({m.microbatch_id for m in mine}) != len(mine):
            raise CommitVoteRejected(
                epoch=epoch, step=step, because=f"my microbatches repeat or are not of the step: {foreign}"
            )

    @contextmanager
    def _optimizing(self, step: int) -> Iterator[None]:
        """Discards partial gradients whose sum overflows, at every member: all voted on the same sum."""
        with reporter.phase(Phase.OPTIMIZER):
            try:
                yield
            except NonFiniteValue:
                self.reset_step(step)
                raise

    @contextmanager
    def _leaving_on_error(self, group: ReduceGroup, what: str) -> Iterator[None]:
        """Closes the group: peers may be in a reduce already and must not wait for a member that will not join it."""
        try:
            yield
        except BaseException as e:
            group.close(f"{self.replica} left the {what}: {type(e).__name__}")
            raise

    def _compute(
        self,
        state: TrainerState,
        epoch: int,
        step: int,
        update: int,
        mine: Sequence[Microbatch],
        ids: Sequence[str],
        all_ids: Sequence[str],
        old: dict[str, Outputs],
    ) -> Contribution:
        """This replica's part of an update: its microbatches among `ids`, with the weights of `state`.

        `old`: outputs before the step, filled in as microbatches come up for the first time in a step of several
        updates. What the engines and the learned band are asked is asked in the first pass.
        """
        algorithm = self.job.algorithm
        own = [m for m in mine if m.microbatch_id in ids]
        is_first_pass = update < algorithm.mini_batches
        with reporter.phase(Phase.COMPUTE):
            for microbatch in self._missing(step, own, update):
                name = microbatch.microbatch_id
                factor = self._factor()
                unit = UnitOfWork(self._clock)
                if algorithm.num_updates > 1 and name not in old:
                    old[name] = self._gradients.outputs(self.state, microbatch)
                ask_again = is_first_pass and is_asked(name, all_ids, step)
                gradient, stats = self._gradients.of(state, microbatch, ask_again=ask_again, old=old.get(name))
                if factor is not None:  # fault injection
                    gradient, stats = gradient.mul_(factor), _times(stats, factor)
                if is_first_pass:
                    stats = replace(stats, unusual=self.state.band.outside(stats.numbers))
                self._partial.add(microbatch, gradient, stats)
                unit.done(share(stats.health.tokens, self.ranks.rank, self.ranks.size))
                # Only for monitoring this replica, on the scale of a step's loss; nothing is computed from it.
                reporter.update(loss=stats.numbers.loss)
        local = self._partial.taken({m.microbatch_id for m in own})
        because = self.ranks.agree("" if local is not None else "the step was reset while it was computed")
        if because or local is None:
            raise CommitVoteRejected(epoch=epoch, step=step, because=because)
        return local

    def _missing(self, step: int, own: Sequence[Microbatch], update: int) -> list[Microbatch]:
        """Of `own`, those still to compute, the same at all ranks."""
        self._partial.prepare(step, own, update)
        missing = [m.microbatch_id for m in own if not self._partial.has(m.microbatch_id)]
        if any(of_rank != missing for of_rank in self.ranks.gather(missing)):
            # A reset reached some ranks earlier than others: none keeps what it has.
            self._partial.clear(step)
            self._partial.prepare(step, own, update)
            return list(own)
        return [m for m in own if m.microbatch_id in missing]

    def _factor(self) -> float | None:
        """Of the next microbatch, from fault injection in any rank."""
        factors = [f for f in self.ranks.gather(self._on_microbatch()) if f is not None]
        return math.prod(factors) if factors else None

    def _reduce_and_vote(
        self,
        group: ReduceGroup,
        epoch: int,
        step: int,
        update: int,
        local: Contribution,
        ledger: ChainHead,
        state: TrainerState,
    ) -> tuple[list[CommitVote], torch.Tensor]:
        """All members' ballots and the sum of their gradients, of this rank's shard.

        Raises:
            PeerLost: one of this replica's ranks has lost a peer.
        """
        lost, sums, raw = "", local.gradient, list[bytes]()
        try:
            with reporter.phase(Phase.REDUCE), self._leaving_on_error(group, "reduce"):
                sums = group.all_reduce(local.gradient, bucket_bytes=self._bucket_bytes, on_bucket=self._on_bucket)
                ballot = CommitVote(
                    replica=self.replica,
                    incarnation=self.incarnation,
                    epoch=epoch,
                    step=step,
                    update=update,
                    microbatches=local.stats,
                    gradient_digest=local_digest(sums),
                    weights_digest=state.weights_digest,
                    ledger=ledger,
                )
                self._on_stage(VOTE)
                raw = group.gather(ballot.to_bytes(), on_bucket=self._on_bucket)
        except PeerLost as e:
            lost = e.because or "a peer was lost"
        if lost := self.ranks.agree(lost):
            group.close(lost)
            raise PeerLost(epoch=epoch, because=lost)
        return [CommitVote.from_bytes(r) for r in raw], sums

    def _refuse_disagreement(
        self,
        ballots: Sequence[CommitVote],
        epoch: int,
        step: int,
        all_ids: Sequence[str],
        members: Sequence[ReplicaId],
    ) -> str:
        """Digest of the reduced gradient. The same verdict at every member, because all have the same ballots and sum.

        The ranks of a replica have the same microbatches and other shards: any of them may find a disagreement.
        """
        for other in ballots:
            for bad in (s for s in other.microbatches if not s.finite):
                error = NonFiniteMicrobatch(
                    replica=other.replica, step=step, microbatch_id=bad.microbatch_id, group_ids=bad.group_ids
                )
                if other.replica == self.replica:
                    # Its sum is invalid; the others keep theirs, and only it reports to its agent.
                    self.reset_step(step)
                    if self.ranks.is_first:
                        reporter.exception(error)
                raise error
        because = self.ranks.agree(disagreement(ballots, members=members, all_ids=all_ids))
        if because:
            raise CommitVoteRejected(epoch=epoch, step=step, because=because)
        return _digest_of(self.ranks.gather(ballots[0].gradient_digest))

    def _refuse_unusual(self, ballots: Sequence[CommitVote], step: int) -> None:
        """The same verdict at every member, because each trainer's own judgement is in its ballot. Several trainers
        with unusual numbers in one step are not a machine fault.
        """
        unusual = unusual_microbatches(ballots)
        if len({u.replica for u in unusual}) == 1:
            if unusual[0].replica == self.replica:
                self.reset_step(step)
            raise UnusualMicrobatches(step=step, microbatches=unusual)

    def _report_wrong(self, compared: Sequence[ComparedMicrobatch]) -> None:
        """Reports another replica's wrong numbers to the agent, once in a step, if this one recomputed them."""
        if not self.ranks.is_first:
            return
        for found in compared:
            if found.verdict is CheckVerdict.WRONG and found.by == self.replica and found.again is not None:
                first = found.first
                here = f"loss {found.again.loss:.3g}, gradient norm {found.again.grad_norm:.3g}"
                error = WrongNumbers(
                    replica=first.replica,
                    incarnation=first.incarnation,
                    unit=f"step {self.state.commit.step}",
                    because=f"microbatch {first.microbatch_id} (prompt groups {shown_groups(first.group_ids)}) had "
                    f"{first.because}; at {self.replica} {here}",
                )
                reporter.exception(error)
                return

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _digest_of(gradient_digests: Sequence[str]) -> str:
    """The record of all updates, or of all ranks' shards; of one it is the gradient's digest."""
    if len(gradient_digests) == 1:
        return gradient_digests[0]
    return hashlib.sha256("".join(gradient_digests).encode()).hexdigest()


def _times(stats: MicrobatchStats, factor: float) -> MicrobatchStats:
    """As if the device had multiplied loss and gradient by `factor`."""
    numbers = MicrobatchNumbers(loss=stats.numbers.loss * factor, grad_norm=stats.numbers.grad_norm * abs(factor))
    loss = stats.policy_loss * factor
    return replace(stats, policy_loss=loss, numbers=numbers, finite=stats.finite and math.isfinite(factor))
