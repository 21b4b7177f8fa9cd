"""The Overview page of a job that rolecall only watches: ranks, phases, course, and what cannot be seen and why."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.clock import SystemClock
from rolecall.core.journal.journal import Journal
from rolecall.dashboards.data.nodes import observed_fleet
from rolecall.dashboards.pages.overview import view
from rolecall.dashboards.pages.overview.watched_job import (
    LATE_SECONDS,
    SLOW_RATIO,
    course_buckets,
    figures_of,
    missing,
    rank_states,
    rank_table,
    works,
)
from rolecall.views import observed_capabilities, observed_course, observed_ranks
from rolecall.views.observed_capabilities import ObservedCapability
from rolecall.views.observed_course import CoursePoint
from rolecall.views.observed_ranks import SILENT_SECONDS, ObservedRank
from rolecall.watch.agents import observing_run
from tests.dashboards.acting_world import page, world
from tests.dashboards.made_runs import first_snapshot
from tests.dashboards.pages.test_overview import drawn, observed_job, text
from tests.support import eventually

NOW = 10_000.0
GRPO = (("generate", 0.6), ("step", 0.25), ("wait", 0.1), ("score", 0.05))


def rank(n: int = 0, **more: object) -> ObservedRank:
    fine = ObservedRank(
        "trainer/0", n, "vm", 40 + n, True, "step", 53, NOW - 1, NOW - 2,
        reports_by="hooks", step_seconds=2.0, own_seconds=1.5, phases=(("step", 0.9), ("wait", 0.1)),
    )  # fmt: skip
    return replace(fine, **more)  # type: ignore[arg-type]


def state(of: ObservedRank, *others: ObservedRank, named: frozenset[tuple[str, int | None]] = frozenset()) -> str:
    found = rank_states([of, *others], named, NOW)[of]
    return f"{found.kind}: {found.word}"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "good: works"),
        ({"is_alive": False}, "soft: has ended"),
        ({"seen_at": NOW - SILENT_SECONDS - 10}, "bad: not seen for 40 s"),
        ({"is_stopped": True}, "bad: stopped by a signal"),
        ({"progress_at": NOW - 31}, "warn: no progress for 30 s"),
        ({"progress_at": NOW - 1 - LATE_SECONDS}, "good: works"),
        ({"progress_at": NOW - 31, "phase": "wait"}, "good: works"),  # no progress is due there
        ({"progress_at": NOW - 31, "step_seconds": 20.0}, "good: works"),  # its steps are long
        ({"progress_at": NOW - 31, "step_seconds": None}, "good: works"),  # nothing is known of its steps
        ({"phase": "start"}, "note: starting"),
    ],
)
def test_state_of_a_rank(changed: dict[str, object], said: str) -> None:
    assert state(rank(**changed)) == said


def test_a_slow_rank_stands_out_among_its_peers_only() -> None:
    peers = [rank(n) for n in (1, 2, 3)]
    assert state(rank(own_seconds=3.0), *peers) == "warn: 2.0 times the time of its peers"
    assert state(rank(own_seconds=2.0), *peers) == "good: works"
    assert state(rank(own_seconds=3.0), rank(1)) == "good: works", "of two, nobody knows which one is usual"
    others = [replace(p, replica="rollout/0") for p in peers]
    assert state(rank(own_seconds=3.0), *others) == "good: works", "another role is no peer"


@pytest.mark.parametrize("num", [3, 4, 9, 10])
def test_peers_are_the_others(num: int) -> None:
    ranks = [rank(n, own_seconds=1.0 + 0.25 * n) for n in range(num)]
    found = rank_states(ranks, frozenset(), NOW)
    for r in ranks:
        ratio = (r.own_seconds or 0.0) / statistics.median(o.own_seconds or 0.0 for o in ranks if o is not r)
        said = f"{ratio:.1f} times the time of its peers" if ratio >= SLOW_RATIO else "works"
        assert found[r].word == said


def test_the_suspect_of_an_incident_says_so() -> None:
    assert state(rank(), named=frozenset({("trainer/0", 0)})) == "bad: suspect"
    assert state(rank(), named=frozenset({("trainer/0", 1)})) == "good: works"
    stopped = rank(is_stopped=True)
    assert state(stopped, named=frozenset({("trainer/0", None)})) == "bad: suspect, stopped by a signal"


def test_the_course_becomes_points_with_their_pace() -> None:
    course = (
        CoursePoint(step=10, at=100.0, values={"reward": 0.1}),
        CoursePoint(step=15, at=110.0, values={"reward": 0.2, "loss": 0.7, "entropy": 1.5}),
        CoursePoint(step=16, at=110.0),
    )
    first, second = course_buckets(course)
    assert (first.last_step, first.reward, first.seconds) == (15, 0.2, 2.0)
    assert first.signs == {"loss": 0.7, "entropy": 1.5} and math.isnan(first.tokens_per_second)
    assert math.isnan(second.seconds) and math.isnan(second.reward), "no time passed, nothing was told"
    assert course_buckets(()) == course_buckets(course[:1]) == ()


CAPABILITIES = (
    ObservedCapability("seen", "process", "yes", "from the kernel", "", "trainer/0 0-3", 4),
    ObservedCapability("seen", "stacks", "partly", "on some nodes", "", "trainer/0 0", 1),
    ObservedCapability("seen", "steps", "no", "<b>reports nothing</b>", "`rolecall exec`", "trainer/0 1", 1),
    ObservedCapability("seen", "steps", "yes", "from hooks", "", "trainer/0 0", 1),
    ObservedCapability("seen", "GPU", "none", "its agent sees no GPU ![](http://a/b.png)", "", "trainer/0 0-3", 4),
    ObservedCapability("named", "exit", "yes", "by its signal", "", "trainer/0 0-3", 4),
)


def test_what_works_for_all_ranks_and_what_is_missing_for_some() -> None:
    assert works(CAPABILITIES) == {"seen": ("process",), "named": ("exit",)}
    rows = missing(CAPABILITIES)
    assert [(str(r[0]), r[1], r[2]) for r in rows] == [
        ("not seen", "trainer/0 1", "steps"),
        ("partly seen", "trainer/0 0", "stacks"),
    ], "a GPU that is not there is not missing"


def trl_job(folder: Path) -> "tuple[object, Journal]":
    settings = observed_job(folder)
    journal, now = Journal(settings.journal_url), SystemClock().wall()
    ranks = [
        rank(n, seen_at=now, progress_at=now - 1, phases=GRPO, phase="generate", reports_by="integration", step=54)
        for n in range(3)
    ]
    journal.set_flag(observed_ranks.FLAG, observed_ranks.to_json([*ranks, replace(ranks[0], rank=3, own_seconds=4.5)]))
    points = [CoursePoint(step=n, at=now - 60 + n, values={"reward": 0.01 * n, "entropy": 2.0}) for n in range(1, 55)]
    journal.set_flag(observed_course.FLAG, observed_course.to_json(points))
    journal.set_flag(observed_capabilities.FLAG, observed_capabilities.to_json(CAPABILITIES))
    return settings, journal


def test_the_page_of_a_job_whose_integration_tells_all(tmp_path: Path) -> None:
    settings, journal = trl_job(tmp_path)
    journal.close()
    at = drawn(settings)  # type: ignore[arg-type]
    page = text(at)
    assert "suspect" in page and "3.0 times the time of its peers" in page
    assert page.index("3.0 times the time of its peers") < page.index("● works"), "the worst first"
    assert (
        "<b>generate</b> 60.0 %, 1.20 s of a step" in page and "<b>train</b> 25.0 %" in page and "<b>score</b>" in page
    )
    assert "<dt>reward</dt><dd>0.54</dd>" in page and "<dt>time per step</dt><dd>2.00 s</dd>" in page
    assert "step 54" in page and "its framework" in page
    headings = [str(h.value) for h in at.subheader]
    assert {"Ranks", "Where the time goes", "Progress", "Policy health"} <= set(headings)
    assert "not seen" in page and "&lt;b&gt;reports nothing&lt;/b&gt;" in page, "and names are text"
    assert "Not there: GPU: its agent sees no GPU" in page
    assert not any("http" in str(e.value) for e in (*at.caption, *at.markdown)), "text of an agent is no Markdown"


def test_a_job_without_the_reporter_has_no_empty_columns(tmp_path: Path) -> None:
    settings = observed_job(tmp_path)
    journal, now = Journal(settings.journal_url), SystemClock().wall()
    silent = ObservedRank("trainer/0", 0, "vm", 40, True, "", -1, now, None, reports_by="torchrun")
    journal.set_flag(observed_ranks.FLAG, observed_ranks.to_json([silent]))
    journal.close()
    page = text(drawn(settings))
    assert "rule torchrun" in page and "<th scope=col>pid</th>" in page
    assert "step time" not in page.partition("<table")[2].partition("</table>")[0] and "own time</th>" not in page
    assert "Where the time goes" not in page and "Progress" not in page


def test_without_a_watch_the_ranks_are_as_it_last_saw_them(tmp_path: Path) -> None:
    settings, journal = trl_job(tmp_path)
    look = first_snapshot(settings)  # type: ignore[arg-type]
    assert look.lease is not None
    late = replace(look, at=look.at + 600, lease=replace(look.lease, expires_at=look.at + 10))
    states = {str(row[0]) for row in rank_table(late)[1]}
    assert states and not any("not seen" in state for state in states)
    assert ("ranks", "4", "all alive when last seen") in figures_of(late)
    assert not {state for role in view.roles(late) for state, _ in role.counts} & {"lost"}
    assert {str(v.state) for v in observed_fleet(late.observed, late.sampled_at).replicas} == {"serving"}
    with journal.store.write() as conn:
        conn.exec_driver_sql("UPDATE leases SET expires_at = expires_at - 7200")
    journal.close()
    # The page may still have the snapshot from before.
    eventually(lambda: "what they do now is not known" in text(drawn(settings)), "the page says so")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["overview", "incidents", "fleet", "accounting", "operations"])
def test_every_page_says_once_that_no_watch_is_running(name: str, tmp_path: Path) -> None:
    made = world(tmp_path)
    made.open("i-1", "rollout/0")
    with made.journal.store.write() as conn:
        conn.exec_driver_sql("UPDATE leases SET expires_at = expires_at - 7200")
    at = page(name, made)
    assert not at.exception
    assert "".join(h.proto.body for h in at.main if h.type == "html").count("No watch is running.") == 1


def test_a_job_whose_ranks_are_all_gone_says_so(tmp_path: Path) -> None:
    run = observing_run(tmp_path, "torchrun-job", {"vm": "http://127.0.0.1:9"})
    journal = Journal(run.database_url)
    journal.acquire("watch", "watch@vm", 3600.0)
    journal.set_flag(observed_ranks.FLAG, observed_ranks.to_json([rank(is_alive=False)]))
    journal.close()
    from rolecall.dashboards.data.run_state import run_state
    from rolecall.dashboards.settings import Settings

    found = run_state(first_snapshot(Settings(journal_url=run.database_url, run=run, name="torchrun-job")))
    assert (found.kind, found.word) == ("warn", "Watched: no rank is alive")
