"""Exactly once: only legal moves are written, and the audit detects every manipulation of the ledger."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.core.clock import FakeClock
from rolecall.core.errors import LedgerViolation
from rolecall.core.ids import GroupId
from rolecall.core.journal.ledger import LEGAL, GroupState, Ledger, LedgerLine, audit, length_bucket
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.journal.store import GENESIS, Store, chain_hash

S = GroupState


def _line(group: str, state: GroupState, step: int = -1, num_tokens: int = 0) -> LedgerLine:
    reason = "stale" if state in (S.DROPPED, S.UNDONE, S.RETURNED) else ""
    return LedgerLine(group_id=GroupId(group), state=state, step=step, num_tokens=num_tokens, reason=reason)


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    store = Store(url)
    yield Ledger(store, clock=FakeClock())
    store.close()


def _ordinary(ledger: Ledger) -> list[ChainHead]:
    """Two steps of two groups each, one group dropped; the heads after each write."""
    return [
        ledger.write([_line(g, S.ISSUED) for g in ("g1", "g2", "g3", "g4", "g5")]),
        ledger.write([_line("g1", S.ASSIGNED, 0), _line("g2", S.ASSIGNED, 0)]),
        ledger.write([_line("g1", S.TRAINED, 0, 12), _line("g2", S.TRAINED, 0, 12)]),
        ledger.write([_line("g5", S.DROPPED, num_tokens=5)]),
        ledger.write([_line("g3", S.ASSIGNED, 1), _line("g4", S.ASSIGNED, 1)]),
        ledger.write([_line("g3", S.TRAINED, 1), _line("g4", S.TRAINED, 1)]),
    ]


# --- moves --------------------------------------------------------------------------------------------------------


def test_an_ordinary_run_counts_up(ledger: Ledger) -> None:
    heads = _ordinary(ledger)
    found = audit(ledger.lines(), [(f"head {n}", h) for n, h in enumerate(heads)])
    assert found.ok and not found.problems
    assert (found.groups_issued, found.groups_trained, found.groups_dropped) == (5, 4, 1)
    assert (found.groups_undone, found.duplicates, found.unaccounted) == (0, 0, 0)
    assert found.head == heads[-1] == ledger.head()
    assert found.dropped_by_reason == {"stale": 1} and found.dropped_by_length == {"4-7": 1}
    assert ledger.last_trained_step() == 1
    assert ledger.groups([S.DROPPED]) == {"g5": (S.DROPPED, -1)}


def test_groups_are_asked_for_by_state_and_by_name(ledger: Ledger) -> None:
    ledger.write([LedgerLine(group_id=GroupId(g), state=GroupState.ISSUED) for g in ("a", "b", "c")])
    ledger.write([LedgerLine(group_id=GroupId("b"), state=GroupState.ASSIGNED, step=4)])
    assert ledger.groups(among=[GroupId("b"), GroupId("x")]) == {"b": (GroupState.ASSIGNED, 4)}
    assert list(ledger.groups([GroupState.ISSUED], among=[GroupId("c"), GroupId("b")])) == ["c"]
    assert ledger.groups(among=[]) == {}


def test_an_empty_ledger_is_whole(ledger: Ledger) -> None:
    assert ledger.head() == ChainHead(position=0, hash=GENESIS)
    assert audit(ledger.lines()).ok
    assert ledger.last_trained_step() == -1
    assert ledger.undo_after(3, "nothing to undo") == []


@pytest.mark.parametrize("before", [None, *GroupState])
@pytest.mark.parametrize("after", list(GroupState))
def test_only_legal_moves_are_written(before: GroupState | None, after: GroupState, url: str) -> None:
    """All 56 pairs of states: the ledger takes exactly the legal ones, and a refusal writes nothing."""
    way: Mapping[GroupState | None, Sequence[GroupState]] = {
        None: [],
        S.ISSUED: [S.ISSUED],
        S.ACCEPTED: [S.ISSUED, S.ACCEPTED],
        S.ASSIGNED: [S.ISSUED, S.ASSIGNED],
        S.RETURNED: [S.ISSUED, S.ASSIGNED, S.RETURNED],
        S.TRAINED: [S.ISSUED, S.ASSIGNED, S.TRAINED],
        S.DROPPED: [S.ISSUED, S.DROPPED],
        S.UNDONE: [S.ISSUED, S.ASSIGNED, S.TRAINED, S.UNDONE],
    }
    store = Store(url)
    ledger = Ledger(store)
    for state in way[before]:
        ledger.write([_line("g1", state, 0)])
    head = ledger.head()
    if after in LEGAL[before]:
        assert ledger.write([_line("g1", after, 0)]).position == head.position + 1
    else:
        with pytest.raises(LedgerViolation, match="g1"):
            # The legal line before it in the same write must not be kept either.
            ledger.write([_line("g2", S.ISSUED), _line("g1", after, 0)])
        assert ledger.head() == head
    store.close()


def test_a_group_is_trained_in_the_step_it_was_assigned_to(ledger: Ledger) -> None:
    ledger.write([_line("g1", S.ISSUED), _line("g1", S.ASSIGNED, 4)])
    with pytest.raises(LedgerViolation, match="assigned to step 4, cannot be trained in step 5"):
        ledger.write([_line("g1", S.TRAINED, 5)])


def test_a_group_is_not_dropped_without_a_reason(ledger: Ledger) -> None:
    ledger.write([_line("g1", S.ISSUED)])
    with pytest.raises(LedgerViolation, match="without a reason"):
        ledger.write([LedgerLine(group_id=GroupId("g1"), state=S.DROPPED)])


def test_going_back_to_a_checkpoint_undoes_later_groups_and_they_are_trained_again(ledger: Ledger) -> None:
    _ordinary(ledger)
    assert ledger.undo_after(0, "back to step 0") == ["g3", "g4"]
    assert audit(ledger.lines(), ended=False).ok
    assert audit(ledger.lines()).unaccounted == 2
    ledger.write([_line("g3", S.ASSIGNED, 1), _line("g4", S.ASSIGNED, 1)])
    ledger.write([_line("g3", S.TRAINED, 1), _line("g4", S.TRAINED, 1)])
    found = audit(ledger.lines())
    assert found.ok and found.duplicates == 0
    assert (found.groups_trained, found.groups_undone) == (4, 2)
    assert list(ledger.undone_steps()) == [1]
    head = ledger.head().position
    assert ledger.undo_after(-1, "back to the beginning") and list(ledger.undone_steps(head)) == [0, 1]


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(-1, "0"), (0, "0"), (1, "1-1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (1000, "512-1023")]
)
def test_length_buckets(num_tokens: int, bucket: str) -> None:
    assert length_bucket(num_tokens) == bucket


# --- any legal sequence -------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    choices=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 400)), max_size=40),
    judges=st.booleans(),
)
def test_any_sequence_of_legal_moves_audits_well(
    choices: list[tuple[int, int, int]], judges: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random walks of six groups through the state machine; the audit agrees with a plain count of them.

    `judges`: of a run with dynamic sampling, in which every group is accepted before it is assigned.
    """
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('l') / 'journal.db'}")
    ledger = Ledger(store)
    states, steps = dict[str, GroupState](), dict[str, int]()
    anchors = []
    for which, pick, tokens in choices:
        group = f"g{which}"
        never = {S.ACCEPTED} if not judges else {S.ASSIGNED} if states.get(group) is not S.ACCEPTED else set()
        legal = sorted(LEGAL[states.get(group)] - never)
        if not legal:
            continue
        state = legal[pick % len(legal)]
        step = steps.get(group, -1) if state is S.TRAINED else pick
        anchors.append((f"after {group}", ledger.write([_line(group, state, step, tokens)])))
        states[group], steps[group] = state, step
    found = audit(ledger.lines(), anchors, ended=False)
    assert found.ok, found.problems
    assert found.duplicates == 0
    assert found.groups_trained == sum(s is S.TRAINED for s in states.values())
    assert found.groups_dropped == sum(s is S.DROPPED for s in states.values())
    open_groups = len(states) - found.groups_trained - found.groups_dropped
    assert audit(ledger.lines(), anchors).unaccounted == open_groups
    assert {g: s for g, (s, _) in ledger.groups().items()} == states
    store.close()


# --- dynamic sampling ---------------------------------------------------------------------------------------------


def _judged(ledger: Ledger, accepts: Sequence[str]) -> None:
    """A step of two groups of four; the others teach nothing."""
    ledger.write([_line(g, S.ISSUED) for g in ("g1", "g2", "g3", "g4")])
    ledger.write([_line(g, S.ACCEPTED, 0, 12) for g in accepts])
    drops = {"g3": ("filtered: all right", 12), "g4": ("filtered: all wrong", 3)}
    for group, (reason, tokens) in drops.items():
        dropped = LedgerLine(group_id=GroupId(group), state=S.DROPPED, step=0, num_tokens=tokens, reason=reason)
        ledger.write([dropped])
    ledger.write([_line("g1", S.ASSIGNED, 0), _line("g2", S.ASSIGNED, 0)])
    ledger.write([_line("g1", S.TRAINED, 0), _line("g2", S.TRAINED, 0)])


def test_filtered_groups_are_counted_by_reason_and_length_separately_from_lost_ones(ledger: Ledger) -> None:
    _judged(ledger, ["g1", "g2"])
    ledger.write([_line("g5", S.ISSUED), _line("g5", S.DROPPED, num_tokens=9)])
    found = audit(ledger.lines())
    assert found.ok and found.unaccounted == 0
    assert found.dropped_by_reason == {"filtered: all right": 1, "filtered: all wrong": 1, "stale": 1}
    assert found.dropped_by_length == {"8-15": 2, "2-3": 1} and found.filtered_by_length == {"8-15": 1, "2-3": 1}


def test_a_group_that_was_trained_without_being_accepted_is_found(ledger: Ledger) -> None:
    _judged(ledger, ["g1"])
    found = audit(ledger.lines())
    assert not found.ok
    assert found.problems == ("assigned to a step although dynamic sampling had not accepted it: 1 group: g2",)


def test_a_state_of_a_later_rolecall_is_a_problem_and_no_traceback(ledger: Ledger) -> None:
    _ordinary(ledger)
    lines = [dict(line) for line in ledger.lines()]
    link = lines[-2]["hash"]
    lines[-1]["state"] = "frozen"
    lines[-1]["hash"] = chain_hash(link, {k: v for k, v in lines[-1].items() if k != "hash"})
    (problem,) = (p for p in audit(lines, ended=False).problems)
    assert problem == f"ledger line {len(lines)}: state 'frozen' is unknown"


# --- tampering ----------------------------------------------------------------------------------------------------


def test_every_line_removed_is_found(ledger: Ledger) -> None:
    anchor = ("trainer state", _ordinary(ledger)[-1])
    lines = ledger.lines()
    for n in range(len(lines)):
        found = audit(lines[:n] + lines[n + 1 :], [anchor])
        assert not found.ok
        if n < len(lines) - 1:
            assert f"ledger line {n + 1} is missing" in found.problems[0]


def test_every_line_repeated_is_found(ledger: Ledger) -> None:
    _ordinary(ledger)
    lines = ledger.lines()
    for n in range(len(lines)):
        found = audit(lines[: n + 1] + lines[n:])
        assert not found.ok and f"ledger line {n + 2} is missing or repeated" in found.problems[0]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("group_id", "g9"),
        ("state", "dropped"),
        ("state", "no state at all"),
        ("step", 7),
        ("num_tokens", 1),
        ("reason", "because"),
        ("wall_at", 0.0),
        ("hash", "0" * 64),
    ],
)
def test_every_column_of_every_line_changed_is_found(ledger: Ledger, column: str, value: Any) -> None:
    _ordinary(ledger)
    lines = ledger.lines()
    for n, line in enumerate(lines):
        if line[column] == value:
            continue
        found = audit([*lines[:n], {**line, column: value}, *lines[n + 1 :]])
        assert not found.ok and f"ledger line {n + 1}" in found.problems[0] and "changed" in found.problems[0]


def test_every_truncated_tail_is_found_against_an_anchor(ledger: Ledger) -> None:
    anchor = ("checkpoint step-1", _ordinary(ledger)[-1])
    lines = ledger.lines()
    for n in range(len(lines)):
        found = audit(lines[:n], [anchor], ended=False)
        assert not found.ok
        assert found.problems[-1].startswith(f"checkpoint step-1 has {len(lines)} ledger lines, the ledger {n}")


def _rehashed(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A forger with the formula recomputes numbers and hashes."""
    link, forged = GENESIS, []
    for seq, line in enumerate(lines, start=1):
        entry = {**{k: v for k, v in line.items() if k != "hash"}, "seq": seq}
        link = chain_hash(link, entry)
        forged.append({**entry, "hash": link})
    return forged


def test_a_group_is_trained_only_once(ledger: Ledger) -> None:
    ledger.write([_line("g1", S.ISSUED), _line("g1", S.ASSIGNED, 0), _line("g1", S.TRAINED, 0)])
    for again in (S.TRAINED, S.ASSIGNED):
        with pytest.raises(LedgerViolation, match="g1"):
            ledger.write([_line("g1", again, 1)])
    assert [line["state"] for line in ledger.lines()].count("trained") == 1


def test_a_forged_chain_is_found_by_moves_and_by_anchors(ledger: Ledger) -> None:
    heads = _ordinary(ledger)
    lines = ledger.lines()
    trained = next(n for n, line in enumerate(lines) if line["state"] == "trained")
    twice = _rehashed([*lines[: trained + 1], lines[trained], *lines[trained + 1 :]])
    found = audit(twice)
    assert not found.ok and found.duplicates == 1
    without_issue = audit(_rehashed(lines[1:]))
    assert not without_issue.ok and "g1: unknown -> assigned is not a legal move" in without_issue.problems[0]
    # Forged into another valid ledger: only an anchor stored elsewhere reveals it.
    valid = _rehashed([{**line, "num_tokens": 1} for line in lines])
    assert audit(valid).ok
    assert any("is of another ledger" in p for p in audit(valid, [("report", heads[-1])]).problems)


def test_random_tampering_is_found(ledger: Ledger, rng: random.Random, seed: int) -> None:
    anchor = ("report", _ordinary(ledger)[-1])
    lines = ledger.lines()
    for _ in range(200):
        harmed = list(lines)
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(harmed))
            what = rng.choice(["remove", "repeat", "swap", "cut"])
            if what == "remove":
                del harmed[at]
            elif what == "repeat":
                harmed.insert(at, harmed[at])
            elif what == "swap" and at:
                harmed[at - 1], harmed[at] = harmed[at], harmed[at - 1]
            elif what == "cut":
                harmed = harmed[:at]
            if not harmed:
                break
        assert (harmed == lines) == audit(harmed, [anchor]).ok, f"seed {seed}"


def test_a_commit_is_in_the_history_until_its_step_is_undone(ledger: Ledger) -> None:
    ledger.write([_line(g, S.ISSUED) for g in ("g1", "g2", "g3")])
    zero = ledger.write([_line("g1", S.ASSIGNED, 0)])
    first = ledger.write([_line("g1", S.TRAINED, 0), _line("g2", S.ASSIGNED, 1)])
    both = frozenset({S.TRAINED, S.ASSIGNED})

    def found(step: int, group: str, head: ChainHead) -> tuple[bool, bool]:
        groups = [GroupId(group)]
        return ledger.includes(step, groups, head), ledger.includes(step, groups, head, both)

    assert found(0, "g1", zero) == (True, True) and found(1, "g2", first) == (False, True)
    later = ledger.write([_line("g2", S.TRAINED, 1)])
    assert found(1, "g2", first) == (True, True)
    assert found(1, "g2", later) == (True, True), "a successor resumes a step with the head that it finds"
    ledger.undo_after(0, "back to step 0")
    assert found(1, "g2", first) == (False, False) and found(0, "g1", zero) == (True, True)
    again = ledger.write([_line("g2", S.ASSIGNED, 1)])
    assert found(1, "g2", first) == (False, False), "the same group in the same step, by another assignment"
    ledger.write([_line("g2", S.TRAINED, 1)])
    assert found(1, "g2", first) == (False, False) and found(1, "g2", again) == (True, True)


def test_a_commit_of_another_step_or_ledger_is_not_in_the_history(ledger: Ledger) -> None:
    heads = _ordinary(ledger)
    groups = [GroupId("g1"), GroupId("g2")]
    assert ledger.includes(0, groups, heads[1])
    assert not ledger.includes(1, groups, heads[1])
    assert not ledger.includes(0, groups, ChainHead(position=heads[1].position, hash=GENESIS))
    assert not ledger.includes(0, groups, ChainHead(position=10**6, hash=heads[1].hash))
    assert not ledger.includes(0, [*groups, GroupId("g9")], heads[1])
    assert not ledger.includes(0, [], heads[1])
    assert ledger.includes(-1, [], ChainHead(position=0, hash=GENESIS)), "the state before the first step"
