"""Lines and text files of the NCCL Inspector: both generations of its JSON, cut lines, and any bytes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.formats.nccl.inspector import LINE_BYTES_MAX, Lines, gauges


def head(rank: int = 0, num_ranks: int = 4, communicator: str = "0x7f8c", at: float = 1000.0) -> dict[str, Any]:
    return {
        "header": {"id": communicator, "rank": rank, "n_ranks": num_ranks, "nnodes": 1, "comm_name": "dp"},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": int(at * 1e6),
            "hostname": f"node-{rank // 2}",
            "pid": 100 + rank,
        },
    }


def perf(sequence: int, micros: float, *, kind: str = "AllReduce", bandwidth: float = 2.0) -> dict[str, Any]:
    return {
        "coll": kind,
        "coll_sn": sequence,
        "coll_msg_size_bytes": 1 << 20,
        "coll_exec_time_us": micros,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 1.0,
        "coll_busbw_gbs": bandwidth,
    }


def line(rank: int, sequence: int, micros: float, **more: Any) -> bytes:
    return json.dumps({**head(rank, **more), "coll_perf": perf(sequence, micros)}).encode() + b"\n"


def test_a_line_of_4_0_is_an_operation() -> None:
    lines = Lines()
    found = lines.take(line(2, 1407, 61974))
    assert found is not None
    assert (found.kind, found.sequence, found.size_bytes, found.is_p2p) == ("AllReduce", 1407, 1 << 20, False)
    assert found.seconds == pytest.approx(0.061974) and found.bus_bytes_per_second == 2e9
    about = found.context
    assert (about.communicator, about.name, about.rank, about.num_ranks) == ("0x7f8c", "dp", 2, 4)
    assert (about.host, about.pid, about.written_at) == ("node-1", 102, 1000.0)
    assert (lines.num_lines, lines.num_bad) == (1, 0)


def test_lines_of_4_3_take_their_head_from_the_dump_they_belong_to() -> None:
    lines = Lines()

    def marker(rank: int, coll: int, proxy: int = 0) -> bytes:
        stats = {"coll_records": coll, "p2p_records": 0, "proxy_records": proxy, "coll_dropped_since_last_dump": 5}
        return json.dumps({**head(rank), "dump_stats": stats}).encode()

    bare = json.dumps({"coll_perf": perf(7, 10.0)}).encode()
    proxy = json.dumps({"proxy_trace": {"record_type": "proxy_op"}}).encode()
    assert lines.take(bare) is None and lines.num_bad == 0  # its dump began before reading did
    given_lines = [marker(1, 1, 1), bare, proxy, marker(3, 2), bare, bare, bare]
    found = [o.context.rank for one in given_lines if (o := lines.take(one)) is not None]
    assert found == [1, 3, 3]  # the last one is more than its dump announced
    assert (lines.num_bad, lines.num_dropped) == (0, 10)


def test_point_to_point_operations() -> None:
    reported = {"p2p": "Send", "p2p_sn": 3, "p2p_msg_size_bytes": 8, "p2p_exec_time_us": 5.5, "p2p_busbw_gbs": 1.5}
    found = Lines().take(json.dumps({**head(), "p2p_perf": reported}).encode())
    assert found is not None and (found.kind, found.sequence, found.is_p2p) == ("Send", 3, True)


@pytest.mark.parametrize(
    "bad",
    [
        b'{"header": {"id": "0x1", "rank": 0',
        b"\xff\xfe",
        b"[1]",
        b"[" * 60_000,
        b'{"a": ' + b"9" * 6000 + b"}",
        b" " * LINE_BYTES_MAX + b"{}",
        json.dumps({**head(), "coll_perf": {"coll": "AllReduce"}}).encode(),
        json.dumps({"header": {"id": "", "rank": 0, "n_ranks": 2}, "coll_perf": perf(1, 2)}).encode(),
        json.dumps({**head(), "coll_perf": perf(1, float("nan"))}).encode(),
        json.dumps({**head(), "coll_perf": perf(-1, 2)}).encode(),
    ],
)
def test_bad_lines_are_counted_and_passed_over(bad: bytes) -> None:
    lines = Lines()
    assert lines.take(bad) is None
    assert (lines.num_lines, lines.num_bad) == (1, 1)
    assert lines.take(line(0, 1, 2)) is not None


TEXTFILE = """\
nccl_bus_bandwidth_gbs{version="v5.1",slurm_job_id="unknown",node="n1",gpu="GPU3",comm_name="DP Group 0",n_nodes="1",\
nranks="4",collective="AllReduce",message_size="4-5GB",algo_proto="Ring_ll"} 678.263
nccl_collective_exec_time_microseconds{node="n1",gpu="GPU3",comm_name="a, \\"b\\"",collective="AllReduce"} 9498.47 17
nccl_p2p_bus_bandwidth_gbs{node="n1",gpu="GPU0",p2p_operation="Send",message_size="512-513MB"} 464.9
nccl_of_later_versions{node="n1",gpu="GPU0",collective="AllReduce"} 1
nccl_bus_bandwidth_gbs{node="n1"
nccl_bus_bandwidth_gbs{node="n1",gpu="GPU0",collective="AllReduce"} NaN
"""


def test_the_text_file() -> None:
    found = gauges(TEXTFILE)
    assert [(g.is_time, g.kind, g.gpu) for g in found] == [
        (False, "AllReduce", "3"),
        (True, "AllReduce", "3"),
        (False, "Send", "0"),
    ]
    assert found[0].value == pytest.approx(678.263e9)
    assert found[1].value == pytest.approx(9.49847e-3)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_KEYS = ("id", "rank", "n_ranks", "coll", "coll_sn", "coll_exec_time_us", "coll_records", "hostname", "p2p_sn", "p2p")
_PART = _JSON | st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=6)
_LINE = st.dictionaries(
    st.sampled_from(["header", "metadata", "coll_perf", "p2p_perf", "dump_stats", "proxy_trace"]), _PART, max_size=5
)


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=60) | _LINE.map(lambda v: json.dumps(v).encode()), max_size=8))
def test_any_lines_are_taken(some: list[bytes]) -> None:
    lines = Lines()
    found = [lines.take(one) for one in some]
    assert lines.num_lines <= len(some)
    assert sum(o is not None for o in found) + lines.num_bad <= lines.num_lines


@settings(max_examples=100)
@given(st.text(max_size=200), st.integers(0, len(TEXTFILE)))
def test_any_text_is_taken(some: str, at: int) -> None:
    found = gauges(TEXTFILE[:at] + some + TEXTFILE[at:])
    assert all(g.value >= 0 for g in found)
