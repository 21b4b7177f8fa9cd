"""A button that acts. It says one `OperatorCommand` to the journal with the name of who is signed in at that moment, and never twice.

A click is bound to what was painted: to the plan's digest, and to how often this session has asked the same before, so
that a double click is one word, and a plan that changed meanwhile is refused by its digest. A reload carries no click.
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

_ASKED, _ANSWER = "rolecall.asked", "rolecall.answer"


@st.cache_resource(show_spinner=False)
def _desk(journal_url: str) -> OperationsReader:
    return OperationsReader()


def desk(reader: Reader) -> OperationsReader:
    """The one desk of this process, for this journal."""
    return _desk(reader.settings.journal_url)


def _times(ask: OperatorCommand) -> int:
    counts: dict[str, int] = st.session_state.setdefault(_ASKED, {})
    return counts.get(ask.identity, 0)


def act(reader: Reader, ask: OperatorCommand, painted: int) -> None:
    """What a click does. `painted`: how often the session had asked this when the button was drawn."""
    if _times(ask) != painted:
        return  # the second half of a double click
    st.session_state[_ASKED] = {**st.session_state.get(_ASKED, {}), ask.identity: painted + 1}
    person = current_viewer(reader)
    if not person.may_act:
        st.session_state[_ANSWER] = OperatorCommandResult(ok=False, text=f"nothing was done: {person.because}")
        return
    clicked(reader)
    st.session_state[_ANSWER] = perform(place_of(reader), ask, person.name)
    # What was just written is on the page that is drawn now.
    reader.fresh()
    desk(reader).forget()


def answer() -> None:
    """What came of the newest click."""
    said = st.session_state.get(_ANSWER)
    if not isinstance(said, OperatorCommandResult):
        return
    with st.container(border=True, key="rolecall-answer"):
        if said.ok:
            st.success("Done: it stands in the journal.", icon=":material/check_circle:")
        else:
            st.error("Not done.", icon=":material/cancel:")
        st.text(plain(said.text))
        st.button("Close", key="rolecall.answer.close", on_click=_forget_answer)


def _forget_answer() -> None:
    st.session_state.pop(_ANSWER, None)


def button(
    reader: Reader, person: Viewer, label: str, ask: OperatorCommand, *, why_not: str = "", primary: bool = False
) -> None:
    """One click, one word: for what needs no reason. `why_not`: why it cannot be clicked, whoever looks."""
    times, refused = _times(ask), why_not or person.because
    st.button(
        label,
        key=f"{ask.identity}:{times}",
        on_click=act,
        args=(reader, ask, times),
        disabled=bool(refused),
        help=None if not refused else f"Not now: {plain(refused)}",
        type="primary" if primary else "secondary",
        width="stretch",
    )


def form(
    reader: Reader,
    person: Viewer,
    name: str,
    asks: dict[str, OperatorCommand],
    *,
    seconds: dict[str, float] | None = None,
    confirm: str = "",
) -> None:
    """A form with a reason and a button for each of `asks` (label -> what).

    `seconds`: label -> how long, to choose from. `confirm`: a word that must be typed first.
    """
    times = sum(_times(a) for a in asks.values())
    key = f"form:{name}:{times}"
    with st.form(key, border=False):
        needed = any(a.what not in NEEDS_NO_REASON for a in asks.values())
        st.text_input(
            "Why" if needed else "Why (optional)",
            key=f"{key}:why",
            max_chars=REASON_CHARS_MAX,
            disabled=not person.may_act,
            placeholder="everybody reads it" if person.may_act else "sign in to act",
        )
        if seconds:
            st.selectbox("For", list(seconds), key=f"{key}:for", disabled=not person.may_act)
        if confirm:
            st.text(f"To confirm, type {plain(confirm)}")
            st.text_input("Name, to confirm", key=f"{key}:confirm", disabled=not person.may_act, autocomplete="off")
        with st.container(horizontal=True):
            for label, ask in asks.items():
                st.form_submit_button(
                    label,
                    key=f"{ask.identity}:{times}",
                    on_click=_submitted(reader, key, ask, seconds or {}, confirm),
                    disabled=not person.may_act,
                )


def _submitted(
    reader: Reader, key: str, ask: OperatorCommand, seconds: dict[str, float], confirm: str
) -> Callable[[], None]:
    painted = _times(ask)

    def submit() -> None:
        typed = str(st.session_state.get(f"{key}:confirm", "")).strip()
        if confirm and typed != confirm:
            st.session_state[_ANSWER] = OperatorCommandResult(
                ok=False, text=f"nothing was done: {typed!r} is not {confirm!r}"
            )
            return
        because = str(st.session_state.get(f"{key}:why", ""))
        if ask.what not in NEEDS_NO_REASON and not because.strip():
            # Not counted as asked: the form keeps what was typed.
            st.session_state[_ANSWER] = OperatorCommandResult(
                ok=False, text="nothing was done: give a reason, everybody reads it"
            )
            return
        chosen = seconds.get(str(st.session_state.get(f"{key}:for", "")), 0.0)
        act(reader, replace(ask, because=because, seconds=chosen), painted)

    return submit


def as_commands(reader: Reader, person: Viewer, *asks: OperatorCommand) -> None:
    """For who may not act here: the same on the command line."""
    if not person.may_act:
        run = reader.settings.run
        lines = [command_line(a, run.run_id if run else "") for a in asks]
        st.code("\n".join(lines), language=None, wrap_lines=True)


__all__ = ["OperatorCommandKind", "act", "answer", "as_commands", "button", "desk", "form"]
