"""Rewards come from tokens alone, and an answer that does not fit the question is none."""

import math

import pytest

from rolecall.agent.processes.state_pages import parse_page
from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock, FakeClock
from rolecall.core.config.job import parse_job
from rolecall.core.errors import StaleIncarnation
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.controller.reward_scoring import InvalidScores, checked_scores
from rolecall.rl_runtime.protocol.messages import PromptGroup, TrainingSample
from rolecall.rl_runtime.tasks.reward_worker import RewardWorker, task_of

JOB = parse_job({"seed": 5})


def groups(count: int = 2) -> list[PromptGroup]:
    task = task_of(JOB)
    made = []
    for n in range(count):
        prompt = task.prompt(n)
        answers = [task.answer(prompt.tokens), task.answer(prompt.tokens)[:-3]]
        samples = tuple(
            TrainingSample(
                request_id=f"{prompt.group_id}.{i}",
                tokens=tokens,
                logprobs=(0.0,) * len(tokens),
                versions=(0,) * len(tokens),
                reward=math.nan,
            )
            for i, tokens in enumerate(answers)
        )
        made.append(PromptGroup(group_id=GroupId(prompt.group_id), prompt_tokens=prompt.tokens, samples=samples))
    return made


def worker(calls: list[int] | None = None, factor: float | None = None, clock: Clock | None = None) -> RewardWorker:
    seen = calls if calls is not None else []

    def on_group() -> float | None:
        seen.append(len(seen))
        return factor

    return RewardWorker(replica=ReplicaId("reward/0"), incarnation=2, job=JOB, clock=clock, on_group=on_group)


def test_the_exact_answer_is_worth_one_and_others_less() -> None:
    calls: list[int] = []
    rewards = worker(calls).score(2, groups())
    assert [r[0] for r in rewards] == [1.0, 1.0] and all(0 <= r[1] < 1 for r in rewards)
    assert calls == [0, 1], "a fault can be injected before each group"


def test_an_injected_fault_changes_every_reward_and_leaves_it_finite() -> None:
    right, wrong = worker().score(2, groups()), worker(factor=-1.0).score(2, groups())
    for group, spoilt in zip(right, wrong, strict=True):
        assert spoilt == [-(1.0 + reward) for reward in group]


def test_what_the_caller_waited_longer_than_the_work_took_is_work() -> None:
    """A worker that often stands still, and is idle between two calls, is slow by its caller's clock alone."""

    class Working(FakeClock):
        def monotonic(self) -> float:
            self.advance(0.5)  # each group takes as long
            return super().monotonic()

    scored = worker(clock=Working())

    def busy_seconds(waited: float) -> float:
        before = parse_page(reporter.page_bytes())
        scored.score(2, groups(), waited)
        now = parse_page(reporter.page_bytes())
        assert now.work_units - before.work_units == 2
        return now.busy_seconds - before.busy_seconds

    assert busy_seconds(0.0) == pytest.approx(1.0), "it is not known how long the caller waited"
    assert busy_seconds(0.9) == pytest.approx(1.0), "clocks differ a little"
    assert busy_seconds(1.04) == pytest.approx(1.0), "so long a message takes on a busy machine"
    assert busy_seconds(3.5) == pytest.approx(3.5)


def test_another_incarnation_is_refused() -> None:
    with pytest.raises(StaleIncarnation):
        worker().score(1, groups())


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ([[1.0, 0.5]], "1 answers for 2 groups"),
        ([[1.0, 0.5], [1.0]], "1 rewards for 2 samples"),
        ([[1.0, 0.5], [1.0, math.nan]], "not finite"),
        ([[1.0, 0.5], [1.0, math.inf]], "not finite"),
    ],
)
def test_an_answer_that_does_not_fit_is_no_reward(answer: list[list[float]], what: str) -> None:
    with pytest.raises(InvalidScores, match=what):
        checked_scores(groups(), answer)


def test_every_group_with_a_reward_that_is_not_finite_is_named_and_no_other() -> None:
    first, second = groups()
    with pytest.raises(InvalidScores) as raised:
        checked_scores([first, second], [[1.0, 0.5], [-math.inf, 1.0]])
    assert raised.value.not_finite == {second.group_id: (-math.inf, 1.0)}


def test_an_answer_that_fits_is_taken() -> None:
    assert checked_scores(groups(), [[1, 0], [0.5, 0.25]]) == [(1.0, 0.0), (0.5, 0.25)]
