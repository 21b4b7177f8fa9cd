"""What can be told of a job that reports nothing: the rows of both tables in the docs are simulated runs.

`python -m tests.detector.live.test_uninstrumented_table` prints the tables.
"""

import random
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.run_panels import RunPanels
from rolecall.detector.panels.registry import detector
from tests.detector.live.test_uninstrumented import ASKED, ERROR, KILLED, Job

PAGE = Path(__file__).parents[3] / "docs/reference/uninstrumented.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"
BEGIN_CONDITIONS, END_CONDITIONS = "<!-- conditions: begin -->\n", "<!-- conditions: end -->"
HEALTHY_SECONDS, WATCHED_SECONDS = 900, 900
"""Before and after the fault."""
WATCHED_EVERY_TIME_SECONDS = 240
"""After the fault, in the tests of every day: what is named is named within 61 s."""
RANK = "trainer/0:2"


class WatchAndPanels:
    """Diagnoses of a watch and findings of its panels, from the same observations."""

    def __init__(self) -> None:
        self.live, self.panels = LiveDetector(DetectorConfig(), {}), RunPanels(detector())
        self.said: list[Diagnosis | Finding] = []

    def observe(self, seen: Observation) -> list[Diagnosis]:
        diagnoses = self.live.observe(seen)
        self.said += [*diagnoses, *self.panels.findings(seen)]
        return diagnoses


def stopped(job: Job) -> None:
    job.state[RANK], job.cpu_rate[RANK] = "T", 0.0


def stuck(job: Job) -> None:
    job.state[RANK], job.cpu_rate[RANK] = "D", 0.0


def waits(job: Job) -> None:
    """All ranks wait in a collective that polls, as NCCL's do: states and CPU time stay as they were."""


def sleeps(job: Job) -> None:
    job.cpu_rate[RANK] = 0.0


def starved(job: Job) -> None:
    job.delay_rate[RANK] = 0.8


def less_work(job: Job) -> None:
    job.cpu_rate[RANK] /= 2


def unknown_exit(job: Job) -> None:
    job.ends(RANK, {"cause": "unknown"})


def whole_job(job: Job) -> None:
    for name in job.who:
        job.ends(name, ERROR)


CASES: tuple[tuple[str, str, Callable[[Job], None]], ...] = (
    ("exit by a signal (kill, crash, OOM)", "exit status", lambda job: job.ends(RANK, KILLED)),
    ("exit with an error code", "exit status", lambda job: job.ends(RANK, ERROR)),
    ("exit of unknown status, the job goes on", "the process is gone, its peers are not", unknown_exit),
    ("exit that was asked for (SIGTERM) or with code 0", "exit status", lambda job: job.ends(RANK, ASKED)),
    ("all processes end at once in the same way", "exit status", whole_job),
    ("hang: the process is stopped (state T)", "process state", stopped),
    ("hang: in an uninterruptible wait (state D)", "process state, CPU time", stuck),
    ("hang: asleep, its peers go on using CPU", "CPU time against peers", sleeps),
    ("hang: all ranks wait in a collective that polls", "none: CPU time and states are as before", waits),
    ("slow: other processes take its CPU", "time runnable without a CPU", starved),
    ("slow: half of the CPU time of its peers", "CPU time against peers", less_work),
)


class SimulatedRun:
    """Four ranks and two engines with a watch and its panels. `variation`: of the CPU seconds per second of each rank,
    a standard deviation."""

    def __init__(self, variation: float) -> None:
        self.job, self.both = Job(), WatchAndPanels()
        self.job.detector = self.both  # type: ignore[assignment]
        self._variation, self._rng = variation, random.Random(0)

    def second(self) -> None:
        for name, rate in self.job.cpu_rate.items():
            self.job.cpu[name] += self._rng.gauss(0.0, self._variation) * rate
        self.job.run(1)

    def healthy(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()
        assert not self.both.said, "a healthy run"


def told(run: SimulatedRun, fault: Callable[[Job], None], watched_seconds: int) -> str:
    """Who is named as what, and after how long: of a healthy run of which rank 2 now has a fault."""
    fault(run.job)
    first: dict[str, int] = {}
    for second in range(watched_seconds):
        run.second()
        for d in run.both.said:
            assert {(s.replica, s.rank) for s in d.suspects} == {("trainer/0", 2)}, d.because
            first.setdefault(f"`{d.fault_class}`{' (panel)' if isinstance(d, Finding) else ''}", second + 1)
        run.both.said.clear()
    return "; ".join(f"{what} after {seconds} s" for what, seconds in first.items()) or "nobody"


def table(watched_seconds: int = WATCHED_SECONDS) -> str:
    rows = ["| what happens to rank 2 | evidence | rank 2 is named as |", "|---|---|---|"]
    run = SimulatedRun(0.02)
    run.healthy(HEALTHY_SECONDS)
    rows += [
        f"| {what} | {evidence} | {told(deepcopy(run), fault, watched_seconds)} |" for what, evidence, fault in CASES
    ]
    return "\n".join(rows) + "\n"


MORE_CPU = 1.7
"""Times the CPU seconds of its peers."""
VARIATIONS, MINUTES_BEFORE, CONDITIONS_SECONDS = (0.02, 0.1, 0.3), (0, 5, 15), 600


def named_after(run: SimulatedRun) -> int | None:
    """Seconds until rank 2, which begins to use more CPU than its peers, is named."""
    run.job.cpu_rate[RANK] *= MORE_CPU
    for second in range(CONDITIONS_SECONDS):
        run.second()
        if run.both.said:
            assert {(s.replica, s.rank) for d in run.both.said for s in d.suspects} == {("trainer/0", 2)}
            return second + 1
    return None


def conditions() -> str:
    head = [
        "CPU time of each rank varies by",
        *(f"{m} min healthy before" if m else "from the start" for m in MINUTES_BEFORE),
    ]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for variation in VARIATIONS:
        run, found = SimulatedRun(variation), []
        for before, minutes in pairwise((0, *MINUTES_BEFORE)):
            run.healthy(60 * (minutes - before))
            found.append(named_after(deepcopy(run)))
        cells = [
            f"{variation:.0%}".replace("%", " %"),
            *(f"{s} s" if s is not None else "not in 10 min" for s in found),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    "watched_seconds", [WATCHED_EVERY_TIME_SECONDS, pytest.param(WATCHED_SECONDS, marks=pytest.mark.long)]
)
def test_the_table_in_the_docs_is_what_simulated_runs_show(watched_seconds: int) -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert written == table(watched_seconds), f"{PAGE.name}: put the output of this module between the marks"


def test_the_conditions_in_the_docs_are_those_of_simulated_runs() -> None:
    written = PAGE.read_text().partition(BEGIN_CONDITIONS)[2].partition(END_CONDITIONS)[0]
    assert written == conditions(), f"{PAGE.name}: put the output of this module between the marks"


if __name__ == "__main__":
    print(table(), conditions(), sep="\n")
