"""`rolecall run` with mistakes in the job file: each is named as `path: reason`, exit code 2, and nothing starts."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rolecall.cli.main import main
from rolecall.rl_runtime.device import Hardware
from rolecall.session import session
from tests.e2e.runs import command
from tests.rl_runtime.chat_model import write_chat_model
from tests.support import some

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOB: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "answer": "answer", "max_prompt_tokens": 20, "max_response_tokens": 8},
    "reward": "mine.py:right",
    "roles": {"trainer": 1, "rollout": 1, "reward": 1},
    "runtime": {"nodes": 4, "standbys": 0},
}
MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a missing column, a reward that cannot be imported, a model that vLLM lacks": (
        {"data.prompt": "question", "reward": "nowhere.at_all:right", "model.path": "odd"},
        (
            "data: row 0 has no column 'question'; it has 'prompt', 'answer'",
            "reward.function: nowhere.at_all cannot be imported: ModuleNotFoundError",
            "model.path: vLLM has no NoSuchModel",
        ),
    ),
    "no template, no such reward function, answers that do not fit, too little memory": (
        {
            "model.path": "bare",
            "reward": "mine.py:wrong",
            "data.max_response_tokens": 60,
            "runtime.kv_cache_bytes": 1 << 45,
        },
        (
            "model.path: the tokenizer has no chat template",
            "reward.function: ",
            "data: prompt and response have up to 80 tokens, and the model reads 64",
            "roles: trainer ",
        ),
    ),
    "no model, no data": (
        {"model.path": "missing", "data.path": "missing.jsonl"},
        ("model.path: ", "data.path: "),
    ),
}
EVERY_TIME = "no template, no such reward function, answers that do not fit, too little memory"


# Each case imports vLLM in a process of its own. `test_dataset_task.py` has the mistakes of the others without a command.
@pytest.mark.parametrize(
    ("changes", "reasons"), some(list(MISTAKES.values()), [MISTAKES[EVERY_TIME]]), ids=list(MISTAKES)
)
def test_each_mistake_is_named_and_nothing_starts(
    tmp_path: Path, changes: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    write_chat_model(tmp_path / "model")
    write_chat_model(tmp_path / "bare", template=None)
    config = json.loads((write_chat_model(tmp_path / "odd") / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "say 1", "answer": "1"}\n')
    (tmp_path / "mine.py").write_text("def right(response, answer):\n    return float(response == answer)\n")
    job: dict[str, Any] = json.loads(json.dumps(JOB))
    for path, value in changes.items():
        *section, name = path.split(".")
        (job[section[0]] if section else job)[name] = value
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    before = set(psutil.Process().children(recursive=True))
    done = command("run", str(tmp_path / "job.yaml"), "--id", "mine", "--runs", str(tmp_path / "runs"))
    assert done.returncode == 2 and not done.stdout, done
    lines = done.stderr.splitlines()
    for reason in reasons:
        assert any(reason in line for line in lines), (reason, done.stderr)
    assert len([line for line in lines if ": " in line]) >= len(reasons)
    assert not (tmp_path / "runs").exists(), "nothing of the run is there"
    assert not set(psutil.Process().children(recursive=True)) - before, "no process was left"


RANKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "heads that the engine's ranks do not divide": (
        {"runtime": {"rollout_ranks": 3}},
        ("runtime.rollout_ranks: 3 ranks do not divide the model's 4 attention heads",),
    ),
    "key-value heads that the engine's ranks do not divide": (
        {"model": {"num_heads": 6, "num_kv_heads": 2}, "runtime": {"rollout_ranks": 3}},
        ("runtime.rollout_ranks: 3 ranks and the model's 2 key-value heads: neither divides the other",),
    ),
    "key-value heads that the trainer's tensor ranks do not divide": (
        {"runtime": {"trainer_ranks": 4, "trainer_tensor_ranks": 4}},
        ("runtime.trainer_tensor_ranks: 4 ranks do not divide the model's 2 key-value heads",),
    ),
    "tensor ranks that do not divide the trainer's ranks": (
        {"runtime": {"trainer_ranks": 3, "trainer_tensor_ranks": 2}},
        ("runtime.trainer_tensor_ranks: ", "trainer_ranks"),
    ),
    "too little memory for the built-in model": (
        {"model": {"hidden_size": 4096, "intermediate_size": 16_384, "num_layers": 64}},
        ("roles: trainer 2 x ", "are free"),
    ),
    "too little memory for its ranks": (
        {
            "model": {"hidden_size": 4096, "intermediate_size": 16_384, "num_layers": 64},
            "runtime": {"trainer_ranks": 4},
        },
        ("roles: trainer 2 x (", "are free"),
    ),
    "more replicas than nodes": (
        {"runtime": {"nodes": 3, "trainer_ranks": 2}},
        ("runtime.nodes: 3, but the roles need 7",),
    ),
}


@pytest.mark.parametrize(("job", "reasons"), RANKS.values(), ids=RANKS)
def test_a_mistake_about_ranks_is_found_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    write_chat_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "say 1", "answer": "1"}\n')
    (tmp_path / "mine.py").write_text("def right(response, answer):\n    return float(response == answer)\n")
    refused(tmp_path, capsys, job, reasons)


@pytest.mark.parametrize(
    ("device", "gpus", "reason"),
    [
        ("cuda", (), "runtime.device: cuda, but this machine has no NVIDIA GPU"),
        ("cuda", ("0", "1"), "roles: trainer 2 x 2, rollout 3 x 1, standby 1 x 1: 8 GPUs, one for each rank"),
        ("cpu", ("0", "1"), "runtime.device: cpu, but the installed vLLM computes on NVIDIA GPUs only"),
        (None, (), "runtime.device: null, which here means cpu, but the installed vLLM computes on NVIDIA GPUs only"),
    ],
)
def test_ranks_without_devices_are_found_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    device: str | None,
    gpus: tuple[str, ...],
    reason: str,
) -> None:
    monkeypatch.setattr(session, "found_hardware", lambda: Hardware(gpus=gpus, is_cuda_build=True, engine="cuda"))
    refused(tmp_path, capsys, {"runtime": {"device": device, "trainer_ranks": 2}}, (reason,))


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], job: dict[str, Any], reasons: tuple[str, ...]) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    before, there = set(psutil.Process().children(recursive=True)), sorted(tmp_path.rglob("*"))
    assert main(["run", str(tmp_path / "job.yaml"), "--id", "mine", "--runs", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr()
    assert all(reason in said.err for reason in reasons) and not said.out, said
    assert sorted(tmp_path.rglob("*")) == there, "nothing was written"
    assert not set(psutil.Process().children(recursive=True)) - before, "no process was left"
