"""The loop on a simulated fleet: healthy, then hurt in every way, with the same laws checked after each run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.events import EventKind
from rolecall.core.membership import ReplicaState
from tests.rl_runtime.loop import World, small_job


def world(tmp_path: Path, seed: int = 0, job: dict[str, Any] | None = None, **rest: Any) -> World:
    return World(job=small_job(**(job or {})), path=tmp_path, seed=seed, **rest)


def test_a_healthy_run_trains_every_group_and_drops_only_what_the_end_leaves(tmp_path: Path) -> None:
    w = world(tmp_path).run()
    found = w.check()
    assert found.groups_trained == 12 * 8
    assert set(found.dropped_by_reason) <= {"run_ended"}
    assert len(w.events(EventKind.WEIGHTS_ADMITTED)) == 3
    assert not w.events(EventKind.STEP_INTERRUPTED)
    assert [b["step"] for b in w.events(EventKind.STEP_COMMITTED)] == list(range(12))
    assert w.clock.monotonic() - 1000 < 30
