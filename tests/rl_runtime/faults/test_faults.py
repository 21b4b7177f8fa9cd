"""Faults from inside and outside, on real processes; and what the injector refuses."""

import contextlib
import itertools
import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.errors import InjectionRefused, RunNotFound
from rolecall.core.ids import NodeId, ReplicaId, process_start_ticks
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.faults import injector
from rolecall.rl_runtime.faults.cpu_quota import QuotaUnavailable, cpu_group
from rolecall.rl_runtime.faults.injector import KINDS, inject
from rolecall.rl_runtime.faults.process_side import (
    ENGINE_STEP,
    MICROBATCH,
    SCORE,
    InjectedError,
    Injection,
    InjectionRequest,
    InProcessFault,
    effect_path,
    request_path,
)
from rolecall.rl_runtime.processes import run_environment
from tests.full_disk import small_disk
from tests.support import PATIENCE_SECONDS, eventually

WORKER = """
import os, sys, threading, time
from rolecall.rl_runtime.faults.process_side import Injection
injection, place = Injection(sys.argv[1], True), sys.argv[2]
def send(word):
    os.write(1, f"{word} {time.time()}\\n".encode())  # one call, one line: two threads print here
def beat():
    while True:
        send("beat")
        time.sleep(0.02)
threading.Thread(target=beat, daemon=True).start()
while True:
    injection.checkpoint(place)
    time.sleep(0.005)
    send("turn")
"""


class Worker:
    """A process in place of a replica: it works in turns, and its side thread beats.

    `at` has the moments (wall) of both as the process itself saw them: what a fault did to it is read from them
    afterwards, so that a late check does not matter.
    """

    def __init__(self, run: RunDir, place: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(run.path), place],
            env=run_environment(run.path) if env is None else env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.at: dict[str, list[float]] = {"turn": [], "beat": []}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._errors = ""
        eventually(lambda: all(len(moments) > 2 for moments in self.at.values()), "the worker to work")
        self.pid = self.process.pid
        ticks = process_start_ticks(self.pid)
        assert ticks is not None
        self.start_ticks = ticks

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, moment = line.split()
            self.at[word].append(float(moment))

    def goes_on(self) -> None:
        """Waits for turns that are made from now on."""
        now = time.time()
        eventually(lambda: self.at["turn"][-1] > now, "the worker to continue")

    def pauses(self, word: str, since: float, until: float) -> list[float]:
        """Seconds between any two of its turns or beats next to each other, those that touch the time given."""
        return [b - a for a, b in itertools.pairwise(self.at[word]) if b > since and a < until]

    def end(self) -> str:
        """Kills it; returns what it wrote to standard error."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None and self.process.stdout is not None
        if not self.process.stderr.closed:
            self._errors = self.process.stderr.read()
        self.process.stderr.close()
        self.process.stdout.close()
        return self._errors


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, allowed=True)


def make_run(root: Path, *, allowed: bool) -> RunDir:
    run = create_run_dir(root, "r")
    Journal(run.database_url).close()
    run.write({"run_id": "r", "database_url": run.database_url, "injection_allowed": allowed})
    return run


@contextlib.contextmanager
def replica(run: RunDir, name: str, place: str = ENGINE_STEP, env: dict[str, str] | None = None) -> Iterator[Worker]:
    worker = Worker(run, place, env)
    serve(run, name, worker.pid, worker.start_ticks)
    try:
        yield worker
    finally:
        worker.end()


def serve(run: RunDir, name: str, pid: int, start_ticks: int) -> None:
    who, node = ReplicaId(name), NodeId("node-1")
    journal = Journal(run.database_url)
    journal.set_desired(Desired(replica=who, incarnation=1, node=node))
    state = ReplicaState.SERVING
    journal.set_actual(Actual(replica=who, incarnation=1, node=node, state=state, pid=pid, start_ticks=start_ticks))
    journal.close()


def log(run: RunDir) -> list[dict[str, object]]:
    path = run.injections_path
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- from inside --------------------------------------------------------------------------------------------------


def ask(run: RunDir, how: InProcessFault, **more: object) -> None:
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    request = InjectionRequest(**{"request_id": how, "how": how, "seconds": 0.2, **more})  # type: ignore[arg-type]
    request_path(run, os.getpid(), ticks).write_text(request.to_json())


def test_without_permission_a_request_is_nothing(run: RunDir) -> None:
    injection = Injection(run.path, False)
    ask(run, InProcessFault.RAISE)
    injection.checkpoint(MICROBATCH)


def test_a_request_acts_once_at_the_place_it_names(run: RunDir) -> None:
    clock = FakeClock()
    injection = Injection(run.path, True, clock=clock)
    injection.checkpoint(MICROBATCH)
    ask(run, InProcessFault.RAISE, at=MICROBATCH, message="as a user would write it")
    injection.checkpoint(MICROBATCH)  # checked less than 50 ms ago
    clock.advance(0.06)
    injection.checkpoint(ENGINE_STEP)
    clock.advance(0.06)
    with pytest.raises(InjectedError, match="as a user would write it"):
        injection.checkpoint(MICROBATCH)
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    effect = json.loads(effect_path(run, os.getpid(), ticks).read_text())
    assert effect == {"request_id": "raise", "at": MICROBATCH, "wall_at": clock.wall()}
    clock.advance(0.06)
    injection.checkpoint(MICROBATCH)


def test_a_delay_lasts_until_its_bound_or_until_taken_back(run: RunDir) -> None:
    clock = FakeClock()
    injection = Injection(run.path, True, clock=clock)
    ask(run, InProcessFault.DELAY, at=ENGINE_STEP, seconds=1.0, delay_seconds=0.1)

    def delay() -> float:
        clock.advance(0.06)
        before = clock.monotonic()
        injection.checkpoint(ENGINE_STEP)
        return clock.monotonic() - before

    assert delay() == pytest.approx(0.1)
    before = clock.monotonic()
    injection.checkpoint(MICROBATCH)
    assert clock.monotonic() == before
    assert delay() == pytest.approx(0.1)
    clock.advance(1.0)
    assert delay() == 0.0
    ask(run, InProcessFault.DELAY, request_id="again", seconds=100.0, delay_seconds=0.1)
    assert delay() == pytest.approx(0.1)
    for path in run.inject_dir.glob("*.json"):
        path.unlink()
    assert delay() == 0.0


def test_rubbish_is_no_request(run: RunDir) -> None:
    injection = Injection(run.path, True)
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    request_path(run, os.getpid(), ticks).write_text('{"how": "explode"}')
    injection.checkpoint(MICROBATCH)


@pytest.mark.parametrize(("how", "beats"), [("lock", True), ("read", True), ("gil", False)])
def test_hangs_from_inside_differ_in_the_side_thread(run: RunDir, how: str, beats: bool) -> None:
    with replica(run, "trainer/0", MICROBATCH) as worker:
        record = inject(run, "trainer-hang", how=how, seconds=2.0)
        worker.goes_on()
        during = record["injected_at"], record["injected_at"] + 0.1
        # A busy loop can only guess how many turns make two seconds.
        hung_seconds = max(worker.pauses("turn", *during))
        assert hung_seconds > (1.9 if beats else 0.5)
        silent_seconds = max(worker.pauses("beat", record["injected_at"], record["ended_at"]))
        assert (silent_seconds < hung_seconds / 2) is beats


def test_exception_comes_from_user_code_on_every_rank(run: RunDir) -> None:
    with replica(run, "trainer/0", MICROBATCH) as a, replica(run, "trainer/1", MICROBATCH) as b:
        record = inject(run, "trainer-exception")
        assert record["targets"] == ["trainer/0", "trainer/1"]
        assert a.process.wait(PATIENCE_SECONDS) == b.process.wait(PATIENCE_SECONDS) == 1
        assert "InjectedError: shape mismatch" in a.end()


@pytest.mark.parametrize(
    ("how", "factor"), [(InProcessFault.NAN, "nan"), (InProcessFault.SCALE, "1000.0"), (InProcessFault.FLIP, "-1.0")]
)
def test_numbers_of_one_unit_of_work_are_corrupted_and_nothing_else(
    run: RunDir, how: InProcessFault, factor: str
) -> None:
    clock = FakeClock()
    injection = Injection(run.path, True, clock=clock)
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    path = request_path(run, os.getpid(), ticks)
    path.write_text(InjectionRequest(request_id="n1", how=how, seconds=5.0, at=MICROBATCH).to_json())
    factors = []
    for name in (ENGINE_STEP, MICROBATCH, MICROBATCH):
        clock.advance(1.0)
        factors.append(str(injection.factor(name)))
    assert factors == ["None", factor, "None"], "only at its checkpoint, and once"


@pytest.mark.parametrize(("how", "factor"), [(InProcessFault.SKEW, "-1.0"), (InProcessFault.NANS, "nan")])
def test_wrong_numbers_last_until_they_are_withdrawn(run: RunDir, how: InProcessFault, factor: str) -> None:
    clock = FakeClock()
    injection = Injection(run.path, True, clock=clock)
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    path = request_path(run, os.getpid(), ticks)
    request = InjectionRequest(request_id="s1", how=how, seconds=60.0, at=SCORE)
    path.write_text(request.to_json())
    factors = []
    for name in (SCORE, SCORE, ENGINE_STEP):
        clock.advance(1.0)
        factors.append(str(injection.factor(name)))
    path.unlink()
    clock.advance(1.0)
    assert [*factors, str(injection.factor(SCORE))] == [factor, factor, "None", "None"]


SCORER = """
import json, sys, time
from rolecall.core.config.job import parse_job
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.faults.process_side import SCORE, Injection
from rolecall.rl_runtime.tasks.reward_worker import RewardWorker
from tests.rl_runtime.tasks.test_reward_worker import groups
injection = Injection(sys.argv[1], True)
worker = RewardWorker(
    replica=ReplicaId("reward/0"), incarnation=1, job=parse_job({"seed": 5}), on_group=lambda: injection.factor(SCORE)
)
made = groups(1)
while True:
    print(json.dumps(worker.score(1, made)), flush=True)
    time.sleep(0.02)
"""


def test_a_real_reward_worker_returns_no_numbers_while_the_fault_lasts_and_then_the_right_ones(run: RunDir) -> None:
    argv = [sys.executable, "-c", SCORER, str(run.path)]
    with subprocess.Popen(argv, env=run_environment(run.path), stdout=subprocess.PIPE, text=True) as scorer:
        try:
            assert scorer.stdout is not None
            right = json.loads(scorer.stdout.readline())
            ticks = process_start_ticks(scorer.pid)
            assert ticks is not None
            serve(run, "reward/0", scorer.pid, ticks)
            done: list[dict[str, object]] = []
            injecting = threading.Thread(target=lambda: done.append(inject(run, "reward-nan", seconds=1.0)))
            injecting.start()
            answers = list(itertools.islice(map(json.loads, scorer.stdout), 1))
            while injecting.is_alive() or answers[-1] != right:
                answers.append(json.loads(scorer.stdout.readline()))
        finally:
            scorer.kill()
    (record,) = done
    assert (record["target"], record["how"]) == ("reward/0", "nans")
    wrong = [a for a in answers if a != right]
    assert len(wrong) > 1 and all(math.isnan(reward) for a in wrong for (group,) in [a] for reward in group)


# --- from outside -------------------------------------------------------------------------------------------------


def test_kill_comes_in_the_middle_of_a_step(run: RunDir) -> None:
    with replica(run, "rollout/0") as worker:
        record = inject(run, "rollout-kill")
        assert worker.process.wait(PATIENCE_SECONDS) == -9
        assert (record["kind"], record["target"], record["incarnation"]) == ("rollout-kill", "rollout/0", 1)
        assert (record["pid"], record["start_ticks"], record["node"]) == (worker.pid, worker.start_ticks, "node-1")
        effect = json.loads(effect_path(run, worker.pid, worker.start_ticks).read_text())
        assert effect["at"] == ENGINE_STEP and effect["wall_at"] <= record["injected_at"]
        assert [line["target"] for line in log(run)] == ["rollout/0"]
    assert not list(run.inject_dir.glob("*[0-9].json")), "a request was left behind"


def test_stop_is_undone_after_its_bound(run: RunDir) -> None:
    with replica(run, "trainer/1", MICROBATCH) as worker:
        record = inject(run, "trainer-hang", "trainer/1", "stop", 1.0)
        assert record["how"] == "stop" and record["ended_at"] - record["injected_at"] >= 1.0
        worker.goes_on()


def test_duty_cycle_stops_most_of_the_time_and_lets_it_work_in_between(run: RunDir) -> None:
    with replica(run, "rollout/0") as worker:
        record = inject(run, "rollout-slow", None, "duty", 3.0)
        worker.goes_on()
        stops = worker.pauses("turn", record["injected_at"], record["ended_at"])
        stops = [seconds for seconds in stops if seconds >= 0.65 * injector.DUTY_PERIOD_SECONDS]
        assert len(stops) >= 4 and sum(stops) > (record["ended_at"] - record["injected_at"]) / 2, stops


def test_delay_slows_every_step_until_its_bound(run: RunDir) -> None:
    with replica(run, "rollout/0") as worker:
        record = inject(run, "rollout-slow", None, "delay", 2.0)
        worker.goes_on()
        slow = worker.pauses("turn", record["injected_at"], record["injected_at"] + 1.9)
        assert len(slow) >= 5 and min(slow) > 2.7 * injector.ENGINE_STEP_SECONDS, slow


def test_a_slowdown_is_as_strong_as_it_was_asked_for(run: RunDir) -> None:
    with replica(run, "rollout/0") as worker:
        record = inject(run, "rollout-slow", None, "delay", 2.0, factor=11.0)
        worker.goes_on()
        slow = worker.pauses("turn", record["injected_at"], record["injected_at"] + 1.9)
        assert record["factor"] == 11.0 and min(slow) > 9 * injector.ENGINE_STEP_SECONDS, slow
        for kind, factor in (("rollout-slow", 1.0), ("rollout-slow", 99.0), ("rollout-kill", 2.0)):
            with pytest.raises(InjectionRefused, match="only slowdowns have one, above 1"):
                inject(run, kind, factor=factor)


@pytest.mark.parametrize("computes", [True, False])
def test_a_quota_throttles_or_is_refused_with_the_reason(
    run: RunDir, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injector, "THROTTLED_SECONDS", 30.0 if computes else 0.3)
    with subprocess.Popen(
        [sys.executable, "-c", "while True: pass" if computes else "input()"],
        stdin=subprocess.PIPE,
        env=run_environment(run.path),
    ) as worker:
        try:
            ticks = process_start_ticks(worker.pid)
            assert ticks is not None
            serve(run, "rollout/0", worker.pid, ticks)
            try:
                home, _ = cpu_group(worker.pid)
            except QuotaUnavailable:
                home = None
            try:
                record = inject(run, "rollout-slow", None, "quota", 0.3)
            except InjectionRefused as e:
                unavailable = "no CPU quota can be set here" in str(e)
                assert unavailable or (not computes and "computes too little for a CPU quota to slow it" in str(e))
                assert log(run) == []
            else:
                assert computes and record["how"] == "quota" and home is not None
            assert home is None or not (home / f"rolecall-{worker.pid}").exists(), "the control group was left behind"
        finally:
            worker.kill()


class Asking(FakeClock):
    """Asks something whenever it is slept on: what holds during an outage, without waiting for it."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self._ask, self.answers = ask, list[object]()

    def sleep(self, seconds: float) -> None:
        self.answers.append(self._ask())
        super().sleep(seconds)


def test_during_an_outage_nobody_writes_to_the_journal_and_afterwards_everybody(run: RunDir) -> None:
    def can_write() -> bool:
        with contextlib.closing(sqlite3.connect(run.path / "journal.db", timeout=0, isolation_level=None)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            return True

    with replica(run, "controller/0") as worker:
        clock = Asking(can_write)
        record = inject(run, "journal-down", seconds=7.0, clock=clock)
        assert clock.answers == [False] and can_write()
        assert (record["target"], record["pid"]) == ("controller/0", worker.pid)
        assert record["ended_at"] - record["injected_at"] == pytest.approx(7.0)
        endless = inject(run, "journal-down", clock=clock)
        assert endless["ended_at"] - endless["injected_at"] == pytest.approx(injector.OUTAGE_SECONDS_MAX)


def test_a_small_disk_is_full_during_its_outage_only_and_a_large_one_is_not_touched(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8 * 1024) as disk:
        run = make_run(disk.path, allowed=True)
        with replica(run, "controller/0"):
            clock = Asking(lambda: os.statvfs(run.path).f_bavail)
            inject(run, "disk-full", seconds=1.0, clock=clock)
            assert set(clock.answers) == {0} and len(clock.answers) >= 5
            assert os.statvfs(run.path).f_bavail > 0
        assert [line["kind"] for line in log(run)] == ["disk-full"]
    disk_of_all = os.statvfs(tmp_path)
    if disk_of_all.f_blocks * disk_of_all.f_frsize > injector.DISK_BYTES_MAX:
        run = make_run(tmp_path, allowed=True)
        with replica(run, "controller/0"), pytest.raises(InjectionRefused, match="put the run on a small one"):
            inject(run, "disk-full", seconds=1.0)


def test_a_lost_node_is_its_raylet_and_the_replicas_there_but_never_the_first_node(run: RunDir) -> None:
    run.write({**run.read(), "nodes": ["node-0", "node-1"]})
    with replica(run, "rollout/0") as there, replica(run, "rollout/1") as raylet:
        for node in ("node-0", "node-1"):
            folder = run.path / "nodes" / node
            folder.mkdir(parents=True)
            (folder / "raylet.json").write_text(json.dumps({"pid": raylet.pid, "start_ticks": raylet.start_ticks}))
        with pytest.raises(InjectionRefused, match=r"no such target node-0 at work in run r \(at work: node-1\)"):
            inject(run, "node-kill", "node-0")
        record = inject(run, "node-kill")
        assert raylet.process.wait(PATIENCE_SECONDS) == -9
        assert (record["target"], record["node"], record["incarnation"]) == ("node-1", "node-1", None)
        assert record["targets"] == ["node-1", "rollout/0", "rollout/1"]
        there.goes_on()


def test_seed_chooses_the_target(run: RunDir) -> None:
    with contextlib.ExitStack() as stack:
        for i in range(2):
            stack.enter_context(replica(run, f"reward/{i}"))
        facts = [injector._victims(run, "reward-kill", KINDS["reward-kill"], None, rng) for rng in _rngs()]
    assert {v.target for victims in facts for v in victims} == {"reward/0", "reward/1"}


def _rngs() -> list[injector.random.Random]:
    return [injector.random.Random(seed) for seed in range(8)]


# --- refusals -----------------------------------------------------------------------------------------------------


def test_refused_unless_the_run_allows_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, allowed=False)
    with (
        replica(run, "rollout/0") as worker,
        pytest.raises(InjectionRefused, match="not started with injection allowed"),
    ):
        inject(run, "rollout-kill")
    assert worker.process.poll() == -9 and log(run) == []  # killed by the test's own end, not before


def test_refused_for_a_reused_pid(run: RunDir) -> None:
    with replica(run, "rollout/0") as worker:
        serve(run, "rollout/0", worker.pid, worker.start_ticks - 1)
        with pytest.raises(InjectionRefused, match=r"is gone \(its PID may be another's"):
            inject(run, "rollout-kill")
        worker.goes_on()
    assert log(run) == []


def test_refused_for_a_process_of_another_run(run: RunDir, tmp_path: Path) -> None:
    env = run_environment(tmp_path / "other")
    with replica(run, "rollout/0", env=env) as worker:
        with pytest.raises(InjectionRefused, match="does not belong to run r"):
            inject(run, "rollout-kill")
        worker.goes_on()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rollout-vanish",), "unknown, known are rollout-kill"),
        (("rollout-slow", None, "magic"), "known are duty, quota, delay"),
        (("rollout-kill", "rollout/7"), "no such target rollout/7"),
        (("reward-kill",), "at work: none"),
        (("watch-kill",), "no such target"),
        (("agent-kill", "node-1"), "no such target"),
    ],
)
def test_refused_with_a_reason(run: RunDir, arguments: tuple[str, ...], message: str) -> None:
    with replica(run, "rollout/0"), pytest.raises(InjectionRefused, match=message):
        inject(run, *arguments)


def test_no_run_no_injection(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        inject(RunDir(tmp_path), "rollout-kill")
