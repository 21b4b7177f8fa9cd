"""The state of a run in one line, for the Overview page and the browser's tab; the step that an incident hit. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.core.faults import FaultClass
from rolecall.core.text import plain
from rolecall.dashboards.data.incident_titles import MODE_OBSERVE, SEVERITIES, Severity, severity
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.reader import JournalSnapshot
from rolecall.recovery.incidents import Incident
from rolecall.views.observed_course import step_at

KIND_OF: Mapping[Severity, str] = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.MINOR: "note"}
GLYPHS: Mapping[str, str] = {"bad": "▲", "warn": "◆", "note": "◔", "good": "●"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    kind: str  # bad, warn, note or good
    word: str
    details: tuple[str, ...]
    num_open: int

    def tab_title(self, name: str) -> str:
        """For the browser's tab, which cuts it at the end."""
        glyph = GLYPHS[self.kind]
        counted = f"{self.num_open} open" if self.num_open else "no open incidents"
        return plain(" · ".join(filter(None, (f"{glyph} {name}".strip(), self.word.lower(), counted))), 100)


STALL_SECONDS, STALL_STEPS = 120.0, 5.0
"""A run is stalled after this time without a step, and not before this many of its slowest recent steps."""
FIRST_STEP_SECONDS = 3600.0
"""A run without a step since its start, or since `rolecall up` started it again, is stalled after this time: loading a
large model takes minutes."""
STALL_RECENT = 20
"""Points of the curve from which the slowest recent step is taken."""


def run_state(snapshot: JournalSnapshot) -> RunState:
    """The state of the run in one line."""
    run, still_open = snapshot.run, snapshot.projection.open_incidents()
    kind, word = "good", "Training"
    unwatched, stalled = unwatched_words(snapshot), _stalled_seconds(snapshot)
    if run.ended:
        kind, word = ("good" if run.ended == "completed" else "bad"), f"Run {run.ended}"
    elif stalled is not None and run.step + 1 == run.num_steps:
        word = "All steps done: last evaluation and checkpoint"
    elif stalled is not None:
        kind, word = "bad", f"Stalled: no step for {age(stalled)}"
    elif run.step >= 0 and _awaits_step(snapshot):
        kind, word = "note", "Starting again"
    elif run.step < 0:
        ours = run.started_at is not None or (run.replicas and not snapshot.observed)
        word = "Starting" if ours else "Watched"
        kind = "note" if word == "Starting" else "good"
        if word == "Watched" and not (snapshot.observed or snapshot.projection.incidents):
            kind, word = "note", "Not started"
        elif (
            word == "Watched"
            and snapshot.observed
            and not any(r.alive_at(snapshot.sampled_at) for r in snapshot.observed)
        ):
            kind, word = "warn", "Watched: no rank is alive"
    num = len(still_open)
    counted = f"{num} open incident{'s' if num != 1 else ''}" if num else "no open incidents"
    if run.ended:
        counted = counted if num else ""
    else:
        worst = min((SEVERITIES.index(severity(i)) for i in still_open), default=None)
        if worst is not None and kind != "bad":
            kind = KIND_OF[SEVERITIES[worst]]
        if run.paused and kind != "bad":
            kind = "warn"
        if unwatched:
            kind = "bad"
            word, unwatched = (unwatched.capitalize(), "") if word.startswith("Watched") else (word, unwatched)
    step = f"step {run.step + 1:,}" + (f" of {run.num_steps:,}" if run.num_steps else "") if run.step >= 0 else ""
    if run.step < 0 and snapshot.course:
        step = f"step {snapshot.course[-1].step:,}"
    took = f"for {age(run.elapsed_seconds)}" if run.started_at is not None and not run.ended and not stalled else ""
    mode = f"mode {snapshot.mode}" if snapshot.mode and not run.ended else ""
    if mode and snapshot.orphans_mode not in ("", snapshot.mode):
        mode += f", of orphans {snapshot.orphans_mode}"
    elif snapshot.mode == MODE_OBSERVE and mode:
        mode += ": no action is taken"
    because = snapshot.projection.ended or "" if run.ended else ""
    if because == f"{run.step + 1} steps":
        because = ""  # the step says it
    details = tuple(filter(None, (counted, unwatched, step, because, took, mode)))
    return RunState(kind=kind, word=word, details=details, num_open=num)


START_WATCH = "Run `rolecall status RUN`: it prints the command that starts a watch."


def unwatched_words(snapshot: JournalSnapshot) -> str:
    """`not watched for 12 min`; empty for a run that is watched, has ended, or has not begun."""
    run, lease = snapshot.run, snapshot.lease
    if run.ended or snapshot.watched or (lease is None and run.started_at is None):
        return ""
    if lease is None:
        return "never watched"
    return f"not watched for {age(max(0.0, snapshot.at - lease.expires_at))}" if lease.expires_at else "not watched"


def _awaits_step(snapshot: JournalSnapshot) -> bool:
    """Whether no step was committed since the run was started, or started again."""
    curve, continued_at = snapshot.trends.curve, snapshot.run.continued_at
    return not curve or (continued_at is not None and curve[-1].at < continued_at)


def _stalled_seconds(snapshot: JournalSnapshot) -> float | None:
    """Time since the last step of a run that stands still, or since the start; None: it goes on, or has ended."""
    run, curve = snapshot.run, snapshot.trends.curve
    if run.ended:
        return None
    if _awaits_step(snapshot):
        begun = run.started_at if run.continued_at is None else run.continued_at
        silent = snapshot.at - begun if begun is not None else 0.0
        return silent if silent > FIRST_STEP_SECONDS else None
    slowest = max((b.seconds_max for b in curve[-STALL_RECENT:] if math.isfinite(b.seconds_max)), default=0.0)
    silent = snapshot.at - curve[-1].at
    return silent if silent > max(STALL_SECONDS, STALL_STEPS * max(slowest, run.step_seconds or 0.0)) else None


def step_of(incident: Incident, snapshot: JournalSnapshot) -> int | None:
    """The step that the fault hit. Of a job that rolecall only watches: the one at which the suspects stand; if they go
    on, as a slow rank does, the one of the job at the onset."""
    if snapshot.trends.curve:
        return snapshot.trends.steps.get(incident.incident_id)
    hit = step_at(snapshot.course, incident.first_diagnosis.onset)
    goes_on = incident.closed_at is not None or incident.diagnosis.fault_class is FaultClass.SLOW
    if goes_on and hit is not None:
        return hit
    named = {(s.replica, s.rank) for s in incident.diagnosis.suspects}
    pids = {(str(s.node), s.process.pid) for s in incident.diagnosis.suspects if s.process is not None}
    # A rank that was started again stands at a step of its own.
    here = (r for r in snapshot.observed if {(r.replica, r.rank), (r.replica, None)} & named)
    return max((r.step for r in here if r.step >= 0 and (not pids or (r.node, r.pid) in pids)), default=hit)
