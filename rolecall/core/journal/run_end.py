"""The end of a run, as its journal says: the newest `run_ended`, unless `rolecall up` has continued the run since."""

import json
from collections.abc import Iterable

from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import ComponentRestarted, RunEnded

DONE_FLAG = "done"
"""Flag in which the controller stores its final record, including the ledger's head, at an orderly shutdown: the run is
over for good."""


def run_end(events: Iterable[Event]) -> Event | None:
    """None: the run has not ended, or goes on again. `events`: in order; other kinds are skipped."""
    end = None
    for event in events:
        if isinstance(event.payload, RunEnded):
            end = event
        elif isinstance(event.payload, ComponentRestarted) and event.payload.continues_run:
            end = None
    return end


def recorded_end(journal: Journal) -> Event | None:
    """`run_end` of a journal."""
    last = journal.last(EventKind.RUN_ENDED)
    if last is None:
        return None
    return run_end([last, *journal.events(after=last.seq, kinds=(EventKind.COMPONENT_RESTARTED,), damaged=[])])


def record_missed_end(journal: Journal) -> RunEnded | None:
    """Records the end of a run whose supervisor was lost after the controller was done; None: nothing is missing."""
    done = journal.flag(DONE_FLAG)
    if done is None or recorded_end(journal) is not None:
        return None
    value = json.loads(done)
    ended = RunEnded(outcome=str(value["outcome"]), because=str(value["because"]))
    journal.append(ended)
    return ended
