"""Uninstrumented jobs: their processes report nothing, so the kernel is the only source.

Progress and announced exits are unknown, so a silent process is not diagnosed as hung. Detected conditions:

  exited    by a signal or with an error while the job continues. Exit code 0 and SIGTERM are intended. When a rank
            dies, its peers fail after it (the collective raises, NCCL's watchdog aborts). The first exit is named;
            later errors and aborts are consequences: in the same replica for as long as a collective can wait, in
            other replicas while the job is being taken down or once the default collective timeout has passed.
            Restarted processes are excluded. A whole job that ends at once in the same way was stopped on purpose.
  ended     an engine or another service with exit code 0, while the trainers of its job go on: it looks like success
            (verl-omni's issue 433), and is lost to them
  stopped   in state T without interruption; in state t (traced), or with all ranks of its job: on purpose, as it seems
  stuck     in an uninterruptible wait (state D) without any CPU use: disk, network file system, driver
  starved   runnable, but kept from the CPU by other processes for most of the time, unlike most ranks of its role

Slowness is left to panels, which compare CPU, memory and faults among the ranks of a role.
"""

from dataclasses import dataclass
from statistics import median_low

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.base.findings import EXIT
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, finding, names
from rolecall.detector.live.stages.exits.crash import exit_values, log_file
from rolecall.detector.live.stages.exits.ray_deaths import awaits_word, reason_of
from rolecall.detector.live.stages.progress.suspended import suspended, suspended_finding
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.formats.ray_logs import RayReason

GATHER_SECONDS = 2.0
"""How long an exit is held for further exits of its job: a launcher that ends a job stops all its processes."""
UNKNOWN_GATHER_SECONDS = 10.0
"""The same if the exit status is unknown (already reaped on Linux before 6.15, or another user's process and an agent
without CAP_SYS_PTRACE): a job that finishes rank after rank looks the same at first."""
TIMEOUT_SECONDS = 600.0
"""PyTorch's default for NCCL collectives (`default_pg_nccl_timeout`), after which ranks waiting for a dead one fail."""
CONSEQUENCE_SECONDS = 900.0
"""Errors up to this long after an exit are its consequences: timeout, watchdog dump, heartbeat monitor."""
TAKEN_DOWN_SECONDS = 60.0
"""Maximum time between two exits of a job that is being taken down: torchrun, Slurm and Kubernetes wait 30 s between
SIGTERM and SIGKILL."""
NUM_NAMED_MAX = 8
STOPPED_SECONDS = 5.0
"""Longer than py-spy and debuggers stop a process (less than a second)."""
STUCK_SECONDS = 60.0
"""Longer than a slow disk blocks a process (seconds)."""
STARVED_SECONDS = 30.0
"""Time with at least `monitored_process.STARVED_SAMPLE_SHARE` starvation in each sample; bursts of other processes are
shorter."""
STARVED_APART = 0.25
"""A starved rank is named if its share of time without CPU exceeds the role's median by this: where all ranks wait for
CPUs as long, the machine is full and no rank is at fault."""
SIGABRT = "6"
LOSSES = frozenset({RayReason.NODE_LOST, RayReason.OUT_OF_MEMORY, RayReason.CREATION_FAILED})
"""A job all of whose actors end like this was not stopped on purpose."""
SERVICES = frozenset({"rollout", "reward", "reference", "critic"})
"""Roles that work until their job ends."""
ENDED_SECONDS = 60.0
"""A job whose services have ended ends itself within this time."""


@dataclass(frozen=True, slots=True)
class _Exit:
    subject: MonitoredProcess
    at: float  # watcher's wall clock
    signal: str
    code: str
    cause: str

    @property
    def how(self) -> str:
        if self.signal:
            return f" on signal {self.signal}"
        return f" with code {self.code}" if self.code else ", status unknown"

    @property
    def known(self) -> bool:
        return bool(self.signal or self.code)

    @property
    def may_follow(self) -> bool:
        """Whether it may be a consequence of the exit of a peer."""
        return not self.known or (self.code not in ("", "0")) or self.signal == SIGABRT


class UninstrumentedStage(Stage):
    name = "uninstrumented"
    suppresses = frozenset({"dependent_stall", "nccl_ras"})

    def evaluate(self, tick: Tick) -> list[Finding]:
        found, processes = _exits(tick.fleet, tick.now), tick.fleet.unpaged()
        found += _ended(tick.fleet, tick.now, crashed=bool(found))
        # Diagnoses concern replicas: the exit of a rank, reported or not, takes precedence over a stall of another.
        losing = {s.replica for s in processes if s.gone and not s.finished}
        halted = list[MonitoredProcess]()
        usual: dict[str, float] = {}  # share of time without CPU, by role
        for subject in processes:
            if subject.gone or subject.finished or subject.sample is None or subject.replica in losing:
                continue
            if subject.halted.wall >= (STUCK_SECONDS if subject.sample.proc_state == "D" else STOPPED_SECONDS):
                halted.append(subject)
            elif subject.starved.wall >= STARVED_SECONDS:
                if subject.role not in usual:
                    usual[subject.role] = _usual_share(tick.fleet, subject.role)
                if subject.starved_share - usual[subject.role] >= STARVED_APART:
                    found.append(_starved(subject, tick.now))
        paused = suspended(tick.fleet, halted)
        spared = {member.key for group in paused for member in group.members}
        found += [_stopped(s, tick.now) for s in halted if s.key not in spared]
        return found + [suspended_finding(group, tick.now) for group in paused]


def _exits(fleet: MonitoredProcesses, now: float) -> list[Finding]:
    everybody = fleet.unpaged()
    exits = (s for s in everybody if s.gone and not (s.exit_event is not None and fleet.is_past(s.exit_event)))
    gone = sorted(map(_exit, exits), key=lambda exited: (exited.at, exited.subject.key))
    if not gone:
        return []
    living = not all(s.gone for s in fleet.current())
    if any(awaits_word(exited.subject, now) for exited in gone) and not living:
        return []
    is_alike = len(gone) > 1 and len({(exited.signal, exited.code) for exited in gone}) == 1
    if not living and is_alike and not any(reason_of(exited.subject) in LOSSES for exited in gone):
        for exited in gone:  # the whole job ended; keep this while its restart brings up ranks one by one
            if not exited.subject.finished:
                fleet.changes(exited.subject)
                exited.subject.finished = True
        return []
    found: list[Finding] = []
    chains: list[list[_Exit]] = []  # each a first exit and its consequences
    for exited in gone:
        if exited.subject.finished or not (exited.known or living):
            continue
        chain = next((c for c in chains if _follows(exited, c)), None)
        if chain is not None:
            chain.append(exited)
            fleet.changes(exited.subject)
            exited.subject.followed = True
            continue
        chains.append([exited])
        if exited.subject.followed:  # consequence of a process that has been restarted since
            continue
        is_due = now - exited.subject.exit_wall >= (GATHER_SECONDS if exited.known else UNKNOWN_GATHER_SECONDS)
        if is_due and not awaits_word(exited.subject, now):
            found.append(_crash(exited, gone, living, now))
    return found


def _ended(fleet: MonitoredProcesses, now: float, *, crashed: bool) -> list[Finding]:
    """Services that ended as if their job were over. `crashed`: another process of it has."""
    found = []
    for subject in fleet.unpaged():
        if not (subject.gone and subject.finished and subject.role in SERVICES):
            continue
        reason = reason_of(subject)
        if _exit(subject).code != "0" and (reason is None or not reason.is_intended):
            continue
        if reason is RayReason.OWNER_DIED and crashed:
            continue  # the process that created it is the fault
        if now - subject.exit_wall < ENDED_SECONDS or fleet.began_wall > subject.exit_wall:
            continue
        trainers = [
            s for s in fleet.roster.of_role("trainer").values() if not s.gone and s.first_wall < subject.exit_wall
        ]
        if not trainers:
            continue
        how = "ended by itself with exit code 0" if reason is None else f"ended{_exit(subject).how}"
        because = (
            f"{subject.name()} {how}, and {names(trainers)} of its job went on for "
            f"{now - subject.exit_wall:.0f} s: it is lost to them, unless it was removed on purpose"
        )
        evidence = Evidence(
            kind=EXIT,
            text=f"process {subject.process} exited{_exit(subject).how}",
            values=exit_values(_exit(subject).signal, oom=False),
        )
        found.append(
            finding(
                "ended",
                [subject],
                FaultClass.CRASH,
                onset=subject.exit_wall,
                now=now,
                confidence=0.5,
                because=because,
                evidence=(evidence,),
            )
        )
    return found


def _follows(exit_: _Exit, chain: list[_Exit]) -> bool:
    since = exit_.at - chain[0].at
    if not exit_.may_follow or since > CONSEQUENCE_SECONDS:
        return False
    if since >= TIMEOUT_SECONDS or exit_.at - chain[-1].at <= TAKEN_DOWN_SECONDS:
        return True
    return any(other.subject.replica == exit_.subject.replica for other in chain)


def _exit(subject: MonitoredProcess) -> _Exit:
    event = subject.exit_event
    detail = event.detail if event else {}
    at = event.wall_at + subject.offset_seconds if event else subject.exit_wall
    return _Exit(subject, at, detail.get("signal", ""), detail.get("code", ""), detail.get("cause", ""))


def _crash(exited: _Exit, gone: list[_Exit], living: bool, now: float) -> Finding:
    after = [other for other in gone if other.at > exited.at]
    named = ", ".join(f"{o.subject.name()}{o.how}" for o in after[:NUM_NAMED_MAX])
    more = ", ..." if len(after) > NUM_NAMED_MAX else ""
    followed = f"; {len(after)} more of its job exited after it: {named}{more}" if after else ""
    oom = "; the host's OOM killer was active at that moment" if exited.cause == "oom" else ""
    rest = "" if living else "; no process of the job is left"
    because = f"{exited.subject.name()} crashed: process exited{exited.how}{oom}{followed}{rest} (uninstrumented job)"
    return finding(
        "crash",
        [exited.subject],
        FaultClass.CRASH,
        onset=exited.at,
        now=now,
        confidence=0.9 if exited.known else 0.6,
        because=because,
        evidence=(
            Evidence(
                kind=EXIT,
                text=f"process {exited.subject.process} exited{exited.how}",
                values=exit_values(exited.signal, oom=exited.cause == "oom"),
            ),
            *log_file(exited.subject.exit_event.detail if exited.subject.exit_event else {}),
        ),
    )


def _stopped(subject: MonitoredProcess, now: float) -> Finding:
    state, seconds = subject.sample.proc_state if subject.sample else "?", subject.halted.wall
    if state == "D":
        what = "uninterruptible wait (state D) with 0 % CPU, for a disk, a file system or a driver,"
    else:
        what = f"process stopped (state {state})"
    return finding(
        "stopped",
        [subject],
        FaultClass.HANG,
        onset=subject.onset_wall(seconds),
        now=now,
        confidence=0.6 if state == "D" else 0.95,
        because=f"{subject.name()} is hung: {what} for {seconds:.0f} s",
        evidence=(Evidence(kind="proc_state", text=f"state {state}", values={"seconds": seconds}),),
    )


def _usual_share(fleet: MonitoredProcesses, role: str) -> float:
    """The median over the ranks of the role; 0 for one rank, which has no peer to compare with."""
    shares = [s.starved_share for s in fleet.roster.of_role(role).values() if not s.gone]
    return median_low(shares) if len(shares) > 1 else 0.0


def _starved(subject: MonitoredProcess, now: float) -> Finding:
    share, seconds = subject.starved.effective / subject.starved.wall, subject.starved.wall
    because = (
        f"{subject.name()} is slow: starved of CPU by other processes on {subject.node}, its main thread runnable "
        f"but not running for {share:.0%} of the last {seconds:.0f} s"
    )
    return finding(
        "starved",
        [subject],
        FaultClass.SLOW,
        onset=subject.onset_wall(seconds),
        now=now,
        confidence=0.7,
        because=because,
        evidence=(Evidence(kind="run_delay", text=f"{share:.0%} of the time", values={"share": share}),),
    )
