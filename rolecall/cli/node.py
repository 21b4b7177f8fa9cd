"""Commands on nodes: list, quarantine, drain, return, burn-in."""

import os
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from rolecall.cli.options import ROOT, JsonOption, RootOption, RunOption, out, print_json, whoami
from rolecall.core.errors import ConfigError
from rolecall.core.text import plain

node = typer.Typer(no_args_is_help=True, help="Nodes: who had faults, where nothing is placed, and burning one in.")

NodeArgument = Annotated[str, typer.Argument(help="as `rolecall node list` shows it", metavar="NODE")]
ReasonOption = Annotated[str, typer.Option("--reason", help="why; shown everywhere")]
BURN_IN_SECONDS = 60.0


@node.command(name="list")
def list_nodes(run: RunOption = "latest", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Every node with its replicas, quarantine, burn-ins and incidents; those with most incidents first."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    rows = commands.nodes(open_run_dir(runs, run))
    if as_json:
        print_json(rows)
        return 0
    for row in rows:
        for line in _lines(row):
            out(plain(line))
    if not rows:
        out("no node is known")
    return 0


def _lines(row: Mapping[str, Any]) -> Iterable[str]:
    """A node for people: one line, and one more for each thing that was said of it."""
    replicas = ", ".join(f"{r['replica']}#{r['incarnation']} {r['state'] or 'not there'}" for r in row["replicas"])
    num = row["num_incidents"]
    yield f"{row['node']:<16} {num} incident{'' if num == 1 else 's'}  {replicas or 'nothing runs there'}"
    if row["quarantined"]:
        since = _utc(row["quarantined_since"])
        yield f"  QUARANTINED since {since} by {row['quarantined_by']}: {row['quarantined_because']}"
    if row["drained_at"] is not None:
        moved = ", ".join(row["moved"]) or "nothing was to be moved"
        yield f"  drained {_utc(row['drained_at'])} by {row['drained_by']}: {moved}"
    if row["incidents"]:
        yield f"  {', '.join(row['incidents'][-5:])}"
    if row["burn_ins"]:
        newest = row["burn_ins"][-1]
        failed = ", ".join(c["name"] for c in newest["result"]["checks"] if c["passed"] is False)
        word = f"FAILED ({failed})" if failed else "passed"
        yield f"  burn-in {_utc(newest['at'])} by {newest['by']}: {word}, {len(row['burn_ins'])} recorded"


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@node.command()
def quarantine(name: NodeArgument, because: ReasonOption, run: RunOption = "latest", runs: RootOption = ROOT) -> int:
    """Nothing is placed on a node any more; what runs there goes on."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.quarantine(open_run_dir(runs, run), name, whoami(), because))
    return 0


@node.command()
def drain(name: NodeArgument, because: ReasonOption, run: RunOption = "latest", runs: RootOption = ROOT) -> int:
    """Quarantines a node and asks for each of its replicas to be moved, through the same guards as a diagnosis."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.drain(open_run_dir(runs, run), name, whoami(), because))
    return 0


@node.command(name="return")
def return_node(name: NodeArgument, because: ReasonOption, run: RunOption = "latest", runs: RootOption = ROOT) -> int:
    """Ends a quarantine: replicas may be placed there again."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.return_node(open_run_dir(runs, run), name, whoami(), because))
    return 0


@node.command(name="burn-in")
def burn_in(
    name: Annotated[str, typer.Argument(help="what this machine is called (default: its host name)")] = "",
    run: Annotated[str, typer.Option("--run", help="record the result in this run's journal; needs NODE")] = "",
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="of work, shared among the checks")
    ] = BURN_IN_SECONDS,
    folder: Annotated[
        Path | None, typer.Option(help="where the disk is tested (default: the temporary folder)")
    ] = None,
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Works THIS machine hard and compares its answers bit by bit: GPU, cores, memory, disk, loopback. Says what it could
    not check. Exit code 1 if a check failed, or none could be done. Not for a node in use: it takes all cores in turn."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.node.burn_in import burn_in as work
    from rolecall.node.burn_in_checks import CHECKS
    from rolecall.recovery.operators import commands

    if run and not name:
        raise ConfigError(["NODE: which node is this? It is recorded under that name"])
    place = open_run_dir(runs, run) if run else None
    where = folder or Path(tempfile.gettempdir())
    if not where.is_dir():
        raise ConfigError([f"--folder: {where} is no folder"])
    found = work(CHECKS, seconds, where, progress=None if as_json else _say)
    told = {"node": name or os.uname().nodename, **found.to_dict()}
    recorded = commands.burned_in(place, name, found.to_dict(), whoami()) if place is not None else ""
    if as_json:
        print_json(told)
        return 0 if found.passed else 1
    for check in found.checks:
        word = {True: "passed", False: "FAILED", None: "not checked"}[check.passed]
        out(plain(f"{check.name:<10} {word}: {check.because}"))
    out(plain(f"{told['node']}: {'passed' if found.passed else 'FAILED'} in {found.seconds:.0f} s"))
    if recorded:
        out(recorded)
    return 0 if found.passed else 1


def _say(text: str) -> None:
    typer.echo(plain(text), err=True)
