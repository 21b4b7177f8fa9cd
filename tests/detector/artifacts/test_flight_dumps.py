"""Reading dumps: what PyTorch writes is understood, and nothing in a file can run, hang or fill the memory."""

import copy
import json
import os
import pickle
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.errors import UnreadableInput
from rolecall.detector.artifacts.flight_recorder import dumps as flight_dumps
from rolecall.detector.artifacts.flight_recorder.dumps import Status, is_dump, read, read_as_needed, read_many
from rolecall.detector.artifacts.flight_recorder.entries import FlightRecorderOperation, ProcessGroup
from rolecall.detector.base.read_budget import Budget, ReadLimits

ENTRY: dict[str, Any] = {
    "record_id": 7,
    "pg_id": 1,
    "process_group": ("3", "tensor"),
    "thread_name": "main",
    "thread_id": "140",
    "collective_seq_id": 12,
    "p2p_seq_id": 0,
    "op_id": 12,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1_795_000_000_500_000_000,
    "input_sizes": [[4, 8], [16]],
    "input_dtypes": ["Float", "Float"],
    "output_sizes": [[4, 8], [16]],
    "output_dtypes": ["Float", "Float"],
    "state": "completed",
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": 1_795_000_000_600_000_000,
    "retired": True,
    "timeout_ms": 600_000,
    "is_p2p": False,
}
CONTENT: dict[str, Any] = {
    "version": "2.10",
    "pg_config": {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "3": {"name": "3", "desc": "tensor", "ranks": "[2, 3]"},
    },
    "comm_lib_version": "2.27.5",
    "pg_status": {
        "0": {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 4},
        "1": {"last_enqueued_collective": 12, "last_started_collective": -1, "last_completed_collective": 12},
    },
    "entries": [ENTRY, {**ENTRY, "record_id": 8, "collective_seq_id": 13, "state": "scheduled", "retired": False}],
}


def written(tmp_path: Path, data: bytes, name: str = "nccl_trace_rank_2") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def pickled(tmp_path: Path, protocol: int = 2, **changes: Any) -> Path:
    return written(tmp_path, pickle.dumps({**CONTENT, **changes}, protocol=protocol))


def refusal(path: Path) -> str:
    """Both ways of reading refuse it, and say which file."""
    with pytest.raises(UnreadableInput) as whole:
        read(path)
    assert whole.value.where == str(path)
    return whole.value.reason


# --- what is understood ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [2, 3, 4, 5, "json"])
def test_a_dump_reads_equally_in_every_format(tmp_path: Path, form: int | str) -> None:
    if isinstance(form, int):
        path = pickled(tmp_path, form)
    else:
        in_words = copy.deepcopy(CONTENT)  # JSON writes the numbers of the status as strings, and pairs as lists
        for status in in_words["pg_status"].values():
            status.update({k: str(v) for k, v in status.items()})
        path = written(tmp_path, json.dumps(in_words).encode())
    assert is_dump(path)
    dump = read(path)
    assert (dump.rank, dump.version, dump.host) == (2, "2.10", "")
    assert dump.groups == (
        ProcessGroup(name="0", desc="default_pg", ranks=(0, 1, 2, 3)),
        ProcessGroup(name="3", desc="tensor", ranks=(2, 3)),
    )
    assert dump.status == {
        0: Status(enqueued=5, started=-1, completed=4),
        1: Status(enqueued=12, started=-1, completed=12),
    }
    assert dump.entries is not None
    assert dump.entries.operations == (
        FlightRecorderOperation(
            backend="nccl",
            name="all_reduce",
            input_sizes=((4, 8), (16,)),
            input_dtypes=("Float", "Float"),
            output_sizes=((4, 8), (16,)),
            output_dtypes=("Float", "Float"),
            is_p2p=False,
        ),
    )
    assert list(dump.entries.group) == [1, 1] and list(dump.entries.seq) == [12, 13]
    assert list(dump.entries.done) == [True, False] and dump.entries.created_at[0] == 1_795_000_000.5
    assert dump.entries.first_record == 7
    status_only = read(path, entries=False)
    assert status_only.entries is None
    assert (status_only.groups, status_only.status) == (dump.groups, dump.status)


def test_gloo_is_done_when_it_is_retired(tmp_path: Path) -> None:
    gloo = {**ENTRY, "profiling_name": "gloo:all_reduce", "state": "scheduled"}
    config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    dump = read(pickled(tmp_path, pg_config=config, entries=[gloo, {**gloo, "retired": False}]))
    assert dump.entries is not None and list(dump.entries.done) == [True, False]
    assert dump.groups == (ProcessGroup(name="3", desc="tensor", ranks=()),), "the line without a name is no group"


def test_point_to_point_has_its_own_numbers_and_peers(tmp_path: Path) -> None:
    recv = {**ENTRY, "profiling_name": "nccl:recv 3<-0", "is_p2p": True, "p2p_seq_id": 4}
    entries = read(pickled(tmp_path, entries=[recv])).entries
    assert entries is not None and list(entries.seq) == [4]
    operation = entries.operations[0]
    assert (operation.name, operation.source, operation.destination, operation.is_p2p) == ("recv", 0, 3, True)


def test_older_versions_lack_fields(tmp_path: Path) -> None:
    lacking = ("is_p2p", "retired", "input_dtypes", "output_dtypes", "record_id")
    old = {k: v for k, v in ENTRY.items() if k not in lacking}
    entries = read(pickled(tmp_path, entries=[old, ENTRY])).entries
    assert entries is not None
    assert [entries.operations[o].input_dtypes for o in entries.operation] == [(), ("Float", "Float")]


def test_a_rank_without_entries_is_reported_by_its_status(tmp_path: Path) -> None:
    dump = read(pickled(tmp_path, entries=[]))
    assert dump.status[0] == Status(enqueued=5, started=-1, completed=4)
    assert dump.entries is not None and len(dump.entries) == 0


def test_a_status_that_the_entries_contradict_is_not_paired_by_order(tmp_path: Path) -> None:
    """`pg_id` 0 is group 3 here: what order would make of `pg_id` 1 is worth nothing."""
    dump = read(pickled(tmp_path, entries=[{**ENTRY, "pg_id": 0}]))
    assert dump.status == {1: Status(enqueued=5, started=-1, completed=4)}


@pytest.mark.parametrize(
    ("name", "rank", "host"),
    [
        ("nccl_trace_rank_12", 12, ""),
        ("comm_lib_trace_rank_0.pickle", 0, ""),
        ("node7_nccl_trace_rank_12", 12, "node7"),
        ("gpu-h100-03_rank_5", 5, "gpu-h100-03"),
        ("rank17.json", 17, ""),
        ("trace-3", 3, ""),
        ("41", 41, ""),
        ("rank_4_host2", 4, "host2"),
    ],
)
def test_any_name_with_a_rank_is_accepted(tmp_path: Path, name: str, rank: int, host: str) -> None:
    dump = read(written(tmp_path, pickle.dumps(CONTENT, protocol=2), name))
    assert (dump.rank, dump.host) == (rank, host)


def test_the_rank_in_the_dump_wins_over_the_name(tmp_path: Path) -> None:
    assert read(pickled(tmp_path, rank=9)).rank == 9


def test_other_files_are_not_dumps(tmp_path: Path) -> None:
    assert not is_dump(written(tmp_path, b"PAR1....PAR1"))
    assert not is_dump(written(tmp_path, b'{"traceEvents": []}'))
    assert not is_dump(written(tmp_path, b""))
    assert not is_dump(tmp_path)
    os.mkfifo(tmp_path / "nccl_trace_rank_5.pipe")
    assert not is_dump(tmp_path / "nccl_trace_rank_5.pipe"), "and no one waited for it"


# --- what is refused -------------------------------------------------------------------------------------------------

ENTRIES = b"\x80\x02}(X\x07\x00\x00\x00entries"
DOUBLED_TUPLE = b"Nq\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(45))
"""Each is twice the one before: hashing or printing the last would take for ever."""
OPENING = b"\x80\x02}(X\x07\x00\x00\x00version"
HOSTILE = {
    "global": (OPENING + b"cos\nsystem\nX\x02\x00\x00\x00id\x85Ru.", "os.system"),
    "stack global": (b"\x80\x04}(\x8c\x02os\x94\x8c\x06system\x94\x93\x8c\x02id\x85Ru.", "os.system"),
    "stack global from the memo": (b"\x80\x04(\x8c\x02os\x94\x8c\x06system\x940h\x000h\x00h\x01\x93.", "POP"),
    "names from the memo": (b"\x80\x04(\x8c\x02os\x94\x8c\x06system\x94h\x00h\x01\x93.", "os.system"),
    "instance": (b"\x80\x02(X\x02\x00\x00\x00idios\nsystem\n.", "os.system"),
    "call": (b"\x80\x02}NR.", "REDUCE"),
    "new object": (b"\x80\x02})\x81.", "NEWOBJ"),
    "build": (b"\x80\x02}}b.", "BUILD"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "persistent id": (b"\x80\x02Pos.system\n.", "PERSID"),
    "binary persistent id": (b"\x80\x02NQ.", "BINPERSID"),
    "memo of 32 GB": (b"\x80\x02Nr\xf0\xff\xff\xff.", "not a Flight Recorder dump"),
    "8 EiB of bytes": (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f", "BINBYTES8"),
    "bytes": (b"\x80\x04\x8e" + struct.pack("<Q", 3) + b"abc.", "BINBYTES8"),
    "a huge number": (b"\x80\x02\x8b\x03\x00\x00\x00abc.", "LONG4"),
    "4 GB of text": (b"\x80\x02X\xff\xff\xff\xffabc", "cut short"),
    "text as protocol 0": (b"\x80\x02S'abc'\n.", "STRING"),
    "lists 100,000 deep": (ENTRIES + b"](" * 100_000 + b"e" * 100_000 + b"u.", "nested too deeply"),
    "a tuple 5 million deep as key": (b"\x80\x02})" + b"\x85" * 5_000_000 + b"Ns.", "a tuple of tuples"),
    "a tuple of 2 ** 45 as key": (b"\x80\x02}" + DOUBLED_TUPLE + b"Ns.", "a tuple of tuples"),
    "a tuple of 2 ** 45 as group": (
        ENTRIES + b"](}(X\x0d\x00\x00\x00process_group" + DOUBLED_TUPLE,
        "a tuple of tuples",
    ),
    "a number as key": (b"\x80\x02}K\x01Ns.", "a key is not text"),
    "a list in itself": (b"\x80\x02(]e.", "cut short, or damaged"),
    "a tuple of what is not there": (b"\x80\x02N(\x86.", "cut short, or damaged"),
    "an opcode that does not exist": (b"\x80\x02\xfe.", "damaged"),
    "something behind its end": (pickle.dumps(CONTENT, protocol=2) + b"cos\nsystem\n.", "follows"),
    "nothing to set": (b"\x80\x02u.", "cut short, or damaged"),
    "unknown memo": (b"\x80\x02h\x07.", "not a readable pickle"),
    "a list as key": (b"\x80\x02}]Ns.", "not a readable pickle"),
    "a number": (b"\x80\x02K\x01.", "not a Flight Recorder dump"),
    "another pickle": (pickle.dumps({"model": [1, 2]}, protocol=2), "not a Flight Recorder dump"),
    "frame beyond the end": (b"\x80\x04\x95" + b"\xff" * 8 + b"}.", "cut short"),
    "frame of 1 GB": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 30) + b"}.", "cut short"),
    "no pickle and no JSON": (b"\x00\x01\x02", "neither"),
    "empty": (b"", "empty"),
    "JSON cut short": (json.dumps(CONTENT).encode()[:-5], "not readable JSON"),
    "JSON of another kind": (b'{"traceEvents": []}', "not a Flight Recorder dump"),
    "JSON 100,000 deep": (b'{"entries": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "JSON of a million digits": (b'{"entries": ' + b"9" * 1_000_000 + b"}", "not readable JSON"),
    "JSON of many lists": (b'{"entries": [' + b"[]," * 5_000_000 + b"1]}", "more than"),
    "JSON with a size beyond 64 bits": (
        json.dumps({"entries": [{**ENTRY, "input_sizes": [[1 << 63]]}]}).encode(),
        "not a Flight Recorder dump",
    ),
    "JSON in no encoding": (b'{"entries": "\xff"}', "not readable JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_dump_is_refused_by_name(tmp_path: Path, case: str) -> None:
    data, said = HOSTILE[case]
    path = written(tmp_path, data)
    assert said in refusal(path)
    if case == "something behind its end":
        assert read(path, entries=False).entries is None, "what follows the status is not even looked at"
        return
    if case == "JSON with a size beyond 64 bits":
        return  # which the status does not hold
    with pytest.raises(UnreadableInput) as by_status:
        read(path, entries=False)
    assert said in by_status.value.reason and by_status.value.where == str(path)


class _Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("place", ["version", "pg_status", "entries"])
def test_nothing_in_a_dump_runs(tmp_path: Path, protocol: int, place: str) -> None:
    marker = tmp_path / "ran"
    path = pickled(tmp_path, protocol, **{place: _Runs(marker)})
    assert "refused: it tries to run posix.mkdir" in refusal(path)
    try:
        read(path, entries=False)
    except UnreadableInput as e:
        assert "posix.mkdir" in e.reason
    else:
        assert place == "entries", "which are not read for the status"
    assert not marker.exists()


def test_ranks_are_numbers_however_they_are_written(tmp_path: Path) -> None:
    config = {"0": {"desc": "default_pg", "ranks": "[00, 1,2, 03]"}}
    (group,) = read(pickled(tmp_path, pg_config=config, pg_status={}, entries=[])).groups
    assert group.ranks == (0, 1, 2, 3)


def test_a_dump_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps(CONTENT, protocol=2)
    for end in range(3, len(data), 7):
        refusal(written(tmp_path, data[:end]))


def test_a_file_of_10_gib_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    with path.open("wb") as file:
        file.write(pickle.dumps(CONTENT, protocol=2))
        file.truncate(10 << 30)
    assert "10,737,418,240 bytes" in refusal(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nccl_trace_rank_0")
    assert "not a regular file" in refusal(tmp_path / "nccl_trace_rank_0")
    assert "cannot be read" in refusal(tmp_path / "nccl_trace_rank_1")


LONG = [[1] * 64] * 1000
SHARED: list[Any] = [1] * 64
for _ in range(40):
    SHARED = [SHARED] * 64


MALFORMED: dict[str, dict[str, Any]] = {
    "the version is 64 ** 40 numbers": {"version": SHARED},
    "a rank of text is negative": {"pg_config": {"0": {"ranks": "[-1]"}}},
    "a rank is negative": {"pg_config": {"0": {"ranks": [-1, 0]}}},
    "a rank beyond all jobs": {"pg_config": {"0": {"ranks": "[0, 9999999]"}}},
    "3 million ranks": {"pg_config": {str(g): {"ranks": [0] * 1_000_000} for g in range(3)}},
    "a status of 64 bits and one": {"pg_status": {"0": {"last_enqueued_collective": "9999999999999999999"}}},
    "one entry with a long list 300,000 times": {"entries": [{**ENTRY, "input_sizes": [1] * 1_000_000}] * 300_000},
    "one long list in a thousand entries": {
        "entries": [{**ENTRY, "input_sizes": LONG, "collective_seq_id": n} for n in range(1000)]
    },
    "entries are a number": {"entries": 5},
    "an entry is a number": {"entries": [5]},
    "an entry is empty": {"entries": [{}]},
    "entries are a table": {"entries": {"0": ENTRY}},
    "groups are a list": {"pg_config": [1]},
    "a group is a number": {"pg_config": {"0": 1}},
    "ranks are code": {"pg_config": {"0": {"ranks": "__import__('os').system('id')"}}},
    "ranks are nearly numbers": {"pg_config": {"0": {"ranks": "[" + "1, " * 50 + "x]"}}},
    "a rank is text": {"pg_config": {"0": {"ranks": [0, "1"]}}},
    "the status is a number": {"pg_status": 1},
    "a group's number is text": {"pg_status": {"a": {}}},
    "a status of 80 bits": {"pg_status": {"0": {"last_enqueued_collective": "9" * 24}}},
    "a status is no integer": {"pg_status": {"0": {"last_enqueued_collective": 1.5}}},
}
MALFORMED_ENTRY: dict[str, dict[str, Any]] = {
    "group is text": {"process_group": "ab"},
    "group lacks its description": {"process_group": ("0",)},
    "group is numbers": {"process_group": (0, 1)},
    "group is a list": {"process_group": [["0"], "1"]},
    "sequence number is text": {"collective_seq_id": "12"},
    "sequence number is a list": {"collective_seq_id": [1, 2]},
    "sequence number is missing": {"collective_seq_id": None},
    "name is a number": {"profiling_name": 3},
    "name is too long": {"profiling_name": "x" * 1000},
    "sizes are a number": {"input_sizes": 4},
    "size is a number": {"input_sizes": [4]},
    "size is no integer": {"input_sizes": [[4.0]]},
    "a thousand dimensions": {"input_sizes": [[1] * 1000]},
    "20,000 tensors": {"input_sizes": [[1]] * 20_000},
    "64 ** 40 numbers": {"input_sizes": SHARED},
    "type is a number": {"input_dtypes": [1]},
    "group number is text": {"pg_id": "x"},
    "group number is a list": {"pg_id": []},
}
MALFORMED |= {f"entry: {name}": {"entries": [{**ENTRY, **bad}]} for name, bad in MALFORMED_ENTRY.items()}


@pytest.mark.parametrize("case", MALFORMED)
def test_deviations_from_pytorchs_format_are_refused(tmp_path: Path, case: str) -> None:
    assert "not a Flight Recorder dump" in refusal(pickled(tmp_path, **MALFORMED[case]))


def test_a_file_without_a_rank_is_refused(tmp_path: Path) -> None:
    assert "rank" in refusal(written(tmp_path, pickle.dumps(CONTENT, protocol=2), "trace"))


def test_names_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    config = {"0": {"name": "0", "desc": "\x1b[2J\u202e" + "x" * 1000, "ranks": "[0, 1]"}}
    (group,) = read(pickled(tmp_path, pg_config=config, pg_status={}, entries=[])).groups
    assert group.desc.startswith("\\x1b[2J\\u202e") and len(group.desc) < 300


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_damaged_bytes_raise_nothing_else(tmp_path: Path, rng: random.Random, form: str) -> None:
    """Also where the damage makes another valid dump of it."""
    data = pickle.dumps(CONTENT, protocol=2) if form == "pickle" else json.dumps(CONTENT).encode()
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
        path = written(tmp_path, bytes(damaged))
        for entries in (True, False):
            try:
                read(path, entries=entries)
            except UnreadableInput:
                refused += 1
    assert refused > 100


# --- many ------------------------------------------------------------------------------------------------------------


def test_one_bad_dump_does_not_hide_the_others(tmp_path: Path) -> None:
    good = written(tmp_path, pickle.dumps(CONTENT, protocol=2), "rank0")
    bad = written(tmp_path, HOSTILE["global"][0], "rank1")
    dumps, unreadable = read_many([good, bad])
    assert [d.rank for d in dumps] == [0]
    assert [e.where for e in unreadable] == [str(bad)] and "os.system" in unreadable[0].reason


def test_processes_read_the_same_in_the_same_order(tmp_path: Path) -> None:
    data = pickle.dumps(CONTENT, protocol=2)
    paths = [written(tmp_path, data, f"rank{r}") for r in range(flight_dumps.POOL_MIN)]
    paths[3].write_bytes(HOSTILE["global"][0])
    dumps, unreadable = read_many(paths, num_processes=2)
    assert [d.rank for d in dumps] == [r for r in range(len(paths)) if r != 3]
    assert [e.where for e in unreadable] == [str(paths[3])]
    assert dumps[5].entries is not None and list(dumps[5].entries.seq) == [12, 13]


def test_the_fast_way_reads_the_entries_that_are_asked_for(tmp_path: Path) -> None:
    data = pickle.dumps(CONTENT, protocol=2)
    paths = [written(tmp_path, data, f"rank{r}") for r in range(4)]
    asked = iter([{1}, {1, 2}, {1, 2}])
    dumps, unreadable = read_as_needed(paths, lambda dumps: next(asked), num_processes=1)
    assert [d.entries is not None for d in dumps] == [False, True, True, False] and not unreadable


def test_the_fast_way_does_not_ask_for_ever_for_entries_that_are_not_there(tmp_path: Path) -> None:
    """PyTorch can be told to write a dump without them."""
    lacking = {key: value for key, value in CONTENT.items() if key != "entries"}
    path = written(tmp_path, json.dumps(lacking).encode(), "rank0")
    for _ in range(2):
        (dump,), unreadable = read_as_needed([path], lambda dumps: {0}, num_processes=1)
        assert dump.entries is None and len(dump.status) == 2 and not unreadable
        path = written(tmp_path, pickle.dumps(lacking, protocol=2), "rank0")


def test_the_fast_way_drops_what_turns_out_unreadable(tmp_path: Path) -> None:
    data = pickle.dumps(CONTENT, protocol=2)
    paths = [written(tmp_path, data, "rank0"), written(tmp_path, data[:-20] + b".", "rank1")]
    dumps, unreadable = read_as_needed(paths, lambda dumps: {0, 1}, num_processes=1)
    assert [d.rank for d in dumps] == [0] and [e.where for e in unreadable] == [str(paths[1])]


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(
    "costly",
    [
        {"entries": [ENTRY] * 100_000},
        {"entries": [{**ENTRY, "input_sizes": [[1, 2]] * 8000, "input_dtypes": ["Float"] * 8000}]},
        {"pg_config": {str(g): {"name": str(g), "ranks": list(range(100))} for g in range(800)}},
        {"pg_status": {str(g): {} for g in range(5000)}, "pg_config": {str(g): {"name": str(g)} for g in range(5000)}},
    ],
    ids=["entries", "sizes", "ranks", "groups"],
)
def test_all_that_is_kept_of_many_dumps_is_bounded(tmp_path: Path, costly: dict[str, Any], num_processes: int) -> None:
    """Each of them is within what one may cost: 2 to 5 MB."""
    data = pickle.dumps({**CONTENT, **costly}, protocol=2)
    paths = [written(tmp_path, data, f"rank{r:03}") for r in range(flight_dumps.POOL_MIN)]
    budget = Budget(ReadLimits(kept_bytes_max=16 << 20))
    dumps, unreadable = read_many(paths, num_processes=num_processes, budget=budget)
    assert budget.stopped is not None and unreadable == []
    assert re.match(r"with it \d+ files? would take more than 0.0156 GiB of memory", budget.stopped.reason)
    assert 2 <= paths.index(Path(budget.stopped.where)) == len(dumps) < 10


def test_lists_of_ranks_that_dumps_share_are_counted_once(tmp_path: Path) -> None:
    """Else the dumps of a large job would be refused, which hold as many ranks each as there are dumps."""
    group = {"name": "0", "desc": "default_pg", "ranks": str(list(range(5000)))}
    data = pickle.dumps({**CONTENT, "pg_config": {"0": group}}, protocol=2)
    paths = [written(tmp_path, data, f"rank{r}") for r in range(20)]
    budget = Budget(ReadLimits(kept_bytes_max=2 * 48 * 5000))
    assert len(read_many(paths, num_processes=1, budget=budget)[0]) == 20


def test_reading_many_dumps_ends_in_time(tmp_path: Path) -> None:
    """Refused ones take time, too, and so does each round of the fast way."""
    clock = FakeClock()
    data = pickle.dumps(CONTENT, protocol=2)
    paths = [written(tmp_path, data, f"rank{r}") for r in range(5)]
    paths[1].write_bytes(HOSTILE["global"][0])
    budget = Budget(ReadLimits(seconds_max=100.0), clock)
    dumps, unreadable = read_many(paths, num_processes=1, progress=lambda num: clock.advance(40.0), budget=budget)
    assert [d.rank for d in dumps] == [0, 2] and [e.where for e in unreadable] == [str(paths[1])]
    assert budget.stopped is not None and budget.stopped.where == str(paths[3]) and "100 s" in budget.stopped.reason

    paths[1].write_bytes(data)

    def wanted(dumps: Any) -> set[int]:
        clock.advance(60.0)
        return {sum(d.entries is not None for d in dumps)}

    budget = Budget(ReadLimits(seconds_max=100.0), clock)
    dumps, unreadable = read_as_needed(paths, wanted, num_processes=1, budget=budget)
    assert budget.stopped is not None and budget.stopped.where == str(paths[1])
    assert [d.entries is not None for d in dumps] == [True, False, False, False, False] and unreadable == []


def test_a_dump_that_takes_too_much_memory_is_refused_by_name_and_the_others_are_kept(tmp_path: Path) -> None:
    good = written(tmp_path, pickle.dumps(CONTENT, protocol=2), "rank0")
    pickled = written(tmp_path, b"\x80\x02" + b"]" * 200_000 + b".", "rank1")
    as_json = written(tmp_path, b'{"entries": [' + b"[]," * 100_000 + b"[]]}", "rank2")
    budget = Budget(ReadLimits(reading_bytes_max=16 << 20))
    dumps, unreadable = read_many([good, pickled, as_json], num_processes=1, budget=budget)
    assert [d.rank for d in dumps] == [0] and [e.where for e in unreadable] == [str(pickled), str(as_json)]
    assert all("more memory than the 16 MiB" in e.reason for e in unreadable)


@pytest.mark.parametrize(
    ("in_flight", "fits"),
    [([], True), ([300], True), ([300, 300], False), ([100] * 3, True), ([1] * 4, False)],
)
def test_large_files_leave_memory_for_fewer_readers(in_flight: list[int], fits: bool) -> None:
    """Of 768 units the next needs 300; two processes have four tasks at most."""
    assert flight_dumps._fits(in_flight, 300, 2, 768) is fits


def test_a_task_has_few_files_and_a_large_one_alone() -> None:
    """Its results lie in memory until they are consumed."""
    sizes = [10] * 20 + [100] * 3 + [768] * 2
    tasks = list(flight_dumps._tasks([(Path(str(n)), size) for n, size in enumerate(sizes)], 768))
    assert [[b for _, b in task] for task in tasks] == [[10] * 8] * 2 + [[10] * 4 + [100] * 2, [100], [768], [768]]


def test_a_reader_process_ends_within_a_file_when_the_time_is_over(tmp_path: Path) -> None:
    class Passing(FakeClock):
        def monotonic(self) -> float:
            self.advance(1.0)
            return super().monotonic()

    clock = Passing()
    path = written(tmp_path, pickle.dumps({"entries": list(range(1 << 19))}, protocol=2), "rank0")
    [error] = flight_dumps._read_task([(path, 1 << 30)], True, clock.monotonic() + 3.0, clock)
    assert isinstance(error, UnreadableInput) and error.where == str(path) and "time" in error.reason
