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
from collections.abc import Iterator
from dataclasses import dataclass, field

from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEvent, AgentEventKind, HostSample, Phase, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.testing.synthetic_process import HANGS, SLOWNESSES, WALL_OFFSET, FakeFault, FakeProcess

__all__ = ["HANGS", "SLOWNESSES", "FakeFault", "FakeFleet", "FakeProcess", "Load"]

TICK_SECONDS = 0.02
SAMPLE_TICKS = 10  # the agents sample every 0.2 s
POLL_SECONDS = 0.25
BUCKETS = 3  # collectives a step
TAIL_PROBABILITY = 0.005
"""One unit in 200 takes up to three times as long, or a pause: garbage collection, page faults, a cold cache."""
TAIL_SECONDS_MAX = 0.4


@dataclass(slots=True)
class Load:
    """How busy the machine is: `contention` CPUs wanted beyond those there are, and bursts on top."""

    num_cpus: float = 2.0
    background: float = 0.3  # CPUs that agents, raylets and the like use
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
        self._retired: list[FakeProcess] = []
        self.groups_ready_at = self.now + 8.0
        self.step = 0
        plan = [("controller", 1), ("reward", self.num_rewards), ("trainer", self.num_trainers)]
        for role, count in [*plan, ("rollout", self.num_rollouts), ("standby", 1)]:
            for i in range(count):
                self.start(role, i, incarnation=1)

    # --- what tests do to it

    def start(self, role: str, index: int, incarnation: int, node: str | None = None) -> FakeProcess:
        """A fresh process of this replica; a former one is forgotten (kill it first)."""
        self._pid += 1
        cost = {
            "trainer": lambda: self.microbatch_seconds * self.rng.uniform(0.4, 1.6),
            "reward": lambda: 0.0004,
            "controller": lambda: 0.004,
        }
        where = node or f"node-{role}-{index}"
        p = FakeProcess(role, index, where, self._pid, incarnation, cost.get(role, lambda: 0.001))
        if role == "rollout":
            p.unit_seconds = lambda: self.engine_step_seconds * (0.6 + 0.4 * p.requests / 16)
        p.phase_since = p.progress_at = self.now
        p.until = self.now + self.rng.uniform(2.0, 6.0)
        self.processes[p.replica] = p
        self.event(AgentEventKind.REGISTERED, p)
        return p

    def event(self, kind: AgentEventKind, p: FakeProcess, **detail: str) -> None:
        self._seq += 1
        self.events.append(
            AgentEvent(
                seq=self._seq,
                kind=kind,
                node=NodeId(p.node),
                at=self.now,
                wall_at=self.now + WALL_OFFSET,
                process=p.process,
                role=p.role,
                replica=p.replica,
                incarnation=p.incarnation,
                detail=detail,
            )
        )

    def kill(self, replica: str, *, signal: str = "9") -> FakeProcess:
        """SIGKILL: the process is gone, and its agent reports it at once."""
        p = self.processes.pop(replica)
        p.alive = False
        self.event(AgentEventKind.EXITED, p, last_phase=p.phase, signal=signal)
        if p.role == "trainer":
            # The collective fails at the survivors; the step begins again once all have joined a new epoch.
            for peer in self.processes.values():
                if peer.role == "trainer":
                    peer.epoch += 1
                    peer.done = peer.entered = peer.entered + (-peer.entered) % BUCKETS
                    if peer.phase in (Phase.REDUCE, Phase.COMPUTE):
                        peer.enter(Phase.WAIT, self.now)
        return p

    def promote(self, standby: str, replica: str, incarnation: int) -> FakeProcess:
        """The same process takes the name of the replica that it replaces."""
        p = self.processes.pop(standby)
        role, _, index = replica.partition("/")
        p.role, p.index, p.replica, p.incarnation = role, int(index), replica, incarnation
        p.unit_seconds = lambda: self.engine_step_seconds * (0.6 + 0.4 * p.requests / 16)
        p.enter(Phase.UPDATE, self.now, seconds=0.3)
        self.processes[replica] = p
        self.event(AgentEventKind.REGISTERED, p)
        return p

    def burst(self, seconds: float, cpus: float) -> None:
        """A neighbour eats `cpus` cores for a while, as a starting vLLM process does."""
        self.load.burst_until, self.load.burst = self.now + seconds, cpus

    # --- the passing of time

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
        for p in list(self.processes.values()):
            self._advance(p, share)
        self._coordinate()
        if self.ticks % SAMPLE_TICKS == 0:
            for p in self.processes.values():
                self._samples.setdefault(p.node, []).append(p.sample(self.now))

    def _wants_cpu(self, p: FakeProcess) -> bool:
        if p.fault is not None:
            if p.fault.kind in ("stopped", "lock", "read"):
                return False
            if p.fault.kind == "gil_loop":
                return True
        return p.units_due > 0 or p.phase == Phase.START

    def _advance(self, p: FakeProcess, share: float) -> None:
        kind = p.fault.kind if p.fault else ""
        if kind == "stopped":
            return
        mine = share * self.rng.uniform(0.7, 1.3)
        mine = min(1.0, mine)
        if kind == "gil_loop":
            p.cpu += TICK_SECONDS * mine
            p.run_delay += 0.0  # the working thread waits for the interpreter, not for a CPU
            return
        p.beats += TICK_SECONDS / 0.1
        if kind in ("lock", "read"):
            return
        if not self._wants_cpu(p):
            p.cpu += TICK_SECONDS * 0.01
            if self.now >= p.until:
                self._timed_out(p)
            return
        self._work(p, mine, kind)

    def _work(self, p: FakeProcess, mine: float, kind: str) -> None:
        run_share, got = mine, TICK_SECONDS * mine
        fault_share = p.fault.share if p.fault else 1.0
        if kind == "duty_cycle":
            got *= fault_share
        elif kind == "cpu_quota":
            p.throttled += TICK_SECONDS * max(0.0, 1 - fault_share / max(run_share, fault_share))
            got = TICK_SECONDS * min(run_share, fault_share)
        if p.phase == Phase.START:
            p.cpu += got
            p.run_delay += TICK_SECONDS * (1 - run_share)
            if self.now >= p.until:
                self._timed_out(p)
            return
        ran = self._units(p, got / self.load.slowdown, kind)  # wall seconds not spent asleep
        p.cpu += got * ran / TICK_SECONDS
        if kind == "duty_cycle":
            p.run_delay += ran * fault_share * (1 - run_share)
        else:
            p.run_delay += max(0.0, ran - got * ran / TICK_SECONDS)

    def _units(self, p: FakeProcess, cpu: float, kind: str) -> float:
        """Works off units; the tick's wall time is shared among them as the CPU time is. Wall seconds at work."""
        wall_per_cpu = TICK_SECONDS / cpu if cpu > 0 else 0.0
        budget, wall, ran = cpu, TICK_SECONDS, 0.0
        while p.units_due > 0 and wall > 1e-12:
            if p.left <= 0 and p.delay_left <= 0:
                p.left = self._cost(p)
                p.wall_of_unit = 0.0
                if kind == "unit_delay" and p.fault:
                    p.delay_left = p.left * (p.fault.factor - 1)
            used = min(p.left, budget)
            p.left -= used
            budget -= used
            wall -= used * wall_per_cpu
            ran += used * wall_per_cpu
            p.wall_of_unit += used * wall_per_cpu
            if p.left > 1e-12:
                break
            p.left = 0.0
            slept = min(p.delay_left, max(0.0, wall))
            p.delay_left -= slept
            p.wall_of_unit += slept
            wall -= slept
            budget = min(budget, wall / wall_per_cpu) if wall_per_cpu else 0.0
            if p.delay_left > 1e-12:
                break
            p.delay_left = 0.0
            self._finish_unit(p, self.now - max(0.0, wall))
        return ran

    def _cost(self, p: FakeProcess) -> float:
        size = p.unit_seconds()
        p.tokens_of_unit = max(1, p.requests) if p.role == "rollout" else int(size * 2000)
        cost = size * self.rng.lognormvariate(0.0, 0.15)
        if self.rng.random() < TAIL_PROBABILITY:
            cost = max(cost * self.rng.uniform(1.5, 3.0), self.rng.uniform(0.05, TAIL_SECONDS_MAX))
        return max(cost, 1e-4)

    def _finish_unit(self, p: FakeProcess, at: float) -> None:
        p.progress += 1
        p.progress_at = at
        p.units += 1
        p.busy += p.wall_of_unit
        p.units_due -= 1
        if self.tokens_reported:
            p.tokens += p.tokens_of_unit
        if p.units_due == 0:
            self._work_done(p)

    # --- what roles do

    def _timed_out(self, p: FakeProcess) -> None:
        """A timed phase is over."""
        if p.phase == Phase.START:
            p.enter(Phase.WAIT if p.role in ("trainer", "reward", "standby") else Phase.IDLE, self.now)
            if p.role == "controller":
                p.enter(Phase.CONTROL, self.now, units=1)
        elif p.phase == Phase.UPDATE:
            p.version = self.version
            p.enter(Phase.GENERATE if p.requests else Phase.IDLE, self.now, units=1 if p.requests else 0)
        elif p.phase == Phase.OPTIMIZER:
            p.enter(Phase.PUBLISH, self.now, seconds=0.02)
        elif p.phase == Phase.PUBLISH:
            p.version = p.step + 1
            self.version = max(self.version, p.version)
            p.enter(Phase.WAIT, self.now)
        elif p.phase == Phase.CONTROL:
            p.enter(Phase.CONTROL, self.now, units=1)
            p.phase_entries -= 1  # one phase, many turns

    def _work_done(self, p: FakeProcess) -> None:
        if p.role == "trainer":
            p.enter(Phase.REDUCE, self.now)
            p.entered += 1
        elif p.role == "controller":
            p.until = self.now + self.rng.uniform(0.01, 0.05)
        elif p.role == "reward":
            p.enter(Phase.WAIT, self.now)
        elif p.role == "rollout":
            p.units_due = 1 if p.requests else 0

    def _coordinate(self) -> None:
        self._trainers()
        for p in self.processes.values():
            usable = p.fault is None or p.fault.kind in SLOWNESSES
            if p.role == "rollout" and usable:
                self._rollout(p)
            elif p.role == "reward" and p.phase == Phase.WAIT and usable and self.rng.random() < 0.004:
                p.enter(Phase.SCORE, self.now, units=self.rng.randint(4, 16))

    def _trainers(self) -> None:
        ready = [p for p in self.processes.values() if p.role == "trainer" and p.phase != Phase.START]
        members = [p for p in ready if p.joined]
        if all(p.phase == Phase.WAIT for p in ready) and ready and self.now >= self.groups_ready_at:
            # A step boundary: newcomers join, which grows the epoch; all but the hung begin to compute.
            if len(members) < len(ready):
                epoch = max(p.epoch for p in ready) + 1
                for p in ready:
                    p.joined, p.epoch = True, epoch
            self.step += 1
            share, more = divmod(self.microbatches, len(ready))
            for i, p in enumerate(ready):
                if not self._hangs(p):
                    p.step = self.step
                    p.enter(Phase.COMPUTE, self.now, units=max(1, share + (i < more)))
        elif members and all(p.phase == Phase.REDUCE and not self._hangs(p) for p in members):
            for p in members:
                p.done += 1
                if p.entered % BUCKETS:
                    p.entered += 1
                else:
                    p.enter(Phase.OPTIMIZER, self.now, seconds=0.03)
            self.groups_ready_at = self.now + self.rng.expovariate(1 / self.groups_ready_seconds)

    @staticmethod
    def _hangs(p: FakeProcess) -> bool:
        return p.fault is not None and p.fault.kind in HANGS

    def _rollout(self, p: FakeProcess) -> None:
        if p.phase == Phase.IDLE:
            # Refilled after a while; now and then an engine has lawfully nothing to do for long (staleness bound).
            if self.rng.random() < 0.05:
                p.requests = self.rng.randint(8, 32)
                p.enter(Phase.GENERATE, self.now, units=1)
        elif p.phase == Phase.GENERATE:
            if p.requests and self.rng.random() < 0.02 * p.requests / 4:
                p.requests -= 1  # long tail: the last ones take longest
            if p.requests and self.rng.random() < 0.03:
                p.requests += self.rng.randint(0, 8)
                p.requests = min(p.requests, 64)
            if not p.requests:
                p.enter(Phase.IDLE, self.now, seconds=math.inf)
                if self.rng.random() < 0.01:
                    p.enter(Phase.PAUSED, self.now, seconds=self.rng.uniform(5.0, 90.0))
            elif p.version < self.version and self.rng.random() < 0.1:
                p.enter(Phase.UPDATE, self.now, seconds=self.rng.uniform(0.05, 0.6))
        elif p.phase == Phase.PAUSED and self.now >= p.until:
            p.enter(Phase.IDLE, self.now)
