"""What tests share: waiting for a condition with a deadline, never for a time."""

import threading
import time
from collections.abc import Callable

_PAUSE = threading.Event()  # never set: its wait is the pause between two looks


def eventually(predicate: Callable[[], object], seconds: float, what: str) -> None:
    """Returns once `predicate()` is true; fails the test, naming `what`, when it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        _PAUSE.wait(0.01)
