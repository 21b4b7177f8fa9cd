"""The child process of a reward worker: whatever the user's function does is never a reward and ends in time."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rolecall.core.config.data import RewardConfig
from rolecall.core.errors import ConfigError, RewardFailed
from rolecall.rl_runtime.tasks.rewards.functions import Answer
from rolecall.rl_runtime.tasks.rewards.process import RewardProcess
from tests.support import eventually

FUNCTIONS = """
import multiprocessing, os, subprocess, sys, time

def score(response):
    if response == "raise":
        raise KeyError("the tool's answer")
    if response == "hang":
        time.sleep(600)
    if response == "exit":
        os._exit(3)
    if response == "kill":
        os.kill(os.getpid(), 9)
    if response == "start":
        subprocess.Popen(["sleep", "601"])
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(602,)).start()
        time.sleep(600)
    if response == "leave":
        sys.exit(5)
    return len(response)

def tests_passed(response, metadata):
    metadata["tests"].pop()
    return len(metadata["tests"])
"""


def answer(response: str) -> Answer:
    return Answer(prompt="", response=response, answer=None, metadata={})


@pytest.fixture
def process(tmp_path: Path) -> RewardProcess:
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    return RewardProcess(RewardConfig(function=f"{file}:score", timeout_seconds=2.0))


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        ("raise", "KeyError"),
        ("hang", "no answer in time"),
        ("exit", r"its process ended \(exit code 3\)"),
        ("kill", r"its process ended \(signal SIGKILL\)"),
        ("leave", r"its process ended \(exit code 5\)"),
    ],
)
def test_a_failure_is_no_reward_and_the_next_group_is_scored(process: RewardProcess, response: str, kind: str) -> None:
    try:
        assert process.score([answer("ab"), answer("abc")]) == [2.0, 3.0]
        with pytest.raises(RewardFailed) as failed:
            process.score([answer("ab"), answer(response)])
        assert failed.match("reward function: ")
        assert re.fullmatch(kind, failed.value.kind)
        assert process.score([answer("abcd")]) == [4.0]
    finally:
        process.close()


def test_what_the_function_started_ends_with_it(process: RewardProcess) -> None:
    try:
        assert process.score([answer("ab")]) == [2.0]
        group = os.getpgid(process.pid)
        assert group != os.getpgid(0)
        with pytest.raises(RewardFailed, match="no answer within 2 s"):
            process.score([answer("start")])
        eventually(lambda: not members(group), "nothing of it is left")
    finally:
        process.close()


OWNER = """
import sys
from rolecall.core.config.data import RewardConfig
from rolecall.rl_runtime.tasks.rewards.functions import Answer
from rolecall.rl_runtime.tasks.rewards.process import RewardProcess

if __name__ == "__main__":
    process = RewardProcess(RewardConfig(function=sys.argv[1], timeout_seconds=600))
    process.start()
    print(process.pid, flush=True)
    process.score([Answer(prompt="", response="hang", answer=None, metadata={})])
"""


def test_a_function_that_hangs_does_not_outlive_a_killed_worker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "owner.py").write_text(OWNER)
    argv = [sys.executable, str(tmp_path / "owner.py"), f"{tmp_path / 'mine.py'}:score"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        try:
            assert members(group) == [group]
            owner.kill()
            eventually(lambda: not members(group), "its child is gone")
        finally:
            owner.kill()


def members(group: int) -> list[int]:
    """Processes of a group that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def test_a_function_that_cannot_be_imported_is_reported_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match=r"broken.py cannot be imported: ModuleNotFoundError: .*nothing_of_this_name"):
        RewardProcess(RewardConfig(function=f"{file}:score")).start()


def test_what_a_function_changes_of_one_sample_the_others_of_the_group_do_not_see(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    shared = {"tests": [1, 2, 3]}
    group = [Answer(prompt="p", response="r", answer=None, metadata=shared) for _ in range(2)]
    process = RewardProcess(RewardConfig(function=f"{tmp_path / 'rewards.py'}:tests_passed"))
    try:
        assert process.score(group) == [2.0, 2.0]
    finally:
        process.close()
