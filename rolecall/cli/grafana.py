"""`rolecall grafana`: dashboards and alert rules for Grafana and Prometheus."""

from pathlib import Path
from typing import Annotated

import typer

from rolecall.cli.grafana_push import annotate, push
from rolecall.cli.options import out
from rolecall.core.text import plain

grafana = typer.Typer(no_args_is_help=True, help="Dashboards for Grafana, alert rules for Prometheus.")
grafana.command()(push)
grafana.command()(annotate)

IncidentsAtOption = Annotated[
    str,
    typer.Option("--incidents-at", help="address of `rolecall dashboard`, to which links lead", metavar="URL"),
]


@grafana.command()
def export(
    folder: Annotated[Path, typer.Option("--out", help="folder to write to; made if missing", metavar="DIR")],
    incidents_at: IncidentsAtOption = "",
    dashboards_path: Annotated[
        str, typer.Option(help="where the dashboards will lie on Grafana's machine", metavar="PATH")
    ] = "",
    runbooks: Annotated[
        str, typer.Option(help="address of a copy of docs/runbooks that people on call can open", metavar="URL")
    ] = "",
) -> int:
    """Writes dashboards (JSON), how Grafana loads them (provisioning) and alert rules. The same bytes every time."""
    from rolecall.dashboards.grafana import export as exporting
    from rolecall.dashboards.grafana.boards.all import documents
    from rolecall.dashboards.grafana.rules.all import RUNBOOKS, rules_yaml

    path = dashboards_path or exporting.DASHBOARDS_PATH
    made = exporting.files(documents(incidents_at), rules_yaml(runbooks or RUNBOOKS), path)
    for written in exporting.write(folder, made):
        out(plain(str(written)))
    return 0
