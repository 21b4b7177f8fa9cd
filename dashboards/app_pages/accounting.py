"""The page `accounting`, as Streamlit runs it."""

from rolecall.dashboards.accounting_page import show

show()
