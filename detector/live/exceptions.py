"""Exceptions reported by processes: the last one, its step, and whether it indicates a fault in user code.

Exceptions caused by the loss, delay or fencing of another process are consequences, not evidence against the code.
"""

from rolecall.core.telemetry import AgentEvent
from rolecall.detector.live.fleet import MonitoredProcesses, ReceivedException
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
