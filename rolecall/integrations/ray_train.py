"""Ray Train: the workers of a training function, and its controller.

    from rolecall.integrations.ray_train import RolecallCallback, reported

    trainer = TorchTrainer(
        reported(train_func),
        run_config=RunConfig(callbacks=[RolecallCallback()]),
    )

`reported` is what a worker needs: it registers with the rank that Ray Train gave it, its steps come from torch's hooks
as under `rolecall exec`, and an exception of the training function is reported before Ray takes it. The callback runs
in the controller, which sees neither steps nor phases of workers: it tells what they give to `ray.train.report`.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

try:
    import ray.train
    from ray.train import UserCallback
except ImportError as e:
    raise ImportError("rolecall.integrations.ray_train needs Ray Train 2.43 or newer: pip install 'ray[train]'") from e

from rolecall.agent.reporter import reporter
from rolecall.integrations.training import Training, first_number, hook, watch_optimizers

logger = logging.getLogger(__name__)

VALUES = {
    "loss": ("loss", "train_loss"),
    "grad_norm": ("grad_norm",),
    "reward": ("reward", "episode_return_mean"),
}
"""Argument of `reporter.update` -> keys of reported metrics, the first one present counts."""


class RolecallCallback(UserCallback):  # type: ignore[misc] # Ray's classes are not typed here
    """The controller of a run, as `controller/0`: the number of reports is its step."""

    def __init__(self, training: Training | None = None) -> None:
        self._given, self._num_reports = training, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return RolecallCallback, ()  # it is made in the driver and sent to the controller

    @functools.cached_property
    def _training(self) -> Training:
        return self._given or Training()

    @hook
    def after_report(self, run_context: object, metrics: Sequence[Mapping[str, Any]], checkpoint: object) -> None:
        if not self._num_reports:
            self._training.begin(role="controller", replica="controller/0", rank=0)
        self._num_reports += 1
        self._training.begin_step(self._num_reports)
        self._training.end_step(compared=False)
        if metrics:
            self._training.update(**{name: first_number(metrics[0], keys) for name, keys in VALUES.items()})


def reported(train_func: Callable[..., Any]) -> Callable[..., Any]:
    """The same training function, whose workers report."""

    # Ray Train looks at the signature: with a parameter or without.
    if inspect.signature(train_func).parameters:

        @functools.wraps(train_func)
        def with_config(config: Any) -> Any:
            return run(functools.partial(train_func, config))

        return with_config

    @functools.wraps(train_func)
    def without() -> Any:
        return run(train_func)

    return without


def run(train: Callable[[], Any]) -> Any:
    """Calls `train` in a worker of Ray Train that reports."""
    training = Training()
    forget: Callable[[], None] | None = None
    try:
        context = ray.train.get_context()
        training.begin(
            rank=context.get_world_rank(),
            world_size=context.get_world_size(),
            local_rank=context.get_local_rank(),
            run_id=context.get_experiment_name() or "",
        )
        forget = watch_optimizers(reporter)
    except Exception as e:  # noqa: BLE001 the job goes on
        logger.warning("rolecall does not watch this worker: %s: %s", type(e).__name__, e)
    try:
        return train()
    except BaseException as e:
        training.failed(e)
        raise
    finally:
        training.wait()
        if forget is not None:
            try:
                forget()
            except Exception as e:  # noqa: BLE001 what the training function returned or raised counts
                logger.warning("rolecall cannot remove its hooks: %s: %s", type(e).__name__, e)
