"""Injects the faults of a piece into jobs of another system, one after the other, and writes a line of each.

A fault ends after its deadline at the latest. A job goes on with the next one if it is whole again; else it is ended
and another one is started.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.recovery.chaos.schedule import Fault
from benchmarks.recovery.peers.jobs import JOBS, NUM_REPLICAS, START_SECONDS, RayTrainJob, TorchftJob, live_workers
from benchmarks.recovery.peers.loop import Worker, is_finite, read_workers
from benchmarks.recovery.peers.scoring import Said, cured, judged
from rolecall.core.rundir import RunDir, write_atomically
from rolecall.rl_runtime.faults.cpu_quota import QuotaUnavailable, cpu_quota
from rolecall.rl_runtime.faults.process_side import (
    MICROBATCH,
    WEIGHTS,
    InjectionRequest,
    InProcessFault,
    effect_path,
    request_path,
)
from rolecall.rl_runtime.processes import is_alive, kill_process

LINES = common.RESULTS / "chaos_peers.jsonl"
DEADLINE_SECONDS = 120.0
"""Of finding and cure, from the injection."""
SETTLE_SECONDS = 3.0
"""After a cure: what the system ends late, and what it says late, counts with the fault."""
MEET_SECONDS, MEET_HOLD_SECONDS = 20.0, 5.0
HEAL_SECONDS = 120.0
GO_ON_SECONDS = 45.0
"""After a fault, which is over by then: a job whose workers all make steps again takes the next one."""
CALM_STEPS = 8
"""Steps of each process before a fault."""
SLOW_FACTOR, DUTY_PERIOD_SECONDS = 4.0, 0.2
QUOTA_RATIO = 0.05
"""Of a CPU: a worker that shares two CPUs with others uses about 0.2."""
POLL_SECONDS = 0.25
Job = TorchftJob | RayTrainJob
PACKAGES = {"torchft": "torchft-nightly", "ray-train": "ray"}


class Logs:
    """The lines of all logs of a job, each with the time at which it was read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._offsets, self.said = folder, dict[Path, int](), list[Said]()

    def read(self) -> None:
        now = time.time()
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            lines = whole.decode(errors="replace").splitlines()
            self.said += [Said(wall_at=now, text=f"{path.stem}: {line}") for line in lines]


def run_piece(system: str, faults: Sequence[Fault], facts: Mapping[str, Any]) -> None:
    about = {"line": "fault", "system": system, "version": version(PACKAGES[system]), **facts}
    job: Job | None = None
    since = 0.0  # the end of the last fault, wall seconds
    try:
        for fault in faults:
            if job is None:
                since = 0.0
                job = JOBS[system](f"peers-{system}-{fault.number}-{int(time.time())}")
            logs = Logs(job.run / "logs")
            try:
                found = _one(system, job, fault, logs, since)
            except (TimeoutError, QuotaUnavailable) as e:
                found = {"injected": False, "reason": str(e)}
            common.add_line(LINES, {**about, "number": fault.number, "name": fault.name, **found})
            print(fault.number, fault.name, found, flush=True)
            since = time.time()
            if not _goes_on(job, since):
                job.stop()
                job = None
    finally:
        if job is not None:
            job.stop()


def _until(job: Job, what: str, seconds: float, found: Callable[[], Any]) -> Any:
    def tended() -> Any:
        job.tend()
        return found()

    return common.until(what, seconds, tended)


def _goes_on(job: Job, since: float) -> bool:
    try:
        _until(job, "a whole job", GO_ON_SECONDS, lambda: _whole(job, since))
    except TimeoutError:
        return False
    return True


def _whole(job: Job, since: float) -> list[Worker] | None:
    """One live worker of each rank, all of which have committed steps with a finite loss since then."""
    live = live_workers(job.run)
    if sorted(w.rank for w in live) != list(range(NUM_REPLICAS)):
        return None
    calm = [[a for a in w.attempts if a.committed and is_finite(a) and a.wall_at > since] for w in live]
    return live if all(len(attempts) >= CALM_STEPS for attempts in calm) else None


def _one(system: str, job: Job, fault: Fault, logs: Logs, since: float) -> dict[str, Any]:
    rng = random.Random(fault.seed)
    before = _until(job, "a whole job", START_SECONDS, lambda: _whole(job, since))
    logs.read()
    excused: set[tuple[int, int]] = set()
    if fault.kind == "holder-kill":
        hit, excused = _met_giving_weights(system, job, before, rng)
    else:
        hit = rng.choice(before)
    # What the workers have written until now; `before` is older if another one had to be killed first.
    num_steps = {w.key: len(w.attempts) for w in read_workers(job.run)}
    logs.read()  # what was said until now is no finding
    with _injected(job, fault, hit) as injected_at:
        deadline = injected_at + DEADLINE_SECONDS
        while time.time() < deadline and _cured(fault, hit, injected_at, job) is None:
            job.tend()
            logs.read()
            time.sleep(POLL_SECONDS)
        ended_at = time.time()
        if ended_at < deadline:
            time.sleep(SETTLE_SECONDS)
        logs.read()
        alive = {w.key for w in live_workers(job.run)}
    others = {w.key for w in before if w.key != hit.key} - excused
    return {
        "injected": True,
        "target": f"trainer/{hit.rank}",
        "pid": hit.pid,
        "num_steps": num_steps[hit.key],
        **judged(system, fault, hit, others, injected_at, ended_at, read_workers(job.run), alive, logs.said),
        "reason": "",
    }


def _cured(fault: Fault, hit: Worker, injected_at: float, job: Job) -> float | None:
    return cured(fault, hit, injected_at, read_workers(job.run))


def _met_giving_weights(
    system: str, job: Job, before: Sequence[Worker], rng: random.Random
) -> tuple[Worker, set[tuple[int, int]]]:
    """A worker that gives its weights just now, and holds still there; the keys of those killed so that it does."""
    if system == "ray-train":  # rank 0 gives them to the next checkpoint
        givers, excused = [w for w in before if w.rank == 0], set[tuple[int, int]]()
    else:  # a survivor gives them to a replica that is back
        first = rng.choice(before)
        givers, excused = [w for w in before if w is not first], {first.key}
        kill_process(first.pid, first.start_ticks)
    for w in givers:
        _request(job, w, InProcessFault.MEET, WEIGHTS, MEET_HOLD_SECONDS)
    try:
        hit = _until(
            job,
            "weights given",
            HEAL_SECONDS,
            lambda: next((w for w in givers if _effect(job, w).exists()), None),
        )
    except TimeoutError:
        for w in givers:
            request_path(RunDir(job.run), *w.key).unlink(missing_ok=True)
        raise
    return hit, excused


def _request(job: Job, worker: Worker, how: InProcessFault, at: str, seconds: float) -> None:
    _effect(job, worker).unlink(missing_ok=True)
    request = InjectionRequest(request_id=f"{how}-{time.time()}", how=how, seconds=seconds, at=at)
    write_atomically(request_path(RunDir(job.run), *worker.key), request.to_json())


def _effect(job: Job, worker: Worker) -> Path:
    return effect_path(RunDir(job.run), *worker.key)


def _meet(job: Job, worker: Worker, how: InProcessFault, seconds: float) -> float:
    """Wall seconds at which the worker began it, in a microbatch."""
    _request(job, worker, how, MICROBATCH, seconds)
    _until(job, "the next microbatch", MEET_SECONDS, lambda: _effect(job, worker).exists() or None)
    return time.time()


@contextmanager
def _injected(job: Job, fault: Fault, hit: Worker) -> Iterator[float]:
    """Within it the fault lasts. Yields when it began, wall seconds."""
    request = request_path(RunDir(job.run), *hit.key)
    pid, ticks = hit.key
    if fault.how in ("gil", "lock", "read", "nan", "scale"):
        yield _meet(job, hit, InProcessFault(fault.how), DEADLINE_SECONDS)
        return
    if fault.kind != "holder-kill":
        _meet(job, hit, InProcessFault.MEET, MEET_HOLD_SECONDS)
    match fault.how:
        case "kill":
            beside = job.node_processes(hit) if fault.kind == "node-kill" else []
            for process in (*beside, hit.key):
                kill_process(*process)
            yield time.time()
        case "stop":
            kill_process(pid, ticks, signal.SIGSTOP)
            yield time.time()
            kill_process(pid, ticks, signal.SIGCONT)
        case "quota":
            with cpu_quota(pid, QUOTA_RATIO):
                request.unlink(missing_ok=True)
                yield time.time()
        case "duty":
            with _duty(hit):
                request.unlink(missing_ok=True)
                yield time.time()
        case _:
            raise AssertionError(f"{fault.kind}:{fault.how} is no fault of a trainer")


@contextmanager
def _duty(hit: Worker) -> Iterator[None]:
    """Within it the process works for a quarter of each period."""
    import threading

    over = threading.Event()

    def turns() -> None:
        working = DUTY_PERIOD_SECONDS / SLOW_FACTOR
        while is_alive(*hit.key) and not over.is_set():
            kill_process(*hit.key, signal.SIGSTOP)
            over.wait(DUTY_PERIOD_SECONDS - working)
            kill_process(*hit.key, signal.SIGCONT)
            over.wait(working)

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        with suppress(RuntimeError):
            thread.join(2 * DUTY_PERIOD_SECONDS)
        kill_process(*hit.key, signal.SIGCONT)
