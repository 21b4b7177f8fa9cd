"""Commands on nodes: agent, doctor; list, quarantine, drain, return, burn-in."""

import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rolecall.cli.options import (
    ROOT,
    Commands,
    CredentialsOption,
    HelpGroup,
    JsonOption,
    ReasonOption,
    RootOption,
    RunArgument,
    RunOption,
    chosen_run,
    confirm,
    examples,
    present,
    progress,
    show,
    whoami,
)
from rolecall.cli.simulate import GpusOption
from rolecall.core.errors import ConfigError
from rolecall.core.text import plain, spans, utc

if TYPE_CHECKING:
    from rolecall.node.doctor import NodeCheck

app = Commands()

PID_MAX = 1 << 22
"""Of the kernel, on any machine."""


@app.command(
    epilog=examples(
        "rolecall doctor",
        "rolecall doctor --config /etc/rolecall/agent.yaml --nhc",
        "rolecall doctor --agents http://node-2:9477       # compare clocks",
        "rolecall doctor --job all                  # what is seen of the jobs here",
        "rolecall doctor --job 4711 --agents nodes.yaml --config watch.yaml",
        "rolecall doctor job.yaml                   # does the job fit this machine?",
        "rolecall doctor job.yaml --plan --gpus 4096   # standby machines, ETTR",
    )
)
def doctor(
    job: Annotated[
        Path | None,
        typer.Argument(
            help="A job file: does it fit this machine? Then the node itself is not checked.", metavar="JOB"
        ),
    ] = None,
    running: Annotated[
        str | None,
        typer.Option(
            "--job",
            help="A job that runs: its run id or MASTER_ADDR:MASTER_PORT, or all. Lists what a watch can see, name, "
            "replace and end in it, and why not the rest.",
            metavar="NAME",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="agent.yaml of this node's agent; with --job: the watch file.")
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            min=1, max=PID_MAX, help="A rank: may it register with the agent, and do its NCCL settings allow diagnosis?"
        ),
    ] = None,
    agents: Annotated[
        str,
        typer.Option(
            help="Other agents, as in `rolecall watch agents`: compare their clocks with this node's. With --job: the "
            "job's agents (default: this node's)."
        ),
    ] = "",
    credentials: CredentialsOption = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="With JOB: standby machines, checkpoint period and ETTR on a fleet, simulated."),
    ] = False,
    gpus: GpusOption = None,
    step_seconds: Annotated[
        float | None, typer.Option("--step-seconds", min=0.01, max=86_400, help="With --plan: a step of the job.")
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option("--settings", help="With --plan: settings of `rolecall simulate run`.", metavar="FILE"),
    ] = None,
    nhc: Annotated[
        bool, typer.Option("--nhc", help="Node-health-check exit codes: 0 ok, 1 warning, 2 broken, 3 unknown.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Check this node, a job that runs, or whether a job fits this node; print fixes.

    Checks whether the node can be watched. With --job, asks the agents what they know of each rank. With JOB, compares
    an estimate of the memory that each process of the job needs with what is free; with --plan, simulates it on a fleet
    that meets faults instead.

    Exit code 0: nothing is broken; 1: something is, or no rank of the running job is seen, or an agent does not answer;
    2: wrong usage, an unreadable file, or a mistake in JOB."""
    from rolecall.node.doctor import NHC_CODES, CheckLevel, examine, worst
    from rolecall.node.facts import read_facts
    from rolecall.terminal import doctor as text

    if running is not None:
        if not running:
            raise ConfigError(["--job: name a job, or all"])
        if job or pid or plan or nhc:
            raise ConfigError(["--job: not with JOB, --pid, --plan or --nhc"])
        return _running_job(running, agents, config, credentials, as_json)
    if plan:
        if config or pid or agents or credentials or nhc:
            raise ConfigError(["--plan: not with --config, --pid, --agents, --credentials or --nhc"])
        return _plan(job, settings, gpus, step_seconds, as_json)
    if gpus is not None or step_seconds is not None or settings is not None:
        raise ConfigError(["--gpus, --step-seconds, --settings: only with --plan"])
    if job is not None:
        if config or pid or agents or credentials:
            raise ConfigError(
                ["JOB: not with --config, --pid, --agents or --credentials: these belong to the check of the node"]
            )
        checks = _job_checks(job)
    else:
        checks = examine(read_facts(config, pid, agents=agents, credentials=credentials))
    level = worst(checks)
    value = {"level": str(level), "checks": [{**asdict(c), "level": str(c.level)} for c in checks]}
    present(as_json, value, text.checks(checks))
    return NHC_CODES[level] if nhc else int(level is CheckLevel.BROKEN)


def _running_job(name: str, agents: str, config: Path | None, credentials: Path | None, as_json: bool) -> int:
    from rolecall.agent.data_dir import data_dirs_of_jobs, default_data_dir
    from rolecall.agent.local_access import local_authorization, reached, served_url
    from rolecall.core.clock import SystemClock
    from rolecall.core.config.watched import load_watched
    from rolecall.node.facts import DEFAULT_PORT
    from rolecall.terminal import doctor as text
    from rolecall.watch.agents import entries_of, is_file, listed, node_of
    from rolecall.watch.capabilities import capabilities
    from rolecall.watch.job_facts import getter, read_job
    from rolecall.watch.panels import authorization

    own = served_url(default_data_dir(os.geteuid(), os.environ)) or f"http://127.0.0.1:{DEFAULT_PORT}"
    named = agents or reached(own)
    entries = entries_of(Path(named)) if is_file(named) else listed(named)
    watched = None if config is None else load_watched(config)
    given, places = authorization(credentials, {}), data_dirs_of_jobs(os.geteuid(), os.environ)

    def header(url: str) -> str:
        return given or local_authorization(url, places)

    facts = read_job(
        entries,
        name,
        watched,
        wall_at=SystemClock().wall(),
        ask_node=lambda url: node_of(url, header(url)),
        get=getter(header),
        may_read_stacks=lambda url: header(url).startswith("Bearer "),
    )
    found = capabilities(facts)
    lost = [n for n in facts.nodes if n.unreachable]
    value = {
        "job": name,
        "ranks": [rank.to_dict() for rank in found],
        "nodes": [{"node": n.node, "url": n.url, "unreachable": n.unreachable} for n in facts.nodes],
        "other_jobs": list(facts.other_jobs),
        "processes_of_unknown_job": facts.unknown_job,
    }
    present(as_json, value, text.job(name, facts, found))
    return int(bool(lost) or not found)


PLAN_SEEDS = 10


def _plan(job: Path | None, file: Path | None, gpus: int | None, step_seconds: float | None, as_json: bool) -> int:
    from rolecall.core.config.job import load_job
    from rolecall.simulate.plan import recommend, settings_of_job
    from rolecall.simulate.settings import SimulationSettings, load_settings, resized
    from rolecall.terminal import simulate as text

    if job is None:
        raise ConfigError(["JOB: needed with --plan"])
    base = load_settings(file) if file else SimulationSettings()
    found = settings_of_job(load_job(job), base)
    if step_seconds is not None:
        found = found.changed(step_seconds=step_seconds)
    advice = recommend(resized(found, gpus), PLAN_SEEDS)
    present(as_json, advice.to_dict(), text.plan(advice))
    return 0


def _job_checks(path: Path) -> "tuple[NodeCheck, ...]":
    from rolecall.core.config.job import load_job
    from rolecall.node.job_check import examine_job
    from rolecall.rl_runtime.cluster.gpus import gpus_of_nodes
    from rolecall.rl_runtime.cluster.reconcile import place
    from rolecall.rl_runtime.device import device_of, found_hardware
    from rolecall.rl_runtime.tasks.check import free_memory, model_size

    job, hardware = load_job(path), found_hardware()
    place(job)
    lacking: list[str] = []
    try:
        gpus_of_nodes(job, hardware)
    except ConfigError as e:
        lacking += e.problems
    device = job.runtime.device or device_of(None, hardware)
    return examine_job(job, model_size(job), free_memory(device, hardware), device, lacking)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # the agent's own parser answers --help
)
def agent(ctx: typer.Context) -> int:
    """Run the agent of this node; `agent token` prints its token."""
    # The agent parses its own arguments, so that it starts without typer and pydantic.
    from rolecall.agent.daemon import main

    try:
        return main(ctx.args)
    except SystemExit as ended:  # of its parser
        return int(ended.code or 0)


node = Commands(cls=HelpGroup, no_args_is_help=True, help="List, quarantine, drain and test nodes.")

NodeArgument = Annotated[str, typer.Argument(help="Node, as `rolecall node list` shows it.", metavar="NODE")]
BURN_IN_SECONDS = 60.0


@node.command(name="list", epilog=examples("rolecall node list", "rolecall node list my-run --json"))
def list_nodes(
    run: RunArgument = "", option: RunOption = "", runs: RootOption = ROOT, as_json: JsonOption = False
) -> None:
    """List nodes with their replicas, quarantine, burn-in results and incidents; most incidents first.

    Of a job that rolecall only watches: the nodes of its agents, with the ranks that its watch saw last."""
    from rolecall.core.journal.journal import Journal
    from rolecall.recovery.operators import commands
    from rolecall.views import observed_ranks

    where = chosen_run(runs, run, option)
    rows = commands.nodes(where)
    with closing(Journal(where.database_url, create=False)) as journal:
        seen = observed_ranks.from_json(journal.flag(observed_ranks.FLAG))
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank in seen:
        if rank.is_alive:
            ranks.setdefault(rank.node, {}).setdefault(rank.replica, []).append(rank.rank)
    rows = [{**row, "ranks": ranks.get(row["node"], {})} for row in rows]
    show(as_json, rows, [plain(line) for row in rows for line in _lines(row)] or ["no node is known"])


def _lines(row: Mapping[str, Any]) -> Iterable[str]:
    counted = {r["replica"]: f"#{r['incarnation']} {r['state'] or 'absent'}" for r in row["replicas"]}
    ranks = {replica: f" {spans(numbers)}" for replica, numbers in row["ranks"].items()}
    here = ", ".join(f"{replica}{text}" for replica, text in {**ranks, **counted}.items())
    num = row["num_incidents"]
    yield f"{row['node']:<16} {num} incident{'' if num == 1 else 's'}  {here or 'idle'}"
    if row["quarantined"]:
        since = utc(row["quarantined_since"])
        yield f"  QUARANTINED since {since} by {row['quarantined_by']}: {row['quarantined_because']}"
    if row["drained_at"] is not None:
        moved = ", ".join(row["moved"]) or "nothing to move"
        yield f"  drained {utc(row['drained_at'])} by {row['drained_by']}: {moved}"
    if row["incidents"]:
        yield f"  {', '.join(row['incidents'][-5:])}"
    if row["burn_ins"]:
        newest = row["burn_ins"][-1]
        failed = ", ".join(c["name"] for c in newest["result"]["checks"] if c["passed"] is False)
        word = f"FAILED ({failed})" if failed else "passed"
        yield f"  burn-in {utc(newest['at'])} by {newest['by']}: {word}, {len(row['burn_ins'])} recorded"


@node.command(epilog=examples('rolecall node quarantine node-4 --reason "ECC errors"'))
def quarantine(name: NodeArgument, because: ReasonOption, run: RunOption = "", runs: RootOption = ROOT) -> None:
    """Stop placing replicas on a node. What runs there continues.

    Of a job that rolecall only watches: its watch calls the node unfit (/v1/unfit), and nothing else is done."""
    from rolecall.recovery.operators import commands

    confirm(commands.quarantine(chosen_run(runs, run), name, whoami(), because))


@node.command(epilog=examples('rolecall node drain node-4 --reason "maintenance"'))
def drain(name: NodeArgument, because: ReasonOption, run: RunOption = "", runs: RootOption = ROOT) -> None:
    """Quarantine a node and move its replicas away. The same guards apply as to a diagnosis."""
    from rolecall.recovery.operators import commands

    confirm(commands.drain(chosen_run(runs, run), name, whoami(), because))


@node.command(name="return", epilog=examples('rolecall node return node-4 --reason "DIMM replaced"'))
def return_node(name: NodeArgument, because: ReasonOption, run: RunOption = "", runs: RootOption = ROOT) -> None:
    """End a quarantine: replicas may be placed on the node again, and its watch no longer calls it unfit for it."""
    from rolecall.recovery.operators import commands

    confirm(commands.return_node(chosen_run(runs, run), name, whoami(), because))


@node.command(name="end", epilog=examples("rolecall node end 4711 --start-ticks 812345"))
def end(
    pid: Annotated[int, typer.Argument(min=2, max=PID_MAX, help="PID on this node.", metavar="PID")],
    start_ticks: Annotated[
        int,
        typer.Option(
            "--start-ticks",
            help="Its start time (field 22 of /proc/PID/stat). A process that started at another time is not ended.",
        ),
    ],
    grace: Annotated[float, typer.Option("--grace", min=0, max=600, help="Seconds after SIGTERM until SIGKILL.")] = 0.0,
    orphan: Annotated[bool, typer.Option("--orphan", help="Only an engine process whose server is gone.")] = False,
) -> None:
    """End a process of this node and its descendants.

    Never another process that has its PID by now. Exit code 2 if it does not end."""
    from rolecall.node.end_process import end_process
    from rolecall.node.orphans import refuse_unless_orphan

    if orphan:
        refuse_unless_orphan(pid, start_ticks)
    confirm(end_process(pid, start_ticks, grace_seconds=grace))


@node.command(epilog=examples("rolecall node orphans", "rolecall node orphans --json"))
def orphans(as_json: JsonOption = False) -> int:
    """List engine processes of THIS machine whose server is gone, with the command that ends each.

    Exit code 1 if there are any."""
    from rolecall.node.orphans import find_orphans, gpu_bytes_by_pid, running_processes

    found = list(find_orphans(running_processes(time.time()), gpu_bytes_by_pid()))
    lines = []
    for orphan in found:
        held = "" if orphan.gpu_bytes is None else f", {orphan.gpu_bytes / 2**30:.1f} GiB of GPU memory"
        hours = f"{orphan.age_seconds / 3600:.1f} h old"
        lines.append(f"{orphan.title}: pid {orphan.pid}, {hours}{held}, child of {orphan.adopted_by}")
        lines.append(f"  {orphan.command}")
    show(as_json, [o.to_dict() for o in found], [*map(plain, lines)] or ["no engine process without its server"])
    return 1 if found else 0


@node.command(
    name="burn-in", epilog=examples("rolecall node burn-in --seconds 600", "rolecall node burn-in node-4 --run latest")
)
def burn_in(
    name: Annotated[str, typer.Argument(help="Name of this node (default: its host name).", metavar="NODE")] = "",
    run: Annotated[str, typer.Option("--run", help="Record the result in this run's journal; needs NODE.")] = "",
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="Total duration, shared among the checks.")
    ] = BURN_IN_SECONDS,
    folder: Annotated[Path | None, typer.Option(help="Where to test the disk (default: the temporary folder).")] = None,
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Stress-test THIS machine: GPU, CPU cores, memory, disk, loopback; results are compared bit by bit.

    Lists what could not be checked. Exit code 1 if a check failed or none could run. Uses all cores in turn: do not run
    it on a node in use."""
    from rolecall.node.burn_in import CHECKS
    from rolecall.node.burn_in import burn_in as work
    from rolecall.recovery.operators import commands

    if run and not name:
        raise ConfigError(["NODE: needed with --run: the result is recorded under that name"])
    place = chosen_run(runs, run) if run else None
    where = folder or Path(tempfile.gettempdir())
    if not where.is_dir():
        raise ConfigError([f"--folder: {where} is not a folder"])
    if place is not None:
        commands.check_burn_in(place, name, whoami())
    found = work(CHECKS, seconds, where, progress=None if as_json else progress)
    result = {"node": name or os.uname().nodename, **found.to_dict()}
    words = {True: "passed", False: "FAILED", None: "not checked"}
    lines = [plain(f"{check.name:<10} {words[check.passed]}: {check.because}") for check in found.checks]
    lines.append(plain(f"{result['node']}: {words[found.passed]} in {found.seconds:.0f} s"))
    show(as_json, result, lines)
    if place is not None:  # shown first: the journal may be lost meanwhile
        recorded = commands.record_burn_in(place, name, found.to_dict(), whoami())
        if not as_json:
            confirm(recorded)
    return 0 if found.passed else 1
