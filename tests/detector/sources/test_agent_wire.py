"""What an agent says of GPUs is checked like all else that it says."""

import json
from typing import Any

import pytest

from rolecall.core.columns import GPUS
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import GpuSample
from rolecall.detector.sources.agent_wire import InvalidAgentResponse, checked_columns, checked_news
from tests.detector.fake_agent import NODE

NODE_ID = NodeId(NODE)


def gpu(number: int) -> GpuSample:
    who = GpuSample(node=NODE_ID, gpu=number, uuid=f"GPU-{number}", at=1.0, wall_at=2.0, pids=(42,), joined_by="nvml")
    return GpuSample.from_dict({**who.to_dict(), "power_watts": 300.5, "sm_clock_hertz": 1_980_000_000})


def block(*numbers: int, **columns: Any) -> dict[str, Any]:
    """The samples of these GPUs, the first with the wrong value of each of `columns`."""
    encoded = GPUS.encode([gpu(n) for n in numbers])
    for name, wrong in columns.items():
        encoded["columns"][name] = [wrong, *(gpu(n).to_dict()[name] for n in numbers[1:])]
    return dict(json.loads(json.dumps(encoded)))


def checked(value: object) -> tuple[GpuSample, ...]:
    return checked_columns(GPUS, value, NODE_ID, "gpus")


def test_gpu_findings_reach_the_incident() -> None:
    encoded = block(3)
    encoded["columns"]["colour"] = "green"
    (found,) = checked(encoded)
    assert found == gpu(3) and (found.power_watts, found.sm_clock_hertz) == (300.5, 1.98e9)


WRONG: dict[str, dict[str, Any]] = {
    "text for a number": {"power_watts": "much"},
    "not finite": {"sm_clock_hertz": float("nan")},
    "truth for a number": {"power_watts": True},
    "pids that are none": {"pids": ["42"]},
    "pids below one": {"pids": [0]},
    "one pid": {"pids": 42},
    "very many pids": {"pids": list(range(1, 1000))},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gpu_does_not_hide_its_neighbour(name: str) -> None:
    (found,) = checked(block(3, 4, **WRONG[name]))
    assert found == gpu(4)
    assert checked(block(3, **WRONG[name])) == ()


def test_gpu_columns_may_be_absent_and_unknown_fields_are_ignored() -> None:
    """A watcher reads the blocks that it knows: so does one of before there were GPU samples."""
    head = {"node": NODE, "agent_pid": 1, "cursor": 1, "samples_lost": 0, "newest": 0, "lost": 0, "events": []}
    older = {**head, "version": 2, "at": 1.0, "wall_at": 2.0}
    assert checked_news(older, NODE)[0].gpus == ()
    later, _ = checked_news({**older, "version": 3, "gpus": block(3), "fans": {"rows": 1}}, NODE)
    assert later.gpus == (gpu(3),)
    without_number = block(3)
    del without_number["columns"]["gpu"]
    for wrong, reason in ((7, "gpus: expected a mapping"), (without_number, "gpus.gpu: missing")):
        with pytest.raises(InvalidAgentResponse, match=reason):
            checked_news({**older, "gpus": wrong}, NODE)
