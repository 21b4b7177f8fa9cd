"""`rolecall run` with an environment of one's own that answers a chat model for several turns, and fails for one row."""

import json
from pathlib import Path

import pytest

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Ledger
from rolecall.core.rundir import RunDir
from tests.e2e.runs import rolecall
from tests.rl_runtime.chat_model import write_chat_model

pytestmark = [pytest.mark.e2e, pytest.mark.light, pytest.mark.timeout(300)]

JOB = """
name: talks
num_steps: 3
model: {path: model}
data: {path: train.jsonl, answer: answer, max_prompt_tokens: 16, max_response_tokens: 40}
environment: {factory: "mine.py:Game", max_turns: 3, attempts: 2}
sampling: {temperature: 1.0, stop: [please]}
algorithm: {group_size: 4, microbatches_per_step: 2, groups_per_microbatch: 2, learning_rate: 1.0e-4}
roles: {trainer: 1, rollout: 1, reward: 2}
runtime: {nodes: 4, standbys: 0, reward_check_share: 1.0}
"""
GAME = """
import random
from rolecall.environment import Step

class Game:
    async def reset(self, prompt, answer, seed):
        self.answer, self.random, self.turns = answer, random.Random(seed), 0
        return "please" if answer == "2" else None

    async def step(self, response):
        if self.answer == "3":
            raise ValueError("no game of 3")
        self.turns += 1
        right = self.answer in response.split()
        words = " ".join(self.random.choices(["yes", "no", "1"], k=self.turns))
        return Step(words, reward=right + 0.01 * len(response), done=right)
"""


def test_a_run_whose_answers_are_conversations(tmp_path: Path) -> None:
    write_chat_model(tmp_path / "model")
    rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(7)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(GAME)
    (tmp_path / "job.yaml").write_text(JOB)
    runs = tmp_path / "runs"
    done = rolecall("run", str(tmp_path / "job.yaml"), "--id", "talks", "--runs", str(runs), seconds=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]

    report = json.loads((runs / "talks" / "report.json").read_text())
    assert report["audit"]["ok"], report["audit"]
    journal = Journal(RunDir(runs / "talks").database_url)
    try:
        lines = list(Ledger(journal.store).lines())
        steps = [e.payload.to_body() for e in journal.events(kinds=[EventKind.STEP_COMMITTED])]
        compared = [e.payload.to_body() for e in journal.events(kinds=[EventKind.REWARDS_COMPARED])]
    finally:
        journal.close()
    rows_of = {line["group_id"]: line["reason"].partition(" row ")[2] for line in lines if line["state"] == "issued"}
    dropped = {rows_of[line["group_id"]].split()[0]: line["reason"] for line in lines if line["state"] == "dropped"}
    trained = {rows_of[line["group_id"]].split()[0] for line in lines if line["state"] == "trained"}
    assert dropped["3"] == "environment_failed: ValueError" and "3" not in trained
    assert [step["step"] for step in steps] == [0, 1, 2]
    compared_ratios = [step["log_ratio_max"] for step in steps if step["log_ratio_max"] is not None]
    assert compared_ratios and max(compared_ratios) < 1e-3, steps
    assert not any(body["odd"] for body in compared), "a second worker's replay gives the same rewards"
