"""Shared by all pages: the journal reader, run switcher, sign-in gate, heading, tab title, refresh, and error banners.

Untrusted text (names, reasons, log lines) is shown with `st.text`, `st.code`, in tables, or escaped with `text.escape`
in `st.html`; never as Markdown.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st
from altair.utils import schemapi

from rolecall.core.clock import SystemClock
from rolecall.core.errors import JournalError
from rolecall.core.rundir import RunDir
from rolecall.core.text import plain, seconds
from rolecall.dashboards.data.reader import JournalReadError, JournalSnapshot, Reader
from rolecall.dashboards.data.run_state import run_state
from rolecall.dashboards.pages.sign_in import current_viewer, sidebar
from rolecall.dashboards.pages.style import banner, css
from rolecall.dashboards.settings import Settings, current

logger = logging.getLogger(__name__)
schemapi.disable_debug_mode()  # a chart is validated when it is drawn; each part of it too would take twice as long

REFRESH_SECONDS = 2.0
"""Refresh interval of the live part of a page."""
ENDED_REFRESH_SECONDS = 15.0
"""The same for a run that has ended: only reviews and notes change."""
STALE_SECONDS = 5.0
"""A snapshot older than this shows its age."""

MESSAGES = {
    JournalReadError.EMPTY: "The journal is empty.",
    JournalReadError.MISSING: "The journal was not found.",
    JournalReadError.UNREACHABLE: "The journal is not responding.",
    JournalReadError.OLD: "The journal was written by another version of rolecall.",
    JournalReadError.DAMAGED: "The journal is damaged.",
}
ADVICE = {
    JournalReadError.EMPTY: "Start a run with `rolecall run JOB.yaml` or `rolecall demo`. This page updates "
    "automatically.",
    JournalReadError.MISSING: "Pass a run (`rolecall dashboard RUN`) or a journal (`--journal URL`). This page "
    "updates automatically when it appears.",
    JournalReadError.UNREACHABLE: "Check that its server is running and that no other process holds a lock on the "
    "file. This page updates automatically when it responds again.",
    JournalReadError.OLD: "Use the version of rolecall that wrote it.",
    JournalReadError.DAMAGED: "`rolecall audit RUN` lists the damaged lines and what is still usable.",
}

READERS_MAX = 4
"""Runs that are followed at once; the one looked at longest ago is closed."""
RUNS_SECONDS = 10.0
RUNS_MAX = 200
RUN, RUN_KEY, SWITCH_KEY = "run", "rolecall.run", "rolecall.run.switch"

_lock = threading.Lock()
_readers: dict[Settings, Reader] = {}


def reader(of: Settings | None = None) -> Reader:
    """The reader of these settings, by default of the served run."""
    settings = of or current()
    with _lock:
        found = _readers.pop(settings, None) or Reader(settings, SystemClock())
        _readers[settings] = found  # the newest is last
        while len(_readers) > READERS_MAX:
            _readers.pop(next(iter(_readers))).close()
        return found


@st.cache_resource(ttl=RUNS_SECONDS, show_spinner=False)
def run_ids(root: str) -> list[str]:
    """The runs in a folder, newest first."""
    found = [(p.stat().st_mtime, p.parent.name) for p in Path(root).glob("*/run.json")]
    return [name for _, name in sorted(found, reverse=True)[:RUNS_MAX]]


def chosen() -> Settings:
    """The served run, or another one of its folder, which the address or the run switcher names."""
    served = current()
    if served.run is None:
        return served
    wanted = st.query_params.get(RUN) or st.session_state.get(RUN_KEY) or served.run.run_id
    if wanted == served.run.run_id or wanted not in run_ids(str(served.run.path.parent)):
        return served
    other = RunDir(served.run.path.parent / wanted)
    return replace(served, journal_url=other.database_url, run=other, name=other.run_id)


def chosen_run() -> dict[str, str]:
    """The parameter of addresses that names the chosen run; empty for the served one."""
    found = chosen()
    return {RUN: found.run.run_id} if found.run is not None and found != current() else {}


def _switcher() -> None:
    """Chooses a run in the sidebar, where the folder has more than one."""
    served, now = current().run, chosen().run
    if served is None or now is None:
        return
    ids = run_ids(str(served.path.parent))
    if len(ids) < 2 or now.run_id not in ids:
        return

    def change() -> None:
        st.session_state[RUN_KEY] = st.session_state[SWITCH_KEY]
        st.query_params.from_dict({RUN: st.session_state[SWITCH_KEY]})

    st.session_state[SWITCH_KEY] = now.run_id
    st.sidebar.selectbox("Run", ids, key=SWITCH_KEY, on_change=change, format_func=lambda name: plain(name, 60))
    st.session_state[RUN_KEY] = now.run_id


def may_read(journal_reader: Reader) -> bool:
    return not journal_reader.settings.sign_in or current_viewer(journal_reader).may_act


def gate() -> bool:
    """Whether the viewer may read; otherwise shows the sign-in form only."""
    journal_reader = reader(chosen())
    if may_read(journal_reader):
        _switcher()
        return True
    st.title("rolecall")
    sidebar(journal_reader)
    st.info("Sign in to continue: use the form in the sidebar.", icon=":material/lock:")
    return False


def page(
    title: str,
    draw: Callable[[Reader, JournalSnapshot], None],
    slow: Callable[[Reader, JournalSnapshot], None] | None = None,
) -> None:
    """Draws a page: sidebar, heading, error banner if any, and the content, refreshed every few seconds.

    `slow`: content that is expensive to draw, below the rest and refreshed less often.
    """
    journal_reader = reader(chosen())
    sidebar(journal_reader)
    st.html(css())
    name = journal_reader.settings.name
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        st.title(title, width="content", anchor=False)
        if name:
            st.text(plain(name, 100))
    ended = journal_reader.latest().run.ended != ""
    every = ENDED_REFRESH_SECONDS if ended else REFRESH_SECONDS

    @st.fragment(run_every=every)
    def live() -> None:
        if not may_read(journal_reader):
            st.rerun(scope="app")
        snapshot = journal_reader.latest()
        show_error(snapshot)
        state = run_state(snapshot)
        st.set_page_config(page_title=state.tab_title(name) if snapshot.usable else plain(f"{name} · no journal", 100))
        if snapshot.usable:
            _drawn(journal_reader, snapshot, draw)

    live()
    if slow is not None:

        @st.fragment(run_every=max(every, 4 * REFRESH_SECONDS))
        def draw_slow() -> None:
            snapshot = journal_reader.latest()
            if snapshot.usable and may_read(journal_reader):
                _drawn(journal_reader, snapshot, slow)

        draw_slow()


def _drawn(journal_reader: Reader, snapshot: JournalSnapshot, draw: Callable[[Reader, JournalSnapshot], None]) -> None:
    try:
        draw(journal_reader, snapshot)
    except JournalError as e:
        # The snapshot was read; the database failed when the page read more from it.
        kind = JournalReadError.UNREACHABLE
        st.html(banner("warn", MESSAGES[kind], str(e), advice=ADVICE[kind]))


def data_table(columns: Mapping[str, Sequence[object]], **options: Any) -> None:
    """A table as wide as the page. `columns`: heading -> values; `options`: of `st.dataframe`."""
    st.dataframe(columns, hide_index=True, width="stretch", **options)


def show_error(snapshot: JournalSnapshot) -> None:
    """Why the journal cannot be read and what to do about it; reading progress of a long journal."""
    if snapshot.error is not JournalReadError.NONE:
        old = ""
        if snapshot.read_at is not None and snapshot.at - snapshot.read_at > STALE_SECONDS:
            old = f"The data shown is {seconds(snapshot.at - snapshot.read_at)} old."
        message, advice = MESSAGES[snapshot.error], ADVICE[snapshot.error]
        st.html(banner("warn", message, snapshot.because, *snapshot.damaged[:5], old, advice=advice))
    if not snapshot.history.whole:
        done = f"{snapshot.history.percent} % of {snapshot.history.of:,} events read; the newest are already shown."
        st.html(banner("note", "Loading history.", done))
