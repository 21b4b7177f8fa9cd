"""What became of a process that a diagnosis names, and what a new watch is told of the past."""

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Fate
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import UNCOUNTED, AgentEventKind
from rolecall.detector.base.findings import LOG_FILE
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.processes import VANISHED_SECONDS
from tests.detector.live.torchrun_job import WALL, Rank, TorchrunJob, job

pytestmark = pytest.mark.usefixtures("incarnation")


def test_a_stopped_rank_that_goes_on_works_and_no_other_rank_speaks_for_it() -> None:
    it = job(2)
    it.ranks[1].is_stopped = True
    (found,) = it.run(8.0)
    (who,) = found.suspects
    assert found.fault_class is FaultClass.HANG and who == it.suspect(1)
    assert it.detector.fate(who)[0] is Fate.UNKNOWN
    assert it.detector.fate(it.suspect(0))[0] is Fate.UNKNOWN, "rank 0 waits"
    it.ranks[1].is_stopped = False
    assert it.run(8.0) == []
    fate, seen = it.detector.fate(who)
    assert fate is Fate.WORKS and "rank 1 (vm, pid 101) makes progress, last seen in step" in seen


def test_a_restarted_job_is_not_the_job_that_died() -> None:
    it = job(2)
    it.exits(it.ranks[1], signal="9")
    (found,) = it.run(3.0)
    (who,) = found.suspects
    it.ended_by_launcher(it.ranks[0])
    it.run(3.0)
    it.replaced_by(Rank(0, 200), Rank(1, 201))
    assert it.run(20.0) == []
    fate, seen = it.detector.fate(who)
    assert fate is Fate.ENDED
    assert seen == "trainer/0 rank 1 (pid 101) on vm has ended; trainer/0 rank 1 (vm, pid 201) has its rank now"


def test_code_that_failed_everywhere_ends_with_its_processes_and_not_with_its_step() -> None:
    it = job(2)
    began = WALL + it.now
    for r in it.ranks:
        it.raises(r, "ValueError", "bad sample", "f1")
        it.exits(r, code="1")
    (found,) = it.run(3.0)
    assert found.fault_class is FaultClass.USER_CODE and not it.detector.survives("trainer", began)
    it.replaced_by(Rank(0, 200), Rank(1, 201))
    assert it.run(5.0) == [], "the new processes have not raised it"
    assert not it.detector.survives("trainer", began)


def test_a_new_watch_says_nothing_of_a_job_that_was_over_before() -> None:
    gone = [Rank(0, 100, alive=False), Rank(1, 101, alive=False)]
    late = TorchrunJob([])
    for r in gone:
        late.raises(r, "ValueError", "bad sample", "f1", ago=60.0)
        late.exits(r, ago=59.0, code="1")
    late.ranks = [Rank(0, 200), Rank(1, 201)]
    late.register(*late.ranks)
    for _ in range(20):
        assert late.run(0.5) == []
    late.exits(late.ranks[1], signal="9")
    (found,) = late.run(3.0)
    assert [s.rank for s in found.suspects] == [1]


def test_a_new_watch_is_told_of_a_rank_that_its_job_still_waits_for() -> None:
    late = TorchrunJob([])
    late.ranks = [Rank(0, 100), Rank(1, 101, alive=False)]
    for r in late.ranks:
        late.event(AgentEventKind.REGISTERED, r, 120.0)
    late.exits(late.ranks[1], ago=5.0, signal="9")
    (found,) = late.run(3.0)
    assert found.fault_class is FaultClass.CRASH and [s.rank for s in found.suspects] == [1]


def test_the_exit_of_a_job_that_is_not_restarted_is_forgotten() -> None:
    it = job(2)
    it.exits(it.ranks[1], signal="9")
    it.ended_by_launcher(it.ranks[0])
    (found,) = it.run(3.0)
    it.ranks = []
    it.run(VANISHED_SECONDS)
    assert it.detector.fate(found.suspects[0])[0] is Fate.ENDED
    assert it.standing == [found]
    # A watch that may act keeps it until the replica is replaced.
    left = [] if it.incarnation == UNCOUNTED else [found]
    assert it.run(900.0) == left and len(it.detector.processes()) == 2 * len(left)


def test_code_that_failed_in_an_earlier_job_hides_no_hang_of_the_present_one() -> None:
    it = job(2)
    for r in it.ranks:
        it.raises(r, "ValueError", "bad sample", "f1")
        it.exits(r, code="1")
    it.run(3.0)
    it.replaced_by(Rank(0, 200), Rank(1, 201))
    it.run(20.0)
    it.ranks[1].is_stopped = True
    (found,) = it.run(8.0)
    assert found.fault_class is FaultClass.HANG and found.suspects == (it.suspect(1),)


def test_ranks_that_wait_for_each_other_are_named_once_each() -> None:
    it = job(4)
    for r in it.ranks:
        r.waits = True
    (found,) = it.run(30.0)
    assert found.fault_class is FaultClass.CANNOT_TELL
    assert found.because.startswith("trainer/0 ranks 0-3 make no progress in step")


def test_a_crash_names_the_step_of_the_exit_and_the_log() -> None:
    """Fast steps pass between the newest sample and the exit."""
    it = job(2)
    it.ranks[1].step += 4
    step = it.ranks[1].step
    it.exits(it.ranks[1], signal="9", log_file="/logs/1/stderr.log")
    it.ranks[1].step -= 4
    (found,) = it.run(3.0)
    assert f"process exited on signal 9 in step {step};" in found.because
    assert [e.text for e in found.evidence if e.kind == LOG_FILE] == ["/logs/1/stderr.log"]


def _pids(it: TorchrunJob) -> list[int]:
    return sorted(s.process.pid for s in it.detector.processes() if s.process is not None)


def test_a_rank_that_ended_unseen_hides_no_fault_of_the_smaller_job() -> None:
    it = job(3)
    it.replaced_by(Rank(0, 200), Rank(1, 201))  # the agent was down, and has not seen how rank 2 ended
    unseen = [102] if it.incarnation == UNCOUNTED else []  # another incarnation ends it
    assert it.run(VANISHED_SECONDS - 1.0) == [] and _pids(it) == [*unseen, 200, 201]
    assert it.run(5.0) == [] and _pids(it) == [200, 201]
    for r in it.ranks:
        it.raises(r, "ValueError", "bad sample", "f1")
        it.exits(r, code="1")
    (found,) = it.run(3.0)
    assert "all 2 ranks of role trainer raised it" in found.because


def test_ranks_of_a_node_that_left_while_no_watch_ran_are_closed_and_those_of_a_silent_one_are_kept() -> None:
    it = job(2)

    def resumed(seconds: int, *silent: str) -> LiveDetector:
        """A watch after a pause, to which no agent responds."""
        detector = LiveDetector.resumed(DetectorConfig(), None, it.detector.state())
        begun = WALL + it.now + 3600.0
        unreachable = tuple((node, begun, "timeout") for node in silent)
        for at in range(seconds + 1):
            detector.observe(Observation(wall_at=begun + at, unreachable=unreachable))
        return detector

    assert len(resumed(int(VANISHED_SECONDS)).processes()) == 2
    assert not resumed(int(VANISHED_SECONDS) + 1).processes()
    assert len(resumed(int(VANISHED_SECONDS) + 1, "vm").processes()) == 2


def test_ranks_of_an_agent_that_samples_nothing_are_kept_and_one_that_is_shown_again_is_back() -> None:
    it = job(2)
    ranks, it.ranks = it.ranks, []
    it.run(2 * VANISHED_SECONDS)
    assert _pids(it) == [100, 101]
    it.ranks = ranks[:1]
    it.run(1.0)
    assert _pids(it) == [100]
    it.ranks = ranks
    assert it.run(20.0) == [] and _pids(it) == [100, 101]
    ranks[1].is_stopped = True
    (found,) = it.run(10.0)
    assert found.fault_class is FaultClass.HANG and found.suspects == (it.suspect(1),)
