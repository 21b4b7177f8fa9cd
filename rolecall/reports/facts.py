"""Everything that a report is made of, read once from a run directory. Reads, and decides nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.core.errors import RolecallError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import GroupState, Ledger
from rolecall.core.journal.payloads import RunEnded, RunStarted
from rolecall.core.rundir import RunDir
from rolecall.views.audit import RunAudit, audit_run
from rolecall.views.injections import InjectedFault, parse_injections
from rolecall.views.lifetimes import IncarnationRecord, Key, incarnation_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was read of a run; from here on the report is arithmetic."""

    run_id: str
    job: Mapping[str, Any]  # `run.json`
    events: Sequence[Event]
    known: Mapping[Key, IncarnationRecord]
    faults: Sequence[InjectedFault]
    steps_undone: Mapping[int, float]
    audit: RunAudit

    @property
    def replica_faults(self) -> list[InjectedFault]:
        return [f for f in self.faults if not f.of_helper]

    @property
    def run_started(self) -> RunStarted | None:
        return next((e.payload for e in self.events if isinstance(e.payload, RunStarted)), None)

    @property
    def run_ended(self) -> RunEnded | None:
        return next((e.payload for e in reversed(self.events) if isinstance(e.payload, RunEnded)), None)

    def first(self, kind: EventKind) -> Event | None:
        return next((e for e in self.events if e.kind is kind), None)

    def last(self, kind: EventKind) -> Event | None:
        return next((e for e in reversed(self.events) if e.kind is kind), None)

    @property
    def started_at(self) -> float:
        begun = self.first(EventKind.RUN_STARTED) or (self.events[0] if self.events else None)
        return begun.wall_at if begun else 0.0

    @property
    def ended_at(self) -> float:
        ended = self.last(EventKind.RUN_ENDED) or (self.events[-1] if self.events else None)
        return ended.wall_at if ended else 0.0

    @property
    def config(self) -> dict[str, Any]:
        found = self.job.get("config") or self.job.get("job") or {}
        return dict(found) if isinstance(found, Mapping) else {}


def read_facts(run: RunDir) -> Facts:
    """Reads a run.

    Raises:
        JournalError: there is no journal.
        JournalCorrupt: its events do not hold, so that no fact about the run can be taken from them.
        RolecallError: the injector's log is damaged.
    """
    found = audit_run(run)
    if found.damage is not None:
        raise found.damage
    journal = Journal(run.database_url, create=False)
    try:
        events = journal.events(limit=found.journal.position) if found.journal.position else []
        known = incarnation_records(events, journal.actual())
        lines = Ledger(journal.store).lines()
    finally:
        journal.close()
    try:
        injections = run.injections_path.read_text(encoding="utf-8")
    except FileNotFoundError:
        injections = ""
    try:
        faults = parse_injections(injections)
    except ValueError as e:
        raise RolecallError(f"{run.injections_path}: {e}") from e
    return Facts(
        run_id=run.run_id,
        job=run.read(),
        events=events,
        known=known,
        faults=faults,
        steps_undone=undone_steps(lines),
        audit=found,
    )


def undone_steps(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Optimizer step -> wall time at which groups trained in it were marked undone."""
    step_of: dict[str, int] = {}
    undone: dict[int, float] = {}
    for line in lines:
        if line["state"] == GroupState.TRAINED:
            step_of[line["group_id"]] = int(line["step"])
        elif line["state"] == GroupState.UNDONE and line["group_id"] in step_of:
            undone[step_of.pop(line["group_id"])] = float(line["wall_at"])
    return undone
