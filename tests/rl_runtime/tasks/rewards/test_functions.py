"""Reward functions of every kind that users write, and what is said of those that cannot be used."""

import asyncio
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.tasks.rewards.functions import Answer, exact, imported, load_scorer, numeric, scorer_of

GROUP = [Answer(prompt="2 + 2", response=r, answer="4", metadata={"level": 3}) for r in ("4", "5", " 4 ")]


def length(response: str) -> int:
    return len(response)


def with_everything(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    return float(response.strip() == answer) * metadata["level"] + len(prompt) / 100


def of_a_batch(responses: list[str], answers: list[str]) -> list[float]:
    return [float(r.strip() == a) for r, a in zip(responses, answers, strict=True)]


async def awaited(response: str) -> float:
    await asyncio.sleep(0.001)
    return float(len(response))


async def awaited_batch(responses: list[str]) -> list[float]:
    await asyncio.sleep(0.001)
    return [float(len(r)) for r in responses]


class Judge:
    async def __call__(self, response: str) -> float:
        return float(len(response))


def of_numpy(responses: list[str]) -> Any:
    return np.array([len(r) for r in responses], dtype=np.float32)


def with_the_rest(**fields: Any) -> float:
    return float(set(fields) == {"prompt", "response", "answer", "metadata"})


@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        (length, [1, 1, 3]),
        (with_everything, [3.05, 0.05, 3.05]),
        (of_a_batch, [1, 0, 1]),
        (awaited, [1, 1, 3]),
        (awaited_batch, [1, 1, 3]),
        (Judge(), [1, 1, 3]),
        (of_numpy, [1, 1, 3]),
        (with_the_rest, [1, 1, 1]),
        (exact, [1, 0, 1]),
        (numeric, [1, 0, 1]),
    ],
)
def test_functions_get_what_they_name(function: Callable[..., Any], rewards: list[float]) -> None:
    assert scorer_of(function, "f")(GROUP) == pytest.approx(rewards)


@pytest.mark.parametrize("function", [exact, numeric])
def test_a_row_without_an_answer_is_no_wrong_answer(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="answer"):
        function("None", None)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so it is 1,234.", "#### 1234", 1.0),
        ("1234", "1,234", 1.0),
        ("1,234,567.5", "1234567.5", 1.0),
        ("one of 1,2,3", "3", 1.0),
        ("one of 1,2,3", "123", 0.0),
        ("12,3456", "3456", 1.0),
        ("7 and then 8", 7, 0.0),
        ("nothing", 7, 0.0),
        ("-3.50", "-3.5", 1.0),
        ("\N{MINUS SIGN}5", "-5", 1.0),
        ("5", "\N{MINUS SIGN}5", 0.0),
        (".5", "0.5", 1.0),
        ("0.5", ".5", 1.0),
        ("-.5", "-0.5", 1.0),
        ("5", ".5", 0.0),
        ("1e-3", "0.001", 1.0),
        ("option-5", "5", 1.0),
        ("the end.5", "5", 1.0),
        ("1.2.3", "3", 1.0),
    ],
)
def test_the_last_numbers_are_compared(response: str, answer: Any, reward: float) -> None:
    assert numeric(response, answer) == reward


def test_an_answer_without_a_number_is_no_reward() -> None:
    with pytest.raises(ValueError, match="'four' has no number"):
        numeric("4", "four")


@pytest.mark.parametrize("returned", [None, "1.0", 0.5, [0.5], [0.5, None, 1.0], ["a", "b", "c"]])
def test_what_is_no_number_for_each_sample_is_refused(returned: Any) -> None:
    def batch(responses: list[str]) -> Any:
        return returned

    with pytest.raises(TypeError, match="the reward function returned"):
        scorer_of(batch, "f")(GROUP)


def test_a_function_whose_parameters_cannot_be_filled_is_refused() -> None:
    def strange(completion: str) -> float:
        return 0.0

    with pytest.raises(
        ConfigError, match=r"its parameters may be prompt, response, answer, metadata; it has completion"
    ):
        scorer_of(strange, "f")


def test_all_groups_share_one_event_loop() -> None:
    """A lock that was waited for belongs to its loop: with a loop for each group the second one would raise."""
    at_once = asyncio.Semaphore(1)

    async def judged(response: str) -> float:
        async with at_once:
            await asyncio.sleep(0.001)
            return float(len(response))

    with asyncio.Runner() as runner:
        score = scorer_of(judged, "f", runner.run)
        assert [score(GROUP), score(GROUP)] == [[1, 1, 3], [1, 1, 3]]


def test_what_a_failed_group_left_running_is_cancelled() -> None:
    ended = list[str]()

    async def judged(response: str) -> float:
        if response == "5":
            raise KeyError(response)
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(response)
        return 0.0

    with asyncio.Runner() as runner:
        with pytest.raises(KeyError):
            scorer_of(judged, "f", runner.run)(GROUP)
        assert ended == ["4", " 4 "]


def test_a_scorer_names_what_it_cannot_do_without() -> None:
    def lenient(response: str, answer: str = "", metadata: Any = None) -> float:
        return 0.0

    functions = exact, of_a_batch, with_everything, lenient
    assert [set(scorer_of(f, "f").needs) for f in functions] == [
        {"response", "answer"},
        {"response", "answer"},
        {"prompt", "response", "answer", "metadata"},
        {"response"},
    ]


def test_a_file_replaces_no_module_and_imports_its_neighbours(tmp_path: Path) -> None:
    file = tmp_path / "random.py"
    file.write_text("import beside_it\n\ndef score(response):\n    return beside_it.LIMIT\n")
    (tmp_path / "beside_it.py").write_text("LIMIT = 7\n")
    assert load_scorer(f"{file}:score")(GROUP) == [7, 7, 7]
    assert sys.modules["random"] is random


def test_functions_of_a_file_are_found_in_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(response):\n    return len(response)\n")
    pickled = pickle.dumps(imported(f"{file}:score", "reward.function", "function"))
    code = f"import pickle; print(pickle.loads({pickled!r})('abc'))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "3\n"


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("LIMIT = 3\n\ndef score(response):\n    return min(LIMIT, len(response))\n")
    assert load_scorer(f"{file}:score")(GROUP) == [1, 1, 3]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "expected `package.module:function`"),
        ("no_such_module_here:score", "no_such_module_here cannot be imported: ModuleNotFoundError"),
        ("math:tau", "tau is not a function in math"),
        ("math:nothing", "nothing is not there in math"),
        ("reasoning_gym:no_such_task", "reasoning_gym:no_such_task"),
    ],
)
def test_a_name_that_leads_nowhere_is_explained(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_scorer(name)


@pytest.mark.filterwarnings("ignore")  # of the library
def test_mathematics_is_compared_by_value() -> None:
    score = load_scorer("math_verify")
    answers = [Answer(prompt="", response=r, answer=r"$\frac{1}{2}$", metadata={}) for r in ("$0.5$", "$0.6$")]
    assert score(answers) == [1.0, 0.0]


@pytest.mark.filterwarnings("ignore")  # of the library
@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"11\sqrt{2}", r"so $11\sqrt{2}$", "11"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{\left( 3, \frac{\pi}{2} \right)}", "3"),
        ("x^2+1", "$1+x^2$", "$x^2$"),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", r"\boxed{\text{Angela}}"),
        (r"\[\frac{1}{2}\]", "0.5", "1"),
        ("72", "it is 72", "7"),
    ],
)
def test_answers_may_be_latex_without_delimiters(answer: str, right: str, wrong: str) -> None:
    group = [Answer(prompt="", response=r, answer=answer, metadata={}) for r in (right, wrong)]
    assert load_scorer("math_verify")(group) == [1.0, 0.0]


@pytest.mark.filterwarnings("ignore")  # of the library
@pytest.mark.parametrize("answer", [None, "", r"\$5"])
def test_an_answer_that_is_no_mathematics_is_no_reward(answer: Any) -> None:
    with pytest.raises(ValueError, match="is no mathematics"):
        load_scorer("math_verify")([Answer(prompt="", response="5", answer=answer, metadata={})])


COMPOSED = "composite"
"""It has no entries without a configuration."""


@pytest.mark.filterwarnings("ignore")  # of the library
def test_tasks_of_reasoning_gym_score_entries_from_a_file_like_their_own() -> None:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    found, expected = dict[str, float](), dict[str, float]()
    for task in sorted(DATASETS.keys() - {COMPOSED}):
        dataset = reasoning_gym.create_dataset(task, size=1, seed=3)
        entry = dataset[0]
        expected[task] = dataset.score_answer(answer=str(entry["answer"]), entry=entry)
        read = json.loads(json.dumps(entry))
        metadata = {"metadata": read["metadata"]}
        answer = Answer(prompt="", response=str(read["answer"]), answer=read["answer"], metadata=metadata)
        (found[task],) = load_scorer(f"reasoning_gym:{task}")([answer])
    assert found == expected
    assert sum(score == 1.0 for score in found.values()) > 0.9 * len(found)


@pytest.mark.filterwarnings("ignore")  # of the library
def test_another_answer_to_a_task_of_reasoning_gym_scores_less() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=1)[0]
    metadata = {"metadata": entry["metadata"]}
    (wrong,) = load_scorer("reasoning_gym:basic_arithmetic")(
        [Answer(prompt="", response="nothing", answer=entry["answer"], metadata=metadata)]
    )
    assert wrong < 0.5
