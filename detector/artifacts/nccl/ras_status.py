"""Localizes the ranks that block a job's collectives, from NCCL RAS status reports (`ncclras`, or `VERBOSE STATUS`).

Text and JSON are read. Checked in this order: ranks that RAS considers dead or cannot reach; ranks with a local error
(a remote error is reported by a victim); ranks that launched a different collective than their peers (a bug in the
code); ranks that are behind in a communicator without further launches. A rank that is behind in one communicator and
waits in another is a victim of the latter.

RAS counts LAUNCHED operations, so the cause of a rank that is behind is on its host side. A single report names no
rank, because healthy ranks are never exactly in step; nor do those of several nodes at one moment. Two reports at least
MOVED_SECONDS apart, or three in a file without time stamps, show whether ranks advance. Undecided cases become remarks:
in a hang inside a collective that all ranks launched, no rank is behind.

The time of a report is that of its file: RAS writes local time without a zone. Of several reports with time stamps
(`ncclras -m`, or a loop that prints the date), the newest has the time of the file, and the others that much less.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.errors import UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.text import counted
from rolecall.detector.artifacts.stacks.dumps import Topology
from rolecall.detector.base.read_budget import Check, head_of, no_check
from rolecall.formats.nccl.ras import (
    Communicator,
    CommunicatorMember,
    Condition,
    MalformedRasStatus,
    NcclResult,
    RasStatus,
    behind,
    ranks_text,
    statuses,
)

DETECTOR = "nccl_ras"
FILE_BYTES_MAX = 32 << 20
HEAD_BYTES = 8192
MOVED_SECONDS = 10.0
"""Minimum time between two reports without a launch; a shorter time is within one step of a large model."""
NUM_POLLS_MIN = 3
"""This many reports in one file without time stamps, whose times are unknown, count as `MOVED_SECONDS`."""
NUM_SUSPECTS_MAX = 64
CONFIDENCE_DEAD, CONFIDENCE_MISSING, CONFIDENCE_FAILED, CONFIDENCE_CODE = 0.8, 0.6, 0.7, 0.6
CONFIDENCE_BEHIND, CONFIDENCE_BEHIND_UNTIMED = 0.75, 0.6

_CLASSES = {
    NcclResult.CUDA: FaultClass.GPU,
    NcclResult.SYSTEM: FaultClass.NETWORK,
    NcclResult.ARGUMENT: FaultClass.USER_CODE,
    NcclResult.USAGE: FaultClass.USER_CODE,
}

SYMMETRIC = (
    "cannot tell: all ranks launched equally many collectives, and RAS counts only launches: a hang inside one that "
    "all have launched looks like a healthy or an idle job. Flight Recorder dumps or stacks of all ranks would show it"
)

NO_COUNTS = (
    "cannot tell: no report has the number of launched collectives (text omits it while all are equal): "
    "a hang inside one looks the same; Flight Recorder dumps or stacks of all ranks would settle it"
)
NO_COMMUNICATOR = (
    "cannot tell: no report lists a communicator: the job has not created one yet, or has ended; a report while it "
    "trains would settle it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """One status report. `at`: wall seconds, from its file."""

    path: str
    at: float
    status: RasStatus


def is_status(path: Path) -> bool:
    """Whether the file begins like a RAS status report. Raises OSError."""
    head = head_of(path, HEAD_BYTES)
    if b'"communicators"' in head and (b'"nccl_version"' in head or b'"missing_ranks' in head):
        return True
    return b"Job summary" in head and b"Communicators..." in head


def read(path: Path, check: Check = no_check) -> list[Poll]:
    """`check` is called during the work. Raises UnreadableInput: too large, cut short, not a RAS status report."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        at = path.stat().st_mtime
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=e.strerror or str(e)) from None
    if len(raw) > FILE_BYTES_MAX:
        raise UnreadableInput(where=str(path), reason=f"RAS reports of more than {FILE_BYTES_MAX:,} bytes are not read")
    try:
        reports = statuses(raw, check)
    except MalformedRasStatus as e:
        raise UnreadableInput(where=str(path), reason=f"not a report of NCCL RAS: {e}") from None
    # The newest time stamp is the time at which the file was written: their zone is unknown.
    newest = max((s.stamp for s in reports if s.stamp is not None), default=None)
    ages = [0.0 if newest is None or s.stamp is None else newest - s.stamp for s in reports]
    return [Poll(path=str(path), at=at - age, status=s) for age, s in zip(ages, reports, strict=True)]


def kept_bytes(polls: Sequence[Poll]) -> int:
    """Memory of these reports."""
    ranks = sum(len(c.ranks) + len(c.missing) for p in polls for c in p.status.communicators)
    return 1024 * len(polls) + 700 * ranks


def summary(polls: Sequence[Poll]) -> str:
    """One sentence that describes the input."""
    with_counts = sum(p.status.has_counts for p in polls)
    newest = max(polls, key=lambda p: p.at).status if polls else None
    if newest is None:
        return "no NCCL RAS report"
    ranks = max((c.size for c in newest.communicators), default=0)
    return (
        f"{counted(len(polls), 'NCCL RAS report')}, {with_counts} with counts; the newest of "
        f"{counted(newest.num_communicators, 'communicator')}{f', the largest of {ranks} ranks' if ranks else ''}"
    )


def diagnose(polls: Sequence[Poll], *, topology: Topology | None = None) -> tuple[list[Finding], tuple[str, ...]]:
    """(findings, remarks: what was repaired, skipped, or is undecided)."""
    if not polls:
        return [], ()
    ordered = sorted(polls, key=lambda p: p.at)  # stable: keeps the order within a file
    case = _RasAnalysis(ordered, topology)
    reported = [*case.lost(), *case.failed(), *case.apart()]
    if not reported and not any(p.status.has_counts for p in polls):
        case.remarks.append(NO_COUNTS if any(p.status.num_communicators for p in polls) else NO_COMMUNICATOR)
    return reported, tuple(dict.fromkeys(case.remarks))


@dataclass(frozen=True, slots=True)
class StalledCommunicatorPolls:
    """A communicator without a launch in the last `num_polls` reports, over `seconds`. `behind`: by collective."""

    communicator: Communicator
    num_polls: int
    seconds: float
    behind: dict[str, tuple[CommunicatorMember, ...]]

    def since(self) -> str:
        over = f" over {self.seconds:.0f} s" if self.seconds >= 1 else ""
        return f"no rank launched anything in {self.num_polls} reports{over}"


def _members(c: Communicator) -> Iterable[CommunicatorMember]:
    return (*(r.member for r in c.ranks), *(m.member for m in c.missing))


def _whole(polls: Sequence[Poll]) -> Communicator | None:
    """The communicator that holds all processes of the job, whose ranks are the global ranks; None if there is none."""
    communicators = [c for p in polls for c in p.status.communicators]
    largest = max(communicators, key=lambda c: len(c.ranks) + len(c.missing), default=None)
    if largest is None or any(p.status.form == "text" and p.status.num_communicators > 1 for p in polls):
        return None
    held = {m.process for m in _members(largest)}
    if any(m.process not in held for c in communicators for m in _members(c)):
        return None
    return largest


class _RasAnalysis:
    def __init__(self, polls: Sequence[Poll], topology: Topology | None) -> None:
        self.polls, self.newest, self.topology = polls, polls[-1], topology or Topology()
        self.remarks: list[str] = []
        self.whole = _whole(polls)
        self.world: dict[tuple[str, int | None, int | None], int] = {}
        if self.whole is not None:
            self.world = {m.process: m.rank for m in _members(self.whole)}
        for poll in polls:
            if poll.status.repaired:
                self.remarks.append(f"{poll.path}: its JSON lacks commas (NCCL 2.28.9 does that) and was repaired")
            if poll.status.communicators and poll.status.form == "json" and not poll.status.has_counts:
                self.remarks.append(
                    f"{poll.path}: all counts are 0, as in a third of the reports of healthy jobs: "
                    "not counted as a stall"
                )

    def _suspects(self, c: Communicator, members: Iterable[CommunicatorMember]) -> list[Suspect]:
        """In the communicator that holds all processes, ranks are global."""
        whole = self.whole is not None and c.hash == self.whole.hash
        found = []
        for m in members:
            rank = m.rank if whole else None
            rank = self.world.get(m.process, rank) if m.host else rank
            found.append(self.topology.suspect(rank, m.host or f"rank-{m.rank}", m.gpu))
        return found

    def _finding(
        self,
        suspects: Iterable[Suspect],
        fault_class: FaultClass,
        confidence: float,
        because: str,
        evidence: tuple[Evidence, ...] = (),
        onset: float | None = None,
    ) -> Finding:
        unique = sorted(set(suspects), key=lambda s: (s.rank is None, s.rank or 0, s.node, s.gpu or 0))
        return Finding(
            detector=DETECTOR,
            suspects=tuple(unique[:NUM_SUSPECTS_MAX]),
            fault_class=fault_class,
            onset=self.newest.at if onset is None else onset,
            detected_at=self.newest.at,
            confidence=confidence,
            because=because,
            evidence=evidence,
        )

    # --- dead and missing

    def lost(self) -> list[Finding]:
        status, found = self.newest.status, list[Finding]()
        dead_processes = {(process.host, process.pid) for process in status.lost if process.dead}
        others = {(process.host, process.pid) for process in status.lost} - dead_processes
        # The first of the reports, up to the newest, that all miss some of the same.
        now = _lost_of(status)
        missing = takewhile(lambda p: now & _lost_of(p.status), reversed(self.polls))
        since = min((p.at for p in missing), default=self.newest.at)
        for dead, fault_class, confidence in (
            (True, FaultClass.CRASH, CONFIDENCE_DEAD),
            (False, FaultClass.HANG, CONFIDENCE_MISSING),
        ):
            suspects, words = list[Suspect](), list[str]()
            # A process that is in both sections is one dead process.
            listed = {(process.host, process.pid): process for process in status.lost if process.dead is dead}
            processes = {key: process for key, process in listed.items() if dead or key not in dead_processes}
            for communicator in status.communicators:
                # A missing rank without its process is one of the listed ones: of the dead if there are no others.
                named = [
                    m.member
                    for m in communicator.missing
                    if (m.unresponsive or m.dead)
                    and (m.dead or (not m.member.host and bool(dead_processes) and not others)) is dead
                ]
                if len(named) == 1 and not named[0].host and len(processes) == 1:
                    # Text of older NCCL versions lists ranks and processes separately.
                    process = next(iter(processes.values()))
                    named = [CommunicatorMember(named[0].rank, process.host, process.pid)]
                for m in named:
                    processes.pop((m.host, m.pid or -1), None)
                if named:
                    suspects += self._suspects(communicator, named)
                    words.append(f"{ranks_text(named)} of communicator {communicator.hash}")
                unnamed = communicator.num_missing - sum(m.unresponsive or m.dead for m in communicator.missing)
                if unnamed > 0:
                    self.remarks.append(
                        f"cannot tell: not named: {counted(unnamed, 'missing rank')} of communicator "
                        f"{communicator.hash}: "
                        "query with VERBOSE"
                    )
            for process in processes.values():
                suspects.append(Suspect(node=NodeId(process.host)))
                words.append(f"process {process.pid} on {process.host} (GPU {process.gpus})")
            if suspects:
                what = (
                    "RAS considers dead (not reached for a minute: exited, stopped or disconnected): "
                    if dead
                    else "does not answer RAS (stopped, hung in a system call, or disconnected): "
                )
                because = what + "; ".join(words[:8])
                found.append(self._finding(suspects, fault_class, confidence, because, onset=since))
        return found

    # --- errors

    def failed(self) -> list[Finding]:
        by_result: dict[NcclResult, list[Suspect]] = {}
        words: dict[NcclResult, list[str]] = {}
        for communicator in self.newest.status.communicators:
            for result in {f.result for f in communicator.failures}:
                members = [f.member for f in communicator.failures if f.result is result]
                by_result.setdefault(result, []).extend(self._suspects(communicator, members))
                words.setdefault(result, []).append(f"{ranks_text(members)} of communicator {communicator.hash}")
        if victims := words.pop(NcclResult.REMOTE, []):
            self.remarks.append(f"victims of another rank (remote error): {'; '.join(victims[:4])}")
        return [
            self._finding(
                by_result[result],
                _CLASSES.get(result, FaultClass.CANNOT_TELL),
                CONFIDENCE_FAILED,
                f"NCCL reports {str(result).lower()}: {'; '.join(reported[:4])}",
            )
            for result, reported in words.items()
        ]

    # --- behind

    def apart(self) -> list[Finding]:
        stuck, together, single = list[StalledCommunicatorPolls](), False, False
        for communicator, same, num_usable in self._histories():
            num_polls, seconds = len(same), same[0].at - same[-1].at
            untimed = Counter(p.path for p in same if p.status.stamp is None)
            still = seconds >= MOVED_SECONDS or max(untimed.values(), default=0) >= NUM_POLLS_MIN
            if not communicator.width:
                if any(len(s.levels) < 2 for s in communicator.spreads):
                    self.remarks.append(
                        f"cannot tell: ranks of communicator {communicator.hash} launched different numbers, and the "
                        "text names none: query with VERBOSE, or for JSON"
                    )
                elif still or num_polls == num_usable:
                    together = True
            elif still:
                stuck.append(StalledCommunicatorPolls(communicator, num_polls, seconds, behind(communicator)))
            elif num_usable == 1 or num_polls > 1:
                single = True
                late = "; ".join(f"{ranks_text(m)} in {name}" for name, m in behind(communicator).items())
                self.remarks.append(
                    f"cannot tell: these ranks of communicator {communicator.hash} are behind by "
                    f"{counted(communicator.width, 'collective')}: {late or 'more than half of its ranks'}; "
                    "in RAS reports of one moment, ranks of a healthy job differ, too"
                )
        if together and not stuck:
            self.remarks.append(SYMMETRIC)
        if single:
            self.remarks.append("query RAS again after some seconds: a rank at the same count is stalled")
        return self._judged(stuck)

    def _histories(self) -> Iterable[tuple[Communicator, list[Poll], int]]:
        """(newest with counts, its reports without a change, newest first, number of reports with counts)."""
        reported: dict[str, list[tuple[Poll, Communicator]]] = {}
        for p in self.polls:
            for communicator in p.status.communicators:
                if communicator.has_counts or (
                    p.status.form == "text" and Condition.MISMATCH in communicator.conditions
                ):
                    reported.setdefault(communicator.hash, []).append((p, communicator))
        present = (
            {communicator.hash for communicator in self.newest.status.communicators}
            if self.newest.status.form == "json"
            else set(reported)
        )
        for key, history in reported.items():
            if key not in present:
                continue  # already torn down
            last = history[-1][1]
            standing, same = last.standing(), list[Poll]()
            for poll, communicator in reversed(history):
                if communicator.standing() != standing:
                    break
                same.append(poll)
            yield last, same, len(history)

    def _judged(self, stuck: list[StalledCommunicatorPolls]) -> list[Finding]:
        found = list[Finding]()
        num_waits = Counter[tuple[str, int | None, int | None]]()  # communicators in which a process waits
        for stalled in stuck:
            late = {m.process for members in stalled.behind.values() for m in members}
            num_waits.update(
                {m.process for spread in stalled.communicator.spreads for v in spread.levels[:-1] for m in v.members}
                - late
            )
        for stalled in stuck:
            communicator = stalled.communicator
            if communicator.num_missing:
                self.remarks.append(
                    f"ranks of communicator {communicator.hash} differ and are stalled: they wait for the missing ranks"
                )
                continue
            if (other := self._other_collective(stalled)) is not None:
                found.append(other)
                continue
            # A rank that is behind is not counted for this communicator: all of its waits are elsewhere.
            causes = {
                name: [m for m in members if not num_waits[m.process]] for name, members in stalled.behind.items()
            }
            causes = {name: members for name, members in causes.items() if members}
            if causes:
                found.append(self._behind(stalled, causes))
            elif stalled.behind:
                self.remarks.append(
                    f"the rank that is behind in communicator {communicator.hash} waits in another one and is its "
                    "victim"
                )
            else:
                self.remarks.append(
                    f"cannot tell: {stalled.since()} (communicator {communicator.hash}), and more than half of its "
                    "ranks are behind the others, or they are not named: stacks of all ranks would show it"
                )
        if stuck and not found and all(stalled.behind and not stalled.communicator.num_missing for stalled in stuck):
            suspects = [s for x in stuck for b in x.behind.values() for s in self._suspects(x.communicator, b)]
            because = "ranks wait for each other in different communicators: collectives in different order?"
            found.append(self._finding(suspects, FaultClass.CANNOT_TELL, 0.4, because))
        return found

    def _other_collective(self, stalled: StalledCommunicatorPolls) -> Finding | None:
        """A minority that launched fewer of one collective and more of another than the rest."""
        communicator = stalled.communicator
        low = {name: {m.process for m in members} for name, members in stalled.behind.items()}
        for spread in communicator.spreads:
            first, num_ranks = spread.levels[0], sum(v.num_ranks for v in spread.levels)
            if 2 * first.num_ranks > num_ranks:
                continue
            ahead = {m.process for m in first.members}
            for name, late in low.items():
                if name != spread.collective and ahead and ahead == late:
                    because = (
                        f"{ranks_text(first.members)} launched {spread.collective} where the other ranks of "
                        f"communicator {communicator.hash} launched {name}; {stalled.since()}: "
                        "the ranks run different code"
                    )
                    suspects, levels = self._suspects(communicator, first.members), _levels(communicator)
                    return self._finding(suspects, FaultClass.USER_CODE, CONFIDENCE_CODE, because, levels)
        return None

    def _behind(self, stalled: StalledCommunicatorPolls, causes: dict[str, list[CommunicatorMember]]) -> Finding:
        communicator = stalled.communicator
        words = []
        for name, members in causes.items():
            levels = next(x.levels for x in communicator.spreads if x.collective == name)
            words.append(f"{ranks_text(members)} launched {levels[-1].launched} {name}, others {levels[0].launched}")
        because = (
            f"{'; '.join(words)} in communicator {communicator.hash}, and {stalled.since()}: "
            "not launched, so blocked on the host side (Python, data loader, CPU, or another wait); the others wait"
        )
        suspects = [s for members in causes.values() for s in self._suspects(communicator, members)]
        sure = CONFIDENCE_BEHIND if stalled.seconds >= MOVED_SECONDS else CONFIDENCE_BEHIND_UNTIMED
        return self._finding(
            suspects, FaultClass.HANG, sure, because, _levels(communicator), self.newest.at - stalled.seconds
        )


def _lost_of(status: RasStatus) -> set[tuple[str, int | None]]:
    """Processes, and ranks by communicator, that do not answer or are dead."""
    ranks = {(c.hash, m.member.rank) for c in status.communicators for m in c.missing if m.unresponsive or m.dead}
    return ranks | {(p.host, p.pid) for p in status.lost}


def _levels(communicator: Communicator) -> tuple[Evidence, ...]:
    reported = []
    for spread in communicator.spreads[:8]:
        parts = [f"{counted(v.num_ranks, 'rank')} at {v.launched}" for v in spread.levels[:8]]
        text = f"{spread.collective} of communicator {communicator.hash}: {', '.join(parts)}"
        reported.append(Evidence(kind="nccl_counts", text=text, values={"num_behind": float(spread.width)}))
    return tuple(reported)
