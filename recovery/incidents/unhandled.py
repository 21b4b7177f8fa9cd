"""What cannot be handled: one incident whose handling raises is set apart, and the others go on.

It is tried again after a pause that doubles up to `PAUSE_SECONDS_MAX`, for as long as it is open; after `TRIES_MAX`
failures in a row a person is called, once. Kept in memory only: a successor that meets the same error counts anew, and
the call has a key in the journal, so that nobody is called twice for it.

What is everybody's trouble is raised on: a lease that is over, a database that is busy or away.
"""

import json
import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rolecall.core.clock import Clock
from rolecall.core.errors import JournalError

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
"""About a tick: long enough for a file or a socket that was just being replaced."""
PAUSE_SECONDS_MAX = 30.0
TRIES_MAX = 5
"""Four pauses, 7.5 s in all: longer than any restart of ours takes, shorter than a person would wait for a page."""
ERROR_CHARS_MAX = 500


@dataclass(slots=True)
class HandlingFailure:
    name: str
    failures: int = 0
    error: str = ""
    retry_at: float = 0.0  # monotonic

    @property
    def spent(self) -> bool:
        """Whether a person should hear of it."""
        return self.failures >= TRIES_MAX

    def because(self) -> str:
        return (
            f"{self.name} cannot be handled: {self.error} ({self.failures} times in a row); it is tried again every "
            f"{PAUSE_SECONDS_MAX:.0f} s, everything else goes on"
        )


class HandlingFailures:
    """Owned by one watch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, HandlingFailure] = {}

    def due(self, name: str) -> bool:
        """Whether `name` may be tried now."""
        known = self._known.get(name)
        return known is None or self._clock.monotonic() >= known.retry_at

    def last_try(self, name: str) -> bool:
        """Whether one more failure makes it a person's business."""
        known = self._known.get(name)
        return known is not None and known.failures >= TRIES_MAX - 1

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Whatever the block raises is the trouble of `name` alone.

        Raises:
            JournalError: the lease is over, or the journal cannot be used: nobody could be handled now.
        """
        try:
            yield
        except JournalError:
            raise
        except Exception as e:  # noqa: BLE001
            # Deliberate: see the module's first lines. All state is in the journal, so the next try begins there.
            self._failed(name, e)
        else:
            if self._known.pop(name, None) is not None:
                logger.warning("%s", json.dumps({"event": "handled_again", "name": name}))

    def spent(self) -> list[HandlingFailure]:
        """Those that a person should hear of."""
        return [t for t in self._known.values() if t.spent]

    def words(self) -> dict[str, str]:
        """What cannot be handled now, and why."""
        return {t.name: t.error for t in self._known.values()}

    def keep_only(self, names: Container[str]) -> None:
        """The others are over."""
        self._known = {n: t for n, t in self._known.items() if n in names}

    def _failed(self, name: str, error: Exception) -> None:
        trouble = self._known.setdefault(name, HandlingFailure(name))
        trouble.failures += 1
        trouble.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
        pause = min(PAUSE_SECONDS_MAX, FIRST_PAUSE_SECONDS * 2.0 ** min(trouble.failures - 1, 10))
        trouble.retry_at = self._clock.monotonic() + pause
        line = {"event": "not_handled", "name": name, "error": trouble.error, "failures": trouble.failures}
        logger.error("%s", json.dumps({**line, "retry_seconds": pause}), exc_info=error)
