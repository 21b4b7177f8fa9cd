"""Valid tokens of an engine's stream: tokens of the model, with valid log-probabilities."""

import math
from dataclasses import replace

import pytest

from rolecall.rl_runtime.controller.rollout_pool import InvalidTokens, check_chunks
from rolecall.rl_runtime.protocol.messages import TokenChunk

GOOD = TokenChunk(
    request_id="g00000007.1", offset=5, tokens=(0, 15), logprobs=(-2.5, 0.0), versions=(3, 4), finished=False
)
BAD = {
    "token 6 has a log-probability of nan": replace(GOOD, logprobs=(-2.5, math.nan)),
    "token 5 has a log-probability of -inf": replace(GOOD, logprobs=(-math.inf, -1.0)),
    "token 5 has a log-probability of 0.01": replace(GOOD, logprobs=(0.01, -1.0)),
    "token 6 is 16, and the vocabulary has 16": replace(GOOD, tokens=(0, 16)),
    "token 5 is -1, and": replace(GOOD, tokens=(-1, 15)),
    "2 tokens with 1 log-probabilities and 2 versions": replace(GOOD, logprobs=(-2.5,)),
    "1 tokens with 2 log-probabilities and 2 versions": replace(GOOD, tokens=(0,)),
    "its end is 'abort', which is no end of an answer": replace(GOOD, finished=True, finish_reason="abort"),
}


def test_good_tokens_pass() -> None:
    check_chunks([GOOD, replace(GOOD, tokens=(), logprobs=(), versions=(), finished=True)], 16)
    check_chunks([replace(GOOD, finished=True, finish_reason=reason) for reason in ("stop", "length")], 16)
    check_chunks([replace(GOOD, tokens=(0, 100_000))])
    check_chunks([replace(GOOD, logprobs=(-2.5, 1e-7))], 16)  # a probability of 1, rounded


@pytest.mark.parametrize("reason", list(BAD))
def test_the_first_bad_token_is_named_with_its_request(reason: str) -> None:
    with pytest.raises(InvalidTokens) as e:
        check_chunks([GOOD, BAD[reason]], 16)
    assert reason in str(e.value) and "g00000007.1" in str(e.value)
