"""Commands on the file of those who may act on the dashboard: add, remove, list."""

from pathlib import Path
from typing import Annotated

import typer

from rolecall.cli.options import out
from rolecall.core.text import plain

people = typer.Typer(no_args_is_help=True, help="Who may act on the dashboard.")

FileOption = Annotated[Path, typer.Option("--file", help="the people file (mode 0600)", metavar="FILE")]
NameArgument = Annotated[str, typer.Argument(help="as it will stand in the journal", metavar="NAME")]


@people.command()
def add(name: NameArgument, file: FileOption) -> int:
    """Lets NAME act, and prints the token once: it is kept nowhere."""
    from rolecall.dashboards import users as book

    token = book.add(file, name)
    out(
        f"{plain(name)} may act on dashboards that are started with --people {plain(file)}. The token, shown this once:"
    )
    out(token)
    return 0


@people.command()
def remove(name: NameArgument, file: FileOption) -> int:
    """Ends NAME's token; whoever uses it now is out at once."""
    from rolecall.dashboards import users as book

    book.remove(file, name)
    out(f"{plain(name)} may not act any more")
    return 0


@people.command("list")
def names(file: FileOption) -> int:
    """Who may act."""
    from rolecall.dashboards import users as book

    for name in sorted(book.read_users(file)):
        out(plain(name))
    return 0
