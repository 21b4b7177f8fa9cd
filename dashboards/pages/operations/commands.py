"""One click, one call of `recovery.commands`, one sentence back. Nothing here decides whether it may be done."""

import shlex
from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.errors import JournalUnavailable, RolecallError
from rolecall.core.journal.database import redacted
from rolecall.recovery.operators import commands
from rolecall.recovery.operators.run_location import Place


class What(StrEnum):
    APPROVE = "approve"
    HOLD = "hold"
    LIFT = "lift"
    VETO = "veto"
    PAUSE = "pause"
    RESUME = "resume"
    REPLACE = "replace"
    DRAIN = "drain"
    QUARANTINE = "quarantine"
    RETURN = "return"
    MARK_RIGHT = "right"
    MARK_WRONG = "wrong"


NEEDS_NO_REASON = (What.APPROVE, What.LIFT, What.RESUME, What.MARK_RIGHT)
"""Saying yes, or that it may go on, needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a person wants. `on`: a plan's digest, a node, a replica or an incident, as `what` needs it."""

    what: What
    on: str = ""
    because: str = ""
    seconds: float = 0.0

    @property
    def identity(self) -> str:
        return f"{self.what}:{self.on}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The sentence that came back, foreign words in it."""

    ok: bool
    text: str


def perform(place: Place, ask: Ask, by: str) -> Answer:
    """Says it to the journal, once. `by`: who is signed in."""
    if ask.what not in NEEDS_NO_REASON and not ask.because.strip():
        return Answer(ok=False, text=f"{ask.what}: give a reason; it is what everybody else will read")
    try:
        return Answer(ok=True, text=_said(place, ask, by))
    except JournalUnavailable as e:
        text = (
            f"{redacted(str(e))}. Whether it was kept is not known: look at the history below before you click again."
        )
        return Answer(ok=False, text=text)
    except RolecallError as e:
        return Answer(ok=False, text=redacted(str(e)))


def _said(place: Place, ask: Ask, by: str) -> str:
    on, because = ask.on, ask.because.strip()
    match ask.what:
        case What.APPROVE:
            return commands.approve(place, on, by)
        case What.HOLD:
            return commands.hold(place, on, by, because, ask.seconds)
        case What.LIFT:
            return commands.lift(place, on, by, because)
        case What.VETO:
            return commands.reject(place, on, by, because)
        case What.PAUSE:
            return commands.pause(place, by, because)
        case What.RESUME:
            return commands.resume(place, by)
        case What.REPLACE:
            return commands.replace(place, on, because, by)
        case What.DRAIN:
            return commands.drain(place, on, by, because)
        case What.QUARANTINE:
            return commands.quarantine(place, on, by, because)
        case What.RETURN:
            return commands.return_node(place, on, by, because)
        case What.MARK_RIGHT | What.MARK_WRONG:
            return commands.mark(place, on, ask.what is What.MARK_RIGHT, by, because)


def command_line(ask: Ask, run: str) -> str:
    """The same for a terminal, for who is not signed in."""
    on = shlex.quote(ask.on) if ask.on else ""
    at = f" --run {shlex.quote(run)}" if run else ""
    reason = "" if ask.what in NEEDS_NO_REASON else ' --reason "WHY"'
    match ask.what:
        case What.HOLD:
            said = f"hold {on} --minutes 10"
        case What.VETO:
            said = f"reject {on}"
        case What.REPLACE:
            said = f"replace {on or 'REPLICA'}"
        case What.DRAIN | What.QUARANTINE | What.RETURN:
            said = f"node {ask.what} {on or 'NODE'}"
        case What.MARK_RIGHT | What.MARK_WRONG:
            said = f"mark {on} --{ask.what}"
        case _:
            said = f"{ask.what} {on}".strip()
    return f"rolecall {said}{reason}{at}"
