"""The chaos scoreboard: its schedule, what counts as named right, and what its report says of misses."""

import os
import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery.chaos import injection, schedule, scoring
from benchmarks.recovery.chaos.lines import read_lines
from benchmarks.recovery.chaos.report import report
from benchmarks.recovery.chaos.schedule import Fault
from benchmarks.recovery.chaos.scoring import Seen
from rolecall.core.clock import FakeClock
from rolecall.core.errors import JournalUnavailable
from rolecall.core.ids import NodeId, ReplicaId, process_start_ticks
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.faults.injector import KINDS
from rolecall.rl_runtime.processes import RunProcess
from tests.events import filled
from tests.views.test_incidents import Tale


def fault(kind: str, *, number: int = 0, role: str = "rollout") -> Fault:
    return Fault(number=number, name="a row", role=role, kind=kind, how="x", seed=1)


def seen(*suspects: str, found_at: float = 102.0, fault_class: str = "crash", cured_at: float | None = 105.0) -> Seen:
    about = {"suspects": suspects, "fault_class": fault_class, "because": f"{fault_class} of {suspects}"}
    return Seen(**about, found_at=found_at, cured_at=cured_at)  # type: ignore[arg-type]


# --- the schedule -----------------------------------------------------------------------------------------------------


def test_every_cell_is_known_to_the_injector_or_has_a_reason() -> None:
    assert len(schedule.MATRIX) >= 14
    for row in schedule.MATRIX.values():
        assert set(row) == set(schedule.ROLES)
    for _, _, kind, how in schedule.cells():
        assert how in KINDS[kind].hows, f"{kind}:{how}"
    for name, role, kind, how in schedule.cells():
        known = Fault(number=0, name=name, role=role, kind=kind, how=how, seed=0)
        assert known.of_helper or known.classes, f"no class is right for {kind}"


def test_the_schedule_is_the_same_for_the_same_seed_and_every_cell_comes_as_often() -> None:
    planned = schedule.schedule(3)
    assert planned == schedule.schedule(3) != schedule.schedule(4)
    assert [f.number for f in planned] == list(range(1000))
    times = Counter((f.name, f.role) for f in planned)
    assert len(times) == len(schedule.cells()) and max(times.values()) - min(times.values()) <= 1


def written(f: Fault, *, injected: bool = True, **more: Any) -> dict[str, Any]:
    about = {"line": "fault", "seed": 0, "number": f.number, "name": f.name, "role": f.role, "target": f"{f.role}/0"}
    nothing = {"innocent": [], "others_in_plans": [], "alarms": [], "problems": [], "reason": "", "named": True}
    nothing["met"] = True
    return {**about, "injected": injected, "found_seconds": 1.0, "cured_seconds": 2.0, **nothing, **more}


def test_a_piece_takes_what_is_left_and_no_more_lost_nodes_than_there_are_spare_ones() -> None:
    first = schedule.piece(0, [], 20)
    lines = [written(f) for f in first]
    second = schedule.piece(0, lines, 20)
    assert [f.number for f in first + second] == list(range(len(first) + len(second)))
    for size in (20, 1000):
        found = schedule.piece(0, [], size)
        assert sum(f.kind == "node-kill" for f in found) <= schedule.SPARE_NODES
    assert schedule.piece(1, lines, 20)[0].number == 0, "lines of another seed"
    assert [f.number for f in schedule.piece(0, lines, 3, first=500)] == [500, 501, 502]


def test_a_fault_that_was_refused_is_tried_again_once() -> None:
    (first,) = schedule.piece(0, [], 1)
    refused = written(first, injected=False)
    assert schedule.piece(0, [refused], 1) == [first]
    assert schedule.piece(0, [refused, refused], 1)[0].number == 1


def test_the_first_injection_of_a_fault_counts() -> None:
    f = schedule.schedule(0)[0]
    lines = [written(f, injected=False, reason="refused"), written(f, named=False), written(f, named=True)]
    assert schedule.counted(lines)[0, 0]["named"] is False


# --- judging ----------------------------------------------------------------------------------------------------------

HIT = frozenset({"rollout/1#2"})


@pytest.mark.parametrize(
    ("incidents", "named", "found", "cured", "reason"),
    [
        ([seen("rollout/1#2")], True, 2.0, 5.0, ""),
        ([], False, None, None, "no incident"),
        ([seen("rollout/0#1")], False, None, None, "another was named, rollout/0#1: crash of"),
        ([seen("rollout/1#2", "rollout/0#1")], False, None, None, "another was named"),
        ([seen()], False, None, None, "another was named, none"),
        ([seen("rollout/1#2", fault_class="slow")], False, None, 5.0, "called slow: "),
        ([seen("rollout/1#2", cured_at=None)], True, 2.0, None, "named, and not cured"),
        ([seen("rollout/1#2", found_at=99.0)], False, None, None, "no incident"),
        ([seen("rollout/1#2", fault_class="hang"), seen("rollout/1#2", found_at=104.0)], True, 4.0, 5.0, ""),
    ],
)
def test_a_fault_is_named_right_by_an_incident_of_what_was_hit_and_of_its_class(
    incidents: list[Seen], named: bool, found: float | None, cured: float | None, reason: str
) -> None:
    told = scoring.judged(fault("rollout-kill"), HIT, 100.0, incidents, None)
    assert (told["named"], told["found_seconds"], told["cured_seconds"]) == (named, found, cured)
    assert told["reason"].startswith(reason) and bool(told["reason"]) is bool(reason)


def test_other_incidents_beside_it_are_alarms() -> None:
    told = scoring.judged(fault("rollout-kill"), HIT, 100.0, [seen("rollout/1#2"), seen("trainer/0#1")], None)
    assert told["named"] and len(told["alarms"]) == 1 and told["alarms"][0].startswith("crash, trainer/0#1")


def test_of_a_lost_node_the_node_must_be_named_and_the_replicas_on_it_are_no_alarms() -> None:
    hit = frozenset({"node-3", "rollout/1#2"})
    crash, lost = seen("rollout/1#2", cured_at=109.0), seen("node-3", fault_class="node_lost", found_at=103.0)
    told = scoring.judged(fault("node-kill"), hit, 100.0, [crash, lost], None)
    assert (told["named"], told["found_seconds"], told["cured_seconds"], told["alarms"]) == (True, 3.0, 9.0, [])
    assert not scoring.judged(fault("node-kill"), hit, 100.0, [crash], None)["named"]


def test_agent_and_watch_are_found_when_they_are_started_again() -> None:
    told = scoring.judged(fault("agent-kill"), frozenset({"node-3"}), 100.0, [], 101.5)
    assert (told["named"], told["found_seconds"], told["cured_seconds"]) == (True, 1.5, 1.5)
    told = scoring.judged(fault("watch-kill"), frozenset({"watch"}), 100.0, [], None)
    assert not told["named"] and told["reason"] == "no restart of the watch is recorded"


def test_a_full_disk_hits_all_nodes_because_it_is_that_of_one_host(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "r")
    run.write({"nodes": ["node-0", "node-1"]})
    record = {"target": "controller/0", "incarnation": 2, "node": "node-0"}
    hits = {}
    for kind in ("disk-full", "journal-down"):
        piece = injection.Piece([fault(kind, role="controller")], {}, 1.0)
        piece._run = run
        hits[kind] = piece._hit(fault(kind, role="controller"), record)
    assert hits == {"disk-full": {"controller/0#2", "node-0", "node-1"}, "journal-down": {"controller/0#2"}}


def test_innocent_is_who_is_gone_without_being_hit_planned_or_on_a_lost_node() -> None:
    names = {1: "hit", 2: "planned", 3: "innocent", 4: "alive", 5: "on the lost node", 6: "reused"}
    before = [
        RunProcess(pid=pid, start_ticks=pid, name=name, node="node-3" if pid == 5 else "node-1")
        for pid, name in names.items()
    ]
    alive = [before[3], RunProcess(pid=6, start_ticks=600, name="another")]
    gone = scoring.innocents(before, alive, frozenset({1, 2}), frozenset({"node-3"}))
    assert [g.partition(" ")[0] for g in gone] == ["innocent", "reused"]


# --- the report -------------------------------------------------------------------------------------------------------

AUDIT = {"ok": True, "unaccounted": 0, "duplicates": 0, "problems": []}


def piece_line(**more: Any) -> dict[str, Any]:
    known = {"run_id": "r", "num_wanted": 2, "num_injected": 2, "failure": "", "audit": AUDIT, "wall_seconds": 60.0}
    return {"line": "piece", "seed": 0, **known, **more}


def test_every_miss_has_its_line_with_the_reason() -> None:
    first, second, third = schedule.schedule(0)[:3]
    lines = [
        written(first),
        written(second, named=False, found_seconds=None, reason="no incident", innocent=["raylet (pid 7)"]),
        written(third, injected=False, reason="no quota here"),
        piece_line(failure="TimeoutError: a whole run", audit={**AUDIT, "ok": False, "problems": ["step 3: lost"]}),
    ]
    text = list(report(lines))
    assert "| named right, of those where wanted | 1 of 2, 50.0 % | **no** |" in text
    assert "| innocent processes | 1 | **no** |" in text
    assert "| audits that hold | 0 of 1 runs | **no** |" in text
    misses = [line for line in text[text.index("## Misses") :] if line.startswith("- ")][:3]
    assert misses[0].endswith(f"{second.role}/0: no incident; innocent: raylet (pid 7)")
    assert misses[1].startswith(f"- not injected: 0/{third.number}") and misses[1].endswith("no quota here")
    assert misses[2] == "- piece r, 2 of 2 faults injected: TimeoutError: a whole run; step 3: lost"


def test_bars_are_met_by_a_whole_schedule_and_a_day_without_faults() -> None:
    lines = [written(f) for f in schedule.schedule(0)]
    lines += [{**piece_line(), "line": "quiet", "wall_seconds": 25 * 3600.0, "evicted": [], "incidents": []}]
    text = list(report(lines))
    assert not [line for line in text if "**no**" in line]
    assert "1 runs, 25.00 hours, 0 evictions: at most 0.12 an hour (95 %)." in text
    assert any(line.startswith("- partition: every role: ") for line in text)


@pytest.mark.parametrize(
    ("more", "row"),
    [
        ({"others_in_plans": ["trainer/0#1"]}, "| replicas in plans that were not hit | 1 | **no** |"),
        ({"alarms": ["crash, trainer/0#1: a crash"]}, "| false alarms | 1 | **no** |"),
        ({"cured_seconds": None}, "| faults not cured | 1 | **no** |"),
    ],
)
def test_one_wrong_eviction_one_false_alarm_or_one_fault_that_stays_misses_a_bar(
    more: dict[str, Any], row: str
) -> None:
    first, second = schedule.schedule(0)[:2]
    text = list(report([written(first), written(second, **more)]))
    assert row in text
    assert row not in list(report([written(first), written(second)]))


def test_a_fault_that_did_not_meet_its_target_is_shown_apart() -> None:
    first, second = schedule.schedule(0)[:2]
    text = list(report([written(first), written(second, met=False, others_in_plans=["trainer/0#1"])]))
    assert "| faults injected, of 1000 | 2, of them elsewhere than wanted: 1 | **no** |" in text
    assert "| named right, of those where wanted | 1 of 1, 100.0 % | yes |" in text
    assert "| replicas in plans that were not hit | 1 | **no** |" in text, "what it did to others counts"
    (row,) = [line for line in text if line.startswith(f"| {second.name} | {second.role} | ")]
    assert row == f"| {second.name} | {second.role} | 0 | 0 | - | - | 1 | 0 | 1 | 0 | 1 |"
    assert any("/0: not injected in the work to interrupt; others in plans" in line for line in text)


def test_an_audit_that_is_missing_does_not_hold() -> None:
    assert "| audits that hold | 0 of 1 runs | **no** |" in list(report([piece_line(audit=None)]))


# --- the driver -------------------------------------------------------------------------------------------------------


def test_a_run_is_whole_when_every_wanted_incarnation_works_and_no_incident_is_open(tmp_path: Path) -> None:
    run, node = create_run_dir(tmp_path, "r"), NodeId("node-1")
    piece = injection.Piece(schedule.schedule(0)[:1], {}, 600.0)
    piece._run = run
    with closing(Journal(run.database_url)) as journal:

        def works(replica: str, incarnation: int, state: ReplicaState) -> bool:
            who = ReplicaId(replica)
            process = {"pid": os.getpid(), "start_ticks": process_start_ticks(os.getpid()) or 0}
            journal.set_actual(Actual(replica=who, incarnation=incarnation, node=node, state=state, **process))
            return piece._is_whole()

        for name in ("rollout/0", "standby/0"):
            journal.set_desired(Desired(replica=ReplicaId(name), incarnation=1, node=node))
        assert not works("rollout/0", 1, ReplicaState.SERVING), "the standby has not started"
        assert works("standby/0", 1, ReplicaState.READY)
        journal.append(Tale().opened(1.0, "inc-1", "rollout/0").events[0].payload, incident_id="inc-1")
        assert not piece._is_whole(), "an incident is open"
        journal.append(filled(EventKind.INCIDENT_CLOSED, {"outcome": "resolved"}), incident_id="inc-1")
        assert piece._is_whole()
        journal.set_desired(Desired(replica=ReplicaId("rollout/0"), incarnation=2, node=node), expect_incarnation=1)
        assert not piece._is_whole(), "a replacement is wanted"
        assert works("rollout/0", 2, ReplicaState.SERVING)
        journal.set_actual(replace(journal.current()[ReplicaId("rollout/0")], start_ticks=1))
        assert not piece._is_whole(), "its process is gone, which nobody has noticed yet"


NODE = NodeId("node-1")


class ScriptedPiece(injection.Piece):
    """Faults of processes that do not exist, in a run that is only a journal."""

    def __init__(
        self,
        faults: list[Fault],
        run: Path,
        calm: Callable[[int], None] = lambda n: None,
        seconds: float = 3600.0,
        ends: threading.Event | None = None,
    ) -> None:
        super().__init__(faults, {"seed": 0}, seconds, ends)
        self.num_calm, self._in_calm = 0, calm
        self(run, threading.Event())

    def _until(self, what: str, seconds: float, found: Callable[[], bool]) -> None:
        return None

    def _calm(self, rng: random.Random) -> None:
        self._in_calm(self.num_calm)
        self.num_calm += 1


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Journal]]:
    """A run with one rollout at work, in which injections do nothing."""
    run = create_run_dir(tmp_path, "r")

    def inject(*args: Any) -> dict[str, Any]:
        return {"target": "rollout/0", "incarnation": 1, "node": "node-1", "pid": 1, "met": True, "injected_at": 100.0}

    monkeypatch.setattr(injection, "inject", inject)
    monkeypatch.setattr("benchmarks.recovery.chaos.lines.LINES", tmp_path / "chaos.jsonl")
    with closing(Journal(run.database_url, clock=FakeClock(100.0, 0.0))) as journal:
        who = ReplicaId("rollout/0")
        journal.set_desired(Desired(replica=who, incarnation=1, node=NODE))
        process = {"pid": os.getpid(), "start_ticks": process_start_ticks(os.getpid()) or 0}
        journal.set_actual(Actual(replica=who, incarnation=1, node=NODE, state=ReplicaState.SERVING, **process))
        yield run.path, journal


def two_faults() -> list[Fault]:
    return [fault("rollout-kill", number=number) for number in (0, 1)]


def test_what_happens_between_two_faults_counts_with_the_first(scripted: tuple[Path, Journal]) -> None:
    run, journal = scripted

    def calm(number: int) -> None:
        if number == 1:
            told = Tale().opened(100.0, "inc-1", "trainer/0").acted(100.0, "inc-1", "trainer/0").events
            for event in told:
                journal.append(event.payload, incident_id="inc-1")

    piece = ScriptedPiece(two_faults(), run, calm)
    first, second = read_lines()
    assert (piece.failure, piece.num_injected, piece.num_calm) == ("", 2, 3)
    assert [len(line["alarms"]) for line in (first, second)] == [1, 0]
    assert [line["others_in_plans"] for line in (first, second)] == [["trainer/0#1"], []]


def test_a_piece_that_is_to_end_judges_its_last_fault_and_injects_no_other(scripted: tuple[Path, Journal]) -> None:
    ends = threading.Event()

    def calm(number: int) -> None:
        if number == 1:
            ends.set()

    piece = ScriptedPiece(two_faults(), scripted[0], calm, ends=ends)
    (line,) = read_lines()
    assert (line["number"], line["injected"], line["reason"]) == (0, True, "no incident")
    assert (piece.failure, piece.num_injected) == ("", 1) and piece.is_done.is_set()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (scoring.Stopped("the run ended"), "the run ended"),
        (sqlite3.OperationalError("disk I/O error"), "OperationalError: disk I/O error"),
        (JournalUnavailable(where="journal.db", reason="locked", hint="wait"), "JournalUnavailable: "),
    ],
)
def test_a_fault_that_ends_the_run_has_its_line(scripted: tuple[Path, Journal], error: Exception, reason: str) -> None:
    def calm(number: int) -> None:
        if number == 1:
            raise error

    piece = ScriptedPiece(two_faults(), scripted[0], calm)
    (line,) = read_lines()
    assert (line["number"], line["injected"], line["named"], line["cured_seconds"]) == (0, True, False, None)
    assert line["reason"].startswith(reason) and piece.failure.endswith(str(error)) and piece.is_done.is_set()
    assert schedule.piece(0, [line], 1)[0].number == 1, "it is not injected again"


def test_a_run_that_does_not_become_whole_is_not_cured(scripted: tuple[Path, Journal]) -> None:
    def calm(number: int) -> None:
        if number == 1:
            raise TimeoutError("a whole run: not within 240 s")

    ScriptedPiece([fault("agent-kill")], scripted[0], calm)
    (line,) = read_lines()
    assert line["cured_seconds"] is None and line["reason"] == "no restart of the agent is recorded"


def test_no_fault_is_injected_that_the_planned_end_of_the_run_would_cut_off(scripted: tuple[Path, Journal]) -> None:
    piece = ScriptedPiece(two_faults(), scripted[0], seconds=injection.ONE_FAULT_SECONDS - 1)
    assert piece.num_injected == 0 and "too short" in piece.failure and not read_lines()


def test_the_node_of_another_role_is_not_hit(scripted: tuple[Path, Journal]) -> None:
    for kind in ("agent-kill", "node-kill", "standby-kill"):
        ScriptedPiece([fault(kind, role="standby")], scripted[0])
    lines = read_lines()
    assert [x["reason"] for x in lines] == [
        f"{kind}: no replica of standby is at work" for kind in ("agent-kill", "node-kill", "standby-kill")
    ]
    assert not any(x["injected"] for x in lines)
