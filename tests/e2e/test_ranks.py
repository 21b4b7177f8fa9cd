"""A run whose trainers and engines have two ranks each: a lost rank is named, and its replica alone is replaced."""

from pathlib import Path

import pytest

from tests.e2e.runs import check_no_false_alarm, command, demo_run
from tests.support import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SETTINGS = (
    "injection_allowed=true",
    "runtime.trainer_ranks=2",
    "runtime.rollout_ranks=2",
    "runtime.standbys=0",
    "runtime.trainer_standbys=1",
    "runtime.startup_timeout_seconds=240",
    "roles.rollout=1",  # without it training waits, and leaves the cores to its replacement
    "roles.reward=1",
    "recovery.role_share_max=1.0",
)
LOST = {"trainer/1 rank 1": "trainer-kill", "rollout/0 rank 1": "rollout-kill"}


def test_a_lost_rank_is_named_and_its_replica_alone_is_replaced(tmp_path: Path) -> None:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    with demo_run(tmp_path, "ranks", ["--seed", "7", "--steps", "40", "--faults", "none", *words]) as run:
        eventually(lambda: run.observer.states.get(("trainer-standby/0", 1)) == "ready", "the standby", seconds=240)
        for number, (target, kind) in enumerate(LOST.items(), 1):
            run.until_step(5 * number, 240)
            told = command("inject", str(run.path), "--kind", kind, "--target", target)
            assert told.returncode == 0, told.stderr
            eventually(
                lambda number=number: len(run.observer.events("incident_verified")) >= number,
                f"the end of incident {number} in {run.path}",
                seconds=150,
            )
        code = run.wait(300)
        report = run.report()
        assert code == 0, run.output()[-3000:]
        assert run.observer.listening_elsewhere == set()
    check_no_false_alarm(report)
    assert report["missed"] == [] and report["pids_kept"] is True
    assert report["audit"]["ok"], report["audit"]
    found = report["incidents"]
    assert [i["fault"]["target"] for i in found] == list(LOST)
    for incident, target in zip(found, LOST, strict=True):
        assert f"{target} (" in incident["because"] and incident["fault_class"] == "crash"
        assert (incident["action"], incident["outcome"]) == ("replace_replica", "resolved")
    assert [r["from_standby"] for i in found for r in i["replacements"]] == [True, False]
