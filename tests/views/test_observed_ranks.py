"""The ranks that a watch sees are kept in the journal, at most every few seconds, and a locked journal stops nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.errors import JournalUnavailable
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.journal.journal import Journal
from rolecall.core.telemetry import AgentEvent, AgentEventKind, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.views import observed_course
from rolecall.views.observed_ranks import FLAG, WRITE_SECONDS, ObservedRank, RecordedRanks, from_json


class Source:
    """A source of one rank that has finished `progress` units."""

    def __init__(self) -> None:
        self.progress = 0
        self.replica, self.rank = "trainer/0", 1
        self.events: tuple[AgentEvent, ...] = ()
        self.at = 50.0
        self.clock_ahead = 0.0  # of its node
        self.page: dict[str, Any] = {}

    def registers(self, replica: str, rank: int = 1, **detail: str) -> None:
        self.replica, self.rank = replica, rank
        self.events = (
            AgentEvent(
                seq=1, kind=AgentEventKind.REGISTERED, node=NodeId("vm"), at=50.0, wall_at=1000.0, role="trainer",
                process=ProcessId(node=NodeId("vm"), pid=7, start_ticks=1), replica=replica, rank=rank, detail=detail,
            ),
        )  # fmt: skip

    def poll(self, timeout_seconds: float) -> Observation:
        page: dict[str, Any] = {"step": 3, "progress": self.progress, "progress_at": 48.0} | self.page
        sample = ProcessSample(
            process=ProcessId(node=NodeId("vm"), pid=7, start_ticks=1), role="trainer", replica=self.replica, rank=self.rank,
            incarnation=0, at=self.at, wall_at=1000.0 + self.clock_ahead, alive=True, page_ok=True, phase="compute", **page,
        )  # fmt: skip
        batch = SampleBatch(
            node=NodeId("vm"),
            agent_pid=1,
            cursor=1,
            lost=0,
            at=50.0,
            wall_at=1000.0 + self.clock_ahead,
            processes=(sample,),
            hosts=(),
        )
        return Observation(wall_at=1000.0, batches=(batch,), events=self.events)


def test_the_newest_sample_of_each_rank_is_kept_every_few_seconds(tmp_path: Path) -> None:
    clock, source = FakeClock(), Source()
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)
    recorded = RecordedRanks(source, journal, clock)
    assert recorded.poll(0.0).batches, "observations are passed on"
    first = ObservedRank("trainer/0", 1, "vm", 7, True, "compute", 3, 1000.0, None, reports_by="reporter")
    assert from_json(journal.flag(FLAG)) == (first,)
    source.progress = 5
    recorded.poll(0.0)
    assert from_json(journal.flag(FLAG)) == (first,), "not yet due"
    clock.advance(WRITE_SECONDS)
    recorded.poll(0.0)
    (found,) = from_json(journal.flag(FLAG))
    assert found.progress_at == 998.0, "wall time of the last unit"


def test_a_journal_that_does_not_answer_stops_no_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)

    def away(name: str, value: str | None) -> None:
        raise JournalUnavailable(where="the journal", reason="locked", hint="")

    monkeypatch.setattr(journal, "set_flag", away)
    assert RecordedRanks(Source(), journal, clock).poll(0.0).batches


def test_a_rank_has_its_job_and_only_its_newest_name(tmp_path: Path) -> None:
    clock, source = FakeClock(), Source()
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)
    recorded = RecordedRanks(source, journal, clock)
    recorded.poll(0.0)
    detail = {"was": "trainer/0", "job": "4711", "rendezvous": "h:1", "launcher_pid": "6"}
    source.registers("trainer/9", **detail)
    clock.advance(WRITE_SECONDS)
    recorded.poll(0.0)
    (found,) = from_json(journal.flag(FLAG))
    assert (found.replica, found.job, found.launcher_pid) == ("trainer/9", "4711", 6)
    assert from_json(json.dumps([["trainer/0", 1, "vm", 7, True, "compute", 3, 1000.0, None]])), "of an older watch"


def test_a_rank_that_had_another_number_has_only_its_newest_name(tmp_path: Path) -> None:
    clock, source = FakeClock(), Source()
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)
    source.registers("trainer/33", rank=0, found_by="ray-train")
    recorded = RecordedRanks(source, journal, clock)
    recorded.poll(0.0)
    source.registers("trainer/0", source="integration", was="trainer/33")
    clock.advance(WRITE_SECONDS)
    recorded.poll(0.0)
    (found,) = from_json(journal.flag(FLAG))
    assert (found.replica, found.rank) == ("trainer/0", 1)


def test_how_a_rank_reports_its_pace_and_the_course_are_kept(tmp_path: Path) -> None:
    clock = FakeClock()
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)
    source = Source()
    source.registers("trainer/0", source="hooks", job="4711")
    recorded = RecordedRanks(source, journal, clock)
    for step in range(1, 11):
        source.at, source.page = 50.0 + 2.0 * step, {
            "step": step, "progress": step, "progress_at": 50.0 + 2.0 * step, "work_units": step,
            "busy_seconds": 1.5 * step, "reward": 0.1 * step, "proc_state": "T",
        }  # fmt: skip
        recorded.poll(0.0)
        clock.advance(WRITE_SECONDS)
    recorded.poll(0.0)
    (rank,) = from_json(journal.flag(FLAG))
    assert (rank.reports_by, rank.is_stopped, rank.step_seconds, rank.own_seconds) == ("hooks", True, 2.0, 1.5)
    assert rank.reward == 1.0 and rank.phases == (("compute", 1.0),)
    course = observed_course.from_json(journal.flag(observed_course.FLAG))
    assert [p.step for p in course] == list(range(1, 11)) and course[-1].values == {"reward": 1.0}
    after = RecordedRanks(source, journal, clock)  # the next watch goes on
    source.page |= {"step": 11, "reward": 2.0}
    after.poll(0.0)
    course = observed_course.from_json(journal.flag(observed_course.FLAG))
    assert [p.step for p in course] == list(range(1, 12))


def test_a_process_that_registers_itself_is_no_longer_found_by_a_rule(tmp_path: Path) -> None:
    clock, source = FakeClock(), Source()
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)
    recorded = RecordedRanks(source, journal, clock)
    told = []
    for detail in ({"found_by": "torchrun", "job": "h:1"}, {"source": "integration"}):
        source.registers("trainer/0", **detail)
        recorded.poll(0.0)
        clock.advance(WRITE_SECONDS)
        (rank,) = from_json(journal.flag(FLAG))
        told.append((rank.reports_by, rank.job))
    assert told == [("torchrun", "h:1"), ("integration", "h:1")]


@pytest.mark.parametrize("ahead", [-100.0, 100.0])
def test_times_of_a_node_whose_clock_is_off_are_those_of_the_watch(tmp_path: Path, ahead: float) -> None:
    """Else the rank would look silent, or stay alive long after its node is gone."""
    clock, source = FakeClock(), Source()
    source.progress, source.clock_ahead, source.page = 5, ahead, {"reward": 1.0}
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)
    RecordedRanks(source, journal, clock).poll(0.0)
    (rank,) = from_json(journal.flag(FLAG))
    assert (rank.seen_at, rank.progress_at) == (1000.0, 998.0)
    assert rank.alive_at(1000.0) and not rank.alive_at(1031.0)
    assert [point.at for point in observed_course.from_json(journal.flag(observed_course.FLAG))] == [998.0]


def test_an_answer_that_is_late_moves_no_time(tmp_path: Path) -> None:
    clock, source = FakeClock(), Source()
    source.clock_ahead = -0.5
    journal = Journal(f"sqlite:///{tmp_path / 'journal.db'}", clock=clock)
    RecordedRanks(source, journal, clock).poll(0.0)
    assert [rank.seen_at for rank in from_json(journal.flag(FLAG))] == [999.5]
