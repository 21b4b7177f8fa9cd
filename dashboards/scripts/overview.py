"""The page `now`, as Streamlit runs it."""

from rolecall.dashboards.pages.overview.page import show

show()
