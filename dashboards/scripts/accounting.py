"""The page `accounting`, as Streamlit runs it."""

from rolecall.dashboards.pages.accounting.page import show

show()
