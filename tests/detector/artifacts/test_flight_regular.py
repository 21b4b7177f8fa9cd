"""Entries cut out by their bytes are the same as those read one by one; bytes that only look like entries do no
harm."""

import pickle
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.core.errors import UnreadableInput
from rolecall.detector.artifacts.flight_recorder import entries
from rolecall.detector.artifacts.flight_recorder.dumps import FlightRecorderDump, read

NUM_ENTRIES = 300
KINDS: list[dict[str, Any]] = [
    {"name": "nccl:all_reduce", "sizes": [[4096, 8192]], "dtypes": ["BFloat16"]},
    {"name": "nccl:_all_gather_base", "sizes": [[1 << 20], [3, 70_000]], "dtypes": ["Float", "Half"]},
    {"name": "nccl:barrier", "sizes": [], "dtypes": []},
    {"name": "nccl:send 0->1", "sizes": [[]], "dtypes": ["Float"]},
]


def torch_pickle(value: Any) -> bytes:
    """As PyTorch's pickler writes plain values: every text is remembered, and so is a dict that stands in many
    places."""
    out, memo = bytearray(b"\x80\x02"), dict[Any, int]()

    def remembered(key: Any) -> bool:
        n = memo.get(key)
        if n is not None:
            out.extend(b"h%c" % n if n < 256 else b"j" + struct.pack("<I", n))
        return n is not None

    def remember(key: Any) -> None:
        n = memo[key] = len(memo)
        out.extend(b"q%c" % n if n < 256 else b"r" + struct.pack("<I", n))

    def put(value: Any) -> None:
        if type(value) is str:
            if not remembered(value):
                out.extend(b"X" + struct.pack("<I", len(value.encode())) + value.encode())
                remember(value)
        elif type(value) is list:
            out.extend(b"](")
            for item in value:
                put(item)
            out.extend(b"e")
        elif type(value) is tuple:
            for item in value:
                put(item)
            out.extend(b"\x86")
        elif type(value) is dict:
            shared = "filename" in value
            if shared and remembered(id(value)):
                return
            out.extend(b"}(")
            for key, item in value.items():
                put(key)
                put(item)
            out.extend(b"u")
            if shared:
                remember(id(value))
        elif type(value) is int:
            codes = ((b"K", "<B", 0, 1 << 8), (b"M", "<H", 0, 1 << 16), (b"J", "<i", -(1 << 31), 1 << 31))
            codes += ((b"\x8a\x08", "<q", -(1 << 63), 1 << 63),)
            code, form = next((c, f) for c, f, low, high in codes if low <= value < high)
            out.extend(code + struct.pack(form, value))
        else:
            out.extend({None: b"N", True: b"\x88", False: b"\x89"}[value])

    put(value)
    return bytes(out + b".")


def content(rng: random.Random, num_entries: int = NUM_ENTRIES, num_texts: int = 0) -> dict[str, Any]:
    """A ring of a few kinds. `num_texts`: of other text before it, so that what entries refer to has larger numbers."""
    stacks = [
        [{"name": f"f{n}", "filename": f"{n}.py", "line": n}, {"name": "main", "filename": "m.py", "line": 7}]
        for n in range(3)
    ]
    entries = []
    for n in range(num_entries):
        kind = rng.choice(KINDS)
        done = rng.random() < 0.9
        created = 1_795_000_000_000_000_000 + n * 1_000_003
        entries.append(
            {
                "frames": rng.choice(stacks),
                "record_id": 5000 + n,
                "pg_id": n % 2,
                "process_group": (str(n % 2), "default_pg" if n % 2 == 0 else "tensor"),
                "thread_name": "main",
                "thread_id": "140",
                "collective_seq_id": rng.choice((0, 200, 300, 70_000, -1, 1 << 40)) + n,
                "p2p_seq_id": n if "send" in kind["name"] else 0,
                "op_id": n,
                "profiling_name": kind["name"],
                "time_created_ns": created,
                "input_sizes": kind["sizes"],
                "input_dtypes": kind["dtypes"],
                "output_sizes": kind["sizes"],
                "output_dtypes": kind["dtypes"],
                "state": "completed" if done else rng.choice(("scheduled", "started")),
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": created + 5 if done else None,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": "send" in kind["name"],
            }
        )
    return {
        "version": "2.10",
        "texts": [f"text {n}" for n in range(num_texts)],
        "pg_config": {str(g): {"name": str(g), "desc": "default_pg", "ranks": "[0, 1]"} for g in range(2)},
        "pg_status": {str(g): {"last_enqueued_collective": 9} for g in range(2)},
        "entries": entries,
    }


def read_back(folder: Path, data: bytes, name: str) -> FlightRecorderDump:
    path = folder / "rank_1"
    path.write_bytes(data)
    return replace(read(path), path=name, written_at=0.0)


def assert_same(one: FlightRecorderDump, other: FlightRecorderDump) -> None:
    assert replace(one, entries=None) == replace(other, entries=None)
    a, b = one.entries, other.entries
    assert a is not None and b is not None and a.first_record == b.first_record
    for name in ("group", "seq", "created_at", "started", "done"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert [a.operations[n] for n in a.operation] == [b.operations[n] for n in b.operation]


@pytest.mark.parametrize("num_texts", [0, 300])
def test_extracted_entries_equal_entries_read_one_by_one(tmp_path: Path, rng: random.Random, num_texts: int) -> None:
    reported = content(rng, num_texts=num_texts)
    data = torch_pickle(reported)
    assert pickle.loads(data) == reported, "the pickler of this test"
    cut = entries.extract(data, 0)
    assert cut is not None and len(cut.kinds) > 0.8 * NUM_ENTRIES and len(cut.rest) < len(data) / 2
    assert_same(read_back(tmp_path, data, ""), read_back(tmp_path, pickle.dumps(reported, protocol=2), ""))


def test_too_few_keys_or_none_of_the_numbers_and_nothing_is_cut(rng: random.Random) -> None:
    reported = content(rng, 20)
    for entry in reported["entries"]:
        del entry["p2p_seq_id"]
    assert entries.extract(torch_pickle(reported), 0) is None
    assert entries.extract(torch_pickle({"entries": [{"collective_seq_id": n} for n in range(20)]}), 0) is None
    assert entries.extract(b"", -1) is None


def test_text_that_looks_like_an_entry_is_reported_as_what_it_is(tmp_path: Path, rng: random.Random) -> None:
    """Cutting within the text would tear it; then the whole is read, which says that it is not text at all."""
    reported = content(rng)
    data = torch_pickle(reported)
    look = b"}(" + next(part for part in data.split(b"}(")[::-1] if len(part) > 60).partition(b"eu")[0]
    look = look[: look.rindex(b"u") + 1]
    assert len(entries.extract(data + look, 0).kinds) == len(entries.extract(data, 0).kinds) + 1  # type: ignore[union-attr]
    name = b"X\x04\x00\x00\x00main"
    torn = data.replace(name, b"X" + struct.pack("<I", len(look)) + look, 1)
    with pytest.raises(UnreadableInput, match="not a readable pickle: 'utf-8'"):
        read_back(tmp_path, torn, "")


@pytest.mark.parametrize("odd", [0, 3, -1, 1 << 40, None, [], {}])
def test_invalid_entries_are_refused(tmp_path: Path, rng: random.Random, odd: Any) -> None:
    """The numbers of kinds stand in the list that is left; a dump cannot bring its own."""
    reported = content(rng)
    reported["entries"].insert(250, odd)
    with pytest.raises(UnreadableInput, match="not a Flight Recorder dump: "):
        read_back(tmp_path, torch_pickle(reported), "")


def test_more_entries_than_a_ring_holds_are_left_in(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    monkeypatch.setattr(entries, "NUM_REGULAR_MAX", 100)
    assert entries.extract(torch_pickle(content(rng)), 0) is None


def test_damaged_bytes_raise_nothing_else(tmp_path: Path, rng: random.Random) -> None:
    data = torch_pickle(content(rng, 60))
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
        try:
            read_back(tmp_path, bytes(damaged), "")
        except UnreadableInput:
            refused += 1
    assert 50 < refused < 300
