"""The detector on a real agent and real processes: three workers on few CPUs, each hurt as in production."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.core.clock import SystemClock
from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.rundir import registration_secret
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.sources.agents import AgentsSource
from tests.support import PATIENCE_SECONDS, eventually

TOKEN = "a token of tests"
UNIT_SECONDS = 0.01
LEARN_UNITS = 300
"""About ten seconds where three share two CPUs: baselines and deadlines are learned by then."""


class Run:
    def __init__(self, folder: Path) -> None:
        self.node_dir = folder / "node-1"
        self.node_dir.mkdir()
        (folder / "token").write_text(TOKEN)
        python = [sys.executable, "-m", "rolecall.agent", "--ranks-only"]
        options = ["--node", "node-1", "--data-dir", str(self.node_dir), "--token-file", str(folder / "token")]
        self.agent = subprocess.Popen([*python, *options])
        self.workers: dict[str, subprocess.Popen[str]] = {}
        self.incarnations: dict[str, int] = {}
        eventually((self.node_dir / "agent.json").exists, "the agent says where it listens")
        for i in range(3):
            self.start(f"rollout/{i}")
        self.detector = LiveDetector(DetectorConfig(mask_proc_state=True), {"rollout": 3})
        self.source = AgentsSource(self.agents, SystemClock())
        self.source.start()
        self.reported: dict[str, tuple[float, Diagnosis]] = {}

    def agents(self) -> dict[str, str]:
        return {"node-1": json.loads((self.node_dir / "agent.json").read_text())["url"]}

    def start(self, replica: str, incarnation: int = 1) -> None:
        self.incarnations[replica] = incarnation
        secret = registration_secret(TOKEN, replica, 0, incarnation)
        script = Path(__file__).parents[1] / "worker.py"
        arguments = [sys.executable, str(script), replica, str(incarnation), str(self.node_dir), secret]
        arguments.append(str(UNIT_SECONDS))
        self.workers[replica] = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )

    def hurt(self, replica: str, how: str) -> None:
        stdin = self.workers[replica].stdin
        assert stdin is not None
        stdin.write(how + "\n")

    def watch(self, seconds: float, stop: bool = True) -> None:
        """Until a diagnosis is reported (with `stop`), or for `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (stop and self.reported):
            for d in self.detector.observe(self.source.poll(0.25)):
                self.reported.setdefault(d.key, (time.monotonic(), d))

    def learn(self, units: int = LEARN_UNITS) -> None:
        """Watches until all have worked for a while."""
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while not all(self.units(r) > units for r in self.workers):
            assert time.monotonic() < deadline, "the workers do not work"
            self.watch(1.0)
            assert not self.reported, self.reported

    def units(self, replica: str) -> int:
        words = self.detector.progressing(replica, self.incarnations[replica])[1].split("has finished ")
        return int(words[1].split()[0].replace(",", "")) if len(words) > 1 else 0

    def give_up(self, replica: str) -> None:
        """Ends it, as a replacement does."""
        self.detector.forget(replica, self.incarnations[replica] + 1)
        self.workers[replica].kill()
        self.workers[replica].communicate(timeout=10)
        self.watch(1.0)
        assert not self.reported, "the end of one that was given up is wanted"

    def close(self) -> None:
        self.source.close()
        for p in (*self.workers.values(), self.agent):
            if p.poll() is None:
                p.kill()
            p.communicate(timeout=10)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    r = Run(tmp_path)
    try:
        yield r
    finally:
        r.close()


@pytest.mark.slow
def test_a_kill_is_reported_and_a_goodbye_is_not(run: Run) -> None:
    run.learn(units=20)  # an exit needs no baseline
    run.hurt("rollout/0", "finish")
    run.workers["rollout/0"].wait(10)
    run.watch(2.0)
    assert not run.reported
    begun = time.monotonic()
    run.workers["rollout/1"].kill()
    run.watch(15.0)
    at, diagnosis = run.reported["crash:rollout/1#1"]
    assert at > begun
    assert "in generate with 8 open requests" in diagnosis.because


HANGS = {"stopped": "process stopped", "lock": "a lock or a read", "gil": "a busy loop holds the interpreter"}


@pytest.mark.slow
def test_a_slow_one_and_then_hangs_are_reported(run: Run) -> None:
    """One after the other, in one run: what costs time is to learn. A slow one needs peers, hangs need none."""
    run.learn()
    begun = time.monotonic()
    run.hurt("rollout/1", "delay")
    run.watch(90.0)
    assert list(run.reported) == ["slow:rollout/1#1"], run.reported
    assert run.reported.pop("slow:rollout/1#1")[0] > begun
    run.give_up("rollout/1")
    run.start("rollout/1", incarnation=2)
    run.learn(units=20)  # deadlines are those of the role
    for replica, (how, kind) in zip(run.workers, HANGS.items(), strict=True):
        incarnation = run.incarnations[replica]
        begun = time.monotonic()
        if how == "stopped":
            os.kill(run.workers[replica].pid, signal.SIGSTOP)
        else:
            run.hurt(replica, how)
        run.watch(30.0)
        assert list(run.reported) == [f"hang:{replica}#{incarnation}"], (how, run.reported)
        at, diagnosis = run.reported.pop(f"hang:{replica}#{incarnation}")
        assert at > begun and kind in diagnosis.because
        run.give_up(replica)


STANDBY_SECONDS = 5.0


@pytest.mark.slow
def test_a_standby_that_is_stopped_is_reported(run: Run) -> None:
    """It waits and has done no work. Its deadline is 30 s, shortened here by that of a start."""
    run.detector = LiveDetector(
        DetectorConfig(mask_proc_state=True, first_unit_seconds=STANDBY_SECONDS), {"rollout": 3}
    )
    run.start("standby/0")
    deadline = time.monotonic() + 60
    while not run.detector.waits("standby/0", 1):
        assert time.monotonic() < deadline, "the standby does not wait"
        run.watch(0.5)
    run.watch(1.2 * STANDBY_SECONDS)
    assert not run.reported, "it waits, and sends heartbeats"
    os.kill(run.workers["standby/0"].pid, signal.SIGSTOP)
    run.watch(60.0)
    assert list(run.reported) == ["hang:standby/0#1"], run.reported
    assert "no heartbeat in wait" in run.reported["hang:standby/0#1"][1].because


@pytest.mark.long  # detection is that of a delay, which every run of the tests has
def test_one_that_is_stopped_again_and_again_is_reported_as_slow(run: Run) -> None:
    run.learn()
    begun = time.monotonic()
    over = threading.Event()
    threading.Thread(target=duty_cycle, args=(run.workers["rollout/1"].pid, over), daemon=True).start()
    run.watch(90.0)
    over.set()
    assert list(run.reported) == ["slow:rollout/1#1"], run.reported
    assert run.reported["slow:rollout/1#1"][0] > begun


def duty_cycle(pid: int, over: threading.Event) -> None:
    """Stops the process for 150 ms of every 200."""
    while not over.is_set():
        os.kill(pid, signal.SIGSTOP)
        over.wait(0.15)
        os.kill(pid, signal.SIGCONT)
        over.wait(0.05)


def test_a_collapse_is_found_from_reports_of_real_processes(run: Run) -> None:
    def newest() -> int:
        points = run.detector.state()["stages"]["collapse"]["history"]["v"]["points"]
        return int(points[-1][0]) if points else -1

    for step in range(17):
        for replica in run.workers:
            run.hurt(replica, f"step {step + 1} {0.9 if step < 8 else 0.2} 0.5")
        deadline = time.monotonic() + 60
        while newest() < step:
            assert time.monotonic() < deadline, f"no one reported step {step}"
            run.watch(0.2, stop=False)
    assert list(run.reported) == ["user_code::collapse"]
    d = run.reported["user_code::collapse"][1]
    assert not d.suspects and "mean reward fell from 0.9 (steps 0 to 7) to 0.2, since step 8" in d.because
    assert "entropy 0.5 nats a token then" in d.because and "(within 1e-06)" in d.because
