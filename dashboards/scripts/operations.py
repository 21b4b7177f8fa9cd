"""The Operations page; Streamlit runs this file."""

from rolecall.dashboards.pages.operations.page import show

show()
