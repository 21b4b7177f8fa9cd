"""Commands on what a run left behind: replay, audit, report."""

from typing import Annotated

import typer
from rich.console import Console

from rolecall.cli.options import (
    ROOT,
    JsonOption,
    LatestRunArgument,
    RootOption,
    RunOption,
    examples,
    out,
    print_json,
)

app = typer.Typer()


@app.command(epilog=examples("rolecall replay inc-1-rollout-1"))
def replay(
    incident: Annotated[str, typer.Argument(help="Incident id.", metavar="INCIDENT")],
    run: RunOption = "latest",
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Repeat a diagnosis from its recorded inputs.

    Exit code 1 if the result differs."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.watch.run import replay_incident

    value = replay_incident(open_run_dir(runs, run), incident)
    if as_json:
        print_json(value)
    else:
        out(value["text"])
    return 0 if value["same"] else 1


@app.command(epilog=examples("rolecall audit my-run"))
def audit(run: LatestRunArgument = "latest", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Verify journal and ledger.

    Each prompt group was trained once or dropped with a reason, and no line was altered."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.views.audit import audit_run, audit_text

    found = audit_run(open_run_dir(runs, run))
    if as_json:
        print_json(found.summary())
    else:
        out(audit_text(found))
    return 0 if found.ok else 1


@app.command(epilog=examples("rolecall report my-run --json"))
def report(run: LatestRunArgument = "latest", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Write the report of a run.

    Writes report.json and report.html again, and prints the summary."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.reports.report import write_report
    from rolecall.session.display import summary

    value = write_report(open_run_dir(runs, run), None)
    if as_json:
        print_json(value)
    else:
        Console().print(summary(value))
    return 0 if value["ok"] else 1
