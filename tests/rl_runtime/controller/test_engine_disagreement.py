"""Which engine disagrees with the trainers, and who made a trajectory's tokens."""

from collections.abc import Mapping

import pytest

from rolecall.core.errors import EngineDisagrees
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.policy_health import LOG_RATIO_ALARMS
from rolecall.rl_runtime.controller.disagreement import disagreeing_engine
from rolecall.rl_runtime.controller.trajectories import EngineKey, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import GenerationRequest, TokenChunk

A: EngineKey = (ReplicaId("rollout/0"), 1)
B: EngineKey = (ReplicaId("rollout/1"), 2)


@pytest.mark.parametrize(
    ("log_ratios", "named"),
    [
        ({"rollout/0#1": 1e-6, "rollout/1#2": 0.3, "rollout/2#1": 2e-6}, ("rollout/1", 2, 7)),
        ({"rollout/0#1": 0.001, "rollout/1#2": 0.019}, None),  # within what is normal
        ({"rollout/0#1": 0.3, "rollout/1#2": 0.4, "rollout/2#1": 1e-6}, None),  # two are off
        ({"rollout/0#1": 0.05, "rollout/1#2": 0.3}, None),  # numerics that differ everywhere
        ({"rollout/1#2": 0.3}, None),  # nothing to compare with
        ({}, None),
    ],
)
def test_only_an_engine_that_is_off_alone_is_named(
    log_ratios: Mapping[str, float], named: tuple[str, int, int] | None
) -> None:
    found = disagreeing_engine(log_ratios, 7)
    assert (EngineDisagrees.parse(str(found)) if found else None) == named


def test_rounding_in_bfloat16_names_no_engine() -> None:
    ratios = {"rollout/0#1": 0.3, "rollout/1#2": 0.003}
    assert disagreeing_engine(ratios, 7) is not None
    assert disagreeing_engine(ratios, 7, alarm=LOG_RATIO_ALARMS["bfloat16"]) is None
    assert disagreeing_engine({**ratios, "rollout/0#1": 3.0}, 7, alarm=LOG_RATIO_ALARMS["bfloat16"]) is not None


def chunk(offset: int, num_tokens: int, *, finished: bool = False) -> TokenChunk:
    return TokenChunk(
        request_id="g.0",
        offset=offset,
        tokens=(5,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        versions=(0,) * num_tokens,
        finished=finished,
        finish_reason="stop" if finished else "",
    )


def request(*prefix: int) -> GenerationRequest:
    return GenerationRequest(
        request_id="g.0", group_id=GroupId("g"), prompt_tokens=(1,), max_response_tokens=8, seed=0, prefix_tokens=prefix
    )


def opened(engine: EngineKey) -> TrajectoryTable:
    table = TrajectoryTable()
    table.open(GroupId("g"), (1,), [request()])
    table.place(GroupId("g"), engine)
    table.mark_sent(engine, ["g.0"])
    return table


def maker(table: TrajectoryTable) -> str:
    (sample,) = table.groups[GroupId("g")].as_group().samples
    return sample.engine


def test_tokens_of_one_engine_are_its_own() -> None:
    table = opened(B)
    table.take(B, [chunk(0, 3)], 0)
    table.take(B, [chunk(3, 2, finished=True)], 0)
    assert maker(table) == "rollout/1#2"


def test_an_answer_that_moved_is_of_no_single_engine() -> None:
    table = opened(A)
    table.take(A, [chunk(0, 3)], 0)
    table.leave(A)
    table.place(GroupId("g"), B)
    table.mark_sent(B, ["g.0"])
    assert maker(table) == "rollout/0#1"
    table.take(B, [chunk(3, 2, finished=True)], 0)
    assert maker(table) == ""


@pytest.mark.parametrize(("prefix", "made_by"), [((), "rollout/1#2"), ((5, 5), "")])
def test_after_a_restart_a_prefix_is_of_unknown_engines(prefix: tuple[int, ...], made_by: str) -> None:
    table = TrajectoryTable()
    table.open(GroupId("g"), (1,), [request()])
    table.adopt(B, [(request(*prefix), chunk(0, 5, finished=True))], 0)
    assert maker(table) == made_by
