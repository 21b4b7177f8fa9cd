"""Processes of jobs that know nothing of rolecall: what is reported about them, and above all what is not."""

import json

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Fate, Suspect
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import NO_PAGE, UNCOUNTED, AgentEvent, AgentEventKind, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.processes import VANISHED_SECONDS
from rolecall.detector.live.stages.exits.uninstrumented import (
    ENDED_SECONDS,
    GATHER_SECONDS,
    STARVED_SECONDS,
    STOPPED_SECONDS,
    STUCK_SECONDS,
)

WALL = 1_000_000.0
ASKED = {"signal": "15", "cause": "finished"}
KILLED = {"signal": "9", "cause": "killed"}


class Job:
    """Four ranks on two nodes and two engines, looked at once a second."""

    def __init__(self) -> None:
        self.at, self.seq = 100.0, 0
        self.who = {f"trainer/0:{n}": ("trainer", n) for n in range(4)} | {
            f"rollout/{n}:0": ("rollout", 0) for n in (0, 1)
        }
        self.pids = {name: 1000 + n for n, name in enumerate(self.who)}
        self.dead: dict[str, int] = {}
        self.state = dict.fromkeys(self.who, "S")
        self.cpu, self.delay = dict.fromkeys(self.who, 0.0), dict.fromkeys(self.who, 0.0)
        self.cpu_rate, self.delay_rate = dict.fromkeys(self.who, 0.5), dict.fromkeys(self.who, 0.0)
        self.events: list[AgentEvent] = []
        self.detector = LiveDetector(DetectorConfig(), {})

    def node(self, name: str) -> NodeId:
        return NodeId("node-2" if name in ("trainer/0:2", "trainer/0:3", "rollout/1:0") else "node-1")

    def process(self, name: str, pid: int | None = None) -> ProcessId:
        return ProcessId(node=self.node(name), pid=pid or self.pids[name], start_ticks=5)

    def tell(self, kind: AgentEventKind, name: str, detail: dict[str, str]) -> None:
        self.seq += 1
        role, rank = self.who[name]
        event = AgentEvent(
            seq=self.seq,
            kind=kind,
            node=self.node(name),
            at=self.at,
            wall_at=WALL + self.at,
            process=self.process(name),
            role=role,
            replica=name.partition(":")[0],
            rank=rank,
            incarnation=UNCOUNTED,
            detail=detail,
        )
        self.events.append(event)

    def ends(self, name: str, detail: dict[str, str]) -> None:
        if detail.get("cause") == "finished":
            self.tell(AgentEventKind.FINISHED, name, {"reason": "asked"})
        self.tell(AgentEventKind.EXITED, name, detail)
        self.dead[name] = self.pids[name]

    def sample(self, name: str, pid: int, alive: bool) -> ProcessSample:
        role, rank = self.who[name]
        return ProcessSample(
            process=self.process(name, pid),
            role=role,
            replica=name.partition(":")[0],
            rank=rank,
            incarnation=UNCOUNTED,
            at=self.at,
            wall_at=WALL + self.at,
            alive=alive,
            page_ok=False,
            phase=NO_PAGE,
            proc_state=self.state[name] if alive else "X",
            cpu_seconds=self.cpu[name],
            main_run_delay_seconds=self.delay[name],
        )

    def run(self, seconds: float) -> dict[str, str]:
        """Key -> sentence of what stands at the end."""
        standing: dict[str, str] = {}
        end = self.at + seconds
        while self.at < end:
            self.at += 1.0
            batches = []
            for node in ("node-1", "node-2"):
                here = [n for n in self.who if self.node(n) == node]
                samples = [self.sample(n, self.pids[n], True) for n in here if self.pids[n] != self.dead.get(n)]
                samples += [self.sample(n, self.dead[n], False) for n in here if n in self.dead]
                batches.append(
                    SampleBatch(
                        node=NodeId(node),
                        agent_pid=1,
                        cursor=1,
                        lost=0,
                        at=self.at,
                        wall_at=WALL + self.at,
                        processes=tuple(samples),
                        hosts=(),
                    )
                )
            for name in self.who:
                self.cpu[name] += self.cpu_rate[name]
                self.delay[name] += self.delay_rate[name]
            seen = Observation(wall_at=WALL + self.at, batches=tuple(batches), events=tuple(self.events))
            self.events = []
            standing = {d.key: d.because for d in self.detector.observe(seen)}
        return standing


@pytest.fixture
def job() -> Job:
    it = Job()
    assert not it.run(3)
    return it


def test_silence_is_no_hang(job: Job) -> None:
    assert not job.run(600)


def test_a_killed_rank_is_named_and_those_that_end_after_it_are_not(job: Job) -> None:
    job.ends("trainer/0:2", KILLED)
    assert not job.run(GATHER_SECONDS - 1)
    job.ends("trainer/0:0", {"code": "1", "cause": "exit"})  # its collective raised
    job.ends("trainer/0:1", ASKED)
    standing = job.run(5)
    assert set(standing) == {"crash:trainer/0#0"}
    assert "trainer/0 rank 2 (node-2, pid 1002) crashed: process exited on signal 9" in standing["crash:trainer/0#0"]
    job.ends("rollout/1:0", {"code": "1", "cause": "exit"})
    assert set(job.run(5)) == {"crash:trainer/0#0"}
    job.ends("rollout/0:0", {"signal": "11", "cause": "crashed"})  # no one's consequence
    assert set(job.run(5)) == {"crash:trainer/0#0", "crash:rollout/0#0"}


ERROR = {"code": "1", "cause": "exit"}
ABORT = {"signal": "6", "cause": "crashed"}


@pytest.mark.parametrize(
    ("who", "seconds", "accused"),
    [
        ("rollout/1:0", 5, False),  # its job is being taken down
        ("rollout/1:0", 300, True),  # too late for that, too early for a collective that both were in
        ("rollout/1:0", 610, False),  # a collective's timeout
        ("rollout/1:0", 950, True),
    ],
)
@pytest.mark.parametrize("how", [ERROR, ABORT])
def test_whose_error_is_the_consequence_of_an_exit(
    job: Job, who: str, seconds: int, accused: bool, how: dict[str, str]
) -> None:
    job.ends("trainer/0:2", KILLED)
    job.run(seconds)
    job.ends(who, how)
    assert ("crash:rollout/1#0" in job.run(5)) == accused


def test_an_exit_drags_others_along_as_long_as_one_follows_another(job: Job) -> None:
    job.ends("trainer/0:2", KILLED)
    job.run(200)
    job.ends("trainer/0:0", ABORT)  # its collective gave up: the job's end begins here
    job.run(30)
    job.ends("rollout/1:0", ERROR)
    assert set(job.run(5)) == {"crash:trainer/0#0"}


def test_when_the_first_began_again_those_that_followed_it_are_not_accused(job: Job) -> None:
    job.ends("trainer/0:2", KILLED)
    job.run(1)
    job.ends("trainer/0:0", ERROR)
    assert job.run(5)
    job.pids["trainer/0:2"] = 2000
    job.tell(AgentEventKind.REGISTERED, "trainer/0:2", {})
    assert not job.run(5)
    job.ends("trainer/0:1", ERROR)  # seen late, and of the old fault
    assert not job.run(5)
    for n in (0, 1):
        job.pids[f"trainer/0:{n}"] = 2001 + n
        job.tell(AgentEventKind.REGISTERED, f"trainer/0:{n}", {})
    assert not job.run(5)
    job.ends("trainer/0:1", ERROR)
    assert "pid 2002" in job.run(5)["crash:trainer/0#0"], "a fault of the job that runs now"


def test_every_rank_that_is_lost_is_named_and_a_second_fault_elsewhere_is_reported(job: Job) -> None:
    job.ends("trainer/0:0", KILLED)
    job.run(1)
    job.ends("trainer/0:1", ERROR)
    (reported,) = job.run(5).values()
    assert (
        "trainer/0 rank 0 (node-1, pid 1000) crashed" in reported
        and "trainer/0 rank 1 (node-1, pid 1001) with code 1" in reported
    )
    job.ends("trainer/0:3", {"signal": "11", "cause": "crashed"})  # no peer's death does that
    ((key, reported),) = job.run(5).items()
    assert key == "crash:trainer/0#0,trainer/0#0"
    assert "independent second fault: trainer/0 rank 3 (node-2, pid 1003) crashed" in reported


def test_the_first_error_is_named_where_all_end_with_errors(job: Job) -> None:
    job.ends("trainer/0:3", {"code": "1", "cause": "exit"})
    job.run(1)
    for name in ("trainer/0:0", "trainer/0:1", "trainer/0:2"):
        job.ends(name, {"code": "1", "cause": "exit"})
    standing = job.run(5)
    assert "trainer/0 rank 3" in standing["crash:trainer/0#0"] and len(standing) == 1


@pytest.mark.parametrize(
    "detail", [{"code": "0", "cause": "finished"}, ASKED, {"code": "1", "cause": "exit"}, {"cause": "unknown"}]
)
def test_a_job_that_ends_as_a_whole_is_no_fault(job: Job, detail: dict[str, str]) -> None:
    names = list(job.who)
    for name in names:
        job.ends(name, detail)
        if name == names[3]:
            assert not job.run(1)
    assert not job.run(30)


def test_a_job_that_was_ended_as_a_whole_is_not_accused_while_the_next_one_starts(job: Job) -> None:
    for name in job.who:
        job.ends(name, KILLED)
    assert not job.run(30)
    for n in range(3):  # rank after rank; the fourth is still to come
        job.pids[f"trainer/0:{n}"] = 2000 + n
        job.tell(AgentEventKind.REGISTERED, f"trainer/0:{n}", {})
        assert not job.run(2)
    job.ends("trainer/0:2", ERROR)
    assert "pid 2002" in job.run(5)["crash:trainer/0#0"], "a fault of the job that runs now"


def test_one_rank_that_dies_and_takes_all_down_with_it_is_a_fault(job: Job) -> None:
    job.ends("rollout/0:0", KILLED)
    for name in job.who.keys() - {"rollout/0:0"}:
        job.ends(name, ASKED)
    assert "no process of the job is left" in job.run(5)["crash:rollout/0#0"]


def test_an_exit_of_which_nothing_is_known_is_reported_only_while_its_job_goes_on(job: Job) -> None:
    job.ends("rollout/0:0", {"cause": "unknown"})
    assert not job.run(8)
    assert "status unknown" in job.run(5)["crash:rollout/0#0"]


def test_a_successor_ends_the_finding_though_the_dead_is_shown_beside_it(job: Job) -> None:
    job.ends("rollout/0:0", KILLED)
    assert job.run(5)
    job.pids["rollout/0:0"] = 2000
    job.tell(AgentEventKind.REGISTERED, "rollout/0:0", {})
    assert not job.run(5)
    job.ends("rollout/0:0", KILLED)
    assert "pid 2000" in job.run(5)["crash:rollout/0#0"]


def test_an_exit_is_reported_for_so_long_and_then_forgotten(job: Job) -> None:
    job.ends("rollout/0:0", KILLED)
    job.run(5)
    del job.who["rollout/0:0"]
    assert job.run(60)
    assert not job.run(1200)


@pytest.mark.parametrize(
    ("state", "fault", "says"),
    [("T", "hang", "process stopped (state T) for"), ("t", "cannot_tell", "is traced by a debugger (state t) for")],
)
def test_a_stopped_process_is_reported_after_seconds_and_no_longer_when_it_goes_on(
    job: Job, state: str, fault: str, says: str
) -> None:
    job.state["trainer/0:1"], job.cpu_rate["trainer/0:1"] = state, 0.0
    assert not job.run(STOPPED_SECONDS - 1)
    reported = job.run(4)[f"{fault}:trainer/0#0"]
    assert "trainer/0 rank 1" in reported and says in reported
    job.state["trainer/0:1"] = "S"
    assert not job.run(2)


def test_a_role_whose_ranks_are_all_stopped_at_once_is_not_accused(job: Job) -> None:
    trainers = [name for name, (role, _) in job.who.items() if role == "trainer"]
    for name in trainers:
        job.state[name], job.cpu_rate[name] = "T", 0.0
    (key, because), *others = job.run(STOPPED_SECONDS + 4).items()
    assert key.startswith("cannot_tell:trainer/0#0") and "together with all ranks of their job" in because
    assert not others


def test_of_two_stopped_ranks_of_a_replica_both_are_named(job: Job) -> None:
    job.state["trainer/0:1"], job.cpu_rate["trainer/0:1"] = "T", 0.0
    assert "trainer/0 rank 1" in job.run(STOPPED_SECONDS + 1)["hang:trainer/0#0"]
    job.state["trainer/0:3"], job.cpu_rate["trainer/0:3"] = "T", 0.0
    (both,) = job.run(STOPPED_SECONDS + 1).values()
    assert "trainer/0 rank 1" in both and "trainer/0 rank 3" in both
    job.state["trainer/0:1"] = "S"
    assert list(job.run(2)) == ["hang:trainer/0#0"], "one of them, as before"


def test_the_exit_of_a_rank_takes_precedence_over_a_stalled_rank(job: Job) -> None:
    job.state["trainer/0:1"], job.cpu_rate["trainer/0:1"] = "T", 0.0
    assert not job.run(STOPPED_SECONDS - 1)
    job.ends("trainer/0:2", KILLED)
    assert "trainer/0 rank 2" in job.run(5)["crash:trainer/0#0"]


def test_a_process_stuck_in_the_kernel_is_reported_late_and_one_that_works_never(job: Job) -> None:
    job.state["trainer/0:1"], job.cpu_rate["trainer/0:1"] = "D", 0.0
    job.state["trainer/0:2"] = "D"  # seen in it each time, and uses the CPU between
    assert not job.run(STUCK_SECONDS - 2)
    standing = job.run(6)
    assert "trainer/0 rank 1" in standing["hang:trainer/0#0"] and "uninterruptible" in standing["hang:trainer/0#0"]


def test_a_starved_process_is_reported_as_such(job: Job) -> None:
    job.delay_rate["rollout/0:0"] = 0.8
    job.delay_rate["rollout/1:0"] = 0.3
    assert not job.run(STARVED_SECONDS - 2)
    standing = job.run(5)
    assert set(standing) == {"slow:rollout/0#0"}
    assert (
        "starved of CPU by other processes on node-1, its main thread runnable but not running for 80%"
        in standing["slow:rollout/0#0"]
    )


def test_ranks_of_a_full_machine_are_not_named_for_waiting_for_its_cpus(job: Job) -> None:
    """One after the other has waited for so long: the more so without a finding."""
    for seconds, name in enumerate(job.pids):
        job.delay_rate[name] = 0.7 + 0.02 * seconds
        assert not job.run(1)
    assert not job.run(2 * STARVED_SECONDS)


def test_a_stored_window_gives_the_same_again(job: Job) -> None:
    job.state["trainer/0:1"], job.cpu_rate["trainer/0:1"] = "T", 0.0
    standing = job.run(20)
    window = json.loads(json.dumps(job.detector.window()))
    assert {d.key: d.because for d in LiveDetector.replay_window(window)[-1]} == standing


def test_a_late_exit_does_not_affect_the_successor(job: Job) -> None:
    """A watch that begins is reported what agents keep: a rank crashed some minutes ago and began anew."""
    name = "rollout/1:0"
    job.ends(name, {"signal": "11", "cause": "crashed"})
    job.dead.clear()
    job.pids[name] = 2000
    job.detector = LiveDetector(DetectorConfig(), {})
    assert not job.run(1)
    # Of many agents each is asked once in eight seconds.
    for seconds in range(1, 8):
        assert job.detector.observe(Observation(wall_at=WALL + job.at + seconds)) == []
    assert {s.process for s in job.detector.processes() if s.replica == "rollout/1"} == {job.process(name, 2000)}


@pytest.mark.parametrize("kind", [AgentEventKind.RAY_WORKER_ENDED, AgentEventKind.EXCEPTION, AgentEventKind.FINISHED])
def test_a_late_report_of_a_dead_process_does_not_displace_its_successor(job: Job, kind: AgentEventKind) -> None:
    """Ray tells why a worker ended when the rank may run again."""
    name = "rollout/1:0"
    job.ends(name, KILLED)
    job.run(1)
    job.pids[name] = 2000
    assert not job.run(2)
    job.pids[name] = job.dead[name]
    job.tell(kind, name, {"reason": "no_word", "type": "ValueError"})
    job.detector.observe(Observation(wall_at=WALL + job.at, events=tuple(job.events)))
    assert {s.process for s in job.detector.processes() if s.replica == "rollout/1"} == {job.process(name, 2000)}


# --- whether a fault is over


def test_a_rank_runs_again_once_it_is_neither_stopped_nor_starved(job: Job) -> None:
    assert job.detector.progressing("trainer/0", 0) == (
        True,
        "trainer/0 rank 0 (node-1, pid 1000) runs; it does not report progress",
    )
    job.state["trainer/0:2"] = "T"
    job.cpu_rate["trainer/0:2"] = 0.0
    assert not job.run(STOPPED_SECONDS - 2), "not diagnosed yet"
    moves, because = job.detector.progressing("trainer/0", 0)
    assert not moves and "rank 2" in because and "stopped, blocked or without a CPU for" in because
    job.run(10)
    assert "diagnosed with hang" in job.detector.progressing("trainer/0", 0)[1]
    job.state["trainer/0:2"] = "S"
    assert not job.run(3)
    assert job.detector.progressing("trainer/0", 0)[0]
    job.delay_rate["rollout/0:0"] = 0.9
    job.run(3)
    assert not job.detector.progressing("rollout/0", 0)[0]


def _has_ended(job: Job, replica: str, node: str) -> bool:
    return job.detector.fate(Suspect(node=NodeId(node), replica=replica))[0] is Fate.ENDED


def test_a_replica_has_ended_when_all_its_processes_are_gone(job: Job) -> None:
    job.state["trainer/0:2"] = "T"
    job.cpu_rate["trainer/0:2"] = 0.0
    assert set(job.run(10)) == {"hang:trainer/0#0"}
    assert not _has_ended(job, "trainer/0", "node-2")
    for name in job.who:
        job.ends(name, {"signal": "15", "cause": "terminated"})
        assert not _has_ended(job, "trainer/0", "node-2")
    assert not job.run(5)
    assert _has_ended(job, "trainer/0", "node-2") and _has_ended(job, "rollout/1", "node-2")
    job.pids = {name: pid + 100 for name, pid in job.pids.items()}
    job.state["trainer/0:2"] = "S"
    job.run(3)
    assert not _has_ended(job, "trainer/0", "node-2") and job.detector.progressing("trainer/0", 0)[0]


def test_what_ended_unseen_has_vanished_and_what_no_agent_shows_is_unknown(job: Job) -> None:
    gone = ("trainer/0:0", "trainer/0:1", "trainer/0:2", "trainer/0:3")
    for name in gone:  # they end while their agent is down: it starts without them
        del job.who[name]
    job.run(VANISHED_SECONDS - 2)
    assert not _has_ended(job, "trainer/0", "node-2")
    job.run(5)
    assert _has_ended(job, "trainer/0", "node-2")
    silent = (("node-2", WALL + job.at, "timeout"),)
    job.detector.observe(Observation(wall_at=WALL + job.at, batches=(), events=(), unreachable=silent))
    assert not _has_ended(job, "trainer/0", "node-2") and not _has_ended(job, "nobody/0", "node-2")
    assert _has_ended(job, "nobody/0", "node-1"), "its agent answers and shows no such process"


GONE_WELL = {"code": "0", "cause": "finished"}


def test_an_engine_that_ends_as_if_all_were_well_while_training_goes_on_is_told(job: Job) -> None:
    job.ends("rollout/0:0", GONE_WELL)
    assert not job.run(ENDED_SECONDS - 2)
    (because,) = job.run(5).values()
    assert "rollout/0 rank 0" in because and "ended by itself with exit code 0" in because
    assert "trainer/0 ranks 0-3" in because


@pytest.mark.parametrize("name", ["trainer/0:1", "rollout/1:0"])
def test_what_ends_well_with_its_job_is_not(job: Job, name: str) -> None:
    """A trainer that ends first, or engines shortly before their trainers."""
    job.ends(name, GONE_WELL)
    job.run(20)
    for other in job.who:
        if other != name:
            job.ends(other, GONE_WELL)
    assert not job.run(2 * ENDED_SECONDS)
