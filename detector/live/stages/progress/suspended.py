"""Processes that are stopped on purpose, as it seems: by a debugger, or with all ranks of their job at once, as Ctrl-Z
and `scontrol suspend` do. To replace them would end what somebody looks at or has set aside.

Of a job of one rank, and of one rank of several, SIGSTOP is a hang as before. Only of jobs that rolecall did not start.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.base.findings import ADVISES, SUSPENDED
from rolecall.detector.live.monitored_process import TRACED_STATE, MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, finding

RANKS_MIN = 2
TOGETHER_SECONDS = 2.0
"""Between the first and the last rank, as agents see them that sample once a second."""
NUM_NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Suspended:
    """Stopped processes of one replica, for the same reason."""

    members: list[MonitoredProcess]
    reason: str
    advice: str


def suspended(fleet: MonitoredProcesses, processes: Iterable[MonitoredProcess]) -> list[Suspended]:
    """Those of these processes that are stopped on purpose."""
    together: dict[str, bool] = {}
    found: dict[tuple[str, str], Suspended] = {}
    for s in processes:
        if not s.foreign or not s.stopped:
            continue
        if s.sample is not None and s.sample.proc_state == TRACED_STATE:
            reason, advice = "traced by a debugger (state t)", "to let it go on, end the debugger"
        else:
            if s.group not in together:
                since = s.seen_wall - _stopped_seconds(s)
                # Agents are asked one after another: what is not seen since then may be stopped, too.
                together[s.group] = _stopped_together([s, *(p for p in fleet.peers(s) if p.seen_wall > since)])
            if not together[s.group]:
                continue
            reason = "stopped (state T) together with all ranks of their job, as by Ctrl-Z or a scheduler"
            advice = "to let them go on, resume the job as it was stopped (fg, scontrol resume, kill -CONT)"
        found.setdefault((s.replica, reason), Suspended([], reason, advice)).members.append(s)
    return list(found.values())


def _stopped_together(job: Iterable[MonitoredProcess]) -> bool:
    living = [s for s in job if not s.gone and not s.finished]
    seconds = [_stopped_seconds(s) for s in living]
    return (
        len(living) >= RANKS_MIN and all(s.stopped for s in living) and max(seconds) - min(seconds) <= TOGETHER_SECONDS
    )


def _stopped_seconds(subject: MonitoredProcess) -> float:
    return subject.beat.wall if subject.reports else subject.halted.wall


def suspended_finding(group: Suspended, now: float) -> Finding:
    members = sorted(group.members, key=lambda s: s.rank)
    seconds = max(map(_stopped_seconds, members))
    more = f" and {len(members) - NUM_NAMED_MAX} more of its ranks" if len(members) > NUM_NAMED_MAX else ""
    named = ", ".join(s.name() for s in members[:NUM_NAMED_MAX])
    because = (
        f"{named}{more} {'is' if len(members) == 1 else 'are'} {group.reason} for {seconds:.0f} s: on purpose, as it "
        "seems, so nothing is replaced"
    )
    return finding(
        SUSPENDED,
        members,
        FaultClass.CANNOT_TELL,
        onset=min(s.onset_wall(_stopped_seconds(s)) for s in members),
        now=now,
        confidence=0.5,
        because=because,
        evidence=(
            Evidence(kind="proc_state", text=group.reason, values={"seconds": seconds}),
            Evidence(kind=ADVISES, text=group.advice),
        ),
    )
