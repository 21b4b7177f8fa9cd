"""Commands on one incident: export."""

import hashlib
from pathlib import Path
from typing import Annotated, Any

import typer

from rolecall.cli.options import ROOT, JsonOption, RootOption, RunOption, out, print_json
from rolecall.core.text import plain

incident = typer.Typer(no_args_is_help=True, help="One incident: a bundle of it for a ticket.")


@incident.callback()
def _group() -> None:
    """One incident: a bundle of it for a ticket."""


@incident.command()
def export(
    incident_id: Annotated[str, typer.Argument(help="incident id, as `rolecall incidents` shows it", metavar="ID")],
    run: RunOption = "latest",
    runs: RootOption = ROOT,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="default: ID.tar.gz here", metavar="FILE.tar.gz")
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="nodes and addresses become node-1, ip-1 and so on")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Journal, windows, events and logs of an incident in one file, without secrets, prompts or names of users."""
    from rolecall.core.private_file import write_private
    from rolecall.core.rundir import open_run_dir
    from rolecall.reports.incident_export import export as bundle_of

    bundle = bundle_of(open_run_dir(runs, run), incident_id, anonymous=anonymous)
    content = bundle.archive()
    path = output or Path(f"{bundle.name}.tar.gz")
    write_private(path, content)
    told: dict[str, Any] = {
        "incident_id": incident_id,
        "file": str(path),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "open": bundle.is_open,
        "members": [m.told() for m in bundle.members],
        "left_out": list(bundle.left_out),
    }
    if as_json:
        print_json(told)
        return 0
    state = " (still open)" if bundle.is_open else ""
    out(f"{plain(path)}: {plain(incident_id)}{state}, {len(bundle.members)} files, {len(content)} bytes")
    for text in bundle.left_out:
        out(f"  left out: {plain(text)}")
    return 0
