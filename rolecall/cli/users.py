"""Commands on the users of the dashboard and their access tokens: add, remove, list."""

from pathlib import Path
from typing import Annotated

import typer

from rolecall.cli.options import examples, out
from rolecall.core.text import plain

app = typer.Typer(no_args_is_help=True, help="Manage dashboard users and access tokens.")

FileOption = Annotated[Path, typer.Option("--file", help="Users file (mode 0600).", metavar="FILE")]
NameArgument = Annotated[str, typer.Argument(help="User name, as the journal records it.", metavar="NAME")]


@app.command(epilog=examples("rolecall users add anna --file users.yaml"))
def add(name: NameArgument, file: FileOption) -> None:
    """Add a user and print the access token. Only its hash is stored, so it is shown this once."""
    from rolecall.dashboards import users as users_file

    token = users_file.add(file, name)
    out(f"{plain(name)} can sign in to dashboards started with --users {plain(file)}. Access token, shown only once:")
    out(token)


@app.command(epilog=examples("rolecall users remove anna --file users.yaml"))
def remove(name: NameArgument, file: FileOption) -> None:
    """Remove a user. Open sessions of the user end at once."""
    from rolecall.dashboards import users as users_file

    users_file.remove(file, name)
    out(f"{plain(name)} removed")


@app.command("list", epilog=examples("rolecall users list --file users.yaml"))
def names(file: FileOption) -> None:
    """List the users."""
    from rolecall.dashboards import users as users_file

    for name in sorted(users_file.read_users(file)):
        out(plain(name))
