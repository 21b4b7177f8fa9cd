"""Source `prometheus`: panels from any server that speaks Prometheus's HTTP API (v1), by range queries.

Ticks lie on multiples of the interval, on the server's clock. The newest one asked for is `lag_seconds` old: by then
every target has been scraped since the tick before it. Queries go out in blocks of ticks. What a server refuses as too
much is asked again in halves, of time first, then of machines; the sizes that worked are remembered.

A counter's rate is asked for only where it can be trusted (`trusted_rate`): a target that restarts, or comes or goes, is
a gap. Ends of series are taken from the server, which marks them stale. What a server sends is not trusted: sizes are
limited, values are checked, redirects are not followed, every wait has a deadline.
"""

import http.client
import json
import logging
import math
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
from numpy.typing import NDArray

from rolecall.core.clock import Clock
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.metrics import CATALOGUE, MetricType, Subject
from rolecall.detector.panel import Machine, Times
from rolecall.detector.panel_source import (
    BUSY,
    NODE_ROLE,
    SECONDS_PER_UNIT,
    UNITS,
    Panels,
    Place,
    Series,
    Stopped,
    Tick,
    panel_metric,
    pause,
    ticks_of,
)

logger = logging.getLogger(__name__)

BLOCK_TICKS = 60
"""Ticks of one query: far below the 11,000 points of a series that Prometheus allows, and 50 MB of panel at 10,000
machines and 21 metrics."""
WINDOW_INTERVALS = 4
"""A rate is taken over so many intervals: two samples are in it even if a scrape fails."""
INTERVAL_SECONDS_MIN = 0.1
CATCH_UP_TICKS = 300
"""What is older is left out when a server is back after an outage."""
EMPTY_ROUNDS = 10
"""A query that gave nothing is left out for so many rounds."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.2, 5.0
PLACES_MAX = 500_000
"""Label sets that a query remembers the machine of."""
NAME_MAX = 256
"""Characters of a label's value; a series with a longer one is left out."""
_TOO_MUCH = re.compile(r"too many|too large|too long|exceed|limit|maximum|timed out", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Which labels name the machine of a series: of each list the first that is not empty."""

    role: tuple[str, ...] = ("role",)
    role_otherwise: str = "machine"
    """Role of a series without such a label."""
    replica: tuple[str, ...] = ("replica",)
    node: tuple[str, ...] = ("node", "hostname", "Hostname", "instance")
    """A series without is left out."""
    rank: tuple[str, ...] = ("rank",)
    gpu: tuple[str, ...] = ("gpu",)
    job: tuple[str, ...] = ()
    phase: tuple[str, ...] = ("phase",)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.role, *self.replica, *self.node, *self.rank, *self.gpu, *self.job, *self.phase)

    def place(self, labels: Mapping[str, str]) -> Place | None:
        """None: no node, a rank or gpu that is no number, or a name too long."""

        def first(names: tuple[str, ...]) -> str:
            return next((labels[n] for n in names if labels.get(n)), "")

        node, rank, gpu = first(self.node), first(self.rank), first(self.gpu)
        role, replica, job, phase = first(self.role), first(self.replica), first(self.job), first(self.phase)
        numbers = all(not n or _NUMBER.fullmatch(n) for n in (rank, gpu))
        if not node or not numbers or max(map(len, (node, role, replica, job, phase))) > NAME_MAX:
            return None
        machine = Machine(node=node, replica=replica, rank=int(rank) if rank else None, gpu=int(gpu) if gpu else None)
        return Place(role=role or self.role_otherwise, machine=machine, job=job, phase=phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """`expression`: PromQL. In it `$match` stands for the selector that the user gave (and for one that picks machines,
    when a server refuses to answer for all at once), `$window` for the duration of rates, `$interval` for a tick's."""

    metric: str
    expression: str
    labels: Labels = Labels()


def trusted_rate(name: str) -> str:
    """Rate of a counter where its series was there at both ends of the window and did not start again in it.

    `rate` alone divides by the whole window even where the series covers less: a target that comes or goes would look
    slow for a window. `and` drops what is stale now or was absent then, `unless resets` what was restarted.
    """
    series = f"{name}{{$match}}"
    return f"rate({series}[$window]) and {series} and {series} offset $window unless resets({series}[$window]) > 0"


ALIVE = " and rolecall_process_up{$match} == 1"
"""An agent goes on to show a process that has died, as it last was: a gap, too."""


def catalogue_queries() -> tuple[Query, ...]:
    """What rolecall's agents expose (core/metrics.py). Phases change faster than servers scrape: role alone makes
    peers."""
    found = []
    for metric in CATALOGUE:
        if name := panel_metric(metric):
            counter = metric.type is MetricType.COUNTER
            expression = trusted_rate(metric.name) if counter else f"{metric.name}{{$match}}"
            if metric.subject is Subject.PROCESS:
                found.append(Query(metric=name, expression=expression + ALIVE, labels=Labels(phase=())))
            else:
                labels = Labels(role=(), role_otherwise=NODE_ROLE, phase=())
                found.append(Query(metric=name, expression=expression, labels=labels))
    each = f"({trusted_rate(BUSY)}) / (({trusted_rate(UNITS)}) > 0){ALIVE}"
    return (*found, Query(metric=SECONDS_PER_UNIT, expression=each, labels=Labels(phase=())))


DCGM_GAUGES = (
    "DEV_SM_CLOCK",
    "DEV_MEM_CLOCK",
    "DEV_GPU_TEMP",
    "DEV_MEMORY_TEMP",
    "DEV_POWER_USAGE",
    "DEV_GPU_UTIL",
    "DEV_MEM_COPY_UTIL",
    "DEV_FB_USED",
    "DEV_NVLINK_BANDWIDTH_TOTAL",
    "PROF_GR_ENGINE_ACTIVE",
    "PROF_SM_ACTIVE",
    "PROF_SM_OCCUPANCY",
    "PROF_PIPE_TENSOR_ACTIVE",
    "PROF_DRAM_ACTIVE",
    "PROF_PCIE_TX_BYTES",
    "PROF_PCIE_RX_BYTES",
)
"""Of dcgm-exporter's `default-counters.csv`; without the last XID, which is a code and no measure."""


def dcgm_queries() -> tuple[Query, ...]:
    """What dcgm-exporter exposes: one column a GPU. Its host label was `Hostname` until May 2026 (dcgm-exporter#655)."""
    labels = Labels(role=("role",), role_otherwise="gpu", node=("hostname", "Hostname", "node", "instance"))
    gauges = [Query(metric=f"DCGM_FI_{g}", expression=f"DCGM_FI_{g}{{$match}}", labels=labels) for g in DCGM_GAUGES]
    replays = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
    return (*gauges, Query(metric=f"{replays}_per_second", expression=trusted_rate(replays), labels=labels))


# --- the server ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server may cost its reader."""

    answer_bytes_max: int = 32 << 20
    """Of JSON, about ten times as much in memory while it is read. A larger answer is asked for in halves."""
    connect_seconds: float = 5.0
    answer_seconds: float = 30.0
    """One whole answer."""
    patience_seconds: float = 10.0
    """A question is asked again for so long."""


class _NoAnswer(Exception):
    """No usable answer now; there may be one later. The message is the reason."""


class _TooMuch(Exception):
    """Refused, or larger than allowed, because it is too much at once. The message is the server's."""


class Client:
    """One kept-alive connection. `authorization`: the header's value, or "" for none; it is never shown."""

    def __init__(self, url: str, clock: Clock, *, authorization: str = "", limits: Limits | None = None) -> None:
        """Raises ConfigError; its text does not repeat a URL that may hold a password."""
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            raise ConfigError(["--url: not a URL"]) from None
        if parts.username is not None or parts.password is not None or "@" in parts.netloc:
            reason = "credentials do not belong into a URL, where others see them: use --credentials or the environment"
            raise ConfigError([f"--url: {reason}"])
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise ConfigError([f"--url: expected http(s)://HOST[:PORT][/PATH], got {url[:200]!r}"])
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self.where = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "rolecall"}
        if authorization:
            self._headers["Authorization"] = authorization
        self._clock, self._limits = clock, limits or Limits()
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def now(self, stopped: Stopped) -> float:
        """The server's clock, seconds since 1970. Raises UnreadableInput, _NoAnswer."""
        result = self.ask("query", {"query": "time()"}, stopped)
        try:
            found = result["result"]
            first = found if result["resultType"] == "scalar" else found[0]["value"]
            now = float(first[0])
            if math.isfinite(now):
                return now
        except (KeyError, IndexError, TypeError, ValueError):
            pass
        raise _NoAnswer("its answer makes no sense: it does not know what time it is")

    def matrix(self, expression: str, start: float, end: float, step: float, stopped: Stopped) -> list[Any]:
        """Series of a range query, as the server sent them. Raises UnreadableInput, _NoAnswer, _TooMuch."""
        asked = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        found = self.ask("query_range", asked, stopped)
        if isinstance(found, dict) and found.get("resultType") == "matrix" and isinstance(found.get("result"), list):
            return list(found["result"])
        raise _NoAnswer("its answer makes no sense: no matrix for a range query")

    def label_values(self, label: str, match: str, start: float, end: float, stopped: Stopped) -> list[str]:
        """Values of a label on series that match `{match}`. Raises UnreadableInput, _NoAnswer, _TooMuch."""
        asked = urlencode({"match[]": f"{{{match}}}", "start": f"{start:.3f}", "end": f"{end:.3f}"})
        found = self.ask(f"label/{quote(label, safe='')}/values?{asked}", None, stopped)
        if isinstance(found, list) and all(isinstance(v, str) for v in found):
            return sorted(found)
        raise _NoAnswer("its answer makes no sense: no list of label values")

    def ask(self, path: str, form: Mapping[str, str] | None, stopped: Stopped) -> Any:
        """`data` of the answer; tries for `patience_seconds`. Raises UnreadableInput: trying again cannot help;
        _NoAnswer; _TooMuch."""
        until = self._clock.monotonic() + self._limits.patience_seconds
        wait = RETRY_SECONDS
        while True:
            try:
                return self._data(*self._exchange(path, form))
            except _NoAnswer:
                if stopped() or self._clock.monotonic() + wait >= until:
                    raise
            pause(self._clock, wait, stopped)
            wait = min(2 * wait, RETRY_SECONDS_MAX)

    def _exchange(self, path: str, form: Mapping[str, str] | None) -> tuple[int, bytes]:
        """Status and body. A watchdog cuts the connection off when time is up: a server that sends a byte now and then
        never lets a single read time out."""
        seconds = self._limits.answer_seconds
        body = None if form is None else urlencode(form)
        headers = self._headers | ({"Content-Type": "application/x-www-form-urlencoded"} if body is not None else {})
        late = threading.Event()
        watchdog = threading.Timer(seconds, self._cut_off, (late,))
        watchdog.daemon = True
        watchdog.start()
        most = self._limits.answer_bytes_max
        keep = False
        try:
            connection = self._connected(seconds)
            connection.request("GET" if body is None else "POST", f"{self._prefix}/api/v1/{path}", body, headers)
            response = connection.getresponse()
            read = response.read(most + 1)
            whole = not response.length  # what is left of its announced length
            keep = whole and not late.is_set()
        except ssl.SSLCertVerificationError as e:
            self._refuse(f"its certificate is not trusted: {e.verify_message}")
        except (OSError, http.client.HTTPException) as e:
            why = (
                f"no whole answer within {seconds:.3g} s" if late.is_set() or isinstance(e, TimeoutError) else _short(e)
            )
            raise _NoAnswer(why) from None
        finally:
            watchdog.cancel()
            if not keep:
                self.close()
        if len(read) > most:
            raise _TooMuch(f"its answer is larger than {most >> 20} MiB")
        if not keep:
            raise _NoAnswer(f"no whole answer within {seconds:.3g} s" if late.is_set() else "its answer was cut short")
        return response.status, read

    def _connected(self, seconds: float) -> http.client.HTTPConnection:
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)
            return self._connection
        kind = http.client.HTTPConnection if self._tls is None else http.client.HTTPSConnection
        connection = self._connection = kind(self._host, self._port)
        timeout = min(seconds, self._limits.connect_seconds)
        connection.sock = socket.create_connection((self._host, connection.port), timeout)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            shaken = self._tls.wrap_socket(connection.sock, server_hostname=self._host, do_handshake_on_connect=False)
            connection.sock = shaken  # first, so that the watchdog can cut off the handshake, too
            shaken.do_handshake()
        connection.sock.settimeout(seconds)
        return connection

    def _cut_off(self, late: threading.Event) -> None:
        late.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # closed already
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _data(self, status: int, body: bytes) -> Any:
        """Raises UnreadableInput, _NoAnswer, _TooMuch."""
        if 300 <= status < 400:
            self._refuse(f"it redirects elsewhere (status {status}), which is not followed: give the final address")
        if status == http.client.UNAUTHORIZED:
            self._refuse("it wants credentials, or does not accept these (status 401)")
        if status == http.client.FORBIDDEN:
            self._refuse("these credentials may not ask it (status 403)")
        if status == http.client.NOT_FOUND:
            self._refuse("it has no /api/v1 there (status 404): is this a Prometheus server, and the path right?")
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            said = {}
        reason = f"{_printable(said.get('error') or 'no reason given')} (status {status})"
        if status == http.client.REQUEST_ENTITY_TOO_LARGE or said.get("errorType") == "timeout":
            raise _TooMuch(reason)
        if status in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY) and _TOO_MUCH.search(reason):
            raise _TooMuch(reason)
        if status >= 500 or status in (http.client.TOO_MANY_REQUESTS, http.client.REQUEST_TIMEOUT):
            raise _NoAnswer(reason)
        if status != http.client.OK:
            self._refuse(reason)
        if said.get("status") != "success":
            raise _NoAnswer("its answer makes no sense: no JSON of Prometheus's API")
        return said.get("data")

    def _refuse(self, reason: str) -> NoReturn:
        raise UnreadableInput(where=self.where, reason=reason)


def _short(e: BaseException) -> str:
    return _printable(str(e) or type(e).__name__)


def _printable(text: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(text)[:300])


# --- the source ---------------------------------------------------------------------------------------------------

_Part = tuple[str, ...] | None
"""Machines that one query asks for, by name; none named: those in no other part; None: all."""


@dataclass(slots=True)
class _Asked:
    """A query and what was learned about asking it."""

    query: Query
    ticks_max: int = BLOCK_TICKS
    parts: list[_Part] = field(default_factory=lambda: [None])
    node_label: str = ""  # the one that parts pick
    empty_rounds: int = 0  # to go until it is asked again
    warned: set[str] = field(default_factory=set)
    names: tuple[str, ...] = ()  # of all labels that matter
    places: dict[tuple[str | None, ...], Place | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = self.query.labels.names

    def matching(self, part: _Part, match: str) -> str:
        """The expression for these machines, `$interval` and `$window` aside."""
        picked = match
        if part is not None:
            named = part or tuple(n for p in self.parts if p for n in p)
            pattern = json.dumps("|".join(map(re.escape, named)), ensure_ascii=False)
            picked = ",".join(filter(None, (match, f"{self.node_label}{'=~' if part else '!~'}{pattern}")))
        return self.query.expression.replace("$match", picked)

    def place(self, labels: Mapping[str, str]) -> Place | None:
        key = tuple(map(labels.get, self.names))
        if key not in self.places:
            if len(self.places) >= PLACES_MAX:
                self.places.clear()
            self.places[key] = self.query.labels.place(labels)
        return self.places[key]

    def warn(self, text: str) -> None:
        """Once for each text."""
        if text not in self.warned and len(self.warned) < 10:
            self.warned.add(text)
            logger.warning("%s: %s", self.query.metric, text)


@dataclass(frozen=True, slots=True)
class _Points:
    """Values of one answer: each its row (place), tick and number, all (P,)."""

    rows: NDArray[np.int64]
    ticks: NDArray[np.int64]
    values: Times


class PrometheusSource:
    """Ticks of all queries, from `history_seconds` ago on and then as they come."""

    def __init__(
        self,
        client: Client,
        queries: Sequence[Query],
        clock: Clock,
        *,
        interval_seconds: float,
        history_seconds: float = 0.0,
        match: str = "",
        lag_seconds: float | None = None,
    ) -> None:
        """`interval_seconds`: at least the servers' scrape interval. `match`: label matchers for `$match`, as
        `cluster="a"`. `lag_seconds`: one interval if None. Raises ConfigError."""
        problems = []
        if not interval_seconds >= INTERVAL_SECONDS_MIN:
            problems.append(f"--interval: must be at least {INTERVAL_SECONDS_MIN} s, got {interval_seconds:g}")
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
        self._lag_seconds = self._interval_seconds if lag_seconds is None else lag_seconds
        self._asked = [_Asked(q) for q in queries]
        self._panels = Panels(self._interval_seconds)
        self._begun = False
        self.failing = ""
        """Why the server gives no ticks now; "" while it does."""

    def ticks(self, stopped: Stopped) -> Iterator[Tick]:
        """Raises UnreadableInput: before the first answer if there is none, later only if the server refuses."""
        try:
            yield from self._ticks(stopped)
        finally:
            self._client.close()

    def _ticks(self, stopped: Stopped) -> Iterator[Tick]:
        following: int | None = None
        while not stopped():
            try:
                offset = self._client.now(stopped) - self._clock.wall()
                newest = math.floor((self._clock.wall() + offset - self._lag_seconds) / self._interval_seconds + 1e-6)
                following = self._first_due(following, newest)
                for asked in self._asked:
                    asked.empty_rounds = max(0, asked.empty_rounds - 1)
                while following <= newest and not stopped():
                    last = min(newest, following + BLOCK_TICKS - 1)
                    block = self._block(following, last, last == newest, stopped)
                    following = last + 1
                    self._answered()
                    yield from block
                due = following * self._interval_seconds + self._lag_seconds - offset
                pause(self._clock, due - self._clock.wall(), stopped)
            except _NoAnswer as e:
                if stopped():
                    return
                self._not_answered(str(e))
                pause(self._clock, min(self._interval_seconds, RETRY_SECONDS_MAX), stopped)

    def _first_due(self, following: int | None, newest: int) -> int:
        """Number of the first tick to ask for."""
        if following is None:
            return newest + 1 - max(1, math.ceil(self._history_seconds / self._interval_seconds))
        skipped = newest + 1 - CATCH_UP_TICKS - following
        if skipped > 0:
            logger.warning("%s: %d ticks are too long ago and left out", self._client.where, skipped)
        return following + max(0, skipped)

    def _answered(self) -> None:
        if self.failing:
            logger.warning("%s answers again", self._client.where)
        self._begun, self.failing = True, ""

    def _not_answered(self, reason: str) -> None:
        if not self._begun:
            raise UnreadableInput(where=self._client.where, reason=f"no answer: {reason}")
        if not self.failing:
            logger.warning("%s does not answer, trying on: %s", self._client.where, reason)
        self.failing = reason

    def _block(self, first: int, last: int, is_newest: bool, stopped: Stopped) -> Iterator[Tick]:
        """All panels from tick `first` to `last`. Raises UnreadableInput, _NoAnswer."""
        series, refusal = [], ""
        for asked in self._asked:
            if asked.empty_rounds:
                continue
            try:
                one = self._fetch(asked, first, last, stopped)
            except UnreadableInput as e:
                if not self._begun:
                    raise UnreadableInput(where=f"{e.where}: {asked.query.metric}", reason=e.reason) from None
                asked.warn(f"left out: {e.reason}")  # the others go on
                refusal = e.reason
                continue
            if one.places:
                series.append(one)
            elif is_newest:
                asked.empty_rounds = EMPTY_ROUNDS
        if refusal and not series:
            raise _NoAnswer(refusal)  # it is not one query: no tick is given up
        if is_newest and not series and not self._begun:
            logger.warning("%s has no series for any query yet", self._client.where)
        at = np.arange(first, last + 1, dtype=np.float64) * self._interval_seconds
        return ticks_of(self._panels.build(at, series))

    def _fetch(self, asked: _Asked, first: int, last: int, stopped: Stopped) -> Series:
        """One query from tick `first` to `last`, in as many pieces as it takes."""
        places: dict[Place, int] = {}
        found: list[_Points] = []
        pieces = [
            (low, min(low + asked.ticks_max - 1, last), part)
            for low in range(first, last + 1, asked.ticks_max)
            for part in asked.parts
        ]
        while pieces:
            low, high, part = pieces.pop(0)
            try:
                answer = self._client.matrix(
                    self._expression(asked, part),
                    low * self._interval_seconds,
                    high * self._interval_seconds,
                    self._interval_seconds,
                    stopped,
                )
            except _TooMuch as e:
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

    def _expression(self, asked: _Asked, part: _Part) -> str:
        interval = f"{round(self._interval_seconds * 1000)}ms"
        window = f"{round(self._interval_seconds * 1000) * WINDOW_INTERVALS}ms"
        return asked.matching(part, self._match).replace("$window", window).replace("$interval", interval)

    def _split(self, asked: _Asked, part: _Part, tick: int, refusal: _TooMuch, stopped: Stopped) -> list[_Part]:
        """Halves of the machines of `part`, which a server refused to answer for at a single tick."""
        if "$match" not in asked.query.expression:
            reason = f"{refusal}; with {{$match}} in its expression it could be asked machine by machine"
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

    def _machines(self, asked: _Asked, tick: int, stopped: Stopped) -> list[str]:
        """Names of the machines at a tick, of the first label that has any."""
        at = tick * self._interval_seconds
        labels = [asked.node_label] if asked.node_label else asked.query.labels.node
        for label in labels:
            match = ",".join(filter(None, (f'{label}!=""', self._match)))
            try:
                names = self._client.label_values(label, match, at - self._interval_seconds, at, stopped)
            except _TooMuch as e:
                raise UnreadableInput(where=self._client.where, reason=str(e)) from None
            if names:
                asked.node_label = label
                return names
        return []

    def _read(self, asked: _Asked, answer: list[Any], places: dict[Place, int], first: int, last: int) -> _Points:
        """What an answer holds; new places are added. Raises _NoAnswer: it makes no sense."""
        rows: list[int] = []
        ticks: list[int] = []
        values: list[float] = []
        scale = 1.0 / self._interval_seconds
        try:
            for one in answer:
                place = asked.place(one["metric"])
                if place is None:
                    asked.warn("series without a node, or with a rank or gpu that is no number, are left out")
                    continue
                row = places.setdefault(place, len(places))
                for at, value in one["values"]:
                    tick = round(at * scale)
                    if not first <= tick <= last:
                        raise ValueError("a time that was not asked for")
                    rows.append(row)
                    ticks.append(tick - first)
                    values.append(float(value))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
            raise _NoAnswer(f"its answer makes no sense: {_short(e)}") from None
        return _Points(
            np.array(rows, dtype=np.int64), np.array(ticks, dtype=np.int64), np.array(values, dtype=np.float64)
        )


def _series(asked: _Asked, places: dict[Place, int], found: list[_Points], num_ticks: int) -> Series:
    """Values on their places; of several for one place and tick the first counts."""
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
    return Series(metric=asked.query.metric, places=list(places), values=table)
