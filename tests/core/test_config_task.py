"""Section `task`, and the algorithm's lengths against the task's longest response."""

from typing import Any

import pytest

from rolecall.core.config.job import TaskConfig, TaskName, parse_job
from rolecall.core.errors import ConfigError

LENGTHS = [("digit_parity", 12, 16), ("digit_parity", 1, 5), ("long_addition", 12, 28), ("long_addition", 1, 6)]


@pytest.mark.parametrize(("name", "num_digits", "longest"), LENGTHS)
def test_longest_response(name: str, num_digits: int, longest: int) -> None:
    assert TaskConfig(name=TaskName(name), num_digits=num_digits).max_response_tokens == longest


def test_a_base_is_of_long_addition_alone() -> None:
    assert parse_job({"task": {"name": "long_addition", "base": 10}}).task.base == 10
    for task in ({"base": 3}, {"name": "digit_parity", "base": 3}):
        with pytest.raises(ConfigError, match="task: base has no meaning for digit_parity"):
            parse_job({"task": task})
    for base in (1, 11):
        with pytest.raises(ConfigError, match=r"task\.base"):
            parse_job({"task": {"name": "long_addition", "base": base}})


@pytest.mark.parametrize("task", [{}, {"name": "long_addition"}, {"name": "long_addition", "base": 7}])
def test_appended_events_are_read_back(task: dict[str, Any]) -> None:
    job = parse_job({"task": task})
    assert parse_job(job.model_dump()) == parse_job(job.model_dump(mode="json")) == job
    assert ("base" in job.model_dump()["task"]) == bool(task)


TOO_LONG = [
    ("overlong_limit_tokens", {"name": "grpo", "overlong_buffer_tokens": 2, "overlong_limit_tokens": 17}),
    ("overlong_buffer_tokens", {"name": "dapo", "overlong_buffer_tokens": 17}),
    ("window_tokens", {"name": "tppo", "window_tokens": 17}),
]


@pytest.mark.parametrize(("setting", "algorithm"), TOO_LONG, ids=[row[0] for row in TOO_LONG])
def test_lengths_beyond_the_longest_response_are_refused_with_the_reason(
    setting: str, algorithm: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{setting}: 17 is longer than the longest response \(16 tokens"):
        parse_job({"algorithm": algorithm})
    assert parse_job({"algorithm": algorithm, "task": {"name": "long_addition"}})
    assert parse_job({"algorithm": {**algorithm, setting: 16}})


@pytest.mark.parametrize("given", [{}, {"window_tokens": None}])
@pytest.mark.parametrize(
    ("task", "window"),
    [({}, 16), ({"name": "long_addition"}, 16), ({"num_digits": 3}, 7)],
    ids=["as long as the longest", "shorter", "the longest response"],
)
def test_the_window_of_tppo_is_filled_in(given: dict[str, Any], task: dict[str, Any], window: int) -> None:
    job = parse_job({"task": task, "algorithm": {"name": "tppo", **given}})
    assert job.algorithm.window_tokens == job.model_dump()["algorithm"]["window_tokens"] == window
    assert parse_job(job.model_dump(mode="json")) == job


def test_only_tppo_has_a_window() -> None:
    assert parse_job({"algorithm": {"name": "ppo"}}).algorithm.window_tokens is None
