"""One name, one process: what `watch agents` does where agents of two nodes give the same name to two.

Agents do not know of each other. What they found by rules they number on their own: by the number in the name of their
node (`a-1` and `b-1` have the same), or as the first trainer of a node on which another job has a first trainer, too. Both
would be one rank to the detectors, which then compare a process with somebody else's past.

A place is a replica and rank; it is held by the first node on which a process is seen alive in it, for as long as it is
seen there. A replica of which another node claims a held place gets a name of its own on that node, for good: another
number, made of both names, with which its samples and events go on. It is logged once, with what to do about it.
Processes that say themselves who they are have proven it, and are left alone.
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
"""So long after it was last seen alive a process holds its place: an agent may be a few looks behind. A job that moves to
another node takes longer."""
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
    """A source that passes on what another hears, each place with one holder. Called from one thread."""

    def __init__(self, source: UpstreamSource) -> None:
        self._source = source
        self._held: dict[tuple[str, int], _ReplicaHolder] = {}
        self._renamed: dict[tuple[str, str], str] = {}  # node, replica as its agent says -> as it is called here

    def poll(self, timeout_seconds: float) -> Observation:
        seen = self._source.poll(timeout_seconds)
        for batch in seen.batches:
            for sample in batch.processes:
                self._claims(sample, seen.wall_at)
        if not self._renamed:
            return seen
        batches = tuple(replace(b, processes=tuple(self._called(b.processes))) for b in seen.batches)
        return replace(seen, batches=batches, events=tuple(self._called(seen.events)))

    def _claims(self, sample: ProcessSample, now: float) -> None:
        node, replica = sample.process.node, sample.replica
        if sample.incarnation != UNCOUNTED or not sample.alive or (node, replica) in self._renamed:
            return
        place = replica, sample.rank
        held = self._held.get(place)
        if held is None and len(self._held) >= NUM_PLACES_MAX:
            self._held = {p: h for p, h in self._held.items() if now - h.at <= HELD_SECONDS}
        # A clock that was set back must not make a place held for an hour.
        if held is None or held.node == node or not 0.0 <= now - held.at <= HELD_SECONDS:
            self._held[place] = _ReplicaHolder(node, now)
            return
        number = zlib.crc32(f"{node} {replica}".encode()) % REPLICA_MAX + 1
        self._renamed[node, replica] = other = f"{split_replica(replica)[0]}/{number}"
        logger.warning(
            "%s rank %d lives on %s and on %s: that of %s is called %s here. Jobs that share nodes: set jobs.rules.by_job "
            "for their agents; else give these nodes different jobs.rules.node_index",
            *(replica, sample.rank, held.node, node, node, other),
        )

    def _called(self, named: Iterable[Named]) -> Iterable[Named]:
        for one in named:
            process = one.process
            other = self._renamed.get((process.node, one.replica)) if process and one.incarnation == UNCOUNTED else None
            yield one if other is None else replace(one, replica=other)
