"""What of a GPU's numbers is a fault: pure, from what was known before and this look.

A condition (a row waits to be remapped) is told when it begins, also at the first look: the agent may start after it,
and it is over when no condition stands any more. A counter is told when it grows, not for what it held before the agent
came. The action that the driver recommends is a condition too, told by `gpu_events.py`, which sees it first.
"""

from collections.abc import Iterator, Mapping

from rolecall.agent.collectors.gpu_calls import Key
from rolecall.core.xid import RecoveryAction

Fault = dict[str, str]
"""`what` (remapped_rows, ecc, nvlink, fabric) and what it says, as of AgentEventKind.GPU_FAULT."""

_CONDITIONS: dict[Key, Fault] = {
    ("remapped_rows_pending",): {
        "what": "remapped_rows",
        "state": "pending",
        "advice": "reset the GPU when it is idle: a bad memory row is replaced then",
    },
    ("remapped_rows_failed",): {
        "what": "remapped_rows",
        "state": "failed",
        "advice": "take the GPU out of use and have it replaced: it has no spare memory rows",
    },
    ("sram_threshold_exceeded",): {
        "what": "ecc",
        "state": "sram_threshold_exceeded",
        "advice": "take the GPU out of use and have it replaced",
    },
}
_UNCORRECTED: Key = ("ecc_errors_total", "uncorrected")


def _condition(key: Key) -> Fault | None:
    """The fault that stands while the number under `key` is not 0; None: the key is of no condition."""
    if key[0] == "nvlink_down":
        return {"what": "nvlink", "state": "down", "link": key[1], "advice": "reset the GPU; else look at the link"}
    if key[0] == "fabric_fault":
        return {"what": "fabric", "state": key[1], "advice": "look at the fabric manager and its switches"}
    return _CONDITIONS.get(key)


def faults(before: Mapping[Key, float], now: Mapping[Key, float]) -> Iterator[Fault]:
    """Those that began between the two looks; `before` is empty at the first."""
    for key, number in now.items():
        if number and not before.get(key) and (fault := _condition(key)) is not None:
            yield fault
    errors, errors_before = now.get(_UNCORRECTED), before.get(_UNCORRECTED)
    if errors is not None and errors_before is not None and errors > errors_before:
        count = f"{errors - errors_before:.0f}"
        yield {"what": "ecc", "state": "uncorrected", "count": count, "advice": "follow the XID that comes with it"}


def any_stands(numbers: Mapping[Key, float]) -> bool:
    """Whether a condition holds, or the driver recommends an action."""
    return any(
        _condition(key) is not None or (key[0] == "recovery_action" and key[1] != RecoveryAction.NONE)
        for key, number in numbers.items()
        if number
    )
