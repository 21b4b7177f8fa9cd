"""Conversations with an environment while engines, reward workers and controllers die: no token is lost or doubled, the
environment's tokens keep their marks, and each group is trained on once or dropped with a reason."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.errors import EnvironmentFailed
from rolecall.core.ids import replica_id
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.ledger import Ledger
from rolecall.rl_runtime.protocol.messages import Conversation, Observation
from tests.rl_runtime.loop import Prompts, World, small_job
from tests.rl_runtime.scripted_responses import ScriptedConversations
from tests.rl_runtime.simulated_fleet import FakeReward

TALKS = ScriptedConversations(longest=16)


class Rows(Prompts):
    runs_foreign_code = True


def world(path: Path, seed: int = 0, *, runtime: Any = None, evaluation: Any = None, **arguments: Any) -> World:
    job = small_job(
        evaluation=evaluation,
        runtime=runtime or {},
        model={"path": "model"},
        data={"path": "train.jsonl"},
        environment={"factory": "mine.py:Game", "max_turns": TALKS.max_turns, "attempts": 2},
    )
    return World(job, path, seed, **{"answers": TALKS, "source": Rows, **arguments})


def dropped(found: World) -> dict[str, str]:
    lines = Ledger(found.journal.store).lines()
    reasons = {line["group_id"]: line["reason"] for line in lines if line["state"] == "dropped"}
    return {group: reason for group, reason in reasons.items() if reason not in ("run_ended", "stale")}


def turns_of(found: World) -> set[int]:
    """Lengths of the trained samples, of which the checks of the fleet know every token."""
    return {end for _, end, _ in found.fleet.used.values()}


def test_conversations_of_one_to_three_turns_are_trained_on(tmp_path: Path) -> None:
    found = world(tmp_path).run()
    found.check()
    assert not dropped(found) and not found.fleet.started_over
    assert len(turns_of(found)) > 8 and max(turns_of(found)) == TALKS.longest
    asked = [request for _, requests in found.fleet.turns_asked for request in requests]
    assert len(asked) > 1.5 * len(set(asked)), "several turns"
    assert {replica for replica, _ in found.fleet.turns_asked} == {"reward/0", "reward/1"}
    committed = found.events(EventKind.STEP_COMMITTED)
    made = {g: 0 for body in committed for g in body["groups"]}
    assert sum(body["tokens"] for body in committed) < 2 * len(made) * (TALKS.longest - 1), "without the environment's"


def test_held_out_prompts_begin_conversations_too(tmp_path: Path) -> None:
    found = world(tmp_path, evaluation={"path": "test.jsonl", "every_steps": 5, "num_prompts": 10}, deaths=[350]).run()
    found.check()
    evaluated = found.events(EventKind.EVALUATION_FINISHED)
    assert [body["step"] for body in evaluated] == [0, 5, 10, 12]
    for body in evaluated:
        assert body["prompts"] == 10 and not body["unscored"]
        assert 0 <= body["version_min"] <= body["version_max"]
        assert 0 < body["response_length"] < TALKS.longest - 1, "without the environment's"


@pytest.mark.parametrize("role", ["rollout", "reward"])
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_replica_lost_in_mid_conversation_costs_no_token(tmp_path: Path, role: str, how: str) -> None:
    async def hurt(found: World) -> None:
        for n in range(6):
            await asyncio.sleep(0.9)
            getattr(found.fleet, how)(replica_id(role, n % 2))

    found = world(tmp_path, script=hurt).run()
    found.check()
    assert not found.fleet.started_over, "a conversation goes on from the tokens that were streamed"
    assert not dropped(found)
    if role == "rollout":
        moved = found.events(EventKind.REQUESTS_REASSIGNED)
        assert sum(body["tokens_kept"] for body in moved) > 0


@pytest.mark.parametrize("seed", range(6))
def test_exactly_once_whatever_dies(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def hurt(found: World) -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.3, 2.5))
            role, how = rng.choice(["rollout", "reward"]), rng.choice([found.fleet.kill, found.fleet.hang])
            how(replica_id(role, rng.randrange(2)))

    deaths = [rng.randrange(20, 500) for _ in range(3)]
    found = world(tmp_path, seed, deaths=deaths, script=hurt).run()
    found.check()
    assert len(found.controllers) > 1 and not {r for r in dropped(found).values() if "environment" in r}


def test_a_conversation_is_adopted_by_the_next_controller_with_its_marks(tmp_path: Path) -> None:
    found = world(tmp_path, deaths=[350]).run()
    found.check()
    (adopted,) = [b for b in found.events(EventKind.REQUESTS_REASSIGNED) if b["from_replica"] == "controller/0"]
    assert adopted["tokens_kept"] > 0
    assert not dropped(found)


@pytest.mark.parametrize(
    ("failure", "tries"),
    [
        (Observation(failure="ValueError"), 2),
        (Observation(failure="environment is not deterministic", is_final=True), 1),
    ],
)
def test_a_failing_environment_costs_its_group_and_is_never_a_reward(
    tmp_path: Path, failure: Observation, tries: int
) -> None:
    failed: list[str] = []

    def fails(worker: FakeReward, asked: Conversation) -> Observation | None:
        if asked.group_id != "g00000003" or not asked.tokens:
            return None
        failed.append(asked.request_id)
        return failure

    async def hurt(found: World) -> None:
        found.fleet.environment_fails = fails

    found = world(tmp_path, script=hurt).run()
    found.check()
    assert dropped(found) == {"g00000003": f"environment_failed: {failure.failure}"}
    assert tries <= len(failed) <= 2 * tries, "retried as often as the job says, of up to two samples"


def test_a_process_that_ends_with_several_conversations_counts_against_the_one_that_ends_it(tmp_path: Path) -> None:
    def fails(worker: FakeReward, asked: Conversation) -> Observation | None:
        together = next((ids for _, ids in reversed(worker.fleet.turns_asked) if asked.request_id in ids), ())
        if any(request == "g00000002.1" for request in together):
            return Observation(failure="its process ended", is_alone=len(together) == 1)
        return None

    async def hurt(found: World) -> None:
        found.fleet.environment_fails = fails

    found = world(tmp_path, script=hurt).run()
    found.check()
    assert dropped(found) == {"g00000002": "environment_failed: its process ended"}
    assert any("g00000002.1" in ids and len(ids) > 1 for _, ids in found.fleet.turns_asked)


def test_a_conversation_that_kills_its_workers_is_dropped(tmp_path: Path) -> None:
    def fails(worker: FakeReward, asked: Conversation) -> Observation | None:
        if asked.request_id == "g00000002.1":
            worker.fleet.kill(worker.replica)
        return None

    async def hurt(found: World) -> None:
        found.fleet.environment_fails = fails

    found = world(tmp_path, script=hurt).run()
    found.check()
    assert dropped(found) == {"g00000002": "environment_failed: 3 workers died with it, last: killed"}


def test_a_conversation_that_no_second_worker_can_replay_is_not_scored(tmp_path: Path) -> None:
    async def hurt(found: World) -> None:
        failure = EnvironmentFailed(kind="environment is not deterministic", because="", is_final=True)
        found.fleet.newest("reward/1").body.answers = [failure]

    found = world(tmp_path, script=hurt, runtime={"reward_check_share": 1.0}).run()
    found.check()
    assert list(dropped(found).values()) == ["environment_failed: environment is not deterministic"]


def test_an_opening_that_fills_the_conversation_is_dropped(tmp_path: Path) -> None:
    def fails(worker: FakeReward, asked: Conversation) -> Observation | None:
        return Observation(tokens=(3,) * TALKS.longest) if asked.group_id == "g00000001" else None

    async def hurt(found: World) -> None:
        found.fleet.environment_fails = fails

    found = world(tmp_path, script=hurt).run()
    found.check()
    reason = "environment_failed: its first observation leaves no room for an answer"
    assert dropped(found) == {"g00000001": reason}
