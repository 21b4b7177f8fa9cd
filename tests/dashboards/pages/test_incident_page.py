"""The pages as Streamlit runs them: the table, its filters in the URL, and the page of every kind of incident."""

import html
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import EventKind
from rolecall.core.rundir import RunDir
from rolecall.dashboards import settings
from rolecall.dashboards.pages.incidents import page as incidents_page
from rolecall.dashboards.pages.incidents.brief import brief, cost_words, links, markdown, similar_before
from rolecall.dashboards.pages.incidents.cache import IncidentCost, page_model
from rolecall.dashboards.pages.incidents.material import read
from rolecall.dashboards.pages.incidents.table import PAGE_ROWS
from rolecall.dashboards.settings import Settings
from tests.dashboards.big_journal import BigJournal
from tests.dashboards.incident_cases import HOSTILE, KINDS, found, world_of
from tests.dashboards.made_runs import MadeRun, first_snapshot
from tests.events import filled
from tests.recovery.world import World

K = EventKind
PAGE = str(Path(incidents_page.__file__).parents[2] / "scripts" / "incidents.py")
TIMEOUT_SECONDS = 60.0

Shows = Callable[..., AppTest]


@pytest.fixture
def shows() -> Iterator[Shows]:
    """Runs the page on a journal, with parameters of the URL."""

    def run(url: str, of: RunDir | None = None, **query: str) -> AppTest:
        settings.use(Settings(journal_url=url, run=of, patience_seconds=TIMEOUT_SECONDS))
        at = AppTest.from_file(PAGE, default_timeout=TIMEOUT_SECONDS)
        for name, value in query.items():
            at.query_params[name] = value
        return at.run()

    yield run
    settings.use(Settings(journal_url="sqlite:///:memory:"))


def texts(at: AppTest) -> str:
    """All texts, and our own HTML with its characters unescaped."""
    return "\n".join([*(t.value for t in at.text), *(html.unescape(h.proto.body) for h in at.get("html"))])


def rows(at: AppTest) -> list[dict[str, Any]]:
    return list(at.dataframe[0].value.to_dict("records")) if at.dataframe else []


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_names_each_incident_with_a_link(shows: Shows, tmp_path: Path) -> None:
    world = world_of("resolved", tmp_path)
    at = shows(world.url)
    assert not at.exception
    (row,) = rows(at)
    assert row["link"] == f"incidents?incident={world.only().incident_id}"
    assert (row["state"], row["suspect"], row["fault"], row["action"]) == (
        "✓ resolved",
        "rollout/1#1",
        "crash",
        "replace replica",
    )
    assert row["found after onset"] == "0.50 s"


def test_an_open_one_has_a_severity_and_a_whole_sentence(shows: Shows, tmp_path: Path) -> None:
    world = world_of("proposed", tmp_path)
    (row,) = rows(shows(world.url))
    assert row["severity"] == "◆ warning" and row["what"] == "rollout/1 crashed"
    assert row["state"] == "◇ approval expired" and row["because"] == world.only().diagnosis.because


def test_times_to_detect_and_to_recover_have_sparklines(shows: Shows, tmp_path: Path) -> None:
    run = BigJournal(tmp_path, num_replicas=20, num_incidents=12, open_incidents=2).build()
    at = shows(run.database_url)
    page = texts(at)
    assert "Onset to finding, newest 12" in page and "Finding to verified recovery, newest 10" in page
    assert "median 8.90 s, from 8.90 s to 8.90 s" in page and page.count('<i style="height:') == 22
    one = texts(shows(world_of("resolved", tmp_path).url))
    assert 'class="rc rc-sparks"' in page and 'class="rc rc-sparks"' not in one, "one incident is no trend"


def test_keys_lead_through_the_incidents(shows: Shows, tmp_path: Path) -> None:
    run = BigJournal(tmp_path, num_replicas=20, num_incidents=5, open_incidents=0).build()
    at = shows(run.database_url)
    assert at.button(key="incidents-first").proto.shortcut == "o"
    at.button(key="incidents-first").click().run()
    first = at.query_params["incident"]
    assert at.button(key="incident-newer").disabled and at.button(key="incident-older").proto.shortcut == "j"
    at.button(key="incident-older").click().run()
    assert at.query_params["incident"] != first and not at.exception


def test_a_run_without_incident_says_so(shows: Shows, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(2.0, world.watch())
    at = shows(world.url)
    assert not at.exception
    assert at.info[0].value.startswith("No incidents")


def test_filters_of_the_url_are_those_of_the_page(shows: Shows, tmp_path: Path) -> None:
    url = world_of("resolved", tmp_path).url
    at = shows(url, status="escalated", text="x y")
    assert at.selectbox(key="incidents-status").value == "escalated"
    assert at.text_input(key="incidents-text").value == "x y"
    assert not rows(at)
    assert at.info[0].value == "No incidents match these filters."


def test_a_filter_is_written_into_the_url(shows: Shows, tmp_path: Path) -> None:
    at = shows(world_of("resolved", tmp_path).url)
    at.selectbox(key="incidents-role").select("rollout").run()
    assert at.query_params["role"] in ("rollout", ["rollout"])
    assert len(rows(at)) == 1
    at.selectbox(key="incidents-role").select("").run()
    assert "role" not in at.query_params


def test_pages_are_turned_and_filters_begin_at_the_first(shows: Shows, tmp_path: Path) -> None:
    run = BigJournal(tmp_path, num_replicas=20, num_incidents=2 * PAGE_ROWS + 3).build()
    at = shows(run.database_url)
    assert len(rows(at)) == PAGE_ROWS
    at.button(key="incidents-older").click().run()
    assert at.query_params["page"] in ("2", ["2"])
    at.button(key="incidents-older").click().run()
    assert len(rows(at)) == 3
    at.text_input(key="incidents-text").input("crash").run()
    assert "page" not in at.query_params
    assert not at.exception


# --- the page of one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_incident_has_a_page(kind: str, shows: Shows, tmp_path: Path) -> None:
    world = world_of(kind, tmp_path)
    i = world.only()
    at = shows(world.url, incident=i.incident_id)
    assert not at.exception
    said = texts(at)
    if kind != "hostile":
        assert i.diagnosis.because in said
    assert i.incident_id in said
    assert [tab.label for tab in at.tabs] == ["Timeline", "Evidence", "Decision", "Cost", "What-if", "Events"]
    first = said[: said.index("</article>")]
    for label in ("where", "action", "is it over", "onset"):
        assert f"<dt>{label}</dt>" in first, "one screen answers it"
    assert "Actual decision: " in said
    ticket, commands = at.code[0], at.code[1]
    assert ticket.value.startswith("## ") and ticket.language == "markdown" and i.incident_id in ticket.value
    assert f"rolecall replay {i.incident_id}" in commands.value


def test_text_of_others_stands_in_no_place_that_is_not_text(shows: Shows, tmp_path: Path) -> None:
    world = world_of("hostile", tmp_path)
    name = world.only().incident_id
    at = shows(world.url, incident=name)
    assert not at.exception
    assert "<script>alert(1)</script> **bold** $x^2$ :red[x]" in texts(at)
    for kind in (
        "markdown",
        "title",
        "header",
        "subheader",
        "caption",
        "info",
        "warning",
        "error",
        "success",
        "button",
    ):
        for element in getattr(at, kind):
            shown = f"{getattr(element, 'value', '')} {getattr(element, 'label', '')}"
            assert "script" not in shown and ":red" not in shown, kind
    for element in at.get("html"):
        assert "<script" not in element.proto.body and "<b>" not in element.proto.body.partition("</header>")[2]
    every = texts(at) + repr([c.value for c in at.code]) + repr([d.value.to_dict() for d in at.dataframe])
    assert "\x1b" not in every and "\u202e" not in every
    table = shows(world.url)
    assert "\x1b" not in repr(rows(table)) and "<script>" in repr(rows(table))


def test_one_event_is_shown_as_json(shows: Shows, tmp_path: Path) -> None:
    world = world_of("hostile", tmp_path)
    at = shows(world.url, incident=world.only().incident_id)
    chooser = at.selectbox(key="incident-event")
    at.selectbox(key="incident-event").select(chooser.options[0]).run()
    shown = at.code[-1].value
    assert '"kind": "incident_opened"' in shown
    assert "\x1b" not in shown and "\u202e" not in shown
    assert not at.exception


def test_a_stored_window_is_drawn_and_decided_again(shows: Shows, tmp_path: Path) -> None:
    d, window = found("stopped", "trainer/1")
    world = World(tmp_path)
    body = {"diagnosis": d.to_dict(), "window": "observations"}
    world.journal.append(filled(K.INCIDENT_OPENED, body), incident_id="inc-1-trainer-1")
    world.journal.save_window("inc-1-trainer-1", "observations", window)
    at = shows(world.url, incident="inc-1-trainer-1")
    assert not at.exception
    said = texts(at)
    assert "suspect: trainer/1#1 (node-trainer-1)" in said
    assert "Source: telemetry window of the incident" in said
    assert "No progress: " in said
    at.button(key="incident-again").click().run()
    assert at.success[0].value == "Reproduced: same diagnosis and plan."
    assert "same diagnosis from the stored window" in texts(at)
    at.button(key="incident-tune").click().run()
    assert "With a minimum hang deadline of" in texts(at)
    assert not at.exception


def test_evidence_files_are_shown_as_text(shows: Shows, tmp_path: Path) -> None:
    world = world_of("resolved", tmp_path)
    name = world.only().incident_id
    folder = tmp_path / "evidence" / name
    folder.mkdir(parents=True)
    (folder / "stacks.json").write_text(HOSTILE)
    at = shows(world.url, RunDir(tmp_path), incident=name)
    at.selectbox(key="incident-file").select("stacks.json").run()
    assert not at.exception
    (shown,) = [c for c in at.code if "<script>" in c.value]
    assert "\x1b" not in shown.value
    assert shown.language in ("", None, "plaintext")


def test_an_incident_that_is_not_there_says_so_and_leads_back(shows: Shows, tmp_path: Path) -> None:
    at = shows(world_of("resolved", tmp_path).url, incident="<b>no</b>", role="rollout")
    assert not at.exception
    assert "The journal has no such incident: <b>no</b>" in texts(at)
    at.button(key="incident-back").click().run()
    assert "incident" not in at.query_params
    assert at.query_params["role"] in ("rollout", ["rollout"])
    assert len(rows(at)) == 1


def test_one_that_cannot_be_read_has_a_page(shows: Shows, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.journal.append_unchecked(K.PLAN_CREATED, {"plan": 7}, incident_id="inc-broken")
    at = shows(world.url, incident="inc-broken")
    assert not at.exception
    assert "Incident set aside" in texts(at) and "set aside</span>" in texts(at)
    assert rows(shows(world.url))[0]["state"] == "⚠ set aside"


def test_ten_thousand_events_are_paged(shows: Shows, tmp_path: Path) -> None:
    world = world_of("held", tmp_path)
    i = world.only()
    events = world.journal.events(incident_id=i.incident_id)
    body = {"topic": "t", "because": "again", "channel": "log"}
    for n in range(250):
        world.journal.append(filled(K.ONCALL_PAGED, {**body, "topic": f"t{n}"}), incident_id=i.incident_id)
    at = shows(world.url, incident=i.incident_id)
    assert not at.exception
    assert len(rows(at)) == 100
    at.number_input(key="incident-events-page").set_value(3).run()
    assert len(rows(at)) == len(events) + 250 - 200


def test_journals_are_not_mixed_up(shows: Shows, tmp_path: Path) -> None:
    """Two runs have incidents of one name."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    crash, held = world_of("resolved", tmp_path / "a"), world_of("held", tmp_path / "b")
    name = crash.only().incident_id
    assert held.only().incident_id == name
    assert ">resolved</span>" in texts(shows(crash.url, incident=name))
    assert ">blocked by a guard</span>" in texts(shows(held.url, incident=name))
    assert [rows(shows(w.url))[0]["state"] for w in (crash, held)] == ["✓ resolved", "‖ blocked by a guard"]


def test_markdown_for_a_ticket_and_links_to_that_time(tmp_path: Path) -> None:
    world = world_of("resolved", tmp_path)
    snapshot = first_snapshot(Settings(journal_url=world.url))
    whole = page_model(read(world.journal, snapshot.projection, world.only().incident_id, None, world.clock.wall()))
    found = brief(whole, 7, ())
    text = markdown(found, "my-run")
    assert text.startswith(f"## {found.title}") and "rollout/1 crashed in step 7" in text
    assert f"> {world.only().diagnosis.because}" in text and "- **is it over**: Resolved" in text
    assert links(Settings(journal_url=world.url), whole.material) == ()
    what = Settings(
        journal_url=world.url, grafana_url="http://grafana:3000/", logs_url="http://logs/?q={replica}&from={start}"
    )
    (_, grafana), (_, logs) = links(what, whole.material)
    onset = world.only().first_diagnosis.onset
    assert grafana.startswith(f"http://grafana:3000/d/rolecall-replica?from={(onset - 300) * 1000:.0f}&to=")
    assert "var-replica=rollout%2F1" in grafana and f"var-run={what.run_id}" in grafana
    assert logs.startswith("http://logs/?q=rollout%2F1&from=")


def test_links_of_an_open_incident_show_its_beginning(tmp_path: Path) -> None:
    world = world_of("proposed", tmp_path)
    incident, snapshot = world.only(), first_snapshot(Settings(journal_url=world.url))
    later = world.clock.wall() + 7200
    material = read(world.journal, snapshot.projection, incident.incident_id, None, later)
    ((_, grafana),) = links(Settings(journal_url=world.url, grafana_url="http://g"), material)
    onset = incident.first_diagnosis.onset
    assert f"from={(onset - 300) * 1000:.0f}&to={(incident.opened_at + 300) * 1000:.0f}" in grafana


def test_the_page_of_an_incident_that_its_run_left_open_stands_still(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    plan = made.open()
    made.plan(plan)
    made.act(plan)
    made.say(K.RUN_ENDED, {"outcome": "interrupted", "because": "Ctrl-C"})
    snapshot = first_snapshot(made.settings())
    later = made.clock.wall() + 24 * 3600
    whole = page_model(read(made.journal, snapshot.projection, "i-1", None, later, None, snapshot.mode_of))
    rows = dict(brief(whole, None, ()).rows)
    assert rows["action"].startswith("the run has ended. Last: in progress: replace rollout/1#1")
    assert rows["is it over"].endswith("when the run ended") and "24 h" not in rows["is it over"]
    assert whole.cost is not None and whole.cost.is_final and whole.cost.replica_seconds < 60
    assert whole.plan_sections[-1].outcome == "not finished" and whole.head.status == "ended"


def test_earlier_incidents_are_those_of_the_same_node(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    for name, replica in (("i-1", "rollout/0"), ("i-2", "rollout/1"), ("i-3", "rollout/0"), ("i-4", "rollout/0")):
        made.open(replica=replica, name=name)
    known = first_snapshot(made.settings()).projection.incidents
    assert [i.incident_id for i in similar_before(known["i-4"], known.values())] == ["i-3", "i-1"]
    assert similar_before(known["i-1"], known.values()) == () == similar_before(None, known.values())


def test_what_is_not_shown_is_counted(shows: Shows, tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    for number in range(12):
        made.open(name=f"i-{number}")
    now = made.clock.wall()
    found = Diagnosis(
        suspects=tuple(Suspect(node=NodeId("node-4"), role="rollout", replica=f"rollout/{n}") for n in range(50)),
        fault_class=FaultClass.HANG, onset=now, detected_at=now, confidence=0.9, because="they hang", evidence=(),
        detectors=("progress",),
    )  # fmt: skip
    made.say(K.INCIDENT_OPENED, {"diagnosis": found.to_dict(), "window": "observations"}, "i-many")
    at = shows(made.run.database_url, incident="i-many")
    assert not at.exception
    said = texts(at)
    assert "and 46 more" in said and "12 on this node, the newest i-11" in said
    assert len(next(d for d in at.dataframe if "when" in d.value).value) == 8
    assert "and 4 earlier ones" in said


def test_in_mode_observe_the_page_says_what_rolecall_would_do(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, mode="observe")
    made.plan(made.open())
    snapshot = first_snapshot(made.settings())
    whole = page_model(read(made.journal, snapshot.projection, "i-1", None, made.clock.wall(), None, snapshot.mode_of))
    done = dict(brief(whole, None, ()).rows)["action"]
    assert done == "nothing, mode observe; rolecall would replace rollout/1#1 on node-4"


def test_a_cost_that_is_not_known_is_not_0() -> None:
    nothing = IncidentCost(
        replica_seconds=0.0, gpu_seconds=None, tokens_lost=0, tokens_kept=0, requests_reassigned=0, steps_interrupted=0,
        steps_undone=0, is_final=False, how=(),
    )  # fmt: skip
    assert cost_words(nothing) == "not yet known"
    assert cost_words(replace(nothing, is_final=True)) == "" == cost_words(None)
    known = replace(nothing, replica_seconds=12.5, how=("trainer/1 was impaired for 12.5 s",))
    assert cost_words(known) == "12.5 replica-seconds so far"
