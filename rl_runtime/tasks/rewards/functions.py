"""Reward functions: the user's, by name, and the built-in ones.

A function has any of the parameters `prompt`, `response`, `answer` and `metadata`, and returns one number; or any of
`prompts`, `responses`, `answers` and `metadatas`, each a list over the samples of a group, and returns one number per
sample. Both kinds may be `async`; samples are then scored at the same time.
"""

import asyncio
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from rolecall.core.errors import ConfigError

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a reward function may see of one sample. `prompt`: text or chat messages, as in the dataset."""

    prompt: Any
    response: str
    answer: Any
    metadata: Mapping[str, Any]


Scorer = Callable[[Sequence[Answer]], list[float]]
"""One reward per sample of a group."""

FIELDS = ("prompt", "response", "answer", "metadata")


def load_scorer(name: str) -> Scorer:
    """The reward function `name`, for the samples of one group.

    Raises:
        ConfigError: it cannot be imported, or has parameters that it cannot get.
    """
    kind, _, task = name.partition(":")
    if name in BUILT_IN:
        return scorer_of(BUILT_IN[name], name)
    if name == "math_verify":
        return scorer_of(_math_verify(), name)
    if kind == "reasoning_gym":
        return scorer_of(_reasoning_gym(task), name)
    built_in = ", or built in: " + ", ".join([*BUILT_IN, "math_verify"])
    return scorer_of(imported(name, "reward.function", "function", built_in), name)


def scorer_of(function: Callable[..., Any], name: str) -> Scorer:
    """Raises ConfigError: its parameters are not those of a reward function."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    many = any(p.name in {f"{field}s" for field in FIELDS} for p in named)
    fields = [f"{field}s" for field in FIELDS] if many else list(FIELDS)
    strange = [p.name for p in named if p.name not in fields and p.default is p.empty]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        wanted = fields
    else:
        wanted = [p.name for p in named if p.name in fields]
    if strange or not wanted:
        got = f"it has {', '.join(strange)}" if strange else "it has none of them"
        raise ConfigError([f"reward.function: {name}: its parameters may be {', '.join(fields)}; {got}"])

    def arguments(answer: Answer) -> dict[str, Any]:
        return {field: getattr(answer, field) for field in FIELDS if field in wanted}

    def score(group: Sequence[Answer]) -> list[float]:
        if many:
            lists = {f"{f}s": [getattr(a, f) for a in group] for f in FIELDS if f"{f}s" in wanted}
            values = function(**lists)
            if inspect.isawaitable(values):
                values = asyncio.run(_awaited(values))
        elif inspect.iscoroutinefunction(function):
            values = asyncio.run(_gathered([function(**arguments(a)) for a in group]))
        else:
            values = [function(**arguments(a)) for a in group]
        return _numbers(values, len(group))

    return score


async def _awaited(value: Any) -> Any:
    return await value


async def _gathered(values: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*values))


def _numbers(values: Any, num: int) -> list[float]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != num:
        raise TypeError(f"the reward function returned {values!r:.80} for {num} samples: expected {num} numbers")
    for i, value in enumerate(values):
        if not isinstance(value, Real):
            raise TypeError(f"the reward function returned {value!r:.80} for sample {i}: expected a number")
    return [float(v) for v in values]


def imported(name: str, setting: str, kind: str, others: str = "") -> Callable[..., Any]:
    """What a job file's `setting` names: a `kind`, function or class. `others`: what else the name could be.

    Raises:
        ConfigError: it cannot be imported, or is not there.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ConfigError([f"{setting}: {name!r}: expected `package.module:{kind}`, `FILE.py:{kind}`{others}"])
    try:
        module = _file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as e:  # deliberate: the user's code may raise anything while it is imported
        raise ConfigError([f"{setting}: {module_name} cannot be imported: {type(e).__name__}: {e}"]) from e
    function = getattr(module, attribute, None)
    if not callable(function):
        found = f"is not a {kind}" if hasattr(module, attribute) else "is not there"
        raise ConfigError([f"{setting}: {attribute} {found} in {module_name}"])
    made: Callable[..., Any] = function
    return made


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def exact(response: str, answer: Any) -> float:
    """1 if the response is the answer, apart from space around it."""
    return float(response.strip() == str(answer).strip())


def numeric(response: str, answer: Any) -> float:
    """1 if the last number of the response is the last number of the answer; `#### 1,234` is 1234."""
    given, wanted = (NUMBER.findall(str(text)) for text in (response, answer))
    if not wanted:
        raise ValueError(f"the answer {answer!r:.60} has no number")
    return float(bool(given) and float(given[-1].replace(",", "")) == float(wanted[-1].replace(",", "")))


BUILT_IN: Mapping[str, Callable[..., Any]] = {"exact": exact, "numeric": numeric}


def _math_verify() -> Callable[..., Any]:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ConfigError(["reward.function: math_verify needs: pip install '.[data]' in a clone"]) from None

    def score(response: str, answer: Any) -> float:
        # Its own time limit uses a signal, which works in the main thread only; the group's deadline holds anyway.
        wanted = parse(str(answer), parsing_timeout=None)
        return float(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))

    return score


def _reasoning_gym(task: str) -> Callable[..., Any]:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError(["reward.function: reasoning_gym needs: pip install '.[data]' in a clone"]) from None
    try:
        dataset = reasoning_gym.create_dataset(task, size=1, seed=0)
    except Exception as e:  # deliberate: an unknown name raises ValueError, a bad configuration something else
        raise ConfigError([f"reward.function: reasoning_gym:{task}: {type(e).__name__}: {e}"]) from e

    def score(response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        entry = {"question": "", "answer": answer, "metadata": metadata.get("metadata", metadata)}
        return float(dataset.score_answer(answer=response.strip(), entry=entry))

    return score
