"""Why Ray's actors died, by a real Ray on this machine: an agent that finds them, and what the detector says."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from rolecall.agent.collectors.base import Fact
from rolecall.agent.collectors.process.discovery import parse_discovery
from rolecall.agent.collectors.process.ray_workers import RAYLET, WORD_SECONDS, RayWorkersCollector
from rolecall.agent.collectors.process.uninstrumented import UninstrumentedJobCollector
from rolecall.agent.identity import Registration
from rolecall.agent.node import Agent, AgentSettings
from rolecall.core.clock import SystemClock
from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.sources.agents import AgentsSource
from rolecall.formats.ray_logs import RayReason
from tests.agent.processes import NODE, TOKEN
from tests.support import eventually

JOB = Path(__file__).with_name("ray_job.py")
RULES = {"defaults": False, "rules": [{"name": "probe", "title": "^ray::CauseProbe", "role": "rollout"}]}


class FakeRay:
    """One worker of a raylet, in a copied /proc. `logs`: the log folder of its session."""

    def __init__(self, folder: Path) -> None:
        proc, self.logs = folder / "proc", folder / "logs"
        self.logs.mkdir()
        for pid, name, parent in ((10, RAYLET, 1), (20, "ray::Actor", 10)):
            (proc / str(pid)).mkdir(parents=True)
            (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} {'0 ' * 17}500 {'0 ' * 29}")
        (proc / "10" / "cmdline").write_bytes(f"raylet\0--log_dir={self.logs}\0".encode())
        process = ProcessId(node=NODE, pid=20, start_ticks=500)
        worker = Registration(process=process, replica="rollout/0", role="rollout", rank=0, incarnation=0, found=True)
        self._living = [worker]
        self._collector = RayWorkersCollector(lambda: tuple(self._living), proc=proc)
        self._collector.read(0.0)

    def death(self) -> Fact:
        self._living.clear()
        self._collector.read(1.0)
        (fact,) = self._collector.read(1.0 + WORD_SECONDS).facts
        return fact


@pytest.fixture
def fake_ray(tmp_path: Path) -> FakeRay:
    return FakeRay(tmp_path)


def test_the_log_of_an_earlier_worker_with_the_same_pid_is_not_read(fake_ray: FakeRay) -> None:
    for worker, age in (("a" * 20, 9), ("b" * 20, 1), ("c" * 20, 5)):
        log = fake_ray.logs / f"python-core-worker-{worker}_20.log"
        log.write_text("")
        os.utime(log, (1000 - age, 1000 - age))
    assert fake_ray.death().detail["log_file"].endswith(f"{'b' * 20}_20.log")


def test_a_log_that_is_no_file_is_not_read(fake_ray: FakeRay, tmp_path: Path) -> None:
    """A pipe would stop the agent; a link may lead to a file that its owner may not read."""
    os.mkfifo(fake_ray.logs / "raylet.out")
    other = tmp_path / "other"
    other.write_text("Disconnect, exit_type=USER_ERROR, exit_detail=secret\n")
    (fake_ray.logs / f"python-core-worker-{'a' * 20}_20.log").symlink_to(other)
    death = fake_ray.death()
    assert death.detail["reason"] == RayReason.NO_WORD and "secret" not in str(death.detail)


class RayJob:
    """The job, an agent that looks at it, and a detector. `said`: every diagnosis, by key and PIDs."""

    def __init__(self, folder: Path, data_dir: Path) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(JOB), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        self.pids: dict[str, int] = {}
        self.said: dict[str, Diagnosis] = {}
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        rules = parse_discovery(RULES)
        self.agent = Agent(
            AgentSettings(
                node=NODE,
                data_dir=data_dir,
                token=TOKEN,
                collectors=lambda registry: [
                    UninstrumentedJobCollector(registry, NODE, rules, interval_seconds=0.2),
                    RayWorkersCollector(registry.registrations),
                ],
            )
        )
        self._serves = threading.Thread(target=self.agent.run, daemon=True)
        self._serves.start()
        clock = SystemClock()
        self.source = AgentsSource(lambda: {NODE: self.agent.url}, clock, 0.2)
        self.source.start()
        self.detector = LiveDetector(DetectorConfig(), {})

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def do(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        while (line := self._lines.get(timeout=60)) != "ok\n":
            name, _, pid = line.strip().partition(" ")
            if pid.isdecimal():  # Ray writes here, too
                self.pids[name] = int(pid)

    def look(self) -> None:
        for diagnosis in self.detector.observe(self.source.poll(0.2)):
            pids = sorted(s.process.pid for s in diagnosis.suspects if s.process)  # names are used again
            self.said.setdefault(f"{diagnosis.key} {pids}", diagnosis)

    def waits_until_found(self, name: str) -> None:
        def found() -> bool:
            self.look()
            return any(r.process.pid == self.pids[name] for r in self.agent.registry.registrations())

        eventually(found, f"{name} is found")
        for _ in range(4):  # the collector looks, and a sample of it arrives
            self.look()

    def statement(self, name: str) -> AgentEvent:
        found: list[AgentEvent] = []

        def said() -> bool:
            self.look()
            found[:] = [
                e
                for e in self.agent.events.after(0).events
                if e.kind is AgentEventKind.RAY_WORKER_ENDED and e.process and e.process.pid == self.pids[name]
            ]
            return bool(found)

        try:
            eventually(said, f"Ray's logs say why {name} ended")
        except AssertionError:
            raise AssertionError(
                f"{name} {self.pids}: {[e.to_dict() for e in self.agent.events.after(0).events]}"
            ) from None
        return found[0]

    def diagnosis(self, name: str) -> Diagnosis:
        found: list[Diagnosis] = []

        def named() -> bool:
            self.look()
            found[:] = [
                d for d in self.said.values() if any(s.process and s.process.pid == self.pids[name] for s in d.suspects)
            ]
            return bool(found)

        eventually(named, f"the end of {name} is diagnosed")
        return found[0]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self._reader.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.source.close()
        self.agent.stop()
        self._serves.join(10)


@pytest.fixture
def ray_job(tmp_path: Path) -> Iterator[RayJob]:
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp") as short:  # Ray's sockets have short names only
        job = RayJob(Path(short), tmp_path / "agent")
        try:
            yield job
        finally:
            job.close()


@pytest.mark.long
def test_every_reason_behind_actor_died(ray_job: RayJob) -> None:
    job = ray_job
    job.do("start stays killed dropped leaves exits asked owner")
    job.do("child owner")
    for name in ("stays", "killed", "dropped", "leaves", "exits", "asked", "owner", "child"):
        job.waits_until_found(name)

    os.kill(job.pids["killed"], signal.SIGKILL)
    assert job.statement("killed").detail["reason"] == "no_word"
    said = job.diagnosis("killed")
    assert said.fault_class is FaultClass.CRASH and "process exited on signal 9" in said.because
    assert "Ray did not end it" in said.because

    job.do("exit3 exits")
    assert job.statement("exits").detail["reason"] == "exited"
    assert "its own code ended the process" in job.diagnosis("exits").because
    assert "exit code 3" in job.diagnosis("exits").because, "the process itself ends with code 0"

    job.do("fail init")
    eventually(lambda: job.look() or _raiser(job), "the actor's __init__ runs")
    job.pids["init"] = _raiser(job)
    assert job.statement("init").detail["reason"] == "creation_failed"
    assert "its __init__ raised: ValueError: no weights at /models/x" in job.diagnosis("init").because

    os.kill(job.pids["owner"], signal.SIGKILL)
    assert job.statement("child").detail["reason"] == "owner_died"
    assert "the process that created it has died" in job.statement("child").detail["text"]
    assert job.diagnosis("owner").fault_class is FaultClass.CRASH

    for command, name, reason in (
        ("kill", "asked", "ray_kill"),
        ("drop", "dropped", "out_of_scope"),
        ("leave", "leaves", "left"),
    ):
        job.do(f"{command} {name}")
        assert job.statement(name).detail["reason"] == reason
    named = {s.process.pid for d in job.said.values() for s in d.suspects if s.process}
    intended = {job.pids[name] for name in ("child", "asked", "dropped", "leaves", "stays")}
    assert not named & intended, "what the job ended itself is no crash"


def _raiser(job: RayJob) -> int:
    known = set(job.pids.values())
    return next((r.process.pid for r in job.agent.registry.registrations() if r.process.pid not in known), 0)


@pytest.mark.long
def test_actors_of_a_raylet_that_died_are_one_lost_node(ray_job: RayJob) -> None:
    job = ray_job
    job.do("start one two")
    job.waits_until_found("one")
    job.waits_until_found("two")
    raylet = int(Path(f"/proc/{job.pids['one']}/stat").read_text().rpartition(")")[2].split()[1])
    job.do(f"raylet {raylet}")
    statement = job.statement("one")
    assert statement.detail["reason"] == "node_lost" and f"pid {raylet}" in statement.detail["text"]
    said = job.diagnosis("one")
    assert said.fault_class is FaultClass.NODE_LOST
    assert {s.process.pid for s in said.suspects if s.process} == {job.pids["one"], job.pids["two"]}
    assert said.because.startswith(f"{NODE} has left the Ray cluster, and rollout/")
