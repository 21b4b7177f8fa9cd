"""The page `acting`, as Streamlit runs it."""

from rolecall.dashboards.pages.operations.page import show

show()
