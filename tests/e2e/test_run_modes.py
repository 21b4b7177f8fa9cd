"""Runs in the modes sync and semi_sync that lose a hybrid: both of its replicas are replaced, and every step is on
policy."""

from pathlib import Path

import pytest

from tests.e2e.runs import check_no_false_alarm, demo_run

pytestmark = [pytest.mark.e2e, pytest.mark.light, pytest.mark.timeout(400)]

SEED = 47
"""Its fault comes 4 s after the fleet is whole; others wait for up to 10."""


@pytest.mark.parametrize(("mode", "fault"), [("sync", "rollout-kill"), ("semi_sync", "trainer-kill")])
def test_a_hybrid_with_a_killed_process_is_replaced_as_a_whole(tmp_path: Path, mode: str, fault: str) -> None:
    """Nothing else is: not the standalone rollouts of semi_sync either."""
    words = ["--mode", mode, "--seed", str(SEED), "--steps", "12", "--faults", fault, "--set", "roles.reward=1"]
    with demo_run(tmp_path, mode, words) as run:
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
    number = incident["fault"]["target"].partition("/")[2]
    assert [r["replica"] for r in incident["replacements"]] == [f"rollout/{number}", f"trainer/{number}"]
