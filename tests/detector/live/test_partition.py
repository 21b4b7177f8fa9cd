"""A trainer's network cable is pulled in the middle of a reduce: the detector, on a machine of its own, says who.

Real trainers and real agents, each pair in a network namespace, behind a switch; the detector sits at the switch.

pytest tests/detector/live/test_partition.py
"""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.rundir import registration_secret
from rolecall.detector.live.monitored_process import WORK_PHASES
from tests.netns import Network
from tests.rl_runtime.trainer_process import Place, Team, TrainerProcess, tiny_job
from tests.support import eventually

TOKEN = "a token of tests"
WATCHER = Path(__file__).parents[1] / "watcher.py"
DEADLINE_SECONDS = 120.0
WORK = {f"trainer/{phase}" for phase in WORK_PHASES}
"""Deadlines by which a trainer that waits for others is judged."""


class Watched:
    """Three machines, each with an agent and a trainer that trains with the others; the detector at their switch."""

    def __init__(self, folder: Path, network: Network) -> None:
        (folder / "token").write_text(TOKEN)
        self._processes: list[subprocess.Popen[str]] = []
        self.network, self._folder = network, folder
        self._said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.team = Team(tiny_job(group_timeout_seconds=600.0))  # the group must not give up before the finding
        self._step = 0
        self._listener: threading.Thread | None = None

    def start(self) -> list[TrainerProcess]:
        machines = self.network.machines
        node_dirs = [self._folder / f"node-{i}" for i in range(len(machines))]
        for machine, node_dir in zip(machines, node_dirs, strict=True):
            node_dir.mkdir()
            options = ["--node", node_dir.name, "--data-dir", str(node_dir), "--host", machine.address]
            options += ["--token-file", str(self._folder / "token")]
            self._run([*machine.command, sys.executable, "-m", "rolecall.agent", "--ranks-only", *options])
        for node_dir in node_dirs:
            eventually((node_dir / "agent.json").exists, f"the agent of {node_dir.name} says where it listens")
        for i, (machine, node_dir) in enumerate(zip(machines, node_dirs, strict=True)):
            secret = registration_secret(TOKEN, f"trainer/{i}", 0, 1)
            self.team.start(i, place=Place(machine=machine, node_dir=str(node_dir), secret=secret))
        [t.ready() for t in self.team.all]
        urls = {d.name: json.loads((d / "agent.json").read_text())["url"] for d in node_dirs}
        arguments = [str(WATCHER), json.dumps(urls), json.dumps({"trainer": len(urls)})]
        detector = self._run([*self.network.switch.command, sys.executable, *arguments])
        self._listener = threading.Thread(target=self._listen, args=(detector,), daemon=True)
        self._listener.start()
        self.team.join(self.team.all)
        return self.team.all

    def _run(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        return process

    def _listen(self, detector: subprocess.Popen[str]) -> None:
        assert detector.stdout is not None
        for line in detector.stdout:
            kind, value = json.loads(line)
            self._said.put((kind, value))

    def tell_step(self) -> None:
        one, other, third = self.team.all
        self.team.tell_step(self._step, {one: [0, 1], other: [2], third: [3]})
        self._step += 1

    def learn(self) -> None:
        """Trains until the detector knows how long trainers take, and has seen each of them work."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        learned: set[str] = set()
        experienced: set[str] = set()
        while not learned & WORK or len(experienced) < len(self.team.all):
            assert time.monotonic() < deadline, (learned, experienced)
            self.tell_step()
            [t.answer() for t in self.team.all]
            while not self._said.empty():
                kind, value = self._said.get()
                if kind == "learned":
                    learned.add(value)
                elif kind == "experienced":
                    experienced.add(value)

    def next_diagnosis(self) -> Diagnosis:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            kind, value = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            if kind == "diagnosis":
                return Diagnosis.from_dict(value)

    def close(self) -> None:
        self.team.close()
        for process in self._processes:
            process.kill()
        if self._listener is not None:
            self._listener.join(30)  # its pipe is at its end
        for process in self._processes:
            process.communicate(timeout=30)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    network = Network(3)
    try:
        watched = Watched(tmp_path, network)
        try:
            yield watched
        finally:
            watched.close()
    finally:
        network.close()


@pytest.mark.slow
def test_the_disconnected_rank_is_named_and_its_waiters_are_not(watched: Watched) -> None:
    trainers = watched.start()
    watched.learn()
    trainers[2].stop_at("bucket", 2)
    watched.tell_step()
    trainers[2].arrives_at("bucket")
    watched.network.cut(2)
    cut_at = time.monotonic()
    trainers[2].go_on()
    reported = [watched.next_diagnosis()]
    while reported[-1].fault_class is not FaultClass.NETWORK:
        reported.append(watched.next_diagnosis())
    print(f"\ncut to naming: {time.monotonic() - cut_at:.2f} s")
    for diagnosis in reported:
        print(diagnosis.fault_class, diagnosis.because)
        assert [s.node for s in diagnosis.suspects] == ["node-2"], diagnosis
    assert reported[-1].suspects[0].replica == "trainer/2"
