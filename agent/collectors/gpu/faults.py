"""What of a GPU's numbers is a fault: pure, from what was known before and this look.

A condition (a row waits to be remapped) is told when it begins, also at the first look: the agent may start after it. A
NVLink counts only when it was up before: boards have links that nothing is wired to. A counter is told when it grows,
not for what it held before the agent came. The GPU is well again when no condition stands any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolecall.agent.collectors.gpu.nvml_calls import Key, Numbers
from rolecall.formats.xid.xid import RECOVERY_ADVICE, RecoveryAction

Fault = dict[str, str]
"""`what` (recovery_action, remapped_rows, ecc, nvlink, fabric) and what it says, as of AgentEventKind.GPU_FAULT."""

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


@dataclass(slots=True)
class Conditions:
    """Of one GPU. `known`: the newest numbers, those among them that a call which fails just now gave before."""

    known: Numbers = field(default_factory=dict)
    standing: set[Key] = field(default_factory=set)

    def update(self, numbers: Mapping[Key, float]) -> tuple[list[Fault], bool]:
        """(faults that began, whether the last condition that stood is over). `numbers`: at least those that changed."""
        before = self.known
        found: list[Fault] = []
        for key, number in numbers.items():
            was = before.get(key)
            if number and not was and (fault := _condition(key, was)) is not None:
                self.standing.add(key)
                found.append(fault)
        errors, errors_before = numbers.get(_UNCORRECTED), before.get(_UNCORRECTED)
        if errors is not None and errors_before is not None and errors > errors_before:
            count = f"{errors - errors_before:.0f}"
            advice = "follow the XID that comes with it"
            found.append({"what": "ecc", "state": "uncorrected", "count": count, "advice": advice})
        self.known.update(numbers)
        stood = bool(self.standing)
        self.standing = {key for key in self.standing if self.known[key]}
        return found, stood and not self.standing


def of_action(action: RecoveryAction) -> Fault:
    """The driver recommends `action`."""
    _, advice = RECOVERY_ADVICE[action]
    return {"what": "recovery_action", "action": str(action), "advice": advice}


def _condition(key: Key, was: float | None) -> Fault | None:
    """The fault that begins when the number under `key` is not 0 any more; None: it is none."""
    if key[0] == "recovery_action":
        return None if key[1] == RecoveryAction.NONE else of_action(RecoveryAction(key[1]))
    if key[0] == "nvlink_down":
        advice = "reset the GPU; if the link stays down, have it inspected"
        return None if was is None else {"what": "nvlink", "state": "down", "link": key[1], "advice": advice}
    if key[0] == "fabric_fault":
        return {"what": "fabric", "state": key[1], "advice": "look at the fabric manager and its switches"}
    return _CONDITIONS.get(key)
