"""Reward functions of every kind that users write, and what is said of those that cannot be used."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.tasks.rewards.functions import Answer, exact, load_scorer, numeric, scorer_of

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
        (with_the_rest, [1, 1, 1]),
        (exact, [1, 0, 1]),
        (numeric, [1, 0, 1]),
    ],
)
def test_functions_get_what_they_name(function: Callable[..., Any], rewards: list[float]) -> None:
    assert scorer_of(function, "f")(GROUP) == pytest.approx(rewards)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [("so it is 1,234.", "#### 1234", 1.0), ("7 and then 8", 7, 0.0), ("nothing", 7, 0.0), ("-3.50", "-3.5", 1.0)],
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
def test_a_task_of_reasoning_gym_scores_its_own_answers() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=1)[0]
    answers = [
        Answer(prompt="", response=r, answer=entry["answer"], metadata={"metadata": entry["metadata"]})
        for r in (entry["answer"], "nothing")
    ]
    right, wrong = load_scorer("reasoning_gym:basic_arithmetic")(answers)
    assert right == 1.0 and wrong < 0.5
