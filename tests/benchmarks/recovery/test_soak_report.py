"""The soak's report: a bar that is missed is reported, counts add up over runs and commits."""

from typing import Any

import pytest

from benchmarks.intervals import poisson_upper
from benchmarks.recovery.soak import report as soak_report

AUDIT = {"ok": True, "unaccounted": 0, "duplicates": 0, "groups_dropped": 3, "dropped_by_reason": {"run_ended": 3}}


def incident(kind: str, how: str, **seconds: float) -> dict[str, Any]:
    return {
        "fault": {"kind": kind, "how": how},
        "diagnosed_correctly": True,
        "replacements": [{"from_standby": True}],
        "tokens_lost": 0,
        "tokens_kept": 10,
        "steps_lost": 0,
        **seconds,
    }


def line(*incidents: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "commit": "a",
        "seed": 1,
        "faults": "some",
        "exit_code": 0,
        "wall_seconds": 3600.0,
        "incidents": list(incidents),
        "missed": [],
        "false_alarms": [],
        "pids_kept": True,
        "audit": AUDIT,
        "microbatches_failure_free": True,
        **more,
    }


def test_each_time_stands_beside_its_bar() -> None:
    good = incident("rollout-slow", "duty", detected_seconds=12.0, resolved_seconds=1.0)
    late = incident("rollout-slow", "quota", detected_seconds=31.0, resolved_seconds=2.0)
    rows = "\n".join(soak_report.bars([line(good), line(late)]))
    assert "| rollout-slow | 2 of 2 | fault to finding | 2 | 21.50 | 16.75 to 26.25 | 31.00 | 30 | **no** |" in rows
    assert "| rollout-slow, duty | 1 of 1 | fault to finding | 1 | 12.00 | 12.00 to 12.00 | 12.00 | 30 | yes |" in rows
    assert (
        "| rollout-slow, quota | 1 of 1 | fault to finding | 1 | 31.00 | 31.00 to 31.00 | 31.00 | 30 | **no** |" in rows
    )


def test_a_fault_that_no_one_found_misses_every_bar_of_its_kind() -> None:
    found = incident("trainer-hang", "gil", detected_seconds=3.0, resolved_seconds=9.0)
    missed = {"kind": "trainer-hang", "how": "lock"}
    rows = [r for r in soak_report.bars([line(found), line(missed=[missed])]) if r.startswith("| trainer-hang |")]
    assert rows and all("| 1 of 2 |" in r and r.endswith("**no** |") for r in rows)
    unknown = list(soak_report.bars([line(missed=[{"kind": "rollout-hang", "how": "stop"}])]))
    assert unknown[-1].startswith("| rollout-hang | 0 of 1 |")


def test_warm_and_cold_replacements_have_bars_of_their_own() -> None:
    times = {"detected_seconds": 0.3, "requests_moved_seconds": 0.4, "resolved_seconds": 12.0}
    warm = incident("rollout-kill", "kill", **times)
    cold = {**incident("rollout-kill", "kill", **times), "replacements": [{"from_standby": False}]}
    rows = list(soak_report.bars([line(warm), line(cold)]))
    assert any("warm standby | 1 |" in r and r.endswith("| 3 | **no** |") for r in rows)
    assert any("cold | 1 |" in r and r.endswith("| 30 | yes |") for r in rows)


def test_groups_dropped_at_the_end_of_a_run_are_not_lost() -> None:
    lost = {**AUDIT, "groups_dropped": 5}
    rows = "\n".join(soak_report.work_lost([line(), line(audit=lost, microbatches_failure_free=False)]))
    assert "| prompt groups dropped before the end of their run | 2 | 0 | **no** |" in rows
    assert "| runs whose set of (step, microbatch) is not the failure-free one | 1 | 0 | **no** |" in rows


def test_hours_without_a_fault_add_up_over_commits() -> None:
    by_commit = {"a": [line(faults="none")], "b": [line(faults="none", false_alarms=["inc-1"]), line()]}
    rows = list(soak_report.failure_free(by_commit))
    assert rows[-1].startswith("| all | 3 | 3 | 2 | 2.00 | 1 |")


@pytest.mark.parametrize(("count", "upper"), [(0, 2.996), (1, 4.744), (10, 16.962)])
def test_the_poisson_bound_is_the_textbook_one(count: int, upper: float) -> None:
    assert poisson_upper(count) == pytest.approx(upper, abs=0.001)
