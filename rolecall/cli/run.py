"""Commands on runs: demo, run, up, down, inject; on what a run left behind: replay, audit, report."""

import datetime
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolecall.cli.options import (
    ROOT,
    Commands,
    JsonOption,
    NamedRunArgument,
    NamedRunOption,
    RootOption,
    RunArgument,
    RunOption,
    chosen_run,
    examples,
    named_run,
    out,
    print_json,
    show,
)
from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.rundir import RunDir
from rolecall.core.text import counted

if TYPE_CHECKING:
    from rolecall.core.config.job import JobConfig

app, results = Commands(), Commands()


@app.command(
    epilog=examples(
        "rolecall demo",
        "rolecall demo --faults rollout-kill,trainer-hang:gil --steps 60",
        "rolecall demo --faults none --algorithm tppo --task long_addition",
        "rolecall demo --mode sync --faults rollout-kill,trainer-kill",
    )
)
def demo(
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of the task, the model and the times of the faults.")
    ] = 0,
    algorithm: Annotated[
        str,
        typer.Option(
            help="RL algorithm: grpo (default), dapo, ppo, tppo, dr-grpo, gspo, cispo, rloo, reinforce++ or "
            "reinforce++-baseline.",
            metavar="NAME",
        ),
    ] = "",
    task: Annotated[
        str,
        typer.Option(help="Task: digit_parity (default) or long_addition.", metavar="NAME"),
    ] = "",
    mode: Annotated[
        str,
        typer.Option(
            help="async (default): trainers and rollouts work at the same time. sync: they take turns on the same "
            "nodes. semi_sync: that, with further rollouts.",
            metavar="NAME",
        ),
    ] = "",
    faults: Annotated[
        str, typer.Option(help="Faults in order, KIND or KIND:HOW, comma separated; 'none' for a baseline run.")
    ] = "rollout-kill,trainer-hang,rollout-slow",
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps; the run continues while an incident is open.")
    ] = 120,
    run_id: Annotated[str, typer.Option("--id", help="Name of the run (default: demo-<seed>-<time>).")] = "",
    runs: RootOption = ROOT,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="Do not serve the dashboard.")] = False,
    allow_injection: Annotated[
        bool, typer.Option("--allow-injection", help="Allow `rolecall inject` on this run.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the live display.")] = False,
    minutes_max: Annotated[float, typer.Option(min=0.5, max=600, help="Stop the run after this many minutes.")] = 10.0,
    hold_minutes: Annotated[
        float, typer.Option(min=0, max=600, help="Keep training for at least this many minutes.")
    ] = 0.0,
    settings: Annotated[
        list[str], typer.Option("--set", help="Override a job setting, as detector.window_seconds=20.")
    ] = [],  # noqa: B006
) -> int:
    """Run a demo: inject faults, recover from them.

    A real RL job on local nodes, seven by default; each fault hits a real process."""
    from rolecall.rl_runtime.faults.injector import KINDS
    from rolecall.session.demo import demo_job, parse_faults

    if hold_minutes >= minutes_max:
        raise ConfigError([f"--hold-minutes: must be less than --minutes-max ({minutes_max:g}), got {hold_minutes:g}"])
    names = parse_faults(faults, {name: kind.hows for name, kind in KINDS.items()})
    allowed = bool(names) or allow_injection
    job = demo_job(
        seed=seed,
        num_steps=steps,
        injection_allowed=allowed,
        settings=settings,
        algorithm=algorithm,
        task=task,
        mode=mode,
    )
    standbys = job.runtime.num_standbys()
    roles = {name: KINDS[name.partition(":")[0]].role for name in names}
    if problems := [f"--faults: {n}: the job has no {role}" for n, role in roles.items() if not standbys.get(role, 1)]:
        raise ConfigError(problems)
    run_id = run_id or _new_run_id("demo", seed)
    return _execute(job, runs, run_id, names, not plain, minutes_max, hold_minutes, dashboard=not no_dashboard)


@app.command(epilog=examples("rolecall run job.yaml", "rolecall run job.yaml --id nightly-7"))
def run(
    job_file: Annotated[Path, typer.Argument(help="Job file (YAML).", metavar="JOB.yaml")],
    run_id: Annotated[str, typer.Option("--id", help="Name of the run (default: <job>-<seed>-<time>).")] = "",
    runs: RootOption = ROOT,
    minutes_max: Annotated[float, typer.Option(min=0.5, help="Stop the run after this many minutes.")] = 60 * 24 * 7,
) -> int:
    """Run a job.

    `recovery.mode` in the job file decides whether rolecall acts on faults. The run ends with its terminal, unless
    `nohup` starts it; `rolecall up` continues it."""
    from rolecall.core.config.job import load_job

    job = load_job(job_file)
    return _execute(job, runs, run_id or _new_run_id(job.name, job.seed), (), False, minutes_max, 0.0)


@app.command(epilog=examples("rolecall up my-run"))
def up(
    run: NamedRunArgument = "",
    option: NamedRunOption = "",
    runs: RootOption = ROOT,
    minutes_max: Annotated[float, typer.Option(min=0.5, help="Stop the run after this many minutes.")] = 60 * 24 * 7,
) -> int:
    """Continue a run that was interrupted or cut off.

    It ended before its controller was done: by Ctrl-C, SIGTERM, the end of its terminal, `rolecall down`, --minutes-max
    or an error, or with its machine or its supervisor. Everything is started again, and the run continues from its
    journal and its newest checkpoint. `rolecall down` ends processes that are left of it."""
    from rolecall.core.config.job import parse_job

    where = named_run(runs, run, option)
    if where.is_watched:
        raise CommandRefused(f"{where.run_id} is only watched: rolecall did not start it")
    job = parse_job(where.config(), str(where.path))
    return _execute(job, where.path.parent, where.run_id, (), False, minutes_max, 0.0, again=True)


def _execute(
    job: "JobConfig",
    runs: Path,
    run_id: str,
    faults: Sequence[str],
    show: bool,
    minutes_max: float,
    hold_minutes: float,
    *,
    dashboard: bool = False,
    again: bool = False,
) -> int:
    from rolecall.core.ids import checked_id
    from rolecall.session.demo import FaultSchedule
    from rolecall.session.session import Interrupted, Session
    from rolecall.terminal.console import console
    from rolecall.terminal.run import summary

    checked_id(run_id, "run id")
    screen = console()
    session = Session(
        job=job,
        root=runs,
        run_id=run_id,
        schedule=FaultSchedule(job.seed, faults),
        show=show and screen.is_terminal,
        minutes_max=minutes_max,
        hold_seconds=hold_minutes * 60,
        dashboard=dashboard,
        again=again,
    )
    try:
        report = session.execute()
    except FileExistsError:
        raise ConfigError([f"--id: a run {run_id!r} exists already in {runs}"]) from None
    except Interrupted:
        name = RunDir(runs / run_id).shell_name
        out(f"interrupted: every process of run {run_id} has been stopped; to continue it: rolecall up {name}")
        return 130
    screen.print(summary(report))
    if dashboard:
        out(f"to open the dashboard again: rolecall dashboard {RunDir((runs / run_id).resolve()).shell_name}")
    return 0 if report["ok"] else 1


def _new_run_id(name: str, seed: int) -> str:
    return f"{name}-{seed}-{datetime.datetime.now():%m%d-%H%M%S}"


@app.command(epilog=examples("rolecall down latest"))
def down(
    run: NamedRunArgument = "", option: NamedRunOption = "", runs: RootOption = ROOT, as_json: JsonOption = False
) -> None:
    """Stop every process of a run.

    Includes processes that a killed supervisor left behind. `rolecall up` continues a run that was not done."""
    from rolecall.core.errors import JournalError
    from rolecall.core.journal.journal import Journal
    from rolecall.core.journal.run_end import record_missed_end
    from rolecall.rl_runtime.processes import stop_run
    from rolecall.watch.addresses import withdraw

    where = named_run(runs, run, option)
    ended = stop_run(where.path)
    withdraw(where)
    value = {"run": where.run_id, "ended": [str(p) for p in ended]}
    lines = [f"{where.run_id}: ended {counted(len(ended), 'process', 'processes')}"]
    with suppress(JournalError), closing(Journal(where.database_url, create=False)) as journal:  # they are ended anyway
        if (missed := record_missed_end(journal)) is not None:
            lines.append(f"its end was not recorded, and is now: {missed.outcome}, {missed.because}")
    show(as_json, value, lines)


@app.command(
    "export",
    epilog=examples(
        "rolecall export my-run --out model/",
        "rolecall export my-run --out model/ --dtype float32",
        "rolecall export my-run --out model/ --step 1199",
    ),
)
def export_command(
    folder: Annotated[Path, typer.Option("--out", help="Folder to create.", metavar="FOLDER")],
    run: NamedRunArgument = "",
    option: NamedRunOption = "",
    runs: RootOption = ROOT,
    dtype: Annotated[
        str, typer.Option(help="Of the weights: bfloat16, float16 or float32. Without it: the job's model.dtype.")
    ] = "",
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Step of the checkpoint, as in RUN/checkpoints/step-00001199 (default: the newest)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's newest checkpoint, or an earlier one, as a Hugging Face model.

    transformers and vLLM load the folder: weights, configuration and tokenizer. The weights have the dtype that the run
    computes with, unless --dtype gives another; LoRA adapters are merged."""
    from rolecall.rl_runtime.trainer.export import DTYPES, export_model

    if dtype and dtype not in DTYPES:
        raise ConfigError([f"--dtype: {dtype!r}: expected {', '.join(DTYPES)}"])
    done = export_model(named_run(runs, run, option), folder, dtype or None, step)
    num, others = done.num_parameters, [*done.passed_over]
    value = {"folder": str(folder), "step": done.step, "parameters": num, "dtype": done.dtype, "passed_over": others}
    lines = [f"passed over: {reason}" for reason in others]
    lines.append(f"{folder}: {num / 1e6:.1f} M parameters in {done.dtype}, after {counted(done.step + 1, 'step')}")
    show(as_json, value, lines)


@app.command(
    epilog=examples(
        "rolecall inject latest --kind rollout-kill",
        "rolecall inject latest --kind trainer-hang --how gil --target trainer/1",
    )
)
def inject(
    kind: Annotated[str, typer.Option(help="Fault to inject; an unknown one lists all.")],
    run: NamedRunArgument = "",
    option: NamedRunOption = "",
    target: Annotated[str, typer.Option(help="Replica, as rollout/1 (default: chosen by --seed).")] = "",
    how: Annotated[
        str, typer.Option(help="Variant. Hangs: stop, gil, lock, read; slow ones: duty, quota, delay.")
    ] = "",
    factor: Annotated[
        float, typer.Option(min=0, help="How many times slower a slowdown makes its target; 0: 4 times.")
    ] = 0.0,
    seconds: Annotated[float, typer.Option(min=0, help="Duration of a slowdown; 0: until the target ends.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    runs: RootOption = ROOT,
) -> None:
    """Inject a real fault into a run.

    The run must have been started with --allow-injection. Touches only that run's processes."""
    from rolecall.rl_runtime.faults.injector import KINDS
    from rolecall.rl_runtime.faults.injector import inject as do

    if kind not in KINDS:
        raise ConfigError([f"--kind: {kind!r} is unknown, known are {', '.join(KINDS)}"])
    where = named_run(runs, run, option)
    print_json(do(where, kind, target or None, how or None, seconds or None, seed, factor or None))


@results.command(epilog=examples("rolecall replay inc-1-rollout-1"))
def replay(
    incident: Annotated[str, typer.Argument(help="Incident id.", metavar="INCIDENT")],
    run: RunOption = "",
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Repeat a diagnosis from its recorded inputs.

    Exit code 1 if the result differs."""
    from rolecall.watch.run import replay_incident

    value = replay_incident(chosen_run(runs, run), incident)
    show(as_json, value, [value["text"]])
    return 0 if value["same"] else 1


@results.command(epilog=examples("rolecall audit my-run"))
def audit(run: RunArgument = "", option: RunOption = "", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Verify journal and ledger.

    Each prompt group was trained once or dropped with a reason, and no line was altered. Of a job that rolecall only
    watches: the journal, since it has no ledger.

    Exit code 0: the audit holds; 1: it found a problem; 2: there is no such run, or nothing to audit, or its journal
    cannot be read."""
    from rolecall.views.audit import audit_run, audit_text

    where = chosen_run(runs, run, option)
    found = audit_run(where, watched=where.is_watched)
    show(as_json, found.summary(), [audit_text(found)])
    return 0 if found.ok else 1


@results.command(epilog=examples("rolecall report my-run --json"))
def report(run: RunArgument = "", option: RunOption = "", runs: RootOption = ROOT, as_json: JsonOption = False) -> int:
    """Write the report of a run.

    Writes report.json and report.html again, and prints the summary."""
    from rolecall.reports.report import write_report
    from rolecall.terminal.console import console
    from rolecall.terminal.run import summary

    value = write_report(chosen_run(runs, run, option), None)
    if as_json:
        print_json(value)
    else:
        console().print(summary(value))
    return 0 if value["ok"] else 1
