"""The part of the chaos schedule that a trainer of another system can meet, in the same seeded order."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from benchmarks.recovery.chaos.schedule import MATRIX, TRIES_MAX, Fault, is_reason, schedule

SYSTEMS = ("torchft", "ray-train")
ROLE = "trainer"
NOT_THERE = {
    "corrupted transfer": "weights travel inside the library, where the training loop has no point at which it could "
    "flip a byte; measured for neither",
    "agent dead": "no telemetry agent runs beside such a job",
}
"""Kinds of the chaos schedule against a trainer that are not injected here, and why."""


def trainer_faults(seed: int) -> list[Fault]:
    return [f for f in schedule(seed) if f.role == ROLE and f.name not in NOT_THERE]


def piece(
    system: str, seed: int, lines: Sequence[dict[str, Any]], count: int, only: Collection[str] = ()
) -> list[Fault]:
    """The next faults of the schedule that were not injected yet, nor refused twice. `only`: of these kinds; empty: of
    all."""
    of_system = [x for x in lines if x["line"] == "fault" and (x["system"], x["seed"]) == (system, seed)]
    tries = Counter(x["number"] for x in of_system)
    done = {x["number"] for x in of_system if x["injected"]} | {n for n, k in tries.items() if k >= TRIES_MAX}
    return [f for f in trainer_faults(seed) if f.number not in done and (not only or f.name in only)][:count]


def kinds() -> list[str]:
    """Rows of the report, in the order of the chaos report."""
    return [name for name, row in MATRIX.items() if not is_reason(row[ROLE]) and name not in NOT_THERE]


def left_out() -> Iterator[tuple[str, str]]:
    """(kind of fault, why it is not injected)."""
    yield from NOT_THERE.items()
    for name, row in MATRIX.items():
        if is_reason(row[ROLE]):
            yield name, row[ROLE]
