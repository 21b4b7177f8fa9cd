"""The Accounting page in all its states, and its worker thread."""

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.errors import JournalError
from rolecall.core.faults import FAULTS
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.pages.accounting.page import _causes_bars
from rolecall.dashboards.pages.accounting.worker import AUDIT_SECONDS, AccountingWorker, audited
from rolecall.dashboards.pages.charts import CLASS_COLOURS
from rolecall.dashboards.pages.incidents.cache import IncidentPageCache
from rolecall.dashboards.settings import Settings
from rolecall.views.ettr import UNDETECTED
from rolecall.views.mfu import WINDOW_STEPS
from rolecall.views.phases import NOT_KNOWN, PHASES, lost_in_run
from tests.dashboards.acting_world import HOSTILE, World, button, fill, page, sign_in, texts, world
from tests.dashboards.made_runs import MadeRun
from tests.events import filled
from tests.fake_run import ALL, FakeRun
from tests.support import PATIENCE_SECONDS, eventually

K = EventKind


@pytest.fixture
def made(tmp_path: Path) -> World:
    return world(tmp_path)


@pytest.fixture
def finished(fake_run: RunDir, tmp_path: Path) -> World:
    return World(run=fake_run, users_path=tmp_path / "users.yaml")


def _worker(run: RunDir, clock: FakeClock, *, url_only: bool = False) -> AccountingWorker:
    return AccountingWorker(Settings(journal_url=run.database_url, run=None if url_only else run), clock)


def test_a_finished_run_is_accounted_for(finished: World) -> None:
    worker = _worker(finished.run, FakeClock())
    worker.latest()
    assert worker.wait(PATIENCE_SECONDS)
    accounts = worker.latest()
    assert accounts.error == ""
    assert accounts.audit is not None
    assert accounts.audit.ok
    assert accounts.audit.ledger.groups_trained == 960
    statistics = accounts.statistics
    assert statistics is not None
    assert statistics.times is not None
    assert 0.85 < (statistics.times.ettr or 0) < 0.95
    assert [p.name for p in statistics.times.by_class] == ["hang", "slow", "crash"]
    assert [(str(d.evidence), d.num, d.share) for d in statistics.detection] == [
        ("process exit", 1, 1.0),
        ("no progress", 1, 1.0),
        ("slow", 1, 1.0),
    ]
    lost = lost_in_run(statistics.times.by_phase)
    assert tuple(lost) == PHASES and list(statistics.times.by_phase) == ["i-1", "i-2", "i-3"]
    assert sum(filter(None, lost.values())) == pytest.approx(5 * statistics.times.lost_seconds)
    assert all(d.injected for d in statistics.detection)
    assert [(p.phase, p.num) for p in statistics.phases] == [(phase, 3) for phase in PHASES]
    assert len(statistics.recoveries) == 3 and statistics.episodes == (), "each has an action"
    detect = statistics.phases[0]
    found_after = [strike.found_after for strike in ALL]
    assert (detect.worst_seconds, detect.total_seconds) == pytest.approx((max(found_after), sum(found_after)), abs=5e-3)


def test_a_long_journal_is_audited_in_a_process_of_its_own_with_the_same_result(finished: World) -> None:
    settings = Settings(journal_url=finished.run.database_url, run=finished.run)
    found = []
    for apart_events in (0, 10**9):
        worker = AccountingWorker(settings, FakeClock(), apart_events=apart_events)
        worker.latest()
        assert worker.wait(PATIENCE_SECONDS)
        found.append(worker.latest())
    assert found[0].error == found[1].error == ""
    assert found[0].audit == found[1].audit is not None


def test_an_error_in_the_process_of_an_audit_is_raised_here(finished: World, tmp_path: Path) -> None:
    journal = Journal(finished.run.database_url)
    try:
        with pytest.raises(JournalError, match="no journal"):
            audited(journal, f"sqlite:///{tmp_path}/none.db", "x", None, apart=True)
    finally:
        journal.close()


def test_by_its_journal_alone_the_moments_of_faults_are_estimates(finished: World) -> None:
    worker = _worker(finished.run, FakeClock(), url_only=True)
    worker.latest()
    assert worker.wait(PATIENCE_SECONDS)
    accounts = worker.latest()
    assert accounts.audit is not None
    assert accounts.audit.ok
    assert accounts.statistics is not None
    assert not any(d.injected for d in accounts.statistics.detection)


def test_accounts_are_kept_until_they_are_due_and_the_audit_until_the_journal_grows(finished: World) -> None:
    clock = FakeClock()
    worker = _worker(finished.run, clock)
    worker.latest()
    assert worker.wait(PATIENCE_SECONDS)
    first = worker.latest()
    assert worker.latest().audited_at == first.audited_at
    clock.advance(AUDIT_SECONDS + 1)
    worker.latest()
    assert worker.wait(PATIENCE_SECONDS)
    assert worker.latest().audited_at == first.audited_at, "nothing was written since"
    finished.say(K.RECOVERY_PAUSED, {"by": "anna", "because": "x"})
    clock.advance(AUDIT_SECONDS + 1)
    eventually(lambda: worker.latest().audited_at != first.audited_at, "it is audited again")


def test_a_damaged_chain_is_reported_with_its_first_broken_line(finished: World) -> None:
    with sqlite3.connect(finished.run.path / "journal.db") as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f"DROP TRIGGER {name}")
        database.execute("UPDATE events SET wall_at = wall_at + 1 WHERE seq = 40")
    at = page("accounting", finished)
    assert not at.exception
    assert "The audit found" in texts(at)
    assert "events line 40" in texts(at)


def test_problems_of_one_kind_are_one_sentence(tmp_path: Path) -> None:
    """Without its ledger, every step of a run disagrees with it."""
    made = MadeRun(tmp_path, num_steps=0)
    for step in range(60):
        body = {
            "step": step,
            "epoch": 1,
            "groups": [f"g{step}"],
            "reward": 0.1,
            "loss": 0.1,
            "seconds": 0.5,
            "tokens": 1,
        }
        made.journal.append(filled(K.STEP_COMMITTED, body))
    at = page("accounting", World(run=made.run, users_path=tmp_path / "users.yaml"))
    assert not at.exception
    kinds = [t.value for t in at.text if "disagree" in t.value]
    assert kinds[0] == "step 0: journal and ledger disagree on 1 group: g0 (and 58 alike)", (
        "the last step may be under way"
    )
    assert len(kinds) == 2, "the rest is in the expander"
    assert "step 49:" in kinds[1] and "step 50:" not in kinds[1]
    assert "and 9 more; `rolecall audit RUN` lists all." in texts(at)


def test_a_fault_class_has_its_colour_and_a_readable_time() -> None:
    bars = _causes_bars([("trainer", "hang", 7200.0), ("rollout", "hang", 5.0), ("rollout", "slow", 1.0)])
    assert bars.count(CLASS_COLOURS["hang"]) == 3 and bars.count(CLASS_COLOURS["slow"]) == 2
    assert "2 h 00 min" in bars
    assert set(CLASS_COLOURS) == {*map(str, FAULTS), UNDETECTED}
    assert len(set(CLASS_COLOURS.values())) == len(CLASS_COLOURS)


def test_a_finished_run_on_the_page(finished: World) -> None:
    at = page("accounting", finished)
    assert not at.exception
    reported = texts(at)
    assert "Audit passed." in reported
    assert "3 faults were injected, 0 missed" in reported
    assert "No diagnosis has been reviewed yet." in reported
    tables = "".join(h.proto.body for h in at.get("html"))
    assert "Where the time of the recoveries went" in reported and all(f">{phase}<" in tables for phase in PHASES)
    assert all(f"<b>{phase}</b>" in tables for phase in PHASES), "as a bar, too"
    assert all(f">{name}</a>" in tables for name in ("i-1", "i-2", "i-3")) and ">fault to commit<" in tables
    assert reported.index("Where the time of the recoveries went") < reported.index("Diagnosis precision")
    assert {m.label: m.value for m in at.metric}["trained"] == "960"


def _replica_seconds(made: World) -> dict[str, str]:
    """Of the table by phase: phase -> replica-seconds."""
    at = page("accounting", made)
    assert not at.exception
    assert "**Lost replica-seconds by phase of recovery**" in [m.value for m in at.markdown]
    bodies = [h.proto.body for h in at.get("html")]
    (table,) = [body for body in bodies if ">replica-seconds<" in body]
    return {name: amount for name, amount in re.findall(r"<tr><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>", table)}


def test_lost_replica_seconds_by_phase_add_up_on_the_page(finished: World) -> None:
    shown = _replica_seconds(finished)
    assert list(shown) == [*PHASES, "together"]
    amounts = {phase: float(amount) for phase, amount in shown.items()}
    assert amounts.pop("together") == pytest.approx(sum(amounts.values()), abs=0.3)


def test_phases_that_are_not_known_are_no_zeros_on_the_page(tmp_path: Path) -> None:
    clock = FakeClock(now=0.0, wall_offset=SystemClock().wall() - 100.0)
    made = MadeRun(tmp_path, clock=clock)
    clock.advance(60.0)
    made.open("trainer/1")
    shown = _replica_seconds(World(run=made.run, users_path=tmp_path / "users.yaml"))
    assert list(shown) == [*PHASES, NOT_KNOWN, "together"]
    assert shown["detect"] == "6.0", "two trainers, from the onset 3 s before the finding"
    assert all(shown[phase] == "–" for phase in PHASES[1:]), "no action has started"


@pytest.mark.parametrize("watched", [True, False])
def test_overview_and_accounting_count_an_open_incident_alike(tmp_path: Path, watched: bool) -> None:
    clock = FakeClock()
    made = MadeRun(tmp_path, clock=clock, watched=watched)
    clock.advance(60.0)
    made.open("trainer/1")
    clock.advance(7200.0)
    settings = Settings(journal_url=made.run.database_url, run=made.run, patience_seconds=PATIENCE_SECONDS)
    reader, worker = Reader(settings, clock), AccountingWorker(settings, clock)
    worker.latest()
    assert worker.wait(PATIENCE_SECONDS)
    statistics, account = worker.latest().statistics, reader.latest().trends.account
    reader.close()
    assert statistics is not None and statistics.times is not None and account is not None
    assert statistics.times.lost_seconds > 3000.0
    assert sum(account.lost.values()) == pytest.approx(statistics.times.lost_seconds)
    assert account.ettr == pytest.approx(statistics.times.ettr)


def test_every_page_counts_a_rollout_that_lent_its_node_until_it_serves_again(tmp_path: Path) -> None:
    clock = FakeClock()
    made = MadeRun(tmp_path, clock=clock)
    clock.advance(60.0)
    settings = Settings(journal_url=made.run.database_url, run=made.run, patience_seconds=PATIENCE_SECONDS)
    reader, worker, incidents = Reader(settings, clock), AccountingWorker(settings, clock), IncidentPageCache(clock)
    plan = made.open("trainer/1")
    made.plan(plan)
    made.act(plan)
    made.say(K.NODE_LENT, {"replica": "rollout/1", "incarnation": 1, "node": "node-4", "to": "trainer/1"}, "i-1")
    clock.advance(10.0)
    made.resolve(plan)
    clock.advance(300.0)
    cost = incidents.get(reader, reader.latest(), "i-1").cost
    assert cost is not None and not cost.is_final, "the rollout is still away"
    made.say(K.REPLICA_READY, {"replica": "rollout/1", "incarnation": 2, "node": "node-4"})
    made.say(K.WEIGHTS_ADMITTED, {"replica": "rollout/1", "incarnation": 2})
    clock.advance(1000.0)
    cost = incidents.get(reader, reader.latest(), "i-1").cost
    assert cost is not None and cost.is_final
    assert cost.how[-1] == "rollout/1, which lent its node, did not serve for 5 min 10 s"
    assert cost.replica_seconds == pytest.approx(2 * 13.0 + 310.0), "two trainers from the onset, and the rollout"
    worker.latest()
    assert worker.wait(PATIENCE_SECONDS)
    statistics, account = worker.latest().statistics, reader.latest().trends.account
    reader.close()
    assert statistics is not None and statistics.times is not None and account is not None
    assert account.lost["rollout", "hang"] == pytest.approx(310.0 / 4)
    assert sum(account.lost.values()) == pytest.approx(statistics.times.lost_seconds)


PEAKS = {"trainer_peak_flops": 1e9, "rollout_peak_flops": 1e9}


def test_utilisation_is_drawn_by_role_where_the_job_file_gives_the_peaks(tmp_path: Path) -> None:
    made = World(run=FakeRun(tmp_path, strikes=(), peaks=PEAKS).build(), users_path=tmp_path / "users.yaml")
    at = page("accounting", made)
    assert not at.exception
    assert {"trainer: newest", "trainer: best", "rollout: newest"} <= {m.label for m in at.metric}
    (spec,) = [json.loads(c.proto.spec) for c in at.get("vega_lite_chart") if "MFU" in c.proto.spec]
    assert spec["title"]["text"] == f"MFU, median of {WINDOW_STEPS} steps"
    assert spec["layer"][2]["encoding"]["color"]["scale"]["domain"] == ["rollout", "trainer"]
    assert "fell from" not in texts(at)
    of_url = page("accounting", made, url_only=True)
    assert "FLOPs" not in texts(of_url), "the peak is in the job file, which is not at hand"


def test_without_a_peak_there_is_no_utilisation(finished: World) -> None:
    assert "FLOPs" not in texts(page("accounting", finished))


def test_a_decline_of_utilisation_is_said(tmp_path: Path, finished: World) -> None:
    """The steps of the second half take ten times as long."""
    shutil.copytree(finished.run.path, tmp_path / "slower")
    run = RunDir(tmp_path / "slower")
    job = run.read()
    run.write({**job, "config": {**job["config"], "runtime": {**job["config"]["runtime"], **PEAKS}}})
    with sqlite3.connect(run.path / "journal.db") as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f"DROP TRIGGER {name}")
        database.execute(
            "UPDATE events SET body = json_set(body, '$.seconds', 10 * json_extract(body, '$.seconds')) "
            "WHERE kind = 'step_committed' AND json_extract(body, '$.step') >= 60"
        )
    worker = _worker(run, FakeClock())
    worker.latest()
    assert worker.wait(PATIENCE_SECONDS)
    statistics = worker.latest().statistics
    assert statistics is not None
    assert statistics.mfu["trainer"].decline.startswith("fell from ") and statistics.mfu["rollout"].decline == ""
    assert "trainer: fell from" in texts(page("accounting", World(run=run, users_path=finished.users_path)))


def test_a_job_that_is_only_observed_says_what_is_not_known(made: World) -> None:
    made.open("i-1")
    at = page("accounting", made)
    assert not at.exception
    reported = texts(at)
    assert "has no ledger" in reported and "Prompt groups" not in reported and "open groups" not in reported
    assert "which part of the time was useful" in reported


def test_faults_on_which_nobody_acted_show_their_time(made: World) -> None:
    now = SystemClock().wall()
    made.open("i-1", at=now - 60.0)
    made.say(K.INCIDENT_CLOSED, {"outcome": "self_recovered", "because": "it works again"}, "i-1")
    made.open("i-2", replica="rollout/2", at=now - 5.0)
    at = page("accounting", made)
    assert not at.exception
    assert "Where the time of the faults went" in texts(at) and "No action has started" not in texts(at)
    tables = "".join(h.proto.body for h in at.get("html"))
    assert "<b>detect</b>" in tables and "<b>until it was over</b>" in tables
    assert ">self recovered<" in tables and ">still open<" in tables


def test_a_live_run_is_counted_up_to_now(tmp_path: Path, finished: World) -> None:
    shutil.copytree(finished.run.path, tmp_path / "live")
    with sqlite3.connect(tmp_path / "live" / "journal.db") as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f"DROP TRIGGER {name}")
        database.execute("DELETE FROM events WHERE kind = 'run_ended'")
        (last,) = database.execute("SELECT max(wall_at) FROM events").fetchone()
    clock = FakeClock(now=0.0, wall_offset=last + 60)
    worker = _worker(RunDir(tmp_path / "live"), clock)
    worker.latest()
    assert worker.wait(PATIENCE_SECONDS)
    statistics = worker.latest().statistics
    assert statistics is not None
    assert statistics.times is not None
    assert statistics.times.slices[-1].end == pytest.approx(last + 60)


def test_a_diagnosis_is_reviewed_under_the_name_of_the_signed_in_user(finished: World) -> None:
    at = sign_in(page("accounting", finished), finished.add_user("anna"))
    before = len(finished.events())
    at.selectbox(key="accounting.review").select("i-2").run()
    fill(at, "review:i-2", "why", "it was the rack's power")
    button(at, "✗ Wrong").click().run()
    button(at, "✓ Right").click().run()
    new = finished.events()[before:]
    assert [(e.kind, e.incident_id, e.payload.verdict, e.payload.by) for e in new] == [
        (K.DIAGNOSIS_REVIEWED, "i-2", "wrong", "anna"),
        (K.DIAGNOSIS_REVIEWED, "i-2", "right", "anna"),
    ]
    assert "1 of 1 reviewed diagnoses were right: 100 %" in texts(at)
    assert "2 of 3 are not reviewed yet." in texts(at)


def test_a_wrong_review_needs_a_reason_and_a_guest_reviews_nothing(finished: World) -> None:
    token = finished.add_user("anna")
    at = page("accounting", finished)
    assert button(at, "✓ Right").disabled
    sign_in(at, token)
    before = len(finished.events())
    button(at, "✗ Wrong").click().run()
    assert len(finished.events()) == before
    assert "a reason is required" in texts(at)


def test_hostile_text_is_shown_as_text(made: World) -> None:
    made.open("i-1", because=HOSTILE)
    at = page("accounting", made)
    assert not at.exception
    assert HOSTILE in texts(at)
    assert not any("onerror" in str(m.value) for m in at.markdown)
