"""The sampler's state as a fold of the ledger, and dynamic sampling's verdicts."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.config.algorithm import AlgorithmConfig, AlgorithmName
from rolecall.core.errors import SamplerMismatch
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import FILTERED, GroupState, Ledger, LedgerLine
from rolecall.rl_runtime.algorithms.sampler import (
    TAKEN,
    GroupSignal,
    SamplerState,
    classify_rewards,
    group_seed,
    is_at_limit,
    not_filled,
    request_seed,
)
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.tasks.task import group_id

S, V = GroupState, GroupSignal


def line(number: int, state: GroupState, step: int = -1, reason: str = "") -> LedgerLine:
    return LedgerLine(group_id=group_id(number), state=state, step=step, reason=reason)


def folded(*lines: LedgerLine, job_seed: int = 3) -> SamplerState:
    state = SamplerState(job_seed)
    state.advance_by(lines)
    return state


# --- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "by_reward", "by_exact"),
    [
        ([1.0, 1.0, 1.0], V.ALL_RIGHT, V.ALL_RIGHT),
        ([0.0, 0.0, 0.0], V.ALL_WRONG, V.ALL_WRONG),
        ([1.0, 0.0, 0.0], V.INFORMATIVE, V.INFORMATIVE),
        ([0.5, 0.5, 0.5], V.ALL_EQUAL, V.ALL_WRONG),
        ([0.5, 0.5, 0.25], V.INFORMATIVE, V.ALL_WRONG),
        ([1.0, 1.0, 0.75], V.INFORMATIVE, V.INFORMATIVE),
        ([-1.0, -1.0], V.ALL_WRONG, V.ALL_WRONG),
        # Equal but for rounding: its advantages are all 0.
        ([0.0, 5e-324], V.ALL_WRONG, V.ALL_WRONG),
        ([0.1 + 0.2, 0.3], V.ALL_EQUAL, V.ALL_WRONG),
        ([0.3, 0.3 + 1e-5], V.INFORMATIVE, V.ALL_WRONG),
        ([1.0, 1.0 - 2**-53], V.ALL_EQUAL, V.INFORMATIVE),
    ],
)
def test_groups_without_a_learning_signal_are_found_by_their_rewards(
    rewards: list[float], by_reward: GroupSignal, by_exact: GroupSignal
) -> None:
    assert (classify_rewards(rewards, "reward"), classify_rewards(rewards, "exact")) == (by_reward, by_exact)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=6), st.randoms())
def test_a_verdict_does_not_depend_on_the_order_of_samples(rewards: list[float], rng: object) -> None:
    shuffled = list(rewards)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    for by in ("reward", "exact"):
        assert classify_rewards(rewards, by) is classify_rewards(shuffled, by)
    exact = sum(r == 1.0 for r in rewards)
    assert (classify_rewards(rewards, "exact") is V.INFORMATIVE) == (0 < exact < len(rewards)), "DAPO: 0 < #correct < G"


@pytest.mark.parametrize(
    ("accepted", "filtered", "at_limit"), [(0, 0, False), (3, 8, False), (3, 9, True), (0, 12, True), (4, 99, False)]
)
def test_the_limit_is_on_groups_judged_for_a_step_that_is_not_full(
    accepted: int, filtered: int, at_limit: bool
) -> None:
    algorithm = AlgorithmConfig(
        name=AlgorithmName.DAPO,
        microbatches_per_step=2,
        groups_per_microbatch=2,
        refills_max=3,
        overlong_buffer_tokens=1,
    )
    assert is_at_limit(algorithm, accepted=accepted, filtered=filtered) is at_limit


@pytest.mark.parametrize(("right", "wrong", "word", "change"), [(7, 2, "easy", "harder"), (2, 7, "hard", "easier")])
def test_an_unfilled_batch_is_reported_with_counts_and_advice(right: int, wrong: int, word: str, change: str) -> None:
    algorithm = AlgorithmConfig(
        name=AlgorithmName.DAPO, microbatches_per_step=2, groups_per_microbatch=2, overlong_buffer_tokens=1
    )
    error = not_filled(algorithm, 5, accepted=1, verdicts={V.ALL_RIGHT: right, V.ALL_WRONG: wrong})
    text = str(error)
    assert text.startswith("step 5: 10 groups were generated, and only 1 of the 4 required are informative")
    assert f"{right} all right, {wrong} all wrong, 0 all equal" in text
    assert f"too {word} " in text and f"make the task {change}" in text and "at_refill_limit: take" in text
    assert (error.step, error.wanted, error.accepted) == (5, 4, 1)


# --- the fold -----------------------------------------------------------------------------------------------------


def test_the_fold_has_the_cursor_the_accepted_and_the_filtered_groups() -> None:
    state = folded(
        *(line(n, S.ISSUED) for n in range(5)),
        line(0, S.ACCEPTED, 0),
        line(1, S.DROPPED, 0, f"{FILTERED}all wrong"),
        line(2, S.DROPPED, 0, "stale"),
        line(3, S.ACCEPTED, 0),
        line(4, S.DROPPED, 1, f"{FILTERED}all right"),
    )
    assert state.cursor == 5 and state.accepted == {group_id(0), group_id(3)}
    assert state.verdicts(0) == Counter({V.ALL_WRONG: 1}) and state.verdicts(1) == Counter({V.ALL_RIGHT: 1})
    assert state.filtered_fraction(0, [group_id(0), group_id(3)]) == pytest.approx(1 / 3)
    state.advance_by([line(0, S.ASSIGNED, 0), line(3, S.ASSIGNED, 0)])
    assert not state.accepted and state.verdicts(0).total() == 1, "the step may be returned, and formed again"
    state.advance_by([line(0, S.RETURNED, 0, "lost"), line(3, S.RETURNED, 0, "lost")])
    assert state.verdicts(0).total() == 1 and not state.accepted, "what was returned is judged again"
    state.advance_by([line(0, S.ACCEPTED, 0), line(0, S.ASSIGNED, 0), line(0, S.TRAINED, 0), line(3, S.ASSIGNED, 1)])
    assert state.verdicts(0).total() == 0 and state.verdicts(1).total() == 1
    state.advance_by([line(0, S.UNDONE, -1, "went back")])
    assert state.verdicts(1).total() == 0, "what was filtered for a step that never was counts for none"


def test_groups_that_fill_a_batch_although_they_have_no_learning_signal_count_as_filtered() -> None:
    state = folded(
        line(0, S.ISSUED),
        line(1, S.ISSUED),
        line(2, S.ISSUED),
        line(0, S.ACCEPTED, 0),
        line(1, S.DROPPED, 0, f"{FILTERED}all equal"),
        line(2, S.ACCEPTED, 0, f"{TAKEN}all equal"),
        line(0, S.ASSIGNED, 0),
        line(2, S.ASSIGNED, 0),
    )
    assert state.verdicts(0) == Counter({V.ALL_EQUAL: 2})
    assert state.filtered_fraction(0, [group_id(0), group_id(2)]) == pytest.approx(2 / 3)


def test_a_prompt_that_was_skipped_is_named() -> None:
    with pytest.raises(SamplerMismatch, match=r"g00000002.*g00000001 comes next"):
        folded(line(0, S.ISSUED), line(2, S.ISSUED))


def test_a_later_window_of_an_answer_is_no_prompt_of_its_own() -> None:
    state = folded(line(0, S.ISSUED), LedgerLine(group_id=group_id(0, 12), state=S.ISSUED), line(1, S.ISSUED))
    assert state.cursor == 2


def test_another_seed_is_refused_with_group_and_both_values() -> None:
    reason = f"seed {group_seed(3, 1)}"
    lines = [line(0, S.ISSUED), line(1, S.ISSUED, reason=reason)]
    assert folded(*lines, job_seed=3).cursor == 2, "an older ledger has no seeds and is accepted"
    with pytest.raises(SamplerMismatch) as raised:
        folded(*lines, job_seed=4)
    assert raised.value.group == group_id(1)
    assert reason in str(raised.value) and f"seed {group_seed(4, 1)}" in str(raised.value)


def test_seeds_of_samples_are_a_counter_without_repetitions() -> None:
    seeds = {request_seed(7, number, sample) for number in range(500) for sample in range(16)}
    assert len(seeds) == 500 * 16
    assert request_seed(7, 3, 0) == group_seed(7, 3) and max(seeds) < 2**31


STATES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(S)), st.integers(0, 2)), max_size=60)


@given(STATES)
def test_a_complete_fold_equals_an_incremental_one(
    moves: list[tuple[int, GroupState, int]],
) -> None:
    """Any chain of lines, legal or not: what a controller carries is what the next one reads."""
    lines = [line(n, S.ISSUED, reason=f"seed {group_seed(0, n)}") for n in range(6)]
    reasons = {S.DROPPED: f"{FILTERED}all wrong", S.ACCEPTED: ""}
    lines += [line(n, s, step, reasons.get(s, "")) for n, s, step in moves if s is not S.ISSUED]
    along = SamplerState(0)
    for one in lines:
        along.advance_by([one])
    rows = [{"group_id": x.group_id, "state": str(x.state), "step": x.step, "reason": x.reason} for x in lines]
    assert along == SamplerState.of(rows, 0)


def test_a_ledger_gives_what_the_fold_needs(tmp_path: Path) -> None:
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}")
    ledger = Ledger(journal.store)
    ledger.write([line(0, S.ISSUED, reason=f"seed {group_seed(0, 0)}"), line(1, S.ISSUED)])
    ledger.write([line(1, S.ACCEPTED, 0)])
    state = SamplerState.of(ledger.lines(), 0)
    assert state == SamplerState(0, cursor=2, accepted={GroupId(group_id(1))})
    journal.close()


def test_a_group_that_taught_something_before_its_tokens_were_lost_may_fill_a_batch(tmp_path: Path) -> None:
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}")
    recorder = RunRecorder(journal, Ledger(journal.store), ReplicaId("controller/0"), 1)
    groups = [group_id(n) for n in range(2)]
    recorder.issued(groups)
    recorder.judged(0, [(groups[0], 3, V.INFORMATIVE)], [])
    # Made again they are all equal, and so are those of the other.
    recorder.assigned(0, [(g, 3) for g in groups], taken=[(g, 3, V.ALL_EQUAL) for g in groups])
    assert {state for state, _ in recorder.ledger.groups().values()} == {S.ASSIGNED}
    assert recorder.sampler == SamplerState.of(recorder.ledger.lines(), 0)
    journal.close()
