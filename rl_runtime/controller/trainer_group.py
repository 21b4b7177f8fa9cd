"""Who trains: the trainers that are there, the epochs that they form, and the state that they all must have.

Losses are noted at once and fenced; the process group follows at the next regroup. A newcomer copies the state of a
member and joins between two steps; where nobody has the newest state any more, the newest checkpoint is taken over.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import DeadlineExceeded, PeerLost, RolecallError
from rolecall.core.ids import split_replica
from rolecall.core.membership import Actual, ReplicaState
from rolecall.rl_runtime.controller.background_tasks import Tasks
from rolecall.rl_runtime.controller.journal_writer import Member, RunRecorder
from rolecall.rl_runtime.protocol.clients import Connect, LoadedCheckpoint, ReplicaExited, TrainerPort
from rolecall.rl_runtime.protocol.membership import MembershipView
from rolecall.rl_runtime.protocol.messages import Holder, TrainerInfo

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
"""How often a wait for several trainers looks whether one of them was fenced meanwhile."""
GRACE_SECONDS = 3.0
"""On top of the process group's own timeout: after a peer failed, the others must have answered within this."""
IDLE_SECONDS = 600.0
"""How long a newcomer's working thread may be busy with an old call before it is asked again."""
GREETINGS_MAX = 4
"""Greetings that fail for a reason of the trainer's own, after which it is given up."""
RETRY_SECONDS = 0.25
COPY_MARGIN_SECONDS = 5.0
START_SECONDS = 60.0
"""How long the first epoch waits for the trainers that are wanted, once one of them is there."""
NO_TRAINER_SECONDS = 600.0
"""How long the run waits for a trainer when it has none: recovery may be waiting for a person's approval."""
REGROUPS_MAX = 12


class NoTrainerLeft(RolecallError):
    """Nobody is left that has the state of the last committed step."""


class StepFailed(RolecallError):
    """A step fails by its own code, or again and again: repeating it will not help."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trainer that answers, with a free working thread, and may join."""

    port: TrainerPort
    info: TrainerInfo


class TrainerGroup:
    """All trainers of a run, and the epoch that they are in."""

    def __init__(
        self, *, books: RunRecorder, connect: Connect, tasks: Tasks, job: JobConfig, clock: Clock, folder: str
    ) -> None:
        """`folder`: where checkpoints are."""
        self._books, self._connect, self._tasks, self._clock = books, connect, tasks, clock
        self._folder, self._keep = folder, job.checkpoint.keep
        self._num_wanted = job.roles.trainer
        self._copy_seconds = job.runtime.transfer_timeout_seconds + COPY_MARGIN_SECONDS
        self._group_seconds = job.runtime.group_timeout_seconds + GRACE_SECONDS
        self._step_seconds = job.detector.first_unit_seconds + self._group_seconds
        self.members: dict[Member, TrainerPort] = {}
        self._holders: dict[Member, Holder] = {}
        self._candidates: dict[Member, Candidate] = {}
        self._greeting: set[Member] = set()
        self._unmet: Counter[Member] = Counter()  # failed greetings of those that are not candidates yet
        self._gone: dict[Member, str] = {}
        self.epoch = 0
        self.committed_step = -1
        """The newest step known to be committed; state older than that is never accepted, except by `recover`."""

    # --- reconciling with the border ----------------------------------------------------------------------------

    def sync(self, fleet: MembershipView) -> None:
        """Notes who is over and greets who is there; called again and again."""
        for member in [*self.members, *self._candidates]:
            because = fleet.lost_because(*member)
            if because is not None and member not in self._gone:
                self._lose(member, because)
        for record in fleet.usable("trainer").values():
            member = (record.replica, record.incarnation)
            known = (*self.members, *self._candidates, *self._greeting, *self._gone)
            if member not in known:
                self._greeting.add(member)
                self._tasks.start(self._greet(record), f"greet {member}")

    async def _greet(self, record: Actual) -> None:
        member = (record.replica, record.incarnation)
        try:
            port = TrainerPort(self._connect(record))
            await port.info()
            await port.idle(IDLE_SECONDS)
            self._candidates[member] = Candidate(port, await port.info())
        except ReplicaExited as e:
            self._lose(member, e.because)
        except DeadlineExceeded as e:
            logger.warning("%s", e)  # the next look at the border greets it again
        except Exception as e:  # noqa: BLE001 deliberate: whatever one trainer raises must not end the controller
            await self._failed_to_greet(member, e)
        else:
            self._unmet.pop(member, None)
        finally:
            self._greeting.discard(member)

    async def _failed_to_greet(self, member: Member, error: Exception) -> None:
        """Counts it; the next look at the border greets it again, until it is given up for it."""
        self._unmet[member] += 1
        because = f"its greeting failed {self._unmet[member]} times, last: {type(error).__name__}: {error}"
        logger.warning("%s#%d: %s", *member, because)
        if self._unmet[member] >= GREETINGS_MAX:
            self._lose(member, because)
        else:
            await asyncio.sleep(RETRY_SECONDS * self._unmet[member])

    def _lose(self, member: Member, because: str) -> None:
        """Contains a loss: fenced at once. A member stays in the running epoch until the next regroup."""
        self._gone[member] = because
        self._candidates.pop(member, None)
        self._books.fence(*member, because)

    def _exclude(self, member: Member, because: str) -> None:
        """It did not answer, but is not known to be dead: out of the epoch; if it comes to itself it may join again."""
        self.members.pop(member, None)
        self._candidates.pop(member, None)
        self._books.set_state(*member, ReplicaState.READY, because)

    # --- waiting for several ------------------------------------------------------------------------------------

    async def _all(self, calls: Mapping[Member, Awaitable[Any]], grace: float) -> dict[Member, Any]:
        """Each one's answer or exception. Who is fenced meanwhile is not waited for, nor who still owes an answer
        `grace` seconds after the first failure: in a collective all fail, so that one is what the others waited for."""
        pending = {member: asyncio.ensure_future(call) for member, call in calls.items()}
        answers: dict[Member, Any] = {}
        failed_at: float | None = None
        try:
            while pending:
                await asyncio.wait(pending.values(), timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                now = self._clock.monotonic()
                for member, task in list(pending.items()):
                    if task.done():
                        answers[member] = task.exception() or task.result()
                    elif member in self._gone:
                        answers[member] = _gone(member, self._gone[member])
                    elif failed_at is not None and now - failed_at > grace:
                        answers[member] = DeadlineExceeded(waited_for=f"{member[0]}#{member[1]}", seconds=grace)
                    else:
                        continue
                    pending.pop(member).cancel()
                    if isinstance(answers[member], BaseException):
                        failed_at = now if failed_at is None else failed_at
        finally:
            for task in pending.values():
                task.cancel()
        return answers

    def _note_losses(self, answers: Mapping[Member, Any]) -> None:
        for member, answer in answers.items():
            if isinstance(answer, ReplicaExited) and member not in self._gone:
                self._lose(member, answer.because)
            elif isinstance(answer, DeadlineExceeded):
                self._exclude(member, str(answer))

    # --- membership ---------------------------------------------------------------------------------------------

    async def found(self) -> None:
        """The first epoch of this controller: among the trainers that have the newest state.

        Raises:
            NoTrainer: none has the state that the ledger speaks of.
            DeadlineExceeded: no trainer came at all.
        """
        await self._wait_for_candidates(self._num_wanted)
        for _ in range(REGROUPS_MAX):
            await self._regroup("the controller begins", with_candidates=True)
            # A step that the controller before had asked for may have ended meanwhile, at some or at all.
            infos = await self._all({m: p.info() for m, p in self.members.items()}, grace=GRACE_SECONDS)
            self._note_losses(infos)
            steps = {i.commit.step if isinstance(i, TrainerInfo) else None for i in infos.values()}
            if len(steps) == 1 and None not in steps:
                self.committed_step = max(s for s in steps if s is not None)
                return
        raise StepFailed(f"trainers did not agree on their state in {REGROUPS_MAX} attempts")

    async def _wait_for_candidates(self, wanted: int) -> None:
        started, first_at = self._clock.monotonic(), None
        while len(self._candidates) < wanted:
            now = self._clock.monotonic()
            if self._candidates and first_at is None:
                first_at = now
            if first_at is not None and now - first_at > START_SECONDS:
                return
            if now - started > NO_TRAINER_SECONDS:
                raise DeadlineExceeded(waited_for="a trainer", seconds=NO_TRAINER_SECONDS)
            await asyncio.sleep(TICK_SECONDS)

    def is_settled(self) -> bool:
        """Whether the epoch's members are all that there are."""
        return not self._candidates and not any(m in self._gone for m in self.members)

    async def settle(self) -> bool:
        """Between two steps: who was lost leaves, who is ready comes in. Whether anything changed.

        Raises:
            NoTrainer: nobody is left.
        """
        if self.is_settled():
            return False
        lost = [f"{m[0]}#{m[1]}: {self._gone[m]}" for m in self.members if m in self._gone]
        joining = [f"{m[0]}#{m[1]} joins" for m in sorted(self._candidates)]
        await self._regroup("; ".join(lost + joining), with_candidates=True)
        return True

    async def _regroup(self, because: str, *, with_candidates: bool) -> None:
        """A new epoch among the members left (and the candidates), all at the newest committed state."""
        for _ in range(REGROUPS_MAX):
            ports = {m: p for m, p in self.members.items() if m not in self._gone}
            if with_candidates:
                ports |= {m: c.port for m, c in self._candidates.items()}
            level = await self._level(ports)
            if await self._join(level, because):
                return
        raise StepFailed(f"no epoch could be formed in {REGROUPS_MAX} attempts: {because}")

    async def _level(self, ports: Mapping[Member, TrainerPort]) -> dict[Member, TrainerPort]:
        """Those that have the newest committed state, after all others copied it from one of them.

        Raises:
            NoTrainer: nobody has it.
        """
        infos = await self._all({m: p.info() for m, p in ports.items()}, grace=GRACE_SECONDS)
        self._note_losses(infos)
        found = {m: i for m, i in infos.items() if isinstance(i, TrainerInfo)}
        # A trainer that was cut off may have committed this step in an epoch that the others left: same microbatches,
        # but added up in another order.
        top = max(((i.commit.step, i.commit.epoch) for i in found.values() if i.has_state), default=(-2, -1))
        if top[0] < self.committed_step or top[0] < -1:
            raise NoTrainerLeft(f"no trainer has the state of step {self.committed_step}")
        self.committed_step = top[0]
        level = {m: i for m, i in found.items() if i.has_state and (i.commit.step, i.commit.epoch) == top}
        self._holders = {m: i.holder for m, i in level.items()}
        behind = {m: i for m, i in found.items() if m not in level}
        holders = list(self._holders.values())
        copies = await self._all(
            {
                m: ports[m].copy_from(holders[n % len(holders)], self._copy_seconds)
                for n, m in enumerate(sorted(behind))
            },
            grace=self._copy_seconds,
        )
        self._note_losses(copies)
        for member, answer in copies.items():
            if answer is None:
                level[member] = behind[member]
                self._holders[member] = behind[member].holder
            elif not isinstance(answer, ReplicaExited | DeadlineExceeded):
                logger.warning("%s#%d could not copy the state: %s", *member, answer)
                self._exclude(member, f"could not copy the state: {answer}")
        return {m: ports[m] for m in sorted(level) if m not in self._gone}

    async def _join(self, ports: Mapping[Member, TrainerPort], because: str) -> bool:
        """Whether all of them are in a new epoch's process group."""
        if not ports:
            return False
        left = [m for m in self._books.members if split_replica(m[0])[0] == "trainer" and m not in ports]
        epoch = self._books.change_members(joined=ports, left=left, because=because, always=True)
        first = next(iter(ports))
        try:
            store = await ports[first].open_store(epoch)
        except (ReplicaExited, DeadlineExceeded) as e:
            self._note_losses({first: e})
            return False
        seconds = self._group_seconds
        calls = {m: p.join(epoch, n, len(ports), store, seconds) for n, (m, p) in enumerate(ports.items())}
        answers = await self._all(calls, grace=seconds)
        self._note_losses(answers)
        self.members = {m: p for m, p in ports.items() if answers[m] is None or isinstance(answers[m], PeerLost)}
        for member, answer in answers.items():
            if answer is not None:
                logger.warning("%s#%d did not join epoch %d: %s", *member, epoch, answer)
        if any(a is not None for a in answers.values()):
            return False
        self.epoch = epoch
        for member in ports:
            self._candidates.pop(member, None)
            self._books.set_state(*member, ReplicaState.SERVING, f"member of epoch {epoch}")
        return True

    async def recover(self) -> LoadedCheckpoint:
        """Nobody has the newest state: the first trainer that comes takes over the newest good checkpoint.

        `committed_step` is then that checkpoint's; what was trained after it must be undone.

        Raises:
            DeadlineExceeded: no trainer came.
        """
        for member in list(self.members):
            if member not in self._gone:
                self._exclude(member, "has not the state of the last committed step")
        self.members = {}
        while True:
            await self._wait_for_candidates(1)
            member, candidate = next(iter(sorted(self._candidates.items())))
            try:
                loaded = await candidate.port.load_checkpoint(self._folder)
                self.committed_step = (await candidate.port.commit_record()).step
                await self._regroup(f"state taken from {loaded.path or 'the beginning'}", with_candidates=True)
                return loaded
            except (ReplicaExited, DeadlineExceeded) as e:
                self._note_losses({member: e})
            except NoTrainerLeft:
                continue


def _gone(member: Member, because: str) -> ReplicaExited:
    return ReplicaExited(replica=member[0], incarnation=member[1], because=because)
