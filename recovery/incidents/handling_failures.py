"""Isolation of incidents whose handling raises: the others continue.

Handling is retried after a pause that doubles up to `PAUSE_SECONDS_MAX` while the incident is open; after `TRIES_MAX`
failures in a row on-call is paged once. Kept in memory only: a successor counts from zero, and the page has a key in
the journal, so it is not sent twice.

Errors that concern every incident are raised: a lost lease, a database that is busy or unavailable.
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
"""About one tick: long enough for a file or socket that was just being replaced."""
PAUSE_SECONDS_MAX = 30.0
TRIES_MAX = 5
"""Four pauses, 7.5 s in all: longer than any restart of our processes, short enough for a page."""
ERROR_CHARS_MAX = 500


@dataclass(slots=True)
class HandlingFailure:
    name: str
    failures: int = 0
    error: str = ""
    retry_at: float = 0.0  # monotonic

    @property
    def exhausted(self) -> bool:
        """Whether on-call should be paged."""
        return self.failures >= TRIES_MAX

    def because(self) -> str:
        return (
            f"{self.name} cannot be handled: {self.error} ({self.failures} failures in a row); retried every "
            f"{PAUSE_SECONDS_MAX:.0f} s, other incidents are not affected"
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
        """Whether one more failure pages on-call."""
        known = self._known.get(name)
        return known is not None and known.failures >= TRIES_MAX - 1

    @contextmanager
    def isolate(self, name: str) -> Iterator[None]:
        """Errors of the block count as handling failures of `name`.

        Raises:
            JournalError: the lease is lost or the journal unusable, so no incident can be handled now.
        """
        try:
            yield
        except JournalError:
            raise
        except Exception as e:  # noqa: BLE001
            # Deliberate: see the module docstring. All state is in the journal, so the next try starts from it.
            self._failed(name, e)
        else:
            if self._known.pop(name, None) is not None:
                logger.warning("%s", json.dumps({"event": "handled_again", "name": name}))

    def exhausted(self) -> list[HandlingFailure]:
        """Those for which on-call should be paged."""
        return [f for f in self._known.values() if f.exhausted]

    def errors(self) -> dict[str, str]:
        """name -> error of everything that cannot be handled now."""
        return {t.name: t.error for t in self._known.values()}

    def keep_only(self, names: Container[str]) -> None:
        """Forgets all others."""
        self._known = {n: t for n, t in self._known.items() if n in names}

    def _failed(self, name: str, error: Exception) -> None:
        failure = self._known.setdefault(name, HandlingFailure(name))
        failure.failures += 1
        failure.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
        pause = min(PAUSE_SECONDS_MAX, FIRST_PAUSE_SECONDS * 2.0 ** min(failure.failures - 1, 10))
        failure.retry_at = self._clock.monotonic() + pause
        line = {"event": "not_handled", "name": name, "error": failure.error, "failures": failure.failures}
        logger.error("%s", json.dumps({**line, "retry_seconds": pause}), exc_info=error)
