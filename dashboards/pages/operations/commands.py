"""Maps an operator command of the dashboard to `recovery.operators.commands` and returns the result as text.

Authorization happens before (`sign_in.py`), validation in `recovery`.
"""

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
"""Approving and resuming need no reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCommand:
    """A command with its target `on`: a plan digest, node, replica or incident, depending on `what`."""

    what: OperatorCommandKind
    on: str = ""
    because: str = ""
    seconds: float = 0.0

    @property
    def identity(self) -> str:
        return f"{self.what}:{self.on}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCommandResult:
    """The result; `text` may contain untrusted text."""

    ok: bool
    text: str


def perform(place: RunLocation, ask: OperatorCommand, by: str) -> OperatorCommandResult:
    """Executes a command. `by`: the signed-in user."""
    if ask.what not in NEEDS_NO_REASON and not ask.because.strip():
        return OperatorCommandResult(ok=False, text=f"{ask.what}: a reason is required")
    try:
        return OperatorCommandResult(ok=True, text=_execute(place, ask, by))
    except JournalUnavailable as e:
        text = (
            f"{redacted(str(e))}. The command may or may not have been recorded: check the history below before "
            f"you retry."
        )
        return OperatorCommandResult(ok=False, text=text)
    except RolecallError as e:
        return OperatorCommandResult(ok=False, text=redacted(str(e)))


def _execute(place: RunLocation, ask: OperatorCommand, by: str) -> str:
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
    """The equivalent CLI command."""
    on = shlex.quote(ask.on) if ask.on else ""
    at = f" --run {shlex.quote(run)}" if run else ""
    reason = "" if ask.what in NEEDS_NO_REASON else ' --reason "REASON"'
    match ask.what:
        case OperatorCommandKind.HOLD:
            command = f"hold {on} --minutes 10"
        case OperatorCommandKind.REJECT:
            command = f"reject {on}"
        case OperatorCommandKind.REPLACE:
            command = f"replace {on or 'REPLICA'}"
        case OperatorCommandKind.DRAIN | OperatorCommandKind.QUARANTINE | OperatorCommandKind.RETURN:
            command = f"node {ask.what} {on or 'NODE'}"
        case OperatorCommandKind.MARK_RIGHT | OperatorCommandKind.MARK_WRONG:
            command = f"mark {on} --{ask.what}"
        case _:
            command = f"{ask.what} {on}".strip()
    return f"rolecall {command}{reason}{at}"
