"""Commands on Grafana and Prometheus: export, push, annotate."""

from pathlib import Path
from typing import Annotated

import typer

from rolecall.cli.grafana_push import annotate, push
from rolecall.cli.options import examples, out
from rolecall.core.text import plain

app = typer.Typer(no_args_is_help=True, help="Dashboards and alert rules for Grafana.")
app.command(epilog=examples("rolecall grafana push --url https://grafana.example --token-file token --dry-run"))(push)
app.command(epilog=examples("rolecall grafana annotate my-run --url https://grafana.example --token-file token"))(
    annotate
)

IncidentsAtOption = Annotated[
    str,
    typer.Option("--incidents-at", help="Address of `rolecall dashboard`, for links.", metavar="URL"),
]


@app.command(epilog=examples("rolecall grafana export --out grafana/"))
def export(
    folder: Annotated[Path, typer.Option("--out", help="Output folder; created if missing.", metavar="DIR")],
    incidents_at: IncidentsAtOption = "",
    dashboards_path: Annotated[
        str, typer.Option(help="Path of the dashboards on the Grafana server.", metavar="PATH")
    ] = "",
    runbooks: Annotated[
        str, typer.Option(help="Address of a copy of docs/runbooks that on-call engineers can open.", metavar="URL")
    ] = "",
) -> int:
    """Write dashboards (JSON), Grafana provisioning files and alert rules. The output is deterministic."""
    from rolecall.dashboards.grafana import export as exporting
    from rolecall.dashboards.grafana.boards.all import documents
    from rolecall.dashboards.grafana.rules.all import RUNBOOKS, rules_yaml

    path = dashboards_path or exporting.DASHBOARDS_PATH
    made = exporting.files(documents(incidents_at), rules_yaml(runbooks or RUNBOOKS), path)
    for written in exporting.write(folder, made):
        out(plain(str(written)))
    return 0
