"""The in-process half of fault injection: a process injects faults into itself at named checkpoints, on request.

A process calls `checkpoint(name)` at each place where work may be interrupted (the constants below). Without the job's
permission this costs one comparison. With it, at most one `stat` per name and `CHECK_SECONDS` of
`runs/<id>/inject/<pid>-<start_ticks>.json`, a request written by the injector (`injector.py`), a separate process.
External faults (SIGKILL, SIGSTOP, a CPU quota) are injected there. This module has those that need the process itself:
a hang that holds the GIL, a lock that is never released, a read that never returns, a delay in each step, an exception
of user code, numbers that are wrong or not finite, a byte that changes on its way. All are bounded in time.
"""

import collections
import itertools
import json
import math
import os
import threading
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.ids import process_start_ticks
from rolecall.core.rundir import RunDir, write_atomically

CHECK_SECONDS = 0.05
"""Period at which a permitted process checks for a request; a stat takes about 2 microseconds."""
MEET_POLL_SECONDS = 0.002
MICROBATCH = "microbatch"  # before its forward pass
BACKWARD = "backward"
BUCKET = "bucket"  # of the reduce, or the vote after the last one
VOTE = "vote"
COPY = "copy"  # of another trainer's state
SNAPSHOT = "snapshot"  # for a checkpoint
ENGINE_STEP = "engine_step"
WEIGHTS = "weights"
SCORE = "score"


class InProcessFault(StrEnum):
    """In-process faults."""

    GIL = "gil"  # a busy loop in C that never releases the GIL
    LOCK = "lock"  # waits for a lock that is never released
    READ = "read"  # reads from a pipe that never delivers
    DELAY = "delay"  # sleeps in each later unit of work
    RAISE = "raise"  # an exception of user code
    NAN = "nan"  # this unit of work yields numbers that are not finite
    NANS = "nans"  # ... and so does each later one
    SCALE = "scale"  # ... that are finite and wrong
    SKEW = "skew"  # ... and so does each later one
    FLIP = "flip"  # the next tensor is sent with one byte flipped
    MEET = "meet"  # pauses here briefly, so that an external signal hits it in the middle of this work


FACTORS = {
    InProcessFault.NAN: math.nan,
    InProcessFault.NANS: math.nan,
    InProcessFault.SCALE: 1000.0,
    InProcessFault.SKEW: -1.0,
    InProcessFault.FLIP: -1.0,
}
"""By which these faults multiply the numbers of a unit of work. (FLIP: any number; the sender flips a byte.)"""
LASTING = frozenset({InProcessFault.DELAY, InProcessFault.SKEW, InProcessFault.NANS})
"""Faults of each unit of work from now on, until their bound or until they are withdrawn."""
ONCE = frozenset({InProcessFault.NAN, InProcessFault.SCALE, InProcessFault.FLIP})
"""Faults of one unit of work, over at once."""


class InjectedError(ValueError):
    """Raised by `raise`; represents an error in user code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionRequest:
    """One fault, requested of one process."""

    request_id: str
    how: InProcessFault
    seconds: float  # bound: the fault ends after this in any case
    at: str = ""  # checkpoint at which it takes effect; empty: any
    delay_seconds: float = 0.0  # DELAY: per unit of work
    message: str = ""  # RAISE: text of the exception

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        d = json.loads(text)
        return cls(**{**d, "how": InProcessFault(d["how"])})


def request_path(run: RunDir, pid: int, start_ticks: int) -> Path:
    return run.inject_dir / f"{pid}-{start_ticks}.json"


def effect_path(run: RunDir, pid: int, start_ticks: int) -> Path:
    """Written by the process at the moment the fault begins: {request_id, at, wall_at}."""
    return run.inject_dir / f"{pid}-{start_ticks}.effect.json"


class Injection:
    """One injection agreement of a process: for its working thread, or for the threads of its weight port."""

    def __init__(self, run_dir: str | Path, allowed: bool, *, clock: Clock | None = None) -> None:
        self._allowed = allowed
        self._clock = clock or SystemClock()
        self._run = RunDir(Path(run_dir))
        pid = os.getpid()
        ticks = process_start_ticks(pid)
        assert ticks is not None, "a process that runs has a start time"
        self._request_path, self._effect_path = request_path(self._run, pid, ticks), effect_path(self._run, pid, ticks)
        self._next_checks: dict[str, float] = {}
        self._done: set[str] = set()
        self._taking = threading.Lock()
        self._lasting: InjectionRequest | None = None
        self._lasts_until = 0.0

    def checkpoint(self, name: str) -> None:
        """A point where a fault may begin. If one was requested here, it returns late, never, or raises.

        Raises:
            InjectedError: the request says `raise`.
        """
        self.factor(name)

    def factor(self, name: str) -> float | None:
        """A checkpoint before a unit of work; the caller multiplies its numbers by what is returned.

        Raises:
            InjectedError: the request says `raise`.
        """
        if not self._allowed:
            return None
        now, factor = self._clock.monotonic(), None
        if now >= self._next_checks.get(name, 0.0):
            self._next_checks[name] = now + CHECK_SECONDS
            factor = self._begin_requested(name, now)
        if self._lasting is not None and (not self._lasting.at or self._lasting.at == name):
            if now >= self._lasts_until:
                self._lasting = None
            else:
                self._clock.sleep(self._lasting.delay_seconds)
                factor = FACTORS.get(self._lasting.how)
        return factor

    def _begin_requested(self, name: str, now: float) -> float | None:
        try:
            os.stat(self._request_path)
        except FileNotFoundError:
            self._lasting = None  # the injector withdrew its request
            return None
        request = self._read()
        if request is None or (request.at and request.at != name):
            return None
        with self._taking:  # several threads may be at this point, but there is only one fault
            if request.request_id in self._done:
                return None
            self._done.add(request.request_id)
            effect: dict[str, Any] = {"request_id": request.request_id, "at": name, "wall_at": self._clock.wall()}
            write_atomically(self._effect_path, json.dumps(effect))
        if request.how in LASTING:
            self._lasting, self._lasts_until = request, now + request.seconds
        elif request.how is InProcessFault.MEET:
            while self._clock.monotonic() < now + request.seconds and self._request_path.exists():
                self._clock.sleep(MEET_POLL_SECONDS)
        elif request.how not in FACTORS:
            _perform(request)
        return FACTORS.get(request.how)

    def _read(self) -> InjectionRequest | None:
        try:
            return InjectionRequest.from_json(self._request_path.read_text())
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # withdrawn between stat and read, or not a request: the safe choice is no fault


def _perform(request: InjectionRequest) -> None:
    match request.how:
        case InProcessFault.GIL:
            _hold_gil(request.seconds)
        case InProcessFault.LOCK:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=min(request.seconds, threading.TIMEOUT_MAX))
        case InProcessFault.READ:
            _read_in_vain(request.seconds)
        case InProcessFault.RAISE:
            raise InjectedError(request.message or "injected: a mistake in user code")
        case _:
            raise AssertionError(f"{request.how} is performed by Injection")


def _hold_gil(seconds: float) -> None:
    """A loop of about `seconds` in one C call: no bytecode runs in between, so the GIL is never released."""
    trial, clock = 2_000_000, SystemClock()
    begun = clock.monotonic()
    collections.deque(itertools.repeat(None, trial), maxlen=0)
    per_turn = max((clock.monotonic() - begun) / trial, 1e-10)
    collections.deque(itertools.repeat(None, max(0, int(seconds / per_turn) - trial)), maxlen=0)


def _read_in_vain(seconds: float) -> None:
    reader, writer = os.pipe()
    # End of file bounds the read.
    closer = threading.Timer(seconds, os.close, args=(writer,))
    closer.daemon = True
    closer.start()
    try:
        os.read(reader, 1)
    finally:
        os.close(reader)
