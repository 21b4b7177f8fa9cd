"""Keeps in the journal, for the dashboard, what this watch can see, name, replace and end in its job, and why not the
rest.

The same answers as `rolecall doctor --job` (`capabilities.py`), from the samples and registrations that the watch reads
anyway. Each agent is asked for the state of its collectors, in a thread, because an agent may be slow. Unlike the
doctor, nothing of the job is touched: no stack is read and no dry run is made.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from rolecall.core.clock import Clock
from rolecall.core.config.watched import WatchedConfig
from rolecall.core.errors import JournalError
from rolecall.core.ids import ProcessId
from rolecall.core.journal.journal import Journal
from rolecall.core.telemetry import AgentEvent, AgentEventKind, GpuSample, ProcessSample
from rolecall.core.text import counted, plain, spans
from rolecall.detector.base.observation import Observation
from rolecall.recovery.interfaces import ObservationSource
from rolecall.views.observed_capabilities import FLAG, ObservedCapability, to_json
from rolecall.watch.capabilities import Can, Capability, JobFacts, NodeState, RankCapabilities, RankFacts, capabilities
from rolecall.watch.job_facts import (
    ASK_SECONDS,
    ASKED_AT_ONCE,
    REASON_CHARACTERS,
    Get,
    NoAnswer,
    node_state,
    rank_facts,
)

logger = logging.getLogger(__name__)

FIRST_SECONDS = 15.0
"""After the first sample: most jobs have made a step then."""
EVERY_SECONDS = 30.0
RANKS_PER_SECOND = 200
"""With more ranks it is found out less often: detection comes first."""
MINUTE_SECONDS = 60.0
"""The phases of so long count, as in the doctor."""
NODES_MAX = 256
"""Agents that are asked at a time, those asked longest ago first."""
REGISTRATIONS_MAX = 4
"""Of one process: a rule that finds it, and its own."""
REPLICAS_NAMED_MAX = 4
_ORDER = {Can.NO: 0, Can.PARTLY: 1, Can.YES: 2, Can.NONE: 3}


@dataclass(slots=True)
class _Process:
    registered: deque[AgentEvent] = field(default_factory=lambda: deque(maxlen=REGISTRATIONS_MAX))
    newest: ProcessSample | None = None
    of_phase: dict[str, ProcessSample] = field(default_factory=dict)  # phase -> the newest sample in it

    def samples(self) -> tuple[ProcessSample, ...]:
        """Of each phase of the last minute, oldest first; empty: it does not live."""
        if self.newest is None or not self.newest.alive:
            return ()
        since = self.newest.at - MINUTE_SECONDS
        found = (s for s in self.of_phase.values() if s.at >= since)
        return tuple(sorted(found, key=lambda s: s.at))


def grouped(found: Iterable[RankCapabilities]) -> tuple[ObservedCapability, ...]:
    """Ranks that can the same together; of what is seen, named, replaced, ended, what is missing first."""
    groups: dict[Capability, dict[str, list[int]]] = {}
    for rank in found:
        for capability in rank.capabilities:
            of = groups.setdefault(capability, {})
            of.setdefault(rank.facts.replica, []).append(rank.facts.rank)
    names: dict[tuple[str, str], int] = {}
    for capability in groups:
        names.setdefault((capability.about, capability.name), len(names))
    order = sorted(groups, key=lambda c: (names[c.about, c.name], _ORDER[c.can]))
    return tuple(
        ObservedCapability(
            c.about, c.name, c.can, c.because, c.fix, _named(groups[c]), sum(map(len, groups[c].values()))
        )
        for c in order
    )


def _named(replicas: Mapping[str, Sequence[int]]) -> str:
    parts = [f"{replica} {spans(ranks)}" for replica, ranks in list(replicas.items())[:REPLICAS_NAMED_MAX]]
    more = len(replicas) - REPLICAS_NAMED_MAX
    return ", ".join([*parts, *([f"{counted(more, 'more replica')}"] if more > 0 else [])])


class RecordedCapabilities:
    """A source that keeps them. Its poll never waits; it is called from one thread. `urls`: node -> its agent.
    `may_read_stacks`: whether the token of the agent at a URL is known."""

    def __init__(
        self,
        source: ObservationSource,
        journal: Journal,
        clock: Clock,
        *,
        urls: Callable[[], Mapping[str, str]],
        get: Get,
        may_read_stacks: Callable[[str], bool],
        watched: WatchedConfig | None = None,
    ) -> None:
        self._source, self._journal, self._clock = source, journal, clock
        self._urls, self._get, self._may_read_stacks, self._watched = urls, get, may_read_stacks, watched
        self._processes: dict[ProcessId, _Process] = {}
        self._reasons: dict[tuple[str, str], str] = {}  # (node, probe) -> why it cannot read
        self._gpus: dict[str, dict[int, GpuSample]] = {}
        self._nodes: dict[str, NodeState] = {}  # as their agents answered; the thread's own
        self._due_at: float | None = None
        self._thread: threading.Thread | None = None
        self._found: str | None = None  # to be written
        self._written = ""

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        for event in seen.events:
            self._take_event(event)
        for batch in seen.batches:
            for sample in batch.processes:
                known = self._processes.setdefault(sample.process, _Process())
                known.newest = known.of_phase[str(sample.phase)] = sample
            if batch.gpus:
                self._gpus.setdefault(str(batch.node), {}).update({g.gpu: g for g in batch.gpus})
        now = self._clock.monotonic()
        if self._due_at is None and any(batch.processes for batch in seen.batches):
            self._due_at = now + FIRST_SECONDS
        if self._due_at is not None and now >= self._due_at and not self.is_busy:
            self._write()
            self._drop_ended(seen.wall_at)
            self._due_at = now + max(EVERY_SECONDS, len(self._processes) / RANKS_PER_SECOND)
            self._begin()
        elif self._found is not None and not self.is_busy:
            self._write()
        return seen

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _take_event(self, event: AgentEvent) -> None:
        if event.kind is AgentEventKind.REGISTERED and event.process is not None:
            self._processes.setdefault(event.process, _Process()).registered.append(event)
        elif event.kind is AgentEventKind.EXITED and event.process is not None:
            self._processes.pop(event.process, None)
        elif event.kind is AgentEventKind.PROBE_DOWN:
            probe = event.detail.get("probe", "")
            self._reasons[str(event.node), probe] = plain(event.detail.get("reason", ""), REASON_CHARACTERS)
        elif event.kind is AgentEventKind.PROBE_UP:
            self._reasons.pop((str(event.node), event.detail.get("probe", "")), None)

    def _drop_ended(self, now: float) -> None:
        self._processes = {
            process: known
            for process, known in self._processes.items()
            if known.newest is None or (known.newest.alive and now - known.newest.wall_at <= MINUTE_SECONDS)
        }

    def _begin(self) -> None:
        # Copies, because the thread reads them while polls go on.
        ranks = tuple(
            rank_facts(process, samples, tuple(known.registered))
            for process, known in self._processes.items()
            if (samples := known.samples())
        )
        urls = dict(self._urls())
        told = {node: tuple(gpus.values()) for node, gpus in self._gpus.items()}, dict(self._reasons)
        self._thread = threading.Thread(
            target=self._find_out, args=(ranks, urls, *told), name="capabilities", daemon=True
        )
        self._thread.start()

    def _find_out(
        self,
        ranks: tuple[RankFacts, ...],
        urls: Mapping[str, str],
        gpus: Mapping[str, tuple[GpuSample, ...]],
        reasons: Mapping[tuple[str, str], str],
    ) -> None:
        try:
            here = [n for n in dict.fromkeys(str(r.process.node) for r in ranks) if n in urls]
            known = {n: s for n, s in self._nodes.items() if n in here}
            wanted = sorted(here, key=lambda n: list(known).index(n) if n in known else -1)[:NODES_MAX]
            with ThreadPoolExecutor(max_workers=ASKED_AT_ONCE) as pool:
                states = list(pool.map(lambda node: self._ask(node, urls[node]), wanted))
            self._nodes = {n: s for n, s in known.items() if n not in wanted} | {s.node: s for s in states}
            nodes = [
                replace(
                    s,
                    gpus=gpus.get(s.node, ()),
                    reasons={p: why for (node, p), why in reasons.items() if node == s.node and not s.probes.get(p)},
                )
                for s in self._nodes.values()
            ]
            asked = tuple(r for r in ranks if str(r.process.node) in self._nodes)
            facts = JobFacts(ranks=asked, nodes=tuple(nodes), watched=self._watched)
            self._found = to_json(grouped(capabilities(facts)))
        except Exception:
            # Deliberate: what a page says beside the job must not end the watch.
            logger.exception("what can be seen of the job is not known")

    def _ask(self, node: str, url: str) -> NodeState:
        stacks = "" if self._may_read_stacks(url) else None  # whether a stack can be read, only the doctor tries
        try:
            page = self._get(url, "/metrics", ASK_SECONDS).decode("utf-8", "replace")
        except NoAnswer as e:
            return NodeState(node=node, url=url, unreachable=str(e), stacks=stacks)
        return replace(node_state(node, url, page), stacks=stacks)

    def _write(self) -> None:
        text, self._found = self._found, None
        if text is None or text == self._written:
            return
        try:
            self._journal.set_flag(FLAG, text)
            self._written = text
        except JournalError as e:  # the next one is written
            logger.warning("what can be seen of the job is not written: %s", e)
