"""Windows of an answer: their ids, ends, order and context."""

import pytest

from rolecall.core.errors import InvalidId
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.controller import windows
from rolecall.rl_runtime.controller.trajectories import AGAIN_MAX, EngineKey, GroupPhase, OpenGroup, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import EndReason, GenerationRequest, TokenChunk
from rolecall.rl_runtime.tasks.task import group_id, group_number, group_start

A: EngineKey = (ReplicaId("rollout/0"), 1)
B: EngineKey = (ReplicaId("rollout/1"), 1)
LONGEST = 10


def test_an_id_contains_the_prompt_and_the_start_of_the_window() -> None:
    assert (group_id(7), group_id(7, 12)) == ("g00000007", "g00000007-00012")
    for number, start in [(0, 0), (7, 12), (123_456_789, 0), (3, 123_456)]:
        assert (group_number(group_id(number, start)), group_start(group_id(number, start))) == (number, start)
    assert min([group_id(8), group_id(7, 12), group_id(7), group_id(7, 4)]) == group_id(7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "g",
        "g7",
        "g0000000x",
        "g00000007-",
        "g00000007-12",
        "g00000007-00000",
        "g000000007",
        "g00000007-000012",
        "g00000007-0001a",
        "g00000007\n",
        "g-0000007",
        "g٠٠٠٠٠٠٠٧",
        "h00000007",
    ],
)
def test_other_texts_are_not_group_ids(text: str) -> None:
    for parse in (group_number, group_start):
        with pytest.raises(InvalidId):
            parse(text)


@pytest.mark.parametrize(
    ("start", "window", "end", "limit"),
    [(0, 4, None, 4), (4, 4, None, 8), (8, 4, None, 10), (4, 4, 6, 6), (0, None, None, 10), (3, 4, None, 7)],
)
def test_a_window_ends_when_it_is_full_or_where_the_next_begins_or_with_the_task(
    start: int, window: int | None, end: int | None, limit: int
) -> None:
    assert windows.limit_of(start, window_tokens=window, longest=LONGEST, end=end) == limit


def test_where_windows_end_follows_from_the_ids_that_were_issued() -> None:
    known = [group_id(7, 9), group_id(7), group_id(8), group_id(7, 4), group_id(9, 2)]
    assert windows.ends(known, longest=LONGEST) == {group_id(7): 4, group_id(7, 4): 9}


@pytest.mark.parametrize(
    ("void", "ends"),
    [([9], {0: 4, 4: LONGEST}), ([4, 9], {0: LONGEST}), ([4], {0: 9}), ([], {0: 4, 4: 9})],
)
def test_tokens_of_void_windows_belong_to_the_previous_one(void: list[int], ends: dict[int, int]) -> None:
    known, gone = [group_id(7), group_id(7, 4), group_id(7, 9)], [group_id(7, n) for n in void]
    found = windows.ends(known, gone, longest=LONGEST)
    assert found == {group_id(7, start): end for start, end in ends.items()}


def opened(table: TrajectoryTable, start: int = 0, end: int | None = None, engine: EngineKey | None = A) -> OpenGroup:
    """A window of 4 tokens of answer 7, with an engine."""
    name = group_id(7, start)
    limit = windows.limit_of(start, window_tokens=4, longest=LONGEST, end=end)
    request = GenerationRequest(
        request_id=f"{name}.0", group_id=name, prompt_tokens=(1,), max_response_tokens=limit, seed=5
    )
    group = table.open(name, (1,), [request], first_fresh=start, is_window=limit < LONGEST)
    if engine is not None:
        give(table, name, engine)
    return group


def give(table: TrajectoryTable, name: GroupId, engine: EngineKey) -> None:
    table.place(name, engine)
    table.mark_sent(engine, [r.request_id for r in table.unsent(engine)])


def stream(
    table: TrajectoryTable, group: OpenGroup, tokens: list[int], reason: str = "", engine: EngineKey = A
) -> None:
    (t,) = group.trajectories
    made = TokenChunk(
        request_id=t.request.request_id,
        offset=len(t.tokens),
        tokens=tuple(tokens),
        logprobs=tuple(-float(x) for x in tokens),
        versions=tuple(x // 10 for x in tokens),
        finished=bool(reason),
        finish_reason=reason,
    )
    table.take(engine, [made], 99)


def ends(group: OpenGroup) -> tuple[EndReason | None, GroupPhase, int]:
    (t,) = group.trajectories
    return t.end, group.phase, len(t.tokens)


def test_a_full_window_is_cut_and_ready_without_a_reward() -> None:
    table = TrajectoryTable()
    group = opened(table)
    stream(table, group, [11, 12, 13, 14], "length")
    assert ends(group) == (EndReason.TRUNCATED, GroupPhase.SCORED, 4)
    sample = group.as_group().samples[0]
    assert not sample.is_over and sample.reward == 0.0
    assert group.as_group() == group.as_group(), "a trainer compares plans: a sample must be like itself"
    assert windows.windows_to_continue(table) == [group] and windows.successor(group) == group_id(7, 4)


@pytest.mark.parametrize(("start", "reason", "end"), [(0, "stop", EndReason.STOP), (8, "length", EndReason.LENGTH)])
def test_an_answer_that_is_over_is_scored_and_not_followed(start: int, reason: str, end: EndReason) -> None:
    table = TrajectoryTable()
    group = opened(table, start)
    stream(table, group, list(range(start)))
    stream(table, group, [40, 41] if start else [40, 41, 42, 43], reason)
    assert ends(group)[:2] == (end, GroupPhase.FINISHED)
    assert windows.windows_to_continue(table) == []


def test_the_next_window_takes_over_the_previous_context_and_is_ready_at_once() -> None:
    table = TrajectoryTable()
    first = opened(table)
    stream(table, first, [11, 12, 13, 24], "length")
    second = opened(table, 4, engine=None)
    assert not table.unassigned(), "it waits for its turn and was not lost"
    assert windows.settle(table, LONGEST) == ([second.group_id], [])
    give(table, second.group_id, B)
    (t,) = second.trajectories
    assert t.with_prefix().prefix_tokens == (11, 12, 13, 24) and t.with_prefix().prefix_versions == (1, 1, 1, 2)
    assert second.oldest_since(0) == -1, "its context does not make it old"
    stream(table, second, [35, 46], "stop", B)
    assert (second.oldest_since(0), second.version_max) == (3, 4) and second.as_group().samples[0].first_fresh == 4


def test_a_window_waits_while_the_one_before_is_regenerated_and_is_void_if_that_ends_early() -> None:
    table = TrajectoryTable()
    first, second, third = opened(table, 0, 4), opened(table, 4, 6, None), opened(table, 6, engine=None)
    assert windows.settle(table, LONGEST) == ([], [])
    stream(table, first, [11, 12], "stop")
    assert windows.settle(table, LONGEST) == ([], [second, third])


def test_a_window_whose_predecessors_are_gone_is_made_from_the_prompt() -> None:
    table = TrajectoryTable()
    window = opened(table, 4, engine=None)
    assert windows.settle(table, LONGEST) == ([window.group_id], [])
    give(table, window.group_id, A)
    stream(table, window, [51, 52, 53, 54, 55])
    assert (window.oldest_since(0), window.trajectories[0].tokens[4:]) == (5, [55])


def test_an_answer_that_ends_before_the_window_it_is_made_for_is_regenerated() -> None:
    table = TrajectoryTable()
    window = opened(table, 4)
    (t,) = window.trajectories
    seed = t.request.seed
    stream(table, window, [51, 52, 53], "stop")
    assert ends(window) == (None, GroupPhase.GENERATING, 0) and t.request.seed != seed
    assert table.to_forget(A) == [t.request.request_id] and table.unsent(A) == [t.request]
    for _ in range(AGAIN_MAX):
        stream(table, window, [51, 52, 53, 54], "stop")
    assert ends(window) == (EndReason.STOP, GroupPhase.FINISHED, 4), "not endlessly: the critic learns from it"


def test_tokens_beyond_the_start_of_the_next_window_are_ignored() -> None:
    table = TrajectoryTable()
    group = opened(table, 0, 2)
    stream(table, group, [11, 12, 13, 14], "length")
    assert ends(group) == (EndReason.TRUNCATED, GroupPhase.SCORED, 2)


def test_windows_of_a_dead_engine_are_cut_permanently_at_their_last_token() -> None:
    table = TrajectoryTable()
    group, fresh = opened(table), opened(table, 8)
    stream(table, group, [11, 22, 33])
    cut = table.cut(A)
    assert (cut.group_ids, cut.num_requests, cut.tokens_kept) == ((group.group_id,), 1, 3)
    assert table.leave(A).group_ids == (fresh.group_id,), "without a token of its own it continues elsewhere"
    assert windows.successor(group) == group_id(7, 3)
    table.truncate_after(1)
    assert ends(group) == (None, GroupPhase.GENERATING, 1) and next(iter(table.unassigned())) == group.group_id
    give(table, group.group_id, B)
    stream(table, group, [14, 15, 16], engine=B)
    assert ends(group) == (EndReason.TRUNCATED, GroupPhase.SCORED, 3), "the next window begins there already"


def test_a_rollback_makes_a_later_window_wait_for_its_context() -> None:
    table = TrajectoryTable()
    first = opened(table)
    stream(table, first, [11, 12, 33, 34], "length")
    second = opened(table, 4, engine=None)
    windows.settle(table, LONGEST)
    give(table, second.group_id, B)
    stream(table, second, [45], engine=B)
    table.truncate_after(2)
    assert first.trajectories[0].tokens == second.trajectories[0].tokens == [11, 12]
    assert list(table.unassigned()) == [first.group_id] and windows.settle(table, LONGEST) == ([], [])
    give(table, first.group_id, A)
    stream(table, first, [23, 24], "length")
    assert windows.settle(table, LONGEST) == ([second.group_id], [])
    assert second.trajectories[0].tokens == [11, 12, 23, 24]


def test_lost_tokens_come_back_from_later_windows_as_far_as_they_go() -> None:
    table = TrajectoryTable()
    lost, later = opened(table, 0, 4, None), opened(table, 4)
    stream(table, later, [11, 12, 13, 14, 15])
    assert windows.restore(table) == [lost.group_id] and ends(lost) == (EndReason.TRUNCATED, GroupPhase.SCORED, 4)
    assert lost.trajectories[0].tokens == [11, 12, 13, 14] and table.to_forget(A) == []
    table = TrajectoryTable()
    lost, later = opened(table, 0, 4), opened(table, 4)
    stream(table, lost, [71])
    stream(table, later, [11, 12, 13, 14, 15])
    assert windows.restore(table) == [] and lost.trajectories[0].tokens == [71], "it is being made another way"


def test_an_answer_that_goes_further_when_it_is_regenerated_has_room_although_its_next_window_was_void() -> None:
    table = TrajectoryTable()
    first, second = opened(table, 0, 4), opened(table, 4, engine=None)
    stream(table, first, [11, 32], "stop")
    assert windows.settle(table, LONGEST) == ([], [second])
    table.close(second.group_id)
    table.truncate_after(2)
    assert ends(first) == (None, GroupPhase.GENERATING, 1)
    give(table, first.group_id, B)
    stream(table, first, [12, 13, 14, 15, 16], "stop", B)
    assert ends(first) == (EndReason.STOP, GroupPhase.FINISHED, 6) and windows.windows_to_continue(table) == []


def test_a_window_behind_one_that_is_closed_does_not_wait_for_those_before_that() -> None:
    table = TrajectoryTable()
    first, third = opened(table, 0, 4), opened(table, 8, engine=None)
    assert windows.settle(table, LONGEST) == ([third.group_id], [])
    stream(table, first, [11, 12], "stop")
    assert windows.settle(table, LONGEST) == ([third.group_id], []), (
        "its answer had reached it, as the window in between shows"
    )


def test_a_dead_engines_window_continues_to_where_the_next_one_begins_already() -> None:
    table = TrajectoryTable()
    first, second = opened(table, 0, 4), opened(table, 4, engine=None)
    first.followed = True
    stream(table, first, [11, 12])
    assert table.cut(A).num_requests == 0 and table.leave(A).tokens_kept == 2
    give(table, first.group_id, B)
    stream(table, first, [13, 14], "length", B)
    assert windows.settle(table, LONGEST) == ([second.group_id], [])
    assert second.trajectories[0].tokens == [11, 12, 13, 14]


def test_a_request_with_an_increased_limit_is_sent_to_its_engine_again() -> None:
    table = TrajectoryTable()
    first = opened(table, 0, LONGEST)
    (t,) = first.trajectories
    stream(table, first, [11, 12, 13, 14], "length")
    assert ends(first) == (None, GroupPhase.GENERATING, 4)
    assert table.to_forget(A) == [t.request.request_id] and table.unsent(A) == [t.with_prefix()]


def a_window_that_waits_behind_one_that_is_closed() -> tuple[TrajectoryTable, str, OpenGroup]:
    table = TrajectoryTable()
    first, second = opened(table), opened(table, 4, engine=None)
    stream(table, first, [11, 12, 13, 14], "length")
    windows.settle(table, LONGEST)
    table.close(first.group_id)
    return table, first.trajectories[0].request.request_id, second


def test_an_engine_keeps_a_closed_window_until_another_has_the_next_one() -> None:
    table, request_id, second = a_window_that_waits_behind_one_that_is_closed()
    assert table.to_forget(A) == []
    give(table, second.group_id, B)
    assert table.to_forget(A) == [request_id] and table.to_forget(B) == []


def test_nor_for_longer_than_the_next_one_is_open() -> None:
    table, request_id, second = a_window_that_waits_behind_one_that_is_closed()
    table.close(second.group_id)
    assert table.to_forget(A) == [request_id]


def test_a_new_controller_finds_the_context_of_a_window() -> None:
    _, request_id, _ = a_window_that_waits_behind_one_that_is_closed()
    request = GenerationRequest(
        request_id=request_id, group_id=group_id(7), prompt_tokens=(1,), max_response_tokens=4, seed=5
    )
    whole = TokenChunk(
        request_id=request_id,
        offset=0,
        tokens=(11, 12, 13, 14),
        logprobs=(-1.0,) * 4,
        versions=(1,) * 4,
        finished=True,
        finish_reason="length",
    )
    for proven, tokens, forgotten in [(1, [11, 12, 13, 14], []), (0, [], [request_id])]:
        table = TrajectoryTable()
        second = opened(table, 4, engine=None)
        assert table.adopt(A, [(request, whole)], proven) == []
        assert second.trajectories[0].tokens == tokens and table.to_forget(A) == forgotten
        assert windows.settle(table, LONGEST) == ([second.group_id], [])
        give(table, second.group_id, B)
        assert table.to_forget(A) == ([request_id] if tokens else [])
