"""`rolecall run` with a dataset, a chat model and a reward function that are not the project's, some groups of which
cannot be scored."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import event_accumulator

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Ledger
from rolecall.core.journal.payloads import EvaluationFinished
from rolecall.core.rundir import RunDir
from tests.e2e.runs import rolecall
from tests.rl_runtime.chat_model import write_chat_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

JOB = """
name: mine
num_steps: 3
model: {path: model}
data: {path: train.jsonl, answer: answer, max_prompt_tokens: 16, max_response_tokens: 6}
reward: {function: "mine.py:score", attempts: 2}
evaluation: {path: test.jsonl, every_steps: 2}
logging: {tensorboard: true}
sampling: {temperature: 0.8, top_p: 0.95}
algorithm: {group_size: 4, microbatches_per_step: 2, groups_per_microbatch: 2, learning_rate: 1.0e-4}
roles: {trainer: 1, rollout: 1, reward: 1}
runtime: {nodes: 4, standbys: 0}
"""
REWARDS = """
async def score(response, answer):
    if answer == "3":
        raise ValueError("no score for 3")
    return float(answer in response.split()) + 0.01 * len(response)
"""


def test_a_run_on_ones_own_dataset_and_reward(tmp_path: Path) -> None:
    write_chat_model(tmp_path / "model")
    rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(7)]
    rows[5]["prompt"] = "say " + "please " * 20
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = [{"prompt": f"say {n} please", "answer": str(n)} for n in (1, 2, 3)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "job.yaml").write_text(JOB)
    runs = tmp_path / "runs"
    done = rolecall("run", str(tmp_path / "job.yaml"), "--id", "mine", "--runs", str(runs), seconds=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]

    report = json.loads((runs / "mine" / "report.json").read_text())
    assert report["learns"] == "grpo on train" and report["audit"]["ok"], report["audit"]
    run = RunDir(runs / "mine")
    fingerprint = run.read()["config"]["data"]["fingerprint"]
    journal = Journal(run.database_url)
    try:
        lines = list(Ledger(journal.store).lines())
        evaluations = [e.as_(EvaluationFinished) for e in journal.events(kinds=[EventKind.EVALUATION_FINISHED])]
    finally:
        journal.close()
    origins = {line["group_id"]: line["reason"].partition(" row ")[2] for line in lines if line["state"] == "issued"}
    assert all(o.endswith(f" of {fingerprint[:12]}") for o in origins.values())
    trained = {origins[line["group_id"]].split()[0] for line in lines if line["state"] == "trained"}
    dropped = {origins[line["group_id"]].split()[0]: line["reason"] for line in lines if line["state"] == "dropped"}
    assert not trained & {"3", "5"}, "what has no score and what is too long is not trained on"
    assert dropped["3"] == "reward_failed: ValueError" and dropped["5"].startswith("prompt too long: ")
    assert "say" not in json.dumps([dict(line) for line in lines]), "the ledger holds no text"

    # The prompt that says 3 cannot be scored, and its failure is no score.
    assert evaluations[-1].step == 3 and {e.step for e in evaluations} <= {0, 2, 3}
    assert all(e.prompts == 2 and e.unscored == {"reward_failed": 1} and e.reward is not None for e in evaluations)
    assert (evaluations[-1].version_min, evaluations[-1].version_max) == (3, 3)
    assert [e["step"] for e in report["evaluations"]] == [e.step for e in evaluations]
    assert report["dataset"]["rows"] == len(rows)
    events = event_accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [s.step for s in events.Scalars("train/reward")] == [1, 2, 3]
    assert [s.step for s in events.Scalars("evaluation/reward")] == [e.step for e in evaluations]
