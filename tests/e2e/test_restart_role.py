"""Both rollouts of a run die, and so does each replacement before it works, until recovery restarts their role: all other
processes stay, and no prompt group is lost."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.runs import DemoRun, command, demo_run
from tests.support import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.light, pytest.mark.timeout(600)]

SETTINGS = ("roles.rollout=2", "roles.reward=1", "runtime.standbys=0", "recovery.evictions_per_hour_max=20")
ROLLOUTS = ("rollout/0", "rollout/1")
RECOVERY_SECONDS = 240.0


def _restarted(run: DemoRun) -> bool:
    """Until the restart begins, every replacement is killed as soon as its process is known."""
    if [e for e in run.observer.events("action_started") if e["plan"]["action"] == "restart_role"]:
        return True
    for (replica, incarnation), pid in list(run.observer.pids.items()):
        running = run.observer.states[replica, incarnation] not in ("lost", "stopped")
        if replica in ROLLOUTS and incarnation > 1 and pid and running:
            with suppress(ProcessLookupError):  # killed in the poll before
                run.observer.kill(replica, incarnation)
    return False


def test_a_role_whose_replicas_die_again_and_again_is_restarted_and_no_other(tmp_path: Path) -> None:
    args = ["--seed", "17", "--steps", "12", "--faults", "none", *(w for s in SETTINGS for w in ("--set", s))]
    with demo_run(tmp_path, "role", args) as run:
        run.until_step(2, 200)
        first = dict(run.observer.pids)
        for replica in ROLLOUTS:
            run.observer.kill(replica, 1)
        eventually(lambda: _restarted(run), "the restart of the role", seconds=RECOVERY_SECONDS)
        run.wait(300)  # its code tells of faults that nobody has announced
        observer = run.observer
        audit = command("audit", str(run.path), "--json")
    assert audit.returncode == 0 and json.loads(audit.stdout)["duplicates"] == 0, audit.stdout
    assert len(observer.steps) >= 12, run.output()[-3000:]

    assert {replica for replica, incarnation in observer.states if incarnation > 1} == set(ROLLOUTS)
    assert all(observer.pids[replica, 1] == first[replica, 1] for replica, _ in first)
    started = [e["plan"]["action"] for e in observer.events("action_started")]
    assert started == ["replace_replica", "replace_replica", "restart_role"]
    newest = {r: max(i for replica, i in observer.states if replica == r) for r in ROLLOUTS}
    assert all(member in observer.serving for member in newest.items())
    assert not {observer.pids[member] for member in newest.items()} & set(first.values())
    assert {e["outcome"] for e in observer.events("incident_closed")} == {"resolved", "self_recovered"}
