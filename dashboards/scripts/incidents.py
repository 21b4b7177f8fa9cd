"""The Incidents page; Streamlit runs this file."""

from rolecall.dashboards.pages.incidents.list_page import show

show()
