"""A Prometheus server for pages. A background thread polls it, so a slow or unreachable server does not delay a page,
which shows the last response and its age.
"""

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rolecall.core.clock import Clock
from rolecall.core.errors import RolecallError
from rolecall.dashboards.data.hardware import Query, samples
from rolecall.detector.sources.prometheus_api import (
    Client,
    PrometheusClientLimits,
    PrometheusResponseTooLarge,
    PrometheusUnavailable,
)

ASK_SECONDS = 10.0
"""Poll interval. Targets are scraped about every 15 s, and the server has other clients."""
FIRST_SECONDS = 0.7
"""How long the first page waits for the first response."""
LIMITS = PrometheusClientLimits(answer_bytes_max=8 << 20, connect_seconds=2.0, answer_seconds=5.0, patience_seconds=0.0)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSnapshot(Generic[Answer]):
    """The latest response. `error`: why there is no newer one, empty if there is; `at`: wall seconds of the
    response."""

    answer: Answer | None = None
    at: float | None = None
    error: str = ""


class PrometheusPoller(Generic[Answer]):
    """Thread-safe; queries only while a page is open. One per process, server and page."""

    def __init__(self, url: str, authorization: str, clock: Clock, read: Callable[[Query], Answer]) -> None:
        """`read`: the queries of one poll."""
        self._url, self._authorization, self._clock, self._read = url, authorization, clock, read
        self._lock = threading.Lock()
        self._seen: PrometheusSnapshot[Answer] = PrometheusSnapshot()
        self._asked_at: float | None = None
        self._answered = threading.Event()

    def latest(self, patience_seconds: float = 0.0) -> PrometheusSnapshot[Answer]:
        """The latest response; starts a new poll when it is old. Waits briefly, or for `patience_seconds` if that is
        longer, for the very first one."""
        with self._lock:
            now = self._clock.monotonic()
            first = self._asked_at is None
            if self._asked_at is None or now - self._asked_at >= ASK_SECONDS:
                self._asked_at = now
                self._answered.clear()
                threading.Thread(target=self._ask, name="dashboard prometheus", daemon=True).start()
        if first:
            self._answered.wait(max(FIRST_SECONDS, patience_seconds))
        return self._seen

    def wait(self, seconds: float) -> bool:
        """Whether the current poll finishes within `seconds`."""
        return self._answered.wait(seconds)

    def _ask(self) -> None:
        try:
            with closing(Client(self._url, self._clock, authorization=self._authorization, limits=LIMITS)) as client:
                answer = self._read(
                    lambda expression: samples(client.ask("query", {"query": expression}, lambda: True))
                )
            self._seen = PrometheusSnapshot(answer=answer, at=self._clock.wall())
        except (PrometheusUnavailable, PrometheusResponseTooLarge, RolecallError) as e:
            self._seen = replace(self._seen, error=str(e))
        except Exception as e:  # noqa: BLE001 - any error is shown on the page
            self._seen = replace(self._seen, error=repr(e))
        finally:
            self._answered.set()
