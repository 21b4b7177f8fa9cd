"""One run of one arm: its process, its kills at their time, and in the cold arm its restarts."""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

from benchmarks import common
from benchmarks.recovery.ettr.measures import measured
from benchmarks.recovery.ettr.schedule import NUM_ROLLOUTS, NUM_TRAINERS, Kill, schedule
from rolecall.core.clock import SystemClock
from rolecall.core.errors import InjectionRefused, JournalError
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import StepCommitted
from rolecall.core.rundir import RunDir
from rolecall.detector.sources.agents import AgentsSource
from rolecall.rl_runtime.faults.injector import inject
from rolecall.views.incidents import parse_injections
from rolecall.views.lifetimes import incarnation_records
from rolecall.watch.run import agent_urls

POLL_SECONDS = 0.25
FIND_SECONDS = 120.0
"""A fault that is not found in time is left to the run's own end."""
TARGET_SECONDS = 300.0
"""A replica that is not at work for so long is not hit: the fault is counted as skipped."""
END_SECONDS = 60.0
JOB = """
name: ettr
seed: {seed}
num_steps: {steps}
injection_allowed: true
roles: {{trainer: {trainers}, rollout: {rollouts}, reward: 1}}
algorithm: {{microbatches_per_step: {microbatches}, learning_rate: 1.0e-4}}
model: {{hidden_size: 384, intermediate_size: 1024, num_layers: 6, num_heads: 6, num_kv_heads: 3, head_dim: 64}}
checkpoint: {{every_steps: {checkpoint_every}}}
runtime: {{standbys: {standbys}, nodes: {nodes}, startup_timeout_seconds: 300}}
recovery: {{mode: {mode}, scope: {scope}, evictions_per_hour_max: 1000, retries_per_replica_max: 100}}
"""


class TokenCounter:
    """Tokens that the engines of a run generated, as its agents report them; those of dead engines stay counted."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._stop = run, threading.Event()
        self._tokens: dict[tuple[str, int, int], int] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        source = AgentsSource(lambda: agent_urls(self._run), SystemClock(), poll_seconds=1.0)
        source.start()
        try:
            while not self._stop.wait(1.0):
                for batch in source.poll(0.0).batches:
                    for sample in batch.processes:
                        if sample.role in ("rollout", "standby"):
                            process = sample.process
                            key = (str(process.node), process.pid, process.start_ticks)
                            self._tokens[key] = max(self._tokens.get(key, 0), sample.tokens)
        finally:
            source.close()

    def total(self) -> int:
        self._stop.set()
        self._thread.join(END_SECONDS)
        return sum(self._tokens.values())


class Driver:
    """One run: its process, its faults at their time, and in the cold arm its restarts."""

    def __init__(self, arm: str, job: str, name: str, kills: Sequence[Kill], minutes_max: float) -> None:
        self._arm, self._name, self._kills = arm, name, list(kills)
        self._log = common.RUNS / f"{name}.log"
        self._minutes = f"{minutes_max:g}"
        self._ends_at = time.monotonic() + 60 * minutes_max + END_SECONDS
        self.run = RunDir(common.RUNS / name)
        self.killed_at: list[float] = []  # cold restarts, wall seconds
        self.num_skipped = 0
        self._process = common.start_run(name, job, "--minutes-max", self._minutes)

    def drive(self) -> int:
        """Exit code of the run, with its end."""
        try:
            while self._process.poll() is None and time.monotonic() < self._ends_at:
                if self._kills and self._committed() >= self._kills[0].step:
                    self._strike(self._kills.pop(0))
                time.sleep(POLL_SECONDS)
        finally:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(END_SECONDS)
        self.num_skipped += len(self._kills)
        return self._process.returncode or 0

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        with closing(Journal(self.run.database_url, create=False)) as journal:
            yield journal

    def _committed(self) -> int:
        """The last committed step; -1: none."""
        try:
            with self.journal() as journal:
                last = journal.last(EventKind.STEP_COMMITTED)
        except (JournalError, OSError):
            return -1  # the run is being created
        return last.as_(StepCommitted).step if last is not None else -1

    def _step_seconds(self) -> float:
        with self.journal() as journal:
            at = [e.wall_at for e in journal.events(kinds=[EventKind.STEP_COMMITTED])]
        return statistics.median(b - a for a, b in pairwise(at)) if len(at) > 1 else 0.0

    def _strike(self, kill: Kill) -> None:
        time.sleep(kill.share * self._step_seconds())
        deadline = time.monotonic() + TARGET_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                record = inject(self.run, f"{kill.role}-kill", f"{kill.role}/{kill.index}")
            except InjectionRefused:
                time.sleep(POLL_SECONDS)
                continue
            if self._arm == "cold":
                self._restart_cold(float(record["injected_at"]))
            return
        self.num_skipped += 1

    def _restart_cold(self, injected_at: float) -> None:
        deadline = time.monotonic() + FIND_SECONDS
        while not self._is_found(injected_at):
            if self._process.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS / 5)
        self.killed_at.append(time.time())
        self._process.kill()
        self._process.wait(END_SECONDS)
        common.start_rolecall("down", self._name, "--runs", str(common.RUNS), log=self._log).wait(END_SECONDS)
        argv = ("up", self._name, "--runs", str(common.RUNS), "--minutes-max", self._minutes)
        self._process = common.start_rolecall(*argv, log=self._log)

    def _is_found(self, injected_at: float) -> bool:
        with self.journal() as journal:
            opened = journal.last(EventKind.INCIDENT_OPENED)
        return opened is not None and opened.wall_at > injected_at


def one_run(
    arm: str, seed: int, percent: float, roles: str, microbatches: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs the job once; returns what was measured."""
    name = f"ettr-{arm}-{seed}-{int(time.time())}"
    job = JOB.format(
        seed=seed,
        steps=options.steps,
        trainers=NUM_TRAINERS,
        rollouts=NUM_ROLLOUTS,
        microbatches=microbatches,
        checkpoint_every=options.checkpoint_every,
        standbys=options.standbys,
        nodes=1 + NUM_TRAINERS + NUM_ROLLOUTS + options.standbys,
        mode="observe" if arm == "cold" else "act",
        scope="job" if arm == "warm" else "replica",
    )
    kills = schedule(seed, options.steps, percent, roles) if arm != "none" else []
    driver = Driver(arm, job, name, kills, options.run_minutes)
    counter = TokenCounter(driver.run)
    began = time.monotonic()
    line: dict[str, Any] = {"run_id": name, "exit_code": driver.drive(), "num_faults_wanted": len(kills)}
    line |= {"seconds": round(time.monotonic() - began, 1), "num_skipped": driver.num_skipped}
    line["tokens_generated"] = counter.total()
    report = driver.run.path / "report.json"
    if report.exists():
        found = json.loads(report.read_text())
        line |= {"audit_ok": found["audit"]["ok"], "outcome": found["outcome"]}
    # Not the exit code: where nothing acts, incidents may be open at the end.
    line["ok"] = line.get("outcome") == "completed" and line["audit_ok"]
    if not report.exists():
        return line  # it did not start
    with driver.journal() as journal:
        events, actual = journal.events(), journal.actual()
    injections = driver.run.injections_path
    faults = parse_injections(injections.read_text()) if injections.exists() else []
    return line | measured(events, incarnation_records(events, actual), faults, driver.killed_at)
