"""Settings of a served dashboard. They stay in the memory of the serving process, because a journal's URL may contain a
password, which must not appear on a command line, in the environment or on a page.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rolecall.core.rundir import RunDir
from rolecall.recovery.operators.run_location import run_id_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A dashboard is started for one run; pages can switch to others of its folder."""

    journal_url: str = field(repr=False)
    run: RunDir | None = None
    """The run's directory, if it is on this machine: it has the injection log and evidence files."""
    prometheus_url: str = ""
    prometheus_authorization: str = field(default="", repr=False)
    grafana_url: str = ""
    """Grafana with the dashboards of rolecall, for links."""
    logs_url: str = ""
    """Address of the logs of one node; `{node}`, `{replica}`, `{start}` and `{end}` are filled in."""
    users_path: Path | None = None
    """Users and their access tokens (`users.py`); None: the dashboard is read-only."""
    sign_in: bool = False
    """Reading requires sign-in too, because the server is reachable from other machines."""
    name: str = ""
    """Name of the run on pages."""
    patience_seconds: float = 0.0
    """A page waits at least this long for data that a thread is still reading; tests on a loaded machine need more than
    the second or less that users get."""

    @property
    def run_id(self) -> str:
        return self.run.run_id if self.run is not None else run_id_of(self.journal_url)


_current: list[Settings] = []


def use(settings: Settings) -> None:
    _current[:] = [settings]


def current() -> Settings:
    if not _current:
        raise RuntimeError("start the dashboard with `rolecall dashboard`")
    return _current[0]
