"""The state of a run in one line, for the Overview page and the browser's tab. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.core.text import plain
from rolecall.dashboards.data.incident_titles import MODE_OBSERVE, SEVERITIES, Severity, severity
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.reader import JournalSnapshot

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


def run_state(snapshot: JournalSnapshot) -> RunState:
    """The state of the run in one line."""
    run, still_open = snapshot.run, snapshot.projection.open_incidents()
    kind, word = "good", "Training"
    if run.ended:
        kind, word = ("good" if run.ended == "completed" else "bad"), f"Run {run.ended}"
    elif run.step < 0:
        word = "Starting" if run.started_at is not None or run.replicas else "Watched"
        kind = "note" if word == "Starting" else "good"
        if word == "Watched" and not (snapshot.observed or snapshot.projection.incidents):
            kind, word = "note", "Not started"
    num = len(still_open)
    counted = f"{num} open incident{'s' if num != 1 else ''}" if num else "no open incidents"
    if run.ended:
        counted = counted if num else ""
    else:
        worst = min((SEVERITIES.index(severity(i)) for i in still_open), default=None)
        if worst is not None:
            kind = KIND_OF[SEVERITIES[worst]]
        if run.paused and kind != "bad":
            kind = "warn"
        if not snapshot.watched and (snapshot.lease is not None or run.started_at is not None):
            kind = "bad"
    step = f"step {run.step + 1:,}" + (f" of {run.num_steps:,}" if run.num_steps else "") if run.step >= 0 else ""
    took = f"for {age(run.elapsed_seconds)}" if run.started_at is not None and not run.ended else ""
    mode = f"mode {snapshot.mode}" if snapshot.mode and not run.ended else ""
    mode += ": no action is taken" if snapshot.mode == MODE_OBSERVE and mode else ""
    because = snapshot.projection.ended or "" if run.ended else ""
    details = tuple(filter(None, (counted, step, because, took, mode)))
    return RunState(kind=kind, word=word, details=details, num_open=num)
