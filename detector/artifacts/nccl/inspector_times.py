"""Localizes late ranks and slow links from NCCL Inspector logs, one file of JSON lines per rank.

Operations are joined across ranks by communicator, kind and sequence number. The rank that arrives LAST has the
SHORTEST time in a collective: the times of the others include their wait. A rank is slow before the collective if its
time is at most half of the median in many joint operations, and the others wait for a good part of their time in
collectives. A communicator that without such waits has far less bandwidth than comparable ones (same kind, message
size, ranks and nodes) has a slow link or GPU among its ranks.

Only finished operations are recorded: a hung operation is absent, so absence proves nothing.
"""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.errors import ReadingStopped, UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.core.text import counted
from rolecall.detector.artifacts.stacks.dumps import Topology
from rolecall.detector.base.read_budget import Check, head_of, no_check
from rolecall.formats.nccl.inspector import LINE_BYTES_MAX, Context, Lines

DETECTOR = "nccl_inspector"
FILE_BYTES_MAX = 64 << 20
"""Of a larger file, only the last this many bytes are read."""
HEAD_BYTES = 8192
NUM_OPERATIONS_MAX = 20_000
"""Per communicator and file: the newest operations."""
OPERATION_BYTES = 250
CHECK_LINES = 1000
"""The deadline is checked after this many lines: some 50 ms."""
NUM_JOINT_MIN = 10
LATE_RATIO_MAX = 0.5
"""Maximum ratio of a rank's time to the median of all ranks for it to count as late in an operation."""
LATE_SHARE_MIN = 0.3
"""Minimum share of the joint operations to which a rank came late."""
WAIT_SHARE_MIN = 0.2
"""Minimum share of a median rank's time in these operations that is spent waiting for the late rank."""
NUM_LIKES_MIN = 3
BANDWIDTH_RATIO_MAX = 0.6
NUM_SUSPECTS_MAX = 16

Key = tuple[str, int]
"""Kind and sequence number: NCCL counts each kind separately."""


@dataclass(frozen=True, slots=True)
class OperationTiming:
    seconds: float
    size_bytes: int
    bus_bytes_per_second: float


@dataclass(slots=True)
class InspectorLog:
    """One file. `operations`: by communicator and rank, in file order."""

    path: str
    at: float  # wall seconds, from the file
    num_lines: int = 0
    num_bad: int = 0
    num_dropped: int = 0
    cut: bool = False
    operations: dict[tuple[str, int], deque[tuple[Key, OperationTiming]]] = field(default_factory=dict)
    contexts: dict[tuple[str, int], Context] = field(default_factory=dict)

    def num_operations(self) -> int:
        return sum(map(len, self.operations.values()))


def is_log(path: Path) -> bool:
    """Whether its first complete line is an Inspector record. Raises OSError."""
    line = head_of(path, HEAD_BYTES).lstrip().partition(b"\n")[0]
    # With a trace of many channels, the line can be longer than the head.
    return line[:1] == b"{" and any(k in line for k in (b'"coll_perf"', b'"p2p_perf"', b'"dump_stats"'))


def read(path: Path, check: Check = no_check) -> InspectorLog:
    """The lines up to where `check` ends the reading, if it does. Raises UnreadableInput: no complete line, or the file
    cannot be read."""
    lines = Lines()
    try:
        about = path.stat()
        log = InspectorLog(path=str(path), at=about.st_mtime, cut=about.st_size > FILE_BYTES_MAX)
        with path.open("rb") as file:
            if log.cut:
                file.seek(-FILE_BYTES_MAX, os.SEEK_END)
                file.readline(LINE_BYTES_MAX)
            left, number = min(about.st_size, FILE_BYTES_MAX), 0
            with suppress(ReadingStopped):
                while left > 0 and (line := file.readline(LINE_BYTES_MAX + 1)):
                    left -= len(line)
                    _keep(log, lines, line)
                    number += 1
                    if number % CHECK_LINES == 0:
                        check()
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=e.strerror or str(e)) from None
    log.num_lines, log.num_bad, log.num_dropped = lines.num_lines, lines.num_bad, lines.num_dropped
    if not log.contexts:
        raise UnreadableInput(where=str(path), reason="it has no finished operation of the NCCL Inspector")
    return log


def _keep(log: InspectorLog, lines: Lines, line: bytes) -> None:
    operation = lines.take(line)
    if operation is None or operation.is_p2p:
        return
    place = (operation.context.communicator, operation.context.rank)
    log.contexts[place] = operation.context
    kept = log.operations.get(place)
    if kept is None:
        kept = log.operations[place] = deque(maxlen=NUM_OPERATIONS_MAX)
    timed = OperationTiming(operation.seconds, operation.size_bytes, operation.bus_bytes_per_second)
    kept.append(((operation.kind, operation.sequence), timed))


def kept_bytes(log: InspectorLog) -> int:
    return 2048 + OPERATION_BYTES * log.num_operations()


def summary(logs: Sequence[InspectorLog]) -> str:
    """One sentence that describes the input."""
    ranks = {place for log in logs for place in log.operations}
    communicators = {communicator for communicator, _ in ranks}
    total = sum(log.num_operations() for log in logs)
    return (
        f"NCCL Inspector: {counted(total, 'finished collective')} of "
        f"{counted(len(communicators), 'communicator')}, {counted(len(ranks), 'rank')} of them"
    )


@dataclass(slots=True)
class JoinedCommunicator:
    """A communicator with its operations and processes by rank. `operations`: those that all reporting ranks
    finished."""

    name: str
    ranks: dict[int, dict[Key, OperationTiming]] = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)

    def operations(self) -> list[Key]:
        tables = list(self.ranks.values())
        first = min(tables, key=len)
        return [key for key in first if all(key in t for t in tables)]


def _joined(logs: Sequence[InspectorLog]) -> list[JoinedCommunicator]:
    found: dict[str, JoinedCommunicator] = {}
    for log in logs:
        for (communicator, rank), operations in log.operations.items():
            joint = found.setdefault(communicator, JoinedCommunicator(communicator))
            joint.ranks.setdefault(rank, {}).update(operations)
            joint.contexts[rank] = log.contexts[communicator, rank]
    return list(found.values())


def diagnose(
    logs: Sequence[InspectorLog], *, topology: Topology | None = None
) -> tuple[list[Finding], tuple[str, ...]]:
    """(findings, remarks: lines cut, ranks without a file, undecided questions)."""
    if not logs:
        return [], ()
    topology = topology or Topology()
    remarks, found = list[str](), list[Finding]()
    if bad := sum(log.num_bad for log in logs):
        remarks.append(f"{counted(bad, 'truncated or unknown line')} skipped")
    if dropped := sum(log.num_dropped for log in logs):
        remarks.append(f"the Inspector dropped {counted(dropped, 'operation')}")
    if cut := [log.path for log in logs if log.cut]:
        remarks.append(
            f"only the last {FILE_BYTES_MAX >> 20} MiB of {counted(len(cut), 'file')} were read, first {cut[0]}"
        )
    now = max(log.at for log in logs)
    joints = _joined(logs)
    sizes = [next(iter(j.contexts.values())).num_ranks for j in joints]
    for joint, size in zip(joints, sizes, strict=True):
        whole = size == max(sizes) and sizes.count(size) == 1
        if len(joint.ranks) < 2:
            continue
        operations = joint.operations()
        remarks += _open_ends(joint)
        if len(operations) < NUM_JOINT_MIN:
            remarks.append(
                f"cannot tell: all {len(joint.ranks)} ranks found of communicator {joint.name} recorded "
                f"{counted(len(operations), 'operation')}, and {NUM_JOINT_MIN} are compared"
            )
            continue
        if (late := _late(joint, operations, whole, topology, now)) is not None:
            found.append(late)
    if all(len(j.ranks) < 2 for j in joints):
        remarks.append("cannot tell: no communicator has files of two ranks: collect the files of all nodes")
    found += _narrow(joints, now)
    return found, tuple(dict.fromkeys(remarks))


def _open_ends(joint: JoinedCommunicator) -> Iterable[str]:
    num_ranks = next(iter(joint.contexts.values())).num_ranks
    if len(joint.ranks) < num_ranks:
        yield (
            f"cannot tell: {num_ranks - len(joint.ranks)} of {num_ranks} ranks of communicator {joint.name} left no "
            f"file"
        )
    newest: dict[str, dict[int, int]] = {}
    for rank, operations in joint.ranks.items():
        for kind, sequence in operations:
            of_kind = newest.setdefault(kind, {})
            of_kind[rank] = max(of_kind.get(rank, 0), sequence)
    for kind, last in newest.items():
        most = max(last.values())
        short = sorted(r for r in joint.ranks if last.get(r, 0) < most)
        if short and 2 * len(short) <= len(joint.ranks):
            who = ", ".join(str(r) for r in short[:8])
            yield (
                f"cannot tell: {'ranks' if len(short) > 1 else 'rank'} {who} of communicator {joint.name} finished "
                f"{kind} up to {last.get(short[0], 0)}, others up to "
                f"{most}: behind, dead, or written later; a hung operation is not in these files"
            )


def _late(
    joint: JoinedCommunicator, operations: list[Key], whole: bool, topology: Topology, now: float
) -> Finding | None:
    num_late = dict.fromkeys(joint.ranks, 0)
    waited = dict.fromkeys(joint.ranks, 0.0)
    total = 0.0
    own: dict[int, list[float]] = {r: [] for r in joint.ranks}
    medians: list[float] = []
    for key in operations:
        times = {rank: table[key].seconds for rank, table in joint.ranks.items()}
        middle = max(times.values()) if len(times) == 2 else median(times.values())
        total += middle
        medians.append(middle)
        for rank, seconds in times.items():
            own[rank].append(seconds)
            if seconds <= LATE_RATIO_MAX * middle:
                num_late[rank] += 1
                waited[rank] += middle - seconds
    if total <= 0.0:
        return None
    late = [
        r
        for r in joint.ranks
        if num_late[r] >= LATE_SHARE_MIN * len(operations) and waited[r] >= WAIT_SHARE_MIN * total
    ]
    if not late or 2 * len(late) > len(joint.ranks):
        return None
    late.sort(key=lambda r: -waited[r])
    first = late[0]
    kinds = sorted({kind for kind, _ in operations})
    because = (
        f"{_who(joint, late)} {'enter' if len(late) > 1 else 'enters'} the collectives of communicator {joint.name} "
        f"late ({', '.join(kinds[:4])}): "
        f"in {num_late[first]} of {len(operations)} its own time was at most half of the others', "
        f"{median(own[first]) * 1e3:.2f} ms where "
        f"they took {median(medians) * 1e3:.2f} ms, {waited[first] / total:.0%} of it waiting: slow before the "
        f"collective"
    )
    evidence = tuple(
        Evidence(
            kind="nccl_late",
            text=f"rank {r}: late in {num_late[r]} of {len(operations)} collectives, others waited {waited[r]:.3f} s",
            values={"num_late": float(num_late[r]), "num_joint": float(len(operations)), "waited_seconds": waited[r]},
        )
        for r in late[:8]
    )
    return Finding(
        detector=DETECTOR,
        suspects=tuple(_suspect(joint.contexts[r], whole, topology) for r in sorted(late)[:NUM_SUSPECTS_MAX]),
        fault_class=FaultClass.SLOW,
        onset=now,
        detected_at=now,
        confidence=0.7,
        because=because,
        evidence=evidence,
    )


def _who(joint: JoinedCommunicator, ranks: Sequence[int]) -> str:
    named = [f"rank {r} ({joint.contexts[r].host}, process {joint.contexts[r].pid})" for r in ranks[:8]]
    return ", ".join(named) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _suspect(c: Context, whole: bool, topology: Topology) -> Suspect:
    """`whole`: the communicator is the single largest one, so its ranks are taken for global ranks."""
    return topology.suspect(c.rank if whole else None, c.host or f"rank-{c.rank}")


def _narrow(joints: Sequence[JoinedCommunicator], now: float) -> list[Finding]:
    """Communicators with far less bandwidth than comparable ones. The fastest rank gives an operation's bandwidth: its
    time contains no wait."""
    likes: dict[tuple[str, int, int, int], list[tuple[float, JoinedCommunicator]]] = {}
    for joint in joints:
        about = next(iter(joint.contexts.values()))
        best: dict[tuple[str, int], dict[int, float]] = {}
        for table in joint.ranks.values():
            for (kind, sequence), timed in table.items():
                of_size = best.setdefault((kind, timed.size_bytes), {})
                of_size[sequence] = max(of_size.get(sequence, 0.0), timed.bus_bytes_per_second)
        for (kind, size), bandwidths in best.items():
            if len(bandwidths) >= NUM_JOINT_MIN and size:
                key = (kind, size, about.num_ranks, about.num_nodes)
                likes.setdefault(key, []).append((median(bandwidths.values()), joint))
    found: dict[str, Finding] = {}
    for (kind, size, num_ranks, _), listed in likes.items():
        if len(listed) < NUM_LIKES_MIN:
            continue
        for n, (own, joint) in enumerate(listed):
            others = median(b for m, (b, _) in enumerate(listed) if m != n)
            if own < BANDWIDTH_RATIO_MAX * others and joint.name not in found:
                because = (
                    f"communicator {joint.name} moves {kind} of {size:,} bytes at {own / 1e9:.3g} GB/s, the "
                    f"{len(listed) - 1} others of "
                    f"{num_ranks} ranks at {others / 1e9:.3g} GB/s: a link or GPU of "
                    f"{_who(joint, sorted(joint.ranks))} is slow; "
                    "its times do not show which one"
                )
                suspects = [_suspect(c, False, Topology()) for _, c in sorted(joint.contexts.items())]
                found[joint.name] = Finding(
                    detector=DETECTOR,
                    suspects=tuple(dict.fromkeys(suspects))[:NUM_SUSPECTS_MAX],
                    fault_class=FaultClass.NETWORK,
                    onset=now,
                    detected_at=now,
                    confidence=0.5,
                    because=because,
                )
    return list(found.values())
