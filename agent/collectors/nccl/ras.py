"""Asks NCCL's RAS for the state of the job, and tells of communicators that stand still with their ranks apart.

One process of each node of a job listens at NCCL_RAS_ADDR; its answer covers the whole job. No listener is the normal state
of a node without a job: that is a metric (`ras_up` 0), neither a failed probe nor an event. A listener that does not answer
within its deadline, or not as RAS does, is CannotRead. Every question makes all processes of the job answer: an agent of a
large job asks the more rarely the more hosts take part, so that the job as a whole is asked about as often as a small one;
while a communicator looks suspicious it is asked at each look.

A communicator is suspicious when its ranks launched different numbers of collectives and none of them launched anything for
CONFIRM_SECONDS, in at least NUM_POLLS_MIN answers with counts. The rule is that of Ray Train's watchdog, without its
condition that all ranks answer: who is missing is told beside it. A symmetric hang has no ranks apart, and is not seen here.

Protocol: NCCL `src/ras/client.cc` and `client_support.cc`: a line each way, then the answer until the server closes.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact
from rolecall.core.ids import NodeId
from rolecall.core.metrics import nccl as rows
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.nccl.ras import Communicator, Condition, MalformedRasStatus, RasStatus, behind, ranks_text
from rolecall.formats.nccl.ras_answers import statuses

DEFAULT_ADDRESS = "localhost:28028"
NOBODY = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""The latter two: `localhost` is an address of IPv6, too, and this node has none; asked last, that is what is told."""
INTERVAL_SECONDS = 15.0
CONFIRM_SECONDS = 60.0
"""Ray Train warns at 60 s. A lower value calls a long checkpoint of one rank a fault."""
NUM_POLLS_MIN = 3
NUM_HOSTS_ASKING = 8
"""A job of more hosts is asked by each agent so many times more rarely, as if only these asked."""
PAUSE_SECONDS_MAX = 600.0
CONNECT_SECONDS_MAX = 1.0
LOOK_SECONDS_MAX = 3.0
"""Of one look; the agent calls a collector that takes five seconds hung."""
ANSWER_SECONDS_MAX = 30.0
"""Of the whole conversation, over several looks. RAS waits up to TIMEOUT_SECONDS, and as long again, for other processes:
longest when some of them are in trouble."""
EVIDENCE_SECONDS_MAX = 12.0
"""Of an answer that is wanted as evidence: RAS itself waits for its peers twice TIMEOUT_SECONDS."""
TIMEOUT_SECONDS = 5
LINE_BYTES_MAX = 1024
JSON_BYTES_MAX = 2 << 20
"""Some 4,500 ranks of communicators. JSON takes ten times that in memory while it is read: of larger jobs the text is
asked for, which tells of the communicators with a condition only."""
NUM_LABELLED_MAX = 16
NUM_PIDS_TOLD = 32
"""Of those who are behind."""
NUM_WATCHED_MAX = 1024


class RasUnavailable(Exception):
    """There is no RAS at this address."""


class TooLarge(Exception):
    """The answer in this form takes more than its limit."""


class RasQuery:
    """One question. Made, it has been asked; its answer may take longer than one look, and is then waited for in the next.

    Every wait ends at `until` or at the deadline of the whole conversation, whichever is first.
    """

    def __init__(self, address: tuple[str, int], form: str, monotonic: Callable[[], float]) -> None:
        """Asks for VERBOSE STATUS. `form`: `json`, or `text` (which a server that knows no JSON gives, too).

        Raises:
            NobodyListens: no RAS there.
            Malformed, OSError: it does not answer as RAS does, or not in time.
        """
        self._monotonic = monotonic
        begun = monotonic()
        self._deadline, self._until = begun + ANSWER_SECONDS_MAX, begun + LOOK_SECONDS_MAX
        self._rest, self._parts, self._num_bytes = b"", list[bytes](), 0
        try:
            self._socket = socket.create_connection(address, timeout=CONNECT_SECONDS_MAX)
        except OSError as e:
            if e.errno in NOBODY:
                raise RasUnavailable(str(e)) from None
            raise
        try:
            self._ask(form)
        except BaseException:
            self.close()  # deliberate, and raised on: nobody else knows of the socket yet
            raise

    def close(self) -> None:
        self._socket.close()

    def _ask(self, form: str) -> None:
        self._say("CLIENT PROTOCOL 2")
        if not self._line().upper().startswith("SERVER PROTOCOL"):
            raise MalformedRasStatus("it does not greet as RAS does")
        self._say(f"TIMEOUT {TIMEOUT_SECONDS}")
        if self._line().upper() != "OK":
            raise MalformedRasStatus("it does not take a timeout")
        if form == "json":
            self._say("SET FORMAT json")
            self._line()  # anything but OK: before 2.28.7 there is no JSON, and what follows is text
        self._say("VERBOSE STATUS")

    def _receive(self) -> bytes:
        """Empty when the server closed. Raises OSError: also TimeoutError."""
        left = min(self._deadline, self._until) - self._monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(left)
        return self._socket.recv(65536)

    def _say(self, line: str) -> None:
        self._socket.settimeout(max(0.01, self._until - self._monotonic()))
        self._socket.sendall(line.encode() + b"\n")

    def _line(self) -> str:
        """Raises Malformed: it closed, or goes on without an end of line. Raises OSError."""
        while b"\n" not in self._rest:
            if len(self._rest) > LINE_BYTES_MAX:
                raise MalformedRasStatus(f"a line of more than {LINE_BYTES_MAX} bytes")
            part = self._receive()
            if not part:
                raise MalformedRasStatus("it closed the connection before it answered")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace").strip()

    def body(self) -> bytes | None:
        """All of the answer; None: not yet, ask again.

        Raises:
            TooLarge: more than its limit.
            OSError: the connection broke, or the deadline of the whole has passed.
        """
        self._until = self._monotonic() + LOOK_SECONDS_MAX
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
    """What is kept of one communicator. Times are node monotonic."""

    standing: tuple[object, ...]
    since: float
    num_polls: int = 1
    seen_at: float = 0.0
    suspicious: bool = False
    width: int = 0
    launched: dict[str, int] = field(default_factory=dict)  # of the newest poll with counts
    missing_polls: int = 0
    told_missing: int = 0
    told_dead: frozenset[int] = frozenset()
    told_failures: bool = False


class NcclRasCollector:
    """A collector (see `agent/collectors/base.py`)."""

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
        self._talk: RasQuery | None = None
        self._watched: dict[str, MonitoredCommunicator] = {}
        self._labelled: dict[str, None] = {}
        self._next_at = float("-inf")
        self._last: tuple[MetricValue, ...] = ()
        self._num_answers = self._num_bad = self._num_repaired = self._num_empty = 0

    def close(self) -> None:
        self._hang_up()
        self._watched.clear()

    def evidence(self) -> bytes:
        """Asks now: the answer as RAS gives it, JSON where it can.

        Raises:
            CannotRead: nobody listens there, or it does not answer in time.
        """
        try:
            try:
                return _whole(RasQuery(self._address, "json", self._monotonic), self._monotonic)
            except TooLarge:
                return _whole(RasQuery(self._address, "text", self._monotonic), self._monotonic)
        except RasUnavailable:
            reason = "nobody listens: NCCL_RAS_ENABLE=0, or no job of NCCL 2.24 or later"
        except TooLarge:
            reason = f"an answer of more than {JSON_BYTES_MAX:,} bytes"
        except (MalformedRasStatus, OSError) as e:
            reason = "it did not answer in time" if isinstance(e, TimeoutError) else str(e)
        raise CollectorUnavailable(f"NCCL RAS at {self._address[0]}:{self._address[1]}: {reason}")

    def _hang_up(self) -> None:
        if self._talk is not None:
            self._talk.close()
            self._talk = None

    def read(self, at: float) -> CollectorReading:
        """Raises CannotRead: something listens there, and does not answer as RAS does."""
        if at < self._next_at:
            return CollectorReading((*self._last, *self._own(up=True)))
        try:
            status = self._ask()
        except RasUnavailable:
            self._forget()
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

    def _forget(self) -> None:
        """The job is over: the next one's communicators are others."""
        self._watched.clear()
        self._labelled.clear()
        self._last, self._form, self._next_at = (), "json", float("-inf")

    def _ask(self) -> RasStatus | None:
        """None: the answer is not complete yet. Raises NobodyListens, Malformed, OSError."""
        waiting = False
        try:
            if self._talk is None:
                self._talk = RasQuery(self._address, self._form, self._monotonic)
            raw = self._talk.body()
            waiting = raw is None
            return None if raw is None else statuses(raw)[-1]
        except TooLarge:
            if self._form == "text":
                raise MalformedRasStatus(f"an answer of more than {JSON_BYTES_MAX:,} bytes") from None
            self._form = "text"  # from the next look on
            return None
        finally:
            if not waiting:
                self._hang_up()

    def _pause(self, status: RasStatus) -> float:
        """0: at the next look."""
        if any(c.width or c.num_missing for c in status.communicators):
            return 0.0
        num_hosts = len(status.hosts())
        if num_hosts <= NUM_HOSTS_ASKING:
            return 0.0
        return min(PAUSE_SECONDS_MAX, self.interval_seconds * (num_hosts / NUM_HOSTS_ASKING - 0.5))

    # --- facts

    def _facts(self, status: RasStatus, at: float) -> Iterable[Fact]:
        for c in status.communicators:
            watched = self._watched.get(c.hash)
            if watched is None:
                if len(self._watched) >= NUM_WATCHED_MAX:
                    continue
                watched = self._watched[c.hash] = MonitoredCommunicator(standing=(), since=at, num_polls=0)
            watched.seen_at = at
            yield from self._apart(c, watched, at)
            yield from self._missing(c, watched)
            if c.failures and not watched.told_failures:
                watched.told_failures = True
                told = ", ".join(sorted({str(f.result) for f in c.failures}))
                yield self._fact("error", c, f"{told}: {ranks_text(f.member for f in c.failures)}")
        # In text a communicator without a condition is not listed: whatever stood there goes on again.
        for key in [k for k, w in self._watched.items() if w.seen_at != at]:
            gone = self._watched.pop(key)
            if gone.suspicious:
                yield self._fact("advances", Communicator(hash=key), "its ranks are together again, or it is gone")

    def _apart(self, c: Communicator, watched: MonitoredCommunicator, at: float) -> Iterable[Fact]:
        if not c.has_counts:
            return  # a poll of zeros is neither progress nor its absence
        standing = c.standing()
        watched.width, watched.launched = c.width, c.launched()
        if standing != watched.standing:
            watched.standing, watched.since, watched.num_polls = standing, at, 1
            if watched.suspicious:
                watched.suspicious = False
                yield self._fact("advances", c, "its ranks launch collectives again")
            return
        watched.num_polls += 1
        stood = at - watched.since
        enough = watched.num_polls >= NUM_POLLS_MIN and stood >= self._confirm_seconds
        if c.width and enough and not watched.suspicious:
            watched.suspicious = True
            who = "; ".join(f"{name}: {ranks_text(m)}" for name, m in behind(c).items()) or "not more exactly known"
            words = f"no rank launched anything for {stood:.0f} s, and {c.width} collective(s) lie between them; behind: {who}"
            pids = {m.pid for members in behind(c).values() for m in members if m.pid is not None}
            fact = self._fact("suspicious", c, words)
            listed = " ".join(map(str, sorted(pids)[:NUM_PIDS_TOLD]))
            yield replace(fact, detail={**fact.detail, "pids": listed})

    def _missing(self, c: Communicator, watched: MonitoredCommunicator) -> Iterable[Fact]:
        dead = frozenset(m.member.rank for m in c.missing if m.dead)
        if dead - watched.told_dead:
            fresh = [m.member for m in c.missing if m.member.rank in dead - watched.told_dead]
            watched.told_dead |= dead
            yield self._fact("dead", c, f"RAS considers dead: {ranks_text(fresh)}")
        watched.missing_polls = watched.missing_polls + 1 if c.num_missing else 0
        if not c.num_missing:
            watched.told_missing = 0
        # Twice: while a communicator is made or torn down, ranks are missing from single polls.
        elif watched.missing_polls >= 2 and c.num_missing > max(watched.told_missing, len(watched.told_dead)):
            watched.told_missing = c.num_missing
            named = [m.member for m in c.missing if m.unresponsive or m.dead]
            who = f": {ranks_text(named)}" if named else ""
            yield self._fact("missing", c, f"{c.num_missing} rank(s) do not answer RAS{who}")

    def _fact(self, what: str, c: Communicator, because: str) -> Fact:
        detail = {"what": what, "communicator": c.hash, "because": because[:500]}
        return Fact(kind=AgentEventKind.NCCL, detail=detail)

    # --- values

    def _values(self, status: RasStatus) -> Iterable[MetricValue]:
        node = self._node
        yield MetricValue(rows.COMMUNICATORS, (node,), float(status.num_communicators))
        by_hash = {c.hash: c for c in status.communicators}
        for key in [k for k in self._labelled if k not in by_hash]:
            del self._labelled[key]
        # Trouble first, then size; who has a label keeps it, so that series do not come and go.
        ranked = sorted(by_hash.values(), key=lambda c: (-bool(c.conditions - {Condition.MISMATCH}), -c.size, c.hash))
        for c in ranked:
            if len(self._labelled) >= NUM_LABELLED_MAX:
                break
            self._labelled.setdefault(c.hash)
        for key in self._labelled:
            yield from self._of(by_hash[key])

    def _of(self, c: Communicator) -> Iterable[MetricValue]:
        here = (self._node, c.hash)
        if c.size:
            yield MetricValue(rows.RANKS, here, float(c.size))
        yield MetricValue(rows.MISSING, here, float(c.num_missing))
        yield MetricValue(rows.DEAD, here, float(sum(m.dead for m in c.missing)))
        watched = self._watched.get(c.hash)
        if watched is None:
            return
        yield MetricValue(rows.SUSPICIOUS, here, float(watched.suspicious))
        if watched.num_polls:
            yield MetricValue(rows.BEHIND, here, float(watched.width))
            for name, launched in watched.launched.items():
                if launched:
                    yield MetricValue(rows.LAUNCHED, (*here, name), float(launched))

    def _own(self, *, up: bool) -> tuple[MetricValue, ...]:
        told = (
            (rows.RAS_UP, float(up)),
            (rows.RAS_ANSWERS, float(self._num_answers)),
            (rows.RAS_BAD, float(self._num_bad)),
            (rows.RAS_REPAIRED, float(self._num_repaired)),
            (rows.RAS_EMPTY, float(self._num_empty)),
        )
        return tuple(MetricValue(metric, (self._node,), value) for metric, value in told)


def _whole(talk: RasQuery, monotonic: Callable[[], float]) -> bytes:
    """The answer, and the end of the conversation. Raises TooLarge, OSError: also TimeoutError."""
    until = monotonic() + EVIDENCE_SECONDS_MAX
    try:
        while (body := talk.body()) is None:
            if monotonic() > until:
                raise TimeoutError("it did not answer in time")
        return body
    finally:
        talk.close()


def split_address(text: str) -> tuple[str, int]:
    """`localhost:28028`, `[::1]:28028`. Raises ValueError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: expected HOST:PORT")
    return host.strip("[]") or "localhost", int(port)
