"""The Overview page in every state of a run, as Streamlit draws it; and its view functions by table."""

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ProcessId, ReplicaId
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import RunDir
from rolecall.dashboards import settings
from rolecall.dashboards.data.progress import RunTrends
from rolecall.dashboards.data.reader import ReadProgress
from rolecall.dashboards.data.run_state import run_state
from rolecall.dashboards.pages import charts, shell
from rolecall.dashboards.pages.operations.plans import plan_rows
from rolecall.dashboards.pages.overview import view
from rolecall.dashboards.pages.overview.page import role_html
from rolecall.dashboards.pages.overview.view import RoleSummary, state_of
from rolecall.dashboards.pages.style import SERVER_LOST, STATES, band_legend, banner, css
from rolecall.dashboards.settings import Settings
from rolecall.views.observed_ranks import FLAG, ObservedRank, from_json, to_json
from rolecall.views.snapshot import ReplicaRow
from rolecall.watch.agents import observing_run
from tests.dashboards.big_journal import BigJournal
from tests.dashboards.made_runs import MadeRun, damage, first_snapshot
from tests.events import filled
from tests.support import eventually

APP = Path(shell.__file__).parents[1] / "scripts" / "app.py"
HOSTILE = "<script>alert(1)</script> **bold** [x](javascript:alert(1)) $\\latex$ :red[red] `code` \x1b[31m\u202e"


def drawn(what: Settings) -> AppTest:
    first_snapshot(what)
    at = AppTest.from_file(str(APP), default_timeout=60).run()
    assert not at.exception
    return at


def text(at: AppTest) -> str:
    """All that stands on the page, HTML included."""
    parts = [str(getattr(e, "value", "") or "") for e in at.main]
    parts += [h.proto.body for h in at.main if h.type == "html"]
    return "\n".join(parts)


def test_a_run_at_work(tmp_path: Path) -> None:
    at = drawn(MadeRun(tmp_path).settings())
    page = text(at)
    assert at.title[0].value == "Overview" and "made" in page
    assert (
        "no open incidents" in page
        and "rc-state good" in page
        and "30" in page
        and "of 120" in page
        and "0.290" in page
    )
    assert "2&nbsp;healthy" in page and "1&nbsp;standby" in page
    assert "No watch is running" not in page and "100.0 %" in page  # ETTR
    assert len(at.get("vega_lite_chart")) == 3


def test_no_part_of_a_page_goes_on_with_a_closed_reader(tmp_path: Path) -> None:
    """Between two refreshes of an open page its reader may be closed, if the browser slept."""
    settings.use(MadeRun(tmp_path).settings())
    first_snapshot(settings.current())

    def script() -> None:
        from rolecall.core.clock import SystemClock
        from rolecall.dashboards.data.reader import JournalSnapshot, Reader, Readers
        from rolecall.dashboards.pages import shell

        def draw(journal_reader: Reader, _: JournalSnapshot) -> None:
            assert shell.reader(journal_reader.settings) is journal_reader
            journal_reader.close()
            shell._readers = Readers(SystemClock())

        shell.page("Made", draw, draw, draw)

    at = AppTest.from_function(script, default_timeout=60).run()
    assert not at.exception


def test_an_open_incident_is_shown_on_top(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    plan = made.open()
    made.plan(plan)
    made.act(plan)
    page = text(drawn(made.settings()))
    assert "rollout/1#1 has finished nothing for 2.9 s" in page and "in progress: replace rollout/1#1 on node-4" in page
    assert "replica-seconds so far" in page
    assert page.index("2.9 s") < page.index("ETTR")
    assert "1&nbsp;being replaced" in page and "acting" in page


def test_a_plan_that_awaits_approval_asks_the_operator(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, mode="approve")
    made.open(replica="rollout/0", name="i-2")
    plan = made.open()
    made.plan(plan)
    made.propose(plan)
    at = drawn(made.settings())
    page = text(at)
    assert "Approve or reject this plan within 1" in page and "2&nbsp;suspect" in page
    assert page.index("Approve or reject") < page.index(", i-2<")  # incidents that need the operator come first
    assert any("operations" in str(link.proto.page) for link in at.get("page_link"))


def test_an_incident_of_an_ended_run_asks_for_nothing_and_costs_no_more(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, mode="approve")
    plan = made.open()
    made.plan(plan)
    made.propose(plan, seconds=30 * 24 * 3600.0)
    acting = made.open(replica="rollout/0", name="i-2")
    made.plan(acting)
    made.act(acting)
    made.say(K.RUN_ENDED, {"outcome": "interrupted", "because": "Ctrl-C"})
    look = first_snapshot(made.settings())
    first, second = view.open_incidents(replace(look, at=look.at + 24 * 3600))
    for incident, last in ((first, "in progress: replace rollout/0#1"), (second, "waiting for approval to replace")):
        assert incident.asks == "" and incident.stage == "ended"
        assert incident.doing.startswith(f"the run has ended. Last: {last}")
        cost = incident.cost.removesuffix(" replica-seconds")
        assert 2.9 < float(cost) < 60, "the cost of three seconds before the end, not of a day"
    at = drawn(made.settings())
    assert "Approve or reject" not in text(at) and "so far" not in text(at)
    assert not {"Approve or reject", "Act on it"} & {str(link.proto.label) for link in at.get("page_link")}


def test_paused_observe_mode_and_no_watch(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "a", mode="observe")
    made.journal.set_flag("paused", "by anna: night shift")
    page = text(drawn(made.settings()))
    assert (
        "Recovery is paused." in page and "by anna: night shift" in page and "mode observe: no action is taken" in page
    )
    alone = MadeRun(tmp_path / "b", watched=False)
    assert "Never watched: faults are neither detected nor recovered." in text(drawn(alone.settings()))


def test_a_plan_to_end_an_orphan_has_the_mode_of_orphans(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, mode="observe")
    body = {"holder": "watch@node-1", "fence": 2, "mode": "observe", "orphans_mode": "approve"}
    made.say(K.LEASE_ACQUIRED, body)
    made.plan(made.open(name="i-2"))
    process = ProcessId(node=NodeId("node-1"), pid=40, start_ticks=400)
    orphan = Diagnosis(
        suspects=(Suspect(node=process.node, process=process),), fault_class=FaultClass.RESOURCE_EXHAUSTED, onset=1.0,
        detected_at=2.0, confidence=0.9, because="VLLM::EngineCore has lost its server", evidence=(),
        detectors=("orphan",),
    )  # fmt: skip
    made.say(K.INCIDENT_OPENED, {"diagnosis": orphan.to_dict(), "window": "observations"}, "i-1")
    plan = Plan(
        incident_id=IncidentId("i-1"), action=ActionKind.END_ORPHAN, targets=(), because=orphan.because, process=process
    )
    made.plan(plan)
    made.propose(plan)
    snapshot = first_snapshot(made.settings())
    first, second = view.open_incidents(snapshot)
    assert first.stage == "awaits approval" and first.asks.startswith("Approve or reject this plan within 15 min")
    assert second.stage == "only observed" and second.asks == ""
    assert "mode observe, of orphans approve" in run_state(snapshot).details
    (row, other) = plan_rows(snapshot.projection.incidents.values(), snapshot.mode_of, snapshot.at)
    assert row.can_be_approved and row.can_be_stopped and not other.can_be_stopped


def test_a_dead_watch_is_reported(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.open()
    with made.journal.store.write() as conn:
        conn.exec_driver_sql("UPDATE leases SET expires_at = expires_at - 3700")
    page = text(drawn(made.settings()))
    assert "No watch is running." in page and "No watch holds the lease, so nothing is done." in page
    assert "not watched for" in page and "it prints the command that starts a watch" in page


def test_a_run_that_stands_still_is_not_training(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "a")
    made.open(replica="trainer/1")
    look = first_snapshot(made.settings())
    assert run_state(look).word == "Training"
    later = replace(look, at=look.at + 3 * 3600)
    state = run_state(later)
    assert (state.word, state.kind) == ("Stalled: no step for 3 h", "bad")
    assert "not watched for 2 h" in state.details and "stalled: no step for 3 h" in state.tab_title("made")
    watched = replace(
        later, observed=(), trends=RunTrends(), run=replace(look.run, step=-1, started_at=None, replicas=())
    )
    assert run_state(watched).word == "Not watched for 2 h"
    trained = replace(later, run=replace(look.run, num_steps=look.run.step + 1))
    assert run_state(trained).word == "All steps done: last evaluation and checkpoint"
    ended = replace(later, run=replace(look.run, ended="completed"))
    assert run_state(ended).word == "Run completed"


def test_a_run_that_never_comes_to_its_first_step_is_not_starting_for_good(tmp_path: Path) -> None:
    look = first_snapshot(MadeRun(tmp_path, num_steps=0).settings())
    assert run_state(replace(look, at=look.at + 3000)).word == "Starting"
    state = run_state(replace(look, at=look.at + 2 * 3600))
    assert (state.word, state.kind) == ("Stalled: no step for 2 h", "bad")
    job_of_others = replace(look, at=look.at + 2 * 3600, run=replace(look.run, started_at=None, replicas=()))
    assert not run_state(job_of_others).word.startswith("Stalled")


def test_a_run_that_is_continued_after_an_outage_starts_again_and_is_not_stalled(tmp_path: Path) -> None:
    clock = FakeClock()
    made = MadeRun(tmp_path, clock=clock)
    clock.advance(8 * 3600)
    made.say(K.COMPONENT_RESTARTED, {"what": "supervisor", "because": "the run is started again"})
    look = replace(first_snapshot(made.settings()), at=made.clock.wall() + 3000)
    assert run_state(look).word == "Starting again"
    assert run_state(replace(look, at=look.at + 1000)).word == "Stalled: no step for 1 h"
    made.say(K.STEP_COMMITTED, {"step": 30, "epoch": 2, "groups": [], "seconds": 0.5, "tokens": 768})
    goes_on = replace(shell.reader().fresh(), at=made.clock.wall() + 60)
    assert run_state(goes_on).word == "Training"
    assert run_state(replace(goes_on, at=made.clock.wall() + 300)).word.startswith("Stalled: no step for 5 min")


def test_an_unknown_cost_is_never_0(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.open(replica="trainer/1")
    look = first_snapshot(made.settings())
    known = replace(look, trends=replace(look.trends, still_open=()))
    (incident,) = view.open_incidents(known)
    assert incident.cost == "not yet known"
    ettr = next(row for row in view.headline_figures(known) if row[0].startswith("ETTR"))
    assert ettr[1].startswith("≤ ") and "the cost of 1 open incident is not known yet" in ettr[2]


def test_an_ended_run_has_times_and_no_standby(fake_run: RunDir) -> None:
    look = first_snapshot(Settings(journal_url=fake_run.database_url, run=fake_run))
    assert all(":" in when for when, _ in view.recent_events(look))
    assert {state for role in view.roles(look) for state, _ in role.counts} == {"ended"}


def test_letters_of_bands_that_would_overlap_are_one_label() -> None:
    bands = [
        charts.FaultBand(key=k, title=k, first_step=s, last_step=s + 1) for k, s in (("A", 5), ("B", 96), ("C", 97))
    ]
    points = {"reward": [{"step": 0.0, "value": 1.0}, {"step": 100.0, "value": 2.0}]}
    assert charts.columns(points, bands)["key"][2:] == ["A", "B–C", ""]
    assert "the last 3 of 300" in band_legend([(b.key, b.title) for b in bands], 300)
    assert "the last" not in band_legend([(b.key, b.title) for b in bands], 3)


def test_the_rate_of_an_ended_run_needs_its_whole_history(fake_run: RunDir) -> None:
    look = first_snapshot(Settings(journal_url=fake_run.database_url, run=fake_run))
    assert "tokens per second" in dict(row[:2] for row in view.headline_figures(look))
    newest = replace(look, history=ReadProgress(read=10, of=9000, whole=False))
    assert "tokens per second" not in dict(row[:2] for row in view.headline_figures(newest)), "of its newest steps only"


def test_a_finished_run_names_its_steps_once(fake_run: RunDir) -> None:
    look = first_snapshot(Settings(journal_url=fake_run.database_url, run=fake_run))
    look.projection.ended = "120 steps"
    assert run_state(look).details == ("step 120",)


def test_a_finished_run_says_how_it_ended(fake_run: RunDir) -> None:
    page = text(drawn(Settings(journal_url=fake_run.database_url, run=fake_run)))
    assert "Run completed" in page and "all 120 steps are committed" in page
    assert "No watch is running" not in page and "91.5 %" in page and "trainer" in page


def test_a_quarantined_node(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.say(K.NODE_QUARANTINED, {"node": "node-3", "by": "anna", "because": "XID 79"})
    assert "1&nbsp;quarantined" in text(drawn(made.settings()))


def test_no_journal_an_empty_one_and_a_locked_one_say_what_to_do(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    page = text(drawn(Settings(journal_url=url)))
    assert "The journal was not found." in page and "--journal URL" in page and "Replicas" not in page
    Journal(url).close()
    other = Settings(journal_url=url, name="empty")
    page = text(drawn(other))
    assert "The journal is empty." in page and "rolecall demo" in page
    locked = tmp_path / "locked.db"
    Journal(f"sqlite:///{locked}").close()
    holder = sqlite3.connect(locked, isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    settings.use(Settings(journal_url=f"sqlite:///{locked}"))
    at = AppTest.from_file(str(APP), default_timeout=60).run()
    holder.close()
    assert not at.exception
    assert "The journal is not responding." in text(at) and "updates automatically" in text(at)


def test_an_old_schema_and_damaged_lines(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "a")
    made.open(name="i-1")
    line = made.journal.head().position
    damage(made.run, line)
    page = text(drawn(made.settings()))
    assert "The journal is damaged." in page and f"cannot be read: {line}" in page and "rolecall audit" in page
    assert "2&nbsp;healthy" in page  # the rest is there
    old = MadeRun(tmp_path / "b")
    with sqlite3.connect(old.run.path / "journal.db") as conn:
        conn.execute("UPDATE meta SET value = '0' WHERE name = 'schema'")
    page = text(drawn(old.settings()))
    assert "by another version" in page and "schema version 0" in page and "Use the version" in page


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, num_steps=0)
    page = text(drawn(made.settings()))
    assert "Starting" in page and "–" not in page and "reward" not in page


def test_a_prometheus_that_is_away_leaves_the_page_whole(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    what = made.settings()
    what = Settings(journal_url=what.journal_url, name="made", prometheus_url="http://127.0.0.1:1")
    pages: list[str] = []

    def reported() -> bool:
        pages[:] = [text(drawn(what))]
        return "Prometheus is not responding." in pages[0]

    eventually(reported, "the page says so")
    assert "2&nbsp;healthy" in pages[0] and "comes from the journal and is complete" in pages[0]


def test_a_thousand_replicas(tmp_path: Path) -> None:
    big = BigJournal(tmp_path, num_incidents=60, open_incidents=20)
    run = big.build()
    at = drawn(Settings(journal_url=run.database_url))
    page = text(at)
    assert "i-0060" in page and "8 more incidents are open" in " ".join(str(p.proto.label) for p in at.get("page_link"))
    (grid,) = [h.proto.body for h in at.main if h.type == "html" and "rc-map" in h.proto.body]
    assert grid.count("<i") >= 984 and len(grid) < 40_000  # roles of up to 32 replicas have chips
    assert grid.count("<i></i>") < grid.count("<i"), "a suspect has a glyph and a name"
    assert not at.dataframe
    at.toggle(key="overview.table").set_value(True).run()
    assert not at.exception and len(at.dataframe[0].value) == 1000


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    plan = made.open(because=HOSTILE, node="<b>node</b>")
    made.plan(plan)
    made.journal.set_flag("paused", HOSTILE)
    at = drawn(Settings(journal_url=made.run.database_url, name=HOSTILE))
    for element in at.main:
        if element.type == "html":
            body = element.proto.body
            assert "<script" not in body and "\x1b" not in body and "\u202e" not in body
            assert "<a " not in body and "<b>node" not in body
        elif element.type in ("markdown", "caption", "subheader", "title", "info", "warning", "error"):
            assert "bold" not in str(element.value)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; **bold**" in text(at)


def test_who_must_sign_in_sees_nothing_before(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    people = tmp_path / "users.yaml"
    people.write_text("")
    people.chmod(0o600)
    what = Settings(journal_url=made.run.database_url, users_path=people, sign_in=True, name="secret-run")
    at = drawn(what)
    assert "Sign in to continue" in at.info[0].value
    assert "secret-run" not in text(at) and "healthy" not in text(at)


@pytest.mark.parametrize(
    ("state", "replica", "incarnation", "suspects", "replaced", "node", "ended", "expected"),
    [
        ("serving", "rollout/1", 1, {}, {}, "n", False, "healthy"),
        ("serving", "rollout/1", 1, {"rollout/1": 1}, {}, "n", False, "suspect"),
        ("serving", "rollout/1", 1, {"rollout/1": None}, {}, "n", False, "suspect"),
        ("serving", "rollout/1", 2, {"rollout/1": 1}, {}, "n", False, "healthy"),  # another incarnation
        ("lost", "rollout/1", 1, {"rollout/1": 1}, {"rollout/1": 1}, "n", False, "being replaced"),
        ("starting", "rollout/1", 2, {"rollout/1": 1}, {"rollout/1": 1}, "n", False, "being replaced"),
        ("serving", "rollout/1", 2, {"rollout/1": 1}, {"rollout/1": 1}, "n", False, "healthy"),
        ("lost", "rollout/1", 1, {}, {}, "n", False, "lost"),
        ("wanted", "rollout/1", 1, {}, {}, "n", False, "starting"),
        ("ready", "rollout/1", 1, {}, {}, "n", False, "starting"),
        ("ready", "standby/0", 1, {}, {}, "n", False, "standby"),
        ("ready", "trainer-standby/0", 1, {}, {}, "n", False, "standby"),
        ("serving", "rollout/1", 1, {}, {}, "bad", False, "quarantined"),
        ("lost", "rollout/1", 1, {}, {}, "bad", False, "lost"),
        ("stopped", "rollout/1", 1, {}, {}, "n", True, "ended"),
        ("stopped", "rollout/1", 1, {}, {}, "n", False, "lost"),
    ],
)
def test_one_word_for_a_replica(
    state: str, replica: str, incarnation: int, suspects: dict[str, int | None], replaced: dict[str, int], node: str,
    ended: bool, expected: str,
) -> None:  # fmt: skip
    row = ReplicaRow(replica=replica, node=node, incarnation=incarnation, state=state)
    assert state_of(row, suspects, replaced, frozenset({"bad"}), ended=ended) == expected


def test_every_state_has_a_glyph_of_its_own_and_readable_colours() -> None:
    assert len({glyph for glyph, _, _ in STATES.values()}) == len(STATES)
    for _, light, dark in STATES.values():
        assert _contrast(light, "#ffffff") >= 4.5 and _contrast(dark, "#171614") >= 4.5
    assert "light-dark(" in css()


def _contrast(one: str, other: str) -> float:
    """WCAG 2.1: (lighter + 0.05) / (darker + 0.05) of relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_code_in_a_banner_is_ours_and_a_half_mark_is_text() -> None:
    assert "<code>rolecall audit</code>" in banner("warn", "x", advice="say `rolecall audit`")
    assert "<code>" not in banner("warn", "x", advice="half a ` mark")
    assert "<code>&lt;b&gt;</code>" in banner("warn", "x", advice="`<b>`")
    assert "<code>" not in banner("warn", "`x`", "foreign `words`")


def test_a_large_role_names_who_is_not_well() -> None:
    cells = [
        ReplicaRow(replica=f"rollout/{n}", state="healthy", incarnation=1, node="n", policy_version=3)
        for n in range(100)
    ]
    cells[57] = ReplicaRow(replica="rollout/57", state="lost", incarnation=2, node="n", policy_version=3)
    html = role_html(RoleSummary(name="rollout", cells=tuple(cells), counts=(("lost", 1), ("healthy", 99))))
    assert (
        "rollout/57</b>" in html and "rollout/56</b>" not in html and html.count("<i") == 100 and html.count("✕") == 3
    )


def test_a_chart_of_one_point_and_of_many() -> None:
    def spec(points: list[dict[str, float]]) -> dict[str, Any]:
        return charts.curves({"reward": points}, "reward", across=(points[0]["step"], points[-1]["step"]), zero=False)

    assert [layer["mark"]["type"] for layer in spec([{"step": 1, "value": 0.5}])["layer"]][2] == "point"
    many = [{"step": float(n), "value": 0.2 + n / 100} for n in range(42)]
    found = spec(many)
    assert [layer["mark"]["type"] for layer in found["layer"]] == ["rect", "rule", "line", "text", "text"]
    assert "data" not in found
    across = found["layer"][2]["encoding"]["x"]
    low, high = across["scale"]["domain"]
    assert low <= 0 and 41 <= high <= 50 and across["title"] == "step"
    assert spec([*many, {"step": 41.5, "value": 0.3}]) == found  # one more point is the same chart


def test_faults_are_bands_with_letters_in_the_data_of_a_chart(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    plan = made.open(replica="trainer/1")
    made.plan(plan)
    made.act(plan)
    made.resolve(plan)
    made.open(replica="rollout/0", name="i-2")
    first, second = view.fault_bands(first_snapshot(made.settings()))
    assert (first.key, second.key) == ("A", "B") and "trainer/1 hung" in first.title
    assert second.last_step >= 30 and first.last_step > first.first_step
    rows = charts.columns({"reward": [{"step": 1.0, "value": 0.5}]}, (first, second))
    assert rows["value"] == [0.5, None, None] and rows["until"][1:] == [first.last_step, second.last_step]
    assert rows["key"] == ["", "A–B", ""] and len({len(column) for column in rows.values()}) == 1


def test_the_last_ten_events_without_routine_ones(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    for n in range(12):
        made.say(K.NODE_QUARANTINED, {"node": f"node-{n}", "by": "anna", "because": "XID 79"})
    rows = view.recent_events(first_snapshot(made.settings()))
    assert len(rows) == 10 and rows[0][1] == "Node quarantined node-11: XID 79"
    assert not any("step committed" in what.lower() for _, what in rows)


def test_only_the_opening_of_an_incident_says_its_diagnosis(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    plan = made.open(replica="trainer/1")
    made.plan(plan)
    made.act(plan)
    snapshot = first_snapshot(made.settings())
    because = next(iter(snapshot.projection.incidents.values())).diagnosis.because
    found = [what for _, what in view.recent_events(snapshot) if because in what]
    assert len(found) == 1 and found[0].startswith("Incident opened")


def observed_job(root: Path, num_ranks: int = 4) -> Settings:
    """A job that rolecall only watches: no run, no replicas in the journal, one open incident."""
    run = observing_run(root, "torchrun-job", {"vm": "http://127.0.0.1:9"})
    journal, now = Journal(run.database_url), SystemClock().wall()
    journal.acquire("watch", "watch@vm", 3600.0)
    journal.append(filled(K.LEASE_ACQUIRED, {"holder": "watch@vm", "fence": 1, "mode": "observe"}))
    ranks = [
        ObservedRank("trainer/0", n, "vm", 4000 + n, True, "compute", 53, now + 600, now - 2) for n in range(num_ranks)
    ]
    journal.set_flag(FLAG, to_json(ranks))
    suspect = Suspect(node=NodeId("vm"), role="trainer", replica="trainer/0", rank=1)
    found = Diagnosis(
        suspects=(suspect,), fault_class=FaultClass.HANG, onset=now - 9, detected_at=now - 3, confidence=0.97,
        because="rank 1 of trainer/0 is stopped", evidence=(), detectors=("progress",),
    )  # fmt: skip
    journal.append(
        filled(K.INCIDENT_OPENED, {"diagnosis": found.to_dict(), "window": "observations"}), incident_id="inc-1"
    )
    target = PlanTarget(replica=ReplicaId("trainer/0"), incarnation=0, node=NodeId("vm"))
    plan = Plan(
        incident_id=IncidentId("inc-1"), action=ActionKind.REPLACE_REPLICA, targets=(target,), because="it is hung"
    )
    verdict = {"plan": plan.to_dict(), "page_oncall": False, "outcome": "tolerated"}
    journal.append(filled(K.PLAN_CREATED, verdict), incident_id="inc-1")
    only = "mode is observe: rolecall only observes this job; it would replace trainer/0 on vm"
    journal.append(
        filled(K.PLAN_BLOCKED, {"digest": plan.digest, "guard": "mode", "because": only}), incident_id="inc-1"
    )
    paged = {"topic": "mode", "because": f"{found.because}; {only}", "channel": "log"}
    journal.append(filled(K.ONCALL_PAGED, paged), incident_id="inc-1")
    journal.close()
    return Settings(journal_url=run.database_url, run=run, name="torchrun-job")


def test_a_job_that_is_only_watched_is_shown_without_dashes(tmp_path: Path) -> None:
    at = drawn(observed_job(tmp_path))
    page = text(at)
    assert "Watched" in page and "1 open incident" in page and "mode observe: no action is taken" in page
    assert "trainer/0 rank 1 hung in step 53" in page and "rank 1 of trainer/0 is stopped" in page
    assert "rolecall would replace trainer/0 on vm" in page and "only observed" in page
    assert "<dt>suspect</dt><dd>trainer/0 rank 1 on vm</dd>" in page
    assert (
        "<dt>paging</dt><dd>nobody was paged, because no notification channel is configured (recovery.notify)</dd>"
        in page
    ), "said once, without a repeat"
    assert "needed from you" not in page and "#0" not in page
    assert "<dt>ranks</dt><dd>4</dd>" in page and "<dt>last progress</dt>" in page
    assert "4 ranks" in page and "rank 1 on vm, pid 4001: suspect" in page and "rank 2 on vm" not in page
    assert "–" not in page and "ETTR" not in page and "policy version" not in page


def test_a_watched_job_that_is_acted_on_has_incarnations_and_its_calls(tmp_path: Path) -> None:
    settings = observed_job(tmp_path)
    journal = Journal(settings.journal_url)
    replica, node = ReplicaId("trainer/0"), NodeId("vm")
    journal.set_desired(Desired(replica=replica, incarnation=2, node=node))
    journal.set_actual(Actual(replica=replica, incarnation=2, node=node, state=ReplicaState.SERVING))
    journal.append(CallStarted(actuator="command", call="kill -9 4001", words="end it"), incident_id="inc-1")
    journal.append(CallEnded(actuator="command", status=1, text="no such process"), incident_id="inc-1")
    journal.close()
    page = text(drawn(settings))
    assert "Watched" in page and "Starting" not in page and "trainer/0 rank 1 hung in step 53" in page
    assert "end it: kill -9 4001" in page and "status 1: no such process" in page and "#2 on vm" in page


def test_an_observed_rank_survives_the_journal_and_garbage_is_nothing() -> None:
    rank = ObservedRank("trainer/0", 1, "vm", 4001, True, "compute", 53, 9.0, None)
    assert from_json(to_json([rank])) == (rank,)
    assert from_json(None) == from_json("{") == from_json("[[1]]") == ()


def test_versions_behind(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.state("rollout/0", ReplicaState.SERVING, version=28)
    look = first_snapshot(made.settings())
    assert view.versions(look) == (30, [(0, 1), (2, 1)], 0)


def test_a_lost_rollout_is_lost_and_not_behind(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.state("rollout/0", ReplicaState.LOST, version=28)
    look = first_snapshot(made.settings())
    assert view.versions(look) == (30, [(0, 1)], 1)
    assert ("policy version", "30", "1 rollout lost") in view.headline_figures(look)


def test_a_failed_audit_is_on_top_of_the_page(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    damage(made.run, made.journal.head().position)
    at = drawn(made.settings())
    eventually(lambda: "The audit found" in text(at.run()), "the result of the audit")
    assert any("accounting" in str(link.proto.page) for link in at.get("page_link"))


def test_the_ranks_of_a_replica_are_inside_it_and_the_suspect_one_is_marked() -> None:
    cells = [ReplicaRow(replica=f"trainer/{n}", node="n", incarnation=1, state="healthy") for n in range(2)]
    cells[1] = replace(cells[1], state="suspect")
    found = view._ranks_of_role(cells, 2, {("trainer/1", 1)})
    assert found["trainer/0"] == (("rank 0 on n", "healthy"), ("rank 1 on n", "healthy"))
    assert [state for _, state in found["trainer/1"]] == ["healthy", "suspect"]
    assert view._ranks_of_role(cells, 1, set()) == {}
    assert [s for _, s in view._ranks_of_role(cells, 2, {("trainer/1", None)})["trainer/1"]] == ["suspect"] * 2
    page = role_html(
        RoleSummary(name="trainer", cells=tuple(cells), counts=(("suspect", 1), ("healthy", 1)), ranks=found)
    )
    assert page.count('aria-label="2 ranks"') == 2


def test_the_text_of_a_lost_server_names_the_run_where_the_command_takes_one() -> None:
    assert "rolecall incidents --run RUN" in SERVER_LOST and "rolecall incidents RUN" not in SERVER_LOST
