"""Reward functions: the user's, by name, and the built-in ones.

A function has any of the parameters `prompt`, `response`, `answer` and `metadata`, and returns one number; or any of
`prompts`, `responses`, `answers` and `metadatas`, each a list over the samples of a group, and returns one number per
sample. Both kinds may be `async`; samples are then scored at the same time. All groups share one event loop, so that
locks and connections outlive a group.
"""

import asyncio
import importlib
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.tasks import user_files

NUMBER = re.compile(r"(?:(?<!\w)-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?")
"""Commas separate thousands, else numbers: `1,234` is one, `1,2,3` are three. A minus after a word is a hyphen."""
MINUS_SIGN = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a reward function may see of one sample. `prompt`: text or chat messages, as in the dataset."""

    prompt: Any
    response: str
    answer: Any
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scorer:
    """`scorer(group)`: one reward per sample. `needs`: fields of `Answer` that the function takes without a default."""

    score: Callable[[Sequence[Answer]], list[float]]
    needs: frozenset[str]

    def __call__(self, group: Sequence[Answer]) -> list[float]:
        return self.score(group)


Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end, as `asyncio.run` does."""

FIELDS = ("prompt", "response", "answer", "metadata")


def load_scorer(name: str, run: Run = asyncio.run) -> Scorer:
    """The reward function `name`, for the samples of one group. `run`: for what is `async`.

    Raises:
        ConfigError: it cannot be imported, or has parameters that it cannot get.
    """
    kind, _, task = name.partition(":")
    if name in BUILT_IN:
        return scorer_of(BUILT_IN[name], name, run)
    if name == "math_verify":
        return scorer_of(_math_verify(), name, run)
    if kind == "reasoning_gym":
        return scorer_of(_reasoning_gym(task), name, run)
    built_in = ", or built in: " + ", ".join([*BUILT_IN, "math_verify"])
    return scorer_of(imported(name, "reward.function", "function", built_in), name, run)


def scorer_of(function: Callable[..., Any], name: str, run: Run = asyncio.run) -> Scorer:
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
                (values,) = run(_gathered([values]))
        else:
            values = [function(**arguments(a)) for a in group]
            if any(map(inspect.isawaitable, values)):
                values = run(_gathered(values))
        return _numbers(values, len(group))

    needs = {p.name.removesuffix("s") if many else p.name for p in named if p.default is p.empty}
    return Scorer(score, frozenset(needs))


async def _gathered(values: Sequence[Awaitable[Any]]) -> list[Any]:
    tasks = [asyncio.ensure_future(value) for value in values]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # the loop goes on to the next group: what is left of a failed one must not
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _numbers(values: Any, num: int) -> list[float]:
    values = values.tolist() if hasattr(values, "tolist") else values
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
        is_file = module_name.endswith(".py")
        module = user_files.load(Path(module_name)) if is_file else importlib.import_module(module_name)
    except Exception as e:  # deliberate: the user's code may raise anything while it is imported
        raise ConfigError([f"{setting}: {module_name} cannot be imported: {type(e).__name__}: {e}"]) from e
    function = getattr(module, attribute, None)
    if not callable(function):
        found = f"is not a {kind}" if hasattr(module, attribute) else "is not there"
        raise ConfigError([f"{setting}: {attribute} {found} in {module_name}"])
    made: Callable[..., Any] = function
    return made


def exact(response: str, answer: Any) -> float:
    """1 if the response is the answer, apart from space around it."""
    if answer is None:
        raise ValueError("the row has no answer")
    return float(response.strip() == str(answer).strip())


def numeric(response: str, answer: Any) -> float:
    """1 if the last number of the response is the last number of the answer; `#### 1,234` is 1234."""
    given, wanted = (NUMBER.findall(str(text).replace(MINUS_SIGN, "-")) for text in (response, answer))
    if not wanted:
        raise ValueError(f"the answer {answer!r:.60} has no number")
    return float(bool(given) and float(given[-1].replace(",", "")) == float(wanted[-1].replace(",", "")))


LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")
"""Begin LaTeX in an answer."""
BUILT_IN: Mapping[str, Callable[..., Any]] = {"exact": exact, "numeric": numeric}


def _math_verify() -> Callable[..., Any]:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ConfigError(["reward.function: math_verify needs: pip install '.[data]' in a clone"]) from None

    def score(response: str, answer: Any) -> float:
        text = str(answer)
        # Without delimiters only plain expressions are found: of 11\\sqrt{2} that would be 11.
        text = text if any(mark in text for mark in LATEX_MARKS) else f"${text}$"
        # Its own time limit uses a signal, which works in the main thread only; the group's deadline holds anyway.
        wanted = parse(text, parsing_timeout=None)
        if answer is None or not wanted:
            raise ValueError(f"the answer {answer!r:.60} is no mathematics")
        return float(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))

    return score


def _reasoning_gym(task: str) -> Callable[..., Any]:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError(["reward.function: reasoning_gym needs: pip install '.[data]' in a clone"]) from None
    try:
        dataset = reasoning_gym.create_dataset(task, size=1, seed=0)
        example = dataset[0]["metadata"]
    except Exception as e:  # deliberate: an unknown name raises ValueError, a bad configuration something else
        raise ConfigError([f"reward.function: reasoning_gym:{task}: {type(e).__name__}: {e}"]) from e

    def score(response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        given = _with_tuples(metadata.get("metadata", metadata), example)
        entry = {"question": "", "answer": answer, "metadata": given}
        return float(dataset.score_answer(answer=response.strip(), entry=entry))

    return score


def _with_tuples(value: Any, example: Any) -> Any:
    """`value`, read from a file that has lists only, with tuples where `example` has some."""
    if isinstance(value, Mapping) and isinstance(example, Mapping):
        return {key: _with_tuples(v, example.get(key)) for key, v in value.items()}
    if isinstance(value, list) and isinstance(example, list | tuple):
        found = [_with_tuples(v, example[min(n, len(example) - 1)] if example else None) for n, v in enumerate(value)]
        return tuple(found) if isinstance(example, tuple) else found
    return value
