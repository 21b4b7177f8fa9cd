"""What `rolecall grafana` puts on a server: dashboards, and incidents as annotations."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from rolecall.cli.options import ROOT, JournalOption, JsonOption, RootOption, checked_journal, out, print_json
from rolecall.core.errors import ConfigError
from rolecall.core.text import plain

if TYPE_CHECKING:
    from rolecall.dashboards.grafana.annotations import IncidentAnnotation
    from rolecall.dashboards.grafana.push import PushResult
    from rolecall.dashboards.grafana.server import Server, Token
    from rolecall.recovery.incidents.incident import Incident

TOKEN_ENV = "ROLECALL_GRAFANA_TOKEN"
TOKEN_CHARS_MAX = 4096
FROM_STDIN = "-"

UrlOption = Annotated[str, typer.Option("--url", help="of the Grafana server, as https://HOST[:PORT][/PATH]")]
TokenOption = Annotated[
    str,
    typer.Option("--token", help=f"token of a service account (Editor); better - for stdin, a file, or {TOKEN_ENV}"),
]
TokenFileOption = Annotated[Path | None, typer.Option("--token-file", help="file that holds the token alone")]
CaOption = Annotated[Path | None, typer.Option("--ca-file", help="certificates that the server's may be signed by")]


def push(
    url: UrlOption,
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    folder: Annotated[str, typer.Option(help="folder of Grafana, made if missing; empty: the top level")] = "rolecall",
    datasource: Annotated[
        str, typer.Option(help="name of the Prometheus data source; empty: each viewer's default")
    ] = "",
    ca_file: CaOption = None,
    incidents_at: Annotated[
        str, typer.Option("--incidents-at", help="address of `rolecall dashboard`, for links")
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="also where a person edited a dashboard")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="look, say what would be written, write nothing")] = False,
    as_json: JsonOption = False,
) -> int:
    """Puts the dashboards on a Grafana server. Twice changes nothing; edits of people are told and left alone.

    Alert rules are not pushed: Prometheus reads them from files (`rolecall grafana export`)."""
    from rolecall.dashboards.grafana.boards.all import documents
    from rolecall.dashboards.grafana.push import PushResult, plan
    from rolecall.dashboards.grafana.push import push as write

    made = documents(incidents_at)
    with _server(url, read_token(token, token_file, os.environ, sys.stdin), ca_file) as server:
        wanted = plan(server, made, folder=folder, datasource=datasource, overwrite=overwrite)
        if dry_run:
            lines = [f"{c.verdict:<9}  {c.uid}  {plain(c.title, 100)}" for c in wanted.changes]
            return _tell(PushResult(done=[f"would be {line}" for line in lines]), as_json)
        done = write(server, wanted)
    if not as_json:
        out("alert rules are not pushed: `rolecall grafana export` writes them for Prometheus")
    return _tell(done, as_json)


def annotate(
    url: UrlOption,
    run: Annotated[str, typer.Argument(help="run id, path of a run directory, or 'latest'", metavar="[RUN]")] = "",
    journal: JournalOption = "",
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    ca_file: CaOption = None,
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Puts the incidents of a run on Grafana's time axes, one annotation each. Again: only what changed is written."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.dashboards.grafana import annotations
    from rolecall.recovery.operators.run_location import JournalLocation, RunLocation, opened

    if run and journal:
        raise ConfigError(["--journal: a run is named, too: one of them is meant"])
    place: RunLocation = JournalLocation(checked_journal(journal)) if journal else open_run_dir(runs, run or "latest")
    with opened(place) as (_, book):
        told = [episode(incident) for incident in book.incidents.values()]
    with _server(url, read_token(token, token_file, os.environ, sys.stdin), ca_file) as server:
        return _tell(annotations.annotate(server, place.run_id, told), as_json)


def episode(incident: "Incident") -> "IncidentAnnotation":
    """An incident as a graph shows it."""
    from rolecall.dashboards.grafana.annotations import IncidentAnnotation

    diagnosis = incident.diagnosis
    first = diagnosis.suspects[0] if diagnosis.suspects else None
    return IncidentAnnotation(
        incident_id=incident.incident_id,
        role=str(first.role or "") if first is not None else "",
        fault=str(diagnosis.fault_class),
        sentence=diagnosis.because,
        opened_at=incident.opened_at,
        closed_at=incident.closed_at,
        outcome=str(incident.outcome or ""),
    )


def read_token(literal: str, path: Path | None, environ: Mapping[str, str], stdin: TextIO) -> "Token":
    """The token, from one of the places where it may be.

    Raises:
        ConfigError: there is none, or two; the text shows none of it.
    """
    from rolecall.dashboards.grafana.server import Token

    if literal and path is not None:
        raise ConfigError(["--token, --token-file: one of them is meant"])
    if path is not None:
        return Token(_of_file(path))
    if literal == FROM_STDIN:
        return Token(stdin.readline(TOKEN_CHARS_MAX).strip())
    if literal:
        typer.echo(
            "rolecall: a token on the command line can be read by all users of this machine while it runs, and stands in "
            f"the shell's history: give --token-file, {TOKEN_ENV} or --token - instead",
            err=True,
        )
        return Token(literal)
    if environ.get(TOKEN_ENV):
        return Token(environ[TOKEN_ENV].strip())
    raise ConfigError([f"a token is needed: --token-file FILE, {TOKEN_ENV}, or --token - and the token on stdin"])


def _of_file(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as f:
            return f.read(TOKEN_CHARS_MAX).strip()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not a text"
        raise ConfigError([f"--token-file: {plain(path)}: {reason}"]) from None


@contextmanager
def _server(url: str, token: "Token", ca_file: Path | None) -> Iterator["Server"]:
    from rolecall.dashboards.grafana.server import Server, address

    where = address(url)
    if where.token_in_the_clear:
        typer.echo(f"rolecall: {where} is not https: the token goes over the network as it is", err=True)
    server = Server(where, token, ca_file=ca_file)
    try:
        yield server
    finally:
        server.close()


def _tell(done: "PushResult", as_json: bool) -> int:
    if as_json:
        print_json({"ok": not done.failed, "done": done.done, "failed": done.failed})
    else:
        for line in (*done.done, *done.failed):
            out(line)
    return 1 if done.failed else 0
