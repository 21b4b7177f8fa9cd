"""The page `now`, as Streamlit runs it."""

from rolecall.dashboards.now_page import show

show()
