"""The example with a real model (`examples/smollm2`) in small: its job file, data and reward, three steps on two
trainers with a tiny chat model, evaluation, TensorBoard and export. Beside its questions are one that cannot be scored
and one that is too long. The model is trained in bfloat16, with adapters and gradient checkpointing.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing import event_accumulator

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Ledger
from rolecall.core.journal.payloads.run import EvaluationFinished
from rolecall.core.rundir import RunDir
from tests.e2e.runs import ROOT, command, rolecall
from tests.rl_runtime.chat_model import write_chat_model

pytestmark = [pytest.mark.e2e, pytest.mark.light, pytest.mark.timeout(300)]

EXAMPLE = ROOT / "examples" / "smollm2"
NUM_ROWS = 5
REWARDS = """


async def score(response, answer):
    if answer == "none":
        raise ValueError("no score for none")
    return right(response, answer) + 0.01 * len(response)
"""


def write_example(folder: Path) -> None:
    """The example's own files, with few rows and a tiny model."""
    write_chat_model(folder / "model")
    spec = importlib.util.spec_from_file_location("smollm2_data", EXAMPLE / "data.py")
    assert spec is not None and spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    data.main(str(folder / "train.jsonl"), str(folder / "held-out.jsonl"), NUM_ROWS, 3)
    train, held_out = ((folder / name).read_text() for name in ("train.jsonl", "held-out.jsonl"))
    questions = [json.loads(line)["question"] for line in (train + held_out).splitlines()]
    assert len(questions) == len(set(questions)) == NUM_ROWS + 3, "no question is in both files"
    more = [{"question": "say 1", "answer": "none"}, {"question": "say " + "please " * 40, "answer": "1"}]
    (folder / "train.jsonl").write_text(train + "".join(json.dumps(row) + "\n" for row in more))
    (folder / "held-out.jsonl").write_text(held_out + json.dumps({"question": "say 2", "answer": "none"}) + "\n")
    (folder / "mine.py").write_text((EXAMPLE / "rewards.py").read_text() + REWARDS)
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job |= {"num_steps": 3, "reward": {"function": "mine.py:score", "attempts": 2}}
    job |= {"evaluation": {"path": "held-out.jsonl", "every_steps": 2}, "logging": {"tensorboard": True}}
    job["model"] |= {"dtype": "bfloat16", "gradient_checkpointing": True}
    job["lora"] = {"rank": 2, "target_modules": ["q_proj", "v_proj"]}
    job["data"] |= {"max_prompt_tokens": 40, "max_response_tokens": 6}
    job["sampling"] |= {"top_p": 0.95}
    job["algorithm"] |= {"group_size": 4, "microbatches_per_step": 2, "groups_per_microbatch": 2}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def test_the_example_in_small(tmp_path: Path) -> None:
    write_example(tmp_path)
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
    unscored, too_long = str(NUM_ROWS), str(NUM_ROWS + 1)
    assert not trained & {unscored, too_long}, "what has no score and what is too long is not trained on"
    assert dropped[unscored] == "reward_failed: ValueError" and dropped[too_long].startswith("prompt too long: ")
    assert "problem" not in json.dumps([dict(line) for line in lines]), "the ledger holds no text"

    # A held-out question without a score is in no mean.
    assert evaluations[-1].step == 3 and {e.step for e in evaluations} <= {0, 2, 3}
    assert all(e.prompts == 3 and e.unscored == {"reward_failed": 1} and e.reward is not None for e in evaluations)
    assert (evaluations[-1].version_min, evaluations[-1].version_max) == (3, 3)
    assert [e["step"] for e in report["evaluations"]] == [e.step for e in evaluations]
    assert report["dataset"]["rows"] == NUM_ROWS + 2
    events = event_accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [s.step for s in events.Scalars("train/reward")] == [1, 2, 3]
    assert [s.step for s in events.Scalars("evaluation/reward")] == [e.step for e in evaluations]

    exported = command("export", "mine", "--runs", str(runs), "--out", str(tmp_path / "trained"), "--json")
    assert exported.returncode == 0, exported
    told = json.loads(exported.stdout)
    assert (told["step"], told["dtype"]) == (2, "bfloat16")
    given, found = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "trained"))
    changed = {n for n, t in found.items() if not torch.equal(t, given[n].bfloat16())}
    assert changed == {f"model.layers.0.self_attn.{p}.weight" for p in ("q_proj", "v_proj")}
