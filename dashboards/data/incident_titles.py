"""What an incident is called, and how severe it is. Pure.

severity   critical: trainers or the controller stand still, a node is lost, or a person was called
           minor:    slow or not decided, and no trainer is suspected
           warning:  all else
"""

from collections.abc import Mapping
from enum import StrEnum

from rolecall.core.diagnosis import Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.text import in_words, node_text, plain
from rolecall.recovery.advice import WATCHED
from rolecall.recovery.incidents import Incident

F = FaultClass
MODE_OBSERVE = "observe"


class Severity(StrEnum):
    """Worst first."""

    CRITICAL = "critical"
    WARNING = "warning"
    MINOR = "minor"


GLYPHS: Mapping[Severity, str] = {Severity.CRITICAL: "▲", Severity.WARNING: "◆", Severity.MINOR: "●"}
SEVERITIES = tuple(Severity)

_VERBS: Mapping[FaultClass, str] = {
    F.CRASH: "crashed",
    F.HANG: "hung",
    F.SLOW: "slow",
    F.SILENT_CORRUPTION: "computes wrong values",
    F.WRONG_WEIGHTS: "serves wrong weights",
    F.RESOURCE_EXHAUSTED: "ran out of resources",
    F.NETWORK: "has a network fault",
    F.GPU: "has a GPU fault",
    F.NODE_LOST: "lost with its node",
    F.USER_CODE: "failed in user code",
    F.DATA: "failed on its data",
    F.CONTROL_PLANE: "control plane fault",
    F.CANNOT_TELL: "in trouble, cause undecided",
}
_GOES_ON = frozenset({F.SLOW, F.CANNOT_TELL})
"""Faults with which a rollout or a reward worker still does some work."""
_ESSENTIAL = ("trainer", "controller")
"""Roles without which no step is committed."""


def severity(incident: Incident) -> Severity:
    found = incident.diagnosis
    essential = any(s.role in _ESSENTIAL or s.replica.startswith(_ESSENTIAL) for s in found.suspects)
    if found.fault_class in _GOES_ON and not incident.page_reason:
        return Severity.WARNING if essential else Severity.MINOR
    if essential or found.fault_class.spec.loses_node or incident.page_reason:
        return Severity.CRITICAL
    return Severity.WARNING


def title(incident: Incident, step: int | None = None) -> str:
    """`trainer/1 hung in step 53`. `step`: see `run_state.step_of`."""
    found = incident.diagnosis
    if incident.requested_by_operator:
        what = "to be replaced by request"
    else:
        what = _VERBS.get(found.fault_class, in_words(found.fault_class))
    if found.fault_class is F.NODE_LOST and found.suspects and found.suspects[0].node:
        names, what = [node_text(found.suspects[0].node)], "lost"
    else:
        names = list(dict.fromkeys(_name(s) for s in found.suspects if s.name))
    who = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    when = "" if step is None else f" in step {step}"
    return plain(f"{who or 'The job'} {what}{when}", 200)


def _name(suspect: Suspect) -> str:
    """`trainer/1`; with the rank if rolecall only watches the job, or it is a further one."""
    rank = suspect.rank is not None and (suspect.rank or not suspect.incarnation)
    return suspect.name.partition("#")[0] + (f" rank {suspect.rank}" if rank else "")


def would_do(incident: Incident) -> str:
    """What rolecall would do if it were allowed to act, from the newest plan; what the engineer can do where rolecall
    only watches; empty without a plan."""
    attempt = incident.attempt
    if attempt is None:
        return ""
    watched = attempt.plan.because.startswith(WATCHED)
    return attempt.plan.because if watched else f"rolecall would {attempt.plan.intent}"
