"""Reward workers take turns, so that a replacement is seen to work; a reward belongs to the tokens that were judged."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolecall.core.errors import WrongNumbers
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.controller.reward_scoring import RewardCheck, RewardScoring
from rolecall.rl_runtime.controller.trajectories import EngineKey, GroupPhase, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import GenerationRequest, TokenChunk

A: EngineKey = (ReplicaId("reward/0"), 1)
B: EngineKey = (ReplicaId("reward/1"), 2)
C: EngineKey = (ReplicaId("reward/2"), 1)
HERE: EngineKey = (ReplicaId("controller/0"), 1)


def _scoring(
    groups: list[Any], table: Any = None, reports: list[WrongNumbers] | None = None, share: float = 0.0
) -> RewardScoring:
    told: list[WrongNumbers] = [] if reports is None else reports
    table = table or SimpleNamespace(in_phase=lambda _phase: groups)
    scoring = RewardScoring(
        recorder=cast(Any, SimpleNamespace(event=lambda _payload: None)),
        table=cast(Any, table),
        connect=cast(Any, None),
        tasks=cast(Any, None),
        on_scored=lambda: None,
        give_up=lambda _group, _reason: None,
        check=RewardCheck(seed=0, share=share, here=HERE, score=None, report=told.append),
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
        async def answer(_groups: Any, _seconds: float, _waited: float) -> tuple[list[list[float]], float]:
            if goes_back:
                table.truncate_after(4)
                _finish(table, (7,), version=4)
            return [[1.0]], 0.0

        await scoring._score(cast(Any, SimpleNamespace(score=answer)), A, [group])

    asyncio.run(score(goes_back=True))
    assert group.phase is GroupPhase.FINISHED and group.trajectories[0].tokens == [7]
    asyncio.run(score(goes_back=False))
    assert (group.phase, group.rewards) == (GroupPhase.SCORED, (1.0,))


def test_a_worker_is_told_how_long_its_last_answer_took() -> None:
    table, group = _group()
    scoring, told = _scoring([], table), []

    async def answer(_groups: Any, _seconds: float, waited: float) -> tuple[list[list[float]], float]:
        told.append(waited)
        return [[1.0]], 0.07

    async def score() -> None:
        for key in (A, A, B):
            await scoring._score(cast(Any, SimpleNamespace(score=answer)), key, [group])

    asyncio.run(score())
    assert told == [0.0, 0.07, 0.0], "each worker of its own"


def _group() -> tuple[TrajectoryTable, Any]:
    table = TrajectoryTable()
    request = GenerationRequest(
        request_id="g.0", group_id=GroupId("g"), prompt_tokens=(1,), max_response_tokens=8, seed=0
    )
    group = table.open(GroupId("g"), (1,), [request])
    _finish(table, (5, 6), version=9)
    return table, group


def _answers(scoring: RewardScoring, group: Any, *answers: tuple[EngineKey, float]) -> None:
    async def score() -> None:
        for key, reward in answers:

            async def answer(
                _groups: Any, _seconds: float, _waited: float, reward: float = reward
            ) -> tuple[list[list[float]], float]:
                return [[reward]], 0.0

            await scoring._score(cast(Any, SimpleNamespace(score=answer)), key, [group])

    asyncio.run(score())


@pytest.mark.parametrize(
    ("answers", "odd"),
    [
        ([(A, math.nan), (B, 1.0)], [A]),
        ([(B, -math.inf), (A, 1.0)], [B]),
        ([(A, math.nan), (B, math.nan), (C, 1.0)], [A, B]),
        ([(A, math.nan), (A, 1.0)], []),  # against itself there is no second opinion
        ([(A, math.nan), (B, math.nan)], []),  # the group, or the scorer's code
        ([(A, 1.0)], []),
    ],
)
def test_a_reward_that_is_not_finite_is_its_workers_fault_where_another_ones_is_finite(
    answers: list[tuple[EngineKey, float]], odd: list[EngineKey]
) -> None:
    table, group = _group()
    reports: list[WrongNumbers] = []
    _answers(_scoring([], table, reports, share=1e-9), group, *answers)
    assert [(r.replica, r.incarnation) for r in reports] == odd
    finite = tuple(reward for _, reward in answers if math.isfinite(reward))
    assert group.rewards == finite, "never a reward that is not finite"


def test_a_reward_that_is_not_finite_for_other_tokens_contradicts_nobody() -> None:
    table, group = _group()
    reports: list[WrongNumbers] = []
    scoring = _scoring([], table, reports, share=1e-9)
    _answers(scoring, group, (A, math.nan))
    table.truncate_after(4)
    _finish(table, (7,), version=4)
    _answers(scoring, group, (B, 1.0))
    assert group.rewards == (1.0,) and reports == []
