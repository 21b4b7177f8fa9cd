"""Commands on live metrics: `watch run|agents|prometheus|recording` and `record run|prometheus`."""

import datetime
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rolecall.cli.diagnose import (
    DETECTOR,
    FALSE_ALARMS,
    DetectorOption,
    FalseAlarmsOption,
    ModelOption,
    ProfileOption,
    panel_detectors,
)
from rolecall.cli.options import (
    ROOT,
    Commands,
    CredentialsOption,
    HelpGroup,
    RootOption,
    RunArgument,
    RunOption,
    SecondsOption,
    chosen_run,
    examples,
    out,
    progress,
)
from rolecall.core.errors import ConfigError
from rolecall.core.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from rolecall.watch.run import MetricsEndpoint

watch = Commands(cls=HelpGroup, no_args_is_help=True, help="Detect, diagnose and recover from faults live.")
record = Commands(cls=HelpGroup, no_args_is_help=True, help="Write live metrics to a recording (Parquet).")

PrometheusArgument = Annotated[
    str, typer.Argument(help="Prometheus-compatible server, as http://HOST:9090[/PATH].", metavar="URL")
]
QueryOption = Annotated[
    list[str],
    typer.Option("--query", help="NAME=PROMQL; repeatable; replaces the default queries.", metavar="NAME=PROMQL"),
]
QueriesOption = Annotated[
    Path | None, typer.Option("--queries", help="YAML file with queries and machine labels.", metavar="FILE")
]
MatchOption = Annotated[
    str, typer.Option("--match", help="Label matchers for every query, as 'cluster=\"a\"'.", metavar="MATCHERS")
]
IntervalOption = Annotated[
    float | None,
    typer.Option("--interval", help="Seconds between queries; not shorter than the scrape interval."),
]
HistoryOption = Annotated[
    float | None, typer.Option("--history", help="Start with this many seconds of the past.", metavar="SECONDS")
]
MetricsOption = Annotated[
    str, typer.Option("--metrics", help="Serve this watch's /metrics at HOST:PORT.", metavar="HOST:PORT")
]
WebConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--web-config", help="With --metrics: TLS and users, in the format of Prometheus exporters.", metavar="FILE"
    ),
]
OutputOption = Annotated[
    Path,
    typer.Option("-o", "--output", help="The recording (Parquet); an existing file is not overwritten."),
]


LinesOption = Annotated[
    bool, typer.Option("--json", help="On a terminal too: a JSON object a line instead of the table.")
]
NODES_SHOWN_MAX = 8
Lines = TypeVar("Lines")
Screen = TypeVar("Screen", bound=AbstractContextManager[Any])


def _display(
    as_json: bool, lines: Lines, screen: "Callable[[Console], Screen]"
) -> "AbstractContextManager[Lines] | Screen":
    """The table on a terminal, else the lines."""
    from rolecall.terminal.console import console

    made = console()
    return nullcontext(lines) if as_json or not made.is_terminal else screen(made)


def _metrics_endpoint(metrics: str, web_config: Path | None) -> "MetricsEndpoint | None":
    if not metrics:
        if web_config is not None:
            raise ConfigError(["--web-config: needs --metrics"])
        return None
    from rolecall.agent.http.web_config import load_web_config
    from rolecall.watch.addresses import parse_address
    from rolecall.watch.run import MetricsEndpoint

    return MetricsEndpoint(parse_address(metrics), None if web_config is None else load_web_config(web_config))


@watch.command(
    name="run",
    epilog=examples(
        "rolecall watch run                               # the latest run",
        "rolecall watch run my-run --require-approval",
        "rolecall watch run my-run --metrics 10.0.0.5:9478 --web-config web.yaml",
    ),
)
def watch_run(
    run: RunArgument = "",
    option: RunOption = "",
    require_approval: Annotated[
        bool,
        typer.Option(
            "--require-approval",
            help="Wait for an operator to approve each plan (`rolecall approve`, or the dashboard), although the job "
            "file says mode: act. A plan not approved within recovery.approval_timeout_seconds expires and pages "
            "on-call. Refused for a job of mode observe.",
        ),
    ] = False,
    metrics: MetricsOption = "",
    web_config: WebConfigOption = None,
    seconds: SecondsOption = None,
    runs: RootOption = ROOT,
) -> int:
    """Watch a run of rolecall: detect, diagnose and, if its job file allows it, recover.

    Without --metrics a free port of 127.0.0.1 serves /metrics; RUN/watch.json holds its address.
    Exit code 1 if a fault was found."""
    from rolecall.watch.run import watch_run as start

    endpoint = _metrics_endpoint(metrics, web_config)
    return start(chosen_run(runs, run, option), seconds, metrics=endpoint, approve=require_approval)


@watch.command(
    name="agents",
    epilog=examples(
        "rolecall watch agents http://node-1:9477,http://node-2:9477 --id my-job",
        "rolecall watch agents nodes.yaml --job 4711     # one job of several",
        "rolecall watch agents nodes.yaml --webhook https://alerts.example/hook",
    ),
)
def watch_agents(
    agents: Annotated[
        str,
        typer.Argument(
            help="http[s]://HOST:PORT,... or a file: one address a line, or Prometheus file_sd_configs (.json, .yaml). "
            "A changed file is read again.",
            metavar="AGENTS",
        ),
    ],
    run_id: Annotated[str, typer.Option("--id", help="Name of the run directory (default: watch-<time>).")] = "",
    job: Annotated[
        str,
        typer.Option(
            "--job",
            help="Of several jobs on these nodes only this: its run id (torchrun --rdzv-id, Slurm job id) or "
            "MASTER_ADDR:MASTER_PORT; all: every one (default: the first that is seen, and its successor).",
        ),
    ] = "",
    webhook: Annotated[
        str,
        typer.Option(
            "--webhook",
            help="URL that pages on-call; its format follows from it, a key is read from ROLECALL_NOTIFY_SECRET.",
        ),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="YAML file: recovery, detector, orphans, and the actuator that replaces a replica (default: observe).",
            metavar="FILE",
        ),
    ] = None,
    credentials: CredentialsOption = None,
    metrics: MetricsOption = "",
    web_config: WebConfigOption = None,
    seconds: SecondsOption = None,
    runs: RootOption = ROOT,
    as_json: LinesOption = False,
) -> int:
    """Watch any job through the agents of its nodes.

    Observes only, unless --config has an actuator with recovery.mode approve or act, or orphans with such a mode.
    Exit code 1 if a fault was found."""
    from rolecall.core.clock import SystemClock
    from rolecall.core.config.watched import load_watched
    from rolecall.recovery.notifications.target import target_of
    from rolecall.terminal.watch import JobLines, JobScreen
    from rolecall.watch.agents import (
        AgentsFile,
        former_agents,
        is_file,
        listed,
        named_agents,
        node_of,
        observing_run,
        watched_job,
    )
    from rolecall.watch.panels import authorization
    from rolecall.watch.run import watch_run as start
    from rolecall.watch.server import check_available

    endpoint = _metrics_endpoint(metrics, web_config)
    header = authorization(credentials, {})
    watched = None if config is None else load_watched(config)

    def ask(url: str) -> str:
        return node_of(url, header)

    run_id = run_id or f"watch-{datetime.datetime.now():%m%d-%H%M%S}"
    # Nothing may fail after the run is written: it would be the latest one, or that of a watch that runs.
    target_of(watched_job(run_id, webhook or None, watched).recovery, os.environ)
    if endpoint is not None:
        check_available(endpoint.address)

    def keep(found: Mapping[str, str]) -> None:
        observing_run(runs, run_id, found, webhook or None, watched)

    former = former_agents(runs, run_id)
    file = AgentsFile(Path(agents), ask, keep, SystemClock(), former) if is_file(agents) else None
    found = file.first() if file else named_agents(listed(agents), ask, former)
    run = observing_run(runs, run_id, found, webhook or None, watched)
    nodes = ", ".join(list(found)[:NODES_SHOWN_MAX]) + (", ..." if len(found) > NODES_SHOWN_MAX else "")
    progress(f"watching {counted(len(found), 'node')} ({nodes}); incidents: rolecall incidents --run {run.shell_name}")
    with _display(as_json, JobLines(out), JobScreen) as display:
        return start(run, seconds, header, file, endpoint, show=display.show, only_job=job)


@watch.command(
    name="prometheus",
    epilog=examples(
        "rolecall watch prometheus http://prometheus:9090",
        "rolecall watch prometheus http://prometheus:9090 --match 'cluster=\"a\"'",
    ),
)
def watch_prometheus(
    url: PrometheusArgument,
    query: QueryOption = [],  # noqa: B006
    queries: QueriesOption = None,
    match: MatchOption = "",
    interval: IntervalOption = None,
    history: HistoryOption = None,
    credentials: CredentialsOption = None,
    detector: DetectorOption = DETECTOR,
    false_alarms: FalseAlarmsOption = FALSE_ALARMS,
    model: ModelOption = None,
    profile: ProfileOption = None,
    seconds: SecondsOption = None,
    as_json: LinesOption = False,
) -> int:
    """Watch any fleet through its Prometheus server. Exit code 1 if a fault was found."""
    from rolecall.terminal.watch import PanelLines, PanelScreen
    from rolecall.watch.panels import INTERVAL_SECONDS, PrometheusOptions
    from rolecall.watch.panels import watch_prometheus as start

    detectors = panel_detectors(detector, false_alarms, model, profile)
    seconds_between = INTERVAL_SECONDS if interval is None else interval
    options = PrometheusOptions(url, tuple(query), queries, match, seconds_between, history, credentials)
    with _display(as_json, PanelLines(out), lambda screen: PanelScreen(screen, url)) as display:
        return start(options, detectors, display=display, seconds=seconds)


@watch.command(name="recording", epilog=examples("rolecall watch recording fleet.parquet --speed 60"))
def watch_recording(
    recording: Annotated[Path, typer.Argument(help="Recording (Parquet).", metavar="FILE")],
    speed: Annotated[
        float, typer.Option("--speed", help="Recorded seconds per second; inf: as fast as possible.")
    ] = 1.0,
    detector: DetectorOption = DETECTOR,
    false_alarms: FalseAlarmsOption = FALSE_ALARMS,
    model: ModelOption = None,
    profile: ProfileOption = None,
    seconds: SecondsOption = None,
    as_json: LinesOption = False,
) -> int:
    """Replay a recording as if it were live. Exit code 1 if a fault was found."""
    from rolecall.terminal.watch import PanelLines, PanelScreen
    from rolecall.watch.panels import watch_recording as start

    detectors = panel_detectors(detector, false_alarms, model, profile)
    with _display(as_json, PanelLines(out), lambda screen: PanelScreen(screen, str(recording))) as display:
        return start(recording, speed, detectors, display=display, seconds=seconds)


@record.command(name="run", epilog=examples("rolecall record run my-run -o my-run.parquet --for 600"))
def record_run(
    output: OutputOption,
    run: RunArgument = "",
    option: RunOption = "",
    interval: Annotated[float, typer.Option("--interval", help="Seconds between samples.")] = 1.0,
    seconds: SecondsOption = None,
    runs: RootOption = ROOT,
) -> int:
    """Record the metrics of a run until --for has passed or Ctrl-C."""
    from rolecall.watch.panels import record_run as start

    return start(chosen_run(runs, run, option), output, out=out, interval_seconds=interval, seconds=seconds)


@record.command(
    name="prometheus", epilog=examples("rolecall record prometheus http://prometheus:9090 -o fleet.parquet")
)
def record_prometheus(
    url: PrometheusArgument,
    output: OutputOption,
    query: QueryOption = [],  # noqa: B006
    queries: QueriesOption = None,
    match: MatchOption = "",
    interval: IntervalOption = None,
    history: HistoryOption = None,
    credentials: CredentialsOption = None,
    seconds: SecondsOption = None,
) -> int:
    """Record the metrics that a Prometheus server holds until --for has passed or Ctrl-C."""
    from rolecall.watch.panels import INTERVAL_SECONDS, PrometheusOptions
    from rolecall.watch.panels import record_prometheus as start

    seconds_between = INTERVAL_SECONDS if interval is None else interval
    options = PrometheusOptions(url, tuple(query), queries, match, seconds_between, history, credentials)
    return start(options, output, out=out, seconds=seconds)
