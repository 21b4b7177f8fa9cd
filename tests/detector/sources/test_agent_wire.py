"""What an agent says of GPUs is checked like all else that it says."""

import json
from typing import Any

import pytest

from rolecall.core.ids import NodeId
from rolecall.core.telemetry import GpuSample
from rolecall.detector.sources.agent_wire import InvalidAgentResponse, checked_batch
from tests.detector.fake_agent import NODE, sample


def gpu(**changes: Any) -> dict[str, Any]:
    said = {"node": NODE, "gpu": 3, "uuid": "GPU-3", "at": 1.0, "wall_at": 2.0, "pids": [42], "joined_by": "nvml"}
    return {**said, "power_watts": 300.5, "sm_clock_hertz": 1_980_000_000, **changes}


def batch(*gpus: Any, **more: Any) -> dict[str, Any]:
    head = {"version": 2, "node": NODE, "agent_pid": 1, "cursor": 1, "lost": 0, "at": 1.0, "wall_at": 2.0}
    return {**head, "processes": [sample()], "hosts": [], "gpus": list(gpus), **more}


def test_what_is_said_of_a_gpu_arrives() -> None:
    who = GpuSample(node=NodeId(NODE), gpu=3, uuid="GPU-3", at=1.0, wall_at=2.0, pids=(42,), joined_by="nvml")
    (found,) = checked_batch(json.loads(json.dumps(batch(gpu(colour="green")))), NODE).gpus
    values = {"power_watts": 300.5, "sm_clock_hertz": 1.98e9}
    assert found.to_dict() == {**who.to_dict(), **values}


WRONG = {
    "text for a number": gpu(power_watts="much"),
    "not finite": gpu(sm_clock_hertz=float("nan")),
    "truth for a number": gpu(temperature_celsius=True),
    "no index": {k: v for k, v in gpu().items() if k != "gpu"},
    "another node": gpu(node="node-9"),
    "pids that are none": gpu(pids=["42"]),
    "pids below one": gpu(pids=[0]),
    "one pid": gpu(pids=42),
    "very many pids": gpu(pids=list(range(1, 1000))),
    "no mapping": 7,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gpu_does_not_hide_its_neighbour(name: str) -> None:
    found = checked_batch(batch(WRONG[name], gpu(gpu=4)), NODE)
    assert [g.gpu for g in found.gpus] == [4] and len(found.processes) == 1
    with pytest.raises(InvalidAgentResponse):
        checked_batch(batch(WRONG[name]), NODE)


def test_an_older_agent_says_nothing_of_gpus_and_a_later_one_says_what_is_not_known_here() -> None:
    """A watcher reads the lists that it knows: so does one of before there were GPU samples."""
    older = {k: v for k, v in batch().items() if k != "gpus"}
    assert checked_batch(older, NODE).gpus == ()
    later = checked_batch(batch(version=3, fans=[{"speed": "high"}]), NODE)
    assert len(later.processes) == 1
    with pytest.raises(InvalidAgentResponse, match="gpus: expected a list"):
        checked_batch(batch() | {"gpus": {}}, NODE)
