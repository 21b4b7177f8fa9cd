"""One optimizer step after the other, by whoever is left to make it.

A step is asked of all members at once. When one is lost, hangs or fails, the survivors say what they have committed
(the commit record is the truth), form a new epoch (`trainer_group.py`), and share out what is still missing; what they
computed is kept.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolecall.core.errors import (
    CommitVoteRejected,
    DeadlineExceeded,
    NonFiniteValue,
    PeerLost,
    RolecallError,
    StaleIncarnation,
)
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.payloads import ChainHead, StepInterrupted
from rolecall.rl_runtime.algorithms.batching import assign
from rolecall.rl_runtime.controller.journal_writer import Member
from rolecall.rl_runtime.controller.trainer_group import (
    GRACE_SECONDS,
    TICK_SECONDS,
    NoTrainerLeft,
    StepFailed,
    TrainerGroup,
)
from rolecall.rl_runtime.protocol.clients import ReplicaExited
from rolecall.rl_runtime.protocol.messages import CommitRecord, Holder, Manifest, Microbatch, StepResult, TrainerInfo

logger = logging.getLogger(__name__)

DECISION_SECONDS = 60.0
"""How long a step that fails by its own code waits for recovery's decision."""
ATTEMPTS_MAX = 24
"""Attempts at one step, over all causes: more is not a fault of machines."""
CODE_ERRORS_MAX = 2
"""Exceptions of code in one step; a second one is user code (invariant Bounded remediation, docs/invariants.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What an optimizer step consists of, decided once and written in the ledger."""

    step: int
    microbatches: tuple[Microbatch, ...]
    ledger: ChainHead
    resumed: bool = False  # trainers may hold gradients of it already

    @property
    def ids(self) -> list[str]:
        return [m.microbatch_id for m in self.microbatches]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step that is part of the trainers' state. `result` is None when all who could tell more died after it."""

    commit: CommitRecord
    result: StepResult | None
    attempts: int


class Training(TrainerGroup):
    """The steps of a run."""

    # --- a step -------------------------------------------------------------------------------------------------

    async def run_step(self, plan: StepPlan) -> CommittedStep:
        """Repeats the step until it is committed.

        Raises:
            NoTrainer: nobody is left.
            StepFailed: its own code fails, and recovery decided nothing about it.
        """
        code_errors = 0
        for attempt in range(1, ATTEMPTS_MAX + 1):
            answers = await self._attempt(plan, look=plan.resumed or attempt > 1)
            results = [a for a in answers.values() if isinstance(a, StepResult)]
            if len(results) == len(answers):
                return self._agreed(plan, results, attempt)
            await self._interrupted(plan, answers, attempt)
            if self.committed_step >= plan.step:
                return await self._committed_by_record(plan, results, attempt)
            raised = {m: a for m, a in answers.items() if _is_code_error(a)}
            if raised:
                code_errors += 1
                if code_errors >= CODE_ERRORS_MAX or len(raised) == len(answers) > 1:
                    await self._decision(plan, raised)
        raise StepFailed(f"step {plan.step} is not committed after {ATTEMPTS_MAX} attempts")

    async def _attempt(self, plan: StepPlan, *, look: bool) -> dict[Member, Any]:
        """Asks all members at once. `look`: ask first what they have computed of it already."""
        computed: dict[ReplicaId, tuple[str, ...]] = {}
        if look:
            infos = await self._all({m: p.info() for m, p in self.members.items()}, grace=GRACE_SECONDS)
            computed = {m[0]: i.computed for m, i in infos.items() if isinstance(i, TrainerInfo)}
        by_id = {m.microbatch_id: m for m in plan.microbatches}
        names = [replica for replica, _ in self.members]
        shares = assign(plan.ids, computed, names)
        calls = {
            member: port.train_step(
                self.epoch,
                plan.step,
                [by_id[i] for i in shares[member[0]]],
                plan.ids,
                plan.ledger,
                names,
                self._step_seconds,
            )
            for member, port in self.members.items()
        }
        return await self._all(calls, grace=self._group_seconds)

    def _agreed(self, plan: StepPlan, results: list[StepResult], attempts: int) -> CommittedStep:
        digests = {r.commit.gradient_digest for r in results}
        if len(digests) != 1 or any(r.commit.step != plan.step for r in results):
            raise StepFailed(f"step {plan.step}: trainers committed different gradients, although they had voted")
        self.committed_step = plan.step
        return CommittedStep(commit=results[0].commit, result=results[0], attempts=attempts)

    async def _committed_by_record(self, plan: StepPlan, results: list[StepResult], attempts: int) -> CommittedStep:
        """The step was committed, though not all could say so."""
        if results:
            return CommittedStep(commit=results[0].commit, result=results[0], attempts=attempts)
        commit, result = await self.newest_commit()
        return CommittedStep(commit=commit, result=result, attempts=attempts)

    async def newest_commit(self) -> tuple[CommitRecord, StepResult | None]:
        """The commit record of the members, and what one of them still knows of that step.

        Raises:
            NoTrainer: nobody could say.
        """
        for member, port in list(self.members.items()):
            try:
                commit, result = await port.commit_record(), await port.last_result()
            except (ReplicaExited, DeadlineExceeded) as e:
                self._note_losses({member: e})
                continue
            return commit, result if result is not None and result.commit.step == commit.step else None
        raise NoTrainerLeft(f"no trainer can say what it committed, step {self.committed_step} or later")

    async def _interrupted(self, plan: StepPlan, answers: Mapping[Member, Any], attempt: int) -> None:
        """Contains the failure of an attempt: who is lost leaves, the others form the next epoch."""
        failures = {m: a for m, a in answers.items() if isinstance(a, BaseException)}
        root = {m: a for m, a in failures.items() if not isinstance(a, PeerLost)} or failures
        because = "; ".join(f"{m[0]}#{m[1]}: {type(a).__name__}: {a}" for m, a in sorted(root.items()))
        interrupted = StepInterrupted(
            step=plan.step,
            epoch=self.epoch,
            because=because,
            lost=tuple(m[0] for m, a in sorted(answers.items()) if isinstance(a, ReplicaExited | DeadlineExceeded)),
            attempt=attempt,
        )
        self._books.event(interrupted)
        self._note_losses(answers)
        if any(isinstance(a, CommitVoteRejected) for a in failures.values()):
            await self.reset_step(plan.step)
        await self._regroup(because, with_candidates=False)

    async def _decision(self, plan: StepPlan, raised: Mapping[Member, BaseException]) -> None:
        """Code fails: waits until recovery replaced one of those in which it did. (A stop of the job ends the wait.)

        Raises:
            StepFailed: nothing was decided in time.
        """
        deadline = self._clock.monotonic() + DECISION_SECONDS
        while self._clock.monotonic() < deadline:
            if any(m in self._gone for m in raised):
                await self._regroup("recovery replaced who raised", with_candidates=False)
                return
            await asyncio.sleep(TICK_SECONDS)
        member, error = next(iter(sorted(raised.items(), key=lambda i: i[0])))
        raise StepFailed(f"step {plan.step}: {member[0]}#{member[1]} raised {type(error).__name__}: {error}")

    async def reset_step(self, step: int) -> None:
        """Partial gradients of `step` are thrown away everywhere: its microbatches will be others."""
        answers = await self._all({m: p.reset_step(step) for m, p in self.members.items()}, grace=GRACE_SECONDS)
        self._note_losses(answers)

    # --- after a step -------------------------------------------------------------------------------------------

    async def manifest(self, policy_version: int) -> tuple[Manifest, list[Holder]] | None:
        """What a version consists of and who has it; None when nobody could say just now."""
        for member, port in list(self.members.items()):
            try:
                found = await port.manifest(policy_version)
            except (ReplicaExited, DeadlineExceeded, StaleIncarnation) as e:
                logger.warning("%s#%d gave no manifest of version %d: %s", *member, policy_version, e)
                continue
            return found, [self._holders[m] for m in self.members if m in self._holders and m not in self._gone]
        return None

    async def checkpoint(self) -> str | None:
        """Has one member write a checkpoint; None when nobody could."""
        for member, port in reversed(list(self.members.items())):
            try:
                return await port.save_checkpoint(self._folder, self._keep)
            except (ReplicaExited, DeadlineExceeded, OSError) as e:
                logger.warning("%s#%d wrote no checkpoint: %s", *member, e)
        return None


def _is_code_error(answer: Any) -> bool:
    """An exception of what was computed, not of machines or messages. A vote that is refused counts, too."""
    if isinstance(answer, NonFiniteValue | CommitVoteRejected):
        return True
    return isinstance(answer, Exception) and not isinstance(answer, RolecallError)
