"""Serves the dashboard in this process, until Ctrl-C. Nothing listens beyond loopback unless it was told to."""

from pathlib import Path

from streamlit.web import bootstrap

from rolecall.dashboards import settings

APP = Path(__file__).with_name("app.py")


def serve(what: settings.Settings, *, host: str, port: int) -> None:
    """Blocks. `port` 0: one that is free (printed)."""
    settings.use(what)
    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
    }
    bootstrap.load_config_options(flag_options=options)
    bootstrap.run(str(APP), False, [], options)
