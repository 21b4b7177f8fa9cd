"""What became of a fault: whether it was named and cured, and what else was touched. From events alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.recovery.chaos.schedule import Fault
from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads.run import ComponentRestarted
from rolecall.rl_runtime.processes import RunProcess
from rolecall.views.incidents import CLOCK_SLACK_SECONDS, IncidentSummary, summarize_incidents
from rolecall.views.lifetimes import incarnation_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An incident that was opened after a fault. Times are wall seconds."""

    suspects: tuple[str, ...]
    fault_class: str
    found_at: float
    cured_at: float | None
    because: str

    @classmethod
    def of(cls, summary: IncidentSummary) -> "Seen":
        incident, resolved_at = summary.incident, summary.resolved_at
        return cls(
            suspects=tuple(sorted({s.name for s in incident.diagnosis.suspects})),
            fault_class=str(incident.diagnosis.fault_class),
            found_at=summary.detected_at,
            cured_at=incident.closed_at if resolved_at is None else resolved_at,
            because=incident.diagnosis.because,
        )


def judged(
    fault: Fault, hit: frozenset[str], injected_at: float, incidents: Sequence[Seen], restarted_at: float | None
) -> dict[str, Any]:
    """What became of a fault. `hit`: names of the replicas with their incarnation, or of the node, that it hit.
    `incidents`: opened since, up to the next fault. `restarted_at`: of the helper that it hit, wall seconds."""
    after = [i for i in incidents if i.found_at >= injected_at - CLOCK_SLACK_SECONDS]
    about = [i for i in after if i.suspects and hit.issuperset(i.suspects)]
    beside = [i for i in after if i not in about]
    found_at, cured_at, reason = restarted_at, restarted_at, ""
    if fault.of_helper:
        if restarted_at is None:
            reason = f"no restart of the {fault.of_helper} is recorded"
    else:
        right = [i for i in about if i.fault_class in fault.classes]
        found_at = min((i.found_at for i in right), default=None)
        cures = [i.cured_at for i in about]
        cured_at = None if None in cures else max((at for at in cures if at is not None), default=None)
        if not right and about:
            reason = f"called {about[0].fault_class}: {about[0].because}"
        elif not right and beside:
            reason = f"another was named, {', '.join(beside[0].suspects) or 'none'}: {beside[0].because}"
        elif not right:
            reason = "no incident"
        elif cured_at is None:
            reason = "named, and not cured"
    return {
        "named": found_at is not None,
        "found_seconds": None if found_at is None else round(max(0.0, found_at - injected_at), 2),
        "cured_seconds": None if cured_at is None else round(max(0.0, cured_at - injected_at), 2),
        "classes": sorted({i.fault_class for i in about}),
        "alarms": [f"{i.fault_class}, {', '.join(i.suspects) or 'no suspect'}: {i.because}" for i in beside],
        "reason": reason,
    }


def innocents(
    before: Sequence[RunProcess], alive: Iterable[RunProcess], excused: frozenset[int], nodes: frozenset[str]
) -> list[str]:
    """Processes that are gone although they were neither hit nor in a plan (`excused`), nor on a lost node."""
    still = {(p.pid, p.start_ticks) for p in alive}
    gone = [p for p in before if (p.pid, p.start_ticks) not in still]
    return [str(p) for p in gone if p.pid not in excused and (not p.node or p.node not in nodes)]


def unjudged(error: Exception) -> dict[str, Any]:
    """What is written of a fault if nothing could be found out: it counts as not named and not cured."""
    reason = str(error) if isinstance(error, Stopped) else f"{type(error).__name__}: {error}"
    nothing: dict[str, list[str]] = {
        key: [] for key in ("classes", "alarms", "innocent", "others_in_plans", "problems")
    }
    return {"named": False, "found_seconds": None, "cured_seconds": None, **nothing, "reason": reason}


class Stopped(Exception):
    """The run is over."""


def incidents_since(events: Sequence[Event], since: float) -> list[Seen]:
    joined = summarize_incidents(events, incarnation_records(events, {}), ())
    return [Seen.of(s) for s in joined.summaries if s.incident.opened_at >= since - CLOCK_SLACK_SECONDS]


def restart_of(fault: Fault, events: Sequence[Event], since: float, node: str) -> float | None:
    """When the killed helper was started again."""
    for event in events:
        said = event.payload
        restarted = isinstance(said, ComponentRestarted) and said.what == fault.of_helper and said.node in (node, "")
        if restarted and event.wall_at >= since:
            return event.wall_at
    return None
