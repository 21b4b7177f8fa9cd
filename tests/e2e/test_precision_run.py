"""`rolecall run` in bfloat16, with adapters and gradient checkpointing, on two trainers; then the export."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import rolecall
from tests.rl_runtime.chat_model import write_chat_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

JOB = """
name: mine
num_steps: 3
model: {path: model, dtype: bfloat16, gradient_checkpointing: true}
lora: {rank: 2, target_modules: [q_proj, v_proj]}
data: {path: train.jsonl, answer: answer, max_prompt_tokens: 16, max_response_tokens: 6}
reward: "mine.py:score"
algorithm: {group_size: 4, microbatches_per_step: 2, groups_per_microbatch: 2, learning_rate: 1.0e-4}
roles: {trainer: 2, rollout: 1, reward: 1}
runtime: {nodes: 5, standbys: 0}
checkpoint: {every_steps: 1}
"""
REWARDS = """
def score(response, answer):
    return float(answer in response.split()) + 0.01 * len(response)
"""


def test_a_run_in_bfloat16_with_adapters(tmp_path: Path) -> None:
    write_chat_model(tmp_path / "model")
    rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(7)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "job.yaml").write_text(JOB)
    options = ["--runs", str(tmp_path / "runs")]
    done = rolecall("run", str(tmp_path / "job.yaml"), "--id", "mine", *options, seconds=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "runs" / "mine" / "report.json").read_text())
    assert report["audit"]["ok"], report["audit"]
    done = rolecall("export", "mine", *options, "--out", str(tmp_path / "out"))
    assert done.returncode == 0 and "in bfloat16, after " in done.stdout, done.stderr[-2000:]
    given, found = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    changed = {n for n, t in found.items() if not torch.equal(t, given[n].bfloat16())}
    assert changed == {f"model.layers.0.self_attn.{p}.weight" for p in ("q_proj", "v_proj")}
