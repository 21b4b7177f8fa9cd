"""One training process, as the callback of a framework sees it, told to the reporter.

A step is a unit of work. Inside it the phase is `step`, or what `during` names; between two steps it is `wait`, because
frameworks load data, evaluate and write checkpoints there, and no progress is due. From `begin` on the hooks of
`rolecall exec` are silent: a step is counted once, by the one who knows more.

Nothing here raises into the job. After an exception it does nothing any more, with one warning.
Standard library only.
"""

import functools
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Protocol, TypeVar

from rolecall.agent.autostart import training as hooks
from rolecall.agent.reporter import reporter

logger = logging.getLogger(__name__)

SOURCE = "integration"
PHASE_STEP, PHASE_WAIT = "step", "wait"
PHASE_GENERATE, PHASE_SCORE, PHASE_UPDATE = "generate", "score", "update"
"""core.telemetry.Phase, which is not imported here."""

T = TypeVar("T")


class ShortLock:
    """A lock around a few lines. A signal handler of the job may come back into them, and in a child that is forked
    meanwhile it is free: the thread that held it is not there."""

    def __init__(self) -> None:
        self._free()
        _locks.add(self)

    def _free(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_locks: "weakref.WeakSet[ShortLock]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock._free()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Report(Protocol):
    """What is used of the module `reporter`."""

    start: Callable[..., None]
    update: Callable[..., None]
    health: Callable[..., None]

    def is_started(self) -> bool: ...
    def enter_phase(self, name: str) -> None: ...
    def set_step(self, n: int) -> None: ...
    def progress(self, units: int = 1, *, busy_seconds: float = 0.0) -> None: ...
    def exception(self, exc: BaseException) -> None: ...


class Training:
    """State of one process. Its methods may be called from any thread."""

    def __init__(self, report: Report = reporter, clock: Callable[[], float] = monotonic) -> None:
        self._report, self._clock = report, clock
        self._lock = ShortLock()
        self._off = False
        self._in_step = False
        self._began_at = 0.0
        self._inside: list[str] = []  # phases entered within the step; coroutines may leave them in any order
        self._shown = ""

    def begin(self, *, overrides: bool = True, **identity: Any) -> None:
        """The process is a rank from now on, without progress due until its first step. `identity`: arguments of
        `reporter.start`; without any, or if it does not override, a reporter that the job has started itself keeps
        its own."""
        self._guard(self._begin, (overrides, identity))

    def _begin(self, given: tuple[bool, Mapping[str, Any]]) -> None:
        overrides, identity = given
        hooks.stand_down()
        if (identity and overrides) or not self._report.is_started():
            self._report.start(**identity, source=SOURCE)
        self.wait()  # a first batch, or a checkpoint to go on from, may take long

    def begin_step(self, n: int) -> None:
        self._guard(self._begin_step, n)

    def _begin_step(self, n: int) -> None:
        with self._lock:
            self._report.set_step(n)
            self._in_step, self._began_at = True, self._clock()
            self._inside.clear()
            self._shown = ""  # entered again, also if the last step never ended
            self._show()

    def end_step(self, *, compared: bool = True) -> None:
        """The step is done; without `begin_step` it counts nothing. `compared`: its time is compared with that of other
        ranks and earlier steps; not where steps differ in kind, or grow as answers do while a policy learns."""
        self._guard(self._end_step, (1, compared))

    def wait(self) -> None:
        """No progress is due: evaluation, the end of training, a step that was given up."""
        self._guard(self._end_step, (0, False))

    def _end_step(self, done: tuple[int, bool]) -> None:
        units, is_compared = done
        with self._lock:
            if units and self._in_step:
                self._report.progress(units, busy_seconds=self._clock() - self._began_at if is_compared else 0.0)
            self._in_step = False
            self._inside.clear()
            self._show()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase within a step. Outside of a step, as in evaluation, it changes nothing."""
        self._guard(self._enter, phase)
        try:
            yield
        finally:
            self._guard(self._leave, phase)

    def _enter(self, phase: str) -> None:
        with self._lock:
            if self._in_step:
                self._inside.append(phase)
                self._show()

    def _leave(self, phase: str) -> None:
        with self._lock:
            if phase in self._inside:
                self._inside.remove(phase)
                self._show()

    def _show(self) -> None:
        phase = self._inside[-1] if self._inside else PHASE_STEP if self._in_step else PHASE_WAIT
        if phase != self._shown:
            self._shown = phase
            self._report.enter_phase(phase)

    def update(self, **values: float | None) -> None:
        """`loss`, `grad_norm`, `reward` of the newest step."""
        if any(value is not None for value in values.values()):
            self._guard(lambda known: self._report.update(**known), values)

    def health(self, **signs: float | None) -> None:
        """Policy health of the newest step (arguments of `reporter.health`). Nothing known: nothing reported."""
        if any(sign is not None for sign in signs.values()):
            self._guard(lambda known: self._report.health(**known), signs)

    def failed(self, error: BaseException) -> None:
        """An exception ended the training; the framework may catch it."""
        self.wait()
        if isinstance(error, Exception):  # Ctrl-C is intended, not a fault
            self._guard(self._report.exception, error)
            with suppress(Exception):
                error._rolecall_reported = True  # type: ignore[attr-defined] # the excepthook may see it again

    def _guard(self, act: Callable[[T], None], subject: T) -> None:
        if self._off:
            return
        try:
            act(subject)
        except Exception as e:  # noqa: BLE001 the job goes on
            self.give_up(e)

    def give_up(self, error: Exception) -> None:
        """Nothing is reported any more."""
        if not self._off:
            self._off = True
            logger.warning("rolecall reports nothing of this training any more: %s: %s", type(error).__name__, error)


def watch_optimizers(report: hooks.Report) -> Callable[[], None] | None:
    """Steps of this process come from torch's hooks, as under `rolecall exec`, where torch is imported, until another
    `Training` begins: the callback of a framework inside. The reporter is started by the caller. Returns what ends
    that; None without torch, where no steps are reported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    from torch.optim.optimizer import register_optimizer_step_post_hook

    watch = hooks.TrainingWatch(report, torch, monotonic, starts=False)
    handle = register_optimizer_step_post_hook(watch.after_optimizer)

    def forget() -> None:
        watch.stand_down()
        handle.remove()

    return forget


def hook(called: Callable[..., None]) -> Callable[..., None]:
    """A method that a framework calls, of an object with a `_training`: nothing that fails in it reaches the job."""

    @functools.wraps(called)
    def safely(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            called(self, *args, **kwargs)
        except Exception as e:  # noqa: BLE001 the job goes on
            self._training.give_up(e)

    return safely


def first_number(values: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """The first of `names` that `values` has as a number; a tensor of one element is one. None: there is none."""
    for name in names:
        with suppress(Exception):  # whatever a framework logs
            value = values.get(name)
            if value is not None and not isinstance(value, (bool, str)):
                return float(value)
    return None


def known_number(value: float | None) -> float | None:
    """None for NaN, which means unknown in policy health."""
    return None if value is None or math.isnan(value) else value
