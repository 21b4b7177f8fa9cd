"""pytest tests/rl_runtime/tasks/test_task.py"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.config.job import ModelConfig, TaskConfig, TaskName
from rolecall.core.errors import ConfigError, InvalidId
from rolecall.rl_runtime.tasks.task import Task, group_id, group_number, make_task
from rolecall.rl_runtime.tasks.tokenizer import CHARACTERS, FILLER, ROWS_MIN, folder_vocabulary, local_vocabulary
from rolecall.rl_runtime.trainer.model import write_model_folder
from rolecall.rl_runtime.weights.proof import CANARY

VOCAB = local_vocabulary()
PARITY_CHARACTERS = CHARACTERS[TaskName.DIGIT_PARITY]
OF_ADDITION = local_vocabulary(TaskName.LONG_ADDITION)
TINY = ModelConfig(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)


def task(num_digits: int = 3, seed: int = 0) -> Task:
    return make_task(TaskConfig(num_digits=num_digits), VOCAB, seed)


def addition(num_digits: int = 12, base: int = 3, seed: int = 0) -> Task:
    config = TaskConfig(name=TaskName.LONG_ADDITION, num_digits=num_digits, base=base)
    return make_task(config, OF_ADDITION, seed)


def digits_of(prompt: tuple[int, ...]) -> str:
    return VOCAB.decode(prompt[1:-1])


def test_prompts_are_made_from_seed_and_number_alone() -> None:
    assert task().prompt(7) == task().prompt(7)
    assert task().prompt(7).group_id == "g00000007"
    prompts = {task(12, seed).prompt(number).tokens for seed in range(3) for number in range(50)}
    assert len(prompts) == 150
    tokens = task().prompt(7).tokens
    assert tokens[0] == VOCAB.bos
    assert len(digits_of(tokens)) == 3 and VOCAB.decode(tokens[-1:]) == "="


def test_prompt_of_this_seed_and_number_stays_the_same_over_versions() -> None:
    assert digits_of(task(12).prompt(0).tokens) == "746436276472"
    assert OF_ADDITION.decode(addition(5, base=10).prompt(8).tokens[1:]) == "4356______="


def test_prompts_are_the_same_in_another_process() -> None:
    """With any hash seed: prompts are reproduced by number alone after every process died."""
    code = (
        "from rolecall.core.config.job import TaskConfig, TaskName\n"
        "from rolecall.rl_runtime.tasks.task import make_task\n"
        "from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary\n"
        "name = TaskName.LONG_ADDITION\n"
        "task = make_task(TaskConfig(name=name, base=3), local_vocabulary(name), 3)\n"
        "print([task.prompt(n).tokens for n in range(20)])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.strip() == str([addition(seed=3).prompt(n).tokens for n in range(20)])


def test_group_numbers_round_trip() -> None:
    assert [group_number(group_id(n)) for n in (0, 7, 10**9)] == [0, 7, 10**9]
    for bad in ("", "g", "g7", "x00000007", "g0000000x", "g-0000007"):
        with pytest.raises(InvalidId):
            group_number(bad)
    with pytest.raises(InvalidId):
        group_id(-1)


REWARDS = [
    ("exact", "oeo.", 1.0),
    ("end token missing", "oeo", 3 / 4),
    ("one letter wrong", "eeo.", 3 / 4),
    ("ends early: right letters so far, nothing for the rest", "oe.", 2 / 4),
    ("one letter too many: the end is not in its place", "oeoe.", 3 / 5),
    ("right letters, shifted", "eoeo.", 0.0),
    ("digits copied", "123.", 1 / 4),
    ("nothing", "", 0.0),
    ("only the end", ".", 0.0),
]


@pytest.mark.parametrize(("response", "reward"), [row[1:] for row in REWARDS], ids=[row[0] for row in REWARDS])
def test_reward(response: str, reward: float) -> None:
    prompt = (VOCAB.bos, *VOCAB.encode("123="))
    tokens = tuple(VOCAB.eos if c == "." else VOCAB.ids[c] for c in response)
    assert task().reward(prompt, tokens) == pytest.approx(reward)


def test_exactly_the_answer_has_full_reward() -> None:
    for number in range(50):
        prompt = task(12).prompt(number).tokens
        answer = task(12).answer(prompt)
        assert len(answer) <= task(12).max_response_tokens
        assert task(12).reward(prompt, answer) == 1.0
        for place in range(len(answer)):
            wrong = (*answer[:place], VOCAB.pad, *answer[place + 1 :])
            assert task(12).reward(prompt, wrong) < 1.0


def test_folder_brings_its_own_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_model_folder(tmp_path, TINY, seed=0)
    assert folder_vocabulary(tmp_path) == VOCAB
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tuple(tokenizer.encode(PARITY_CHARACTERS).ids) == VOCAB.encode(PARITY_CHARACTERS)
    assert tokenizer.decode(list(VOCAB.encode(PARITY_CHARACTERS))) == PARITY_CHARACTERS


def test_folder_needs_the_characters_of_the_task_alone(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "parity", TINY, seed=0)
    with pytest.raises(ConfigError, match=f"no token of its own for '{FILLER}'"):
        folder_vocabulary(tmp_path / "parity", TaskName.LONG_ADDITION)
    write_model_folder(tmp_path / "addition", TINY, seed=0, task=TaskName.LONG_ADDITION)
    assert folder_vocabulary(tmp_path / "addition", TaskName.LONG_ADDITION) == OF_ADDITION
    with pytest.raises(ConfigError, match="no token of its own for 'e'"):
        folder_vocabulary(tmp_path / "addition")


@pytest.mark.parametrize("name", list(TaskName))
def test_every_local_vocabulary_has_the_canarys_tokens(name: TaskName) -> None:
    assert local_vocabulary(name).size >= ROWS_MIN > max(CANARY)
    assert VOCAB.size == 16 and VOCAB.encode("09=eo") == (3, 12, 13, 14, 15)  # weights of a seed depend on it


def test_an_unusable_folder_is_reported_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        folder_vocabulary(tmp_path)
    write_model_folder(tmp_path, TINY, seed=0)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["7"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="no token of its own for '7'"):
        folder_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        folder_vocabulary(tmp_path)


# --- long_addition

numbers = st.integers(min_value=0, max_value=10**6)


def number_of(digits: list[int], base: int) -> int:
    return sum(d * base**place for place, d in enumerate(digits))


@given(number=numbers, base=st.integers(min_value=2, max_value=10), num_digits=st.integers(min_value=1, max_value=64))
def test_answer_adds_as_python_does(number: int, base: int, num_digits: int) -> None:
    made = addition(num_digits, base)
    prompt = made.prompt(number).tokens
    assert len(prompt) == 2 * num_digits + 2 and prompt[0] == OF_ADDITION.bos
    text = OF_ADDITION.decode(prompt[1:])
    written = text.rstrip("=").rstrip(FILLER)
    assert text == written.ljust(2 * num_digits, FILLER) + "="
    given_digits = [int(c) for c in written]
    assert max(given_digits) < base
    answer = made.answer(prompt)
    assert answer[-1] == OF_ADDITION.eos and len(answer) <= made.max_response_tokens
    config = TaskConfig(name=TaskName.LONG_ADDITION, num_digits=num_digits, base=base)
    assert len(prompt) + made.max_response_tokens == config.max_tokens
    worked = [int(c) for c in OF_ADDITION.decode(answer)]
    carries, kept = worked[::2], worked[1::2]
    total = number_of(given_digits[::2], base) + number_of(given_digits[1::2], base)
    assert number_of([*kept, carries[-1]], base) == total
    for place, (carry, digit) in enumerate(zip(carries, kept, strict=True)):
        a, b, before = given_digits[2 * place], given_digits[2 * place + 1], carries[place - 1] if place else 0
        assert carry * base + digit == a + b + before


def test_answer_of_the_example_in_the_documentation() -> None:
    prompt = (OF_ADDITION.bos, *OF_ADDITION.encode("785690__="))
    assert addition(4, base=10).answer(prompt) == (*OF_ADDITION.encode("151210"), OF_ADDITION.eos)


ADDED = [
    ("exact", "151210.", 1.0),
    ("end token missing", "151210", 6 / 7),
    ("carry forgotten: only that digit is wrong", "151110.", 6 / 7),
    ("ends early", "1512.", 4 / 7),
    ("goes on behind the last place", "151210000.", 6 / 10),
    ("shifted by one", "0151210.", 0.0),
    ("nothing", "", 0.0),
]


@pytest.mark.parametrize(("response", "reward"), [row[1:] for row in ADDED], ids=[row[0] for row in ADDED])
def test_reward_of_addition(response: str, reward: float) -> None:
    prompt = (OF_ADDITION.bos, *OF_ADDITION.encode("785690__="))
    tokens = tuple(OF_ADDITION.eos if c == "." else OF_ADDITION.ids[c] for c in response)
    assert addition(4, base=10).reward(prompt, tokens) == pytest.approx(reward)


@given(number=numbers, place=st.integers(min_value=0), wrong=st.integers(min_value=0, max_value=15))
def test_only_the_exact_answer_has_full_reward(number: int, place: int, wrong: int) -> None:
    made = addition()
    prompt = made.prompt(number).tokens
    answer = made.answer(prompt)
    assert made.reward(prompt, answer) == 1.0
    place %= len(answer)
    other = (*answer[:place], wrong, *answer[place + 1 :])
    assert (made.reward(prompt, other) == 1.0) == (other == answer)
    assert made.reward(prompt, answer[:place]) < 1.0 and made.reward(prompt, (*answer, wrong)) < 1.0


def test_most_answers_are_short_and_some_are_long() -> None:
    made = addition(12)
    places = Counter((len(made.answer(made.prompt(n).tokens)) - 1) // 2 for n in range(4000))
    assert set(places) == set(range(1, 13))
    assert places.most_common(1)[0][0] == 1
    expected = {k: 4000 / k / sum(1 / j for j in range(1, 13)) for k in range(1, 13)}
    assert sum((places[k] - e) ** 2 / e for k, e in expected.items()) < 31.3  # chi-square, 11 degrees, 0.1 %
