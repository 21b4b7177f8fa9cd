"""One click, one call of `recovery.commands`, one sentence back. Nothing here decides whether it may be done."""

import shlex
from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.errors import JournalUnavailable, RolecallError
from rolecall.core.journal.database import redacted
from rolecall.recovery.operators import commands
from rolecall.recovery.operators.run_location import RunLocation


class OperatorCommandKind(StrEnum):
    APPROVE = "approve"
    HOLD = "hold"
    LIFT = "lift"
    REJECT = "reject"
    PAUSE = "pause"
    RESUME = "resume"
    REPLACE = "replace"
    DRAIN = "drain"
    QUARANTINE = "quarantine"
    RETURN = "return"
    MARK_RIGHT = "right"
    MARK_WRONG = "wrong"


NEEDS_NO_REASON = (
    OperatorCommandKind.APPROVE,
    OperatorCommandKind.LIFT,
    OperatorCommandKind.RESUME,
    OperatorCommandKind.MARK_RIGHT,
)
"""Saying yes, or that it may go on, needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCommand:
    """What a person wants. `on`: a plan's digest, a node, a replica or an incident, as `what` needs it."""

    what: OperatorCommandKind
    on: str = ""
    because: str = ""
    seconds: float = 0.0

    @property
    def identity(self) -> str:
        return f"{self.what}:{self.on}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCommandResult:
    """The sentence that came back, foreign words in it."""

    ok: bool
    text: str


def perform(place: RunLocation, ask: OperatorCommand, by: str) -> OperatorCommandResult:
    """Says it to the journal, once. `by`: who is signed in."""
    if ask.what not in NEEDS_NO_REASON and not ask.because.strip():
        return OperatorCommandResult(ok=False, text=f"{ask.what}: give a reason; it is what everybody else will read")
    try:
        return OperatorCommandResult(ok=True, text=_said(place, ask, by))
    except JournalUnavailable as e:
        text = (
            f"{redacted(str(e))}. Whether it was kept is not known: look at the history below before you click again."
        )
        return OperatorCommandResult(ok=False, text=text)
    except RolecallError as e:
        return OperatorCommandResult(ok=False, text=redacted(str(e)))


def _said(place: RunLocation, ask: OperatorCommand, by: str) -> str:
    on, because = ask.on, ask.because.strip()
    match ask.what:
        case OperatorCommandKind.APPROVE:
            return commands.approve_plan(place, on, by)
        case OperatorCommandKind.HOLD:
            return commands.hold_plan(place, on, by, because, ask.seconds)
        case OperatorCommandKind.LIFT:
            return commands.lift_hold(place, on, by, because)
        case OperatorCommandKind.REJECT:
            return commands.reject_plan(place, on, by, because)
        case OperatorCommandKind.PAUSE:
            return commands.pause_recovery(place, by, because)
        case OperatorCommandKind.RESUME:
            return commands.resume_recovery(place, by)
        case OperatorCommandKind.REPLACE:
            return commands.replace(place, on, because, by)
        case OperatorCommandKind.DRAIN:
            return commands.drain(place, on, by, because)
        case OperatorCommandKind.QUARANTINE:
            return commands.quarantine(place, on, by, because)
        case OperatorCommandKind.RETURN:
            return commands.return_node(place, on, by, because)
        case OperatorCommandKind.MARK_RIGHT | OperatorCommandKind.MARK_WRONG:
            return commands.review_diagnosis(place, on, ask.what is OperatorCommandKind.MARK_RIGHT, by, because)


def command_line(ask: OperatorCommand, run: str) -> str:
    """The same for a terminal, for who is not signed in."""
    on = shlex.quote(ask.on) if ask.on else ""
    at = f" --run {shlex.quote(run)}" if run else ""
    reason = "" if ask.what in NEEDS_NO_REASON else ' --reason "WHY"'
    match ask.what:
        case OperatorCommandKind.HOLD:
            said = f"hold {on} --minutes 10"
        case OperatorCommandKind.REJECT:
            said = f"reject {on}"
        case OperatorCommandKind.REPLACE:
            said = f"replace {on or 'REPLICA'}"
        case OperatorCommandKind.DRAIN | OperatorCommandKind.QUARANTINE | OperatorCommandKind.RETURN:
            said = f"node {ask.what} {on or 'NODE'}"
        case OperatorCommandKind.MARK_RIGHT | OperatorCommandKind.MARK_WRONG:
            said = f"mark {on} --{ask.what}"
        case _:
            said = f"{ask.what} {on}".strip()
    return f"rolecall {said}{reason}{at}"
