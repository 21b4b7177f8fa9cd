"""Reward workers take turns, so that a replacement is seen to work."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.open_group import EngineKey
from rolecall.rl_runtime.scoring import Scoring

A: EngineKey = (ReplicaId("reward/0"), 1)
B: EngineKey = (ReplicaId("reward/1"), 2)


def _scoring(groups: list[Any]) -> Scoring:
    table = SimpleNamespace(in_phase=lambda _phase: groups)
    scoring = Scoring(
        books=cast(Any, None),
        table=cast(Any, table),
        connect=cast(Any, None),
        tasks=cast(Any, None),
        on_scored=lambda: None,
        give_up=lambda _group, _reason: None,
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
    assert scoring._take(A) == [group], "B does not rest: nobody waits for it"


def test_nobody_waits_for_a_worker_that_may_not_take_the_group() -> None:
    group = SimpleNamespace(group_id="g1")
    scoring = _scoring([group])
    assert scoring._take(A) == [group]
    scoring._resting.add(B)
    scoring._failed_at[cast(Any, "g1")].append(B)
    assert scoring._take(A) == [group]
