"""The dashboard as Streamlit runs it: navigation, and nothing else. `rolecall dashboard` starts it (serving.py)."""

import streamlit as st

PAGES = (
    ("now", "Now", ":material/monitor_heart:"),
    ("incidents", "Incidents", ":material/emergency:"),
    ("fleet", "Fleet", ":material/dns:"),
    ("accounting", "Accounting", ":material/receipt_long:"),
    ("acting", "Acting", ":material/front_hand:"),
)
"""File below app_pages/ and address, title, icon."""

st.set_page_config(page_title="rolecall", page_icon=":material/health_and_safety:", layout="wide")
st.navigation([st.Page(f"app_pages/{name}.py", title=title, icon=icon) for name, title, icon in PAGES]).run()
