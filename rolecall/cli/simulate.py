"""Commands that simulate: fleet (recordings with known faults), run (the ETTR of a run that meets faults)."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolecall.cli.options import Commands, HelpGroup, JsonOption, examples, out, present, progress
from rolecall.core.text import counted

if TYPE_CHECKING:
    from rolecall.simulate.settings import SimulationSettings

app = Commands(
    cls=HelpGroup, no_args_is_help=True, help="Simulate: recordings with known faults, and runs that meet faults."
)

SEEDS = 20
GpusOption = Annotated[
    int | None,
    typer.Option("--gpus", min=2, max=1_000_000, help="Size of the fleet: replicas in the same proportion."),
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, max=10_000, help="Simulated runs; an interval holds 95 % of them.")
]


@app.command(name="fleet", epilog=examples("rolecall simulate fleet cases/ --tasks 20 --healthy 5"))
def simulate_fleet(
    folder: Annotated[Path, typer.Argument(help="New folder for the recordings.", metavar="FOLDER")],
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 1,
    tasks: Annotated[int, typer.Option(min=0, help="Number of tasks with a fault.")] = 10,
    healthy: Annotated[int, typer.Option(min=0, help="Number of tasks without a fault.")] = 2,
    machines_max: Annotated[int, typer.Option(min=4, max=1500, help="Machines of the largest task.")] = 128,
) -> int:
    """Write simulated training tasks as recordings, each with a label: faulty machine, onset, severity."""
    from rolecall.diagnose.simulate import simulate_fleet as simulated

    num = simulated(
        folder, seed=seed, num_tasks=tasks, num_healthy=healthy, num_machines_max=machines_max, progress=progress
    )
    out(f"{folder}: {counted(num, 'recording')}")
    return 0


@app.command(
    name="run",
    epilog=examples(
        "rolecall simulate run --gpus 4096",
        "rolecall simulate run fleet.yaml --days 90 --costs",
        "rolecall simulate run --mode sync --arm role --arm restart_warm --json",
    ),
)
def simulate_run(
    file: Annotated[
        Path | None, typer.Argument(help="Settings (YAML); without it the defaults.", metavar="SETTINGS")
    ] = None,
    gpus: GpusOption = None,
    mode: Annotated[str, typer.Option(help="async, semi_sync or sync.", metavar="MODE")] = "",
    days: Annotated[float | None, typer.Option(min=0.01, max=3650, help="Simulated time of each run.")] = None,
    arm: Annotated[
        list[str], typer.Option("--arm", help="Way to recover; may be repeated. Default: all.", metavar="NAME")
    ] = [],  # noqa: B006
    seeds: SeedsOption = SEEDS,
    seed: Annotated[int, typer.Option(min=0, help="First random seed.")] = 1,
    costs: Annotated[
        bool,
        typer.Option(
            "--costs",
            help="Also: what a second of detection costs, up to how many false alarms evictions pay, and what standby "
            "machines cost.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Simulate an RL run that meets faults: which ETTR does each way to recover reach?

    Compares role-based recovery (replica: the failed replica alone; role: all trainers, or one rollout) with a restart
    of the whole job from the newest checkpoint (restart_warm: in place, restart_cold: after a requeue), under the same
    faults. Settings and the sources of their defaults: docs/reference/simulation-file.md."""
    from rolecall.simulate import study
    from rolecall.simulate.standbys import standbys
    from rolecall.terminal import simulate as text

    settings = _settings(file, gpus, mode, days)
    names = arm or list(settings.arms)
    arms = {name: study.arm_of(settings, name) for name in names}
    results = [study.run_arm(settings, name, seeds, seed) for name in arms]
    found = {
        "gpus": settings.gpus,
        "mode": str(settings.mode),
        "days": settings.days,
        "seeds": seeds,
        "standbys": dict(standbys(settings)),
        "arms": {r.arm: asdict(r) for r in results},
    }
    answers = {name: study.costs(settings, of, seeds, seed) for name, of in arms.items()} if costs else {}
    if costs:
        found["costs"] = {name: answer.to_dict() for name, answer in answers.items()}
    present(as_json, found, text.comparison(settings, seeds, results, answers))
    return 0


def _settings(file: Path | None, gpus: int | None, mode: str, days: float | None) -> "SimulationSettings":
    """Raises ConfigError: the file or an option is wrong."""
    from rolecall.core.errors import ConfigError
    from rolecall.simulate.settings import Mode, SimulationSettings, load_settings, resized

    if mode and mode not in tuple(Mode):
        raise ConfigError([f"--mode: {mode!r} is not one of {', '.join(Mode)}"])
    settings = load_settings(file) if file else SimulationSettings()
    if gpus is not None or mode:
        settings = resized(settings, gpus, Mode(mode) if mode else None)
    return settings if days is None else settings.changed(days=days)
