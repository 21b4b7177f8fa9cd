"""Findings on the root causes of waits: fault class, suspects, text, and the evidence that would settle the case."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.flight_recorder.entries import GLOO
from rolecall.detector.artifacts.flight_recorder.progress import Cause, Job, SynchronizationPoint, operations_at
from rolecall.detector.artifacts.flight_recorder.text import count_text, ranks_text
from rolecall.detector.artifacts.flight_recorder.waits import WaitRootCause
from rolecall.detector.base.findings import settles

DETECTOR = "flight_recorder"
NUM_SUSPECTS_OF_A_TIE = 16
"""A tie of more ranks than this names none of them."""
VOTES_SHARE_MIN = 0.5
"""Ranks with less than this share of the top rank's votes are not named with it."""


def findings(job: Job, ends: list[WaitRootCause]) -> list[Finding]:
    """One finding per kind of cause; ranks of one kind are named together unless their votes differ widely."""
    findings = []
    for cause in dict.fromkeys(e.cause for e in ends):
        of_kind = [e for e in ends if e.cause is cause]
        told = [e for e in of_kind if len(e.waiters) >= VOTES_SHARE_MIN * len(of_kind[0].waiters)]
        findings.append(_finding(job, cause, told))
    return findings


@dataclass(frozen=True, slots=True)
class FindingWording:
    """Text fragments of a finding: `rank 3`, `it`, `all_reduce #12 of group 0`, `ranks 0-2 wait`, ` since ...`."""

    who: str
    it: str
    place: SynchronizationPoint
    operation: str
    others_wait: str
    since: str
    num_waiters: int

    def of_who(self, one: str, several: str) -> str:
        return one if self.it == "it" else several


Verdict = tuple[FaultClass, float, str, str]
"""Fault class, confidence, text, and the evidence that would settle the case."""


def _finding(job: Job, cause: Cause, ends: list[WaitRootCause]) -> Finding:
    ranks = sorted({r for e in ends for r in e.ranks})
    waiters = {r for e in ends for r in e.waiters} - set(ranks)
    place = ends[0].place
    waiting = [r for r in place.waiting if r not in ranks] or place.waiting
    since = min(
        (s.since for e in ends for s in e.place.seats.values() if s.waits and s.since is not None), default=None
    )
    scene = FindingWording(
        who=job.who(ranks),
        it="it" if len(ranks) == 1 else "they",
        place=place,
        operation=_operation_text(job, place),
        others_wait=f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'}",
        since=f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC" if since is not None else "",
        num_waiters=len(waiters),
    )
    if cause is Cause.OUTSIDE or cause is Cause.NO_DUMP:
        verdict = _not_there(cause, scene)
    elif cause is Cause.MISMATCH:
        verdict = _another_operation(scene)
    elif cause is Cause.ELSEWHERE:
        verdict = _another_collective(scene, _elsewhere(job, ranks, place))
    elif cause is Cause.BEHIND:
        verdict = _not_finished(scene, _is_gloo(job, place))
    else:
        verdict = _undecided(cause, scene)
        ranks = ranks if len(ranks) <= NUM_SUSPECTS_OF_A_TIE else []
    return _made(job, cause, ranks, verdict, since, len(waiters), place)


def _not_there(cause: Cause, scene: FindingWording) -> Verdict:
    if cause is Cause.OUTSIDE:
        because = (
            f"{scene.who} {scene.of_who('has', 'have')} not entered {scene.operation}; {scene.others_wait} in "
            f"it{scene.since}; {scene.it} {scene.of_who('is', 'are')} in no collective (host side: Python, data "
            "loader, GIL or CPU)"
        )
        return FaultClass.HANG, 0.9, because, ""
    because = (
        f"{scene.who} left no dump, and {scene.others_wait} for {scene.of_who('it', 'them')} in {scene.operation}"
        f"{scene.since}, which all others have entered: dead, stopped or disconnected before the dump"
    )
    return FaultClass.HANG, 0.8 if scene.place.members_known else 0.6, because, ""


def _another_operation(scene: FindingWording) -> Verdict:
    because = (
        f"{scene.who} entered a different operation as {scene.operation} ({scene.place.detail}): a bug in the code, "
        f"not a machine fault; {count_text(scene.num_waiters, 'other rank')} "
        f"{'waits' if scene.num_waiters == 1 else 'wait'}{scene.since}"
    )
    return FaultClass.USER_CODE, 0.9, because, ""


def _another_collective(scene: FindingWording, elsewhere: str) -> Verdict:
    because = (
        f"{scene.who} {scene.of_who('waits', 'wait')} in another collective ({elsewhere}), while {scene.others_wait} "
        f"for {scene.of_who('it', 'them')} in {scene.operation}{scene.since}: the order of collectives differs between "
        f"ranks"
    )
    return FaultClass.USER_CODE, 0.7, because, ""


def _not_finished(scene: FindingWording, is_gloo: bool) -> Verdict:
    because = (
        f"{scene.who} entered {scene.operation} and did not {scene.place.detail} it, as others did{scene.since}: "
        f"{scene.of_who('its', 'their')} {'link' if is_gloo else 'GPU or link'}"
    )
    return FaultClass.NETWORK if is_gloo else FaultClass.GPU, 0.6, because, ""


def _undecided(cause: Cause, scene: FindingWording) -> Verdict:
    if cause is Cause.AHEAD:
        because = (
            f"{scene.who} {scene.of_who('waits', 'wait')} in {scene.operation}{scene.since}, which most of the group "
            f"has not entered, without waiting: either {scene.it} entered it alone, or something else blocks the others"
        )
        return FaultClass.CANNOT_TELL, 0.3, because, "stacks of the ranks that have not entered it"
    because = (
        f"{scene.who} all wait in {scene.operation}{scene.since}; the operations match and none of the ranks has "
        "finished it, so the rank that blocks it cannot be identified"
    )
    settle = "NCCL RAS or Inspector, or GPU and link counters of these ranks; or the missing dumps"
    return FaultClass.CANNOT_TELL, 0.3, because, settle


def _made(
    job: Job,
    cause: Cause,
    ranks: Sequence[int],
    verdict: Verdict,
    since: float | None,
    num_waiting: int,
    place: SynchronizationPoint,
) -> Finding:
    fault, confidence, because, settle = verdict
    values = {
        "num_waiting": float(num_waiting),
        "num_members": float(len(place.members)),
        "sequence_number": float(place.frontier),
        "num_without_dump": float(len(job.absent)),
    }
    if since is not None:
        values["waited_seconds"] = max(0.0, job.written_at - since)
    missing = f"; no dump of {ranks_text(job.absent)}" if job.absent and cause is not Cause.NO_DUMP else ""
    text = f"{place.name}, sequence number {place.frontier}: {str(cause).replace('_', ' ')}{missing}"
    evidence = [Evidence(kind=str(cause), text=text, values=values)]
    return Finding(
        detector=DETECTOR,
        suspects=job.suspects(ranks),
        fault_class=fault,
        onset=min(since, job.written_at) if since is not None else job.written_at,
        detected_at=job.written_at,
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
    since = place.seats[rank].since
    because = (
        f"rank {rank} waits in {_operation_text(job, place)}, and its dump is the only one of {len(job.absent) + 1} "
        "ranks, so the rank that blocks it cannot be identified"
    )
    settle = "dumps of the other ranks, taken while it waits"
    return [_made(job, Cause.INSIDE, (), (FaultClass.CANNOT_TELL, 0.2, because, settle), since, 1, place)]


def missing_dumps(job: Job) -> list[Finding]:
    """No rank waits, but a rank has no dump: it may have died, or its file was not collected."""
    if not job.absent or len(job.absent) > len(job.dumps):
        return []
    because = (
        f"{ranks_text(job.absent)} left no dump; none of the {count_text(len(job.dumps), 'other rank')} waits for "
        f"anything: dead, or the file was not collected"
    )
    place = SynchronizationPoint(("-", -1, -1, -1), "", tuple(sorted({*job.dumps, *job.absent})), True)
    settle = f"whether {ranks_text(job.absent)} is alive, or its dump"
    named = job.absent if len(job.absent) <= NUM_SUSPECTS_OF_A_TIE else ()
    return [_made(job, Cause.NO_DUMP, named, (FaultClass.CANNOT_TELL, 0.4, because, settle), None, 0, place)]


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


def _elsewhere(job: Job, ranks: Sequence[int], place: SynchronizationPoint) -> str:
    others = [p for p in job.places.values() if p is not place and set(p.waiting) & set(ranks) and p.frontier > 0]
    return ", ".join(_operation_text(job, p) for p in others[:2]) or "?"


def _is_gloo(job: Job, place: SynchronizationPoint) -> bool:
    for rank in place.seats:
        for operation in operations_at(job, rank, place.key, place.frontier):
            return operation.backend == GLOO
    return False
