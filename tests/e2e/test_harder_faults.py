"""Faults of helpers and of every other kind, one after the other, in one real run of T-PPO."""

from pathlib import Path

import pytest

from rolecall.core.config.algorithm import AlgorithmName
from tests.e2e.runs import check_algorithm, check_no_false_alarm, demo_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(800)]

SEED = 10
"""Its faults come 3 to 6 s after the fleet is whole; others wait for up to 10."""
SETTINGS = ("recovery.evictions_per_hour_max=20", "runtime.standbys=0", "roles.rollout=2", "runtime.nodes=5")
"""No fault here is found by comparison with peers: a third rollout would only take a share of the cores."""
FAULTS = "reward-kill,agent-kill,watch-kill,trainer-kill,trainer-hang:lock,rollout-kill"


def test_the_run_continues_through_every_other_fault(tmp_path: Path) -> None:
    """The trainers have a critic to copy, and a window of an answer may be trained before its engine is lost."""
    args = ["--algorithm", AlgorithmName.TPPO, "--task", "long_addition", "--seed", str(SEED), "--steps", "20"]
    args += [word for setting in SETTINGS for word in ("--set", setting)]
    with demo_run(tmp_path, "harder", [*args, "--faults", FAULTS]) as run:
        code = run.wait(700)
        report = run.report()
        assert code == 0, run.output()[-3000:]
    check_no_false_alarm(report)
    # The agent's next process may take longer than the grace for it: an incident of no fault of the job.
    replaced = [i["fault"]["kind"] for i in report["incidents"] if i["fault"]]
    assert replaced == ["reward-kill", "trainer-kill", "trainer-hang", "rollout-kill"]
    assert [f["kind"] for f in report["helper_faults"]] == ["agent-kill", "watch-kill"]
    assert report["missed"] == [] and report["pids_kept"] is True
    assert report["audit"]["ok"], report["audit"]
    check_algorithm(run, AlgorithmName.TPPO)
