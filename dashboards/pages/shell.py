"""Shared by all pages: the journal reader, run switcher, sign-in gate, heading, tab title, refresh, and error banners.

Untrusted text (names, reasons, log lines) is shown with `st.text`, `st.code`, in tables, or escaped with `text.escape`
in `st.html`; never as Markdown.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import streamlit as st
from altair.utils import schemapi
from streamlit.navigation.page import Page

from rolecall.core.clock import SystemClock
from rolecall.core.errors import JournalError
from rolecall.core.rundir import RunDir, newest_runs
from rolecall.core.text import escape, plain, seconds
from rolecall.dashboards.data.reader import JournalReadError, JournalSnapshot, Reader, Readers
from rolecall.dashboards.data.run_state import START_WATCH, run_state, unwatched_words
from rolecall.dashboards.pages.sign_in import current_viewer, sidebar
from rolecall.dashboards.pages.style import CLOSE_MENU, LOST_TITLE, banner, css
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
    JournalReadError.DAMAGED: "`rolecall audit RUN` verifies the journal and names the first line that does not hold.",
}

RUNS_SECONDS = 10.0
RUNS_MAX = 200
RUN, RUN_KEY, SWITCH_KEY = "run", "rolecall.run", "rolecall.run.switch"

_readers = Readers(SystemClock())


def reader(of: Settings | None = None) -> Reader:
    """The reader of these settings, by default of the served run. It may be closed once no page asks for it: ask again
    at each refresh."""
    return _readers.get(of or current())


@st.cache_resource(ttl=RUNS_SECONDS, show_spinner=False)
def run_ids(root: str) -> list[str]:
    """The runs in a folder, newest first."""
    return newest_runs(Path(root))[:RUNS_MAX]


def _wanted(served: RunDir) -> str:
    """The run that the address or the run switcher names, else the served one."""
    return str(st.query_params.get(RUN) or st.session_state.get(RUN_KEY) or served.run_id)


def _is_run(served: RunDir, wanted: str) -> bool:
    """Whether a run of this name lies beside the served one. `wanted` comes from the address."""
    root = str(served.path.parent)
    return wanted in run_ids(root) or (wanted in os.listdir(root) and (Path(root) / wanted / "run.json").is_file())


def chosen() -> Settings:
    """The served run, or another one of its folder, which the address or the run switcher names."""
    served = current()
    if served.run is None:
        return served
    wanted = _wanted(served.run)
    if wanted == served.run.run_id or not _is_run(served.run, wanted):
        return served
    other = RunDir(served.run.path.parent / wanted)
    return replace(served, journal_url=other.database_url, run=other, name=other.run_id)


def other_runs() -> list[RunDir]:
    """The other runs of the folder, newest first."""
    now = chosen().run
    if now is None:
        return []
    return [RunDir(now.path.parent / name) for name in run_ids(str(now.path.parent)) if name != now.run_id]


def chosen_run() -> dict[str, str]:
    """The parameter of addresses that names the chosen run; empty where there is only one."""
    found = chosen().run
    return {RUN: found.run_id} if found is not None and other_runs() else {}


def _no_such_run() -> bool:
    """Whether the address names a run that is not there; then says so and lists those that are."""
    served, named = current().run, st.query_params.get(RUN)
    if not named or (served is not None and (named == served.run_id or _is_run(served, named))):
        return False
    st.html(css())
    with st.container(horizontal=True):
        st.title("No such run", anchor=False)
    if served is None:
        st.html(banner("bad", f"Run {named} cannot be shown.", "This dashboard shows one journal and no other run."))
        return True
    root = served.path.parent
    st.html(banner("bad", f"No run {named} in {root}.", "This address shows no other run in its place."))
    st.subheader("Runs, newest first")
    st.html(run_links({RUN: name} for name in run_ids(str(root))))
    return True


def run_links(parameters: Iterable[Mapping[str, str]]) -> str:
    """A list of links to this page with other parameters, each called after its run."""
    parts = (f'<li><a href="?{escape(urlencode(p))}">{escape(p[RUN], 100)}</a></li>' for p in parameters)
    return f'<ul class="rc">{"".join(parts)}</ul>'


def _switcher() -> None:
    """Chooses a run in the sidebar, where the folder has more than one."""
    now = chosen().run
    if now is None or not other_runs():
        return
    ids = run_ids(str(now.path.parent))
    ids = ids if now.run_id in ids else [now.run_id, *ids]

    def change() -> None:
        st.session_state[RUN_KEY] = st.session_state[SWITCH_KEY]
        st.query_params.from_dict({RUN: st.session_state[SWITCH_KEY]})

    st.session_state[SWITCH_KEY] = now.run_id
    st.sidebar.selectbox("Run", ids, key=SWITCH_KEY, on_change=change, format_func=lambda name: plain(name, 60))
    st.session_state[RUN_KEY] = now.run_id
    if now != current().run and RUN not in st.query_params:
        st.query_params[RUN] = now.run_id  # so that a reload and a copied address show the same run


def may_read(journal_reader: Reader) -> bool:
    return not journal_reader.settings.sign_in or current_viewer(journal_reader).may_act


def gate(pages: Sequence[Page]) -> bool:
    """Whether the viewer may read and the run exists; otherwise shows why not. Draws the links to the pages."""
    journal_reader = reader(chosen())
    if may_read(journal_reader):
        if _no_such_run():
            return False
        with st.sidebar.container(gap="xxsmall"):
            for link in pages:
                st.page_link(link, query_params=chosen_run(), width="stretch")
        _switcher()
        st.sidebar.html(LOST_TITLE + CLOSE_MENU, unsafe_allow_javascript=True)  # constants
        return True
    st.title("rolecall")
    sidebar(journal_reader)
    st.info("Sign in to continue: use the form in the sidebar.", icon=":material/lock:")
    return False


def page(
    title: str,
    draw: Callable[[Reader, JournalSnapshot], None],
    slow: Callable[[Reader, JournalSnapshot], None] | None = None,
    last: Callable[[Reader, JournalSnapshot], None] | None = None,
) -> None:
    """Draws a page: sidebar, heading, banners (an error, no watch) and the content, refreshed every few seconds.

    `slow`: content that is expensive to draw, below the rest and refreshed less often. `last`: content below that,
    refreshed as the first.
    """
    settings = chosen()
    sidebar(reader(settings))
    st.html(css())
    name = settings.name
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        st.title(title, width="content", anchor=False)
        if name:
            st.text(plain(name, 100))
    ended = reader(settings).latest().run.ended != ""
    every = ENDED_REFRESH_SECONDS if ended else REFRESH_SECONDS

    @st.fragment(run_every=every)
    def live() -> None:
        journal_reader = reader(settings)
        if not may_read(journal_reader):
            st.rerun(scope="app")
        snapshot = journal_reader.latest()
        show_error(snapshot)
        state = run_state(snapshot)
        st.set_page_config(page_title=state.tab_title(name) if snapshot.usable else plain(f"{name} · no journal", 100))
        if snapshot.usable:
            if unwatched := unwatched_words(snapshot):
                because = f"{unwatched.capitalize()}: faults are neither detected nor recovered."
                st.html(banner("bad", "No watch is running.", because, advice=START_WATCH))
            _drawn(journal_reader, snapshot, draw)

    live()
    if slow is not None:

        @st.fragment(run_every=max(every, 4 * REFRESH_SECONDS))
        def draw_slow() -> None:
            journal_reader = reader(settings)
            snapshot = journal_reader.latest()
            if snapshot.usable and may_read(journal_reader):
                _drawn(journal_reader, snapshot, slow)

        draw_slow()
    if last is not None:

        @st.fragment(run_every=every)
        def draw_last() -> None:
            journal_reader = reader(settings)
            snapshot = journal_reader.latest()
            if snapshot.usable and may_read(journal_reader):
                _drawn(journal_reader, snapshot, last)

        draw_last()


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


AXIS_INK = {"light": "#55616f", "dark": "#a3afbb"}
"""Of the numbers and names at an axis: Streamlit's own has a contrast of 3.6:1 on white. As `--soft` in style.py."""


def draw_chart(chart: Any, data: Mapping[str, Sequence[object]] | None = None, key: str | None = None) -> None:
    """A chart as wide as its place. `chart`: of altair, or its specification, whose data is then `data`."""
    spec = dict(chart) if isinstance(chart, Mapping) else chart.to_dict()
    ink = AXIS_INK["dark" if st.context.theme.type == "dark" else "light"]
    config = spec.get("config", {})
    inked = {part: {**config.get(part, {}), "labelColor": ink, "titleColor": ink} for part in ("axis", "legend")}
    st.vega_lite_chart(data, {**spec, "config": {**config, **inked}}, width="stretch", key=key)


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
