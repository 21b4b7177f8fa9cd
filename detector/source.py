"""Source `agents`: samples and events straight from the node agents, nothing to install.

One thread an agent, over one kept-alive connection: it waits at `/v1/events` for at most a poll interval, so that an
exit reaches the detector in milliseconds and wakes `poll`, then fetches `/v1/samples`. What an agent sends is not
trusted: sizes are limited, values are checked (wire.py), redirects are not followed, every wait has a deadline.

An agent may restart at any time: its address is asked for again, its event numbers go on (at least once), its sample
cursor starts again. An agent that does not answer is reported as unreachable, with the reason; the others go on.
"""

import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rolecall.core.clock import Clock
from rolecall.core.telemetry import AgentEvent, SampleBatch
from rolecall.detector.lost import REFUSED
from rolecall.detector.observation import Observation
from rolecall.detector.wire import BadAnswer, checked_batch, checked_events

__all__ = ["AgentsSource", "Limits", "Observation"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an agent may cost its listener."""

    answer_bytes_max: int = 16 << 20
    """A minute of samples of a node with 13 processes is 3 MiB: an agent that sends more than this is not one of ours."""
    connect_seconds: float = 1.0
    answer_seconds: float = 2.0
    """On top of what the request itself may wait."""

    @property
    def round_seconds_max(self) -> float:
        """On top of the poll interval: an agent whose round takes longer is told as unreachable and cut off."""
        return 2 * self.answer_seconds + self.connect_seconds


AGENTS_SECONDS = 0.5
"""How often the list of agents is asked for: a restarted agent has another port."""
RETRY_SECONDS = 0.2
BATCHES_MAX = 64
"""Batches of one agent held until polled; the oldest go first, samples are replaceable."""
EVENTS_MAX = 10_000
"""Events held until polled. Beyond that no more are read: the agent keeps them."""
AGENTS_MAX = 4096
CLOSE_SECONDS = 5.0


class _Unreachable(Exception):
    """An agent did not answer; the message is the reason told to people."""


@dataclass(slots=True)
class _Agent:
    """What one thread knows of its agent. `url` and `stop` are written by the owner, the rest by the thread."""

    node: str
    url: str
    stop: bool = False
    after: int = 0  # last event read
    since: int = 0  # sample cursor
    agent_pid: int = 0
    batches: list[SampleBatch] = field(default_factory=list)
    failing_since: float = 0.0  # wall seconds, 0: it answers
    reason: str = ""
    answered_wall: float = 0.0  # when its last round was complete
    sock: socket.socket | None = None


class AgentsSource:
    """`agents()` gives node -> URL, is called from `start` and `poll` only, and may raise OSError or ValueError.
    `poll_seconds`: how often samples are fetched."""

    def __init__(
        self,
        agents: Callable[[], Mapping[str, str]],
        clock: Clock,
        poll_seconds: float = 0.25,
        limits: Limits | None = None,
    ) -> None:
        self._list_agents, self._clock, self._poll_seconds = agents, clock, poll_seconds
        self._limits = limits or Limits()
        self._agents: dict[str, _Agent] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._events: list[AgentEvent] = []
        self._changed = threading.Condition()
        self._listed_at = float("-inf")
        self._closed = False

    def start(self) -> None:
        """Begins to listen to the agents there are; more are found by `poll`."""
        self._refresh()

    def poll(self, timeout_seconds: float) -> Observation:
        """Everything heard since the last poll; returns early when an event comes, else after `timeout_seconds`."""
        self._refresh()
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._closed, timeout_seconds)
            events, self._events = tuple(self._events), []
            batches: list[SampleBatch] = []
            unreachable = []
            for node in sorted(self._agents):
                agent = self._agents[node]
                batches += agent.batches
                agent.batches = []
                if agent.failing_since:
                    unreachable.append((node, agent.failing_since, agent.reason))
                elif self._is_stuck(agent):
                    unreachable.append((node, agent.answered_wall, "no complete answer"))
            self._changed.notify_all()
        return Observation(
            wall_at=self._clock.wall(), batches=tuple(batches), events=events, unreachable=tuple(unreachable)
        )

    def _is_stuck(self, agent: _Agent) -> bool:
        """Neither answering nor failing: it sends just enough to keep a read from timing out, and never ends."""
        return self._clock.wall() - agent.answered_wall > self._poll_seconds + self._limits.round_seconds_max

    def close(self) -> None:
        """Stops all threads; waits for them for at most `CLOSE_SECONDS` in all."""
        with self._changed:
            self._closed = True
            for agent in self._agents.values():
                agent.stop = True
            self._changed.notify_all()
        deadline = self._clock.monotonic() + CLOSE_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _refresh(self) -> None:
        """Reads the list of agents again when it is due; starts and stops threads accordingly."""
        now = self._clock.monotonic()
        if self._closed or now - self._listed_at < AGENTS_SECONDS:
            return
        self._listed_at = now
        try:
            listed = dict(self._list_agents())
        except (OSError, ValueError) as e:
            # Where the agents say their address is being written or away: those known are still listened to.
            logger.warning("the list of agents cannot be read: %s", e)
            return
        with self._changed:
            for node, url in list(listed.items())[:AGENTS_MAX]:
                agent = self._agents.get(node)
                if agent is None:
                    self._start_thread(node, url)
                    continue
                agent.url = url
                if self._is_stuck(agent) and agent.sock is not None:
                    with suppress(OSError):  # gone already: then its thread is on its way to a fresh connection
                        agent.sock.shutdown(socket.SHUT_RDWR)
            # One that is no longer listed is on its way down or up again: its thread goes on asking the old address,
            # so that it is told as unreachable rather than forgotten.

    def _start_thread(self, node: str, url: str) -> None:
        agent = self._agents[node] = _Agent(node, url, answered_wall=self._clock.wall())
        thread = threading.Thread(target=self._listen, args=(agent,), name=f"agent-{node}", daemon=True)
        self._threads[node] = thread
        thread.start()

    # --- one thread an agent

    def _listen(self, agent: _Agent) -> None:
        while not agent.stop:
            url = agent.url
            try:
                self._converse(agent, url)
            except _Unreachable as e:
                self._failed(agent, str(e))
            except BadAnswer as e:
                self._failed(agent, f"its answer makes no sense: {e}")
            except Exception as e:  # deliberate: one agent's nonsense must not end the watch over it
                logger.exception("listening to the agent of %s", agent.node)
                self._failed(agent, f"{type(e).__name__}: {e}")
            with self._changed:
                self._changed.wait_for(lambda: agent.stop, RETRY_SECONDS)

    def _converse(self, agent: _Agent, url: str) -> None:
        """Talks over one connection until it breaks or the agent's address changes."""
        with closing(self._connect(url)) as connection:
            agent.sock = connection.sock
            while not agent.stop and agent.url == url:
                self._read_events(agent, connection)
                self._read_samples(agent, connection)
                with self._changed:
                    agent.failing_since, agent.reason, agent.answered_wall = 0.0, "", self._clock.wall()
                    # Events that nobody fetches stay with the agent.
                    self._changed.wait_for(lambda: agent.stop or len(self._events) < EVENTS_MAX)

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise _Unreachable(f"{url!r} is no agent's address")
        try:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self._limits.connect_seconds)
            connection.connect()
        except ConnectionRefusedError:
            raise _Unreachable(f"connection {REFUSED}") from None
        except (OSError, ValueError) as e:
            raise _Unreachable(f"no connection ({_short(e)})") from None
        connection.sock.settimeout(self._poll_seconds + self._limits.answer_seconds)
        return connection

    def _read_events(self, agent: _Agent, connection: http.client.HTTPConnection) -> None:
        answer = self._get(connection, f"/v1/events?after={agent.after}&wait={self._poll_seconds:g}")
        batch = checked_events(answer, agent.node)
        fresh = tuple(e for e in batch.events if e.seq > agent.after)
        if batch.newest < agent.after:
            # Its directory was made anew: numbers start again, what it has is all unread.
            agent.after = 0
            return
        if fresh:
            agent.after = fresh[-1].seq
            with self._changed:
                self._events.extend(fresh)
                self._changed.notify_all()

    def _read_samples(self, agent: _Agent, connection: http.client.HTTPConnection) -> None:
        batch = checked_batch(self._get(connection, f"/v1/samples?since={agent.since}"), agent.node)
        if agent.agent_pid and batch.agent_pid != agent.agent_pid and agent.since:
            # Another agent process: what the cursor means to it is unknown, so everything it holds is read.
            agent.agent_pid, agent.since = batch.agent_pid, 0
            batch = checked_batch(self._get(connection, "/v1/samples?since=0"), agent.node)
        agent.agent_pid, agent.since = batch.agent_pid, batch.cursor
        with self._changed:
            agent.batches.append(batch)
            del agent.batches[:-BATCHES_MAX]

    def _get(self, connection: http.client.HTTPConnection, path: str) -> object:
        return _get(connection, path, self._limits.answer_bytes_max)

    def _failed(self, agent: _Agent, reason: str) -> None:
        with self._changed:
            agent.failing_since = agent.failing_since or self._clock.wall()
            agent.reason = reason


def _get(connection: http.client.HTTPConnection, path: str, bytes_max: int) -> object:
    """The JSON value at `path`.

    Raises:
        _Unreachable: no answer in time, or the connection broke.
        BadAnswer: anything but a JSON answer of bearable size.
    """
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(bytes_max + 1)
    except TimeoutError:
        raise _Unreachable(f"no answer to {path.partition('?')[0]} in time") from None
    except ConnectionRefusedError:
        raise _Unreachable(f"connection {REFUSED}") from None
    except (OSError, http.client.HTTPException) as e:
        raise _Unreachable(f"connection broke ({_short(e)})") from None
    if response.status != http.client.OK:
        raise BadAnswer(f"status {response.status} for {path.partition('?')[0]}")
    if len(body) > bytes_max:
        raise BadAnswer(f"more than {bytes_max >> 20} MiB for {path.partition('?')[0]}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as e:
        raise BadAnswer(f"no JSON for {path.partition('?')[0]}: {_short(e)}") from None


def _short(e: BaseException) -> str:
    return (str(e) or type(e).__name__)[:120]
