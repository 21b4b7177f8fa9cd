"""Constant work: any order of losses, down to one survivor, still makes each microbatch exactly once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.algorithms.batching import (
    assign,
    chunks,
    form_microbatches,
    interleaved,
    mini_batches,
    updates,
)
from rolecall.rl_runtime.protocol.messages import PromptGroup

REPLICAS = [ReplicaId(f"trainer/{n}") for n in range(6)]


def group(name: str) -> PromptGroup:
    return PromptGroup(group_id=GroupId(name), prompt_tokens=(1,), samples=())


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[str], list[ReplicaId], list[tuple[ReplicaId, dict[ReplicaId, int]]]]:
    """(ids, members, losses): each loss names who goes, and how many of its share each had computed until then."""
    ids = [f"7.{n}" for n in range(draw(st.integers(1, 12)))]
    members = REPLICAS[: draw(st.integers(1, 6))]
    order = draw(st.permutations(members))[: len(members) - 1]
    done = [(who, {r: draw(st.integers(0, len(ids))) for r in members}) for who in order]
    return ids, members, done


@given(losses())
def test_any_order_of_losses_leaves_each_microbatch_with_exactly_one_survivor(
    case: tuple[list[str], list[ReplicaId], list[tuple[ReplicaId, dict[ReplicaId, int]]]],
) -> None:
    ids, members, story = case
    computed: dict[ReplicaId, set[str]] = {r: set() for r in members}
    shares = assign(ids, computed, members)
    assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1
    for who, counts in story:
        for replica in members:
            computed[replica] |= set(shares[replica][: counts[replica]])
        members = [r for r in members if r != who]
        shares = assign(ids, computed, members)
        assert sorted(i for share in shares.values() for i in share) == sorted(ids)
        for replica in members:
            assert computed[replica] <= set(shares[replica]), "computed work must stay where it was done"
    assert set(shares) == set(members)


@given(losses(), st.data())
def test_a_retry_after_partial_computation_gives_the_same_shares(
    case: tuple[list[str], list[ReplicaId], list[tuple[ReplicaId, dict[ReplicaId, int]]]], data: st.DataObject
) -> None:
    ids, members, _ = case
    before = {r: set(data.draw(st.lists(st.sampled_from(ids)))) for r in members[:1]}
    shares = assign(ids, before, members)
    since = {r: before.get(r, set()) & set(share) | _some(data, share) for r, share in shares.items()}
    assert assign(ids, since, members) == shares


def _some(data: st.DataObject, share: list[str]) -> set[str]:
    return set(data.draw(st.lists(st.sampled_from(share)))) if share else set()


def test_free_ids_go_to_the_replica_with_the_fewest() -> None:
    a, b, c = REPLICAS[:3]
    assert assign(["1", "2", "3", "4"], {a: ["1", "2"]}, [a, b, c]) == {a: ["1", "2"], b: ["3"], c: ["4"]}


def test_an_id_that_two_computed_counts_once_and_a_strangers_not_at_all() -> None:
    a, b, c = REPLICAS[:3]
    assert assign(["1", "2"], {b: ["1"], a: ["1"], c: ["2"]}, [a, b]) == {a: ["1"], b: ["2"]}


def test_an_empty_membership_and_repeated_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="no replica is left"):
        assign(["1"], {}, [])
    with pytest.raises(ValueError, match="twice"):
        assign(["1", "1"], {}, REPLICAS)


@given(st.permutations([f"g{n:08d}" for n in range(8)]))
def test_a_steps_microbatches_depend_on_its_set_of_groups_only(names: list[str]) -> None:
    made = form_microbatches(3, [group(n) for n in names], 4)
    assert [m.microbatch_id for m in made] == ["3.0", "3.1", "3.2", "3.3"]
    assert [g.group_id for m in made for g in m.groups] == sorted(names)


@pytest.mark.parametrize("names", [["a", "b", "c"], [], ["a", "a", "b", "c"]])
def test_groups_that_do_not_make_equal_microbatches_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="step 3"):
        form_microbatches(3, [group(n) for n in names], 2)


def algorithm(parts: int, size: int, passes: int) -> AlgorithmConfig:
    return AlgorithmConfig(mini_batches=parts, microbatches_per_step=parts * size, ppo_epochs=passes)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99), st.randoms())
def test_each_pass_updates_with_each_microbatch_once(
    parts: int, size: int, passes: int, step: int, rng: random.Random
) -> None:
    ids = [f"{step}.{n}" for n in range(parts * size)]
    plan = updates(ids, algorithm(parts, size, passes), step=step, seed=3)
    assert len(plan) == parts * passes
    for number in range(passes):
        this = plan[number * parts : (number + 1) * parts]
        assert sorted(i for update in this for i in update) == sorted(ids)
        assert {frozenset(u) for u in this} == {frozenset(u) for u in plan[:parts]}
        assert {len(u) for u in this} == {size}
    shuffled = rng.sample(ids, len(ids))
    if parts > 1:
        assert updates(shuffled, algorithm(parts, size, passes), step=step, seed=3) == plan


def test_mini_batches_differ_by_step_and_seed_and_their_order_by_pass() -> None:
    def made(step: int, seed: int) -> list[tuple[str, ...]]:
        ids = [f"0.{n}" for n in range(16)]
        return updates(ids, algorithm(4, 4, 6), step=step, seed=seed)

    assert len({frozenset(map(frozenset, made(step, seed))) for step in range(3) for seed in range(3)}) == 9
    plan = made(0, 0)
    assert len({tuple(plan[n : n + 4]) for n in range(0, 24, 4)}) > 1


@pytest.mark.parametrize("num_members", [1, 2, 4])
def test_each_member_has_its_share_of_every_mini_batch(num_members: int) -> None:
    ids = [f"7.{n}" for n in range(16)]
    parts = mini_batches(ids, step=7, number=4, seed=0)
    shares = assign(interleaved(parts), {}, REPLICAS[:num_members])
    for part in parts:
        assert {len(set(part) & set(share)) for share in shares.values()} == {4 // num_members}


def test_one_mini_batch_is_assigned_as_ever() -> None:
    ids = [f"7.{n}" for n in (10, 9, 2, 1)]
    assert interleaved(mini_batches(ids, step=7, number=1, seed=0)) == ids


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 90))
def test_chunks_hold_each_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    found = chunks(lengths, budget)
    assert sorted(row for chunk in found for row in chunk) == list(range(len(lengths)))
    for chunk in found:
        longest = max(lengths[row] for row in chunk)
        assert len(chunk) * longest <= budget or len(chunk) == 1
    assert found == chunks(lengths, budget)


def test_without_a_budget_rows_stay_in_their_order() -> None:
    assert chunks([3, 9, 1], None) == [[0, 1, 2]]
    assert chunks([2, 9, 3, 8], 18) == [[1, 3], [2, 0]], "rows of similar length are together"
