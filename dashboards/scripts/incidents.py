"""The Incidents page; Streamlit runs this file."""

from rolecall.dashboards.pages.incidents.page import show

show()
