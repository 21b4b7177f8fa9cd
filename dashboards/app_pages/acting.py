"""The page `acting`, as Streamlit runs it."""

from rolecall.dashboards.acting_page import show

show()
