"""Metric panels of a live run, of each role and of its further ranks, from the samples that `watch` already receives.

    samples -> readings -> a tick a second and role -> tracker -> findings that name replica, rank and incarnation

A panel contains the current processes of one role. Of replicas whose ranks compute together the further ranks have a
panel of their own: the first one leads them, and does more. So have the engines of hybrids, which sleep in every step
while others may work. When a process joins, leaves or is replaced, its panel's
tracker starts over, since work is redistributed; what is usual among the machines is kept (`profile`). Fewer than
`PEERS_MIN` processes have no panel. Standbys, starting processes and node metrics (the nodes of a run do different
work) are excluded. Metrics of the GPUs of a process count as its own (detector/live/gpu_readings.py).
"""

from dataclasses import dataclass, field, replace

import numpy as np

from rolecall.core.diagnosis import Finding
from rolecall.core.ids import ProcessId
from rolecall.core.membership import STANDBY_ROLES
from rolecall.core.telemetry import UNCOUNTED, AgentEventKind, Phase, ProcessSample
from rolecall.detector.base.findings import PANEL
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.gpu_readings import GPU_METRICS, GpuReadings, Who
from rolecall.detector.panels.metrics import CounterReading, measured, process_reading
from rolecall.detector.panels.panel import Machine, PanelDetector, PanelShape, Tracker
from rolecall.detector.panels.sequential.detector import Sequential, SequentialTracker
from rolecall.detector.panels.sequential.profile import Profile

INTERVAL_SECONDS = 1.0
PEERS_MIN = 3
"""With two processes, a difference does not show which one is faulty."""
SETTLE_TICKS = 60
"""A panel starts when its members, and so their metrics, have been unchanged for this many ticks: a process that has
just started still differs from its peers."""
LEARNED_TICKS_MIN = 1800
"""A panel must have lasted so long before a profile learns from it."""
SILENT_SECONDS = 30.0
"""A process without samples for this long leaves its panel. A restarting agent is back by then."""
RUN_DELAY = frozenset({"rolecall_process_run_delay_ratio", "rolecall_process_main_run_delay_ratio"})
"""Not compared among the processes of one node: which of them waits for a CPU there is the scheduler's choice."""
METRIC = "metric:"
"""Prefix of evidence kinds that concern a single metric."""
PROCESSES_MAX = 65_536
"""Equal to the limit of the engine (`processes.SUBJECTS_MAX`)."""


Part = tuple[str, bool, bool]
"""(role, whether these are the further ranks of replicas whose ranks compute together, whether they sleep at times)"""


@dataclass(slots=True)
class _PanelMember:
    """A current or prospective member of a panel."""

    role: str
    replica: str
    rank: int
    incarnation: int
    process: ProcessId
    heard_wall: float
    is_further: bool = False
    sleeps: bool = False
    newest: ProcessSample | None = None  # since the last tick
    before: CounterReading | None = None  # at the last tick with a sample

    @property
    def who(self) -> Who:
        return self.process.node, self.process.pid

    @property
    def key(self) -> tuple[str, int, int]:
        return self.replica, self.rank, self.incarnation

    @property
    def part(self) -> Part:
        return self.role, self.is_further, self.sleeps

    def read(self) -> dict[str, float]:
        """Metric values by name since the last read; empty without a new sample."""
        if self.newest is None:
            return {}
        reading = process_reading(self.newest)
        values = measured(self.before, reading, INTERVAL_SECONDS)
        self.newest, self.before = None, reading
        return values


@dataclass(slots=True)
class _Panel:
    """`members`: the panel's columns, in order; `tracker`: None until the members have settled."""

    members: tuple[ProcessId, ...]
    metrics: set[str] = field(default_factory=set)
    ticks: int = 0
    tracker: Tracker | None = None


class RunPanels:
    """Mutable; one per watcher. Findings depend only on the current and earlier observations."""

    def __init__(self, detector: PanelDetector, *, foreign: bool = False) -> None:
        """`detector`: its profile, if it has one, is where learning begins. `foreign`: as of `LiveDetector`."""
        self._detector, self._foreign = detector, foreign
        self._processes: dict[ProcessId, _PanelMember] = {}
        self._by_key: dict[tuple[str, int, int], _PanelMember] = {}  # may include members removed since the last tick
        self._gpus = GpuReadings()
        self._panels: dict[Part, _Panel] = {}
        self._ticked = -1  # number of the last tick, in intervals since 1970

    @property
    def profile(self) -> Profile | None:
        """What is usual among the machines of the run, so far; None if the detector learns no profile."""
        detector = self._detector
        for panel in self._panels.values():
            detector = _taught(detector, panel)
        return detector.profile if isinstance(detector, Sequential) else None

    def findings(self, observation: Observation) -> tuple[Finding, ...]:
        """Findings that start with this observation, each returned once."""
        now = observation.wall_at
        for batch in observation.batches:
            for sample in batch.processes:
                self._take(sample, now)
            for gpu in batch.gpus:
                self._gpus.take(gpu, now)
        for event in observation.events:
            if event.process is not None and event.kind in (AgentEventKind.EXITED, AgentEventKind.FINISHED):
                self._processes.pop(event.process, None)
        number = int(now / INTERVAL_SECONDS)
        if number <= self._ticked:
            return ()
        self._ticked = number
        return tuple(self._tick(now))

    def _take(self, sample: ProcessSample, now: float) -> None:
        if not sample.alive or sample.role in STANDBY_ROLES or sample.phase == Phase.START:
            self._processes.pop(sample.process, None)
            return
        known = self._processes.get(sample.process)
        if known is None or known.key != (sample.replica, sample.rank, sample.incarnation):
            # A promoted standby is the same process under another name, and a new member of its panel.
            if known is None and len(self._processes) >= PROCESSES_MAX:
                return
            place = (sample.role, sample.replica, sample.rank, sample.incarnation)
            # The previous process with this key exited without an event; keeping it would duplicate a column.
            before = self._by_key.get(place[1:])
            if before is not None and self._processes.get(before.process) is before:
                del self._processes[before.process]
            known = self._processes[sample.process] = _PanelMember(*place, sample.process, now)
            self._by_key[known.key] = known
        known.heard_wall = now
        # In a job that rolecall did not start, rank 0 does the same work as the others.
        foreign = self._foreign or sample.incarnation == UNCOUNTED
        known.is_further = sample.rank > 0 and sample.exchanges > 0 and not foreign
        known.sleeps |= sample.phase == Phase.SLEEP
        if known.newest is None or sample.at > known.newest.at:
            known.newest = sample

    def _tick(self, now: float) -> list[Finding]:
        found: list[Finding] = []
        members = self._members(now)
        of_gpus = self._gpus.tick(now)
        for part in self._panels.keys() - members.keys():
            self._detector = _taught(self._detector, self._panels.pop(part))
        for part, processes in members.items():
            panel = self._panels.get(part)
            who = tuple(p.process for p in processes)
            if panel is None or panel.members != who:
                if panel is not None:
                    self._detector = _taught(self._detector, panel)
                panel = self._panels[part] = _Panel(who)
            found += self._tick_panel(part, panel, processes, of_gpus, now)
        return found

    def _members(self, now: float) -> dict[Part, list[_PanelMember]]:
        """Newest incarnation of each rank by panel, in a fixed order; only panels with at least `PEERS_MIN`."""
        self._processes = {k: p for k, p in self._processes.items() if now - p.heard_wall <= SILENT_SECONDS}
        self._by_key = {p.key: p for p in self._processes.values()}
        newest: dict[str, int] = {}
        for process in self._processes.values():
            newest[process.replica] = max(process.incarnation, newest.get(process.replica, 0))
        members: dict[Part, list[_PanelMember]] = {}
        for process in sorted(self._processes.values(), key=lambda process: process.key):
            if process.incarnation == newest[process.replica]:
                members.setdefault(process.part, []).append(process)
        return {part: processes for part, processes in members.items() if len(processes) >= PEERS_MIN}

    def _tick_panel(
        self,
        part: Part,
        panel: _Panel,
        processes: list[_PanelMember],
        of_gpus: dict[Who, dict[str, float]],
        at: float,
    ) -> list[Finding]:
        readings = [p.read() | of_gpus.get(p.who, {}) for p in processes]
        panel.ticks += 1
        if panel.tracker is None:
            panel.metrics.update(*readings)
            if len({p.process.node for p in processes}) == 1:
                panel.metrics -= RUN_DELAY
            if panel.ticks >= SETTLE_TICKS and panel.metrics:
                machines = tuple(Machine(node=p.process.node, replica=p.replica, rank=p.rank) for p in processes)
                metrics = tuple(sorted(panel.metrics))
                role, is_further, _ = part
                panel.tracker = self._detector.track(
                    PanelShape(
                        role=role,
                        metrics=metrics,
                        machines=machines,
                        interval_seconds=INTERVAL_SECONDS,
                        further_ranks=is_further,
                    )
                )
            return []
        rows = [[values.get(metric, np.nan) for values in readings] for metric in sorted(panel.metrics)]
        values = np.array(rows, dtype=np.float32)
        values[~np.isfinite(values)] = np.nan
        by_place = {(p.replica, p.rank): p for p in processes}
        return [self._with_gpus(_named(f, by_place), processes) for f in panel.tracker.tick(at, values)]

    def _with_gpus(self, finding: Finding, processes: list[_PanelMember]) -> Finding:
        """Adds evidence of the suspects' GPUs to a finding about GPU metrics."""
        named = [e.kind.removeprefix(METRIC) for e in finding.evidence if e.kind.startswith(METRIC)]
        of_gpus = [metric for metric in named if metric in GPU_METRICS]
        peers = [p.who for p in processes]
        suspects = [(s.process.node, s.process.pid) for s in finding.suspects if s.process is not None]
        found = [e for who in suspects if of_gpus for e in self._gpus.evidence(who, peers, of_gpus)]
        because = "; ".join([finding.because, *(e.text for e in found)])
        return replace(finding, because=because, evidence=(*finding.evidence, *found))


def _taught(detector: PanelDetector, panel: _Panel) -> PanelDetector:
    """With what a panel has shown, if it was watched for long enough: in a short one, a machine that is slow from the
    start may not have been named yet, and must not become usual."""
    tracker = panel.tracker
    if not (isinstance(detector, Sequential) and isinstance(tracker, SequentialTracker)):
        return detector
    learned = tracker.learned() if panel.ticks >= LEARNED_TICKS_MIN else None
    if learned is None:
        return detector
    return replace(detector, profile=(detector.profile or Profile(panels=[])).replaced(learned, tracker.shape))


def _named(finding: Finding, by_place: dict[tuple[str, int], _PanelMember]) -> Finding:
    """Adds incarnation and process to the suspects and the panel prefix to the detector name."""
    pairs = [(s, by_place[(s.replica, s.rank or 0)]) for s in finding.suspects]
    suspects = [replace(s, incarnation=p.incarnation, process=p.process) for s, p in pairs]
    return replace(finding, detector=f"{PANEL}{finding.detector}", suspects=tuple(suspects))
