"""pytest tests/rl_runtime/test_task.py"""

import json
from pathlib import Path

import pytest

from rolecall.core.config import ModelConfig, TaskConfig
from rolecall.core.errors import BadId, ConfigError
from rolecall.rl_runtime.model import write_model_folder
from rolecall.rl_runtime.task import DigitParity, group_id, group_number, make_task
from rolecall.rl_runtime.tokenizer import CHARACTERS, folder_vocabulary, local_vocabulary

VOCAB = local_vocabulary()
TINY = ModelConfig(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)


def task(num_digits: int = 3, seed: int = 0) -> DigitParity:
    return make_task(TaskConfig(num_digits=num_digits), VOCAB, seed)


def test_prompts_are_made_from_seed_and_number_alone() -> None:
    assert task().prompt(7) == task().prompt(7)
    assert task().prompt(7).group_id == "g00000007"
    prompts = {task(12, seed).prompt(number).tokens for seed in range(3) for number in range(50)}
    assert len(prompts) == 150
    tokens = task().prompt(7).tokens
    assert tokens[0] == VOCAB.bos
    assert VOCAB.decode(tokens[1:]) == task().digits(7) + "="


def test_prompt_of_this_seed_and_number_stays_the_same_over_versions() -> None:
    assert task(12).digits(0) == "746436276472"


def test_group_numbers_round_trip() -> None:
    assert [group_number(group_id(n)) for n in (0, 7, 10**9)] == [0, 7, 10**9]
    for bad in ("", "g", "g7", "x00000007", "g0000000x", "g-0000007"):
        with pytest.raises(BadId):
            group_number(bad)
    with pytest.raises(BadId):
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
        assert len(answer) <= task(12).max_new_tokens
        assert task(12).reward(prompt, answer) == 1.0
        for place in range(len(answer)):
            wrong = (*answer[:place], VOCAB.pad, *answer[place + 1 :])
            assert task(12).reward(prompt, wrong) < 1.0


def test_folder_brings_its_own_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_model_folder(tmp_path, TINY, seed=0)
    assert folder_vocabulary(tmp_path) == VOCAB
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tuple(tokenizer.encode(CHARACTERS).ids) == VOCAB.encode(CHARACTERS)
    assert tokenizer.decode(list(VOCAB.encode(CHARACTERS))) == CHARACTERS


def test_folder_that_cannot_be_used_says_why(tmp_path: Path) -> None:
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
