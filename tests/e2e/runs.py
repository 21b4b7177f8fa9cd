"""Starting whole runs from tests: `rolecall demo` as a user would, in a process of its own, with an observer beside
it."""

import io
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.cli.main import main
from rolecall.core.config.algorithm import AlgorithmName
from rolecall.core.config.job import TaskName
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import GroupState, Ledger
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.tasks.task import group_number, group_start
from tests.e2e.observer import Observer, is_alive
from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class DemoRun:
    process: subprocess.Popen[bytes]
    path: Path
    observer: Observer
    log: Path

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done within {seconds} s:\n{self.output()[-3000:]}") from None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def report(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return value

    def strike(self, kind: str, replica: str, incarnation: int) -> float:
        """SIGKILL of a replica's process by the observer; the report is informed afterwards. Returns the time."""
        at = self.observer.kill(replica, incarnation)
        pid = self.observer.pids[(replica, incarnation)]
        line = {"kind": kind, "target": replica, "incarnation": incarnation, "pid": pid, "injected_at": at}
        more = {"start_ticks": self.observer.start_ticks(pid), "node": "", "how": "sigkill"}
        with (self.path / "injections.jsonl").open("a") as f:
            f.write(json.dumps({**line, **more}) + "\n")
        return at

    def until_step(self, step: int, seconds: float) -> None:
        def reached() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early:\n{self.output()[-3000:]}")
            return len(self.observer.steps) > step

        eventually(reached, f"step {step} of {self.path.name}:\n{self.output()[-2000:]}", seconds=seconds)


def rolecall(*args: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    argv = [sys.executable, "-m", "rolecall", *args]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """The same, in this process: without the seconds that each interpreter takes to start on a machine at work."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(args)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


@contextmanager
def demo_run(root: Path, run_id: str, args: Sequence[str], *, dashboard: bool = False) -> Iterator[DemoRun]:
    """A demo in the background. However the test ends, nothing of it is left running."""
    path = root / run_id
    log = root / f"{run_id}.log"
    argv = [sys.executable, "-m", "rolecall", "demo", "--plain", "--runs", str(root), "--id", run_id]
    argv += [] if dashboard else ["--no-dashboard"]
    with log.open("wb") as out:
        process = subprocess.Popen([*argv, *args], cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    observer = Observer(path.resolve())
    observer.start()
    try:
        yield DemoRun(process, path, observer, log)
    finally:
        observer.stop()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        rolecall("down", str(path), "--runs", str(root))


def check_no_false_alarm(report: dict[str, Any]) -> None:
    """The report of a run whose every incident is of an injected fault. A failure shows what the other ones were."""
    wrong = [i for i in report["incidents"] if i["incident_id"] in report["false_alarms"]]
    assert report["false_alarms"] == [], json.dumps(wrong, indent=1)


def check_algorithm(run: DemoRun, name: AlgorithmName) -> None:
    """A run that has ended learned with this algorithm, from every part of an answer at most once."""
    assert run.report()["learns"] == f"{name} on {TaskName.LONG_ADDITION}"
    journal = Journal(RunDir(run.path).database_url)
    try:
        commits = journal.events(kinds=[EventKind.STEP_COMMITTED])
        trained = {line["group_id"] for line in Ledger(journal.store).lines() if line["state"] == GroupState.TRAINED}
    finally:
        journal.close()
    critic, filters, windows = (name in which for which in ({"ppo", "tppo"}, {"dapo"}, {"tppo"}))
    for commit in commits:
        health = commit.payload.to_body()["health"]
        assert health["entropy"] > 0
        assert ("value_loss" in health, "filtered_fraction" in health) == (critic, filters)
    starts = defaultdict[int, list[int]](list)
    for group in trained:
        starts[group_number(group)].append(group_start(group))
    assert any(len(found) > 1 for found in starts.values()) == windows


def alive(observer: Observer) -> list[str]:
    """Processes of the run that live now, by (pid, start time)."""
    found = []
    for (pid, start), seen in list(observer.processes.items()):
        if pid != os.getpid() and is_alive(pid, start):
            found.append(f"{pid} {seen.title[:80]}")
    return found
