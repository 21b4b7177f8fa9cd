"""One process of a synthetic run (synthetic_run.py): the counters that a reporter and /proc would show."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import Phase, ProcessSample

WALL_OFFSET = 1_700_000_000.0

HANGS = ("stopped", "gil_loop", "lock", "read")
SLOWNESSES = ("duty_cycle", "cpu_quota", "unit_delay")
THROTTLED_READ_SECONDS = 2.0 - 1e-6
"""Agents read a cgroup's throttling this often, and run delay, of which it is a part, with every sample."""


@dataclass(slots=True)
class FakeFault:
    """What is wrong with a process. `share`: of CPU time left (duty_cycle, cpu_quota); `factor`: of unit_delay."""

    kind: str
    share: float = 0.25
    factor: float = 4.0


@dataclass(slots=True)
class FakeProcess:
    role: str
    index: int
    node: str
    pid: int
    incarnation: int
    unit_seconds: Callable[[], float]  # CPU seconds of the next unit
    replica: str = ""
    fault: FakeFault | None = None
    alive: bool = True
    phase: str = Phase.START
    phase_since: float = 0.0
    phase_entries: int = 1
    step: int = -1
    epoch: int = 1
    version: int = 0
    progress: int = 0
    progress_at: float = 0.0
    beats: float = 0.0
    entered: int = 0
    done: int = 0
    busy: float = 0.0
    units: int = 0
    tokens: int = 0
    tokens_of_unit: int = 0
    joined: bool = False  # trainer: member of the epoch
    requests: int = 0
    cpu: float = 0.0
    run_delay: float = 0.0
    throttled: float = 0.0
    throttled_read: float = 0.0  # what the agent last read of it, and when
    throttled_read_at: float = 0.0
    left: float = 0.0  # CPU seconds left of the unit
    wall_of_unit: float = 0.0
    delay_left: float = 0.0
    units_due: int = 0  # of this phase; 0 in a phase without work
    until: float = math.inf  # a timed phase ends here
    after: str = ""

    def __post_init__(self) -> None:
        self.replica = self.replica or f"{self.role}/{self.index}"

    @property
    def process(self) -> ProcessId:
        return ProcessId(node=NodeId(self.node), pid=self.pid, start_ticks=self.pid * 7)

    def enter(self, phase: str, now: float, *, units: int = 0, seconds: float = math.inf) -> None:
        self.phase, self.phase_since = phase, now
        self.phase_entries += 1
        self.units_due, self.until, self.left = units, now + seconds, 0.0

    def sample(self, now: float) -> ProcessSample:
        stopped = self.fault is not None and self.fault.kind == "stopped"
        if now - self.throttled_read_at >= THROTTLED_READ_SECONDS:
            self.throttled_read, self.throttled_read_at = self.throttled, now
        return ProcessSample(
            process=self.process,
            role=self.role,
            replica=self.replica,
            rank=0,
            incarnation=self.incarnation,
            at=now,
            wall_at=now + WALL_OFFSET,
            alive=self.alive,
            page_ok=True,
            epoch=self.epoch,
            phase=self.phase,
            phase_since=self.phase_since,
            phase_entries=self.phase_entries,
            step=self.step,
            policy_version=self.version,
            progress=self.progress,
            progress_at=self.progress_at,
            beats=int(self.beats),
            collectives_entered=self.entered,
            collectives_done=self.done,
            busy_seconds=self.busy,
            work_units=self.units,
            tokens=self.tokens,
            requests_active=self.requests,
            proc_state="T" if stopped else "S",
            cpu_seconds=self.cpu,
            run_delay_seconds=self.run_delay * 1.1,
            main_run_delay_seconds=self.run_delay,
            throttled_seconds=self.throttled_read,
        )
