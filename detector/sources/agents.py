"""Source `agents`: samples and events straight from the node agents, nothing to install.

One task an agent, all on one event loop in a thread of its own, over one kept connection each: it waits at `/v1/news`
for at most a poll interval, so that an exit reaches the detector in milliseconds and wakes `poll`; samples come with the
answer, as columns. What an agent sends is not trusted: sizes are limited, values are checked (agent_wire.py), redirects are not
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
from rolecall.core.telemetry import AgentEvent, EventBatch, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.sources.agent_client import (
    AgentClientLimits,
    AgentConnection,
    AgentUnreachable,
    EndpointNotFound,
)
from rolecall.detector.sources.agent_wire import InvalidAgentResponse, checked_batch, checked_events, checked_news

__all__ = ["AgentClientLimits", "AgentsSource", "Observation"]

logger = logging.getLogger(__name__)

AGENTS_SECONDS = 0.5
"""How often the list of agents is asked for: a restarted agent has another port."""
RETRY_SECONDS = 0.2
BATCHES_MAX = 64
"""Batches of one agent held until polled; the oldest go first, samples are replaceable."""
SAMPLES_HELD_MAX = 250_000
"""Samples of processes held until polled, of all agents; beyond that of each agent only its newest batch stays. They take
0.8 KiB each: a watch that waits for its journal must not grow by gigabytes."""
EVENTS_MAX = 10_000
"""Events held until polled. Beyond that no more are read: the agent keeps them."""
AGENTS_MAX = 4096
CLOSE_SECONDS = 5.0
DIALS_MAX = 64
"""Connections being made at a time: a thousand at once would time each other out."""
DESCRIPTORS_OWN = 128
"""What a watcher has open beside its agents."""
REQUESTS_PER_SECOND_MAX = 1000
SAMPLES_PER_SECOND_MAX = 8000
"""What one watch takes in. Of more agents, or more ranks, each is asked more rarely and gives its newest look alone:
counters are cumulative, so that only resolution is lost. A watch that falls behind loses more (docs/decisions/0021)."""
PROCESSES_COUNTED_MAX = 256
"""Of one agent, as many as it may have (`agent.registry.NUM_PROCESSES_MAX`): one that claims thousands must not make all
others be asked more rarely."""
WAIT_SECONDS_MAX = 10.0
"""However many there are: agents hold no question for longer than 30 s, and a watch that looks more rarely is of no use."""
AGENTS_READ_WHOLE_MAX = 64
"""A watch that begins reads the minute that each agent holds; of more agents only the newest look: it would take as long
to digest."""
LATE_SECONDS = 0.5
"""When our own loop comes so much too late, answers may have waited for us: for a while no agent is called unreachable."""
LATE_EXCUSES_SECONDS = 10.0
"""Who has not answered for so long is silent however late we are: a watch that is always late must not be blind."""
BEAT_SECONDS = 0.1
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
    num_processes: int = 0  # in its newest look
    batches: list[SampleBatch] = field(default_factory=list)
    failing_since: float = 0.0  # wall seconds, 0: it answers
    reason: str = ""
    excused_since: float | None = None  # time of the loop: it did not answer, and that may be our own fault


class AgentsSource:
    """`agents()` gives node -> URL, is called from `start` and `poll` only, and may raise OSError or ValueError.
    `poll_seconds`: how often samples are fetched. `authorization`, `tls`: for agents that want a user, or speak HTTPS.
    `forgets`: who is no longer listed is to be watched no more, and is not just on its way down or up again."""

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
    ) -> None:
        self._forgets = forgets
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
        self._closed = False
        self._num_held = 0  # samples of processes, not polled yet
        self._left: list[str] = []  # nodes that are listed no more, since the last poll
        self._num_processes = 0  # of all agents
        self._late_at = float("-inf")  # time of the loop

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
            left, self._left = tuple(self._left), []
            batches: list[SampleBatch] = []
            self._num_held = 0
            unreachable = []
            for node in sorted(self._agents):
                agent = self._agents[node]
                batches += agent.batches
                agent.batches = []
                if agent.failing_since:
                    unreachable.append((node, agent.failing_since, agent.reason))
        return Observation(
            wall_at=self._clock.wall(),
            batches=tuple(batches),
            events=events,
            unreachable=tuple(unreachable),
            left=left,
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
        beat = self._loop.create_task(self._beat())
        self._tasks.add(beat)
        beat.add_done_callback(self._tasks.discard)
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
        num_before = len(self._agents)
        with self._changed:
            for node, url in list(listed.items())[:AGENTS_MAX]:
                agent = self._agents.get(node)
                if agent is None:
                    self._begin(node, url)
                    continue
                agent.url = url
            # One that is no longer listed is on its way down or up again: its thread goes on asking the old address,
            # so that it is told as unreachable rather than forgotten.
            for node in self._agents.keys() - listed.keys() if self._forgets else ():
                self._agents.pop(node).stop = True
                self._left.append(node)
        if len(self._agents) > num_before:
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
        old = False
        while not agent.stop:
            try:
                await self._converse(agent, agent.url, old)
            except EndpointNotFound as e:
                if not old:
                    old = True
                    continue
                self._failed(agent, f"its answer makes no sense: {e}")
            except AgentUnreachable as e:
                if not self._may_be_us(agent):
                    self._failed(agent, str(e))
            except InvalidAgentResponse as e:
                self._failed(agent, f"its answer makes no sense: {e}")
            except Exception as e:  # deliberate: one agent's nonsense must not end the watch over it
                logger.exception("listening to the agent of %s", agent.node)
                self._failed(agent, f"{type(e).__name__}: {e}")
            old = False
            await asyncio.sleep(RETRY_SECONDS)
        self._num_processes -= agent.num_processes

    async def _converse(self, agent: _Agent, url: str, old: bool) -> None:
        """Talks over one connection until it breaks or the agent's address changes. `old`: with an agent of an earlier
        version, which is asked for events and for samples."""
        async with self._dials:
            tls = self._context(url)
            connection = await AgentConnection.open(url, self._limits, authorization=self._authorization, tls=tls)
        with closing(connection):
            while not agent.stop and agent.url == url:
                if old:
                    await self._read_events(agent, connection)
                    await self._read_samples(agent, connection)
                else:
                    await self._read_news(agent, connection)
                with self._changed:
                    agent.failing_since, agent.reason, agent.excused_since = 0.0, "", None
                while len(self._events) >= EVENTS_MAX and not agent.stop:
                    await asyncio.sleep(FULL_SECONDS)  # events that are not fetched stay with the agent

    def _context(self, url: str) -> ssl.SSLContext | None:
        if self._tls is None and url.startswith("https:"):
            self._tls = ssl.create_default_context()  # once: it reads all authorities that the system trusts
        return self._tls

    async def _beat(self) -> None:
        while True:
            begun = self._loop.time()
            await asyncio.sleep(BEAT_SECONDS)
            if self._loop.time() - begun > BEAT_SECONDS + LATE_SECONDS:
                self._late_at = self._loop.time()

    def _may_be_us(self, agent: _Agent) -> bool:
        """Whether its answer may lie here unread: our loop was late a moment ago."""
        now = self._loop.time()
        if now - self._late_at >= self._limits.answer_seconds:
            return False
        if agent.excused_since is None:
            agent.excused_since = now
        return now - agent.excused_since < LATE_EXCUSES_SECONDS

    @property
    def _wait_seconds(self) -> float:
        """How long an agent holds a question when it has no event to tell."""
        requests, samples = len(self._agents) / REQUESTS_PER_SECOND_MAX, self._num_processes / SAMPLES_PER_SECOND_MAX
        return min(WAIT_SECONDS_MAX, max(self._poll_seconds, requests, samples))

    async def _read_news(self, agent: _Agent, connection: AgentConnection) -> None:
        wait = self._wait_seconds
        thinned = wait > self._poll_seconds or (not agent.since and len(self._agents) > AGENTS_READ_WHOLE_MAX)
        path = f"/v1/news?after={agent.after}&since={agent.since}&wait={wait:g}{'&rounds=1' if thinned else ''}"
        answer = await connection.get(path, wait + self._limits.answer_seconds)
        batch, events = checked_news(answer, agent.node)
        if self._is_of_another(agent, batch):
            return  # everything that it holds is asked for next
        self._take_events(agent, events)
        self._take_batch(agent, batch)

    async def _read_events(self, agent: _Agent, connection: AgentConnection) -> None:
        wait = self._wait_seconds
        path = f"/v1/events?after={agent.after}&wait={wait:g}"
        answer = await connection.get(path, wait + self._limits.answer_seconds)
        self._take_events(agent, checked_events(answer, agent.node))

    async def _read_samples(self, agent: _Agent, connection: AgentConnection) -> None:
        answer = await connection.get(f"/v1/samples?since={agent.since}", self._limits.answer_seconds)
        batch = checked_batch(answer, agent.node)
        if not self._is_of_another(agent, batch):
            self._take_batch(agent, batch)

    def _is_of_another(self, agent: _Agent, batch: SampleBatch) -> bool:
        """Whether another agent process answers: what the cursor means to it is unknown, so that all it holds is read."""
        if not agent.agent_pid or batch.agent_pid == agent.agent_pid or not agent.since:
            return False
        agent.agent_pid, agent.since = batch.agent_pid, 0
        return True

    def _take_events(self, agent: _Agent, batch: EventBatch) -> None:
        fresh = tuple(e for e in batch.events if e.seq > agent.after)
        if batch.newest < agent.after:
            # Its directory was made anew: numbers start again, what it has is all unread.
            agent.after = 0
        elif fresh:
            agent.after = fresh[-1].seq
            with self._changed:
                self._events.extend(fresh)
                self._changed.notify_all()

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
