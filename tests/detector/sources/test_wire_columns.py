"""Samples as columns: what an agent writes is what a watcher reads, and what is wrong stops with its row."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.columns import GPUS, HOSTS, PROCESSES
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import HEALTH_SIGNS, GpuSample, HostSample, ProcessSample
from rolecall.detector.sources.agent_wire import InvalidAgentResponse, checked_columns, checked_news
from tests.detector.fake_agent import NODE, sample

NODE_ID = NodeId(NODE)
NUMBER = st.floats(-1e15, 1e15)
MAYBE = NUMBER | st.just(float("nan"))
ANY_LOSS = MAYBE | st.sampled_from([float("inf"), float("-inf")])
COUNT = st.integers(0, 1 << 61)
PROCESS = st.builds(
    ProcessSample,
    process=st.builds(ProcessId, node=st.just(NODE_ID), pid=st.integers(1, 3), start_ticks=COUNT),
    role=st.just("rollout"),
    replica=st.sampled_from(["rollout/0", "rollout/1"]),
    rank=st.integers(0, 2),
    incarnation=st.integers(0, 2),
    at=NUMBER,
    wall_at=NUMBER,
    alive=st.booleans(),
    page_ok=st.booleans(),
    phase=st.sampled_from(["start", "generate", ""]),
    step=st.integers(-1, 3),
    tokens=COUNT,
    loss=ANY_LOSS,
    reward=ANY_LOSS,
    healths=st.integers(0, 3),
    entropy=ANY_LOSS,
    kl_sampler=ANY_LOSS,
    proc_state=st.sampled_from("RS?"),
    cpu_seconds=NUMBER,
)
GPU = st.builds(
    GpuSample,
    node=st.just(NODE_ID),
    gpu=st.integers(0, 7),
    at=NUMBER,
    wall_at=NUMBER,
    uuid=st.sampled_from(["", "GPU-1"]),
    pids=st.lists(st.integers(1, 9), max_size=2).map(tuple),
    power_watts=MAYBE,
    sm_clock_hertz=MAYBE,
)
HOST = st.builds(
    HostSample,
    node=st.just(NODE_ID),
    at=NUMBER,
    wall_at=NUMBER,
    cpu_count=st.integers(1, 9),
    cpu_busy_seconds=NUMBER,
    load_1m=NUMBER,
    memory_total_bytes=COUNT,
    memory_available_bytes=COUNT,
)


def over_the_wire(block: dict[str, Any]) -> Any:
    return json.loads(json.dumps(block))


@given(st.lists(PROCESS, min_size=1, max_size=4))
def test_processes_arrive_as_they_were(samples: list[ProcessSample]) -> None:
    found = checked_columns(PROCESSES, over_the_wire(PROCESSES.encode(samples)), NODE_ID, "processes")
    assert [s.to_dict() for s in found] == [s.to_dict() for s in samples]


@given(st.lists(GPU, min_size=1, max_size=4))
def test_gpus_arrive_as_they_were(samples: list[GpuSample]) -> None:
    found = checked_columns(GPUS, over_the_wire(GPUS.encode(samples)), NODE_ID, "gpus")
    assert [s.to_dict() for s in found] == [s.to_dict() for s in samples]


@given(st.lists(HOST, min_size=1, max_size=3))
def test_hosts_arrive_as_they_were(samples: list[HostSample]) -> None:
    found = checked_columns(HOSTS, over_the_wire(HOSTS.encode(samples)), NODE_ID, "hosts")
    assert list(found) == samples


def test_what_all_ranks_agree_in_is_said_once_and_what_is_as_usual_not_at_all() -> None:
    block = PROCESSES.encode([ProcessSample.from_dict(sample(rank=n)) for n in range(3)])
    assert block["rows"] == 3
    columns = block["columns"]
    assert columns["role"] == "rollout" and columns["rank"] == [0, 1, 2] and columns["pid"] == 42
    assert "loss" not in columns and "progress" not in columns


def test_an_agent_or_a_watcher_that_knows_no_health_understands_the_other() -> None:
    reported = ProcessSample.from_dict(sample(healths=3, entropy=0.5, ratio_max=1e300))
    block = over_the_wire(PROCESSES.encode([reported]))
    assert block["columns"]["entropy"] == 0.5 and "kl_sampler" not in block["columns"]
    older = {**block, "columns": {k: v for k, v in block["columns"].items() if k not in ("healths", *HEALTH_SIGNS)}}
    (found,) = checked_columns(PROCESSES, older, NODE_ID, "processes")
    assert found.to_dict() == ProcessSample.from_dict(sample()).to_dict(), "an older agent"
    newer = {**block, "columns": {**block["columns"], "invented_later": 0.5}}
    (found,) = checked_columns(PROCESSES, newer, NODE_ID, "processes")
    assert found.to_dict() == reported.to_dict(), "a newer one"


def two(**columns: Any) -> dict[str, Any]:
    """A block of two samples, the second of them good whatever `columns` says."""
    block = PROCESSES.encode(
        [ProcessSample.from_dict(sample(replica=f"rollout/{n}", rank=n, at=5.0 + n)) for n in (1, 2)]
    )
    return {**block, "columns": {**block["columns"], **columns}}


WRONG_IN_ONE_ROW: dict[str, dict[str, Any]] = {
    "text for a number": {"progress": ["many", 3]},
    "truth for a number": {"progress": [True, 3]},
    "number for a text": {"phase": [3, "generate"]},
    "number for a truth": {"alive": [1, True]},
    "not finite": {"busy_seconds": [float("nan"), 1.0]},
    "infinite": {"busy_seconds": [float("inf"), 1.0]},
    "null where none is meant": {"busy_seconds": [None, 1.0]},
    "huge": {"progress": [10**30, 1]},
    "huge float": {"busy_seconds": [1e300, 1.0]},
    "another role": {"role": ["trainer", "rollout"]},
    "no replica": {"replica": ["../../etc", "rollout/2"]},
    "a list": {"tokens": [[1], 1]},
    "a long text": {"phase": ["x" * 5000, "generate"]},
    "a mapping": {"loss": [{}, 1.0]},
}


@pytest.mark.parametrize("name", WRONG_IN_ONE_ROW)
def test_a_wrong_row_does_not_hide_its_neighbour(name: str) -> None:
    (found,) = checked_columns(PROCESSES, two(**WRONG_IN_ONE_ROW[name]), NODE_ID, "processes")
    assert found.replica == "rollout/2" and found.at == 7.0


WRONG_AS_A_WHOLE: dict[str, tuple[object, str]] = {
    "no mapping": ([], "expected a mapping"),
    "no rows": ({"columns": {}}, "processes.rows"),
    "rows that are a truth": ({"rows": True, "columns": {}}, "processes.rows"),
    "very many rows": ({"rows": 1 << 30, "columns": {}}, "processes.rows"),
    "no columns": ({"rows": 1}, "processes.columns"),
    "a column is missing": ({"rows": 1, "columns": {"pid": 1}}, "missing"),
    "a short column": (two(tokens=[1]), "expected 2 values, got 1"),
    "a long column": (two(tokens=[1, 2, 3]), "expected 2 values, got 3"),
}


@pytest.mark.parametrize("name", WRONG_AS_A_WHOLE)
def test_a_wrong_block_is_refused_with_a_reason(name: str) -> None:
    value, reason = WRONG_AS_A_WHOLE[name]
    with pytest.raises(InvalidAgentResponse, match=reason):
        checked_columns(PROCESSES, value, NODE_ID, "processes")


@pytest.mark.parametrize("wrong", [{"role": "trainer"}, {"progress": "many"}, {"progress": None}, {"step": 2**62 + 1}])
def test_wrong_rows_only_are_no_rows(wrong: dict[str, Any]) -> None:
    assert checked_columns(PROCESSES, two(**wrong), NODE_ID, "processes") == ()


PIDS: dict[str, object] = {
    "texts": [["a"], [1]],
    "below one": [[0], [1]],
    "truths": [[True], [1]],
    "very many": [list(range(1, 1000)), [1]],
    "no list": ["x", [1]],
}


@pytest.mark.parametrize("name", PIDS)
def test_wrong_pids_of_a_gpu(name: str) -> None:
    block = GPUS.encode([GpuSample(node=NODE_ID, gpu=n, at=1.0, wall_at=2.0, pids=(n + 1,)) for n in (0, 1)])
    block["columns"]["pids"] = PIDS[name]
    (found,) = checked_columns(GPUS, block, NODE_ID, "gpus")
    assert found.gpu == 1 and found.pids == (1,)
    for none in (7, "x", {"a": 1}, None):
        assert checked_columns(GPUS, {**block, "columns": {**block["columns"], "pids": none}}, NODE_ID, "gpus") == ()


def news(**changes: Any) -> dict[str, Any]:
    head = {"version": 2, "node": NODE, "agent_pid": 1, "cursor": 9, "samples_lost": 2, "newest": 0, "lost": 3}
    return {**head, "at": 1.0, "wall_at": 2.0, "events": [], **changes}


def test_news_are_samples_and_events() -> None:
    batch, events = checked_news(news(processes=two()), NODE)
    assert (batch.cursor, batch.lost, batch.agent_pid, len(batch.processes)) == (9, 2, 1, 2)
    assert (events.newest, events.lost, events.events) == (0, 3, ()) and not batch.hosts and not batch.gpus


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"cursor": None}, "news.cursor"),
        ({"node": "node-9"}, "answers for"),
        ({"events": None}, "events"),
        ({"version": 9}, "version"),
    ],
)
def test_news_that_make_no_sense(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidAgentResponse, match=reason):
        checked_news(news(**wrong), NODE)
    with pytest.raises(InvalidAgentResponse):
        checked_news([], NODE)


LONG = 10**400
"""JSON has no bound on it, and Python's floats cannot hold it."""


@pytest.mark.parametrize("name", ["cpu_seconds", "loss", "tokens", "at"])
def test_a_number_of_any_length_is_left_out(name: str) -> None:
    alone = PROCESSES.encode([ProcessSample.from_dict(sample())])
    alone["columns"][name] = LONG
    assert checked_columns(PROCESSES, json.loads(json.dumps(alone)), NODE_ID, "processes") == ()
    for number, num_good in ((LONG, 1), (2, 2)):
        block = PROCESSES.encode([ProcessSample.from_dict(sample())] * 2)
        block["columns"][name] = [1, number]
        assert len(checked_columns(PROCESSES, json.loads(json.dumps(block)), NODE_ID, "processes")) == num_good
