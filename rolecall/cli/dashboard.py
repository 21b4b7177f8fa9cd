"""`rolecall dashboard`: serves what people look at, of a run on this machine or of a journal anywhere."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolecall.cli.options import ROOT, JournalOption, RootOption, checked_journal, out
from rolecall.core.errors import ConfigError
from rolecall.core.text import plain

if TYPE_CHECKING:
    from types import ModuleType

    from rolecall.dashboards.settings import Settings

PORT = 8501
dashboards = typer.Typer()


@dashboards.command()
def dashboard(
    run: Annotated[str, typer.Argument(help="run id, path of a run directory, or 'latest'", metavar="[RUN]")] = "",
    journal: JournalOption = "",
    prometheus: Annotated[str, typer.Option(help="Prometheus-compatible server, as http://HOST:9090[/PATH]")] = "",
    credentials: Annotated[
        Path | None, typer.Option(help="file with one line for Prometheus: 'bearer TOKEN' or 'basic USER:PASSWORD'")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free")] = PORT,
    people: Annotated[
        Path | None, typer.Option(help="who may act, and with which token (`rolecall people add`)")
    ] = None,
    open_to_readers: Annotated[
        bool, typer.Option("--open-to-readers", help="beyond loopback: who reaches the address may read, unasked")
    ] = False,
    names: Annotated[
        list[str], typer.Option("--origin", help="another address under which browsers come, as https://dash.example")
    ] = [],  # noqa: B006
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="certificate chain (PEM)")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="its private key (PEM)")] = None,
    runs: RootOption = ROOT,
) -> int:
    """Serves the incident dashboard until Ctrl-C: on loopback, unless told otherwise."""
    serving = _serving()
    settings = _settings(run, journal, prometheus, credentials, people, runs)
    origins = tuple(_checked_origin(n) for n in names)
    _check_tls(tls_cert, tls_key)
    if not serving.is_loopback(host) and people is None and not open_to_readers:
        raise ConfigError(
            [
                f"--host: others can reach {plain(host, 80)}: name who may sign in (--people FILE), or say --open-to-readers"
            ]
        )
    sign_in = not serving.is_loopback(host) and not open_to_readers
    listener = serving.bound(host, port)
    address = serving.address_of(listener, host, tls=tls_cert is not None)

    def ready() -> None:
        out(f"dashboard of {plain(settings.name or 'the journal', 100)}: {address}")
        if people is not None:
            out(
                "sign in with your token (`rolecall people add` made it)"
                + (" to read and" if sign_in else "")
                + " to act"
            )
        elif not serving.is_loopback(host):
            out("anybody who reaches this address can read; nobody can act")
        if not serving.is_loopback(host) and tls_cert is None:
            out("what is shown, and tokens, travel unencrypted: --tls-cert and --tls-key, or a proxy, change that")
        sys.stdout.flush()

    serving.serve(
        replace(settings, sign_in=sign_in),
        listener,
        address=address,
        names=origins,
        cert=tls_cert,
        key=tls_key,
        ready=ready,
    )
    return 0


def _serving() -> "ModuleType":
    """Raises ConfigError: Streamlit is not installed."""
    try:
        import streamlit
    except ModuleNotFoundError:
        raise ConfigError(["dashboard: Streamlit is missing: pip install 'rolecall[dashboards]'"]) from None
    if not hasattr(streamlit, "App"):
        found = streamlit.__version__
        raise ConfigError([f"dashboard: Streamlit {found} is too old: pip install -U 'rolecall[dashboards]'"])
    from rolecall.dashboards.server import serving

    return serving


def _settings(
    run: str, journal: str, prometheus: str, credentials: Path | None, people: Path | None, runs: Path
) -> "Settings":
    from rolecall.core.rundir import open_run_dir
    from rolecall.dashboards.settings import Settings

    if run and journal:
        raise ConfigError(["--journal: a run is named, too: one of them is meant"])
    authorization = _checked_prometheus(prometheus, credentials)
    if people is not None:
        from rolecall.dashboards.users import read_users

        read_users(people)
    if journal:
        url = checked_journal(journal)
        from rolecall.recovery.operators.run_location import run_id_of

        where, name = None, run_id_of(url)
    else:
        where = open_run_dir(runs, run or "latest")
        url, name = where.database_url, where.run_id
    return Settings(
        journal_url=url,
        run=where,
        prometheus_url=prometheus,
        prometheus_authorization=authorization,
        users_path=people,
        name=str(name),
    )


def _checked_prometheus(url: str, credentials: Path | None) -> str:
    """The Authorization header. Raises ConfigError: the address or the file is no use."""
    if not url:
        if credentials is not None:
            raise ConfigError(["--credentials: they are for Prometheus, and --prometheus names none"])
        return ""
    from rolecall.core.clock import SystemClock
    from rolecall.detector.sources.prometheus_api import Client
    from rolecall.watch.panels import authorization

    try:
        Client(url, SystemClock()).close()
    except ConfigError as e:
        raise ConfigError([p.replace("--url", "--prometheus") for p in e.problems]) from None
    return authorization(credentials, os.environ)


def _checked_origin(text: str) -> str:
    scheme, there, host = text.partition("://")
    if scheme not in ("http", "https") or not there or not host or "/" in host or "@" in host or "*" in host:
        raise ConfigError([f"--origin: expected http(s)://HOST[:PORT], got {plain(text, 100)!r}"])
    return text


def _check_tls(cert: Path | None, key: Path | None) -> None:
    if (cert is None) != (key is None):
        raise ConfigError(["--tls-cert: it needs --tls-key, and the other way round"])
    if cert is None or key is None:
        return
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError([f"--tls-cert: {cert} with {key} is no use: {e}"]) from None
