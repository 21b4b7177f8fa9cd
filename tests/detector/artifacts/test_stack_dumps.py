"""Reading stack dumps and topologies: what is understood, and what is refused."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.errors import UnreadableInput
from rolecall.detector.artifacts.stacks import dumps as stack_dumps
from rolecall.detector.artifacts.stacks.diagnosis import diagnose
from rolecall.detector.artifacts.stacks.dumps import StackDump, is_dump, is_topology, read
from rolecall.detector.artifacts.stacks.dumps import read_topology as topology_of
from rolecall.diagnose import diagnose as diagnosing
from tests.detector.stack_cases import (
    C10D,
    LOADER,
    REDUCE,
    only,
    py_spy_json,
    thread,
)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("trainer-1_rank3.json", {"role": "trainer", "replica": "trainer/1", "rank": 3}),
        ("rank_3.json", {"rank": 3}),
        ("trainer_rank3_of_8.json", {"role": "trainer", "rank": 3, "world_size": 8}),
        ("node-2/trainer-0-pid123.json", {"node": "node-2", "role": "trainer", "replica": "trainer/0"}),
        ("node=gpu-07_rank12.json", {"node": "gpu-07", "rank": 12}),
        ("host4.rank1.json", {"node": "host4", "rank": 1}),
        ("dp0_pp1_tp0.json", {"axes": (("dp", 0), ("pp", 1), ("tp", 0))}),
        ("learner-2.json", {"role": "learner", "replica": "learner/2"}),
        ("stack-5.json", {}),
        ("frank7.json", {}),
        ("NODE=GPU-07_rank12.json", {"node": "GPU-07", "rank": 12}),
        ("machine-learning/rank1.json", {"rank": 1}),
        ("nodes/rank1.json", {"rank": 1}),
        ("hosts_20261122/rank1.json", {"rank": 1}),
        ("node-logs-2026-11-22/rank1.json", {"rank": 1}),
        ("node-7.cluster/rank1.json", {"node": "node-7.cluster", "rank": 1}),
        ("node7_local_rank3.json", {"node": "node7"}),
        ("round-2_rank3.json", {"rank": 3, "round_index": 2}),
        ("rank3_of_8-2.json", {"rank": 3, "world_size": 8, "round_index": 2}),
        ("trainer-1_rank3_step-7.json", {"role": "trainer", "replica": "trainer/1", "rank": 3}),
    ],
)
def test_file_names_identify_the_process_of_a_stack(tmp_path: Path, path: str, wanted: dict[str, object]) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(py_spy_json(*REDUCE)))
    found = read(file)
    empty = {"node": "", "role": "", "replica": "", "rank": None, "world_size": None, "axes": (), "round_index": None}
    assert {k: getattr(found, k) for k in empty} == {**empty, **wanted} and found.pid == 7


def test_an_agents_response_identifies_its_process(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    said = {"node": "m04", "pid": 7, "replica": "trainer/1", "rank": 0, "incarnation": 2, "at": 5.0}
    file.write_text(json.dumps({**said, "threads": py_spy_json(*REDUCE)}))
    assert is_dump(file) and not is_topology(file)
    found = read(file)
    place = (found.node, found.role, found.replica, found.rank, found.incarnation)
    assert place == ("m04", "trainer", "trainer/1", 0, 2)


def test_an_agents_response_has_the_engine_processes_below_its_process(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    core = {
        "pid": 8,
        "parent": 7,
        "title": "VLLM::EngineCore",
        "is_stopped": True,
        "threads": py_spy_json(*LOADER, pid=8),
    }
    worker = {"pid": 9, "parent": 8, "title": "VLLM::Worker_TP0", "is_stopped": False, "threads": [], "missing": "late"}
    file.write_text(json.dumps({"pid": 7, "threads": py_spy_json(*REDUCE), "engines": [core, worker]}))
    found = read(file)
    assert [(e.pid, e.parent, e.title) for e in found.engines] == [
        (8, 7, "VLLM::EngineCore"),
        (9, 8, "VLLM::Worker_TP0"),
    ]
    of_core, of_worker = (e.dump for e in found.engines)
    assert of_core is not None and of_core.is_stopped and of_core.at == found.at and of_worker is None
    assert [str(t.frames[0]) for t in of_core.threads] == ["select (selectors.py)"]
    assert [str(t.frames[0]) for t in found.threads] == [f"all_reduce ({C10D})"]


def test_of_a_process_tree_the_process_itself_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rank_0.json"
    worker = py_spy_json("torch/utils/data/_utils/worker.py:_worker_loop", pid=8)
    file.write_text(json.dumps([*py_spy_json(*REDUCE), *worker]))
    assert [str(t.frames[0]) for t in read(file).threads] == [f"all_reduce ({C10D})"]


def test_text_of_py_spy_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rank_0.txt"
    file.write_text(
        "Process \x1b[1m7\x1b[0m: python train.py --name 'a (b)'\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        'Thread 9 (active+gil): "Thread-1 (x)"\n    x (a.py:3)\n'
        'Thread 7 (idle): "MainThread"\n    wait (threading.py:320)\n        Arguments:\n            self: "f '
        '(b.py:1)"\n'
        "    <module> (my (odd) dir/train.py:12)\n"
    )
    assert is_dump(file)
    found = read(file)
    assert found.pid == 7 and [(t.name, t.active, t.owns_gil) for t in found.threads] == [
        ("MainThread", False, False),
        ("Thread-1 (x)", True, True),
    ]
    assert [f.name for f in found.threads[0].frames] == ["wait", "<module>"]


BAD = {
    "cut short": json.dumps(py_spy_json(*REDUCE))[:-40],
    "no frames": json.dumps([{"pid": 1, "thread_id": 1, "frames": []}]),
    "frames of another kind": json.dumps([{"pid": 1, "thread_id": 1, "frames": [[1]]}]),
    "threads of another kind": '{"pid": 1, "threads": [1, 2]}',
    "engines of another kind": json.dumps({"pid": 7, "threads": py_spy_json(*REDUCE), "engines": [1]}),
    "an engine without a PID": json.dumps({"pid": 7, "threads": py_spy_json(*REDUCE), "engines": [{"threads": []}]}),
    "nested too deep": '[{"thread_id": 1, "frames": ' + "[" * 100_000,
    "too many threads": json.dumps([{"thread_id": 1, "frames": []}] * (stack_dumps.NUM_THREADS_MAX + 1)),
    "too many frames": json.dumps([{"thread_id": 1, "frames": [{"name": "f", "filename": "a.py"}] * 4097}]),
    "a number of 10,000 digits": '[{"thread_id": ' + "1" * 10_000 + "}]",
    "nothing": "",
    "text of another kind": "Thread safety is hard\n",
    "text without frames": 'Thread 7 (idle): "MainThread"\n',
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_dump_is_refused_by_name(tmp_path: Path, what: str) -> None:
    file = tmp_path / "rank_0.json"
    file.write_text(BAD[what])
    with pytest.raises(UnreadableInput, match=r"rank_0\.json: \w"):
        read(file)


def test_where_no_node_is_named_each_role_has_its_own_diagnosis(tmp_path: Path) -> None:
    for name in ("trainer_rank{}", "rollout_rank{}", "{}"):
        for r in range(4):
            (tmp_path / f"{name.format(r)}.json").write_text(json.dumps(py_spy_json(*(LOADER if r == 3 else REDUCE))))
    answer = diagnosing.diagnose([tmp_path], [])
    nodes = [s.node.rpartition("/")[2] for d in answer.diagnoses for s in d.suspects]
    assert sorted(nodes) == ["pid-7", "rollout-rank-3", "trainer-rank-3"]


def test_a_damaged_dump_of_a_folder_is_reported_and_its_process_counts_as_missing(tmp_path: Path) -> None:
    for r in range(8):
        text = json.dumps(py_spy_json(*REDUCE))
        (tmp_path / f"trainer_rank{r}_of_8.json").write_text(text if r != 5 else text[:-40])
    answer = diagnosing.diagnose([tmp_path], [])
    assert "no dump of trainer rank 5" in answer.diagnoses[0].because
    assert [r for i in answer.inputs for r in i.remarks if "rank5_of_8.json: not JSON, or cut short" in r]
    with pytest.raises(UnreadableInput, match="rank5_of_8"):
        diagnosing.diagnose([tmp_path / "trainer_rank5_of_8.json"], [])
    with pytest.raises(UnreadableInput, match="rank5_of_8"):
        diagnosing.diagnose([tmp_path / "trainer_rank4_of_8.json", tmp_path / "trainer_rank5_of_8.json"], [])


def test_a_dump_of_10_gib_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rank_0.json"
    with file.open("wb") as f:
        f.write(b'[{"thread_id": 1, "frames": [')
        f.truncate(10 << 30)
    with pytest.raises(UnreadableInput, match="10,737,418,240 bytes"):
        read(file)
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(UnreadableInput, match="not a file"):
            read(path)
    os.mkfifo(tmp_path / "pipe")
    assert not is_dump(tmp_path / "pipe")


def test_frames_that_dumps_share_take_memory_once(tmp_path: Path) -> None:
    """Else the stacks of a large job, all alike, would be taken for more than memory holds."""
    counted: set[int] = set()
    kept, taken = [], []
    for n, texts in enumerate((REDUCE, REDUCE, (*REDUCE, "mine.py:" + 400 * "x"))):
        (tmp_path / f"rank_{n}.json").write_text(json.dumps(py_spy_json(*texts)))
        kept.append(read(tmp_path / f"rank_{n}.json"))
        taken.append(stack_dumps.kept_bytes(kept[-1], counted))
    assert taken[0] > 5 * taken[1] > 0 and taken[2] - taken[1] > 400


@given(
    st.binary(max_size=300), st.sampled_from([b"", b'[{"thread_id": 1, "frames": [{"name": ', b"Thread 7 (idle)\n    "])
)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, tail: bytes, head: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "rank_1.json"
    file.write_bytes(head + tail)
    is_dump(file)
    is_topology(file)
    try:
        diagnose([read(file)])
    except UnreadableInput:
        pass


def test_a_topology_completes_dumps(tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    rank = {"node": "m3", "replica": "trainer/1", "pid": 7}
    file.write_text(json.dumps({"role": "trainer", "ranks": {"3": rank}, "parallel": {"tp": 2, "dp": 2}}))
    assert is_topology(file) and not is_dump(file)
    topology = topology_of(file)
    assert (topology.world_size, topology.axes(3), topology.axes(2)) == (
        4,
        (("tp", 1), ("dp", 1)),
        (("tp", 0), ("dp", 1)),
    )
    nameless = StackDump(path="a", at=1.0, threads=(thread(*LOADER),), pid=7)
    known = [StackDump(path=f"{r}", at=1.0, threads=(thread(*REDUCE),), rank=r) for r in range(3)]
    suspect = only(diagnose([nameless, *known], topology=topology)).suspects[0]
    assert (suspect.node, suspect.role, suspect.replica, suspect.rank) == ("m3", "trainer", "trainer/1", 3)


def test_a_topology_is_known_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    for content, known in (
        ('{"parallel": {"tp": 2}}', True),
        ('{"role": "trainer", "ranks": {"0": {"node": "a"}}}', True),
        ('{"groups": {"pp": [[0]]}}', True),
        ('{"version": "2.9", "pg_config": {}, "groups": {}}', False),
        ('{"ranks": [1, 2]}', False),
        ("ranks and groups", False),
    ):
        file.write_text(content)
        assert is_topology(file) == known, content


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"parallel": ',
        '{"parallel": {"tp": 0}}',
        '{"parallel": {"tp": 2}, "world_size": 3}',
        '{"parallel": {"tp": 1000000, "pp": 1000000}}',
        '{"world_size": "many", "ranks": {}}',
        '{"world_size": 2, "ranks": {"5": {}}}',
        '{"ranks": {"x": {}}}',
        '{"ranks": {"' + "1" * 5000 + '": {}}}',
        '{"groups": {"pp": [1, 2]}}',
        '{"groups": {"pp": [["a"]]}}',
        '{"groups": [[1, 2]]}',
    ],
)
def test_a_bad_topology_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "topology.json"
    file.write_text(content)
    with pytest.raises(UnreadableInput, match=r"topology\.json: \w"):
        topology_of(file)
