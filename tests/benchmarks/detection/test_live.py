"""The report of slowness and quiet: who was named, when, and by what; what is counted as wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.detection import live


def fault(at: float, target: str = "rollout/1", **more: Any) -> dict[str, Any]:
    where = {"target": target, "incarnation": 2, "injected_at": at}
    return {"kind": "rollout-slow", "how": "duty", "factor": 2.5, **where, **more}


def finding(at: float, *suspects: str, incident: str = "", detector: str = "sequential") -> dict[str, Any]:
    about = {"suspects": list(suspects), "detectors": [detector], "because": f"at {at:g}", "fault_class": "slow"}
    return {"incident": incident or f"inc-{at:g}", "at": at, **about}


def line(kind: str, **more: Any) -> dict[str, Any]:
    known = {"run_id": "r", "seed": 1, "exit_code": 0, "wall_seconds": 3600.0, "wanted": 0, "faults": [], "wrong": []}
    return {"kind": kind, **known, **more}


def test_a_slowdown_belongs_to_the_first_finding_that_names_its_process_alone_before_the_next_one() -> None:
    found = [
        finding(90.0, "rollout/0#1"),
        finding(110.0, "rollout/0#1", "rollout/1#2"),
        finding(130.0, "rollout/1#2", detector="panel:sequential"),
        finding(140.0, "rollout/1#2"),
        finding(260.0, "rollout/1#1"),
    ]
    told, wrong = live.judged([fault(100.0), fault(200.0), fault(300.0)], found)
    assert [(f["seconds"], f["wrong"]) for f in told] == [(30.0, 1), (None, 1), (None, 0)]
    assert [live.detector_of(f) for f in told] == ["panel", "-", "-"]
    assert [f["at"] for f in wrong] == [90.0, 110.0, 260.0]


def test_without_faults_every_incident_is_wrong_and_counts_once() -> None:
    found = [finding(1.0, "trainer/0#1", incident="a"), finding(2.0, "trainer/0#1", incident="a"), finding(3.0)]
    told, wrong = live.judged([], found)
    assert not told and [f["because"] for f in wrong] == ["at 1", "at 3"]


def test_late_and_missed_slowdowns_miss_the_bar() -> None:
    times = [20.0, 30.0, 61.0, None]
    faults = [{**fault(0.0), "seconds": s, "detectors": ["sequential"] if s else [], "wrong": 0} for s in times]
    rows = list(live.named([line("slowed", wanted=5, faults=faults)]))
    assert "| all | 2 of 4, **missed** | 3 | 30.0 | 25.0 to 45.5 | 61.0 | slow test |" in rows
    assert rows[-1].strip() == "**1 of 5 slowdowns could not be injected.**"
    assert sum("**missed**" in row for row in live.each([line("slowed", faults=faults)])) == 1


def test_hours_without_a_wrong_finding_add_up_over_the_kinds_of_runs() -> None:
    killed = [fault(1.0, kind="rollout-kill", how="kill"), fault(2.0, kind="watch-kill", how="kill")]
    rows = list(live.quiet([line("healthy"), line("replaced", faults=killed, wrong=[finding(5.0, "rollout/0#1")])]))
    assert any(row.startswith("| all three | 2 | 2 | 2.00 | 1 | 1 | 2.37 |") for row in rows)
    assert rows[-1] == "- replaced, r: slow, sequential: at 5"


def test_a_report_of_slowdowns_alone_says_nothing_of_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [{**fault(0.0), "seconds": 20.0, "detectors": ["sequential"], "wrong": 0}]
    lines = [line("slowed", wanted=1, faults=faults, commit="a"), line("healthy", commit="b")]
    monkeypatch.setattr(live, "LINES", tmp_path / "live.jsonl")
    monkeypatch.setattr(live.common, "publish", lambda _name, text: written.append(text) or live.common.ROOT / "x.md")
    written: list[list[str]] = []
    assert not live.write_report(["a"]) and not written, "nothing was run"
    live.LINES.write_text("".join(json.dumps({**x, "settings": ["x=1"]}) + "\n" for x in lines))
    assert [x["kind"] for x in live.write_report(["a"])] == ["slowed"]
    (text,) = written
    assert "- config: rolecall demo, x=1; slowdowns of 1.5 to 4 times for 75 s at most, 30 s apart" in text
    assert "- seeds: slowed 1" in text and any(row.startswith("- commit a, ") for row in text)
    assert "| all | 1 of 1 | 1 | 20.0 | 20.0 to 20.0 | 20.0 | slow test |" in text
    assert not any("healthy" in row or "torchrun" in row for row in text)
    assert len(live.write_report(["a", "b"])) == 2
    assert "- seeds: slowed 1 of a, healthy 1 of b" in written[-1], "runs of several commits are told apart"


def test_twenty_slowdowns_are_over_within_the_hour_they_are_given() -> None:
    minutes = live.minutes_of(20)
    assert minutes <= 45 and live.minutes_max("slowed", minutes) <= 62


def test_slowdowns_are_the_same_for_the_same_seed_and_within_their_range() -> None:
    first, again, other = (list(live.slowdowns(seed, 30)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(1.5 <= x.factor <= 4.0 for x in first)
    assert {(x.kind, x.how) for x in first} == set(live.KINDS), "each kind occurs"
