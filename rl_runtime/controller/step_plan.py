"""The controller's next action: step formation and containment. Pure: takes snapshots and the time, returns decisions
with their reason; `controller.py` and its components perform them and ask again.

Step formation. `next_step` picks the loop's next action; `form_step` picks a step's groups or the reason to wait;
`place_groups` and `reassign` map groups to engines; `work_of_hybrids` says whether hybrids generate or train.
Containment. `membership_changes` compares with the journal's records; `late_or_lost` ends the wait for trainers that
will not answer; `contain_attempt` and `choose_state` decide how a failed step continues, and from whose state.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from rolecall.core.config.job import RunMode
from rolecall.core.errors import CommitVoteRejected, DeadlineExceeded, NonFiniteMicrobatch, PeerLost, RolecallError
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.membership import Actual, ReplicaState, is_standby
from rolecall.rl_runtime.controller.trajectories import EngineKey
from rolecall.rl_runtime.protocol.clients import ReplicaExited, is_code_error
from rolecall.rl_runtime.protocol.membership import Desireds, Member, MembershipView
from rolecall.rl_runtime.protocol.messages import (
    CommitRecord,
    ComputedMicrobatch,
    Holder,
    Microbatch,
    StepResult,
    TrainerInfo,
    UnusualMicrobatches,
)

PATIENCE_SECONDS = 2.0
"""How long a full step waits for groups that would otherwise become too old."""
SWITCH_SHARES: Mapping[RunMode, float] = MappingProxyType({"sync": 1.0, "semi_sync": 0.5})
"""Share of a step's groups that must be ready before the hybrids' engines sleep (RobustRL, arXiv 2512.22492)."""
CODE_ERRORS_MAX = 2
"""Exceptions of code in one step; the second one counts as user code (docs/invariants.md, Bounded remediation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Content of an optimizer step, decided once and written to the ledger."""

    step: int
    microbatches: tuple[Microbatch, ...]
    ledger: ChainHead
    resumed: bool = False  # trainers may already hold its gradients

    @property
    def ids(self) -> list[str]:
        return [m.microbatch_id for m in self.microbatches]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step that is part of the trainers' state. `result` is None when every trainer with it died."""

    commit: CommitRecord
    result: StepResult | None
    attempts: int


class HybridWork(StrEnum):
    """What the hybrids, which are a trainer and an engine each, do at the moment."""

    GENERATE = "generate"  # their engines work, the trainers wait
    TRAIN = "train"  # their engines sleep


@dataclass(slots=True)
class LoopState:
    """Progress of the loop. Times are seconds of the controller's monotonic clock.

    The controller owns it and is the only one to assign its fields; its components read them. State that must survive
    the controller is in the journal and the ledger.
    """

    num_steps: int
    step: int = 0
    """The step being formed or trained; its policy version has the same number."""
    hold: bool = False
    """The flag `hold` is set: steps beyond `num_steps` are wanted."""
    stop_because: str = ""
    """Why the run is to stop; empty while it continues."""
    issuing: bool = False
    """Groups may be issued, and filtered by dynamic sampling."""
    plan: StepPlan | None = None
    """The step that is in the ledger and not committed yet."""
    published: bool = False
    """The rollouts were offered the newest policy version."""
    publish_failed: bool = False
    """The last attempt found no trainer that could name the holders of the newest version."""
    step_ended: bool = False
    """No checkpoint has been considered since the last step."""
    evaluating: bool = False
    """The newest policy version, if it is the last one, is still to be evaluated."""
    full_since: float | None = None
    """Time since which there are enough groups for the step being formed."""
    hybrid_work: HybridWork = HybridWork.GENERATE
    """Of the hybrids, in the modes that have them."""

    @property
    def wants_more(self) -> bool:
        return self.step < self.num_steps or self.hold


class LoopAction(StrEnum):
    FINISH = "finish"
    REGROUP = "regroup"  # trainers left or are ready to join: form a new epoch
    SLEEP = "sleep"  # send the hybrids' engines to sleep
    PUBLISH = "publish"  # offer the newest policy version to the rollouts
    CHECKPOINT = "checkpoint"  # copy the state if a checkpoint is due
    TRAIN = "train"  # run the planned step
    FORM = "form"  # choose the groups of the next step
    EVALUATE = "evaluate"  # wait for the evaluation of the last policy version


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    action: LoopAction
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerChanges:
    """Lost members of the epoch, each with the reason, and trainers that are ready to join."""

    lost: Mapping[Member, str] = field(default_factory=dict)
    joining: Sequence[Member] = ()

    @property
    def because(self) -> str:
        lost = [f"{replica}#{incarnation}: {why}" for (replica, incarnation), why in self.lost.items()]
        return "; ".join([*lost, *(f"{replica}#{incarnation} joins" for replica, incarnation in self.joining)])


def work_of_hybrids(
    loop: LoopState, *, mode: RunMode, num_ready: int, groups_per_step: int, others_serve: bool
) -> HybridWork:
    """What the hybrids are to do. Depends on nothing but the present: a loss during a step needs no case of its own.

    `num_ready`: groups that the step being formed can take. `others_serve`: an engine works that is no hybrid's.
    Without one the hybrids generate until the step is formed, because nobody else would finish its groups.
    """
    share = SWITCH_SHARES.get(mode)
    if share is None:
        return HybridWork.GENERATE
    enough = others_serve and num_ready >= share * groups_per_step
    return HybridWork.TRAIN if loop.plan is not None or enough else HybridWork.GENERATE


def next_step(loop: LoopState, trainers: TrainerChanges, awake: Collection[EngineKey] = ()) -> LoopDecision:
    """The loop's next action. Membership comes before weights, and weights before the next step. `awake`: engines of
    hybrids that do not sleep, if they should."""
    if loop.stop_because:
        return LoopDecision(action=LoopAction.FINISH, because=loop.stop_because)
    if loop.plan is None and not loop.wants_more and not loop.evaluating:
        return LoopDecision(action=LoopAction.FINISH, because=f"{loop.step} steps")
    if trainers.lost or trainers.joining:
        return LoopDecision(action=LoopAction.REGROUP, because=trainers.because)
    if awake:
        names = ", ".join(f"{replica}#{incarnation}" for replica, incarnation in sorted(awake))
        return LoopDecision(action=LoopAction.SLEEP, because=f"the hybrids train: {names} must sleep")
    # A planned step needs no rollouts. If no trainer answers, the attempt to train identifies the lost ones.
    if not loop.published and not (loop.publish_failed and loop.plan is not None):
        return LoopDecision(action=LoopAction.PUBLISH, because=f"policy version {loop.step} has not been offered")
    # After a regroup: if the trainer that copies its state is lost now, one that has just joined has it, too.
    if loop.step_ended:
        return LoopDecision(action=LoopAction.CHECKPOINT, because=f"step {loop.step - 1} has ended")
    if loop.plan is not None:
        return LoopDecision(action=LoopAction.TRAIN, because=f"step {loop.plan.step} is assigned and not committed")
    if not loop.wants_more:
        return LoopDecision(action=LoopAction.EVALUATE, because=f"policy version {loop.step} is being evaluated")
    return LoopDecision(action=LoopAction.FORM, because=f"step {loop.step} has no groups yet")


def missing_replicas(desired: Desireds, current: Mapping[ReplicaId, Actual]) -> list[ReplicaId]:
    """Desired replicas, except standbys and those that have lent their nodes, that are not ready."""
    ready = {r for r, record in current.items() if record.state in (ReplicaState.READY, ReplicaState.SERVING)}
    return [r for r, wanted in desired.items() if not is_standby(r) and not wanted.lent and r not in ready]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """The groups that the next steps can take."""

    step: int
    groups_per_step: int
    staleness_max: int
    ready: Sequence[GroupId]  # in the order in which a step takes them
    set_aside: Sequence[GroupId] = ()  # filtered by dynamic sampling, reserved to fill a batch
    at_refill_limit: bool = False  # no more groups may be filtered for this step
    newest_versions: Mapping[GroupId, int] = field(default_factory=dict)
    """Version of the newest token of each group that a step may still take, without groups of late engines."""
    full_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormStep:
    groups: Sequence[GroupId]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    because: str
    full_since: float | None = None


def form_step(batch: BatchSnapshot, now: float) -> FormStep | Wait:
    """The groups of the next step, or why it is not formed yet."""
    wanted = batch.groups_per_step
    missing = wanted - len(batch.ready)
    if batch.at_refill_limit and len(batch.set_aside) >= missing:
        groups = [*batch.ready, *batch.set_aside[:missing]]
        return FormStep(groups=groups, because=f"the refill limit is reached: {missing} filtered groups fill the batch")
    if missing > 0:
        return Wait(because=f"{len(batch.ready)} of {wanted} groups are ready")
    full_since = now if batch.full_since is None else batch.full_since
    chosen = batch.ready[:wanted]
    overdue = _overdue_group(batch, chosen)
    if overdue is None:
        return FormStep(groups=chosen, because=f"{wanted} groups are ready")
    if now - full_since >= PATIENCE_SECONDS:
        return FormStep(groups=chosen, because=f"waited {PATIENCE_SECONDS:g} s for {overdue}")
    return Wait(because=f"{overdue} is not ready and would become too old", full_since=full_since)


def _overdue_group(batch: BatchSnapshot, chosen: Sequence[GroupId]) -> GroupId | None:
    """An unfinished group that cannot be trained in time if the next step has only `chosen`."""
    taken, ready = set(chosen), set(batch.ready)
    left = {g: v for g, v in batch.newest_versions.items() if g not in taken}
    for later in range(batch.staleness_max + 1):
        # These must be trained by step `step + later`; the next one comes in the following step at the earliest.
        due = [g for g, version in left.items() if version + batch.staleness_max <= batch.step + later]
        unready = [g for g in due if g not in ready]
        if len(due) > later * batch.groups_per_step and unready:
            return unready[0]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An engine's capacity for new work."""

    key: EngineKey
    version: int  # policy version that it has proven
    may_serve: bool  # proven, alive, and answering
    num_requests: int
    is_due: bool = False  # about to have the newest version
    is_behind: bool = False  # answers, and may still load the newest version in time


def least_loaded(engines: Iterable[EngineLoad]) -> EngineLoad | None:
    """Engine for the next group: fewest unfinished requests, then newest weights, then by name.

    Only serving engines count: a dead one has no load and would get everything.
    """
    able = [e for e in engines if e.may_serve]
    return min(able, key=lambda e: (e.num_requests, -e.version, e.key), default=None)


def staleness_if_issued(step: int, groups_ahead: int, groups_per_step: int, engine_version: int) -> int:
    """Versions between a group's first token and its step, if everything ahead of it is trained first.

    `step`: the one being formed or trained; its policy version has the same number.
    """
    return step + groups_ahead // groups_per_step - engine_version


def place_groups(
    loop: LoopState,
    groups: Iterator[GroupId],
    loads: Iterable[EngineLoad],
    *,
    ahead: int,
    groups_per_step: int,
    group_size: int,
    staleness_max: int,
    together: bool = False,
) -> list[tuple[GroupId, EngineKey]]:
    """As many of `groups` as can be trained within `staleness_max` after `ahead`, each with its engine. `together`:
    none before all engines have the newest version."""
    by_key = {e.key: e for e in loads}
    if together and any(e.is_behind for e in by_key.values()):
        return []
    placed: list[tuple[GroupId, EngineKey]] = []
    while loop.hold or loop.step + ahead // groups_per_step < loop.num_steps:
        in_time = [
            e
            for e in by_key.values()
            if staleness_if_issued(loop.step, ahead, groups_per_step, e.version) <= staleness_max
        ]
        engine = least_loaded(in_time)
        due = least_loaded(e for e in by_key.values() if e.is_due)
        # Engines are updated one after the other: the first with a version must not get all the work.
        if engine is None or (due is not None and due.num_requests < engine.num_requests):
            break
        placed.append((next(groups), engine.key))
        by_key[engine.key] = replace(engine, num_requests=engine.num_requests + group_size)
        ahead += 1
    return placed


def reassign(unassigned: Mapping[GroupId, int], loads: Iterable[EngineLoad]) -> list[tuple[GroupId, EngineKey]]:
    """An engine for each group, given its number of unassigned requests; empty while no engine may serve."""
    by_key = {e.key: e for e in loads}
    placed: list[tuple[GroupId, EngineKey]] = []
    for group, num_requests in unassigned.items():
        engine = least_loaded(by_key.values())
        if engine is None:
            break
        placed.append((group, engine.key))
        by_key[engine.key] = replace(engine, num_requests=engine.num_requests + num_requests)
    return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChanges:
    """Differences between one role's replicas and the records. `replaced`: by recovery, but still alive."""

    lost: Mapping[Member, str]
    replaced: Mapping[Member, str]
    joining: Sequence[Actual]


def membership_changes(
    fleet: MembershipView, role: str, *, active: Iterable[Member], known: Collection[Member] = ()
) -> MembershipChanges:
    """`active`: incarnations that have work. `known`: others that already completed the handshake."""
    lost: dict[Member, str] = {}
    replaced: dict[Member, str] = {}
    active = list(active)
    for member in active:
        because = fleet.lost_because(*member)
        if because is not None:
            (replaced if fleet.is_replaced_alive(*member) else lost)[member] = because
    usable = fleet.usable(role).values()
    joining = [r for r in usable if (m := (r.replica, r.incarnation)) not in active and m not in known]
    return MembershipChanges(lost=lost, replaced=replaced, joining=joining)


@dataclass(slots=True, kw_only=True)
class StepProgress:
    """How the members' work on an attempt at a step grows, as each one says of itself. Times are seconds of the
    controller's monotonic clock."""

    started_at: float
    unit_seconds: float
    """How long one microbatch may take."""
    grown_at: dict[Member, float] = field(default_factory=dict)
    """When a member's number of computed microbatches was last seen to grow."""
    working_at: dict[Member, float] = field(default_factory=dict)
    """When a member last answered while its work grew as it should."""
    _num_computed: dict[Member, int] = field(default_factory=dict)

    def add(self, member: Member, num_computed: int, now: float) -> None:
        if self._num_computed.get(member) != num_computed:
            self._num_computed[member], self.grown_at[member] = num_computed, now
        if now - self.grown_at[member] <= self.unit_seconds:
            self.working_at[member] = now

    def stands_still(self, now: float, seconds: float) -> bool:
        """Whether no member's work has grown for longer than that. One that waits for the others has none left."""
        return now - max(self.grown_at.values(), default=self.started_at) > seconds


def late_or_lost(
    pending: Iterable[Member],
    lost: Mapping[Member, str],
    *,
    failed_at: float | None,
    now: float,
    grace_seconds: float,
    working_at: Mapping[Member, float] = MappingProxyType({}),
) -> dict[Member, RolecallError]:
    """Members whose answer is no longer awaited, each with the reason.

    A member is missing once it was fenced, and late `grace_seconds` after the first failure among the others: a
    collective fails at all members together, so the others were waiting for the silent one. One that still computes
    has not come to the collective: it is late only that long after it was last seen at work (`working_at`).
    """
    found: dict[Member, RolecallError] = {}
    for replica, incarnation in pending:
        member = replica, incarnation
        if member in lost:
            found[member] = ReplicaExited(replica=replica, incarnation=incarnation, because=lost[member])
        elif failed_at is not None and now - max(failed_at, working_at.get(member, failed_at)) > grace_seconds:
            found[member] = DeadlineExceeded(waited_for=f"{replica}#{incarnation}", seconds=grace_seconds)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """How a failed attempt at a step is contained."""

    because: str
    lost: tuple[ReplicaId, ...]
    """Trainers that exited or did not answer in time."""
    resets_gradients: bool
    """The trainers rejected the vote: their gradients of the step are discarded."""
    raised: Mapping[Member, BaseException]
    """Exceptions of the step's own code."""
    awaits_recovery: bool
    """The code fails again, or in all members: repeating the step does not help until recovery has acted."""
    not_finite: NonFiniteMicrobatch | None = None
    """A microbatch that is not finite at one member. Again after another one computed it: the data or the code."""
    unusual: tuple[ComputedMicrobatch, ...] = ()
    """Microbatches of one member that are outside the learned band: another one computes them again."""


def contain_attempt(
    answers: Mapping[Member, Any], *, code_errors: int, not_finite: Collection[str] = ()
) -> Interruption:
    """`answers`: each member's result or exception. `code_errors`: earlier attempts at this step that failed by
    code. `not_finite`: microbatches that were not finite in earlier attempts at this step.
    """
    failures = {m: a for m, a in answers.items() if isinstance(a, BaseException)}
    root = {m: a for m, a in failures.items() if not isinstance(a, PeerLost)} or failures
    # The members compute the same: a rejected vote is an exception of the code, too.
    raised = {m: a for m, a in failures.items() if isinstance(a, CommitVoteRejected) or is_code_error(a)}
    bad = next((a for _, a in sorted(failures.items()) if isinstance(a, NonFiniteMicrobatch)), None)
    again = bad is not None and bad.microbatch_id in not_finite
    if bad is not None and again:
        raised |= {m: bad for m in answers if m[0] == bad.replica}
    return Interruption(
        because="; ".join(f"{m[0]}#{m[1]}: {type(a).__name__}: {a}" for m, a in sorted(root.items())),
        lost=tuple(m[0] for m, a in sorted(answers.items()) if isinstance(a, ReplicaExited | DeadlineExceeded)),
        resets_gradients=any(isinstance(a, CommitVoteRejected) for a in failures.values()),
        raised=raised,
        awaits_recovery=again
        or (bool(raised) and (code_errors + 1 >= CODE_ERRORS_MAX or len(raised) == len(answers) > 1)),
        not_finite=bad,
        unusual=next((a.microbatches for a in failures.values() if isinstance(a, UnusualMicrobatches)), ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChoice:
    """The newest committed state, the members that have it, and the holder from which each other member copies it."""

    step: int
    holders: Mapping[Member, Holder]
    copies: Mapping[Member, Holder]


def choose_state(
    infos: Mapping[Member, TrainerInfo], committed_step: int, undone: AbstractSet[Member] = frozenset()
) -> StateChoice | None:
    """The state that a new epoch starts from; None when no trainer has the state of `committed_step` or a later one.
    `undone`: trainers whose last step was undone while they were cut off."""
    # A trainer that was cut off may have committed this step in an epoch that the others left: the same microbatches,
    # but summed in another order.
    states = {m: (i.commit.step, i.commit.epoch) for m, i in infos.items() if i.has_state and m not in undone}
    newest = max(states.values(), default=(-2, -1))
    if newest[0] < max(committed_step, -1):
        return None
    holders = {m: infos[m].holder for m, state in states.items() if state == newest}
    givers = list(holders.values())
    behind = sorted(m for m in infos if m not in holders)
    return StateChoice(
        step=newest[0],
        holders=holders,
        copies={m: givers[n % len(givers)] for n, m in enumerate(behind)},
    )
