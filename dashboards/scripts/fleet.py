"""The Fleet page; Streamlit runs this file."""

from rolecall.dashboards.pages.fleet import show

show()
