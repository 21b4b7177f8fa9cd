"""The live detector: observations in, standing diagnoses out. It keeps state, reads no clock and has no side effects.

    fleet.ingest -> STAGES, in order, each adding findings -> fusion -> diagnoses that stand now

Every `observe` returns a diagnosis while its evidence holds, as the same object under the same key. Findings about an
incarnation end when its successor registers or when recovery calls `forget`: exits of forgotten incarnations are
expected.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Self

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Fate, ReplicaLoad, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import Phase
from rolecall.core.text import counted
from rolecall.detector.base.findings import PANEL
from rolecall.detector.base.observation import Observation
from rolecall.detector.live import fusion
from rolecall.detector.live.history import ObservationHistory, decode, encode
from rolecall.detector.live.monitored_process import WORK_PHASES, MonitoredProcess, phase_text
from rolecall.detector.live.processes import VANISHED_SECONDS, MonitoredProcesses
from rolecall.detector.live.stages.evidence.nccl_ras import NcclRasStage
from rolecall.detector.live.stages.evidence.panels import PanelsStage
from rolecall.detector.live.stages.evidence.pulled_evidence import PulledEvidenceStage
from rolecall.detector.live.stages.exits.crash import CrashStage, LostRanksStage, UserCodeStage
from rolecall.detector.live.stages.exits.dead_role import DeadRoleStage
from rolecall.detector.live.stages.exits.orphans import OrphansStage
from rolecall.detector.live.stages.exits.ray_deaths import RayDeathsStage
from rolecall.detector.live.stages.exits.uninstrumented import UninstrumentedStage
from rolecall.detector.live.stages.nodes.agent_lost import AgentLostStage
from rolecall.detector.live.stages.nodes.full_disk import FullDiskStage
from rolecall.detector.live.stages.nodes.node_faults import NodeFaultsStage
from rolecall.detector.live.stages.numbers.collapse import CollapseStage
from rolecall.detector.live.stages.numbers.not_finite import NotFiniteStage
from rolecall.detector.live.stages.numbers.wrong_numbers import WrongNumbersStage
from rolecall.detector.live.stages.progress.engine import EngineStage
from rolecall.detector.live.stages.progress.skipped import SkippedCollectiveStage
from rolecall.detector.live.stages.progress.slow import SlowLoadingStage, SlowStage
from rolecall.detector.live.stages.progress.stall import CollectiveStage, DependentStallStage, StallStage
from rolecall.detector.live.stages.progress.wait import WaitStage
from rolecall.detector.live.stages.stage import Stage, Tick, stalls_others

Stages = Sequence[Callable[[], Stage]]
STAGES: Stages = (
    UserCodeStage,
    WrongNumbersStage,
    NotFiniteStage,
    SkippedCollectiveStage,
    CrashStage,
    UninstrumentedStage,
    EngineStage,
    StallStage,
    CollectiveStage,
    DependentStallStage,
    SlowLoadingStage,
    SlowStage,
    AgentLostStage,
    FullDiskStage,
    OrphansStage,
    NcclRasStage,
    NodeFaultsStage,
    RayDeathsStage,
    LostRanksStage,
    DeadRoleStage,
    WaitStage,
    PulledEvidenceStage,
    PanelsStage,
    CollapseStage,
)
"""Stages in execution order: causes before symptoms."""
WINDOW_VERSION = 2
FRESH_SECONDS = 3.0
"""Maximum age of the newest sample of a recovered process: a restarting agent is silent for a second."""


class LiveDetector:
    """One per watcher; call `observe` from a single thread."""

    def __init__(
        self,
        config: DetectorConfig,
        expected_roles: Mapping[str, int] | None = None,
        *,
        foreign: bool = False,
        stages: Stages = STAGES,
    ) -> None:
        """`foreign`: no process was started by rolecall, even if a watch counts their incarnations."""
        self._config, self._roles = config, dict(expected_roles or {})
        self._fleet = MonitoredProcesses(
            mask_proc_state=config.mask_proc_state, of_runtime=bool(self._roles), foreign=foreign
        )
        self._stages = [make() for make in stages]
        self._suppressed_wall: dict[str, float] = {}  # stage -> time of its last suppression by an earlier stage
        self._standing: dict[str, Diagnosis] = {}
        self.suspicions: tuple[Diagnosis, ...] = ()
        """Of the newest observation, not reported: collected evidence decides whether they become a diagnosis."""
        self._now = 0.0
        self._history = ObservationHistory(config.window_seconds)

    def observe(self, observation: Observation) -> list[Diagnosis]:
        """All standing diagnoses after this observation, one per fault."""
        self._history.add(observation, self._fleet, self._learned)
        now = self._now = max(self._now, observation.wall_at)
        self._fleet.ingest(observation)
        tick = Tick(
            observation=observation, fleet=self._fleet, config=self._config, expected_roles=self._roles, now=now
        )
        suppressed: set[str] = set()
        for stage in self._stages:
            found = stage.evaluate(tick)
            if stage.name in suppressed or now - self._suppressed_wall.get(stage.name, 0.0) < stage.quiet_seconds:
                continue  # suppressed: evaluated only to update its state
            tick.findings = [*tick.findings, *found]
            if stage.suppresses and any(map(stalls_others, found)):
                suppressed |= stage.suppresses
                self._suppressed_wall.update(dict.fromkeys(stage.suppresses, now))
        self.suspicions = tuple(map(fusion.to_diagnosis, tick.suspicions))
        findings = tick.findings
        of_panels = [f for f in findings if f.detector.startswith(PANEL)]
        others = [f for f in findings if not f.detector.startswith(PANEL)]
        diagnoses = fusion.fuse(others, self._standing, self._fleet.roster.sizes(), now, of_panels)
        self._standing = {d.key: d for d in diagnoses}
        # Learning is suspended for processes with a finding, and for waiting ones while a fault stalls others.
        quiet = {
            s.key
            for f in others
            for who in f.suspects
            if who.replica
            for s in self._held_up(who)
            # A rank between two steps that nothing accuses may be at work: how long it takes is learned.
            if f.fault_class is not FaultClass.CANNOT_TELL or s.phase != Phase.WAIT
        }
        if any(map(stalls_others, others)):
            quiet |= {s.key for s in self._fleet.current() if s.phase not in WORK_PHASES}
        self._fleet.quiet = quiet
        return diagnoses

    def _held_up(self, suspect: Suspect) -> Iterator[MonitoredProcess]:
        """Its process, and those that compute with it; all of its replica if it names no rank."""
        for s in self._fleet.roster.of_replica(suspect.replica).values():
            if s.incarnation == suspect.incarnation:
                together = s.sample is not None and s.sample.exchanges
                if together or suspect.rank in (None, s.rank):
                    yield s

    def forget(self, replica: str, below_incarnation: int) -> None:
        """Marks older incarnations of `replica` as being replaced: their exits from now on are intended.

        Call it when the replacement is ordered, before the old process is killed.
        """
        self._fleet.forget(replica, below_incarnation, self._now)
        self._standing = {
            k: d
            for k, d in self._standing.items()
            if not any(s.replica == replica and (s.incarnation or 0) < below_incarnation for s in d.suspects)
        }

    def unforget(self, replica: str, incarnation: int) -> None:
        """Watches this incarnation of `replica` again, which was not replaced. Its faults are as old as they are."""
        self._fleet.unforget(replica, incarnation)

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        """Whether this replica has recovered: it runs at this incarnation or later and has finished work.

        An idle process counts if it has worked under this name. The text describes the progress, or the missing
        condition.
        """
        here = self._fleet.roster.of_replica(replica).values()
        ranks = [s for s in here if s.incarnation >= incarnation_min]
        if not ranks:
            return False, f"{replica}: no process of incarnation {incarnation_min} or later has registered"
        for s in ranks:
            missing = self._missing(s)
            if missing:
                return False, f"{s.name()}: {missing}"
        lead = min(ranks, key=lambda s: s.worked)
        if lead.reports and len(ranks) > 1:
            work = f"{counted(lead.worked, 'unit')} of work"
            return True, f"each of the {len(ranks)} ranks of {replica} has finished at least {work}"
        return True, _progress_of(lead)

    def _missing(self, subject: MonitoredProcess) -> str:
        """Reason why this process is not healthy; empty if it is."""
        if subject.gone:
            return "its process exited"
        if subject.sample is None:
            return "registered, not sampled yet"
        if self._now - subject.seen_wall > FRESH_SECONDS:
            return f"no sample for {self._now - subject.seen_wall:.1f} s"
        for diagnosis in self._standing.values():
            # Of panels alone, only its metrics changed; the checks below cover its progress.
            named = {(s.replica, s.incarnation) for s in diagnosis.suspects}
            if (subject.replica, subject.incarnation) in named and not fusion.on_panels_alone(diagnosis):
                return f"diagnosed with {diagnosis.fault_class}"
        if not subject.reports:
            held = max(subject.halted.wall, subject.starved.wall)
            return f"stopped, blocked or without a CPU for {held:.0f} s" if held else ""
        if not subject.worked:
            return f"in phase {subject.phase}, no unit of work finished yet"
        if subject.phase == Phase.START:
            return "in phase start"
        due = subject.progress_due and subject.phase in WORK_PHASES
        if due and subject.stall.wall >= self._config.hang_floor_seconds:
            return f"no progress in {subject.phase} for {subject.stall.wall:.1f} s"
        return ""

    def waits(self, replica: str, incarnation_min: int) -> bool:
        """Whether every rank of this replica runs at this incarnation or later, is not suspected, and has no work."""
        ranks = [s for s in self._fleet.roster.of_replica(replica).values() if s.incarnation >= incarnation_min]
        return bool(ranks) and all(self._waits(s) for s in ranks)

    def has_worked(self, replica: str, incarnation: int) -> bool:
        """Whether this incarnation has finished work, whatever became of it since."""
        here = self._fleet.roster.of_replica(replica).values()
        return any(s.incarnation == incarnation and s.worked > 0 for s in here)

    def _waits(self, subject: MonitoredProcess) -> bool:
        if subject.gone or subject.sample is None or self._now - subject.seen_wall > FRESH_SECONDS:
            return False
        who = subject.replica, subject.incarnation
        named = any(who == (s.replica, s.incarnation) for d in self._standing.values() for s in d.suspects)
        return not named and subject.reports and not subject.progress_due

    def fate(self, suspect: Suspect) -> tuple[Fate, str]:
        """What became of the process that a diagnosis names, or of its replica. Another process with the same rank is
        not that process. Unknown while an agent does not answer."""
        replica, process = suspect.replica, suspect.process
        here = list(self._fleet.roster.of_replica(replica).values())
        if {suspect.node, *(s.node for s in here)} & {silent for silent, _, _ in self._fleet.unreachable}:
            return Fate.UNKNOWN, f"the agent of {suspect.node} does not answer"
        if process is None or suspect.rank is None:
            if all(self._is_over(s) for s in here):
                return Fate.ENDED, f"no process of {replica} is left"
            works, seen = self.progressing(replica, suspect.incarnation or 0)
            return Fate.WORKS if works else Fate.UNKNOWN, seen
        subject = next((s for s in here if s.process == process), None)
        if subject is None or self._is_over(subject):
            newer = next((s for s in here if s.rank == suspect.rank and s.process != process and not s.gone), None)
            place = f"; {newer.name()} has its rank now" if newer is not None else ""
            return Fate.ENDED, f"{replica} rank {suspect.rank} (pid {process.pid}) on {suspect.node} has ended{place}"
        missing = self._missing(subject)
        if missing:
            return Fate.UNKNOWN, f"{subject.name()}: {missing}"
        return Fate.WORKS, _progress_of(subject)

    def _is_over(self, subject: MonitoredProcess) -> bool:
        return subject.gone or self._now - subject.seen_wall > VANISHED_SECONDS

    def survives(self, role: str, since: float) -> bool:
        """Whether a process of `role` that ran at `since` (wall seconds) still runs, or may: an agent is silent."""
        if self._fleet.unreachable:
            return True
        of_role = self._fleet.roster.of_role(role).values()
        return any(s.first_wall <= since and not self._is_over(s) for s in of_role)

    def loads(self) -> dict[str, ReplicaLoad]:
        """Of every replica that was sampled. The ranks of an engine hold the same requests."""
        found: dict[str, ReplicaLoad] = {}
        for s in self._fleet.current():
            if s.sample is None or s.gone:
                continue
            before = found.get(s.replica, ReplicaLoad())
            found[s.replica] = ReplicaLoad(
                requests=max(before.requests or 0, s.sample.requests_active) if s.reports else before.requests,
                tokens=max(before.tokens or 0, s.sample.tokens_held) if s.reports else before.tokens,
                rss_bytes=before.rss_bytes + s.sample.rss_bytes,
                available_bytes=self._fleet.available_bytes.get(s.node),
            )
        return found

    def processes(self) -> list[MonitoredProcess]:
        """All monitored processes, newest incarnations only."""
        return list(self._fleet.current())

    def window(self, suspects: Iterable[Suspect] = ()) -> dict[str, Any]:
        """The most recent observations and the state before them, as JSON, for storage with a diagnosis and
        `replay_window`. It covers between half and all of `window_seconds`; for a large fleet, only `suspects` and some
        of their peers."""
        start, observations = self._history.window(self._fleet, suspects)
        return {
            "version": WINDOW_VERSION,
            "config": self._config.model_dump(),
            "roles": self._roles,
            "start": start,
            "observations": observations,
        }

    @classmethod
    def replay(
        cls,
        config: DetectorConfig,
        roles: Mapping[str, int] | None,
        observations: Iterable[Observation],
        start: dict[str, Any] | None = None,
    ) -> list[list[Diagnosis]]:
        """The diagnoses after each observation, starting from `start` (of a window) or from an empty state."""
        detector = cls(config, roles)
        if start is not None:
            detector._restore(start)
        return [detector.observe(o) for o in observations]

    @classmethod
    def replay_window(cls, window: Mapping[str, Any]) -> list[list[Diagnosis]]:
        """Replays a stored window. Raises ValueError: the window has another version or is damaged."""
        if window.get("version") != WINDOW_VERSION:
            raise ValueError(f"window: version {window.get('version')!r} is not {WINDOW_VERSION}")
        observations = [Observation.from_dict(o) for o in window["observations"]]
        config = DetectorConfig.model_validate(window["config"])
        return cls.replay(config, window["roles"], observations, window["start"])

    @classmethod
    def resumed(
        cls, config: DetectorConfig, roles: Mapping[str, int] | None, state: dict[str, Any], *, foreign: bool = False
    ) -> Self:
        """A detector restored from `state`, so that a restarted watcher keeps its baselines."""
        detector = cls(config, roles, foreign=foreign)
        detector._restore(state)
        return detector

    def state(self) -> dict[str, Any]:
        """Learned state and standing diagnoses, as JSON."""
        return {**self._learned(), "subjects": [encode(s) for s in self._fleet.subjects.values()]}

    def state_in_parts(self, subjects_at_once: int) -> Iterator[str | None]:
        """`state` as text, encoded a few subjects at a time; yields None until complete. Observations may arrive in
        between, so each subject has its state at the time of encoding."""
        texts: list[str] = []
        keys = list(self._fleet.subjects)
        for begin in range(0, len(keys), subjects_at_once):
            there = (self._fleet.subjects.get(key) for key in keys[begin : begin + subjects_at_once])
            texts += [json.dumps(encode(s)) for s in there if s is not None]
            if begin + subjects_at_once < len(keys):
                yield None
        yield f'{json.dumps(self._learned())[:-1]}, "subjects": [{", ".join(texts)}]}}'

    def _learned(self) -> dict[str, Any]:
        """The state without the subjects."""
        fleet = {
            f.name: encode(getattr(self._fleet, f.name))
            for f in fields(MonitoredProcesses)
            if f.init and f.name != "subjects"
        }
        return {
            "fleet": {"@": "MonitoredProcesses", **fleet},
            "stages": {stage.name: encode(stage.state) for stage in self._stages},
            "suppressed_wall": encode(self._suppressed_wall),
            "standing": encode(list(self._standing.values())),
            "now": self._now,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        subjects: list[MonitoredProcess] = [decode(s) for s in state["subjects"]]
        subjects_by_key = {s.key: s for s in subjects}
        foreign = self._fleet.foreign
        self._fleet = replace(
            decode(state["fleet"]), subjects=subjects_by_key, of_runtime=bool(self._roles), foreign=foreign
        )
        for subject in subjects:
            subject.foreign |= foreign
        for stage in self._stages:
            known = decode(state["stages"].get(stage.name))
            if known is not None:
                stage.state = known
        self._suppressed_wall = decode(state["suppressed_wall"])
        self._standing = {d.key: d for d in decode(state["standing"])}
        self._now = state["now"]


def _progress_of(subject: MonitoredProcess) -> str:
    if not subject.reports:
        return f"{subject.name()} runs; it does not report progress"
    where = phase_text(subject.phase, subject.sample.step if subject.sample else -1)
    if subject.phase == Phase.STEP:  # a step is its only unit of work
        return f"{subject.name()} makes progress, last seen in {where}"
    return f"{subject.name()} has finished {counted(subject.worked, 'unit')} of work, last seen in {where}"
