"""A dataset with an environment: what the model reads between its answers, rewards, and the checks before the start."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rolecall.core.config.job import JobConfig, load_job, parse_job
from rolecall.core.errors import ConfigError, EnvironmentFailed
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.protocol.messages import (
    ENVIRONMENT_VERSION,
    Conversation,
    Observation,
    PromptGroup,
    TrainingSample,
)
from rolecall.rl_runtime.tasks.check import problems_of
from rolecall.rl_runtime.tasks.environment_task import EnvironmentTask, turns
from rolecall.rl_runtime.tasks.reward_worker import RewardWorker
from rolecall.rl_runtime.tasks.task import group_id, held_out_id
from tests.rl_runtime.chat_model import TEMPLATE, WORDS, write_chat_model
from tests.support import eventually

ROWS = [{"prompt": f"say {n}", "answer": str(n)} for n in range(5)]
GAMES = """
import itertools
from rolecall.environment import Step

class Game:
    async def reset(self, prompt, answer):
        self.answer = answer
        if answer == "4":
            raise ValueError("no game of 4")
        return "please" if answer == "1" else None

    async def step(self, response):
        if response == self.answer:
            return Step("", reward=1.0, done=True)
        return Step(f"no {response}", reward=-0.25)

COUNT = itertools.count(1)

class Random(Game):
    async def step(self, response):
        return Step(str(next(COUNT)))

class Broken(Game):
    def reset(self):
        raise KeyError("nothing begins")
"""
REWARD = "def long(response):\n    return len(response.split())\n"
STARTS = "<bos> assistant"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chat_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "games.py").write_text(GAMES)
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def job_of(folder: Path, environment: Any = "Game", *, data: Any = None, **sections: Any) -> JobConfig:
    if isinstance(environment, str):
        environment = {"factory": f"{folder / 'games.py'}:{environment}"}
    values = {"path": str(folder / "train.jsonl"), "answer": "answer", "shuffle": False, "max_response_tokens": 30}
    value: dict[str, Any] = {"model": {"path": str(folder / "model")}, "data": {**values, **(data or {})}}
    return parse_job({**value, "environment": environment, **sections})


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in text.split())


def words(tokens: tuple[int, ...]) -> str:
    return " ".join(WORDS[t] for t in tokens)


def talk(number: int, *parts: str, sample: int = 0) -> Conversation:
    """Of the environment's tokens and the model's, in turn."""
    runs = [tokens_of(part) for part in parts]
    versions = [(0 if n % 2 else ENVIRONMENT_VERSION,) * len(run) for n, run in enumerate(runs)]
    group = group_id(number)
    return Conversation(
        request_id=f"{group}.{sample}", group_id=group, tokens=sum(runs, ()), versions=sum(versions, ())
    )


def group_of(*talks: Conversation) -> PromptGroup:
    samples = tuple(
        TrainingSample(
            request_id=t.request_id, tokens=t.tokens, logprobs=(0.0,) * len(t.tokens), versions=t.versions, reward=0.0
        )
        for t in talks
    )
    return PromptGroup(group_id=talks[0].group_id, prompt_tokens=(1,), samples=samples)


@pytest.fixture
def worker(folder: Path) -> RewardWorker:
    return RewardWorker(replica=ReplicaId("reward/0"), incarnation=1, job=job_of(folder))


def test_a_held_out_prompt_has_the_same_seed_in_every_evaluation(folder: Path) -> None:
    task = EnvironmentTask(job_of(folder))

    def seed(group: str) -> int:
        return task._seed(group)

    assert len({seed(held_out_id(version, 3)) for version in (0, 10, 20)}) == 1
    assert len({seed(g) for g in (held_out_id(0, 3), held_out_id(0, 4), group_id(3), group_id(8))}) == 4


def test_a_scored_conversation_leaves_no_environment(folder: Path) -> None:
    with (folder / "games.py").open("a") as f:
        f.write(CLOSING)
    for sections in ({}, {"reward": f"{folder / 'mine.py'}:long"}):
        (folder / "closed").unlink(missing_ok=True)
        task = EnvironmentTask(job_of(folder, "Closing", **sections))
        (opening,) = task.observe([talk(2)])
        assert words(opening.tokens) == STARTS
        task.rewards(group_of(talk(2, STARTS, "2 <end>")))
        eventually(lambda: (folder / "closed").exists(), "its environment is closed")
        task._environments.close()


CLOSING = """
from pathlib import Path

class Closing(Game):
    def close(self):
        Path(__file__).with_name("closed").write_text("")
"""


def test_turns_are_the_runs_of_marked_and_unmarked_tokens() -> None:
    whole = talk(0, "please", "1 <end>", "no", "2 3")
    assert turns(whole.tokens, whole.versions) == ([tokens_of("please"), tokens_of("no")], [(11, 2), (12, 13)])
    bare = talk(0, "", "1 <end>", "no")
    assert turns(bare.tokens, bare.versions) == ([(), tokens_of("no")], [(11, 2)])
    assert turns((), ()) == ([], [])


def test_the_model_reads_the_template_between_its_answers(folder: Path, worker: RewardWorker) -> None:
    task = EnvironmentTask(job_of(folder))
    assert words(task.prompt(2).tokens) == "<bos> user say 2 <end>", "the answer begins with the environment's opening"
    opening = [talk(2), talk(1)]
    plain, more = worker.observe(1, opening)
    assert words(plain.tokens) == STARTS and words(more.tokens) == f"<bos> user please <end> {STARTS}"
    ended, cut = worker.observe(
        1, [talk(2, STARTS, "3 <end>"), talk(1, f"<bos> user please <end> {STARTS}", "3 no 5", sample=1)]
    )
    assert words(ended.tokens) == f"<bos> user no 3 <end> {STARTS}", "the answer has its end already"
    assert words(cut.tokens) == f"<end> <bos> user no 3 no 5 <end> {STARTS}", "a stop text ended it"
    between = f"<bos> user no 3 <end> {STARTS}"
    assert worker.observe(1, [talk(2, STARTS, "3 <end>", between, "2 <end>")]) == [Observation(done=True)]


CHAT_ML = (
    "{% if messages[0]['role'] != 'system' %}<bos>system\nplease<end>\n{% endif %}"
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, CHAT_ML])
@pytest.mark.parametrize("number", [1, 2])
def test_what_the_model_reads_is_the_rendered_chat(folder: Path, template: str, number: int) -> None:
    model = write_chat_model(folder / "model", template=template)
    task = EnvironmentTask(job_of(folder))
    answers, messages = ["3 no <end>", "4 <end>"], [{"role": "user", "content": ROWS[number]["prompt"]}]
    if number == 1:
        messages.append({"role": "user", "content": "please"})
    parts: list[str] = []
    for answer in answers:
        (observation,) = task.observe([talk(number, *parts)])
        parts += [words(observation.tokens), answer]
        said = answer.removesuffix(" <end>")
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"no {said}"}]
    read = (*task.prompt(number).tokens, *talk(number, *parts).tokens)
    whole = AutoTokenizer.from_pretrained(model).apply_chat_template(messages[:-1], return_dict=False)
    assert read == tuple(whole)


def test_text_as_it_stands_has_no_roles(folder: Path) -> None:
    job = job_of(folder, data={"chat_template": False})
    worker = RewardWorker(replica=ReplicaId("reward/0"), incarnation=1, job=job)
    assert words(EnvironmentTask(job).prompt(1).tokens) == "say 1"
    assert worker.observe(1, [talk(2), talk(1)]) == [Observation(), Observation(tokens=tokens_of("please"))]
    assert worker.observe(1, [talk(2, "", "3")]) == [Observation(tokens=tokens_of("no 3"))]


def test_a_reward_is_the_sum_of_the_steps_of_the_whole_conversation(worker: RewardWorker) -> None:
    between = f"<bos> user no 3 <end> {STARTS}"
    won = talk(2, STARTS, "3 <end>", between, "2 <end>")
    lost = talk(2, STARTS, "3 <end>", between, "5 5", sample=1)
    assert worker.score(1, [group_of(won, lost)]) == [[0.75, -0.5]], "of a lost worker, too: all is replayed"


def test_a_function_gets_the_whole_conversation(folder: Path) -> None:
    job = job_of(folder, reward=f"{folder / 'mine.py'}:long")
    worker = RewardWorker(replica=ReplicaId("reward/0"), incarnation=1, job=job)
    between = f"<bos> user no 3 <end> {STARTS}"
    assert worker.score(1, [group_of(talk(2, STARTS, "3 <end>", between, "2 <end>"))]) == [[7.0]]


def test_a_replay_that_gives_other_observations_fails_and_has_no_reward(folder: Path) -> None:
    made = [RewardWorker(replica=ReplicaId(f"reward/{n}"), incarnation=1, job=job_of(folder, "Random")) for n in (0, 1)]
    first, second = made
    second.observe(1, [talk(3, STARTS, "5 <end>")])  # so that its numbers are others
    (one,) = first.observe(1, [talk(2, STARTS, "3 <end>")])
    assert words(one.tokens) == f"<bos> user 1 <end> {STARTS}"
    more = talk(2, STARTS, "3 <end>", words(one.tokens), "4 <end>")
    (failed,) = second.observe(1, [more])
    assert (failed.failure, failed.is_final) == ("environment is not deterministic", True)
    assert first.observe(1, [more])[0].tokens == tokens_of(f"<bos> user 2 <end> {STARTS}"), "the live one goes on"
    with pytest.raises(EnvironmentFailed, match="a replay of the conversation gave other observations"):
        second.score(1, [group_of(more)])


def test_a_failure_of_one_conversation_is_a_word_for_the_ledger(worker: RewardWorker) -> None:
    failed, fine = worker.observe(1, [talk(4), talk(2)])
    assert failed == Observation(failure="ValueError") and words(fine.tokens) == STARTS


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"environment": "Broken"}, "environment.factory: KeyError: 'nothing begins'"),
        ({"environment": "Missing"}, "environment.factory: Missing is not there in "),
        ({"environment": {"factory": "nowhere:Game"}}, "environment.factory: nowhere cannot be imported"),
        ({"data": {"path": "nowhere.jsonl"}}, "data.path: "),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    folder: Path, change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("_check_model", "_check_lengths", "_check_memory"):
        monkeypatch.setattr(f"rolecall.rl_runtime.tasks.check.{other}", lambda *_: "")
    (problem,) = problems_of(job_of(folder, **change))[0]
    assert problem.startswith(why)
    assert problems_of(job_of(folder))[0] == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"environment": "a:B"}, "environment: no meaning without data"),
        ({"model": {"path": "m"}, "data": {"path": "x"}}, "data: needs reward or environment"),
        (
            {
                "model": {"path": "m"},
                "data": {"path": "x"},
                "environment": "a:B",
                "algorithm": {"name": "ppo", "group_size": 1},
            },
            "environment: the critic of ppo values single answers",
        ),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(value: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_job(value)


def test_paths_start_at_the_job_file(folder: Path) -> None:
    text = "model: {path: model}\ndata: {path: train.jsonl}\nenvironment: games.py:Game\n"
    (folder / "job.yaml").write_text(text)
    environment = load_job(folder / "job.yaml").environment
    assert environment is not None and environment.factory == f"{folder / 'games.py'}:Game"
