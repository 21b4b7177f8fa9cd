"""What a served dashboard looks at. Kept in the memory of the serving process: a journal's URL may hold a password, which
belongs into no command line, no environment and no page.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rolecall.core.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One dashboard shows one run."""

    journal_url: str = field(repr=False)
    run: RunDir | None = None
    """The run's directory where it is on this machine: injections and evidence files are there."""
    prometheus_url: str = ""
    prometheus_authorization: str = field(default="", repr=False)
    users_path: Path | None = None
    """Who may act, and with which token (`users.py`); None: nobody."""
    sign_in: bool = False
    """Who is not signed in sees nothing: others than this machine's users can reach it."""
    name: str = ""
    """Of the run, as pages show it."""


_current: list[Settings] = []


def use(settings: Settings) -> None:
    """From here on this process serves `settings`."""
    _current[:] = [settings]


def current() -> Settings:
    """What this process serves."""
    if not _current:
        raise RuntimeError("the dashboard is started with `rolecall dashboard`")
    return _current[0]
