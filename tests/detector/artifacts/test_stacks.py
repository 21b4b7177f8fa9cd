"""Stack dumps: real ones of py-spy, and written cases of ranks that wait for each other."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.stacks.diagnosis import PARALLEL_GROUP, ROUNDS, STACK_GROUP, diagnose, summary
from rolecall.detector.artifacts.stacks.dumps import ParallelGroup, StackDump, Topology, is_dump, normal_frame, read
from rolecall.detector.artifacts.stacks.positions import StackActivity, stack_of
from rolecall.detector.artifacts.stacks.rounds import at_least, often
from tests.detector.stack_cases import (
    C10D,
    COMPUTE,
    GATHER,
    LOADER,
    RECEIVE,
    REDUCE,
    SYNC,
    WRAPPER,
    dump,
    only,
    py_spy_json,
    ranks,
    settle,
    thread,
)
from tests.support import eventually

# --- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "doing", "confidence"),
    [
        (LOADER, StackActivity.DATA, 0.8),
        (("threading.py:wait", "cache.py:get", "train.py:step", "train.py:main"), StackActivity.LOCK, 0.8),
        (("socket.py:readinto", "rewards.py:ask", "train.py:main"), StackActivity.IO, 0.8),
        (("torch/serialization.py:load", "train.py:resume", "train.py:main"), StackActivity.CHECKPOINT, 0.8),
        (("torch/_inductor/scheduler.py:fuse", "train.py:main"), StackActivity.COMPILE, 0.8),
        (("gc_collect_main", "train.py:main"), StackActivity.GARBAGE, 0.8),
        (("train.py:pause", "train.py:main"), StackActivity.STILL, 0.8),
    ],
    ids=lambda value: value.name if isinstance(value, StackActivity) else None,
)
def test_the_process_that_does_not_wait_is_the_suspect(
    texts: tuple[str, ...], doing: StackActivity, confidence: float
) -> None:
    texts = tuple(t if ":" in t else f"python3.11:{t}" for t in texts)
    found = only(diagnose([*(dump(r, *REDUCE) for r in range(7)), dump(7, *texts)]))
    assert (ranks(found), found.fault_class, found.confidence) == ([7], FaultClass.HANG, confidence)
    assert found.suspects[0].node == "m03"
    assert str(doing) in found.because and "7 of 8 trainer processes wait for others (all_reduce" in found.because
    groups = [e for e in found.evidence if e.kind == STACK_GROUP]
    assert [e.values["num_processes"] for e in groups] == [7, 1]


def test_one_who_computes_is_named_with_less_confidence_and_an_older_dump_changes_it() -> None:
    waiting = [dump(r, *REDUCE) for r in range(3)]
    late = dump(3, *COMPUTE, active=True)
    assert only(diagnose([*waiting, late])).confidence == 0.6
    same = only(diagnose([*waiting, late, dump(3, *COMPUTE, active=True, at=90.0)]))
    assert (ranks(same), same.confidence) == ([3], 0.7) and "an older dump shows the same" in same.because
    moved = only(diagnose([*waiting, late, dump(3, "layers.py:backward", "train.py:main", active=True, at=90.0)]))
    assert (ranks(moved), moved.fault_class) == ([3], FaultClass.CANNOT_TELL) and "it moves" in moved.because
    assert "5 rounds of dumps of all processes, 10 s apart" in settle(moved)


def test_cause_comes_before_symptom() -> None:
    """Rank 6 sits in its data loader: its pipeline neighbour waits for it, and all others for both."""
    found = only(diagnose([*(dump(r, *REDUCE) for r in range(6)), dump(6, *LOADER), dump(7, *RECEIVE)]))
    assert ranks(found) == [6]


@pytest.mark.parametrize(
    "dumps",
    [
        [dump(r, *REDUCE) for r in range(8)],
        [dump(r, *COMPUTE, active=True) for r in range(8)],
        [dump(0, *REDUCE), *(dump(r, *COMPUTE, active=r % 2 == 0) for r in range(1, 8))],
        [dump(r, f"f{r}.py:f", "train.py:main") for r in range(8)],
        [dump(0, *COMPUTE)],
    ],
    ids=["all wait in one place", "all compute", "one is early", "all differ", "one at work"],
)
def test_no_one_is_accused(dumps: list[StackDump]) -> None:
    assert diagnose(dumps) == []
    assert f"trainer: {len(dumps)} stack" in summary(dumps)


def test_two_halves_are_undecided_and_state_what_would_settle_it() -> None:
    found = only(diagnose([dump(0, *REDUCE), dump(1, *LOADER)]))
    assert found.fault_class == FaultClass.CANNOT_TELL and "some seconds later" in settle(found)
    both_wait = only(diagnose([*(dump(r, *REDUCE) for r in range(2)), *(dump(r, *GATHER) for r in (2, 3))]))
    assert both_wait.fault_class == FaultClass.CANNOT_TELL and "Flight Recorder" in settle(both_wait)


def test_a_pipeline_that_waits_for_a_stage_at_work_is_no_fault_by_itself() -> None:
    dumps = [*(dump(r, *RECEIVE) for r in range(3)), dump(3, *COMPUTE, active=True)]
    assert only(diagnose(dumps)).fault_class == FaultClass.CANNOT_TELL
    stuck = [*dumps, dump(3, *COMPUTE, active=True, at=90.0)]
    assert (ranks(only(diagnose(stuck))), only(diagnose(stuck)).fault_class) == ([3], FaultClass.HANG)


def test_a_single_waiting_dump_is_undecided() -> None:
    found = only(diagnose([dump(0, *REDUCE)]))
    assert found.fault_class == FaultClass.CANNOT_TELL and "that it waits for" in settle(found)


def test_a_majority_at_one_place_twice_waits_for_the_others() -> None:
    """Reading a value from a GPU shows no wait: 7 of 8 stand in their own code, and in an older dump, too."""
    item = ("train.py:log_loss", "train.py:main")
    now = [*(dump(r, *item, active=True) for r in range(7)), dump(7, *LOADER)]
    assert diagnose(now) == [], "in one look they may all be at work"
    older = [*(dump(r, *item, active=True, at=90.0) for r in range(7)), dump(7, *LOADER, at=90.0)]
    found = only(diagnose([*now, *older]))
    assert ranks(found) == [7] and "7 of 8 trainer processes wait for others (log_loss (train.py)" in found.because
    assert diagnose([*now, *older[1:], dump(0, *COMPUTE, at=90.0)]) == [], "one of them moves"
    whole = [dump(r, *REDUCE, at=at) for r in range(8) for at in (90.0, 100.0)]
    assert only(diagnose(whole)).fault_class == FaultClass.CANNOT_TELL


def test_a_rank_without_a_dump_is_evidence_when_all_others_wait() -> None:
    dumps = [dump(r, *REDUCE) for r in range(8) if r != 5]
    gap = only(diagnose(dumps))
    assert (ranks(gap), gap.fault_class) == ([5], FaultClass.HANG) and "no dump of trainer rank 5" in gap.because
    last = [dump(r, *REDUCE) for r in range(7)]
    assert diagnose(last) == [], "nobody said that there is a rank 7"
    known = Topology(world_size=8, nodes={7: "m03"})
    assert [(s.rank, s.node) for s in only(diagnose(last, topology=known)).suspects] == [(7, "m03")]
    assert ranks(only(diagnose([dump(r, *REDUCE, world_size=8) for r in range(7)]))) == [7]
    few = only(diagnose(last[:3], topology=known))
    assert few.fault_class == FaultClass.CANNOT_TELL and "dumps of the other processes" in settle(few)


def test_a_stalled_rank_explains_more_than_a_missing_dump() -> None:
    found = only(diagnose([*(dump(r, *REDUCE) for r in range(6)), dump(7, *LOADER)]))
    assert ranks(found) == [7] and found.confidence == 0.6 and "no dump of trainer rank 6" in found.because


def test_ranks_numbered_per_replica_hide_no_process() -> None:
    dumps = [dump(r, *REDUCE, replica=f"trainer/{i}") for i in range(2) for r in (0, 2)]
    assert diagnose(dumps) == []


def test_roles_are_judged_apart() -> None:
    rollouts = [dump(r, "queue.py:get", "engine.py:loop", role="rollout") for r in range(8)]
    trainers = [*(dump(r, *REDUCE) for r in range(3)), dump(3, *LOADER)]
    found = only(diagnose([*rollouts, *trainers]))
    assert [(s.role, s.rank) for s in found.suspects] == [("trainer", 3)]


# --- groups -------------------------------------------------------------------------------------------------------

GRID = Topology(world_size=32, sizes=(("tp", 2), ("pp", 4), ("dp", 4)), nodes={r: f"m{r // 2:02d}" for r in range(32)})


def test_the_published_picture_names_the_pipeline_and_where_to_look_first() -> None:
    """After Fig. 7 of ByteRobust (arXiv 2509.16293): TP 2, PP 4, DP 4 on 16 machines of two GPUs. Most wait to reduce
    gradients, machines 12 to 14 for their pipeline neighbour, machine 15 in a tensor-parallel gather."""
    dumps = [dump(r, *(SYNC if r < 24 else RECEIVE if r < 30 else GATHER)) for r in range(32)]
    found = only(diagnose(dumps, topology=GRID))
    assert sorted({s.node for s in found.suspects}) == ["m12", "m13", "m14", "m15"]
    assert ranks(found)[:2] == [30, 31], "the innermost wait comes first"
    group = next(e for e in found.evidence if e.kind == PARALLEL_GROUP)
    assert group.values == {"num_members": 8, "num_likely_innocent": 6}
    assert "the tp x pp group of dp 3, 8 processes on 4 nodes, of which 6 are likely innocent" in found.because
    assert "check first trainer rank 30 (node m15), trainer rank 31 (node m15)" in found.because
    assert found.fault_class == FaultClass.HANG and found.confidence == 0.5


def test_the_smallest_group_is_taken_of_node_replica_grid_and_list() -> None:
    def members(outliers: Sequence[int], topology: Topology | None, **more: object) -> list[int]:
        dumps = [dump(r, *(RECEIVE if r in outliers else SYNC), **more) for r in range(32)]
        return sorted(r for r in ranks(only(diagnose(dumps, topology=topology))) if r is not None)

    assert members([24, 25], GRID) == [24, 25], "the two of one node, which is their tensor group"
    assert members([24, 30], GRID) == [24, 26, 28, 30], "one pipeline"
    assert members([1, 9], GRID) == [1, 9, 17, 25], "one data-parallel group"
    assert members([3, 20], GRID) == [3, 20], "nothing but the whole holds both"
    listed = Topology(groups=(ParallelGroup(axis="ep", index=4, ranks=frozenset({3, 20, 21})),))
    assert members([3, 20], listed) == [3, 20, 21]
    assert members([3, 20], None) == [3, 20]


def test_a_group_can_come_of_file_names() -> None:
    dumps = [
        dump(r, *(RECEIVE if r in (4, 6) else SYNC), axes=(("dp", r // 4), ("pp", r % 4)), node="") for r in range(8)
    ]
    extra = [dump(8 + r, *SYNC, axes=(("dp", 2), ("pp", r)), node="") for r in range(4)]
    found = only(diagnose([*dumps, *extra]))
    assert sorted(r or 0 for r in ranks(found)) == [4, 5, 6, 7] and "the pp group of dp 1" in found.because


# --- rounds -------------------------------------------------------------------------------------------------------

LAYERS = ("attention", "mlp", "norm", "embed", "head")


def looks(*rounds: dict[int, Sequence[str]], num: int = 8, **more: object) -> list[StackDump]:
    """A round every ten seconds: ranks at these places, all others in one collective."""
    return [
        dump(r, *some.get(r, REDUCE), active=r in some, at=100.0 + 10 * n, **more)
        for n, some in enumerate(rounds)
        for r in range(num)
        if some.get(r, REDUCE)
    ]


def work(n: int) -> tuple[str, ...]:
    """In another layer in each round."""
    return (f"layers.py:{LAYERS[n % 5]}", "train.py:step", "train.py:main")


def late(*ranks_of_rounds: Sequence[int], num: int = 8) -> list[StackDump]:
    """These ranks compute in these rounds, each time elsewhere; in a round without any nobody waits."""
    everybody = [dict.fromkeys(range(num), work(n)) for n in range(len(ranks_of_rounds))]
    return looks(
        *(dict.fromkeys(r, work(n)) if r else everybody[n] for n, r in enumerate(ranks_of_rounds)),
        num=num,
    )


def rounds_told(found: Finding) -> dict[str, float]:
    return next(e.values for e in found.evidence if e.kind == ROUNDS)


def test_a_process_that_blocks_most_rounds_and_moves_is_slow() -> None:
    found = only(diagnose(late([3], [3], [], [3], [3])))
    assert (ranks(found), found.fault_class, found.confidence) == ([3], FaultClass.SLOW, 0.7)
    assert "the others wait for trainer rank 3 (node m01) in 4 of 5 rounds of stacks" in found.because
    reported = next(e for e in found.evidence if e.kind == ROUNDS)
    assert reported.text == "trainer rank 3 (node m01): flagged in 4 of 5 rounds: 1, 2, 4, 5"
    assert reported.values == {"num_flagged": 4, "num_rounds": 5, "chance_ratio": pytest.approx(8 / 8**4, rel=0.01)}
    assert (found.onset, found.detected_at) == (100.0, 140.0)
    assert summary(late([3], [3])).startswith("trainer: 8 stacks, the last of 2 rounds: 7 wait in a collective")


@pytest.mark.parametrize(
    ("outliers", "fault_class", "wanted"),
    [
        (([3], [3], [3], [], []), FaultClass.SLOW, [3]),
        (([3], [3], [3, 6], [3], [6]), FaultClass.SLOW, [3]),
        (([3], [3], [3]), FaultClass.SLOW, [3]),
        (([3], [], [3], [], []), FaultClass.CANNOT_TELL, [3]),
        (([3], [3]), FaultClass.CANNOT_TELL, [3]),
        (([], [], [], [], [3]), FaultClass.CANNOT_TELL, [3]),
        (([3], [6], [3], [6], [3], [6]), FaultClass.CANNOT_TELL, [3, 6]),
        (([3], [3], [3], [], [], []), FaultClass.CANNOT_TELL, [3]),
        (([3], [], [], [], []), None, []),
        (([3], [], []), None, []),
        (([3], [6], [1], [4], [7]), None, []),
        (([], [], [], [], []), None, []),
    ],
    ids=[
        "three of five",
        "others now and then",
        "three of three",
        "two of five",
        "both of two",
        "the last only",
        "a tie",
        "three of six",
        "one noisy round",
        "one of three",
        "always another",
        "nobody",
    ],
)
def test_flags_are_counted(outliers: tuple[list[int], ...], fault_class: FaultClass | None, wanted: list[int]) -> None:
    found = diagnose(late(*outliers, num=16))
    assert [(f.fault_class, ranks(f)) for f in found] == ([(fault_class, wanted)] if fault_class else [])
    for f in found:
        num = sum(wanted[0] in r for r in outliers)
        assert f"in {num} of {len(outliers)} rounds" in f.because and rounds_told(f)["num_flagged"] == num
        assert ("5 rounds of dumps of all processes, 10 s apart" in settle(f)) == (fault_class != FaultClass.SLOW)


def test_two_that_take_turns_are_named_by_what_they_share() -> None:
    found = only(diagnose(late([6], [7], [6], [7], [6], num=16)))
    assert (ranks(found), found.fault_class) == ([6, 7], FaultClass.SLOW)
    assert "the others wait for node m03 in 5 of 5 rounds" in found.because
    twice = only(diagnose(late([20], [22], num=32), topology=GRID))
    assert (ranks(twice), twice.fault_class) == ([20, 22], FaultClass.CANNOT_TELL), (
        "nobody else of their group was late"
    )
    together = only(diagnose(late(*[[6, 7]] * 5, num=16)))
    assert ranks(together) == [6, 7] and "node m03 in 5 of 5" in together.because
    apart = only(diagnose(late(*[[3, 8]] * 5, num=16)))
    assert ranks(apart) == [3, 8] and "trainer rank 3 (node m01), trainer rank 8 (node m04) in 5 of 5" in apart.because
    many = only(diagnose(late(*[range(0, 64, 5)] * 5, num=64)))
    assert ranks(many) == list(range(0, 64, 5)) and many.fault_class == FaultClass.SLOW


def test_the_same_parallel_group_elsewhere_in_most_rounds_is_named_as_a_whole() -> None:
    """As in the published picture, in a job that goes on: some of one pipeline group are behind in each round."""

    def behind(n: int) -> dict[int, Sequence[str]]:
        return {24 + (n + k) % 8: (f"{C10D}:irecv", f"p2p.py:recv_{n}", "train.py:main") for k in range(5)}

    dumps = looks(*(behind(n) for n in range(5)), num=32)
    found = only(diagnose(dumps, topology=GRID))
    assert sorted(r or 0 for r in ranks(found)) == list(range(24, 32))
    assert (found.fault_class, found.confidence) == (FaultClass.SLOW, 0.5)
    assert "in 5 of 5 rounds of stacks most of them at one place and those elsewhere in the tp x pp group of dp 3" in (
        found.because
    )
    assert next(e.values for e in found.evidence if e.kind == PARALLEL_GROUP)["num_members"] == 8


def test_a_process_at_one_place_over_all_rounds_is_hung() -> None:
    healthy = late([], [])
    later = [replace(d, at=d.at + 20) for d in looks({3: LOADER}, {3: LOADER}, {3: LOADER})]
    found = only(diagnose([*healthy, *later]))
    assert (ranks(found), found.fault_class, found.confidence) == ([3], FaultClass.HANG, 0.9)
    assert rounds_told(found) == {"num_flagged": 3, "num_rounds": 5}
    assert "at the same place in the last 3 of 5 rounds" in str(found.evidence)
    slow_before = looks({3: work(0)}, {3: work(1)}, {3: LOADER}, {3: LOADER}, {3: LOADER})
    assert only(diagnose(slow_before)).fault_class == FaultClass.HANG
    assert only(diagnose(slow_before[:-8])).fault_class == FaultClass.SLOW, (
        "two looks may hit it at one place by chance"
    )
    flowing = looks({3: LOADER, 1: RECEIVE}, {3: LOADER}, {3: LOADER}, {3: LOADER})
    assert only(diagnose(flowing)).fault_class == FaultClass.HANG, "what was under way came to rest"


def test_a_job_that_goes_on_does_not_hang_wherever_its_slowest_stands() -> None:
    """A slow data loader looks like each time; that the others leave their wait shows that it moves."""
    found = only(diagnose(looks({3: LOADER}, {3: LOADER}, {3: LOADER}, {3: LOADER, 1: work(0)}, {3: LOADER})))
    assert (ranks(found), found.fault_class) == ([3], FaultClass.SLOW) and "slow, not hung" in found.because


def test_of_two_the_one_who_is_always_late_is_reported() -> None:
    five, six = (diagnose(late(*[[1]] * num, num=2)) for num in (5, 6))
    assert (ranks(only(five)), only(five).fault_class) == ([1], FaultClass.CANNOT_TELL)
    assert (ranks(only(six)), only(six).fault_class) == ([1], FaultClass.SLOW)
    still = only(diagnose(looks(*[{1: LOADER}] * 5, num=2)))
    assert still.fault_class == FaultClass.CANNOT_TELL and still.because.endswith(" does not")


def test_a_healthy_pipeline_is_not_slow_in_any_number_of_rounds() -> None:
    rounds = [{r: RECEIVE if r != 3 else work(n) for r in range(4)} for n in range(5)]
    assert (
        diagnose([replace(d, threads=(thread(*frames_of(d), active=d.rank == 3),)) for d in looks(*rounds, num=4)])
        == []
    )


def test_a_pipeline_stage_that_stands_while_its_pipeline_goes_on_does_not_hang() -> None:
    def look(n: int, waits: Sequence[str]) -> list[StackDump]:
        stage = dump(3, *COMPUTE, active=True, at=100.0 + 10 * n)
        return [*(dump(r, *waits, at=100.0 + 10 * n) for r in range(3)), stage]

    other = (f"{C10D}:isend", *RECEIVE[1:])
    assert diagnose([*look(0, RECEIVE), *look(1, other), *look(2, RECEIVE)]) == []
    assert only(diagnose([*look(0, RECEIVE), *look(1, RECEIVE)])).fault_class == FaultClass.HANG


def test_processes_read_one_after_the_other_make_no_rounds() -> None:
    dumps = [replace(d, at=1000.0 + 60 * (d.rank or 0) + d.at) for d in late([3], [3], [3], [3], [3])]
    assert only(diagnose(dumps)).fault_class == FaultClass.CANNOT_TELL
    assert "rounds" not in summary(dumps)


def frames_of(d: StackDump) -> list[str]:
    return [f"{f.file}:{f.name}" for f in d.threads[0].frames]


def test_a_process_without_a_current_dump_is_missing() -> None:
    """It computed while it was there: what an old dump shows is not what it does now."""
    rounds = [{5: work(0)}, {5: ()}, {5: ()}]
    found = only(diagnose(looks(*rounds)))
    assert (ranks(found), found.fault_class) == ([5], FaultClass.HANG) and "no dump of trainer rank 5" in found.because
    arrived = diagnose([*late([]), *(replace(d, at=110.0) for d in looks({5: ()}))])
    assert only(arrived).fault_class == FaultClass.CANNOT_TELL, "the others may just have come"


def test_outliers_at_random_are_seldom_named() -> None:
    """Somebody is the last in every round, by lot: in at most a tenth of such jobs is anybody slow, of all the
    groups."""
    rng = random.Random(5)
    named = 0
    for _ in range(60):
        found = diagnose(late(*([rng.randrange(32)] for _ in range(5)), num=32), topology=GRID)
        named += any(f.fault_class == FaultClass.SLOW for f in found)
    assert named <= 6


@pytest.mark.parametrize(("flags", "rounds", "num"), [(3, 5, 8), (4, 4, 4), (2, 2, 16), (5, 5, 6)])
def test_chance_is_that_of_drawing_lots(flags: int, rounds: int, num: int) -> None:
    hits = [max(Counter(lots).values()) >= flags for lots in product(range(num), repeat=rounds)]
    assert at_least(1, num * often(flags, rounds, 1 / num)) == pytest.approx(sum(hits) / len(hits), rel=0.1)


@pytest.mark.parametrize(("num", "expected"), [(1, 0.1), (3, 0.5), (12, 4.0), (2000, 900.0)])
def test_at_least_is_what_is_left_of_fewer(num: int, expected: float) -> None:
    fewer = math.fsum(math.exp(k * math.log(expected) - expected - math.lgamma(k + 1)) for k in range(num))
    assert at_least(num, expected) == pytest.approx(1 - fewer, abs=1e-9)
    assert (at_least(num, 0.0), at_least(num, num + 1.0)) == (0.0, 1.0)


def saved(folder: Path, names: str, outliers: Sequence[int], num: int = 8) -> list[StackDump]:
    """Dumps of that many rounds, as files that lost their times; `names`: of `rank` and `round`."""
    for n, slow in enumerate(outliers):
        for r in range(num):
            file = folder / names.format(rank=r, round=n + 1)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(py_spy_json(*(work(n) if r == slow else REDUCE), pid=50 + r)))
            os.utime(file, ns=(0, r * 1000 + 7 * n % 3))
    return [read(f) for f in sorted(folder.rglob("*.json"))]


@pytest.mark.parametrize(
    "names",
    [
        "round_{round}/trainer_rank{rank}.json",
        "{round}/rank_{rank}.json",
        "2026112110000{round}/rank_{rank}.json",
        "node-{rank}/round-{round}/rank{rank}.json",
        "round-{round}/node-{rank}/rank{rank}.json",
        "trainer-0_rank{rank}_round{round}.json",
        "rank_{rank}.{round}.json",
        "rank_{rank}_17{rank}000{round}.json",
        "look{round}-node-{rank}-pid{rank}9.json",
        "round{round}/{rank}.json",
    ],
)
def test_rounds_are_reported_by_names(tmp_path: Path, names: str) -> None:
    dumps = saved(tmp_path, names, [3, 3, 3, 3, 3])
    found = only(diagnose(dumps[::-1]))
    assert found.fault_class == FaultClass.SLOW and found == only(diagnose(dumps))
    assert rounds_told(found)["num_flagged"] == 5 and len(found.suspects) == 1


def test_rounds_are_reported_by_time_where_some_dumps_are_missing() -> None:
    dumps = [d for d in late(*[[3]] * 5) if (d.rank, d.at) not in ((0, 100.0), (5, 120.0), (6, 140.0))]
    jitter = [replace(d, at=d.at + (d.rank or 0) / 10, path=f"{i}") for i, d in enumerate(dumps)]
    found = only(diagnose(jitter))
    assert (ranks(found), rounds_told(found)["num_flagged"]) == ([3], 5)


def test_dumps_that_cannot_be_put_into_rounds_are_judged_by_the_newest() -> None:
    dumps = [*looks({3: LOADER}), dump(0, *REDUCE, at=99.9), dump(1, *REDUCE, at=99.0), dump(1, *REDUCE, at=98.0)]
    assert (ranks(only(diagnose(dumps))), only(diagnose(dumps)).fault_class) == ([3], FaultClass.HANG)


PLACES = (REDUCE, GATHER, RECEIVE, LOADER, COMPUTE, ("layers.py:mlp", "train.py:main"))


@given(
    st.lists(
        st.builds(
            lambda rank, texts, at, pid, number, node: dump(
                rank, *texts, at=at, pid=pid, round_index=number, node=node, active=texts is COMPUTE
            ),
            st.integers(0, 5),
            st.sampled_from(PLACES),
            st.sampled_from((0.0, 10.0, 20.0, 30.0, 31.0, 5000.0)),
            st.sampled_from((None, 1, 2)),
            st.sampled_from((None, 1, 2, 3)),
            st.sampled_from(("", "m1")),
        ),
        min_size=1,
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_of_files_changes_nothing(dumps: list[StackDump], rng: random.Random) -> None:
    dumps = [replace(d, path=f"{n}.json", rank=d.rank if n % 7 else None) for n, d in enumerate(dumps)]
    shuffled = rng.sample(dumps, len(dumps))
    for topology in (None, Topology(world_size=8, sizes=(("tp", 2), ("dp", 4)), pids={6: 1})):
        assert diagnose(shuffled, topology=topology) == diagnose(dumps, topology=topology)
        assert summary(shuffled, topology=topology) == summary(dumps, topology=topology)


def test_a_file_given_twice_is_no_second_round() -> None:
    dumps = [dump(r, *(LOADER if r == 3 else REDUCE)) for r in range(8)]
    copied = [replace(d, path=f"copy/{d.path}") for d in dumps]
    assert only(diagnose([*dumps, *copied])).because == only(diagnose(dumps)).because


def test_dumps_of_an_earlier_process_are_ignored() -> None:
    now = [dump(r, *REDUCE, pid=20 + r) for r in range(7)]
    before = [dump(r, *work(r), pid=10 + r, at=90.0) for r in range(8)]
    found = only(diagnose([*before, *now, dump(7, *LOADER, pid=27)]))
    assert (ranks(found), found.fault_class, found.confidence) == ([7], FaultClass.HANG, 0.8)
    yesterday = [dump(r, *work(r), at=-80_000.0) for r in range(8)]
    assert only(diagnose([*yesterday, *looks({7: LOADER})])).fault_class == FaultClass.HANG


def test_processes_of_containers_that_share_a_pid_are_not_one(tmp_path: Path) -> None:
    for names in ("pod-{}.json", "{}/stack.json", "node-1/{}-pid1.json", "stack_{}.json"):
        dumps = []
        for n, texts in enumerate((REDUCE, REDUCE, LOADER)):
            file = tmp_path / names.format("abc"[n] if "node" in names else n)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(py_spy_json(*texts, pid=1)))
            dumps.append(read(file))
        assert "2 of 3" in only(diagnose(dumps)).because, names


# --- places -------------------------------------------------------------------------------------------------------


def test_the_same_wait_reached_in_other_ways_is_one_place() -> None:
    below = ("threading.py:wait", "threading.py:acquire", *REDUCE)
    above = (*REDUCE[:-1], "logging_wrapper.py:rank_zero", "train.py:main")
    assert len({stack_of(dump(0, *texts)).key for texts in (REDUCE, below, above)}) == 1
    other_caller = (REDUCE[0], WRAPPER, "layers.py:row_parallel", "layers.py:forward")
    assert stack_of(dump(0, *other_caller)).key != stack_of(dump(0, *REDUCE)).key


@pytest.mark.parametrize(
    ("texts", "doing"),
    [
        ((f"{C10D}:broadcast", "train.py:main"), StackActivity.COLLECTIVE),
        (("numpy/lib/stride_tricks.py:broadcast_to", "train.py:main"), StackActivity.STILL),
        (("functional.py:reduce", "train.py:main"), StackActivity.STILL),
        (
            ("torch/autograd/graph.py:_engine_run_backward", "torch/_tensor.py:Tensor.backward", "train.py:main"),
            StackActivity.BACKWARD,
        ),
        ((f"{C10D}:_store_based_barrier", f"{C10D}:init_process_group", "train.py:main"), StackActivity.RENDEZVOUS),
        (("torch/cuda/streams.py:synchronize", "train.py:main"), StackActivity.DEVICE),
        (("libcuda.so.1:cuStreamSynchronize", "train.py:item"), StackActivity.DEVICE),
        (("libtorch_cuda.so:c10d::ProcessGroupNCCL::WorkNCCL::wait", "train.py:main"), StackActivity.COLLECTIVE),
        (("Reducer.all_reduce_gradients", "train.py:main"), StackActivity.COLLECTIVE),
        (("train.py:flatten", "train.py:all_reduce_gradients", "train.py:main"), StackActivity.STILL),
    ],
)
def test_activities_of_a_stack(texts: tuple[str, ...], doing: StackActivity) -> None:
    texts = tuple(t if ".py:" in t or ".so" in t else f"train.py:{t}" for t in texts)
    assert stack_of(dump(0, *texts)).doing == doing


def test_the_most_informative_thread_represents_its_process() -> None:
    loop = thread("selectors.py:select", "asyncio/base_events.py:run_forever", "worker.py:main")
    trains = thread(*REDUCE, name="Thread-2 (train)")
    helpers = (
        thread("threading.py:wait", "multiprocessing/queues.py:_feed", name="QueueFeederThread"),
        thread("concurrent/futures/thread.py:_worker", name="ThreadPoolExecutor-0_0"),
        thread("agent.py:beat", "threading.py:run", name="Thread-9 (beat)"),
        thread("rolecall/agent/reporter/sender.py:ReporterClient._run", name="rolecall-sender"),
        thread(name="Dummy-1"),
    )
    assert stack_of(StackDump(path="a", at=0.0, threads=(loop, *helpers))).doing == StackActivity.IO
    in_thread = StackDump(path="a", at=0.0, threads=(loop, *helpers, trains))
    assert stack_of(in_thread).doing == StackActivity.COLLECTIVE
    for idle in (
        thread("ray/_private/worker.py:Worker.main_loop"),
        thread("threading.py:Thread.join", "train.py:main"),
    ):
        assert stack_of(StackDump(path="a", at=0.0, threads=(idle, *helpers, trains))).doing == StackActivity.COLLECTIVE
    task = thread("reward.py:score", "ray/_private/worker.py:Worker.main_loop")
    assert stack_of(StackDump(path="a", at=0.0, threads=(task, *helpers, trains))).doing == StackActivity.STILL
    in_main = StackDump(path="a", at=0.0, threads=(thread(*COMPUTE), *helpers, thread(*REDUCE, name="Thread-3")))
    assert stack_of(in_main).doing == StackActivity.STILL, "the main thread comes first where it has something to say"
    starved = (thread(*COMPUTE), thread("tokenizer.py:encode", name="Thread-4", active=True, owns_gil=True))
    found = only(diagnose([*(dump(r, *REDUCE) for r in range(3)), dump(3, threads=starved)]))
    assert [e.text for e in found.evidence if e.kind == "gil"] == [
        "trainer rank 3 (node m01): another thread holds the GIL: Thread-4 in encode (tokenizer.py)"
    ]


def test_a_main_thread_without_frames_leaves_the_word_to_any_other() -> None:
    helper = thread("agent.py:beat", "threading.py:run", name="Thread-9 (beat)")
    assert stack_of(StackDump(path="a", at=0.0, threads=(thread(), helper))).at == "beat (agent.py)"


@pytest.mark.parametrize(
    ("file", "name", "wanted"),
    [
        (f"/opt/venv/lib/python3.11/site-packages/{C10D}", "all_reduce", f"all_reduce ({C10D})"),
        ("/usr/lib/python3/dist-packages/yaml/reader.py", "peek", "peek (yaml/reader.py)"),
        ("/usr/lib/python3.12/threading.py", "Thread.run", "Thread.run (threading.py)"),
        ("/home/a/run-7/train.py", "main", "main (train.py)"),
        ("<ipython-input-3-4f2a>", "<module>", "<module> (<ipython-input>)"),
        ("/tmp/ipykernel_71/12.py", "go", "go (<ipython-input>)"),
        ("<eval_with_key>.17", "forward", "forward (<eval_with_key>)"),
        ("/tmp/torchinductor_a/xy/cxy7.py", "call", "call (<torchinductor>)"),
        ("<string>", "__compiled_fn_12", "__compiled_fn (<string>)"),
        ("train.py", "torch_dynamo_resume_in_step_at_88", "torch_dynamo_resume_in_step_at (train.py)"),
        ("libtorch.so", "c10d::Work<float>::wait(long)", "c10d::Work (libtorch.so)"),
        ("libc.so.6", "0x7f12ab", None),
    ],
)
def test_frames_look_the_same_in_each_process(file: str, name: str, wanted: str | None) -> None:
    frame = normal_frame(file, name)
    assert (str(frame) if frame else None) == wanted


# --- real processes -----------------------------------------------------------------------------------------------

WORKER = """
import socket, sys, threading, time
near, far = socket.socketpair()
lock = threading.Lock()

def all_reduce():
    near.recv(1)

def read_cache():
    with lock:
        pass

def augment():
    time.sleep(60)

def step(what):
    what()

lock.acquire()
threading.Thread(target=time.sleep, args=(60,), name="heartbeat", daemon=True).start()
print("ready", flush=True)
step({"wait": all_reduce, "lock": read_cache, "sleep": augment}[sys.argv[1]])
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Processes in a wait like a collective's, at a lock, and asleep. They end by themselves after a minute."""
    script = tmp_path_factory.mktemp("job") / "train.py"
    script.write_text(WORKER)
    started = {
        name: subprocess.Popen([sys.executable, "-I", script, name.rstrip("012")], stdout=subprocess.PIPE, text=True)
        for name in ("wait0", "wait1", "wait2", "lock", "sleep")
    }
    try:
        for process in started.values():
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.communicate(timeout=10)


def py_spy(process: subprocess.Popen[str], path: Path, function: str) -> StackDump:
    """The first dump in which the main thread waits in `function`: "ready" is said on the way there."""
    seen: StackDump | None = None

    def waits() -> bool:
        nonlocal seen
        seen = py_spy_once(process, path)
        main = seen.threads[0]
        return not main.active and bool(main.frames) and main.frames[0].name == function

    eventually(waits, f"{path.name} waits in {function}")
    assert seen is not None
    return seen


def py_spy_once(process: subprocess.Popen[str], path: Path) -> StackDump:
    kind = ["--json"] if path.suffix == ".json" else []
    program = Path(sys.executable).parent / "py-spy"
    if not program.exists():
        pytest.skip("py-spy is not installed beside this Python")
    command = [str(program), "dump", "--nonblocking", *kind, "--pid", str(process.pid)]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"py-spy may not look at processes here: {done.stderr.decode()[:200]}")
    path.write_bytes(done.stdout)
    assert is_dump(path)
    return read(path)


def test_real_processes(real: dict[str, subprocess.Popen[str]], tmp_path: Path) -> None:
    """Three wait; the fourth is at a lock, asleep, or stopped where nobody can look. Half of the dumps are text."""
    waiting = [
        py_spy(real[f"wait{r}"], tmp_path / f"trainer-{r}_rank{r}.{'json' if r else 'txt'}", "all_reduce")
        for r in range(3)
    ]
    assert diagnose(waiting) == []
    for name, kind, function in (("lock", "txt", "read_cache"), ("sleep", "json", "augment")):
        odd = py_spy(real[name], tmp_path / f"trainer-3_rank3_{name}.{kind}", function)
        found = only(diagnose([*waiting, odd]))
        assert [(s.replica, s.rank) for s in found.suspects] == [("trainer/3", 3)]
        words = f"is stuck in its own code: {function} (train.py), called by step (train.py)"
        assert words in found.because and "all_reduce (train.py), called by step (train.py)" in found.because
    real["wait2"].send_signal(signal.SIGSTOP)
    stopped = py_spy(real["wait2"], tmp_path / "rank_2.json", "all_reduce")
    assert stack_of(stopped).doing == StackActivity.COLLECTIVE, "a stopped process looks as it did"
    absent = only(diagnose([*waiting[:2], waiting[2]], topology=Topology(world_size=4)))
    assert [s.rank for s in absent.suspects] == [3]


STEPPER = """
import sys

def all_reduce():
    print("ready", flush=True)
    return sys.stdin.readline().strip()

def attention():
    print("ready", flush=True)
    return sys.stdin.readline().strip()

def mlp():
    print("ready", flush=True)
    return sys.stdin.readline().strip()

def step(what):
    return {"wait": all_reduce, "attention": attention, "mlp": mlp}[what]()

what = "wait"
while what:
    what = step(what)
"""


def test_real_processes_over_five_rounds(tmp_path: Path) -> None:
    """The fourth computes in another layer in each round, once it waits like the others: slow, in four of five."""
    script = tmp_path / "train.py"
    script.write_text(STEPPER)
    started = [
        subprocess.Popen([sys.executable, "-I", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    dumps = []
    try:
        for n, slow in enumerate(("attention", "mlp", "wait", "attention", "mlp")):
            for r, process in enumerate(started):
                assert process.stdin is not None and process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                layer = slow if r == 3 else "wait"
                process.stdin.write(f"{layer}\n")
                process.stdin.flush()
                assert process.stdout.readline() == "ready\n"
                folder = tmp_path / f"round-{n + 1}"
                folder.mkdir(exist_ok=True)
                function = "all_reduce" if layer == "wait" else layer
                dumps.append(py_spy(process, folder / f"trainer-0_rank{r}.json", function))
                process.stdin.write("wait\n")
                process.stdin.flush()
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=10)
    found = only(diagnose(dumps))
    assert (ranks(found), found.fault_class) == ([3], FaultClass.SLOW)
    assert "the others wait for trainer/0 rank 3 in 4 of 5 rounds" in found.because
    assert "in its own code: mlp (train.py), called by step (train.py)" in found.because
