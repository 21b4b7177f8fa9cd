"""Tokens that an environment wrote are context: values and gradients in float64 are those of the reference, which has
never heard of them.

pytest tests/rl_runtime/algorithms/test_environment_tokens.py
"""

from dataclasses import asdict, replace
from random import Random

import pytest
import torch

from rolecall.rl_runtime.algorithms.agreement import rows_to_ask
from rolecall.rl_runtime.algorithms.objective import disagreement, divisors
from rolecall.rl_runtime.protocol.messages import ENVIRONMENT_VERSION, PromptGroup
from tests.rl_runtime import reference_math
from tests.rl_runtime.objective_rig import (
    ALGORITHMS,
    GARBAGE,
    VOCABULARY,
    Case,
    Measured,
    RandomAnswer,
    divided,
    expected_gradients,
    measure,
    random_case,
)

EXACT = 1e-10
WITHOUT_CRITIC = [
    name
    for name, settings in ALGORITHMS.items()
    # The overlong penalty counts the whole conversation, as `max_response_tokens` does.
    if settings["name"] not in ("ppo", "tppo") and "overlong_buffer_tokens" not in settings
]


def conversation(answer: RandomAnswer, rng: Random) -> tuple[RandomAnswer, list[int]]:
    """The same answer with an environment's tokens before and between its own, and where its own are now. What the
    models say at the others is garbage."""
    made = answer.sample
    runs: list[int | None] = [None] * rng.randint(0, 2)
    for at in range(len(made.tokens)):
        runs += [at, *[None] * rng.choice([0, 0, 1, 3])]
    while runs and runs[-1] is None:
        runs.pop()

    def spread(values: list, other: object) -> list:  # type: ignore[type-arg]
        return [other if at is None else values[at] for at in runs]

    sample = replace(
        made,
        tokens=tuple(spread([*made.tokens], rng.randrange(VOCABULARY))),
        logprobs=tuple(spread([*made.logprobs], 0.0)),
        versions=tuple(spread([*made.versions], ENVIRONMENT_VERSION)),
    )
    row = [rng.choice([-GARBAGE, GARBAGE]) for _ in range(VOCABULARY)]
    with_environment = RandomAnswer(
        sample=sample,
        logits=spread(answer.logits, row),
        reference_logits=spread(answer.reference_logits, row),
        values=[*spread(answer.values, GARBAGE), GARBAGE],
        old_logprobs=spread(answer.old_logprobs, GARBAGE),
        old_values=[*spread(answer.old_values, GARBAGE), GARBAGE],
    )
    return with_environment, [n for n, at in enumerate(runs) if at is not None]


def conversations(case: Case, seed: int) -> tuple[Case, list[list[int]]]:
    rng, places, groups = Random(f"environment/{seed}"), [], []
    for prompt, answers in case.groups:
        pairs = [conversation(answer, rng) for answer in answers]
        places += [own for _, own in pairs]
        groups.append((prompt, tuple(answer for answer, _ in pairs)))
    return replace(case, groups=tuple(groups)), places


def own_gradients(measured: Measured, case: Case, places: list[list[int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(by the logits of each answer's own tokens, of what is left)."""
    by = divisors(case.algorithm, measured.found.sums, longest=case.terms.longest)
    (by_logits, _), own = measured.gradients(policy=by.policy, value=by.value), []
    rest = by_logits.clone()
    for i, ((start, _), at) in enumerate(zip(case.rows(), places, strict=True)):
        rows = [start - 1 + t for t in at]
        own.append(by_logits[i, rows])
        rest[i, rows] = 0.0
    return own, rest


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients_are_those_without_the_environment(name: str, seed: int) -> None:
    case = random_case(name, seed)
    talk, places = conversations(case, seed)
    measured, alone = measure(talk), measure(case)
    assert sum(len(a.sample.tokens) for _, a in talk.rows()) > sum(len(a.sample.tokens) for _, a in case.rows())
    wanted = reference_math.step(case.answers(), case.method())
    assert divided(talk, measured)[0] == pytest.approx(wanted.policy, abs=EXACT)
    assert asdict(measured.found.sums) == pytest.approx(asdict(alone.found.sums), abs=EXACT), (
        "no number of a step counts them"
    )

    expected, _ = expected_gradients(case, alone)
    own, rest = own_gradients(measured, talk, places)
    assert not rest.any()
    for i, ((start, answer), found) in enumerate(zip(case.rows(), own, strict=True)):
        length = len(answer.sample.tokens)
        torch.testing.assert_close(found, expected[i, start - 1 : start - 1 + length], rtol=EXACT, atol=EXACT)


def test_they_are_never_compared_with_the_sampler() -> None:
    versions = torch.tensor([[-1, ENVIRONMENT_VERSION, 0, ENVIRONMENT_VERSION], [-1, ENVIRONMENT_VERSION, -1, -1]])
    away = disagreement(torch.zeros(2, 4), torch.tensor([[0.0, 5.0, 0.25, 5.0], [0.0, 5.0, 0.0, 0.0]]), versions, 0)
    assert away.tolist() == [0.25, -1.0]
    assert rows_to_ask(versions, {0: {}}, 1, microbatches=16) == (0, [0])


def test_counts_of_a_group_are_without_them() -> None:
    case = random_case("grpo", 1)
    talk, _ = conversations(case, 1)

    def counts(groups: list[PromptGroup]) -> list[tuple[int, int]]:
        return [(g.num_tokens, g.num_fresh) for g in groups]

    assert counts(talk.protocol_groups()) == counts(case.protocol_groups())
