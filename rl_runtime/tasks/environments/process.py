"""The user's environments in a child process of the reward worker (`user_process.py`): live ones by conversation, and a
replay for every conversation that has none there.

Conversations of one call are played at the same time where `reset` and `step` are `async`, else one after the other.
None of their failures is ever an observation or a reward.
"""

import asyncio
import copy
import inspect
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any, Final

from rolecall.core.config.data import EnvironmentConfig
from rolecall.core.errors import ConfigError, EnvironmentFailed
from rolecall.rl_runtime.tasks.environments.interface import Opening, Step
from rolecall.rl_runtime.tasks.rewards.functions import imported
from rolecall.rl_runtime.tasks.user_process import UserProcess

logger = logging.getLogger(__name__)

SETTING: Final = "environment.factory"
LIVE_MAX: Final = 1024
"""Environments that are kept, at most until their conversations are scored; the one that was idle for longest is
replayed when it is needed again."""
IDLE_SECONDS: Final = 3600.0
"""After so long without a response an environment ends: its group may have been dropped without being scored."""
GRACE_SECONDS: Final = 1.0
"""Beyond its deadline, for an `async` call to fail by itself before the whole process is ended."""
CLOSE_SECONDS: Final = 1.0
"""For an `async` method `close`."""
ARGUMENTS: Final = ("prompt", "answer", "metadata", "seed")
NOT_DETERMINISTIC: Final = "environment is not deterministic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A conversation to play: with which arguments it begins, and what the model responded."""

    key: str  # equal for the same conversation
    arguments: Mapping[str, Any]  # those of `reset`
    responses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One step for each response."""

    opening: Opening
    steps: tuple[Step, ...]


class EnvironmentProcess(UserProcess):
    """One child, started at the first use. Not for several threads."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(_serve, config.factory, EnvironmentFailed)
        self._config = config

    def play(self, scripts: Sequence[Script]) -> list[Played | EnvironmentFailed]:
        """The result of each script, in order.

        Raises:
            ConfigError: the class cannot be used.
            EnvironmentFailed: the process did not start.
        """
        self._send((list(scripts), self._config.timeout_seconds, []))
        results: dict[int, Played | EnvironmentFailed] = {}
        try:
            while len(results) < len(scripts):
                seconds = self._config.timeout_seconds + GRACE_SECONDS + CLOSE_SECONDS
                found = self._receive(seconds, f"{len(scripts) - len(results)} conversations")
                if found is not None:  # else one more step is done
                    number, result = found
                    results[number] = result
        except EnvironmentFailed as e:
            e.is_alone = len(scripts) - len(results) == 1
            return [results.get(n, e) for n in range(len(scripts))]
        return [results[n] for n in range(len(scripts))]

    def end(self, keys: Sequence[str]) -> None:
        """Drops the environments of conversations that have ended. Waits for nothing, and starts no process."""
        if self.pid:
            with suppress(EnvironmentFailed):  # the process has ended: so have they
                self._send(([], self._config.timeout_seconds, list(keys)))


@dataclass(slots=True)
class _Live:
    environment: Any
    opening: Opening = None
    responses: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    used_at: float = 0.0  # monotonic seconds


class _Player:
    """The environments of one child."""

    def __init__(
        self,
        factory: Callable[[], Any],
        wanted: Sequence[str],
        progress: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._factory, self._wanted, self._progress, self._monotonic = factory, wanted, progress, monotonic
        self._live: OrderedDict[str, _Live] = OrderedDict()
        self._dropped: list[Any] = []

    async def play(self, script: Script, seconds: float) -> Played | EnvironmentFailed:
        live = self._live.pop(script.key, None)
        try:
            if live is None or tuple(live.responses) != script.responses[: len(live.responses)]:
                self._drop(live)
                live = _Live(self._factory())
                # The samples of a group share what their row holds, and an environment may change what it gets.
                arguments = copy.deepcopy({name: script.arguments[name] for name in self._wanted})
                live.opening = opening_of(await _done(live.environment.reset(**arguments), seconds))
                self._progress()
            for response in script.responses[len(live.responses) :]:
                if live.steps and live.steps[-1].done:
                    self._drop(live)
                    because = f"it ended after {len(live.steps)} of {len(script.responses)} responses"
                    return EnvironmentFailed(kind=NOT_DETERMINISTIC, because=because, is_final=True)
                live.steps.append(step_of(await _done(live.environment.step(response), seconds)))
                live.responses.append(response)
                self._progress()
        except TimeoutError:
            self._drop(live)
            return EnvironmentFailed(kind="no answer in time", because=f"no answer within {seconds:g} s")
        except Exception as e:  # noqa: BLE001 deliberate: the user's code may raise anything, and it is reported
            self._drop(live)
            return EnvironmentFailed(kind=type(e).__name__, because=f"{type(e).__name__}: {e}")
        live.used_at = self._monotonic()
        self._live[script.key] = live
        return Played(opening=live.opening, steps=tuple(live.steps))

    def _drop(self, live: _Live | None) -> None:
        if live is not None:
            self._dropped.append(live.environment)

    async def end(self, keys: Sequence[str]) -> None:
        """Drops these environments, idle ones, and those beyond `LIVE_MAX`; closes all that were dropped."""
        since = self._monotonic() - IDLE_SECONDS
        for key in [*keys, *(key for key, live in self._live.items() if live.used_at < since)]:
            self._drop(self._live.pop(key, None))
        while len(self._live) > LIVE_MAX:
            self._drop(self._live.popitem(last=False)[1])
        dropped, self._dropped = self._dropped, []
        await asyncio.gather(*map(self._close, dropped))

    async def _close(self, environment: Any) -> None:
        close = getattr(environment, "close", None)
        if not callable(close):
            return
        try:
            await _done(close(), CLOSE_SECONDS)
        except Exception:  # deliberate: the user's code may raise anything, and its conversation has its result already
            logger.warning("close of an environment failed", exc_info=True)
        self._progress()  # it may have taken long, and the next call waits for it


async def _done(value: Any, seconds: float) -> Any:
    return await asyncio.wait_for(value, seconds) if inspect.isawaitable(value) else value


def opening_of(value: Any) -> Opening:
    """Raises TypeError: it is none of what `reset` may return."""
    if value is None or isinstance(value, str):
        return value
    texts = ("role", "content")
    if isinstance(value, Sequence) and all(
        isinstance(m, Mapping) and all(isinstance(m.get(t), str) for t in texts) for m in value
    ):
        return [{t: m[t] for t in texts} for m in value]
    raise TypeError(f"reset returned {value!r:.80}: expected text, messages with `role` and `content`, or None")


def step_of(value: Any) -> Step:
    """Raises TypeError, ValueError: it is not what `step` may return."""
    if not isinstance(value, Step) or not isinstance(value.observation, str) or not isinstance(value.reward, Real):
        raise TypeError(f"step returned {value!r:.80}: expected rolecall.environment.Step of a text and a number")
    if not math.isfinite(value.reward):
        raise ValueError(f"step returned the reward {value.reward}")
    return Step(value.observation, float(value.reward), bool(value.done))


def load_environment(name: str) -> tuple[Callable[[], Any], list[str]]:
    """The class `name`, and which arguments its `reset` takes.

    Raises:
        ConfigError: it cannot be imported, or is no environment.
    """
    factory = imported(name, SETTING, "Class")
    for method in ("reset", "step"):
        if not callable(getattr(factory, method, None)):
            raise ConfigError([f"{SETTING}: {name} has no method {method}"])
    try:
        inspect.signature(factory.step).bind("self", "response")  # type: ignore[attr-defined]
    except TypeError as e:
        raise ConfigError([f"{SETTING}: {name}: step gets the response and nothing else: {e}"]) from e
    parameters = list(inspect.signature(factory.reset).parameters.values())[1:]  # type: ignore[attr-defined]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return factory, list(ARGUMENTS)
    named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    strange = [p.name for p in named if p.name not in ARGUMENTS and p.default is p.empty]
    if strange:
        got = f"it has {', '.join(strange)}"
        raise ConfigError([f"{SETTING}: {name}: the parameters of reset may be {', '.join(ARGUMENTS)}; {got}"])
    return factory, [p.name for p in named if p.name in ARGUMENTS]


def _serve(connection: Connection, name: str) -> None:
    try:
        factory, wanted = load_environment(name)
    except ConfigError as e:
        connection.send(str(e))
        return
    player = _Player(factory, wanted, lambda: connection.send(None))
    connection.send(None)
    with asyncio.Runner() as runner:  # one loop for all calls: environments may keep connections open
        while True:
            try:
                scripts, seconds, ended = connection.recv()
            except EOFError:
                return
            runner.run(_play(player, scripts, seconds, connection))
            runner.run(player.end(ended))


async def _play(player: _Player, scripts: Sequence[Script], seconds: float, connection: Connection) -> None:
    async def one(number: int, script: Script) -> None:
        connection.send((number, await player.play(script, seconds)))

    await asyncio.gather(*(one(n, script) for n, script in enumerate(scripts)))
