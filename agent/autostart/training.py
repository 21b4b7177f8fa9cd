"""Reports the steps of a training process whose code reports nothing, through torch's own hooks.

A process is a rank once one of its optimizers has made a step: launchers, data loaders and compile workers never do,
though they inherit the environment. A unit of work is a step of the leading optimizer; gradient accumulation only
makes it longer.

In its second step the outermost modules that are called with gradients are looked for, and hooked. From then on the
phase is `step` from the first such call of a step to the optimizer's end, and `wait` between two steps, where a job
loads data, evaluates and writes checkpoints: no progress is due there. A rank's own time is that of loading and of
forward passes; in backward passes and optimizers it may wait for other ranks. Where modules cannot be hooked (a
compiled job would be compiled again), the phase stays `wait`: steps are shown, and no rank is accused for its silence.

Costs a few microseconds a step. Nothing here raises into the job: after an exception the hooks do nothing any more.
A job that uses the reporter itself is left to it. Standard library only; torch is what the job has imported.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from types import ModuleType
from typing import Any, Protocol

from rolecall.agent.reporter import reporter

PHASE_STEP, PHASE_WAIT = "step", "wait"
"""core.telemetry.Phase, which is not imported here."""
ROOTS_MAX = 4
"""Hooked modules: policy, critic, and others that a step trains."""
STEPS_WITHOUT_LEAD = 8
"""After so many steps of other optimizers without one of the leading one, another leads."""


class Report(Protocol):
    """What is used of the module `reporter`."""

    def start(self) -> None: ...
    def is_started(self) -> bool: ...
    def enter_phase(self, name: str) -> None: ...
    def set_step(self, n: int) -> None: ...
    def progress(self, units: int = 1, *, busy_seconds: float = 0.0, exchange_seconds: float = 0.0) -> None: ...


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether the process can know its rank: an actor of Ray can only if its environment says so."""
    return "RAY_JOB_ID" not in environ or any(name in environ for name in ("ROLECALL_RANK", "RANK", "SLURM_PROCID"))


def attach(optimizers: ModuleType) -> None:
    """`optimizers`: torch.optim.optimizer, just imported; the rest of torch is not."""
    if is_rank(os.environ):
        watch = TrainingWatch(reporter, lambda: Modules(sys.modules["torch"]), monotonic)
        optimizers.register_optimizer_step_post_hook(watch.after_optimizer)


class TrainingWatch:
    """The state of one process. `modules`: called at the first step."""

    def __init__(self, report: Report, modules: Callable[[], "Modules"], clock: Callable[[], float]) -> None:
        self._report, self._make_modules, self._clock = report, modules, clock
        self._modules: Modules | None = None
        self._thread = 0
        self._lead: int | None = None
        self._others = 0
        self._num_steps = 0
        self._off = False
        self._ended_at = 0.0  # of the last step
        self._began_at: float | None = None  # of the first forward pass since
        self._forward_at = 0.0  # of the last one
        self._forward_seconds = 0.0
        self._evaluated = False

    def after_optimizer(self, optimizer: object, args: object, kwargs: object) -> None:
        """torch calls it after each step of any optimizer."""
        del args, kwargs
        if self._off:
            return
        try:
            if self._leads(id(optimizer)):
                self._stepped()
        except Exception:  # noqa: BLE001 the job goes on
            self._off = True

    def _leads(self, optimizer: int) -> bool:
        if optimizer == self._lead:
            self._others = 0
            return True
        self._others += 1
        if self._lead is None or self._others > STEPS_WITHOUT_LEAD:
            self._lead, self._others = optimizer, 0
            return True
        return False

    def _stepped(self) -> None:
        now = self._clock()
        if not self._num_steps:
            if self._report.is_started():
                self._off = True  # the job reports itself
                return
            self._report.start()
            self._thread = threading.get_ident()
            self._modules = self._make_modules()
            self._modules.search()
        elif self._num_steps == 1 and self._modules is not None:
            self._modules.hook(self._before_forward, self._after_forward)
        self._num_steps += 1
        self._report.set_step(self._num_steps)
        if self._began_at is None:
            self._report.progress()
        else:
            loading = 0.0 if self._evaluated else self._began_at - self._ended_at
            busy = loading + self._forward_seconds
            self._report.progress(busy_seconds=busy, exchange_seconds=max(0.0, now - self._ended_at - busy))
        self._report.enter_phase(PHASE_WAIT)
        self._ended_at, self._began_at, self._forward_seconds, self._evaluated = now, None, 0.0, False

    def _before_forward(self, with_gradients: bool) -> None:
        if self._off or threading.get_ident() != self._thread:
            return
        if not with_gradients:
            self._evaluated = self._began_at is None or self._evaluated
            return
        self._forward_at = self._clock()
        if self._began_at is None:
            self._began_at = self._forward_at
            self._report.enter_phase(PHASE_STEP)

    def _after_forward(self, with_gradients: bool) -> None:
        if not self._off and with_gradients and threading.get_ident() == self._thread:
            self._forward_seconds += self._clock() - self._forward_at


class Modules:
    """Finds the outermost modules of a step, and hooks them."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._handles: list[Any] = []
        self._found: dict[int, Any] = {}
        self._depth = 0
        self._thread = threading.get_ident()

    def search(self) -> None:
        """For one step every module's call is looked at. Not in a job that torch.compile compiles: its guards include
        these hooks."""
        if self._is_compiled():
            return
        module = self._torch.nn.modules.module
        self._handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _is_compiled(self) -> bool:
        dynamo = sys.modules.get("torch._dynamo.utils")
        return dynamo is not None and bool(dynamo.counters["frames"]["total"])

    def _enter(self, module: Any, args: object) -> None:
        del args
        if threading.get_ident() == self._thread:
            if not self._depth and self._torch.is_grad_enabled() and len(self._found) < ROOTS_MAX:
                self._found[id(module)] = module
            self._depth += 1

    def _leave(self, module: object, args: object, output: object) -> None:
        del module, args, output
        if threading.get_ident() == self._thread:
            self._depth = max(0, self._depth - 1)

    def hook(self, before: Callable[[bool], None], after: Callable[[bool], None]) -> None:
        """Ends the search, and calls these around each forward pass of what it found, with whether it has gradients."""
        for handle in self._handles:
            handle.remove()
        enabled = self._torch.is_grad_enabled
        for module in self._found.values():
            module.register_forward_pre_hook(lambda *_: before(enabled()))
            module.register_forward_hook(lambda *_: after(enabled()), always_call=True)  # also of a pass that raises
        self._handles, self._found = [], {}
