"""The page `incidents`, as Streamlit runs it."""

from rolecall.dashboards.incidents_page import show

show()
