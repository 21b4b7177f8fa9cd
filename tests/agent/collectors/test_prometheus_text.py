"""The text format: what it allows, what it does not, any bytes, and how long a large page takes."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.samples import Sample

from rolecall.agent.collectors.exporters.scrape import LINE_BYTES_MAX, parse_page

GOOD = [
    ("up 1", Sample("up", {}, 1.0)),
    ("up\t1", Sample("up", {}, 1.0)),
    ("  up 1  ", Sample("up", {}, 1.0)),
    ("up{} 0", Sample("up", {}, 0.0)),
    ("up 1\r", Sample("up", {}, 1.0)),
    ('vllm:kv{a="b"} .5', Sample("vllm:kv", {"a": "b"}, 0.5)),
    ('x{a="1",b="2",} 2.5e-3 1700000000123', Sample("x", {"a": "1", "b": "2"}, 0.0025, 1700000000.123)),
    ('x { a = "1" , b = "2" } -7 -5', Sample("x", {"a": "1", "b": "2"}, -7.0, -0.005)),
    (r'x{path="C:\\dir",say="\"hi\"\n"} 1', Sample("x", {"path": "C:\\dir", "say": '"hi"\n'}, 1.0)),
    ('x{a="} 3"} 4', Sample("x", {"a": "} 3"}, 4.0)),
    ('x{a="é, {=}"} 4', Sample("x", {"a": "é, {=}"}, 4.0)),
    ('{"up",a="b"} 1', Sample("up", {"a": "b"}, 1.0)),
    ("x +Inf", Sample("x", {}, math.inf)),
    ("x -Inf", Sample("x", {}, -math.inf)),
]


@pytest.mark.parametrize(("line", "sample"), GOOD, ids=[line for line, _ in GOOD])
def test_good_line(line: str, sample: Sample) -> None:
    assert parse_page(line.encode()) == ([sample], 0, 0)
    assert parse_page(line.encode(), {sample.name}) == ([sample], 0, 0)
    assert parse_page(line.encode(), {"another"}) == ([], 0, 0)


def test_nan_is_a_value() -> None:
    assert math.isnan(parse_page(b"up NaN").samples[0].value)


BAD = [
    *("up", "up ", "1 2", "{} 1", "up 1_000", "up one", "up 0x10", "up " + "9" * 400),
    *("up{ 1", "up{a} 1", "up{a=b} 1", 'up{a="b} 1', 'up{a="b"c="d"} 1', 'up{a="b",,} 1'),
    *('up{a="b"}', 'up{a="1",a="2"} 1', 'up{1a="b"} 1'),
]


@pytest.mark.parametrize("line", BAD)
def test_a_malformed_line_is_counted_and_the_others_are_read(line: str) -> None:
    page = parse_page(f"# HELP up\nfirst 1\n{line}\n\nlast 2\n".encode())
    assert [s.name for s in page.samples] == ["first", "last"]
    assert page.num_malformed == 1


def test_bytes_that_are_no_text_spoil_one_line() -> None:
    page = parse_page(b'a 1\nb{x="\xff"} 2\nc 3')
    assert ([s.name for s in page.samples], page.num_malformed) == (["a", "c"], 1)


def test_a_line_beyond_the_bound_is_malformed() -> None:
    page = parse_page(b'a 1\nb{x="' + b"y" * LINE_BYTES_MAX + b'"} 1\nc 1')
    assert ([s.name for s in page.samples], page.num_malformed) == (["a", "c"], 1)


def test_lines_of_other_names_are_not_parsed() -> None:
    page = parse_page(b"a 1\nb what\nb{ 2\na 3\n", frozenset({"a"}))
    assert ([s.value for s in page.samples], page.num_malformed) == ([1.0, 3.0], 0)


def test_series_beyond_the_bound_are_counted() -> None:
    page = parse_page(b"a 1\na 2\na 3\nb 4\n", frozenset({"a"}), num_samples_max=2)
    assert ([s.value for s in page.samples], page.num_dropped) == ([1.0, 2.0], 1)


@given(st.binary() | st.text(alphabet='a1{}=",\\\n\t -.#eNI+').map(str.encode))
@example(b'a{b="' + b"\\" * 1001 + b'"} 1')
@example(b"a 1e999999999")
@example(b"a " + b"9" * 400)
def test_any_bytes_give_samples_or_are_counted(body: bytes) -> None:
    page = parse_page(body)
    lines = [line for line in body.split(b"\n") if line and not line.isspace() and not line.lstrip().startswith(b"#")]
    assert len(page.samples) + page.num_malformed == len(lines)


def test_a_page_of_5000_series_is_read_whole() -> None:
    labels = ",".join(f'label_{i}="value-{i}"' for i in range(2))
    body = "".join(f'series_{i % 50}{{gpu="{i}",{labels}}} {i}.5\n' for i in range(5000)).encode()
    page = parse_page(body)
    assert [s.value for s in page.samples] == [i + 0.5 for i in range(5000)]
    assert page.samples[4999].labels == {"gpu": "4999", "label_0": "value-0", "label_1": "value-1"}
