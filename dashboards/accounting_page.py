"""The page `Accounting`."""

import streamlit as st

from rolecall.dashboards.reading import Look, Reader
from rolecall.dashboards.shell import page


def show() -> None:
    page("Accounting", _draw)


def _draw(_reader: Reader, look: Look) -> None:
    st.text(f"step {look.snapshot.step}")
