"""Reading pages: torn ones, foreign ones, ones that are written at the same time."""

import math
import multiprocessing
import os
import random
import struct
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from rolecall.agent.processes.state_pages import PageReader, PageState, PageUnreadable, parse_page
from rolecall.agent.reporter import page_layout as layout
from rolecall.agent.reporter.reporter import _Page
from rolecall.core.telemetry import HEALTH_SIGNS
from tests.support import PATIENCE_SECONDS, eventually


def page() -> bytearray:
    return bytearray(bytes(_Page().raw))


def test_a_fresh_page_is_empty() -> None:
    state = parse_page(bytes(page()))
    assert (state.phase, state.step, state.policy_version, state.progress) == ("start", -1, -1, 0)


def test_a_page_of_a_reporter_without_health_has_none() -> None:
    state = parse_page(bytes(page()))  # zeros in place of the health values
    assert state.healths == 0 and all(math.isnan(getattr(state, sign)) for sign in HEALTH_SIGNS)


def test_every_sign_of_health_has_its_word_behind_the_older_ones() -> None:
    words = [layout.W_HEALTHS, *layout.HEALTH_WORDS.values()]
    assert tuple(layout.HEALTH_WORDS) == HEALTH_SIGNS
    assert words == list(range(layout.W_JUMPS + 1, layout.W_JUMPS + 1 + len(words))) and words[-1] < layout.NUM_WORDS
    assert all(PageState.__annotations__[sign] is float for sign in HEALTH_SIGNS) and layout.LAYOUT_VERSION == 1


def _damage(what: str) -> bytes:
    raw = page()
    q = memoryview(raw).cast("q")
    if what == "short":
        return bytes(raw[:4000])
    if what == "magic":
        raw[0] ^= 1
    elif what == "layout":
        q[layout.W_LAYOUT] = 99
    elif what == "odd":
        q[layout.W_SEQUENCE] |= 1
    return bytes(raw)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("short", "4000 bytes"), ("magic", "not a state page"), ("layout", "layout 99"), ("odd", "middle of a write")],
)
def test_an_incomplete_page_is_rejected(what: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PageUnreadable, match=reason):
        parse_page(_damage(what))
    path = tmp_path / "p.page"
    path.write_bytes(_damage(what))
    with pytest.raises(PageUnreadable):
        PageReader(path).read()


def test_a_page_that_is_truncated_under_the_reader_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.page"
    path.write_bytes(bytes(page()))
    reader = PageReader(path)
    assert reader.read().phase == "start"
    os.truncate(path, 0)
    with pytest.raises(PageUnreadable):
        reader.read()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(bytes(page()))
    (tmp_path / "p.page").symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        PageReader(tmp_path / "p.page")


def test_a_page_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.page"
    path.write_bytes(bytes(page()))
    with pytest.raises(PermissionError, match=f"it is user {os.geteuid()}'s"):
        PageReader(path, {os.geteuid() + 1})
    assert PageReader(path, {os.geteuid(), 4711}).read().phase == "start"


def test_random_bytes_are_never_an_unexpected_error(rng: random.Random) -> None:
    for _ in range(200):
        raw = bytearray(rng.randbytes(layout.PAGE_BYTES))
        raw[:16] = struct.pack("=8sq", layout.MAGIC, layout.LAYOUT_VERSION)
        raw[16] &= 0xFE
        parse_page(bytes(raw))


def test_text_is_cut_between_characters() -> None:
    area = layout.padded("ab\u2603", 4)  # the snowman needs three bytes
    assert area == b"ab\0\0"
    assert layout.text_of(area) == "ab"
    assert layout.text_of(b"\xff\xfe\0") == "\ufffd\ufffd"


def _write_for_ever(path: str, ready: Event) -> None:
    from rolecall.agent.reporter import page_layout as at

    it = _Page()
    it.move_to(Path(path))
    ready.set()
    n = 0
    while True:
        n += 1
        with it:  # every write keeps step == progress == tokens == epoch
            it.q[at.W_STEP] = it.q[at.W_PROGRESS] = it.q[at.W_TOKENS] = it.q[at.W_EPOCH] = n


def test_no_torn_state_is_ever_taken_while_another_process_writes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    path = tmp_path / "p.page"
    writer = context.Process(target=_write_for_ever, args=(str(path), ready))
    writer.start()
    try:
        assert ready.wait(PATIENCE_SECONDS)
        reader = PageReader(path)
        seen: set[int] = set()

        def enough() -> bool:
            for _ in range(200):
                try:
                    state = reader.read()
                except PageUnreadable:
                    continue  # reported as torn: not used
                assert state.progress == 0 or state.step == state.progress == state.tokens == state.epoch
                seen.add(state.progress)
            return len(seen) > 50  # else the writer did not write meanwhile, and nothing is proven

        eventually(enough, "fifty different states were read")
    finally:
        writer.kill()
        writer.join(PATIENCE_SECONDS)


def test_the_texts_of_an_exception_are_packed_where_they_are_read() -> None:
    areas = (
        layout.A_EXCEPTION_FINGERPRINT,
        layout.A_EXCEPTION_TYPE,
        layout.A_EXCEPTION_WHERE,
        layout.A_EXCEPTION_MESSAGE,
    )
    page = bytearray(layout.PAGE_BYTES)
    texts = [b"f" * 64, b"t" * 256, b"w" * 512, b"m" * 2000]
    layout.EXCEPTION_TEXTS.pack_into(page, areas[0][0], *texts)
    assert [bytes(page[start : start + length]) for start, length in areas] == texts
    assert layout.fitting("ab\u2603", 4) == b"ab\0\0" and layout.fitting("ab", 4) == b"ab"
