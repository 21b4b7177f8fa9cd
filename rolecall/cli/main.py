"""The `rolecall` command: one verb a function, each importing only what it needs.

This module alone may import every package; it is where sources, detectors, actuators and clocks are put together.
Exit codes: 0 fine; 1 a fault, a failed check or an incident left open; 2 wrong usage, unreadable input, or a file or
database that cannot be used; 3 a defect of rolecall; 130 interrupted.
"""

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rolecall.cli.dashboard import dashboards
from rolecall.cli.fleet import fleet
from rolecall.cli.grafana import grafana
from rolecall.cli.incident import incident
from rolecall.cli.node import node
from rolecall.cli.options import ROOT, JsonOption, RootOption, RunArgument, RunOption, out, print_json, whoami
from rolecall.cli.plan import words
from rolecall.cli.users import people
from rolecall.core.errors import (
    ConfigError,
    InvalidId,
    JournalCorrupt,
    JournalError,
    NotEnoughNodes,
    RolecallError,
    RunNotFound,
    UnreadableInput,
)
from rolecall.core.journal.database import redacted
from rolecall.core.text import plain
from rolecall.node.doctor import doctor_app

logger = logging.getLogger(__name__)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Keeps LLM RL post-training runs productive while machines fail: says who is faulty and why, and replaces it.",
)

USAGE_ERRORS = (InvalidId, ConfigError, JournalError, RunNotFound, NotEnoughNodes, UnreadableInput)
OF_DETECTORS = ("numpy", "polars", "safetensors", "sklearn")
"""Packages of rolecall[detector]: who wants to diagnose needs no torch and no Ray."""
TRACEBACK_ENV = "ROLECALL_TRACEBACK"
"""Set: a defect shows where it happened. A process that keeps a log (`watch`) always writes it there."""


def _complain(error: object) -> None:
    # Texts of job files and of Ray stand in messages: no control character of theirs reaches the terminal.
    for n, line in enumerate(redacted(str(error)).splitlines() or [""]):
        typer.echo(("rolecall: " if n == 0 else "") + plain(line), err=True)


app.add_typer(fleet)
app.add_typer(dashboards)
app.add_typer(doctor_app)
app.add_typer(incident, name="incident")
app.add_typer(words)
app.add_typer(node, name="node")
app.add_typer(people, name="people")
app.add_typer(grafana, name="grafana")


# --- running ------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="seed of task, model and moments of the faults")] = 0,
    algorithm: Annotated[
        str, typer.Option(help="what it learns with: grpo, dapo, ppo or tppo (default: grpo)", metavar="NAME")
    ] = "",
    task: Annotated[
        str,
        typer.Option(help="what it learns: digit_parity (default), or long_addition of varying length", metavar="NAME"),
    ] = "",
    faults: Annotated[
        str, typer.Option(help="faults in order, 'kind' or 'kind:how', comma separated; 'none' for the run to compare")
    ] = "rollout-kill,trainer-hang,rollout-slow",
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps; the run goes on while a fault is open")] = 120,
    run_id: Annotated[str, typer.Option("--id", help="name of the run (default: demo-<seed>-<time>)")] = "",
    runs: RootOption = ROOT,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="do not serve the dashboard")] = False,
    allow_injection: Annotated[
        bool, typer.Option("--allow-injection", help="let `rolecall inject` hurt this run")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="lines instead of the live display")] = False,
    minutes_max: Annotated[float, typer.Option(min=0.5, max=600, help="give up after this long")] = 10.0,
    hold_minutes: Annotated[float, typer.Option(min=0, max=600, help="train on for at least this long")] = 0.0,
    settings: Annotated[
        list[str], typer.Option("--set", help="any setting of the job, as detector.window_seconds=20")
    ] = [],  # noqa: B006
) -> int:
    """A real run on seven local nodes that loses replicas and keeps learning."""
    from rolecall.rl_runtime.faults.injector import KINDS
    from rolecall.session.demo import demo_job, parse_faults

    names = parse_faults(faults, {name: kind.hows for name, kind in KINDS.items()})
    allowed = bool(names) or allow_injection
    job = demo_job(
        seed=seed, num_steps=steps, injection_allowed=allowed, settings=settings, algorithm=algorithm, task=task
    )
    run_id = run_id or _new_run_id("demo", seed)
    return _execute(job, runs, run_id, names, not plain, minutes_max, hold_minutes, dashboard=not no_dashboard)


@app.command()
def run(
    job_file: Annotated[Path, typer.Argument(help="job file (YAML)", metavar="JOB.yaml")],
    run_id: Annotated[str, typer.Option("--id", help="name of the run (default: <job>-<seed>-<time>)")] = "",
    runs: RootOption = ROOT,
    minutes_max: Annotated[float, typer.Option(min=0.5, help="give up after this long")] = 60 * 24 * 7,
) -> int:
    """Runs a job without faults or display. `recovery.mode` in the job file decides whether rolecall acts."""
    from rolecall.core.config.job import load_job

    job = load_job(job_file)
    return _execute(job, runs, run_id or _new_run_id(job.name, job.seed), (), False, minutes_max, 0.0)


def _execute(
    job: Any,
    runs: Path,
    run_id: str,
    faults: Sequence[str],
    show: bool,
    minutes_max: float,
    hold_minutes: float,
    *,
    dashboard: bool = False,
) -> int:
    from rolecall.core.ids import checked_id
    from rolecall.session.demo import FaultSchedule
    from rolecall.session.display import summary
    from rolecall.session.session import Interrupted, Session

    checked_id(run_id, "run id")
    console = Console()
    session = Session(
        job=job,
        root=runs,
        run_id=run_id,
        schedule=FaultSchedule(job.seed, faults),
        show=show and console.is_terminal,
        minutes_max=minutes_max,
        hold_seconds=hold_minutes * 60,
        dashboard=dashboard,
    )
    try:
        report = session.execute()
    except FileExistsError:
        raise ConfigError([f"--id: a run {run_id!r} exists already in {runs}"]) from None
    except Interrupted:
        console.print(f"interrupted: everything of run {escape(run_id)} has been stopped", highlight=False)
        return 130
    console.print(summary(report))
    if dashboard:
        console.print(f"to look at it again: rolecall dashboard {escape(run_id)}", highlight=False, soft_wrap=True)
    return 0 if report["ok"] else 1


def _new_run_id(name: str, seed: int) -> str:
    import datetime

    return f"{name}-{seed}-{datetime.datetime.now():%m%d-%H%M%S}"


@app.command()
def down(run: RunArgument, runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Ends every process that belongs to a run: what a kill -9 of its supervisor left behind."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.rl_runtime.processes import stop_run
    from rolecall.watch.addresses import withdraw

    where = open_run_dir(runs, run)
    ended = stop_run(where.path)
    withdraw(where)
    if as_json:
        print_json({"run": where.run_id, "ended": [str(p) for p in ended]})
    else:
        out(f"{where.run_id}: ended {len(ended)} process(es)")
    return 0


@app.command()
def inject(
    run: RunArgument,
    kind: Annotated[str, typer.Option(help="which fault; an unknown one lists all")],
    target: Annotated[str, typer.Option(help="replica, as rollout/1; default: one chosen by seed")] = "",
    how: Annotated[str, typer.Option(help="hang: stop, gil, lock, read; slow: duty, quota, delay")] = "",
    seconds: Annotated[float, typer.Option(min=0, help="how long a slowness lasts; 0: until the target is gone")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    runs: RootOption = ROOT,
) -> int:
    """Injects a real fault into a run that was started with injection allowed, and into that run's processes only."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.rl_runtime.faults.injector import KINDS
    from rolecall.rl_runtime.faults.injector import inject as do

    if kind not in KINDS:
        raise ConfigError([f"--kind: {kind!r} is unknown, known are {', '.join(KINDS)}"])
    print_json(do(open_run_dir(runs, run), kind, target or None, how or None, seconds or None, seed))
    return 0


# --- watching -----------------------------------------------------------------------------------------------------


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # its own parser answers it
)
def agent(ctx: typer.Context) -> int:
    """The node agent; the same as `python -m rolecall.agent` (see its --help)."""
    from rolecall.agent.daemon import main as agent_main

    return agent_main(ctx.args)


@app.command()
def status(
    run: Annotated[str, typer.Argument()] = "latest", runs: RootOption = ROOT, as_json: JsonOption = False
) -> int:
    """Roles, replicas and open incidents of a run. Exit code 1 while an incident is open, or one cannot be read."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    value = commands.status(open_run_dir(runs, run))
    if as_json:
        print_json(value)
    else:
        out(commands.status_text(value))
    return 1 if value["open_incidents"] or value["broken_incidents"] else 0


@app.command()
def incidents(
    incident: Annotated[str, typer.Argument(help="incident id; all when left out", metavar="[ID]")] = "",
    run: RunOption = "latest",
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """What went wrong, why, and what was done about it."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    value = commands.incidents(open_run_dir(runs, run), incident or None)
    if as_json:
        print_json(value)
    else:
        out(commands.incidents_text(value))
    return 0


@app.command()
def pause(
    because: Annotated[str, typer.Option("--reason", help="why; shown everywhere")],
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Stops all acting before the next action. Watching and diagnosing go on."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.pause_recovery(open_run_dir(runs, run), whoami(), because))
    return 0


@app.command()
def resume(run: RunOption = "latest", runs: RootOption = ROOT) -> int:
    """Ends a pause."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.resume_recovery(open_run_dir(runs, run), whoami()))
    return 0


@app.command()
def approve(
    digest: Annotated[str, typer.Argument(help="the plan's digest, as `rolecall incidents` shows it")],
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Approves one plan, once, for the incarnations it names."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.approve_plan(open_run_dir(runs, run), digest, whoami()))
    return 0


@app.command()
def reject(
    digest: Annotated[str, typer.Argument(help="the plan's digest, as `rolecall incidents` shows it")],
    because: Annotated[str, typer.Option("--reason")],
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Rejects a plan that is proposed or held: its incident ends, and a person is told."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.reject_plan(open_run_dir(runs, run), digest, whoami(), because))
    return 0


@app.command()
def replace(
    replica: Annotated[str, typer.Argument(help="as rollout/3")],
    because: Annotated[str, typer.Option("--reason", help="why; goes into the journal")],
    run: RunOption = "latest",
    runs: RootOption = ROOT,
) -> int:
    """Asks for a replica to be replaced. The request goes through the same guards as a diagnosis."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.recovery.operators import commands

    out(commands.replace(open_run_dir(runs, run), replica, because, whoami()))
    return 0


# --- looking back -------------------------------------------------------------------------------------------------


@app.command()
def replay(
    incident: Annotated[str, typer.Argument(help="incident id", metavar="INCIDENT")],
    run: RunOption = "latest",
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Decides an incident again from what its diagnosis had read. Exit code 1 if the decision differs."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.watch.run import replay_incident

    value = replay_incident(open_run_dir(runs, run), incident)
    if as_json:
        print_json(value)
    else:
        out(value["text"])
    return 0 if value["same"] else 1


@app.command()
def audit(run: RunArgument = "latest", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Checks journal and ledger: every prompt group trained once or dropped with a reason, no line touched."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.views.audit import audit_run, audit_text

    found = audit_run(open_run_dir(runs, run))
    if as_json:
        print_json(found.summary())
    else:
        out(audit_text(found))
    return 0 if found.ok else 1


@app.command()
def report(run: RunArgument = "latest", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Writes report.json and report.html of a run again, and prints the summary."""
    from rolecall.core.rundir import open_run_dir
    from rolecall.reports.report import write_report
    from rolecall.session.display import summary

    value = write_report(open_run_dir(runs, run), None)
    if as_json:
        print_json(value)
    else:
        Console().print(summary(value))
    return 0 if value["ok"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; every error is one clear message, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    try:
        result = app(args=list(sys.argv[1:] if argv is None else argv), standalone_mode=False, prog_name="rolecall")
    except typer.Exit as e:
        return int(e.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except RolecallError as e:
        _complain(e)
        if isinstance(e, JournalCorrupt):
            from rolecall.reports.salvage import offer

            if left := offer(e):
                _complain(left)
        return 2 if isinstance(e, USAGE_ERRORS) else 1
    except BrokenPipeError:
        # Whoever read our output (`| head`) has enough. The interpreter's own flush at the end must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:  # noqa: BLE001 - the end of the program: whatever it is, a person reads it
        return _show_failure(e)
    return int(result or 0)


def _show_failure(error: Exception) -> int:
    """Tells what was not raised on purpose; returns the exit code."""
    if logging.root.handlers:
        logger.error("the command failed", exc_info=error)
    elif os.environ.get(TRACEBACK_ENV):
        traceback.print_exception(error)
    show = getattr(error, "show", None)
    if show is not None:  # Click's own usage errors know how to show themselves
        show()
        return int(getattr(error, "exit_code", 2))
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("rolecall"):
        extra = "detector" if str(error.name).partition(".")[0] in OF_DETECTORS else "all"
        _complain(f"this needs {error.name}, which is not installed; try: pip install 'rolecall[{extra}]'")
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        _complain(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _complain(f"{error.strerror}: free some room and try again")
        return 2
    _complain(f"{type(error).__name__}: {error}\nThis is a defect of rolecall; with {TRACEBACK_ENV}=1 it says where.")
    return 3
