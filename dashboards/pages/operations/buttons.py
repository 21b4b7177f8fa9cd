"""Buttons and forms that issue an `OperatorCommand` once, on behalf of the signed-in user.

A click is bound to the displayed state: the plan's digest, and how often this session has issued the same command
before. A double click therefore issues one command, and a plan that changed in the meantime is rejected by its digest.
A reload issues nothing.
"""

from collections.abc import Callable
from dataclasses import replace

import streamlit as st

from rolecall.core.text import plain
from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.pages.operations.commands import (
    NEEDS_NO_REASON,
    OperatorCommand,
    OperatorCommandKind,
    OperatorCommandResult,
    command_line,
    perform,
)
from rolecall.dashboards.pages.operations.state import OperationsReader, place_of
from rolecall.dashboards.pages.sign_in import Viewer, clicked, current_viewer
from rolecall.recovery.operators.run_location import REASON_CHARS_MAX

_ISSUED, _RESULT = "rolecall.issued", "rolecall.result"


@st.cache_resource(show_spinner=False)
def _operations(journal_url: str) -> OperationsReader:
    return OperationsReader()


def operations(reader: Reader) -> OperationsReader:
    """The operations reader of this process for this journal."""
    return _operations(reader.settings.journal_url)


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
        st.session_state[_RESULT] = OperatorCommandResult(ok=False, text=f"Nothing was done: {viewer.because}.")
        return
    clicked(reader)
    st.session_state[_RESULT] = perform(place_of(reader), ask, viewer.name)
    # The redrawn page must show what was just written.
    reader.fresh()
    operations(reader).invalidate()


def show_result() -> None:
    """Shows the result of the latest command."""
    result = st.session_state.get(_RESULT)
    if not isinstance(result, OperatorCommandResult):
        return
    with st.container(border=True, key="rolecall-result"):
        if result.ok:
            st.success("Done: recorded in the journal.", icon=":material/check_circle:")
        else:
            st.error("Not done.", icon=":material/cancel:")
        st.text(plain(result.text))
        st.button("Close", key="rolecall.result.close", on_click=_clear_result)


def _clear_result() -> None:
    st.session_state.pop(_RESULT, None)


def button(
    reader: Reader, viewer: Viewer, label: str, ask: OperatorCommand, *, why_not: str = "", primary: bool = False
) -> None:
    """A button for a command without a reason. `why_not`: why it is disabled for every user."""
    times, refused = _times(ask), why_not or viewer.because
    st.button(
        label,
        key=f"{ask.identity}:{times}",
        on_click=issue,
        args=(reader, ask, times),
        disabled=bool(refused),
        help=None if not refused else f"Disabled: {plain(refused)}",
        type="primary" if primary else "secondary",
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
    with st.form(key, border=False):
        needed = any(a.what not in NEEDS_NO_REASON for a in asks.values())
        st.text_input(
            "Reason" if needed else "Reason (optional)",
            key=f"{key}:why",
            max_chars=REASON_CHARS_MAX,
            disabled=not viewer.may_act,
            placeholder="visible to everyone" if viewer.may_act else "sign in to use commands",
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
            st.session_state[_RESULT] = OperatorCommandResult(
                ok=False, text=f"Nothing was done: {typed!r} is not {confirm!r}."
            )
            return
        because = str(st.session_state.get(f"{key}:why", ""))
        if ask.what not in NEEDS_NO_REASON and not because.strip():
            # Not counted as issued, so the form keeps what was typed.
            st.session_state[_RESULT] = OperatorCommandResult(ok=False, text="Nothing was done: a reason is required.")
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


__all__ = ["OperatorCommandKind", "as_commands", "button", "form", "issue", "operations", "show_result"]
