"""A rollout replica without Ray: serves requests until acknowledged; pulls, proves, applies and relays weights.

Three kinds of threads. Only the engine thread uses the engine (`engine_thread.py`). Control calls (`submit`,
`tokens_since`, ...) take a lock for microseconds and answer even while the engine hangs. One caller at a time updates
weights: it pulls without disturbing generation, then gives the verified tensors to the engine thread.

The engine of a hybrid sleeps while the trainer beside it works. It keeps its requests, and an update wakes it.

Nothing is generated with unproven weights (invariant Proof before service, docs/invariants.md). A partially received
version is never applied. When an update fails, the previous version continues serving once its storage and canary are
proven unchanged; otherwise nothing is generated, and `policy_version` is -1.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import CorruptTransfer, DeadlineExceeded, ProofMismatch, RolecallError, StaleIncarnation
from rolecall.core.ids import ReplicaId
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.exchanges import share
from rolecall.rl_runtime.protocol.messages import (
    GenerationRequest,
    Holder,
    Manifest,
    PulledTokens,
    RolloutInfo,
    TokenChunk,
    WeightProof,
)
from rolecall.rl_runtime.rollout.engine import EngineSettings, NewTokens, VllmEngine, vocab_size
from rolecall.rl_runtime.rollout.engine_thread import EngineThread
from rolecall.rl_runtime.rollout.token_buffer import TokenBuffer
from rolecall.rl_runtime.weights.digest import entries_of, manifest_digest
from rolecall.rl_runtime.weights.port import TensorServer
from rolecall.rl_runtime.weights.proof import canary_outside
from rolecall.rl_runtime.weights.pull import PartialTransfer, TransferFailed, fitting, pull_any

logger = logging.getLogger(__name__)

APPLY_SECONDS: Final = 30.0
"""Wait for the engine thread to finish its step, then load, read back and prove: 30 ms for a small model."""


class WeightsNotProven(RolecallError):
    """This rollout has no proven weights: it may not generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Serving:
    """The served version, with the verified bytes that it was loaded from."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    proof: WeightProof


class RolloutReplica:
    """One engine with its requests and weights. The constructor returns once the engine runs, without weights.

    Args:
        token: the run's token, for the weight port.
        address: where the weight port listens: the node's address, so that others can pull from it.
        start_seconds: deadline of the import and start of the engine: 6 s alone on a core for a small model, several
            times that when all engines of a node start together.
        transfer_seconds: deadline of one pull over all holders.
        on_step: called before each engine step, in its thread (`EngineThread`).
        on_tensor: called before each tensor is sent, in a thread of the weight port (`TensorServer`).
        on_failure: called once when the engine fails; an actor then exits its process.
        on_promotion: called with the new identity when this standby has become a replica.

    Raises:
        EngineBroken, DeadlineExceeded: the engine does not start.
    """

    def __init__(
        self,
        *,
        replica: ReplicaId,
        incarnation: int,
        token: str,
        settings: EngineSettings,
        address: str = "127.0.0.1",
        start_seconds: float = 240.0,
        transfer_seconds: float = 10.0,
        clock: Clock | None = None,
        on_step: Callable[[], float | None] | None = None,
        on_tensor: Callable[[], float | None] = lambda: None,
        on_failure: Callable[[BaseException], None] | None = None,
        make_engine: Callable[[EngineSettings], VllmEngine] = VllmEngine,
        on_promotion: Callable[[ReplicaId, int], None] = lambda _replica, _incarnation: None,
    ) -> None:
        self._replica, self._incarnation, self._epoch = replica, incarnation, -1
        self._token, self._transfer_seconds = token, transfer_seconds
        self._clock, self._on_promotion = clock or SystemClock(), on_promotion
        self._identity_lock, self._updating = threading.Lock(), threading.Lock()
        self._serving: _Serving | None = None
        self._partial: PartialTransfer | None = None
        self.server = TensorServer(token, address, clock=self._clock, on_tensor=lambda _puller, _name: on_tensor())
        self._thread = EngineThread(
            lambda: make_engine(settings),
            lambda made: share(self._record(made), 0, settings.num_ranks),
            clock=self._clock,
            on_step=on_step,
            on_failure=on_failure,
        )
        try:
            self._engine = self._thread.wait_started(start_seconds)
        except RolecallError:
            self.server.close()
            raise
        self._buffer = TokenBuffer(
            requests_max=settings.requests_max,
            end_tokens=frozenset(self._engine.end_tokens),
            model_len_max=settings.max_model_len,
            vocab_size=vocab_size(settings),
        )

    def info(self) -> RolloutInfo:
        with self._identity_lock:
            replica, incarnation = self._replica, self._incarnation
        return RolloutInfo(
            replica=replica,
            incarnation=incarnation,
            policy_version=self.policy_version,
            holder=self.server.holder(replica, incarnation),
            num_requests=self._buffer.num_requests,
            tokens_generated=self._buffer.tokens_generated,
            asleep=self._thread.asleep,
        )

    @property
    def policy_version(self) -> int:
        """The proven version it generates with; -1 without one."""
        serving = self._serving
        return serving.manifest.policy_version if serving is not None else -1

    def promote(self, replica: ReplicaId, incarnation: int, secret: str) -> None:
        """A standby becomes `replica`. Its weights stay, but count only once proven under the new name.

        Raises:
            StaleIncarnation: it is already a later incarnation of this replica.
        """
        with self._identity_lock:
            if (replica, incarnation) == (self._replica, self._incarnation):
                return
            if replica == self._replica and incarnation < self._incarnation:
                raise self._stale(incarnation)
            self._replica, self._incarnation, self._epoch = replica, incarnation, -1
        reporter.become(replica=replica, incarnation=incarnation, secret=secret)
        self._on_promotion(replica, incarnation)

    def _stale(self, incarnation: int) -> StaleIncarnation:
        return StaleIncarnation(
            replica=self._replica, wanted=f"incarnation {self._incarnation}", got=f"incarnation {incarnation}"
        )

    def _checked(self, incarnation: int) -> ReplicaId:
        with self._identity_lock:
            if incarnation != self._incarnation:
                raise self._stale(incarnation)
            return self._replica

    def close(self) -> None:
        """Stops the engine and the port; safe to call twice."""
        self._thread.close()
        self.server.close()

    def submit(self, incarnation: int, requests: Sequence[GenerationRequest]) -> None:
        """Accepts requests; skips those it already holds.

        Raises:
            WeightsNotProven: it has no proven weights.
            RequestRefused, TokenBufferFull: none of them is accepted.
            EngineBroken: the engine has failed.
        """
        replica = self._checked(incarnation)
        if self._serving is None:
            raise WeightsNotProven(f"{replica}#{incarnation} has no proven weights, it may not generate")
        taken = self._buffer.take(requests)
        if taken:
            self._thread.post_requests(len(taken), lambda engine: self._add(engine, taken))

    def _add(self, engine: VllmEngine, requests: Sequence[GenerationRequest]) -> None:
        if self._serving is None:  # an update failed since they were taken, and the version before did not come back
            self._buffer.forget([request.request_id for request in requests])  # their owner sends or moves them
            return
        for request in requests:
            if not self._buffer.begin(request):
                continue  # dropped before it was started
            seed = _seed_behind(request.seed, len(request.prefix_tokens))
            tokens = (*request.prompt_tokens, *request.prefix_tokens)
            try:
                engine.add(
                    request.request_id,
                    tokens,
                    num_new_max=request.max_response_tokens - len(request.prefix_tokens),
                    seed=seed,
                    temperature=request.temperature,
                )
            except ValueError:
                # Checked when accepted, so an internal error: dropped here, its owner reassigns it.
                logger.exception("the engine refuses request %s", request.request_id)
                self._buffer.forget([request.request_id])

    def tokens_since(self, incarnation: int, offsets: dict[str, int]) -> PulledTokens:
        """New tokens after `offsets`. Repeating the call repeats the answer: only `ack` drops tokens."""
        replica = self._checked(incarnation)
        chunks, unknown = self._buffer.since(offsets)
        return PulledTokens(
            replica=replica,
            incarnation=incarnation,
            policy_version=self.policy_version,
            chunks=chunks,
            unknown=unknown,
        )

    def drain(self, incarnation: int, offsets: dict[str, int], seconds: float) -> PulledTokens:
        """The last pull before it is replaced alive: first stops generation, if possible within `seconds`."""
        self._checked(incarnation)
        try:
            self._thread.call(lambda engine: engine.abort(list(offsets)), seconds, "stop generating")
        except RolecallError as e:  # it hangs or has failed
            logger.warning("draining what there is: %s", e)
        return self.tokens_since(incarnation, offsets)

    def sleep(self, incarnation: int, offsets: dict[str, int], seconds: float) -> PulledTokens:
        """Stops generation and frees the engine's device memory, until the next update. Returns the last tokens.

        Raises:
            DeadlineExceeded: a step or an update in progress did not end in time.
        """
        self._checked(incarnation)
        deadline = self._clock.monotonic() + seconds
        if not self._updating.acquire(timeout=seconds):
            raise DeadlineExceeded(waited_for="a weight update of this replica", seconds=seconds)
        try:
            self._thread.call(self._fall_asleep, deadline - self._clock.monotonic(), "fall asleep")
        finally:
            self._updating.release()
        return self.tokens_since(incarnation, offsets)

    def _fall_asleep(self, engine: VllmEngine) -> None:
        if not self._thread.asleep:
            self._thread.asleep = True
            engine.sleep()

    def ack(self, incarnation: int, request_ids: Sequence[str]) -> None:
        """Drops requests, whose tokens are safe elsewhere or not needed, and aborts those still running."""
        self._checked(incarnation)
        running = self._buffer.forget(request_ids)
        reporter.update(tokens_held=self._buffer.num_tokens)
        if running and self._thread.failure is None:
            self._thread.post(lambda engine: engine.abort(running))

    def list_requests(self, incarnation: int) -> list[tuple[GenerationRequest, TokenChunk]]:
        """All requests, finished or not, each with all its tokens: for a restarted controller."""
        self._checked(incarnation)
        return self._buffer.everything()

    def update_weights(
        self, incarnation: int, epoch: int, manifest: Manifest, holders: Sequence[Holder]
    ) -> WeightProof:
        """Pulls, verifies, applies and proves one version; requests in flight continue with it. From then on, this
        replica also serves it to other pullers. For the version already served, only the proof is repeated.

        Raises:
            TransferFailed: no holder could provide everything; verified tensors are kept for the next call.
            ProofMismatch: part (a), (b) or (c) fails; names the tensor. The previous version is served if its proof
                succeeds.
            StaleIncarnation: wrong incarnation, or an epoch older than the last one seen.
            DeadlineExceeded: the engine thread does not respond, or another update is in progress.
        """
        with self._one_update():
            replica = self._checked(incarnation)
            if epoch < self._epoch:
                raise StaleIncarnation(replica=replica, wanted=f"epoch {self._epoch}", got=f"epoch {epoch}")
            self._epoch = epoch
            begun = self._clock.monotonic()
            pieces = self._pull(replica, manifest, holders)
            proof = received(manifest, pieces, replica=replica, incarnation=incarnation, epoch=epoch)
            proof = self._thread.call(
                lambda engine: self._apply(engine, manifest, pieces.tensors, proof),
                APPLY_SECONDS,
                f"apply version {manifest.policy_version}",
            )
            self.server.publish(manifest, pieces.tensors, copy=False)
            self._partial = None
            return replace(proof, seconds=self._clock.monotonic() - begun)

    @contextmanager
    def _one_update(self) -> Iterator[None]:
        seconds = self._transfer_seconds + APPLY_SECONDS
        if not self._updating.acquire(timeout=seconds):
            raise DeadlineExceeded(waited_for="another weight update of this replica", seconds=seconds)
        try:
            yield
        finally:
            self._thread.awaits_weights = False
            self._updating.release()

    def _pull(self, replica: ReplicaId, manifest: Manifest, holders: Sequence[Holder]) -> PartialTransfer:
        pieces = fitting(self._partial, manifest)
        if pieces is not self._partial and self._serving and self._serving.manifest.digest == pieces.digest:
            pieces.tensors.update(self._serving.tensors)
        if not pieces.missing():
            return pieces
        self._thread.awaits_weights = True
        others = [h for h in holders if (h.host, h.port) != (self.server.host, self.server.port)]
        try:
            return pull_any(
                others,
                manifest,
                token=self._token,
                puller=replica,
                timeout_seconds=self._transfer_seconds,
                pieces=pieces,
                clock=self._clock,
                on_corrupt=partial(_report_corrupt, manifest.policy_version),
            )
        except TransferFailed as e:
            self._partial = e.pieces
            raise
        finally:
            self._thread.awaits_weights = False

    # The methods below run in the engine thread.

    def _record(self, made: Sequence[NewTokens]) -> int:
        num_made = self._buffer.record(made, self.policy_version)
        reporter.update(tokens_held=self._buffer.num_tokens)
        return num_made

    def _apply(
        self, engine: VllmEngine, manifest: Manifest, tensors: Mapping[str, torch.Tensor], proof: WeightProof
    ) -> WeightProof:
        self._checked(proof.incarnation)  # it may have been promoted during the pull
        before = self._serving
        with reporter.phase(Phase.UPDATE):
            try:
                asleep = self._thread.asleep
                if asleep:
                    engine.wake()
                    self._thread.asleep = False
                if asleep or before is None or before.manifest.digest != manifest.digest:
                    load(engine, tensors, proof.replica)
                proof = prove(engine, manifest, proof)
            except Exception as e:  # deliberate: whatever failed, the storage now holds no valid version
                logger.error("version %s is not applied: %s", manifest.policy_version, e)
                self._restore(engine, before)
                raise
            self._serving = _Serving(manifest=manifest, tensors=dict(tensors), proof=proof)
            reporter.update(policy_version=manifest.policy_version, epoch=proof.epoch)
            reporter.progress()
        return proof

    def _restore(self, engine: VllmEngine, before: _Serving | None) -> None:
        """Restores the previous version if its proof still succeeds; otherwise stops generation."""
        if before is not None:
            try:
                load(engine, before.tensors, before.proof.replica)
                again = prove(engine, before.manifest, before.proof)
                same = (again.storage_digest, again.canary_logprobs) == (
                    before.proof.storage_digest,
                    before.proof.canary_logprobs,
                )
                if same:
                    return
                logger.error("version %s does not come back as it was", before.manifest.policy_version)
            except Exception as e:  # noqa: BLE001 deliberate: without a proof there is no service, whatever the reason
                logger.error("version %s does not come back: %s", before.manifest.policy_version, e)
        self._serving = None
        engine.abort([request.request_id for request, _ in self._buffer.everything()])
        reporter.update(policy_version=-1)


def _report_corrupt(version: int, holder: Holder, reason: str) -> None:
    """Nothing is lost by one such transfer. Several of one holder are a faulty machine."""
    error = CorruptTransfer(replica=holder.replica, incarnation=holder.incarnation, version=version, because=reason)
    reporter.exception(error)


def _seed_behind(seed: int, num_prefix: int) -> int:
    """Seed for continuing after a prefix: a fresh draw, so that random numbers are not reused."""
    if num_prefix == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{num_prefix}".encode()).digest()[:4], "big")


# The proof. Every digest is computed from the bytes each time.


def received(
    manifest: Manifest, pieces: PartialTransfer, replica: ReplicaId, incarnation: int, epoch: int
) -> WeightProof:
    """Part (a): digests of the bytes in memory. Raises ProofMismatch: names the tensor."""
    entries = entries_of(pieces.tensors)
    wanted, found = ({e.name: e for e in them} for them in (manifest.tensors, entries))
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ProofMismatch(replica=replica, part="a", tensor=name, reason="bytes received are not the manifest's")
    return WeightProof(
        replica=replica,
        incarnation=incarnation,
        epoch=epoch,
        policy_version=manifest.policy_version,
        manifest_digest=manifest.digest,
        received_digest=manifest_digest(manifest.policy_version, entries),
        storage_digest="",
        covered=0,
        uncovered=(),
        canary_logprobs=(),
        holder=pieces.main_holder if pieces.bytes_by_holder else replica,
        bytes_received=pieces.bytes_received,
        seconds=0.0,
    )


def load(engine: VllmEngine, tensors: Mapping[str, torch.Tensor], replica: ReplicaId) -> None:
    not_loaded = engine.load(tensors)
    if not_loaded:
        reason = f"nothing was loaded into {len(not_loaded)} parameters"
        raise ProofMismatch(replica=replica, part="b", tensor=not_loaded[0], reason=reason)


def prove(engine: VllmEngine, manifest: Manifest, proof: WeightProof) -> WeightProof:
    """Parts (b) and (c), from the engine's current state. Called in its thread, between two steps.

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
