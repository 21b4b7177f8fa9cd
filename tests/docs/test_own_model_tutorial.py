"""docs/tutorial-own-model.md: the files that it writes, taken from the page, are used as they stand there.

Its data script runs, its job file loads, a task reads the dataset, and the reward function gives the rewards that the
page names. A tiny model folder stands in for the real one, whose tokenizer is not needed.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.core.config.job import JobConfig, load_job
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.tasks.dataset_task import DatasetTask
from rolecall.rl_runtime.tasks.rewards.functions import Answer
from rolecall.rl_runtime.tasks.rewards.process import RewardProcess
from tests.docs.pages import ROOT
from tests.rl_runtime.chat_model import write_chat_model

PAGE = (ROOT / "docs" / "tutorial-own-model.md").read_text()
_FILE = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", re.DOTALL | re.MULTILINE)
_SED = re.compile(r"-e 's/([^/]+)/([^/]+)/'")
_TRIAL = re.compile(r"short_and_right\('([^']*)', '([^']*)'\)")


def written_by(page: str, folder: Path) -> Path:
    """Writes the page's files into `folder`, with a model folder, and runs its data script."""
    for name, text in _FILE.findall(page):
        (folder / name).write_text(text)
    write_chat_model(folder / "model")
    subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written_by(PAGE, tmp_path)


def task_of(folder: Path, name: str = "job.yaml") -> tuple[JobConfig, DatasetTask]:
    job = load_job(folder / name)
    task = DatasetTask(job)
    task.check(rows=256)
    return job, task


def test_every_file_of_the_tutorial_is_there() -> None:
    assert [name for name, _ in _FILE.findall(PAGE)] == ["make_data.py", "rewards.py", "job.yaml", "ask.py"]
    for name, text in _FILE.findall(PAGE):
        if name.endswith(".py"):
            compile(text, name, "exec")


def test_job_file_and_dataset_load(folder: Path) -> None:
    job, task = task_of(folder)
    assert job.injection_allowed and job.lora is not None
    assert (task.num_rows, task.num_held_out(None)) == (32, 16)
    trained, held_out = ((folder / name).read_text().splitlines() for name in ("train.jsonl", "test.jsonl"))
    assert not set(trained) & set(held_out), "no question is in both files"
    assert "32 questions in train.jsonl\n16 questions in test.jsonl\n" + "\n".join(trained[:2]) in PAGE


def test_the_reward_is_what_the_page_says(folder: Path) -> None:
    job, _ = task_of(folder)
    assert job.reward is not None
    tried = _TRIAL.findall(PAGE)
    answers = [Answer(prompt="", response=response, answer=answer, metadata={}) for response, answer in tried]
    process = RewardProcess(job.reward)
    try:
        rewards = process.score(answers)
    finally:
        process.close()
    assert rewards == [1.0, 0.25, 0.0]
    assert f"```text\n{' '.join(map(str, rewards))}\n```" in PAGE


def test_the_mistakes_are_refused_as_the_page_says(folder: Path) -> None:
    text = (folder / "job.yaml").read_text()
    for old, new in _SED.findall(PAGE):
        assert old in text
        text = text.replace(old, new)
    (folder / "wrong.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        task_of(folder, "wrong.yaml")
    reward = load_job(folder / "wrong.yaml").reward
    assert reward is not None
    process = RewardProcess(reward)
    with pytest.raises(ConfigError) as refused:
        process.start()
    process.close()
    for reason in (*caught.value.problems, *refused.value.problems):
        assert reason.partition(" in /")[0] in PAGE


def test_a_page_with_a_wrong_column_or_a_wrong_reward_is_noticed(tmp_path: Path) -> None:
    page = PAGE.replace("prompt: question ", "prompt: query ").replace("1 / len(words)", "1 - len(words)")
    folder = written_by(page, tmp_path)
    with pytest.raises(ConfigError, match="row 0 has no column 'query'"):
        task_of(folder)
    (folder / "job.yaml").write_text((folder / "job.yaml").read_text().replace("prompt: query", "prompt: question"))
    with pytest.raises(AssertionError):
        test_the_reward_is_what_the_page_says(folder)
