"""Source `agents`: samples and events straight from the node agents, nothing to install.

One task an agent, all on one event loop in a thread of its own, over one kept connection each: it waits at `/v1/events`
for at most a poll interval, so that an exit reaches the detector in milliseconds and wakes `poll`, then fetches
`/v1/samples`. What an agent sends is not trusted: sizes are limited, values are checked (wire.py), redirects are not
followed, every wait has a deadline (agent_client.py).

An agent may restart at any time: its address is asked for again, its event numbers go on (at least once), its sample
cursor starts again. An agent that does not answer is reported as unreachable, with the reason; the others go on.
"""

import asyncio
import logging
import resource
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field

from rolecall.core.clock import Clock
from rolecall.core.telemetry import AgentEvent, SampleBatch
from rolecall.detector.agent_client import AgentConnection, Limits, Unreachable
from rolecall.detector.observation import Observation
from rolecall.detector.wire import BadAnswer, checked_batch, checked_events

__all__ = ["AgentsSource", "Limits", "Observation"]

logger = logging.getLogger(__name__)

AGENTS_SECONDS = 0.5
"""How often the list of agents is asked for: a restarted agent has another port."""
RETRY_SECONDS = 0.2
BATCHES_MAX = 64
"""Batches of one agent held until polled; the oldest go first, samples are replaceable."""
EVENTS_MAX = 10_000
"""Events held until polled. Beyond that no more are read: the agent keeps them."""
AGENTS_MAX = 4096
CLOSE_SECONDS = 5.0
DIALS_MAX = 64
"""Connections being made at a time: a thousand at once would time each other out."""
DESCRIPTORS_OWN = 128
"""What a watcher has open beside its agents."""
FULL_SECONDS = 0.05
"""How often an agent's task looks whether events have been fetched."""


@dataclass(slots=True)
class _Agent:
    """What one task knows of its agent. `url` and `stop` are written by the owner, the rest by the task."""

    node: str
    url: str
    stop: bool = False
    after: int = 0  # last event read
    since: int = 0  # sample cursor
    agent_pid: int = 0
    batches: list[SampleBatch] = field(default_factory=list)
    failing_since: float = 0.0  # wall seconds, 0: it answers
    reason: str = ""


class AgentsSource:
    """`agents()` gives node -> URL, is called from `start` and `poll` only, and may raise OSError or ValueError.
    `poll_seconds`: how often samples are fetched. `authorization`, `tls`: for agents that want a user, or speak HTTPS."""

    def __init__(
        self,
        agents: Callable[[], Mapping[str, str]],
        clock: Clock,
        poll_seconds: float = 0.25,
        limits: Limits | None = None,
        *,
        authorization: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._list_agents, self._clock, self._poll_seconds = agents, clock, poll_seconds
        self._limits = limits or Limits()
        self._authorization, self._tls = authorization, tls
        self._agents: dict[str, _Agent] = {}
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dials = asyncio.Semaphore(DIALS_MAX)
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._events: list[AgentEvent] = []
        self._changed = threading.Condition()
        self._listed_at = float("-inf")
        self._closed = False

    def start(self) -> None:
        """Begins to listen to the agents there are; more are found by `poll`. Call it once."""
        self._thread.start()
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
        return Observation(
            wall_at=self._clock.wall(), batches=tuple(batches), events=events, unreachable=tuple(unreachable)
        )

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
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(0))  # transports close in the turn after
        finally:
            self._loop.close()

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
                    self._begin(node, url)
                    continue
                agent.url = url
            # One that is no longer listed is on its way down or up again: its thread goes on asking the old address,
            # so that it is told as unreachable rather than forgotten.

        _allow_descriptors(len(self._agents) + DESCRIPTORS_OWN)

    def _begin(self, node: str, url: str) -> None:
        agent = self._agents[node] = _Agent(node, url)

        def spawn() -> None:
            task = self._loop.create_task(self._listen(agent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(spawn)

    # --- one task an agent, all in the loop's thread

    async def _listen(self, agent: _Agent) -> None:
        while not agent.stop:
            try:
                await self._converse(agent, agent.url)
            except Unreachable as e:
                self._failed(agent, str(e))
            except BadAnswer as e:
                self._failed(agent, f"its answer makes no sense: {e}")
            except Exception as e:  # deliberate: one agent's nonsense must not end the watch over it
                logger.exception("listening to the agent of %s", agent.node)
                self._failed(agent, f"{type(e).__name__}: {e}")
            await asyncio.sleep(RETRY_SECONDS)

    async def _converse(self, agent: _Agent, url: str) -> None:
        """Talks over one connection until it breaks or the agent's address changes."""
        async with self._dials:
            connection = await AgentConnection.open(url, self._limits, authorization=self._authorization, tls=self._tls)
        with closing(connection):
            while not agent.stop and agent.url == url:
                await self._read_events(agent, connection)
                await self._read_samples(agent, connection)
                with self._changed:
                    agent.failing_since, agent.reason = 0.0, ""
                while len(self._events) >= EVENTS_MAX and not agent.stop:
                    await asyncio.sleep(FULL_SECONDS)  # events that nobody fetches stay with the agent

    def _context(self, url: str) -> ssl.SSLContext | None:
        if self._tls is None and url.startswith("https:"):
            self._tls = ssl.create_default_context()  # once: it reads all authorities that the system trusts
        return self._tls

    async def _read_events(self, agent: _Agent, connection: AgentConnection) -> None:
        path = f"/v1/events?after={agent.after}&wait={self._poll_seconds:g}"
        answer = await connection.get(path, self._poll_seconds + self._limits.answer_seconds)
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

    async def _read_samples(self, agent: _Agent, connection: AgentConnection) -> None:
        seconds = self._limits.answer_seconds
        batch = checked_batch(await connection.get(f"/v1/samples?since={agent.since}", seconds), agent.node)
        if agent.agent_pid and batch.agent_pid != agent.agent_pid and agent.since:
            # Another agent process: what the cursor means to it is unknown, so everything it holds is read.
            agent.agent_pid, agent.since = batch.agent_pid, 0
            batch = checked_batch(await connection.get("/v1/samples?since=0", seconds), agent.node)
        agent.agent_pid, agent.since = batch.agent_pid, batch.cursor
        with self._changed:
            agent.batches.append(batch)
            del agent.batches[:-BATCHES_MAX]

    def _failed(self, agent: _Agent, reason: str) -> None:
        with self._changed:
            agent.failing_since = agent.failing_since or self._clock.wall()
            agent.reason = reason


def _allow_descriptors(wanted: int) -> None:
    """Raises the soft limit of open files, as far as the hard one allows, where `wanted` are not allowed yet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most < wanted:
            logger.warning("%d open files are allowed, %d are needed: raise `ulimit -n`", hard, wanted)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
