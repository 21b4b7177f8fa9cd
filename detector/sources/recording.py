"""Recordings: metrics of a fleet as one long Parquet table, read into panels and written from them.

Columns: `timestamp` (seconds), `role`, `replica`, `node`, `metric` (strings), `value` (a number); optional: `job`,
`phase` (strings), `gpu`, `rank`, `step` (integers). Rows in any order; samples may be missing. Each panel (job, role,
phase) gets its own grid: by `step` if every row has one, else by time, at the typical distance of its first samples, so
that a truncated recording has the same grid. Ticks without samples are omitted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rolecall.core.clock import Clock
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.detector.base.read_budget import Check, no_check
from rolecall.detector.panels.panel import Machine, Panel, PanelShape, PanelTick, Stopped, Times, pause, ticks_of

MAGIC = b"PAR1"
STRINGS = ("role", "replica", "node", "metric")
REQUIRED = ("timestamp", *STRINGS, "value")
OPTIONAL_STRINGS = ("job", "phase")
OPTIONAL_INTEGERS = ("gpu", "rank", "step")
PANEL_KEY = ("job", "role", "phase", "by_rank", "by_gpu")
MACHINE_KEY = ("node", "replica", "rank", "gpu")

NUM_ROWS_MAX = 100_000_000
"""About 5 GB in memory during reading; ten thousand machines with 21 metrics for eight minutes."""
NUM_VALUES_MAX = 500_000_000
"""All panels of a file, 2 GB: only a grid that does not fit its samples gives more."""
TIME_MAX = 1e11
"""Seconds: three thousand years."""
NO_VALUE = "hold no finite value"
NUM_FIRST_SAMPLES = 64
"""The interval is their typical distance: few enough to be available early, enough to outvote gaps."""


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


def read(path: Path, check: Check = no_check) -> Recording:
    """Raises UnreadableInput: not a regular file, damaged, too large, columns missing or of a wrong type, or no
    row with a time, a node and a metric."""
    if path.exists() and not path.is_file():
        raise UnreadableInput(where=str(path), reason="not a regular file")  # a pipe would block
    table = _table(path)
    num_rows = len(table)
    table, remarks = _clean(table)
    if not len(table) and not any(NO_VALUE in remark for remark in remarks):
        raise UnreadableInput(where=str(path), reason="it holds no sample with a time, a node, a metric and a value")
    panels, room = [], NUM_VALUES_MAX
    check()
    for part in table.partition_by(PANEL_KEY, maintain_order=False):
        panels.append(_panel(path, part, room))
        room -= panels[-1].values.size
        check()
    panels.sort(key=lambda p: (p.shape.job, p.shape.role, p.shape.phase, p.shape.machines))
    return Recording(path=str(path), panels=tuple(panels), num_rows=num_rows, remarks=tuple(remarks))


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


def _table(path: Path) -> pl.DataFrame:
    where = str(path)
    try:
        schema = _schema_of(path)
        missing = [c for c in REQUIRED if c not in schema]
        if missing:
            raise UnreadableInput(where=where, reason=f"not a recording: it has no column {', '.join(missing)}")
        num_rows = pl.scan_parquet(path, glob=False).select(pl.len()).collect().item()
        if num_rows > NUM_ROWS_MAX:
            reason = f"it has {num_rows:,} samples, and {NUM_ROWS_MAX:,} are read at most: cut it by time or by role"
            raise UnreadableInput(where=where, reason=reason)
        wanted = [c for c in (*REQUIRED, *OPTIONAL_STRINGS, *OPTIONAL_INTEGERS) if c in schema]
        table = pl.read_parquet(path, columns=wanted, glob=False)
    except pl.exceptions.PanicException as e:  # a bug in the reader, triggered by damaged files
        raise UnreadableInput(where=where, reason="the Parquet file is damaged") from e
    except (pl.exceptions.PolarsError, OSError) as e:
        first = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise UnreadableInput(where=where, reason=f"not a readable Parquet file: {first}") from e
    return _typed(table, where)


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
        column = pl.col(name).cast(pl.String).fill_null("") if name in schema else pl.lit("")
        columns.append(column.cast(pl.Categorical).alias(name))
    for name in OPTIONAL_INTEGERS:
        column = pl.col(name).cast(pl.Int64, strict=False) if name in schema else pl.lit(None, dtype=pl.Int64)
        columns.append(column.alias(name))
    try:
        return table.select(columns)
    except pl.exceptions.PolarsError as e:
        first = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise UnreadableInput(where=where, reason=f"a column cannot be converted: {first}") from e


def _clean(table: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """The table without rows that lack a usable value, and remarks about these."""
    good = {
        "have no valid time": pl.col("timestamp").is_between(-TIME_MAX, TIME_MAX).fill_null(False),
        "have no node": pl.col("node").cast(pl.String) != "",
        "have no metric": pl.col("metric").cast(pl.String) != "",
        NO_VALUE: pl.col("value").is_finite().fill_null(False),
    }
    remarks = []
    for what, keep in good.items():
        before = len(table)
        table = table.filter(keep)
        if len(table) < before:
            remarks.append(f"{before - len(table):,} rows {what} and are left out")
    by = [pl.col("rank").is_not_null().alias("by_rank"), pl.col("gpu").is_not_null().alias("by_gpu")]
    return table.with_columns(by), remarks


def _panel(path: Path, part: pl.DataFrame, room: int) -> Panel:
    machine_rows = part.select(MACHINE_KEY).unique()
    machines = sorted(
        Machine(**row) for row in machine_rows.with_columns(pl.col("node", "replica").cast(pl.String)).to_dicts()
    )
    metrics = sorted(part["metric"].cast(pl.String).unique().to_list())
    columns = {k: [getattr(m, k) for m in machines] for k in MACHINE_KEY}
    index = pl.DataFrame(
        {**columns, "machine": np.arange(len(machines), dtype=np.int32)},
        schema={"node": pl.String, "replica": pl.String, "rank": pl.Int64, "gpu": pl.Int64, "machine": pl.Int32},
    )
    names = pl.DataFrame(
        {"metric": metrics, "m": np.arange(len(metrics), dtype=np.int32)}, schema={"metric": pl.String, "m": pl.Int32}
    )
    part = (
        part.with_columns(pl.col("node", "replica", "metric").cast(pl.String))
        .join(index, on=MACHINE_KEY, how="left", nulls_equal=True)
        .join(names, on="metric", how="left")
        # Of samples on one tick, the latest counts; equal times are ordered by value, independent of the row order.
        .sort("timestamp", "value")
    )
    head = part.row(0, named=True)
    by_step = part["step"].null_count() == 0 and part["step"].n_unique() > 1
    if by_step:
        step = part["step"].to_numpy()
        steps, tick = np.unique(step, return_inverse=True)
        at = np.full(len(steps), -np.inf)
        np.maximum.at(at, tick, part["timestamp"].to_numpy())
        at = np.maximum.accumulate(at)
        interval = _usual_distance([np.unique(at)])
    else:
        # The typical distance between a machine's first samples, over machines.
        seen = part.select("machine", "timestamp").unique().sort("timestamp")
        starts = seen.group_by("machine", maintain_order=True).head(NUM_FIRST_SAMPLES)
        interval = _usual_distance([g["timestamp"].to_numpy() for g in starts.partition_by("machine")])
        first = head["timestamp"]
        number = np.rint((part["timestamp"].to_numpy() - first) / interval).astype(np.int64)
        numbers, tick = np.unique(number, return_inverse=True)
        at = first + numbers * interval
    shape = PanelShape(
        job=str(head["job"]),
        role=str(head["role"]),
        phase=str(head["phase"]),
        metrics=tuple(metrics),
        machines=tuple(machines),
        interval_seconds=interval,
    )
    size = len(metrics) * len(at) * len(machines)
    if size > room:
        what = f"{len(machines)} machines, {len(metrics)} metrics and {len(at)} ticks of {interval:g} s"
        limit = f"{room:,} of {NUM_VALUES_MAX:,} are left: cut it by time or by role"
        raise UnreadableInput(where=str(path), reason=f"{shape.name}: {what} are {size:,} values, and {limit}")
    values = np.full((len(metrics), len(at), len(machines)), np.nan, dtype=np.float32)
    values[part["m"].to_numpy(), tick, part["machine"].to_numpy()] = part["value"].to_numpy()
    return Panel(shape=shape, at=at, values=values)


def _usual_distance(times: Sequence[Times]) -> float:
    """Median over machines of the (lower) median positive distance; seconds, 1 if there is none."""
    distances = [_lower_median(d) for t in times if len(d := np.diff(t)[np.diff(t) > 0])]
    return _lower_median(np.array(distances)) if distances else 1.0


def _lower_median(values: Times) -> float:
    return float(np.quantile(values, 0.5, method="lower"))  # an average of two values could be dominated by a gap


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
