"""Commands on the dashboard: serve it, for a run on this machine or a journal anywhere; manage its users."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolecall.cli.options import (
    ROOT,
    Commands,
    HelpGroup,
    JournalOption,
    RootOption,
    RunArgument,
    RunOption,
    checked_journal,
    chosen_run,
    confirm,
    examples,
    out,
    output_is_closed,
)
from rolecall.core.errors import ConfigError
from rolecall.core.http import is_loopback
from rolecall.core.text import os_reason, plain

if TYPE_CHECKING:
    from types import ModuleType

    from rolecall.dashboards.settings import Settings

PORT = 8501
app = Commands()


@app.command(
    epilog=examples(
        "rolecall dashboard",
        "rolecall dashboard my-run --users users.yaml",
        "rolecall dashboard --journal - --prometheus http://prometheus:9090",
    )
)
def dashboard(
    run: RunArgument = "",
    option: RunOption = "",
    journal: JournalOption = "",
    prometheus: Annotated[str, typer.Option(help="Prometheus-compatible server, as http://HOST:9090[/PATH].")] = "",
    credentials: Annotated[
        Path | None, typer.Option(help="File with one line for Prometheus: 'bearer TOKEN' or 'basic USER:PASSWORD'.")
    ] = None,
    grafana: Annotated[str, typer.Option(help="Grafana with rolecall's dashboards, for links.")] = "",
    logs: Annotated[
        str, typer.Option(help="Address of logs, for links, with {node}, {replica}, {start} and {end}.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = PORT,
    users: Annotated[
        Path | None, typer.Option(help="Users file (`rolecall users add`): signed-in users may give commands.")
    ] = None,
    open_to_readers: Annotated[
        bool, typer.Option("--open-to-readers", help="Beyond loopback: allow reading without sign-in.")
    ] = False,
    names: Annotated[
        list[str], typer.Option("--origin", help="Another address that browsers use, as https://dash.example.")
    ] = [],  # noqa: B006
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Private key (PEM).")] = None,
    runs: RootOption = ROOT,
) -> None:
    """Serve the dashboard.

    Until Ctrl-C; on loopback by default."""
    serving = _serving()
    settings = _settings(run, option, journal, prometheus, credentials, users, runs)
    origins = tuple(_checked_origin(n) for n in names)
    _check_tls(tls_cert, tls_key)
    if not is_loopback(host) and users is None and not open_to_readers:
        raise ConfigError(
            [f"--host: {plain(host, 80)} is reachable by others: give --users FILE (sign-in) or --open-to-readers"]
        )
    sign_in = not is_loopback(host) and not open_to_readers
    listener = serving.bound(host, port)
    address = serving.address_of(listener, host, tls=tls_cert is not None)

    def ready() -> None:
        out(f"dashboard of {plain(settings.name or 'the journal', 100)}: {address}")
        if users is not None:
            out(f"sign in with your access token to {'read and ' if sign_in else ''}give commands")
        elif not is_loopback(host):
            out("read-only: anyone who reaches this address can read, no one can give commands")
        if not is_loopback(host) and tls_cert is None:
            out("not encrypted: use --tls-cert and --tls-key, or a TLS proxy")
        sys.stdout.flush()

    serving.serve(
        replace(
            settings,
            sign_in=sign_in,
            grafana_url=_checked_link("--grafana", grafana),
            logs_url=_checked_link("--logs", logs),
        ),
        listener,
        address=address,
        names=origins,
        cert=tls_cert,
        key=tls_key,
        ready=ready,
    )


def _serving() -> "ModuleType":
    """Raises ConfigError: Streamlit is not installed."""
    try:
        import streamlit
    except ModuleNotFoundError:
        raise ConfigError(["dashboard: Streamlit is missing; in a clone: pip install '.[dashboards]'"]) from None
    if not hasattr(streamlit, "App"):
        found = streamlit.__version__
        raise ConfigError([f"dashboard: Streamlit {found} is too old: pip install -U 'streamlit>=1.67'"])
    from rolecall.dashboards.server import serving

    return serving


def _settings(
    run: str, option: str, journal: str, prometheus: str, credentials: Path | None, users: Path | None, runs: Path
) -> "Settings":
    from rolecall.dashboards.settings import Settings

    if (run or option) and journal:
        raise ConfigError(["--journal: a run is given too; give one of the two"])
    authorization = _checked_prometheus(prometheus, credentials)
    if users is not None:
        from rolecall.dashboards.users import read_users

        read_users(users)
    if journal:
        url = checked_journal(journal)
        from rolecall.recovery.operators.run_location import run_id_of

        where, name = None, run_id_of(url)
    else:
        where = chosen_run(runs, run, option)
        url, name = where.database_url, where.run_id
    return Settings(
        journal_url=url,
        run=where,
        prometheus_url=prometheus,
        prometheus_authorization=authorization,
        users_path=users,
        name=str(name),
    )


def _checked_prometheus(url: str, credentials: Path | None) -> str:
    """The Authorization header. Raises ConfigError: an invalid address or file."""
    if not url:
        if credentials is not None:
            raise ConfigError(["--credentials: needs --prometheus"])
        return ""
    from rolecall.core.clock import SystemClock
    from rolecall.detector.sources.prometheus_api import Client
    from rolecall.watch.panels import authorization

    try:
        Client(url, SystemClock()).close()
    except ConfigError as e:
        raise ConfigError([p.replace("--url", "--prometheus") for p in e.problems]) from None
    return authorization(credentials, os.environ)


def _checked_link(option: str, url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError([f"{option}: expected http(s)://..., got {plain(url, 100)!r}"])
    return url


def _checked_origin(text: str) -> str:
    scheme, there, host = text.partition("://")
    if scheme not in ("http", "https") or not there or not host or "/" in host or "@" in host or "*" in host:
        raise ConfigError([f"--origin: expected http(s)://HOST[:PORT], got {plain(text, 100)!r}"])
    return text


def _check_tls(cert: Path | None, key: Path | None) -> None:
    if (cert is None) != (key is None):
        raise ConfigError(["--tls-cert and --tls-key: give both"])
    if cert is None or key is None:
        return
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError([f"--tls-cert: cannot use {cert} with {key}: {os_reason(e)}"]) from None


users = Commands(cls=HelpGroup, no_args_is_help=True, help="Manage dashboard users and access tokens.")

FileOption = Annotated[Path, typer.Option("--file", help="Users file (mode 0600).", metavar="FILE")]
NameArgument = Annotated[str, typer.Argument(help="User name, as the journal records it.", metavar="NAME")]


@users.command(epilog=examples("rolecall users add anna --file users.yaml"))
def add(name: NameArgument, file: FileOption) -> None:
    """Add a user and print the access token. Only its hash is stored, so it is shown this once."""
    from rolecall.dashboards import users as users_file

    if output_is_closed():
        raise ConfigError(["standard output is closed: the access token is shown there, and only once"])
    with users_file.adding(file, name) as token:
        out(f"Access token of {plain(name)} for dashboards started with --users {plain(file)}, shown only once:")
        out(token)


@users.command(epilog=examples("rolecall users remove anna --file users.yaml"))
def remove(name: NameArgument, file: FileOption) -> None:
    """Remove a user. Open sessions of the user end at once."""
    from rolecall.dashboards import users as users_file

    users_file.remove(file, name)
    confirm(f"{plain(name)} removed")


@users.command("list", epilog=examples("rolecall users list --file users.yaml"))
def names(file: FileOption) -> None:
    """List the users."""
    from rolecall.dashboards import users as users_file

    for name in sorted(users_file.read_users(file)):
        out(plain(name))
