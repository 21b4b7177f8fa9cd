"""Jobs whose steps come from torch's hooks: who holds the others up, and who left a collective out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import UNCOUNTED, AgentEvent, AgentEventKind, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.recovery.advice import what_to_do
from tests.detector.live import torchrun_job

pytestmark = pytest.mark.usefixtures("incarnation")

NODE = NodeId("node-1")
SECONDS = 0.2
WALL = 1_700_000_000.0


def _is_counted() -> bool:
    return torchrun_job.FIRST_INCARNATION != UNCOUNTED


@dataclass
class Rank:
    """Does a step a second until it is told otherwise. `fixed`: fields of its samples that no longer change."""

    number: int
    fixed: dict[str, Any] = field(default_factory=dict)
    beats: bool = True
    cpu: float = 0.9
    exited: AgentEvent | None = None
    sampled: bool = True
    starved: bool = False


class Job:
    """`progress` and collectives of healthy ranks follow the time: two collectives a step, one after it."""

    def __init__(self, num_ranks: int = 4) -> None:
        self.ranks = [Rank(n) for n in range(num_ranks)]
        self.detector = LiveDetector(DetectorConfig(), {}, foreign=_is_counted())
        self.now, self.standing = 0.0, list[Diagnosis]()
        self.events: list[AgentEvent] = []
        self.pulled: tuple[Finding, ...] = ()
        self._cpu, self._beats, self._delay = [0.0] * num_ranks, [0] * num_ranks, [0.0] * num_ranks

    def _process(self, rank: Rank) -> ProcessId:
        return ProcessId(node=NODE, pid=100 + rank.number, start_ticks=7)

    def _sample(self, rank: Rank) -> ProcessSample:
        step = int(self.now)
        in_step = self.now - step > 0.5
        usual: dict[str, Any] = {
            "phase": "step" if in_step else "wait",
            "phase_since": step + 0.5 * in_step,
            "phase_entries": 2 * step + in_step,
            "step": step,
            "progress": step,
            "progress_at": float(step),
            "exchanges": step + in_step,
            "collectives_issued": 3 * step + 1,
            "collectives_at_step": 3 * step,
            "collectives_at_begin": 3 * step + 1 if in_step else -1,
            "busy_seconds": 0.5 * step,
            "work_units": step,
        }
        self._cpu[rank.number] += rank.cpu * SECONDS
        self._beats[rank.number] += 2 * rank.beats
        self._delay[rank.number] += 0.9 * SECONDS * rank.starved
        return ProcessSample(
            process=self._process(rank),
            role="trainer",
            replica="trainer/0",
            rank=rank.number,
            incarnation=torchrun_job.FIRST_INCARNATION,
            at=self.now,
            wall_at=WALL + self.now,
            alive=True,
            page_ok=True,
            beats=self._beats[rank.number],
            cpu_seconds=self._cpu[rank.number],
            main_run_delay_seconds=self._delay[rank.number],
            **{**usual, **rank.fixed},
        )

    def run(self, seconds: float) -> list[Diagnosis]:
        for _ in range(round(seconds / SECONDS)):
            self.now += SECONDS
            living = tuple(self._sample(r) for r in self.ranks if r.sampled and r.exited is None)
            exits = (r.exited for r in self.ranks if r.exited and r.exited.at > self.now - SECONDS)
            events, self.events = (*self.events, *exits), []
            batch = SampleBatch(
                node=NODE,
                agent_pid=1,
                cursor=0,
                lost=0,
                at=self.now,
                wall_at=WALL + self.now,
                processes=living,
                hosts=(),
            )
            observation = Observation(
                wall_at=WALL + self.now, batches=(batch,), events=events, pulled_findings=self.pulled
            )
            self.pulled = ()
            self.standing = self.detector.observe(observation)
        return self.standing

    def stand(self, numbers: Mapping[int, Mapping[str, Any]]) -> None:
        """From now on these ranks stand still, with these fields."""
        step = int(self.now)
        for number, fields in numbers.items():
            rank = self.ranks[number]
            at = {"phase_since": self.now, "phase_entries": 2 * step + 1, "step": step, "progress": step}
            at |= {"progress_at": float(step), "exchanges": step, "work_units": step, "busy_seconds": 0.5 * step}
            at |= {"collectives_at_step": 3 * step, "collectives_at_begin": -1, "collectives_issued": 3 * step + 1}
            rank.fixed, rank.cpu = {**at, **fields}, 0.01

    def exit(self, number: int, detail: Mapping[str, str]) -> None:
        self.ranks[number].exited = self._event(AgentEventKind.EXITED, number, detail)

    def raises(self, number: int, message: str, fingerprint: str) -> None:
        detail = {"type": "RuntimeError", "message": message, "fingerprint": fingerprint, "step": str(int(self.now))}
        self.events.append(self._event(AgentEventKind.EXCEPTION, number, detail))

    def _event(self, kind: AgentEventKind, number: int, detail: Mapping[str, str]) -> AgentEvent:
        rank = self.ranks[number]
        return AgentEvent(
            seq=number + 1,
            kind=kind,
            node=NODE,
            at=self.now + SECONDS / 2,
            wall_at=WALL + self.now + SECONDS / 2,
            process=self._process(rank),
            role="trainer",
            replica="trainer/0",
            rank=number,
            incarnation=torchrun_job.FIRST_INCARNATION,
            detail=dict(detail),
        )


@pytest.fixture
def job() -> Job:
    made = Job()
    assert made.run(14.0) == []
    return made


def test_the_rank_that_others_wait_for_is_named_although_all_are_in_the_same_step(job: Job) -> None:
    step = int(job.now)
    waiting = {n: {"phase": "step", "exchanges": step + 1, "collectives_issued": 3 * step + 2} for n in (0, 1, 3)}
    job.stand({2: {"phase": "step"}, **waiting})
    (found,) = job.run(6.0)
    assert found.fault_class is FaultClass.HANG and [s.rank for s in found.suspects] == [2]
    assert "blocked on a lock or a read" in found.because


def test_a_step_too_short_to_be_sampled_has_the_deadline_of_measured_steps() -> None:
    """On a busy machine every sample may fall between two steps."""
    job = Job()
    usual = job._sample
    job._sample = lambda rank: replace(usual(rank), phase="wait")  # type: ignore[method-assign]
    assert job.run(14.0) == []
    job._sample = usual  # type: ignore[method-assign]
    step = int(job.now)
    waiting = {n: {"phase": "step", "exchanges": step + 1, "collectives_issued": 3 * step + 2} for n in (0, 1, 3)}
    job.stand({2: {"phase": "step"}, **waiting})
    (found,) = job.run(6.0)
    assert found.fault_class is FaultClass.HANG and [s.rank for s in found.suspects] == [2]


def test_all_ranks_that_hang_in_the_reward_function_are_named(job: Job) -> None:
    """As when its server answers nobody: which one is named first is chance."""
    step = int(job.now)
    waiting = {n: {"phase": "step", "exchanges": step + 1, "collectives_issued": 3 * step + 2} for n in (0, 3)}
    job.stand({1: {"phase": "score"}, 2: {"phase": "score"}, **waiting})
    (found,) = job.run(8.0)
    assert found.fault_class is FaultClass.HANG and [s.rank for s in found.suspects] == [1, 2]
    assert found.because.startswith(
        "trainer/0 rank 1 (node-1, pid 101) and trainer/0 rank 2 (node-1, pid 102) are hung in their reward function: no "
        f"progress in score of step {step}"
    )


def test_ranks_between_two_steps_are_suspected_and_not_reported(job: Job) -> None:
    step = int(job.now)
    waiting = {n: {"phase": "step", "exchanges": step + 1, "collectives_issued": 3 * step + 2} for n in (0, 1, 3)}
    job.stand({2: {"phase": "wait"}, **waiting})
    assert job.run(6.0) == []
    (suspicion,) = job.detector.suspicions
    assert [s.rank for s in suspicion.suspects] == [0, 1, 2, 3] and suspicion.fault_class is FaultClass.CANNOT_TELL


def test_a_job_that_ends_after_a_long_pause_is_not_suspected(job: Job) -> None:
    job.stand({n: {"phase": "wait"} for n in range(4)})
    assert job.run(6.0) == []
    for n in range(4):
        job.events.append(job._event(AgentEventKind.FINISHED, n, {}))
    assert job.run(2.0) == [] and job.detector.suspicions == ()


def test_a_rank_that_works_between_two_steps_is_not_suspected(job: Job) -> None:
    job.stand({n: {"phase": "wait"} for n in range(4)})
    for rank in job.ranks:
        rank.cpu = 0.9
    assert job.run(6.0) == [] and job.detector.suspicions == ()


def test_a_pause_that_was_seen_before_is_not_suspected(job: Job) -> None:
    for _ in range(10):
        job.stand({n: {"phase": "wait"} for n in range(4)})
        job.run(4.0)
        for rank in job.ranks:
            rank.fixed, rank.cpu = {}, 0.9
        job.run(3.0)
    job.stand({n: {"phase": "wait"} for n in range(4)})
    assert job.run(6.0) == [] and job.detector.suspicions == ()


def test_the_longest_of_generations_between_two_steps_is_not_suspected(job: Job) -> None:
    for _ in range(9):
        job.stand({n: {"phase": "wait"} for n in range(4)})
        job.run(45.0)
        for rank in job.ranks:
            rank.fixed, rank.cpu = {}, 0.9
        job.run(3.0)
    job.stand({n: {"phase": "wait"} for n in range(4)})
    assert job.run(80.0) == [] and job.detector.suspicions == ()
    assert job.run(20.0) == []
    (suspicion,) = job.detector.suspicions
    assert "2 x second longest 45" in suspicion.because


def test_a_job_that_a_watch_meets_between_two_steps_is_suspected_late() -> None:
    """Nothing is known of its pauses, but how long its steps took: three times that, 120 s at least."""
    job = Job()
    job.now = 5000.0
    job.stand({n: {"phase": "wait", "step": 50, "progress": 50} for n in range(4)})
    assert job.run(110.0) == [] and job.detector.suspicions == ()
    assert job.run(200.0) == []
    (suspicion,) = job.detector.suspicions
    assert "(deadline 300.0 s = 3 x longest 100.00, little history yet)" in suspicion.because


def test_in_the_first_steps_a_stack_settles_which_rank_the_others_wait_for() -> None:
    """A job whose steps take minutes may hang before it has made enough of them for a suspicion."""
    job = Job()
    job.run(4.0)
    job.stand({3: {"phase": "wait"}, **{n: {"phase": "step"} for n in range(3)}})
    (tie,) = job.run(150.0)
    assert tie.fault_class is FaultClass.CANNOT_TELL and "rank 3 of trainer/0 has not begun it" in tie.because
    (late,) = [s for s in tie.suspects if s.rank == 3]
    job.pulled = (_stack(job, late),)
    (found,) = job.run(SECONDS)
    assert found.fault_class is FaultClass.HANG and [s.rank for s in found.suspects] == [3]


def test_a_long_checkpoint_is_not_reported_once_such_pauses_are_known(job: Job) -> None:
    """Rank 0 writes it while the others stand in their next step; a hundred and more steps lie between two of them."""

    def checkpoint(seconds: float) -> list[Diagnosis]:
        job.stand({0: {"phase": "wait"}, **{n: {"phase": "step"} for n in (1, 2, 3)}})
        reported = job.run(seconds)
        for rank in job.ranks:
            rank.fixed, rank.cpu = {}, 0.9
        assert job.run(150.0) == []
        return reported

    for _ in range(2):
        (tie,) = checkpoint(90.0)
        assert "rank 0 of trainer/0 has not begun it" in tie.because
    assert checkpoint(150.0) == []
    (tie,) = checkpoint(200.0)
    assert tie.fault_class is FaultClass.CANNOT_TELL, "twice as long as the second longest is told"


def _stack(job: Job, *suspects: Suspect) -> Finding:
    return Finding(
        detector="stacks",
        suspects=suspects,
        fault_class=FaultClass.HANG,
        onset=WALL + job.now - 6.0,
        detected_at=WALL + job.now,
        confidence=0.9,
        because="stacks",
    )


@pytest.mark.parametrize("phase", ["step", "wait"])
def test_a_collective_that_times_out_after_a_hang_of_all_blames_no_rank_alone(job: Job, phase: str) -> None:
    """NCCL's watchdog aborts the ranks that wait, one after another, and the launcher ends the rest."""
    job.stand({n: {"phase": phase} for n in range(4)})
    before = job.run(100.0)
    assert [d.fault_class for d in before] == [FaultClass.CANNOT_TELL] * (phase == "step")
    job.exit(1, {"signal": "6", "cause": "crashed"})
    job.run(SECONDS)
    job.exit(0, {"signal": "6", "cause": "crashed"})
    for n in (2, 3):
        job.events.append(job._event(AgentEventKind.FINISHED, n, {}))
        job.exit(n, {"signal": "15"})
    (found,) = job.run(4.0)
    assert found.fault_class is FaultClass.CRASH and [s.rank for s in found.suspects] == [1, 0, 2, 3]
    assert found.confidence == 0.5 and "; trainer/0 ranks 0-3 had stood still for 10" in found.because
    assert found.because.endswith("the ranks that wait in it, so the cause is not known")


def test_a_rank_that_aborts_at_work_between_two_steps_is_named(job: Job) -> None:
    job.stand({0: {"phase": "wait"}, **{n: {"phase": "step"} for n in (1, 2, 3)}})
    job.ranks[0].cpu = 0.9
    job.run(90.0)
    job.exit(0, {"signal": "6", "cause": "crashed"})
    (found,) = job.run(4.0)
    assert found.fault_class is FaultClass.CRASH and [s.rank for s in found.suspects] == [0]
    assert found.confidence == 1.0


@pytest.mark.parametrize(("beats", "kind"), [(False, "process stopped, no heartbeat"), (True, "heartbeat continues")])
def test_how_a_rank_hangs_that_its_stack_names_is_told_by_its_heartbeats(job: Job, beats: bool, kind: str) -> None:
    job.stand({n: {"phase": "wait"} for n in range(4)})
    job.ranks[3].beats, job.ranks[3].starved = beats, True  # so that its heartbeats alone do not name it
    assert job.run(6.0) == []
    job.pulled = (_stack(job, *job.detector.suspicions[0].suspects[3:]),)
    (found,) = job.run(SECONDS)
    assert [s.rank for s in found.suspects] == [3] and found.because.startswith(f"stacks; {kind}")


@pytest.mark.parametrize(
    ("phase", "state", "others", "unreported_seconds"),
    [
        pytest.param("wait", "R", "wait", 28.0, id="in an evaluation"),  # as while it pickles the results
        pytest.param("wait", "R", "step", 2.0, id="between two steps"),
        pytest.param("wait", "T", "step", 2.0, id="stopped between two steps"),
        pytest.param("step", "R", "step", 2.0, id="in a step"),
    ],
)
def test_how_long_the_interpreter_may_be_held(
    job: Job, phase: str, state: str, others: str, unreported_seconds: float
) -> None:
    waiting = {n: {"phase": others, "exchanges": int(job.now) + (others == "step")} for n in (0, 1, 3)}
    job.stand({2: {"phase": phase, "proc_state": state}, **waiting})
    job.ranks[2].beats, job.ranks[2].cpu = False, 0.0 if state == "T" else 0.9
    assert job.run(unreported_seconds) == []
    (found,) = job.run(3.0)
    assert found.fault_class is FaultClass.HANG and [s.rank for s in found.suspects] == [2]


@pytest.mark.parametrize("phase", ["step", "wait"])
@pytest.mark.parametrize(
    ("state", "stopped", "says"),
    [
        ("t", [2], "trainer/0 rank 2 (node-1, pid 102) is traced by a debugger (state t) for"),
        ("T", [0, 1, 2, 3], "are stopped (state T) together with all ranks of their job"),
    ],
)
def test_what_is_stopped_on_purpose_is_told_and_not_accused(
    job: Job, phase: str, state: str, stopped: list[int], says: str
) -> None:
    waiting = {n: {"phase": "step", "exchanges": int(job.now) + 1} for n in range(4)}
    job.stand(waiting | {n: {"phase": phase, "proc_state": state} for n in stopped})
    for n in stopped:
        job.ranks[n].beats, job.ranks[n].cpu = False, 0.0
    job.events.append(job._event(AgentEventKind.NCCL, 2, {"what": "suspicious", "communicator": "a", "pids": "102"}))
    (found,) = job.run(40.0)
    assert found.fault_class is FaultClass.CANNOT_TELL and [s.rank for s in found.suspects] == stopped
    assert says in found.because and job.detector.suspicions == () and what_to_do(found).startswith("to let ")
    job.events.append(job._event(AgentEventKind.NCCL, 2, {"what": "advances", "communicator": "a"}))
    for rank in job.ranks:
        rank.fixed, rank.cpu, rank.beats = {}, 0.9, True
    assert job.run(3.0) == []


def test_of_ranks_that_are_stopped_one_after_another_each_is_accused(job: Job) -> None:
    for n in range(4):
        job.stand({n: {"phase": "step", "proc_state": "T"}})
        job.ranks[n].beats, job.ranks[n].cpu = False, 0.0
        (found,) = job.run(5.0)
    assert found.fault_class is FaultClass.HANG and {s.rank for s in found.suspects} == {0, 1, 2, 3}


def skipping(job: Job) -> None:
    """Rank 2 goes on to its next step; the others wait in the collective before it."""
    step = int(job.now)
    begun = {"collectives_issued": 3 * step + 1, "collectives_at_begin": 3 * step}
    job.stand({2: {"phase": "step", **begun}, **{n: {"phase": "wait"} for n in (0, 1, 3)}})


def test_a_rank_that_left_a_collective_out_is_named(job: Job) -> None:
    skipping(job)
    (found,) = job.run(3.0)
    assert found.fault_class is FaultClass.USER_CODE and [s.rank for s in found.suspects] == [2]
    assert "left out a collective" in found.because


def test_the_abort_of_another_rank_is_not_what_is_told(job: Job) -> None:
    step = int(job.now)
    skipping(job)
    job.run(SECONDS)
    for rank in job.ranks:  # those of ranks 1 and 2 are from before they entered their collectives
        rank.fixed["collectives_issued"] = 3 * step if rank.number in (1, 2) else 3 * step + 1
    job.exit(1, {"signal": "6", "cause": "crashed", "collectives": f"{step} {3 * step} {3 * step} -1"})
    assert all(d.fault_class is FaultClass.USER_CODE for d in job.run(0.4))
    job.exit(2, {"signal": "15", "collectives": f"{step} {3 * step} {3 * step} {3 * step}"})
    (found,) = job.run(4.0)
    assert found.fault_class is FaultClass.USER_CODE and [s.rank for s in found.suspects] == [2]


def test_an_abort_waits_until_the_other_ranks_have_been_sampled(job: Job) -> None:
    """On a busy machine the samples of the rank that left a collective out come after the abort."""
    step = int(job.now)
    skipping(job)
    for rank in job.ranks:
        rank.sampled = False
    job.exit(1, {"signal": "6", "cause": "crashed", "collectives": f"{step} {3 * step + 1} {3 * step} -1"})
    assert job.run(2.0) == []
    for rank in job.ranks:
        rank.sampled = True
    (found,) = job.run(2.0)
    assert found.fault_class is FaultClass.USER_CODE and [s.rank for s in found.suspects] == [2]


def test_an_abort_of_which_nothing_else_is_heard_is_a_crash(job: Job) -> None:
    for rank in job.ranks:
        rank.sampled = False
    job.exit(1, {"signal": "6", "cause": "crashed"})
    (found,) = job.run(4.0)
    assert found.fault_class is FaultClass.CRASH and [s.rank for s in found.suspects] == [1]


@pytest.mark.parametrize("aborted", [False, True])
def test_of_two_ranks_the_one_that_enters_fewer_than_usual_left_one_out(aborted: bool) -> None:
    job = Job(2)
    job.run(12.0)
    step = int(job.now)
    begun = {"collectives_issued": 3 * step + 1, "collectives_at_begin": 3 * step}
    job.stand({1: {"phase": "step", **begun}, 0: {"phase": "wait"}})
    if aborted:
        job.exit(0, {"signal": "6", "cause": "crashed", "collectives": f"{step} {3 * step} {3 * step} -1"})
    (found,) = job.run(3.0)
    assert found.fault_class is FaultClass.USER_CODE and [s.rank for s in found.suspects] == [1]
    assert "rank 0 (node-1, pid 100) is in the first" in found.because


def test_what_is_usual_of_two_ranks_is_stored_with_the_rest() -> None:
    job = Job(2)
    job.run(12.0)
    stored = json.loads(json.dumps(job.detector.state()))
    again = LiveDetector.resumed(DetectorConfig(), {}, stored, foreign=_is_counted())
    assert again.state() == job.detector.state() and "UsualCollectives" in json.dumps(stored)


def test_of_two_ranks_the_one_that_enters_more_than_usual_is_the_odd_one_and_none_is_named() -> None:
    """An evaluation on rank 0 alone, say."""
    job = Job(2)
    job.run(12.0)
    step = int(job.now)
    begun = {"collectives_issued": 3 * step + 2, "collectives_at_begin": 3 * step + 1}
    job.stand({1: {"phase": "step", **begun}, 0: {"phase": "wait", "collectives_issued": 3 * step + 2}})
    assert all(d.fault_class is not FaultClass.USER_CODE for d in job.run(3.0))


def test_of_two_ranks_the_one_that_went_on_is_not_named_if_the_other_has_entered_no_more() -> None:
    """A step with fewer collectives than those before, say, and a rank that hangs at its end."""
    job = Job(2)
    job.run(12.0)
    step = int(job.now)
    begun = {"collectives_issued": 3 * step + 1, "collectives_at_begin": 3 * step}
    job.stand({1: {"phase": "step", **begun}, 0: {"phase": "wait", "collectives_issued": 3 * step}})
    assert all(d.fault_class is not FaultClass.USER_CODE for d in job.run(3.0))


def test_of_two_ranks_none_is_named_before_their_usual_number_is_known() -> None:
    job = Job(2)
    job.run(1.0)
    step = int(job.now)
    begun = {"collectives_issued": 3 * step + 1, "collectives_at_begin": 3 * step}
    job.stand({1: {"phase": "step", **begun}, 0: {"phase": "wait"}})
    assert all(d.fault_class is not FaultClass.USER_CODE for d in job.run(3.0))


def test_an_abort_that_no_skipped_collective_explains_is_a_crash(job: Job) -> None:
    job.exit(1, {"signal": "6", "cause": "crashed"})
    (found,) = job.run(2.0)
    assert found.fault_class is FaultClass.CRASH and [s.rank for s in found.suspects] == [1]


def test_who_holds_the_interpreter_before_a_collective_between_two_steps_is_found_soon(job: Job) -> None:
    step = int(job.now)
    waiting = {n: {"phase": "wait", "collectives_issued": 3 * step + 3} for n in (0, 1, 3)}
    job.stand({2: {"phase": "wait", "collectives_issued": 3 * step + 2}, **waiting})
    job.ranks[2].beats = False
    (found,) = job.run(6.0)
    assert found.fault_class is FaultClass.HANG and [s.rank for s in found.suspects] == [2]


def test_a_process_group_that_is_created_anew_counts_from_0(job: Job) -> None:
    """As slime does between two steps."""
    others = {n: {"phase": "wait", "collectives_issued": 1} for n in (1, 2, 3)}
    job.stand({0: {"phase": "step", "collectives_issued": 2, "collectives_at_begin": 1}, **others})
    assert not any(f.fault_class is FaultClass.USER_CODE for f in job.run(6.0))


def test_a_rank_that_does_in_its_step_what_others_do_between_two_is_not_said_to_have_left_one_out(job: Job) -> None:
    step = int(job.now)
    begun = {"collectives_issued": 3 * step, "collectives_at_begin": 3 * step}
    job.stand({2: {"phase": "step", **begun}, **{n: {"phase": "wait"} for n in (0, 1, 3)}})
    assert all(d.fault_class is not FaultClass.USER_CODE for d in job.run(3.0))


def test_a_rank_that_is_ahead_in_entering_is_not_said_to_have_left_one_out(job: Job) -> None:
    step = int(job.now)
    begun = {"collectives_issued": 3 * step + 1, "collectives_at_begin": 3 * step + 1}
    job.stand({2: {"phase": "step", **begun}, **{n: {"phase": "wait"} for n in (0, 1, 3)}})
    assert all(d.fault_class is not FaultClass.USER_CODE for d in job.run(3.0))


def test_a_kernel_that_kills_for_memory_is_told_by_the_exit(job: Job) -> None:
    job.exit(3, {"signal": "9", "cause": "oom"})
    (found,) = job.run(1.0)
    assert found.fault_class is FaultClass.CRASH and "OOM killer" in found.because


def test_an_exception_is_told_once_its_peers_have_failed_for_it(job: Job) -> None:
    job.stand({n: {"phase": "step"} for n in range(4)})
    job.raises(3, "device-side assert triggered on this rank alone", "aaaa")
    assert job.run(0.8) == []
    job.exit(3, {"code": "1"})
    for n in range(3):
        job.raises(n, "Connection closed by peer [127.0.0.1]:4711", "bbbb")
    (found,) = job.run(2.2)
    assert found.fault_class is FaultClass.CRASH and [s.rank for s in found.suspects] == [3]
