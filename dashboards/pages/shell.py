"""What every page shares: the reader, the heading, and the page that is shown in place of one that cannot be.

Foreign text (names, reasons, log lines) goes through `st.text` or `st.code`, into tables, or through `text.escape` into
`st.html`: never into Markdown.
"""

import logging
import threading
from collections.abc import Callable

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.errors import JournalError
from rolecall.core.text import plain, seconds
from rolecall.dashboards.data.reader import JournalReadError, JournalSnapshot, Reader
from rolecall.dashboards.pages.sign_in import current_viewer, sidebar
from rolecall.dashboards.pages.style import banner, css
from rolecall.dashboards.settings import Settings, current

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0
"""How often what is live on a page is drawn again."""
ENDED_REFRESH_SECONDS = 15.0
"""The same for a run that is over: little comes then, a mark or a note."""
STALE_SECONDS = 5.0
"""A look older than this says how old it is."""

WORDS = {
    JournalReadError.EMPTY: "The journal is empty.",
    JournalReadError.MISSING: "There is no journal.",
    JournalReadError.AWAY: "The journal does not answer.",
    JournalReadError.OLD: "The journal is of another version of rolecall.",
    JournalReadError.DAMAGED: "The journal is damaged.",
}
ADVICE = {
    JournalReadError.EMPTY: "It fills when the run starts: `rolecall run JOB.yaml` or `rolecall demo`. This page goes on by itself.",
    JournalReadError.MISSING: "Name a run (`rolecall dashboard RUN`) or a journal (`--journal URL`). Should it come, this page "
    "goes on by itself.",
    JournalReadError.AWAY: "Is its server running, and does no other process hold the file locked? "
    "This page goes on by itself when it answers again.",
    JournalReadError.OLD: "Use the version of rolecall that wrote it.",
    JournalReadError.DAMAGED: "`rolecall audit RUN` says which lines are damaged, and what can still be used of the run.",
}

_lock = threading.Lock()
_readers: dict[Settings, Reader] = {}


def reader() -> Reader:
    """The one reader of this process."""
    settings = current()
    with _lock:
        found = _readers.get(settings)
        if found is None:
            for other in _readers.values():
                other.close()
            _readers.clear()
            found = _readers[settings] = Reader(settings, SystemClock())
        return found


def may_read(r: Reader) -> bool:
    """Whether who looks may see anything."""
    return not r.settings.sign_in or current_viewer(r).may_act


def gate() -> bool:
    """Lets in who may read; everybody else gets the form to sign in, and nothing else."""
    r = reader()
    if may_read(r):
        return True
    st.title("rolecall")
    sidebar(r)
    st.info("Sign in to read: the form stands in the sidebar.", icon=":material/lock:")
    return False


def page(
    title: str,
    draw: Callable[[Reader, JournalSnapshot], None],
    slow: Callable[[Reader, JournalSnapshot], None] | None = None,
) -> None:
    """Draws a page: heading, trouble if there is any, and below it what is known, again every few seconds.

    `slow`: what costs more to draw, below the rest and less often.
    """
    r = reader()
    st.html(css())
    st.title(title)
    if r.settings.name:
        st.text(plain(r.settings.name, 100))
    ended = r.look().snapshot.ended != ""
    every = ENDED_REFRESH_SECONDS if ended else REFRESH_SECONDS

    @st.fragment(run_every=every)
    def live() -> None:
        if not may_read(r):
            st.rerun(scope="app")
        look = r.look()
        show_trouble(look)
        if look.usable:
            _drawn(r, look, draw)

    live()
    if slow is not None:

        @st.fragment(run_every=max(every, 4 * REFRESH_SECONDS))
        def seldom() -> None:
            look = r.look()
            if look.usable and may_read(r):
                _drawn(r, look, slow)

        seldom()


def _drawn(r: Reader, look: JournalSnapshot, draw: Callable[[Reader, JournalSnapshot], None]) -> None:
    try:
        draw(r, look)
    except JournalError as e:
        # The look was fine; the database went away while the page asked it for more.
        st.html(banner("warn", "The journal does not answer.", str(e), advice=ADVICE[JournalReadError.AWAY]))


def show_trouble(look: JournalSnapshot) -> None:
    """The journal's trouble in a sentence, and what to do about it; how much is read of one that is long."""
    if look.trouble is not JournalReadError.NONE:
        old = ""
        if look.read_at is not None and look.at - look.read_at > STALE_SECONDS:
            old = f"What is shown is {seconds(look.at - look.read_at)} old."
        st.html(banner("warn", WORDS[look.trouble], look.because, *look.damaged[:5], old, advice=ADVICE[look.trouble]))
    if not look.history.whole:
        done = f"{look.history.percent} % of {look.history.of:,} lines are read; what is newest is here already."
        st.html(banner("note", "The history is being read.", done))
