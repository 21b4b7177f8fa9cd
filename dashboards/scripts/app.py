"""Entry point for Streamlit: navigation only. `rolecall dashboard` starts it (dashboards/server/serving.py).

It must not be next to `dashboards/pages/`: Streamlit takes a folder `pages` beside the entry point for an older
kind of app, and answers the first visit to a page with "page not found".
"""

import streamlit as st

from rolecall.dashboards.pages.shell import gate

# Script and URL path, title, icon.
PAGES = (
    ("overview", "Overview", ":material/monitor_heart:"),
    ("incidents", "Incidents", ":material/emergency:"),
    ("fleet", "Fleet", ":material/dns:"),
    ("accounting", "Accounting", ":material/receipt_long:"),
    ("operations", "Operations", ":material/terminal:"),
)

# Inline, because Streamlit fetches named icons from the internet.
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='4' fill='%232f5fb3'/%3E%3Cpath d='M2 8h3l2-4 3 8 2-4h2' fill='none' stroke='white' "
    "stroke-width='1.6'/%3E%3C/svg%3E"
)

st.set_page_config(page_title="rolecall", page_icon=ICON, layout="wide", initial_sidebar_state=220)
pages = [st.Page(f"{name}.py", title=title, icon=icon) for name, title, icon in PAGES]
# The links are drawn by hand, because those of `st.navigation` drop the run from the address.
chosen = st.navigation(pages, position="hidden")
if gate(pages):
    chosen.run()
