"""Reports the steps of a training process whose code reports nothing, through torch's own hooks.

A process is a rank once one of its optimizers has made a step: launchers, data loaders and compile workers never do,
though they inherit the environment. Its rank is asked for then: actors of Ray learn theirs after torch is imported.
A unit of work is a step of the leading optimizer; gradient accumulation only makes it longer. Once modules are hooked,
further steps after the same forward pass are no unit of their own: DeepSpeed's ZeRO steps its optimizer once for each
parameter group.

From the second step on the outermost modules that are called with gradients are looked for, and hooked when some are
found. Then the phase is `step` from the first such call in training mode to the optimizer's end, and `wait` between two
steps, where a job loads data, evaluates and writes checkpoints: no progress is due there; a forward pass of evaluation
shows that it goes on. It is `wait`, too, after an evaluation or another optimizer's step within a step, up to the next
training pass: the leading optimizer may not follow (the last microbatches of an epoch). Where modules cannot be hooked
(a compiled job would be compiled again), the phase stays `wait`: steps are shown, and a hang is found as one between
two steps.

A rank's own time is that of loading, of forward passes and, where the gradients of whole parameters are computed in it,
of backward passes up to the last gradient: after it, a rank waits for the gradients of others. Of sharded parameters
(FSDP) no gradient is hooked: their backward passes wait for other ranks all along. Accumulated gradients are as many
units of work as there are forward passes.

Nothing here raises into the job: after an exception the hooks do nothing any more. A job that uses the reporter itself
is left to it. Standard library only; torch is what the job has imported.
"""

import contextlib
import os
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from time import monotonic
from types import ModuleType
from typing import Any, Protocol

from rolecall.agent.reporter import reporter
from rolecall.agent.reporter.launcher import launched_process

SOURCE = "hooks"
PHASE_STEP, PHASE_WAIT = "step", "wait"
"""core.telemetry.Phase, which is not imported here."""
ROOTS_MAX = 4
"""Hooked modules: policy, critic, and others that a step trains."""
TITLE_BYTES_MAX = 4096
_CRITIC = re.compile(r"ray::\w*(Critic|ValueWorker)")
"""OpenRLHF's and verl's critics, and NeMo-RL's."""
STEPS_WITHOUT_LEAD = 8
"""After so many steps of another optimizer without one of the leading one, that one leads."""
STEPS_WITHOUT_CALL = 64
"""After so many steps of the leading optimizer without a call of a hooked module, modules are looked for again: the
next part of a training may train others, and CUDA graphs replay a forward pass without a call."""
COMPILED = (("frames", "total"), ("stats", "unique_graphs"))
"""Counters of torch.compile, one of which is not 0 once it has compiled: the first leaves out `fullgraph=True`."""
GROUPS_MAX = 256
"""Parameter groups of a step, each of which may be stepped by itself."""


class Report(Protocol):
    """What is used of the module `reporter`."""

    def start(
        self, *, source: str, role: str | None = None, rank: int | None = None, world_size: int | None = None
    ) -> None: ...
    def is_started(self) -> bool: ...
    def enter_phase(self, name: str) -> None: ...
    def finish_step(
        self,
        n: int,
        phase: str,
        *,
        work_units: int = 1,
        busy_seconds: float = 0.0,
        exchange_seconds: float = 0.0,
        loading_seconds: float = 0.0,
    ) -> None: ...
    def begin_step(self, phase: str) -> None: ...
    def count_collectives(self, issued: Callable[[], int]) -> None: ...
    def exchange(self) -> None: ...


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether the process can know its rank: an actor of Ray can only if its environment says so."""
    return "RAY_JOB_ID" not in environ or _names_rank(environ)


def _names_rank(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in ("ROLECALL_RANK", "RANK", "SLURM_PROCID"))


def title() -> str:
    """Of this process, as Ray sets it; empty: it cannot be read."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return file.read(TITLE_BYTES_MAX).partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def role_of_actor(environ: Mapping[str, str], title: str) -> str | None:
    """`critic` for an actor of Ray whose class trains one, unless ROLECALL_ROLE names a role; None: as by default. The
    same rank of policy and critic are two processes."""
    if "RAY_JOB_ID" in environ and not environ.get("ROLECALL_ROLE") and _CRITIC.match(title):
        return "critic"
    return None


def rank_in_group(environ: Mapping[str, str]) -> dict[str, int]:
    """`rank` and `world_size` of the default process group of torch.distributed. Empty: there is none, or the
    environment names the rank; Lightning, which starts the processes of a job itself, sets no such variable. In a group
    larger than the environment's world the variables are those of the process that started the ranks."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        group = distributed.GroupMember.WORLD
        if group is None or "ROLECALL_RANK" in environ:
            return {}
        rank, size = group.rank(), group.size()
        if _names_rank(environ) and size <= (launched_process(environ, rank=rank).world_size or size):
            return {}
        return {"rank": rank, "world_size": size}
    except Exception:  # noqa: BLE001 torch has changed: the job goes on, as a process without a group
        return {}


def issued_collectives() -> int:
    """Of the default process group of torch.distributed; -1: there is none, or it does not count."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        group = distributed.GroupMember.WORLD
        return -1 if group is None else int(group._get_sequence_number_for_group())
    except Exception:  # noqa: BLE001 a private part of torch: the job goes on, without the number
        return -1


_watches: "weakref.WeakSet[TrainingWatch]" = weakref.WeakSet()
"""Of this process, whether `rolecall exec` or an integration made them."""


def attach(optimizers: ModuleType) -> None:
    """`optimizers`: torch.optim.optimizer, just imported; the rest of torch is not."""
    watch = TrainingWatch(reporter, sys.modules["torch"], monotonic)
    optimizers.register_optimizer_step_post_hook(watch.after_optimizer)


def stand_down() -> None:
    """The job, or an integration in it, reports this process from now on: the hooks do nothing any more."""
    for watch in list(_watches):
        watch.stand_down()


class TrainingWatch:
    """The state of one process. `torch`: used from the first step on. `starts`: whether it starts the reporter; it then
    leaves a process alone that has started it itself."""

    def __init__(self, report: Report, torch: Any, clock: Callable[[], float], *, starts: bool = True) -> None:
        self._report, self._torch, self._clock, self._starts = report, torch, clock, starts
        self._guard = Guard(torch)
        self._modules = Modules(torch, self._guard)
        self._lead: weakref.ref[object] | None = None
        self._others: dict[int, int] = {}  # steps of other optimizers since its last one, by id
        self._num_steps = 0
        self._num_uncalled = 0  # steps since a hooked module was called
        self._uncalled_max = STEPS_WITHOUT_CALL
        self._after_step = Hook(self._guard, self._step, any_thread=True)
        self._ended_at = 0.0  # of the last step
        self._called = False  # a hooked module, since then
        self._began_at: float | None = None  # of the first forward pass of training since then
        self._forward_at: float | None = None  # of the one that runs
        self._num_passes = 0  # forward passes of training since the last step
        self._own_seconds = 0.0  # in forward and backward passes since the last step
        self._backward_at: float | None = None  # end of the last forward pass, or of the last gradient after it
        self._evaluated = False
        self._paused = False  # the phase is `wait` although the step is not over
        _watches.add(self)

    def after_optimizer(self, optimizer: object, args: object, kwargs: object) -> None:
        """torch calls it after each step of any optimizer."""
        del args, kwargs
        self._after_step(optimizer)
        if self._guard.off:
            self._modules.remove_hooks()  # not where it failed: torch may be walking through them

    def stand_down(self) -> None:
        """Not inside a forward pass."""
        self._guard.off = True
        self._modules.remove_hooks()

    def _step(self, optimizer: object) -> None:
        led = self._lead
        if not self._leads(optimizer):
            self._pause()
            return
        if led is None and self._starts:
            if self._report.is_started() or not is_rank(os.environ):
                self._guard.off = True  # the job reports itself, or nobody can say which rank it is
                return
            self._report.start(source=SOURCE, role=role_of_actor(os.environ, title()), **rank_in_group(os.environ))
            self._report.count_collectives(issued_collectives)
        if led is not self._lead:  # another one may train other modules, in another thread
            self._guard.thread = get_ident()
            self._modules.search()
        elif self._modules.searching:
            self._modules.hook(self._before_forward, self._after_forward)
        elif not self._called and self._modules.show_steps():
            self._num_uncalled += 1
            if self._num_uncalled > self._uncalled_max:
                self._uncalled_max = min(2 * self._uncalled_max, GROUPS_MAX)  # perhaps they were groups of one step
                self._num_uncalled = 0
                self._modules.search()
            return  # another parameter group of the same step
        elif self._modules.ordering:
            self._modules.hook_last_gradients(self._after_gradients)
        self._stepped()

    def _leads(self, optimizer: object) -> bool:
        lead = self._lead() if self._lead is not None else None
        if optimizer is not lead:
            steps = self._others[id(optimizer)] = self._others.get(id(optimizer), 0) + 1
            if lead is not None and steps <= STEPS_WITHOUT_LEAD:
                return False
            self._lead = weakref.ref(optimizer)
        if self._others:
            self._others = {}
        return True

    def _stepped(self) -> None:
        now = self._clock()
        self._num_steps += 1
        if self._began_at is None:
            self._report.finish_step(self._num_steps, PHASE_WAIT)
        else:
            loading = 0.0 if self._evaluated else self._began_at - self._ended_at
            busy = loading + self._own_seconds
            waited = max(0.0, now - self._ended_at - busy)
            self._report.finish_step(
                self._num_steps,
                PHASE_WAIT,
                work_units=self._num_passes,
                busy_seconds=busy,
                exchange_seconds=waited,
                loading_seconds=loading,
            )
        self._ended_at, self._began_at, self._own_seconds, self._num_passes = now, None, 0.0, 0
        self._backward_at = None
        self._called = self._evaluated = self._paused = False
        self._num_uncalled = 0

    def _pause(self) -> None:
        """In a step that may not go on for long: its last microbatches may have had no step of the leading optimizer,
        before an evaluation, or at the end."""
        if self._began_at is not None and not self._paused:
            self._paused = True
            self._report.enter_phase(PHASE_WAIT)

    def _before_forward(self, module: Any) -> None:
        self._called, self._forward_at = True, None
        if not self._modules.show_steps():  # compiled since: the optimizer perhaps, too, whose step is then not seen
            self._began_at = None
            self._report.enter_phase(PHASE_WAIT)
            return
        if not (module.training and self._torch.is_grad_enabled()):
            self._evaluated = self._began_at is None or self._evaluated
            if self._began_at is None or self._paused:
                self._report.enter_phase(PHASE_WAIT)  # again: it is not idle
            elif not module.training:
                self._pause()
            return
        self._forward_at = self._clock()
        self._num_passes += 1
        if self._began_at is None:
            self._began_at = self._forward_at
            self._report.begin_step(PHASE_STEP)
        elif self._paused:
            self._report.enter_phase(PHASE_STEP)
        self._paused = False

    def _after_forward(self, module: object) -> None:
        if self._forward_at is not None:
            self._backward_at = self._clock()
            self._own_seconds += self._backward_at - self._forward_at
            self._forward_at = None

    def _after_gradients(self, parameter: object) -> None:
        """`parameter`: the one of a module whose gradient comes last. Also in a thread of autograd's own."""
        if self._backward_at is not None:
            now = self._clock()
            self._own_seconds += now - self._backward_at
            self._backward_at = now
            self._report.exchange()


class Guard:
    """When hooks are called. `off`: never again; `thread`: the one whose forward passes count."""

    __slots__ = ("_torch", "is_compiling", "off", "thread")

    def __init__(self, torch: Any) -> None:
        """`torch`: perhaps only begun to be imported, without `torch.compiler`."""
        self._torch, self.off, self.thread = torch, False, 0
        self.is_compiling: Callable[[], bool] = self._is_compiling

    def _is_compiling(self) -> bool:
        """Until it is first called outside of torch.compile, which traces this, too."""
        asked: Callable[[], bool] = getattr(getattr(self._torch, "compiler", None), "is_compiling", bool)
        if asked():
            return True
        self.is_compiling = asked
        return False


class Hook:
    """A hook in the job: the only way from its calls into this file, which lets no exception out. One function, because
    it is called in every step. A copy of a module, also on disk, has a function of the standard library in the hook's
    place that does nothing: it can be loaded where rolecall is not."""

    __slots__ = ("_act", "_any_thread", "_guard")

    def __init__(self, guard: Guard, act: Callable[[Any], None], *, any_thread: bool = False) -> None:
        """`any_thread`: of backward passes, which autograd may run in its own."""
        self._guard, self._act, self._any_thread = guard, act, any_thread

    def __call__(self, subject: object, *args: object) -> None:
        guard = self._guard
        if guard.is_compiling():
            return  # torch.compile traces this, and gets no further
        if guard.off or not (self._any_thread or get_ident() == guard.thread):
            return
        try:
            self._act(subject)
        except Exception:  # noqa: BLE001 the job goes on
            guard.off = True

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Modules:
    """Finds the outermost modules of a step, and hooks them. Not in a job that torch.compile compiles: its guards
    include these hooks, and it would compile again."""

    def __init__(self, torch: Any, guard: Guard) -> None:
        self._torch, self._guard = torch, guard
        self._handles: list[Any] = []
        self._of_gradients: list[Any] = []
        self._found: dict[int, Any] = {}
        self._last: dict[int, Any] = {}
        self._depth = 0
        self.searching = self.ordering = False
        """A step is looked at: for the outermost modules; for the order in which their gradients come."""

    def search(self) -> None:
        """Begins to look at every module's call, and forgets what was hooked before."""
        self.remove_hooks()
        if self._is_compiled():
            return
        self.searching = True
        module = self._torch.nn.modules.module
        self._handles = [
            module.register_module_forward_pre_hook(Hook(self._guard, self._enter)),
            module.register_module_forward_hook(Hook(self._guard, self._leave), always_call=True),
        ]

    def hook(self, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        """Ends the search if it found something, and calls these around each forward pass of what it found."""
        self._depth = 0
        if not self._found and not self._is_compiled():
            return
        self.remove_hooks()
        if not self._is_compiled():
            for module in self._found.values():
                self._handles.append(module.register_forward_pre_hook(Hook(self._guard, before)))
                # Also of a pass that raises.
                self._handles.append(module.register_forward_hook(Hook(self._guard, after), always_call=True))
                for parameter in self._with_whole_gradients(module):
                    note = Hook(self._guard, partial(self._note_gradient, id(module)), any_thread=True)
                    self._of_gradients.append(parameter.register_post_accumulate_grad_hook(note))
            self.ordering = bool(self._of_gradients)
        self._found = {}

    def hook_last_gradients(self, after: Callable[[Any], None]) -> None:
        """Calls this after each gradient of the parameter whose gradient came last in the step that ends, of each
        module."""
        self._forget_gradients()
        for parameter in self._last.values():
            hook = Hook(self._guard, after, any_thread=True)
            self._of_gradients.append(parameter.register_post_accumulate_grad_hook(hook))
        self._last = {}

    def _with_whole_gradients(self, module: Any) -> list[Any]:
        """The parameters to be trained; none if one is sharded: its gradient comes once others have sent theirs."""
        nn = self._torch.nn
        trained = [p for p in module.parameters() if p.requires_grad]
        is_whole = all(type(p) is nn.Parameter and type(p.data) is self._torch.Tensor and p.is_leaf for p in trained)
        is_flat = any("FullyShardedDataParallel" in type(m).__name__ for m in module.modules())
        return trained if is_whole and not is_flat else []

    def _note_gradient(self, module: int, parameter: Any) -> None:
        self._last[module] = parameter

    def show_steps(self) -> bool:
        """Whether every step has a forward pass of a hooked module. One that was compiled later hides its own."""
        return bool(self._handles) and not self._is_compiled()

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.searching = [], False
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for handle in self._of_gradients:
            handle.remove()
        self._of_gradients, self.ordering = [], False

    def _is_compiled(self) -> bool:
        dynamo = sys.modules.get("torch._dynamo.utils")
        return dynamo is not None and any(kind in dynamo.counters and dynamo.counters[kind][n] for kind, n in COMPILED)

    def _enter(self, module: Any) -> None:
        if not self._depth and self._torch.is_grad_enabled() and len(self._found) < ROOTS_MAX:
            self._found[id(module)] = module
        self._depth += 1

    def _leave(self, module: object) -> None:
        self._depth = max(0, self._depth - 1)
