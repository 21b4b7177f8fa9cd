"""Held-out prompts of a dataset and of a built-in task, and the check of them before a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.protocol.messages import PromptGroup, TrainingSample
from rolecall.rl_runtime.tasks.check import _check_data, checked
from rolecall.rl_runtime.tasks.dataset_task import DatasetTask
from rolecall.rl_runtime.tasks.reward_worker import task_of
from rolecall.rl_runtime.tasks.task import held_out_id
from tests.rl_runtime.chat_model import WORDS, write_chat_model

TRAIN = [{"prompt": f"say {n}", "answer": str(n)} for n in range(4)]
TEST = [{"question": f"say {n}", "gold": str(n)} for n in range(5, 9)]


def lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chat_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(lines(TRAIN))
    (tmp_path / "test.jsonl").write_text(lines(TEST))
    return tmp_path


def job_of(folder: Path, **evaluation: Any) -> JobConfig:
    given = {"path": str(folder / "test.jsonl"), "prompt": "question", "answer": "gold", **evaluation}
    return parse_job(
        {
            "model": {"path": str(folder / "model")},
            "data": {
                "path": str(folder / "train.jsonl"),
                "answer": "answer",
                "max_prompt_tokens": 20,
                "max_response_tokens": 8,
            },
            "reward": "exact",
            "evaluation": given,
        }
    )


def refused(job: JobConfig) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        _check_data(job)
    return caught.value.problems


def test_held_out_prompts_are_the_first_rows_of_their_own_file(folder: Path) -> None:
    task = task_of(job_of(folder))
    said = [" ".join(WORDS[t] for t in task.held_out(n).tokens) for n in range(2)]
    assert said == [f"<bos> user say {n} <end> <bos> assistant" for n in (5, 6)]
    assert (task.num_held_out(None), task.num_held_out(3), task.num_held_out(9), task.num_rows) == (4, 3, 4, 4)
    samples = tuple(
        TrainingSample(
            request_id="",
            tokens=(WORDS.index(w),),
            logprobs=(0.0,),
            versions=(0,),
            reward=0.0,
        )
        for w in ("6", "1")
    )
    group = PromptGroup(group_id=held_out_id(20, 1), prompt_tokens=(1,), samples=samples)
    assert list(task.rewards(group)) == [1.0, 0.0], "scored with the answer of its own row"


def test_a_prompt_that_is_too_long_is_not_generated_for(folder: Path) -> None:
    (folder / "test.jsonl").write_text(lines([{"question": "say " + "please " * 20, "gold": "1"}, *TEST]))
    prompt = task_of(job_of(folder)).held_out(0)
    assert prompt.unusable.startswith("prompt too long: ")


def test_a_changed_file_is_refused_by_its_fingerprint(folder: Path) -> None:
    task = task_of(job_of(folder))
    assert isinstance(task, DatasetTask)
    job = job_of(folder, fingerprint=task.held_out_fingerprint)
    task_of(job)
    (folder / "test.jsonl").write_text(lines(TEST[:3]))
    with pytest.raises(ConfigError, match=r"evaluation\.path: the files have changed"):
        task_of(job)


def test_mistakes_are_found_before_the_run(folder: Path) -> None:
    assert refused(job_of(folder, prompt="ask"))[0].startswith("evaluation: row 0 has no column 'ask'")
    assert refused(job_of(folder, path=str(folder / "none.jsonl")))[0].startswith("evaluation.path: ")
    many = "evaluation.num_prompts: 4 prompts x 64 samples are up to 2,304,000 tokens, at most 2,000,000"
    assert refused(job_of(folder, samples=64, max_response_tokens=9000)) == (many,)
    (folder / "test.jsonl").write_text(lines([*TEST, {"question": "say 1"}]))
    assert refused(job_of(folder))[0].startswith("evaluation: row 4 has no column 'gold'")


def test_the_same_prompts_under_another_name_are_refused(folder: Path) -> None:
    shutil.copy(folder / "train.jsonl", folder / "copy.jsonl")
    job = job_of(folder, path=str(folder / "copy.jsonl"), prompt="prompt", answer="answer")
    assert refused(job) == ("evaluation.path: these prompts are trained on: its files are those of data.path",)
    split = job_of(folder, path=None, split="test", prompt="prompt", answer="answer")
    assert refused(split) == ("evaluation.split: a file has no splits: name the file of this split in path",)


def test_a_built_in_task_has_new_prompts_and_a_limit() -> None:
    job = parse_job({"evaluation": {"num_prompts": 300, "samples": 4}})
    assert checked(job) == job
    task = task_of(job)
    held_out = {task.held_out(n).tokens for n in range(300)}
    assert not held_out & {task.prompt(n).tokens for n in range(300)} and len(held_out) > 290
    with pytest.raises(ConfigError, match="513 prompts x 4 samples are up to 2,052 requests, at most 2,048"):
        checked(parse_job({"evaluation": {"num_prompts": 513, "samples": 4}}))
