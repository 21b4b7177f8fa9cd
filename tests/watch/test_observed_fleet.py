"""Incarnations of a job that rolecall did not start, counted as its processes are seen."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId, ProcessId, ReplicaId
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.membership import ReplicaState
from rolecall.core.telemetry import AgentEvent, AgentEventKind, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.recovery.actuators.targets.target import Member
from rolecall.recovery.loop import LEASE_NAME
from rolecall.watch.agents import UniqueReplicaSource
from rolecall.watch.observed_fleet import (
    FLAG,
    FORMER_FLAG,
    FRESH_SECONDS,
    OVER_SECONDS,
    SETTLE_SECONDS,
    SHRUNK_SECONDS,
    SILENT_SECONDS,
    SWEEP_SECONDS,
    EveryProcess,
    ObservedFleet,
    kept_members,
)

S = ReplicaState
LEASE_SECONDS = 1000.0
ROLES = frozenset({"rollout"})


def process(pid: int, node: str = "n-1", ticks: int | None = None) -> ProcessId:
    return ProcessId(node=NodeId(node), pid=pid, start_ticks=pid if ticks is None else ticks)


class Source:
    def __init__(self) -> None:
        self.next = Observation(wall_at=0.0)

    def poll(self, timeout_seconds: float) -> Observation:
        del timeout_seconds
        given, self.next = self.next, Observation(wall_at=0.0)
        return given


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.journal = Journal(f"sqlite:///{folder / 'journal.db'}", clock=self.clock)
        self.leads, self.needed = True, set[str]()
        self.held = self.journal.acquire(LEASE_NAME, "first", LEASE_SECONDS)
        self.start()

    @property
    def lease(self) -> Lease | None:
        """As a watch knows its lease, which may be over."""
        return self.held if self.leads else None

    def start(self) -> None:
        """A watch that has just started."""
        self.source = Source()
        self.fleet = ObservedFleet(
            self.source, self.journal, self.clock, ROLES, lambda: self.lease, needed=lambda: self.needed
        )

    def see(
        self, *running: tuple[str, int, ProcessId], events: tuple[AgentEvent, ...] = (), dead: bool = False
    ) -> Observation:
        """One poll: samples of these, then enough time for the next one to be written."""
        now = self.clock.wall()
        samples = tuple(
            ProcessSample(
                process=p,
                role=r.partition("/")[0],
                replica=r,
                rank=rank,
                incarnation=0,
                at=now,
                wall_at=now,
                page_ok=True,
                alive=not dead,
            )
            for r, rank, p in running
        )
        batch = SampleBatch(
            node=NodeId("n-1"), agent_pid=1, cursor=1, lost=0, at=now, wall_at=now, processes=samples, hosts=()
        )
        self.source.next = Observation(wall_at=now, batches=(batch,), events=events)
        seen = self.fleet.poll(0.0)
        self.clock.advance(SETTLE_SECONDS)
        return seen

    def event(self, kind: AgentEventKind, who: ProcessId, replica: str, rank: int = 0, age: float = 0.0) -> AgentEvent:
        at = self.clock.wall() - age
        detail = {"job": "77"} if kind is AgentEventKind.REGISTERED else {}
        return AgentEvent(
            seq=1, kind=kind, node=who.node, at=at, wall_at=at, process=who, replica=replica, rank=rank, detail=detail
        )

    def state(self, replica: str) -> tuple[int, int, ReplicaState, int]:
        """Desired and actual incarnation, actual state, PID."""
        desired, actual = self.journal.desired()[ReplicaId(replica)], self.journal.current()[ReplicaId(replica)]
        return desired.incarnation, actual.incarnation, actual.state, actual.pid


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.journal.close()


A, B = "rollout/0", "rollout/1"


def test_what_runs_is_incarnation_1_and_serves(it: Fleet) -> None:
    for _ in range(2):
        seen = it.see((A, 0, process(10)), (A, 1, process(11)), (B, 0, process(20)))
    assert it.state(A) == (1, 1, S.SERVING, 10) and it.state(B) == (1, 1, S.SERVING, 20)
    assert [s.incarnation for s in seen.batches[0].processes] == [1, 1, 1]
    assert sorted((i, m.replica, m.rank, m.pid) for i, m in it.fleet.members()) == [
        (1, A, 0, 10),
        (1, A, 1, 11),
        (1, B, 0, 20),
    ]


def test_a_new_process_of_a_rank_is_the_next_incarnation_and_serves_when_complete(it: Fleet) -> None:
    for _ in range(2):
        it.see((A, 0, process(10)), (A, 1, process(11)), (B, 0, process(20)))
    for _ in range(2):
        it.see((A, 1, process(31)), (B, 0, process(20)))
    assert it.state(A) == (2, 2, S.READY, 31), "rank 0 is missing"
    seen = it.see((A, 0, process(30)), (A, 1, process(31)), (B, 0, process(20)))
    assert it.state(A)[1:3] == (2, S.SERVING) and it.state(B) == (1, 1, S.SERVING, 20)
    assert [s.incarnation for s in seen.batches[0].processes] == [2, 2, 1]


def test_a_job_that_starts_again_with_fewer_ranks_is_whole_with_these(it: Fleet) -> None:
    """Its processes say how many there are; as history to a watch that starts after they did."""
    for _ in range(2):
        it.see(*((A, rank, process(10 + rank)) for rank in range(4)))
    fewer = [(A, rank, process(30 + rank)) for rank in range(3)]
    told = tuple(it.event(AgentEventKind.REGISTERED, p, A, rank, age=FRESH_SECONDS + 1) for _, rank, p in fewer)
    told = tuple(replace(event, detail={"world_size": "3"}) for event in told)
    for _ in range(2):
        it.see(*fewer[:2], events=told)
    assert it.state(A) == (2, 2, S.READY, 30), "rank 2 is missing"
    for _ in range(2):
        it.see(*fewer)
    assert it.state(A) == (2, 2, S.SERVING, 30)
    it.start()
    more = [(A, rank, process(50 + rank)) for rank in range(4)]
    sizes = (
        replace(it.event(AgentEventKind.REGISTERED, p, A, rank), detail={"world_size": "4"}) for _, rank, p in more
    )
    for _ in range(2):
        it.see(*more, events=tuple(sizes))
    assert it.state(A) == (3, 3, S.SERVING, 50)


def test_a_replica_of_a_larger_job_is_whole_with_the_ranks_that_it_had(it: Fleet) -> None:
    for pids in (10, 30):
        ranks = [(A, rank, process(pids + rank)) for rank in range(2)]
        told = tuple(
            replace(it.event(AgentEventKind.REGISTERED, p, A, r), detail={"world_size": "8"}) for _, r, p in ranks
        )
        for _ in range(2):
            it.see(*ranks, events=told)
    assert it.state(A) == (2, 2, S.SERVING, 30)


def sweeps(it: Fleet, *running: tuple[str, int, ProcessId]) -> None:
    for _ in range(int(SHRUNK_SECONDS / SWEEP_SECONDS) + 1):
        it.clock.advance(SWEEP_SECONDS)
        it.see(*running)


def test_fewer_ranks_that_say_nothing_are_whole_once_no_other_one_starts(it: Fleet) -> None:
    for _ in range(2):
        it.see(*((A, rank, process(10 + rank)) for rank in range(4)))
    fewer = [(A, rank, process(30 + rank)) for rank in range(3)]
    for _ in range(2):
        it.see(*fewer)
    it.clock.advance(3600.0)  # the watch stood still
    for _ in range(2):
        it.see(*fewer)
    assert it.state(A) == (2, 2, S.READY, 30)
    sweeps(it, *fewer)
    assert it.state(A) == (2, 2, S.SERVING, 30)


def test_a_replica_that_restarts_in_part_is_not_whole(it: Fleet) -> None:
    before = [(A, rank, process(10 + rank)) for rank in range(3)]
    for _ in range(2):
        it.see(*before)
    sweeps(it, (A, 0, process(30)), *before[1:])
    assert it.state(A) == (2, 2, S.READY, 30), "the other ranks of the incarnation before run"
    for _ in range(2):
        it.see(*((B, rank, process(60 + rank)) for rank in range(3)))
    sweeps(it, (B, 1, process(71)), (B, 2, process(72)))
    assert it.state(B) == (2, 2, S.READY, 71), "rank 0 is missing"


def test_one_that_has_ended_is_stopped_and_what_comes_after_is_the_next(it: Fleet) -> None:
    for _ in range(2):
        it.see((A, 0, process(10)), (A, 1, process(11)))
    it.see((A, 1, process(11)), events=(it.event(AgentEventKind.EXITED, process(10), A),))
    assert it.state(A)[1:3] == (1, S.STOPPED)
    assert [m.pid for _, m in it.fleet.members()] == [11]
    for _ in range(2):
        it.see((A, 0, process(30)))
    assert it.state(A)[1:3] == (2, S.READY)


def test_a_dead_sample_ends_it_and_starts_nothing(it: Fleet) -> None:
    for _ in range(2):
        it.see((A, 0, process(10)))
    for _ in range(2):
        it.see((A, 0, process(10)), dead=True)
    assert it.state(A) == (1, 1, S.STOPPED, 10)


def test_events_carry_the_incarnation_of_their_process(it: Fleet) -> None:
    it.see((A, 0, process(10)))
    it.see((A, 0, process(30)))
    seen = it.see((A, 0, process(30)), events=(it.event(AgentEventKind.EXITED, process(10), A),))
    assert [e.incarnation for e in seen.events] == [1], "one that is over"
    assert it.state(A)[1:3] == (2, S.SERVING)


def test_a_registration_is_counted_before_the_first_sample_but_not_if_it_is_history(it: Fleet) -> None:
    it.see((A, 0, process(10)))
    old = it.event(AgentEventKind.REGISTERED, process(5, ticks=50), A, age=FRESH_SECONDS + 1)
    seen = it.see((A, 0, process(10)), events=(old,))
    assert [e.incarnation for e in seen.events] == [0] and it.state(A)[1] == 1
    new = it.event(AgentEventKind.REGISTERED, process(30), A)
    seen = it.see((A, 0, process(10)), events=(new,))
    assert [e.incarnation for e in seen.events] == [2]
    assert [(i, m.pid, m.job) for i, m in it.fleet.members()] == [(2, 30, "77")]


def test_an_older_process_of_the_node_does_not_come_back(it: Fleet) -> None:
    it.see((A, 0, process(30)))
    it.see((A, 0, process(10)))
    it.see((A, 0, process(30)))
    assert it.state(A) == (1, 1, S.SERVING, 30)
    it.see((A, 0, process(30)), dead=True)
    it.see((A, 0, process(10)))
    assert it.state(A)[1:3] == (1, S.STOPPED)


def test_replicas_of_other_roles_are_passed_on_and_not_counted(it: Fleet) -> None:
    for _ in range(2):
        seen = it.see((A, 0, process(10)), ("trainer/0", 0, process(40)))
    assert [s.incarnation for s in seen.batches[0].processes] == [1, 0]
    assert set(it.journal.desired()) == {A}
    not_to_be_hit = [(0, "trainer/0", 40), (1, A, 10)]
    assert [(n, m.replica, m.pid) for n, m in it.fleet.members()] == not_to_be_hit
    assert sorted((n, m.replica, m.pid) for n, m in kept_members(it.journal)) == not_to_be_hit, "for a dry run"
    it.start()
    assert [m.pid for _, m in it.fleet.members()] == [10], "the other may be gone by now"
    it.see((A, 0, process(10)), ("trainer/0", 0, process(40)))
    it.see(("trainer/0", 0, process(40)), dead=True)
    assert [m.pid for _, m in it.fleet.members()] == [10]


def test_one_that_gets_another_name_is_counted_there(it: Fleet) -> None:
    it.see(("rollout/7", 0, process(10)))
    for _ in range(2):
        it.see((A, 0, process(10)))
    assert it.state(A) == (1, 1, S.SERVING, 10) and set(it.journal.desired()) == {A}


def test_a_watch_that_takes_over_goes_on_counting(it: Fleet) -> None:
    for pid in (10, 30):
        it.see((A, 0, process(pid)))
    it.start()
    history = (
        it.event(AgentEventKind.REGISTERED, process(10), A, age=1.0),
        it.event(AgentEventKind.EXITED, process(10), A),
    )
    it.see((A, 0, process(30)), events=history)
    it.see((A, 0, process(30)))
    assert it.state(A) == (2, 2, S.SERVING, 30)
    it.see((A, 0, process(50)))
    it.see((A, 0, process(50)))
    assert it.state(A) == (3, 3, S.SERVING, 50)


def test_what_a_process_told_when_it_registered_is_known_and_kept(it: Fleet) -> None:
    registered = it.event(AgentEventKind.REGISTERED, process(10), A, age=FRESH_SECONDS + 1.0)
    details = {"job": "77", "rendezvous": "77.0", "pod_uid": "u", "slurm_step": "77.0"}
    again = replace(registered, wall_at=registered.wall_at + 9.0, detail=details)
    it.see((A, 0, process(10)), events=(registered, again))
    expected = Member(
        replica=A,
        rank=0,
        node="n-1",
        pid=10,
        start_ticks=10,
        job="77",
        rendezvous="77.0",
        registered_at=registered.wall_at,
        pod_uid="u",
        slurm_step="77.0",
    )
    assert it.fleet.members() == [(1, expected)]
    it.start()
    assert it.fleet.members() == kept_members(it.journal) == [(1, expected)]


def test_what_cannot_be_read_is_counted_anew(it: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    it.see((A, 0, process(10)))
    it.journal.set_flag(FLAG, '{"rollout/0": 3}')
    it.start()
    for _ in range(2):
        it.see((A, 0, process(10)))
    assert "counted anew" in caplog.text and it.state(A)[1] == 1


def test_a_name_that_is_no_replica_is_passed_on(it: Fleet) -> None:
    seen = it.see(("somebody", 0, process(10)))
    assert [s.replica for s in seen.batches[0].processes] == ["somebody"] and it.fleet.members() == []
    assert replace(seen.batches[0].processes[0]).incarnation == 0


def test_a_process_after_a_boot_of_its_node_is_the_next_one(it: Fleet) -> None:
    """Start times of processes are counted from the boot."""
    before, after = process(900, ticks=900_000), process(70, ticks=700)
    it.see((A, 0, before), events=(it.event(AgentEventKind.REGISTERED, before, A),))
    it.see((A, 0, before), dead=True)
    it.clock.advance(60.0)
    for _ in range(2):
        it.see((A, 0, after), events=(it.event(AgentEventKind.REGISTERED, after, A),))
    assert it.state(A) == (2, 2, S.SERVING, 70)
    assert [(n, m.pid) for n, m in it.fleet.members()] == [(2, 70)]


class OneRun:
    """Passes on what has PIDs below 100."""

    def __init__(self, source: EveryProcess) -> None:
        self._source = source

    def poll(self, timeout_seconds: float) -> Observation:
        seen = self._source.poll(timeout_seconds)
        ours = tuple(replace(b, processes=tuple(p for p in b.processes if p.process.pid < 100)) for b in seen.batches)
        return replace(seen, batches=ours, events=tuple(e for e in seen.events if e.process and e.process.pid < 100))


def test_processes_of_jobs_that_are_left_out_are_known_and_kept(it: Fleet) -> None:
    """A command that ends a node, or a job of Slurm, ends them too."""
    every = EveryProcess(it.source)
    it.fleet = ObservedFleet(OneRun(every), it.journal, it.clock, ROLES, lambda: it.lease, every)
    theirs = process(200)
    told = it.event(AgentEventKind.REGISTERED, theirs, A)
    it.see(
        (A, 0, process(10)), ("trainer/0", 0, process(40)), (A, 0, theirs), ("no name", 0, process(300)), events=(told,)
    )
    expected = [(0, "rollout/0 of another job", 200, "77"), (0, "trainer/0", 40, ""), (1, A, 10, "")]
    for known in (it.fleet.members(), kept_members(it.journal)):
        assert sorted((n, m.label, m.pid, m.job) for n, m in known) == expected
    it.see((A, 0, process(10)), events=(it.event(AgentEventKind.EXITED, theirs, A),))
    assert sorted(m.label for _, m in it.fleet.members()) == [A, "trainer/0"]


def test_one_that_its_agent_no_longer_samples_has_ended(it: Fleet) -> None:
    every = EveryProcess(it.source)
    it.fleet = ObservedFleet(OneRun(every), it.journal, it.clock, ROLES, lambda: it.lease, every)
    elsewhere = process(300, node="n-2")
    it.see((A, 0, process(10)), (B, 0, process(200)), (B, 0, elsewhere))
    it.clock.advance(SILENT_SECONDS + SWEEP_SECONDS)
    it.see((A, 0, process(10)))
    assert sorted(m.pid for _, m in it.fleet.members()) == [10, 300], "the agent of n-2 does not answer"


def test_a_process_whose_exit_was_missed_has_ended_once_its_agent_no_longer_samples_it(it: Fleet) -> None:
    """It would be named for ever as one that an action near it ends too."""
    ours, elsewhere = (A, 0, process(10)), ("trainer/1", 0, process(300, node="n-2"))
    for _ in range(2):
        it.see(ours, (B, 0, process(20)), ("trainer/0", 0, process(40)), elsewhere)
    it.clock.advance(3600.0)  # the watch stood still
    it.see(ours)
    it.see()  # nothing new yet: of nobody
    assert sorted(m.pid for _, m in it.fleet.members()) == [10, 20, 40, 300] and it.state(B)[2] is S.SERVING
    for _ in range(int(SILENT_SECONDS / SWEEP_SECONDS) + 1):
        it.clock.advance(SWEEP_SECONDS)
        it.see(ours)
    assert sorted(m.pid for _, m in it.fleet.members()) == [10, 300], "the agent of n-2 does not answer"
    assert it.state(A)[1:3] == (1, S.SERVING) and it.state(B)[1:3] == (1, S.STOPPED)


def test_an_agent_that_reads_nothing_ends_no_process(it: Fleet) -> None:
    it.see((A, 0, process(10)), ("trainer/0", 0, process(40)))
    for _ in range(2 * int(SILENT_SECONDS / SWEEP_SECONDS)):
        it.clock.advance(SWEEP_SECONDS)
        it.see()
    assert sorted(m.pid for _, m in it.fleet.members()) == [10, 40] and it.state(A)[2] is S.SERVING


def test_a_watch_that_stands_by_takes_over_the_numbers_and_writes_nothing(it: Fleet) -> None:
    """It saw the job later than the leader, or not all of it."""
    for _ in range(2):
        it.see((A, 0, process(10)))
    it.see((A, 0, process(10)), dead=True)
    for _ in range(2):
        it.see((A, 0, process(20)), (B, 0, process(40)))
    leader, source = it.fleet, it.source
    it.leads = False
    it.start()
    it.see((A, 0, process(20)), (B, 0, process(40)))
    assert sorted((n, m.pid) for n, m in it.fleet.members()) == [(1, 40), (2, 20)]

    standby, its_source, kept = it.fleet, it.source, it.journal.flag(FLAG)
    it.see((A, 0, process(30)), (B, 0, process(40)), events=(it.event(AgentEventKind.EXITED, process(20), A),))
    assert it.journal.flag(FLAG) == kept and it.state(A) == (2, 2, S.SERVING, 20), "only the leader writes"
    assert sorted((n, m.pid) for n, m in standby.members()) == [(1, 40), (3, 30)]

    it.fleet, it.source, it.leads = leader, source, True
    it.see((A, 0, process(20)), (B, 0, process(40)), events=(it.event(AgentEventKind.EXITED, process(40), B),))
    it.fleet, it.source, it.leads = standby, its_source, False
    it.see((A, 0, process(30)), (B, 0, process(40)))
    assert sorted((n, m.pid) for n, m in standby.members()) == [(3, 30)], "what each of them has seen to end"

    it.leads = True
    for _ in range(2):
        it.see((A, 0, process(30)))
    assert it.state(A) == (3, 3, S.SERVING, 30) and it.state(B)[1:3] == (1, S.STOPPED)


def test_a_watch_that_takes_over_knows_what_the_leader_wrote_last(it: Fleet) -> None:
    """The leader writes once more, and ends, between two polls of the one that stands by."""
    for _ in range(2):
        it.see((A, 0, process(10)))
    leader, source = it.fleet, it.source
    it.leads = False
    it.start()
    it.see((A, 0, process(10)))
    standby, its_source = it.fleet, it.source
    it.fleet, it.source, it.leads = leader, source, True
    for pid in (20, 30):
        it.see((A, 0, process(pid)))
    it.fleet, it.source = standby, its_source
    it.see((A, 0, process(30)))
    assert sorted((n, m.pid) for n, m in it.fleet.members()) == [(3, 30)]
    assert sorted((n, m.pid) for n, m in kept_members(it.journal)) == [(3, 30)]


def test_a_leader_that_stood_still_past_its_lease_writes_nothing_more(
    it: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """It still takes itself for the leader when it goes on: its next tick renews the lease, after this poll."""
    for _ in range(2):
        it.see((A, 0, process(10)))
    stale, source = it.fleet, it.source
    it.clock.advance(LEASE_SECONDS + 1.0)
    old, it.held = it.held, it.journal.acquire(LEASE_NAME, "second", LEASE_SECONDS, lapsed=it.held)
    it.start()
    for pid in (10, 20):
        for _ in range(2):
            it.see((A, 0, process(pid)))
    assert it.state(A) == (2, 2, S.SERVING, 20)
    kept = it.journal.flag(FLAG)

    it.fleet, it.source, it.held = stale, source, old
    for _ in range(2):
        it.see((A, 0, process(30)), (B, 0, process(40)))
    assert it.journal.flag(FLAG) == kept and it.state(A) == (2, 2, S.SERVING, 20)
    assert ReplicaId(B) not in it.journal.desired() and "has been superseded" in caplog.text

    it.clock.advance(LEASE_SECONDS + 1.0)
    it.held = it.journal.acquire(LEASE_NAME, "first", LEASE_SECONDS, lapsed=it.journal.lease(LEASE_NAME))
    for _ in range(2):
        it.see((A, 0, process(30)))
    assert it.state(A) == (3, 3, S.SERVING, 30), "it goes on from what the other one has counted"


def test_a_watch_that_takes_over_knows_the_processes_of_the_incarnation_before(it: Fleet) -> None:
    """One of them ends slowly on another node, where start times tell nothing."""
    old, new = process(10, "n-1"), process(20, "n-2")
    it.see((A, 0, old))
    for _ in range(2):
        it.see((A, 0, new))
    it.start()
    for _ in range(2):
        it.see((A, 0, old), (A, 0, new))
    assert it.state(A) == (2, 2, S.SERVING, 20)
    assert [(n, m.pid) for n, m in it.fleet.members()] == [(2, 20)]
    assert [(n, m.pid) for n, m in kept_members(it.journal)] == [(2, 20)]


def test_a_replacement_on_another_node_counts_while_the_process_that_is_ended_lingers(it: Fleet) -> None:
    old, new = process(10), process(20, "n-2")
    it.fleet = ObservedFleet(
        UniqueReplicaSource(it.source, lambda: {old}), it.journal, it.clock, ROLES, lambda: it.lease
    )
    it.see((A, 0, old))
    for _ in range(2):
        seen = it.see((A, 0, old), (A, 0, new))
    assert [(s.replica, s.incarnation) for s in seen.batches[0].processes] == [(A, 1), (A, 2)]
    assert it.state(A) == (2, 2, S.SERVING, 20)


def test_a_replica_of_which_nothing_runs_is_dropped_after_an_hour_and_keeps_its_number(it: Fleet) -> None:
    """Where each job has a name of its own they would become ever more, and all are read at each tick."""
    for pid in (10, 30):
        for _ in range(2):
            it.see((A, 0, process(pid)), (B, 0, process(20)))
    it.see((A, 0, process(30)), dead=True)
    it.see((B, 0, process(20)))
    it.needed = {A}
    for _ in range(2):
        it.clock.advance(OVER_SECONDS)
        it.see((B, 0, process(20)))
    assert it.state(A) == (2, 2, S.STOPPED, 30), "an open incident is about it"
    it.needed = set()
    it.see((B, 0, process(20)))
    assert set(it.journal.desired()) == set(it.journal.current()) == {B} == set(it.fleet._replicas)
    assert "30" not in (it.journal.flag(FLAG) or "") and it.journal.flag(FORMER_FLAG) == '{"rollout/0":2}'
    it.start()
    for _ in range(2):
        it.see((A, 0, process(50)), (B, 0, process(20)))
    assert it.state(A) == (3, 3, S.SERVING, 50) and it.state(B) == (1, 1, S.SERVING, 20)


def test_a_replica_of_which_something_runs_is_kept(it: Fleet) -> None:
    for _ in range(2):
        it.see((A, 0, process(10)), (A, 1, process(11)))
    it.see((A, 1, process(11)), events=(it.event(AgentEventKind.EXITED, process(10), A),))
    for _ in range(3):
        it.clock.advance(OVER_SECONDS)
        it.see((A, 1, process(11)))
    assert it.state(A) == (1, 1, S.STOPPED, 10)
