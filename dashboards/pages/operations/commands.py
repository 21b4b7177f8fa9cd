"""Operator commands of the dashboard: buttons and forms that issue an `OperatorCommand` once, on behalf of the
signed-in user, and its execution through `recovery.operators.commands`, with the result as text.

A click is bound to the displayed state: the plan's digest, and how often this session has issued the same command
before. A double click therefore issues one command, and a plan that changed in the meantime is rejected by its digest.
A reload issues nothing. Authorization is in `sign_in.py`, validation in `recovery`.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import streamlit as st

from rolecall.core.errors import JournalUnavailable, RolecallError
from rolecall.core.journal.database import redacted
from rolecall.core.text import plain
from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.pages.operations.plans import OperationsReader, place_of
from rolecall.dashboards.pages.sign_in import Viewer, clicked, current_viewer
from rolecall.recovery.operators import commands
from rolecall.recovery.operators.run_location import REASON_CHARS_MAX, RunLocation


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
    REVIEW_RIGHT = "right"
    REVIEW_WRONG = "wrong"


NEEDS_NO_REASON = (
    OperatorCommandKind.APPROVE,
    OperatorCommandKind.LIFT,
    OperatorCommandKind.RESUME,
    OperatorCommandKind.REVIEW_RIGHT,
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
    ask = replace(ask, because=ask.because.strip())
    if ask.what not in NEEDS_NO_REASON and not ask.because:
        return OperatorCommandResult(ok=False, text=f"{ask.what}: a reason is required")
    try:
        return OperatorCommandResult(ok=True, text=_EXECUTE[ask.what](place, ask, by))
    except JournalUnavailable as e:
        text = (
            f"{redacted(str(e))}. The command may or may not have been recorded: check the history below before "
            f"you retry."
        )
        return OperatorCommandResult(ok=False, text=text)
    except RolecallError as e:
        return OperatorCommandResult(ok=False, text=redacted(str(e)))


_EXECUTE: Mapping[OperatorCommandKind, Callable[[RunLocation, OperatorCommand, str], str]] = {
    OperatorCommandKind.APPROVE: lambda place, ask, by: commands.approve_plan(place, ask.on, by),
    OperatorCommandKind.HOLD: lambda place, ask, by: commands.hold_plan(place, ask.on, by, ask.because, ask.seconds),
    OperatorCommandKind.LIFT: lambda place, ask, by: commands.lift_hold(place, ask.on, by, ask.because),
    OperatorCommandKind.REJECT: lambda place, ask, by: commands.reject_plan(place, ask.on, by, ask.because),
    OperatorCommandKind.PAUSE: lambda place, ask, by: commands.pause_recovery(place, by, ask.because),
    OperatorCommandKind.RESUME: lambda place, _ask, by: commands.resume_recovery(place, by),
    OperatorCommandKind.REPLACE: lambda place, ask, by: commands.replace(place, ask.on, ask.because, by),
    OperatorCommandKind.DRAIN: lambda place, ask, by: commands.drain(place, ask.on, by, ask.because),
    OperatorCommandKind.QUARANTINE: lambda place, ask, by: commands.quarantine(place, ask.on, by, ask.because),
    OperatorCommandKind.RETURN: lambda place, ask, by: commands.return_node(place, ask.on, by, ask.because),
    OperatorCommandKind.REVIEW_RIGHT: lambda place, ask, by: commands.review_diagnosis(
        place, ask.on, True, by, ask.because
    ),
    OperatorCommandKind.REVIEW_WRONG: lambda place, ask, by: commands.review_diagnosis(
        place, ask.on, False, by, ask.because
    ),
}


def command_line(ask: OperatorCommand, run: str) -> str:
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
        case OperatorCommandKind.REVIEW_RIGHT | OperatorCommandKind.REVIEW_WRONG:
            command = f"review {on} --{ask.what}"
        case _:
            command = f"{ask.what} {on}".strip()
    return f"rolecall {command}{reason}{at}"


_ISSUED, _RESULT = "rolecall.issued", "rolecall.result"


@st.cache_resource(show_spinner=False)
def _operations(journal_url: str) -> OperationsReader:
    return OperationsReader()


def operations(reader: Reader) -> OperationsReader:
    return _operations(reader.settings.journal_url)


def _result_key(reader: Reader) -> str:
    """Of this run: the session may go on to another one."""
    return f"{_RESULT}.{reader.settings.name}"


def _not_done(reader: Reader, why: str) -> None:
    st.session_state[_result_key(reader)] = OperatorCommandResult(ok=False, text=f"Nothing was done: {why}.")


def _times(ask: OperatorCommand) -> int:
    counts: dict[str, int] = st.session_state.setdefault(_ISSUED, {})
    return counts.get(ask.identity, 0)


def issue(reader: Reader, ask: OperatorCommand, displayed: int) -> None:
    """Click handler. `displayed`: how often the session had issued this command when the button was drawn."""
    if _times(ask) != displayed:
        return  # the second half of a double click
    st.session_state[_ISSUED] = {**st.session_state.get(_ISSUED, {}), ask.identity: displayed + 1}
    viewer = current_viewer(reader)
    if not viewer.may_act:
        _not_done(reader, viewer.because)
        return
    clicked(reader)
    st.session_state[_result_key(reader)] = perform(place_of(reader), ask, viewer.name)
    # The redrawn page must show what was just written.
    reader.fresh()
    operations(reader).invalidate()


def show_result(reader: Reader) -> None:
    key = _result_key(reader)
    result = st.session_state.get(key)
    if not isinstance(result, OperatorCommandResult):
        return
    with st.container(border=True, key="rolecall-result"):
        if result.ok:
            st.success("Done: recorded in the journal.", icon=":material/check_circle:")
        else:
            st.error("Not done.", icon=":material/cancel:")
        st.text(plain(result.text))
        st.button("Close", key="rolecall.result.close", on_click=st.session_state.pop, args=(key, None))


def button(reader: Reader, viewer: Viewer, label: str, ask: OperatorCommand) -> None:
    """A button for a command without a reason."""
    times = _times(ask)
    st.button(
        label,
        key=f"{ask.identity}:{times}",
        on_click=issue,
        args=(reader, ask, times),
        disabled=bool(viewer.because),
        help=f"Disabled: {plain(viewer.because)}" if viewer.because else None,
        type="primary",
        width="stretch",
    )


def form(
    reader: Reader,
    viewer: Viewer,
    name: str,
    asks: dict[str, OperatorCommand],
    *,
    seconds: dict[str, float] | None = None,
    confirm: str = "",
) -> None:
    """A form with a reason field and a button for each of `asks` (label -> command).

    `seconds`: label -> duration, to choose from. `confirm`: text that must be typed to confirm.
    """
    times = sum(_times(a) for a in asks.values())
    key = f"form:{name}:{times}"
    # Enter would click the first button, whichever one the reason is for.
    with st.form(key, border=False, enter_to_submit=False):
        needed = any(a.what not in NEEDS_NO_REASON for a in asks.values())
        st.text_input(
            "Reason" if needed else "Reason (optional)",
            key=f"{key}:why",
            max_chars=REASON_CHARS_MAX,
            disabled=not viewer.may_act,
            placeholder="visible to everyone" if viewer.may_act else viewer.because,
        )
        if seconds:
            st.selectbox("For", list(seconds), key=f"{key}:for", disabled=not viewer.may_act)
        if confirm:
            st.text(f"To confirm, type {plain(confirm)}")
            st.text_input("Name, to confirm", key=f"{key}:confirm", disabled=not viewer.may_act, autocomplete="off")
        with st.container(horizontal=True):
            for label, ask in asks.items():
                st.form_submit_button(
                    label,
                    key=f"{ask.identity}:{times}",
                    on_click=_submitted(reader, key, ask, seconds or {}, confirm),
                    disabled=not viewer.may_act,
                )


def _submitted(
    reader: Reader, key: str, ask: OperatorCommand, seconds: dict[str, float], confirm: str
) -> Callable[[], None]:
    displayed = _times(ask)

    def submit() -> None:
        typed = str(st.session_state.get(f"{key}:confirm", "")).strip()
        if confirm and typed != confirm:
            _not_done(reader, f"{typed!r} is not {confirm!r}")
            return
        because = str(st.session_state.get(f"{key}:why", ""))
        if ask.what not in NEEDS_NO_REASON and not because.strip():
            # Not counted as issued, so the form keeps what was typed.
            _not_done(reader, "a reason is required")
            return
        chosen = seconds.get(str(st.session_state.get(f"{key}:for", "")), 0.0)
        issue(reader, replace(ask, because=because, seconds=chosen), displayed)

    return submit


def as_commands(reader: Reader, viewer: Viewer, *asks: OperatorCommand) -> None:
    """Shows the equivalent CLI commands to viewers who are not signed in."""
    if not viewer.may_act:
        run = reader.settings.run
        lines = [command_line(a, run.run_id if run else "") for a in asks]
        st.code("\n".join(lines), language=None, wrap_lines=True)
