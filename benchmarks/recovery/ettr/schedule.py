"""When which replica is killed: the same for every arm."""

import random
from dataclasses import dataclass

ARMS = ("none", "role", "warm", "cold")
ROLES = {"trainer": ("trainer",), "rollout": ("rollout",), "both": ("trainer", "rollout")}
NUM_TRAINERS, NUM_ROLLOUTS = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One fault of the schedule: once `step` is committed, `share` of a step later."""

    step: int
    share: float
    role: str
    index: int


def schedule(seed: int, num_steps: int, percent: float, roles: str) -> list[Kill]:
    """A kill for each `100 / percent` steps; the same for the same arguments. None falls into the first step, or so
    late that the run could end before it."""
    rng = random.Random(f"ettr-{seed}-{num_steps}-{percent:g}-{roles}")
    width = max(2, round(100 / percent))
    kills = []
    for first in range(0, num_steps - width + 1, width):
        role = rng.choice(ROLES[roles])
        number = NUM_TRAINERS if role == "trainer" else NUM_ROLLOUTS
        step = rng.randrange(first, first + max(1, width - 2))
        kills.append(Kill(step=step, share=rng.random(), role=role, index=rng.randrange(number)))
    return kills
