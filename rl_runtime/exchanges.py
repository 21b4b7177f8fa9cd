"""Exchanges with the other ranks of this replica: counted, and timed.

The ranks of a replica finish each unit of work together, so a slow one makes the wall times of all of them equal. The
time that a rank waits inside exchanges separates them: the slow rank is the one that the others wait for.

Only a wait that blocks the calling thread is seen. Collectives on a CPU do; those of NCCL are kernels that run after
the call has returned, so on GPUs nearly all of the wait passes at the next synchronisation, outside of an exchange.
"""

import os
from collections.abc import Callable
from functools import wraps
from time import monotonic
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")

SCHEDSTAT = "/proc/thread-self/schedstat"

_waited_seconds = 0.0


def waited_seconds() -> float:
    """Wall time that this process has waited in exchanges so far, without time in which its thread could have run but
    got no CPU: that is run delay, which the detector subtracts from all of a process's time."""
    return _waited_seconds


class exchange:
    """`with exchange():` waits for other ranks of this replica. One thread at a time."""

    __slots__ = ("_delay_seconds", "_since")

    def __enter__(self) -> Self:
        reporter.exchange()
        self._delay_seconds, self._since = run_delay_seconds(), monotonic()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        global _waited_seconds
        inside = monotonic() - self._since
        _waited_seconds += max(0.0, inside - (run_delay_seconds() - self._delay_seconds))


def exchanging(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, of which each call is an exchange."""

    @wraps(call)
    def timed(*args: P.args, **kwargs: P.kwargs) -> T:
        with exchange():
            return call(*args, **kwargs)

    return timed


class UnitOfWork:
    """One unit of work of this process, from here on: its own time is what it does not wait in exchanges."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._since, self._waited = clock, clock.monotonic(), waited_seconds()

    def done(self, tokens: int = 0) -> None:
        """Reports it. `tokens`: this rank's share."""
        waited = waited_seconds() - self._waited
        own = self._clock.monotonic() - self._since - waited
        reporter.progress(busy_seconds=own, exchange_seconds=waited, tokens=tokens)


def share(number: int, rank: int, ranks: int) -> int:
    """A rank's part of a number that all ranks have together: equal up to one."""
    return number * (rank + 1) // ranks - number * rank // ranks


def run_delay_seconds(path: str = SCHEDSTAT) -> float:
    """How long the calling thread was runnable without a CPU so far, throttling by a quota included; 0 where the kernel
    does not say (proc(5), schedstat)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        _ran, waited, _slices = os.read(descriptor, 128).split()
        return int(waited) / 1e9
    except (OSError, ValueError):
        return 0.0
    finally:
        os.close(descriptor)
