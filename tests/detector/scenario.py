"""Runs a scenario file: processes with rates, changes and events at given seconds, and what must be diagnosed when.

roles = {trainer = 2}                # expected replicas per role, optional
config = {mask_proc_state = true}    # DetectorConfig
end = 30.0                           # seconds

[process."trainer/0"]                # phase, node, incarnation, and rates a second of its counters
                                     # (of several ranks: "trainer/0 rank 1")
phase = "compute"
progress = 4.0

[[at]]                               # from t on
t = 20.0
replica = "trainer/0"
set = {progress = 0.0, phase = "reduce"}     # rates and fields
add = {collectives_entered = 1}              # counters, once

[[at]]
t = 21.0
event = {kind = "exited", replica = "trainer/0", detail = {signal = "9"}}   # or forget, start, pause, unreachable

[[at]]
t = 22.0
set_clock = -3600.0                  # seconds, of one node (node = "node-trainer-0"), or of every node and the watch

[[expect]]                           # all diagnoses, in the order in which they are first reported; none but these
between = [22.5, 25.0]
fault_class = "hang"
suspects = ["trainer/0"]
ranks = [0]                          # optional: of the suspects that name one
says = ["lock"]
until = 28.0                         # optional: it no longer stands from then on
"""

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.ids import NodeId, ProcessId, split_replica
from rolecall.core.telemetry import HEALTH_SIGNS, AgentEvent, AgentEventKind, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector

SAMPLE_SECONDS = 0.2
POLLS_PER_SAMPLE = 1
WALL_OFFSET = 1_700_000_000.0

RATES = {
    "progress": 0.0,
    "beats": 10.0,
    "busy_seconds": 0.0,
    "work_units": 0.0,
    "tokens": 0.0,
    "cpu_seconds": 0.02,
    "main_run_delay_seconds": 0.0,
    "throttled_seconds": 0.0,
    "collectives": 0.0,
    "exchanges": 0.0,
    "exchange_seconds": 0.0,
    "policy_version": 0.0,
}
FIELDS = {"phase": "idle", "epoch": 1, "step": 0, "requests_active": 0, "proc_state": "S", "replica": "", "alive": True}
UNKNOWN = {"reward": math.nan, **dict.fromkeys(HEALTH_SIGNS, math.nan)}


@dataclass
class Process:
    """Counters that grow at constant rates between changes."""

    replica: str
    rank: int
    node: str
    pid: int
    incarnation: int
    rates: dict[str, float]
    fields: dict[str, Any]
    counters: dict[str, float] = field(default_factory=dict)
    phase_since: float = 0.0
    phase_entries: int = 1
    progress_at: float = 0.0
    alive: bool = True
    wall_offset: float = WALL_OFFSET

    def advance(self, seconds: float, now: float) -> None:
        before = int(self.counters.get("progress", 0.0))
        for name, rate in self.rates.items():
            self.counters[name] = self.counters.get(name, 0.0) + rate * seconds
        if int(self.counters["progress"]) > before:
            self.progress_at = now

    def change(self, now: float, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name in self.rates:
                self.rates[name] = value
            elif name in self.fields:
                if name == "phase":
                    self.phase_since, self.phase_entries = now, self.phase_entries + 1
                self.fields[name] = value
            elif name == "incarnation":
                self.incarnation = value
            else:
                raise KeyError(f"a process has no {name!r}")

    def process(self) -> ProcessId:
        return ProcessId(node=NodeId(self.node), pid=self.pid, start_ticks=self.pid * 3)

    def sample(self, now: float) -> ProcessSample:
        c, name = self.counters, self.fields["replica"] or self.replica
        collectives = int(c.get("collectives", 0.0))
        return ProcessSample(
            process=self.process(),
            role=split_replica(name)[0],
            replica=name,
            rank=self.rank,
            incarnation=self.incarnation,
            at=now,
            wall_at=now + self.wall_offset,
            alive=self.fields["alive"],
            page_ok=True,
            epoch=self.fields["epoch"],
            phase=self.fields["phase"],
            phase_since=self.phase_since,
            phase_entries=self.phase_entries,
            step=self.fields["step"],
            policy_version=int(c.get("policy_version", 0.0)) if c.get("policy_version") else -1,
            healths=int(self.fields["entropy"] == self.fields["entropy"]),
            progress=int(c.get("progress", 0.0)),
            progress_at=self.progress_at,
            beats=int(c.get("beats", 0.0)),
            collectives_entered=collectives + int(c.get("collectives_entered", 0.0)),
            collectives_done=collectives,
            exchanges=int(c.get("exchanges", 0.0)),
            exchange_seconds=c.get("exchange_seconds", 0.0),
            busy_seconds=c.get("busy_seconds", 0.0),
            work_units=int(c.get("work_units", 0.0)),
            tokens=int(c.get("tokens", 0.0)),
            requests_active=self.fields["requests_active"],
            proc_state=self.fields["proc_state"],
            cpu_seconds=c.get("cpu_seconds", 0.0),
            main_run_delay_seconds=c.get("main_run_delay_seconds", 0.0),
            throttled_seconds=c.get("throttled_seconds", 0.0),
            **{sign: self.fields[sign] for sign in UNKNOWN},
        )


class Scenario:
    """`reported`: (first reported, diagnosis, stood until or None) in order; `observations`: what the detector saw."""

    def __init__(self, path: Path) -> None:
        self.spec = tomllib.loads(path.read_text())
        self.config = DetectorConfig(**self.spec.get("config", {}))
        self.detector = LiveDetector(self.config, self.spec.get("roles"))
        self.processes: dict[str, Process] = {}
        self.events: list[AgentEvent] = []
        self.unreachable: dict[str, tuple[float, str]] = {}
        self.observations: list[Observation] = []
        self.reported: dict[str, tuple[float, Diagnosis, float | None]] = {}
        self.paused_until = 0.0
        self.wall_offset = WALL_OFFSET  # of the watch
        self.seq = 0
        for replica, given in self.spec["process"].items():
            self.start(replica, given, 0.0)

    def start(self, name: str, given: dict[str, Any], now: float) -> None:
        values = dict(given)
        replica, _, rank = name.partition(" rank ")
        node = values.pop("node", "node-" + replica.replace("/", "-"))
        incarnation = values.pop("incarnation", 1)
        p = Process(
            replica,
            int(rank or 0),
            node,
            100 + len(self.observations) + len(self.processes),
            incarnation,
            {**RATES},
            {**FIELDS, **UNKNOWN},
            wall_offset=self.wall_offset,
        )
        p.progress_at = now
        p.change(now, values)
        self.processes[name] = p
        self.event(now, {"kind": "registered", "replica": name})

    def event(self, now: float, given: dict[str, Any]) -> None:
        p = self.processes[given["replica"]]
        self.seq += 1
        name = p.fields["replica"] or p.replica
        self.events.append(
            AgentEvent(
                seq=self.seq,
                kind=AgentEventKind(given["kind"]),
                node=NodeId(p.node),
                at=now,
                wall_at=now + p.wall_offset,
                process=p.process(),
                role=split_replica(name)[0],
                replica=name,
                rank=p.rank,
                incarnation=p.incarnation,
                detail={k: str(v) for k, v in given.get("detail", {}).items()},
            )
        )
        if given["kind"] == "exited":
            p.alive = False

    def apply(self, now: float, change: dict[str, Any]) -> None:
        if "set" in change or "add" in change:
            p = self.processes[change["replica"]]
            p.change(now, change.get("set", {}))
            for name, value in change.get("add", {}).items():
                p.counters[name] = p.counters.get(name, 0.0) + value
        elif "event" in change:
            self.event(now, change["event"])
        elif "forget" in change:
            self.detector.forget(*change["forget"])
        elif "start" in change:
            self.start(change["replica"], change["start"], now)
        elif "pause" in change:
            self.paused_until = now + change["pause"]
        elif "unreachable" in change:
            self.unreachable[change["unreachable"]] = (now, change["reason"])
        elif "set_clock" in change:
            for p in self.processes.values():
                p.wall_offset += change["set_clock"] if change.get("node") in (None, p.node) else 0.0
            self.wall_offset += 0.0 if "node" in change else change["set_clock"]
        elif "reachable" in change:
            self.unreachable.pop(change["reachable"])
        else:
            raise KeyError(f"no such change: {change}")

    def run(self) -> None:
        changes = sorted(self.spec.get("at", []), key=lambda c: c["t"])
        num_samples = round(self.spec["end"] / SAMPLE_SECONDS)
        for i in range(1, num_samples + 1):
            now = i * SAMPLE_SECONDS
            while changes and changes[0]["t"] <= now:
                self.apply(changes[0]["t"], changes.pop(0))
            if now < self.paused_until:
                continue  # the whole machine stands still, agents and detector too
            for p in self.processes.values():
                p.advance(SAMPLE_SECONDS, now)
            self.observe(now)

    def observe(self, now: float) -> None:
        wall = now + self.wall_offset
        batches: dict[str, list[ProcessSample]] = {}
        for p in self.processes.values():
            if p.alive and p.node not in self.unreachable:
                batches.setdefault(p.node, []).append(p.sample(now))
        observation = Observation(
            wall_at=wall,
            batches=tuple(
                SampleBatch(
                    node=NodeId(node),
                    agent_pid=1,
                    cursor=1,
                    lost=0,
                    at=now,
                    wall_at=samples[0].wall_at,
                    processes=tuple(samples),
                    hosts=(),
                )
                for node, samples in batches.items()
            ),
            events=tuple(self.events),
            unreachable=tuple((n, since + self.wall_offset, why) for n, (since, why) in self.unreachable.items()),
        )
        self.events = []
        self.observations.append(observation)
        standing = {d.key: d for d in self.detector.observe(observation)}
        for key, (first, d, until) in self.reported.items():
            if d.key not in standing and until is None:
                self.reported[key] = (first, d, now)
        for key, d in standing.items():
            if all(until is not None for _, before, until in self.reported.values() if before.key == key):
                self.reported[f"{key} at {now}" if key in self.reported else key] = (now, d, None)
