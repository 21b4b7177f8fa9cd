"""How many tokens the rollouts of a run generate while something happens to others."""

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.cluster.actors import report_tokens

PERIOD_SECONDS = 0.2
JOIN_SECONDS = 10.0


@dataclass
class TokenCounter:
    """Tokens that each rollout's process has generated, read from its state page several times a second."""

    run: RunDir
    seen: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts in a thread for as long as the block lasts."""
        stop = threading.Event()
        thread = threading.Thread(target=self._count, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(JOIN_SECONDS)

    def _count(self, stop: threading.Event) -> None:
        read = report_tokens(self.run)
        with closing(Journal(self.run.database_url, create=False)) as journal:
            while not stop.wait(PERIOD_SECONDS):
                rollouts = [a for r, a in journal.current().items() if r.startswith("rollout/")]
                self.seen.append((time.time(), {a.replica: read(a) or 0 for a in rollouts}))

    def rates(self, replicas: Collection[str], since: float, until: float, window_seconds: float) -> list[float]:
        """Tokens a second of these replicas together, in each window between two wall times. Empty: not counted then,
        or for less than a window."""
        counts = [(at, sum(by[r] for r in replicas)) for at, by in self.seen if since <= at <= until]
        found, first = [], counts[0] if counts else (since, 0)
        for at, number in counts:
            if at - first[0] >= window_seconds:
                found.append((number - first[1]) / (at - first[0]))
                first = (at, number)
        return found
