"""The page `fleet`, as Streamlit runs it."""

from rolecall.dashboards.pages.fleet.page import show

show()
