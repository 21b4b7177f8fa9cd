"""Windows and prefixes of the dead, where the exact gradient is known: answers of at most three tokens out of three.

Every answer, every moment of a death (independent of what is generated) and every way on are enumerated and weighed
with their exact probabilities, through the real table, windows and objective. So nothing here is statistical: an
estimate without bias equals the gradient of the expected reward to the last digit, and a deviation is exactly what it
should be.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.algorithms.objective import TokenSelection, make_batch, objective
from rolecall.rl_runtime.controller import windows
from rolecall.rl_runtime.controller.trajectories import EngineKey, GroupPhase, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import EndReason, GenerationRequest, PromptGroup, TokenChunk
from rolecall.rl_runtime.tasks.task import group_id, group_start

STOP, LONGEST, WINDOW = 0, 3, 2
PROMPT = (1,)
DEATHS = {None: 0.4, 1: 0.35, 2: 0.25}
"""Tokens after which the engine dies -> probability, whatever the tokens are."""
Answer = tuple[int, ...]


def is_over(answer: Answer) -> bool:
    return len(answer) == LONGEST or answer[-1:] == (STOP,)


ANSWERS = [
    a for n in range(1, LONGEST + 1) for a in itertools.product(range(3), repeat=n) if is_over(a) and STOP not in a[:-1]
]
STATES = sorted({a[:n] for a in ANSWERS for n in range(len(a))})


@dataclass
class Tree:
    """A policy with a parameter for each state and token, and a reward for each answer."""

    logits: Tensor
    rewards: dict[Answer, float]

    def __post_init__(self) -> None:
        self.logprobs = torch.log_softmax(self.logits, dim=1)
        self.fixed = self.logprobs.detach()

    def logprob(self, answer: Answer, at: int) -> Tensor:
        return self.logprobs[STATES.index(answer[:at]), answer[at]]

    def probability(self, answer: Answer, begin: int = 0) -> Tensor:
        """Of continuing from the first `begin` tokens to the whole answer."""
        return torch.exp(sum((self.logprob(answer, t) for t in range(begin, len(answer))), torch.zeros(())))

    def value(self, state: Answer) -> float:
        """Expected value of the answers with this beginning."""
        if state and is_over(state):
            return 0.0
        below = [a for a in ANSWERS if a[: len(state)] == state]
        return sum(float(self.probability(a, len(state)).detach()) * self.rewards[a] for a in below)

    def exact_gradient(self) -> Tensor:
        expected = sum((self.probability(a) * self.rewards[a] for a in ANSWERS), torch.zeros(()))
        (found,) = torch.autograd.grad(expected, self.logits, retain_graph=True)
        return found


@pytest.fixture
def tree() -> Tree:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(len(STATES), 3, generator=generator, dtype=torch.float64).requires_grad_()
    rewards = {a: float(r) for a, r in zip(ANSWERS, torch.randn(len(ANSWERS), generator=generator), strict=True)}
    return Tree(logits, rewards)


# --- what becomes of one answer

Mutant = Callable[[PromptGroup], PromptGroup]


def chunk(tree: Tree, request_id: str, answer: Answer, begin: int, end: int) -> TokenChunk:
    """The part that an engine streams."""
    tokens = answer[begin:end]
    logprobs = tuple(float(tree.logprob(answer, t).detach()) for t in range(begin, end))
    reason = "" if end < len(answer) else "stop" if answer[-1] == STOP else "length"
    return TokenChunk(
        request_id=request_id,
        offset=begin,
        tokens=tokens,
        logprobs=logprobs,
        versions=(0,) * len(tokens),
        finished=bool(reason),
        finish_reason=reason,
    )


def groups_of(tree: Tree, answer: Answer, death: int | None, prefixes: str) -> list[PromptGroup]:
    """The groups that are trained of one answer, when its engine dies after `death` tokens."""
    table, engines = TrajectoryTable(), [(ReplicaId("rollout/0"), n) for n in range(9)]
    made: list[PromptGroup] = []
    following = group_id(0)
    for _ in range(LONGEST):
        start = group_start(following)
        limit = windows.limit_of(start, window_tokens=WINDOW, longest=LONGEST)
        request = GenerationRequest(
            request_id=f"{following}.0", group_id=following, prompt_tokens=PROMPT, max_response_tokens=limit, seed=0
        )
        group = table.open(following, PROMPT, [request], first_fresh=start, is_window=limit < LONGEST)
        windows.settle(table, LONGEST)
        (t,) = group.trajectories
        assert len(t.tokens) == start, "a window has its whole context"
        while not t.finished:
            engine: EngineKey = engines.pop(0)
            table.place(following, engine)
            table.mark_sent(engine, [request.request_id])
            until = death if death is not None and len(t.tokens) < death <= limit else limit
            table.take(engine, [chunk(tree, request.request_id, answer, len(t.tokens), min(until, len(answer)))], 0)
            if len(t.tokens) == death and not t.finished:
                if prefixes == "train":
                    table.cut(engine)
                table.leave(engine)
        if group.phase is GroupPhase.FINISHED:
            table.score(following, [tree.rewards[answer]])
        made.append(group.as_group())
        if not group.is_cut:
            return made
        following = windows.successor(group)
    raise AssertionError("an answer without an end")


def cases(tree: Tree, prefixes: str) -> Iterator[tuple[float, list[PromptGroup]]]:
    """(probability, what is trained on) of all that can happen."""
    for answer in ANSWERS:
        for death, chance in DEATHS.items():
            yield chance * float(tree.probability(answer).detach()), groups_of(tree, answer, death, prefixes)


# --- what is learned from it


def estimate(
    tree: Tree, found: Sequence[tuple[float, list[PromptGroup]]], mutant: Mutant | None = None, **settings: Any
) -> Tensor:
    """The expected gradient of what the objective makes larger."""
    algorithm = AlgorithmConfig(name="tppo", window_tokens=WINDOW, entropy_coefficient=0.0, **settings)
    weighed = [(p, mutant(g) if mutant else g) for p, groups in found for g in groups]
    groups = [g for _, g in weighed]
    terms = TokenSelection(policy_version=0, staleness_max=0, longest=LONGEST)
    batch = make_batch(groups, algorithm, terms, pad=0, dtype=torch.float64)
    chances = torch.tensor([p for p, _ in weighed], dtype=torch.float64).unsqueeze(1)
    batch = replace(batch, weights_st=batch.weights_st * chances)
    shape = batch.tokens_st.shape
    logprobs, values_after = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for i, group in enumerate(groups):
        tokens = group.samples[0].tokens
        rows = [tree.logprob(tokens, t) for t in range(len(tokens))]
        logprobs = torch.index_put(
            logprobs, (torch.full((len(rows),), i), torch.arange(1, 1 + len(rows))), torch.stack(rows)
        )
        for t in range(len(tokens) + 1):
            values_after[i, t] = tree.value(tokens[:t])
    total = objective(
        batch,
        algorithm,
        terms,
        logprobs_st=logprobs,
        entropy_st=torch.zeros(shape, dtype=torch.float64),
        values_after_st=values_after.requires_grad_(),
    )
    (found_gradient,) = torch.autograd.grad(-total.policy, tree.logits, retain_graph=True)
    return found_gradient


def deviation_of_previous(tree: Tree, found: Sequence[tuple[float, list[PromptGroup]]], decay: float) -> Tensor:
    """Effect of the previous state's value as that of a cut state: the last difference."""
    total = torch.zeros((), dtype=torch.float64)
    for chance, groups in found:
        for sample in (g.samples[0] for g in groups if g.samples[0].end is EndReason.TRUNCATED):
            tokens, last = sample.tokens, len(sample.tokens) - 1
            missing = tree.value(tokens[:last]) - tree.value(tokens)
            for t in range(sample.first_fresh, len(tokens)):
                total = total + chance * decay ** (last - t) * missing * tree.logprob(tokens, t)
    (gradient,) = torch.autograd.grad(total, tree.logits, retain_graph=True)
    return gradient


def close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=0.0, atol=1e-12))


PREFIXES = ["continue", "train"]
DECAYS = [0.0, 0.6, 1.0]


def test_only_possible_faults_are_listed(tree: Tree) -> None:
    for prefixes in PREFIXES:
        found = list(cases(tree, prefixes))
        assert sum(p for p, _ in found) == pytest.approx(1.0, abs=1e-12)
        for _, groups in found:
            starts = [g.samples[0].first_fresh for g in groups]
            ends = [len(g.samples[0].tokens) for g in groups]
            assert starts == [0, *ends[:-1]] and is_over(groups[-1].samples[0].tokens), "each token once, none left out"
    cut = [[len(g.samples[0].tokens) for g in groups] for _, groups in cases(tree, "train")]
    assert [1, 3] in cut and [2, 3] in cut, "deaths make windows that nothing else makes"
    assert [1, 3] not in [[len(g.samples[0].tokens) for g in groups] for _, groups in cases(tree, "continue")]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_neither_setting_biases_the_gradient_when_the_critic_is_right(tree: Tree, prefixes: str, decay: float) -> None:
    assert close(estimate(tree, list(cases(tree, prefixes)), lambda_policy=decay), tree.exact_gradient())


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_the_papers_value_behind_a_cut_deviates_by_exactly_the_last_difference(
    tree: Tree, prefixes: str, decay: float
) -> None:
    found = list(cases(tree, prefixes))
    estimated = estimate(tree, found, lambda_policy=decay, truncation_value="previous")
    deviation = deviation_of_previous(tree, found, decay)
    assert close(estimated, tree.exact_gradient() + deviation)
    assert deviation.abs().max() > 1e-3


def lost_behind(tree: Tree, start: int, answer: Answer) -> PromptGroup | None:
    """A window whose context was lost with engine and controller, made from the prompt; None if it is to be made
    anew."""
    table, name, engine = TrajectoryTable(), group_id(0, start), (ReplicaId("rollout/0"), 1)
    request = GenerationRequest(
        request_id=f"{name}.0", group_id=name, prompt_tokens=PROMPT, max_response_tokens=LONGEST, seed=0
    )
    group = table.open(name, PROMPT, [request], first_fresh=start)
    assert windows.settle(table, LONGEST) == ([name], [])
    table.place(name, engine)
    table.mark_sent(engine, [request.request_id])
    table.take(engine, [chunk(tree, request.request_id, answer, 0, len(answer))], 0)
    if not group.trajectories[0].finished:
        return None
    table.score(name, [tree.rewards[answer]])
    return group.as_group()


def lost_cases(tree: Tree, death: int) -> Iterator[tuple[float, list[PromptGroup]]]:
    """Trained tokens stay trained; the tokens after them come from another answer that reached that point."""
    made = {a: lost_behind(tree, death, a) for a in ANSWERS}
    chances = {a: float(tree.probability(a).detach()) for a in ANSWERS}
    reached = sum(chances[a] for a, group in made.items() if group is not None)
    for answer in ANSWERS:
        first = groups_of(tree, answer, death, "train")[0]
        if first.samples[0].is_over:
            yield chances[answer], [first]
            continue
        for other, group in made.items():
            if group is not None:
                yield chances[answer] * chances[other] / reached, [first, group]


@pytest.mark.parametrize("death", [1, 2])
def test_nor_does_a_context_that_was_lost_and_regenerated(tree: Tree, death: int) -> None:
    assert close(estimate(tree, list(lost_cases(tree, death)), lambda_policy=0.6), tree.exact_gradient())


def used_again(group: PromptGroup) -> PromptGroup:
    """Trains again on what earlier windows were trained on."""
    return replace(group, samples=tuple(replace(s, first_fresh=0) for s in group.samples))


def ended(group: PromptGroup) -> PromptGroup:
    """Takes a cut for an end that is worth nothing."""
    return replace(
        group,
        samples=tuple(
            replace(s, end=EndReason.STOP, reward=0.0) if s.end is EndReason.TRUNCATED else s for s in group.samples
        ),
    )


@pytest.mark.parametrize("mutant", [used_again, ended])
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_the_same_test_finds_the_usual_mistakes(tree: Tree, prefixes: str, mutant: Mutant) -> None:
    estimated = estimate(tree, list(cases(tree, prefixes)), mutant, lambda_policy=1.0)
    assert (estimated - tree.exact_gradient()).abs().max() > 1e-3
