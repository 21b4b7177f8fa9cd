"""Reward workers take turns, so that a replacement is seen to work; a reward belongs to the tokens that were judged."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.controller.reward_scoring import RewardCheck, RewardScoring
from rolecall.rl_runtime.controller.trajectories import EngineKey, GroupPhase, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import GenerationRequest, TokenChunk

A: EngineKey = (ReplicaId("reward/0"), 1)
B: EngineKey = (ReplicaId("reward/1"), 2)
C: EngineKey = (ReplicaId("reward/2"), 1)
HERE: EngineKey = (ReplicaId("controller/0"), 1)


def _scoring(groups: list[Any], table: Any = None) -> RewardScoring:
    table = table or SimpleNamespace(in_phase=lambda _phase: groups)
    scoring = RewardScoring(
        recorder=cast(Any, None),
        table=cast(Any, table),
        connect=cast(Any, None),
        tasks=cast(Any, None),
        on_scored=lambda: None,
        give_up=lambda _group, _reason: None,
        check=RewardCheck(seed=0, share=0.0, here=HERE, score=lambda _group: [], report=lambda _error: None),
    )
    for key in (A, B):
        scoring._workers[key] = cast(Any, None)
        scoring._wakes[key] = asyncio.Event()
    return scoring


def test_the_one_that_was_used_less_recently_is_asked_first() -> None:
    group = SimpleNamespace(group_id="g1")
    scoring = _scoring([group])
    assert scoring._take(A) == [group]
    scoring._resting.add(B)
    assert scoring._take(A) == [], "B rests and was never used"
    assert scoring._wakes[B].is_set()
    scoring._resting.discard(B)
    scoring._resting.add(A)
    assert scoring._take(B) == [group]
    scoring._resting.discard(A)
    assert scoring._take(A) == [group], "B is busy: scoring does not wait for it"


def test_scoring_does_not_wait_for_an_excluded_worker() -> None:
    group = SimpleNamespace(group_id="g1")
    scoring = _scoring([group])
    assert scoring._take(A) == [group]
    scoring._resting.add(B)
    scoring._failed_at[cast(Any, "g1")].append(B)
    assert scoring._take(A) == [group]


def _finish(table: TrajectoryTable, tokens: tuple[int, ...], version: int) -> None:
    """The one request of group g, whole, from an engine."""
    engine: EngineKey = (ReplicaId("rollout/0"), 1)
    table.place(GroupId("g"), engine)
    table.mark_sent(engine, ["g.0"])
    made = TokenChunk(
        request_id="g.0",
        offset=0,
        tokens=tokens,
        logprobs=(-1.0,) * len(tokens),
        versions=(version,) * len(tokens),
        finished=True,
        finish_reason="stop",
    )
    table.take(engine, [made], version)


def test_a_reward_for_tokens_that_are_no_more_is_not_that_of_those_made_in_their_place() -> None:
    table = TrajectoryTable()
    request = GenerationRequest(
        request_id="g.0", group_id=GroupId("g"), prompt_tokens=(1,), max_response_tokens=8, seed=0
    )
    group = table.open(GroupId("g"), (1,), [request])
    _finish(table, (5, 6), version=9)
    scoring = _scoring([], table)

    async def score(goes_back: bool) -> None:
        async def answer(_groups: Any, _seconds: float) -> list[list[float]]:
            if goes_back:
                table.truncate_after(4)
                _finish(table, (7,), version=4)
            return [[1.0]]

        await scoring._score(cast(Any, SimpleNamespace(score=answer)), A, [group])

    asyncio.run(score(goes_back=True))
    assert group.phase is GroupPhase.FINISHED and group.trajectories[0].tokens == [7]
    asyncio.run(score(goes_back=False))
    assert (group.phase, group.rewards) == (GroupPhase.SCORED, (1.0,))
