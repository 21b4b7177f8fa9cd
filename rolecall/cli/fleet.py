"""Commands on fleets, with or without the bundled runtime: diagnose, watch, record, fit, simulate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rolecall.cli.options import (
    ROOT,
    CredentialsOption,
    ForOption,
    HistoryOption,
    IntervalOption,
    JsonOption,
    MatchOption,
    QueriesOption,
    QueryOption,
    RootOption,
    SourceOption,
    UrlOption,
    out,
    print_json,
)
from rolecall.core.errors import ConfigError
from rolecall.core.text import plain

fleet = typer.Typer()

DETECTOR = "sequential"
FALSE_ALARMS = 100.0
DetectorOption = Annotated[
    str,
    typer.Option(
        "--detector",
        help="sequential, minder, mahalanobis, isolation-forest, pca, knn, robust-z or pairwise",
        metavar="NAME",
    ),
]
FalseAlarmsOption = Annotated[
    float, typer.Option("--false-alarms", help="how many are accepted per 1,000 machine-days")
]
ModelOption = Annotated[Path | None, typer.Option("--model", help="of minder: what `rolecall fit` wrote")]


def _say(text: str) -> None:
    """Progress: on standard error, so that standard output is the answer and nothing else."""
    typer.echo(plain(text), err=True)


@fleet.command()
def diagnose(
    paths: Annotated[
        list[Path],
        typer.Argument(help="recordings, Flight Recorder dumps, stack dumps, or folders of them", metavar="PATH..."),
    ],
    detector: DetectorOption = DETECTOR,
    false_alarms: FalseAlarmsOption = FALSE_ALARMS,
    model: ModelOption = None,
    explain: Annotated[
        Path | None, typer.Option("--explain", help="write a page (.html) that draws the evidence", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Says who is faulty, since when and why. Exit code 0: healthy; 1: a fault was found; 2: unreadable input."""
    from rolecall.detector.panels.registry import detector as named
    from rolecall.detector.panels.registry import with_step_time
    from rolecall.diagnose import diagnose as diagnosing

    if explain is not None and explain.suffix.lower() not in (".html", ".htm"):
        raise ConfigError([f"--explain: {explain} is written as a page: name it .html"])
    chosen = named(detector, false_alarms_per_1000_machine_days=false_alarms, model=model)
    detectors = with_step_time(chosen, false_alarms)
    answer = diagnosing.diagnose(paths, detectors, progress=None if as_json else _say)
    if explain is not None:
        from rolecall.diagnose.explain import explain as draw

        draw(explain, diagnosing.explained(answer, detectors))
    if as_json:
        print_json(answer.to_dict())
    else:
        for line in diagnosing.sentences(answer):
            out(line)
    return diagnosing.exit_code(answer)


@fleet.command()
def fit(
    recordings: Annotated[
        list[Path], typer.Argument(help="recordings of mostly healthy machines", metavar="RECORDING...")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="the model; never overwritten")],
    labels: Annotated[list[Path], typer.Option("--labels", help="label.json of each recording, in order")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> int:
    """Trains the denoisers and the metric priority of detector `minder`."""
    from rolecall.diagnose.fit import fit_recordings

    out(fit_recordings(recordings, output, labels=labels, seed=seed))
    return 0


simulate = typer.Typer(help="Makes data of which the truth is known.")


@simulate.callback()
def _simulate() -> None:
    """Makes data of which the truth is known."""


@simulate.command(name="fleet")
def simulated_fleet(
    folder: Annotated[Path, typer.Argument(help="new folder for the cases", metavar="OUT")],
    seed: Annotated[int, typer.Option(min=0)] = 1,
    tasks: Annotated[int, typer.Option(min=0, help="tasks with a fault")] = 10,
    healthy: Annotated[int, typer.Option(min=0, help="tasks without one")] = 2,
    machines_max: Annotated[int, typer.Option(min=4, max=1500, help="of the largest task")] = 128,
) -> int:
    """Writes simulated training tasks as recordings with labels: who is faulty, since when, by how much."""
    from rolecall.diagnose.simulate import simulate_fleet

    num = simulate_fleet(
        folder, seed=seed, num_tasks=tasks, num_healthy=healthy, num_machines_max=machines_max, progress=_say
    )
    out(f"{folder}: {num} case(s)")
    return 0


fleet.add_typer(simulate, name="simulate")


def _prometheus_options(
    url: str,
    query: list[str],
    queries: Path | None,
    match: str,
    interval: float | None,
    history: float | None,
    credentials: Path | None,
) -> Any:
    from rolecall.watch.panels import INTERVAL_SECONDS, PrometheusOptions

    if not url:
        raise ConfigError(["--url: --source prometheus needs one"])
    return PrometheusOptions(
        url=url,
        queries=tuple(query),
        queries_file=queries,
        match=match,
        interval_seconds=INTERVAL_SECONDS if interval is None else interval,
        history_seconds=history,
        credentials=credentials,
    )


@fleet.command()
def watch(
    run: Annotated[
        str, typer.Argument(help="run id, path of a run directory or 'latest'; a file for --source recording")
    ] = "",
    source: SourceOption = "agents",
    url: UrlOption = "",
    query: QueryOption = [],  # noqa: B006
    queries: QueriesOption = None,
    match: MatchOption = "",
    interval: IntervalOption = None,
    history: HistoryOption = None,
    credentials: CredentialsOption = None,
    speed: Annotated[float, typer.Option(help="of a recording: recorded seconds a second; inf: without waiting")] = 1.0,
    detector: DetectorOption = DETECTOR,
    false_alarms: FalseAlarmsOption = FALSE_ALARMS,
    model: ModelOption = None,
    seconds: ForOption = None,
    agents: Annotated[
        str,
        typer.Option(
            help="agents of any job, as http[s]://HOST:PORT,... or a file, read again when it changes: one a line, or "
            "groups as Prometheus' file_sd_configs (.json, .yaml); RUN is not given"
        ),
    ] = "",
    mode: Annotated[str, typer.Option(help="of --agents: observe, the only one")] = "observe",
    run_id: Annotated[str, typer.Option("--id", help="of --agents: name of what is kept (default: watch-<time>)")] = "",
    webhook: Annotated[str, typer.Option(help="of --agents: where a person is called, http://...")] = "",
    approve: Annotated[
        bool,
        typer.Option(
            "--approve",
            help="of RUN: a person approves each plan (`rolecall approve`, or the dashboard) before it begins, though the job "
            "file says act; a plan that nobody approves within recovery.approval_timeout_seconds lapses, and a person is called. A "
            "job of mode observe is refused",
        ),
    ] = False,
    metrics: Annotated[
        str,
        typer.Option(
            help="HOST:PORT that serves /metrics of this watch (default: of a run of ours a free port of 127.0.0.1, in "
            "RUN/watch.json; with --agents none)"
        ),
    ] = "",
    web_config: Annotated[
        Path | None,
        typer.Option("--web-config", help="of --metrics: TLS and users, as Prometheus' exporters take them"),
    ] = None,
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Watches a run (detects, diagnoses and, where the job file says so, acts), or any fleet on a Prometheus server or
    in a recording (detects). Exit code 1 if a fault was found."""
    serve = _served_at(metrics, web_config)
    if serve is not None and source != "agents":
        raise ConfigError([f"--metrics: goes with --source agents, not with {source}"])
    if approve and (agents or source != "agents"):
        raise ConfigError(["--approve: goes with RUN, whose job rolecall acts on"])
    if agents:
        if run or source != "agents" or mode != "observe":
            raise ConfigError(["--agents: goes with neither RUN nor another --source, and with no --mode but observe"])
        return _watch_agents(agents, run_id, webhook, runs, seconds, credentials, serve)
    if source == "agents":
        from rolecall.core.rundir import open_run_dir
        from rolecall.watch.run import watch_run

        if not run:
            raise ConfigError(["RUN: which run? (or --agents, for a job that rolecall did not start)"])
        if model is not None:
            raise ConfigError(["--model: a run's own detectors have none; --source prometheus or recording takes one"])
        return watch_run(open_run_dir(runs, run), seconds, metrics=serve, approve=approve)
    from rolecall.detector.panels.registry import detector as named
    from rolecall.detector.panels.registry import with_step_time
    from rolecall.watch.panels import watch_prometheus, watch_recording

    chosen = named(detector, false_alarms_per_1000_machine_days=false_alarms, model=model)
    detectors = with_step_time(chosen, false_alarms)
    if source == "prometheus":
        options = _prometheus_options(url, query, queries, match, interval, history, credentials)
        return watch_prometheus(options, detectors, out=out, as_json=as_json, seconds=seconds)
    if source == "recording":
        if not run:
            raise ConfigError(["RUN: which recording?"])
        return watch_recording(Path(run), speed, detectors, out=out, as_json=as_json, seconds=seconds)
    raise ConfigError([f"--source: {source!r} is none of agents, prometheus, recording"])


def _served_at(metrics: str, web_config: Path | None) -> Any:
    """None where nothing is asked for."""
    if not metrics:
        if web_config is not None:
            raise ConfigError(["--web-config: goes with --metrics"])
        return None
    from rolecall.agent.http.web_config import load_web_config
    from rolecall.watch.addresses import parse_address
    from rolecall.watch.run import MetricsEndpoint

    return MetricsEndpoint(parse_address(metrics), None if web_config is None else load_web_config(web_config))


def _watch_agents(
    agents: str, run_id: str, webhook: str, runs: Path, seconds: float | None, credentials: Path | None, serve: Any
) -> int:
    import datetime

    from rolecall.core.clock import SystemClock
    from rolecall.watch.agents import is_file, listed, named_agents, node_of, observing_run
    from rolecall.watch.agents_file import AgentsFile
    from rolecall.watch.panels import authorization
    from rolecall.watch.run import watch_run

    header = authorization(credentials, {})

    def ask(url: str) -> str:
        return node_of(url, header)

    run_id = run_id or f"watch-{datetime.datetime.now():%m%d-%H%M%S}"

    def keep(found: Mapping[str, str]) -> None:
        observing_run(runs, run_id, found, webhook or None)

    file = AgentsFile(Path(agents), ask, keep, SystemClock()) if is_file(agents) else None
    found = file.first() if file else named_agents(listed(agents), ask)
    run = observing_run(runs, run_id, found, webhook or None)
    _say(f"watching {len(found)} node(s); incidents: rolecall incidents --run {run.path}")
    return watch_run(run, seconds, header, file.urls if file else None, serve)


@fleet.command()
def record(
    output: Annotated[Path, typer.Option("-o", "--output", help="the recording (Parquet); never overwritten")],
    run: Annotated[
        str, typer.Argument(help="of --source agents: run id, path of a run directory or 'latest'")
    ] = "latest",
    source: SourceOption = "agents",
    url: UrlOption = "",
    query: QueryOption = [],  # noqa: B006
    queries: QueriesOption = None,
    match: MatchOption = "",
    interval: IntervalOption = None,
    history: HistoryOption = None,
    credentials: CredentialsOption = None,
    seconds: ForOption = None,
    runs: RootOption = ROOT,
) -> int:
    """Writes a live fleet's metrics as a recording, until --for is over or Ctrl-C."""
    from rolecall.watch.panels import record_prometheus, record_run

    if source == "prometheus":
        options = _prometheus_options(url, query, queries, match, interval, history, credentials)
        return record_prometheus(options, output, out=out, seconds=seconds)
    if source == "agents":
        from rolecall.core.rundir import open_run_dir

        each = 1.0 if interval is None else interval
        return record_run(open_run_dir(runs, run), output, out=out, interval_seconds=each, seconds=seconds)
    raise ConfigError([f"--source: {source!r} is none of agents, prometheus"])
