"""Uninstrumented jobs: their processes report nothing, so the kernel is the only source.

There is no progress to miss and no announced exit, so no process is called hung for silence. What remains:

  exited    by a signal or with an error, while the job goes on. Exit 0 and SIGTERM are intended. When one rank dies,
  its
            peers fail after it (the collective raises, NCCL's watchdog aborts): the first is named; errors and aborts
            that follow are its consequences: in its replica for as long as a collective can wait, in others while the
            job is being taken down, or once the default timeout of a collective that they share has passed. A process
            that was restarted has no part in it. A whole job that ends at once in one way was stopped on purpose.
  stopped   in state T (or t: traced) without interruption
  stuck     in an uninterruptible wait (state D) without any CPU: disk, network file system, driver
  starved   runnable, and kept from the CPU by other processes for most of the time

Slowness is left to panels, which compare CPU, memory and faults among the ranks of a role.
"""

from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.base.findings import EXIT
from rolecall.detector.live.findings import finding
from rolecall.detector.live.fleet import MonitoredProcesses
from rolecall.detector.live.stages.crash import exit_values
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.detector.live.subject import MonitoredProcess

GATHER_SECONDS = 2.0
"""How long an exit waits for the others of its job: a launcher that ends a job takes them all down."""
UNKNOWN_GATHER_SECONDS = 10.0
"""The same where the kernel cannot say how it ended (Linux before 6.13, and its parent has reaped it): a job that ends
by itself, rank after rank, looks the same at first."""
TIMEOUT_SECONDS = 600.0
"""PyTorch's default for collectives over NCCL (`default_pg_nccl_timeout`): ranks that wait for a dead one fail then."""
CONSEQUENCE_SECONDS = 900.0
"""Errors so long after an exit are its consequences: timeout, then the watchdog's dump and its heartbeat monitor."""
TAKEN_DOWN_SECONDS = 60.0
"""Between exits of a job that is being taken down: torchrun, Slurm and Kubernetes wait 30 s between SIGTERM and
SIGKILL."""
NUM_NAMED_MAX = 8
STOPPED_SECONDS = 5.0
"""py-spy and debuggers stop a process for less than a second."""
STUCK_SECONDS = 60.0
"""A slow disk holds a process for seconds."""
STARVED_SECONDS = 30.0
"""Half of each sample's time (`subject.STARVED_SAMPLE_SHARE`) for so long: a burst of others is shorter."""
SIGABRT = "6"


@dataclass(frozen=True, slots=True)
class _Exit:
    subject: MonitoredProcess
    at: float  # our wall clock
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
        """Ranks whose peer died end like this."""
        return not self.known or (self.code not in ("", "0")) or self.signal == SIGABRT


class UninstrumentedStage(Stage):
    name = "uninstrumented"
    suppresses = frozenset({"dependent_stall", "nccl_ras"})

    def evaluate(self, tick: Tick) -> list[Finding]:
        return find(tick.fleet, tick.now)


def find(fleet: MonitoredProcesses, now: float) -> list[Finding]:
    found = _exits(fleet, now)
    # Diagnoses are of replicas: the exit of a rank, even if not reported yet, says more than a stall of another rank.
    losing = {s.replica for s in fleet.unpaged() if s.gone and not s.finished}
    for s in fleet.unpaged():
        if s.gone or s.finished or s.sample is None or s.replica in losing:
            continue
        if s.halted.wall >= (STUCK_SECONDS if s.sample.proc_state == "D" else STOPPED_SECONDS):
            found.append(_stopped(s, now))
        elif s.starved.wall >= STARVED_SECONDS:
            found.append(_starved(s, now))
    return found


def _exits(fleet: MonitoredProcesses, now: float) -> list[Finding]:
    everybody = fleet.unpaged()
    gone = sorted((_exit(s) for s in everybody if s.gone), key=lambda e: (e.at, e.subject.key))
    if not gone:
        return []
    living = len(everybody) > len(gone)
    if not living and len(gone) > 1 and len({(e.signal, e.code) for e in gone}) == 1:
        for e in gone:  # the job ended as a whole: that stays true while its next start comes rank by rank
            if not e.subject.finished:
                fleet.changes(e.subject)
                e.subject.finished = True
        return []
    found: list[Finding] = []
    chains: list[list[_Exit]] = []  # each a first exit, and what followed of it
    for e in gone:
        if e.subject.finished or not (e.known or living):
            continue
        chain = next((c for c in chains if _follows(e, c)), None)
        if chain is not None:
            chain.append(e)
            fleet.changes(e.subject)
            e.subject.followed = True
            continue
        chains.append([e])
        if e.subject.followed:  # of a process that was restarted and is not among the dead any more
            continue
        if now - e.subject.exit_wall >= (GATHER_SECONDS if e.known else UNKNOWN_GATHER_SECONDS):
            found.append(_crash(e, gone, living, now))
    return found


def _follows(e: _Exit, chain: list[_Exit]) -> bool:
    since = e.at - chain[0].at
    if not e.may_follow or since > CONSEQUENCE_SECONDS:
        return False
    if since >= TIMEOUT_SECONDS or e.at - chain[-1].at <= TAKEN_DOWN_SECONDS:
        return True
    return any(other.subject.replica == e.subject.replica for other in chain)


def _exit(s: MonitoredProcess) -> _Exit:
    event = s.exit_event
    detail = event.detail if event else {}
    at = event.wall_at + s.offset_seconds if event else s.exit_wall
    return _Exit(s, at, detail.get("signal", ""), detail.get("code", ""), detail.get("cause", ""))


def _crash(e: _Exit, gone: list[_Exit], living: bool, now: float) -> Finding:
    after = [other for other in gone if other.at > e.at]
    named = ", ".join(f"{o.subject.name()}{o.how}" for o in after[:NUM_NAMED_MAX])
    more = ", .." if len(after) > NUM_NAMED_MAX else ""
    followed = f"; {len(after)} more of its job exited after it: {named}{more}" if after else ""
    oom = "; the host's OOM killer was active at that moment" if e.cause == "oom" else ""
    rest = "" if living else "; no process of the job is left"
    because = f"{e.subject.name()} crashed: process exited{e.how}{oom}{followed}{rest} (uninstrumented job)"
    return finding(
        "crash",
        [e.subject],
        FaultClass.CRASH,
        onset=e.at,
        now=now,
        confidence=0.9 if e.known else 0.6,
        because=because,
        evidence=(
            Evidence(
                kind=EXIT,
                text=f"process {e.subject.process} exited{e.how}",
                values=exit_values(e.signal, oom=e.cause == "oom"),
            ),
        ),
    )


def _stopped(s: MonitoredProcess, now: float) -> Finding:
    state, seconds = s.sample.proc_state if s.sample else "?", s.halted.wall
    if state == "D":
        what = "uninterruptible wait (state D), 0 % CPU: a disk, a file system or a driver"
    else:
        what = f"process {'traced by a debugger' if state == 't' else 'stopped'} (state {state})"
    return finding(
        "stopped",
        [s],
        FaultClass.HANG,
        onset=s.onset_wall(seconds),
        now=now,
        confidence=0.6 if state == "D" else 0.95,
        because=f"{s.name()} is hung: {what} for {seconds:.0f} s",
        evidence=(Evidence(kind="proc_state", text=f"state {state}", values={"seconds": seconds}),),
    )


def _starved(s: MonitoredProcess, now: float) -> Finding:
    share, seconds = s.starved.effective / s.starved.wall, s.starved.wall
    because = (
        f"{s.name()} is slow: starved of CPU by other processes on {s.node}, its main thread runnable but not running "
        f"for {share:.0%} of the last {seconds:.0f} s"
    )
    return finding(
        "starved",
        [s],
        FaultClass.SLOW,
        onset=s.onset_wall(seconds),
        now=now,
        confidence=0.7,
        because=because,
        evidence=(Evidence(kind="run_delay", text=f"{share:.0%} of the time", values={"share": share}),),
    )
