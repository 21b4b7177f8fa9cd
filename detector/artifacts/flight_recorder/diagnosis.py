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

from rolecall.core.diagnosis import Finding
from rolecall.detector.artifacts.flight_recorder.dumps import FlightRecorderDump
from rolecall.detector.artifacts.flight_recorder.findings import alone, findings, missing_dumps
from rolecall.detector.artifacts.flight_recorder.progress import WAIT_SECONDS_MIN, Cause, gathered
from rolecall.detector.artifacts.flight_recorder.text import count_text, ranks_text
from rolecall.detector.artifacts.flight_recorder.waits import ends_of
from rolecall.detector.artifacts.stacks.dumps import Topology

NUM_WITNESSES = 8
"""Waiting ranks whose dumps the fast path reads in full, in addition to those of the suspects."""


def diagnose(
    dumps: Sequence[FlightRecorderDump], *, world_size: int | None = None, topology: Topology | None = None
) -> list[Finding]:
    """Root causes, the one that explains most waits first; empty if no rank waits.

    `world_size`: number of ranks; by default derived from the groups, else from the highest rank seen. `topology`:
    node, role and replica of ranks; takes precedence over file names.
    """
    if not dumps:
        return []
    job = gathered(dumps, world_size, topology)
    if len(job.dumps) == 1 and job.absent:
        return alone(job)
    ends = ends_of(job)
    if ends:
        return findings(job, ends)
    return missing_dumps(job)


def entries_wanted(dumps: Sequence[FlightRecorderDump], *, world_size: int | None = None) -> set[int]:
    """Ranks whose entries could change or explain the result of the status; empty if no more is needed."""
    if not dumps:
        return set()
    job = gathered(dumps, world_size)
    wanted = set(job.unread)
    for end in ends_of(job):
        wanted.update(end.ranks)
        place = end.place
        all_seats = end.cause in (Cause.INSIDE, Cause.AHEAD, Cause.BEHIND, Cause.NO_DUMP)
        wanted.update(place.seats if all_seats else sorted(place.waiting)[:NUM_WITNESSES])
    return {r for r in wanted if r in job.dumps and job.dumps[r].entries is None}


def looked_at(dumps: Sequence[FlightRecorderDump], *, world_size: int | None = None) -> str:
    """One sentence that describes the input."""
    if not dumps:
        return "no dump"
    job = gathered(dumps, world_size)
    operations = sum(len(d.entries) for d in job.dumps.values() if d.entries is not None)
    groups = len({(p.key[0], p.key[1]) for p in job.places.values()})
    waiting = {r for p in job.places.values() for r in p.waiting}
    who, how_long = (ranks_text(waiting), " or longer") if waiting else ("none", "")
    missing = f"; no dump of {ranks_text(job.absent)}" if job.absent else ""
    return (
        f"Flight Recorder dumps of {count_text(len(job.dumps), 'rank')}, {count_text(groups, 'process group')}, "
        f"{count_text(operations, 'operation')}: {who} waited for {WAIT_SECONDS_MIN:g} s{how_long}{missing}"
    )
