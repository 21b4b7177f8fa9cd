"""A process failed: by the job's own code, or alone, which is a crash.

*User code* (`UserCodeStage`, first): hardware fails in one place; a bug fails wherever the code runs. One fingerprint
(exception type and frames, without values) on every rank of a role, or raised again in the same step by another rank or
by the replacement of the first, indicates a fault of the code or its input. Exceptions caused by another process (lost,
late, fenced) do not count. No process is named, because replacing a machine would not help; `about` (role, exception,
frames) identifies the fault.

*Crash* (`CrashStage`): a process exited without announcing it. An exit by signal is reported at once (the agent's pidfd
reports it within milliseconds). After an exception the stage waits for the same one on peers:
`EXCEPTION_GRACE_SECONDS`, and up to `EXCEPTION_HOLD_SECONDS_MAX` while a peer is still in the step that raised it, or
where the exception only tells of a lost peer. If all do, the first to exit is named with the words that the cause is
not known. So is a rank that SIGABRT ends after it stood still together with peers, beside these: the timeout of a
collective aborts any rank that waits in it. A process that stays alive after an exception counts as crashed once it
finishes no more work while a peer does; at once, after the same wait, if nothing caught the exception: its interpreter
ends, which takes torch seconds, or for ever. Only of jobs that rolecall did not start: its own runtime knows when its
processes end.

A replica is replaced as a whole, so exits of several of its ranks are one finding (`LostRanksStage`). The first suspect
is the rank whose node reported a hardware fault, else the first that exited with an error of its own: connections that
its peers lose are consequences. A rank on another node with an independent fault (hardware, a signal such as SIGSEGV,
the OOM killer) is a second suspect, because the replacement must avoid both nodes. Each further suspect changes the
diagnosis key.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import UNCOUNTED, AgentEvent, AgentEventKind, Phase, ProcessSample
from rolecall.detector.base.findings import EXIT, LOG_FILE
from rolecall.detector.live.monitored_process import UNITS, Key, MonitoredProcess, phase_text
from rolecall.detector.live.processes import MonitoredProcesses, ReceivedException, finding, names, suspect
from rolecall.detector.live.stages.exits.ray_deaths import awaits_word
from rolecall.detector.live.stages.progress.skipped import ABORT_SIGNALS, is_aborted
from rolecall.detector.live.stages.progress.skipped import DETECTOR as SKIPPED
from rolecall.detector.live.stages.progress.stall import AWAITED_SECONDS
from rolecall.detector.live.stages.stage import WORKING_CPUS, Stage, Stall, Tick, phase_deadline

CONSEQUENCES = frozenset(
    (
        # rolecall: raised by a survivor when a peer or lease holder is lost, fenced or late
        *("PeerLost", "DeadlineExceeded", "StaleIncarnation", "ProofMismatch", "WireError"),
        *("ActorDiedError", "ActorUnavailableError", "RayActorError", "GetTimeoutError", "ObjectLostError"),  # Ray
        # Python and PyTorch: broken connections and timeouts
        *("BrokenPipeError", "ConnectionAbortedError", "ConnectionError", "ConnectionRefusedError"),
        *(
            "ConnectionResetError",
            "TimeoutError",
            "DistError",
            "DistBackendError",
            "DistNetworkError",
            "DistStoreError",
        ),
        *("KeyboardInterrupt", "SystemExit"),  # intended: stopped by an operator or the supervisor
    )
)
CONSEQUENCE_TEXT = re.compile(
    r"connection (was |has been )?(closed|reset|refused|aborted|lost)|broken pipe|socket closed|"
    r"remote (worker|process|rank|peer)|nccl(remote|system|internal)error|nccl communicator was aborted|"
    r"gloo.*(timed? ?out|timeout)|(wait|collective|store|barrier|socket).{0,40}(timed? ?out|timeout)",
    re.IGNORECASE,
)
"""Messages of the errors that gloo, NCCL and TCPStore raise at a rank that lost a peer; their type is RuntimeError."""
HARDWARE_TEXT = re.compile(
    r"(CUDA|HIP) error: (?!device-side assert|out of memory|invalid)|uncorrectable (ECC|NVLink)|"
    r"unspecified launch failure|CUDNN_STATUS_(INTERNAL|EXECUTION)|input/output error|bus error|"
    r"no space left on device|disk quota exceeded|the journal cannot be used now",
    re.IGNORECASE,
)
"""Messages that a faulty GPU, link or disk, or a full disk, causes as well as a bug: on several ranks they do not prove
a bug."""


def last_exception(fleet: MonitoredProcesses, subject: MonitoredProcess) -> ReceivedException | None:
    for seen in reversed(fleet.exceptions):
        e = seen.event
        if (e.replica, e.rank, e.incarnation) == subject.key and e.process in (None, subject.process):
            return seen
    return None


def exception_text(event: AgentEvent) -> str:
    d = event.detail
    where = f" at {d['where']}" if d.get("where") else ""
    return f"{d.get('type', 'an exception')}: {d.get('message', '')[:200]}{where}"


def is_consequence(event: AgentEvent) -> bool:
    """Whether it only tells that another process was lost, late or fenced."""
    kind = event.detail.get("type", "").rpartition(".")[2]
    raised_by_libraries = kind in ("RuntimeError", "OSError", "Exception")
    return kind in CONSEQUENCES or (
        raised_by_libraries and CONSEQUENCE_TEXT.search(event.detail.get("message", "")) is not None
    )


def blames_code(seen: ReceivedException) -> bool:
    """Whether the same exception elsewhere proves a fault of the code or its input."""
    return not is_consequence(seen.event) and HARDWARE_TEXT.search(seen.event.detail.get("message", "")) is None


def _of_an_earlier_job(fleet: MonitoredProcesses, event: AgentEvent) -> bool:
    """Processes that rolecall did not start are of the same job while they live."""
    if not fleet.foreign and event.incarnation != UNCOUNTED:
        return False
    return fleet.is_succeeded(event) or event.incarnation < fleet.newest.get(event.replica, UNCOUNTED)


def step_of(seen: ReceivedException) -> int:
    """The optimizer step in which it was raised; -1 if unknown."""
    try:
        return int(seen.event.detail.get("step", "-1"))
    except ValueError:
        return -1


RANKS_MIN = 2
"""Minimum role size for the rule 'on all ranks'; for a single process only a repetition in the same step counts."""
REMEMBER_SECONDS = 3600.0
"""Exceptions further apart are separate failures, even in the same step of a stuck job."""
ALL_RANKS_SECONDS = 60.0
"""Exceptions of the ranks of a role within this time count as simultaneous: a step may take this long."""


class UserCodeStage(Stage):
    name = "user_code"
    suppresses = frozenset({"dependent_stall", "nccl_ras"})

    def evaluate(self, tick: Tick) -> list[Finding]:
        fleet, now, found = tick.fleet, tick.now, list[Finding]()
        by_print: dict[tuple[str, str], list[ReceivedException]] = defaultdict(list)
        for seen in fleet.exceptions:
            fingerprint = seen.event.detail.get("fingerprint", "")
            if fleet.is_past(seen.event) or _of_an_earlier_job(fleet, seen.event):
                continue
            if fingerprint and blames_code(seen) and now - seen.received_wall <= REMEMBER_SECONDS:
                by_print[(seen.event.role, fingerprint)].append(seen)
        for (role, fingerprint), seen_list in by_print.items():
            seen_list.sort(key=lambda seen: seen.received_wall)
            why = _why(fleet, role, seen_list, tick.expected_roles)
            # Whether the role has since progressed beyond the step in which it failed.
            last = max(step_of(seen) for seen in seen_list)
            recovered = any(
                subject.sample is not None
                and subject.worked_wall > seen_list[-1].received_wall
                and subject.phase != Phase.START
                and (last < 0 or subject.sample.step > last)
                for subject in fleet.roster.of_role(role).values()
            )
            if why is not None and not recovered:
                tick.explained.add(fingerprint)
                found.append(_code_finding(fleet, role, fingerprint, seen_list, why, now))
        return found


def _why(
    fleet: MonitoredProcesses, role: str, seen_list: list[ReceivedException], expected_roles: Mapping[str, int]
) -> str | None:
    """Reason why these reports of one fingerprint indicate user code, or None."""
    newest = seen_list[-1].received_wall
    recent = [s for s in seen_list if newest - s.received_wall <= ALL_RANKS_SECONDS]
    together = {(s.event.replica, s.event.rank) for s in recent}
    ranks = {(s.replica, s.rank) for s in fleet.roster.of_role(role).values()} | together
    num_ranks = max(len(ranks), expected_roles.get(role, 0))
    if num_ranks >= RANKS_MIN and len(together) >= num_ranks:
        return f"all {num_ranks} ranks of role {role} raised it"
    by_step: dict[int, set[tuple[str, int, int]]] = defaultdict(set)
    for seen in seen_list:
        step = step_of(seen)
        if step >= 0 or seen in recent:  # without a step, only simultaneous exceptions concern the same work
            by_step[step].add((seen.event.replica, seen.event.rank, seen.event.incarnation))
    for step, raisers in by_step.items():
        if len(raisers) > 1:
            who = ", ".join(dict.fromkeys(_raiser(fleet, *raiser) for raiser in sorted(raisers)))
            when = f"in step {step}" if step >= 0 else f"within {ALL_RANKS_SECONDS:.0f} s"
            return f"it was raised {len(raisers)} times {when} ({who})"
    return None


def _raiser(fleet: MonitoredProcesses, replica: str, rank: int, incarnation: int) -> str:
    """Processes of a job that rolecall did not start differ by rank."""
    foreign = fleet.foreign or incarnation == UNCOUNTED
    return f"{replica} rank {rank}" if foreign else f"{replica}#{incarnation}"


def _code_finding(
    fleet: MonitoredProcesses, role: str, fingerprint: str, seen_list: list[ReceivedException], why: str, now: float
) -> Finding:
    first = seen_list[0].event
    text = exception_text(first)
    kind = first.detail.get("type", "").rpartition(".")[2]
    return finding(
        "user_code",
        [],
        FaultClass.USER_CODE,
        onset=first.wall_at + fleet.offsets.get(first.node, 0.0),
        now=now,
        confidence=0.95,
        because=f"role {role} fails in user code, not in hardware: {why}: {text}",
        evidence=tuple(
            Evidence(
                kind=AgentEventKind.EXCEPTION,
                text=f"{_raiser(fleet, s.event.replica, s.event.rank, s.event.incarnation)} in step "
                f"{s.event.detail.get('step', '?')}: {exception_text(s.event)}",
            )
            for s in seen_list[-8:]
        ),
        about=f"{role}:{kind}:{fingerprint}",
    )


EXCEPTION_GRACE_SECONDS, EXCEPTION_GRACE_SECONDS_MIN = 2.0, 0.4
"""How long to wait for the same exception on peers: ranks of a role reach a line within one step of each other. Less in
a job whose steps are shorter (`_grace_seconds`)."""
EXCEPTION_HOLD_SECONDS_MAX = 5.0
"""Time for peers to finish the step in which one of them failed: detect the loss, rebuild the group (2.7 s measured on
CPU) and restart the step. Recovery waits slightly longer (`recovery.triage.LOST_GRACE_SECONDS`) before it repairs a
loss without a diagnosis."""
EXCEPTION_ALIVE_SECONDS = 5.0
"""A process that has finished no work for this long after an exception, while a peer has, counts as crashed."""
OOM_SECONDS = 5.0
"""A SIGKILL this close to an increase of the host's OOM kill count is attributed to the OOM killer."""
EXCEPTION_UNDECIDED_SECONDS = 0.6
"""At least so long an uncaught exception waits for peers in the same step, where steps are short: ranks of a busy
machine come to a line one after another."""
ABORT_SECONDS, ABORT_SECONDS_MAX = 0.7, 3.0
"""How long an exit on SIGABRT waits for the exits of peers; at most, while some live and were not sampled since."""
SIGKILL_NAMES = ("9", "SIGKILL", "")
UNCAUGHT = "uncaught"
"""Detail of an exception (reporter/page_layout.py) and value of its evidence: nothing caught it, its process ends."""


class CrashStage(Stage):
    """Runs after `user_code`: exceptions that it explains are not reported as crashes."""

    name = "crash"
    suppresses = frozenset({"dependent_stall", "nccl_ras"})

    def evaluate(self, tick: Tick) -> list[Finding]:
        fleet, now, found = tick.fleet, tick.now, list[Finding]()
        standing, named = _Standing(tick), set[str]()
        skipped = {s.replica for f in tick.findings if f.detector == SKIPPED for s in f.suspects}
        raisers = {(e.replica, e.rank, e.incarnation) for e in (seen.event for seen in fleet.exceptions)}
        if not raisers and not fleet.roster.gone:
            return []
        for subject in fleet.current():
            if not subject.gone and subject.key not in raisers:
                continue
            if subject.exit_event is not None and fleet.is_past(subject.exit_event):
                continue
            if subject.finished or not subject.reports:  # uninstrumented.py covers processes without a state page
                continue
            raised = last_exception(fleet, subject)
            if raised is not None and raised.event.detail.get("fingerprint", "") in tick.explained:
                continue
            if subject.replica in skipped or _aborted_just_now(fleet, subject, now) or awaits_word(subject, now):
                continue
            if subject.gone:
                if raised is None or not _held_for_peers(fleet, subject, raised, now):
                    aborted = subject.foreign and is_aborted(subject)
                    stood = standing.beside(subject) if aborted else _Stood()
                    gone = _gone(fleet, subject, raised, now, stood.text)
                    if stood.text and subject.replica not in named:
                        named.add(subject.replica)
                        others = (suspect(p) for p in stood.ranks.values() if p.replica == subject.replica)
                        gone = replace(gone, suspects=tuple(dict.fromkeys((*gone.suspects, *others))))
                    found.append(gone)
            elif raised is not None and is_ending(subject, raised):
                if not _held_for_peers(fleet, subject, raised, now):
                    found.append(_ending(subject, raised, now))
            elif raised is not None and now - raised.received_wall >= EXCEPTION_ALIVE_SECONDS:
                idle = subject.worked <= raised.worked
                if idle and any(p.worked_wall > raised.received_wall for p in fleet.peers(subject)):
                    found.append(_given_up(subject, raised, now))
        return found


@dataclass(frozen=True, slots=True)
class _Stood:
    """Processes of a group that stand still, or stood still when they ended, for longer than they may. `text`: their
    names."""

    ranks: Mapping[Key, MonitoredProcess] = field(default_factory=dict)
    text: str = ""


class _Standing:
    """By group; made where it is needed."""

    def __init__(self, tick: Tick) -> None:
        self._tick = tick
        self._by_group: dict[str, _Stood] = {}

    def beside(self, subject: MonitoredProcess) -> _Stood:
        """Those that stood still together with this one, itself included, as in a collective that one of them does not
        enter: its timeout aborts any of the others first. Empty if this one did not, or alone."""
        stood = self._by_group.get(subject.group)
        if stood is None:
            members = [subject, *self._tick.fleet.peers(subject)]
            ranks = {s.key: s for s in members if self._is_overdue(s)}
            stood = self._by_group[subject.group] = _Stood(ranks, names(ranks.values()))
        return stood if subject.key in stood.ranks and len(stood.ranks) > 1 else _Stood()

    def _is_overdue(self, subject: MonitoredProcess) -> bool:
        """Between two steps, where no progress is due: without work for as long as others may wait for it there."""
        clocks = subject.stall
        if subject.phase == Phase.WAIT:
            return clocks.wall >= AWAITED_SECONDS and clocks.cpu < WORKING_CPUS * clocks.effective
        deadline = phase_deadline(self._tick.fleet, subject, self._tick.config)
        return subject.progress_due and Stall(subject, deadline, clocks, False).ripe


def _aborted_just_now(fleet: MonitoredProcesses, subject: MonitoredProcess, now: float) -> bool:
    """Whether it ended on SIGABRT, as a library does at a rank whose peer has left a collective out, and the state of
    that peer may not be known yet."""
    signal = subject.exit_event.detail.get("signal", "") if subject.exit_event is not None else ""
    if not subject.foreign or signal not in ABORT_SIGNALS:
        return False
    peers = (p for p in fleet.peers(subject) if p.replica == subject.replica and not p.gone and p.sample is not None)
    known = all(p.sample.wall_at + p.offset_seconds >= subject.exit_wall for p in peers)  # type: ignore[union-attr]
    return now - subject.exit_wall < (ABORT_SECONDS if known else ABORT_SECONDS_MAX)


def is_ending(subject: MonitoredProcess, raised: ReceivedException) -> bool:
    """Whether the process, alive, ends by this exception of its own, which nothing caught. What only tells of a lost
    peer waits for the exit. A thread may go on with the work."""
    if not subject.foreign or not raised.event.detail.get(UNCAUGHT) or is_consequence(raised.event):
        return False
    return subject.sample is None or subject.sample.step <= step_of(raised)


def _held_for_peers(
    fleet: MonitoredProcesses, subject: MonitoredProcess, raised: ReceivedException, now: float
) -> bool:
    waited = now - raised.received_wall
    grace = _grace_seconds(fleet, subject)
    if waited < grace:
        return True
    if waited >= EXCEPTION_HOLD_SECONDS_MAX:
        return False
    if is_consequence(raised.event):
        return True  # the process that was lost is named, if it is seen
    if not blames_code(raised):
        return False
    if is_ending(subject, raised) and grace < EXCEPTION_GRACE_SECONDS and waited >= EXCEPTION_UNDECIDED_SECONDS:
        return False  # whoever has not come to this line in two steps waits for this process
    return any(_undecided(fleet, peer, raised) for peer in fleet.peers(subject))


def _grace_seconds(fleet: MonitoredProcesses, subject: MonitoredProcess) -> float:
    """Two usual steps of a job that names no phases, each as long as both of its phases, or as the only one that it
    shows. Samples make short phases longer than they are: what a process measured of its own work tells them, too, of
    which a step is taken to be at most twice as long."""
    usual = [fleet.gaps.median(subject.group, phase) for phase in (Phase.WAIT, Phase.STEP)]
    if not subject.foreign or not any(usual):
        return EXCEPTION_GRACE_SECONDS
    own = fleet.gaps.median(subject.group, UNITS)
    steps = min(2 * sum(usual), 4 * own) if own else 2 * sum(usual)
    return min(EXCEPTION_GRACE_SECONDS, max(EXCEPTION_GRACE_SECONDS_MIN, steps))


def _undecided(fleet: MonitoredProcesses, peer: MonitoredProcess, raised: ReceivedException) -> bool:
    """Whether this peer may still reach the line that raised."""
    if peer.gone or peer.finished or peer.sample is None or peer.phase == Phase.START:
        return False
    last = last_exception(fleet, peer)
    has_failed = last is not None and last.received_wall >= raised.received_wall
    # A rank of the runtime goes on after an exception that tells of a lost peer; any other one ends with it.
    if has_failed and last is not None and (blames_code(last) or peer.foreign):
        return False
    step = step_of(raised)
    if step >= 0:
        return peer.sample.step <= step
    return peer.worked_wall <= raised.received_wall


def _gone(
    fleet: MonitoredProcesses,
    subject: MonitoredProcess,
    raised: ReceivedException | None,
    now: float,
    stood: str,
) -> Finding:
    """`stood`: names of the ranks that stood still together with it; empty: it did not."""
    event, sample = subject.exit_event, subject.sample
    detail = event.detail if event else {}
    step = _last_step(detail, sample)
    where = f" in {phase_text(detail.get('last_phase') or subject.phase, step)}"
    how = ""
    if detail.get("signal"):
        how = f" on signal {detail['signal']}"
    elif detail.get("code"):
        how = f" with code {detail['code']}"
    open_requests = sample.requests_active if sample else 0
    requests = f" with {open_requests} open request{'s' * (open_requests != 1)}" if open_requests else ""
    reported = f"last exception: {exception_text(raised.event)}" if raised else "no exception reported"
    lost_peer = raised is not None and is_consequence(raised.event)
    if lost_peer:
        reported += "; this follows from the loss of another process, so the cause is not known"
    elif stood:
        reported += (
            f"; {stood} had stood still for {subject.stall.wall:.0f} s: the timeout of a collective aborts any of the "
            "ranks that wait in it, so the cause is not known"
        )
    signal, struck = detail.get("signal", ""), fleet.oom_wall.get(subject.node, -math.inf)
    oom = signal in SIGKILL_NAMES and (detail.get("cause") == "oom" or abs(subject.exit_wall - struck) <= OOM_SECONDS)
    killer = "; the host's OOM killer was active at that moment" if oom else ""
    because = f"{subject.name()} crashed: process exited{how}{where}{requests}; {reported}{killer}"
    onset = event.wall_at + subject.offset_seconds if event else subject.exit_wall
    values = {"requests_open": float(open_requests), "step": float(step)}
    values |= exit_values(signal, oom=oom)
    is_victim = lost_peer or stood != ""
    values |= {LOST_PEER: 1.0} if is_victim else {}
    evidence = [Evidence(kind=EXIT, text=f"process {subject.process} exited{how}", values=values), *log_file(detail)]
    if raised:
        evidence.append(Evidence(kind=AgentEventKind.EXCEPTION, text=exception_text(raised.event)))
    return finding(
        "crash",
        [subject],
        FaultClass.CRASH,
        onset=onset,
        now=now,
        confidence=0.5 if is_victim else 1.0,
        because=because,
        evidence=tuple(evidence),
        about=f":{LOST_PEER}" if is_victim else "",
    )


def _last_step(detail: Mapping[str, str], sample: ProcessSample | None) -> int:
    """The agent reads the page once more when a process has ended: steps may have passed since the newest sample."""
    at_exit = detail.get("step", "")
    sampled = sample.step if sample else -1
    return max(int(at_exit), sampled) if at_exit.isdecimal() and len(at_exit) <= 18 else sampled


def log_file(detail: Mapping[str, str]) -> tuple[Evidence, ...]:
    """Of an exit, where its agent knows it."""
    return (Evidence(kind=LOG_FILE, text=path),) if (path := detail.get("log_file")) else ()


def exit_values(signal: str, *, oom: bool) -> dict[str, float]:
    """Values of exit evidence."""
    values = {"signal": float(signal)} if signal.isascii() and signal.isdecimal() and len(signal) < 4 else {}
    return values | ({"oom": 1.0} if oom else {})


def _ending(subject: MonitoredProcess, raised: ReceivedException, now: float) -> Finding:
    text = exception_text(raised.event)
    step = step_of(raised)
    values = {UNCAUGHT: 1.0, "step": float(step)}
    return finding(
        "crash",
        [subject],
        FaultClass.CRASH,
        onset=raised.event.wall_at + subject.offset_seconds,
        now=now,
        confidence=1.0,
        because=f"{subject.name()} crashed: its process ends in {phase_text(subject.phase, step)} with an uncaught "
        f"exception: {text}",
        evidence=(Evidence(kind=AgentEventKind.EXCEPTION, text=text, values=values),),
    )


def _given_up(subject: MonitoredProcess, raised: ReceivedException, now: float) -> Finding:
    because = (
        f"{subject.name()} raised {exception_text(raised.event)} and has made no progress for "
        f"{now - raised.received_wall:.0f} s while its peers work; its process is alive, its work is lost"
    )
    return finding(
        "crash",
        [subject],
        FaultClass.CRASH,
        onset=raised.event.wall_at + subject.offset_seconds,
        now=now,
        confidence=0.8,
        because=because,
        evidence=(Evidence(kind=AgentEventKind.EXCEPTION, text=exception_text(raised.event)),),
    )


OWN_SIGNALS = frozenset({4, 7, 8, 11})
"""SIGILL, SIGBUS, SIGFPE, SIGSEGV: not sent by launchers. Excluded: SIGABRT, which comes from NCCL's watchdog, and
SIGKILL and SIGTERM, with which a launcher ends the rest of a job."""
NUM_NAMED_MAX = 8
LOST_PEER = "lost_peer"
"""Value of exit evidence: the exit is a consequence of another process's loss or hang."""


class LostRanksStage(Stage):
    name = "lost_ranks"

    def evaluate(self, tick: Tick) -> list[Finding]:
        tick.findings = folded(tick.findings)
        return []


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """The findings with all exits of an incarnation merged at the position of the first. The first suspect of each is
    the process that ended."""
    groups: dict[tuple[str, int | None], list[Finding]] = {}
    for f in findings:
        is_exit = f.fault_class is FaultClass.CRASH or f.fault_class.spec.is_hardware
        of_one_replica = len({s.replica for s in f.suspects}) == 1 and bool(f.suspects[0].replica)
        if is_exit and of_one_replica and any(e.kind == EXIT or e.values.get(UNCAUGHT) for e in f.evidence):
            groups.setdefault((f.suspects[0].replica, f.suspects[0].incarnation), []).append(f)
    one = {id(group[0]): _merged_exits(group) for group in groups.values()}
    dropped = {id(f) for group in groups.values() for f in group[1:]}
    return [one.get(id(f), f) for f in findings if id(f) not in dropped]


def _lost_peer(f: Finding) -> bool:
    return any(e.values.get(LOST_PEER) for e in f.evidence)


def _merged_exits(group: Sequence[Finding]) -> Finding:
    lead, *others = sorted(group, key=lambda f: (not f.fault_class.spec.is_hardware, _lost_peer(f), f.onset))
    if not others:
        return lead
    nodes, own, also = {lead.suspects[0].node}, list[Finding](), list[Finding]()
    for f in others:
        its = f.suspects[0].node
        exits = [e.values for e in f.evidence if e.kind == EXIT]
        alone = any(e.get("oom") or int(e.get("signal", 0)) in OWN_SIGNALS for e in exits)
        alone |= f.fault_class.spec.is_hardware
        (own if alone and its not in nodes else also).append(f)
        nodes |= {its} if f in own else set()
    # Of a collective that timed out, each rank that waited in it is a suspect.
    stood = (s for f in group if _lost_peer(lead) and len(f.suspects) > 1 for s in f.suspects)
    suspects = dict.fromkeys((lead.suspects[0], *stood, *(f.suspects[0] for f in own)))
    because = "; independent second fault: ".join([lead.because, *(f.because for f in own)])
    if also:
        more = f" and {len(also) - NUM_NAMED_MAX} more" if len(also) > NUM_NAMED_MAX else ""
        named = ", ".join(f"rank {s.rank} ({s.node})" for s in (f.suspects[0] for f in also[:NUM_NAMED_MAX]))
        when = "after it" if all(f.onset >= lead.onset for f in also) else "too"
        because += f"; exited {when}: {named}{more}"
    other_exits = (e for f in also[:NUM_NAMED_MAX] for e in f.evidence if e.kind == EXIT)
    return replace(
        lead,
        suspects=tuple(suspects),
        because=because,
        evidence=(*lead.evidence, *(e for f in own for e in f.evidence), *other_exits),
    )
