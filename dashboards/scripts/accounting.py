"""The Accounting page; Streamlit runs this file."""

from rolecall.dashboards.pages.accounting.page import show

show()
