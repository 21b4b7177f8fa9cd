"""The trainers of a run: their epochs and optimizer steps.

A loss is recorded and fenced at once; the process group follows at the next regroup. A trainer that joins copies a
member's state between two steps; if no trainer has the newest state, the run goes on from the newest one left in its
history: another trainer's, or a checkpoint. All members run a step together. When one is lost, hangs or fails, the
survivors report their commits (the commit record is authoritative), form a new epoch, and share the missing
microbatches; computed gradients are kept. `step_plan.py` decides.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import (
    CheckpointCorrupt,
    DeadlineExceeded,
    NonFiniteMicrobatch,
    PeerLost,
    ProofMismatch,
    RolecallError,
    StaleIncarnation,
    WireError,
)
from rolecall.core.ids import ReplicaId, split_replica
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import HoldLifted, HoldPlaced
from rolecall.core.journal.payloads.run import MicrobatchCompared, MicrobatchRecomputed, StepInterrupted
from rolecall.core.membership import Actual, ReplicaState
from rolecall.rl_runtime.algorithms.batching import assign, interleaved, mini_batches
from rolecall.rl_runtime.controller.background_tasks import Tasks, retry_first_call
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.controller.step_plan import (
    CommittedStep,
    StepPlan,
    StepProgress,
    TrainerChanges,
    choose_state,
    contain_attempt,
    late_or_lost,
    membership_changes,
)
from rolecall.rl_runtime.protocol.checkpoints import CheckpointInfo, WrittenCheckpoint, choose, surplus
from rolecall.rl_runtime.protocol.clients import Connect, ReplicaExited, TrainerPort, is_code_error
from rolecall.rl_runtime.protocol.membership import Member, MembershipView
from rolecall.rl_runtime.protocol.messages import (
    CommitRecord,
    ComparedMicrobatch,
    ComputedMicrobatch,
    Holder,
    Manifest,
    StepResult,
    TrainerInfo,
)

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
"""Period at which a wait for several trainers checks for fenced members."""
GRACE_SECONDS = 3.0
"""Added to the process group's own timeout: after a peer failed, the others must answer within this."""
PROGRESS_SECONDS = 1.0
"""Period at which trainers are asked during a step how many microbatches they have computed."""
IDLE_SECONDS = 600.0
"""How long an old call may occupy the working thread of a joining trainer before the next attempt."""
COPY_MARGIN_SECONDS = 5.0
START_SECONDS = 60.0
"""How long the first epoch waits for the other desired trainers once one has arrived."""
NO_TRAINER_SECONDS = 600.0
"""How long a run without any trainer waits for one, in addition to the time that an operator has to approve a plan.
While a trainer starts, or operators hold or pause recovery, the time does not run."""
PAUSED_FLAG = "paused"
REGROUPS_MAX = 12
JOINS_MAX = 2
"""Epochs that may fail without a lost member before trainers that were in none before are left out, and joins that may
fail by a trainer's own exception before it is given up: it would come back and fail again."""
DECISION_SECONDS = 60.0
"""How long a step that fails by its own code waits for recovery's decision."""
ATTEMPTS_MAX = 24
"""Attempts at one step, over all causes; more are not explained by machine faults."""
LOADS_MAX = 12
"""Trainers that are asked to take the state of a checkpoint, before the run ends."""
LOAD_PAUSE_SECONDS = 2.0
"""The pause before each further one grows by this: a shared file system may be away for a minute."""


class NoTrainerLeft(RolecallError):
    """No trainer has the state of the last committed step."""


class StepFailed(RolecallError):
    """A step fails by its own code, or repeatedly: another attempt will not help."""


class StateNotLoaded(RolecallError):
    """A checkpoint does not fit the job, or no trainer could take a state: another attempt will not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """Where a run goes on. `refused`: checkpoints that cannot be used, each with the reason."""

    source: str  # a checkpoint's path, a trainer, or the beginning
    refused: tuple[str, ...]
    commit: CommitRecord
    result: StepResult | None


def _recomputed(bad: NonFiniteMicrobatch, by: str, *, finite: bool) -> MicrobatchRecomputed:
    return MicrobatchRecomputed(
        step=bad.step,
        microbatch=bad.microbatch_id,
        groups=bad.group_ids,
        from_replica=bad.replica,
        by=by,
        finite=finite,
    )


def _compared(step: int, found: ComparedMicrobatch) -> MicrobatchCompared:
    first, again = found.first, found.again
    return MicrobatchCompared(
        step=step,
        microbatch=first.microbatch_id,
        groups=first.group_ids,
        from_replica=first.replica,
        loss=first.numbers.loss,
        grad_norm=first.numbers.grad_norm,
        because=first.because,
        by=found.by,
        loss_again=again.loss if again else None,
        grad_norm_again=again.grad_norm if again else None,
        verdict=str(found.verdict),
    )


class TrainerGroup:
    """All trainers of a run, and their current epoch."""

    def __init__(
        self, *, recorder: RunRecorder, connect: Connect, tasks: Tasks, job: JobConfig, clock: Clock, folder: str
    ) -> None:
        """`folder`: the checkpoint folder."""
        self._recorder, self._connect, self._tasks, self._clock = recorder, connect, tasks, clock
        self._folder, self._keep = folder, job.checkpoint.keep
        self._num_wanted = job.roles.trainer
        self._no_trainer_seconds = NO_TRAINER_SECONDS + job.recovery.approval_timeout_seconds
        self._copy_seconds = job.runtime.transfer_timeout_seconds + COPY_MARGIN_SECONDS
        self._group_seconds = job.runtime.group_timeout_seconds + GRACE_SECONDS
        self._unit_seconds = job.detector.first_unit_seconds
        """How long one microbatch may take at a trainer that the others wait for: as long as the newest step took."""
        self._stall_seconds = job.detector.first_unit_seconds + self._group_seconds
        self._num_mini_batches, self._seed = job.algorithm.mini_batches, job.seed
        self._holders: dict[Member, Holder] = {}
        self._candidates: dict[Member, TrainerPort] = {}  # responsive, with a free working thread: may join
        self._joining: set[Member] = set()
        self._failed_first_calls: Counter[Member] = Counter()
        self._failed_joins: Counter[Member] = Counter()
        self._have_joined: set[Member] = set()  # members of an epoch that was formed
        self._lost: dict[Member, str] = {}
        self.members: dict[Member, TrainerPort] = {}
        self.epoch = 0
        self.committed_step = -1
        """The newest step known to be committed; an older state is never accepted, except by `recover`."""

    def sync(self, fleet: MembershipView) -> None:
        """Records losses and starts handshakes with new trainers; called repeatedly."""
        active = [m for m in (*self.members, *self._candidates) if m not in self._lost]
        changes = membership_changes(fleet, "trainer", active=active, known={*self._joining, *self._lost})
        for member, because in {**changes.lost, **changes.replaced}.items():
            self._lose(member, because)
        for record in changes.joining:
            self._joining.add((record.replica, record.incarnation))
            self._tasks.start(self._admit(record), f"admit {(record.replica, record.incarnation)}")

    async def _admit(self, record: Actual) -> None:
        member = (record.replica, record.incarnation)
        try:
            port = TrainerPort(self._connect(record))
            await port.info()
            await port.idle(IDLE_SECONDS)
            await port.info()
            self._candidates[member] = port
        except ReplicaExited as e:
            self._lose(member, e.because)
        except DeadlineExceeded as e:
            logger.warning("%s", e)  # the next sync retries the handshake
        except Exception as e:  # noqa: BLE001 deliberate: an exception of one trainer must not end the controller
            because = await retry_first_call(self._failed_first_calls, member, e)
            if because:
                self._lose(member, because)
        else:
            self._failed_first_calls.pop(member, None)
        finally:
            self._joining.discard(member)

    def _lose(self, member: Member, because: str) -> None:
        """Contains a loss: fences it at once. A member stays in the running epoch until the next regroup."""
        self._lost[member] = because
        self._candidates.pop(member, None)
        self._recorder.fence(*member, because)

    def _exclude(self, member: Member, because: str) -> None:
        """It did not answer, but is not known to be dead: it leaves the epoch, and may rejoin once it answers."""
        self.members.pop(member, None)
        self._candidates.pop(member, None)
        self._recorder.set_state(*member, ReplicaState.READY, because)

    async def _call_all(
        self,
        calls: Mapping[Member, Awaitable[Any]],
        grace: float,
        working_at: Mapping[Member, float] = MappingProxyType({}),
    ) -> dict[Member, Any]:
        """Each member's answer or exception; `late_or_lost` decides when to stop waiting for a member."""
        pending = {member: asyncio.ensure_future(call) for member, call in calls.items()}
        answers: dict[Member, Any] = {}
        failed_at: float | None = None
        try:
            while pending:
                await asyncio.wait(pending.values(), timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                now = self._clock.monotonic()
                new = {m: task.exception() or task.result() for m, task in pending.items() if task.done()}
                waited = [m for m in pending if m not in new]
                new |= late_or_lost(
                    waited, self._lost, failed_at=failed_at, now=now, grace_seconds=grace, working_at=working_at
                )
                # In the order of the calls, which callers rely on.
                for member in [m for m in pending if m in new]:
                    answers[member] = new[member]
                    pending.pop(member).cancel()
                    if isinstance(new[member], BaseException) and failed_at is None:
                        failed_at = now
        finally:
            for task in pending.values():
                task.cancel()
        return answers

    async def _infos(self, ports: Mapping[Member, TrainerPort]) -> dict[Member, TrainerInfo]:
        """Each responsive trainer's state; records losses."""
        answers = await self._call_all({m: p.info() for m, p in ports.items()}, grace=GRACE_SECONDS)
        self._note_losses(answers)
        return {m: a for m, a in answers.items() if isinstance(a, TrainerInfo)}

    def _note_losses(self, answers: Mapping[Member, Any]) -> None:
        for member, answer in answers.items():
            if isinstance(answer, ReplicaExited) and member not in self._lost:
                self._lose(member, answer.because)
            elif isinstance(answer, DeadlineExceeded):
                self._exclude(member, str(answer))

    def changes(self) -> TrainerChanges:
        """Differences between the epoch's members and the available trainers."""
        lost = {m: self._lost[m] for m in self.members if m in self._lost}
        return TrainerChanges(lost=lost, joining=sorted(self._candidates))

    async def form_first_epoch(self, committed_step: int) -> None:
        """The first epoch of this controller, among the trainers that have the newest state.

        `committed_step`: the last one in the ledger.

        Raises:
            NoTrainerLeft: none has the state of that step.
            DeadlineExceeded: no trainer arrived.
        """
        self.committed_step = committed_step
        await self._wait_for_candidates(self._num_wanted)
        for _ in range(REGROUPS_MAX):
            await self.regroup("the controller starts", with_candidates=True)
            # A step of an earlier controller may have ended in the meantime, at some or all trainers.
            asked = set(self.members)
            infos = await self._infos(self.members)
            steps = {i.commit.step for i in infos.values()}
            if len(steps) == 1 and infos.keys() == asked:
                self.committed_step = steps.pop()
                return
        raise StepFailed(f"trainers did not agree on their state in {REGROUPS_MAX} attempts")

    async def _wait_for_candidates(self, wanted: int) -> None:
        started = asked_at = self._clock.monotonic()
        first_at: float | None = None
        while len(self._candidates) < wanted:
            now = self._clock.monotonic()
            if now - asked_at > PROGRESS_SECONDS:
                started, asked_at = now if self._replacement_is_delayed() else started, now
            if self._candidates and first_at is None:
                first_at = now
            if first_at is not None and now - first_at > START_SECONDS:
                return
            if now - started > self._no_trainer_seconds:
                raise DeadlineExceeded(waited_for="a trainer", seconds=self._no_trainer_seconds)
            await asyncio.sleep(TICK_SECONDS)

    def _replacement_is_delayed(self) -> bool:
        """Whether a trainer starts, which the supervisor limits, or operators hold or pause recovery."""
        journal, held_until = self._recorder.journal, dict[str, float]()
        for event in journal.events(kinds=(EventKind.HOLD_PLACED, EventKind.HOLD_LIFTED), damaged=[]):
            match event.payload:
                case HoldPlaced(digest=digest, until=until):
                    held_until[digest] = until
                case HoldLifted(digest=digest):
                    held_until.pop(digest, None)
        starts = any(
            a.state is ReplicaState.STARTING for r, a in journal.current().items() if split_replica(r)[0] == "trainer"
        )
        is_held = any(until > self._clock.wall() for until in held_until.values())
        return starts or is_held or journal.flag(PAUSED_FLAG) is not None

    async def regroup(self, because: str, *, with_candidates: bool) -> None:
        """A new epoch among the remaining members (and the candidates), all at the newest committed state.

        Raises:
            NoTrainerLeft: no trainer has that state.
        """
        num_failed = 0
        for _ in range(REGROUPS_MAX):
            ports = {m: p for m, p in self.members.items() if m not in self._lost}
            if with_candidates:
                ports |= self._candidates
            newcomers = ports.keys() - self._have_joined
            left_out = newcomers if num_failed >= JOINS_MAX and newcomers != ports.keys() else set()
            ports = await self._copy_state({m: p for m, p in ports.items() if m not in left_out})
            if await self._join(ports, because):
                for member in left_out:
                    self._lose(member, "no epoch could be formed with it, and one could without it")
                return
            answered = self.members.keys() - self._lost.keys()
            num_failed += bool(ports) and answered >= ports.keys()  # some cannot reach each other
        raise StepFailed(f"no epoch could be formed in {REGROUPS_MAX} attempts: {because}")

    async def _copy_state(self, ports: Mapping[Member, TrainerPort]) -> dict[Member, TrainerPort]:
        """The trainers that have the newest committed state after the others copied it."""
        infos = await self._infos(ports)
        undone = {m for m, i in infos.items() if not self._recorder.in_history(i.commit, or_assigned=True)}
        choice = choose_state(infos, self.committed_step, undone)
        if choice is None:
            raise NoTrainerLeft(f"no trainer has the state of step {self.committed_step}")
        self.committed_step, self._holders = choice.step, dict(choice.holders)
        copies = await self._call_all(
            {m: ports[m].copy_from(holder, self._copy_seconds) for m, holder in choice.copies.items()},
            grace=self._copy_seconds,
        )
        self._note_losses(copies)
        for member, answer in copies.items():
            if answer is None:
                self._holders[member] = infos[member].holder
            elif not isinstance(answer, ReplicaExited | DeadlineExceeded):
                logger.warning("%s#%d could not copy the state: %s", *member, answer)
                is_own = not isinstance(answer, PeerLost | ProofMismatch | WireError)  # those are perhaps the holder's
                self._exclude_failed(member, f"could not copy the state: {answer}", is_own=is_own)
        return {m: ports[m] for m in sorted(self._holders) if m not in self._lost}

    async def _join(self, ports: Mapping[Member, TrainerPort], because: str) -> bool:
        """Whether all of them joined a new epoch's process group."""
        if not ports:
            return False
        left = [m for m in self._recorder.members if split_replica(m[0])[0] == "trainer" and m not in ports]
        epoch = self._recorder.change_members(joined=ports, left=left, because=because, always=True)
        first = next(iter(ports))
        try:
            store = await ports[first].open_store(epoch)
        except Exception as e:  # noqa: BLE001 deliberate: an exception of one trainer must not end the controller
            self._note_failed_joins({first: e})
            return False
        seconds = self._group_seconds
        calls = {m: p.join(epoch, n, len(ports), store, seconds) for n, (m, p) in enumerate(ports.items())}
        answers = await self._call_all(calls, grace=seconds)
        self.members = {m: p for m, p in ports.items() if answers[m] is None or isinstance(answers[m], PeerLost)}
        for member, answer in answers.items():
            if answer is not None:
                logger.warning("%s#%d did not join epoch %d: %s", *member, epoch, answer)
        self._note_failed_joins(answers)
        if any(a is not None for a in answers.values()):
            return False
        self.epoch = epoch
        for member in ports:
            self._candidates.pop(member, None)
            self._failed_joins.pop(member, None)
            self._recorder.set_state(*member, ReplicaState.SERVING, f"member of epoch {epoch}")
        self._have_joined = set(ports)
        return True

    def _note_failed_joins(self, answers: Mapping[Member, Any]) -> None:
        self._note_losses(answers)
        for member, answer in answers.items():
            if answer is None or isinstance(answer, PeerLost | ReplicaExited | DeadlineExceeded):
                continue
            self._exclude_failed(member, f"it could not join: {type(answer).__name__}: {answer}")

    def _exclude_failed(self, member: Member, because: str, *, is_own: bool = True) -> None:
        """It may try again, but not for ever where its own code fails: nothing would be trained meanwhile."""
        self._exclude(member, because)
        self._failed_joins[member] += is_own
        if self._failed_joins[member] >= JOINS_MAX:
            self._lose(member, because)

    async def recover(self) -> LoadedState:
        """No trainer has the newest state: the run goes on from the newest one left in its history, that of a trainer
        which was not in the epoch, or the newest good checkpoint.

        `committed_step` is then that state's, whose step may not be in the ledger yet; later training must be undone.

        Raises:
            DeadlineExceeded: no trainer arrived.
            StateNotLoaded: the checkpoint does not fit the job's model, or every attempt failed.
        """
        for member in list(self.members):
            if member not in self._lost:
                self._exclude(member, "it does not have the state of the last committed step")
        self.members = {}
        failure, failed = "", Counter[Member]()
        for attempt in range(LOADS_MAX):
            if failure:
                await asyncio.sleep(attempt * LOAD_PAUSE_SECONDS)
            await self._wait_for_candidates(1)
            infos = await self._infos(self._candidates)
            if not infos:
                failure = "no trainer answered"
                continue
            member = min(infos, key=lambda m: (failed[m], -self._step_of(infos[m]), m))
            port = self._candidates[member]
            try:
                source, refused = await self._load_newest(member, port, self._step_of(infos[member]))
                self.committed_step = (await port.commit_record()).step
            except (ReplicaExited, DeadlineExceeded) as e:
                self._note_losses({member: e})
                failure = str(e)
                continue
            except Exception as e:
                if not (isinstance(e, CheckpointCorrupt) or is_code_error(e)):
                    raise
                failure = str(e) if isinstance(e, CheckpointCorrupt) else f"{type(e).__name__}: {e}"
                self._exclude(member, f"it cannot take a state: {failure}")
                failed[member] += 1
                continue
            try:
                await self.regroup(f"state taken from {source}", with_candidates=True)
                await self.reset_step(self.committed_step + 1)  # its groups may be other ones than before
                commit, result = await self.newest_commit()
                return LoadedState(source=source, refused=refused, commit=commit, result=result)
            except NoTrainerLeft as e:
                failure = str(e)
        raise StateNotLoaded(f"no trainer could take a state in {LOADS_MAX} attempts, last: {failure}")

    def _step_of(self, info: TrainerInfo) -> int:
        """Step of a trainer's state; -1: it has none of the run's history, or that of the beginning."""
        return info.commit.step if info.has_state and self._recorder.in_history(info.commit, or_assigned=True) else -1

    async def _load_newest(self, member: Member, port: TrainerPort, own_step: int) -> tuple[str, tuple[str, ...]]:
        """Lets one trainer load, unless its own state is as new; this controller tells it which checkpoint, so that all
        of its ranks load the same. Returns source and refused checkpoints, as in `LoadedState`."""
        found = await port.list_checkpoints(self._folder)
        choice = choose(found, self._recorder.in_history)
        refused, damage = list(choice.refused), [info.damage for info in found if info.commit is None]
        for info in choice.usable:
            if info.step <= own_step:
                break
            try:
                await self._load(port, info.path)
                return info.path, tuple(refused)
            except CheckpointCorrupt as e:
                refused.append(str(e))
                damage.append(str(e))
        if own_step < 0 and damage:  # perhaps only for now, or for this trainer
            raise CheckpointCorrupt(path=self._folder, reason=f"none can be read: {damage[0]}")
        if own_step < 0:
            await self._load(port, "")
            return "the beginning", tuple(refused)
        return f"{member[0]}#{member[1]}, step {own_step}", tuple(refused)

    async def _load(self, port: TrainerPort, path: str) -> None:
        try:
            await port.load_checkpoint(path)
        except ProofMismatch as e:
            raise StateNotLoaded(f"{path or 'the initial state'} does not fit this job: {e}") from e

    async def run_step(self, plan: StepPlan) -> CommittedStep:
        """Repeats the step until it is committed.

        Raises:
            NoTrainerLeft: no trainer is left.
            StepFailed: its own code fails, and recovery did not act.
        """
        code_errors = 0
        not_finite: dict[str, NonFiniteMicrobatch] = {}
        unusual: tuple[ComputedMicrobatch, ...] = ()
        for attempt in range(1, ATTEMPTS_MAX + 1):
            answers = await self._attempt(plan, repeated=plan.resumed or attempt > 1, first=unusual)
            results = [a for a in answers.values() if isinstance(a, StepResult)]
            if len(results) == len(answers):
                digests = {r.commit.gradient_digest for r in results}
                if len(digests) != 1 or any(r.commit.step != plan.step for r in results):
                    raise StepFailed(f"step {plan.step}: trainers committed different gradients after an agreed vote")
                self.committed_step = plan.step
                if attempt == 1 and not plan.resumed:
                    self._unit_seconds = max(r.seconds for r in results)
                for bad in not_finite.values():
                    by = next(r.replica for r in results if bad.microbatch_id in r.my_microbatches)
                    self._recorder.event(_recomputed(bad, by, finite=True))
                for compared in results[0].compared:
                    self._recorder.event(_compared(plan.step, compared))
                return CommittedStep(commit=results[0].commit, result=results[0], attempts=attempt)
            contained = contain_attempt(answers, code_errors=code_errors, not_finite=not_finite)
            interrupted = StepInterrupted(
                step=plan.step, epoch=self.epoch, because=contained.because, lost=contained.lost, attempt=attempt
            )
            self._recorder.event(interrupted)
            self._note_losses(answers)
            only_at = ""
            if (faulty := contained.not_finite) is not None:
                # The member that computed it leaves the epoch, so that another one computes it again; it rejoins with a
                # copy of the state. The only member tries once more, and then waits for another one.
                if (first := not_finite.setdefault(faulty.microbatch_id, faulty)) is not faulty:
                    self._recorder.event(_recomputed(first, faulty.replica, finite=False))
                    only_at = faulty.replica if faulty.replica == first.replica else ""
                else:
                    self._leave_to_others(ReplicaId(faulty.replica), str(faulty))
            if contained.unusual:
                unusual = contained.unusual
                self._leave_to_others(unusual[0].replica, contained.because)
            if contained.resets_gradients:
                await self.reset_step(plan.step)
            await self.regroup(contained.because, with_candidates=False)
            if self.committed_step >= plan.step:  # though not every member could report it
                commit, result = (results[0].commit, results[0]) if results else await self.newest_commit()
                return CommittedStep(commit=commit, result=result, attempts=attempt)
            code_errors += bool(contained.raised)
            if contained.awaits_recovery:
                await self._await_recovery(plan, contained.raised, only_at)
        raise StepFailed(f"step {plan.step} is not committed after {ATTEMPTS_MAX} attempts")

    def _leave_to_others(self, replica: ReplicaId, because: str) -> None:
        """It leaves the epoch, unless no other member is left."""
        if any(m[0] != replica and m not in self._lost for m in self.members):
            # It may have left already: the others name it, and it did not answer in time itself.
            for member in [m for m in self.members if m[0] == replica]:
                self._exclude(member, because)

    async def _attempt(
        self, plan: StepPlan, *, repeated: bool, first: Sequence[ComputedMicrobatch]
    ) -> dict[Member, Any]:
        """Runs one attempt. `repeated`: parts may be computed already. `first`: unusual ones to compare."""
        computed: dict[ReplicaId, tuple[str, ...]] = {}
        if repeated:
            infos = await self._call_all({m: p.info() for m, p in self.members.items()}, grace=GRACE_SECONDS)
            computed = {m[0]: i.computed for m, i in infos.items() if isinstance(i, TrainerInfo)}
        by_id = {m.microbatch_id: m for m in plan.microbatches}
        names = [replica for replica, _ in self.members]
        parts = mini_batches(plan.ids, step=plan.step, number=self._num_mini_batches, seed=self._seed)
        shares = assign(interleaved(parts), computed, names)
        progress = StepProgress(started_at=self._clock.monotonic(), unit_seconds=self._unit_seconds)
        calls = {}
        for member, port in self.members.items():
            mine = [by_id[i] for i in shares[member[0]]]
            train = partial(port.train_step, self.epoch, plan.step, mine, plan.ids, plan.ledger, names, first)
            calls[member] = self._watched(member, port, train, progress)
        return await self._call_all(calls, grace=self._group_seconds, working_at=progress.working_at)

    async def _watched(
        self, member: Member, port: TrainerPort, train: Callable[[], Awaitable[StepResult]], progress: StepProgress
    ) -> StepResult:
        """The member's answer. A step may take any time; notes meanwhile how the work grows.

        Raises:
            DeadlineExceeded: no member has computed a microbatch for too long.
        """
        answer = asyncio.ensure_future(train())
        try:
            while not (await asyncio.wait({answer}, timeout=PROGRESS_SECONDS))[0]:
                with suppress(Exception):  # a lost member has no answer; an unanswered question is no progress
                    progress.add(member, (await port.info()).num_computed, self._clock.monotonic())
                if progress.stands_still(self._clock.monotonic(), self._stall_seconds):
                    raise DeadlineExceeded(waited_for=f"{port} to compute a microbatch", seconds=self._stall_seconds)
            return answer.result()
        finally:
            answer.cancel()

    async def newest_commit(self) -> tuple[CommitRecord, StepResult | None]:
        """The members' newest commit record, and the result of that step if one still has it.

        Raises:
            NoTrainerLeft: no member answered.
        """
        found: list[tuple[CommitRecord, StepResult | None]] = []
        for member, port in list(self.members.items()):
            try:
                found.append((await port.commit_record(), await port.last_result()))
            except (ReplicaExited, DeadlineExceeded) as e:
                self._note_losses({member: e})
        if not found:
            raise NoTrainerLeft(f"no trainer can report its commit of step {self.committed_step} or later")
        commit, _ = max(found, key=lambda f: f[0].step)
        return commit, next((r for _, r in found if r is not None and r.commit.step == commit.step), None)

    async def _await_recovery(self, plan: StepPlan, raised: Mapping[Member, BaseException], only_at: str) -> None:
        """After a code failure, waits until recovery replaced a trainer that raised. (A stop of the job ends the wait.)
        `only_at`: the one trainer that computed a microbatch which is not finite; another one that is ready takes over.

        Raises:
            StepFailed: recovery did not act in time.
        """
        deadline = self._clock.monotonic() + DECISION_SECONDS
        while self._clock.monotonic() < deadline:
            if any(m in self._lost for m in raised):
                await self.regroup("recovery replaced a trainer that raised", with_candidates=False)
                return
            if only_at and any(replica != only_at for replica, _ in self._candidates):
                because = f"another trainer computes what is not finite at {only_at}"
                await self.regroup(because, with_candidates=True)  # it copies the state
                self._leave_to_others(ReplicaId(only_at), because)
                await self.regroup(because, with_candidates=False)
                return
            await asyncio.sleep(TICK_SECONDS)
        member, error = next(iter(sorted(raised.items(), key=lambda i: i[0])))
        raise StepFailed(f"step {plan.step}: {member[0]}#{member[1]} raised {type(error).__name__}: {error}")

    async def reset_step(self, step: int) -> None:
        """Every member discards partial gradients of `step`, because its microbatches will change."""
        calls = {m: p.reset_step(step) for m, p in self.members.items()}
        self._note_losses(await self._call_all(calls, grace=GRACE_SECONDS))

    async def manifest(self, policy_version: int) -> tuple[Manifest, list[Holder]] | None:
        """The manifest of a version and the members that hold it; None if no member answered."""
        for member, port in list(self.members.items()):
            try:
                found = await port.manifest(policy_version)
            except (ReplicaExited, DeadlineExceeded, StaleIncarnation) as e:
                logger.warning("%s#%d gave no manifest of version %d: %s", *member, policy_version, e)
                continue
            return found, [self._holders[m] for m in self.members if m in self._holders and m not in self._lost]
        return None

    async def take_snapshot(self, failed: AbstractSet[Member]) -> tuple[Member, int] | None:
        """A member that has copied its state to write it, and the step of that; None if none could. `failed`: to be
        asked last."""
        others = [m for m in reversed(self.members) if m not in failed]
        for member in (*others, *(m for m in self.members if m in failed)):
            try:
                return member, await self.members[member].take_snapshot()
            except Exception as e:  # noqa: BLE001 deliberate: of one trainer, it must not end the controller
                what = f"{type(e).__name__}: {e}"
                logger.warning("%s#%d could not copy its state for a checkpoint: %s", *member, what)
        return None

    async def write_checkpoint(self, writer: Member, step: int) -> WrittenCheckpoint | None:
        """The checkpoint that `writer` wrote of its copy; None if it could not."""
        port = self.members.get(writer)
        try:
            return None if port is None else await port.write_checkpoint(self._folder, step)
        except Exception as e:  # noqa: BLE001 deliberate: whatever a disk does to one trainer must not end the controller
            logger.warning("%s#%d wrote no checkpoint: %s: %s", *writer, type(e).__name__, e)
            return None

    async def remove_surplus(self, writer: Member, found: Sequence[CheckpointInfo]) -> None:
        """Lets `writer` remove those of `found` that are not needed; after a failure the next write does.

        Not a part of the write: when that ends, a later controller may be at work, which needs other checkpoints.
        """
        port = self.members.get(writer)
        try:
            unwanted = surplus(found, self._recorder.in_history, keep=self._keep)
            if port is not None and unwanted:
                await port.remove_checkpoints([info.path for info in unwanted])
        except Exception as e:  # noqa: BLE001 deliberate: as above
            logger.warning("%s#%d removed no checkpoint: %s: %s", *writer, type(e).__name__, e)
