"""Commands on incidents: incidents, review, incident export."""

import hashlib
from pathlib import Path
from typing import Annotated, Any

import typer

from rolecall.cli.options import ROOT, JsonOption, RootOption, RunOption, examples, out, show, whoami
from rolecall.core.errors import ConfigError
from rolecall.core.rundir import open_run_dir, write_atomically
from rolecall.core.text import plain

app = typer.Typer()


@app.command(epilog=examples("rolecall incidents", "rolecall incidents inc-1-rollout-1 --json"))
def incidents(
    incident: Annotated[str, typer.Argument(help="Incident id (default: all incidents).", metavar="[ID]")] = "",
    run: RunOption = "latest",
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> None:
    """List incidents.

    Each with its diagnosis, evidence, actions and outcome."""
    from rolecall.recovery.operators import queries

    value = queries.incidents(open_run_dir(runs, run), incident or None)
    show(as_json, value, [queries.incidents_text(value)])


@app.command(epilog=examples('rolecall review inc-1-rollout-1 --wrong --reason "the switch was at fault"'))
def review(
    incident: Annotated[str, typer.Argument(help="Incident id.", metavar="INCIDENT")],
    right: Annotated[bool | None, typer.Option("--right/--wrong", help="Was the diagnosis right?")] = None,
    because: Annotated[str, typer.Option("--reason", help="Why; written to the journal.")] = "",
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Review a diagnosis: was it right or wrong.

    Possible after the incident has closed. The latest review counts."""
    from rolecall.recovery.operators import commands

    if right is None:
        raise ConfigError(["--right or --wrong: which?"])
    out(commands.review_diagnosis(open_run_dir(runs, run), incident, right, whoami(), because))
    return 0


incident = typer.Typer(no_args_is_help=True, help="Export one incident for a ticket.")


@incident.command(epilog=examples("rolecall incident export inc-1-rollout-1 --anonymous -o ticket.tar.gz"))
def export(
    incident_id: Annotated[str, typer.Argument(help="Incident id, as `rolecall incidents` shows it.", metavar="ID")],
    run: RunOption = "latest",
    runs: RootOption = ROOT,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Output file (default: ID.tar.gz).", metavar="FILE.tar.gz")
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Replace node names and addresses by node-1, ip-1, ....")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Bundle journal, windows, events and logs of an incident, without secrets, prompts or user names."""
    from rolecall.reports.incident_export import export as bundle_of

    bundle = bundle_of(open_run_dir(runs, run), incident_id, anonymous=anonymous)
    content = bundle.archive()
    path = output or Path(f"{bundle.name}.tar.gz")
    write_atomically(path, content, private=True)
    shown: dict[str, Any] = {
        "incident_id": incident_id,
        "file": str(path),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "open": bundle.is_open,
        "members": [m.listing() for m in bundle.members],
        "left_out": list(bundle.left_out),
    }
    state = " (still open)" if bundle.is_open else ""
    head = f"{plain(path)}: {plain(incident_id)}{state}, {len(bundle.members)} files, {len(content)} bytes"
    show(as_json, shown, [head, *(f"  left out: {plain(text)}" for text in bundle.left_out)])
    return 0


app.add_typer(incident, name="incident")
