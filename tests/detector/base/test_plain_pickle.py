"""Pickles of plain data are what Python's own pickler wrote; what costs too much or tries to run is not read."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.detector.base import plain_pickle
from rolecall.detector.base.plain_pickle import UnsafePickle, loads

ATOMS = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.text()
TUPLES = st.tuples() | st.tuples(ATOMS) | st.tuples(ATOMS, ATOMS) | st.tuples(ATOMS, ATOMS, ATOMS)
PLAIN = st.recursive(ATOMS | TUPLES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@given(PLAIN, st.integers(2, 5))
def test_plain_data_come_back(value: Any, protocol: int) -> None:
    shared = [value, value]
    assert loads(pickle.dumps(shared, protocol=protocol)) == shared


@given(PLAIN, st.integers(2, 5), st.data())
def test_damaged_bytes_raise_nothing_else(value: Any, protocol: int, data: st.DataObject) -> None:
    damaged = bytearray(pickle.dumps([value, "text", 5], protocol=protocol))
    for at in data.draw(st.lists(st.integers(2, len(damaged) - 1), min_size=1, max_size=3)):
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        loads(bytes(damaged))
    except UnsafePickle as e:
        assert str(e)


@pytest.mark.parametrize(
    ("limit", "data", "said"),
    [
        ("NUM_CONTAINERS_MAX", b"]" * 11, "more than 10 lists and dicts"),
        ("NUM_CONTAINERS_MAX", b"}" * 11, "more than 10 lists and dicts"),
        ("NUM_CONTAINERS_MAX", b")" * 11, "more than 10 lists and dicts"),
        ("NUM_MEMO_MAX", b"N" + b"\x94" * 11, "remembers more than 10"),
        ("NUM_MEMO_MAX", b"N" + b"".join(b"q%c" % n for n in range(11)), "remembers more than 10"),
        ("NUM_OPCODES_MAX", b"N" * 11, "more than 10 opcodes"),
        ("DEPTH_MAX", b"(" * 11, "nested too deeply"),
    ],
)
def test_cost_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: str, data: bytes, said: str) -> None:
    monkeypatch.setattr(plain_pickle, limit, 10)
    with pytest.raises(UnsafePickle, match=said):
        loads(b"\x80\x04" + data + b".")


def test_memory_is_bounded_while_reading_and_the_limit_is_named() -> None:
    data = b"\x80\x04" + b"]" * 200_000 + b"."
    with pytest.raises(UnsafePickle, match="more memory than the 8 MiB"):
        loads(data, bytes_max=8 << 20)


def test_a_deadline_ends_the_reading_of_one_pickle() -> None:
    """Counted: it is looked at within the work, not only before it."""
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise TimeoutError

    data = pickle.dumps(list(range(1 << 20)), protocol=2)
    with pytest.raises(TimeoutError):
        loads(data, check=check)
    assert len(looks) == 3
