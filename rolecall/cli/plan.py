"""What a person says of one plan or one diagnosis: hold, lift, mark. Approve and reject stand in `rolecall.cli.main`."""

from typing import Annotated

import typer

from rolecall.cli.options import ROOT, RootOption, RunOption, out, whoami
from rolecall.core.errors import ConfigError

words = typer.Typer()

DigestArgument = Annotated[str, typer.Argument(help="the plan's digest, as `rolecall incidents` shows it")]


@words.command()
def hold(
    digest: DigestArgument,
    because: Annotated[str, typer.Option("--reason", help="why; shown everywhere")],
    minutes: Annotated[float, typer.Option(help="when the hold ends by itself; up to a day")] = 30.0,
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Nothing of a plan begins for so long, and its proposal does not lapse. In mode act a plan begins in the moment in
    which it is made: there only what a guard holds can be held."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.hold_plan(open_run_dir(runs, run), digest, whoami(), because, minutes * 60))
    return 0


@words.command()
def lift(
    digest: DigestArgument,
    because: Annotated[str, typer.Option("--reason", help="why; goes into the journal")] = "",
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Ends a hold before its time. The guards look again."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.lift_hold(open_run_dir(runs, run), digest, whoami(), because))
    return 0


@words.command()
def mark(
    incident: Annotated[str, typer.Argument(help="incident id", metavar="INCIDENT")],
    right: Annotated[bool | None, typer.Option("--right/--wrong", help="was the diagnosis right?")] = None,
    because: Annotated[str, typer.Option("--reason", help="why; goes into the journal")] = "",
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Says whether a diagnosis was right, also after its incident's end. The newest word counts; precision follows."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    if right is None:
        raise ConfigError(["--right or --wrong: which?"])
    out(commands.review_diagnosis(open_run_dir(runs, run), incident, right, whoami(), because))
    return 0
