"""The page `incidents`, as Streamlit runs it."""

from rolecall.dashboards.pages.incidents.list_page import show

show()
