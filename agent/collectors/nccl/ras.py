"""Queries NCCL's RAS for the state of the job, and reports communicators that are stuck with diverged ranks.

One process per node of a job listens at NCCL_RAS_ADDR; its answer covers the whole job. No listener is the normal state
of a node without a job: `ras_up` is 0, and that is neither a failed probe nor an event. A listener that misses its
deadline or does not follow the RAS protocol is CollectorUnavailable. Each query makes all processes of the job answer:
an agent of a large job queries less often the more hosts take part, so that the total rate stays that of a small job;
while a communicator is under suspicion it queries at each poll.

A communicator is suspicious when its ranks have launched different numbers of collectives and none has launched any for
CONFIRM_SECONDS, in at least NUM_POLLS_MIN answers with counts. This is the rule of Ray Train's watchdog without its
condition that all ranks answer: missing ranks are reported as well. A symmetric hang has no diverged ranks and is not
detected here.

Protocol: NCCL `src/ras/client.cc` and `client_support.cc`: a line each way, then the answer until the server closes.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact
from rolecall.core.ids import NodeId
from rolecall.core.metrics import nccl as rows
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import AgentEventKind
from rolecall.core.text import counted
from rolecall.formats.nccl.ras import (
    Communicator,
    Condition,
    MalformedRasStatus,
    RasStatus,
    behind,
    ranks_text,
    statuses,
)

DEFAULT_ADDRESS = "localhost:28028"
NO_LISTENER_ERRNOS = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""No RAS listens. The latter two: `localhost` may resolve to IPv6 on a node without it."""
INTERVAL_SECONDS = 15.0
CONFIRM_SECONDS = 60.0
"""Ray Train warns at 60 s. A lower value reports a long checkpoint of one rank as a fault."""
NUM_POLLS_MIN = 3
NUM_HOSTS_ASKING = 8
"""With more hosts each agent queries proportionally less often, as if only this many queried."""
PAUSE_SECONDS_MAX = 600.0
CONNECT_SECONDS_MAX = 1.0
POLL_SECONDS_MAX = 3.0
"""Per poll; the agent considers a collector hung after five seconds."""
ANSWER_SECONDS_MAX = 30.0
"""Per query, over several polls: RAS waits up to twice TIMEOUT_SECONDS for other processes."""
EVIDENCE_SECONDS_MAX = 12.0
"""Per evidence request: RAS itself waits up to twice TIMEOUT_SECONDS for its peers."""
TIMEOUT_SECONDS = 5
LINE_BYTES_MAX = 1024
JSON_BYTES_MAX = 2 << 20
"""About 4,500 ranks. Parsing JSON takes ten times that in memory: larger jobs are queried in text form, which lists
only communicators with a condition."""
NUM_LABELLED_MAX = 16
NUM_PIDS_REPORTED = 32
"""PIDs of late ranks in one fact."""
NUM_WATCHED_MAX = 1024


class RasUnavailable(Exception):
    """No RAS listens at this address."""


class TooLarge(Exception):
    """The answer exceeds the size limit."""


class RasQuery:
    """One query, sent on construction. The answer may take longer than one poll; the next poll then continues to wait.

    Every wait ends at the poll's limit or at the deadline of the whole query, whichever is first.
    """

    def __init__(self, address: tuple[str, int], form: str, monotonic: Callable[[], float]) -> None:
        """Requests VERBOSE STATUS. `form`: `json`, or `text` (servers without JSON support send text for both).

        Raises:
            RasUnavailable: no RAS listens.
            MalformedRasStatus, OSError: protocol violation or timeout.
        """
        self._monotonic = monotonic
        begun = monotonic()
        self._deadline, self._until = begun + ANSWER_SECONDS_MAX, begun + POLL_SECONDS_MAX
        self._rest, self._parts, self._num_bytes = b"", list[bytes](), 0
        try:
            self._socket = socket.create_connection(address, timeout=CONNECT_SECONDS_MAX)
        except OSError as e:
            if e.errno in NO_LISTENER_ERRNOS:
                raise RasUnavailable(str(e)) from None
            raise
        try:
            self._ask(form)
        except BaseException:
            self.close()  # the caller has no reference to close yet
            raise

    def close(self) -> None:
        self._socket.close()

    def _ask(self, form: str) -> None:
        self._send("CLIENT PROTOCOL 2")
        if not self._line().upper().startswith("SERVER PROTOCOL"):
            raise MalformedRasStatus("the greeting is not RAS's")
        self._send(f"TIMEOUT {TIMEOUT_SECONDS}")
        if self._line().upper() != "OK":
            raise MalformedRasStatus("it rejected the timeout")
        if form == "json":
            self._send("SET FORMAT json")
            self._line()  # not OK before NCCL 2.28.7, which has no JSON: text follows
        self._send("VERBOSE STATUS")

    def _receive(self) -> bytes:
        """Empty when the server closed the connection. Raises OSError, including TimeoutError."""
        left = min(self._deadline, self._until) - self._monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(left)
        return self._socket.recv(65536)

    def _send(self, line: str) -> None:
        self._socket.settimeout(max(0.01, self._until - self._monotonic()))
        self._socket.sendall(line.encode() + b"\n")

    def _line(self) -> str:
        """Raises MalformedRasStatus: connection closed, or line too long. Raises OSError."""
        while b"\n" not in self._rest:
            if len(self._rest) > LINE_BYTES_MAX:
                raise MalformedRasStatus(f"a line of more than {LINE_BYTES_MAX} bytes")
            part = self._receive()
            if not part:
                raise MalformedRasStatus("it closed the connection before answering")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace").strip()

    def body(self) -> bytes | None:
        """The complete answer; None: not complete yet, call again.

        Raises:
            TooLarge: the answer exceeds the limit.
            OSError: the connection broke, or the query's deadline has passed.
        """
        self._until = self._monotonic() + POLL_SECONDS_MAX
        try:
            while part := self._receive():
                self._parts.append(part)
                self._num_bytes += len(part)
                if self._num_bytes > JSON_BYTES_MAX:
                    raise TooLarge
        except TimeoutError:
            if self._monotonic() >= self._deadline:
                raise
            return None
        return self._rest + b"".join(self._parts)


@dataclass(slots=True)
class MonitoredCommunicator:
    """State of one communicator. Times are node monotonic seconds."""

    progress: tuple[object, ...]
    since: float
    num_polls: int = 1
    seen_at: float = 0.0
    suspicious: bool = False
    width: int = 0
    launched: dict[str, int] = field(default_factory=dict)  # of the newest poll with counts
    missing_polls: int = 0
    reported_missing: int = 0
    reported_dead: frozenset[int] = frozenset()
    reported_failures: bool = False


class NcclRasCollector:
    name = "nccl_ras"

    def __init__(
        self,
        node: NodeId,
        address: str = "",
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        confirm_seconds: float = CONFIRM_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address`: `HOST:PORT`; default $NCCL_RAS_ADDR, else localhost:28028. Raises ValueError."""
        self.interval_seconds = interval_seconds
        self._node, self._confirm_seconds, self._monotonic = node, confirm_seconds, monotonic
        self._address = split_address(address or os.environ.get("NCCL_RAS_ADDR", "") or DEFAULT_ADDRESS)
        self._form = "json"
        self._query: RasQuery | None = None
        self._watched: dict[str, MonitoredCommunicator] = {}
        self._labelled: dict[str, None] = {}
        self._next_at = float("-inf")
        self._last: tuple[MetricValue, ...] = ()
        self._num_answers = self._num_bad = self._num_repaired = self._num_empty = 0

    def close(self) -> None:
        self._hang_up()
        self._watched.clear()

    def evidence(self) -> bytes:
        """Queries now: RAS's raw answer, JSON where supported.

        Raises:
            CollectorUnavailable: nothing listens there, or it does not answer in time.
        """
        try:
            try:
                return _whole(RasQuery(self._address, "json", self._monotonic), self._monotonic)
            except TooLarge:
                return _whole(RasQuery(self._address, "text", self._monotonic), self._monotonic)
        except RasUnavailable:
            reason = "nothing listens: NCCL_RAS_ENABLE=0, or no job with NCCL 2.24 or later"
        except TooLarge:
            reason = f"an answer of more than {JSON_BYTES_MAX:,} bytes"
        except (MalformedRasStatus, OSError) as e:
            reason = "it did not answer in time" if isinstance(e, TimeoutError) else str(e)
        raise CollectorUnavailable(f"NCCL RAS at {self._address[0]}:{self._address[1]}: {reason}")

    def _hang_up(self) -> None:
        if self._query is not None:
            self._query.close()
            self._query = None

    def read(self, at: float) -> CollectorReading:
        """Raises CollectorUnavailable: the listener does not follow the RAS protocol, or not in time."""
        if at < self._next_at:
            return CollectorReading((*self._last, *self._own(up=True)))
        try:
            status = self._ask()
        except RasUnavailable:
            # The job has ended: the next one has other communicators.
            self._watched.clear()
            self._labelled.clear()
            self._last, self._form, self._next_at = (), "json", float("-inf")
            return CollectorReading(self._own(up=False))
        except (MalformedRasStatus, OSError) as e:
            self._num_bad += 1
            reason = "it did not answer in time" if isinstance(e, TimeoutError) else str(e)
            raise CollectorUnavailable(f"NCCL RAS at {self._address[0]}:{self._address[1]}: {reason}") from None
        if status is None:
            return CollectorReading((*self._last, *self._own(up=True)))
        self._num_answers += 1
        self._num_repaired += status.repaired
        self._num_empty += not status.has_counts and bool(status.communicators)
        facts = tuple(self._facts(status, at))
        self._last = tuple(self._values(status))
        self._next_at = at + self._pause(status)
        return CollectorReading((*self._last, *self._own(up=True)), facts)

    def _ask(self) -> RasStatus | None:
        """None: the answer is incomplete. Raises RasUnavailable, MalformedRasStatus, OSError."""
        waiting = False
        try:
            if self._query is None:
                self._query = RasQuery(self._address, self._form, self._monotonic)
            raw = self._query.body()
            waiting = raw is None
            return None if raw is None else statuses(raw)[-1]
        except TooLarge:
            if self._form == "text":
                raise MalformedRasStatus(f"an answer of more than {JSON_BYTES_MAX:,} bytes") from None
            self._form = "text"  # from the next poll on
            return None
        finally:
            if not waiting:
                self._hang_up()

    def _pause(self, status: RasStatus) -> float:
        """Seconds until the next query; 0: at the next poll."""
        if any(c.width or c.num_missing for c in status.communicators):
            return 0.0
        num_hosts = len(status.hosts())
        if num_hosts <= NUM_HOSTS_ASKING:
            return 0.0
        return min(PAUSE_SECONDS_MAX, self.interval_seconds * (num_hosts / NUM_HOSTS_ASKING - 0.5))

    def _facts(self, status: RasStatus, at: float) -> Iterable[Fact]:
        for communicator in status.communicators:
            watched = self._watched.get(communicator.hash)
            if watched is None:
                if len(self._watched) >= NUM_WATCHED_MAX:
                    continue
                watched = self._watched[communicator.hash] = MonitoredCommunicator(progress=(), since=at, num_polls=0)
            watched.seen_at = at
            yield from self._diverged(communicator, watched, at)
            yield from self._missing(communicator, watched)
            if communicator.failures and not watched.reported_failures:
                watched.reported_failures = True
                results = ", ".join(sorted({str(f.result) for f in communicator.failures}))
                yield self._fact(
                    "error", communicator, f"{results}: {ranks_text(f.member for f in communicator.failures)}"
                )
        # Text answers omit communicators without a condition: these make progress again.
        for key in [k for k, w in self._watched.items() if w.seen_at != at]:
            gone = self._watched.pop(key)
            if gone.suspicious:
                yield self._fact("advances", Communicator(hash=key), "its ranks have converged, or it no longer exists")

    def _diverged(self, communicator: Communicator, watched: MonitoredCommunicator, at: float) -> Iterable[Fact]:
        if not communicator.has_counts:
            return  # an answer without counts shows neither progress nor its absence
        progress = communicator.standing()
        watched.width, watched.launched = communicator.width, communicator.launched()
        if progress != watched.progress:
            watched.progress, watched.since, watched.num_polls = progress, at, 1
            if watched.suspicious:
                watched.suspicious = False
                yield self._fact("advances", communicator, "its ranks are launching collectives again")
            return
        watched.num_polls += 1
        stuck_seconds = at - watched.since
        confirmed = watched.num_polls >= NUM_POLLS_MIN and stuck_seconds >= self._confirm_seconds
        if communicator.width and confirmed and not watched.suspicious:
            watched.suspicious = True
            late = "; ".join(f"{name}: {ranks_text(m)}" for name, m in behind(communicator).items()) or "unknown"
            because = (
                f"no rank launched a collective for {stuck_seconds:.0f} s, and the ranks are "
                f"{counted(communicator.width, 'collective')} apart; late: {late}"
            )
            pids = {m.pid for members in behind(communicator).values() for m in members if m.pid is not None}
            fact = self._fact("suspicious", communicator, because)
            listed = " ".join(map(str, sorted(pids)[:NUM_PIDS_REPORTED]))
            yield fact._replace(detail={**fact.detail, "pids": listed})

    def _missing(self, communicator: Communicator, watched: MonitoredCommunicator) -> Iterable[Fact]:
        dead = frozenset(m.member.rank for m in communicator.missing if m.dead)
        if dead - watched.reported_dead:
            fresh = [m.member for m in communicator.missing if m.member.rank in dead - watched.reported_dead]
            watched.reported_dead |= dead
            yield self._fact("dead", communicator, f"RAS considers dead: {ranks_text(fresh)}")
        watched.missing_polls = watched.missing_polls + 1 if communicator.num_missing else 0
        if not communicator.num_missing:
            watched.reported_missing = 0
        # Two polls: ranks are briefly missing while a communicator is created or torn down.
        elif watched.missing_polls >= 2 and communicator.num_missing > max(
            watched.reported_missing, len(watched.reported_dead)
        ):
            watched.reported_missing = communicator.num_missing
            named = [m.member for m in communicator.missing if m.unresponsive or m.dead]
            who = f": {ranks_text(named)}" if named else ""
            yield self._fact(
                "missing", communicator, f"no answer to RAS from {counted(communicator.num_missing, 'rank')}{who}"
            )

    def _fact(self, what: str, communicator: Communicator, because: str) -> Fact:
        detail = {"what": what, "communicator": communicator.hash, "because": because[:500]}
        return Fact(kind=AgentEventKind.NCCL, detail=detail)

    def _values(self, status: RasStatus) -> Iterable[MetricValue]:
        node = self._node
        yield MetricValue(rows.COMMUNICATORS, (node,), float(status.num_communicators))
        by_hash = {c.hash: c for c in status.communicators}
        for key in [k for k in self._labelled if k not in by_hash]:
            del self._labelled[key]
        # Conditions first, then size; a labelled communicator keeps its label, so that series are stable.
        ranked = sorted(by_hash.values(), key=lambda c: (-bool(c.conditions - {Condition.MISMATCH}), -c.size, c.hash))
        for communicator in ranked:
            if len(self._labelled) >= NUM_LABELLED_MAX:
                break
            self._labelled.setdefault(communicator.hash)
        for key in self._labelled:
            yield from self._of(by_hash[key])

    def _of(self, communicator: Communicator) -> Iterable[MetricValue]:
        here = (self._node, communicator.hash)
        if communicator.size:
            yield MetricValue(rows.RANKS, here, float(communicator.size))
        yield MetricValue(rows.MISSING, here, float(communicator.num_missing))
        yield MetricValue(rows.DEAD, here, float(sum(m.dead for m in communicator.missing)))
        watched = self._watched.get(communicator.hash)
        if watched is None:
            return
        yield MetricValue(rows.SUSPICIOUS, here, float(watched.suspicious))
        if watched.num_polls:
            yield MetricValue(rows.BEHIND, here, float(watched.width))
            for name, launched in watched.launched.items():
                if launched:
                    yield MetricValue(rows.LAUNCHED, (*here, name), float(launched))

    def _own(self, *, up: bool) -> tuple[MetricValue, ...]:
        counts = (
            (rows.RAS_UP, float(up)),
            (rows.RAS_ANSWERS, float(self._num_answers)),
            (rows.RAS_BAD, float(self._num_bad)),
            (rows.RAS_REPAIRED, float(self._num_repaired)),
            (rows.RAS_EMPTY, float(self._num_empty)),
        )
        return tuple(MetricValue(metric, (self._node,), value) for metric, value in counts)


def _whole(query: RasQuery, monotonic: Callable[[], float]) -> bytes:
    """Waits for the complete answer and closes the query. Raises TooLarge, OSError, including TimeoutError."""
    until = monotonic() + EVIDENCE_SECONDS_MAX
    try:
        while (body := query.body()) is None:
            if monotonic() > until:
                raise TimeoutError("it did not answer in time")
        return body
    finally:
        query.close()


def split_address(text: str) -> tuple[str, int]:
    """`localhost:28028`, `[::1]:28028`. Raises ValueError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: expected HOST:PORT")
    return host.strip("[]") or "localhost", int(port)
