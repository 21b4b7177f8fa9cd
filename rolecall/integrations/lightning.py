"""A callback for the `Trainer` of Lightning: steps, exceptions, loss.

    from rolecall.integrations.lightning import RolecallCallback

    trainer = Trainer(..., callbacks=[RolecallCallback()])

A step is one of the trainer's global steps; with gradient accumulation it takes several batches. Between two steps, in
validation, and while a checkpoint is written, no progress is due. Works with `lightning` and `pytorch_lightning`,
whichever the job has imported.
"""

import importlib
import importlib.util
import sys
from typing import Any

from rolecall.integrations.training import Training, first_number, hook

NAMES = ("lightning.pytorch", "pytorch_lightning")
VALUES = {
    "loss": ("train_loss", "loss", "train/loss", "train_loss_step"),
    "grad_norm": ("grad_norm", "grad_2.0_norm_total"),
    "reward": ("reward", "train/reward"),
}
"""Argument of `reporter.update` -> names under which jobs log it (`self.log`); the first one present counts."""


def _bases() -> tuple[type, ...]:
    """The callback classes of the packages that the job has imported, else of the one that is installed: the two are
    different classes, and a trainer accepts only its own."""
    names = [name for name in NAMES if name in sys.modules]
    if not names:
        names = [name for name in NAMES if importlib.util.find_spec(name.partition(".")[0]) is not None][:1]
    if not names:
        raise ImportError("rolecall.integrations.lightning needs Lightning: pip install lightning")
    return tuple(dict.fromkeys(importlib.import_module(name).Callback for name in names))


_Callback: Any = type("_Callback", _bases(), {})


class RolecallCallback(_Callback):  # type: ignore[misc]
    """Give it to the trainer of every rank."""

    def __init__(self, training: Training | None = None) -> None:
        super().__init__()
        self._training = training or Training()
        self._steps_done = -1  # of the step that has begun; -1: none has

    def __reduce__(self) -> tuple[Any, ...]:
        return RolecallCallback, ()  # a trainer is copied and sent to other processes

    @hook
    def on_train_start(self, trainer: Any, pl_module: object) -> None:
        self._steps_done = -1
        # Where Lightning starts the processes of a job itself, no variable of the environment tells the rank.
        self._training.begin(
            overrides=False, rank=trainer.global_rank, world_size=trainer.world_size, local_rank=trainer.local_rank
        )

    @hook
    def on_train_batch_start(self, trainer: Any, pl_module: object, batch: object, batch_idx: int) -> None:
        if self._steps_done < 0:  # not within a step of several batches
            self._steps_done = trainer.global_step
            self._training.begin_step(trainer.global_step + 1)

    @hook
    def on_train_batch_end(
        self, trainer: Any, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps_done:
            return
        self._steps_done = -1
        self._training.end_step()
        if trainer.global_step % max(1, getattr(trainer, "log_every_n_steps", 0) or 1) == 0:
            # Only where Lightning itself reads them: they may be on a GPU.
            metrics = getattr(trainer, "logged_metrics", None) or {}
            self._training.update(**{name: first_number(metrics, keys) for name, keys in VALUES.items()})

    @hook
    def on_validation_start(self, trainer: object, pl_module: object) -> None:
        self._pause()

    @hook
    def on_train_epoch_end(self, trainer: object, pl_module: object) -> None:
        self._pause()

    @hook
    def on_train_end(self, trainer: object, pl_module: object) -> None:
        self._pause()

    @hook
    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        self._steps_done = -1
        self._training.failed(exception)

    def _pause(self) -> None:
        self._steps_done = -1
        self._training.wait()
