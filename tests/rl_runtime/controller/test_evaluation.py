"""Evaluations beside training, on a fleet whose engines, reward workers and controllers die meanwhile."""

import asyncio
import random
from math import comb
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.data import EvaluationConfig
from rolecall.core.errors import RewardFailed
from rolecall.core.ids import GroupId
from rolecall.core.journal.evaluations import EvaluationHistory
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.ledger import Ledger
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.run import EvaluationFinished, StepInterrupted
from rolecall.rl_runtime.controller.controller import STOP_FLAG
from rolecall.rl_runtime.controller.evaluation import (
    LATE,
    REQUESTS_AT_ONCE,
    held_out_seed,
    interval,
    pass_at,
    summarized,
)
from rolecall.rl_runtime.protocol.messages import ENVIRONMENT_VERSION, PromptGroup, TrainingSample
from rolecall.rl_runtime.tasks.task import Prompt, group_id, held_out_id, held_out_of, is_held_out
from tests.rl_runtime.loop import Prompts, World, small_job
from tests.rl_runtime.scripted_responses import ScriptedResponses

NUM = 10
DUE = [0, 5, 10, 12]


def job(**changes: Any) -> Any:
    return small_job(evaluation={"every_steps": 5, "num_prompts": NUM, **changes})


def results(world: World) -> list[dict[str, Any]]:
    return world.events(EventKind.EVALUATION_FINISHED)


def expected_reward(answers: ScriptedResponses, samples: int = 1, seed: int = 0) -> float:
    rewards = [answers.reward(answers.tokens(held_out_seed(seed, n, i))) for n in range(NUM) for i in range(samples)]
    return sum(rewards) / len(rewards)


def check(world: World) -> None:
    """Whatever dies: each due version once, with the same score as without a death, and nothing in the ledger."""
    world.check()
    found = results(world)
    assert [r["step"] for r in found] == DUE
    for r in found:
        assert r["prompts"] == NUM and not r["unscored"]
        assert r["reward"] == pytest.approx(expected_reward(world.answers, r["samples"]))
    assert not any(is_held_out(line["group_id"]) for line in Ledger(world.journal.store).lines())
    assert found[-1]["version_min"] == found[-1]["version_max"] == 12
    held = {k for e in world.fleet.processes.values() for k in getattr(e.body, "held", ()) if not e.dead.is_set()}
    assert not any(is_held_out(k) for k in held), "engines keep requests of an evaluation that is over"


@pytest.mark.parametrize("samples", [1, 3])
def test_evaluates_before_the_first_step_every_n_steps_and_after_the_last_one(tmp_path: Path, samples: int) -> None:
    world = World(job(samples=samples), tmp_path, 3).run()
    check(world)
    assert all(r["version_min"] <= r["step"] + 1 and r["version_max"] >= r["step"] for r in results(world)[1:])


def test_the_engines_get_greedy_requests(tmp_path: Path) -> None:
    asked: dict[str, float | None] = {}

    async def script(world: World) -> None:
        while True:
            for process in world.fleet.processes.values():
                for h in getattr(process.body, "held", {}).values():
                    asked[h.request.request_id] = h.request.temperature
            await asyncio.sleep(0.02)

    World(job(), tmp_path, 3, script=script).run()
    assert {t for r, t in asked.items() if is_held_out(r)} == {0.0}
    assert {t for r, t in asked.items() if not is_held_out(r)} == {None}


@pytest.mark.parametrize("seed", range(8))
def test_engines_and_reward_workers_die_during_evaluations(tmp_path: Path, seed: int) -> None:
    killed: list[str] = []

    async def script(world: World) -> None:
        """Kills an engine that holds requests of an evaluation, twice, and a reward worker."""
        while len(killed) < 2:
            await asyncio.sleep(0.05)
            for member, process in list(world.fleet.processes.items()):
                held = getattr(process.body, "held", {})
                if not process.dead.is_set() and any(is_held_out(r) and h.tokens for r, h in held.items()):
                    world.fleet.kill(member[0])
                    killed.append(member[0])
                    await asyncio.sleep(2.0)
                    break
        world.fleet.kill("reward/0")

    check(World(job(), tmp_path, seed, script=script).run())
    assert len(killed) == 2


@pytest.mark.parametrize("seed", range(12))
def test_controllers_die_during_evaluations(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = World(job(), tmp_path, seed, deaths=[rng.randrange(20, 400) for _ in range(3)]).run()
    world.check()
    found = results(world)
    steps = [r["step"] for r in found]
    assert len(set(steps)) == len(steps), "an evaluation is recorded once"
    assert steps[-1] == 12 and set(steps) <= set(DUE)
    for r in found:
        assert r["prompts"] == NUM and r["reward"] == pytest.approx(expected_reward(world.answers))


def test_a_successor_continues_an_evaluation_with_the_tokens_that_engines_hold(tmp_path: Path) -> None:
    """The controller dies in the middle of the evaluation of version 0; step 0 is still in the results."""
    world = World(job(), tmp_path, 1, answers=ScriptedResponses(longest=120), deaths=[130])
    world.run()
    assert len(world.controllers) == 2
    assert results(world)[0]["step"] == 0
    world.check()


def test_a_prompt_that_cannot_be_scored_is_no_score(tmp_path: Path) -> None:
    class Picky(Prompts):
        def held_out(self, number: int) -> Prompt:
            unusable = "prompt too long: 9 tokens, at most 8" if number == 4 else ""
            return Prompt(group_id=group_id(number), tokens=(2, number), unusable=unusable)

    async def script(world: World) -> None:
        while not (bodies := [p.body for m, p in world.fleet.processes.items() if m[0].startswith("reward/")]):
            await asyncio.sleep(0.01)
        for body in bodies:
            scores = body.score

            async def score(incarnation: int, groups: Any, waited_seconds: float, scores: Any = scores) -> Any:
                if any(is_held_out(g.group_id) and held_out_of(g.group_id)[1] in (2, 7) for g in groups):
                    raise RewardFailed(kind="ValueError", because="no score")
                return await scores(incarnation, groups, waited_seconds)

            body.score = score

    config = small_job(evaluation={"every_steps": 5, "num_prompts": NUM})
    world = World(config, tmp_path, 2, script=script, source=Picky).run()
    world.check()
    for r in results(world):
        assert r["unscored"]["prompt too long"] == 1
        assert r["unscored"]["reward_failed"] >= 2, "groups scored in the same call fail with it"
        assert r["prompts"] + sum(r["unscored"].values()) == NUM


def test_the_runs_end_waits_for_the_last_evaluation_no_longer_than_its_deadline(tmp_path: Path) -> None:
    async def script(world: World) -> None:
        while True:
            for process in world.fleet.processes.values():
                for h in getattr(process.body, "held", {}).values():
                    if is_held_out(h.request.request_id) and h.request.request_id.endswith("-000003.0"):
                        h.since = 1e9  # is never generated
            await asyncio.sleep(0.001)

    world = World(job(timeout_seconds=20), tmp_path, 2, script=script).run()
    world.check()
    last = results(world)[-1]
    assert last["step"] == 12 and last["unscored"] == {LATE: 1} and last["prompts"] == NUM - 1
    assert 20 <= last["seconds"] < 25


def test_a_requested_stop_says_that_it_drops_a_running_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(world: World) -> None:
        while not any(is_held_out(r) for p in world.fleet.processes.values() for r in getattr(p.body, "held", {})):
            await asyncio.sleep(0.01)
        world.journal.set_flag(STOP_FLAG, "maintenance")
        await asyncio.sleep(1e9)

    world = World(job(), tmp_path, 2, answers=ScriptedResponses(longest=120), script=script)
    world.run()
    assert not results(world)
    assert "evaluation of version 0 dropped without a result: maintenance" in caplog.text


def test_only_a_part_of_an_evaluation_is_on_the_engines_at_once(tmp_path: Path) -> None:
    most = [0]

    async def script(world: World) -> None:
        while True:
            unfinished = [
                r
                for p in world.fleet.processes.values()
                for r, h in getattr(p.body, "held", {}).items()
                if is_held_out(r) and len(h.tokens) < len(h.whole)
            ]
            most[0] = max(most[0], len(unfinished))
            await asyncio.sleep(0.02)

    config = small_job(evaluation={"every_steps": 5, "num_prompts": 300})
    world = World(config, tmp_path, 2, script=script).run()
    world.check()
    assert results(world)[-1]["prompts"] == 300
    assert NUM < most[0] <= REQUESTS_AT_ONCE * config.roles.rollout


def test_after_a_return_to_a_checkpoint_discarded_versions_are_evaluated_again(tmp_path: Path) -> None:
    """All trainers die after version 10 was evaluated, and the newest checkpoint is of version 9."""

    async def script(world: World) -> None:
        while not any(e["step"] == 10 for e in world.events(EventKind.EVALUATION_FINISHED)):
            await asyncio.sleep(0.05)
        for index in range(world.job.roles.trainer):
            world.fleet.kill(f"trainer/{index}")

    job = {"num_steps": 16, "evaluation": {"every_steps": 2, "num_prompts": NUM}, "checkpoint__every_steps": 9}
    world = World(small_job(**job), tmp_path, 4, script=script).run()
    world.check()
    steps = [r["step"] for r in results(world)]
    assert steps.count(10) == 2 and steps[-1] == 16


# --- pure parts


def group(number: int, *rewards: float, versions: tuple[int, ...] = (3, 3)) -> PromptGroup:
    samples = tuple(
        TrainingSample(
            request_id=f"{held_out_id(3, number)}.{n}",
            tokens=(5, 6),
            logprobs=(-1.0, -1.0),
            versions=versions,
            reward=reward,
        )
        for n, reward in enumerate(rewards)
    )
    return PromptGroup(group_id=held_out_id(3, number), prompt_tokens=(1,), samples=samples)


def test_pass_at_k_is_the_share_of_subsets_with_an_answer_that_passes() -> None:
    found = pass_at([0, 1, 5], 5)
    assert list(found) == ["1", "2", "4", "5"]
    assert found["1"] == pytest.approx((0 + 1 / 5 + 1) / 3)
    assert found["2"] == pytest.approx((0 + (1 - comb(4, 2) / comb(5, 2)) + 1) / 3)
    assert found["5"] == pytest.approx(2 / 3)
    assert pass_at([], 4) == {}


def test_the_interval_is_over_prompts_and_not_over_samples() -> None:
    config = EvaluationConfig(samples=2)
    found = summarized([group(0, 0, 0), group(1, 1, 1, versions=(3, 4))], config, step=3, unscored={}, seconds=1.0)
    assert (found.reward, found.prompts, found.samples) == (0.5, 2, 2)
    low, high = interval([0.0, 1.0])
    assert (found.reward_low, found.reward_high) == (low, high)
    assert low == pytest.approx(0.5 - 1.96 * 0.5) and high == pytest.approx(0.5 + 1.96 * 0.5)
    assert (found.version_min, found.version_max, found.response_length) == (3, 4, 2.0)
    assert found.pass_at == {"1": 0.5, "2": 0.5}


def test_tokens_of_an_environment_have_no_version_and_no_length() -> None:
    talk = group(0, 1, versions=(ENVIRONMENT_VERSION, 3, 3, ENVIRONMENT_VERSION, 4))
    found = summarized([talk], EvaluationConfig(), step=3, unscored={}, seconds=1.0)
    assert (found.version_min, found.version_max, found.response_length) == (3, 4, 3.0)


def test_an_evaluation_without_a_score_has_no_reward() -> None:
    found = summarized([], EvaluationConfig(), step=3, unscored={"reward_failed": 4}, seconds=1.0)
    assert (found.reward, found.reward_low, found.pass_at, found.version_min) == (None, None, {}, -1)


def _event(payload: Payload) -> Event:
    return Event(seq=1, wall_at=0.0, payload=payload)


def test_versions_of_a_discarded_policy_count_as_not_evaluated() -> None:
    def finished(step: int) -> Event:
        return _event(summarized([], EvaluationConfig(), step=step, unscored={}, seconds=0.0))

    def interrupted(step: int, attempt: int) -> Event:
        return _event(StepInterrupted(step=step, epoch=1, because="", lost=(), attempt=attempt))

    history = EvaluationHistory()
    for event in (finished(0), finished(5), finished(10), interrupted(11, 1)):
        history.take(event)
    assert (set(history.by_step), history.returns) == ({0, 5, 10}, 0)
    history.take(interrupted(7, 0))
    assert (set(history.by_step), history.returns) == ({0, 5}, 1)
    history.take(finished(10))
    assert [p.result.step for p in history.points()] == [0, 5, 10]
    assert history.newest == history.by_step[10]


def test_ids_of_held_out_groups() -> None:
    assert held_out_of(held_out_id(20, 7)) == (20, 7)
    assert is_held_out(held_out_id(20, 7)) and not is_held_out(group_id(7))
    assert held_out_id(0, 0) > group_id(10**9), "training groups come first"
    with pytest.raises(ValueError, match="held-out group"):
        held_out_of(GroupId("g00000007"))


def test_seeds_are_the_same_in_each_evaluation_and_differ_by_prompt_and_sample() -> None:
    assert len({held_out_seed(s, n, i) for s in range(3) for n in range(3) for i in range(3)}) == 27
    assert isinstance(EvaluationFinished.kind, EventKind)
