"""The text format: what it allows, what it does not, any bytes, and how long a large page takes."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rolecall.agent.collectors.exporters.prometheus_text import (
    LINE_BYTES_MAX,
    MalformedMetricLine,
    PrometheusSample,
    parse_line,
    parse_page,
)

GOOD = [
    ("up 1", PrometheusSample("up", {}, 1.0)),
    ("up\t1", PrometheusSample("up", {}, 1.0)),
    ("  up 1  ", PrometheusSample("up", {}, 1.0)),
    ("up{} 0", PrometheusSample("up", {}, 0.0)),
    ("up 1\r", PrometheusSample("up", {}, 1.0)),
    ('vllm:kv{a="b"} .5', PrometheusSample("vllm:kv", {"a": "b"}, 0.5)),
    ('x{a="1",b="2",} 2.5e-3 1700000000123', PrometheusSample("x", {"a": "1", "b": "2"}, 0.0025, 1700000000123)),
    ('x { a = "1" , b = "2" } -7 -5', PrometheusSample("x", {"a": "1", "b": "2"}, -7.0, -5)),
    (r'x{path="C:\\dir",say="\"hi\"\n"} 1', PrometheusSample("x", {"path": "C:\\dir", "say": '"hi"\n'}, 1.0)),
    ('x{a="} 3"} 4', PrometheusSample("x", {"a": "} 3"}, 4.0)),
    ('x{a="é, {=}"} 4', PrometheusSample("x", {"a": "é, {=}"}, 4.0)),
    ("x +Inf", PrometheusSample("x", {}, math.inf)),
    ("x -Inf", PrometheusSample("x", {}, -math.inf)),
]


@pytest.mark.parametrize(("line", "sample"), GOOD, ids=[line for line, _ in GOOD])
def test_good_line(line: str, sample: PrometheusSample) -> None:
    assert parse_line(line) == sample
    assert parse_page(line.encode()) == ([sample], 0, 0)


def test_not_a_number_is_a_number_of_the_format() -> None:
    assert math.isnan(parse_line("x NaN").value)


BAD = [
    *("up", "up ", "1 2", "{} 1", "up 1 2 3", "up 1_000", "up one", "up 0x10", "up 1 1.5", "up ١", "up infinity"),
    *("up{ 1", "up{a} 1", "up{a=b} 1", 'up{a="b} 1', 'up{a="b"c="d"} 1', 'up{a="b",,} 1', "up{,} 1"),
    *(
        'up{a="b"}',
        'up{a="1",a="2"} 1',
        r'up{a="\t"} 1',
        'up{a="b"} 1 # {trace="1"} 2',
        '{"up",a="b"} 1',
        'up{1a="b"} 1',
    ),
    f"up 1 {'9' * 5000}",
]


@pytest.mark.parametrize("line", BAD)
def test_bad_line_is_refused_counted_and_passed_over(line: str) -> None:
    with pytest.raises(MalformedMetricLine):
        parse_line(line)
    page = parse_page(f"# HELP up\nfirst 1\n{line}\n\nlast 2\n".encode())
    assert [s.name for s in page.samples] == ["first", "last"]
    assert page.num_malformed == 1


def test_bytes_that_are_no_text_spoil_one_line() -> None:
    page = parse_page(b'a 1\nb{x="\xff"} 2\nc 3')
    assert ([s.name for s in page.samples], page.num_malformed) == (["a", "c"], 1)


def test_a_line_beyond_the_bound_is_malformed() -> None:
    page = parse_page(b'a 1\nb{x="' + b"y" * LINE_BYTES_MAX + b'"} 1\nc 1')
    assert ([s.name for s in page.samples], page.num_malformed) == (["a", "c"], 1)


def test_lines_of_other_names_are_not_looked_into() -> None:
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
    lines = [line for line in body.split(b"\n") if line and not line.isspace() and not line.startswith(b"#")]
    assert len(page.samples) + page.num_malformed == len(lines)


LABELS = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True), st.text(max_size=9), max_size=4)


@given(st.from_regex(r"[a-z_:][a-z0-9_:]{0,9}", fullmatch=True), LABELS, st.floats(allow_nan=False))
def test_reads_what_is_written_as_prometheus_client_reads_it(name: str, labels: dict[str, str], value: float) -> None:
    # Other kinds of line break than \n stand in a label value as they are; prometheus_client's reader splits there.
    labels = {k: "".join(v.split()) for k, v in labels.items()}
    pairs = [k + '="' + v.replace("\\", r"\\").replace('"', r"\"") + '"' for k, v in labels.items()]
    line = f"{name}{{{','.join(pairs)}}} {value!r}\n"
    if value in (math.inf, -math.inf):
        line = line.replace("inf\n", "Inf\n")
    (sample,) = parse_page(line.encode()).samples
    (theirs,) = next(iter(text_string_to_metric_families(line))).samples
    assert (sample.name, sample.labels, sample.value) == (name, labels, value)
    assert (theirs.name, theirs.labels, theirs.value) == (name, labels, value)


def test_a_page_of_5000_series_is_read_whole() -> None:
    labels = ",".join(f'label_{i}="value-{i}"' for i in range(2))
    body = "".join(f'series_{i % 50}{{gpu="{i}",{labels}}} {i}.5\n' for i in range(5000)).encode()
    page = parse_page(body)
    assert [s.value for s in page.samples] == [i + 0.5 for i in range(5000)]
    assert page.samples[4999].labels == {"gpu": "4999", "label_0": "value-0", "label_1": "value-1"}
