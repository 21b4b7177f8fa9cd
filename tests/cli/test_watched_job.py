"""Commands on a job that rolecall only watches: none tells of a run that rolecall made."""

import json
import logging
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.clock import FakeClock
from rolecall.core.config.job import parse_job
from rolecall.core.faults import FaultClass
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import IncidentClosed, NodeQuarantined
from rolecall.core.rundir import RunDir
from rolecall.recovery.loop import LEASE_NAME
from rolecall.recovery.nodes import known_nodes
from rolecall.recovery.operators import queries
from rolecall.recovery.projection import IncidentProjection, open_incident
from rolecall.testing.recovery_world import diagnosis
from rolecall.views import observed_ranks
from rolecall.views.observed_ranks import ObservedRank
from rolecall.watch.addresses import ListenAddress
from rolecall.watch.agents import observing_run
from rolecall.watch.run import watch_run
from rolecall.watch.server import JournalMetricsPoller, check_available

URL = "http://node-7:9477"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("ROLECALL_RUNS", str(tmp_path))
    return observing_run(tmp_path, "my-job", {"node-7": URL})


@pytest.mark.parametrize(
    "command",
    [
        ("report", "my-job"),
        ("pause", "my-job", "--reason", "x"),
        ("replace", "trainer/0", "--reason", "x", "--run", "my-job"),
        ("node", "drain", "node-7", "--reason", "x", "--run", "my-job"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
@pytest.mark.usefixtures("job")
def test_what_only_a_run_of_rolecall_has_is_refused(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("rolecall: my-job is only watched: ")


def test_an_audit_verifies_the_journal_and_says_that_there_is_no_ledger(
    job: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Journal(job.database_url)) as journal:
        journal.append(NodeQuarantined(node="node-7", by="alice", because="a loud fan"))
    assert main(["audit", "my-job"]) == 0
    said = capsys.readouterr().out
    assert "run my-job: the audit holds\n  journal   1 events\n" in said and "it has no ledger" in said
    assert "groups  " not in said and "weights" not in said
    with closing(sqlite3.connect(job.path / "journal.db")) as database:
        for (name,) in database.execute("select name from sqlite_master where type = 'trigger'").fetchall():
            database.execute(f"drop trigger {name}")
        database.execute("update events set hash = 'x'")
        database.commit()
    assert main(["audit", "my-job"]) == 1
    assert "PROBLEM   journal: " in capsys.readouterr().out


def test_an_operator_quarantines_and_returns_a_node(job: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    because = ("--reason", "a loud fan", "--run", "my-job")
    with closing(Journal(job.database_url)) as journal:
        watch = JournalMetricsPoller(journal, parse_job({}), "my-job", FakeClock(), ours=False)

        def unfit() -> object:
            assert watch.poll()
            return watch.unfit

        assert main(["node", "return", "node-7", *because]) == 2
        assert main(["node", "quarantine", "node-8", *because]) == 2
        assert unfit() == {} and capsys.readouterr().out == ""
        assert main(["node", "quarantine", "node-7", *because]) == 0
        said = capsys.readouterr().out
        assert "its watch calls it unfit" in said and "nothing is done to the job" in said and "replica" not in said
        assert unfit() == {"node-7": ("it is quarantined",)}
        assert main(["node", "quarantine", "node-7", *because]) == 2
        assert main(["node", "return", "node-7", *because]) == 0
        assert capsys.readouterr().out == "node-7 is back in service\n"
        assert unfit() == {}


def test_its_nodes_are_those_of_its_agents_with_the_ranks_that_were_seen(
    job: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [
        ObservedRank(replica, rank, "node-7", 40 + rank, is_alive, "step", 3, 0.0, None)
        for replica, rank, is_alive in (("trainer/0", 0, True), ("trainer/0", 1, True), ("rollout/0", 0, False))
    ]
    observing_run(job.path.parent, "my-job", {"node-7": URL, "node-8": "http://node-8:9477"})
    with closing(Journal(job.database_url)) as journal:
        journal.set_flag(observed_ranks.FLAG, observed_ranks.to_json(ranks))
        assert known_nodes(journal) == {"node-7", "node-8"}
    assert main(["node", "list", "my-job"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["node-7", "0", "incidents", "trainer/0", "0-1"], ["node-8", "0", "incidents", "idle"]]
    observing_run(job.path.parent, "my-job", {"node-8": "http://node-8:9477"})
    assert main(["node", "list", "my-job", "--json"]) == 0
    assert [(row["node"], row["ranks"]) for row in json.loads(capsys.readouterr().out)] == [("node-8", {})]


@pytest.mark.usefixtures("job")
def test_the_hint_names_a_command_that_works_while_an_agent_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "my-job"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    command = f"rolecall watch agents node-7={URL} --id my-job"
    assert f"start one: {command} (add its --config, --job, --credentials, --webhook and --metrics" in said


def test_open_incidents_come_first_then_the_newest(job: RunDir) -> None:
    clock = FakeClock()
    with closing(Journal(job.database_url, clock=clock)) as journal:
        projection = IncidentProjection()
        names = []
        for replica in ("trainer/0", "trainer/1", "trainer/2"):
            names.append(open_incident(journal, projection, diagnosis(FaultClass.HANG, (replica, 1))))
            clock.advance(10.0)
    assert [i["incident_id"] for i in queries.incidents(job)] == names[::-1]


def test_incidents_says_whether_one_is_open_as_value_and_exit_code(
    job: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Journal(job.database_url)) as journal:
        projection = IncidentProjection()
        name = open_incident(journal, projection, diagnosis(FaultClass.HANG, ("trainer/0", 1)))
        command = ("incidents", "--run", "my-job", "--json")
        assert main(command) == 1
        (value,) = json.loads(capsys.readouterr().out)
        assert value["open"] is True and value["outcome"] is None
        closed = IncidentClosed(outcome="self_recovered", because="it works again")
        journal.append(closed, incident_id=name)
    assert main(command) == 0
    (value,) = json.loads(capsys.readouterr().out)
    assert (value["open"], value["state"], value["outcome"]) == (False, "closed", "self_recovered")


def test_a_watch_that_shows_what_it_watches_logs_warnings_only(job: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr("logging.basicConfig", lambda **settings: levels.append(settings["level"]))
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    assert watch_run(job, 0.1, show=lambda _: None) == 0
    assert watch_run(job, 0.1) == 0
    assert levels == [logging.WARNING, logging.INFO]


def test_a_second_watch_says_that_another_one_leads(job: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Journal(job.database_url)) as journal:
        assert journal.acquire(LEASE_NAME, "vm:1", 60.0)
    assert watch_run(job, 0.1) == 0
    assert "watch vm:1 leads my-job already: this one stands by, and takes over when it ends" in caplog.text


@pytest.mark.parametrize("name", [("--id", "my-job"), ()], ids=["of a watch that runs", "another"])
def test_a_watch_that_cannot_start_writes_no_run(
    job: RunDir, name: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would be the latest run, or other commands would read the settings of one that never ran."""
    before = job.read()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for mistake in (("--metrics", address), ("--webhook", "pager")):
            assert main(["watch", "agents", "other=http://localhost:1", *mistake, *name, "--for", "1"]) == 2
            assert f"{mistake[1]}: cannot listen" in (said := capsys.readouterr().err) or "webhook_url: must be" in said
    assert job.read() == before and [path.name for path in job.path.parent.iterdir()] == ["my-job"]


def test_an_address_is_free_again_after_the_check() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = ListenAddress(*free.getsockname())
    check_available(address)
    socket.create_server(address).close()
