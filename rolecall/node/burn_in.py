"""Burn-in: work with a known result on this machine, compared bit by bit.

Arithmetic on the GPU and on each core must give the same bits every time; memory, disk and loopback must return what
was written. Each check runs in a separate process with a deadline, because a faulty machine may hang during the test.

A check that could not be done gives its reason and neither passes nor fails. A pass means that no fault was found in
the given time, not that there is none.
"""

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rolecall.core.clock import Clock, SystemClock

GRACE_SECONDS = 60.0
"""What a check may take beyond its share: process start and the import of torch from a slow disk."""
KILL_SECONDS = 5.0
"""How long a killed process may take to end; one in an uninterruptible wait is reported and left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """`passed` None: it could not be done; `because` gives the reason."""

    name: str
    passed: bool | None
    because: str
    values: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInBudget:
    """How long a check works and where it may write."""

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
        found.append(_in_process(name, check, work, grace_seconds))
    return BurnInResult(seconds=round(clock.monotonic() - began, 3), checks=tuple(found))


def _in_process(name: str, check: Check, work: BurnInBudget, grace_seconds: float) -> CheckResult:
    """Runs one check in a separate process, which is killed at its deadline."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, name, check, work), daemon=True)
    process.start()
    theirs.close()
    limit = work.seconds + grace_seconds
    try:
        if not ours.poll(limit):
            return CheckResult(name=name, passed=False, because=f"no result within {limit:.0f} s{_end(process)}")
        found: CheckResult = ours.recv()
        return found
    except EOFError:
        process.join(KILL_SECONDS)
        return CheckResult(name=name, passed=False, because=f"its process exited with code {process.exitcode}")
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
    except Exception as e:  # noqa: BLE001 - whatever a driver raises is a result
        to.send(CheckResult(name=name, passed=False, because=f"{type(e).__name__}: {e}"[:500]))
    finally:
        to.close()
