"""Step time, own time and phases of one process, from its samples."""

from typing import Any

import pytest

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import NO_PAGE, Phase, ProcessSample
from rolecall.views.rank_pace import PARTS_MAX, WINDOW_SECONDS, RankPace


def sample(at: float, phase: str = Phase.STEP, **page: Any) -> ProcessSample:
    return ProcessSample(
        process=ProcessId(node=NodeId("vm"), pid=7, start_ticks=1), role="trainer", replica="trainer/0", rank=0,
        incarnation=0, at=at, wall_at=1000.0 + at, alive=True, page_ok=True, phase=phase, **page,
    )  # fmt: skip


def steps(pace: RankPace, num: int, seconds: float, own: float = 0.0, since: float = 0.0) -> float:
    """A sample at the end of each step; the time after them."""
    for n in range(num):
        at = since + (n + 1) * seconds
        pace.take(sample(at, step=n + 2, progress=n + 1, progress_at=at, work_units=n + 1, busy_seconds=(n + 1) * own))
    return since + num * seconds


@pytest.mark.parametrize("seconds", [0.05, 2.0, 400.0])
def test_step_time_is_exact_for_fast_and_slow_jobs(seconds: float) -> None:
    pace = RankPace()
    steps(pace, 100, seconds, own=seconds / 4)
    assert pace.step_seconds == pytest.approx(seconds)
    assert pace.own_seconds == pytest.approx(seconds / 4)


def test_it_forgets_what_is_older_than_the_window() -> None:
    pace = RankPace()
    after = steps(pace, 10, 10.0)
    for n in range(40):
        at = after + 2.0 * (n + 1)
        pace.take(sample(at, step=n + 12, progress=n + 11, progress_at=at))
    assert 40 * 2.0 > WINDOW_SECONDS
    assert pace.step_seconds == pytest.approx(2.0)


def test_nothing_is_known_of_one_step_or_of_a_process_without_a_page() -> None:
    pace = RankPace()
    pace.take(sample(1.0, step=1, progress=1, progress_at=1.0))
    assert pace.step_seconds is None and pace.own_seconds is None
    silent = RankPace()
    for n in range(5):
        silent.take(sample(float(n), phase=NO_PAGE))
    assert silent.phases == () and silent.step_seconds is None


def test_a_job_that_goes_back_to_a_checkpoint_counts_anew() -> None:
    pace = RankPace()
    after = steps(pace, 10, 10.0)
    assert pace.step_seconds == pytest.approx(10.0)
    for n in range(3):
        at = after + 3.0 * (n + 1)
        pace.take(sample(at, step=n + 1, progress=n + 11, progress_at=at))
    assert pace.step_seconds == pytest.approx(3.0)


def test_phases_have_the_share_of_whole_steps() -> None:
    """A step: generates for 6 s, scores for 1 s, trains for 3 s; sampled each second, the last step is not over."""
    pace = RankPace()
    for n in range(73):
        step, within = divmod(n, 10)
        phase, since = (Phase.GENERATE, 0) if within < 6 else (Phase.SCORE, 6) if within < 7 else (Phase.STEP, 7)
        pace.take(sample(float(n), phase=phase, phase_since=10.0 * step + since, step=step + 1, progress=step))
    shares = dict(pace.phases)
    assert shares == pytest.approx({"generate": 0.6, "step": 0.3, "score": 0.1}, abs=0.01)
    assert list(shares) == ["generate", "step", "score"], "the largest first"
    assert len(pace.parts) == PARTS_MAX


def test_the_part_before_a_phase_began_belongs_to_the_one_before() -> None:
    pace = RankPace()
    pace.take(sample(0.0, phase=Phase.WAIT))
    pace.take(sample(10.0, phase=Phase.STEP, phase_since=9.0))
    assert dict(pace.phases) == pytest.approx({"wait": 0.9, "step": 0.1})


def test_an_outage_of_the_page_is_no_time_of_a_phase() -> None:
    pace = RankPace()
    pace.take(sample(0.0))
    pace.take(sample(50.0, phase=NO_PAGE))
    pace.take(sample(100.0, phase=Phase.WAIT, phase_since=100.0))
    pace.take(sample(101.0, phase=Phase.WAIT, phase_since=100.0))
    assert pace.phases == (("wait", 1.0),)


def test_the_start_of_a_process_is_no_part_of_its_steps() -> None:
    pace = RankPace()
    for at, phase, since in ((0.0, Phase.START, 0.0), (30.0, Phase.STEP, 20.0), (40.0, Phase.WAIT, 35.0)):
        pace.take(sample(at, phase=phase, phase_since=since))
    assert dict(pace.phases) == pytest.approx({"step": 0.75, "wait": 0.25})
