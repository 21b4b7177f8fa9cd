"""`rolecall watch agents|prometheus|recording` while it lasts: a table on a terminal, one JSON object a line elsewhere.

What a table or a line says is pure (`job_table`, `panel_table`, `*_event`); the classes only write it.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.text import ago, counted, in_words, iso_utc, past, plain, spans
from rolecall.recovery.incidents import Incident, IncidentState
from rolecall.terminal.console import BAD, GOOD, PLAIN, SOFT, STRONG, WARN, Indented, aligned
from rolecall.watch.job import WatchedJob, WatchedRank, grouped
from rolecall.watch.panels import WatchedPanels

ROWS_MAX = 15
"""Of a table: it must leave room for incidents in a window of 24 lines."""
JOBS_SHOWN_MAX = 4
CLOSED_SHOWN, CLOSED_SECONDS = 3, 3600.0
"""Of incidents that are over: the newest, for an hour."""
REFRESHES_PER_SECOND = 2
FAULTY_STATES = {"exited": SOFT, "stopped": BAD}

Out = Callable[[str], None]


def _text(*pieces: str | tuple[str, str]) -> Text:
    parts = [(p, PLAIN) if isinstance(p, str) else p for p in pieces]
    return Text.assemble(*((plain(text), style) for text, style in parts))


# --- a job, through its agents ------------------------------------------------------------------------------------


def job_table(job: WatchedJob) -> RenderableType:
    """What is watched, its ranks (those of a larger job by replica), and the incidents."""
    each = len(job.ranks) <= ROWS_MAX
    groups = [[r] for r in job.ranks] if each else list(grouped(job.ranks).values())
    rows = [
        (
            _text(ranks[0].replica),
            _text(spans(r.rank for r in ranks)),
            *([_text(str(ranks[0].pid or ""))] if each else []),
            _text(ranks[0].found_by or "not known yet"),
            _text(ranks[0].node),
            _states(ranks),
            _text(f"step {max(r.step for r in ranks)}" if any(r.step >= 0 for r in ranks) else ""),
        )
        for ranks in groups
    ]
    parts: list[RenderableType] = [Indented(_text(("watching ", SOFT), (job.text, STRONG)))]
    if len(job.jobs) > 1:
        jobs = f"{counted(len(job.jobs), 'job')}: {', '.join(job.jobs)}"
        parts.append(Indented(_text((jobs, WARN), "; --job JOB watches one of them")))
    for other in job.other_jobs[:JOBS_SHOWN_MAX]:
        words = f" also runs here and is not watched; --job {other} watches it in a run of its own"
        parts.append(Indented(_text((f"job {other}", WARN), words)))
    if rows:
        names = ("replica", *(("rank", "pid") if each else ("ranks",)), "found by", "node", "state", "")
        parts += aligned([[_text((name, SOFT)) for name in names], *rows[:ROWS_MAX]])
    if len(rows) > ROWS_MAX:
        parts.append(_text((f"  and {counted(len(rows) - ROWS_MAX, 'more replica')}", SOFT)))
    for node, since in sorted(job.unreachable.items()):
        parts.append(_text(("  no answer", BAD), f" from the agent on {node}; the outage began {ago(since, job.at)}"))
    current = [i for i in job.incidents if i.state is not IncidentState.CLOSED]
    since = job.at - CLOSED_SECONDS
    closed = [i for i in job.incidents if i.closed_at is not None and i.closed_at >= since]
    if not current:
        parts.append(_text(("no open incident", GOOD)))
    for incident in [*current, *closed[-CLOSED_SHOWN:]]:
        parts.append(Indented(_incident(incident, job.at)))
    return Group(*parts)


def _states(ranks: Sequence[WatchedRank]) -> Text:
    counts = Counter(r.state for r in ranks)
    if len(counts) == 1:
        (state,) = counts
        return _text((state, FAULTY_STATES.get(state, GOOD)))
    parts = []
    for state in counts:
        numbers = spans(r.rank for r in ranks if r.state == state)
        shown = f" (rank{'s' * (counts[state] > 1)} {numbers})" if state in FAULTY_STATES else ""
        words = state if state in FAULTY_STATES or state == "running" else f"in {state}"  # a phase
        parts.append(_text((f"{counts[state]} {words}{shown}", FAULTY_STATES.get(state, GOOD))))
    return Text(", ").join(parts)


def _incident(incident: Incident, now: float) -> Text:
    found = incident.diagnosis
    state = (in_words(incident.outcome or "open"), WARN if incident.outcome else BAD)
    at = ago(incident.opened_at, now)
    because = past(found.because) if incident.outcome else found.because
    return _text((incident.incident_id, STRONG), " ", state, f": {because} ", (f"(opened {at})", SOFT))


def incident_event(incident: Incident) -> dict[str, Any]:
    return {
        "event": "incident",
        "incident_id": incident.incident_id,
        "state": str(incident.state),
        "open": incident.state is not IncidentState.CLOSED,
        "outcome": str(incident.outcome) if incident.outcome else None,
        "fault_class": str(incident.diagnosis.fault_class),
        "suspects": incident.diagnosis.to_dict()["suspects"],
        "because": incident.diagnosis.because,
        "opened_at": incident.opened_at,
        "closed_at": incident.closed_at,
    }


class JobLines:
    """A JSON object for each change: of what is watched, of the agents that answer, of an incident's state."""

    def __init__(self, out: Out) -> None:
        self._out = out
        self._said: dict[str, Any] = {}

    def show(self, job: WatchedJob) -> None:
        ranks = [{"replica": r.replica, "rank": r.rank, "node": r.node, "pid": r.pid} for r in job.ranks]
        what = {
            "num_ranks": len(ranks),
            "nodes": list(job.nodes),
            "jobs": list(job.jobs),
            "other_jobs": list(job.other_jobs),
            "text": job.text,
            "ranks": ranks,
        }
        self._say("watching", {"event": "watching", **what})
        if job.unreachable or "unreachable" in self._said:
            self._say("unreachable", {"event": "unreachable", "nodes": dict(sorted(job.unreachable.items()))})
        for incident in job.incidents:
            self._say(incident.incident_id, incident_event(incident))

    def _say(self, name: str, value: dict[str, Any]) -> None:
        if self._said.get(name) != value:
            self._said[name] = value
            self._out(json.dumps(value))


class _Screen:
    """A renderable, redrawn in place. A context manager."""

    def __init__(self, console: Console, first: Text, *, transient: bool) -> None:
        self._console = console
        self._newest: RenderableType = first
        self._live = Live(
            get_renderable=lambda: self._newest,
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=transient,
        )

    def __enter__(self) -> Self:
        self._live.start()
        # The table shows the events; a warning is printed above it, because the live display has replaced stderr.
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class JobScreen(_Screen):
    """The table; the last one stays."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, Text("waiting for the agents"), transient=False)

    def show(self, job: WatchedJob) -> None:
        self._newest = job_table(job)


# --- a fleet, through its metrics ---------------------------------------------------------------------------------


def panel_table(seen: WatchedPanels) -> RenderableType:
    head = [_text((name, SOFT)) for name in ("panel", "machines", "metrics", "interval")]
    rows = [
        (
            _text(s.name),
            _text(f"{len(s.machines):,}"),
            _text(f"{len(s.metrics):,}"),
            _text(f"{s.interval_seconds:g} s"),
        )
        for s in seen.shapes
    ]
    parts: list[RenderableType] = [_text(("watching ", SOFT), (seen.where, STRONG))]
    parts += aligned([head, *rows[:ROWS_MAX]])
    if len(rows) > ROWS_MAX:
        parts.append(_text((f"  and {counted(len(rows) - ROWS_MAX, 'more panel')}", SOFT)))
    number = (counted(seen.num_findings, "finding"), BAD) if seen.num_findings else ("no finding", GOOD)
    parts.append(_text(number, f" in {counted(seen.num_ticks, 'tick')}, the newest of {iso_utc(seen.at)}"))
    return Group(*parts)


def finding(diagnosis: Diagnosis) -> Text:
    """Detection time, diagnosis, reason, onset, and remedy."""
    advice = f"; {diagnosis.advice}" if diagnosis.advice else ""
    since = f" (since {iso_utc(diagnosis.onset)}, confidence {diagnosis.confidence:.2f}{advice})"
    at = (f"{iso_utc(diagnosis.detected_at)} ", SOFT)
    return _text(at, (diagnosis.fault_class, BAD), f": {diagnosis.because}", (since, SOFT))


def verdict(seen: WatchedPanels) -> Text:
    if seen.num_findings:
        head = (f"{counted(seen.num_findings, 'finding')} in", BAD)
    elif seen.open_ends:
        head = ("nothing found, but not everything could be checked, in", WARN)
    else:
        head = ("healthy: nothing found in", GOOD)
    return _text(head, f" {counted(seen.num_ticks, 'tick')} of {seen.text}")


class PanelLines:
    """A JSON object a line: what is watched, whenever it changes; each finding; and the end."""

    def __init__(self, out: Out) -> None:
        self._out = out
        self._said = ""

    def show(self, seen: WatchedPanels) -> None:
        if seen.text != self._said:
            self._said = seen.text
            self._out(json.dumps({"event": "watching", "where": seen.where, "text": plain(seen.text)}))

    def found(self, diagnosis: Diagnosis) -> None:
        self._out(json.dumps({"event": "finding", "diagnosis": diagnosis.to_dict()}))

    def end(self, seen: WatchedPanels) -> None:
        value = {"event": "end", "findings": seen.num_findings, "ticks": seen.num_ticks, "text": verdict(seen).plain}
        self._out(json.dumps({**value, "cannot_tell": list(seen.open_ends)}))


class PanelScreen(_Screen):
    """The table below the findings so far; at the end the verdict replaces it."""

    def __init__(self, console: Console, where: str) -> None:
        super().__init__(console, _text("waiting for the first answer of ", (where, STRONG)), transient=True)

    def show(self, seen: WatchedPanels) -> None:
        self._newest = panel_table(seen)

    def found(self, diagnosis: Diagnosis) -> None:
        self._console.print(Indented(finding(diagnosis)))

    def end(self, seen: WatchedPanels) -> None:
        self._live.stop()
        self._console.print(Indented(verdict(seen)))
        for line in seen.open_ends:
            self._console.print(Indented(_text(line), 4, 8))
