"""Wrong numbers of a reward worker, none at all of one, then wrong ones of an engine, in one real run of PPO: second
opinions name each, and it leaves its node."""

from pathlib import Path

import pytest

from rolecall.core.config.algorithm import AlgorithmName
from rolecall.core.text import past
from tests.e2e.runs import check_algorithm, check_no_false_alarm, command, demo_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

SEED = 47
"""Its faults come 3 to 4 s after the fleet is whole; others wait for up to 10."""
FAULTS = ("reward-wrong", "reward-nan", "rollout-wrong")
REASON = {
    "reward-wrong": "computed other numbers in prompt group",
    "reward-nan": "rewards nan, ",
    "rollout-wrong": "alone disagrees with the trainers",
}


def test_wrong_workers_and_a_wrong_engine_are_named_and_leave_their_nodes(tmp_path: Path) -> None:
    settings = ["runtime.reward_check_share=0.2"]  # the wrong worker is compared within seconds
    args = ["--algorithm", AlgorithmName.PPO, "--task", "long_addition", "--seed", str(SEED), "--steps", "30"]
    args += ["--faults", ",".join(FAULTS)]
    with demo_run(tmp_path, "wrong", [*args, *(word for s in settings for word in ("--set", s))]) as run:
        code = run.wait(420)
        report = run.report()
        assert code == 0, run.output()[-3000:]
    check_no_false_alarm(report)
    found = [i for i in report["incidents"] if i["fault"]]
    assert [i["fault"]["kind"] for i in found] == list(FAULTS)
    assert report["missed"] == [] and report["pids_kept"] is True
    assert report["audit"]["ok"], report["audit"]
    victims = [f"{i['fault']['target']}#{i['fault']['incarnation']}" for i in found]
    named = {s for i in report["incidents"] for s in i["suspects"]}
    assert named == {*victims}, "nobody else is blamed, by a tolerated suspicion neither"
    for incident, victim in zip(found, victims, strict=True):
        fault = incident["fault"]
        assert incident["suspects"] == [victim] and incident["fault_class"] == "silent_corruption"
        assert (incident["action"], incident["outcome"]) == ("replace_node", "resolved")
        (replacement,) = incident["replacements"]
        assert replacement["node"] != fault["node"]
        told = command("incidents", incident["incident_id"], "--run", str(run.path)).stdout
        assert past(incident["because"]) in told and REASON[fault["kind"]] in told
    quarantined = {e["node"] for e in run.observer.events("node_quarantined")}
    assert quarantined == {i["fault"]["node"] for i in found}
    used = [c["used"] for c in run.observer.events("rewards_compared")]
    assert used and all(reward >= 0 for rewards in used for reward in rewards), "a contradicted reward was trained on"
    last = run.observer.events("step_committed")[-1]["log_ratios"]
    # Answers that the wrong engine began may still be trained on in the last step, and are compared by its name.
    assert all(apart < 0.02 for engine, apart in last.items() if engine not in victims), last
    check_algorithm(run, AlgorithmName.PPO)
