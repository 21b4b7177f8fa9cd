"""Analysis of collected evidence: the detectors of `rolecall diagnose` over the files of one incident.

Findings name processes as the live detectors do, so that they can refine a current diagnosis. A missing dump is not
evidence against its rank: its agent may have been too slow, or was not queried.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.errors import UnreadableInput
from rolecall.core.faults import EvidenceKind, FaultClass
from rolecall.core.text import node_text
from rolecall.detector.artifacts.flight_recorder import diagnosis as flight_recorder
from rolecall.detector.artifacts.flight_recorder import dumps as flight_dumps
from rolecall.detector.artifacts.kernel_log import diagnosis as kernel_findings
from rolecall.detector.artifacts.kernel_log import logs as kernel_logs
from rolecall.detector.artifacts.kernel_log.logs import KernelLogFact
from rolecall.detector.artifacts.nccl import ras_status as nccl_status
from rolecall.detector.artifacts.stacks import diagnosis as stacks
from rolecall.detector.artifacts.stacks import dumps as stack_dumps
from rolecall.detector.artifacts.stacks import weight_sync
from rolecall.detector.artifacts.stacks.dumps import StackDump, Topology
from rolecall.detector.artifacts.stacks.positions import Stack, StackActivity, shown, stack_of
from rolecall.detector.base.read_budget import Budget, read_each
from rolecall.formats.kernel_log.messages import OomKill
from rolecall.watch.evidence.requests import process_name

NUM_FRAMES_SHOWN = 6
NUM_KILLS_SHOWN = 4
OF_TWO_CONFIDENCE = 0.7
AT_REST = frozenset({StackActivity.LOCK, StackActivity.STILL, StackActivity.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFile:
    """One file of evidence. `who`: the process that it describes."""

    kind: EvidenceKind
    path: Path
    who: Suspect | None = None
    suspected: bool = False


@dataclass(slots=True)
class EvidenceAnalysis:
    """`statements`: findings of each part, as text. `unread`: files that the detectors cannot read, and why.
    `knows_stopped`: a process was stopped, by a signal or a debugger. `at_rest`: processes whose stack shows neither
    work, input and output nor a wait for other processes."""

    statements: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    knows_stopped: bool = False
    at_rest: set[Suspect] = field(default_factory=set)

    def settling(self, between: Collection[Suspect]) -> list[Finding]:
        """Findings that settle a tie. `between`: processes between two steps, where a job evaluates and writes
        checkpoints; a finding that names one of them counts only if it is at rest."""
        return [
            f
            for f in self.findings
            if f.fault_class.spec.settles_ties and self.at_rest.issuperset(s for s in f.suspects if s in between)
        ]

    def of_a_suspicion(self) -> list[Finding]:
        """Only findings about processes at rest: one that writes a checkpoint also holds the others up. Of two ranks,
        stacks alone cannot tell whether the one that waits does so for the other; here nothing moves."""
        resting = [f for f in self.findings if f.suspects and self.at_rest.issuperset(f.suspects)]
        of_shards = [f for f in self.findings if f.detector == weight_sync.DETECTOR]
        if any(f.fault_class is FaultClass.HANG for f in of_shards):
            return of_shards  # it knows more than the stacks of one role
        return [*of_shards, *(f for f in resting if f.fault_class.spec.settles_ties)] + [
            replace(f, fault_class=FaultClass.HANG, confidence=OF_TWO_CONFIDENCE)
            for f in resting
            if f.fault_class is FaultClass.CANNOT_TELL and len(f.suspects) == 1 and f.detector == stacks.DETECTOR
        ]


def analyse_evidence(
    files: Sequence[EvidenceFile],
    asked: Sequence[Suspect] = (),
    ours: Collection[tuple[str, int]] = (),
) -> EvidenceAnalysis:
    """Never raises UnreadableInput: external files may contain anything. Where a process is known to be stopped, no
    finding says that the culprit is not known. `asked`: processes whose stacks were asked for. `ours`: (node, PID) of
    the job's processes, also of those that have ended; empty: not known."""
    analysis = EvidenceAnalysis()
    by_kind = {kind: [f for f in files if f.kind is kind] for kind in EvidenceKind}
    parts: tuple[tuple[EvidenceKind, Callable[[Sequence[EvidenceFile], EvidenceAnalysis], None]], ...] = (
        (EvidenceKind.STACKS, _stacks),
        (EvidenceKind.FLIGHT, _flight),
        (EvidenceKind.NCCL, _nccl),
        (EvidenceKind.KERNEL, partial(_kernel, ours=frozenset(ours))),
    )
    for kind, part in parts:
        if by_kind[kind]:
            try:
                part(by_kind[kind], analysis)
            except UnreadableInput as e:
                analysis.unread.append(_unread(e))
    _weight_sync([f for f in files if f.kind is EvidenceKind.STACKS], asked, analysis)
    if analysis.knows_stopped:
        analysis.findings = [f for f in analysis.findings if f.fault_class is not FaultClass.CANNOT_TELL]
    return analysis


def _unread(error: UnreadableInput) -> str:
    return f"{Path(error.where).name}: {error.reason}"


def _stacks(files: Sequence[EvidenceFile], analysis: EvidenceAnalysis) -> None:
    dumps, owners = list[StackDump](), dict[tuple[str, int | None], Suspect]()
    for file in files:
        try:
            dump = stack_dumps.read(file.path)
        except UnreadableInput as e:
            analysis.unread.append(_unread(e))
            continue
        assert file.who is not None
        dumps.append(dump)
        analysis.knows_stopped |= dump.is_stopped
        owners[dump.replica, dump.rank] = file.who
        stack = stack_of(dump)
        if stack.doing in AT_REST:
            analysis.at_rest.add(file.who)
        peer = "" if file.suspected else ", a peer,"
        analysis.statements.append(f"stack: {process_name(file.who)}{peer} {_told(stack)}")
        for engine in dump.engines:
            told = _told(stack_of(engine.dump)) if engine.dump is not None else "is not known"
            analysis.statements.append(f"stack: {process_name(file.who)} ({engine.title}, pid {engine.pid}) {told}")
    for found in stacks.diagnose(dumps) if dumps else ():
        analysis.findings.append(_renamed(found, lambda s: owners.get((s.replica, s.rank))))


def _told(stack: Stack) -> str:
    frames = " < ".join(shown(f) for f in stack.frames[:NUM_FRAMES_SHOWN])
    held = f"; another thread holds the GIL: {stack.gil_holder}" if stack.gil_holder else ""
    return f"{stack.doing}: {frames}{held}"


def _weight_sync(files: Sequence[EvidenceFile], asked: Sequence[Suspect], analysis: EvidenceAnalysis) -> None:
    """Stacks of several roles, or of processes with engines of their own: the shards of a weight transfer."""
    seen: dict[Suspect, list[weight_sync.Shard]] = {}
    has_engines = False
    for file in files:
        try:
            dump = stack_dumps.read(file.path)
        except UnreadableInput:
            continue  # told already
        assert file.who is not None
        seen[file.who] = weight_sync.shards_of(file.who, dump)
        has_engines |= bool(dump.engines)
    if not has_engines and len({f.who.role for f in files if f.who is not None}) < 2:
        return
    unseen = [weight_sync.Shard(who, None) for who in dict.fromkeys(asked) if who not in seen]
    found = weight_sync.diagnose([*chain.from_iterable(seen.values()), *unseen])
    analysis.findings += [found] if found is not None else []


def _flight(files: Sequence[EvidenceFile], analysis: EvidenceAnalysis) -> None:
    dumps, unreadable = flight_dumps.read_many([f.path for f in files], num_processes=1)
    analysis.unread += map(_unread, unreadable)
    if not dumps:
        return
    by_path = {str(f.path): f.who for f in files}
    owners = {d.rank: who for d in dumps if (who := by_path[d.path]) is not None}
    roles = {who.role for who in owners.values()}
    topology = Topology(
        role=roles.pop() if len(roles) == 1 else "",
        nodes={rank: str(who.node) for rank, who in owners.items()},
        replicas={rank: who.replica for rank, who in owners.items()},
    )
    analysis.statements.append(flight_recorder.summary(dumps))
    for found in flight_recorder.diagnose(dumps, topology=topology):
        if all(s.rank in owners for s in found.suspects):
            analysis.findings.append(_renamed(found, lambda s: None if s.rank is None else owners.get(s.rank)))


def _nccl(files: Sequence[EvidenceFile], analysis: EvidenceAnalysis) -> None:
    polls = [poll for file in files for poll in nccl_status.read(file.path)]
    findings, remarks = nccl_status.diagnose(polls)
    analysis.statements += [f"NCCL RAS: {nccl_status.summary(polls)}", *(f"NCCL RAS: {text}" for text in remarks)]
    analysis.findings += findings


def _kernel(files: Sequence[EvidenceFile], analysis: EvidenceAnalysis, ours: frozenset[tuple[str, int]]) -> None:
    read = read_each([f.path for f in files], (), Budget(), kernel_logs.read, kernel_logs.kept_bytes)
    analysis.unread += map(_unread, (*read.unreadable, *((read.stopped,) if read.stopped else ())))
    logs = read.items
    analysis.statements.append(f"kernel: {kernel_findings.summary(logs)}")
    if ours:
        foreign = [s for log in logs for s in log.seen if _is_foreign_kill(s, ours)]
        for log in logs:
            log.seen = [s for s in log.seen if s not in foreign]
        analysis.statements += _foreign_kills(foreign)
    analysis.findings += kernel_findings.diagnose(logs)


def _is_foreign_kill(seen: KernelLogFact, ours: frozenset[tuple[str, int]]) -> bool:
    """The kernel killed a process for its memory that is not one of the job's."""
    if not isinstance(seen.fact, OomKill):
        return False
    nodes = {node for node, _ in ours}
    places = {seen.node} if seen.node in nodes else nodes
    return not any((node, seen.fact.pid) in ours for node in places)


def _foreign_kills(seen: Sequence[KernelLogFact]) -> list[str]:
    """No evidence of the job's fault, but memory may have been short for it, too."""
    told = []
    for in_cgroup in (False, True):
        kills = [(s, s.fact) for s in seen if isinstance(s.fact, OomKill) and s.fact.of_cgroup is in_cgroup]
        if kills:
            who = ", ".join(f"{fact.name} ({fact.pid})" for _, fact in kills[:NUM_KILLS_SHOWN])
            more = f" and {len(kills) - NUM_KILLS_SHOWN} more" if len(kills) > NUM_KILLS_SHOWN else ""
            nodes = ", ".join(dict.fromkeys(node_text(s.node) for s, _ in kills))
            why = "the limit of their own cgroup was reached" if in_cgroup else "the whole host was short of memory"
            told.append(f"kernel: on {nodes} it killed {who}{more}, which are no ranks of this job: {why}")
    return told


def _renamed(found: Finding, of: Callable[[Suspect], Suspect | None]) -> Finding:
    """The finding with its suspects named as by the live detectors, process included."""
    return replace(found, suspects=tuple(of(s) or s for s in found.suspects))
