"""Every error that rolecall raises on purpose. Facts are attributes; the message is built from them.

RolecallError
├── InvalidId                an id, role or replica name is malformed
├── ConfigError              a job file is wrong: every problem at once, each `path: reason`
├── JournalError
│   ├── JournalCorrupt       the hash chain or the file is damaged: where, and what was expected
│   ├── JournalUnavailable   the database cannot be used now: server down, disk full, locked too long
│   ├── ConcurrentWrite      another process wrote in between: read again, then decide again
│   └── LeaseFenced          another process holds a newer lease: this one must stop
├── LedgerViolation          a prompt group would be trained twice, or its state transition is illegal
│   └── SamplerMismatch      the sampler's next draw contradicts the ledger: which group, both values
├── BatchNotFilled           dynamic sampling finds too few informative groups: how many, and why
├── StaleIncarnation         a message is addressed to an incarnation or epoch that has ended
├── TokenBufferFull          an engine holds as many requests or tokens as it can: acknowledge, or wait
├── DeadlineExceeded         a wait across processes timed out: what was awaited, how long
├── PeerLost                 a collective failed because a peer is gone
├── CommitVoteRejected       trainers disagree on what to commit: no rank steps the optimizer
├── NonFiniteMicrobatch      one microbatch's loss or gradient is NaN or infinite: another replica computes it again
├── EngineDisagrees          the tokens of one engine alone have other log-probabilities than the trainers compute
├── WrongNumbers             others computed other numbers from the same input: which replica is wrong
├── CorruptTransfer          the weights that a replica sent are not those of their manifest: from and to which replica
├── RewardFailed             the user's reward function raised, took too long, or ended its process
│   └── EnvironmentFailed    an environment did so in the middle of a conversation, or is not deterministic
├── NothingScored            no group could be scored for so long that the run ends: how many, and why
├── NonFiniteValue           a sum of finite gradients is not finite: no rank steps the optimizer
├── ProofMismatch            weights differ from their manifest: which tensor, which part of the proof
├── CheckpointCorrupt        a checkpoint is incomplete or altered: which file
├── CheckpointUnwritable     a checkpoint could not be written: where, and why (disk full, not writable)
├── WireError                a message on the weight port is malformed, too long or not signed
├── NotEnoughNodes           the requested roles do not fit on the nodes: which role lacks what
├── InjectionRefused         fault injection is disabled, or the target is not a process of this job
├── ActuatorError            an action could not be performed
├── InvalidTransition        an event is illegal in the incident's state: with the events that led there
├── UnreadableInput          a recording or dump cannot be read: which file, what is wrong with it
│   └── ReadingStopped       the time or memory for reading was used up: in which file
├── CommandRefused           an operator command cannot be carried out now: why
└── RunNotFound              no such run, or it has ended
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.core.text import counted


class RolecallError(Exception):
    """Base of all errors raised on purpose. Survives pickling (Ray carries it between processes), facts included."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own implementation calls cls(*args), which fails for keyword arguments.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(cls: type[RolecallError], args: tuple[Any, ...], facts: dict[str, Any]) -> RolecallError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


class InvalidId(RolecallError, ValueError):
    def __init__(self, *, what: str, text: str) -> None:
        self.what, self.text = what, text
        if what == "replica":
            wanted = "is not written role/index, as rollout/3"
        else:
            wanted = "is not allowed: write 1 to 63 of a-z, 0-9, '_', '.' and '-', beginning with a letter or digit"
        super().__init__(f"{what}: {text!r} {wanted}")


class ConfigError(RolecallError, ValueError):
    """All problems of one job file or command line. `problems`: `path: reason` lines."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems, self.source = tuple(problems), source
        head = f"{source}: " if source else ""
        several = f"{counted(len(self.problems), 'problem')}\n" + "\n".join(f"  {p}" for p in self.problems)
        super().__init__(head + (self.problems[0] if len(self.problems) == 1 else several))


class JournalError(RolecallError):
    pass


class JournalCorrupt(JournalError):
    def __init__(self, *, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(f"{where}: {reason}")


class JournalUnavailable(JournalError):
    """`hint`: how to fix it."""

    def __init__(self, *, where: str, reason: str, hint: str) -> None:
        self.where, self.reason, self.hint = where, reason, hint
        super().__init__(f"the journal cannot be used now: {where}: {reason} ({hint})")


class LeaseFenced(JournalError):
    def __init__(self, *, lease: str, fence: int, holder: str) -> None:
        self.lease, self.fence, self.holder = lease, fence, holder
        super().__init__(f"lease {lease!r}: fencing number {fence} has been superseded, {holder} holds it now")


class ConcurrentWrite(JournalError):
    """Another process wrote first, so the decision may be outdated: read again and decide again."""

    def __init__(self, *, incident_id: str, event: str, by: str) -> None:
        self.incident_id, self.event, self.by = incident_id, event, by
        super().__init__(f"{incident_id}: {event} was not written, {by} came first")


class LedgerViolation(RolecallError):
    pass


class SamplerMismatch(LedgerViolation):
    def __init__(self, *, group: str, what: str, ledger: str, here: str) -> None:
        self.group, self.what, self.ledger, self.here = group, what, ledger, here
        super().__init__(f"group {group}: the ledger has {what} {ledger}, this sampler draws {here}")


class BatchNotFilled(RolecallError):
    """`by_verdict`: number of groups without a learning signal by kind, e.g. {"all right": 3}."""

    def __init__(self, *, step: int, wanted: int, accepted: int, by_verdict: Mapping[str, int], advice: str) -> None:
        self.step, self.wanted, self.accepted = step, wanted, accepted
        self.by_verdict, self.advice = dict(by_verdict), advice
        others = ", ".join(f"{n} {verdict}" for verdict, n in by_verdict.items())
        super().__init__(
            f"step {step}: {accepted + sum(by_verdict.values())} groups were generated, and only {accepted} of the "
            f"{wanted} "
            f"required are informative; the others were {others}. {advice}"
        )


class StaleIncarnation(RolecallError):
    def __init__(self, *, replica: str, wanted: str, got: str) -> None:
        self.replica, self.wanted, self.got = replica, wanted, got
        super().__init__(f"{replica}: message is meant for {got}, this is {wanted}")


class TokenBufferFull(RolecallError):
    """Nothing of the batch was accepted."""


class DeadlineExceeded(RolecallError, TimeoutError):
    def __init__(self, *, waited_for: str, seconds: float) -> None:
        self.waited_for, self.seconds = waited_for, seconds
        super().__init__(f"timed out after {seconds:.1f} s waiting for {waited_for}")


class PeerLost(RolecallError):
    def __init__(self, *, epoch: int, because: str) -> None:
        self.epoch, self.because = epoch, because
        super().__init__(f"epoch {epoch}: {because}")


class CommitVoteRejected(RolecallError):
    def __init__(self, *, epoch: int, step: int, because: str) -> None:
        self.epoch, self.step, self.because = epoch, step, because
        super().__init__(f"epoch {epoch}, step {step}: commit refused: {because}")


class NonFiniteMicrobatch(RolecallError):
    """Raised by all members of the vote; `replica` computed it."""

    def __init__(self, *, replica: str, step: int, microbatch_id: str, group_ids: Sequence[str]) -> None:
        self.replica, self.step, self.microbatch_id, self.group_ids = replica, step, microbatch_id, tuple(group_ids)
        what = f"loss or gradient of microbatch {microbatch_id} (prompt groups {shown_groups(group_ids)})"
        super().__init__(f"{replica}, step {step}: {what} is not finite")

    @staticmethod
    def parse(message: str) -> tuple[str, str] | None:
        """(microbatch id, its prompt groups, perhaps truncated by the agent) from the message."""
        found = _MICROBATCH.search(message)
        return (found[1], found[2]) if found else None


GROUPS_SHOWN_MAX = 8


def shown_groups(group_ids: Sequence[str]) -> str:
    """The first `GROUPS_SHOWN_MAX`, for a message."""
    return ", ".join(group_ids[:GROUPS_SHOWN_MAX]) + (", ..." if len(group_ids) > GROUPS_SHOWN_MAX else "")


_OTHER_NUMBERS = re.compile(r"(\S+)#(\d+) computed other numbers in ([^:]+): (.*)", re.DOTALL)
_OTHER_BYTES = re.compile(r"(\S+)#(\d+) sent other bytes of version (\d+) than its manifest names: (.*)", re.DOTALL)
_DISAGREES = re.compile(r"(\S+)#(\d+) alone disagrees with the trainers in step (\d+):")
_MICROBATCH = re.compile(r"microbatch (\S+) \(prompt groups ([^)]*)")


class WrongNumbers(RolecallError):
    """Reported, not raised, by a process that compared a replica's results with those of others."""

    def __init__(self, *, replica: str, incarnation: int, unit: str, because: str) -> None:
        """`unit`: the unit of work, without a colon; at most one report per unit counts."""
        self.replica, self.incarnation, self.unit = replica, incarnation, unit
        super().__init__(f"{replica}#{incarnation} computed other numbers in {unit}: {because}")

    @staticmethod
    def parse(message: str) -> tuple[str, int, str, str] | None:
        """(replica, incarnation, unit, reason) from the message."""
        found = _OTHER_NUMBERS.match(message)
        return (found[1], int(found[2]), found[3], found[4]) if found else None


class CorruptTransfer(RolecallError):
    """Reported, not raised, by the replica that pulled; it took the tensor from another holder."""

    def __init__(self, *, replica: str, incarnation: int, version: int, because: str) -> None:
        """`replica`: the holder."""
        self.replica, self.incarnation, self.version = replica, incarnation, version
        super().__init__(
            f"{replica}#{incarnation} sent other bytes of version {version} than its manifest names: {because}"
        )

    @staticmethod
    def parse(message: str) -> tuple[str, int, int, str] | None:
        """(holder, its incarnation, version, reason) from the message."""
        found = _OTHER_BYTES.match(message)
        return (found[1], int(found[2]), int(found[3]), found[4]) if found else None


class EngineDisagrees(RolecallError):
    """Reported, not raised, by the controller after a step."""

    def __init__(
        self, *, replica: str, incarnation: int, step: int, log_ratio: float, others: float, num_others: int
    ) -> None:
        self.replica, self.incarnation, self.step = replica, incarnation, step
        super().__init__(
            f"{replica}#{incarnation} alone disagrees with the trainers in step {step}: log-probabilities by up to "
            f"{log_ratio:.3g}, those of {counted(num_others, 'other engine')} by at most {others:.3g}"
        )

    @staticmethod
    def parse(message: str) -> tuple[str, int, int] | None:
        """(replica, incarnation, step) from the message."""
        found = _DISAGREES.match(message)
        return (found[1], int(found[2]), int(found[3])) if found else None


class RewardFailed(RolecallError):
    """The reward function raised, took too long, or ended its process. `kind`: a word for the ledger, which holds no
    text of the function."""

    who = "reward function"

    def __init__(self, *, kind: str, because: str) -> None:
        self.kind, self.because = kind, because
        super().__init__(f"{self.who}: {because}")


class EnvironmentFailed(RewardFailed):
    """The environment of a conversation failed likewise. `is_alone`: it did so by itself, not with the process that it
    shares with others. `is_final`: it would fail everywhere."""

    who = "environment"

    def __init__(self, *, kind: str, because: str, is_alone: bool = True, is_final: bool = False) -> None:
        self.is_alone, self.is_final = is_alone, is_final
        super().__init__(kind=kind, because=because)


class NothingScored(RolecallError):
    def __init__(self, *, groups: int, last: str) -> None:
        self.groups, self.last = groups, last
        super().__init__(f"{groups} prompt groups in a row could not be scored, the last one: {last}")


class NonFiniteValue(RolecallError):
    def __init__(self, *, replica: str, step: int, what: str) -> None:
        self.replica, self.step, self.what = replica, step, what
        super().__init__(f"{replica}, step {step}: {what} is not finite")


class ProofMismatch(RolecallError):
    def __init__(self, *, replica: str, part: str, tensor: str, reason: str) -> None:
        self.replica, self.part, self.tensor, self.reason = replica, part, tensor, reason
        super().__init__(f"{replica}: proof ({part}) fails at {tensor}: {reason}")


class CheckpointCorrupt(RolecallError):
    def __init__(self, *, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class CheckpointUnwritable(RolecallError):
    def __init__(self, *, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: cannot be written: {reason}")


class WireError(RolecallError):
    pass


class NotEnoughNodes(RolecallError):
    pass


class InjectionRefused(RolecallError):
    pass


class ActuatorError(RolecallError):
    pass


class InvalidTransition(RolecallError):
    """`story`: one line for each of the incident's events so far, oldest first."""

    def __init__(self, *, incident_id: str, state: str, event: str, reason: str, story: Sequence[str]) -> None:
        self.incident_id, self.state, self.event, self.reason = incident_id, state, event, reason
        self.story = tuple(story)
        history = "\n".join(f"  {line}" for line in story) or "  (no earlier event)"
        super().__init__(f"{incident_id}: {event} is illegal in state {state}: {reason}. History:\n{history}")


class UnreadableInput(RolecallError, ValueError):
    """`where`: the file, and the position in it if known."""

    def __init__(self, *, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(f"{where}: {reason}")


class ReadingStopped(UnreadableInput):
    """Reading stopped at a limit of the whole call: `where` was read in part, later files not at all."""


class CommandRefused(RolecallError):
    pass


class RunNotFound(RolecallError):
    pass
