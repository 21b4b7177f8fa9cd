"""Recordings: metrics of a fleet as one long Parquet table, read into panels and written from them.

Columns: `timestamp` (seconds), `role`, `replica`, `node`, `metric` (strings), `value` (a number); optional: `job`,
`phase` (strings), `gpu`, `rank`, `step` (integers). Rows in any order; samples may be missing. Each panel (job, role,
phase) gets its own grid: by `step` if every row has one, else by time, at the typical distance of its first samples, so
that a truncated recording has the same grid. Ticks without samples are omitted.

A file is read three times in batches, so that memory is bounded by its grids and not by its rows: for its machines,
metrics and intervals, for its ticks, and for its values.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rolecall.core.clock import Clock
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.detector.base.read_budget import Check, no_check
from rolecall.detector.panels.panel import (
    Machine,
    Panel,
    PanelShape,
    PanelTick,
    Stopped,
    Times,
    panel_key,
    pause,
    ticks_of,
)

MAGIC = b"PAR1"
LABEL_JSON = "label.json"
"""Beside the recording of a simulated task: what is faulty in it."""
STRINGS = ("role", "replica", "node", "metric")
REQUIRED = ("timestamp", *STRINGS, "value")
OPTIONAL_STRINGS = ("job", "phase")
OPTIONAL_INTEGERS = ("gpu", "rank", "step")
MACHINE_KEY = ("node", "replica", "rank", "gpu")
KEY = ("job", "role", "phase", *MACHINE_KEY)
"""Of a machine within a file. Its panel: job, role, phase, and whether it has a rank and a gpu."""

BATCH_ROWS = 1 << 18
"""Read at a time: what `write` puts into a row group, about 0.1 GB."""
NUM_ROWS_MAX = 100_000_000
"""Minutes of reading; ten thousand machines with 21 metrics for eight minutes."""
NUM_VALUES_MAX = 100_000_000
"""All panels of a file, 0.4 GB, and 0.8 GB for the times of the values while they are read."""
NUM_NAMES_MAX = 100_000
"""Machines of a file, and likewise its metrics: 0.5 GB for the first samples of each machine."""
NUM_TICKS_MAX = 3_000_000
"""All panels of a file, 0.8 GB while they are read: five weeks at 1 s."""
VALUE_BYTES = 4
TIME_MAX = 1e11
"""Seconds: three thousand years."""
NO_VALUE = "hold no finite value"
GOOD = {
    "have no valid time": pl.col("timestamp").is_between(-TIME_MAX, TIME_MAX).fill_null(False),
    "have no node": pl.col("node") != "",
    "have no metric": pl.col("metric") != "",
    NO_VALUE: pl.col("value").is_finite().fill_null(False),
}
"""What rows need; others are left out for the first that they lack."""
NUM_FIRST_SAMPLES = 64
"""The interval is their typical distance: few enough to be available early, enough to outvote gaps."""
NO_INTERVAL = 1.0
"""Seconds, of samples at a single time."""
NUM_NEW_SAMPLES = 1 << 21
"""That may be among the first, before those that are not are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """`remarks`: omitted data with the reason, one sentence each. `panels`: none if no sample has a value."""

    path: str
    panels: tuple[Panel, ...]
    num_rows: int
    remarks: tuple[str, ...] = ()


def is_parquet(path: Path) -> bool:
    """Whether the file begins like Parquet. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def is_recording(path: Path) -> bool:
    """Whether it is Parquet with a recording's columns; also true if it is too damaged to decide. Raises OSError."""
    if not is_parquet(path):
        return False
    try:
        return set(REQUIRED) <= set(_schema_of(path))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
        return True


def _schema_of(path: Path) -> pl.Schema:
    return pl.scan_parquet(path, glob=False).collect_schema()  # a file name may contain pattern characters


def read(path: Path, check: Check = no_check, keep: Callable[[int], None] = lambda _: None) -> Recording:
    """`keep` gets the bytes of the panels before they take memory, and raises if these are too many.

    Raises UnreadableInput: not a regular file, damaged, too large, columns missing or of a wrong type, or no row with a
    time, a node and a metric.
    """
    if path.exists() and not path.is_file():
        raise UnreadableInput(where=str(path), reason="not a regular file")  # a pipe would block
    file = _File(path, check)
    survey = _survey(file)
    if not len(survey.machines) and not any(NO_VALUE in remark for remark in survey.remarks):
        raise file.unreadable("it holds no sample with a time, a node, a metric and a value")
    panels = _panels(file, survey, keep) if len(survey.machines) else []
    panels.sort(key=lambda p: panel_key(p.shape))
    return Recording(path=str(path), panels=tuple(panels), num_rows=file.num_rows, remarks=survey.remarks)


def write(path: Path, panels: Iterable[Panel]) -> int:
    """Writes panels as one recording, without missing values; returns the number of samples."""
    tables = [_rows(panel) for panel in panels]
    table = pl.concat(tables) if tables else pl.DataFrame(schema=_schema())
    partial = path.with_name(path.name + ".partial")
    table.write_parquet(partial, compression="zstd")
    partial.replace(path)
    return len(table)


def _schema() -> dict[str, Any]:
    integers = dict.fromkeys(OPTIONAL_INTEGERS[:2], pl.Int32)
    return {
        "timestamp": pl.Float64,
        **dict.fromkeys((*STRINGS, *OPTIONAL_STRINGS), pl.String),
        **integers,
        "value": pl.Float32,
    }


class _File:
    """The rows of a file, of which only one batch is in memory."""

    def __init__(self, path: Path, check: Check) -> None:
        """Raises UnreadableInput."""
        self._path, self._check = path, check
        with self._reading():
            self._version = _version_of(path)
            schema = _schema_of(path)
            self.num_rows = int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())
        if missing := [c for c in REQUIRED if c not in schema]:
            raise self.unreadable(f"not a recording: it has no column {', '.join(missing)}")
        if self.num_rows > NUM_ROWS_MAX:
            most = f"{NUM_ROWS_MAX:,} are read at most: cut it by time or by role"
            raise self.unreadable(f"it has {self.num_rows:,} samples, and {most}")
        self._columns = [c for c in (*REQUIRED, *OPTIONAL_STRINGS, *OPTIONAL_INTEGERS) if c in schema]

    def batches(self) -> Iterator[pl.DataFrame]:
        """At least one, with all columns. Raises UnreadableInput."""
        for start in range(0, max(self.num_rows, 1), BATCH_ROWS):
            self._check()
            with self._reading():
                rows = pl.scan_parquet(self._path, glob=False).select(self._columns).slice(start, BATCH_ROWS).collect()
                if _version_of(self._path) != self._version:
                    raise self.unreadable("it was changed while it was read")
            yield _typed(rows, str(self._path))

    def unreadable(self, reason: str) -> UnreadableInput:
        return UnreadableInput(where=str(self._path), reason=reason)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except pl.exceptions.PanicException as e:  # a bug in the reader, triggered by damaged files
            raise self.unreadable("the Parquet file is damaged") from e
        except (pl.exceptions.PolarsError, OSError) as e:
            if isinstance(e, OSError) and e.strerror:
                raise self.unreadable(f"it cannot be read: {e.strerror}") from e
            if not is_parquet(self._path):
                raise self.unreadable("not a Parquet file") from e
            if "must end with" in str(e):
                raise self.unreadable("not a readable Parquet file: its end is missing") from e
            first = (str(e).splitlines() or [type(e).__name__])[0][:200]
            raise self.unreadable(f"not a readable Parquet file: {first}") from e


def _version_of(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _typed(table: pl.DataFrame, where: str) -> pl.DataFrame:
    """All columns with their types; missing ones are filled with null."""
    schema = table.schema
    for name in ("value", *(c for c in OPTIONAL_INTEGERS if c in schema)):
        if not schema[name].is_numeric() and schema[name] != pl.Null:
            raise UnreadableInput(where=where, reason=f"column {name} holds {schema[name]}, not numbers")
    at = pl.col("timestamp")
    if schema["timestamp"].is_temporal() and schema["timestamp"] != pl.Duration:
        at = at.cast(pl.Datetime("us")).dt.epoch("us") / 1e6
    elif not schema["timestamp"].is_numeric():
        reason = f"column timestamp holds {schema['timestamp']}, neither seconds nor times"
        raise UnreadableInput(where=where, reason=reason)
    columns = [at.cast(pl.Float64).alias("timestamp"), pl.col("value").cast(pl.Float32)]
    for name in (*STRINGS, *OPTIONAL_STRINGS):
        columns.append((pl.col(name).cast(pl.String).fill_null("") if name in schema else pl.lit("")).alias(name))
    for name in OPTIONAL_INTEGERS:
        column = pl.col(name).cast(pl.Int64, strict=False) if name in schema else pl.lit(None, dtype=pl.Int64)
        columns.append(column.alias(name))
    try:
        return table.select(columns)
    except pl.exceptions.PolarsError as e:
        first = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise UnreadableInput(where=where, reason=f"a column cannot be converted: {first}") from e


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """What a file has. `machines`: KEY, with what says the tick of a sample: `first`, `interval`, or the step if
    `by_step`; `n`: the place in the panel. `metrics`: of each panel, with their place `m`."""

    machines: pl.DataFrame
    metrics: pl.DataFrame
    remarks: tuple[str, ...]


def _survey(file: _File) -> _Survey:
    """Raises UnreadableInput."""
    left_out = dict.fromkeys(GOOD, 0)
    strings, numbers = KEY[:-2], (*KEY[-2:], "machine", "panel")
    machines = pl.DataFrame(schema=dict.fromkeys(strings, pl.String) | dict.fromkeys(numbers, pl.Int64))
    metrics = pl.DataFrame(schema={"panel": pl.Int64, "metric": pl.String})
    starts = pl.DataFrame(schema={"machine": pl.Int64, "timestamp": pl.Float64})
    until, enough = pl.DataFrame(schema={"machine": pl.Int64, "until": pl.Float64}), NUM_NEW_SAMPLES
    panels = pl.DataFrame(
        schema={"panel": pl.Int64, "first": pl.Float64, "by_step": pl.Boolean, "low": pl.Int64, "high": pl.Int64}
    )
    for rows in file.batches():
        for what, good in GOOD.items():
            before = len(rows)
            rows = rows.filter(good)
            left_out[what] += before - len(rows)
        rows, machines = _numbered(rows, machines)
        metrics = pl.concat([metrics, rows.select("panel", "metric").unique()]).unique()
        for names, what in (machines, "machines"), (metrics, "metrics"):
            if len(names) > NUM_NAMES_MAX:
                raise file.unreadable(f"it has more than {NUM_NAMES_MAX:,} {what}: cut it by role")
        step = pl.col("step")
        seen = rows.group_by("panel").agg(
            pl.col("timestamp").min().alias("first"),
            step.is_not_null().all().alias("by_step"),
            step.min().alias("low"),
            step.max().alias("high"),
        )
        least, most = pl.col("first", "low").min(), pl.col("high").max()
        panels = (
            pl.concat([panels, seen]).group_by("panel").agg(least, pl.col("by_step").all(), most).select(panels.columns)
        )
        early = pl.col("until").is_null() | (pl.col("timestamp") < pl.col("until"))
        new = rows.select(starts.columns).join(until, on="machine", how="left").filter(early)
        starts = pl.concat([starts, new.select(starts.columns)])
        if len(starts) > enough:
            starts = _first_samples(starts)
            last = starts.group_by("machine").agg(pl.len(), pl.col("timestamp").max().alias("until"))
            until = last.filter(pl.col("len") == NUM_FIRST_SAMPLES).drop("len")
            enough = len(starts) + NUM_NEW_SAMPLES
    # The typical distance between a machine's first samples, over machines; an average of two could be that of a gap.
    starts = _first_samples(starts).join(machines.select("machine", "panel"), on="machine")
    distances = starts.group_by("panel", "machine").agg(pl.col("timestamp").diff().quantile(0.5, "lower"))
    interval = pl.col("timestamp").quantile(0.5, "lower").fill_null(NO_INTERVAL).alias("interval")
    panels = panels.join(distances.group_by("panel").agg(interval), on="panel")
    panels = panels.with_columns(pl.col("by_step") & (pl.col("low") < pl.col("high"))).drop("low", "high")
    place = pl.int_range(pl.len()).over("panel")
    return _Survey(
        machines=machines.join(panels, on="panel").sort("panel", *MACHINE_KEY).with_columns(place.alias("n")),
        metrics=metrics.sort("panel", "metric").with_columns(place.alias("m")),
        remarks=tuple(f"{num:,} rows {what} and are left out" for what, num in left_out.items() if num),
    )


def _numbered(rows: pl.DataFrame, machines: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows with `machine` and `panel`, and the machines with those that are new."""
    found = rows.join(machines, on=KEY, how="left", nulls_equal=True)
    new = found.filter(pl.col("machine").is_null()).select(KEY).unique()
    if not len(new):
        return found, machines
    machine = pl.int_range(len(machines), len(machines) + len(new)).alias("machine")
    machines = pl.concat([machines.drop("panel"), new.with_columns(machine)])
    panel = (*KEY[:3], pl.col("rank").is_null(), pl.col("gpu").is_null())
    # A panel has the number of its first machine, which machines that are added later do not change.
    machines = machines.with_columns(pl.col("machine").min().over(panel).alias("panel"))
    return rows.join(machines, on=KEY, nulls_equal=True), machines


def _first_samples(starts: pl.DataFrame) -> pl.DataFrame:
    """The first times of each machine, in order."""
    starts = starts.unique().sort("timestamp")
    return starts.group_by("machine", maintain_order=True).head(NUM_FIRST_SAMPLES)


def _placed(file: _File, survey: _Survey) -> Iterator[pl.DataFrame]:
    """Good rows with the columns of their machine, and the `number` of their tick."""
    for rows in file.batches():
        rows = rows.filter(*GOOD.values()).join(survey.machines, on=KEY, nulls_equal=True)
        at, first, interval = (rows[name].to_numpy() for name in ("timestamp", "first", "interval"))
        number = pl.Series(np.rint((at - first) / interval).astype(np.int64))
        yield rows.with_columns(pl.when("by_step").then("step").otherwise(number).alias("number"))


def _shaped(file: _File, survey: _Survey) -> tuple[list[tuple[int, PanelShape, Times]], pl.DataFrame]:
    """Number, shape and times of each panel, and the `number` of its ticks with their place `t`. Raises
    UnreadableInput: they have too many values."""
    ticks = pl.DataFrame(schema={"panel": pl.Int64, "number": pl.Int64, "at": pl.Float64})
    for rows in _placed(file, survey):
        new = rows.select("panel", "number", pl.col("timestamp").alias("at"))
        ticks = pl.concat([ticks, new]).group_by("panel", "number").agg(pl.col("at").max())
        if len(ticks) > NUM_TICKS_MAX:
            raise file.unreadable(f"it has more than {NUM_TICKS_MAX:,} ticks: cut it by time")
    ticks = ticks.sort("panel", "number").with_columns(pl.int_range(pl.len()).over("panel").alias("t"))
    metrics_of, ticks_of_panel = (x.partition_by("panel", as_dict=True) for x in (survey.metrics, ticks))
    shaped, room = list[tuple[int, PanelShape, Times]](), NUM_VALUES_MAX
    for (panel,), members in survey.machines.partition_by("panel", as_dict=True).items():
        head, its_ticks = members.row(0, named=True), ticks_of_panel[panel,]
        if head["by_step"]:
            at = np.maximum.accumulate(its_ticks["at"].to_numpy())
            distances = np.diff(np.unique(at))
            interval = float(np.quantile(distances, 0.5, method="lower")) if len(distances) else NO_INTERVAL
        else:
            interval = head["interval"]
            at = head["first"] + its_ticks["number"].to_numpy() * interval
        shape = PanelShape(
            **{name: head[name] for name in ("job", "role", "phase")},
            metrics=tuple(metrics_of[panel,]["metric"]),
            machines=tuple(Machine(**row) for row in members.select(MACHINE_KEY).to_dicts()),
            interval_seconds=interval,
        )
        size = len(shape.metrics) * len(at) * len(shape.machines)
        if size > room:
            what = f"{len(shape.machines)} machines, {len(shape.metrics)} metrics and {len(at)} ticks of {interval:g} s"
            limit = f"{room:,} of {NUM_VALUES_MAX:,} are left: cut it by time or by role"
            raise file.unreadable(f"{shape.name}: {what} are {size:,} values, and {limit}")
        room -= size
        shaped.append((panel, shape, at))
    return shaped, ticks


def _panels(file: _File, survey: _Survey, keep: Callable[[int], None]) -> list[Panel]:
    """Raises UnreadableInput, and what `keep` raises."""
    shaped, ticks = _shaped(file, survey)
    layout = pl.DataFrame(
        [(panel, len(shape.machines), len(at), len(shape.metrics)) for panel, shape, at in shaped],
        schema=dict.fromkeys(("panel", "machines", "ticks", "metrics"), pl.Int64),
        orient="row",
    )
    size = pl.col("machines") * pl.col("ticks") * pl.col("metrics")
    layout = layout.with_columns((size.cum_sum() - size).alias("start"))
    num_values = layout.select(size.sum()).item()
    keep(VALUE_BYTES * num_values + sum(at.nbytes for _, _, at in shaped))
    row = pl.col("start") + pl.col("m") * pl.col("ticks") * pl.col("machines")
    rows_of = survey.metrics.join(layout, on="panel").select("panel", "metric", row.alias("row"))
    columns_of = ticks.join(layout, on="panel").select(
        "panel", "number", (pl.col("t") * pl.col("machines")).alias("column")
    )
    # All panels of the file are one array. The last sample of a cell counts, of equal times the largest: independent of
    # the row order.
    values, last = np.full(num_values, np.nan, dtype=np.float32), np.full(num_values, -np.inf)
    for rows in _placed(file, survey):
        place = (pl.col("row") + pl.col("column") + pl.col("n")).alias("cell")
        rows = rows.join(rows_of, on=["panel", "metric"]).join(columns_of, on=["panel", "number"])
        rows = rows.select(place, "timestamp", "value")
        if rows["cell"].n_unique() < len(rows):
            rows = rows.sort("timestamp", "value")
        cell, at, value = (column.to_numpy() for column in rows)
        newer = (at > last[cell]) | (at == last[cell]) & (value > values[cell])
        values[cell[newer]], last[cell[newer]] = value[newer], at[newer]
    starts = layout["start"].to_list()
    return [
        Panel(shape=shape, at=at, values=part.reshape(len(shape.metrics), len(at), len(shape.machines)))
        for (_, shape, at), part in zip(shaped, np.split(values, starts[1:]), strict=True)
    ]


def _rows(panel: Panel) -> pl.DataFrame:
    shape = panel.shape
    m, t, n = np.nonzero(np.isfinite(panel.values))
    machines = shape.machines

    def strings(words: Sequence[str], which: np.ndarray[Any, Any]) -> pl.Series:
        return pl.Series(words, dtype=pl.String).gather(which) if words else pl.Series([], dtype=pl.String)

    return pl.DataFrame(
        {
            "timestamp": panel.at[t],
            "role": pl.repeat(shape.role, len(m), eager=True, dtype=pl.String),
            "replica": strings([x.replica for x in machines], n),
            "node": strings([x.node for x in machines], n),
            "metric": strings(shape.metrics, m),
            "job": pl.repeat(shape.job, len(m), eager=True, dtype=pl.String),
            "phase": pl.repeat(shape.phase, len(m), eager=True, dtype=pl.String),
            "gpu": pl.Series([x.gpu for x in machines], dtype=pl.Int32).gather(n),
            "rank": pl.Series([x.rank for x in machines], dtype=pl.Int32).gather(n),
            "value": panel.values[m, t, n],
        },
        schema=_schema(),
    )


class RecordingSource:
    """Replays a recording as if live. `speed`: recorded seconds per second; infinite: without waiting."""

    def __init__(self, path: Path, speed: float, clock: Clock) -> None:
        """Raises UnreadableInput; ConfigError: invalid speed."""
        if not speed > 0:
            raise ConfigError([f"--speed: must be above 0, got {speed:g}"])
        self._speed, self._clock = speed, clock
        self.recording = read(path)

    def ticks(self, stopped: Stopped) -> Iterator[PanelTick]:
        first, begun = None, self._clock.monotonic()
        for tick in ticks_of(self.recording.panels):
            first = tick.at if first is None else first
            pause(self._clock, begun + (tick.at - first) / self._speed - self._clock.monotonic(), stopped)
            if stopped():
                return
            yield tick
