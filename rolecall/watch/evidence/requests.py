"""Selects the evidence to request for an incident, and the agents to query. Pure.

The row of the fault's class in `core.faults.FAULTS` names the evidence:

    kernel log        last kernel lines of the suspects' nodes
    stacks            of the suspects and of two of their peers; of many, of those that the others may wait for
    Flight Recorder   dumps of the whole role, if its processes take part in collectives
    NCCL RAS          one response, which covers the whole job

Only processes known to their agent are included, and each kind is bounded.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.faults import EvidenceKind
from rolecall.core.telemetry import Phase
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import suspect

NUM_STACKS_MAX = 16
"""Stacks of suspects. A tie names all members of its group."""
STOPPED_STATES = ("T", "t")
NUM_PEERS = 2
NUM_FLIGHT_MAX = 64
"""A dump takes 0.3 MB and some milliseconds of its process; an agent dumps one process at a time."""
NUM_NODES_MAX = 4
"""Nodes queried for kernel lines; one RAS response covers the whole job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRequest:
    """One request to one agent. `who`: for stacks and dumps, including the process. `is_stopped`: that process, by a
    signal or a debugger."""

    kind: EvidenceKind
    node: str
    who: Suspect | None = None
    suspected: bool = False
    is_stopped: bool = False

    @property
    def what(self) -> str:
        """For messages: `stack of trainer/3 rank 3`."""
        of = self.node if self.who is None else process_name(self.who)
        return f"{KIND_TEXTS[self.kind]} of {of}"


KIND_TEXTS = {
    EvidenceKind.STACKS: "stack",
    EvidenceKind.FLIGHT: "Flight Recorder dump",
    EvidenceKind.NCCL: "NCCL RAS report",
    EvidenceKind.KERNEL: "kernel log",
}


def process_name(who: Suspect) -> str:
    rank = "" if who.rank is None else f" rank {who.rank}"
    return f"{who.replica or who.role}{rank}".strip() or str(who.node)


def select_evidence(diagnosis: Diagnosis, fleet: Iterable[MonitoredProcess]) -> list[EvidenceRequest]:
    """Suspects first: later requests may miss the deadline."""
    alive = [s for s in fleet if s.process is not None and not s.gone]
    suspected = _suspected(alive, diagnosis)
    keys = {s.key for s in suspected}
    known = {s.process for s in suspected}
    # If the detector has no sample of the suspect yet (a watch that just started), only the diagnosis is used.
    named = [s for s in diagnosis.suspects if s.process is not None and not alive and s.process not in known]
    suspects = [*map(suspect, _most_telling(suspected, NUM_STACKS_MAX)), *named]
    wanted = diagnosis.fault_class.spec.evidence
    asks: list[EvidenceRequest] = []
    if EvidenceKind.STACKS in wanted:
        asks += [_of(EvidenceKind.STACKS, who, True) for who in suspects[:NUM_STACKS_MAX]]
        asks += [_of(EvidenceKind.STACKS, suspect(s), False) for s in _peers(suspected, alive)]
    if EvidenceKind.FLIGHT in wanted:
        asks += [_of(EvidenceKind.FLIGHT, suspect(s), s.key in keys) for s in _members(suspected, alive)]
    nodes = list(dict.fromkeys(str(s.node) for s in diagnosis.suspects if s.node))[:NUM_NODES_MAX]
    if EvidenceKind.NCCL in wanted and nodes:
        # RAS covers the whole job from any node; a node with live processes is preferred.
        living = {s.node for s in alive}
        one = next((n for n in nodes if n in living), nodes[0])
        asks.append(EvidenceRequest(kind=EvidenceKind.NCCL, node=one))
    if EvidenceKind.KERNEL in wanted:
        asks += [EvidenceRequest(kind=EvidenceKind.KERNEL, node=node) for node in nodes]
    stopped = {s.process for s in alive if s.sample is not None and s.sample.proc_state in STOPPED_STATES}
    return [replace(a, is_stopped=a.who is not None and a.who.process in stopped) for a in asks]


def _of(kind: EvidenceKind, who: Suspect, suspected: bool) -> EvidenceRequest:
    assert who.process is not None
    return EvidenceRequest(kind=kind, node=str(who.process.node), who=who, suspected=suspected)


def _suspected(alive: Sequence[MonitoredProcess], diagnosis: Diagnosis) -> list[MonitoredProcess]:
    """Processes of the suspects: of named ranks, whole replicas, or whole nodes."""
    nodes = {str(who.node) for who in diagnosis.suspects if who.node and not who.replica}
    named = {(who.replica, who.rank, who.incarnation) for who in diagnosis.suspects if who.replica}
    # A suspect without a rank or incarnation includes all of them.
    names = {s.key: product([s.replica], (s.rank, None), (s.incarnation, None)) for s in alive}
    return [s for s in alive if s.node in nodes or not named.isdisjoint(names[s.key])]


def _peers(suspected: Sequence[MonitoredProcess], alive: Sequence[MonitoredProcess]) -> list[MonitoredProcess]:
    """Processes of the suspects' roles that are not suspects, preferably on other nodes."""
    roles, nodes, keys = {s.role for s in suspected}, {s.node for s in suspected}, {s.key for s in suspected}
    others = (s for s in alive if s.role in roles and s.key not in keys)
    return nsmallest(NUM_PEERS, others, key=lambda s: (s.node in nodes, s.key))


def _members(suspected: Sequence[MonitoredProcess], alive: Sequence[MonitoredProcess]) -> Sequence[MonitoredProcess]:
    """Members of the suspects' collectives: all processes of a role that counts collectives."""
    roles = {s.role for s in suspected}
    members = [s for s in alive if s.role in roles and s.reports]
    samples = [s.sample for s in members if s.sample is not None]
    if len(members) < 2 or not any(p.collectives_entered > 0 or p.phase in (Phase.REDUCE, Phase.STEP) for p in samples):
        return []
    return _most_telling(sorted(members, key=lambda s: s.key), NUM_FLIGHT_MAX)


def _most_telling(processes: Sequence[MonitoredProcess], number: int) -> Sequence[MonitoredProcess]:
    """At most `number` of them, if there are more: first those that the others may wait for, which are between two
    steps or have begun the fewest exchanges, then one of each node, so that no machine is left out."""
    if len(processes) <= number:
        return processes
    num_seen: Counter[tuple[bool, int, str]] = Counter()
    ordered: list[tuple[tuple[bool, int, int], MonitoredProcess]] = []
    for s in processes:
        place = s.phase != Phase.WAIT, s.sample.exchanges if s.sample is not None else 0
        ordered.append(((*place, num_seen[*place, s.node]), s))
        num_seen[*place, s.node] += 1
    return [s for _, s in nsmallest(number, ordered, key=lambda known: known[0])]
