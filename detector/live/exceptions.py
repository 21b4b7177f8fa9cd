"""Exceptions that processes reported: which one was the last, in which step, and whether it points at the code.

Exceptions that only say that another process is gone, late or fenced are consequences and prove nothing about the code.
"""

from rolecall.core.telemetry import AgentEvent
from rolecall.detector.live.fleet import MonitoredProcesses, ReceivedException
from rolecall.detector.live.subject import MonitoredProcess

CONSEQUENCES = frozenset(
    {
        # ours: what a survivor raises when a peer or holder is lost, fenced or late
        "PeerLost",
        "DeadlineExceeded",
        "StaleIncarnation",
        "ProofMismatch",
        "WireError",
        # Ray's
        "ActorDiedError",
        "ActorUnavailableError",
        "RayActorError",
        "GetTimeoutError",
        "ObjectLostError",
        # Python's and torch's, of a broken connection or a wait that ran out
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "TimeoutError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        # on purpose, by an operator or the supervisor
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
    """It is no mere consequence of the end of another process."""
    return seen.event.detail.get("type", "").rpartition(".")[2] not in CONSEQUENCES


def step_of(seen: ReceivedException) -> int:
    """The optimizer step in which it was raised; -1 where the process knows none."""
    try:
        return int(seen.event.detail.get("step", "-1"))
    except ValueError:
        return -1
