"""Commands on Grafana and Prometheus: push (dashboards), annotate (incidents), export (files)."""

import os
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from rolecall.cli.options import (
    ROOT,
    Commands,
    HelpGroup,
    JournalOption,
    JsonOption,
    RootOption,
    RunArgument,
    RunOption,
    checked_journal,
    chosen_run,
    examples,
    out,
    progress,
    show,
)
from rolecall.core.errors import ConfigError
from rolecall.core.text import plain

if TYPE_CHECKING:
    from rolecall.dashboards.grafana.push import PushResult
    from rolecall.dashboards.grafana.server import Server, Token

TOKEN_ENV = "ROLECALL_GRAFANA_TOKEN"
TOKEN_CHARS_MAX = 4096
FROM_STDIN = "-"

app = Commands(cls=HelpGroup, no_args_is_help=True, help="Dashboards and alert rules for Grafana.")

UrlOption = Annotated[str, typer.Option("--url", help="Grafana server, as https://HOST[:PORT][/PATH].")]
TokenOption = Annotated[
    str,
    typer.Option("--token", help=f"Service account token (Editor); prefer - (stdin), --token-file or {TOKEN_ENV}."),
]
TokenFileOption = Annotated[Path | None, typer.Option("--token-file", help="File that holds only the token.")]
CaOption = Annotated[Path | None, typer.Option("--ca-file", help="CA certificates for the server.")]
IncidentsAtOption = Annotated[
    str, typer.Option("--incidents-at", help="Address of `rolecall dashboard`, for links.", metavar="URL")
]


@app.command(epilog=examples("rolecall grafana push --url https://grafana.example --token-file token"))
def push(
    url: UrlOption,
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    folder: Annotated[str, typer.Option(help="Grafana folder, created if missing; empty: top level.")] = "rolecall",
    datasource: Annotated[str, typer.Option(help="Prometheus data source; empty: the viewer's default.")] = "",
    ca_file: CaOption = None,
    incidents_at: IncidentsAtOption = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also replace dashboards that were edited in Grafana.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written; write nothing.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Put the dashboards on a Grafana server. Idempotent; dashboards edited in Grafana are reported and kept.

    Alert rules are not pushed: Prometheus reads them from files (`rolecall grafana export`)."""
    from rolecall.dashboards.grafana.export import documents
    from rolecall.dashboards.grafana.push import PushResult, plan
    from rolecall.dashboards.grafana.push import push as write

    made = documents(incidents_at)
    with closing(_server(url, read_token(token, token_file, os.environ, sys.stdin), ca_file)) as server:
        wanted = plan(server, made, folder=folder, datasource=datasource, overwrite=overwrite)
        if dry_run:
            lines = [f"{c.verdict:<9}  {c.uid}  {plain(c.title, 100)}" for c in wanted.changes]
            return _report(PushResult(done=[f"would be {line}" for line in lines]), as_json)
        done = write(server, wanted)
    if not as_json:
        out("alert rules are not pushed: `rolecall grafana export` writes them for Prometheus")
    return _report(done, as_json)


@app.command(epilog=examples("rolecall grafana annotate --url https://grafana.example --token-file token"))
def annotate(
    url: UrlOption,
    run: RunArgument = "",
    option: RunOption = "",
    journal: JournalOption = "",
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    ca_file: CaOption = None,
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Write the incidents of a run to Grafana, one annotation each. Idempotent: only changes are written."""
    from rolecall.dashboards.grafana.push import annotate as write_annotations
    from rolecall.recovery.operators.run_location import JournalLocation, RunLocation, opened

    if (run or option) and journal:
        raise ConfigError(["--journal: a run is given too; give one of the two"])
    place: RunLocation = JournalLocation(checked_journal(journal)) if journal else chosen_run(runs, run, option)
    with opened(place) as (_, recorded):
        incidents = list(recorded.incidents.values())
    with closing(_server(url, read_token(token, token_file, os.environ, sys.stdin), ca_file)) as server:
        return _report(write_annotations(server, place.run_id, incidents), as_json)


@app.command(
    epilog=examples(
        "rolecall grafana export --out grafana/",
        "rolecall grafana export --out g/ --runbooks https://git.example/runbooks",
        "rolecall grafana export --out g/ --runbooks 'https://d.example/{alert}'",
    )
)
def export(
    folder: Annotated[Path, typer.Option("--out", help="Output folder; created if missing.", metavar="DIR")],
    incidents_at: IncidentsAtOption = "",
    dashboards_path: Annotated[
        str, typer.Option(help="Path of the dashboards on the Grafana server.", metavar="PATH")
    ] = "",
    runbooks: Annotated[
        str,
        typer.Option(
            help="Absolute URL of a copy of docs/runbooks that on-call engineers can open: the alerts' runbook_url. "
            "/ALERT.md is added, or {alert} in it is replaced. Without it alerts have no link and name the file.",
            metavar="URL",
        ),
    ] = "",
) -> None:
    """Write dashboards (JSON), Grafana provisioning files and alert rules. The output is deterministic."""
    from rolecall.dashboards.grafana import export as exporting
    from rolecall.dashboards.grafana.export import documents
    from rolecall.dashboards.grafana.rules import ALERT, rules_yaml

    if runbooks:
        exporting.check_link("--runbooks", runbooks, ALERT)
    path = dashboards_path or exporting.DASHBOARDS_PATH
    made = exporting.files(documents(incidents_at), rules_yaml(runbooks), path)
    for written in exporting.write(folder, made):
        out(plain(str(written)))
    if not runbooks:
        progress("alerts name the file of their runbook and do not link it: give --runbooks URL")


def read_token(literal: str, path: Path | None, environ: Mapping[str, str], stdin: TextIO) -> "Token":
    """The token, from the option, the file, standard input or the environment.

    Raises:
        ConfigError: no token, or two. The message shows no part of it.
    """
    from rolecall.dashboards.grafana.server import Token

    if literal and path is not None:
        raise ConfigError(["--token, --token-file: give one of the two"])
    if path is not None:
        return Token(_of_file(path))
    if literal == FROM_STDIN:
        return Token(stdin.readline(TOKEN_CHARS_MAX).strip())
    if literal:
        typer.echo(
            "rolecall: a token on the command line is visible to all users of this machine and stays in the shell "
            f"history: use --token-file, {TOKEN_ENV} or --token - instead",
            err=True,
        )
        return Token(literal)
    if environ.get(TOKEN_ENV):
        return Token(environ[TOKEN_ENV].strip())
    raise ConfigError([f"no token: give --token-file FILE, {TOKEN_ENV}, or --token - with the token on stdin"])


def _of_file(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as f:
            return f.read(TOKEN_CHARS_MAX).strip()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not a text"
        raise ConfigError([f"--token-file: {plain(path)}: {reason}"]) from None


def _server(url: str, token: "Token", ca_file: Path | None) -> "Server":
    from rolecall.dashboards.grafana.server import Server, address

    where = address(url)
    if where.token_in_the_clear:
        typer.echo(f"rolecall: {where} is not https: the token is sent unencrypted", err=True)
    return Server(where, token, ca_file=ca_file)


def _report(done: "PushResult", as_json: bool) -> int:
    show(as_json, {"ok": not done.failed, "done": done.done, "failed": done.failed}, (*done.done, *done.failed))
    return 1 if done.failed else 0
