"""Signing in, in the sidebar. A session keeps a `SignedInUser`; the token itself is forgotten as soon as it was looked at.

It is typed into a password field of a form, travels over the page's own connection, and goes into no address, cookie, log
or message. A reload is a new session: nobody is signed in by a link.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import streamlit as st

from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.users import Authenticator, SignedInUser, SignInRefused

_PASS, _SAID, _TOKEN, _PAINTED = "rolecall.pass", "rolecall.pass.said", "rolecall.token", "rolecall.painted"
HOW_TO = "rolecall users add NAME --file users.yaml\nrolecall dashboard ... --users users.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Who looks. `name` is empty for a guest, and `because` says then why nothing can be clicked."""

    name: str = ""
    because: str = ""

    @property
    def may_act(self) -> bool:
        return bool(self.name)


@st.cache_resource(show_spinner=False)
def _door(path: str) -> Authenticator:
    return Authenticator(Path(path))


def current_viewer(reader: Reader) -> Viewer:
    """Who is signed in at this moment; asked again before every act."""
    path = reader.settings.users_path
    if path is None:
        return Viewer(because="nobody may act here: the dashboard was started without a people file")
    held = st.session_state.get(_PASS)
    if not isinstance(held, SignedInUser):
        return Viewer(because=st.session_state.get(_SAID) or "sign in (in the sidebar) to act")
    refusal = _door(str(path)).refusal(held, reader.now())
    if refusal:
        _leave(refusal)
        return Viewer(because=refusal)
    return Viewer(name=held.name)


def clicked(reader: Reader) -> None:
    """The person is there: the time without a click begins anew."""
    held = st.session_state.get(_PASS)
    if isinstance(held, SignedInUser) and current_viewer(reader).may_act:
        st.session_state[_PASS] = replace(held, seen_at=reader.now())


def follow(reader: Reader) -> Viewer:
    """Who is signed in, for what is drawn again by itself: the whole page, when the sidebar shows somebody else."""
    found = current_viewer(reader)
    if st.session_state.get(_PAINTED, found.name) != found.name:
        st.session_state[_PAINTED] = found.name
        st.rerun(scope="app")
    return found


def sidebar(reader: Reader) -> None:
    """The form, or who is signed in. Called once by a page, outside of what is drawn again by itself."""
    path = reader.settings.users_path
    with st.sidebar:
        if path is None:
            st.caption("Nobody may act here.")
            return
        clicked(reader)
        found = current_viewer(reader)
        st.session_state[_PAINTED] = found.name
        if found.may_act:
            st.text(f"signed in: {found.name}")
            st.button("Sign out", key="rolecall.out", on_click=_leave, width="stretch")
            return
        with st.form("rolecall.door", clear_on_submit=True):
            st.text_input("Token", type="password", key=_TOKEN, autocomplete="off")
            st.form_submit_button("Sign in", on_click=_enter, args=(reader,), width="stretch")
        said = st.session_state.get(_SAID, "")
        if said:
            st.error("Not signed in", icon=":material/lock:")
            st.text(said)


def _enter(reader: Reader) -> None:
    token = str(st.session_state.get(_TOKEN, "")).strip()
    st.session_state[_TOKEN] = ""
    path = reader.settings.users_path
    if path is None or not token:
        return
    answer = _door(str(path)).enter(token, reader.now())
    if isinstance(answer, SignInRefused):
        _leave(answer.because)
        return
    st.session_state[_PASS] = answer
    st.session_state.pop(_SAID, None)


def _leave(because: str = "") -> None:
    st.session_state.pop(_PASS, None)
    st.session_state[_SAID] = because
