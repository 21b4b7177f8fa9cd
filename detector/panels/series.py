"""Builds panels from series that arrive in any order: assigns each to a panel and machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rolecall.core.errors import UnreadableInput
from rolecall.detector.panels.panel import Floats, Machine, Panel, PanelKey, PanelShape, Times

PANELS_MAX, METRICS_MAX, MACHINES_MAX = 1000, 500, 50_000
"""Higher numbers indicate labels that do not identify machines."""
FORGET_SECONDS = 3600.0
"""A machine not seen for this long is dropped when the panel next grows, and a panel when another one is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelPosition:
    """The panel of a series, and its machine."""

    role: str
    machine: Machine
    job: str = ""
    phase: str = ""

    @property
    def key(self) -> PanelKey:
        return self.job, self.role, self.phase, self.machine.rank is not None, self.machine.gpu is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSeries:
    """One metric of many machines. `values`: (S, T) float32 of position and tick; NaN is missing, none is infinite."""

    metric: str
    places: Sequence[PanelPosition]
    values: Floats


@dataclass(slots=True)
class _Columns:
    shape: PanelShape
    metrics: dict[str, int]
    machines: dict[Machine, int]
    seen_at: dict[Machine, float] = field(default_factory=dict)


class Panels:
    """Assigns series to panels, and remembers machines and metrics, so that shapes change only when some are added."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._columns: dict[PanelKey, _Columns] = {}

    def build(self, at: Times, series: Sequence[MetricSeries]) -> list[Panel]:
        """`at`: (T,) seconds. If two series give the same value, the first counts. Raises UnreadableInput: more panels,
        machines or metrics than allowed."""
        parts: dict[PanelKey, list[tuple[MetricSeries, list[int]]]] = {}
        for one in series:
            rows: dict[PanelKey, list[int]] = {}
            for row in np.flatnonzero(np.isfinite(one.values).any(axis=1)).tolist():
                rows.setdefault(one.places[row].key, []).append(row)
            for key, found in rows.items():
                parts.setdefault(key, []).append((one, found))
        return [self._panel(key, at, part) for key, part in parts.items()]

    def _panel(self, key: PanelKey, at: Times, part: list[tuple[MetricSeries, list[int]]]) -> Panel:
        columns = self._grown(key, float(at[-1]), part)
        values = np.full((len(columns.metrics), len(at), len(columns.machines)), np.nan, dtype=np.float32)
        for one, rows in part:
            n = np.array([columns.machines[one.places[row].machine] for row in rows])
            _fill(values[columns.metrics[one.metric]], n, one.values[rows])
        present = np.isfinite(values).any(axis=(0, 2))
        return Panel(shape=columns.shape, at=at[present], values=values[:, present, :])

    def _grown(self, key: PanelKey, now: float, part: list[tuple[MetricSeries, list[int]]]) -> _Columns:
        """The columns of a panel, extended by those in `part`."""
        machines = {one.places[row].machine for one, rows in part for row in rows}
        metrics = {one.metric for one, _ in part}
        columns = self._columns.pop(key, None)
        if columns is None or not (metrics <= columns.metrics.keys() and machines <= columns.machines.keys()):
            seen_at = columns.seen_at if columns is not None else {}
            kept = {m: seen for m, seen in seen_at.items() if now - seen <= FORGET_SECONDS}
            metrics |= columns.metrics.keys() if columns is not None else set()
            self._forget(now)
            columns = self._fresh(key, metrics, machines | kept.keys())
            columns.seen_at = kept
        columns.seen_at.update(dict.fromkeys(machines, now))
        self._columns[key] = columns  # most recently seen last
        return columns

    def _forget(self, now: float) -> None:
        """Drops panels without recent data, such as those of finished jobs."""
        for key, columns in list(self._columns.items()):
            if now - max(columns.seen_at.values()) <= FORGET_SECONDS:
                return
            del self._columns[key]

    def _fresh(self, key: PanelKey, metrics: set[str], machines: set[Machine]) -> _Columns:
        job, role, phase, _, _ = key
        shape = PanelShape(
            job=job,
            role=role,
            phase=phase,
            metrics=tuple(sorted(metrics)),
            machines=tuple(sorted(machines)),
            interval_seconds=self._interval_seconds,
        )
        many = [
            (len(self._columns) + 1, PANELS_MAX, "panels"),
            (len(metrics), METRICS_MAX, "metrics"),
            (len(machines), MACHINES_MAX, "machines"),
        ]
        for number, most, what in many:
            if number > most:
                reason = f"more than {most:,} {what}: the labels that name job, role, phase and machine do not fit"
                raise UnreadableInput(where=shape.name, reason=reason)
        return _Columns(
            shape, {m: i for i, m in enumerate(shape.metrics)}, {m: i for i, m in enumerate(shape.machines)}
        )


def _fill(target: Floats, n: NDArray[np.int64], values: Floats) -> None:
    """Writes `values` (S, T) into columns `n` (S,) of `target` (T, N) where these are empty."""
    columns, first = np.unique(n, return_index=True)
    standing = target[:, columns]
    target[:, columns] = np.where(np.isnan(standing), values[first].T, standing)
    for row in sorted({*range(len(n))} - {*first.tolist()}):
        column = target[:, n[row]]
        target[:, n[row]] = np.where(np.isnan(column), values[row], column)
