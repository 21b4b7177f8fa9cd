"""A synthetic run to test detectors on: trainers, rollouts, reward workers and a controller that share a few CPUs.

Time moves in ticks of 20 ms. In each tick a process gets a share of a CPU (or none: stopped, blocked, throttled), works
off the CPU seconds of its current unit, and leaves the counters that the real reporter and /proc would. Run delay
arises from contention and from bursts (a neighbour that eats a core), jitter from a log-normal with a heavy tail.
Faults are set on a process from outside and leave the traces that the real ones do; nothing here knows a detector.

    fleet = FakeFleet(seed=7)
    for observation in fleet.run(60.0): ...
    fleet.processes["trainer/1"].fault = Fault("stopped")
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind, HostSample, Phase, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation

TICK_SECONDS = 0.02
SAMPLE_TICKS = 10  # the agents sample every 0.2 s
POLL_SECONDS = 0.25
BUCKETS = 3  # collectives a step
TAIL_PROBABILITY = 0.005
"""One unit in 200 takes up to three times as long, or a pause: garbage collection, page faults, a cold cache."""
TAIL_SECONDS_MAX = 0.4


WALL_OFFSET = 1_700_000_000.0

HANGS = ("stopped", "gil_loop", "lock", "read")
SLOWNESSES = ("duty_cycle", "cpu_quota", "unit_delay")
THROTTLED_READ_SECONDS = 2.0 - 1e-6
"""Agents read a cgroup's throttling this often, and run delay, of which it is a part, with every sample."""


@dataclass(slots=True)
class FakeFault:
    """A fault of a process. `share`: of CPU time left (duty_cycle, cpu_quota); `factor`: of unit_delay."""

    kind: str
    share: float = 0.25
    factor: float = 4.0


@dataclass(slots=True)
class FakeProcess:
    """One process of the run: the counters that a reporter and /proc would show."""

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


@dataclass(slots=True)
class Load:
    """How busy the machine is: `contention` CPUs wanted beyond those there are, and bursts on top."""

    num_cpus: float = 2.0
    background: float = 0.3  # CPUs that agents, raylets and other processes use
    burst_until: float = 0.0
    burst: float = 0.0
    slowdown: float = 1.0  # all CPUs slower by this: frequency, cache, a neighbour on the same core


@dataclass
class FakeFleet:
    """A run of `num_trainers` and `num_rollouts`, one process a node. Mutable on purpose: tests set faults on it."""

    seed: int = 0
    num_trainers: int = 2
    num_rollouts: int = 3
    num_rewards: int = 2
    microbatches: int = 4
    microbatch_seconds: float = 0.25
    engine_step_seconds: float = 0.012
    bursts_per_hour: float = 12.0
    tokens_reported: bool = True
    groups_ready_seconds: float = 1.5  # mean wait of the trainers for rollouts
    events: list[AgentEvent] = field(default_factory=list)
    unreachable: dict[str, tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.now, self.ticks, self.version = 100.0, 0, 0
        self.load = Load()
        self.processes: dict[str, FakeProcess] = {}
        self._pid, self._seq = 4000, 0
        self._samples: dict[str, list[ProcessSample]] = {}
        self.groups_ready_at = self.now + 8.0
        self.step = 0
        plan = [("controller", 1), ("reward", self.num_rewards), ("trainer", self.num_trainers)]
        for role, count in [*plan, ("rollout", self.num_rollouts), ("standby", 1)]:
            for i in range(count):
                self.start(role, i, incarnation=1)

    def start(self, role: str, index: int, incarnation: int, node: str | None = None) -> FakeProcess:
        """A fresh process of this replica; the previous one is forgotten (kill it first)."""
        self._pid += 1
        cost = {
            "trainer": lambda: self.microbatch_seconds * self.rng.uniform(0.4, 1.6),
            "reward": lambda: 0.0004,
            "controller": lambda: 0.004,
        }
        where = node or f"node-{role}-{index}"
        process = FakeProcess(role, index, where, self._pid, incarnation, cost.get(role, lambda: 0.001))
        if role == "rollout":
            process.unit_seconds = lambda: self.engine_step_seconds * (0.6 + 0.4 * process.requests / 16)
        process.phase_since = process.progress_at = self.now
        process.until = self.now + self.rng.uniform(2.0, 6.0)
        self.processes[process.replica] = process
        self.event(AgentEventKind.REGISTERED, process)
        return process

    def event(self, kind: AgentEventKind, process: FakeProcess, **detail: str) -> None:
        self._seq += 1
        self.events.append(
            AgentEvent(
                seq=self._seq,
                kind=kind,
                node=NodeId(process.node),
                at=self.now,
                wall_at=self.now + WALL_OFFSET,
                process=process.process,
                role=process.role,
                replica=process.replica,
                incarnation=process.incarnation,
                detail=detail,
            )
        )

    def kill(self, replica: str, *, signal: str = "9") -> FakeProcess:
        """SIGKILL: the process is gone, and its agent reports it at once."""
        process = self.processes.pop(replica)
        process.alive = False
        self.event(AgentEventKind.EXITED, process, last_phase=process.phase, signal=signal)
        if process.role == "trainer":
            # The collective fails at the survivors; the step begins again once all have joined a new epoch.
            for peer in self.processes.values():
                if peer.role == "trainer":
                    peer.epoch += 1
                    peer.done = peer.entered = peer.entered + (-peer.entered) % BUCKETS
                    if peer.phase in (Phase.REDUCE, Phase.COMPUTE):
                        peer.enter(Phase.WAIT, self.now)
        return process

    def promote(self, standby: str, replica: str, incarnation: int) -> FakeProcess:
        """The same process takes the name of the replica that it replaces."""
        process = self.processes.pop(standby)
        role, _, index = replica.partition("/")
        process.role, process.index, process.replica, process.incarnation = role, int(index), replica, incarnation
        process.unit_seconds = lambda: self.engine_step_seconds * (0.6 + 0.4 * process.requests / 16)
        process.enter(Phase.UPDATE, self.now, seconds=0.3)
        self.processes[replica] = process
        self.event(AgentEventKind.REGISTERED, process)
        return process

    def burst(self, seconds: float, cpus: float) -> None:
        """A neighbour eats `cpus` cores for a while, as a starting vLLM process does."""
        self.load.burst_until, self.load.burst = self.now + seconds, cpus

    def run(self, seconds: float) -> Iterator[Observation]:
        """Observations as a source would yield them, one each POLL_SECONDS (jittered)."""
        end, next_poll = self.now + seconds, self.now + POLL_SECONDS
        while self.now < end:
            self.tick()
            if self.now >= next_poll or (self.events and self.ticks % 3 == 0):
                next_poll = self.now + POLL_SECONDS * self.rng.uniform(0.95, 1.3)
                yield self.poll()

    def poll(self) -> Observation:
        wall = self.now + WALL_OFFSET
        nodes = {p.node for p in self.processes.values()} | set(self._samples)
        batches = []
        for node in sorted(nodes - set(self.unreachable)):
            samples = tuple(self._samples.pop(node, ()))
            hosts = (
                HostSample(
                    node=NodeId(node),
                    at=self.now,
                    wall_at=wall,
                    cpu_count=2,
                    cpu_busy_seconds=self.now,
                    load_1m=2.0,
                    memory_total_bytes=24 << 30,
                    memory_available_bytes=12 << 30,
                ),
            )
            batches.append(
                SampleBatch(
                    node=NodeId(node),
                    agent_pid=1,
                    cursor=self.ticks,
                    lost=0,
                    at=self.now,
                    wall_at=wall,
                    processes=samples,
                    hosts=hosts,
                )
            )
        events, self.events = tuple(self.events), []
        unreachable = tuple((n, since, why) for n, (since, why) in sorted(self.unreachable.items()))
        return Observation(wall_at=wall, batches=tuple(batches), events=events, unreachable=unreachable)

    def tick(self) -> None:
        self.now += TICK_SECONDS
        self.ticks += 1
        if self.rng.random() < self.bursts_per_hour / 3600 * TICK_SECONDS:
            self.burst(self.rng.uniform(1.0, 10.0), self.rng.uniform(0.5, 3.0))
        wanting = [p for p in self.processes.values() if self._wants_cpu(p)]
        demand = len(wanting) + self.load.background
        if self.now < self.load.burst_until:
            demand += self.load.burst
        share = min(1.0, self.load.num_cpus / demand) if demand else 1.0
        for process in list(self.processes.values()):
            self._advance(process, share)
        self._coordinate()
        if self.ticks % SAMPLE_TICKS == 0:
            for process in self.processes.values():
                self._samples.setdefault(process.node, []).append(process.sample(self.now))

    def _wants_cpu(self, process: FakeProcess) -> bool:
        if process.fault is not None:
            if process.fault.kind in ("stopped", "lock", "read"):
                return False
            if process.fault.kind == "gil_loop":
                return True
        return process.units_due > 0 or process.phase == Phase.START

    def _advance(self, process: FakeProcess, share: float) -> None:
        kind = process.fault.kind if process.fault else ""
        if kind == "stopped":
            return
        mine = min(1.0, share * self.rng.uniform(0.7, 1.3))
        if kind == "gil_loop":  # no run delay: the working thread waits for the interpreter, not for a CPU
            process.cpu += TICK_SECONDS * mine
            return
        process.beats += TICK_SECONDS / 0.1
        if kind in ("lock", "read"):
            return
        if not self._wants_cpu(process):
            process.cpu += TICK_SECONDS * 0.01
            if self.now >= process.until:
                self._timed_out(process)
            return
        self._work(process, mine, kind)

    def _work(self, process: FakeProcess, run_share: float, kind: str) -> None:
        got = TICK_SECONDS * run_share
        fault_share = process.fault.share if process.fault else 1.0
        if kind == "duty_cycle":
            got *= fault_share
        elif kind == "cpu_quota":
            process.throttled += TICK_SECONDS * max(0.0, 1 - fault_share / max(run_share, fault_share))
            got = TICK_SECONDS * min(run_share, fault_share)
        if process.phase == Phase.START:
            process.cpu += got
            process.run_delay += TICK_SECONDS * (1 - run_share)
            if self.now >= process.until:
                self._timed_out(process)
            return
        ran = self._units(process, got / self.load.slowdown, kind)  # wall seconds not spent asleep
        process.cpu += got * ran / TICK_SECONDS
        if kind == "duty_cycle":
            process.run_delay += ran * fault_share * (1 - run_share)
        else:
            process.run_delay += max(0.0, ran - got * ran / TICK_SECONDS)

    def _units(self, process: FakeProcess, cpu: float, kind: str) -> float:
        """Completes units; they share the tick's wall time as they share its CPU time. Returns wall seconds at work."""
        wall_per_cpu = TICK_SECONDS / cpu if cpu > 0 else 0.0
        budget, wall, ran = cpu, TICK_SECONDS, 0.0
        while process.units_due > 0 and wall > 1e-12:
            if process.left <= 0 and process.delay_left <= 0:
                process.left = self._cost(process)
                process.wall_of_unit = 0.0
                if kind == "unit_delay" and process.fault:
                    process.delay_left = process.left * (process.fault.factor - 1)
            used = min(process.left, budget)
            process.left -= used
            budget -= used
            wall -= used * wall_per_cpu
            ran += used * wall_per_cpu
            process.wall_of_unit += used * wall_per_cpu
            if process.left > 1e-12:
                break
            process.left = 0.0
            slept = min(process.delay_left, max(0.0, wall))
            process.delay_left -= slept
            process.wall_of_unit += slept
            wall -= slept
            budget = min(budget, wall / wall_per_cpu) if wall_per_cpu else 0.0
            if process.delay_left > 1e-12:
                break
            process.delay_left = 0.0
            self._finish_unit(process, self.now - max(0.0, wall))
        return ran

    def _cost(self, process: FakeProcess) -> float:
        size = process.unit_seconds()
        process.tokens_of_unit = max(1, process.requests) if process.role == "rollout" else int(size * 2000)
        cost = size * self.rng.lognormvariate(0.0, 0.15)
        if self.rng.random() < TAIL_PROBABILITY:
            cost = max(cost * self.rng.uniform(1.5, 3.0), self.rng.uniform(0.05, TAIL_SECONDS_MAX))
        return max(cost, 1e-4)

    def _finish_unit(self, process: FakeProcess, at: float) -> None:
        process.progress += 1
        process.progress_at = at
        process.units += 1
        process.busy += process.wall_of_unit
        process.units_due -= 1
        if self.tokens_reported:
            process.tokens += process.tokens_of_unit
        if process.units_due == 0:
            self._work_done(process)

    def _timed_out(self, process: FakeProcess) -> None:
        """A timed phase is over."""
        if process.phase == Phase.START:
            process.enter(Phase.WAIT if process.role in ("trainer", "reward", "standby") else Phase.IDLE, self.now)
            if process.role == "controller":
                process.enter(Phase.CONTROL, self.now, units=1)
        elif process.phase == Phase.UPDATE:
            process.version = self.version
            process.enter(
                Phase.GENERATE if process.requests else Phase.IDLE, self.now, units=1 if process.requests else 0
            )
        elif process.phase == Phase.OPTIMIZER:
            process.enter(Phase.PUBLISH, self.now, seconds=0.02)
        elif process.phase == Phase.PUBLISH:
            process.version = process.step + 1
            self.version = max(self.version, process.version)
            process.enter(Phase.WAIT, self.now)
        elif process.phase == Phase.CONTROL:
            process.enter(Phase.CONTROL, self.now, units=1)
            process.phase_entries -= 1  # one phase, many turns

    def _work_done(self, process: FakeProcess) -> None:
        if process.role == "trainer":
            process.enter(Phase.REDUCE, self.now)
            process.entered += 1
        elif process.role == "controller":
            process.until = self.now + self.rng.uniform(0.01, 0.05)
        elif process.role == "reward":
            process.enter(Phase.WAIT, self.now)
        elif process.role == "rollout":
            process.units_due = 1 if process.requests else 0

    def _coordinate(self) -> None:
        self._trainers()
        for process in self.processes.values():
            usable = process.fault is None or process.fault.kind in SLOWNESSES
            if process.role == "rollout" and usable:
                self._rollout(process)
            elif process.role == "reward" and process.phase == Phase.WAIT and usable and self.rng.random() < 0.004:
                process.enter(Phase.SCORE, self.now, units=self.rng.randint(4, 16))

    def _trainers(self) -> None:
        ready = [p for p in self.processes.values() if p.role == "trainer" and p.phase != Phase.START]
        members = [p for p in ready if p.joined]
        if all(p.phase == Phase.WAIT for p in ready) and ready and self.now >= self.groups_ready_at:
            # A step boundary: newcomers join, which grows the epoch; all but the hung begin to compute.
            if len(members) < len(ready):
                epoch = max(p.epoch for p in ready) + 1
                for process in ready:
                    process.joined, process.epoch = True, epoch
            self.step += 1
            share, more = divmod(self.microbatches, len(ready))
            for i, process in enumerate(ready):
                if not self._hangs(process):
                    process.step = self.step
                    process.enter(Phase.COMPUTE, self.now, units=max(1, share + (i < more)))
        elif members and all(p.phase == Phase.REDUCE and not self._hangs(p) for p in members):
            for process in members:
                process.done += 1
                if process.entered % BUCKETS:
                    process.entered += 1
                else:
                    process.enter(Phase.OPTIMIZER, self.now, seconds=0.03)
            self.groups_ready_at = self.now + self.rng.expovariate(1 / self.groups_ready_seconds)

    @staticmethod
    def _hangs(process: FakeProcess) -> bool:
        return process.fault is not None and process.fault.kind in HANGS

    def _rollout(self, process: FakeProcess) -> None:
        if process.phase == Phase.IDLE:
            # Refilled after a while; now and then the staleness bound leaves an engine idle for long.
            if self.rng.random() < 0.05:
                process.requests = self.rng.randint(8, 32)
                process.enter(Phase.GENERATE, self.now, units=1)
        elif process.phase == Phase.GENERATE:
            if process.requests and self.rng.random() < 0.02 * process.requests / 4:
                process.requests -= 1  # long tail: the last ones take longest
            if process.requests and self.rng.random() < 0.03:
                process.requests += self.rng.randint(0, 8)
                process.requests = min(process.requests, 64)
            if not process.requests:
                process.enter(Phase.IDLE, self.now, seconds=math.inf)
                if self.rng.random() < 0.01:
                    process.enter(Phase.PAUSED, self.now, seconds=self.rng.uniform(5.0, 90.0))
            elif process.version < self.version and self.rng.random() < 0.1:
                process.enter(Phase.UPDATE, self.now, seconds=self.rng.uniform(0.05, 0.6))
        elif process.phase == Phase.PAUSED and self.now >= process.until:
            process.enter(Phase.IDLE, self.now)
