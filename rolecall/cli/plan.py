"""Commands on a plan: approve, reject, hold, lift."""

from typing import Annotated

import typer

from rolecall.cli.options import ROOT, ReasonOption, RootOption, RunOption, examples, out, whoami
from rolecall.core.rundir import open_run_dir

app = typer.Typer()

DigestArgument = Annotated[
    str, typer.Argument(help="Digest of the plan, as `rolecall incidents` shows it.", metavar="DIGEST")
]


@app.command(epilog=examples("rolecall approve 582be534fb4cd49b"))
def approve(digest: DigestArgument, run: RunOption = "latest", runs: RootOption = ROOT) -> None:
    """Approve a plan.

    An approval counts once, for the replica incarnations that the plan names."""
    from rolecall.recovery.operators import commands

    out(commands.approve_plan(open_run_dir(runs, run), digest, whoami()))


@app.command(epilog=examples('rolecall reject 582be534fb4cd49b --reason "checkpoint in progress"'))
def reject(digest: DigestArgument, because: ReasonOption, run: RunOption = "latest", runs: RootOption = ROOT) -> None:
    """Reject a proposed or held plan.

    Its incident is escalated to on-call."""
    from rolecall.recovery.operators import commands

    out(commands.reject_plan(open_run_dir(runs, run), digest, whoami(), because))


@app.command(epilog=examples('rolecall hold 582be534fb4cd49b --minutes 10 --reason "collecting a core dump"'))
def hold(
    digest: DigestArgument,
    because: ReasonOption,
    minutes: Annotated[float, typer.Option(help="Duration of the hold; up to a day.")] = 30.0,
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> None:
    """Delay a plan.

    While the hold lasts its action does not start and its approval does not expire.

    In mode act a plan starts as soon as it is made: there only a plan that a guard blocks can be held."""
    from rolecall.recovery.operators import commands

    out(commands.hold_plan(open_run_dir(runs, run), digest, whoami(), because, minutes * 60))


@app.command(epilog=examples("rolecall lift 582be534fb4cd49b"))
def lift(
    digest: DigestArgument,
    because: Annotated[str, typer.Option("--reason", help="Why; written to the journal.")] = "",
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> None:
    """End a hold early.

    The guards are evaluated again."""
    from rolecall.recovery.operators import commands

    out(commands.lift_hold(open_run_dir(runs, run), digest, whoami(), because))
