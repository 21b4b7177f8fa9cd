"""Injects real faults into a run that allows it, from a separate process without Ray.

A target is one incarnation's process, by PID and start time, and must carry the run's marker in its environment, so no
other process can be hit. Faults in the middle of work first wait for the target to reach a checkpoint inside that work
(`process_side.py`). Each injection is one line of `injections.jsonl`, written when it takes effect; no detector reads
that file. Every fault is bounded in time, and undone if its target survives: by the injector, or by its guardian
(`guardian.py`) if the injector is killed; an outage of the journal or its disk by the kernel, which then closes the
injector's files.
"""

import json
import os
import random
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import InjectionRefused
from rolecall.core.ids import split_replica
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import STANDBY_ROLE, TRAINER_STANDBY_ROLE, Actual, ReplicaState, is_standby
from rolecall.core.rundir import RUN_ENV, RunDir, write_atomically
from rolecall.rl_runtime.faults.cpu_quota import QuotaUnavailable, cpu_quota
from rolecall.rl_runtime.faults.guardian import guarded
from rolecall.rl_runtime.faults.process_side import (
    ENGINE_STEP,
    MICROBATCH,
    ONCE,
    SCORE,
    WEIGHTS,
    InjectionRequest,
    InProcessFault,
    effect_path,
    request_path,
)
from rolecall.rl_runtime.processes import environment_of, find_processes, is_alive, kill_process, recorded_processes

SECONDS_MAX = 600.0
"""Upper bound after which a fault on a surviving target is undone."""
MEET_SECONDS = 15.0
"""Time for a target to reach the work in which it should be hit; after that it is hit wherever it is."""
MEET_HOLD_SECONDS = 1.0
EFFECT_SECONDS = 20.0
"""Deadline for the start of an in-process fault."""
SLOW_FACTOR = 4.0
"""How many times slower a slowdown makes its target, unless it is told."""
SLOW_FACTOR_MAX = 20.0
DUTY_PERIOD_SECONDS = 0.2
ENGINE_STEP_SECONDS = 0.01
"""An engine step takes about this long; a delay is added to each."""
CPU_SHARE_SECONDS = 1.0
"""Over which a process's share of a CPU is measured before a quota takes most of it."""
THROTTLED_SECONDS, THROTTLED_PERIODS = 10.0, 10
"""A quota that its target does not meet in so many periods by then is no fault."""
OUTAGE_SECONDS_MAX = 60.0
"""Of the journal or its disk: a run gives up after 120 s."""
DISK_BYTES_MAX = 4 << 30
"""Only a file system made for it is filled, not one that others use."""
FILL_SECONDS = 0.2
"""Period at which space that became free is filled again."""
POLL_SECONDS = 0.005
USER_CODE_MESSAGE = "shape mismatch in the loss: expected 8 advantages, got 7"


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionSpec:
    """One supported fault."""

    role: str  # roles; empty: no replica
    hows: tuple[str, ...]  # the first is the default
    at: str = ""  # checkpoint at which it should take effect
    every_rank: bool = False

    @property
    def slows(self) -> bool:
        return "duty" in self.hows


KINDS: dict[str, InjectionSpec] = {
    "rollout-kill": InjectionSpec(role="rollout", hows=("kill",), at=ENGINE_STEP),
    "trainer-hang": InjectionSpec(role="trainer", hows=("stop", "gil", "lock", "read"), at=MICROBATCH),
    "rollout-slow": InjectionSpec(role="rollout", hows=("duty", "quota", "delay"), at=ENGINE_STEP),
    "trainer-slow": InjectionSpec(role="trainer", hows=("duty", "quota"), at=MICROBATCH),
    "trainer-kill": InjectionSpec(role="trainer", hows=("kill",), at=MICROBATCH),
    "holder-kill": InjectionSpec(role="trainer", hows=("kill",), at=WEIGHTS),  # while a rollout pulls weights from it
    "rollout-hang": InjectionSpec(role="rollout", hows=("stop", "gil", "lock", "read"), at=ENGINE_STEP),
    "reward-kill": InjectionSpec(role="reward", hows=("kill",)),
    "reward-hang": InjectionSpec(role="reward", hows=("stop", "gil", "lock", "read"), at=SCORE),
    "reward-slow": InjectionSpec(role="reward", hows=("duty", "quota"), at=SCORE),
    "controller-kill": InjectionSpec(role="controller", hows=("kill",)),
    "controller-hang": InjectionSpec(role="controller", hows=("stop",)),
    "standby-kill": InjectionSpec(role=STANDBY_ROLE, hows=("kill",)),
    "standby-hang": InjectionSpec(role=STANDBY_ROLE, hows=("stop",)),
    "trainer-standby-kill": InjectionSpec(role=TRAINER_STANDBY_ROLE, hows=("kill",)),
    "trainer-exception": InjectionSpec(role="trainer", hows=("raise",), at=MICROBATCH, every_rank=True),
    "trainer-nan": InjectionSpec(role="trainer", hows=("nan",), at=MICROBATCH),  # of one microbatch
    "rollout-nan": InjectionSpec(role="rollout", hows=("nan",), at=ENGINE_STEP),  # log-probabilities of one step
    "reward-nan": InjectionSpec(role="reward", hows=("nans", "nan"), at=SCORE),  # of every group, or of one
    "trainer-wrong": InjectionSpec(role="trainer", hows=("scale",), at=MICROBATCH),  # of one microbatch
    "reward-wrong": InjectionSpec(role="reward", hows=("skew",), at=SCORE),  # of every group, until its bound
    "rollout-wrong": InjectionSpec(role="rollout", hows=("skew",), at=ENGINE_STEP),  # every log-probability, the same
    "relay-kill": InjectionSpec(role="rollout", hows=("kill",), at=WEIGHTS),  # the same of a rollout that serves others
    "holder-corrupt": InjectionSpec(role="trainer", hows=("flip",), at=WEIGHTS),  # in one transfer
    "relay-corrupt": InjectionSpec(role="rollout", hows=("flip",), at=WEIGHTS),
    "node-kill": InjectionSpec(role="", hows=("kill",)),  # its raylet, with which everything on the node ends
    "journal-down": InjectionSpec(role="controller", hows=("locked",)),  # nobody can write to it
    "disk-full": InjectionSpec(role="controller", hows=("fill",)),  # of the run's directory, journal included
    "agent-kill": InjectionSpec(role="", hows=("kill",)),
    "watch-kill": InjectionSpec(role="", hows=("kill",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionTarget:
    """Target of a fault, verified to be a live process of the run."""

    target: str
    pid: int
    start_ticks: int
    node: str = ""
    incarnation: int | None = None

    @property
    def lives(self) -> bool:
        return is_alive(self.pid, self.start_ticks)


def inject(
    run: RunDir,
    kind: str,
    target: str | None = None,
    how: str | None = None,
    seconds: float | None = None,
    seed: int = 0,
    factor: float | None = None,
    *,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Injects one fault and returns its record once it is over (at once for a kill).

    `target`: a replica, or for agent-kill and node-kill a node; None: a serving one, chosen by `seed`. `seconds`: bound
    of a hang or slowness; None: until the target exits, at most `SECONDS_MAX` (an outage: `OUTAGE_SECONDS_MAX`).
    `factor`: how many times slower a slowdown is; None: `SLOW_FACTOR`.

    Raises:
        InjectionRefused: the run does not allow it, the target is not a live process of it, or the fault is not
            supported here.
        RunNotFound: no such run.
    """
    spec = KINDS.get(kind)
    if spec is None:
        raise InjectionRefused(f"{kind}: unknown, known are {', '.join(KINDS)}")
    if how is not None and how not in spec.hows:
        raise InjectionRefused(f"{kind}: how={how!r} is unknown, known are {', '.join(spec.hows)}")
    if factor is not None and not (spec.slows and 1.0 < factor <= SLOW_FACTOR_MAX):
        raise InjectionRefused(
            f"{kind}: factor={factor:g}: only slowdowns have one, above 1 and up to {SLOW_FACTOR_MAX:g}"
        )
    if run.read().get("injection_allowed") is not True:
        raise InjectionRefused(f"run {run.run_id} was not started with injection allowed")
    victims = _victims(run, kind, spec, target, random.Random(seed))
    bound = min(seconds or SECONDS_MAX, SECONDS_MAX)
    injection = _Injection(
        run, kind, spec.at, how or spec.hows[0], bound, clock or SystemClock(), factor or SLOW_FACTOR
    )
    with _terminable():
        return injection.perform(victims)


def _victims(
    run: RunDir, kind: str, spec: InjectionSpec, target: str | None, rng: random.Random
) -> list[InjectionTarget]:
    if kind == "agent-kill":
        found = _agents(run)
    elif kind == "watch-kill":
        found = _watches(run)
    elif kind == "node-kill":
        found = _nodes(run)
    else:
        found = _replicas(run, spec.role)
    wanted = [v for v in found if target is None or v.target == target]
    if not wanted:
        known = ", ".join(v.target for v in found) or "none"
        raise InjectionRefused(f"{kind}: no such target {target or ''} at work in run {run.run_id} (at work: {known})")
    chosen = wanted if spec.every_rank else [rng.choice(wanted)]
    if kind == "node-kill":  # the raylet is killed; the replicas there are hit with it
        chosen += [v for v in _replicas(run) if v.node == chosen[0].node]
    for victim in chosen:
        if not victim.lives:
            raise InjectionRefused(
                f"{victim.target}: process {victim.pid} that started at tick {victim.start_ticks} is gone (its PID may "
                "be another's by now)"
            )
        if environment_of(victim.pid).get(RUN_ENV) != str(run.path):
            raise InjectionRefused(f"{victim.target}: process {victim.pid} does not belong to run {run.run_id}")
    return chosen


def _replicas(run: RunDir, role: str = "") -> list[InjectionTarget]:
    """Replicas at work of one role, or of all."""
    with closing(Journal(run.database_url, create=False)) as journal:
        current, desired = journal.current(), journal.desired()
    found = [
        InjectionTarget(
            target=record.replica,
            pid=record.pid,
            start_ticks=record.start_ticks,
            node=record.node,
            incarnation=record.incarnation,
        )
        for replica, record in sorted(current.items())
        if role in ("", split_replica(replica)[0]) and _is_at_work(record) and replica in desired and record.pid
    ]
    return found + _further_ranks(run, found)


def _is_at_work(record: Actual) -> bool:
    return record.state is ReplicaState.SERVING or (is_standby(record.replica) and record.state is ReplicaState.READY)


def _further_ranks(run: RunDir, replicas: list[InjectionTarget]) -> list[InjectionTarget]:
    """`trainer/0 rank 1`: the processes of replicas of several ranks, besides the first of each."""
    found = []
    for line in recorded_processes(run.path):
        incarnation, _, rank = line["name"].partition(" rank ")
        for replica in replicas:
            if rank and incarnation == f"{replica.target}#{replica.incarnation}":
                target, ticks = f"{replica.target} rank {rank}", int(line["start_ticks"])
                found.append(replace(replica, target=target, pid=int(line["pid"]), start_ticks=ticks))
    return found


def _agents(run: RunDir) -> list[InjectionTarget]:
    found = []
    for path in sorted((run.path / "nodes").glob("*/agent.json")):
        address = json.loads(path.read_text())
        node = path.parent.name
        found.append(
            InjectionTarget(target=node, pid=int(address["pid"]), start_ticks=int(address["start_ticks"]), node=node)
        )
    return found


def _nodes(run: RunDir) -> list[InjectionTarget]:
    """Raylets of the run, but that of the first node: Ray's head ends the run with it."""
    first = run.read()["nodes"][0]
    found = []
    for path in sorted((run.path / "nodes").glob("*/raylet.json")):
        process, node = json.loads(path.read_text()), path.parent.name
        if node != first and is_alive(int(process["pid"]), int(process["start_ticks"])):
            found.append(InjectionTarget(target=node, node=node, **process))
    return found


def _watches(run: RunDir) -> list[InjectionTarget]:
    found = []
    for process in find_processes(run.path, exclude=(os.getpid(),)):
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it exited in the meantime
        if b"rolecall" in words and b"watch" in words:
            found.append(InjectionTarget(target="watch", pid=process.pid, start_ticks=process.start_ticks))
    return found


class _Injection:
    """One injection in progress."""

    def __init__(
        self, run: RunDir, kind: str, at: str, how: str, bound: float, clock: Clock, factor: float = SLOW_FACTOR
    ) -> None:
        self._run, self._kind, self._at, self._how = run, kind, at, how
        self._bound, self._clock, self._factor = bound, clock, factor

    def perform(self, victims: list[InjectionTarget]) -> dict[str, Any]:
        if self._how == "kill":
            with self._met(victims[0]) as met:
                self._signal(victims[0], signal.SIGKILL)
                return self._record(victims, met=met)
        if self._how == "locked":
            return self._lock_journal(victims)
        if self._how == "fill":
            return self._fill_disk(victims)
        with ExitStack() as guards:
            for v in victims:
                guards.enter_context(guarded(self._run, v.pid, v.start_ticks))
            if self._how in ("stop", "duty", "quota"):
                record = self._quota(victims[0]) if self._how == "quota" else self._stop(victims[0])
                return {**record, "ended_at": self._clock.wall()}
            if self._how == "raise":
                return self._inside(victims, InProcessFault.RAISE, message=USER_CODE_MESSAGE)
            if self._how == "delay":
                return self._inside(
                    victims, InProcessFault.DELAY, delay_seconds=(self._factor - 1) * ENGINE_STEP_SECONDS
                )
            return self._inside(victims, InProcessFault(self._how))

    def _stop(self, victim: InjectionTarget) -> dict[str, Any]:
        """Stops the target; with `duty`, lets it run for a part of each period."""
        deadline = self._clock.monotonic() + self._bound
        try:
            with self._met(victim) as met:
                self._signal(victim, signal.SIGSTOP)
                record = self._record([victim], met=met)
            if self._how == "stop":
                self._until_gone([victim])
                return record
            working_seconds = DUTY_PERIOD_SECONDS / self._factor
            while self._clock.monotonic() < deadline:
                self._clock.sleep(DUTY_PERIOD_SECONDS - working_seconds)
                if not kill_process(victim.pid, victim.start_ticks, signal.SIGCONT):
                    break
                self._clock.sleep(working_seconds)
                if not kill_process(victim.pid, victim.start_ticks, signal.SIGSTOP):
                    break
        finally:
            kill_process(victim.pid, victim.start_ticks, signal.SIGCONT)
        return record

    def _quota(self, victim: InjectionTarget) -> dict[str, Any]:
        try:
            with cpu_quota(victim.pid, self._cpu_share(victim) / self._factor) as num_throttled:
                began, deadline = self._clock.wall(), self._clock.monotonic() + THROTTLED_SECONDS
                while num_throttled() < THROTTLED_PERIODS:
                    if not victim.lives:
                        raise InjectionRefused(f"{victim.target}: process {victim.pid} ended by itself")
                    if self._clock.monotonic() > deadline:
                        raise InjectionRefused(
                            f"{self._kind}: {victim.target} computes too little for a CPU quota to slow it: "
                            f"throttled in {num_throttled()} periods of {THROTTLED_SECONDS:.0f} s"
                        )
                    self._clock.sleep(0.05)
                record = self._record([victim], injected_at=began)
                self._until_gone([victim])
        except QuotaUnavailable as e:
            raise InjectionRefused(f"{self._kind}: no CPU quota can be set here: {e}") from e
        return record

    def _lock_journal(self, victims: list[InjectionTarget]) -> dict[str, Any]:
        kind, _, path = self._run.database_url.partition(":///")
        if kind != "sqlite":
            raise InjectionRefused(f"{self._kind}: only a journal in SQLite can be locked")
        with closing(sqlite3.connect(path, timeout=EFFECT_SECONDS, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            record = self._record(victims)
            self._clock.sleep(min(self._bound, OUTAGE_SECONDS_MAX))
        return {**record, "ended_at": self._clock.wall()}

    def _fill_disk(self, victims: list[InjectionTarget]) -> dict[str, Any]:
        disk = os.statvfs(self._run.path)
        if disk.f_blocks * disk.f_frsize > DISK_BYTES_MAX:
            raise InjectionRefused(
                f"{self._kind}: {self._run.path} is on a file system of more than {DISK_BYTES_MAX >> 30} GiB, which "
                "others may use: put the run on a small one"
            )
        deadline = self._clock.monotonic() + min(self._bound, OUTAGE_SECONDS_MAX)
        # A file without a name: its space is free again when this process ends, however it ends.
        filler = os.open(self._run.path, os.O_TMPFILE | os.O_WRONLY, 0o600)
        try:
            record = self._record(victims)
            while self._clock.monotonic() < deadline:
                _fill(filler)
                self._clock.sleep(FILL_SECONDS)
        finally:
            os.close(filler)
        return {**record, "ended_at": self._clock.wall()}

    def _cpu_share(self, victim: InjectionTarget) -> float:
        """Share of a CPU that the target's busiest thread gets while it could use one: a quota above it would slow
        nothing."""
        before = _ran_and_waited(victim.pid)
        self._clock.sleep(CPU_SHARE_SECONDS)
        now = _ran_and_waited(victim.pid)
        worked = [(ran - before[t][0], waited - before[t][1]) for t, (ran, waited) in now.items() if t in before]
        ran, waited = max(worked, default=(0, 0))
        return ran / (ran + waited) if ran > 0 else 1.0

    def _inside(
        self, victims: list[InjectionTarget], how: InProcessFault, *, delay_seconds: float = 0.0, message: str = ""
    ) -> dict[str, Any]:
        """Sends the request to the processes; the record is written when the first fault has begun."""
        asked = [(v, self._ask(v, how, self._bound, delay_seconds=delay_seconds, message=message)) for v in victims]
        try:
            began = self._wait_for_effect(asked, EFFECT_SECONDS)
            if began is None:
                raise InjectionRefused(f"{victims[0].target}: did not come to {self._at} within {EFFECT_SECONDS:.0f} s")
            record = self._record(victims, injected_at=began)
            if how not in ONCE:
                self._until_gone(victims)
        finally:
            for v in victims:
                self._take_back(v)
        return {**record, "ended_at": self._clock.wall()}

    @contextmanager
    def _met(self, victim: InjectionTarget) -> Iterator[bool]:
        """Holds the target at the checkpoint of the work to interrupt; yields False if it is not reached in time."""
        if not self._at:
            yield True
            return
        request_id = self._ask(victim, InProcessFault.MEET, MEET_HOLD_SECONDS)
        try:
            yield self._wait_for_effect([(victim, request_id)], MEET_SECONDS) is not None
        finally:
            self._take_back(victim)

    def _ask(self, victim: InjectionTarget, how: InProcessFault, seconds: float, **more: Any) -> str:
        request_id = os.urandom(8).hex()
        request = InjectionRequest(request_id=request_id, how=how, seconds=seconds, at=self._at, **more)
        self._run.inject_dir.mkdir(exist_ok=True)
        write_atomically(request_path(self._run, victim.pid, victim.start_ticks), request.to_json())
        return request_id

    def _take_back(self, victim: InjectionTarget) -> None:
        request_path(self._run, victim.pid, victim.start_ticks).unlink(missing_ok=True)

    def _wait_for_effect(self, asked: list[tuple[InjectionTarget, str]], seconds: float) -> float | None:
        """Wall time at which the first fault began; None if none began in time."""
        deadline = self._clock.monotonic() + seconds
        while self._clock.monotonic() < deadline:
            for victim, request_id in asked:
                path = effect_path(self._run, victim.pid, victim.start_ticks)
                if path.exists():
                    effect = json.loads(path.read_text())
                    if effect["request_id"] == request_id:
                        return float(effect["wall_at"])
            if not any(v.lives for v, _ in asked):
                return None
            self._clock.sleep(POLL_SECONDS)
        return None

    def _signal(self, victim: InjectionTarget, sig: signal.Signals) -> None:
        if not kill_process(victim.pid, victim.start_ticks, sig):
            raise InjectionRefused(f"{victim.target}: process {victim.pid} ended by itself before it could be hit")

    def _until_gone(self, victims: list[InjectionTarget]) -> None:
        deadline = self._clock.monotonic() + self._bound
        while any(v.lives for v in victims) and self._clock.monotonic() < deadline:
            self._clock.sleep(0.05)

    def _record(
        self, victims: list[InjectionTarget], *, injected_at: float | None = None, met: bool = True
    ) -> dict[str, Any]:
        """`met`: the target was at the intended checkpoint, or none was intended."""
        first = victims[0]
        record: dict[str, Any] = {
            "kind": self._kind,
            "how": self._how,
            "target": first.target,
            "targets": [v.target for v in victims],
            "incarnation": first.incarnation,
            "node": first.node,
            "pid": first.pid,
            "start_ticks": first.start_ticks,
            "met": met,
            "injected_at": self._clock.wall() if injected_at is None else injected_at,
        }
        if KINDS[self._kind].slows:
            record["factor"] = self._factor
        with self._run.injections_path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
            f.flush()
            os.fsync(f.fileno())
        return record


def _fill(file: int) -> None:
    """Extends a file until its file system has no page left."""
    disk = os.fstatvfs(file)
    piece = disk.f_bavail * disk.f_frsize
    while piece >= disk.f_frsize:
        try:
            os.posix_fallocate(file, os.fstat(file).st_size, piece)
        except OSError:
            piece //= 2  # others write, too


def _ran_and_waited(pid: int) -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread of a process ran, and waited for a CPU; empty if it is gone."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            ran, waited, _ = path.read_text().split()
            found[path.parent.name] = int(ran), int(waited)
    return found


@contextmanager
def _terminable() -> Iterator[None]:
    """Within the context SIGTERM unwinds the stack, so that faults are undone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
