"""Reading a journal incrementally: every view that follows a run gets its events from a `JournalReader`."""

from collections.abc import Callable, Collection, Iterator

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal, JournalPage

PAGE_EVENTS = 5_000


class JournalReader:
    """Reads each line of a journal once, in order. Owned by one thread."""

    def __init__(
        self,
        kinds: Collection[EventKind] | None = None,
        *,
        page_events: int = PAGE_EVENTS,
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        """`kinds`: only these. `wanted`: see `Journal.page`."""
        self._kinds, self._page_events, self._wanted = kinds, page_events, wanted
        self.seq = 0
        """Everything up to this line has been read."""
        self.at_end = False
        """Whether the newest page reached the end of the journal."""

    def pages(self, journal: Journal) -> Iterator[JournalPage]:
        """What is new, page by page. A consumer may stop at any page; the next call continues after it.

        Raises:
            JournalError: the journal cannot be read.
        """
        self.at_end = False
        while not self.at_end:
            page = journal.page(after=self.seq, kinds=self._kinds, limit=self._page_events, wanted=self._wanted)
            self.seq, self.at_end = page.last, not page.full
            yield page
