"""Pages as Streamlit runs them: one line each, the work is in the modules above."""
