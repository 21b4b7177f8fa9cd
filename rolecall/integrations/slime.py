"""slime: its trainers and its rollout manager, through flags of slime that take the path of a function.

    python train.py ... \\
        --custom-megatron-init-path rolecall.integrations.slime.megatron_init \\
        --custom-rollout-log-function-path rolecall.integrations.slime.rollout_log

Either works without the other. A trainer registers before its model is built, with role and rank, and its optimizer
steps come from torch's hooks as under `rolecall exec`. The rollout manager reports each rollout, with slime's number of
it, once its samples are rewarded. Signatures: slime's docs/en/get_started/customization.md.
"""

import functools
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from rolecall.agent.reporter import reporter
from rolecall.integrations.training import Training, watch_optimizers

logger = logging.getLogger(__name__)

CRITIC, CONTROLLER = "critic", "controller"
TRUNCATED = "TRUNCATED"
"""Name of the `Sample.Status` of an answer that was cut off."""
FRAMES_MAX = 6
"""Between `megatron_init` and the actor whose `init` led to its call: one function of slime, and decorators."""


def megatron_init(args: Any) -> None:
    """For `--custom-megatron-init-path`: called in each trainer, once its process group is there. Never raises."""
    try:
        Training().begin(rank=int(args.rank), world_size=int(args.world_size), **_named(_role_of_caller()))
        watch_optimizers(reporter)
    except Exception as e:  # noqa: BLE001 the job goes on
        logger.warning("rolecall does not watch this trainer: %s: %s", type(e).__name__, e)


def rollout_log(
    rollout_id: int, args: Any, samples: Sequence[Any], rollout_extra_metrics: object, rollout_time: float
) -> bool:
    """For `--custom-rollout-log-function-path`: called in the rollout manager, after each rollout. Never raises. False:
    slime logs the rollout as it does without this function."""
    del rollout_extra_metrics, rollout_time
    training = _manager()
    try:
        training.begin_step(int(rollout_id))
        training.end_step(compared=False)
        training.update(reward=_mean(_rewards(args, samples)))
        training.health(
            response_length=_mean(sample.response_length for sample in samples),
            truncated_fraction=_mean(sample.status.name == TRUNCATED for sample in samples),
        )
    except Exception as e:  # noqa: BLE001 the job goes on
        training.give_up(e)
    return False


@functools.cache
def _manager() -> Training:
    """This process, which is the rollout manager: the job has one."""
    training = Training()
    training.begin(rank=0, **_named(CONTROLLER))
    return training


def _named(role: str) -> dict[str, Any]:
    """Unless the environment names the process. Empty `role`: a trainer, which is the reporter's default."""
    is_named = any(name in os.environ for name in ("ROLECALL_ROLE", "ROLECALL_REPLICA"))
    return {"role": role, "replica": f"{role}/0"} if role and not is_named else {}


def _role_of_caller() -> str:
    """`critic` in an actor that trains one, else empty. slime gives the hook no role, and the same rank of policy and
    critic are two processes: the actor is looked for among the callers."""
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        role = getattr(frame.f_locals.get("self"), "role", None)
        if isinstance(role, str):
            return CRITIC if role == CRITIC else ""
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def _rewards(args: Any, samples: Iterable[Any]) -> list[float]:
    """Those that are numbers: an aborted sample has none."""
    found: list[float] = []
    for sample in samples:
        with suppress(Exception):  # whatever a reward function returns
            found.append(float(sample.get_reward_value(args)))
    return found


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
