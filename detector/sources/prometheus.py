"""Source `prometheus`: panels from any server with Prometheus's HTTP API (v1), by range queries.

A query names the labels of its series that identify a machine. A counter's rate is used only where it is reliable
(`trusted_rate`): a target that restarts, appears or disappears is a gap.

Ticks are multiples of the interval on the server's clock. The newest requested tick is one interval old: by then,
every target has been scraped since the previous tick. Queries cover blocks of ticks. A query that a server rejects as
too large is split in halves, first by time, then by machines; the sizes that worked are remembered. The server marks
ended series as stale; the values that it sends are checked.
"""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.core.clock import Clock
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.metrics.catalogue import CATALOGUE
from rolecall.core.metrics.metric import MetricScope, MetricType
from rolecall.detector.panels.metrics import BUSY, NODE_ROLE, SECONDS_PER_UNIT, UNITS, panel_metric
from rolecall.detector.panels.panel import Machine, PanelTick, Stopped, Times, pause, ticks_of
from rolecall.detector.panels.series import MetricSeries, PanelPosition, Panels
from rolecall.detector.sources.prometheus_api import (
    RETRY_SECONDS_MAX,
    Client,
    PrometheusResponseTooLarge,
    PrometheusUnavailable,
    is_name,
    short,
)

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels that identify the machine of a series: of each list, the first that is not empty."""

    role: tuple[str, ...] = ("role",)
    role_otherwise: str = "machine"
    """Role of a series without such a label."""
    replica: tuple[str, ...] = ("replica",)
    node: tuple[str, ...] = ("node", "hostname", "Hostname", "instance")
    """Series without any of these are ignored."""
    rank: tuple[str, ...] = ("rank",)
    gpu: tuple[str, ...] = ("gpu",)
    job: tuple[str, ...] = ()
    phase: tuple[str, ...] = ("phase",)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.role, *self.replica, *self.node, *self.rank, *self.gpu, *self.job, *self.phase)

    def place(self, labels: Mapping[str, str]) -> PanelPosition | None:
        """None: no node, a rank or gpu that is not a number, or an unusable name."""

        def first(names: tuple[str, ...]) -> str:
            return next((labels[n] for n in names if labels.get(n)), "")

        node, rank, gpu = first(self.node), first(self.rank), first(self.gpu)
        role, replica, job, phase = first(self.role), first(self.replica), first(self.job), first(self.phase)
        numbers = all(not n or _NUMBER.fullmatch(n) for n in (rank, gpu))
        if not node or not numbers or not all(map(is_name, (node, role, replica, job, phase))):
            return None
        machine = Machine(node=node, replica=replica, rank=int(rank) if rank else None, gpu=int(gpu) if gpu else None)
        return PanelPosition(role=role or self.role_otherwise, machine=machine, job=job, phase=phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricQuery:
    """`expression`: PromQL, in which `$match` stands for the user's selector (and one for a subset of machines, when a
    server rejects a query for all), `$window` for the duration of rates, `$interval` for that of a tick."""

    metric: str
    expression: str
    labels: Labels = Labels()


def trusted_rate(name: str) -> str:
    """Rate of a counter, if its series exists at both ends of the window and was not reset in it.

    `rate` alone divides by the whole window even if the series covers only a part: a target that appears or disappears
    would look slow for a window. `and` drops series that are stale now or were absent then, `unless resets` those that
    were reset.
    """
    series = f"{name}{{$match}}"
    return f"rate({series}[$window]) and {series} and {series} offset $window unless resets({series}[$window]) > 0"


ALIVE = " and rolecall_process_up{$match} == 1"
"""An agent continues to export the last values of a dead process: also a gap."""


def catalogue_queries() -> tuple[MetricQuery, ...]:
    """Metrics of rolecall's agents (core/metrics/catalogue.py). Phases change faster than servers scrape, so only the
    role defines peers."""
    found = []
    for metric in CATALOGUE:
        name = panel_metric(metric)
        if not name or metric.subject is MetricScope.GPU:  # no label identifies the GPU's owner
            continue
        counter = metric.type is MetricType.COUNTER
        expression = trusted_rate(metric.name) if counter else f"{metric.name}{{$match}}"
        labels = Labels(role=(), role_otherwise=NODE_ROLE, phase=())
        if metric.subject is MetricScope.PROCESS:
            expression, labels = expression + ALIVE, Labels(phase=())
        found.append(MetricQuery(metric=name, expression=expression, labels=labels))
    each = f"({trusted_rate(BUSY)}) / (({trusted_rate(UNITS)}) > 0){ALIVE}"
    return (*found, MetricQuery(metric=SECONDS_PER_UNIT, expression=each, labels=Labels(phase=())))


DCGM_GAUGES = (
    *("DEV_SM_CLOCK", "DEV_MEM_CLOCK", "DEV_GPU_TEMP", "DEV_MEMORY_TEMP", "DEV_POWER_USAGE", "DEV_GPU_UTIL"),
    *("DEV_MEM_COPY_UTIL", "DEV_FB_USED", "DEV_NVLINK_BANDWIDTH_TOTAL", "PROF_GR_ENGINE_ACTIVE", "PROF_SM_ACTIVE"),
    *("PROF_SM_OCCUPANCY", "PROF_PIPE_TENSOR_ACTIVE", "PROF_DRAM_ACTIVE", "PROF_PCIE_TX_BYTES", "PROF_PCIE_RX_BYTES"),
)
"""From dcgm-exporter's `default-counters.csv`; without the last XID, which is a code and not a measurement."""


def dcgm_queries() -> tuple[MetricQuery, ...]:
    """Metrics of dcgm-exporter: one column per GPU. Its host label was `Hostname` until May 2026
    (dcgm-exporter#655)."""
    labels = Labels(role=("role",), role_otherwise="gpu", node=("hostname", "Hostname", "node", "instance"))
    gauges = [
        MetricQuery(metric=f"DCGM_FI_{g}", expression=f"DCGM_FI_{g}{{$match}}", labels=labels) for g in DCGM_GAUGES
    ]
    replays = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
    return (*gauges, MetricQuery(metric=f"{replays}_per_second", expression=trusted_rate(replays), labels=labels))


logger = logging.getLogger(__name__)

BLOCK_TICKS = 60
"""Ticks per query: far below Prometheus's limit of 11,000 points per series, and 50 MB of panel at 10,000 machines and
21 metrics."""
WINDOW_INTERVALS = 4
"""Window of a rate in intervals: it contains two samples even if a scrape fails."""
INTERVAL_SECONDS_MIN, INTERVAL_SECONDS_MAX = 0.1, 86_400.0
CATCH_UP_TICKS = 300
"""Older ticks are skipped when a server is back after an outage."""
EMPTY_ROUNDS = 10
"""A query without results is skipped for this many rounds."""
PLACES_MAX = 500_000
"""Maximum number of label sets per query whose machine is cached."""

_Part = tuple[str, ...] | None
"""Machines of one query, by name; empty: those in no other part; None: all."""


@dataclass(slots=True)
class _QueryState:
    """A query, and what was learned about the server's limits for it."""

    query: MetricQuery
    ticks_max: int = BLOCK_TICKS
    parts: list[_Part] = field(default_factory=lambda: [None])
    node_label: str = ""  # label by which parts select machines
    empty_rounds: int = 0  # rounds until the next request
    warned: set[str] = field(default_factory=set)
    names: tuple[str, ...] = ()  # of all relevant labels
    places: dict[tuple[str | None, ...], PanelPosition | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = self.query.labels.names

    def matching(self, part: _Part, match: str) -> str:
        """The expression for these machines, without substituting `$interval` and `$window`."""
        picked = match
        if part is not None:
            named = part or tuple(n for p in self.parts if p for n in p)
            pattern = json.dumps("|".join(map(re.escape, named)), ensure_ascii=False)
            picked = ",".join(filter(None, (match, f"{self.node_label}{'=~' if part else '!~'}{pattern}")))
        return self.query.expression.replace("$match", picked)

    def place(self, labels: Mapping[str, str]) -> PanelPosition | None:
        key = tuple(map(labels.get, self.names))
        if key not in self.places:
            if len(self.places) >= PLACES_MAX:
                self.places.clear()
            self.places[key] = self.query.labels.place(labels)
        return self.places[key]

    def warn(self, text: str) -> None:
        """Logs each text once, at most ten texts."""
        if text not in self.warned and len(self.warned) < 10:
            self.warned.add(text)
            logger.warning("%s: %s", self.query.metric, text)


@dataclass(frozen=True, slots=True)
class _Points:
    """Values of one response, with row (position) and tick of each, all (P,)."""

    rows: NDArray[np.int64]
    ticks: NDArray[np.int64]
    values: Times


class PrometheusSource:
    """Ticks of all queries, first from `history_seconds` ago, then live."""

    def __init__(
        self,
        client: Client,
        queries: Sequence[MetricQuery],
        clock: Clock,
        *,
        interval_seconds: float,
        history_seconds: float = 0.0,
        match: str = "",
    ) -> None:
        """`interval_seconds`: at least the servers' scrape interval. `match`: label matchers for `$match`, such as
        `cluster="a"`. Raises ConfigError."""
        problems = []
        if not INTERVAL_SECONDS_MIN <= interval_seconds <= INTERVAL_SECONDS_MAX:
            within = f"{INTERVAL_SECONDS_MIN} and {INTERVAL_SECONDS_MAX:g} s"
            problems.append(f"--interval: must be within {within}, got {interval_seconds:g}")
        if not queries:
            problems.append("no query")
        match = match.strip().removeprefix("{").removesuffix("}").strip().rstrip(",")
        if match:
            fixed = [q.metric for q in queries if "$match" not in q.expression]
            problems += [f"{m}: its expression has no $match, so that --match could not hold for it" for m in fixed]
        if problems:
            raise ConfigError(problems)
        self._client, self._clock, self._match = client, clock, match
        self._interval_seconds = round(interval_seconds, 3)  # the API's resolution
        self._history_seconds = history_seconds
        self._asked = [_QueryState(q) for q in queries]
        self._panels = Panels(self._interval_seconds)
        self._begun, self._newest_with_data = False, 0  # number of that tick
        self.failing = ""
        """Why the server currently gives no ticks; "" if it does."""

    def ticks(self, stopped: Stopped) -> Iterator[PanelTick]:
        """Raises UnreadableInput: if there is no first response; later only if the server rejects the query."""
        try:
            yield from self._ticks(stopped)
        finally:
            self._client.close()

    def _ticks(self, stopped: Stopped) -> Iterator[PanelTick]:
        following: int | None = None
        while not stopped():
            try:
                offset = self._client.now(stopped) - self._clock.wall()
                newest = math.floor((self._clock.wall() + offset) / self._interval_seconds - 1 + 1e-6)
                following = self._first_due(following, newest)
                for asked in self._asked:
                    asked.empty_rounds = max(0, asked.empty_rounds - 1)
                while following <= newest and not stopped():
                    last = min(newest, following + BLOCK_TICKS - 1)
                    block = self._block(following, last, last == newest, stopped)
                    following = last + 1
                    if self.failing:
                        logger.warning("%s answers again", self._client.where)
                    self._begun, self.failing = True, ""
                    yield from block
                due = following * self._interval_seconds + self._interval_seconds - offset
                pause(self._clock, due - self._clock.wall(), stopped)
            except PrometheusUnavailable as e:
                if stopped():
                    self.failing = self.failing if self._begun else str(e)
                    return
                if not self._begun:
                    raise UnreadableInput(where=self._client.where, reason=f"no answer: {e}") from None
                if not self.failing:
                    logger.warning("%s does not answer, retrying: %s", self._client.where, e)
                self.failing = str(e)
                pause(self._clock, min(self._interval_seconds, RETRY_SECONDS_MAX), stopped)

    def _first_due(self, following: int | None, newest: int) -> int:
        """Number of the first tick to request."""
        if following is None:
            return newest + 1 - max(1, math.ceil(self._history_seconds / self._interval_seconds))
        if following > newest + 1 + CATCH_UP_TICKS:
            # The server's clock was wrong, and there was no data for that time: continue at the previous position.
            for asked in self._asked:
                asked.empty_rounds = 0
            return max(newest - CATCH_UP_TICKS, self._newest_with_data) + 1
        skipped = newest + 1 - CATCH_UP_TICKS - following
        if skipped > 0:
            logger.warning("%s: %d ticks are too long ago and left out", self._client.where, skipped)
        return following + max(0, skipped)

    def _block(self, first: int, last: int, is_newest: bool, stopped: Stopped) -> Iterator[PanelTick]:
        """All panels from tick `first` to `last`. Raises UnreadableInput, PrometheusUnavailable."""
        series, refusal = [], ""
        for asked in self._asked:
            if asked.empty_rounds:
                continue
            try:
                one = self._fetch(asked, first, last, stopped)
            except UnreadableInput as e:
                if not self._begun:
                    raise UnreadableInput(where=f"{e.where}: {asked.query.metric}", reason=e.reason) from None
                asked.warn(f"left out: {e.reason}")  # the other queries continue
                refusal = e.reason
                continue
            if one.places:
                series.append(one)
            elif is_newest:
                asked.empty_rounds = EMPTY_ROUNDS
        if refusal and not series:
            raise PrometheusUnavailable(refusal)  # all queries failed: retry, so that no tick is lost
        if is_newest and not series and not self._begun:
            logger.warning("%s has no series for any query yet", self._client.where)
        at = np.arange(first, last + 1, dtype=np.float64) * self._interval_seconds
        panels = self._panels.build(at, series)
        if panels:
            self._newest_with_data = last
        return ticks_of(panels)

    def _fetch(self, asked: _QueryState, first: int, last: int, stopped: Stopped) -> MetricSeries:
        """One query from tick `first` to `last`, in as many requests as needed."""
        places: dict[PanelPosition, int] = {}
        found: list[_Points] = []
        step = self._interval_seconds
        interval, window = f"{round(step * 1000)}ms", f"{round(step * 1000) * WINDOW_INTERVALS}ms"
        pieces = [
            (low, min(low + asked.ticks_max - 1, last), part)
            for low in range(first, last + 1, asked.ticks_max)
            for part in asked.parts
        ]
        while pieces:
            if stopped():
                raise PrometheusUnavailable("stopped by the user")
            low, high, part = pieces.pop(0)
            try:
                expression = asked.matching(part, self._match).replace("$window", window).replace("$interval", interval)
                answer = self._client.matrix(expression, low * step, high * step, step, stopped)
            except PrometheusResponseTooLarge as e:
                if high > low:
                    asked.ticks_max = half = (high - low + 1) // 2
                    pieces[:0] = [(low, low + half - 1, part), (low + half, high, part)]
                else:
                    smaller = self._split(asked, part, low, e, stopped)
                    pieces.insert(0, (low, high, part))
                    pieces = [(a, b, q) for a, b, p in pieces for q in (smaller if p == part else [p])]
                continue
            found.append(self._read(asked, answer, places, first, last))
        return _series(asked, places, found, last - first + 1)

    def _split(
        self, asked: _QueryState, part: _Part, tick: int, refusal: PrometheusResponseTooLarge, stopped: Stopped
    ) -> list[_Part]:
        """Splits the machines of `part` in halves, after the server rejected a query of a single tick."""
        if "$match" not in asked.query.expression:
            reason = f"{refusal}; with {{$match}} in its expression it could be queried machine by machine"
            raise UnreadableInput(where=self._client.where, reason=reason)
        names = list(part or ())
        if not part:
            known = {n for p in asked.parts if p for n in p}
            names = [n for n in self._machines(asked, tick, stopped) if n not in known]
        if len(names) < 2:
            raise UnreadableInput(where=self._client.where, reason=f"{refusal}, for a single machine and tick")
        halves: list[_Part] = [tuple(names[: len(names) // 2]), tuple(names[len(names) // 2 :])]
        rest: list[_Part] = [] if part else [()]
        asked.parts = [p for p in asked.parts if p != part] + halves + rest
        return halves + rest

    def _machines(self, asked: _QueryState, tick: int, stopped: Stopped) -> list[str]:
        """Names of the machines at a tick, from the first label with values."""
        at = tick * self._interval_seconds
        labels = [asked.node_label] if asked.node_label else asked.query.labels.node
        for label in labels:
            match = ",".join(filter(None, (f'{label}!=""', self._match)))
            try:
                names = self._client.label_values(label, match, at - self._interval_seconds, at, stopped)
            except PrometheusResponseTooLarge as e:
                raise UnreadableInput(where=self._client.where, reason=str(e)) from None
            if names:
                asked.node_label = label
                return names
        return []

    def _read(
        self, asked: _QueryState, answer: list[Any], places: dict[PanelPosition, int], first: int, last: int
    ) -> _Points:
        """Values of a response; adds new positions. Raises PrometheusUnavailable: malformed."""
        rows: list[int] = []
        ticks: list[int] = []
        values: list[float] = []
        scale = 1.0 / self._interval_seconds
        try:
            for one in answer:
                if "values" not in one and "histograms" in one:
                    asked.warn("native histograms are left out: query a rate, a quantile or a count of them")
                    continue
                place = asked.place(one["metric"])
                if place is None:
                    asked.warn("series without a node, or with a rank or gpu that is not a number, are left out")
                    continue
                row = places.setdefault(place, len(places))
                for at, value in one["values"]:
                    tick = round(at * scale)
                    if not first <= tick <= last:
                        raise ValueError("a time that was not requested")
                    rows.append(row)
                    ticks.append(tick - first)
                    values.append(float(value))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
            raise PrometheusUnavailable(f"invalid response: {short(e)}") from None
        return _Points(
            np.array(rows, dtype=np.int64), np.array(ticks, dtype=np.int64), np.array(values, dtype=np.float64)
        )


def _series(asked: _QueryState, places: dict[PanelPosition, int], found: list[_Points], num_ticks: int) -> MetricSeries:
    """Values at their positions; of several for one position and tick, the first counts."""
    rows = np.concatenate([p.rows for p in found])
    ticks = np.concatenate([p.ticks for p in found])
    values = np.concatenate([p.values for p in found])
    table = np.full((len(places), num_ticks), np.nan, dtype=np.float32)
    if len(rows):
        with np.errstate(over="ignore"):  # beyond float32: infinite, and so missing
            numbers = values.astype(np.float32)
        good = np.isfinite(numbers)
        where = (rows * num_ticks + ticks)[good]
        distinct, one = np.unique(where, return_index=True)
        table.ravel()[distinct] = numbers[good][one]
        if len(distinct) < len(where):
            asked.warn("several series fall on one machine, and the first counts: map more labels, or aggregate")
    return MetricSeries(metric=asked.query.metric, places=list(places), values=table)
