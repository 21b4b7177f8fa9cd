"""Tokens of open requests: taken once, in order, only when proven, and kept when their engine goes."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.controller.trajectories import EngineKey, GroupPhase, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import (
    ENVIRONMENT_VERSION,
    EndReason,
    GenerationRequest,
    Observation,
    TokenChunk,
)

A: EngineKey = (ReplicaId("rollout/0"), 1)
B: EngineKey = (ReplicaId("rollout/1"), 1)
G = GroupId("g00000000")


def request(sample: int, group: GroupId = G) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{group}.{sample}", group_id=group, prompt_tokens=(1, 2), max_response_tokens=8, seed=sample
    )


def chunk(sample: int, offset: int, tokens: list[int], version: int = 0, *, finished: bool = False) -> TokenChunk:
    return TokenChunk(
        request_id=f"{G}.{sample}",
        offset=offset,
        tokens=tuple(tokens),
        logprobs=tuple(-float(t) for t in tokens),
        versions=(version,) * len(tokens),
        finished=finished,
    )


def table(samples: int = 2, engine: EngineKey | None = A) -> TrajectoryTable:
    t = TrajectoryTable()
    t.open(G, (1, 2), [request(n) for n in range(samples)])
    if engine is not None:
        t.place(G, engine)
        t.mark_sent(engine, [r.request_id for r in t.unsent(engine)])
    return t


def tokens(t: TrajectoryTable, sample: int) -> list[int]:
    return t.groups[G].trajectories[sample].tokens


def test_a_group_is_finished_when_all_its_samples_are() -> None:
    t = table()
    assert t.take(A, [chunk(0, 0, [5, 6], finished=True)], 0) == []
    assert t.take(A, [chunk(1, 0, [7], finished=True)], 0) == [G]
    assert t.groups[G].phase is GroupPhase.FINISHED
    assert all(math.isnan(s.reward) for s in t.groups[G].as_group().samples), "no reward is known yet"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_overlapping_and_gapped_chunks_never_lose_or_double_a_token(pulls: list[tuple[int, int]]) -> None:
    whole = [10, 11, 12, 13, 14, 15]
    t = table(1)
    for start, stop in pulls:
        before = list(tokens(t, 0))
        t.take(A, [chunk(0, start, whole[start:stop])], 0)
        assert tokens(t, 0) == whole[: len(tokens(t, 0))] and tokens(t, 0)[: len(before)] == before


def test_tokens_of_a_version_that_is_not_proven_wait_until_it_is() -> None:
    t = table(1)
    mixed = TokenChunk(
        request_id=f"{G}.0", offset=0, tokens=(5, 6, 7), logprobs=(0, 0, 0), versions=(3, 4, 4), finished=True
    )
    assert t.take(A, [mixed], proven_version=3) == [] and tokens(t, 0) == [5]
    assert t.offsets(A) == {f"{G}.0": 1}
    assert t.take(A, [mixed], proven_version=4) == [G] and tokens(t, 0) == [5, 6, 7]


def test_tokens_made_without_proven_weights_are_never_taken() -> None:
    t = table(1)
    made = TokenChunk(
        request_id=f"{G}.0", offset=0, tokens=(5, 6, 7), logprobs=(0, 0, 0), versions=(3, -1, -1), finished=True
    )
    assert t.take(A, [made], proven_version=4) == [] and tokens(t, 0) == [5]


def test_a_lost_engines_requests_continue_from_their_tokens() -> None:
    t = table()
    t.take(A, [chunk(0, 0, [5, 6]), chunk(1, 0, [7], finished=True)], 0)
    moved = t.leave(A)
    assert (moved.num_requests, moved.tokens_kept, moved.group_ids) == (1, 2, (G,))
    assert list(t.unassigned()) == [G]
    assert t.place(G, B) == 1
    (again,) = t.unsent(B)
    assert (again.request_id, again.prefix_tokens, again.prefix_versions) == (f"{G}.0", (5, 6), (0, 0))
    assert again.prefix_logprobs == (-5.0, -6.0)


def test_late_messages_of_an_engine_that_was_given_up_are_ignored() -> None:
    t = table(1)
    t.leave(A)
    t.place(G, B)
    t.take(A, [chunk(0, 0, [5])], 0)
    t.mark_sent(A, [f"{G}.0"])
    assert tokens(t, 0) == [] and len(t.unsent(B)) == 1


def test_an_engine_gets_no_more_unfinished_requests_than_it_may_have() -> None:
    t = table(5, engine=None)
    t.place(G, A)

    def submitted() -> list[str]:
        found = [r.request_id for r in t.unsent(A, 2)]
        t.mark_sent(A, found)
        return found

    assert submitted() == [f"{G}.0", f"{G}.1"] and submitted() == []
    t.take(A, [chunk(0, 0, [5], finished=True)], 0)
    assert submitted() == [f"{G}.2"] and t.num_unfinished(A) == 4
    moved = t.leave(A)
    assert moved.num_requests == 4 and t.num_unfinished(A) == 0 and t.place(G, B) == 4, "also those that never left"


def test_a_request_unknown_to_its_engine_is_sent_again() -> None:
    t = table(1)
    t.take(A, [chunk(0, 0, [5])], 0)
    t.resend(A, [f"{G}.0"])
    assert [r.prefix_tokens for r in t.unsent(A)] == [(5,)] and t.offsets(A) == {}


def test_an_engine_may_forget_a_group_only_once_it_is_closed() -> None:
    t = table()
    t.take(A, [chunk(0, 0, [5], finished=True), chunk(1, 0, [6], finished=True)], 0)
    t.score(G, [0.5, 1.0])
    t.assign([G])
    assert t.to_forget(A) == []
    t.close(G)
    assert sorted(t.to_forget(A)) == [f"{G}.0", f"{G}.1"] and t.to_forget(A) == []


def test_a_restarted_controller_adopts_the_requests_of_engines_and_prefers_the_longer() -> None:
    t = table(2, engine=None)
    t.adopt(A, [(request(0), chunk(0, 0, [5])), (request(1), chunk(1, 0, [8], finished=True))], 0)
    t.adopt(B, [(request(0), chunk(0, 0, [5, 6])), (request(9), chunk(9, 0, [1]))], 0)
    assert tokens(t, 0) == [5, 6] and tokens(t, 1) == [8]
    assert t.offsets(B) == {f"{G}.0": 2} and t.offsets(A) == {}
    assert t.to_forget(A) == [f"{G}.0"] and t.to_forget(B) == [f"{G}.9"]


def test_a_request_with_unproven_tokens_is_sent_to_its_engine_again() -> None:
    t = table(1, engine=None)
    held = TokenChunk(
        request_id=f"{G}.0", offset=0, tokens=(5, 6, 7), logprobs=(-5.0, 0, 0), versions=(3, 9, 9), finished=True
    )
    assert t.adopt(A, [(request(0), held)], proven_version=4) == [] and tokens(t, 0) == [5]
    assert t.to_forget(A) == [f"{G}.0"] and t.offsets(A) == {}
    assert [r.prefix_tokens for r in t.unsent(A)] == [(5,)]
    t.mark_sent(A, [f"{G}.0"])
    t.take(A, [chunk(0, 1, [8], 4, finished=True)], 4)
    assert tokens(t, 0) == [5, 8], "version 9 of the day it comes is another one"


def test_going_back_cuts_tokens_of_policies_that_never_were() -> None:
    t = table()
    t.take(A, [chunk(0, 0, [5], 3), chunk(1, 0, [8], 3, finished=True)], 9)
    t.take(A, [chunk(0, 1, [6, 7], 5, finished=True)], 9)
    t.score(G, [1.0, 1.0])
    t.truncate_after(4)
    assert tokens(t, 0) == [5] and tokens(t, 1) == [8]
    assert t.groups[G].phase is GroupPhase.GENERATING and list(t.unassigned()) == [G]
    assert t.to_forget(A) == [f"{G}.0"]


def test_the_age_of_groups_is_reported_by_their_newest_token_or_by_the_engine_that_will_make_it() -> None:
    t = table(1)
    assert t.too_stale(9, 2) == [] and t.waiting({}) == {}, "without a token there is nothing to be old"
    assert t.waiting({A: 4}) == {G: 4}
    t.take(A, [chunk(0, 0, [5], 3)], 9)
    t.take(A, [chunk(0, 1, [5], 5)], 9)
    assert t.waiting({A: 9}) == {G: 9} and t.waiting({}) == {G: 5}
    assert t.groups[G].oldest_since(0) == 3 and t.groups[G].oldest_since(4) == 5 and t.groups[G].oldest_since(6) == -1
    assert t.too_stale(99, 2) == [], "its newest token is still to come"
    t.take(A, [chunk(0, 2, [5], 5, finished=True)], 9)
    assert t.waiting({A: 9}) == {G: 5} and t.too_stale(7, 2) == []
    assert [g.group_id for g in t.too_stale(8, 2)] == [G]
    t.score(G, [1.0])
    assert [g.group_id for g in t.too_stale(8, 2)] == [G]
    t.judge([G], GroupPhase.ACCEPTED)
    assert [g.group_id for g in t.too_stale(8, 2)] == [G]
    t.assign([G])
    assert t.too_stale(8, 2) == []


# --- conversations with an environment


def talk(max_turns: int = 3) -> TrajectoryTable:
    """One conversation on A, whose environment has opened it with token 9."""
    t = TrajectoryTable()
    t.expect_conversations(max_turns)
    t.open(G, (1, 2), [request(0)])
    assert t.awaiting() == [], "nothing is asked for a group that is not placed"
    t.place(G, A)
    assert t.unsent(A) == [], "the environment begins"
    observe(t, 9)
    send(t, A)
    return t


def observe(t: TrajectoryTable, *said: int, done: bool = False) -> None:
    (trajectory,) = t.awaiting()
    asked = trajectory.as_conversation()
    assert t.is_current(asked)
    t.observe(asked, Observation(tokens=said, done=done))
    assert not t.is_current(asked), "an answer is taken once"


def send(t: TrajectoryTable, engine: EngineKey) -> GenerationRequest:
    (sent,) = t.unsent(engine)
    t.mark_sent(engine, [sent.request_id])
    return sent


def said(offset: int, *words: int, version: int = 0, reason: str = "stop") -> TokenChunk:
    return replace(chunk(0, offset, [*words], version, finished=bool(reason)), finish_reason=reason)


def test_a_conversation_goes_on_behind_its_environments_tokens() -> None:
    t = talk()
    assert t.take(A, [said(1, 5, 6)], 0) == [G], "someone has to ask the environment"
    assert t.offsets(A) == {} and t.unsent(A) == [] and t.num_unfinished(A) == 1
    observe(t, 8)
    assert t.take(A, [said(1, 5, 6)], 0) == [] and not t.awaiting(), "the turn before, pulled late"
    again = send(t, A)
    assert (again.prefix_tokens, again.prefix_versions) == (
        (9, 5, 6, 8),
        (ENVIRONMENT_VERSION, 0, 0, ENVIRONMENT_VERSION),
    )
    assert again.prefix_logprobs == (0.0, -5.0, -6.0, 0.0)
    assert t.take(A, [said(4, 7, version=1)], 1) == [G]
    observe(t, done=True)
    group = t.groups[G]
    assert (group.phase, group.trajectories[0].end, group.num_tokens) == (GroupPhase.FINISHED, EndReason.STOP, 3)
    assert (group.version_max, group.oldest_since(-5)) == (1, 0)
    t.close(G)
    assert t.to_forget(A) == [f"{G}.0"]


def test_a_conversation_ends_at_its_last_turn_and_at_its_limit() -> None:
    t = talk(max_turns=1)
    assert t.take(A, [said(1, 5)], 0) == [G] and t.groups[G].phase is GroupPhase.FINISHED
    t = talk()
    t.take(A, [said(1, 5, 6)], 0)
    observe(t, 7, 7, 7, 7, 7)
    assert (t.groups[G].trajectories[0].end, tokens(t, 0)) == (EndReason.LENGTH, [9, 5, 6]), "no room for an answer"
    t = talk()
    assert t.take(A, [said(1, *[5] * 7)], 0) == [G] and not t.awaiting()
    assert t.groups[G].phase is GroupPhase.FINISHED


def test_a_lost_engines_conversation_goes_on_elsewhere_with_its_marks() -> None:
    t = talk()
    t.take(A, [said(1, 5)], 0)
    t.leave(A)
    observe(t, 8)
    assert list(t.unassigned()) == [G]
    t.place(G, B)
    assert send(t, B).prefix_versions == (ENVIRONMENT_VERSION, 0, ENVIRONMENT_VERSION)
    t.take(B, [said(3, 6, reason="")], 0)
    assert tokens(t, 0) == [9, 5, 8, 6]


def test_an_engine_that_is_left_between_two_turns_forgets_the_first() -> None:
    t = talk()
    t.take(A, [said(1, 5)], 0)
    observe(t, 8)
    t.leave(A, alive=True)
    assert t.to_forget(A) == [f"{G}.0"]
    t = talk()
    t.take(A, [said(1, 5)], 0)
    observe(t, 8)
    t.close(G)
    assert t.to_forget(A) == [f"{G}.0"]


def test_a_restarted_controller_adopts_a_conversation_that_awaits_its_environment() -> None:
    sent = replace(request(0), prefix_tokens=(9,), prefix_logprobs=(0.0,), prefix_versions=(ENVIRONMENT_VERSION,))
    whole = replace(said(0, 9, 5, 6), versions=(ENVIRONMENT_VERSION, 0, 0))
    restarted = TrajectoryTable()
    restarted.expect_conversations(3)
    restarted.open(G, (1, 2), [request(0)])
    assert restarted.adopt(A, [(sent, whole)], 0) == [G]
    observe(restarted, 8)
    assert send(restarted, A).prefix_tokens == (9, 5, 6, 8)


def test_going_back_to_an_older_policy_keeps_what_its_tokens_led_to() -> None:
    t = talk()
    t.take(A, [said(1, 5)], 0)
    observe(t, 8)
    send(t, A)
    t.take(A, [said(3, 6, 7, version=2)], 2)
    (asked,) = t.awaiting()
    conversation = asked.as_conversation()
    t.truncate_after(0)
    assert tokens(t, 0) == [9, 5, 8] and not t.awaiting() and not t.is_current(conversation)
    assert t.to_forget(A) == [f"{G}.0"] and list(t.unassigned()) == [G]
    t.take(A, [said(1, 5)], 0)
    t.truncate_after(-1)
    assert tokens(t, 0) == [9] and t.groups[G].waits, "nothing of the model is left"
