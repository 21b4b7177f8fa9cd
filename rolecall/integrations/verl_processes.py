"""What the processes of verl report: roles, replicas, ranks, steps, phases, and what the controller logs.

    process                     registers as              reports
    worker of a group           trainer/0, critic/0, ...  each call of its registered methods: a unit of work
    reward loop worker          reward/N                  phase `score` while a reward is computed
    server of a rollout engine  rollout/N                 open requests; the workers beside it that receive its weights
                                                          report nothing, since the server stands for the replica
    process that logs           controller/0              step, reward, loss, policy health

Worker groups: verl marks the methods that its controller calls with the decorator `register`, which is wrapped, so that
workers of other backends and of the user report, too. A call is in the phase `step` (`update` while weights are sent):
both may wait for other ranks, and a rank is accused only where nothing else explains the wait. The step of a worker is
the number of its finished updates plus one, counted from the checkpoint that it loaded.

The controller waits for others all the time, so no progress is due from it; its state says which step the run is in.
Servers of engines have no progress due either: the last long answer of a step takes as long as it takes.

Standard library only.
"""

import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from rolecall.agent.reporter import reporter
from rolecall.integrations.after_import import AfterImport
from rolecall.integrations.training import (
    PHASE_SCORE,
    PHASE_STEP,
    PHASE_UPDATE,
    PHASE_WAIT,
    ShortLock,
    Training,
    first_number,
    known_number,
)

logger = logging.getLogger(__name__)

UPDATES = frozenset({"update_actor", "update_critic", "train_mini_batch", "train_batch"})
"""Methods of workers that end in an optimizer step of the run's step. `update_actor` calls the others itself."""
WORK = {
    **dict.fromkeys(UPDATES, PHASE_STEP),
    **dict.fromkeys(("compute_log_prob", "compute_ref_log_prob", "compute_values", "infer_batch"), PHASE_STEP),
    **dict.fromkeys(("compute_rm_score", "generate_sequences"), PHASE_STEP),
    "update_weights": PHASE_UPDATE,
}
"""Method -> phase. Others, as queries and moves between devices, are not told."""
FIRST = frozenset({"init_model", "reset", "load_checkpoint"})
"""Methods before the first work: the process registers with them."""
ROLES = ("trainer", "critic", "reward", "reference", "rollout")
"""Of the roles that share a process, the first one names it."""
CONTROLLER = "controller"
RECEIVER = "CheckpointEngineWorker"
"""Worker of a standalone rollout replica, whose server has the same rank. It is no trainer."""
STEP_OF_CHECKPOINT = re.compile(r"global_step_(\d{1,9})\b")

VALUES = {
    "loss": ("actor/pg_loss", "actor/loss"),
    "grad_norm": ("actor/grad_norm",),
    "reward": ("critic/rewards/mean", "critic/score/mean"),
}
"""Argument of `reporter.update` -> keys that the controller logs, the first one present counts."""
HEALTH = {
    "entropy": ("actor/entropy", "actor/entropy_loss"),
    "kl_sampler": ("rollout_corr/kl",),
    "response_length": ("response_length/mean",),
    "truncated_fraction": ("response_length/clip_ratio",),
}
"""Argument of `reporter.health` -> keys that the controller logs."""
STEP_KEY = "training/global_step"
"""In the metrics of a step, not in those of a validation."""


def install() -> None:
    """Once a process, before verl's other modules are imported."""
    AfterImport(
        {
            "verl.single_controller.base.decorator": _wrap_register,
            "verl.experimental.reward_loop.reward_loop": _wrap_reward_loop,
            "verl.workers.rollout.vllm_rollout.vllm_async_server": _wrap_servers,
            "verl.workers.rollout.sglang_rollout.async_sglang_server": _wrap_servers,
            "verl.utils.tracking": _wrap_tracking,
        }
    ).install()


class Process:
    """The one worker process that this is. Methods may be called from any thread."""

    def __init__(self, training: Training | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.training = training or Training()
        self._environ = environ
        self._lock = ShortLock()
        self._role = ""
        self._depth = 0
        self._updates: dict[int, int] = {}  # worker object -> updates that it has finished
        self._resumed_at = 0

    @property
    def is_registered(self) -> bool:
        return bool(self._role)

    @property
    def is_controller(self) -> bool:
        return self._role == CONTROLLER

    def register(self, role: str, index: int, rank: int, world_size: int | None = None) -> None:
        """`role/index`, unless the environment names this process. Another role of the same process changes nothing
        unless it comes before in ROLES."""
        order = (*ROLES, CONTROLLER)
        if self._role and order.index(role) >= order.index(self._role):
            return
        self._role = role
        identity: dict[str, Any] = {"rank": rank, "world_size": world_size}
        if not any(name in self._environ for name in ("ROLECALL_ROLE", "ROLECALL_REPLICA")):
            identity["replica"] = f"{role}/{index}"
        self.training.begin(**{name: value for name, value in identity.items() if value is not None})

    @contextmanager
    def call(self, worker: Any, method: str, args: tuple[Any, ...]) -> Iterator[None]:
        """A call of a registered method. Calls within it are part of it."""
        with self._lock:
            outermost = self._depth == 0
            self._depth += 1
        try:
            if outermost:
                _safely(self._begin, worker, method, args)
            with self.training.during(WORK[method]) if method in WORK else nullcontext():
                yield
        except BaseException as e:
            if outermost:
                self.training.failed(e)
            raise
        else:
            if outermost:
                _safely(self._end, worker, method)
        finally:
            with self._lock:
                self._depth -= 1

    def _begin(self, worker: Any, method: str, args: tuple[Any, ...]) -> None:
        self.register(role_of(worker), 0, int(worker.rank), int(worker.world_size))
        if method == "load_checkpoint":
            found = [m for text in args if isinstance(text, str) and (m := STEP_OF_CHECKPOINT.search(text))]
            self._resumed_at = max([self._resumed_at, *(int(m.group(1)) for m in found)])
        if method in WORK:
            self.training.begin_step(self._resumed_at + max(self._updates.values(), default=0) + 1)

    def _end(self, worker: Any, method: str) -> None:
        if method in WORK:
            self.training.end_step(compared=False)
        if method in UPDATES:
            self._updates[id(worker)] = self._updates.get(id(worker), 0) + 1


class Requests:
    """A process that serves requests concurrently: in `phase` while it has any."""

    def __init__(self, process: Process, phase: str) -> None:
        self._process, self._phase = process, phase
        self._lock = ShortLock()
        self._num_active = 0

    @contextmanager
    def one(self, role: str, index: int, rank: int) -> Iterator[None]:
        _safely(self._count, 1, role, index, rank)
        try:
            yield
        finally:
            _safely(self._count, -1, role, index, rank)

    def _count(self, change: int, role: str, index: int, rank: int) -> None:
        with self._lock:
            self._process.register(role, index, rank)
            self._num_active += change
            reporter.update(requests_active=self._num_active)
            if change < 0:
                reporter.progress()
            if self._num_active == (1 if change > 0 else 0):
                reporter.enter_phase(self._phase if change > 0 else PHASE_WAIT)


_process = Process()
_rewards = Requests(_process, PHASE_SCORE)
_requests = Requests(_process, PHASE_WAIT)


def role_of(worker: Any) -> str:
    """Of a worker of a group, by what verl calls it."""
    role, name = str(getattr(worker, "role", "")), type(worker).__name__
    if "Critic" in name or getattr(getattr(worker, "config", None), "model_type", "") == "value_model":
        return "critic"
    if "Reward" in name:
        return "reward"
    if "actor" in role or not role:
        return "trainer"
    return "reference" if "ref" in role else "rollout" if "rollout" in role else "trainer"


def _wrap_register(decorator: ModuleType) -> None:
    original = decorator.register

    @functools.wraps(original)
    def register(*args: Any, **kwargs: Any) -> Any:
        decorate = original(*args, **kwargs)

        def reported(function: Any) -> Any:
            name = getattr(function, "__name__", "")
            return decorate(_called(function, name) if name in WORK or name in FIRST else function)

        return reported

    decorator.register = register  # type: ignore[attr-defined]


def _called(function: Any, name: str) -> Any:
    # Ray may send these functions to other processes by value: they refer to this module by name and hold no state.
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            with call(self, name, (*args, *kwargs.values())):
                return await function(self, *args, **kwargs)

        return call_async

    @functools.wraps(function)
    def call_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        with call(self, name, (*args, *kwargs.values())):
            return function(self, *args, **kwargs)

    return call_sync


def call(worker: Any, method: str, args: tuple[Any, ...]) -> Any:
    """`Process.call` of this process."""
    if any(c.__name__ == RECEIVER for c in type(worker).__mro__):
        return nullcontext()
    return _process.call(worker, method, args)


def _wrap_reward_loop(module: ModuleType) -> None:
    worker = module.RewardLoopWorker
    original = worker.compute_score
    if not inspect.iscoroutinefunction(original):
        raise TypeError("RewardLoopWorker.compute_score is no coroutine function")

    @functools.wraps(original)
    async def compute_score(self: Any, *args: Any, **kwargs: Any) -> Any:
        with scoring():
            return await original(self, *args, **kwargs)

    worker.compute_score = compute_score


def scoring() -> Any:
    """One reward of this process, which is an actor with a number in its name."""
    return _rewards.one("reward", _number_of_actor(), 0)


@functools.cache
def _number_of_actor() -> int:
    try:
        name = sys.modules["ray"].get_runtime_context().get_actor_name() or ""
    except Exception:  # noqa: BLE001 the job goes on
        name = ""
    found = re.search(r"_(\d{1,6})$", name)
    return int(found.group(1)) if found else 0


def _wrap_servers(module: ModuleType) -> None:
    """Every class of the module that generates and knows its replica: names differ between versions."""
    classes: list[Any] = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    for server in classes:
        original = vars(server).get("generate")
        if inspect.iscoroutinefunction(original):
            server.generate = _served(original)


def _served(original: Any) -> Any:
    @functools.wraps(original)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with serving(self):
            return await original(self, *args, **kwargs)

    return generate


def serving(server: Any) -> Any:
    """One request of a server."""
    return _requests.one("rollout", _number(server, "replica_rank"), _number(server, "node_rank"))


def _number(server: Any, name: str) -> int:
    """0: it has none."""
    try:
        return int(getattr(server, name, 0))
    except Exception:  # noqa: BLE001 the request goes on
        return 0


def _wrap_tracking(module: ModuleType) -> None:
    tracking = module.Tracking
    original = tracking.log

    @functools.wraps(original)
    def log(self: Any, *args: Any, **kwargs: Any) -> Any:
        logged(*[args[n] if len(args) > n else kwargs.get(name) for n, name in enumerate(("data", "step"))])
        return original(self, *args, **kwargs)

    tracking.log = log


def logged(metrics: Any, step: Any) -> None:
    """Metrics of one step, from the process that runs the training loop. Never raises."""
    _safely(_logged, _process, metrics, step)


def _logged(process: Process, metrics: Any, step: Any) -> None:
    if not isinstance(metrics, Mapping) or STEP_KEY not in metrics:
        return
    if not process.is_registered and "RANK" not in os.environ:  # a rank of torchrun logs its own steps
        process.register(CONTROLLER, 0, 0)
    training = process.training
    if process.is_controller:
        training.begin_step(int(step))
        training.end_step(compared=False)
    training.update(**{name: first_number(metrics, keys) for name, keys in VALUES.items()})
    training.health(**{name: known_number(first_number(metrics, keys)) for name, keys in HEALTH.items()})


_failed: set[str] = set()


def _safely(act: Callable[..., None], *args: Any) -> None:
    try:
        act(*args)
    except Exception as e:  # noqa: BLE001 the job goes on
        if act.__name__ not in _failed:
            _failed.add(act.__name__)
            logger.warning("rolecall could not report (logged once): %s: %s", type(e).__name__, e)
