"""The controller's writes: ledger lines, journal events, replica states and epochs, each only while it is the current
incarnation.

The sampler's state is a fold of the ledger's lines, and advances with each line written here. Before every write the
membership records are checked for a newer incarnation of the controller; the older one stops with
`ControllerSuperseded` and writes nothing more. Lines of one decision go in one transaction. All writes are idempotent:
events of a step have keys, ledger lines are left out when the group has them already.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rolecall.core.errors import StaleIncarnation
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.events import Event
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import FILTERED, GroupState, Ledger, LedgerLine
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.run import AdmissionProof, ChainHead, ReplicaLost, WeightsAdmitted, WeightsRejected
from rolecall.core.membership import ReplicaState
from rolecall.rl_runtime.algorithms.sampler import TAKEN, GroupSignal, SamplerState, no_origin
from rolecall.rl_runtime.protocol.membership import GONE, Member, MembershipView, members_after
from rolecall.rl_runtime.protocol.messages import CommitRecord, WeightProof
from rolecall.rl_runtime.tasks.task import group_number

Judged = tuple[GroupId, int, GroupSignal]
"""(group, number of tokens, verdict of dynamic sampling)."""
OPEN_STATES = (
    GroupState.ISSUED,
    GroupState.ACCEPTED,
    GroupState.RETURNED,
    GroupState.UNDONE,
    GroupState.ASSIGNED,
)


class ControllerSuperseded(StaleIncarnation):
    """A newer incarnation of the controller is desired or running: this one stops writing."""


class RunRecorder:
    """Journal and ledger, written as one incarnation of the controller."""

    def __init__(
        self,
        journal: Journal,
        ledger: Ledger,
        replica: ReplicaId,
        incarnation: int,
        *,
        job_seed: int = 0,
        origin: Callable[[int], str] = no_origin,
    ) -> None:
        """`origin`: what the ledger says of a prompt beside its seed (`Task.origin`)."""
        self.journal, self.ledger = journal, ledger
        self.replica, self.incarnation = replica, incarnation
        self.sampler = SamplerState(job_seed, origin=origin)
        last = journal.epoch()
        self.epoch = last.number if last else 0
        self.members = last.members if last else ()

    def fleet(self) -> MembershipView:
        """The current desired and actual records."""
        return MembershipView(self.journal.desired(), self.journal.actual())

    def check(self, fleet: MembershipView | None = None) -> MembershipView:
        """The membership records, if this is still the current controller.

        Raises:
            ControllerSuperseded: a newer incarnation has taken over.
        """
        fleet = fleet or self.fleet()
        wanted = fleet.desired.get(self.replica)
        newest = max((i for r, i in fleet.actual if r == self.replica), default=self.incarnation)
        newest = max(newest, wanted.incarnation if wanted else self.incarnation)
        if newest > self.incarnation:
            raise ControllerSuperseded(replica=self.replica, wanted=f"#{newest}", got=f"#{self.incarnation}")
        return fleet

    def event(self, payload: Payload, key: str | None = None) -> Event:
        self.check()
        return self.journal.append(payload, key=key)

    def set_state(
        self, replica: ReplicaId, incarnation: int, state: ReplicaState, because: str, policy_version: int = -1
    ) -> bool:
        """Writes a replica's state, but not its process; False if it was fenced in the meantime."""
        self.check()
        version = {"policy_version": policy_version} if policy_version >= 0 else {}
        values = {"state": str(state), "because": because, **version}
        return self.journal.change_actual(replica, incarnation, unless=GONE, **values)

    def fence(self, replica: ReplicaId, incarnation: int, because: str) -> bool:
        """Marks an incarnation LOST, once; False if it was gone already."""
        record = self.fleet().actual.get((replica, incarnation))
        if record is None or not self.set_state(replica, incarnation, ReplicaState.LOST, because):
            return False
        lost = ReplicaLost(replica=replica, incarnation=incarnation, node=record.node, because=because)
        self.event(lost, key=f"lost:{replica}#{incarnation}")
        return True

    def change_members(
        self, *, joined: Iterable[Member] = (), left: Iterable[Member] = (), because: str, always: bool = False
    ) -> int:
        """The epoch after a membership change; unchanged without one, unless `always` forces a new epoch."""
        members = members_after(self.members, joined=joined, left=left)
        if members != self.members or always:
            self.check()
            grown = self.journal.grow_epoch(members, because)
            self.epoch, self.members = grown.number, grown.members
        return self.epoch

    def _write(self, lines: Sequence[LedgerLine]) -> ChainHead:
        self.check()
        head = self.ledger.write(lines)
        self.sampler.advance_by(lines)
        return head

    def resume_sampler(self) -> None:
        """Folds the lines of earlier controllers.

        Raises:
            SamplerMismatch: this controller would continue differently.
        """
        self.sampler = SamplerState.of(self.ledger.lines(), self.sampler.job_seed, self.sampler.origin)

    def issued(self, group_ids: Iterable[GroupId]) -> None:
        self._write(
            [
                LedgerLine(group_id=g, state=GroupState.ISSUED, reason=self.sampler.seed_line(group_number(g)))
                for g in group_ids
            ]
        )

    def judged(self, step: int, accepted: Iterable[Judged], filtered: Iterable[Judged]) -> None:
        """Writes verdicts of dynamic sampling made while `step` was formed, except those written earlier."""
        lines = [_accepted(step, j) for j in accepted if j[0] not in self.sampler.accepted]
        lines += [_filtered(step, j) for j in filtered]
        if lines:
            self._write(lines)

    def assigned(
        self,
        step: int,
        groups: Iterable[tuple[GroupId, int]],
        *,
        taken: Iterable[Judged] = (),
        filtered: Iterable[Judged] = (),
    ) -> ChainHead:
        """Writes the (group, number of tokens) pairs of a step. Returns the ledger head for the commit record.

        `taken`: those that fill the batch without a learning signal. `filtered`: other groups, no longer needed. A
        group that is already accepted has its line; its tokens were lost and the regenerated ones have no signal.
        """
        lines = [_filtered(step, j) for j in filtered]
        lines += [_accepted(step, j, reason=f"{TAKEN}{j[2]}") for j in taken if j[0] not in self.sampler.accepted]
        lines += [LedgerLine(group_id=g, state=GroupState.ASSIGNED, step=step, num_tokens=n) for g, n in groups]
        return self._write(lines)

    def returned(self, step: int, group_ids: Iterable[GroupId], reason: str) -> None:
        lines = [LedgerLine(group_id=g, state=GroupState.RETURNED, step=step, reason=reason) for g in group_ids]
        self._write(lines)

    def dropped(self, groups: Iterable[tuple[GroupId, int]], reason: str) -> None:
        """Writes the (group, number of tokens) pairs of groups that will not be trained."""
        lines = [LedgerLine(group_id=g, state=GroupState.DROPPED, num_tokens=n, reason=reason) for g, n in groups]
        if lines:
            self._write(lines)

    def trained(self, commit: CommitRecord, num_tokens: Mapping[GroupId, int]) -> list[GroupId]:
        """Writes exactly the groups of a commit record. Returns those not written before."""
        # Queries only this step's groups: querying all trained groups would get slower with every step.
        known = self.ledger.groups([GroupState.TRAINED], among=commit.group_ids)
        fresh = [g for g in commit.group_ids if g not in known]
        lines = [
            LedgerLine(group_id=g, state=GroupState.TRAINED, step=commit.step, num_tokens=num_tokens.get(g, 0))
            for g in fresh
        ]
        if lines:
            self._write(lines)
        return fresh

    def in_history(self, commit: CommitRecord, *, or_assigned: bool = False) -> bool:
        """Whether the ledger has the commit's step as trained and not undone. `or_assigned`: or is waiting for it."""
        states = {GroupState.TRAINED, GroupState.ASSIGNED} if or_assigned else {GroupState.TRAINED}
        return self.ledger.includes(commit.step, commit.group_ids, commit.ledger, states)

    def undone_after(self, step: int, reason: str) -> list[GroupId]:
        """Returns to an older checkpoint: reopens groups trained later."""
        self.check()
        undone = self.ledger.undo_after(step, reason)
        self.sampler.advance_by(LedgerLine(group_id=g, state=GroupState.UNDONE, step=step) for g in undone)
        return undone

    def admitted(self, proof: WeightProof) -> None:
        admitted = WeightsAdmitted(
            replica=proof.replica,
            incarnation=proof.incarnation,
            epoch=proof.epoch,
            policy_version=proof.policy_version,
            holder=proof.holder,
            bytes=proof.bytes_received,
            seconds=round(proof.seconds, 4),
            proof=AdmissionProof(
                manifest_digest=proof.manifest_digest,
                received_digest=proof.received_digest,
                storage_digest=proof.storage_digest,
                covered=proof.covered,
                uncovered=proof.uncovered,
                canary_logprobs=proof.canary_logprobs,
            ),
        )
        self.event(admitted)

    def refused(self, replica: ReplicaId, incarnation: int, version: int, part: str, tensor: str, because: str) -> None:
        rejected = WeightsRejected(
            replica=replica,
            incarnation=incarnation,
            policy_version=version,
            part=part,
            tensor=tensor,
            because=because,
        )
        self.event(rejected)


def _accepted(step: int, judged: Judged, *, reason: str = "") -> LedgerLine:
    group, num_tokens, _ = judged
    return LedgerLine(group_id=group, state=GroupState.ACCEPTED, step=step, num_tokens=num_tokens, reason=reason)


def _filtered(step: int, judged: Judged) -> LedgerLine:
    group, num_tokens, verdict = judged
    reason = f"{FILTERED}{verdict}"
    return LedgerLine(group_id=group, state=GroupState.DROPPED, step=step, num_tokens=num_tokens, reason=reason)
