"""Limits of the buffer that stores a rollout's requests and tokens."""

import pytest

from rolecall.core.errors import TokenBufferFull
from rolecall.rl_runtime.protocol.messages import ENVIRONMENT_VERSION, GenerationRequest
from rolecall.rl_runtime.rollout.engine import NewTokens
from rolecall.rl_runtime.rollout.token_buffer import RequestRefused, TokenBuffer
from tests.rl_runtime.rollout_rig import END, request


def buffer(requests_max: int = 64) -> TokenBuffer:
    return TokenBuffer(requests_max=requests_max, end_tokens=frozenset({END}), model_len_max=64, vocab_size=16)


BAD_REQUESTS = {
    "no prompt": ({"prompt_tokens": ()}, "has no prompt"),
    "no tokens asked": ({"max_response_tokens": 0}, "asks for no token"),
    "too long": ({"max_response_tokens": 62}, "may grow to 65 tokens, the engine takes 64"),
    "prefix without log-probabilities": ({"prefix_tokens": (3,)}, "do not fit together"),
    "prefix beyond the limit": (
        {"prefix_tokens": (3,) * 6, "prefix_logprobs": (0.0,) * 6, "prefix_versions": (0,) * 6},
        "or the limit",
    ),
    "token outside of the vocabulary": ({"prompt_tokens": (16,)}, "outside of the vocabulary of 16"),
    "negative token": ({"prompt_tokens": (-1,)}, "outside of the vocabulary"),
}


@pytest.mark.parametrize("fault", sorted(BAD_REQUESTS))
def test_bad_request_is_refused_and_its_batch_with_it(fault: str) -> None:
    changes, reason = BAD_REQUESTS[fault]
    held = buffer()
    with pytest.raises(RequestRefused, match=reason):
        held.take([request("good"), request("bad", **changes)])
    assert held.num_requests == 0


def test_too_many_unfinished_requests_are_refused() -> None:
    held = buffer(requests_max=2)
    a, _ = held.take([request("a"), request("b")])
    held.take([request("a")])
    with pytest.raises(TokenBufferFull, match="2 requests are unfinished, 2 at most"):
        held.take([request("c")])
    assert held.begin(a)
    held.record([NewTokens(request_id="a", tokens=(END,), logprobs=(0.0,), finish_reason="stop")], 0)
    held.take([request("c")])
    with pytest.raises(TokenBufferFull):
        held.take([request("d")])
    held.forget(["b"])
    held.take([request("d")])
    assert held.num_requests == 3


def test_tokens_of_a_forgotten_request_are_counted_but_not_kept() -> None:
    held = buffer()
    assert held.record([NewTokens(request_id="x", tokens=(3,), logprobs=(0.0,), finish_reason="")], 0) == 1
    assert held.tokens_generated == 1 and held.since({"x": 0}) == ((), ("x",))


def test_nothing_new_is_no_chunk() -> None:
    held = buffer()
    held.take([request("a")])
    assert held.since({"a": 0}) == ((), ())


def test_a_request_that_was_forgotten_and_repeated_has_nothing_of_the_one_before() -> None:
    held = buffer()
    (before,) = held.take([request("a")])
    assert held.begin(before)
    held.forget(["a"])
    (again,) = held.take([request("a", prefix_tokens=(9,), prefix_logprobs=(-0.5,), prefix_versions=(0,))])
    assert not held.begin(before)
    late = NewTokens(request_id="a", tokens=(3,), logprobs=(-1.0,), finish_reason="stop")
    assert held.record([late], 0) == 1 and held.since({"a": 0})[0][0].tokens == (9,)
    assert held.begin(again)
    held.record([late], 0)
    assert held.since({"a": 0})[0][0].tokens == (9, 3)


def turn(*tokens: int, versions: tuple[int, ...]) -> GenerationRequest:
    return request("a", 9, prefix_tokens=tokens, prefix_logprobs=(0.0,) * len(tokens), prefix_versions=versions)


def test_the_next_turn_of_a_conversation_replaces_the_one_before() -> None:
    held = buffer(requests_max=1)
    (first,) = held.take([turn(7, versions=(ENVIRONMENT_VERSION,))])
    assert held.begin(first)
    assert held.take([turn(7, 3, versions=(ENVIRONMENT_VERSION, 0))]) == [], "the turn is not over"
    held.record([NewTokens(request_id="a", tokens=(3, END), logprobs=(-1.0, -1.0), finish_reason="stop")], 4)
    assert held.take([turn(7, versions=(ENVIRONMENT_VERSION,))]) == [], "the first one, sent twice"
    next_turn = turn(7, 3, END, END, versions=(ENVIRONMENT_VERSION, 4, 4, ENVIRONMENT_VERSION))
    (second,) = held.take([next_turn])
    assert held.take([next_turn]) == [] and held.num_requests == 1
    late = NewTokens(request_id="a", tokens=(5,), logprobs=(-1.0,), finish_reason="stop")
    held.record([late], 4)
    assert held.since({"a": 0})[0][0].tokens == (7, 3, END, END), "it has not begun"
    assert held.begin(second) and held.record([late], 5)
    (chunk,) = held.since({"a": 4})[0]
    assert (chunk.tokens, chunk.versions, chunk.finish_reason) == ((5,), (5,), "stop")
    held.forget(["a"])
    assert held.num_tokens == 0 and len(held.take([turn(*[3] * 6, versions=(0,) * 6)])) == 1
    assert held.num_tokens == 6, "tokens of both turns were counted once"
