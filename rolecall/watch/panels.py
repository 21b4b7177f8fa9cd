"""`rolecall watch prometheus|recording` and `rolecall record run`: metrics of any fleet, sent live to detectors or into
a recording.

A queries file (YAML) defines the Prometheus queries and the labels that identify a machine; the default covers the
metrics of rolecall's agents and dcgm-exporter. Credentials come from a file or the environment, never from the command
line.
"""

import base64
import logging
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field, ValidationError

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import read_yaml
from rolecall.core.config.section import Section
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.rundir import RunDir
from rolecall.core.text import counted, os_reason, plain
from rolecall.detector.live.fusion import Merger
from rolecall.detector.panels.membership import PanelFollower
from rolecall.detector.panels.panel import Panel, PanelDetector, PanelShape, PanelSource, PanelTick, Stopped, panel_key
from rolecall.detector.sources import recording
from rolecall.detector.sources.agent_panels import AgentsPanels
from rolecall.detector.sources.prometheus import Labels, MetricQuery, PrometheusSource, catalogue_queries, dcgm_queries
from rolecall.detector.sources.prometheus_api import Client
from rolecall.detector.sources.recording import RecordingSource

logger = logging.getLogger(__name__)

BEARER_ENV = "ROLECALL_PROMETHEUS_TOKEN"
USER_ENV, PASSWORD_ENV = "ROLECALL_PROMETHEUS_USER", "ROLECALL_PROMETHEUS_PASSWORD"
INTERVAL_SECONDS = 15.0
"""The usual scrape interval."""
HISTORY_TICKS = 720
"""History loaded at the start of a watch: the default detector needs 703 ticks to learn three machines, 383 for many.
Three hours, at the usual interval.
"""
SECONDS_MAX = 31 * 86_400.0
FILE_BYTES_MAX = 1 << 20
Out = Callable[[str], None]


Name = Annotated[str, Field(min_length=1, max_length=256)]
Names = tuple[Name, ...]


class LabelsConfig(Section):
    """Labels that identify the machine of a series; the first nonempty one of each list counts."""

    role: Names = Labels().role
    role_otherwise: Name = Labels().role_otherwise
    """Role of a series without a role label. Peers are the machines of one role."""
    replica: Names = Labels().replica
    node: Annotated[Names, Field(min_length=1)] = Labels().node
    """Series without a node label are left out."""
    rank: Names = Labels().rank
    gpu: Names = Labels().gpu
    job: Names = Labels().job
    phase: Names = Labels().phase
    """Peers are compared within one phase only, for series that have the label, for example from a join with
    `group_left(phase)`.
    """


class QueryConfig(Section):
    expression: Annotated[str, Field(min_length=1, max_length=65_536)]
    """PromQL. `$match` stands for --match, `$window` for the duration of rates (four intervals), `$interval` for the
    interval."""
    labels: LabelsConfig | None = None
    """None: the file's labels."""


class QueriesConfig(Section):
    """The queries file."""

    labels: LabelsConfig = LabelsConfig()
    queries: Annotated[dict[Name, QueryConfig], Field(max_length=500)] = Field(default_factory=dict)
    """Metric name -> query."""
    defaults: bool = False
    """Also query the metrics of rolecall's agents and dcgm-exporter."""


def load_queries(path: Path) -> tuple[MetricQuery, ...]:
    """Raises ConfigError: the file cannot be read, is not YAML, or has problems."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX >> 20} MiB")
        value = read_yaml(text)
    except (OSError, ValueError) as e:
        raise ConfigError([os_reason(e)], str(path)) from e
    try:
        config = QueriesConfig.model_validate({} if value is None else value)
    except ValidationError as e:
        problems = [f"{'.'.join(map(str, x['loc'])) or '(top)'}: {x['msg']}" for x in e.errors()]
        raise ConfigError(problems, str(path)) from None
    own = [
        MetricQuery(metric=name, expression=q.expression, labels=Labels(**dict(q.labels or config.labels)))
        for name, q in config.queries.items()
    ]
    if not own and not config.defaults:
        raise ConfigError(["queries: none, and `defaults` is not set"], str(path))
    return (*own, *catalogue_queries(), *dcgm_queries()) if config.defaults else tuple(own)


def parse_query(text: str) -> MetricQuery:
    """`name=EXPR` of the command line. Raises ConfigError."""
    name, equals, expression = text.partition("=")
    if not equals or not name.strip() or not expression.strip():
        raise ConfigError([f"--query: expected NAME=EXPRESSION, got {text[:80]!r}"])
    return MetricQuery(metric=name.strip(), expression=expression.strip())


def authorization(path: Path | None, environ: Mapping[str, str]) -> str:
    """Value of the Authorization header; "" for none. The file holds one line: `bearer TOKEN` or `basic USER:PASSWORD`.
    Raises ConfigError: the file cannot be read, or has other content (which is not printed)."""
    if path is None:
        token, user, password = (environ.get(name, "") for name in (BEARER_ENV, USER_ENV, PASSWORD_ENV))
        if token and user:
            raise ConfigError([f"{BEARER_ENV} and {USER_ENV} are both set: set only one"])
        text, where = f"bearer {token}" if token else f"basic {user}:{password}" if user else "", "(environment)"
        if not text:
            return ""
    else:
        where = str(path)
        try:
            text = path.read_text(encoding="utf-8") if path.stat().st_size <= FILE_BYTES_MAX else ""
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not a text"
            raise ConfigError([f"--credentials: {reason}"], where) from None
    kind, _, secret = text.strip().partition(" ")
    secret = secret.strip()
    if kind.lower() == "basic" and ":" in secret and secret.isprintable():
        return "Basic " + base64.b64encode(secret.encode()).decode()
    if kind.lower() == "bearer" and secret and secret.isascii() and secret.isprintable() and " " not in secret:
        return f"Bearer {secret}"
    raise ConfigError(["expected one line, `bearer TOKEN` or `basic USER:PASSWORD`"], where)


@dataclass(frozen=True, slots=True)
class PrometheusOptions:
    """Command-line options."""

    url: str
    queries: tuple[str, ...] = ()
    """`name=EXPR` each. With these or a file, the default queries are not used unless the file enables them."""
    queries_file: Path | None = None
    match: str = ""
    interval_seconds: float = INTERVAL_SECONDS
    history_seconds: float | None = None
    """None: the command's default."""
    credentials: Path | None = None


def prometheus_source(
    options: PrometheusOptions, history_seconds: float, clock: Clock, environ: Mapping[str, str] = os.environ
) -> PrometheusSource:
    """Raises ConfigError."""
    client = Client(options.url, clock, authorization=authorization(options.credentials, environ))
    queries = [*map(parse_query, options.queries)]
    if options.queries_file is not None:
        queries += load_queries(options.queries_file)
    asked = options.history_seconds
    if asked is not None and not 0 <= asked <= SECONDS_MAX:
        raise ConfigError([f"--history: must be within 0 and {SECONDS_MAX:g} s, got {asked:g}"])
    return PrometheusSource(
        client,
        queries or (*catalogue_queries(), *dcgm_queries()),
        clock,
        interval_seconds=options.interval_seconds,
        history_seconds=history_seconds if asked is None else asked,
        match=options.match,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedPanels:
    """What a watch sees of a fleet. `at`: time of the newest tick."""

    where: str
    shapes: tuple[PanelShape, ...] = ()
    num_ticks: int = 0
    at: float = 0.0
    num_findings: int = 0
    open_ends: tuple[str, ...] = ()
    """At the end: what could not be judged, and why."""

    @property
    def text(self) -> str:
        """`128 machines: role trainer (128 machines, 12 metrics)`."""
        panels = (
            f"{s.name} ({counted(len(s.machines), 'machine')}, {counted(len(s.metrics), 'metric')})"
            for s in self.shapes
        )
        return f"{counted(sum(len(s.machines) for s in self.shapes), 'machine')}: {'; '.join(panels)}"


class PanelDisplay(Protocol):
    """Shows a watch of panels while it lasts."""

    def show(self, seen: WatchedPanels) -> None:
        """After each tick."""

    def found(self, diagnosis: Diagnosis) -> None: ...

    def end(self, seen: WatchedPanels) -> None: ...


def watch_prometheus(
    options: PrometheusOptions,
    detectors: Sequence[PanelDetector],
    *,
    display: PanelDisplay,
    seconds: float | None = None,
    clock: Clock = SystemClock(),
) -> int:
    """Until `seconds` are over or a signal. Exit code: 0 healthy, 1 a fault was found. Raises ConfigError,
    UnreadableInput: the server cannot be queried, or did not answer by the end of the watch and nothing was found.
    """
    source = prometheus_source(options, HISTORY_TICKS * options.interval_seconds, clock)
    with _until(seconds, clock) as stopped:
        try:
            code = watch(source, detectors, display=display, stopped=stopped, where=options.url)
        except NoTicks as e:
            if not source.failing:
                raise
            raise UnreadableInput(where=options.url, reason=f"{e.reason}: {source.failing}") from e
    if not code and source.failing:
        raise UnreadableInput(where=options.url, reason=f"it did not answer at the end: {source.failing}")
    return code


def watch_recording(
    path: Path,
    speed: float,
    detectors: Sequence[PanelDetector],
    *,
    display: PanelDisplay,
    seconds: float | None = None,
    clock: Clock = SystemClock(),
) -> int:
    """Replays a recording at `speed` times its original rate. Exit code: 0 healthy, 1 a fault was found."""
    source = RecordingSource(path, speed, clock)
    for remark in source.recording.remarks:
        logger.warning("%s: %s", path, remark)
    with _until(seconds, clock) as stopped:
        return watch(source, detectors, display=display, stopped=stopped, where=str(path))


class NoTicks(UnreadableInput):
    """A source ended before its first tick."""


def watch(
    source: PanelSource, detectors: Sequence[PanelDetector], *, display: PanelDisplay, stopped: Stopped, where: str
) -> int:
    """Shows every diagnosis as it occurs. Returns 1 if there was one, else 0. Raises UnreadableInput: `where` has no
    ticks.
    """
    watches = [PanelFollower(d) for d in detectors]
    merger = Merger()
    seen = WatchedPanels(where=where)
    for tick in source.ticks(stopped):
        diagnoses = [d for each in watches for finding in each.tick(tick) if (d := merger.add(finding)) is not None]
        seen = replace(
            seen,
            shapes=tuple(watches[0].shapes),
            num_ticks=seen.num_ticks + 1,
            at=tick.at,
            num_findings=seen.num_findings + len(diagnoses),
        )
        display.show(seen)
        for diagnosis in diagnoses:
            display.found(diagnosis)
    if not seen.num_ticks:
        raise NoTicks(where=where, reason="no tick was received")
    display.end(replace(seen, open_ends=tuple(dict.fromkeys(e for w in watches for e in w.open_ends))))
    return 1 if seen.num_findings else 0


@contextmanager
def _until(seconds: float | None, clock: Clock) -> Iterator[Stopped]:
    """True after `seconds`, SIGINT or SIGTERM. A second signal has its original effect."""
    end = math.inf if seconds is None else clock.monotonic() + seconds
    signalled = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, _frame: FrameType | None) -> None:
        signalled.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield lambda: signalled.is_set() or clock.monotonic() >= end
    finally:
        for number, was in before.items():
            signal.signal(number, was)


PART_BYTES = 64 << 20
"""Values kept in memory before they are written to a file."""
PART_SECONDS = 60.0
"""Maximum loss when the recorder is killed."""


def record_prometheus(
    options: PrometheusOptions, path: Path, *, out: Out, seconds: float | None = None, clock: Clock = SystemClock()
) -> int:
    source = prometheus_source(options, 0.0, clock)
    with _until(seconds, clock) as stopped:
        return record(source, path, out=out, stopped=stopped, clock=clock)


def record_run(
    run: RunDir,
    path: Path,
    *,
    out: Out,
    interval_seconds: float = 1.0,
    seconds: float | None = None,
    clock: Clock = SystemClock(),
) -> int:
    """Samples directly from the agents of a run."""
    from rolecall.detector.sources.agents import AgentsSource
    from rolecall.watch.run import agent_urls

    if not 0.2 <= interval_seconds <= 3600:
        raise ConfigError([f"--interval: must be within 0.2 and 3600 s, got {interval_seconds:g}"])
    source = AgentsPanels(AgentsSource(lambda: agent_urls(run), clock), clock, interval_seconds)
    with _until(seconds, clock) as stopped:
        return record(source, path, out=out, stopped=stopped, clock=clock)


def record(source: PanelSource, path: Path, *, out: Out, stopped: Stopped, clock: Clock) -> int:
    """Writes all ticks until `stopped()` as one recording and returns 0. Recorded data survives any exit: parts are in
    `<path>.parts`, each a separate recording, until they are joined. Raises ConfigError: `path` or its parts exist, or
    cannot be written; UnreadableInput: the source failed, or returned no data. Earlier data has been written."""
    parts = _Parts(path, clock)
    try:
        for tick in source.ticks(stopped):
            if not parts.add(tick):
                logger.warning("%s: no more samples fit into one recording", path)
                break
    finally:
        num_rows = parts.join()
        if num_rows:
            out(plain(f"{path}: {num_rows:,} samples"))
    if not num_rows:
        raise UnreadableInput(where=str(path), reason="not written: the source had no sample")
    return 0


class _Parts:
    """Writes ticks into one recording with bounded memory."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._folder, self._clock = path, path.with_name(path.name + ".parts"), clock
        if path.exists():
            raise ConfigError([f"-o: {path} exists already, and is not overwritten"])
        try:
            self._folder.mkdir()
        except FileExistsError:
            left = f"{self._folder} is left of a recorder that was killed, or that still runs"
            raise ConfigError([f"-o: {left}: `rolecall diagnose` reads it as it is; move it away"]) from None
        except OSError as e:
            raise ConfigError([f"-o: {self._folder}: {e.strerror}"]) from None
        self._ticks: dict[tuple[Any, ...], list[PanelTick]] = {}
        self._bytes, self._begun, self._number = 0, clock.monotonic(), 0
        self.num_rows = 0

    def add(self, tick: PanelTick) -> bool:
        """False: the recording is full."""
        self._ticks.setdefault((panel_key(tick.shape), id(tick.shape)), []).append(tick)
        self._bytes += tick.values.nbytes
        if self._bytes >= PART_BYTES or self._clock.monotonic() - self._begun >= PART_SECONDS:
            self._write()
        return self.num_rows + self._bytes // 4 < recording.NUM_ROWS_MAX

    def _write(self) -> None:
        if self._ticks:
            panels = [
                Panel(
                    shape=ticks[0].shape,
                    at=np.array([t.at for t in ticks]),
                    values=np.stack([t.values for t in ticks], axis=1),
                )
                for ticks in self._ticks.values()
            ]
            with self._writing():
                self.num_rows += recording.write(self._folder / f"{self._number:06d}.parquet", panels)
            self._number += 1
        self._ticks, self._bytes, self._begun = {}, 0, self._clock.monotonic()

    def join(self) -> int:
        """Joins all parts into one recording; returns the number of samples."""
        import polars as pl

        self._write()
        if self.num_rows:
            partial = self._path.with_name(self._path.name + ".partial")
            with self._writing():
                pl.scan_parquet(sorted(self._folder.glob("*.parquet"))).sink_parquet(partial, compression="zstd")
                if self._path.exists():
                    raise FileExistsError(f"{self._path} appeared meanwhile, and is not overwritten")
                partial.rename(self._path)
        shutil.rmtree(self._folder)
        return self.num_rows

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises UnreadableInput if a file cannot be written."""
        import polars as pl

        try:
            yield
        except (OSError, pl.exceptions.PolarsError) as e:
            kept = f"what was recorded until then lies in {self._folder}" if self._number else "nothing was recorded"
            raise UnreadableInput(where=str(self._path), reason=f"cannot be written: {os_reason(e)}; {kept}") from e
