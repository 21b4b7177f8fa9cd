"""Every kind of algorithm in a whole run that loses an engine: it continues, and no part of an answer is trained twice."""

from collections import defaultdict
from pathlib import Path

import pytest

from rolecall.core.config.algorithm import AlgorithmName
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import GroupState, Ledger
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.tasks.task import group_number, group_start
from tests.e2e.runs import demo_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SEED = 47
"""Its fault comes 3 to 4 s after the fleet is whole."""
OTHERS = [AlgorithmName.DAPO, AlgorithmName.PPO, AlgorithmName.TPPO]
"""GRPO is the demo's own, and has tests of its own. The others differ from it in the loss alone."""


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_with_this_algorithm_survives_the_loss_of_an_engine(tmp_path: Path, name: AlgorithmName) -> None:
    args = ["--algorithm", name, "--task", "long_addition", "--seed", str(SEED), "--steps", "10"]
    with demo_run(tmp_path, name, [*args, "--faults", "rollout-kill"]) as run:
        code = run.wait(240)
        assert code == 0, run.output()[-3000:]
        report = run.report()
    assert report["learns"] == f"{name} on long_addition"
    assert [i["fault"]["kind"] for i in report["incidents"]] == ["rollout-kill"] and report["false_alarms"] == []
    assert report["audit"]["ok"], report["audit"]

    journal = Journal(RunDir(run.path).database_url)
    try:
        commits = journal.events(kinds=[EventKind.STEP_COMMITTED])
        trained = {line["group_id"] for line in Ledger(journal.store).lines() if line["state"] == GroupState.TRAINED}
    finally:
        journal.close()
    critic, filters, windows = (name in which for which in ({"ppo", "tppo"}, {"dapo"}, {"tppo"}))
    for commit in commits:
        health = commit.payload.to_body()["health"]
        assert (
            health["entropy"] > 0 and ("value_loss" in health) == critic and ("filtered_fraction" in health) == filters
        )
    starts = defaultdict[int, list[int]](list)
    for group in trained:
        starts[group_number(group)].append(group_start(group))
    assert any(len(found) > 1 for found in starts.values()) == windows
