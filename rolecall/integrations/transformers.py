"""A callback for the `Trainer` of transformers and the trainers of TRL: steps, phases, rewards, policy health.

    from rolecall.integrations.transformers import RolecallCallback

    trainer = GRPOTrainer(..., callbacks=[RolecallCallback()])

A step is one of the trainer's global steps, with the number that the trainer logs for it. Within a step of a trainer of
TRL that generates, the phase is `generate` while it does, and `score` while a reward function runs, so that a hang in
one of them is told as such. For that, the trainer's `reward_funcs` and its method that generates are wrapped while it
trains. A trainer that has neither keeps the phase `step`.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

try:
    from transformers import TrainerCallback
except ImportError as e:
    raise ImportError("rolecall.integrations.transformers needs transformers: pip install transformers") from e

from rolecall.integrations.training import PHASE_GENERATE, PHASE_SCORE, Training, first_number, hook, known_number

logger = logging.getLogger(__name__)

FRAMES_MAX = 12
"""Between a callback and the trainer that calls it: four in transformers 5."""
GENERATES = "_generate"
"""The method of TRL's trainers that generates a batch of completions, tool calls included. Not public: where it is
missing, generation is part of the phase `step`."""
REWARD_FUNCTIONS = "reward_funcs"

VALUES = {
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "reward": ("reward", "objective/scores"),
}
"""Argument of `reporter.update` -> keys of a trainer's logs, the first one present counts."""
HEALTH = {
    "entropy": ("entropy", "policy/entropy_avg"),
    "clip_fraction_low": ("clip_ratio/low_mean",),
    "clip_fraction_high": ("clip_ratio/high_mean",),
    "ratio_mean": ("sampling/importance_sampling_ratio/mean",),
    "ratio_max": ("sampling/importance_sampling_ratio/max",),
    "response_length": ("completions/mean_length", "completion_length"),
    "truncated_fraction": ("completions/clipped_ratio",),
    "filtered_fraction": ("frac_reward_zero_std",),
    "log_ratio_max": ("sampling/sampling_logp_difference/max",),
}
"""Argument of `reporter.health` -> keys of TRL's logs. A group whose rewards are all the same teaches nothing: the
share of these groups is what `filtered_fraction` means for a trainer that does not filter. TRL's `kl` is to the
reference policy, for which the reporter has no place."""


class RolecallCallback(TrainerCallback):  # type: ignore[misc] # transformers has no types here
    """Give it to the trainer of every rank."""

    def __init__(self, training: Training | None = None) -> None:
        self._training = training or Training()
        self._undo: list[Callable[[], None]] = []
        self._generates = False

    def __reduce__(self) -> tuple[Any, ...]:
        return RolecallCallback, ()  # a trainer is copied and sent to other processes

    @hook
    def on_train_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._training.begin()
        try:
            self._unwrap()
            if (trainer := trainer_of(self)) is not None:
                self._undo = wrapped(trainer, self._training)
                self._generates = hasattr(trainer, GENERATES)
        except Exception as e:  # noqa: BLE001 the job goes on, without these phases
            logger.warning("rolecall cannot tell the phases of this trainer: %s: %s", type(e).__name__, e)

    @hook
    def on_step_begin(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        self._training.begin_step(state.global_step + 1)  # logged with this number when it is done

    @hook
    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._training.end_step(compared=not self._generates)

    @hook
    def on_log(self, args: object, state: object, control: object, logs: Any = None, **kwargs: object) -> None:
        if isinstance(logs, Mapping):
            self._training.update(**{name: first_number(logs, keys) for name, keys in VALUES.items()})
            self._training.health(**{name: known_number(first_number(logs, keys)) for name, keys in HEALTH.items()})

    @hook
    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._training.wait()
        self._unwrap()

    def _unwrap(self) -> None:
        undo, self._undo = self._undo, []
        for act in undo:
            try:
                act()
            except Exception as e:  # noqa: BLE001 the job goes on with the wrapped function, which works
                logger.warning("rolecall cannot undo its change of the trainer: %s: %s", type(e).__name__, e)


def trainer_of(callback: object) -> Any:
    """The trainer that calls `callback` right now, None if it cannot be told. Callbacks get everything of a trainer but
    the trainer itself, so it is looked for among the callers."""
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        owner = frame.f_locals.get("self")
        callbacks = getattr(getattr(owner, "callback_handler", None), "callbacks", ())
        if any(other is callback for other in callbacks):
            return owner
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def wrapped(trainer: Any, training: Training) -> list[Callable[[], None]]:
    """Wraps the trainer's generation and its reward functions. Returns what undoes it."""
    undo: list[Callable[[], None]] = []
    functions = getattr(trainer, REWARD_FUNCTIONS, None)
    if isinstance(functions, list) and functions:
        timed = [_scored(function, training) for function in functions]
        setattr(trainer, REWARD_FUNCTIONS, list(timed))
        undo.append(functools.partial(_restore_rewards, trainer, functions, timed))
    generate = getattr(trainer, GENERATES, None)
    if inspect.ismethod(generate):
        before, ours = vars(trainer).get(GENERATES), Timed(generate, training, PHASE_GENERATE)
        setattr(trainer, GENERATES, ours)
        undo.append(functools.partial(_restore_generation, trainer, before, ours))
    return undo


def _restore_rewards(trainer: Any, functions: list[Any], timed: list[Any]) -> None:
    """What the job has changed since stays as it is."""
    now = getattr(trainer, REWARD_FUNCTIONS, None)
    if not isinstance(now, list):
        return
    if list(map(id, now)) == list(map(id, timed)):
        setattr(trainer, REWARD_FUNCTIONS, functions)
    else:
        original = {id(one): function for one, function in zip(timed, functions, strict=True)}
        now[:] = [original.get(id(function), function) for function in now]


def _restore_generation(trainer: Any, before: Any, ours: "Timed") -> None:
    if vars(trainer).get(GENERATES) is not ours:
        return  # the job has its own by now
    if before is None:
        delattr(trainer, GENERATES)
    else:
        setattr(trainer, GENERATES, before)


def _scored(function: Any, training: Training) -> Any:
    """A reward model is a module, and stays as it is: TRL asks for its type."""
    if hasattr(function, "forward") or not callable(function):
        return function
    if not inspect.iscoroutinefunction(function):
        return Timed(function, training, PHASE_SCORE)

    @functools.wraps(function)
    async def scored(*args: Any, **kwargs: Any) -> Any:
        with training.during(PHASE_SCORE):
            return await function(*args, **kwargs)

    return scored


class Timed:
    """A function of the job, called within a phase. Everything else of it is the function's own: it may be an object
    with a state. A copy in another process is the function alone."""

    __slots__ = ("_rolecall",)
    _rolecall: tuple[Callable[..., Any], Training, str]

    def __init__(self, function: Callable[..., Any], training: Training, phase: str) -> None:
        object.__setattr__(self, "_rolecall", (function, training, phase))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, training, phase = self._rolecall
        with training.during(phase):
            return function(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        return self._rolecall[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rolecall[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._rolecall[0], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._rolecall[0],)


def _itself(function: Any) -> Any:
    return function
