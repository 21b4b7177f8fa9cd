"""Commands on live metrics: `watch run|agents|prometheus|recording` and `record run|prometheus`."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    CredentialsOption,
    JsonOption,
    LatestRunArgument,
    RootOption,
    SecondsOption,
    examples,
    out,
    progress,
)
from rolecall.core.errors import ConfigError
from rolecall.core.rundir import open_run_dir
from rolecall.core.text import counted

if TYPE_CHECKING:
    from rolecall.watch.run import MetricsEndpoint

watch = typer.Typer(no_args_is_help=True, help="Detect, diagnose and recover from faults live.")
record = typer.Typer(no_args_is_help=True, help="Write live metrics to a recording (Parquet).")

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
    run: LatestRunArgument = "latest",
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
    return start(open_run_dir(runs, run), seconds, metrics=endpoint, approve=require_approval)


@watch.command(
    name="agents",
    epilog=examples(
        "rolecall watch agents http://node-1:9477,http://node-2:9477 --id my-job",
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
    webhook: Annotated[str, typer.Option("--webhook", help="URL that is called to page on-call.")] = "",
    credentials: CredentialsOption = None,
    metrics: MetricsOption = "",
    web_config: WebConfigOption = None,
    seconds: SecondsOption = None,
    runs: RootOption = ROOT,
) -> int:
    """Watch any job through the agents of its nodes. Observes only: no action is taken.

    Exit code 1 if a fault was found."""
    from rolecall.core.clock import SystemClock
    from rolecall.watch.agents import AgentsFile, is_file, listed, named_agents, node_of, observing_run
    from rolecall.watch.panels import authorization
    from rolecall.watch.run import watch_run as start

    endpoint = _metrics_endpoint(metrics, web_config)
    header = authorization(credentials, {})

    def ask(url: str) -> str:
        return node_of(url, header)

    run_id = run_id or f"watch-{datetime.datetime.now():%m%d-%H%M%S}"

    def keep(found: Mapping[str, str]) -> None:
        observing_run(runs, run_id, found, webhook or None)

    file = AgentsFile(Path(agents), ask, keep, SystemClock()) if is_file(agents) else None
    found = file.first() if file else named_agents(listed(agents), ask)
    run = observing_run(runs, run_id, found, webhook or None)
    progress(f"watching {counted(len(found), 'node')}; incidents: rolecall incidents --run {run.path}")
    return start(run, seconds, header, file.urls if file else None, endpoint)


@watch.command(
    name="prometheus",
    epilog=examples(
        "rolecall watch prometheus http://prometheus:9090",
        "rolecall watch prometheus http://prometheus:9090 --match 'cluster=\"a\"' --history 3600",
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
    as_json: JsonOption = False,
) -> int:
    """Watch any fleet through its Prometheus server. Exit code 1 if a fault was found."""
    from rolecall.watch.panels import INTERVAL_SECONDS, PrometheusOptions
    from rolecall.watch.panels import watch_prometheus as start

    detectors = panel_detectors(detector, false_alarms, model, profile)
    seconds_between = INTERVAL_SECONDS if interval is None else interval
    options = PrometheusOptions(url, tuple(query), queries, match, seconds_between, history, credentials)
    return start(options, detectors, out=out, as_json=as_json, seconds=seconds)


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
    as_json: JsonOption = False,
) -> int:
    """Replay a recording as if it were live. Exit code 1 if a fault was found."""
    from rolecall.watch.panels import watch_recording as start

    detectors = panel_detectors(detector, false_alarms, model, profile)
    return start(recording, speed, detectors, out=out, as_json=as_json, seconds=seconds)


@record.command(name="run", epilog=examples("rolecall record run my-run -o my-run.parquet --for 600"))
def record_run(
    output: OutputOption,
    run: LatestRunArgument = "latest",
    interval: Annotated[float, typer.Option("--interval", help="Seconds between samples.")] = 1.0,
    seconds: SecondsOption = None,
    runs: RootOption = ROOT,
) -> int:
    """Record the metrics of a run until --for has passed or Ctrl-C."""
    from rolecall.watch.panels import record_run as start

    return start(open_run_dir(runs, run), output, out=out, interval_seconds=interval, seconds=seconds)


@record.command(
    name="prometheus", epilog=examples("rolecall record prometheus http://prometheus:9090 -o fleet.parquet --for 3600")
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
