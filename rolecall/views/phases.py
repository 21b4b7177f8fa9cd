"""Phases of recoveries: where their time goes, and in which of them the work of a run is lost. Pure.

    detect      fault (its onset, if the injection is not known) -> finding
    decide      finding -> the action starts
    restart     action -> the replacement is ready
    reconnect   ready -> it serves (rollout: with proof of its weights; trainer: in an epoch)
    recompute   serving -> the step that the fault interrupted is committed

Of several replacements the last one counts: the moment is None as long as one of them has not got there. A phase
without one of its two moments is None. Survivors may commit the interrupted step before the replacement serves: then
nothing is computed again, and `recompute` is 0.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rolecall.core.journal.events import Event
from rolecall.core.journal.payloads.run import StepCommitted
from rolecall.views.ettr import UNDETECTED, Charge
from rolecall.views.incidents import IncidentSummary, last_of
from rolecall.views.lifetimes import IncarnationRecord

PHASES = ("detect", "decide", "restart", "reconnect", "recompute")
PHASES_LEAD = (
    "Of each recovery. Detect: fault (its onset, if the injection is not known) to finding; decide: to the start of "
    "the action; restart: to a replacement that is ready; reconnect: until it serves; recompute: until the step that "
    "was interrupted is committed."
)
AFTERWARDS, NOT_KNOWN = "afterwards", "not known"
LOST_IN = (*PHASES, AFTERWARDS, NOT_KNOWN, UNDETECTED)
"""Where replica-seconds are lost, in the order in which they are shown. `AFTERWARDS`: when all phases are over;
`NOT_KNOWN`: in a phase without a known end, or a later one."""
LOST_LEAD = (
    "Each replica-second that was lost, by the phase of the recovery: of incidents at the same time, of the one that "
    "began first. Healthy trainers that wait count, too; work that is done again does not, as in ETTR. Afterwards: the "
    "recovery is over, but a replica that lent its node does not serve yet. Not known: from the first phase without a "
    "known end, also where no action has started. Undetected: injected faults without an incident."
)
NOISE_SECONDS = 1e-3
"""Wall seconds as floats are exact to a microsecond, and a phase is the difference of two."""


class Commits:
    """All commits of a run, those of steps that were undone later included."""

    def __init__(self, events: Iterable[Event]) -> None:
        found = sorted((e.wall_at, e.payload.step) for e in events if isinstance(e.payload, StepCommitted))
        self._times, self._steps = [at for at, _ in found], [step for _, step in found]

    def of_interrupted(self, at: float) -> float | None:
        """When the step that was in progress at `at` was committed, wall seconds; None: not yet. It is the step after
        the last commit: after a rollback not the one after the largest step."""
        first = bisect_right(self._times, at)
        interrupted = self._steps[first - 1] + 1 if first else 0
        later = range(first, len(self._steps))
        return next((self._times[n] for n in later if self._steps[n] == interrupted), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPhases:
    """`began_at`: the fault, wall seconds. `seconds`: by phase. `whole`: from the fault until the step that it
    interrupted is committed, seconds."""

    began_at: float
    seconds: Mapping[str, float | None]
    whole: float | None
    incident_id: str = ""

    @property
    def has_action(self) -> bool:
        """Whether an action has started."""
        return self.seconds["decide"] is not None

    def to_dict(self) -> dict[str, Any]:
        """Layout in the report."""
        known = {**self.seconds, "whole": self.whole}
        rounded = {name: None if lasted is None else round(lasted, 3) for name, lasted in known.items()}
        return {"incident_id": self.incident_id, **rounded}


def recovery_phases(
    *,
    began_at: float,
    detected_at: float | None,
    started_at: float | None,
    made: Sequence[IncarnationRecord],
    commits: Commits,
    incident_id: str = "",
) -> RecoveryPhases:
    """Phases of one recovery. `started_at`: of its action; `made`: the replacements. Times are wall seconds."""
    committed_at = commits.of_interrupted(began_at)
    ready_at, serving_at = last_of([r.ready_at for r in made]), last_of([r.serving_at for r in made])
    moments = pairwise((began_at, detected_at, started_at, ready_at, serving_at, committed_at))
    seconds = {
        phase: None if since is None or until is None else max(0.0, until - since)
        for phase, (since, until) in zip(PHASES, moments, strict=True)
    }
    whole = None if committed_at is None else committed_at - began_at
    return RecoveryPhases(began_at=began_at, seconds=seconds, whole=whole, incident_id=incident_id)


def phases_of(summary: IncidentSummary, commits: Commits) -> RecoveryPhases:
    """Phases of an incident's recovery; before an action, only the first one is known."""
    incident = summary.incident
    # Of a restart of the job: until it computes again.
    computing = [r for r in summary.replacements if r.role in ("rollout", "trainer")]
    return recovery_phases(
        began_at=summary.began_at,
        detected_at=summary.detected_at,
        started_at=incident.action_started_at,
        made=computing or summary.replacements,
        commits=commits,
        incident_id=incident.incident_id,
    )


def phases_of_run(summaries: Iterable[IncidentSummary], events: Iterable[Event]) -> tuple[RecoveryPhases, ...]:
    """Of every incident, in their order."""
    commits = Commits(events)
    return tuple(phases_of(s, commits) for s in summaries)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase over the recoveries of a run. `share`: of the seconds of all phases."""

    phase: str
    num: int
    median_seconds: float
    worst_seconds: float
    total_seconds: float
    share: float


def phase_times(recoveries: Sequence[Mapping[str, float | None]]) -> tuple[PhaseTime, ...]:
    """Phases in their order, those without a known time left out. `recoveries`: seconds by phase."""
    known = {phase: [s for r in recoveries if (s := r.get(phase)) is not None] for phase in PHASES}
    total = sum(map(sum, known.values()))
    return tuple(
        PhaseTime(
            phase=phase,
            num=len(seconds),
            median_seconds=statistics.median(seconds),
            worst_seconds=max(seconds),
            total_seconds=sum(seconds),
            share=sum(seconds) / total if total else 0.0,
        )
        for phase, seconds in known.items()
        if seconds
    )


def lost_by_phase(charged: Sequence[Charge], phases: RecoveryPhases) -> dict[str, float]:
    """Replica-seconds lost in each phase of a recovery, up to the first phase that is not known."""
    found, since = {}, phases.began_at
    for phase in PHASES:
        lasted = phases.seconds[phase]
        if lasted is None:
            break
        found[phase] = sum(c.replica_seconds(since, since + lasted) for c in charged)
        since += lasted
    return found


def lost_by_incident(charged: Iterable[Charge], phases: Iterable[RecoveryPhases]) -> dict[str, dict[str, float]]:
    """Replica-seconds lost, by incident in the order in which its losses began, and by phase (`LOST_IN`). They add up
    to all that was lost. Faults without an incident have an empty id."""
    of_incident: dict[str, list[Charge]] = {}
    for charge in charged:
        of_incident.setdefault(charge.loss.incident_id, []).append(charge)
    known = {p.incident_id: p for p in phases}
    found = {}
    for which, its in of_incident.items():
        lost = lost_by_phase(its, known[which]) if which in known else {}
        rest = sum(c.replica_seconds() for c in its) - sum(lost.values())
        if rest > NOISE_SECONDS:
            lost[AFTERWARDS if len(lost) == len(PHASES) else NOT_KNOWN if which else UNDETECTED] = rest
        found[which] = lost
    return found


def lost_in_run(by_incident: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """Sums of `lost_by_incident`, in the order of `LOST_IN`; empty if nothing was lost. None: a phase that is not known
    of any incident."""
    sums = {where: [lost[where] for lost in by_incident.values() if where in lost] for where in LOST_IN}
    return {where: sum(its) if its else None for where, its in sums.items() if its or (by_incident and where in PHASES)}
