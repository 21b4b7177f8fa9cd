"""The Overview page; Streamlit runs this file."""

from rolecall.dashboards.pages.overview.page import show

show()
