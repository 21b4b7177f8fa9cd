"""Processes of jobs that know nothing of rolecall: they report nothing, so the kernel's word is all there is.

There is no progress to miss and no goodbye to hear, so nobody is called hung for silence. What remains is told:

  exited    by a signal or with an error, while the job goes on. Exit 0 and SIGTERM were asked for. When one rank dies,
            its peers fail after it (the collective raises, NCCL's watchdog aborts): the first is accused, errors and
            aborts that follow are its consequences. A whole job that ends at once in one way has been ended.
  stopped   the kernel says T (or t: traced) without a break
  stuck     in an uninterruptible wait without any CPU: disk, network file system, driver
  starved   runnable, and kept from the CPU by others for most of the time

Slowness is left to panels, which compare CPU, memory and faults among the ranks of a role.
"""

from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, FaultClass, Finding
from rolecall.detector.findings import finding
from rolecall.detector.fleet import Fleet
from rolecall.detector.subject import Subject

GATHER_SECONDS = 2.0
"""How long an exit waits for the others of its job: the launcher of a job that is ended takes them all down."""
UNKNOWN_GATHER_SECONDS = 10.0
"""The same where the kernel cannot say how it ended (Linux before 6.13, and its parent has reaped it): a job that ends by
itself, rank after rank, looks the same at first."""
CONSEQUENCE_SECONDS = 900.0
"""Errors so long after an exit are its consequences: NCCL's watchdog aborts after ten minutes by default."""
STOPPED_SECONDS = 5.0
"""py-spy and debuggers stop a process for less than a second."""
STUCK_SECONDS = 60.0
"""A slow disk holds a process for seconds."""
STARVED_SECONDS = 30.0
"""Half of each sample's time (`subject.STARVED_SAMPLE_SHARE`) for so long: a burst of others is shorter."""
SIGABRT = "6"


@dataclass(frozen=True, slots=True)
class _Exit:
    subject: Subject
    at: float  # our wall clock
    signal: str
    code: str
    cause: str

    @property
    def how(self) -> str:
        if self.signal:
            return f" on signal {self.signal}"
        return f" with code {self.code}" if self.code else ", nobody can say how"

    @property
    def known(self) -> bool:
        return bool(self.signal or self.code)

    @property
    def may_follow(self) -> bool:
        """Ranks whose peer died end like this."""
        return not self.known or (self.code not in ("", "0")) or self.signal == SIGABRT


def find(fleet: Fleet, now: float) -> list[Finding]:
    found = _exits(fleet, now)
    # Diagnoses are of replicas: that a rank is gone, even if it is to be told in a moment, says more than that another
    # of its replica stands still.
    losing = {s.replica for s in fleet.current() if not s.reports and s.gone and not s.finished}
    for s in fleet.current():
        if s.reports or s.gone or s.finished or s.sample is None or s.replica in losing:
            continue
        if s.halted.wall >= (STUCK_SECONDS if s.sample.proc_state == "D" else STOPPED_SECONDS):
            found.append(_halted(s, now))
        elif s.starved.wall >= STARVED_SECONDS:
            found.append(_starved(s, now))
    return found


def _exits(fleet: Fleet, now: float) -> list[Finding]:
    everybody = [s for s in fleet.current() if not s.reports]
    gone = sorted((_exit(s) for s in everybody if s.gone), key=lambda e: (e.at, e.subject.key))
    if not gone:
        return []
    living = len(everybody) > len(gone)
    if not living and len(gone) > 1 and len({(e.signal, e.code) for e in gone}) == 1:
        return []  # the job ended as a whole
    found: list[Finding] = []
    first: _Exit | None = None
    for e in gone:
        if e.subject.finished or not (e.known or living):
            continue
        if first is not None and e.may_follow and e.at - first.at <= CONSEQUENCE_SECONDS:
            continue
        first = first or e
        if now - e.subject.exit_wall >= (GATHER_SECONDS if e.known else UNKNOWN_GATHER_SECONDS):
            found.append(_crash(e, gone, living, now))
    return found


def _exit(s: Subject) -> _Exit:
    event = s.exit_event
    detail = event.detail if event else {}
    at = event.wall_at + s.offset_seconds if event else s.exit_wall
    return _Exit(s, at, detail.get("signal", ""), detail.get("code", ""), detail.get("cause", ""))


def _crash(e: _Exit, gone: list[_Exit], living: bool, now: float) -> Finding:
    after = sum(1 for other in gone if other.at > e.at)
    followed = f"; {after} more of its job ended after it" if after else ""
    oom = "; its node's OOM killer struck at that moment" if e.cause == "oom" else ""
    rest = "" if living else ", and none of its job is left"
    because = (
        f"{e.subject.name()} is gone: its process exited{e.how}{oom}{followed}{rest} (it does not report to rolecall)"
    )
    return finding(
        "crash",
        [e.subject],
        FaultClass.CRASH,
        onset=e.at,
        now=now,
        confidence=0.9 if e.known else 0.6,
        because=because,
        evidence=(Evidence(kind="exit", text=f"process {e.subject.process} exited{e.how}"),),
    )


def _halted(s: Subject, now: float) -> Finding:
    state, seconds = s.sample.proc_state if s.sample else "?", s.halted.wall
    if state == "D":
        what = "it is in an uninterruptible wait (process state D) and uses no CPU: a disk, a file system or a driver"
    else:
        what = f"its process state is {state}: somebody stopped it{' to debug it' if state == 't' else ''}"
    return finding(
        "stopped",
        [s],
        FaultClass.HANG,
        onset=s.onset_wall(seconds),
        now=now,
        confidence=0.6 if state == "D" else 0.95,
        because=f"{s.name()} stands still for {seconds:.0f} s: {what}",
        evidence=(Evidence(kind="proc_state", text=f"state {state}", values={"seconds": seconds}),),
    )


def _starved(s: Subject, now: float) -> Finding:
    share, seconds = s.starved.effective / s.starved.wall, s.starved.wall
    because = (
        f"{s.name()} is starved: for {seconds:.0f} s its main thread was runnable and without a CPU for "
        f"{share:.0%} of the time, because of others on {s.node}"
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
