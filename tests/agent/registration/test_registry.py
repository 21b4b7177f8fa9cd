"""Accepted claims: the kernel's identification of the sender, the secret of the spawn, and reports about a process's
life."""

import json
import os
import queue
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rolecall.agent import registry
from rolecall.agent.collectors.process.discovery import job_number
from rolecall.agent.collectors.process.exits import ExitWatch, WatchRefused
from rolecall.agent.collectors.process.host import HostProbe
from rolecall.agent.events import EventLog
from rolecall.agent.identity import ClaimRejected, Registration
from rolecall.agent.registration_socket import LINE_BYTES_MAX, RegistrationServer
from rolecall.agent.registry import DEAD_SHOWN_SECONDS, EXCEPTIONS_MAX, EXCEPTIONS_SECONDS, REFUSED_SECONDS, Registry
from rolecall.agent.reporter.sender import send_message
from rolecall.agent.samples import Sampler, SampleRing, sample_of
from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.columns import PROCESSES
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.rundir import registration_secret
from rolecall.core.telemetry import AgentEvent, AgentEventKind, ProcessSample, is_instrumented
from tests.agent.processes import NODE, TOKEN, Child, own_start_ticks, secret
from tests.agent.test_samples import since
from tests.support import PATIENCE_SECONDS, eventually


class World:
    """A registry with its neighbours, in one directory that outlives it."""

    def __init__(self, data_dir: Path, node: NodeId = NODE) -> None:
        self.data_dir = data_dir
        (data_dir / "pages").mkdir(exist_ok=True)
        self.clock = FakeClock()
        self.events = EventLog(data_dir / "events.jsonl", node, self.clock)
        self.exits = ExitWatch()
        self.exits.start()
        self.registry = Registry(
            node=node, data_dir=data_dir, token=TOKEN, events=self.events, exits=self.exits, clock=self.clock
        )

    def close(self) -> None:
        self.exits.stop()
        self.events.close()

    def reported(self) -> list[AgentEvent]:
        return list(self.events.after(0).events)

    def kinds(self) -> list[str]:
        return [str(e.kind) for e in self.reported()]

    def register(self, child: Child, replica: str, incarnation: int = 1) -> None:
        self.registry.register(child.pid, claim(child, replica, incarnation))

    def poll(self) -> None:
        for tracked in self.registry.processes():
            if tracked.exited_at is None:
                self.registry.poll(tracked)


def claim(child: Child, replica: str, incarnation: int = 1, **other: object) -> dict[str, object]:
    message: dict[str, object] = {"kind": "register", "pid": child.pid, "start_ticks": child.start_ticks}
    message |= {"replica": replica, "rank": 0, "incarnation": incarnation}
    return {**message, "secret": secret(replica, 0, incarnation), **other}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    it = World(tmp_path)
    yield it
    it.close()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    it = Child(tmp_path)
    it.do("import signal")  # it is up
    yield it
    it.close()


def test_a_right_claim_is_believed_and_reported_once(world: World, child: Child) -> None:
    world.register(child, "rollout/1", 3)
    world.register(child, "rollout/1", 3)  # the answer to the first was lost
    [event] = world.reported()
    assert (event.kind, event.replica, event.role, event.incarnation) == ("registered", "rollout/1", "rollout", 3)
    assert event.process is not None and event.process.pid == child.pid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_page_that_another_user_put_in_place_is_not_believed(world: World, child: Child) -> None:
    child.start("trainer/0")
    os.chown(child.page, 4711, -1)
    world.register(child, "trainer/0")
    world.poll()
    [tracked] = world.registry.processes()
    assert tracked.page is None and tracked.reader is None and world.kinds() == ["registered"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"secret": "guess"}, "wrong secret"),
        ({"secret": secret("rollout/2")}, "wrong secret"),
        ({"incarnation": 2}, "wrong secret"),
        ({"rank": 1}, "wrong secret"),
        ({"replica": "trainer/0"}, "wrong secret"),
        ({"secret": "\u2603"}, "wrong secret"),
        ({"replica": "../../etc"}, "is not written role/index"),
        ({"replica": 5}, "must be strings"),
        ({"rank": "0"}, "rank"),
        ({"rank": True}, "rank"),
        ({"incarnation": -1}, "incarnation"),
        ({"pid": 1}, "may not report for process 1"),
        ({"pid": "x"}, "must be integers"),
        ({"start_ticks": 1}, "started at"),
    ],
)
def test_a_wrong_claim_is_refused_and_counted(
    world: World, child: Child, wrong: dict[str, object], reason: str
) -> None:
    for _ in range(3):  # who asks in a loop fills no disk
        with pytest.raises(ClaimRejected, match=reason):
            world.registry.register(child.pid, {**claim(child, "rollout/1"), **wrong})
    assert world.registry.num_refused == 3 and world.registry.num_live() == 0
    (event,) = world.events.after(0).events
    assert event.kind is AgentEventKind.REFUSED and event.detail["pid"] == str(child.pid)
    assert re.search(reason, event.detail["reason"])


def test_a_live_process_that_cannot_be_watched_after_a_restart_is_not_reported_as_dead(
    world: World, child: Child
) -> None:
    child.start("rollout/1")
    world.register(child, "rollout/1")
    again = World(world.data_dir)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))  # its page takes the last descriptor
    try:
        with pytest.raises(WatchRefused, match="Too many open files"):
            again.registry.adopt()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        again.close()
    assert again.kinds() == ["registered"] and child.page.exists()


def test_a_rank_whose_pid_is_anothers_or_a_threads_by_now_has_ended(world: World, thread_id: int) -> None:
    waits = [sys.executable, "-S", "-c", "input()"]
    with (
        (world.data_dir / "another.log").open("w") as log,
        subprocess.Popen(waits, stdin=subprocess.PIPE, stderr=log) as another,
    ):
        processes = [ProcessId(node=NODE, pid=pid, start_ticks=1) for pid in (thread_id, another.pid)]
        ranks = [
            Registration(process=p, replica=f"rollout/{n}", role="rollout", rank=0, incarnation=1)
            for n, p in enumerate(processes)
        ]
        (world.data_dir / "registrations.json").write_text(json.dumps([asdict(r) for r in ranks]))
        world.registry.adopt()
    details = {e.replica: e.detail for e in world.reported() if e.kind is AgentEventKind.EXITED}
    ended = {"cause": "unknown", "noticed": "after a restart of the agent"}
    assert details == {"rollout/0": ended, "rollout/1": ended} and world.registry.num_live() == 0


def test_a_page_that_is_a_pipe_blocks_nothing(world: World, child: Child) -> None:
    os.mkfifo(child.page)
    done = threading.Thread(target=world.register, args=(child, "rollout/1"), daemon=True)
    done.start()
    done.join(PATIENCE_SECONDS)
    assert not done.is_alive(), "who opens it waits for a writer that never comes"
    world.poll()
    [tracked] = world.registry.processes()
    assert not tracked.page_ok


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/", {}),
        ("4:memory:/slurm/uid_1000/job_4711/step_0/task_0", {"slurm_step": "4711.0"}),
        (
            "0::/kubepods/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/3f",
            {"pod_uid": "1b4e28ba-2fa1-11d2-883f-0016d3cca427"},
        ),
    ],
)
def test_a_process_does_not_choose_the_pod_or_step_that_ends_with_it(
    world: World, child: Child, monkeypatch: pytest.MonkeyPatch, cgroup: str, expected: dict[str, str]
) -> None:
    monkeypatch.setattr(registry, "read_at_most", lambda *_: cgroup.encode())
    told = {"pod_uid": "another", "slurm_step": "1.0", "job": "mine"}
    world.registry.register(child.pid, claim(child, "rollout/1", detail=told))
    assert world.reported()[0].detail == {"job": "mine", **expected}


def test_a_promotion_to_a_place_that_is_taken_is_refused(world: World, child: Child) -> None:
    world.register(child, "rollout/1")
    standby = Child(world.data_dir)
    try:
        standby.start("standby/0")
        world.register(standby, "standby/0")
        with pytest.raises(ClaimRejected, match=f"is process {NODE}:{child.pid}"):
            world.register(standby, "rollout/1")
        standby.do(f"reporter.become(replica='rollout/1', incarnation=1, secret={secret('rollout/1')!r})")
        world.poll()  # nor by its page
        assert sorted(t.registration.replica for t in world.registry.processes()) == ["rollout/1", "standby/0"]
        assert world.kinds().count("refused") == 1
    finally:
        standby.close()


def test_process_counts_are_reported_while_the_registry_is_locked(world: World, child: Child) -> None:
    """A scrape must not wait for a disk on which a registration is being written."""
    world.register(child, "rollout/1")
    reported: queue.Queue[int] = queue.Queue()
    with world.registry.locked():
        threading.Thread(target=lambda: reported.put(world.registry.num_live()), daemon=True).start()
        assert reported.get(timeout=PATIENCE_SECONDS) == 1


def test_a_second_process_cannot_be_the_same_rank_while_the_first_lives(world: World, child: Child) -> None:
    world.register(child, "rollout/1")
    other = Child(world.data_dir)
    try:
        with pytest.raises(ClaimRejected, match=f"is process {NODE}:{child.pid}"):
            world.register(other, "rollout/1")
        child.close()
        world.register(other, "rollout/1")  # at once: the exit need not have been noticed yet
    finally:
        other.close()


def test_a_claim_that_is_repeated_for_a_place_that_is_taken_is_one_event(
    world: World, child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    world.register(child, "rollout/1")
    other = Child(world.data_dir)
    server = RegistrationServer(world.data_dir / "other.sock", {"register": world.registry.register}, world.clock)
    try:
        for _ in range(3):
            answer = server._result(other.pid, json.dumps(claim(other, "rollout/1")).encode())
            assert answer["for_now"] is True
            world.clock.advance(2 * REFUSED_SECONDS)
        assert world.kinds() == ["registered", "refused"] and caplog.text.count("rollout/1:0#1 is process") == 1
        assert world.registry.num_refused == 3
    finally:
        server.stop()
        other.close()


def test_with_too_many_processes_a_further_one_is_refused_for_now(
    world: World, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "NUM_PROCESSES_MAX", 0)
    with pytest.raises(ClaimRejected) as full:
        world.register(child, "rollout/1")
    monkeypatch.undo()
    with pytest.raises(ClaimRejected) as wrong:
        world.registry.register(child.pid, claim(child, "rollout/1", secret="guess"))
    assert (full.value.for_now, wrong.value.for_now) == (True, False)
    world.register(child, "rollout/1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_started_a_rank_is_no_rank(world: World, child: Child, rank: int) -> None:
    """A task of Slurm that spawns its ranks: a rule finds the task, whose variables they all inherit."""
    task = ProcessId(node=NODE, pid=os.getpid(), start_ticks=own_start_ticks())
    found = Registration(
        process=task, replica="trainer/0", role="trainer", rank=0, incarnation=0, found=True, job="7.0"
    )
    world.registry.discover(found, {"found_by": "slurm"})
    known = {"rank": rank, "secret": registration_secret(TOKEN, "trainer/0", rank, 0)}
    world.registry.register(child.pid, claim(child, "trainer/0", 0, **known))
    assert [(r.process.pid, r.rank) for r in world.registry.registrations()] == [(child.pid, rank)]
    with pytest.raises(ClaimRejected, match="has started"):
        world.registry.discover(found, {"found_by": "slurm"})


POD = "0::/kubepods/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/3f"


@pytest.mark.parametrize(
    ("job", "cgroup", "user", "is_refused"),
    [
        ("h:1", "0::/", 1000, False),
        ("h:1", "0::/", 1001, True),
        ("h:2", "0::/", 1001, False),  # a job of its own
        ("", "0::/", 1001, False),  # of no known job
        ("h:1", POD, 1001, False),  # pods of one job may have a user namespace each
    ],
)
def test_a_process_of_another_user_is_no_rank_of_the_job(
    world: World, child: Child, monkeypatch: pytest.MonkeyPatch, job: str, cgroup: str, user: int, is_refused: bool
) -> None:
    mine = os.getpid()

    def read(path: str, _: int) -> bytes:
        if path.endswith("cgroup"):
            return cgroup.encode()
        number = 1000 if f"/{mine}/" in path else user
        return f"Name:\tpython\nUid:\t{number}\t0\t0\t0\n".encode()

    monkeypatch.setattr(registry, "read_at_most", read)
    first = Registration(
        process=ProcessId(node=NODE, pid=mine, start_ticks=own_start_ticks()),
        replica="trainer/0",
        role="trainer",
        rank=0,
        incarnation=0,
        found=True,
        job="h:1",
    )
    other = replace(first, process=ProcessId(node=NODE, pid=child.pid, start_ticks=child.start_ticks), rank=1, job=job)
    world.registry.discover(first, {"found_by": "torchrun"})
    if not is_refused:
        world.registry.discover(other, {"found_by": "torchrun"})
        assert world.kinds() == ["registered"] * 2
        return
    for _ in range(2):
        with pytest.raises(ClaimRejected, match="job h:1 is of the user with number 1000, the process of 1001"):
            world.registry.discover(other, {"found_by": "torchrun"})
        world.clock.advance(REFUSED_SECONDS)
    assert world.kinds() == ["registered", "refused"] and len(world.registry.registrations()) == 1


def test_an_event_of_a_stranger_is_refused(world: World, child: Child) -> None:
    with pytest.raises(ClaimRejected, match="not registered"):
        world.registry.exception(child.pid, {**claim(child, "rollout/1"), "number": 1, "detail": {}})


def test_the_story_of_a_process_that_fails(world: World, child: Child) -> None:
    child.start("trainer/1")
    world.register(child, "trainer/1")
    child.do("reporter.set_step(9); reporter.enter_phase('compute')")
    world.registry.exception(
        child.pid, {**claim(child, "trainer/1"), "number": 1, "detail": {"type": "ValueError", "step": "9"}}
    )
    child.do("reporter.exception(ValueError('first')); reporter.exception(KeyError('second'))")
    child.close()  # before the page is read again
    eventually(lambda: "exited" in world.kinds(), "the exit was reported")
    reported = world.reported()
    assert [str(e.kind) for e in reported] == ["registered", "exception", "exception", "exited"]
    assert [e.detail.get("number") for e in reported[1:3]] == ["1", "2"]  # the first is not reported twice
    assert reported[2].detail["type"] == "KeyError"
    assert reported[3].detail == {"cause": "killed", "last_phase": "compute", "step": "9", "signal": "9"}


def test_an_exception_with_a_long_name_in_its_detail_is_refused(world: World, child: Child) -> None:
    """A watch takes no such event."""
    child.start("trainer/1")
    world.register(child, "trainer/1")
    message = {**claim(child, "trainer/1"), "number": 1}
    with pytest.raises(ClaimRejected, match="at most 200 characters"):
        world.registry.exception(child.pid, {**message, "detail": {"x" * 5000: ""}})
    world.registry.exception(child.pid, {**message, "detail": {"message": "x" * 5000}})
    assert [len(e.detail["message"]) for e in world.reported()[1:]] == [2000]


def test_exceptions_in_a_loop_do_not_wash_out_the_log(world: World, child: Child) -> None:
    child.start("trainer/1")
    world.register(child, "trainer/1")
    message = {**claim(child, "trainer/1"), "detail": {"type": "ValueError"}}
    for number in range(1, 200):
        world.registry.exception(child.pid, {**message, "number": number})
    assert world.kinds().count("exception") == EXCEPTIONS_MAX and world.registry.num_refused == 199 - EXCEPTIONS_MAX
    child.do(*["reporter.exception(KeyError('x'))"] * 250)  # the page has the newest, a moment later
    world.poll()
    assert world.kinds().count("exception") == EXCEPTIONS_MAX
    world.clock.advance(EXCEPTIONS_SECONDS)
    world.poll()
    assert world.reported()[-1].detail["number"] == "250"


def test_a_wanted_exit(world: World, child: Child) -> None:
    child.start("reward/0")
    world.register(child, "reward/0")
    child.do("reporter.finish('no more work')")
    child.close()
    eventually(lambda: "exited" in world.kinds(), "the exit was reported")
    assert world.kinds() == ["registered", "finished", "exited"]
    assert world.reported()[1].detail == {"reason": "no more work"}
    assert world.reported()[2].detail["cause"] == "finished"


def test_a_promotion_is_followed_on_the_page(world: World, child: Child) -> None:
    child.start("standby/0")
    world.register(child, "standby/0")
    wrong = "reporter.become(replica='rollout/2', incarnation=5, secret='guess')"
    child.do(wrong)
    world.poll()
    [tracked] = world.registry.processes()
    assert tracked.registration.replica == "standby/0", "an identity without its secret was believed"
    child.do(wrong.replace("'guess'", repr(secret("rollout/2", 0, 5))))
    world.poll()
    assert (tracked.registration.replica, tracked.registration.incarnation) == ("rollout/2", 5)
    assert world.reported()[-1].detail == {"was": "standby/0", "was_incarnation": "1"}
    world.register(child, "rollout/2", 5)  # the same over the socket, later
    assert world.kinds() == ["registered", "registered"]


def test_a_renamed_node_keeps_its_processes_and_reports_no_exception_again(world: World, child: Child) -> None:
    child.start("rollout/1")
    world.register(child, "rollout/1")
    child.do("reporter.exception(ValueError('x'))")
    world.poll()
    renamed = World(world.data_dir, NodeId("gpu-7"))
    try:
        renamed.registry.adopt()
        renamed.poll()
        [kept] = renamed.registry.registrations()
        assert kept.process == ProcessId(node=NodeId("gpu-7"), pid=child.pid, start_ticks=child.start_ticks)
        assert renamed.kinds() == ["registered", "exception"]
    finally:
        renamed.close()


def test_an_unfetched_answer_is_removed_at_the_next_start(world: World) -> None:
    left = world.data_dir / "pages" / "1-1.0123456789abcdef.flight"
    left.write_bytes(b"a dump")
    world.registry.adopt()
    assert not left.exists()


def test_a_restarted_agent_continues_and_reports_missed_events(tmp_path: Path) -> None:
    first, lives, dies = World(tmp_path), Child(tmp_path), Child(tmp_path)
    try:
        for child, replica in ((lives, "rollout/0"), (dies, "rollout/1")):
            child.start(replica)
            first.register(child, replica)
        dies.do("reporter.enter_phase('generate'); reporter.exception(ValueError('x'))")
        first.poll()
        first.close()
        dies.close()
        second = World(tmp_path)
        second.registry.adopt()
        assert second.kinds() == ["registered", "registered", "exception", "exited"]  # the exception once
        last = second.reported()[-1]
        assert (last.replica, last.detail["last_phase"]) == ("rollout/1", "generate")
        assert last.detail["noticed"] == "after a restart of the agent"
        assert second.registry.num_live() == 1
        third = World(tmp_path)
        third.registry.adopt()
        assert third.kinds() == second.kinds(), "an exit was reported twice"
        lives.close()
        eventually(lambda: third.kinds()[-1] == "exited", "the adopted process is watched")
        second.close()
        third.close()
    finally:
        lives.close()
        dies.close()


def test_damaged_registrations_are_started_without(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (world.data_dir / "registrations.json").write_text('[{"process": 5}]')
    world.registry.adopt()
    assert world.registry.num_live() == 0
    assert "is damaged" in caplog.text


def test_pages_of_the_forgotten_are_removed(world: World, child: Child) -> None:
    stale = world.data_dir / "pages" / "4194305-1.page"  # above the largest PID
    stale.write_bytes(b"")
    child.start("rollout/0")
    world.registry.adopt()
    assert not stale.exists() and child.page.exists()  # the second may register any moment
    world.register(child, "rollout/0")
    child.close()
    eventually(lambda: "exited" in world.kinds(), "the exit was reported")
    assert len(world.registry.processes()) == 1
    world.clock.advance(DEAD_SHOWN_SECONDS + 1)
    assert world.registry.processes() == () and not child.page.exists()


def test_a_page_that_cannot_be_removed_changes_nothing_else(world: World, child: Child) -> None:
    """As on a file system that has become read-only. Here the pages are folders."""
    child.start("rollout/0")
    world.register(child, "rollout/0")
    child.close()
    eventually(lambda: "exited" in world.kinds(), "the exit was reported")
    child.page.unlink()
    for page in (child.page, world.data_dir / "pages" / "4194305-1.page", world.data_dir / "pages" / "1-1.flight"):
        page.mkdir()
    world.clock.advance(DEAD_SHOWN_SECONDS + 1)
    assert world.registry.processes() == ()
    world.registry.adopt()


def test_samples_of_a_live_and_a_dead_process(world: World, child: Child) -> None:
    child.start("rollout/0", incarnation=2)
    world.register(child, "rollout/0", 2)
    child.do("reporter.enter_phase('generate'); reporter.progress(4, busy_seconds=0.5, tokens=64)")
    ring = SampleRing(NODE, os.getpid(), world.clock)
    sampler = Sampler(world.registry, HostProbe(NODE), ring, world.clock)
    sampler.round()
    batch = since(ring, 0)
    [live] = batch.processes
    assert (live.alive, live.page_ok, live.phase, live.progress, live.tokens) == (True, True, "generate", 4, 64)
    assert (live.replica, live.role, live.incarnation, live.work_units) == ("rollout/0", "rollout", 2, 4)
    assert live.num_threads >= 2 and live.rss_bytes > 1 << 20 and live.proc_state in "RSD"
    [tracked] = world.registry.processes()
    assert tracked.page is not None
    reported = {name: value for name, value in tracked.page._asdict().items() if hasattr(live, name)}
    assert {name: repr(getattr(live, name)) for name in reported} == {name: repr(v) for name, v in reported.items()}
    assert len(batch.hosts) == 1
    child.close()
    eventually(lambda: "exited" in world.kinds(), "the exit was reported")
    sampler.round()
    [dead] = since(ring, batch.cursor).processes
    assert (dead.alive, dead.proc_state, dead.phase, dead.progress) == (False, "X", "generate", 4)
    assert dead.cpu_seconds >= live.cpu_seconds


def test_a_rank_without_a_page_is_not_shown_as_one_that_makes_no_progress(world: World, child: Child) -> None:
    """No page could be created, or it is of another version."""
    world.register(child, "trainer/0")
    child.page.write_bytes(b"")
    again = World(world.data_dir)
    again.registry.adopt()
    for one in (world, again):
        one.poll()
        [tracked] = one.registry.processes()
        sample = sample_of(tracked, 1.0, 2.0)
        assert isinstance(sample, ProcessSample) and not is_instrumented(sample)
        assert sample.alive and sample.num_threads and (sample.replica, sample.page_ok) == ("trainer/0", False)
    again.close()


def test_a_torn_page_keeps_its_last_good_values(world: World, child: Child) -> None:
    child.start("rollout/0")
    world.register(child, "rollout/0")
    child.do("reporter.progress(3)")
    world.poll()
    child.do("reporter._page.q[2] |= 1; reporter._page.q[14] = 99")  # stopped in the middle of a write
    world.poll()
    [tracked] = world.registry.processes()
    row = sample_of(tracked, 1.0, 2.0)
    assert isinstance(row, tuple)
    sample = PROCESSES.sample(row)
    assert (sample.page_ok, sample.progress) == (False, 3)
    assert world.registry.num_torn == 1


# --- the socket


def _defect(peer_pid: int, message: dict[str, object]) -> None:
    raise RuntimeError("a defect")


@pytest.fixture
def intake(world: World) -> Iterator[RegistrationServer]:
    answerers = {"register": world.registry.register, "defect": _defect}
    it = RegistrationServer(world.data_dir / "agent.sock", answerers, SystemClock())
    it.start()
    yield it
    it.stop()


def _say(world: World, raw: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(PATIENCE_SECONDS)
        s.connect(str(world.data_dir / "agent.sock"))
        s.sendall(raw)
        return s.recv(4096)


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b"not json\n", b"not JSON"),
        (b"[1]\n", b"not a JSON object"),
        (b'{"kind": "dance"}\n', b"kind must be one of defect, register"),
        (b"{" * 5000 + b"\n", b"not JSON"),
        (b'{"kind": "register"}\n', b"must be integers"),
    ],
)
def test_bad_words_get_a_reason(world: World, intake: RegistrationServer, raw: bytes, answer: bytes) -> None:
    reply = _say(world, raw)
    assert b'"ok": false' in reply and answer in reply
    assert intake.num_malformed == (b'register"' not in raw)


def test_a_defect_is_no_refusal(world: World, intake: RegistrationServer, child: Child) -> None:
    assert b'"retry": true' in _say(world, b'{"kind": "defect"}\n')
    child.start("rollout/1")  # and other processes are unaffected
    eventually(lambda: world.registry.num_live() == 1, "the child was registered")
    with pytest.raises(ConnectionError):
        send_message(world.data_dir / "agent.sock", {"kind": "defect"}, PATIENCE_SECONDS)


def test_a_line_without_end_is_truncated(world: World, intake: RegistrationServer) -> None:
    assert _say(world, b"x" * LINE_BYTES_MAX) == b""
    assert intake.num_malformed == 1


def test_repeated_refusals_are_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    it = RegistrationServer(world.data_dir / "agent.sock", {"register": world.registry.register}, world.clock)
    it.start()
    try:
        for _ in range(20):
            assert b"must be integers" in _say(world, b'{"kind": "register"}\n')
        world.clock.advance(REFUSED_SECONDS)
        assert b"must be integers" in _say(world, b'{"kind": "register"}\n')
    finally:
        it.stop()
    assert caplog.text.count("must be integers") == 2


def test_a_client_that_calls_in_a_loop_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.agent.registration_socket.CALLS_PER_SECOND_MAX", 5)
    rested: list[float] = []

    class Rested(RegistrationServer):
        """Time passes only while it rests."""

        def _rest(self, seconds: float) -> None:
            rested.append(seconds)
            world.clock.advance(seconds)

    it = Rested(world.data_dir / "agent.sock", {}, world.clock)
    it.start()
    try:
        for _ in range(23):
            assert b"not JSON" in _say(world, b"x\n")
        assert it.num_malformed == 23
        assert rested[:4] == [1.0] * 4 and len(rested) in (4, 5)
    finally:
        it.stop()


def test_the_kernel_identifies_the_sender(world: World, intake: RegistrationServer, child: Child) -> None:
    right_secret_wrong_sender = json.dumps(claim(child, "rollout/1")).encode() + b"\n"
    reply = _say(world, right_secret_wrong_sender)
    assert f"process {os.getpid()} may not report for process {child.pid}".encode() in reply
    own = {"pid": os.getpid(), "start_ticks": own_start_ticks()}
    assert _say(world, json.dumps({**claim(child, "rollout/1"), **own}).encode() + b"\n") == b'{"ok": true}\n'


def test_a_silent_connection_delays_no_other(world: World, intake: RegistrationServer, child: Child) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(world.data_dir / "agent.sock"))
        child.start("rollout/1")
        eventually(lambda: world.registry.num_live() == 1, "the child was registered meanwhile")
        silent.settimeout(PATIENCE_SECONDS)
        assert silent.recv(1) == b""  # closed at its deadline


def test_two_jobs_on_one_node_do_not_share_a_replica(tmp_path: Path) -> None:
    world, children = World(tmp_path), [Child(tmp_path) for _ in range(3)]
    try:
        for child in children:
            child.do("import signal")
        of_job = [{"detail": {"job": "mine", "rendezvous": r}} for r in ("h:1", "h:2", "h:2")]
        for child, rank, detail in zip(children, (0, 0, 1), of_job, strict=True):
            known = {"rank": rank, "secret": registration_secret(TOKEN, "trainer/0", rank, 0)}
            for _ in range(2):  # the answer to the first was lost
                world.registry.register(child.pid, claim(child, "trainer/0", 0, **known, **detail))
        named = {(r.process.pid, r.replica, r.rank) for r in world.registry.registrations()}
        other = f"trainer/{job_number('h:2')}"
        a, b, c = (child.pid for child in children)
        assert named == {(a, "trainer/0", 0), (b, other, 0), (c, other, 1)}
        assert world.kinds() == ["registered"] * 3
        children[0].close()
        eventually(lambda: "exited" in world.kinds(), what="the end of the first job")
        world.poll()
        world.registry.register(b, claim(children[1], "trainer/0", 0, **of_job[1]))
        assert {r.replica for r in world.registry.registrations()} == {other}, "a name is kept"
    finally:
        for child in children:
            child.close()
        world.close()
