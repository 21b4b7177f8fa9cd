"""In a run of DAPO, an external fault is resolved, and one NaN stops nothing; an exception in user code evicts no
replica, ends the run, and leaves no process (Ctrl-C: test_operating.py; kill -9 and `down`: test_quick_succession.py)."""

from pathlib import Path

import pytest

from rolecall.core.config.algorithm import AlgorithmName
from tests.e2e.runs import alive, check_algorithm, command, demo_run
from tests.support import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

AGREEMENT_SECONDS = 1.0
"""Between taking a time and the row with it are a commit and, on a busy machine, other processes' turns. The
errors that this is to find (heartbeats or polls taken for events) are of several seconds."""
RECOVERY_SECONDS = 240.0
"""A cold start alone takes a minute when the machine has other work."""


def test_an_external_fault_is_resolved_a_nan_is_tolerated_and_an_exception_on_all_ranks_stops_the_job(
    tmp_path: Path,
) -> None:
    """The observer kills by itself, and by the plain kill(2): no part of rolecall expects the fault, and no
    standby waits for it."""
    args = ["--algorithm", AlgorithmName.DAPO, "--task", "long_addition", "--seed", "5", "--steps", "100000"]
    args += ["--faults", "none", "--allow-injection", "--set", "runtime.standbys=0"]
    with demo_run(tmp_path, "outside-fault", args) as run:
        observer = run.observer
        run.until_step(2, 200)
        killed_at = run.strike("rollout-kill", "rollout/0", 1)
        eventually(lambda: observer.events("incident_closed"), "the end of the incident", seconds=RECOVERY_SECONDS)
        assert len(observer.events("incident_opened")) == 1
        eventually(lambda: ("rollout/0", 2) in observer.serving, "the next poll of the observer")
        spoilt = command("inject", str(run.path), "--kind", "trainer-nan", "--target", "trainer/1")
        assert spoilt.returncode == 0, spoilt.stderr
        eventually(lambda: len(observer.events("incident_closed")) == 2, "the end of the second incident")
        run.until_step(len(observer.steps) + 2, RECOVERY_SECONDS)
        raised = command("inject", str(run.path), "--kind", "trainer-exception")
        assert raised.returncode == 0, raised.stderr
        assert run.wait(120) == 1, run.output()[-3000:]
        assert alive(observer) == []
        report = run.report()
    crash, spoilt, exception = report["incidents"]

    assert (crash["fault_class"], crash["action"], crash["suspects"]) == ("crash", "replace_replica", ["rollout/0#1"])
    detected_at = killed_at + crash["detected_seconds"]
    assert observer.opened[crash["incident_id"]].agrees(detected_at, AGREEMENT_SECONDS), crash
    served = observer.serving["rollout/0", 2]
    assert served.agrees(detected_at + crash["resolved_seconds"], AGREEMENT_SECONDS), crash

    assert (spoilt["fault_class"], spoilt["suspects"]) == ("silent_corruption", ["trainer/1#1"]), spoilt
    assert spoilt["outcome"] == "tolerated" and "finite when computed again" in spoilt["because"]
    (recomputed,) = observer.events("microbatch_recomputed")
    assert (recomputed["from_replica"], recomputed["by"], recomputed["finite"]) == ("trainer/1", "trainer/0", True)

    assert exception["fault_class"] == "user_code" and exception["action"] == "stop_job"
    assert "InjectedError" in exception["because"]
    assert len(observer.serving) >= 8
    again = [key for key in observer.serving if key[1] != 1]
    assert again == [("rollout/0", 2)], "a replica was replaced for a mistake in user code"
    assert report["audit"]["ok"]
    check_algorithm(run, AlgorithmName.DAPO)
