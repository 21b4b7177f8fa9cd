"""NaN and infinite values of a job that rolecall only watches."""

import math
from dataclasses import replace

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import ProcessSample
from rolecall.detector.live.engine import LiveDetector
from tests.detector.live.torchrun_job import Rank, TorchrunJob, job

pytestmark = pytest.mark.usefixtures("incarnation")


def _from_now(it: TorchrunJob, *ranks: int, loss: float = math.nan) -> None:
    for n in ranks:
        it.ranks[n].loss = loss


def test_nan_on_all_ranks_is_reported_within_seconds_with_its_step() -> None:
    it = job()
    _from_now(it, 0, 1, 2, 3)
    step = it.ranks[0].step + 1
    (found,) = it.run(4.0)
    assert found.fault_class is FaultClass.CANNOT_TELL and [s.rank for s in found.suspects] == [0, 1, 2, 3]
    assert found.because == f"trainer/0 ranks 0-3: loss NaN since step {step}"
    assert found.advice == f"stop the job and continue from the last checkpoint before step {step}"
    assert "computed again on another machine" in found.settle
    assert it.run(60.0) == [found], "it stands while the values are not finite"


def test_infinity_on_one_rank_names_it_and_its_finite_peers() -> None:
    it = job()
    _from_now(it, 2, loss=math.inf)
    (found,) = it.run(4.0)
    assert [s.rank for s in found.suspects] == [2]
    assert "rank 2 (vm, pid 102): loss infinite since step" in found.because
    assert found.because.endswith("3 other ranks of the job are finite")


class _WithoutSteps(TorchrunJob):
    def _sample(self, r: Rank) -> ProcessSample:
        return replace(super()._sample(r), step=-1)


def test_a_job_that_reports_no_step_is_told_of_none() -> None:
    it = _WithoutSteps([Rank(n, 100 + n) for n in range(2)])
    it.run(20.0)
    _from_now(it, 0, 1)
    (found,) = it.run(4.0)
    assert found.because == "trainer/0 ranks 0-1: loss NaN"
    texts = [e.text for e in found.evidence]
    assert any(text.endswith("NaN or infinite") for text in texts) and not any("since step" in t for t in texts)


def test_the_rank_on_which_it_began_is_told() -> None:
    it = job()
    _from_now(it, 1)
    it.run(1.0)
    _from_now(it, 0, 2, 3)
    (found,) = it.run(4.0)
    assert found.because.endswith("first on trainer/0 rank 1")


def test_one_value_that_is_finite_again_is_no_finding_and_many_are() -> None:
    it = job()
    for repetition in range(12):
        _from_now(it, 0)
        early = it.run(0.5)
        _from_now(it, 0, loss=0.5)
        early += it.run(1.5)
        assert repetition >= 9 or not early
    assert len(it.standing) == 1
    assert it.run(70.0) == []


def test_a_watch_that_begins_late_and_a_stored_state_know_it_too() -> None:
    it = job()
    _from_now(it, 0, 1, 2, 3)
    it.run(4.0)
    late = TorchrunJob(it.ranks, now=it.now)
    (found,) = late.run(8.0)
    assert "loss, gradient norm or reward is NaN or infinite" in found.because
    it.detector = LiveDetector.resumed(it.detector._config, None, it.detector.state())
    assert len(it.run(2.0)) == 1
