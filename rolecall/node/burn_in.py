"""Burn-in: this machine works hard on what has one right answer, and the answers are compared bit by bit.

Arithmetic on the GPU and on each core must give the same bits every time, memory and disk must give back what they were
given, loopback must carry it unchanged. Each check runs in a process of its own with a deadline: a machine that is worth
testing may hang in the middle of the test, and that is an answer, too.

What a check could not do, it says; it then has neither passed nor failed. A burn-in that passes says that nothing was
found in so many seconds: not that nothing is there.
"""

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rolecall.core.clock import Clock, SystemClock

GRACE_SECONDS = 60.0
"""What a check may take beyond its share: a process that starts, and torch that is imported there, on a slow disk."""
KILL_SECONDS = 5.0
"""How long a killed process may take to end; one in an uninterruptible wait is left behind, and said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """`passed` None: it could not be done, for the reason that it gives."""

    name: str
    passed: bool | None
    because: str
    values: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInBudget:
    """What a check is given: how long to work, and where it may write."""

    seconds: float
    folder: Path


Check = Callable[[BurnInBudget, Clock], CheckResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInResult:
    seconds: float  # of all
    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """No check failed, and at least one was done."""
        return any(c.passed for c in self.checks) and all(c.passed is not False for c in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "seconds": self.seconds, "checks": [asdict(c) for c in self.checks]}


def burn_in(
    checks: Mapping[str, Check],
    seconds: float,
    folder: Path,
    *,
    clock: Clock | None = None,
    grace_seconds: float = GRACE_SECONDS,
    progress: Callable[[str], None] | None = None,
) -> BurnInResult:
    """Runs the checks one after the other, each for its share of `seconds`."""
    clock = clock or SystemClock()
    began = clock.monotonic()
    work = BurnInBudget(seconds=seconds / max(1, len(checks)), folder=folder)
    found = []
    for name, check in checks.items():
        if progress is not None:
            progress(f"{name}: for {work.seconds:.0f} s")
        found.append(_apart(name, check, work, grace_seconds))
    return BurnInResult(seconds=round(clock.monotonic() - began, 3), checks=tuple(found))


def _apart(name: str, check: Check, work: BurnInBudget, grace_seconds: float) -> CheckResult:
    """One check in a process of its own, which is killed at its deadline."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, name, check, work), daemon=True)
    process.start()
    theirs.close()
    limit = work.seconds + grace_seconds
    try:
        if not ours.poll(limit):
            return CheckResult(name=name, passed=False, because=f"no answer within {limit:.0f} s{_end(process)}")
        found: CheckResult = ours.recv()
        return found
    except EOFError:
        process.join(KILL_SECONDS)
        return CheckResult(name=name, passed=False, because=f"its process ended with {process.exitcode}")
    finally:
        _end(process)
        ours.close()


def _end(process: Any) -> str:
    process.join(0.5)
    if process.is_alive():
        process.kill()
        process.join(KILL_SECONDS)
    return "; its process cannot be killed" if process.is_alive() else ""


def _run(to: Connection, name: str, check: Check, work: BurnInBudget) -> None:
    try:
        to.send(check(work, SystemClock()))
    except Exception as e:  # noqa: BLE001 - whatever a driver raises is an answer of this machine
        to.send(CheckResult(name=name, passed=False, because=f"{type(e).__name__}: {e}"[:500]))
    finally:
        to.close()
