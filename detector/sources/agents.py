"""Source `agents`: samples and events directly from the node agents.

Each agent has one asyncio task with one persistent connection; all tasks share an event loop in a separate thread. A
task long-polls `/v1/news` for at most a poll interval, so that an exit reaches the detector in milliseconds and wakes
`poll`; samples come in the same response, as columns.

http.client would need a thread per agent, and a thousand threads contend for the GIL (*measured*: 0.4 ms per sample,
against 0.04 here; docs/decisions/0021). Agents are untrusted: the size of a response is bounded before and after
decompression, redirects are not followed, values are checked (agent_wire.py), and the deadline covers the response.

An agent may restart at any time: its address is read again, its event numbers continue (at least once), its sample
cursor restarts. All events of a new data directory are read: its event at the cursor has another time. An agent that
does not respond is reported as unreachable, with the reason; the others continue.
"""

import asyncio
import json
import logging
import resource
import ssl
import threading
import zlib
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from rolecall.core.clock import Clock
from rolecall.core.telemetry import AgentEvent, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.stages.nodes.agent_lost import REFUSED
from rolecall.detector.sources.agent_wire import InvalidAgentResponse, OtherNode, checked_news

HEAD_BYTES_MAX = 16 << 10


class AgentUnreachable(Exception):
    """No response from the agent; the message is the reason shown to users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClientLimits:
    """Limits on the time and memory that one agent may use."""

    answer_bytes_max: int = 16 << 20
    """A minute of samples of a node with 13 processes is 3 MiB; a larger response is not from a valid agent."""
    connect_seconds: float = 1.0
    answer_seconds: float = 2.0
    """For the whole response, in addition to the long-poll time of the request."""


class AgentConnection:
    """Created by `open`, ended by `close`. For one task."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, answer_bytes_max: int
    ) -> None:
        self._reader, self._writer, self._head, self._bytes_max = reader, writer, head, answer_bytes_max

    @classmethod
    async def open(
        cls, url: str, limits: AgentClientLimits, *, authorization: str = "", tls: ssl.SSLContext | None = None
    ) -> Self:
        """`authorization`: value of that header. `tls`: for https; by default, the system's authorities are trusted.
        Raises AgentUnreachable: no connection in time, or `url` is not an agent's address."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise AgentUnreachable(f"{url!r} is not the address of an agent") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AgentUnreachable(f"{url!r} is not the address of an agent")
        context = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        try:
            async with asyncio.timeout(limits.connect_seconds):
                reader, writer = await asyncio.open_connection(
                    parts.hostname, port or (443 if context else 80), ssl=context, limit=HEAD_BYTES_MAX
                )
        except ConnectionRefusedError:
            raise AgentUnreachable(f"connection {REFUSED}") from None
        except (OSError, ValueError) as e:
            raise AgentUnreachable(f"no connection ({_short(e)})") from None
        head = f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nAccept-Encoding: gzip\r\n"
        if authorization:
            head += f"Authorization: {authorization}\r\n"
        return cls(reader, writer, head + "\r\n", limits.answer_bytes_max)

    def close(self) -> None:
        """Aborts without the TLS shutdown: nothing is in flight."""
        self._writer.transport.abort()

    async def get(self, path: str, seconds: float) -> object:
        """The JSON value at `path`, within `seconds`. Raises AgentUnreachable: no complete response in time, or the
        connection broke; InvalidAgentResponse: not a JSON response within the size limit."""
        shown = path.partition("?")[0]
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(f"GET {path}{self._head}".encode())
                body = await self._answer(shown)
        except TimeoutError:
            raise AgentUnreachable(f"no complete answer to {shown} in time") from None
        except (OSError, EOFError, asyncio.LimitOverrunError) as e:
            raise AgentUnreachable(f"connection broke ({_short(e)})") from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as e:
            raise InvalidAgentResponse(f"no JSON for {shown}: {_short(e)}") from None

    async def _answer(self, shown: str) -> bytes:
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1."):
            raise InvalidAgentResponse(f"no HTTP answer for {shown}")
        if words[1] in ("401", "403"):
            raise AgentUnreachable(f"authentication required (status {words[1]}): --credentials")
        if words[1] != "200":
            raise InvalidAgentResponse(f"status {words[1][:8]} for {shown}")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            raise InvalidAgentResponse(f"no length of the answer for {shown}")
        if len(length) > 12 or int(length) > self._bytes_max:
            raise InvalidAgentResponse(f"more than {self._bytes_max >> 20} MiB for {shown}")
        body = await self._reader.readexactly(int(length))
        return self._inflated(body, shown) if headers.get("content-encoding", "").lower() == "gzip" else body

    def _inflated(self, body: bytes, shown: str) -> bytes:
        inflater = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            whole = inflater.decompress(body, self._bytes_max + 1)
        except zlib.error as e:
            raise InvalidAgentResponse(f"damaged compression of {shown}: {_short(e)}") from None
        if len(whole) > self._bytes_max:
            raise InvalidAgentResponse(f"more than {self._bytes_max >> 20} MiB for {shown}")
        if not inflater.eof:
            raise InvalidAgentResponse(f"damaged compression of {shown}: it ends too early")
        return whole


def _short(e: BaseException) -> str:
    return (str(e) or type(e).__name__)[:120]


logger = logging.getLogger(__name__)

AGENTS_SECONDS = 0.5
"""Interval for reading the list of agents: a restarted agent has another port."""
RETRY_SECONDS = 0.2
BATCHES_MAX = 64
"""Batches per agent held until polled; the oldest are dropped first, since newer samples replace them."""
SAMPLES_HELD_MAX = 250_000
"""Process samples of all agents held until polled; beyond that, only the newest batch per agent is kept. Each takes
0.8 KiB: while a watch waits for its journal, its memory must stay bounded."""
EVENTS_MAX = 10_000
"""Events held until polled. Beyond that, reading stops: the agent keeps the rest."""
AGENTS_MAX = 4096
CLOSE_SECONDS = 5.0
DIALS_MAX = 64
"""Concurrent connection attempts: a thousand at once would time each other out."""
DESCRIPTORS_OWN = 128
"""File descriptors that a watcher needs in addition to those of its agents."""
REQUESTS_PER_SECOND_MAX = 1000
SAMPLES_PER_SECOND_MAX = 8000
"""Capacity of one watch. With more agents or ranks, each agent is polled less often and sends only its newest samples:
counters are cumulative, so only resolution is lost. A watch that falls behind loses more (docs/decisions/0021)."""
PROCESSES_COUNTED_MAX = 256
"""Maximum per agent (`agent.registry.NUM_PROCESSES_MAX`): an agent that reports thousands must not slow down the
polling of the others."""
WAIT_SECONDS_MAX = 10.0
"""For any number of agents: they hold a request for at most 30 s, and slower polling would not be useful."""
AGENTS_READ_WHOLE_MAX = 64
"""At start, a watch reads the minute of samples that each agent holds; with more agents than this, only the newest
samples, since processing all would take too long."""
LATE_SECONDS = 0.5
"""If the event loop is late by this much, responses may be waiting unread: for a while, no agent is reported as
unreachable."""
LATE_EXCUSES_SECONDS = 10.0
"""An agent that has not responded for this long is unreachable even if the loop is late."""
BEAT_SECONDS = 0.1
FULL_SECONDS = 0.05
"""How often an agent's task checks whether events have been fetched."""


@dataclass(slots=True)
class _Agent:
    """State of one agent's task. `url` and `stop` are written by the owner, the rest by the task."""

    node: str
    url: str
    stop: bool = False
    after: int = 0  # last event read
    after_wall_at: float = 0.0  # its time
    since: int = 0  # sample cursor
    agent_pid: int = 0
    num_processes: int = 0  # in its newest samples
    batches: list[SampleBatch] = field(default_factory=list)
    failing_since: float = 0.0  # wall seconds; 0: it responds
    clock_then: float = 0.0  # the wall clock less the monotonic one at that time
    reason: str = ""
    is_other: bool = False  # it answers for another node
    excused_since: float | None = None  # loop time; no response so far, possibly because this loop is late


AFTER_EVENT_SECONDS, AFTER_EVENT_POLL_SECONDS = 3.0, 0.1


def wait_seconds(timeout_seconds: float, since_event: float) -> float:
    """How long a poll waits. `since_event`: seconds since the last event; what follows from it is decided within
    fractions of a second (`detector.live.stages.exits.crash`), not at the next poll of samples."""
    is_soon = since_event < AFTER_EVENT_SECONDS
    return min(timeout_seconds, AFTER_EVENT_POLL_SECONDS) if is_soon else timeout_seconds


class AgentsSource:
    """`agents()` gives node -> URL, is called from `start` and `poll` only, and may raise OSError or ValueError.
    `poll_seconds`: interval for fetching samples. `authorization`, `tls`: for agents with authentication or HTTPS.
    `forgets`: an agent that is no longer listed is dropped, instead of being treated as restarting. `doubt`: is called
    before `agents` with each node whose agent answers for another node."""

    def __init__(
        self,
        agents: Callable[[], Mapping[str, str]],
        clock: Clock,
        poll_seconds: float = 0.25,
        limits: AgentClientLimits | None = None,
        *,
        authorization: str = "",
        tls: ssl.SSLContext | None = None,
        forgets: bool = False,
        doubt: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._forgets, self._doubt = forgets, doubt
        self._list_agents, self._clock, self._poll_seconds = agents, clock, poll_seconds
        self._limits = limits or AgentClientLimits()
        self._authorization, self._tls = authorization, tls
        self._agents: dict[str, _Agent] = {}
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dials = asyncio.Semaphore(DIALS_MAX)
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._events: list[AgentEvent] = []
        self._changed = threading.Condition()
        self._listed_at = float("-inf")
        self._event_at = float("-inf")  # of the newest poll with events
        self._closed = False
        self._num_held = 0  # process samples, not polled yet
        self._left: list[str] = []  # nodes removed from the list since the last poll
        self._num_processes = 0  # of all agents
        self._late_at = float("-inf")  # time of the loop

    def start(self) -> None:
        """Starts polling the listed agents; `poll` adds new ones. Call it once."""
        self._thread.start()
        self._refresh()

    def poll(self, timeout_seconds: float) -> Observation:
        """Everything received since the last poll; returns early on an event, else after `timeout_seconds`, or sooner
        for a while after an event (`wait_seconds`)."""
        self._refresh()
        with self._changed:
            wait = wait_seconds(timeout_seconds, self._clock.monotonic() - self._event_at)
            self._changed.wait_for(lambda: self._events or self._closed, wait)
            events, self._events = tuple(self._events), []
            if events:
                self._event_at = self._clock.monotonic()
            left, self._left = tuple(self._left), []
            batches: list[SampleBatch] = []
            self._num_held = 0
            unreachable = []
            now, monotonic = self._clock.wall(), self._clock.monotonic()
            for node in sorted(self._agents):
                agent = self._agents[node]
                batches += agent.batches
                agent.batches = []
                if agent.failing_since:
                    clock_set = round(now - monotonic - agent.clock_then, 1)  # since then; the moment itself stays
                    unreachable.append((node, agent.failing_since + clock_set, agent.reason))
        silent = tuple(unreachable)
        return Observation(wall_at=now, batches=tuple(batches), events=events, unreachable=silent, left=left)

    def close(self) -> None:
        """Ends all tasks and their thread; waits for at most `CLOSE_SECONDS`."""
        with self._changed:
            self._closed = True
            for agent in self._agents.values():
                agent.stop = True
            self._changed.notify_all()
        if self._thread.ident is None:
            self._loop.close()
            return
        with suppress(RuntimeError):  # already closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._spawn(self._beat())
        try:
            self._loop.run_forever()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(0))  # transports close in the next loop iteration
        finally:
            self._loop.close()

    def _refresh(self) -> None:
        """Reads the list of agents again when it is due; starts and stops tasks accordingly."""
        now = self._clock.monotonic()
        if self._closed or now - self._listed_at < AGENTS_SECONDS:
            return
        self._listed_at = now
        for agent in self._agents.values():
            if agent.is_other:
                agent.is_other = False
                self._doubt(agent.node)
        try:
            listed = dict(self._list_agents())
        except (OSError, ValueError) as e:
            # The list is being written or missing: known agents are still polled.
            logger.warning("the list of agents cannot be read: %s", e)
            return
        num_before = len(self._agents)
        with self._changed:
            for node, url in list(listed.items())[:AGENTS_MAX]:
                if node in self._agents:
                    self._agents[node].url = url
                else:
                    self._begin(node, url)
            # An agent that is no longer listed is restarting: its task keeps polling the old address, so that it is
            # reported as unreachable rather than forgotten.
            for node in self._agents.keys() - listed.keys() if self._forgets else ():
                self._agents.pop(node).stop = True
                self._left.append(node)
        if len(self._agents) > num_before:
            _allow_descriptors(len(self._agents) + DESCRIPTORS_OWN)

    def _begin(self, node: str, url: str) -> None:
        agent = self._agents[node] = _Agent(node, url)
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._listen(agent)))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """In the loop's thread."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- one task per agent, all in the loop's thread

    async def _listen(self, agent: _Agent) -> None:
        while not agent.stop:
            try:
                await self._converse(agent, agent.url)
            except AgentUnreachable as e:
                if not self._excused(agent):
                    self._failed(agent, str(e))
            except InvalidAgentResponse as e:
                agent.is_other = isinstance(e, OtherNode)
                self._failed(agent, f"invalid response: {e}")
            except Exception as e:  # deliberate: no response may end the agent's task
                logger.exception("listening to the agent of %s", agent.node)
                self._failed(agent, f"{type(e).__name__}: {e}")
            await asyncio.sleep(RETRY_SECONDS)
        self._num_processes -= agent.num_processes

    async def _converse(self, agent: _Agent, url: str) -> None:
        """Polls over one connection until it breaks or the agent's address changes."""
        if self._tls is None and url.startswith("https:"):
            self._tls = ssl.create_default_context()  # once: it loads all authorities that the system trusts
        tls = self._tls
        async with self._dials:
            connection = await AgentConnection.open(url, self._limits, authorization=self._authorization, tls=tls)
        with closing(connection):
            while not agent.stop and agent.url == url:
                await self._read_news(agent, connection)
                with self._changed:
                    agent.failing_since, agent.reason, agent.excused_since = 0.0, "", None
                while len(self._events) >= EVENTS_MAX and not agent.stop:
                    await asyncio.sleep(FULL_SECONDS)  # unread events stay with the agent

    async def _beat(self) -> None:
        while True:
            begun = self._loop.time()
            await asyncio.sleep(BEAT_SECONDS)
            if self._loop.time() - begun > BEAT_SECONDS + LATE_SECONDS:
                self._late_at = self._loop.time()

    def _excused(self, agent: _Agent) -> bool:
        """Whether a response may be unread because this loop was recently late."""
        now = self._loop.time()
        if now - self._late_at >= self._limits.answer_seconds:
            return False
        if agent.excused_since is None:
            agent.excused_since = now
        return now - agent.excused_since < LATE_EXCUSES_SECONDS

    async def _read_news(self, agent: _Agent, connection: AgentConnection) -> None:
        # How long the agent holds the request without an event.
        requests, samples = len(self._agents) / REQUESTS_PER_SECOND_MAX, self._num_processes / SAMPLES_PER_SECOND_MAX
        wait = min(WAIT_SECONDS_MAX, max(self._poll_seconds, requests, samples))
        thinned = wait > self._poll_seconds or (not agent.since and len(self._agents) > AGENTS_READ_WHOLE_MAX)
        path = f"/v1/news?after={agent.after}&since={agent.since}&wait={wait:g}{'&rounds=1' if thinned else ''}"
        answer = await connection.get(path, wait + self._limits.answer_seconds)
        batch, events = checked_news(answer, agent.node)
        if agent.agent_pid and batch.agent_pid != agent.agent_pid and agent.since:
            # Another agent process, to which the cursor does not apply: the next request reads everything it holds.
            agent.agent_pid, agent.since = batch.agent_pid, 0
            return
        fresh = tuple(e for e in events.events if e.seq > agent.after)
        if events.newest < agent.after or events.after_wall_at not in (0.0, agent.after_wall_at):
            # Its data directory is new: numbers restart, and all its events are unread.
            agent.after, agent.after_wall_at = 0, 0.0
        elif fresh:
            agent.after, agent.after_wall_at = fresh[-1].seq, fresh[-1].wall_at
            with self._changed:
                self._events.extend(fresh)
                self._changed.notify_all()
        self._take_batch(agent, batch)

    def _take_batch(self, agent: _Agent, batch: SampleBatch) -> None:
        agent.agent_pid, agent.since = batch.agent_pid, batch.cursor
        if batch.processes:
            num = min(len({p.process for p in batch.processes}), PROCESSES_COUNTED_MAX)
            self._num_processes += num - agent.num_processes
            agent.num_processes = num
        with self._changed:
            agent.batches.append(batch)
            self._num_held += len(batch.processes)
            num_kept = BATCHES_MAX if self._num_held <= SAMPLES_HELD_MAX else 1
            self._num_held -= sum(len(b.processes) for b in agent.batches[:-num_kept])
            del agent.batches[:-num_kept]

    def _failed(self, agent: _Agent, reason: str) -> None:
        with self._changed:
            if not agent.failing_since:
                agent.failing_since = self._clock.wall()
                agent.clock_then = agent.failing_since - self._clock.monotonic()
            agent.reason = reason


def _allow_descriptors(wanted: int) -> None:
    """Raises the soft limit of open files to `wanted`, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most < wanted:
            logger.warning("%d open files are allowed, %d are needed: raise `ulimit -n`", hard, wanted)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
