"""What a watch says of the job that it watches: at once, as a table, and as lines."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.recovery.incidents import Incident, IncidentOutcome, IncidentState
from rolecall.terminal.console import as_text
from rolecall.terminal.watch import JobLines, job_table
from rolecall.testing.recovery_world import diagnosis
from rolecall.watch.job import JobObserver, WatchedJob, WatchedRank, spans

RANKS = tuple(
    WatchedRank(replica="trainer/0", rank=n, node="vm", found_by="torchrun", state="running", pid=40 + n)
    for n in range(4)
)
JOB = WatchedJob(at=1000.0, nodes=("vm",), ranks=RANKS, unreachable={})


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((7, 0, 2, 1), "0-2,7"), ((1, 1), "1")]
)
def test_spans(numbers: tuple[int, ...], text: str) -> None:
    assert spans(numbers) == text


def test_what_is_watched_is_one_line() -> None:
    assert JOB.text == "4 ranks: trainer/0 0-3 (torchrun) on vm"
    assert replace(JOB, ranks=RANKS[:1]).text == "1 rank: trainer/0 0 (torchrun) on vm"
    assert replace(JOB, ranks=()).text == "no ranks yet on vm"
    exited = tuple(replace(rank, state="exited") for rank in RANKS)
    assert replace(JOB, ranks=(*RANKS[:3], exited[3])).text.startswith("4 ranks, 1 exited: ")
    assert replace(JOB, ranks=exited).text == "4 ranks, all exited: trainer/0 0-3 (torchrun) on vm"
    many = tuple(replace(RANKS[0], replica=f"trainer/{n}") for n in range(20))
    assert replace(JOB, ranks=many).text.endswith("; 12 more")


def test_the_table_names_the_ranks_that_do_not_run() -> None:
    stopped = (*RANKS[:2], replace(RANKS[2], state="stopped"), RANKS[3])
    text = as_text(job_table(replace(JOB, ranks=stopped, unreachable={"vm": 820.0})))
    assert ["trainer/0", "2", "42", "torchrun", "vm", "stopped"] in [line.split() for line in text.splitlines()]
    assert "no answer from the agent on vm; the outage began 3 min ago" in text
    assert "no open incident" in text
    large = tuple(replace(RANKS[0], rank=n, state="stopped" if n == 2 else "running") for n in range(16))
    assert "15 running, 1 stopped (rank 2)" in as_text(job_table(replace(JOB, ranks=large)))


def test_the_table_forgets_incidents_that_are_long_over() -> None:
    def closed(number: int, closed_at: float) -> Incident:
        return Incident(
            incident_id=f"inc-{number}-job",
            state=IncidentState.CLOSED,
            diagnosis=diagnosis(FaultClass.HANG, ("trainer/0", 1)),
            opened_at=closed_at - 60.0,
            seen_keys=frozenset(),
            closed_at=closed_at,
            outcome=IncidentOutcome.SELF_RECOVERED,
        )

    job = replace(JOB, at=10_000.0, incidents=(closed(1, 6000.0), closed(2, 9000.0)))
    lines = as_text(job_table(job)).splitlines()
    assert lines[-2] == "no open incident" and lines[-1].startswith("inc-2-job self recovered: ")


def test_the_table_fits_into_a_window() -> None:
    many = tuple(replace(RANKS[0], replica=f"trainer/{n}") for n in range(1000))
    text = as_text(job_table(replace(JOB, ranks=many)), 80)
    assert len(text.splitlines()) <= 24 and "and 985 more replicas" in text


def test_lines_tell_changes_once() -> None:
    lines: list[str] = []
    display = JobLines(lines.append)
    for job in (replace(JOB, ranks=()), JOB, replace(JOB, at=1001.0), replace(JOB, unreachable={"vm": 990.0}), JOB):
        display.show(job)
    said = [json.loads(line) for line in lines]
    assert [s["event"] for s in said] == ["watching", "watching", "unreachable", "unreachable"]
    assert said[1]["text"] == JOB.text and said[1]["num_ranks"] == 4
    assert said[1]["ranks"][2] == {"replica": "trainer/0", "rank": 2, "node": "vm", "pid": 42}
    assert said[2]["nodes"] == {"vm": 990.0} and said[3]["nodes"] == {}


def test_several_jobs_are_told() -> None:
    ranks = tuple(replace(r, job="a" if r.rank < 2 else "b") for r in JOB.ranks)
    assert "2 jobs: a, b; --job JOB watches one of them" in as_text(job_table(replace(JOB, ranks=ranks)))
    assert "--job" not in as_text(job_table(replace(JOB, ranks=ranks[:2])))
    other = as_text(job_table(replace(JOB, ranks=ranks[:2], other_jobs=("b",))))
    assert "job b also runs here and is not watched; --job b watches it in a run of its own" in other


class _Source:
    def __init__(self, *events: AgentEvent) -> None:
        self.events = events

    def poll(self, timeout_seconds: float) -> Any:
        events, self.events = self.events, ()
        return Observation(wall_at=1000.0, events=events)


def test_the_rule_that_found_a_rank_is_shown_at_most_once_a_second() -> None:
    process = ProcessId(node=NodeId("vm"), pid=7, start_ticks=70)
    registered = AgentEvent(
        seq=1, kind=AgentEventKind.REGISTERED, node=NodeId("vm"), at=1.0, wall_at=1000.0, process=process,
        detail={"found_by": "torchrun"},
    )  # fmt: skip
    rank = MonitoredProcess(
        replica="trainer/0", role="trainer", rank=0, incarnation=0, node="vm", process=process, seen_wall=1000.0
    )
    shown: list[WatchedJob] = []
    clock = FakeClock()
    observer = JobObserver(_Source(registered), shown.append, clock)
    observer.poll(0.1)
    for _ in range(3):
        observer.show(["vm"], lambda: [rank], ())
    assert [job.text for job in shown] == ["1 rank: trainer/0 0 (torchrun) on vm"]
    clock.advance(1.5)
    observer.poll(0.1)
    observer.show(["vm"], lambda: [rank], ())
    assert shown[-1].text == shown[0].text and len(shown) == 2
