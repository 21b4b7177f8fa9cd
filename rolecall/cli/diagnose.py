"""Commands on recordings and dumps: diagnose, fit."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolecall.cli.options import Commands, JsonOption, check_output, examples, out, present, progress
from rolecall.core.errors import ConfigError, UnreadableInput

if TYPE_CHECKING:
    from rolecall.detector.panels.panel import PanelDetector

app = Commands()

DETECTOR = "sequential"
FALSE_ALARMS = 100.0
DetectorOption = Annotated[
    str,
    typer.Option(
        "--detector",
        help="sequential, minder, mahalanobis, isolation-forest, pca, knn, robust-z or pairwise.",
        metavar="NAME",
    ),
]
FalseAlarmsOption = Annotated[
    float, typer.Option("--false-alarms", help="Accepted false alarms per 1,000 machine-days.")
]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Model of detector minder, as `rolecall fit` writes it.", metavar="FILE")
]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", help="What is usual in your job, as `rolecall fit` writes it.", metavar="FILE"),
]


def panel_detectors(name: str, false_alarms: float, model: Path | None, profile: Path | None) -> "list[PanelDetector]":
    """The detector that `--detector` names, beside the one that reads step times.

    Raises:
        ConfigError: an unknown name, or a model or profile that does not fit it.
        UnreadableInput: a model or profile is damaged.
    """
    from rolecall.detector.panels.registry import detector, with_step_time

    chosen = detector(name, false_alarms_per_1000_machine_days=false_alarms, model=model, profile=profile)
    return with_step_time(chosen, false_alarms)


@app.command(
    epilog=examples(
        "rolecall diagnose fleet.parquet",
        "rolecall diagnose friday.parquet --profile my-job.json",
        "dmesg | rolecall diagnose -",
        "rolecall diagnose nccl_trace_rank_*              # Flight Recorder dumps",
        "rolecall diagnose /var/log/incident-17/ --explain why.html",
    )
)
def diagnose(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Recordings, Flight Recorder dumps, stack dumps, kernel logs, folders of them; - is standard input.",
            metavar="PATH",
        ),
    ],
    detector: DetectorOption = DETECTOR,
    false_alarms: FalseAlarmsOption = FALSE_ALARMS,
    model: ModelOption = None,
    profile: ProfileOption = None,
    explain: Annotated[
        Path | None, typer.Option("--explain", help="Write an HTML page that plots the evidence.", metavar="FILE.html")
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity/--no-sensitivity",
            help="If all is healthy, try for up to 5 s which shift of a metric would have been named.",
        ),
    ] = True,
    as_json: JsonOption = False,
) -> int:
    """Find the fault in logs, dumps, stacks and recordings.

    Names the machine, the onset of its fault and the evidence. Reads kernel logs, Flight Recorder dumps, stacks, NCCL's
    answers and recordings of metrics.

    Exit code 0: healthy, or nothing is suspected; 1: a fault was found, or suspects are named and the evidence does not
    decide between them; 2: wrong usage, unreadable input, or a folder without a file of a known kind."""
    from rolecall.diagnose import diagnose as diagnosing
    from rolecall.diagnose import standard_input
    from rolecall.terminal import findings

    if explain is not None:
        if explain.suffix.lower() not in (".html", ".htm"):
            raise ConfigError([f"--explain: {explain}: the page is HTML, so its name must end in .html"])
        check_output("--explain", explain)
    detectors = panel_detectors(detector, false_alarms, model, profile)

    def judged(paths: list[Path]) -> diagnosing.DiagnosisReport:
        return diagnosing.diagnose(
            paths,
            detectors,
            progress=None if as_json else progress,
            sensitivity_seconds=diagnosing.SENSITIVITY_SECONDS if sensitivity else 0.0,
        )

    if any(path in standard_input.PATHS for path in paths):
        if len(paths) > 1:
            raise ConfigError(["-: standard input is judged alone: name no other path with it"])
        with standard_input.saved(sys.stdin.buffer) as file:
            try:
                answer = judged([file])
            except UnreadableInput as e:
                where = e.where.replace(str(file), standard_input.STANDARD_INPUT)
                raise UnreadableInput(where=where, reason=e.reason) from e
            answer.inputs = [standard_input.named(i, file) for i in answer.inputs]
    else:
        answer = judged(paths)
    if explain is not None:
        from rolecall.diagnose.explain import explain as draw

        draw(explain, diagnosing.explained(answer, detectors))
    present(as_json, answer.to_dict(), findings.report(answer))
    return diagnosing.exit_code(answer)


@app.command(
    epilog=examples(
        "rolecall fit monday.parquet tuesday.parquet -o my-job.json",
        "rolecall fit --detector minder monday.parquet -o model.safetensors",
    )
)
def fit(
    recordings: Annotated[
        list[Path], typer.Argument(help="Recordings of your job, oldest first, mostly healthy.", metavar="RECORDING")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The result; an existing file is not overwritten.")],
    detector: Annotated[
        str, typer.Option("--detector", help="sequential (a profile) or minder (a model).", metavar="NAME")
    ] = DETECTOR,
    labels: Annotated[list[Path], typer.Option("--labels", help="label.json of each recording, in order.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(min=0, help="Random seed of minder.")] = 0,
) -> int:
    """Learn from recordings what is usual in your own job."""
    from rolecall.diagnose.fit import fit_model, fit_profile

    if detector == DETECTOR:
        out(fit_profile(recordings, output, labels=labels, progress=progress))
    elif detector == "minder":
        out(fit_model(recordings, output, labels=labels, seed=seed))
    else:
        raise ConfigError([f"--detector: {detector!r} cannot be fitted; sequential and minder can"])
    return 0
