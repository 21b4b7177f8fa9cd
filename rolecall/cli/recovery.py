"""Commands on recovery: what it does, whether it may, and what it should replace."""

from typing import Annotated

import typer

from rolecall.cli.options import (
    ROOT,
    JsonOption,
    LatestRunArgument,
    ReasonOption,
    RootOption,
    RunOption,
    examples,
    out,
    show,
    whoami,
)
from rolecall.core.rundir import open_run_dir

app = typer.Typer()


@app.command(epilog=examples("rolecall status", "rolecall status my-run --json"))
def status(run: LatestRunArgument = "latest", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Show roles, replicas and open incidents.

    Exit code 1 while an incident is open or unreadable."""
    from rolecall.recovery.operators import queries

    value = queries.status(open_run_dir(runs, run))
    show(as_json, value, [queries.status_text(value)])
    return 1 if value["open_incidents"] or value["broken_incidents"] else 0


@app.command(epilog=examples('rolecall pause --reason "network maintenance until 18:00"'))
def pause(because: ReasonOption, run: RunOption = "latest", runs: RootOption = ROOT) -> None:
    """Pause recovery.

    No further action starts. Detection and diagnosis continue."""
    from rolecall.recovery.operators import commands

    out(commands.pause_recovery(open_run_dir(runs, run), whoami(), because))


@app.command(epilog=examples("rolecall resume"))
def resume(run: RunOption = "latest", runs: RootOption = ROOT) -> None:
    """Resume recovery after a pause."""
    from rolecall.recovery.operators import commands

    out(commands.resume_recovery(open_run_dir(runs, run), whoami()))


@app.command(epilog=examples('rolecall replace rollout/3 --reason "fan failure on node-4"'))
def replace(
    replica: Annotated[str, typer.Argument(help="Replica, as rollout/3.", metavar="REPLICA")],
    because: ReasonOption,
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> None:
    """Request the replacement of a replica.

    The same guards apply as to a diagnosis."""
    from rolecall.recovery.operators import commands

    out(commands.replace(open_run_dir(runs, run), replica, because, whoami()))
