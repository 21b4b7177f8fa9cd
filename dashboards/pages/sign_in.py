"""Sign-in form in the sidebar. A session keeps a `SignedInUser`; the token is discarded after verification.

The token is typed into a password field, sent over the page's own connection, and never appears in a URL, cookie, log
or message. A reload is a new session, so a link cannot sign anyone in.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import streamlit as st

from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.users import Authenticator, SignedInUser, SignInRefused

_USER, _ERROR, _TOKEN, _SHOWN = "rolecall.user", "rolecall.user.error", "rolecall.token", "rolecall.shown"
HOW_TO = "rolecall users add NAME --file users.yaml\nrolecall dashboard RUN --users users.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The viewer of the page. `name` is empty for a guest, and `because` then says why controls are disabled."""

    name: str = ""
    because: str = ""

    @property
    def may_act(self) -> bool:
        return bool(self.name)


@st.cache_resource(show_spinner=False)
def _authenticator(path: str) -> Authenticator:
    return Authenticator(Path(path))


def current_viewer(reader: Reader) -> Viewer:
    """The signed-in user; checked again before every command."""
    path = reader.settings.users_path
    if path is None:
        return Viewer(because="the dashboard is read-only: it was started without a users file")
    held = st.session_state.get(_USER)
    if not isinstance(held, SignedInUser):
        return Viewer(because=st.session_state.get(_ERROR) or "sign in (in the sidebar) to use commands")
    rejection = _authenticator(str(path)).rejection(held, reader.now())
    if rejection:
        _leave(rejection)
        return Viewer(because=rejection)
    return Viewer(name=held.name)


def clicked(reader: Reader) -> None:
    """Resets the idle timeout of the signed-in user."""
    held = st.session_state.get(_USER)
    if isinstance(held, SignedInUser) and current_viewer(reader).may_act:
        st.session_state[_USER] = replace(held, seen_at=reader.now())


def follow(reader: Reader) -> Viewer:
    """The signed-in user, for content that refreshes independently; redraws the page if the sidebar shows another
    user.
    """
    found = current_viewer(reader)
    if st.session_state.get(_SHOWN, found.name) != found.name:
        st.session_state[_SHOWN] = found.name
        st.rerun(scope="app")
    return found


def sidebar(reader: Reader) -> None:
    """The sign-in form, or the signed-in user. Called once per page, outside of its refreshing part."""
    path = reader.settings.users_path
    with st.sidebar:
        if path is None:
            st.caption("Read-only: no users are configured.")
            return
        clicked(reader)
        found = current_viewer(reader)
        st.session_state[_SHOWN] = found.name
        if found.may_act:
            st.text(f"Signed in as {found.name}")
            st.button("Sign out", key="rolecall.signout", on_click=_leave, width="stretch")
            return
        with st.form("rolecall.signin", clear_on_submit=True):
            st.text_input("Access token", type="password", key=_TOKEN, autocomplete="off")
            st.form_submit_button("Sign in", on_click=_enter, args=(reader,), width="stretch")
        error = st.session_state.get(_ERROR, "")
        if error:
            st.error("Sign-in failed", icon=":material/lock:")
            st.text(error)


def _enter(reader: Reader) -> None:
    token = str(st.session_state.get(_TOKEN, "")).strip()
    st.session_state[_TOKEN] = ""
    path = reader.settings.users_path
    if path is None or not token:
        return
    result = _authenticator(str(path)).sign_in(token, reader.now())
    if isinstance(result, SignInRefused):
        _leave(result.because)
        return
    st.session_state[_USER] = result
    st.session_state.pop(_ERROR, None)


def _leave(because: str = "") -> None:
    st.session_state.pop(_USER, None)
    st.session_state[_ERROR] = because
