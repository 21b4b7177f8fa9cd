"""I/O of the display: reads the journal, and draws on the terminal or prints lines."""

import logging
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from rolecall.core.journal.journal import Journal
from rolecall.core.text import plain
from rolecall.session.display import plain_lines, render
from rolecall.views.snapshot import RunSnapshot, RunSnapshotProjection

logger = logging.getLogger(__name__)


class Screen:
    """Shows one run, redrawn in place (`live`) or as lines. A context manager."""

    def __init__(self, *, live: bool, title: str, num_steps: int | None = None, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False)
        self._title = title
        self._projection = RunSnapshotProjection(num_steps=num_steps)
        self._before: RunSnapshot | None = None
        self._note = ""
        self._printed: list[str] = []
        self._size = self._console.size
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis") if live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._print(self._title)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Status text while there is nothing to draw yet."""
        self._note = text
        if self._live is None:
            self._print(text)
        elif self._before is None:
            self._draw(RunSnapshot(now=0.0, note=text))

    def say(self, text: str) -> None:
        """Prints a line that stays above the display."""
        self._printed.append(text)
        self._print(text)

    def draw(self, journal: Journal, now: float) -> None:
        """Reads and shows new events. `now`: monotonic seconds, for the log; the display uses wall time."""
        try:
            projection = self._projection
            projection.read(journal.events(after=projection.seq))
            snapshot = projection.snapshot(
                journal.clock.wall(), journal.desired(), journal.current(), journal.flag("paused"), self._note
            )
            if self._live is not None:
                self._draw(snapshot)
            else:
                for line in plain_lines(self._before, snapshot):
                    self._print(line)
            self._before = snapshot
        except Exception:
            # Deliberate: a failing display must not stop the run; it is drawn again next time.
            logger.exception("cannot draw at %.1f", now)

    def _draw(self, snapshot: RunSnapshot) -> None:
        assert self._live is not None
        if self._console.size != self._size:
            # The terminal moved or wrapped the lines drawn last, so their position is unknown.
            self._size = self._console.size
            self._console.clear()
            for text in self._printed:
                self._print(text)
        self._live.update(render(snapshot, self._title, self._console.width), refresh=True)

    def _print(self, text: str) -> None:
        self._console.print(plain(text, 500), markup=False, highlight=False, soft_wrap=True)
