"""What tests share: waiting for a condition with a deadline, never for a time; and which cases run every time."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

PATIENCE_SECONDS: Final = 60.0
"""How long a test waits for what must happen. Waiting ends with the condition, so a large number costs nothing; a small
one fails on a loaded machine, where the start of one process can take several seconds."""


def some(cases: Sequence[tuple[Any, ...]], kept: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of all cases; those that are not `kept` for every run of the tests are among the long ones."""
    assert all(case in cases for case in kept), "a case that does not exist"
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.long) for case in cases]


_PAUSE = threading.Event()  # never set: its wait is the pause between two looks


def eventually(predicate: Callable[[], object], what: str, *, seconds: float = PATIENCE_SECONDS) -> None:
    """Returns once `predicate()` is true; fails the test, naming `what`, when it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        _PAUSE.wait(0.01)
