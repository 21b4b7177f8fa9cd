"""The table of incidents: rows, filters, the URL, pages."""

from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.errors import JournalError
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind as K
from rolecall.dashboards.pages.incidents.table import (
    PAGE_ROWS,
    Filter,
    IncidentTable,
    IncidentTableRow,
    broken_row,
    choices,
    row_of,
    shown,
)
from rolecall.dashboards.pages.links import href
from rolecall.dashboards.pages.status import GLYPHS, SET_ASIDE, doing, status_of
from rolecall.recovery.operators import commands
from rolecall.recovery.operators.run_location import JournalLocation
from tests.dashboards.incident_cases import HOSTILE, world_of
from tests.recovery.world import World

NOW = 2_000_000.0


def row(n: int = 1, **more: object) -> IncidentTableRow:
    fixed = IncidentTableRow(
        incident_id=f"inc-{n}",
        status="resolved",
        is_open=False,
        who="rollout/1#1",
        roles=("rollout",),
        nodes=("node-4",),
        fault_class="crash",
        opened_at=NOW - 60.0 * n,
        closed_at=NOW - 60.0 * n + 5,
        found_seconds=1.0,
        verified_seconds=2.0,
        action="replace_replica",
        because="it is gone",
        haystack=f"inc-{n}\nit is gone",
    )
    return replace(fixed, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "takes", "leaves"),
    [
        (Filter(text="GONE"), row(), row(haystack="slow")),
        (Filter(status="open"), row(is_open=True, status="acting"), row()),
        (Filter(status="escalated"), row(status="escalated"), row()),
        (Filter(role="trainer"), row(roles=("rollout", "trainer")), row()),
        (Filter(fault="hang"), row(fault_class="hang"), row()),
        (Filter(node="node-5"), row(nodes=("node-4", "node-5")), row()),
        (Filter(within="hour"), row(), row(opened_at=NOW - 3601)),
        (Filter(day="1970-01-24"), row(), row(opened_at=NOW - 86_400 * 2)),
        (Filter(review="wrong"), row(review="wrong"), row(review="right")),
        (Filter(review="none"), row(), row(review="right")),
    ],
    ids=lambda v: next(iter(v.to_query()), "") if isinstance(v, Filter) else "",
)
def test_each_filter_takes_what_it_says(wanted: Filter, takes: IncidentTableRow, leaves: IncidentTableRow) -> None:
    assert wanted.takes(takes, NOW)
    assert not wanted.takes(leaves, NOW)


def test_filters_live_in_the_url() -> None:
    wanted = Filter(text="a b&c", status="open", node="n", within="day", page=3)
    assert Filter.from_query(wanted.to_query()) == wanted
    assert Filter().to_query() == {}


@pytest.mark.parametrize("page", ["0", "-1", "x", "9" * 40, "²", ""])
def test_a_url_may_hold_anything(page: str) -> None:
    found = Filter.from_query({"page": page, "within": "for ever", "strange": "1", "text": "x" * 9999})
    assert (found.page, found.within, len(found.text)) == (1, "", 200)


def test_a_page_beyond_the_last_is_the_last() -> None:
    rows = [row(n) for n in range(1, 2 * PAGE_ROWS + 2)]
    found = shown(rows, Filter(page=99), NOW)
    assert (found.page, found.num_pages, len(found.rows), found.num_found) == (3, 3, 1, len(rows))


def test_a_row_has_suspect_fault_times_and_duration(tmp_path: Path) -> None:
    world = world_of("resolved", tmp_path)
    found = row_of(world.only())
    assert (found.status, found.words, found.who, found.roles) == (
        "resolved",
        "✓ resolved",
        "rollout/1#1",
        ("rollout",),
    )
    assert found.fault_class == FaultClass.CRASH
    assert found.action == "replace_replica"
    assert not found.is_open
    assert found.found_seconds == pytest.approx(0.5)
    assert found.verified_seconds is not None and found.verified_seconds > 1.0
    assert found.open_seconds(NOW) == pytest.approx(world.only().closed_at - world.only().opened_at)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "mode", "status", "words"),
    [
        ("held", "act", "blocked by a guard", "blocked (paused by Ada: let me look): replace rollout/1#1 on"),
        ("held", "observe", "only observed", "nothing, mode observe; rolecall would replace rollout/1#1 on"),
        ("proposed", "approve", "awaits approval", "waiting for approval to replace rollout/1#1 on"),
        ("observed", "act", "self_recovered", ""),
    ],
)
def test_one_status_for_all_pages(kind: str, mode: str, status: str, words: str, tmp_path: Path) -> None:
    world = world_of(kind, tmp_path)
    incident, now = world.only(), world.clock.wall()
    (found,) = IncidentTable().rows({"i": incident}, {}, mode_of=lambda _: mode, now=now)
    assert found.status == status_of(incident, mode, now) == status and status in GLYPHS
    if words:
        assert doing(incident, mode, now).startswith(words)


def test_a_plan_of_mode_observe_waits_for_approval_once_the_mode_is_approve(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch = world.watch(world.config.model_copy(update={"mode": "observe"}))
    world.run(2.0, watch)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: world.events(K.PLAN_BLOCKED), watch)
    assert status_of(world.only(), "observe", world.clock.wall()) == "only observed"
    approving = world.watch(world.config.model_copy(update={"mode": "approve"}))
    world.until(lambda: world.events(K.PLAN_PROPOSED), approving)
    assert status_of(world.only(), "approve", world.clock.wall()) == "awaits approval"


def test_a_proposal_that_expired_is_not_being_done(tmp_path: Path) -> None:
    world = world_of("proposed", tmp_path)
    incident, records = world.only(), IncidentTable()
    (before,) = records.rows({"i": incident}, {}, mode_of=lambda _: "approve", now=world.clock.wall())
    (after,) = records.rows({"i": incident}, {}, mode_of=lambda _: "approve", now=world.clock.wall() + 3600)
    assert (before.status, after.status) == ("awaits approval", "approval expired")
    assert doing(incident, "approve", world.clock.wall() + 3600).startswith("nothing: the approval expired at 20")


def test_titles_have_the_step(tmp_path: Path) -> None:
    (found,) = IncidentTable().rows({"i": world_of("resolved", tmp_path).only()}, {}, step_of=lambda _: 53)
    assert found.title == "rollout/1 crashed in step 53"


def test_marks_show_and_are_found(tmp_path: Path) -> None:
    world = world_of("resolved", tmp_path)
    commands.review_diagnosis(
        JournalLocation(world.url), world.only().incident_id, right=False, by="Ada", because="it was the switch"
    )
    assert row_of(world.only()).review == "wrong"


def test_open_ones_are_on_top_then_the_newest(tmp_path: Path) -> None:
    first = world_of("resolved", tmp_path).only()
    older = replace(first, incident_id="older", opened_at=first.opened_at - 100)
    oldest_open = replace(first, incident_id="open", opened_at=first.opened_at - 200, outcome=None, closed_at=None)
    oldest_open = replace(oldest_open, state=type(first.state).ACTING)
    rows = IncidentTable().rows({i.incident_id: i for i in (older, first, oldest_open)}, {})
    assert [r.incident_id for r in rows] == ["open", first.incident_id, "older"]


def test_set_aside_ones_are_there_with_the_reason(tmp_path: Path) -> None:
    i = world_of("resolved", tmp_path).only()
    rows = IncidentTable().rows(
        {i.incident_id: i}, {i.incident_id: JournalError("no such move\nstory"), "line 7": ValueError()}
    )
    reported = {r.incident_id: r for r in rows}
    assert reported[i.incident_id].status == SET_ASIDE
    assert reported[i.incident_id].because == "no such move"
    assert reported["line 7"].because == "ValueError"
    assert SET_ASIDE in choices(rows).statuses


def test_only_what_changed_is_made_again(tmp_path: Path) -> None:
    i = world_of("resolved", tmp_path).only()
    records = IncidentTable()
    (before,) = records.rows({"a": i}, {})
    (same,) = records.rows({"a": i}, {})
    (changed,) = records.rows({"a": replace(i, because="x")}, {})
    assert same is before
    assert changed is not before


def test_what_there_is_is_offered() -> None:
    offered = choices([row(status="acting", is_open=True), row(2, nodes=("b", "a")), row(3, opened_at=0.0)])
    assert offered.statuses == ("open", "acting", "resolved")
    assert offered.nodes == ("a", "b", "node-4")
    assert offered.days == ("1970-01-24",)


def test_text_of_others_becomes_plain(tmp_path: Path) -> None:
    found = row_of(world_of("hostile", tmp_path).only())
    assert "\x1b" not in found.because and "\u202e" not in found.because
    assert "\x1b" not in broken_row("x", HOSTILE).because
    assert href("a&incident=b c/..") == "incidents?incident=a%26incident%3Db+c%2F.."
