"""Accounting of a run in a background thread: the audit, and statistics over its incidents.

A page gets the latest result and never waits for a newer one, except briefly for the very first. Both are recomputed
when the journal has grown, but use at most 5 % of one core; the audit, which verifies the whole hash chain, also on
request. Events are read once and kept without fields that no statistic uses.

The audit of a long journal holds every event in memory, so it runs in a child process, and pages stay responsive:

    python -m rolecall.dashboards.pages.accounting.worker < {"url", "run_id", "path"} > the audit, pickled

The journal's URL may contain a password, so it is sent through the pipe, not as an argument or in the environment.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rolecall.core.clock import Clock
from rolecall.core.config.job import parse_job
from rolecall.core.errors import JournalUnavailable, RolecallError
from rolecall.core.journal.database import redacted
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import ChainHead, StepCommitted, WeightsAdmitted
from rolecall.core.journal.run_end import run_end
from rolecall.core.rundir import RunDir
from rolecall.dashboards.data.reader import injected_faults
from rolecall.dashboards.pages.accounting.statistics import (
    DetectionTimes,
    Episode,
    EttrBreakdown,
    RecoveryTimes,
    detection,
    episodes,
    recovery,
    times,
)
from rolecall.dashboards.settings import Settings
from rolecall.recovery.incidents import INCIDENT_KINDS
from rolecall.recovery.loop import LEASE_NAME
from rolecall.recovery.operators.run_location import run_id_of
from rolecall.views.audit import RunAudit, audit_journal
from rolecall.views.ettr import RETAINED, counted_until, steps, training_began
from rolecall.views.incidents import summarize_incidents
from rolecall.views.journal_reader import JournalReader
from rolecall.views.lifetimes import incarnation_records
from rolecall.views.mfu import MfuMeter, RoleMfu, mfu_courses, role_mfu
from rolecall.views.phases import PhaseTime, RecoveryPhases, phase_times, phases_of_run

_K = EventKind
KINDS = (*RETAINED, *INCIDENT_KINDS, _K.RUN_STARTED, _K.RUN_ENDED)
PAGE_EVENTS = 2_000
"""Events read per query, so that pages can be drawn in between."""
IDLE_FACTOR = 20.0
"""Seconds without work per second of work."""
STATISTICS_SECONDS, AUDIT_SECONDS = 5.0, 60.0
"""Shortest interval between two statistics, and two audits."""
FIRST_SECONDS = 0.5
"""How long the first page waits for the first statistics; a short journal needs 50 ms."""

APART_EVENTS = 20_000
"""Journals with fewer events are audited in-process, which is faster than starting a process."""
SECONDS_MAX = 1_800.0
"""Enough for about 20 million events; a longer audit is stuck."""
NICENESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentStatistics:
    times: EttrBreakdown | None
    detection: tuple[DetectionTimes, ...]
    recovery: tuple[RecoveryTimes, ...]
    phases: tuple[PhaseTime, ...]
    recoveries: tuple[RecoveryPhases, ...]  # oldest first
    episodes: tuple[Episode, ...]  # of incidents without an action, oldest first
    num_missed: int
    num_false_alarms: int
    num_injected: int
    mfu: Mapping[str, RoleMfu]
    mfu_courses: Mapping[str, Sequence[tuple[int, float]]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingSnapshot:
    """`audited_at`: wall seconds; None: not yet. `error`: why the latest attempt failed."""

    statistics: IncidentStatistics | None = None
    audit: RunAudit | None = None
    audited_at: float | None = None
    audit_head: ChainHead | None = None  # journal head at the time of the audit
    has_ledger: bool = True
    busy: bool = False
    error: str = ""


class AccountingWorker:
    """Thread-safe; one per process and journal."""

    def __init__(self, settings: Settings, clock: Clock, *, apart_events: int = APART_EVENTS) -> None:
        """A journal with more than `apart_events` events is audited in a child process."""
        self._settings, self._clock, self._apart_events = settings, clock, apart_events
        self._lock = threading.Lock()
        self._snapshot = AccountingSnapshot()
        self._events: list[Event] = []
        self._admitted: set[tuple[object, object]] = set()
        self._meter = _mfu_meter(settings.run)
        self._mfu_of_steps: dict[int, Mapping[str, float]] = {}  # of a repeated step the newest commit
        self._reader = JournalReader(KINDS, page_events=PAGE_EVENTS)
        self._thread: threading.Thread | None = None
        self._first = threading.Event()
        self._began: float | None = None
        self._audit_due = self._statistics_due = 0.0  # monotonic seconds
        self._statistics_head: ChainHead | None = None

    def latest(self, *, audit_now: bool = False) -> AccountingSnapshot:
        """The latest result; starts new work when it is due."""
        with self._lock:
            if audit_now:
                self._audit_due = 0.0
                self._snapshot = replace(self._snapshot, audit_head=None)
            now = self._clock.monotonic()
            due = now >= self._statistics_due or now >= self._audit_due
            if due and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="accounting", daemon=True)
                self._thread.start()
            began = self._began = now if self._began is None else self._began
        # Only for the first result; later callers get the latest one at once.
        self._first.wait(max(0.0, FIRST_SECONDS - (now - began), self._settings.patience_seconds))
        thread = self._thread
        return replace(self._snapshot, busy=thread is not None and thread.is_alive())

    def wait(self, seconds: float) -> bool:
        """Whether the current work finishes within `seconds`."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _work(self) -> None:
        try:
            with closing(Journal(self._settings.journal_url, clock=self._clock, create=False)) as journal:
                head = journal.head()
                self._update_statistics(journal, head)
                if head.position > self._apart_events:
                    self._first.set()  # do not wait for the audit of a long journal
                self._audit(journal, head)
        except RolecallError as e:
            self._failed(redacted(str(e)))
        except Exception as e:  # noqa: BLE001
            # A malformed event body, written by something else. Report it and keep the page working.
            self._failed(f"an event cannot be processed: {e!r}"[:500])
        finally:
            self._first.set()

    def _failed(self, because: str) -> None:
        with self._lock:
            self._snapshot = replace(self._snapshot, error=because)
            self._statistics_due = self._audit_due = self._clock.monotonic() + AUDIT_SECONDS

    def _update_statistics(self, journal: Journal, head: ChainHead) -> None:
        began = self._clock.monotonic()
        if began < self._statistics_due:
            return
        for page in self._reader.pages(journal):
            self._events += self._kept(page.events)
        ended = run_end(self._events[-200:]) is not None
        statistics = self._snapshot.statistics
        if statistics is None or head != self._statistics_head or not ended:
            statistics = self._statistics(journal)
        took = self._clock.monotonic() - began
        with self._lock:
            self._statistics_head = head
            self._statistics_due = self._clock.monotonic() + max(STATISTICS_SECONDS, IDLE_FACTOR * took)
            self._snapshot = replace(self._snapshot, statistics=statistics, error="")

    def _kept(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            if isinstance(event.payload, WeightsAdmitted):
                who = (event.payload.replica, event.payload.incarnation)
                if who in self._admitted:
                    continue  # only the first shows when an incarnation started to serve
                self._admitted.add(who)
            if self._meter is not None and (mfu := self._meter.take(event)):
                self._mfu_of_steps[event.as_(StepCommitted).step] = mfu
            yield event.slim()

    def _statistics(self, journal: Journal) -> IncidentStatistics:
        events, now = self._events, self._clock.wall()
        known = incarnation_records(events, journal.actual())
        faults, error = injected_faults(self._settings.run)
        replica_faults = [f for f in faults if not f.of_helper]
        joined = summarize_incidents(events, known, faults)
        committed, began = steps(events), training_began(events)
        lease = journal.lease(LEASE_NAME)
        until = counted_until(
            now,
            committed[-1].at if committed else None,
            ended=run_end(events[-200:]) is not None,
            watched=lease is not None and lease.expires_at > now,
            has_open_incident=any(s.incident.closed_at is None for s in joined.summaries),
        )
        phases = phases_of_run(joined.summaries, events)
        recoveries = tuple(p for p in phases if p.has_action)
        replicas = {r for r, _ in known}
        counted = None
        if began is not None and until is not None and until > began:
            counted = times(
                joined,
                committed,
                phases,
                began=began,
                until=until,
                num_rollouts=sum(r.startswith("rollout/") for r in replicas),
                num_trainers=sum(r.startswith("trainer/") for r in replicas),
            )
        return IncidentStatistics(
            times=counted,
            detection=detection(joined.summaries),
            recovery=recovery(joined.summaries),
            phases=phase_times([p.seconds for p in recoveries]),
            recoveries=recoveries,
            episodes=episodes(joined.summaries, now),
            num_missed=len(joined.missed),
            num_false_alarms=len(joined.false_alarms) if replica_faults else 0,
            num_injected=len(replica_faults),
            mfu=role_mfu(list(self._mfu_of_steps.values())),
            mfu_courses=mfu_courses(self._mfu_of_steps),
            note=error and f"the injection log cannot be used: {error}",
        )

    def _audit(self, journal: Journal, head: ChainHead) -> None:
        began = self._clock.monotonic()
        if began < self._audit_due or head == self._snapshot.audit_head:
            return
        run = self._settings.run
        url, apart = self._settings.journal_url, head.position > self._apart_events
        found = audited(journal, url, run.run_id if run else run_id_of(url), run, apart=apart)
        took = self._clock.monotonic() - began
        with self._lock:
            self._audit_due = self._clock.monotonic() + max(AUDIT_SECONDS, IDLE_FACTOR * took)
            self._snapshot = replace(
                self._snapshot,
                audit=found,
                audited_at=self._clock.wall(),
                audit_head=head,
                has_ledger=found.ledger.head.position > 0,
            )


def _mfu_meter(run: RunDir | None) -> MfuMeter | None:
    """None where the job file is not at hand, or not one of this rolecall."""
    try:
        return MfuMeter(parse_job(run.read().get("config"))) if run is not None else None
    except RolecallError:
        return None


def audited(journal: Journal, url: str, run_id: str, run: RunDir | None, *, apart: bool) -> RunAudit:
    """`apart`: in a child process. Raises JournalError: the audit is not possible now."""
    if not apart:
        return audit_journal(journal, run_id, run)
    request = json.dumps({"url": url, "run_id": run_id, "path": None if run is None else str(run.path)})
    argv = [sys.executable, "-m", __name__]
    try:
        child = subprocess.run(
            argv,
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        reason = (
            f"not finished after {SECONDS_MAX:.0f} s" if isinstance(e, subprocess.TimeoutExpired) else str(e.strerror)
        )
        raise JournalUnavailable(where="the audit", reason=reason, hint="run `rolecall audit RUN`") from None
    if child.returncode != 0:
        reason = f"its process exited with {child.returncode}"
        raise JournalUnavailable(where="the audit", reason=reason, hint="run `rolecall audit RUN` to see why")
    found = pickle.loads(child.stdout)  # written by our own child process
    if isinstance(found, Exception):
        raise found
    if not isinstance(found, RunAudit):
        raise TypeError(f"the audit's process returned {type(found).__name__}")
    return found


def main() -> int:
    request = json.load(sys.stdin)
    os.nice(NICENESS)
    run = None if request["path"] is None else RunDir(Path(request["path"]))
    result: RunAudit | Exception
    try:
        with closing(Journal(request["url"], create=False)) as journal:
            result = audit_journal(journal, request["run_id"], run)
    except Exception as e:  # noqa: BLE001 - raised in the parent
        result = e
    sys.stdout.buffer.write(pickle.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
