"""Options that several commands share, and the ways in which commands print."""

import getpass
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from rolecall.core.errors import ConfigError
from rolecall.core.journal.database import checked_url, redacted
from rolecall.core.rundir import DEFAULT_ROOT, RUNS_ENV, RunDir, open_run_dir
from rolecall.core.text import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

JOURNAL_ENV = "ROLECALL_JOURNAL_URL"
_RUN = "Run id, path of a run directory, or 'latest'"
RunArgument = Annotated[str, typer.Argument(help=f"{_RUN} (default: latest).", metavar="RUN")]
RunOption = Annotated[str, typer.Option("--run", help=f"{_RUN} (default: latest).", metavar="RUN")]
NamedRunArgument = Annotated[str, typer.Argument(help=f"{_RUN}; must be given.", metavar="RUN")]
NamedRunOption = Annotated[str, typer.Option("--run", help="The same.", metavar="RUN")]
RootOption = Annotated[Path, typer.Option("--runs", envvar=RUNS_ENV, help="Directory that holds the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; written to the journal and shown to everyone.")]
ROOT = DEFAULT_ROOT

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
HELP_CHARS_MAX = 1000
"""Of a first sentence in the list of commands: none is cut."""
FOR_SECONDS_MAX = 31 * 86_400.0


def _checked_seconds(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds <= FOR_SECONDS_MAX:  # not a number is refused, too
        raise ConfigError([f"--for: must be above 0 and at most {FOR_SECONDS_MAX:g} s, got {seconds:g}"])
    return seconds


SecondsOption = Annotated[
    float | None, typer.Option("--for", callback=_checked_seconds, help="Stop after this many seconds.")
]


_TYPE = re.compile(r"<(?:list\[)?(\w+)\]?(?: range)?>(?:\.\.\.)?")
_TYPE_NAMES = {"str": "TEXT", "path": "PATH", "int": "N", "float": "NUMBER"}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def shown_name(name: str) -> str:
    """A parameter as the help names it: `--runs PATH` for typer's `--runs <path>`, and an argument without its type."""
    if not name.startswith("-"):
        return _TYPE.sub("", name).strip()
    return _TYPE.sub(lambda found: _TYPE_NAMES.get(found[1].lower(), found[0]), name)


class HelpCommand(TyperCommand):
    """A command whose usage is `diagnose [OPTIONS] PATH...`, without typer's braces, and whose help names no types of
    Python."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write = formatter.write_dl
        formatter.write_dl = lambda rows: write([(shown_name(name), text) for name, text in rows])
        super().format_options(ctx, formatter)
        formatter.write_dl = write


class Commands(typer.Typer):
    """Commands with this help."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, cls=HelpCommand, **settings)


class HelpGroup(TyperGroup):
    """A group whose help has its commands in panels, each with its whole first sentence.

    `panels`: title -> names of its commands, in order; of the root alone. The title of all others is "Commands".
    """

    panels: Mapping[str, Sequence[str]] = {}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        listed = {name for names in self.panels.values() for name in names}
        others = [name for name in self.list_commands(ctx) if name not in listed]
        for title, names in {**self.panels, "Commands": others}.items():
            commands = {name: self.get_command(ctx, name) for name in names}
            rows = [(n, c.get_short_help_str(HELP_CHARS_MAX)) for n, c in commands.items() if c and not c.hidden]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def examples(*lines: str) -> str:
    """The epilog of a command's help: its examples, one a line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def chosen_run(runs: Path, run: str, option: str = "") -> RunDir:
    """The run that a command is for. Every command takes `--run RUN`, one without another argument also takes `RUN`.

    Raises:
        ConfigError: both are given, and differ. RunNotFound: there is no such run.
    """
    if run and option and run != option:
        raise ConfigError([f"--run: {option!r} and RUN {run!r} are both given: give one of the two"])
    return open_run_dir(runs, run or option or "latest")


def named_run(runs: Path, run: str, option: str) -> RunDir:
    """As `chosen_run`, for a command that is for no run unless one is named."""
    if not (run or option):
        raise ConfigError(["RUN: name a run, or 'latest'"])
    return chosen_run(runs, run, option)


def whoami() -> str:
    """Who gives the command, as the journal records it: user and machine, at most 64 characters."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # neither the environment nor the user database names the user
        user = f"uid {os.getuid()}"
    return plain(f"{user}@{os.uname().nodename}", 64)


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


def present(as_json: bool, value: Any, text: "RenderableType") -> None:
    """The result of a command: `text`, in colour on a terminal, or with --json `value`."""
    if as_json:
        print_json(value)
    else:
        from rolecall.terminal.console import console

        console().print(text)
        sys.stdout.flush()


def show(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """The result of a command: `lines`, or with --json `value`."""
    if as_json:
        print_json(value)
    else:
        for line in lines:
            out(line)
