"""Localizes the ranks that block a job's collectives, from their Flight Recorder dumps.

In each process group, k is the first collective that a waiting rank has not finished. Checked in this order:

    some ranks entered another operation as k    mismatch of type, size or dtype: a bug in the code, not a machine fault
    some ranks have not enqueued k               host side: Python, data loader, CPU; or they wait in another group
    all ranks with a dump have, some have none   those without: dead, stopped or disconnected before the dump
    some finished k, or alone did not start it   GPU side: enqueued and not finished (GPU or link)
    all wait inside k                            a tie

A rank that is late for one group because it waits in another is a victim of the latter. Waits are therefore followed to
their root causes (group -> its late ranks -> the groups in which they wait), and each root cause is scored by the ranks
whose wait leads to it. A root cause with more than half of a group as suspects names none. A cycle of waits means that
ranks are in different collectives. Pairs of `send` and `recv` are groups of two.

Pure: dumps in, findings out (dumps.py reads them). Sequence numbers decide, with one exception: an operation enqueued
less than a second before the dump does not count as waiting yet.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from rolecall.core.diagnosis import NO_TIME, Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.text import counted, in_words
from rolecall.detector.artifacts.flight_recorder.dumps import FlightRecorderDump
from rolecall.detector.artifacts.flight_recorder.entries import GLOO
from rolecall.detector.artifacts.flight_recorder.waits import (
    WAIT_SECONDS_MIN,
    WEAK,
    Cause,
    Job,
    SynchronizationPoint,
    WaitRootCause,
    gathered,
    mixed_jobs,
    operations_at,
    ranks_text,
    root_causes,
)
from rolecall.detector.artifacts.stacks.dumps import Topology
from rolecall.detector.base.findings import settles

DETECTOR = "flight_recorder"
NUM_SUSPECTS_OF_A_TIE = 16
"""A tie of more ranks than this names none of them."""
NO_OPERATION = (
    "cannot tell: the dumps hold no operation of any process group; dumps taken while the job runs, with PyTorch's "
    "recorder switched on (TORCH_FR_BUFFER_SIZE, or TORCH_NCCL_TRACE_BUFFER_SIZE, above 0), would settle it"
)
VOTES_SHARE_MIN = 0.5
"""Ranks with less than this share of the top rank's votes are not named with it."""


Verdict = tuple[FaultClass, float, str, str]
"""Fault class, confidence, text, and the evidence that would settle the case."""


def _finding(job: Job, cause: Cause, of_kind: list[WaitRootCause]) -> Finding:
    """The ranks of one kind of cause are named together unless their votes differ widely. Operation, waiting ranks and
    time are those of one group; ranks that block other groups are only counted."""
    ends = [e for e in of_kind if len(e.waiters) >= VOTES_SHARE_MIN * len(of_kind[0].waiters)]
    place = ends[0].place
    here = sorted({r for e in ends if e.place is place for r in e.ranks})
    others = {r: e.place.key for e in ends if e.place is not place for r in e.ranks if r not in here}
    fault, confidence, because, settle = _verdict(job, cause, here, place)
    if others:
        groups = counted(len(set(others.values())), "other group")
        because += f"; the same was found for {ranks_text(others)} in {groups}"
    ranks = sorted({*here, *others})
    if cause in WEAK and len(ranks) > NUM_SUSPECTS_OF_A_TIE:
        ranks = []
    return _made(job, cause, ranks, (fault, confidence, because, settle), place)


def _verdict(
    job: Job,
    cause: Cause,
    ranks: Sequence[int],
    place: SynchronizationPoint,
) -> Verdict:
    who, operation, one = job.who(ranks), _operation_text(job, place), len(ranks) == 1
    it, them, its, wait = ("it", "it", "its", "waits") if one else ("they", "them", "their", "wait")
    waiting = [r for r in place.waiting if r not in ranks] or place.waiting
    others_wait = f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    since = "" if place.since is None else f" since {datetime.fromtimestamp(place.since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    match cause:
        case Cause.OUTSIDE:
            because = (
                f"{who} {'has' if one else 'have'} not entered {operation}; {others_wait} in it{since}; {it} "
                f"{'is' if one else 'are'} in no collective (host side: Python, data loader, GIL or CPU)"
            )
            return FaultClass.HANG, 0.9, because, ""
        case Cause.NO_DUMP:
            because = (
                f"{who} left no dump, and {others_wait} for {them} in {operation}{since}, which all others have "
                "entered: dead, stopped or disconnected before the dump"
            )
            return FaultClass.HANG, 0.8 if place.members_known else 0.6, because, ""
        case Cause.MISMATCH:
            others = len(set(place.waiting) - set(ranks))
            still = f"; {counted(others, 'other rank')} {'waits' if others == 1 else 'wait'}{since}" if others else ""
            because = (
                f"{who} entered a different operation as {operation} ({place.detail}): a bug in the code, not a "
                f"machine fault{still}"
            )
            return FaultClass.USER_CODE, 0.9, because, ""
        case Cause.ELSEWHERE:
            places = [
                p for p in job.places.values() if p is not place and set(p.waiting) & set(ranks) and p.frontier > 0
            ]
            elsewhere = ", ".join(_operation_text(job, p) for p in places[:2]) or "?"
            because = (
                f"{who} {wait} in another collective ({elsewhere}), while {others_wait} for {them} in "
                f"{operation}{since}: the order of collectives differs between ranks"
            )
            return FaultClass.USER_CODE, 0.7, because, ""
        case Cause.BEHIND:
            backends = (o.backend for r in place.seats for o in operations_at(job, r, place.key, place.frontier))
            is_gloo = next(backends, "") == GLOO
            because = (
                f"{who} entered {operation} and did not {place.detail} it, as others did{since}: {its} "
                f"{'link' if is_gloo else 'GPU or link'}"
            )
            return FaultClass.NETWORK if is_gloo else FaultClass.GPU, 0.6, because, ""
        case Cause.AHEAD:
            because = (
                f"{who} {wait} in {operation}{since}, which most of the group has not entered, without waiting: either "
                f"{it} entered it alone, or something else blocks the others"
            )
            return FaultClass.CANNOT_TELL, 0.3, because, "stacks of the ranks that have not entered it"
        case Cause.INSIDE:
            because = (
                f"{who} all wait in {operation}{since}; the operations match and none of the ranks has finished it, so "
                "the rank that blocks it cannot be identified"
            )
            settle = "NCCL RAS or Inspector, or GPU and link counters of these ranks; or the missing dumps"
            return FaultClass.CANNOT_TELL, 0.3, because, settle


def _made(
    job: Job,
    cause: Cause,
    ranks: Sequence[int],
    verdict: Verdict,
    place: SynchronizationPoint,
) -> Finding:
    """Times are those of the recorded operations: a dump does not say when it was taken, and the file's time changes
    when it is copied."""
    fault, confidence, because, settle = verdict
    values = {
        "num_waiting": float(len(set(place.waiting) - set(ranks))),
        "num_members": float(len(place.members)),
        "sequence_number": float(place.frontier),
        "num_without_dump": float(len(job.absent)),
    }
    missing = f"; no dump of {ranks_text(job.absent)}" if job.absent and cause is not Cause.NO_DUMP else ""
    text = f"{place.name}, sequence number {place.frontier}: {in_words(cause)}{missing}"
    evidence = [Evidence(kind=str(cause), text=text, values=values)]
    if place.since is None:
        evidence.append(Evidence(kind=NO_TIME, text="the dumps do not say when the wait began"))
    detected_at = max(job.newest_at, place.since or 0.0)
    return Finding(
        detector=DETECTOR,
        suspects=job.suspects(ranks),
        fault_class=fault,
        onset=detected_at if place.since is None else place.since,
        detected_at=detected_at,
        confidence=confidence,
        because=because,
        evidence=(*evidence, *([settles(settle)] if settle else [])),
    )


def alone(job: Job) -> list[Finding]:
    """A single dump of several: it shows only what that rank waits for."""
    (rank,) = job.dumps
    waiting = [p for p in job.places.values() if p.frontier > 0]
    if not waiting:
        return []
    place = min(waiting, key=lambda p: p.seats[rank].since or 0.0)
    because = (
        f"rank {rank} waits in {_operation_text(job, place)}, and its dump is the only one of {len(job.absent) + 1} "
        "ranks, so the rank that blocks it cannot be identified"
    )
    settle = "dumps of the other ranks, taken while it waits"
    return [_made(job, Cause.INSIDE, (), (FaultClass.CANNOT_TELL, 0.2, because, settle), place)]


def _missing_dumps(job: Job) -> list[Finding]:
    """No rank waits, but a rank has no dump: it may have died, or its file was not collected."""
    if not job.absent or len(job.absent) > len(job.dumps):
        return []
    because = (
        f"{ranks_text(job.absent)} left no dump; none of the {counted(len(job.dumps), 'other rank')} waits for "
        f"anything: dead, or the file was not collected"
    )
    place = SynchronizationPoint(("-", -1, -1, -1), "", tuple(sorted({*job.dumps, *job.absent})), True)
    settle = f"whether {ranks_text(job.absent)} is alive, or its dump"
    named = job.absent if len(job.absent) <= NUM_SUSPECTS_OF_A_TIE else ()
    return [_made(job, Cause.NO_DUMP, named, (FaultClass.CANNOT_TELL, 0.4, because, settle), place)]


def _operation_text(job: Job, place: SynchronizationPoint) -> str:
    """`all_reduce #12 of group 0 (default_pg)`."""
    if place.key[2] >= 0:
        return f"send and recv of {place.name}"
    for rank in sorted(place.seats, key=lambda r: r in place.culprits):
        if place.seats[rank].enqueued >= place.frontier:
            operations = operations_at(job, rank, place.key, place.frontier)
            if operations:
                return f"{operations[0].name} #{place.frontier} of {place.name}"
    return f"collective #{place.frontier} of {place.name}"


NUM_WAITERS_SHOWN = 8
"""Waiting ranks whose dumps the fast path reads in full, in addition to those of the suspects."""


def diagnose(
    dumps: Sequence[FlightRecorderDump],
    *,
    world_size: int | None = None,
    topology: Topology | None = None,
    complete: bool = True,
) -> list[Finding]:
    """Root causes, the one that explains most waits first; empty if no rank waits, or if jobs are mixed (`open_ends`).

    `world_size`: number of ranks; by default derived from the groups, else from the highest rank seen. `topology`:
    node, role and replica of ranks; takes precedence over file names. `complete`: all dumps were read; otherwise a rank
    without one is not suspected for that.
    """
    if not dumps or mixed_jobs(dumps):
        return []
    job = gathered(dumps, world_size, topology)
    if len(job.dumps) == 1 and job.absent:
        return alone(job)
    causes = root_causes(job)
    kinds = dict.fromkeys(c.cause for c in causes)
    found = [_finding(job, kind, [c for c in causes if c.cause is kind]) for kind in kinds] or _missing_dumps(job)
    return [f for f in found if complete or not any(s.rank in job.absent for s in f.suspects)]


def entries_wanted(dumps: Sequence[FlightRecorderDump], *, world_size: int | None = None) -> set[int]:
    """Ranks whose entries could change or explain the result of the status; empty if no more is needed."""
    if not dumps or mixed_jobs(dumps):
        return set()
    job = gathered(dumps, world_size)
    wanted = set(job.unread)
    for end in root_causes(job):
        wanted.update(end.ranks)
        place = end.place
        all_seats = end.cause in (Cause.INSIDE, Cause.AHEAD, Cause.BEHIND, Cause.NO_DUMP)
        wanted.update(place.seats if all_seats else sorted(place.waiting)[:NUM_WAITERS_SHOWN])
    return {r for r in wanted if r in job.dumps and job.dumps[r].entries is None}


def open_ends(dumps: Sequence[FlightRecorderDump], *, world_size: int | None = None) -> list[str]:
    """Why dumps without a finding do not show that the job is healthy, and what would settle it."""
    if mixed := mixed_jobs(dumps):
        return [mixed]
    job = gathered(dumps, world_size)
    if not any(max(s.enqueued, s.started, s.completed) > 0 for p in job.places.values() for s in p.seats.values()):
        return [NO_OPERATION]
    if job.absent:
        return [
            f"cannot tell: no dump of {ranks_text(job.absent)}, and no other rank waits; their dumps would settle it"
        ]
    return []


def summary(dumps: Sequence[FlightRecorderDump], *, world_size: int | None = None) -> str:
    """One sentence that describes the input."""
    if not dumps:
        return "no dump"
    if mixed_jobs(dumps):
        return f"{counted(len(dumps), 'Flight Recorder dump')} of several jobs or moments"
    job = gathered(dumps, world_size)
    operations = sum(len(d.entries) for d in job.dumps.values() if d.entries is not None)
    groups = len({(p.key[0], p.key[1]) for p in job.places.values()})
    waiting = {r for p in job.places.values() for r in p.waiting}
    who, how_long = (ranks_text(waiting), " or longer") if waiting else ("none", "")
    missing = f"; no dump of {ranks_text(job.absent)}" if job.absent else ""
    return (
        f"Flight Recorder dumps of {counted(len(job.dumps), 'rank')}, {counted(groups, 'process group')}, "
        f"{counted(operations, 'operation')}: {who} waited for {WAIT_SECONDS_MIN:g} s{how_long}{missing}"
    )
