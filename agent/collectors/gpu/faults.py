"""Faults in a GPU's numbers: a pure function of the previous state and this poll.

A condition (such as a pending row remap) is reported at its onset, and at the first poll, because the agent may have
started later. An NVLink counts only if it was up before: boards have unconnected links. A counter is reported when it
grows, not for its value at agent start. The GPU has recovered when no condition remains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolecall.agent.collectors.gpu.queries import Key, Numbers
from rolecall.formats.xid.xid import RECOVERY_ADVICE, RecoveryAction

Fault = dict[str, str]
"""`what` (recovery_action, remapped_rows, ecc, nvlink, fabric) and its details, as in AgentEventKind.GPU_FAULT."""

_CONDITIONS: dict[Key, Fault] = {
    ("remapped_rows_pending",): {
        "what": "remapped_rows",
        "state": "pending",
        "advice": "reset the GPU when it is idle: the reset replaces the bad memory row",
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


@dataclass(slots=True)
class Conditions:
    """Of one GPU. `known`: the newest numbers, also of calls that now fail; `active`: current conditions."""

    known: Numbers = field(default_factory=dict)
    active: set[Key] = field(default_factory=set)

    def update(self, numbers: Mapping[Key, float]) -> tuple[list[Fault], bool]:
        """(new faults, whether the last active condition has cleared). `numbers`: at least those that changed."""
        before = self.known
        found: list[Fault] = []
        for key, number in numbers.items():
            was = before.get(key)
            if number and not was and (fault := _condition(key, was)) is not None:
                self.active.add(key)
                found.append(fault)
        errors, errors_before = numbers.get(_UNCORRECTED), before.get(_UNCORRECTED)
        if errors is not None and errors_before is not None and errors > errors_before:
            count = f"{errors - errors_before:.0f}"
            advice = "follow the advice of the XID that accompanies it"
            found.append({"what": "ecc", "state": "uncorrected", "count": count, "advice": advice})
        self.known.update(numbers)
        was_active = bool(self.active)
        self.active = {key for key in self.active if self.known[key]}
        return found, was_active and not self.active


def of_action(action: RecoveryAction) -> Fault:
    """Fault for the driver's recommended recovery action."""
    _, advice = RECOVERY_ADVICE[action]
    return {"what": "recovery_action", "action": str(action), "advice": advice}


def _condition(key: Key, was: float | None) -> Fault | None:
    """The fault that a nonzero number under `key` means; None: no fault. `was`: the previous number."""
    if key[0] == "recovery_action":
        return None if key[1] == RecoveryAction.NONE else of_action(RecoveryAction(key[1]))
    if key[0] == "nvlink_down":
        advice = "reset the GPU; if the link stays down, have it inspected"
        return None if was is None else {"what": "nvlink", "state": "down", "link": key[1], "advice": advice}
    if key[0] == "fabric_fault":
        return {"what": "fabric", "state": key[1], "advice": "check the fabric manager and its switches"}
    return _CONDITIONS.get(key)
