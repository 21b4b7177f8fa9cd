"""The page `fleet`, as Streamlit runs it."""

from rolecall.dashboards.fleet_page import show

show()
