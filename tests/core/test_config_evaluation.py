"""Sections `evaluation` and `logging` of a job file: what is refused, and why."""

from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.job import load_job, parse_job
from rolecall.core.errors import ConfigError

DATA = {
    "model": {"path": "/model"},
    "data": {"path": "/train.jsonl", "answer": "answer", "metadata": ["level"], "max_response_tokens": 20},
    "reward": "exact",
}


def problem(value: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_job(value)
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("evaluation", "why"),
    [
        ({}, "these prompts are trained on"),
        ({"path": "/train.jsonl"}, "these prompts are trained on"),
        ({"path": "/test.jsonl", "temperature": 0.5}, "temperature has no meaning with samples: 1"),
        ({"path": "/test.jsonl", "every_steps": 0}, "evaluation.every_steps: "),
        ({"path": "/test.jsonl", "samples": 65}, "evaluation.samples: "),
        ({"path": "/test.jsonl", "steps": 5}, "evaluation.steps: unknown key"),
    ],
)
def test_of_a_dataset_it_needs_other_prompts(evaluation: dict[str, Any], why: str) -> None:
    assert why in problem({**DATA, "evaluation": evaluation})


@pytest.mark.parametrize(
    ("evaluation", "why"),
    [
        ({}, "evaluation.num_prompts: a built-in task has no end"),
        ({"num_prompts": 5, "path": "/test.jsonl"}, "evaluation.path: no meaning without data"),
        ({"num_prompts": 5, "split": "test"}, "evaluation.split: no meaning without data"),
        ({"num_prompts": 5, "max_response_tokens": 500}, "longer than the task's longest response"),
    ],
)
def test_of_a_built_in_task_it_needs_a_number_of_prompts(evaluation: dict[str, Any], why: str) -> None:
    assert why in problem({"evaluation": evaluation})


def test_columns_are_those_of_the_data_unless_given() -> None:
    job = parse_job({**DATA, "evaluation": {"path": "/test.jsonl", "answer": "gold"}})
    assert job.data is not None and job.evaluation is not None
    held_out = job.evaluation.held_out(job.data)
    assert (held_out.path, held_out.answer, held_out.metadata) == ("/test.jsonl", "gold", ("level",))
    assert (held_out.split, held_out.shuffle, held_out.fingerprint) == ("train", False, None)
    job = parse_job({**DATA, "evaluation": {"split": "test"}})
    assert job.data is not None and job.evaluation is not None
    assert (job.evaluation.held_out(job.data).path, job.evaluation.held_out(job.data).split) == ("/train.jsonl", "test")


def test_engines_take_the_longer_one_of_both_answers() -> None:
    value = {**DATA, "evaluation": {"path": "/test.jsonl", "max_response_tokens": 50}}
    assert parse_job(value).max_tokens == 512 + 50
    value["evaluation"] = {"path": "/test.jsonl", "max_response_tokens": 5}
    assert parse_job(value).max_tokens == 512 + 20


def test_a_job_without_the_sections_is_written_and_identified_as_before() -> None:
    plain = parse_job({})
    assert not {"evaluation", "logging"} & set(plain.model_dump())
    logged = parse_job({"logging": {"tensorboard": True, "wandb": {"project": "p"}}})
    assert logged.logging.names == ("tensorboard", "wandb")
    assert logged.digest() == plain.digest(), "where metrics go does not change what the run does"
    assert parse_job(logged.model_dump(mode="json")) == logged
    evaluated = parse_job({"evaluation": {"num_prompts": 5}})
    assert evaluated.digest() != plain.digest()
    assert parse_job(evaluated.model_dump(mode="json")) == evaluated


def test_a_relative_path_starts_at_the_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {path: m}\ndata: {path: train.jsonl}\nreward: exact\nevaluation: {path: test.jsonl}\n", encoding="utf-8"
    )
    job = load_job(path)
    assert job.evaluation is not None and job.evaluation.path == str(tmp_path / "test.jsonl")
