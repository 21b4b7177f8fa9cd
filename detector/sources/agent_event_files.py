"""Diagnoses an agent's event files (`events.jsonl` of its data directory, copied from one or more nodes): replays the
events in time order to the detectors of a live run.

Events are exits, exceptions and hardware and kernel faults. There are no samples, so hung or slow processes cannot be
detected. Damaged lines are counted; an agent that dies may leave an incomplete last line.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Evidence, Finding
from rolecall.core.errors import ReadingStopped, UnreadableInput
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.core.text import counted
from rolecall.detector.base.findings import ADVISES, settles
from rolecall.detector.base.observation import Observation
from rolecall.detector.base.read_budget import Budget, Check, head_of, no_check
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.sources.agent_wire import checked_event

KEYS = frozenset({"seq", "kind", "node", "wall_at", "at"})
LINE_BYTES_MAX = 256 << 10
"""An event holds at most 16 texts of 2,000 characters (agent/events.py)."""
EVENTS_MAX = 1_000_000
KEPT_BYTES = 2000
"""Approximate size of an event in memory."""
CHECK_LINES = 1000
GRACES_SECONDS = (1.0, 3.0, 6.0, 12.0)
"""Delays after an event at which the detectors run again if no other event came: some wait for related events."""


@dataclass(slots=True)
class Events:
    path: Path
    events: list[AgentEvent] = field(default_factory=list)
    num_damaged: int = 0


def is_events(path: Path) -> bool:
    """Whether the file begins with an event. Raises OSError."""
    line = head_of(path, LINE_BYTES_MAX).partition(b"\n")[0]
    if not line.startswith(b"{"):
        return False
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and set(first) >= KEYS


def read(path: Path, budget: Budget) -> Events:
    """The events up to where the budget ends the reading. Raises UnreadableInput: not readable, no event, or too
    many."""
    found = Events(path)
    try:
        with path.open("rb") as f, suppress(ReadingStopped):
            while line := f.readline(LINE_BYTES_MAX + 1):
                try:
                    found.events.append(checked_event(json.loads(line)))
                except (ValueError, RecursionError):
                    found.num_damaged += 1
                if len(found.events) > EVENTS_MAX:
                    raise UnreadableInput(where=str(path), reason=f"more than {EVENTS_MAX:,} events")
                if (len(found.events) + found.num_damaged) % CHECK_LINES == 0:
                    budget.check_time(str(path))
                    budget.keep(CHECK_LINES * KEPT_BYTES, str(path))
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=f"it cannot be read: {e.strerror}") from e
    if not found.events:
        raise UnreadableInput(where=str(path), reason="none of its lines is an event")
    return found


def diagnose(files: Sequence[Events], check: Check = no_check) -> list[Finding]:
    """The findings of the live detectors, each fault once, as first reported; those up to where `check` ends the
    replay, if it does."""
    detector, found = LiveDetector(DetectorConfig()), dict[str, Diagnosis]()
    with suppress(ReadingStopped):
        for observation in _observations([e for f in files for e in f.events]):
            check()
            for d in detector.observe(observation):
                found.setdefault(d.key, d)
    # A hardware fault names only its node until a process dies because of it: that diagnosis supersedes it.
    exact = {(d.fault_class, s.node) for d in found.values() for s in d.suspects if s.replica}
    vague = [d for d in found.values() if d.suspects and not any(s.replica for s in d.suspects)]
    superseded = [d for d in vague if all((d.fault_class, s.node) in exact for s in d.suspects)]
    # For a replica that lost ranks one after another, the diagnosis with the most ranks supersedes the others.
    processes = {d.key: {s.process for s in d.suspects if s.process is not None} for d in found.values()}
    superseded += [
        d
        for d in found.values()
        if processes[d.key]
        and any(processes[d.key] < processes[o.key] and o.fault_class == d.fault_class for o in found.values())
    ]
    return [_finding(d) for d in found.values() if d not in superseded]


def _observations(events: Sequence[AgentEvent]) -> Iterator[Observation]:
    events = sorted(events, key=lambda e: (e.wall_at, e.seq))
    for i, event in enumerate(events):
        yield Observation(wall_at=event.wall_at, events=(event,))
        until = events[i + 1].wall_at if i + 1 < len(events) else float("inf")
        for seconds in GRACES_SECONDS:
            if event.wall_at + seconds < until:
                yield Observation(wall_at=event.wall_at + seconds)


def _finding(diagnosis: Diagnosis) -> Finding:
    more = [Evidence(kind=ADVISES, text=diagnosis.advice)] if diagnosis.advice else []
    more += [settles(diagnosis.settle)] if diagnosis.settle else []
    return Finding(
        detector=diagnosis.detectors[0],
        suspects=diagnosis.suspects,
        fault_class=diagnosis.fault_class,
        onset=diagnosis.onset,
        detected_at=diagnosis.detected_at,
        confidence=diagnosis.confidence,
        because=diagnosis.because,
        evidence=(*diagnosis.evidence, *more),
        about=diagnosis.about,
    )


def summary(files: Sequence[Events]) -> str:
    nodes = {str(e.node) for f in files for e in f.events}
    return f"{counted(sum(len(f.events) for f in files), 'event')} of {counted(len(nodes), 'node')}"


def remarks(files: Sequence[Events]) -> tuple[str, ...]:
    damaged = [f"{f.path}: {counted(f.num_damaged, 'damaged line')} left out" for f in files if f.num_damaged]
    if all(e.kind in _OF_AGENT for f in files for e in f.events):
        damaged.append("cannot tell: no event concerns a process or hardware; events of a run would settle it")
    return tuple(damaged)


_OF_AGENT = {AgentEventKind.AGENT_STARTED, AgentEventKind.PROBE_DOWN, AgentEventKind.PROBE_UP, AgentEventKind.OTHER}
