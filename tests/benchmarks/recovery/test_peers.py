"""The chaos schedule in other systems: which faults they meet, what counts as found, named and cured, and the report."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery.chaos import schedule as chaos
from benchmarks.recovery.peers import schedule, scoring
from benchmarks.recovery.peers.jobs import NUM_REPLICAS
from benchmarks.recovery.peers.loop import Attempt, Progress, Worker, loss_of, make_model, read_workers
from benchmarks.recovery.peers.report import report, side_by_side
from benchmarks.recovery.peers.scoring import Said

AT = 1000.0  # wall seconds of the injection


def fault(kind: str = "trainer-kill") -> chaos.Fault:
    return chaos.Fault(number=0, name="a row", role="trainer", kind=kind, how="x", seed=1)


def worker(rank: int, pid: int, steps: Sequence[tuple[float, int]], *, discarded: Sequence[float] = ()) -> Worker:
    """`steps`: (seconds from the injection, step); `discarded`: seconds of those that were not committed."""
    attempts = [Attempt(wall_at=AT + at, step=n, committed=at not in discarded, loss=0.5) for at, n in steps]
    return Worker(rank=rank, pid=pid, start_ticks=7, node="", attempts=attempts)


HIT = worker(0, 10, [(-2, 4), (-1, 5)])
OTHER = worker(1, 11, [(-2, 4), (-1, 5), (9, 6), (10, 7), (30, 8)], discarded=(9,))
BACK = worker(0, 12, [(20, 7), (29, 8)])


def judged(system: str, said: Sequence[Said], kind: str = "trainer-kill") -> dict[str, Any]:
    workers, others = [HIT, OTHER, BACK], {OTHER.key}
    return scoring.judged(system, fault(kind), HIT, others, AT, AT + 40, workers, {OTHER.key, BACK.key}, said)


def said(*lines: str, at: float = 2.0) -> list[Said]:
    return [Said(wall_at=AT + at, text=line) for line in lines]


TORCHRUN = "group-0: E1128 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: {}) of binary: python"
RAY = (
    "driver: (TrainController pid=5) [Rank {} Error Snippet]:",
    "driver: (TrainController pid=5) The actor died unexpectedly before finishing this task.",
)


def test_the_faults_are_those_of_the_chaos_schedule_against_a_trainer_in_its_order() -> None:
    faults = schedule.trainer_faults(3)
    assert [f for f in chaos.schedule(3) if f in faults] == faults
    assert {f.role for f in faults} == {"trainer"}
    assert {f.name for f in faults} == set(schedule.kinds())
    assert len(schedule.kinds()) == 11


def test_what_is_left_out_has_a_reason_and_nothing_is_both() -> None:
    left_out = dict(schedule.left_out())
    assert not set(left_out) & set(schedule.kinds())
    assert set(left_out) | set(schedule.kinds()) == set(chaos.MATRIX)
    assert all(" " in reason for reason in left_out.values())


def test_a_piece_goes_on_where_the_system_has_no_line() -> None:
    first, second, third = schedule.trainer_faults(0)[:3]
    lines = [
        {"line": "fault", "system": "torchft", "seed": 0, "number": first.number, "injected": True},
        {"line": "fault", "system": "ray-train", "seed": 0, "number": second.number, "injected": True},
        {"line": "fault", "system": "torchft", "seed": 1, "number": second.number, "injected": True},
    ]
    assert schedule.piece("torchft", 0, lines, 2) == [second, third]
    assert schedule.piece("torchft", 0, lines, 1, [third.name]) == [third]
    refused = {"line": "fault", "system": "torchft", "seed": 0, "number": second.number, "injected": False}
    assert schedule.piece("torchft", 0, [*lines, refused], 2) == [second, third]
    assert schedule.piece("torchft", 0, [*lines, refused, refused], 1) == [third]


@pytest.mark.parametrize(
    ("system", "lines", "kind", "named"),
    [
        ("torchft", [TORCHRUN.format(10)], "trainer-kill", True),
        ("torchft", [TORCHRUN.format(10)], "trainer-hang", False),  # it is not a hang that it describes
        ("torchft", [TORCHRUN.format(10), TORCHRUN.format(11)], "trainer-kill", False),
        ("torchft", ["group-1: should_commit=False enough_replicas=True, errored=Read error"], "trainer-kill", False),
        ("ray-train", [x.format(0) for x in RAY], "trainer-kill", True),
        ("ray-train", [x.format(1) for x in RAY], "trainer-kill", False),
        ("ray-train", [x.format(0) for x in RAY], "node-kill", False),
        ("ray-train", [RAY[0].format(0), "driver: its node has died"], "node-kill", True),
    ],
)
def test_named_right(system: str, lines: Sequence[str], kind: str, named: bool) -> None:
    found = judged(system, said(*lines), kind)
    assert found["named"] is named
    assert found["found_seconds"] == 2.0


def test_what_was_said_before_and_what_is_said_in_health_is_no_finding() -> None:
    healthy = said("group-1: should_commit=True enough_replicas=True, errored=None")
    found = judged("torchft", said(TORCHRUN.format(10), at=-5.0) + healthy)
    assert (found["found_seconds"], found["named"], found["quote"]) == (None, False, "")


def test_the_quote_has_who_and_what_without_colours_and_folders() -> None:
    found = judged(
        "torchft", said("group-0: failed (exitcode: -9) local_rank: 0 (pid: 10) of binary: /opt/x/bin/python")
    )
    assert found["quote"].endswith("(pid: 10) of binary: python")
    found = judged("ray-train", said(f"driver: \x1b[36m{RAY[0].format(0)}\x1b[0m", RAY[1]))
    assert "[Rank 0 Error Snippet]: ... " in found["quote"]
    assert found["quote"].endswith("died unexpectedly before finishing this task.")
    assert "\x1b" not in found["quote"]


def test_cured_when_all_make_steps_together_again() -> None:
    found = judged("torchft", [])
    assert found["cured_seconds"] == 30.0  # the first step of the other one after the replacement's first
    assert found["innocent"] == 0
    assert found["lost_steps"] == 1  # discarded
    assert found["stall_seconds"] == 20.0


def test_not_cured_while_only_the_others_or_only_the_hit_process_go_on() -> None:
    assert scoring.cured(fault(), HIT, AT, [HIT, OTHER]) is None
    slow = worker(0, 10, [(-1, 5), (5, 6), (9, 7)])
    assert scoring.cured(fault("trainer-slow"), slow, AT, [slow, OTHER]) is None


def test_wrong_numbers_are_cured_in_place_only_if_the_step_was_discarded() -> None:
    kept = worker(0, 10, [(-1, 5), (5, 6), (9, 7)])
    discarded = worker(0, 10, [(-1, 5), (5, 6), (9, 6)], discarded=(5,))
    assert scoring.cured(fault("trainer-nan"), kept, AT, [kept, OTHER]) is None
    assert scoring.cured(fault("trainer-nan"), discarded, AT, [discarded, OTHER]) == AT + 10


def test_steps_that_are_not_finite_cure_nothing() -> None:
    broken = replace(BACK, attempts=[replace(a, loss=float("nan")) for a in BACK.attempts])
    assert scoring.cured(fault(), HIT, AT, [HIT, OTHER, broken]) is None


def test_steps_since_the_checkpoint_are_lost_and_workers_that_end_are_innocent() -> None:
    ended, back = worker(1, 11, [(-2, 4), (-1, 5)]), [worker(0, 20, [(30, 3)]), worker(1, 21, [(31, 3)])]
    workers = [HIT, ended, *back]
    alive = {w.key for w in back}
    found = scoring.judged("ray-train", fault(), HIT, {ended.key}, AT, AT + 40, workers, alive, [])
    assert (found["lost_steps"], found["innocent"], found["cured_seconds"]) == (3, 1, 31.0)


def test_a_worker_writes_what_the_benchmark_reads(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 2, "node-a")
    progress.attempt(4, True, 0.25)
    progress.attempt(5, False, float("nan"))
    progress.close()
    [read] = read_workers(tmp_path)
    assert (read.rank, read.pid, read.node) == (2, os.getpid(), "node-a")
    assert [(a.step, a.committed, scoring.is_finite(a)) for a in read.attempts] == [(4, True, True), (5, False, False)]


def test_a_line_that_is_half_written_is_not_read(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 0)
    progress.attempt(1, True, 0.5)
    progress.close()
    [path] = (tmp_path / "progress").iterdir()
    path.write_text(path.read_text() + "1795852520.144 14 1 0.0")
    assert [a.step for a in read_workers(tmp_path)[0].attempts] == [1]


def test_an_injected_factor_reaches_the_gradient() -> None:
    model = make_model()
    usual, scaled = (float(loss_of(model, 0, 3, factor).detach()) for factor in (None, 1000.0))
    assert scaled == pytest.approx(1000 * usual, rel=1e-4)
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 2e6


def line(system: str, name: str, **changed: Any) -> dict[str, Any]:
    about = {
        "line": "fault",
        "system": system,
        "version": "1.0",
        "seed": 0,
        "number": 5,
        "name": name,
        "role": "trainer",
    }
    measured = {"found_seconds": 0.5, "cured_seconds": 9.0, "innocent": 0, "lost_steps": 1, "stall_seconds": 2.0}
    return {
        **about, "injected": True, "target": "trainer/1", "named": True, "quote": "exit -9", "reason": "",
        **measured, **changed,
    }  # fmt: skip


def test_the_report_says_of_each_fault_what_the_system_said() -> None:
    silent = {"named": False, "found_seconds": None, "cured_seconds": None, "quote": ""}
    refused = {"line": "fault", "system": "torchft", "seed": 0, "number": 9, "name": "NaN", "injected": False}
    lines = [line("torchft", "kill"), line("torchft", "stop", **silent), {**refused, "reason": "not in time"}]
    text = list(report(lines, []))
    assert (
        "| kill | 1 | 1 | 0.5 (worst 0.5, n=1) | 9.0 (worst 9.0, n=1) | 0 | 1 (worst 1, n=1) | 2.0 (worst 2.0, n=1) |"
        in text
    )
    assert "| stop | 1 | 0 | not: 1 | not: 1 | 0 | 1 (worst 1, n=1) | 2.0 (worst 2.0, n=1) |" in text
    assert "- 0/5, kill, trainer/1: `exit -9`" in text
    assert "- 0/5, stop, trainer/1: nothing was said" in text
    assert "- not injected: 0/9, NaN: not in time" in text


def test_systems_stand_side_by_side() -> None:
    chaos_line = line("rolecall", "kill", innocent=[])
    late = line("ray-train", "kill", cured_seconds=None, innocent=NUM_REPLICAS - 1)
    rows = side_by_side([late], [chaos_line])
    kill = next(row for row in rows if row.startswith("| kill |"))
    assert kill == (
        "| kill | named 1/1, found 0.5 s, cured 9.0 s, innocent 0 | not measured "
        "| named 1/1, found 0.5 s, not cured, innocent 2 |"
    )
