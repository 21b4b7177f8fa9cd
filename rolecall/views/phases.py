"""Phases of recoveries: where their time goes. Pure.

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
from rolecall.views.incidents import IncidentSummary, last_of
from rolecall.views.lifetimes import IncarnationRecord

PHASES = ("detect", "decide", "restart", "reconnect", "recompute")
PHASES_LEAD = (
    "Of each recovery. Detect: fault (its onset, if the injection is not known) to finding; decide: to the start of "
    "the action; restart: to a replacement that is ready; reconnect: until it serves; recompute: until the step that "
    "was interrupted is committed."
)


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
    """`seconds`: by phase. `whole`: from the fault until the step that it interrupted is committed, seconds."""

    seconds: Mapping[str, float | None]
    whole: float | None
    incident_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Layout in the report."""
        return {"incident_id": self.incident_id, **self.seconds, "whole": self.whole}


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
        phase: None if since is None or until is None else round(max(0.0, until - since), 3)
        for phase, (since, until) in zip(PHASES, moments, strict=True)
    }
    whole = None if committed_at is None else round(committed_at - began_at, 3)
    return RecoveryPhases(seconds=seconds, whole=whole, incident_id=incident_id)


def phases_of(summary: IncidentSummary, commits: Commits) -> RecoveryPhases | None:
    """Phases of an incident's recovery; None: no action has started."""
    incident = summary.incident
    if incident.action_started_at is None:
        return None
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
    """Of every recovery that has started, in the order of the incidents."""
    commits = Commits(events)
    return tuple(found for s in summaries if (found := phases_of(s, commits)) is not None)


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
