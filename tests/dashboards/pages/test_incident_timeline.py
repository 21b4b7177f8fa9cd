"""Timeline, texts and cost of an incident."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import ActionKind
from rolecall.core.ids import GroupId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import GroupState, Ledger, LedgerLine
from rolecall.core.journal.payloads.run import RequestsReassigned
from rolecall.core.text import plain
from rolecall.dashboards.pages.incidents.cache import cost
from rolecall.dashboards.pages.incidents.charts import incident_charts
from rolecall.dashboards.pages.incidents.material import EVENTS_MAX, IncidentPageInputs, read
from rolecall.dashboards.pages.incidents.signals import from_window
from rolecall.dashboards.pages.incidents.timeline import (
    ENTRIES_MAX,
    TimelineEntryKind,
    build_timeline,
    incident_summary,
    moved_words,
)
from rolecall.dashboards.pages.incidents.view import (
    collected_evidence,
    findings,
    head,
    plan_sections,
    quantity,
    recovery_section,
)
from rolecall.recovery.projection import IncidentProjection
from tests.dashboards.incident_cases import HOSTILE, KINDS, found, material_of, world_of
from tests.dashboards.made_runs import MadeRun
from tests.events import filled, made_event
from tests.fake_run import HANG, KILL, FakeRun

K = EventKind


@pytest.fixture(scope="module")
def of_fake_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], IncidentPageInputs]:
    """Incidents of the whole run that never was, with the injector's log."""
    run = FakeRun(tmp_path_factory.mktemp("runs")).build()
    journal = Journal(run.database_url, clock=FakeClock(), create=False)
    book = IncidentProjection()
    book.refresh(journal)
    try:
        inputs = {n: read(journal, book, f"i-{n}", run, 2_000_000_000.0) for n in (1, 2, 3)}
    finally:
        journal.close()
    return inputs.__getitem__


def kinds(m: IncidentPageInputs) -> list[TimelineEntryKind]:
    return [x.kind for x in build_timeline(m, incident_summary(m)).moments]


def test_requests_that_were_cut_are_reported_of() -> None:
    moved = filled(K.REQUESTS_REASSIGNED, {"from_replica": "rollout/1", "num_requests": 9, "to": ["rollout/0"]})
    assert isinstance(moved, RequestsReassigned)
    assert moved_words(moved) == "9 requests of rollout/1 continue at rollout/0"
    cut = "9 requests of rollout/1 continue at the next available engine"
    assert moved_words(replace(moved, to=(), num_cut=4)).startswith(cut)


def test_a_cure_is_reported_from_the_fault_to_the_close(of_fake_run: Callable[[int], IncidentPageInputs]) -> None:
    m = of_fake_run(1)
    whole = build_timeline(m, incident_summary(m))
    in_order = [x.kind for x in whole.moments]
    wanted = [
        TimelineEntryKind.FAULT,
        TimelineEntryKind.ONSET,
        TimelineEntryKind.DETECTED,
        TimelineEntryKind.PLAN,
        TimelineEntryKind.ACTION,
        TimelineEntryKind.RUN,
        TimelineEntryKind.WEIGHTS,
        TimelineEntryKind.VERIFIED,
        TimelineEntryKind.CLOSED,
    ]
    assert [x for x in dict.fromkeys(in_order) if x in wanted] == wanted
    assert [x.number for x in whole.moments] == list(range(1, len(in_order) + 1))
    assert "24 requests of rollout/1 continue at rollout/0, rollout/2" in [x.words for x in whole.moments]
    assert whole.whole.begin < min(x.at for x in whole.moments)
    assert whole.whole.end > max(x.at for x in whole.moments)
    assert whole.whole.zero == pytest.approx(m.incident.diagnosis.onset)  # type: ignore[union-attr]


def test_an_interrupted_step_is_shown_until_its_commit(of_fake_run: Callable[[int], IncidentPageInputs]) -> None:
    m = of_fake_run(2)
    words = [x.words for x in build_timeline(m, incident_summary(m)).moments]
    assert any("is interrupted" in w for w in words)
    assert any("which was interrupted, is committed" in w for w in words)
    assert any(w == "trainer/1#2 rejoined" for w in words)


def test_without_the_injectors_log_no_fault_is_reported(of_fake_run: Callable[[int], IncidentPageInputs]) -> None:
    m = replace(of_fake_run(1), faults=())
    assert TimelineEntryKind.FAULT not in kinds(m)
    assert head(m, incident_summary(m)).injected == ""


def test_a_long_story_is_shown_around_the_finding_first(of_fake_run: Callable[[int], IncidentPageInputs]) -> None:
    m = of_fake_run(1)
    assert build_timeline(m, incident_summary(m)).around is None
    late = [replace(e, wall_at=e.wall_at + 900) if e.kind is K.INCIDENT_CLOSED else e for e in m.events]
    long = build_timeline(replace(m, events=tuple(late)), None)
    assert long.around is not None
    assert long.around.end - long.around.begin < (long.whole.end - long.whole.begin) / 3


def test_ten_thousand_events_are_sixty_marks(tmp_path: Path) -> None:
    world = world_of("held", tmp_path)
    m = material_of(world)
    called = [
        made_event(seq=1000 + n, kind=K.ONCALL_PAGED, wall_at=m.now + n, body={"because": f"{n}"})
        for n in range(10_000)
    ]
    found = build_timeline(replace(m, events=(*m.events, *called)), None)
    assert len(found.moments) == ENTRIES_MAX
    assert found.num_left_out == 10_000 + len(build_timeline(m, None).moments) - ENTRIES_MAX
    assert EVENTS_MAX > 10_000


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_a_head_a_story_and_drawings(kind: str, tmp_path: Path) -> None:
    m = material_of(world_of(kind, tmp_path))
    story = incident_summary(m)
    h, whole = head(m, story), build_timeline(m, story)
    assert h.sentence and h.state and h.glyph and h.status
    assert len(whole.moments) >= 2
    assert cost(m, story) is not None
    for chart in incident_charts(whole, whole.whole, ()):
        assert chart.to_dict()


STATES = {
    "resolved": ("✓", "Resolved, verified 2.25 s after the finding: rollout/1#2"),
    "retried": ("✓", "at attempt 2"),
    "gave up": (
        "✗",
        "Escalated, closed 2.50 s after the opening: 2 replacements in a row died before their first progress",
    ),
    "proposed": ("?", "No, open for "),
    "held": ("‖", "No, open for "),
    "observed": ("⊘", "Self-recovered: the fault ended without action by rolecall"),
    "cannot tell": ("–", "On-call paged over test"),
    "user code": ("✗", "Escalated"),
}


@pytest.mark.parametrize("kind", STATES)
def test_the_state_is_a_sentence(kind: str, tmp_path: Path) -> None:
    m = material_of(world_of(kind, tmp_path))
    h = head(m, incident_summary(m))
    glyph, words = STATES[kind]
    assert h.glyph == glyph
    assert words in h.state


def test_who_is_named_with_role_incarnation_node_and_pid(tmp_path: Path) -> None:
    d, window = found("stopped", "trainer/1")
    m = material_of(world_of("resolved", tmp_path))
    assert m.incident is not None
    h = head(replace(m, incident=replace(m.incident, diagnosis=d)), None)
    assert h.who == ("trainer/1#1, role trainer, on node-trainer-1, pid 4005",)
    assert ("Confidence", "95 %") in h.facts
    assert from_window(window, d).signals


def test_set_aside_and_unreadable_ones_have_a_page(tmp_path: Path) -> None:
    world = world_of("resolved", tmp_path)
    world.journal.append_unchecked(K.PLAN_CREATED, {"plan": 7}, incident_id=world.only().incident_id)
    world.journal.append_unchecked(K.PLAN_CREATED, {}, incident_id="inc-no one")
    book = IncidentProjection()
    book.refresh(world.journal)
    aside = read(world.journal, book, next(iter(book.incidents)), None, world.clock.wall())
    assert head(aside, incident_summary(aside)).state.startswith("Set aside: ")
    unreadable = read(world.journal, book, "inc-no one", None, world.clock.wall())
    assert unreadable.incident is None
    assert head(unreadable, None).status == "set aside"
    assert plan_sections(unreadable) == findings(unreadable) == ()
    assert any("plan_created: plan: " in text for text in unreadable.missing)


def test_a_damaged_line_is_named_and_the_rest_is_reported(tmp_path: Path) -> None:
    import sqlalchemy as sa

    world = world_of("resolved", tmp_path)
    with world.journal.store.write() as conn:
        for (name,) in conn.execute(sa.text("SELECT name FROM sqlite_master WHERE type='trigger'")).all():
            conn.execute(sa.text(f"DROP TRIGGER {name}"))
        conn.execute(sa.text("UPDATE events SET body='{' WHERE kind='action_done'"))
    m = material_of(world)
    assert any("events line" in text for text in m.missing)
    assert TimelineEntryKind.DETECTED in kinds(m)


def test_a_damaged_window_is_named(tmp_path: Path) -> None:
    import sqlalchemy as sa

    world = world_of("resolved", tmp_path)
    with world.journal.store.write() as conn:
        conn.execute(sa.text("UPDATE windows SET blob=x'00'"))
    m = material_of(world)
    assert m.window is None
    assert any("window" in text for text in m.missing)


def test_decisions_show_attempts_guards_and_operators(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    first, second = plan_sections(material_of(world_of("retried", tmp_path / "a")))
    assert first.outcome.startswith("failed (died): ")
    assert second.outcome == "done and verified"
    (held,) = plan_sections(material_of(world_of("held", tmp_path / "b")))
    assert held.held == ("paused: paused by Ada: let me look",)
    (approved,) = plan_sections(material_of(world_of("approved", tmp_path / "c")))
    assert any(w.startswith("Ada approved it") for w in approved.commands)


def test_the_proof_of_a_replacement(of_fake_run: Callable[[int], IncidentPageInputs]) -> None:
    m = of_fake_run(1)
    c = recovery_section(m, incident_summary(m))
    assert c.replacements[0].startswith("rollout/1#2 on node-6, pid 4108, from a warm standby; serving since")
    (proof,) = c.proofs
    facts = dict(proof.facts)
    assert facts["Sent and received weights"].startswith("match: ")
    assert facts["Tensors verified"] == "19, not covered: 1"


def test_what_a_killed_rollout_cost(of_fake_run: Callable[[int], IncidentPageInputs]) -> None:
    m = of_fake_run(1)
    c = cost(m, incident_summary(m), gpus_per_process=2.0)
    assert c is not None and c.is_final
    assert (c.tokens_kept, c.tokens_lost, c.requests_reassigned, c.steps_interrupted) == (862, 0, 24, 0)
    assert c.replica_seconds == pytest.approx(KILL.found_after + KILL.serving_after, abs=0.01)
    assert c.gpu_seconds == pytest.approx(2 * c.replica_seconds)


def test_what_a_hung_trainer_cost_counts_those_who_waited(of_fake_run: Callable[[int], IncidentPageInputs]) -> None:
    m = of_fake_run(2)
    c = cost(m, incident_summary(m))
    assert c is not None and c.gpu_seconds is None
    assert c.steps_interrupted == 1
    alone = HANG.found_after + HANG.serving_after
    assert c.replica_seconds > alone + HANG.found_after
    assert len(c.how) == 2 and c.how[1].startswith("trainer/0 waited for")


def test_steps_that_were_undone_are_rolled_back_before_they_are_committed_again(tmp_path: Path) -> None:
    clock = FakeClock()
    made = MadeRun(tmp_path, clock=clock)
    ledger = Ledger(made.journal.store, clock=clock)
    for step in (27, 28, 29):
        for state in (GroupState.ISSUED, GroupState.ASSIGNED, GroupState.TRAINED):
            ledger.write([LedgerLine(group_id=GroupId(f"g{step}"), state=state, step=step)])
    clock.advance(600.0)
    plan = made.open("trainer/1")
    ledger.undo_after(27, "went back to step 27")
    made.plan(plan)
    made.act(plan)
    made.resolve(plan)
    book = IncidentProjection()
    book.refresh(made.journal)
    m = read(made.journal, book, "i-1", None, clock.wall())
    c = cost(m, incident_summary(m))
    assert c is not None and c.steps_undone == 2


def test_a_review_changes_no_cost_of_a_closed_incident(tmp_path: Path) -> None:
    clock = FakeClock()
    made = MadeRun(tmp_path, clock=clock)
    restart = replace(made.open(), action=ActionKind.RESTART_ROLE)
    made.plan(restart)
    made.act(restart)
    made.say(K.REPLICA_STARTING, {"replica": "rollout/1", "incarnation": 2, "node": "node-4"})
    clock.advance(10.0)
    made.say(K.ACTION_FAILED, {"digest": restart.digest, "failure": "no_progress"}, "i-1")
    made.plan(replace(restart, action=ActionKind.TOLERATE, targets=()))
    made.say(K.INCIDENT_CLOSED, {"outcome": "escalated"}, "i-1")
    costs = []
    for _ in range(2):
        book = IncidentProjection()
        book.refresh(made.journal)
        m = read(made.journal, book, "i-1", None, clock.wall())
        costs.append(cost(m, incident_summary(m)))
        clock.advance(3600.0)
        made.say(K.DIAGNOSIS_REVIEWED, {"verdict": "right", "by": "Ada"}, "i-1")
    assert costs[0] is not None and costs[0].is_final and costs[0].replica_seconds == pytest.approx(13.0 + 10.0)
    assert costs[1] == costs[0]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("stalled_seconds", 2.5, "2.5 s"),
        ("rss_bytes", 1 << 21, "2.0 MiB"),
        ("sm_clock_hertz", 1.41e9, "1,410 MHz"),
        ("share", 0.25, "25.0 %"),
        ("cusum", 6.73, "6.73"),
        ("x", "\x1b[31m", "\N{REPLACEMENT CHARACTER}[31m"),
    ],
)
def test_numbers_have_their_unit(name: str, value: Any, words: str) -> None:
    assert quantity(name, value) == words


def test_text_of_others_is_plain_wherever_it_comes(tmp_path: Path) -> None:
    m = material_of(world_of("hostile", tmp_path))
    story = incident_summary(m)
    said = repr((head(m, story), build_timeline(m, story), findings(m), plan_sections(m), recovery_section(m, story)))
    said += repr(
        [replace(w, files=()) for w in collected_evidence(m)]
    )  # names of files are compared, and made plain when shown
    assert "<script>" in said  # it is there, as text
    assert "\\x1b" not in said and "\\u202e" not in said
    assert HOSTILE not in said


def test_drawings_hold_text_of_others_in_data_alone(tmp_path: Path) -> None:
    m = material_of(world_of("hostile", tmp_path))
    whole = build_timeline(m, incident_summary(m))
    whole = replace(whole, moments=tuple(replace(x, words=plain(HOSTILE)) for x in whole.moments))
    for chart in incident_charts(whole, whole.whole, ()):
        spec = chart.to_dict()

        def without_data(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: without_data(v) for k, v in value.items() if k not in ("data", "datasets")}
            return [without_data(v) for v in value] if isinstance(value, list) else value

        assert "<script>" in repr(spec)
        assert "<script>" not in repr(without_data(spec))
