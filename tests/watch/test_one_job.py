"""One of several jobs on the same nodes."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from rolecall.agent.collectors.process.discovery import job_number
from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEventKind
from rolecall.detector.base.observation import Observation
from rolecall.views.observed_ranks import EXITED_KEPT_SECONDS
from rolecall.watch.job import OVERLAP_SECONDS, UNKNOWN_SECONDS, FirstJobSource, JobObserver, OneJobSource, WatchedJob
from tests.detector.live.torchrun_job import Rank, TorchrunJob


@dataclass
class _Source:
    observation: Observation

    def poll(self, timeout_seconds: float) -> Any:
        del timeout_seconds
        return self.observation


def _of_two_jobs() -> Observation:
    a, b = Rank(0, 100), Rank(0, 200, replica="trainer/7")
    it = TorchrunJob([])
    it.event(AgentEventKind.REGISTERED, a, job="mine", rendezvous="h:1")
    it.event(AgentEventKind.REGISTERED, b, found_by="torchrun", job="h:2")
    it.event(AgentEventKind.EXITED, a, code="1")
    it.event(AgentEventKind.EXITED, b, code="1")
    it.ranks = [a, b]
    seen: list[Observation] = []
    it.detector.observe = lambda observation: seen.append(observation) or []  # type: ignore[method-assign,func-returns-value]
    it.run(0.5)
    return seen[0]


@pytest.mark.parametrize(("job", "pids"), [("mine", [100]), ("h:1", [100]), ("h:2", [200]), ("other", [])])
def test_only_the_chosen_job_is_passed_on(job: str, pids: list[int]) -> None:
    seen = OneJobSource(_Source(_of_two_jobs()), job, FakeClock()).poll(0.1)
    assert [p.process.pid for b in seen.batches for p in b.processes] == pids
    assert [e.process.pid for e in seen.events if e.process is not None] == pids * 2


def _said_late(source: OneJobSource, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What it logs of processes that stay unknown; nothing at first."""
    source.poll(0.1)
    clock.advance(UNKNOWN_SECONDS - 1.0)
    source.poll(0.1)
    assert not caplog.records
    for _ in range(3):
        clock.advance(UNKNOWN_SECONDS)
        source.poll(0.1)
    return [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize(("job", "warns"), [("other", True), ("mine", False)])
def test_a_job_without_a_known_process_is_warned_of_once(
    job: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    source = OneJobSource(_Source(_of_two_jobs()), job, clock)
    said = _said_late(source, clock, caplog)
    assert len(said) == warns
    assert all(text.startswith("job other: none of the 2 processes that the agents report") for text in said)


def test_a_node_with_processes_whose_registration_is_lost_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Beside nodes whose processes are known."""
    seen, clock, elsewhere = _of_two_jobs(), FakeClock(), NodeId("node-2")
    lost = [
        replace(p, process=replace(p.process, node=elsewhere, pid=p.process.pid + 5)) for p in seen.batches[0].processes
    ]
    more = replace(seen, batches=(*seen.batches, replace(seen.batches[0], node=elsewhere, processes=tuple(lost))))
    source = OneJobSource(_Source(more), "mine", clock)
    (said,) = _said_late(source, clock, caplog)
    assert said.startswith("node-2: the job of 2 processes is not known") and "of job mine" in said


class _Jobs:
    """Jobs of torchrun on one node, and what a watch without --job sees of them."""

    def __init__(self) -> None:
        self.job = TorchrunJob([])
        self.heard: list[Observation] = []
        self.job.detector.observe = lambda seen: self.heard.append(self.source.poll(0.1, seen)) or []  # type: ignore[method-assign,func-returns-value]
        self.source = _Passed()

    def begin(self, rendezvous: str, *ranks: Rank, **detail: str) -> None:
        for r in ranks:
            known = {"launcher": "torchrun", "job": f"run-{rendezvous}", "rendezvous": rendezvous, **detail}
            self.job.event(AgentEventKind.REGISTERED, r, **known)
        self.job.ranks = [r for r in self.job.ranks if r.alive] + list(ranks)

    def run(self, seconds: float) -> set[int]:
        """PIDs that were sampled."""
        self.heard.clear()
        self.job.run(seconds)
        return {p.process.pid for seen in self.heard for b in seen.batches for p in b.processes}


class _Passed:
    def __init__(self) -> None:
        self.newest = _Source(Observation(wall_at=0.0))
        self.first = FirstJobSource(self.newest)

    def poll(self, timeout_seconds: float, seen: Observation) -> Observation:
        self.newest.observation = seen
        return self.first.poll(timeout_seconds)


def _numbered(rendezvous: str, pid: int) -> Rank:
    return Rank(0, pid, replica=f"trainer/{job_number(rendezvous)}")


def test_a_run_holds_only_the_processes_of_its_own_job(caplog: pytest.LogCaptureFixture) -> None:
    jobs, mine, theirs = _Jobs(), Rank(0, 100), _numbered("h:2", 200)
    jobs.begin("h:1", mine)
    jobs.run(30.0)
    jobs.begin("h:2", theirs)
    assert jobs.run(OVERLAP_SECONDS + 5.0) == {100} and jobs.source.first.others == ("run-h:2",)
    assert [r.getMessage()[:72] for r in caplog.records] == [
        "job run-h:2 also runs on these nodes and is not watched: this run watches"[:72]
    ]
    jobs.job.exits(theirs, signal="9")
    assert jobs.run(5.0) == {100} and jobs.source.first.others == ()
    assert not [e for seen in jobs.heard for e in seen.events]


def test_a_registration_that_comes_before_the_first_sample_is_passed_on_with_it() -> None:
    jobs, second = _Jobs(), Rank(0, 200, replica="rollout/1")
    jobs.begin("h:1", Rank(0, 100, replica="rollout/0"))
    assert jobs.run(1.0) == {100}
    known = {"launcher": "srun", "job": "2", "rendezvous": "2.0"}
    jobs.job.event(AgentEventKind.REGISTERED, second, **known)
    assert jobs.run(1.0) == {100} and not [e for seen in jobs.heard for e in seen.events]
    jobs.job.ranks.append(second)
    assert jobs.run(1.0) == {100, 200}
    (event,) = [e for seen in jobs.heard for e in seen.events]
    assert event.process is not None and event.process.pid == 200 and event.detail == known


def test_an_exit_that_comes_before_the_first_sample_is_passed_on_with_it() -> None:
    """A watch is woken by events, and gets the samples of the same answer a moment later. Without its exit event the end
    of a rank was told as "status unknown"."""
    it, killed = TorchrunJob([]), Rank(1, 101)
    it.ranks = [Rank(0, 100), killed]
    for r in it.ranks:
        it.event(AgentEventKind.REGISTERED, r, launcher="torchrun", job="run-h:1", rendezvous="h:1")
    it.exits(killed, signal="9")
    seen: list[Observation] = []
    it.detector.observe = lambda observation: seen.append(observation) or []  # type: ignore[method-assign,func-returns-value]
    it.run(0.5)
    source = _Source(replace(seen[0], batches=()))
    passed = FirstJobSource(source)
    assert passed.poll(0.1).events == ()
    source.observation = replace(seen[0], events=())
    events = passed.poll(0.1).events
    assert [e.kind for e in events] == [AgentEventKind.REGISTERED] * 2 + [AgentEventKind.EXITED]
    assert events[-1].detail["signal"] == "9" and passed.poll(0.1).events == (), "once"


def test_a_job_that_takes_a_free_name_is_another_job() -> None:
    """The watched job has a number, since trainer/0 was taken when it began. A later job gets that free name."""
    jobs = _Jobs()
    jobs.begin("h:2", _numbered("h:2", 200))
    assert jobs.run(5.0) == {200}
    other = Rank(0, 300)
    jobs.begin("h:3", other)
    assert jobs.run(OVERLAP_SECONDS + 5.0) == {200}
    jobs.job.exits(other, signal="15")
    assert jobs.run(5.0) == {200}


def test_a_job_that_starts_again_is_watched() -> None:
    jobs, first = _Jobs(), _numbered("h:1", 100)
    jobs.begin("h:1", first)
    jobs.run(20.0)
    jobs.begin("h:2", _numbered("h:2", 200))  # an agent is a few polls behind
    assert jobs.run(1.0) == {100}
    jobs.job.exits(first, signal="15")
    assert jobs.run(5.0) == {100, 200}, "the exit of the first is seen, too"


def test_another_job_does_not_take_the_place_of_the_watched_one() -> None:
    jobs, mine = _Jobs(), Rank(0, 100)
    jobs.begin("h:1", mine)
    jobs.begin("h:2", _numbered("h:2", 200))
    jobs.run(OVERLAP_SECONDS + 5.0)
    jobs.job.exits(mine, signal="15")
    assert jobs.run(60.0) == {100}
    jobs.begin("h:3", Rank(0, 300))
    assert jobs.run(5.0) == {300}


@pytest.mark.parametrize(
    ("second", "detail"),
    [
        (Rank(0, 200, replica="rollout/0"), {}),
        (Rank(0, 200, replica="trainer/1"), {}),
        (_numbered("h:2", 200), {"launcher": "", "found_by": "verl-trainer"}),
    ],
    ids=["another role", "another replica", "Ray"],
)
def test_parts_of_one_run_are_watched_together(second: Rank, detail: dict[str, str]) -> None:
    jobs = _Jobs()
    jobs.begin("h:1", Rank(0, 100))
    jobs.begin("h:2", second, **detail)
    assert jobs.run(5.0) == {100, 200}


def test_ranks_of_an_ended_job_disappear_once_others_run() -> None:
    it, clock = TorchrunJob([Rank(n, 100 + n) for n in range(4)]), FakeClock(now=100.0)
    shown: list[WatchedJob] = []
    observer = JobObserver(_Source(_of_two_jobs()), shown.append, clock)

    def show() -> list[tuple[int, str]]:
        clock.advance(it.now - clock.monotonic())
        observer.show(["vm"], it.detector.processes, ())
        return [(r.pid, r.state) for r in shown[-1].ranks]

    it.run(5.0)
    for r in it.ranks:
        it.exits(r, signal="15")
    it.run(2.0)
    assert [state for _, state in show()] == ["exited"] * 4
    it.replaced_by(Rank(0, 200), Rank(1, 201))
    it.run(EXITED_KEPT_SECONDS + 5.0)
    assert [pid for pid, _ in show()] == [200, 201]
