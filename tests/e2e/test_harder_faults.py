"""Faults of helpers and of every other kind, one after the other, in one real run."""

from pathlib import Path

import pytest

from tests.e2e.runs import demo_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(800)]

SEED = 10
"""Its faults come 3 to 6 s after the fleet is whole; others wait for up to 10."""
FAULTS = "reward-kill,agent-kill,watch-kill,trainer-kill,trainer-hang:lock"


def test_the_run_continues_through_every_other_fault(tmp_path: Path) -> None:
    settings = ["recovery.evictions_per_hour_max=20", "runtime.standbys=0"]  # no rollout is struck
    args = [
        "--seed",
        str(SEED),
        "--steps",
        "60",
        "--faults",
        FAULTS,
        *(word for s in settings for word in ("--set", s)),
    ]
    with demo_run(tmp_path, "harder", args) as run:
        code = run.wait(700)
        report = run.report()
        assert code == 0, run.output()[-3000:]
    replaced = [i["fault"]["kind"] for i in report["incidents"]]
    assert replaced == ["reward-kill", "trainer-kill", "trainer-hang"]
    assert [f["kind"] for f in report["helper_faults"]] == ["agent-kill", "watch-kill"]
    assert report["missed"] == [] and report["false_alarms"] == [] and report["pids_kept"] is True
    assert report["audit"]["ok"], report["audit"]
