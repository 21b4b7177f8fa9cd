"""Options that several commands share, and the ways in which commands print."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from rolecall.core.errors import ConfigError
from rolecall.core.journal.database import checked_url, redacted
from rolecall.core.text import plain

JOURNAL_ENV = "ROLECALL_JOURNAL_URL"
RUNS_ENV = "ROLECALL_RUNS"
RunArgument = Annotated[str, typer.Argument(help="Run id, path of a run directory, or 'latest'.", metavar="RUN")]
LatestRunArgument = Annotated[
    str, typer.Argument(help="Run id, path of a run directory, or 'latest'.", metavar="[RUN]")
]
RunOption = Annotated[str, typer.Option("--run", help="Run id, path of a run directory, or 'latest'.")]
RootOption = Annotated[Path, typer.Option("--runs", envvar=RUNS_ENV, help="Directory that holds the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; written to the journal and shown to everyone.")]
ROOT = Path("runs")

CredentialsOption = Annotated[
    Path | None,
    typer.Option("--credentials", help="File with one line: 'bearer TOKEN' or 'basic USER:PASSWORD'.", metavar="FILE"),
]
JournalOption = Annotated[
    str,
    typer.Option(
        "--journal",
        help=f"URL of a journal instead of a run; '-' reads it from {JOURNAL_ENV}, so that no process list shows it.",
    ),
]
SecondsOption = Annotated[float | None, typer.Option("--for", help="Stop after this many seconds.")]


def examples(*lines: str) -> str:
    """The epilog of a command's help: its examples, one a line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def whoami() -> str:
    """Who gives the command, as the journal records it: user and machine, at most 64 characters."""
    return plain(f"{os.environ.get('USER') or os.getuid()}@{os.uname().nodename}", 64)


def checked_journal(text: str) -> str:
    """The URL that `--journal` names.

    Raises:
        ConfigError: no journal can be at that URL. The message shows no password.
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


def progress(text: str) -> None:
    """Progress goes to standard error: standard output holds the result and nothing else."""
    typer.echo(plain(text), err=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def show(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """The result of a command: `lines`, or with --json `value`."""
    if as_json:
        print_json(value)
    else:
        for line in lines:
            out(line)
