"""Options that several commands share, and how commands print."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rolecall.core.errors import ConfigError
from rolecall.core.journal.database import checked_url, redacted
from rolecall.core.text import plain

JOURNAL_ENV = "ROLECALL_JOURNAL_URL"
RUNS_ENV = "ROLECALL_RUNS"
RunArgument = Annotated[str, typer.Argument(help="run id, path of a run directory, or 'latest'", metavar="RUN")]
RunOption = Annotated[str, typer.Option("--run", help="run id, path of a run directory, or 'latest'")]
RootOption = Annotated[Path, typer.Option("--runs", envvar=RUNS_ENV, help="directory that holds the runs")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
ROOT = Path("runs")

# Where metrics come from: of `watch` and `record`.
SourceOption = Annotated[str, typer.Option("--source", help="agents, prometheus or recording")]
UrlOption = Annotated[str, typer.Option(help="Prometheus-compatible server, as http://HOST:9090[/PATH]")]
QueryOption = Annotated[
    list[str], typer.Option("--query", help="NAME=EXPRESSION (PromQL); may be repeated, replaces the default queries")
]
QueriesOption = Annotated[Path | None, typer.Option("--queries", help="YAML file: expressions and labels of machines")]
MatchOption = Annotated[str, typer.Option("--match", help="label matchers for every query, as 'cluster=\"a\"'")]
IntervalOption = Annotated[
    float | None, typer.Option("--interval", help="seconds between ticks, not below the scrape interval")
]
HistoryOption = Annotated[float | None, typer.Option("--history", help="begin with so many seconds of the past")]
CredentialsOption = Annotated[
    Path | None, typer.Option("--credentials", help="file with one line: 'bearer TOKEN' or 'basic USER:PASSWORD'")
]
JournalOption = Annotated[
    str,
    typer.Option(
        "--journal", help=f"the journal's URL instead of a run; '-' reads it from {JOURNAL_ENV}, unseen by others"
    ),
]
ForOption = Annotated[float | None, typer.Option("--for", help="end after so many seconds")]


def whoami() -> str:
    """Whose word it is, as the journal keeps it: user and machine, at most 64 characters."""
    return plain(f"{os.environ.get('USER') or os.getuid()}@{os.uname().nodename}", 64)


def checked_journal(text: str) -> str:
    """The URL that `--journal` means.

    Raises:
        ConfigError: none that a journal can live at. The reason shows no password.
    """
    url = os.environ.pop(JOURNAL_ENV, "") if text == "-" else text
    if not url:
        raise ConfigError([f"--journal: {JOURNAL_ENV} is not set"])
    if "://" not in url and Path(url).exists():
        url = f"sqlite:///{Path(url).resolve()}"
    try:
        return checked_url(url)
    except ValueError as e:
        raise ConfigError([f"--journal: {redacted(url)[:200]!r} {e}"]) from None


def out(text: str) -> None:
    typer.echo(text)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
