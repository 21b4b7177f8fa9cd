"""Unique process names for `watch agents`, where agents of two nodes may assign the same name.

Agents number processes of an uninstrumented job independently: by the number in their node's name (`a-1` and `b-1`
share it), or as the first trainer of a node that also has another job's first trainer. The detectors would treat both
as one rank and compare a process with the history of another.

A (replica, rank) belongs to the first node on which it is seen alive, while it is seen there. If another node claims
it, its replica on that node is permanently renamed, with a number derived from both names; samples and events use the
new name. This is logged once with the remedy. Processes that use the reporter identify themselves and are never
renamed.
"""

import logging
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rolecall.core.ids import split_replica
from rolecall.core.telemetry import AgentEvent, ProcessSample
from rolecall.core.uninstrumented import UNCOUNTED
from rolecall.detector.base.observation import Observation

logger = logging.getLogger(__name__)

HELD_SECONDS = 15.0
"""A name stays assigned for this long after its process was last seen alive: an agent may be a few polls behind. A job
takes longer to move to another node."""
NUM_PLACES_MAX = 65_536
REPLICA_MAX = 999_999
Named = TypeVar("Named", ProcessSample, AgentEvent)


class UpstreamSource(Protocol):
    def poll(self, timeout_seconds: float) -> Observation: ...


@dataclass(slots=True)
class _ReplicaHolder:
    node: str
    at: float  # wall seconds of the watch


class UniqueReplicaSource:
    """Passes on the observations of a source with unique names. Called from one thread."""

    def __init__(self, source: UpstreamSource) -> None:
        self._source = source
        self._holders: dict[tuple[str, int], _ReplicaHolder] = {}
        self._renamed: dict[tuple[str, str], str] = {}  # (node, replica as its agent names it) -> new name

    def poll(self, timeout_seconds: float) -> Observation:
        seen = self._source.poll(timeout_seconds)
        for batch in seen.batches:
            for sample in batch.processes:
                self._claim(sample, seen.wall_at)
        if not self._renamed:
            return seen
        batches = tuple(replace(b, processes=tuple(self._with_new_names(b.processes))) for b in seen.batches)
        return replace(seen, batches=batches, events=tuple(self._with_new_names(seen.events)))

    def _claim(self, sample: ProcessSample, now: float) -> None:
        node, replica = sample.process.node, sample.replica
        if sample.incarnation != UNCOUNTED or not sample.alive or (node, replica) in self._renamed:
            return
        name = replica, sample.rank
        held = self._holders.get(name)
        if held is None and len(self._holders) >= NUM_PLACES_MAX:
            self._holders = {p: h for p, h in self._holders.items() if now - h.at <= HELD_SECONDS}
        # A clock that was set back must not keep a name assigned for an hour.
        if held is None or held.node == node or not 0.0 <= now - held.at <= HELD_SECONDS:
            self._holders[name] = _ReplicaHolder(node, now)
            return
        number = zlib.crc32(f"{node} {replica}".encode()) % REPLICA_MAX + 1
        self._renamed[node, replica] = other = f"{split_replica(replica)[0]}/{number}"
        logger.warning(
            "%s rank %d is alive on %s and on %s: the one on %s is renamed to %s. If jobs share nodes, set "
            "jobs.rules.by_job for their agents; otherwise give these nodes different jobs.rules.node_index",
            *(replica, sample.rank, held.node, node, node, other),
        )

    def _with_new_names(self, named: Iterable[Named]) -> Iterable[Named]:
        for one in named:
            process = one.process
            other = self._renamed.get((process.node, one.replica)) if process and one.incarnation == UNCOUNTED else None
            yield one if other is None else replace(one, replica=other)
