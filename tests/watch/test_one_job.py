"""One of several jobs on the same nodes."""

from dataclasses import dataclass
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.telemetry import AgentEventKind
from rolecall.detector.base.observation import Observation
from rolecall.views.observed_ranks import EXITED_KEPT_SECONDS
from rolecall.watch.job import UNKNOWN_SECONDS, JobObserver, OneJobSource, WatchedJob
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


@pytest.mark.parametrize(("job", "warns"), [("other", True), ("mine", False)])
def test_a_job_without_a_known_process_is_warned_of_once(
    job: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    source = OneJobSource(_Source(_of_two_jobs()), job, clock)
    source.poll(0.1)
    clock.advance(UNKNOWN_SECONDS - 1.0)
    source.poll(0.1)
    assert not caplog.records
    for _ in range(3):
        clock.advance(UNKNOWN_SECONDS)
        source.poll(0.1)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == warns
    assert all(text.startswith("job other: none of the 2 processes that the agents report") for text in said)


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
