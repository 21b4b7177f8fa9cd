"""The child process of environments: live ones, replays, and whatever the user's code does is never an observation."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.data import EnvironmentConfig
from rolecall.core.errors import ConfigError, EnvironmentFailed
from rolecall.rl_runtime.tasks import user_process
from rolecall.rl_runtime.tasks.environments.interface import Step
from rolecall.rl_runtime.tasks.environments.process import (
    IDLE_SECONDS,
    EnvironmentProcess,
    Played,
    Script,
    _Player,
    load_environment,
)
from tests.support import eventually

GAMES = """
import asyncio, os, sys, time
from rolecall.environment import Step

MADE = []

class Game:
    def __init__(self):
        MADE.append(self)

    async def reset(self, prompt, seed):
        if prompt == "raise":
            raise KeyError("no such prompt")
        self.total = seed
        return [{"role": "user", "content": f"start {seed}"}] if seed else None

    async def step(self, response):
        match response:
            case "raise": raise KeyError("the tool's answer")
            case "wait": await asyncio.sleep(600)
            case "hang": time.sleep(600)
            case "exit": os._exit(3)
            case "kill": os.kill(os.getpid(), 9)
            case "leave": sys.exit(5)
            case "nan": return Step("", float("nan"))
            case "text": return "no step"
            case "made": return Step(str(len(MADE)))
            case "meet":
                MEETING.append(self)
                while len(MEETING) < 2:
                    await asyncio.sleep(0.01)
        self.total += len(response)
        return Step(f"{response} {self.total}", reward=len(response), done=response == "stop")

MEETING = []

class Plain:
    def reset(self, **given):
        self.given = sorted(given)
        return "go"

    def step(self, response):
        return Step(f"{response} {','.join(self.given)}")

class Board:
    def reset(self, metadata):
        self.cells = metadata["cells"]

    def step(self, response):
        self.cells.append(response)
        return Step(" ".join(self.cells))

class Strange(Plain):
    def reset(self, prompts):
        pass

class Half:
    def reset(self):
        pass

class Deaf:
    def reset(self):
        pass

    def step(self):
        return Step("what?")
"""


def script(*responses: str, key: str = "a", seed: int = 0, prompt: str = "hello") -> Script:
    arguments: dict[str, Any] = {"prompt": prompt, "answer": "4", "metadata": {}, "seed": seed}
    return Script(key=key, arguments=arguments, responses=responses)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "games.py").write_text(GAMES)
    return tmp_path / "games.py"


@pytest.fixture
def process(file: Path) -> Any:
    made = EnvironmentProcess(EnvironmentConfig(factory=f"{file}:Game", timeout_seconds=2.0))
    yield made
    made.close()


def kind(result: Played | EnvironmentFailed) -> str:
    assert isinstance(result, EnvironmentFailed)
    return result.kind


def seen(result: Played | EnvironmentFailed) -> list[str]:
    assert isinstance(result, Played), result
    return [step.observation for step in result.steps]


def test_a_conversation_goes_on_where_it_was_and_a_lost_one_is_replayed(process: EnvironmentProcess) -> None:
    assert process.play([script(seed=3), script(key="b")]) == [
        Played(opening=[{"role": "user", "content": "start 3"}], steps=()),
        Played(opening=None, steps=()),
    ]
    (one,) = process.play([script("ab", "made", seed=3)])
    assert isinstance(one, Played)
    assert one.steps == (Step("ab 5", 2.0), Step("2")), "two conversations, two environments"
    assert seen(process.play([script("ab", "made", "stop", seed=3)])[0]) == ["ab 5", "2", "stop 9"]
    process.close()
    (again,) = process.play([script("ab", "stop", seed=3)])
    assert isinstance(again, Played) and again.steps == (Step("ab 5", 2.0), Step("stop 9", 4.0, done=True))


def test_a_conversation_that_was_generated_again_gets_an_environment_of_its_own(process: EnvironmentProcess) -> None:
    assert seen(process.play([script("ab", "cd")])[0]) == ["ab 2", "cd 4"]
    assert seen(process.play([script("ab", "efg")])[0]) == ["ab 2", "efg 5"]
    assert seen(process.play([script("ab")])[0]) == ["ab 2"]


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("raise", "KeyError"),
        ("text", "TypeError"),
        ("nan", "ValueError"),
        ("wait", "no answer in time"),
    ],
)
def test_a_failure_of_one_conversation_leaves_the_others(process: EnvironmentProcess, response: str, why: str) -> None:
    process.play([script("ab", key="b"), script("ab", key="c")])
    pid = process.pid
    first, failed, last = process.play([script("x", key="c"), script(response), script("ab", "cd", key="b")])
    assert isinstance(failed, EnvironmentFailed) and failed.is_alone
    assert kind(failed) == why and seen(last) == ["ab 2", "cd 4"] and seen(first) == ["x 1"]
    assert process.pid == pid, "of the same process"
    assert kind(process.play([script(prompt="raise")])[0]) == "KeyError"


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("hang", "no answer in time"),
        ("exit", r"its process ended \(exit code 3\)"),
        ("kill", r"its process ended \(signal SIGKILL\)"),
        ("leave", r"its process ended \(exit code \d\)"),
    ],
)
def test_an_environment_that_ends_its_process_fails_and_others_are_replayed(
    process: EnvironmentProcess, response: str, why: str
) -> None:
    process.play([script("ab", key="b")])
    (failed,) = process.play([script(response)])
    assert isinstance(failed, EnvironmentFailed) and failed.is_alone and re.fullmatch(why, failed.kind)
    assert seen(process.play([script("ab", "cd", key="b")])[0]) == ["ab 2", "cd 4"]
    together = process.play([script("wait", key="c"), script(response), script("wait", key="d")])
    assert all(isinstance(f, EnvironmentFailed) and not f.is_alone for f in together), "who was it?"


def test_async_environments_are_played_at_the_same_time(process: EnvironmentProcess) -> None:
    assert [seen(r) for r in process.play([script("meet"), script("meet", key="b")])] == [["meet 4"], ["meet 4"]]


def test_responses_behind_the_end_are_those_of_another_course(process: EnvironmentProcess) -> None:
    (failed,) = process.play([script("stop", "ab")])
    assert isinstance(failed, EnvironmentFailed) and failed.is_final
    assert failed.kind == "environment is not deterministic"


def test_methods_need_not_be_async_and_get_what_they_name(file: Path) -> None:
    process = EnvironmentProcess(EnvironmentConfig(factory=f"{file}:Plain"))
    try:
        (played,) = process.play([script("ab")])
        assert isinstance(played, Played)
        assert played.opening == "go" and seen(played) == ["ab answer,metadata,prompt,seed"]
    finally:
        process.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.at_all:Game", "environment.factory: nowhere.at_all cannot be imported: ModuleNotFoundError"),
        ("{file}:Missing", "environment.factory: Missing is not there in "),
        ("{file}:Half", "Half has no method step"),
        ("{file}:Deaf", "Deaf: step gets the response and nothing else: too many positional arguments"),
        ("{file}:Strange", "the parameters of reset may be prompt, answer, metadata, seed; it has prompts"),
        ("Game", "expected `package.module:Class`, `FILE.py:Class`"),
    ],
)
def test_what_is_no_environment_is_refused(file: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        load_environment(name.format(file=file))
    with pytest.raises(ConfigError):
        EnvironmentProcess(EnvironmentConfig(factory=name.format(file=file))).play([script()])


CLOSING = """
from pathlib import Path
from rolecall.environment import Step

LOG = Path(__file__).with_suffix(".log")

class Game:
    def reset(self, prompt):
        self.prompt = prompt

    async def step(self, response):
        if response == "raise":
            raise KeyError(response)
        return Step(response)

    async def close(self):
        with LOG.open("a") as f:
            f.write(self.prompt + " ")

class Sync(Game):
    def close(self):
        with LOG.open("a") as f:
            f.write(self.prompt + " ")
        raise ValueError("not closed")
"""


@pytest.mark.parametrize("name", ["Game", "Sync"])
def test_an_environment_is_closed_once_its_conversation_is_scored_or_failed(tmp_path: Path, name: str) -> None:
    file, log = tmp_path / "closing.py", tmp_path / "closing.log"
    file.write_text(CLOSING)
    process = EnvironmentProcess(EnvironmentConfig(factory=f"{file}:{name}"))
    process.end(["a"])
    assert process.pid == 0, "no process is started to end something"
    try:
        process.play([script("ab", key=key, prompt=key) for key in ("a", "b", "c")])
        process.end(["a", "c", "of another worker"])
        process.play([script("ab", "raise", key="d", prompt="d"), script("ab", "cd", key="b", prompt="b")])
        eventually(lambda: sorted(log.read_text().split()) == ["a", "c", "d"], "they are closed")
        (again,) = process.play([script("ab", key="a", prompt="a")])
        assert isinstance(again, Played), "it is replayed when it is needed again"
    finally:
        process.close()


def test_what_an_environment_changes_of_its_row_the_others_of_the_group_do_not_see(file: Path) -> None:
    process = EnvironmentProcess(EnvironmentConfig(factory=f"{file}:Board"))
    shared = {"metadata": {"cells": ["x"]}}
    try:
        played = process.play([Script(key=key, arguments=shared, responses=(key,)) for key in ("a", "b")])
        assert [seen(p) for p in played] == [["x a"], ["x b"]]
    finally:
        process.close()


def test_an_environment_that_nobody_needs_any_more_ends() -> None:
    closed: list[str] = []

    class Closing:
        def reset(self, prompt: str) -> None:
            self.prompt = prompt

        def step(self, response: str) -> Step:
            return Step(response)

        def close(self) -> None:
            closed.append(self.prompt)

    now = 0.0
    player = _Player(Closing, ["prompt"], lambda: None, lambda: now)

    async def play(*keys: str) -> None:
        for key in keys:
            await player.play(script("ab", key=key, prompt=key), 1.0)
        await player.end([])

    asyncio.run(play("dropped", "scored later"))
    now = IDLE_SECONDS - 1
    asyncio.run(play("scored later"))
    now = IDLE_SECONDS + 1
    asyncio.run(play("new"))
    assert closed == ["dropped"]


SLOW = """
import time
from rolecall.environment import Step

class Slow:
    def reset(self): pass
    def step(self, response): return Step(response)
    def close(self): time.sleep(SECONDS)
"""


def test_environments_that_take_long_to_close_do_not_end_the_process(tmp_path: Path) -> None:
    """Each within the deadline, all together far beyond it."""
    file = tmp_path / "slow.py"
    file.write_text(f"SECONDS = 0.4\n{SLOW}")
    process = EnvironmentProcess(EnvironmentConfig(factory=f"{file}:Slow", timeout_seconds=1.0))
    keys = [f"{n}" for n in range(12)]
    try:
        process.play([script("ab", key=key) for key in keys])
        before = process.pid
        process.end(keys)
        (played,) = process.play([script("ab", key="next")])
        assert isinstance(played, Played) and process.pid == before
    finally:
        process.close()


def test_a_child_that_reads_nothing_does_not_block_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_process, "SEND_SECONDS", 0.5)
    file = tmp_path / "slow.py"
    file.write_text(f"SECONDS = 600\n{SLOW}")
    process = EnvironmentProcess(EnvironmentConfig(factory=f"{file}:Slow"))
    try:
        process.play([script("ab", key="a")])
        process.end(["a"])  # it hangs in `close`
        with pytest.raises(EnvironmentFailed, match="its process ended"):
            process.play([script("a" * 1_000_000, key="b")])
        (played,) = process.play([script("ab", key="b")])
        assert isinstance(played, Played)
    finally:
        process.close()
