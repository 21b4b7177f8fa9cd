"""The one reader that views follow a journal with: each line once, whatever is damaged, left out or of another kind."""

from pathlib import Path

import pytest

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import OncallPaged
from rolecall.core.journal.payloads.run import EpochAdvanced
from rolecall.views.journal_reader import JournalReader
from tests.events import filled

PAGE_EVENTS = 3


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(f"sqlite:///{tmp_path / 'journal.db'}")


def _page(journal: Journal, number: int) -> None:
    journal.append(OncallPaged(topic="test", because=str(number), channel="log"))


def _texts(reader: JournalReader, journal: Journal) -> list[list[str]]:
    return [
        [e.payload.because for e in page.events if isinstance(e.payload, OncallPaged)] for page in reader.pages(journal)
    ]


def test_each_event_comes_once_in_pages_and_the_next_poll_has_only_what_is_new(journal: Journal) -> None:
    reader = JournalReader(page_events=PAGE_EVENTS)
    for number in range(5):
        _page(journal, number)
    assert _texts(reader, journal) == [["0", "1", "2"], ["3", "4"]]
    assert reader.at_end and reader.seq == 5
    assert _texts(reader, journal) == [[]]
    _page(journal, 5)
    assert _texts(reader, journal) == [["5"]]


def test_a_damaged_line_in_a_full_page_hides_nothing_behind_it(journal: Journal) -> None:
    _page(journal, 0)
    journal.append_unchecked(EventKind.STEP_COMMITTED, {"strange": True})
    for number in range(2, 6):
        _page(journal, number)
    reader = JournalReader((EventKind.ONCALL_PAGED, EventKind.STEP_COMMITTED), page_events=PAGE_EVENTS)
    pages = list(reader.pages(journal))
    paged = [e.payload.because for page in pages for e in page.events if isinstance(e.payload, OncallPaged)]
    assert paged == ["0", "2", "3", "4", "5"]
    assert [line.seq for page in pages for line in page.damaged] == [2]


def test_lines_of_other_kinds_are_not_searched_again(journal: Journal) -> None:
    reader = JournalReader([EventKind.EPOCH_ADVANCED], page_events=PAGE_EVENTS)
    for number in range(4):
        _page(journal, number)
    assert [page.events for page in reader.pages(journal)] == [[]] and reader.seq == 4
    journal.append(filled(EventKind.EPOCH_ADVANCED, {"epoch": 2}))
    (page,) = reader.pages(journal)
    assert [e.payload.epoch for e in page.events if isinstance(e.payload, EpochAdvanced)] == [2]


def test_unwanted_lines_are_passed_over_and_counted_as_read(journal: Journal) -> None:
    asked: list[str] = []

    def wanted(kind: str) -> bool:
        asked.append(kind)
        return len(asked) != 3

    reader = JournalReader(page_events=PAGE_EVENTS, wanted=wanted)
    for number in range(4):
        _page(journal, number)
    assert _texts(reader, journal) == [["0", "1"], ["3"]] and reader.seq == 4


def test_a_consumer_that_stops_at_a_page_goes_on_after_it(journal: Journal) -> None:
    reader = JournalReader(page_events=PAGE_EVENTS)
    for number in range(5):
        _page(journal, number)
    first = next(reader.pages(journal))
    assert len(first.events) == PAGE_EVENTS and not reader.at_end
    assert _texts(reader, journal) == [["3", "4"]]
