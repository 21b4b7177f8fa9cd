"""Commands of operators: on recovery (status, pause, resume, replace), plans and incidents."""

import hashlib
import shlex
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rolecall.cli.options import (
    ROOT,
    Commands,
    HelpGroup,
    JsonOption,
    ReasonOption,
    RootOption,
    RunArgument,
    RunOption,
    check_output,
    chosen_run,
    confirm,
    examples,
    out,
    present,
    show,
    whoami,
)
from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.rundir import RunDir, find_run_dir, write_atomically
from rolecall.core.text import plain

app = Commands()

AGENTS_SHOWN_MAX = 8
"""In the command that starts a watch again."""


@app.command(epilog=examples("rolecall status", "rolecall status my-run --json"))
def status(run: RunArgument = "", option: RunOption = "", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Show steps, replicas and open incidents; of a job that rolecall only watches, its ranks with their PIDs.

    Exit code 0: no open incident; 1: one is open or unreadable; 2: there is no such run, or its journal cannot be read.
    """
    from rolecall.core.clock import SystemClock
    from rolecall.core.journal.journal import Journal
    from rolecall.recovery.operators import queries
    from rolecall.terminal import recovery
    from rolecall.views import observed_ranks

    where = chosen_run(runs, run, option)
    value = queries.status(where)
    with closing(Journal(where.database_url, create=False)) as journal:
        ranks = observed_ranks.from_json(journal.flag(observed_ranks.FLAG))
    value["ranks"] = [asdict(r) for r in ranks]
    present(as_json, value, recovery.status(value, SystemClock().wall(), where.shell_name, _start_of(where)))
    return 1 if value["open_incidents"] or value["broken_incidents"] else 0


def _start_of(run: RunDir) -> str:
    """The command that watches the run of `rolecall watch agents` again, and the options to add; empty for another run.
    Agents are given with their nodes: an address alone is refused while its agent does not answer."""
    agents: dict[str, str] = run.read().get("agents") or {}
    if not agents:
        return ""
    root = run.path.parent
    runs = "" if run.shell_name == run.run_id else f" --runs {shlex.quote(str(root))}"
    named = ",".join(f"{n}={url}" for n, url in agents.items()) if len(agents) <= AGENTS_SHOWN_MAX else "AGENTS"
    command = f"rolecall watch agents {shlex.quote(named)} --id {run.run_id}{runs}"
    return f"{command} (add its --config, --job, --credentials, --webhook and --metrics, if it had them)"


@app.command(epilog=examples('rolecall pause --reason "network maintenance until 18:00"'))
def pause(because: ReasonOption, run: RunArgument = "", option: RunOption = "", runs: RootOption = ROOT) -> None:
    """Pause recovery.

    No further action starts. Detection and diagnosis continue."""
    from rolecall.recovery.operators import commands

    confirm(commands.pause_recovery(chosen_run(runs, run, option), whoami(), because))


@app.command(epilog=examples("rolecall resume"))
def resume(run: RunArgument = "", option: RunOption = "", runs: RootOption = ROOT) -> None:
    """Resume recovery after a pause."""
    from rolecall.recovery.operators import commands

    confirm(commands.resume_recovery(chosen_run(runs, run, option), whoami()))


@app.command(epilog=examples('rolecall replace rollout/3 --reason "fan failure on node-4"'))
def replace(
    replica: Annotated[str, typer.Argument(help="Replica, as rollout/3.", metavar="REPLICA")],
    because: ReasonOption = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the calls that would be made to replace it, and make none.")
    ] = False,
    run: RunOption = "",
    runs: RootOption = ROOT,
) -> None:
    """Request the replacement of a replica.

    The same guards apply as to a diagnosis. --dry-run is for jobs that rolecall watches with an actuator: it asks
    nothing of the watch, and needs no reason."""
    from rolecall.recovery.operators import commands

    if dry_run:
        from rolecall.watch.dry_run import planned_calls

        out(planned_calls(chosen_run(runs, run), replica))
        return
    confirm(commands.replace(chosen_run(runs, run), replica, because, whoami()))


DigestArgument = Annotated[
    str, typer.Argument(help="Digest of the plan, as `rolecall incidents` shows it.", metavar="DIGEST")
]


@app.command(epilog=examples("rolecall approve 582be534fb4cd49b"))
def approve(digest: DigestArgument, run: RunOption = "", runs: RootOption = ROOT) -> None:
    """Approve a plan.

    An approval counts once, for the replica incarnations that the plan names."""
    from rolecall.recovery.operators import commands

    confirm(commands.approve_plan(chosen_run(runs, run), digest, whoami()))


@app.command(epilog=examples('rolecall reject 582be534fb4cd49b --reason "checkpoint in progress"'))
def reject(digest: DigestArgument, because: ReasonOption, run: RunOption = "", runs: RootOption = ROOT) -> None:
    """Reject a proposed or held plan.

    Its incident is escalated to on-call."""
    from rolecall.recovery.operators import commands

    confirm(commands.reject_plan(chosen_run(runs, run), digest, whoami(), because))


@app.command(epilog=examples('rolecall hold 582be534fb4cd49b --minutes 10 --reason "a core dump"'))
def hold(
    digest: DigestArgument,
    because: ReasonOption,
    minutes: Annotated[float, typer.Option(help="Duration of the hold; up to a day.")] = 30.0,
    run: RunOption = "",
    runs: RootOption = ROOT,
) -> None:
    """Delay a plan.

    While the hold lasts its action does not start and its approval does not expire.

    In mode act a plan starts as soon as it is made: there only a plan that a guard blocks can be held."""
    from rolecall.recovery.operators import commands

    confirm(commands.hold_plan(chosen_run(runs, run), digest, whoami(), because, minutes * 60))


@app.command(epilog=examples("rolecall lift 582be534fb4cd49b"))
def lift(
    digest: DigestArgument,
    because: Annotated[str, typer.Option("--reason", help="Why; written to the journal.")] = "",
    run: RunOption = "",
    runs: RootOption = ROOT,
) -> None:
    """End a hold early.

    The guards are evaluated again."""
    from rolecall.recovery.operators import commands

    confirm(commands.lift_hold(chosen_run(runs, run), digest, whoami(), because))


@app.command(epilog=examples("rolecall incidents", "rolecall incidents inc-1-rollout-1 --json"))
def incidents(
    incident: Annotated[str, typer.Argument(help="Incident id (default: all incidents).", metavar="ID")] = "",
    run: RunOption = "",
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """List incidents: open ones, then the newest first.

    Each with its diagnosis, evidence, actions and outcome.

    Exit code 0: none of them is open; 1: one is open or unreadable; 2: there is no such incident or run."""
    from rolecall.core.clock import SystemClock
    from rolecall.recovery.operators import queries
    from rolecall.terminal import recovery

    where = chosen_run(runs, run)
    try:
        value = queries.incidents(where, incident or None)
    except CommandRefused as e:
        if incident != "latest" and find_run_dir(runs, incident) is None:
            raise
        raise CommandRefused(f"{e}. {incident} is a run: did you mean --run {shlex.quote(incident)}?") from None
    present(as_json, value, recovery.incidents(value, SystemClock().wall(), where.shell_name))
    return int(any(i["open"] or i["set_aside"] for i in value))


@app.command(epilog=examples('rolecall review inc-1-rollout-1 --wrong --reason "the switch was at fault"'))
def review(
    incident: Annotated[str, typer.Argument(help="Incident id.", metavar="INCIDENT")],
    right: Annotated[bool, typer.Option("--right", help="The diagnosis was right.")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="It was wrong.")] = False,
    because: Annotated[str, typer.Option("--reason", help="Why; written to the journal.")] = "",
    run: RunOption = "",
    runs: RootOption = ROOT,
) -> int:
    """Review a diagnosis: was it right or wrong.

    Possible while the incident is open and after it has closed. The newest review counts."""
    from rolecall.recovery.operators import commands

    if right == wrong:
        raise ConfigError(["--right or --wrong: which?"])
    confirm(commands.review_diagnosis(chosen_run(runs, run), incident, right, whoami(), because))
    return 0


incident = Commands(cls=HelpGroup, no_args_is_help=True, help="Export one incident for a ticket.")


@incident.command(epilog=examples("rolecall incident export inc-1-rollout-1 --anonymous -o ticket.tar.gz"))
def export(
    incident_id: Annotated[str, typer.Argument(help="Incident id, as `rolecall incidents` shows it.", metavar="ID")],
    run: RunOption = "",
    runs: RootOption = ROOT,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Output file (default: ID.tar.gz).", metavar="FILE.tar.gz")
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Replace node names and addresses by node-1, ip-1 and so on.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Bundle journal, windows, events and logs of an incident, without secrets, prompts or user names."""
    from rolecall.reports.incident_export import export as bundle_of

    if output is not None:
        check_output("-o", output)
    bundle = bundle_of(chosen_run(runs, run), incident_id, anonymous=anonymous)
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
