"""Options that several commands share, and how commands print."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

RUNS_ENV = "ROLECALL_RUNS"
RunArgument = Annotated[str, typer.Argument(help="run id, path of a run directory, or 'latest'", metavar="RUN")]
RunOption = Annotated[str, typer.Option("--run", help="run id, path of a run directory, or 'latest'")]
RootOption = Annotated[Path, typer.Option("--runs", envvar=RUNS_ENV, help="directory that holds the runs")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
ROOT = Path("runs")


def out(text: str) -> None:
    typer.echo(text)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
