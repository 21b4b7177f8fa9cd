"""In a run of DAPO a trainer's node is lost while none is free: it trains on the node of a rollout, the others go on
generating, and the rollout is back once a node is. Then one NaN stops nothing, and an exception in user code evicts no
replica, ends the run, and leaves no process (Ctrl-C: test_operating.py; kill -9 and `down`: test_quick_succession.py).
"""

import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rolecall.core.config.algorithm import AlgorithmName
from rolecall.core.rundir import RunDir
from rolecall.testing.token_counter import TokenCounter
from tests.e2e.runs import DemoRun, alive, check_algorithm, command, demo_run
from tests.support import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(800)]

SETTINGS = ("runtime.standbys=0", "runtime.staleness_max=8", "roles.reward=1", "detector.first_unit_seconds=300")
RECOVERY_SECONDS = 240.0
WINDOW_SECONDS = 3.0
WINDOW_STEPS = 2.5
"""In each stretch of this many seconds, or of this many steps if those take longer, the other rollouts together must
generate something. Once a step they all load new weights, which takes seconds on a loaded machine."""
FREE_NODE = "node-6"  # 7 nodes: the first, two trainers, three rollouts, and this one


def _lose_node(run: DemoRun, replica: str) -> tuple[str, float]:
    """SIGKILL of the raylet of this replica's node, and with it of every process there."""
    ((node,),) = run.observer.query("select node from desired where replica = ?", replica)
    raylet = json.loads((run.path / "nodes" / node / "raylet.json").read_text())
    at = time.time()
    os.kill(int(raylet["pid"]), signal.SIGKILL)
    return node, at


def _serves(run: DemoRun, replica: str, above: int) -> int:
    """The newest incarnation above this one that serves; 0: none does."""
    serving = [i for (r, i), state in run.observer.states.items() if r == replica and state == "serving"]
    return max((i for i in serving if i > above), default=0)


def test_a_trainer_whose_node_is_lost_trains_on_the_node_of_a_rollout(tmp_path: Path) -> None:
    args = ["--algorithm", AlgorithmName.DAPO, "--task", "long_addition", "--seed", "11", "--steps", "100000"]
    args += ["--faults", "none", "--allow-injection"]
    args += [word for s in SETTINGS for word in ("--set", s)]
    with demo_run(tmp_path, "borrowed", args) as run:
        run.until_step(5, 400)
        told = command("node", "quarantine", FREE_NODE, "--run", str(run.path), "--reason", "it is kept back")
        assert told.returncode == 0, told.stderr
        counter = TokenCounter(RunDir(run.path))
        with counter.counting():
            run.until_step(len(run.observer.steps) + 2, 120)
            lost_node, lost_at = _lose_node(run, "trainer/1")
            eventually(lambda: _serves(run, "trainer/1", 1), "trainer/1 on another node", seconds=RECOVERY_SECONDS)
            trains_at = time.time()
            run.until_step(len(run.observer.steps) + 3, 120)
        (lent,) = run.observer.events("node_lent")
        assert lent["to"] == "trainer/1" and lent["node"] != lost_node
        assert f"no node is free; {lent['replica']}#1 lends {lent['node']}: it holds " in lent["because"]
        ((node,),) = run.observer.query("select node from desired where replica = 'trainer/1'")
        assert node == lent["node"]
        found_at = min(e["diagnosis"]["detected_at"] for e in run.observer.events("incident_opened"))
        print(f"\nfinding {found_at - lost_at:.1f} s after the loss, training {trains_at - found_at:.1f} s after it")
        others = {f"rollout/{n}" for n in range(3)} - {lent["replica"]}
        step_seconds = median(later - earlier for earlier, later in pairwise(run.observer.steps.values()))
        window_seconds = max(WINDOW_SECONDS, WINDOW_STEPS * step_seconds)
        rates = counter.rates(others, lost_at, trains_at, min(window_seconds, trains_at - lost_at - 1.0))
        print(f"tokens a second of the others in {window_seconds:.1f} s:", [round(rate) for rate in rates])
        assert rates and min(rates) > 0
        moved = [m for m in run.observer.events("requests_reassigned") if m["from_replica"] == lent["replica"]]
        assert sum(m["tokens_lost"] for m in moved) == 0, moved
        status = command("status", str(run.path)).stdout
        assert "lent its node" in status and f"{lent['node']} to trainer/1" in status

        returned = command("node", "return", FREE_NODE, "--run", str(run.path), "--reason", "it is needed")
        assert returned.returncode == 0, returned.stderr
        eventually(lambda: _serves(run, lent["replica"], 1), f"{lent['replica']} again", seconds=RECOVERY_SECONDS)
        (resumed,) = run.observer.events("lender_resumed")
        assert (resumed["replica"], resumed["node"]) == (lent["replica"], FREE_NODE)
        run.until_step(len(run.observer.steps) + 3, 120)
        named = {s["replica"] for e in run.observer.events("incident_opened") for s in e["diagnosis"]["suspects"]}
        assert named <= {"trainer/1", ""}, "what was lent is not lost"
        served = set(run.observer.serving)
        nan = _a_nan_is_tolerated(run)
        _an_exception_ends_the_run(run)
    audited = command("audit", str(run.path))
    assert audited.returncode == 0, audited.stdout
    assert set(run.observer.serving) == served, "a replica was replaced for a NaN, or for a mistake in user code"
    check_algorithm(run, AlgorithmName.DAPO)
    incidents = run.report()["incidents"]
    (tolerated,) = [i for i in incidents if i["incident_id"] == nan]
    assert tolerated["fault_class"] == "silent_corruption" and tolerated["outcome"] == "tolerated"
    assert "computed again, it was finite" in tolerated["because"]
    stopped = [i for i in incidents if i["action"] == "stop_job"]  # several if a rank raises late
    assert stopped and all(i["fault_class"] == "user_code" and "InjectedError" in i["because"] for i in stopped)


def _a_nan_is_tolerated(run: DemoRun) -> str:
    """Of trainer/0, and computed again by the one that was moved. Returns the incident."""
    spoilt = command("inject", str(run.path), "--kind", "trainer-nan", "--target", "trainer/0")
    assert spoilt.returncode == 0, spoilt.stderr
    eventually(lambda: _incidents(run, "silent_corruption"), "an incident of the NaN")
    ((incident, suspects),) = _incidents(run, "silent_corruption")
    assert [(s["replica"], s["incarnation"]) for s in suspects] == [("trainer/0", 1)]
    eventually(lambda: run.observer.events("incident_closed", incident), "the end of the incident")
    (again,) = run.observer.events("microbatch_recomputed")
    assert (again["from_replica"], again["by"], again["finite"]) == ("trainer/0", "trainer/1", True)
    run.until_step(len(run.observer.steps) + 2, RECOVERY_SECONDS)
    return incident


def _an_exception_ends_the_run(run: DemoRun) -> None:
    """On all ranks, as a mistake in user code is."""
    raised = command("inject", str(run.path), "--kind", "trainer-exception")
    assert raised.returncode == 0, raised.stderr
    assert run.wait(120) == 1, run.output()[-3000:]
    assert alive(run.observer) == []


def _incidents(run: DemoRun, fault_class: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """(incident, its suspects) of those that were opened with this class."""
    opened = [(e["incident"], e["diagnosis"]) for e in run.observer.events("incident_opened")]
    return [(incident, found["suspects"]) for incident, found in opened if found["fault_class"] == fault_class]
