"""Commands on one plan: approve, reject, hold, lift."""

from typing import Annotated

import typer

from rolecall.cli.options import ROOT, ReasonOption, RootOption, RunOption, examples, out, whoami

app = typer.Typer()

DigestArgument = Annotated[
    str, typer.Argument(help="Digest of the plan, as `rolecall incidents` shows it.", metavar="DIGEST")
]


@app.command(epilog=examples("rolecall approve 582be534fb4cd49b"))
def approve(
    digest: DigestArgument,
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Approve a plan.

    An approval counts once, for the replica incarnations that the plan names."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.approve_plan(open_run_dir(runs, run), digest, whoami()))
    return 0


@app.command(epilog=examples('rolecall reject 582be534fb4cd49b --reason "checkpoint in progress"'))
def reject(
    digest: DigestArgument,
    because: ReasonOption,
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Reject a proposed or held plan.

    Its incident is escalated to on-call."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.reject_plan(open_run_dir(runs, run), digest, whoami(), because))
    return 0


@app.command(epilog=examples('rolecall hold 582be534fb4cd49b --minutes 10 --reason "collecting a core dump"'))
def hold(
    digest: DigestArgument,
    because: ReasonOption,
    minutes: Annotated[float, typer.Option(help="Duration of the hold; up to a day.")] = 30.0,
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Delay a plan.

    While the hold lasts its action does not start and its approval does not expire.

    In mode act a plan starts as soon as it is made: there only a plan that a guard blocks can be held."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.hold_plan(open_run_dir(runs, run), digest, whoami(), because, minutes * 60))
    return 0


@app.command(epilog=examples("rolecall lift 582be534fb4cd49b"))
def lift(
    digest: DigestArgument,
    because: Annotated[str, typer.Option("--reason", help="Why; written to the journal.")] = "",
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """End a hold early.

    The guards are evaluated again."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.lift_hold(open_run_dir(runs, run), digest, whoami(), because))
    return 0
