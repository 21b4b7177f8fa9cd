"""The rollout engines: admitted on proof, given requests, polled for tokens, and contained at once when lost.

Each engine has two tasks: a pump (submit requests, pull tokens, acknowledge) and an updater (load the newest policy
version and prove it). The engine of a hybrid also sleeps, while the trainer beside it works: it has no requests then,
and an update wakes it. An engine that does not answer delays only itself: after `SILENT_SECONDS` its requests continue
elsewhere from the streamed tokens, and it gets no new ones. Its pending call stays in flight. Recovery decides on its
replacement; if it answers again, tokens generated since then are discarded, and it continues to work.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from rolecall.core.errors import (
    DeadlineExceeded,
    ProofMismatch,
    RolecallError,
    StaleIncarnation,
    TokenBufferFull,
    WireError,
)
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.payloads.run import RequestsReassigned
from rolecall.core.membership import Actual, ReplicaState
from rolecall.rl_runtime.controller.background_tasks import RETRY_SECONDS, Tasks, retry_first_call, set_or_timeout
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.controller.step_plan import EngineLoad, membership_changes, reassign
from rolecall.rl_runtime.controller.trajectories import NOTHING, EngineKey, TrajectoryTable
from rolecall.rl_runtime.protocol.clients import Connect, ReplicaExited, RolloutPort
from rolecall.rl_runtime.protocol.membership import MembershipView
from rolecall.rl_runtime.protocol.messages import (
    GenerationRequest,
    Holder,
    Manifest,
    PulledTokens,
    TokenChunk,
    WeightProof,
)
from rolecall.rl_runtime.weights.proof import ProofVerifier

logger = logging.getLogger(__name__)

PULL_SECONDS = 0.1
"""Period of pulls from an engine with work. A longer one delays tokens, and requests of a dead engine."""
IDLE_SECONDS = 0.5
"""Period of the same call to an idle engine, to detect that it is dead or silent."""
DRAIN_SECONDS = 2.0
"""Time for an engine that is replaced alive to deliver its last tokens; half of it to stop generating. Ten times a
pause of the slowest engine: with 0.8 s, one end-to-end run on a busy machine with two cores lost 16 tokens.
"""
SILENT_SECONDS = 1.5
"""An engine that has not answered for this long gets no work until it answers, and its requests continue elsewhere. Ten
times a pause of an engine slowed four times; a false alarm costs recomputing its requests' prefixes. Shorter than a
step's patience (`step_plan.py`) by the duration of a sample, so that reassigned requests finish in time.
"""
UPDATE_MARGIN_SECONDS = 20.0
"""Added to the transfer's own deadline: loading and the canary of an engine that has just started."""
SLOT_SECONDS = 2.0
"""How long an update may block its holder for the next puller, and how long new work is reserved for an outdated
engine. A holder serves one puller at a time, and every engine with the version is a holder, so a round is logarithmic
in their number. A longer or hung update continues and delays no other engine.
"""
SLEEP_SECONDS = 10.0
"""Time for an engine to finish its step and fall asleep. The step of all hybrids waits for it, and
one that takes longer is contained: its memory may be what the trainer needs."""
SENT_MAX = 1024
"""Unfinished requests that one engine has at most: enough to keep it busy until the next pull, and few to send to
another when it is lost. The others wait for their turn."""
EXCHANGE = "exchanging its requests"
FAILURES_MAX = 4
"""Turns or updates that may fail in a row, by the engine's own error, before it is contained."""
LOGPROB_MAX: Final = 1e-3
"""A probability is at most 1, up to the rounding of an engine's arithmetic."""
ENDS: Final = ("", "stop", "length")
"""Valid end reasons. Engine libraries have others (abort, error): treating them as the model's own end would turn an
infrastructure failure into a wrong answer (invariant Infrastructure is not reward, docs/invariants.md).
"""


class InvalidTokens(RolecallError):
    def __init__(self, *, request_id: str, reason: str) -> None:
        self.request_id, self.reason = request_id, reason
        super().__init__(f"it streamed invalid tokens: request {request_id}: {reason}")


def check_chunks(chunks: Iterable[TokenChunk], vocab_size: int | None = None) -> None:
    """Validates streamed tokens before any is accepted: an invalid number stops only its engine.

    Unchecked, one such token ends the run: every trainer rejects its step in the same way, as if the job's own code
    were wrong (invariant Bounded remediation, docs/invariants.md).

    Raises:
        InvalidTokens: names the first token outside the vocabulary or with an invalid log-probability, or an invalid
            end reason.
    """
    for chunk in chunks:
        reason = _invalid_reason(chunk, vocab_size)
        if reason:
            raise InvalidTokens(request_id=chunk.request_id, reason=reason)


def _invalid_reason(chunk: TokenChunk, vocab_size: int | None) -> str:
    num = len(chunk.tokens)
    if not num == len(chunk.logprobs) == len(chunk.versions):
        return f"{num} tokens with {len(chunk.logprobs)} log-probabilities and {len(chunk.versions)} versions"
    for place, (token, logprob) in enumerate(zip(chunk.tokens, chunk.logprobs, strict=True), start=chunk.offset):
        if not (math.isfinite(logprob) and logprob <= LOGPROB_MAX):
            return f"token {place} has a log-probability of {logprob}"
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            return f"token {place} is {token}, and the vocabulary has {vocab_size}"
    if chunk.finish_reason not in ENDS:
        return f"its end is {chunk.finish_reason[:40]!r}, which is no end of an answer"
    return ""


@dataclass(frozen=True, slots=True)
class DesiredWeights:
    """The version that every engine should load."""

    manifest: Manifest
    holders: tuple[Holder, ...]


@dataclass(eq=False, slots=True)
class EngineState:
    """One incarnation of a rollout replica."""

    port: RolloutPort
    record: Actual
    holder: Holder
    version: int = -1  # newest policy version that it has proven
    proven: str = ""  # digest of that version's manifest
    serving: bool = False
    behind_since: float | None = None  # seconds of the loop's clock; None: it has proven the desired version
    silent: bool = False
    asleep: bool = False  # until its next update
    updating: bool = False
    may_be_awake: bool = False  # an update was sent since it fell asleep, and may have arrived
    draining: bool = False
    holds_unknown: bool = False  # requests of an earlier controller, not listed yet
    failures: Counter[str] = field(default_factory=Counter)
    """In a row, by what failed: an engine that answers, but cannot load a version, is contained, too."""
    tokens_seen: int = 0  # its own counter of generated tokens, right after the last pull
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def key(self) -> EngineKey:
        return self.port.replica, self.port.incarnation


class RolloutPool:
    """All engines of a run, and the table of their trajectories."""

    def __init__(
        self,
        *,
        recorder: RunRecorder,
        table: TrajectoryTable,
        verifier: ProofVerifier,
        connect: Connect,
        tasks: Tasks,
        transfer_seconds: float,
        tokens_generated: Callable[[Actual], int | None],
        on_finished: Callable[[], None],
        trains_prefixes: bool = False,
        vocab_size: int | None = None,
        hybrids: Collection[ReplicaId] = (),
    ) -> None:
        """`trains_prefixes`: unfinished output of a lost engine is trained on, and generation continues elsewhere after
        it; otherwise the request continues elsewhere first. `vocab_size`: larger token ids are rejected. `hybrids`:
        rollouts that share their machine with a trainer.
        """
        self._recorder, self._table, self._verifier = recorder, table, verifier
        self._connect, self._tasks = connect, tasks
        self._update_seconds = transfer_seconds + UPDATE_MARGIN_SECONDS
        self._tokens_generated, self._on_finished = tokens_generated, on_finished
        self._trains_prefixes, self._vocab_size = trains_prefixes, vocab_size
        self._giving: set[Holder] = set()
        self._given: Counter[Holder] = Counter()  # how often each served the target version
        self._offered = asyncio.Event()  # a holder is free, or there is a new one
        self._hybrids = frozenset(hybrids)
        self._hybrids_rest = bool(hybrids)  # until it is known whether an earlier controller's step is to be trained
        self._joining: dict[EngineKey, asyncio.Task[None]] = {}
        self._unmet: Counter[EngineKey] = Counter()  # failed handshakes with replicas that are not admitted yet
        self._took_over = False  # serving engines were queried for requests of an earlier controller
        self.engines: dict[EngineKey, EngineState] = {}
        self.target: DesiredWeights | None = None

    def sync(self, fleet: MembershipView) -> None:
        """Contains lost engines and starts handshakes with new ones; called repeatedly."""
        changes = membership_changes(fleet, "rollout", active=self.engines, known=self._joining)
        for key, because in changes.lost.items():
            self.contain(key, because)
        for key, because in changes.replaced.items():
            engine = self.engines[key]
            if engine.silent:  # its requests are elsewhere already: there is nothing to wait for
                self.contain(key, because)
            elif not engine.draining:
                engine.draining = True
                self._tasks.start(self._drain(engine, because), f"drain {key}")
        for record in changes.joining:
            key = (record.replica, record.incarnation)
            task = self._tasks.start(self._connect_engine(record), f"connect {key}")
            self._joining[key] = task
            task.add_done_callback(lambda _, key=key: self._joining.pop(key, None))  # type: ignore[misc]

    async def connected(self) -> None:
        """Waits for the handshakes in progress; each has a deadline."""
        await asyncio.gather(*self._joining.values(), return_exceptions=True)

    async def _connect_engine(self, record: Actual) -> None:
        key = (record.replica, record.incarnation)
        try:
            port = RolloutPort(self._connect(record))
            info = await port.info()
        except ReplicaExited as e:
            self._recorder.fence(*key, e.because)
            return
        except DeadlineExceeded as e:
            logger.warning("%s", e)  # the next sync retries the handshake
            return
        except Exception as e:  # noqa: BLE001 deliberate: an exception of one engine must not stop the others
            because = await retry_first_call(self._unmet, key, e)
            if because:
                self._recorder.fence(*key, because)
            return  # otherwise the next sync retries the handshake
        self._unmet.pop(key, None)
        if key in self.engines:
            return
        engine = EngineState(port=port, record=record, holder=info.holder, holds_unknown=info.num_requests > 0)
        if record.state is ReplicaState.SERVING and info.policy_version >= 0:
            # An earlier controller admitted it; the next update proves it again.
            engine.version, engine.serving = info.policy_version, True
        engine.asleep = info.asleep
        engine.tokens_seen = self._tokens_generated(record) or 0
        self.engines[key] = engine
        self._recorder.change_members(joined=[key], because=f"{record.replica}#{record.incarnation} answers")
        engine.tasks = [
            self._tasks.start(self._pump(engine), f"pump {port}"),
            self._tasks.start(self._keep_updated(engine), f"update {port}"),
        ]
        engine.wanted.set()

    async def held_requests(self) -> dict[EngineKey, list[tuple[GenerationRequest, TokenChunk]]]:
        """Requests held by each serving engine that answers, for a controller that restarts."""

        async def ask(engine: EngineState) -> list[tuple[GenerationRequest, TokenChunk]]:
            try:
                held = await engine.port.list_requests()
                check_chunks((chunk for _, chunk in held), self._vocab_size)
                engine.holds_unknown = False
                return held
            except InvalidTokens as e:
                self.contain(engine.key, str(e))
                return []
            except (ReplicaExited, DeadlineExceeded, StaleIncarnation) as e:
                logger.warning("what %s holds is not known: %s", engine.port, e)
                return []

        serving = [e for e in self.engines.values() if e.serving]
        answers = await asyncio.gather(*(ask(e) for e in serving))
        self._took_over = True
        return {e.key: answer for e, answer in zip(serving, answers, strict=True)}

    def loads(self) -> list[EngineLoad]:
        now = asyncio.get_running_loop().time()
        return [
            EngineLoad(
                key=engine.key,
                version=engine.version,
                may_serve=engine.serving and not (engine.silent or engine.asleep or self._rests(engine)),
                num_requests=self._table.num_unfinished(engine.key),
                is_due=engine.behind_since is not None and now - engine.behind_since < SLOT_SECONDS,
                is_behind=not engine.silent
                and engine.behind_since is not None
                and now - engine.behind_since < self._update_seconds,
            )
            for engine in self.engines.values()
        ]

    def place(self, group_id: GroupId, key: EngineKey) -> None:
        self._table.place(group_id, key)
        self.engines[key].wake.set()

    def assign_unassigned(self) -> set[ReplicaId]:
        """Assigns unassigned requests to the least loaded engines. Returns the replicas that got some."""
        placed = reassign(self._table.unassigned(), self.loads())
        for group_id, key in placed:
            self.place(group_id, key)
        return {replica for _, (replica, _) in placed}

    def is_stuck(self, group_id: GroupId) -> bool:
        """Whether any of the group's requests is on an unresponsive engine or unassigned."""
        silent = {e.key for e in self.engines.values() if e.silent}
        trajectories = self._table.groups[group_id].trajectories
        return any(not t.finished and (t.engine is None or t.engine in silent) for t in trajectories)

    def wake_all(self) -> None:
        """Wakes all pumps, because there are requests to drop."""
        for engine in self.engines.values():
            engine.wake.set()

    def _rests(self, engine: EngineState) -> bool:
        """Whether the trainer beside it works now, so that it gets neither requests nor weights."""
        return self._hybrids_rest and engine.key[0] in self._hybrids

    def others_serve(self) -> bool:
        """Whether an engine works that is no hybrid's."""
        return any(e.may_serve and e.key[0] not in self._hybrids for e in self.loads())

    def rest_hybrids(self) -> list[EngineKey]:
        """From now on the hybrids' engines get nothing to do. Returns those that do not sleep yet."""
        self._hybrids_rest = True
        hybrids = [e for e in self.engines.values() if e.key[0] in self._hybrids]
        return sorted(e.key for e in hybrids if e.updating or e.may_be_awake or not e.asleep)

    def wake_hybrids(self) -> None:
        """Lets the hybrids' engines load the desired version, prove it, and work again."""
        if not self._hybrids_rest:
            return
        self._hybrids_rest = False
        now = asyncio.get_running_loop().time()
        for engine in self.engines.values():
            if self.target is not None and self._needs_update(engine, self.target):
                engine.behind_since = engine.behind_since or now
                engine.wanted.set()

    async def sleep(self, keys: Iterable[EngineKey]) -> None:
        """Sends engines to sleep; their requests continue elsewhere, or here later, with every token made so far."""
        asked = {asyncio.ensure_future(self._put_to_sleep(e)): e for k in keys if (e := self.engines.get(k))}
        try:
            while waited := [task for task, e in asked.items() if not task.done() and e.key in self.engines]:
                await asyncio.wait(waited, timeout=PULL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in asked:
                if task.done():
                    task.result()
        finally:
            for task in asked:
                task.cancel()

    async def _put_to_sleep(self, engine: EngineState) -> None:
        try:
            # An update in progress ends first, that of a joining engine included.
            seconds = SLEEP_SECONDS + (self._update_seconds if engine.updating else 0.0)
            self._take_last(engine, await engine.port.sleep(self._table.offsets(engine.key), seconds))
        except ReplicaExited as e:
            self.contain(engine.key, e.because)
        except Exception as e:  # noqa: BLE001 deliberate: an exception of one engine must not stop the others
            self.contain(engine.key, f"it did not fall asleep: {type(e).__name__}: {e}")
        else:
            engine.asleep, engine.may_be_awake = True, False
            self._table.leave(engine.key, alive=True)
            self.assign_unassigned()
            engine.wake.set()

    def _take_last(self, engine: EngineState, pulled: PulledTokens) -> None:
        """Takes the tokens of an engine that has stopped generating."""
        if engine.key in self.engines and (pulled.replica, pulled.incarnation) == engine.key:
            engine.tokens_seen = self._tokens_generated(engine.record) or engine.tokens_seen
            check_chunks(pulled.chunks, self._vocab_size)
            if self._table.take(engine.key, pulled.chunks, engine.version):
                self._on_finished()

    async def _drain(self, engine: EngineState, because: str) -> None:
        """Collects the last tokens of an engine that is replaced alive; the supervisor waits for it."""
        engine.serving = False  # no new requests; an answer in progress is still taken
        try:
            self._take_last(engine, await engine.port.drain(self._table.offsets(engine.key), DRAIN_SECONDS / 2))
        except Exception as e:  # noqa: BLE001
            # Whatever the cause, the engine delivers no more tokens: its requests continue from the streamed ones.
            logger.warning("%s did not drain: %s", engine.port, e)
        self.contain(engine.key, because)

    def contain(self, key: EngineKey, because: str) -> None:
        """Contains a lost engine without waiting: fences it, reassigns its requests, and writes the event."""
        engine = self.engines.pop(key, None)
        if engine is None:
            return
        for task in engine.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._recorder.fence(*key, because)
        self._move(engine, because, forgets=False)
        self._recorder.change_members(left=[key], because=f"{key[0]}#{key[1]}: {because}")

    def _move(self, engine: EngineState, because: str, *, forgets: bool) -> None:
        """Reassigns its unfinished requests with their tokens. `forgets`: it is alive, and drops them."""
        made = None if forgets and not engine.silent else self._tokens_generated(engine.record)
        lost = not forgets or engine.silent
        cut = self._table.cut(engine.key) if self._trains_prefixes and lost else NOTHING
        moved = self._table.leave(engine.key, alive=forgets)
        takers = self.assign_unassigned()
        if cut.num_requests:
            self._on_finished()
        if not moved.num_requests and not cut.num_requests:
            return
        replica, incarnation = engine.key
        reassigned = RequestsReassigned(
            from_replica=replica,
            from_incarnation=incarnation,
            to=tuple(sorted(takers)),
            num_requests=moved.num_requests + cut.num_requests,
            num_groups=len({*moved.group_ids, *cut.group_ids}),
            num_cut=cut.num_requests,
            tokens_kept=moved.tokens_kept + cut.tokens_kept,
            tokens_lost=0 if made is None else max(0, made - engine.tokens_seen),
            because=because,
        )
        self._recorder.event(reassigned)

    async def _pump(self, engine: EngineState) -> None:
        while engine.key in self.engines:
            turn = asyncio.ensure_future(self._turn(engine))
            try:
                await self._watched(engine, turn)
                del engine.failures[EXCHANGE]
            except asyncio.CancelledError:
                turn.cancel()
                raise
            except (ReplicaExited, StaleIncarnation, InvalidTokens) as e:
                # An engine that streams invalid numbers would do so again: it is replaced at once.
                self.contain(engine.key, e.because if isinstance(e, ReplicaExited) else str(e))
                return
            except Exception as e:  # noqa: BLE001 deliberate: an exception of one engine must not stop the others
                if not await self._failed(engine, EXCHANGE, e):
                    return
            busy = bool(self._table.num_unfinished(engine.key))
            await set_or_timeout(engine.wake, PULL_SECONDS if busy else IDLE_SECONDS)

    async def _watched(self, engine: EngineState, turn: Awaitable[None]) -> None:
        """Waits for one turn without a limit, but after `SILENT_SECONDS` nothing depends on it any more."""
        waiting = {asyncio.ensure_future(turn)}
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=SILENT_SECONDS)
            if not done and not engine.silent and engine.key in self.engines:
                engine.silent = True
                because = str(DeadlineExceeded(waited_for=f"{engine.port}", seconds=SILENT_SECONDS))
                logger.warning("%s", because)
                self._move(engine, because, forgets=True)
        engine.silent = False
        (task,) = done
        task.result()

    async def _turn(self, engine: EngineState) -> None:
        key, port = engine.key, engine.port
        if engine.holds_unknown and self._took_over:
            # Requests of an earlier controller that were not adopted, because the engine did not answer or serve then.
            # If it got one again, it would continue its own tokens: after another prefix, or of a discarded policy.
            held = await port.list_requests()
            self._table.forget_unassigned(key, [request.request_id for request, _ in held])
            engine.holds_unknown = False
        pulled = await port.tokens_since(self._table.offsets(key))
        engine.tokens_seen = self._tokens_generated(engine.record) or engine.tokens_seen
        if (pulled.replica, pulled.incarnation) != key:
            raise StaleIncarnation(replica=key[0], wanted=f"#{pulled.incarnation}", got=f"#{key[1]}")
        check_chunks(pulled.chunks, self._vocab_size)
        finished = self._table.take(key, pulled.chunks, engine.version)
        self._table.resend(key, pulled.unknown)
        if finished:
            self._on_finished()
        if engine.serving and pulled.policy_version < 0:
            self._unserve(engine, "it reports that its weights are not proven any more")
        forget = self._table.to_forget(key)
        if forget:
            try:
                await port.ack(forget)
            except RolecallError:
                self._table.forget_unassigned(key, forget)
                raise
        takes = engine.serving and not (engine.holds_unknown or engine.asleep or self._rests(engine))
        fresh = self._table.unsent(key, SENT_MAX) if takes else []
        if fresh:
            try:
                await port.submit(fresh)
            except TokenBufferFull as e:  # with requests of an earlier controller; these end or are dropped
                logger.info("%s takes no request now: %s", port, e)
            else:
                self._table.mark_sent(key, [r.request_id for r in fresh])

    async def _failed(self, engine: EngineState, what: str, error: Exception) -> bool:
        """Counts a failure; False if the engine was contained for it."""
        engine.failures[what] += 1
        count = engine.failures[what]
        logger.warning("%s: %s failed: %s: %s", engine.port, what, type(error).__name__, error)
        if count >= FAILURES_MAX:
            self.contain(engine.key, f"{what} failed {count} times, last: {type(error).__name__}: {error}")
            return False
        await asyncio.sleep(RETRY_SECONDS * count)
        return engine.key in self.engines

    def publish(self, manifest: Manifest, holders: Sequence[Holder]) -> None:
        """Sets the version that every engine should load; requests in progress continue."""
        if self.target is None or self.target.manifest.digest != manifest.digest:
            self._given.clear()
        self.target = DesiredWeights(manifest, tuple(holders))
        self._offered.set()
        now = asyncio.get_running_loop().time()
        for engine in self.engines.values():
            if engine.behind_since is None and engine.proven != manifest.digest:
                engine.behind_since = now
            engine.wanted.set()

    def demote(self, because: str) -> None:
        """Invalidates the discarded proven version: no engine serves until it has proven the current one."""
        for engine in self.engines.values():
            engine.version, engine.proven = -1, ""
            self._unserve(engine, because)

    def _unserve(self, engine: EngineState, because: str) -> None:
        """Stops a live engine from serving until it proves a version again; its requests continue elsewhere."""
        engine.proven = ""
        engine.wanted.set()
        if not engine.serving:
            return
        engine.serving = False
        self._recorder.set_state(*engine.key, ReplicaState.READY, because)
        self._move(engine, because, forgets=True)

    async def _keep_updated(self, engine: EngineState) -> None:
        while engine.key in self.engines:
            await engine.wanted.wait()
            engine.wanted.clear()
            while self.target is not None and self._needs_update(engine, self.target):
                try:
                    proof = await self._update(engine)
                except ReplicaExited as e:
                    self.contain(engine.key, e.because)
                    return
                except ProofMismatch as e:
                    version = self.target.manifest.policy_version
                    self._recorder.refused(*engine.key, version, e.part, e.tensor, e.reason)
                    if not await self._failed(engine, "its proof", e):
                        return
                except Exception as e:  # noqa: BLE001 deliberate: an exception of one engine must not stop the others
                    if not await self._failed(engine, "its update", e):
                        return
                else:
                    if proof is None:
                        await asyncio.sleep(RETRY_SECONDS)
                    elif not self._admit(engine, proof):
                        return

    def _needs_update(self, engine: EngineState, target: DesiredWeights) -> bool:
        current = engine.serving and engine.proven == target.manifest.digest
        return not self._rests(engine) and (engine.asleep or not current)

    async def _update(self, engine: EngineState) -> WeightProof | None:
        """One attempt. None: retry, without counting a failure of the engine."""
        if engine.silent:
            return None
        call: asyncio.Future[WeightProof] | None = None
        try:
            holders = await self._free_holders(engine)
            # Read now: the target may have been replaced during the wait, and the trainer beside it may have begun.
            if self._rests(engine):
                return None
            manifest, epoch = self._wanted().manifest, self._recorder.epoch
            call = asyncio.ensure_future(engine.port.update_weights(epoch, manifest, holders, self._update_seconds))
            engine.updating = engine.may_be_awake = True
            with self._gives(holders[:1]):
                await asyncio.wait({call}, timeout=SLOT_SECONDS)
            proof = await call
        except asyncio.CancelledError:
            if call is not None:
                call.cancel()
            raise
        except (DeadlineExceeded, StaleIncarnation, WireError) as e:
            logger.warning("%s: version %d not loaded: %s", engine.port, manifest.policy_version, e)
            return None
        finally:
            engine.updating = False
        verdict = self._verifier.judge(manifest, proof, incarnation=engine.key[1], epoch=epoch)
        if not verdict.admitted or proof.replica != engine.key[0]:
            reason = verdict.because if not verdict.admitted else f"the proof is {proof.replica}'s"
            # It computes with weights that it could not prove. Tokens streamed after its last proof are rejected.
            self._unserve(engine, f"refused: {reason}")
            raise ProofMismatch(replica=str(engine.port), part=verdict.part, tensor=verdict.tensor, reason=reason)
        return proof

    def _wanted(self) -> DesiredWeights:
        assert self.target is not None, "a target is replaced, never taken away"
        return self.target

    async def _free_holders(self, engine: EngineState) -> list[Holder]:
        """Holders of the target version (trainers, and rollouts that loaded it), free ones first."""
        while True:
            target = self._wanted()
            digest = target.manifest.digest
            relays = [
                e.holder for e in self.engines.values() if e is not engine and e.proven == digest and not e.silent
            ]
            holders = [*target.holders, *relays]
            free = [h for h in holders if h not in self._giving]
            if free or not holders:
                return sorted(holders, key=lambda h: (h in self._giving, self._given[h]))
            await set_or_timeout(self._offered, SLOT_SECONDS)

    @contextmanager
    def _gives(self, holders: Sequence[Holder]) -> Iterator[None]:
        """Reserves the holders for one puller within the context; empty when none is left."""
        self._giving.update(holders)
        self._given.update(holders)
        try:
            yield
        finally:
            self._giving.difference_update(holders)
            self._offered.set()

    def _admit(self, engine: EngineState, proof: WeightProof) -> bool:
        """Records a proven version; the first one lets the engine serve. False if it was fenced in the meantime."""
        engine.version, engine.proven, engine.asleep = proof.policy_version, proof.manifest_digest, False
        engine.failures.clear()
        if self.target is not None and engine.proven == self.target.manifest.digest:
            engine.behind_since = None
        if engine.serving:
            self.assign_unassigned()
            self._on_finished()
            return True
        self._recorder.admitted(proof)
        because = f"proved policy version {proof.policy_version}"
        if not self._recorder.set_state(*engine.key, ReplicaState.SERVING, because, proof.policy_version):
            return False
        engine.serving = True
        self.assign_unassigned()
        self._on_finished()
        return True
