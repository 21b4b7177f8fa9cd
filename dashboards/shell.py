"""What every page shares: the reader, the heading, and the page that is shown in place of one that cannot be.

Foreign text (names, reasons, log lines) goes through `st.text` or `st.code`, or into tables: never into Markdown.
"""

from collections.abc import Callable

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.dashboards.reading import Look, Reader, Trouble
from rolecall.dashboards.settings import Settings, current

REFRESH_SECONDS = 2.0
"""How often what is live on a page is drawn again."""

ADVICE = {
    Trouble.EMPTY: "It fills when the run starts: `rolecall run JOB.yaml` or `rolecall demo`.",
    Trouble.MISSING: "Name a run (`rolecall dashboard RUN`) or a journal (`--journal URL`).",
    Trouble.AWAY: "The page goes on by itself when the database answers again.",
    Trouble.OLD: "Use the version of rolecall that wrote it.",
    Trouble.DAMAGED: "`rolecall audit RUN` says which lines are damaged.",
}


@st.cache_resource(show_spinner=False)
def _reader(_settings: Settings, name: str) -> Reader:
    return Reader(_settings, SystemClock())


def reader() -> Reader:
    """The one reader of this process."""
    settings = current()
    return _reader(settings, settings.journal_url)


def page(title: str, draw: Callable[[Reader, Look], None]) -> None:
    """Draws a page: heading, trouble if there is any, and below it what is known, again every few seconds."""
    st.title(title)

    @st.fragment(run_every=REFRESH_SECONDS)
    def live() -> None:
        r = reader()
        look = r.look()
        if look.trouble is not Trouble.NONE:
            st.warning(f"The journal is {look.trouble.value}.", icon=":material/report:")
            st.text(look.because)
            st.markdown(ADVICE[look.trouble])
        if look.trouble in (Trouble.NONE, Trouble.AWAY, Trouble.DAMAGED):
            draw(r, look)

    live()
