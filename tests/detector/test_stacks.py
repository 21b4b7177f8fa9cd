"""Stack dumps: real ones of py-spy, and written cases of who waits for whom."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.diagnosis import FaultClass, Finding
from rolecall.core.errors import UnreadableInput
from rolecall.detector import stack_dumps
from rolecall.detector.findings import SETTLE
from rolecall.detector.stack_dumps import Dump, Frame, Group, Thread, Topology, is_dump, is_topology, normal_frame, read
from rolecall.detector.stack_dumps import read_topology as topology_of
from rolecall.detector.stack_places import Doing, stack_of
from rolecall.detector.stacks import PARALLEL_GROUP, STACK_GROUP, diagnose, looked_at

C10D = "torch/distributed/distributed_c10d.py"
WRAPPER = "torch/distributed/c10d_logger.py:wrapper"

# Innermost first, as py-spy has them.
REDUCE = (f"{C10D}:all_reduce", WRAPPER, "train.py:sync_gradients", "train.py:step", "train.py:main")
GATHER = (
    f"{C10D}:all_gather_into_tensor",
    WRAPPER,
    "layers.py:gather_along_first_dim",
    "layers.py:forward",
    "train.py:main",
)
SYNC = ("distributed/param_and_grad_buffer.py:start_grad_sync", "schedules.py:forward_backward", "train.py:main")
RECEIVE = (f"{C10D}:irecv", "p2p_communication.py:recv_backward", "schedules.py:forward_backward", "train.py:main")
LOADER = (
    "selectors.py:select",
    "multiprocessing/queues.py:get",
    "torch/utils/data/dataloader.py:_next_data",
    "train.py:main",
)
COMPUTE = ("layers.py:forward", "train.py:step", "train.py:main")


def frames(*texts: str) -> tuple[Frame, ...]:
    return tuple(Frame(*text.split(":", 1)) for text in texts)


def thread(*texts: str, name: str = "MainThread", active: bool = False, owns_gil: bool = False) -> Thread:
    return Thread(name=name, frames=frames(*texts), active=active, owns_gil=owns_gil)


def dump(
    rank: int, *texts: str, active: bool = False, at: float = 100.0, role: str = "trainer", **more: object
) -> Dump:
    fields = {"node": f"m{rank // 2:02d}", "threads": (thread(*texts, active=active),), **more}
    return Dump(path=f"rank_{rank}-{at}.json", at=at, role=role, rank=rank, **fields)  # type: ignore[arg-type]


def only(found: Sequence[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def ranks(found: Finding) -> list[int | None]:
    return [s.rank for s in found.suspects]


def settle(found: Finding) -> str:
    return "; ".join(e.text for e in found.evidence if e.kind == SETTLE)


# --- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "doing", "confidence"),
    [
        (LOADER, Doing.DATA, 0.8),
        (("threading.py:wait", "cache.py:get", "train.py:step", "train.py:main"), Doing.LOCK, 0.8),
        (("socket.py:readinto", "rewards.py:ask", "train.py:main"), Doing.IO, 0.8),
        (("torch/serialization.py:load", "train.py:resume", "train.py:main"), Doing.CHECKPOINT, 0.8),
        (("torch/_inductor/scheduler.py:fuse", "train.py:main"), Doing.COMPILE, 0.8),
        (("gc_collect_main", "train.py:main"), Doing.GARBAGE, 0.8),
        (("train.py:pause", "train.py:main"), Doing.STILL, 0.8),
    ],
    ids=lambda value: value.name if isinstance(value, Doing) else None,
)
def test_who_does_not_wait_while_the_rest_waits_is_the_suspect(
    texts: tuple[str, ...], doing: Doing, confidence: float
) -> None:
    texts = tuple(t if ":" in t else f"python3.11:{t}" for t in texts)
    found = only(diagnose([*(dump(r, *REDUCE) for r in range(7)), dump(7, *texts)]))
    assert (ranks(found), found.fault_class, found.confidence) == ([7], FaultClass.HANG, confidence)
    assert found.suspects[0].node == "m03"
    assert str(doing) in found.because and "7 of 8 trainer processes wait for others (all_reduce" in found.because
    groups = [e for e in found.evidence if e.kind == STACK_GROUP]
    assert [e.values["num_processes"] for e in groups] == [7, 1]


def test_one_who_computes_is_named_with_less_confidence_and_an_older_dump_changes_it() -> None:
    waiting = [dump(r, *REDUCE) for r in range(3)]
    late = dump(3, *COMPUTE, active=True)
    assert only(diagnose([*waiting, late])).confidence == 0.6
    same = only(diagnose([*waiting, late, dump(3, *COMPUTE, active=True, at=90.0)]))
    assert (ranks(same), same.confidence) == ([3], 0.7) and "an older dump shows the same" in same.because
    moved = only(diagnose([*waiting, late, dump(3, "layers.py:backward", "train.py:main", active=True, at=90.0)]))
    assert (ranks(moved), moved.confidence) == ([3], 0.5) and "it moves" in moved.because


def test_cause_comes_before_symptom() -> None:
    """Rank 6 sits in its data loader: its pipeline neighbour waits for it, and all others for both."""
    found = only(diagnose([*(dump(r, *REDUCE) for r in range(6)), dump(6, *LOADER), dump(7, *RECEIVE)]))
    assert ranks(found) == [6]


@pytest.mark.parametrize(
    "dumps",
    [
        [dump(r, *REDUCE) for r in range(8)],
        [dump(r, *COMPUTE, active=True) for r in range(8)],
        [dump(0, *REDUCE), *(dump(r, *COMPUTE, active=r % 2 == 0) for r in range(1, 8))],
        [dump(r, f"f{r}.py:f", "train.py:main") for r in range(8)],
        [dump(0, *COMPUTE)],
    ],
    ids=["all wait in one place", "all compute", "one is early", "all differ", "one at work"],
)
def test_nobody_is_accused(dumps: list[Dump]) -> None:
    assert diagnose(dumps) == []
    assert f"trainer: {len(dumps)} stack" in looked_at(dumps)


def test_halves_cannot_tell_and_say_what_would_settle_it() -> None:
    found = only(diagnose([dump(0, *REDUCE), dump(1, *LOADER)]))
    assert found.fault_class == FaultClass.CANNOT_TELL and "some seconds later" in settle(found)
    both_wait = only(diagnose([*(dump(r, *REDUCE) for r in range(2)), *(dump(r, *GATHER) for r in (2, 3))]))
    assert both_wait.fault_class == FaultClass.CANNOT_TELL and "Flight Recorder" in settle(both_wait)


def test_a_pipeline_that_waits_for_a_stage_at_work_is_no_fault_by_itself() -> None:
    dumps = [*(dump(r, *RECEIVE) for r in range(3)), dump(3, *COMPUTE, active=True)]
    assert only(diagnose(dumps)).fault_class == FaultClass.CANNOT_TELL
    stuck = [*dumps, dump(3, *COMPUTE, active=True, at=90.0)]
    assert (ranks(only(diagnose(stuck))), only(diagnose(stuck)).fault_class) == ([3], FaultClass.HANG)


def test_a_single_dump_that_waits_cannot_tell() -> None:
    found = only(diagnose([dump(0, *REDUCE)]))
    assert found.fault_class == FaultClass.CANNOT_TELL and "that it waits for" in settle(found)


def test_most_at_one_place_twice_wait_for_who_is_elsewhere() -> None:
    """Reading a value from a GPU shows no wait: 7 of 8 stand in their own code, and in an older dump, too."""
    item = ("train.py:log_loss", "train.py:main")
    now = [*(dump(r, *item, active=True) for r in range(7)), dump(7, *LOADER)]
    assert diagnose(now) == [], "in one look they may all be at work"
    older = [*(dump(r, *item, active=True, at=90.0) for r in range(7)), dump(7, *LOADER, at=90.0)]
    found = only(diagnose([*now, *older]))
    assert ranks(found) == [7] and "7 of 8 trainer processes wait for others (log_loss (train.py)" in found.because
    assert diagnose([*now, *older[1:], dump(0, *COMPUTE, at=90.0)]) == [], "one of them moves"
    whole = [dump(r, *REDUCE, at=at) for r in range(8) for at in (90.0, 100.0)]
    assert only(diagnose(whole)).fault_class == FaultClass.CANNOT_TELL


def test_a_rank_without_a_dump_is_evidence_when_all_others_wait() -> None:
    dumps = [dump(r, *REDUCE) for r in range(8) if r != 5]
    gap = only(diagnose(dumps))
    assert (ranks(gap), gap.fault_class) == ([5], FaultClass.HANG) and "no dump of trainer rank 5" in gap.because
    last = [dump(r, *REDUCE) for r in range(7)]
    assert diagnose(last) == [], "nobody said that there is a rank 7"
    known = Topology(world_size=8, nodes={7: "m03"})
    assert [(s.rank, s.node) for s in only(diagnose(last, topology=known)).suspects] == [(7, "m03")]
    assert ranks(only(diagnose([dump(r, *REDUCE, world_size=8) for r in range(7)]))) == [7]
    few = only(diagnose(last[:3], topology=known))
    assert few.fault_class == FaultClass.CANNOT_TELL and "dumps of the other processes" in settle(few)


def test_a_stalled_rank_explains_more_than_a_missing_dump() -> None:
    found = only(diagnose([*(dump(r, *REDUCE) for r in range(6)), dump(7, *LOADER)]))
    assert ranks(found) == [7] and found.confidence == 0.6 and "no dump of trainer rank 6" in found.because


def test_ranks_that_each_replica_counts_anew_hide_nobody() -> None:
    dumps = [dump(r, *REDUCE, replica=f"trainer/{i}") for i in range(2) for r in (0, 2)]
    assert diagnose(dumps) == []


def test_roles_are_judged_apart() -> None:
    rollouts = [dump(r, "queue.py:get", "engine.py:loop", role="rollout") for r in range(8)]
    trainers = [*(dump(r, *REDUCE) for r in range(3)), dump(3, *LOADER)]
    found = only(diagnose([*rollouts, *trainers]))
    assert [(s.role, s.rank) for s in found.suspects] == [("trainer", 3)]


# --- groups -------------------------------------------------------------------------------------------------------

GRID = Topology(world_size=32, sizes=(("tp", 2), ("pp", 4), ("dp", 4)), nodes={r: f"m{r // 2:02d}" for r in range(32)})


def test_the_published_picture_names_the_pipeline_and_where_to_look_first() -> None:
    """After Fig. 7 of ByteRobust (arXiv 2509.16293): TP 2, PP 4, DP 4 on 16 machines of two GPUs. Most wait to reduce
    gradients, machines 12 to 14 for their pipeline neighbour, machine 15 in a tensor-parallel gather."""
    dumps = [dump(r, *(SYNC if r < 24 else RECEIVE if r < 30 else GATHER)) for r in range(32)]
    found = only(diagnose(dumps, topology=GRID))
    assert sorted({s.node for s in found.suspects}) == ["m12", "m13", "m14", "m15"]
    assert ranks(found)[:2] == [30, 31], "the innermost wait comes first"
    group = next(e for e in found.evidence if e.kind == PARALLEL_GROUP)
    assert group.values == {"num_members": 8, "num_likely_innocent": 6}
    assert "the tp x pp group of dp 3, 8 processes on 4 nodes, of which 6 are likely innocent" in found.because
    assert "look first at trainer rank 30 (node m15), trainer rank 31 (node m15)" in found.because
    assert found.fault_class == FaultClass.HANG and found.confidence == 0.5


def test_the_smallest_group_is_taken_of_node_replica_grid_and_list() -> None:
    def members(outliers: Sequence[int], topology: Topology | None, **more: object) -> list[int]:
        dumps = [dump(r, *(RECEIVE if r in outliers else SYNC), **more) for r in range(32)]
        return sorted(r for r in ranks(only(diagnose(dumps, topology=topology))) if r is not None)

    assert members([24, 25], GRID) == [24, 25], "the two of one node, which is their tensor group"
    assert members([24, 30], GRID) == [24, 26, 28, 30], "one pipeline"
    assert members([1, 9], GRID) == [1, 9, 17, 25], "one data-parallel group"
    assert members([3, 20], GRID) == [3, 20], "nothing but the whole holds both"
    listed = Topology(groups=(Group(axis="ep", index=4, ranks=frozenset({3, 20, 21})),))
    assert members([3, 20], listed) == [3, 20, 21]
    assert members([3, 20], None) == [3, 20]


def test_a_group_can_come_of_file_names() -> None:
    dumps = [
        dump(r, *(RECEIVE if r in (4, 6) else SYNC), axes=(("dp", r // 4), ("pp", r % 4)), node="") for r in range(8)
    ]
    extra = [dump(8 + r, *SYNC, axes=(("dp", 2), ("pp", r)), node="") for r in range(4)]
    found = only(diagnose([*dumps, *extra]))
    assert sorted(r or 0 for r in ranks(found)) == [4, 5, 6, 7] and "the pp group of dp 1" in found.because


# --- places -------------------------------------------------------------------------------------------------------


def test_the_same_wait_reached_in_other_ways_is_one_place() -> None:
    below = ("threading.py:wait", "threading.py:acquire", *REDUCE)
    above = (*REDUCE[:-1], "logging_wrapper.py:rank_zero", "train.py:main")
    assert len({stack_of(dump(0, *texts)).key for texts in (REDUCE, below, above)}) == 1
    other_caller = (REDUCE[0], WRAPPER, "layers.py:row_parallel", "layers.py:forward")
    assert stack_of(dump(0, *other_caller)).key != stack_of(dump(0, *REDUCE)).key


@pytest.mark.parametrize(
    ("texts", "doing"),
    [
        ((f"{C10D}:broadcast", "train.py:main"), Doing.COLLECTIVE),
        (("numpy/lib/stride_tricks.py:broadcast_to", "train.py:main"), Doing.STILL),
        (("functional.py:reduce", "train.py:main"), Doing.STILL),
        (
            ("torch/autograd/graph.py:_engine_run_backward", "torch/_tensor.py:Tensor.backward", "train.py:main"),
            Doing.BACKWARD,
        ),
        ((f"{C10D}:_store_based_barrier", f"{C10D}:init_process_group", "train.py:main"), Doing.RENDEZVOUS),
        (("torch/cuda/streams.py:synchronize", "train.py:main"), Doing.DEVICE),
        (("libcuda.so.1:cuStreamSynchronize", "train.py:item"), Doing.DEVICE),
        (("libtorch_cuda.so:c10d::ProcessGroupNCCL::WorkNCCL::wait", "train.py:main"), Doing.COLLECTIVE),
        (("Reducer.all_reduce_gradients", "train.py:main"), Doing.COLLECTIVE),
        (("train.py:flatten", "train.py:all_reduce_gradients", "train.py:main"), Doing.STILL),
    ],
)
def test_what_a_stack_says(texts: tuple[str, ...], doing: Doing) -> None:
    texts = tuple(t if ".py:" in t or ".so" in t else f"train.py:{t}" for t in texts)
    assert stack_of(dump(0, *texts)).doing == doing


def test_the_thread_that_tells_most_speaks_for_its_process() -> None:
    loop = thread("selectors.py:select", "asyncio/base_events.py:run_forever", "worker.py:main")
    trains = thread(*REDUCE, name="Thread-2 (train)")
    helpers = (
        thread("threading.py:wait", "multiprocessing/queues.py:_feed", name="QueueFeederThread"),
        thread("concurrent/futures/thread.py:_worker", name="ThreadPoolExecutor-0_0"),
        thread("agent.py:beat", "threading.py:run", name="Thread-9 (beat)"),
        thread(name="Dummy-1"),
    )
    in_thread = Dump(path="a", at=0.0, threads=(loop, *helpers, trains))
    assert stack_of(in_thread).doing == Doing.COLLECTIVE
    for idle in (
        thread("ray/_private/worker.py:Worker.main_loop"),
        thread("threading.py:Thread.join", "train.py:main"),
    ):
        assert stack_of(Dump(path="a", at=0.0, threads=(idle, *helpers, trains))).doing == Doing.COLLECTIVE
    task = thread("reward.py:score", "ray/_private/worker.py:Worker.main_loop")
    assert stack_of(Dump(path="a", at=0.0, threads=(task, *helpers, trains))).doing == Doing.STILL
    in_main = Dump(path="a", at=0.0, threads=(thread(*COMPUTE), *helpers, thread(*REDUCE, name="Thread-3")))
    assert stack_of(in_main).doing == Doing.STILL, "the main thread comes first where it has something to say"
    starved = (thread(*COMPUTE), thread("tokenizer.py:encode", name="Thread-4", active=True, owns_gil=True))
    found = only(diagnose([*(dump(r, *REDUCE) for r in range(3)), dump(3, threads=starved)]))
    assert [e.text for e in found.evidence if e.kind == "gil"] == [
        "trainer rank 3 (node m01): another thread holds the GIL: Thread-4 in encode (tokenizer.py)"
    ]


@pytest.mark.parametrize(
    ("file", "name", "wanted"),
    [
        (f"/opt/venv/lib/python3.11/site-packages/{C10D}", "all_reduce", f"all_reduce ({C10D})"),
        ("/usr/lib/python3/dist-packages/yaml/reader.py", "peek", "peek (yaml/reader.py)"),
        ("/usr/lib/python3.12/threading.py", "Thread.run", "Thread.run (threading.py)"),
        ("/home/a/run-7/train.py", "main", "main (train.py)"),
        ("<ipython-input-3-4f2a>", "<module>", "<module> (<ipython-input>)"),
        ("/tmp/ipykernel_71/12.py", "go", "go (<ipython-input>)"),
        ("<eval_with_key>.17", "forward", "forward (<eval_with_key>)"),
        ("/tmp/torchinductor_a/xy/cxy7.py", "call", "call (<torchinductor>)"),
        ("<string>", "__compiled_fn_12", "__compiled_fn (<string>)"),
        ("train.py", "torch_dynamo_resume_in_step_at_88", "torch_dynamo_resume_in_step_at (train.py)"),
        ("libtorch.so", "c10d::Work<float>::wait(long)", "c10d::Work (libtorch.so)"),
        ("libc.so.6", "0x7f12ab", None),
    ],
)
def test_frames_look_the_same_in_each_process(file: str, name: str, wanted: str | None) -> None:
    frame = normal_frame(file, name)
    assert (str(frame) if frame else None) == wanted


# --- reading ------------------------------------------------------------------------------------------------------


def py_spy_json(*texts: str, pid: int = 7, name: str = "MainThread") -> list[dict[str, object]]:
    shown = [{"name": f.name, "filename": f"/x/{f.file}", "short_filename": f.file, "line": 3} for f in frames(*texts)]
    common = {"pid": pid, "thread_id": 1, "os_thread_id": pid, "active": False, "owns_gil": False}
    return [{**common, "thread_name": name, "frames": shown}]


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
    ],
)
def test_names_say_whose_stack_it_is(tmp_path: Path, path: str, wanted: dict[str, object]) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(py_spy_json(*REDUCE)))
    found = read(file)
    empty = {"node": "", "role": "", "replica": "", "rank": None, "world_size": None, "axes": ()}
    assert {k: getattr(found, k) for k in empty} == {**empty, **wanted} and found.pid == 7


def test_an_agents_answer_says_it_itself(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    said = {"node": "m04", "pid": 7, "replica": "trainer/1", "rank": 0, "incarnation": 2, "at": 5.0}
    file.write_text(json.dumps({**said, "threads": py_spy_json(*REDUCE)}))
    assert is_dump(file) and not is_topology(file)
    found = read(file)
    place = (found.node, found.role, found.replica, found.rank, found.incarnation)
    assert place == ("m04", "trainer", "trainer/1", 0, 2)


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
        'Thread 7 (idle): "MainThread"\n    wait (threading.py:320)\n        Arguments:\n            self: "f (b.py:1)"\n'
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


def test_a_topology_fills_in_what_dumps_do_not_say(tmp_path: Path) -> None:
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
    nameless = Dump(path="a", at=1.0, threads=(thread(*LOADER),), pid=7)
    known = [Dump(path=f"{r}", at=1.0, threads=(thread(*REDUCE),), rank=r) for r in range(3)]
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


# --- real processes -----------------------------------------------------------------------------------------------

WORKER = """
import socket, sys, threading, time
near, far = socket.socketpair()
lock = threading.Lock()

def all_reduce():
    near.recv(1)

def read_cache():
    with lock:
        pass

def augment():
    time.sleep(60)

def step(what):
    what()

lock.acquire()
threading.Thread(target=time.sleep, args=(60,), name="heartbeat", daemon=True).start()
print("ready", flush=True)
step({"wait": all_reduce, "lock": read_cache, "sleep": augment}[sys.argv[1]])
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Processes in a wait like a collective's, at a lock, and asleep. They end by themselves after a minute."""
    script = tmp_path_factory.mktemp("job") / "train.py"
    script.write_text(WORKER)
    started = {
        name: subprocess.Popen([sys.executable, "-I", script, name.rstrip("012")], stdout=subprocess.PIPE, text=True)
        for name in ("wait0", "wait1", "wait2", "lock", "sleep")
    }
    try:
        for process in started.values():
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.communicate(timeout=10)


def py_spy(process: subprocess.Popen[str], path: Path) -> Dump:
    kind = ["--json"] if path.suffix == ".json" else []
    program = Path(sys.executable).parent / "py-spy"
    if not program.exists():
        pytest.skip("py-spy is not installed beside this Python")
    command = [str(program), "dump", "--nonblocking", *kind, "--pid", str(process.pid)]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"py-spy may not look at processes here: {done.stderr.decode()[:200]}")
    path.write_bytes(done.stdout)
    assert is_dump(path)
    return read(path)


def test_real_processes(real: dict[str, subprocess.Popen[str]], tmp_path: Path) -> None:
    """Three wait; the fourth is at a lock, asleep, or stopped where nobody can look. Half of the dumps are text."""
    waiting = [py_spy(real[f"wait{r}"], tmp_path / f"trainer-{r}_rank{r}.{'json' if r else 'txt'}") for r in range(3)]
    assert diagnose(waiting) == []
    for name, kind, words in (
        ("lock", "txt", "stands still in its own code: read_cache (train.py), called by step (train.py)"),
        ("sleep", "json", "stands still in its own code: augment (train.py), called by step (train.py)"),
    ):
        found = only(diagnose([*waiting, py_spy(real[name], tmp_path / f"trainer-3_rank3_{name}.{kind}")]))
        assert [(s.replica, s.rank) for s in found.suspects] == [("trainer/3", 3)]
        assert words in found.because and "all_reduce (train.py), called by step (train.py)" in found.because
    real["wait2"].send_signal(signal.SIGSTOP)
    stopped = py_spy(real["wait2"], tmp_path / "rank_2.json")
    assert stack_of(stopped).doing == Doing.COLLECTIVE, "a stopped process looks as it did"
    absent = only(diagnose([*waiting[:2], waiting[2]], topology=Topology(world_size=4)))
    assert [s.rank for s in absent.suspects] == [3]
