"""A run in mode sync whose hybrid loses its engine: both of its replicas are replaced, and every step is on policy."""

from pathlib import Path

import pytest

from tests.e2e.runs import check_no_false_alarm, demo_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_a_hybrid_whose_engine_was_killed_is_replaced_as_a_whole(tmp_path: Path) -> None:
    words = ["--mode", "sync", "--seed", "3", "--steps", "12", "--faults", "rollout-kill", "--set", "roles.reward=1"]
    with demo_run(tmp_path, "sync", words) as run:
        code = run.wait(300)
        report = run.report()
        assert code == 0, run.output()[-3000:]
        steps = run.observer.events("step_committed")
    assert {step["staleness"] for step in steps} == {0}
    check_no_false_alarm(report)
    assert report["missed"] == [] and report["pids_kept"] is True
    assert report["audit"]["ok"], report["audit"]
    (incident,) = report["incidents"]
    assert (incident["fault_class"], incident["action"]) == ("crash", "replace_replica")
    number = incident["fault"]["target"].removeprefix("rollout/")
    assert [r["replica"] for r in incident["replacements"]] == [f"rollout/{number}", f"trainer/{number}"]
