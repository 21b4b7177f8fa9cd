"""A run whose end is recorded and that `rolecall up` continues: every reader says that it goes on, until its next end."""

from contextlib import closing

import pytest

from rolecall.core.config.job import parse_job
from rolecall.core.ids import NodeId
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.run import ComponentRestarted, RunEnded
from rolecall.core.journal.run_end import recorded_end
from rolecall.core.rundir import RunDir
from rolecall.dashboards.data import reader as reading
from rolecall.dashboards.data.reader import newest
from rolecall.recovery.operators import queries
from rolecall.reports.report import make_report, read_facts
from rolecall.views.audit import audit_run
from rolecall.views.run_totals import run_account
from tests.dashboards.data.test_reader import reader_of


def _said(run: RunDir) -> list[object]:
    """How each reader says that the run has ended."""
    with closing(Journal(run.database_url)) as journal:
        events, end = journal.events(), recorded_end(journal)
        partial = newest(journal, journal.head().position)
    account = run_account(parse_job(run.read()["config"]))
    for event in events:
        account.take(event)
    time = account.lost_time.account(events[-1].wall_at + 1e6)
    status = queries.status(run)
    with reader_of(run.database_url) as read:
        shown = read()
    report = make_report(read_facts(run), None)
    return [
        end is not None,
        partial.run.newest.ended != "",
        partial.projection.ended is not None,
        account.ended,
        time is not None and time.end < events[-1].wall_at + 1e6,
        status["ended"] is not None,
        status["ended_at"] is not None,
        shown.run.ended != "",
        shown.projection.ended is not None,
        report["outcome"] != "running",
        "has not ended" not in "".join(audit_run(run).notes),
    ]


def test_the_metric_of_the_start_is_that_of_the_newest_start(fake_run: RunDir) -> None:
    """The alert on a stalled run counts from it."""
    with closing(Journal(fake_run.database_url)) as journal:
        again = journal.append(ComponentRestarted(what="supervisor", node="", because="the run is started again"))
        account = run_account(parse_job(fake_run.read()["config"]))
        for event in journal.events():
            account.take(event)
    assert account.started_at == again.wall_at


def test_a_run_that_is_continued_has_not_ended(fake_run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "OPEN_MAX", 2)
    again = ComponentRestarted(what="supervisor", node="", because="the run is started again")
    an_agent = ComponentRestarted(what="agent", node=NodeId("node-1"), because="it had ended")
    interrupted = RunEnded(outcome="interrupted", because="Ctrl-C or SIGTERM")
    told: list[tuple[Payload, bool]] = [
        (an_agent, True),
        (interrupted, True),
        (again, False),
        (an_agent, False),
        (interrupted, True),
    ]
    for payload, has_ended in told:
        with closing(Journal(fake_run.database_url)) as journal:
            journal.append(payload)
        assert _said(fake_run) == [has_ended] * 11
