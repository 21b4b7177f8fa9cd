"""Distinguishes user code from hardware faults: the same exception on all ranks of a role, or twice in one step.

Hardware fails in one place; a bug fails wherever the code runs. One fingerprint (exception type and frames, without
values) on every rank of a role, or raised again in the same step by another rank or by the replacement of the first,
indicates a fault of the code or its input. Exceptions caused by the loss, delay or fencing of another process are
consequences, not evidence against the code. No process is named, because replacing a machine would not help. `about`
(role, exception, frames) identifies the fault.
"""

from collections import defaultdict
from collections.abc import Mapping

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import AgentEvent, AgentEventKind, Phase
from rolecall.detector.live.fleet import MonitoredProcesses, ReceivedException, finding
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.detector.live.subject import MonitoredProcess

CONSEQUENCES = frozenset(
    {
        # rolecall: raised by a survivor when a peer or lease holder is lost, fenced or late
        "PeerLost",
        "DeadlineExceeded",
        "StaleIncarnation",
        "ProofMismatch",
        "WireError",
        # Ray
        "ActorDiedError",
        "ActorUnavailableError",
        "RayActorError",
        "GetTimeoutError",
        "ObjectLostError",
        # Python and PyTorch: broken connections and timeouts
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "TimeoutError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        # intended: stopped by an operator or the supervisor
        "KeyboardInterrupt",
        "SystemExit",
    }
)


def last_exception(fleet: MonitoredProcesses, subject: MonitoredProcess) -> ReceivedException | None:
    for seen in reversed(fleet.exceptions):
        e = seen.event
        if (e.replica, e.rank, e.incarnation) == subject.key:
            return seen
    return None


def exception_text(event: AgentEvent) -> str:
    d = event.detail
    where = f" at {d['where']}" if d.get("where") else ""
    return f"{d.get('type', 'an exception')}: {d.get('message', '')[:200]}{where}"


def blames_code(seen: ReceivedException) -> bool:
    """Whether it is not just a consequence of another process's exit."""
    return seen.event.detail.get("type", "").rpartition(".")[2] not in CONSEQUENCES


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
            if fingerprint and blames_code(seen) and now - seen.received_wall <= REMEMBER_SECONDS:
                by_print[(seen.event.role, fingerprint)].append(seen)
        for (role, fingerprint), seen_list in by_print.items():
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
                found.append(_finding(fleet, role, fingerprint, seen_list, why, now))
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
            who = ", ".join(f"{replica}#{incarnation}" for replica, _, incarnation in sorted(raisers))
            when = f"in step {step}" if step >= 0 else f"within {ALL_RANKS_SECONDS:.0f} s"
            return f"it was raised {len(raisers)} times {when} ({who})"
    return None


def _finding(
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
                text=f"{s.event.replica}#{s.event.incarnation} in step {s.event.detail.get('step', '?')}: "
                f"{exception_text(s.event)}",
            )
            for s in seen_list[-8:]
        ),
        about=f"{role}:{kind}:{fingerprint}",
    )
