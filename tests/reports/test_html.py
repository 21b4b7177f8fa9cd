"""report.html: one page that loads nothing, runs nothing, and shows foreign text as text."""

import copy
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.rundir import RunDir
from rolecall.reports.charts import WIDTH, badge_rows, incident_markers, key_of, lane_order
from rolecall.reports.html import headline, render_html
from rolecall.reports.report import write_report

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[2J\u202e&amp;]]>-->"
VOID = {"meta"}
"""Of those that the page has; a `<line .../>` closes itself."""


class _Page(HTMLParser):
    """Tags in order, with a stack that must balance."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


def _read(html: str) -> _Page:
    page = _Page()
    page.feed(html)
    page.close()
    assert page.stack == []
    return page


@pytest.fixture
def report(fake_run: RunDir) -> dict[str, Any]:
    return write_report(fake_run)


def test_the_page_is_whole_and_loads_and_runs_nothing(report: dict[str, Any]) -> None:
    html = render_html(report)
    page = _read(html)
    tags = [t for t, _ in page.tags]
    assert not {"script", "link", "iframe", "object", "embed", "img", "base", "form"} & set(tags)
    assert not re.search(r"(?:src|href|srcset|action)\s*=|url\(|@import|javascript:", html)
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "default-src 'none'" in html and "prefers-color-scheme: dark" in html
    assert tags.count("h1") == 1 and tags.count("svg") >= 3


def test_the_page_shows_the_run(report: dict[str, Any]) -> None:
    text = _read(render_html(report)).text
    assert "3 of 3 faults resolved, the audit holds; reward went from 0.07 to 0.96" in text
    for incident in report["incidents"]:
        assert incident["because"] in text and incident["plan"] in text and incident["verified"] in text
    assert re.search(r"Where the time went.*Phase.*detect.*decide.*restart.*reconnect.*recompute", text, re.DOTALL)
    lost = report["lost_replica_seconds"]
    assert re.search(rf"Replica-seconds lost.*detect.*{lost['detect']:,.1f} \(\d+ %\).*together.*\d", text, re.DOTALL)
    unknown = _read(render_html({**report, "lost_replica_seconds": {"detect": 2.0, "decide": None}})).text
    assert re.search(r"detect\s*2\.0 \(100 %\)\s*decide\s*–\s*together\s*2\.0", unknown)
    assert "Replica-seconds lost" not in _read(render_html({**report, "lost_replica_seconds": {}})).text
    for word in ("rollout-kill on rollout/1", "8.90 s", "standby/0", "pid 4108", "4,194,304", report["config_digest"]):
        assert word in text, word


def _poisoned(value: Any) -> Any:
    """The same report with every foreign text replaced by the hostile one."""
    if isinstance(value, dict):
        return {k: _poisoned(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_poisoned(v) for v in value]
    return HOSTILE if isinstance(value, str) else value


def test_every_text_of_a_report_is_shown_as_text(report: dict[str, Any]) -> None:
    safe = render_html(report)
    hostile = _poisoned({k: v for k, v in report.items() if k != "config"})
    hostile["config"] = {HOSTILE: [HOSTILE]}
    hostile["audit"]["dropped_by_reason"] = {HOSTILE: 3}
    hostile["environment"]["packages"] = {HOSTILE: HOSTILE}
    hostile["audit"]["problems"] = hostile["pids"]["violations"] = [HOSTILE]
    hostile["missed"] = [copy.deepcopy(hostile["incidents"][0]["fault"])]
    hostile["remarks"] = [{"at": 1.0, "kind": HOSTILE, "what": HOSTILE, "because": HOSTILE}]
    html = render_html(hostile)
    page = _read(html)
    assert {t for t, _ in page.tags} <= {t for t, _ in _read(safe).tags} | {"article"}
    assert not [n for _, attrs in page.tags for n in attrs if n.startswith("on")]
    assert "<script" not in html and "<img" not in html and "\x1b" not in html and "\u202e" not in html
    assert page.text.count("<script>alert(1)</script>") > 30, "it is there, as text"


def test_headlines_say_what_is_so(report: dict[str, Any]) -> None:
    def said(**changes: Any) -> str:
        return headline({**report, **changes})

    assert said(faults_injected=4).startswith("Only 3 of 4 faults resolved")
    none = said(faults_injected=0, incidents=[])
    assert none.startswith("No fault, no finding, the audit holds")
    assert said(false_alarms=["i-9"]).startswith("3 of 3 faults resolved, 1 false alarm, the audit holds")
    assert "the audit fails" in said(audit={**report["audit"], "ok": False})
    first, second, third = report["incidents"]
    further = {**first, "further_faults": [second["fault"]]}
    assert said(incidents=[further, third]).startswith("3 of 3 faults resolved"), "as the verdict counts"
    assert said(incidents=[first, second, {**third, "resolved_at": None}]).startswith("Only 2 of 3 faults resolved")
    assert "1 incident" in said(faults_injected=0, incidents=report["incidents"][:1])
    assert "reward" not in said(reward_first=None)


def test_entropy_and_length_are_drawn_where_there_are_any(report: dict[str, Any]) -> None:
    text = render_html(report)
    assert (
        text.count('aria-label="Entropy of the policy, nats per token"')
        == text.count('aria-label="Tokens per response"')
        == 1
    )
    short = render_html({**report, "health": {"response_length": [None] * len(report["steps"]), "entropy": [0.0]}})
    assert "Tokens per response" not in short and "Entropy of the policy" in short
    assert "Entropy of the policy" not in render_html({**report, "health": {}}), "a run of before there were signs"


def test_an_empty_report_is_a_page_too(report: dict[str, Any]) -> None:
    empty = {
        "steps": [],
        "health": {},
        "lanes": [],
        "incidents": [],
        "missed": [],
        "proofs": [],
        "config": {},
        "wall_seconds": 0.0,
    }
    text = _read(render_html({**report, **empty, "reward_first": None, "reward_last": None})).text
    assert "no fault was injected and none was found" in text


# --- drawings -----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, WIDTH), max_size=30))
def test_badges_never_touch(xs: list[float]) -> None:
    xs = sorted(xs)
    rows = badge_rows(xs, 22.0)
    by_row: dict[int, list[float]] = {}
    for x, row in zip(xs, rows, strict=True):
        by_row.setdefault(row, []).append(x)
    assert all(b - a >= 22.0 for its in by_row.values() for a, b in pairwise(its))


def test_letters_go_on_after_z() -> None:
    assert [key_of(n) for n in (0, 25, 26, 52)] == ["A", "Z", "A2", "A3"]


def test_lanes_are_in_the_order_of_roles_and_numbers() -> None:
    names = ["rollout/10", "rollout/2", "controller/0", "critic/0", "trainer/0", "standby/0", "node"]
    assert lane_order([{"replica": n} for n in names]) == [
        ["trainer/0"],
        ["rollout/2", "rollout/10"],
        ["standby/0"],
        ["controller/0"],
        ["critic/0"],
        ["node"],
    ]


def test_a_fault_is_at_the_same_place_in_every_chart(report: dict[str, Any]) -> None:
    guides = re.findall(r'<line transform="translate\(([0-9.]+),0\)"[^>]*stroke="var\(--bad\)"', render_html(report))
    assert len(guides) == 5 * 3 and len(set(guides)) == 3
    assert [m.key for m in incident_markers(report)] == ["A", "B", "C"]
