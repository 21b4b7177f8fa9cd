"""The live detector: observations in, standing diagnoses out. It keeps state, reads no clock and acts on nothing.

    fleet.ingest -> crash, user_code, stall + collective, slow, lost, nccl -> node_faults -> lost_ranks -> fusion -> diagnoses that stand now
    findings of panels (part of the observation), if nothing explains them ---^
    collapse of the policy, which explains nobody's fault and is explained by none ---^

A diagnosis is returned by every `observe` while its evidence holds, as the same object under the same key; when it is
no longer returned, its evidence is gone. What an incarnation is accused of ends when its successor registers, or when
recovery says `forget`: exits of forgotten incarnations are expected.

What panels of metrics say (detector/live/stages/run_panels.py) begins and has no end. So it counts as the same fault for
`SAME_FAULT_SECONDS`, says nothing against a replica that is seen to work, and nobody's learning stops for it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import Phase
from rolecall.detector.base.observation import Observation
from rolecall.detector.live import collective, fusion
from rolecall.detector.live.codec import decode, encode
from rolecall.detector.live.deadlines import learned_deadline
from rolecall.detector.live.fleet import MonitoredProcesses
from rolecall.detector.live.history import ObservationHistory
from rolecall.detector.live.merging import SAME_FAULT_SECONDS
from rolecall.detector.live.stages import (
    agent_lost as lost,
)
from rolecall.detector.live.stages import (
    crash,
    lost_ranks,
    slow,
    stall,
    user_code,
)
from rolecall.detector.live.stages import (
    pulled_evidence as pulled,
)
from rolecall.detector.live.stages import (
    uninstrumented as unpaged,
)
from rolecall.detector.live.stages.collapse import CollapseWatch
from rolecall.detector.live.stages.nccl_ras import StalledCommunicators
from rolecall.detector.live.stages.node_faults import NodeFaults
from rolecall.detector.live.stages.slow import SlowState
from rolecall.detector.live.subject import WORK_PHASES, MonitoredProcess

WINDOW_VERSION = 1
FRESH_SECONDS = 3.0
"""'Healthy again' needs a sample no older than this: an agent that restarts is silent for a second."""
FAULTS_OF_OTHERS = frozenset({FaultClass.CRASH, FaultClass.USER_CODE, FaultClass.HANG, FaultClass.NETWORK})
"""While one of these stands, and for a while after, those who depend on others are excused."""
AFTERMATH_SECONDS = 300.0
"""What begins in metrics while a finding of another kind stands, or so long after, is taken for what that does to the
others: they wait, or take over work. The same after processes came or went."""
ONSET_SECONDS = 5.0
"""A change in metrics is dated no better than this."""


@dataclass(slots=True)
class PanelFault:
    """What panels say of one machine."""

    finding: Finding
    last_wall: float  # when it was last said
    told: bool = False


class LiveDetector:
    """One per watcher; `observe` is meant to be called from one thread."""

    def __init__(self, config: DetectorConfig, expected_roles: Mapping[str, int] | None = None) -> None:
        self._config, self._roles = config, dict(expected_roles or {})
        self._fleet = MonitoredProcesses(mask_proc_state=config.mask_proc_state)
        self._slow = SlowState()
        self._nodes, self._nccl = NodeFaults(), StalledCommunicators()
        self._collapse = CollapseWatch()
        self._standing: dict[str, Diagnosis] = {}
        self._fault_wall = 0.0
        self._panels: list[PanelFault] = []
        self._pulled: list[Finding] = []
        self._trouble = (0.0, 0.0)  # since when, and when last, the engine's own detectors found something
        self._now = 0.0
        self._history = ObservationHistory(config.window_seconds)

    def observe(self, observation: Observation) -> list[Diagnosis]:
        """All diagnoses that stand after this observation, one per fault."""
        self._history.add(observation, self._fleet, self._learned)
        now = self._now = max(self._now, observation.wall_at)
        fleet, config = self._fleet, self._config
        fleet.ingest(observation)
        slow.update(self._slow, fleet, config, now)
        findings, explained = user_code.find(fleet, self._roles, now)
        findings += crash.find(fleet, now, explained) + unpaged.find(fleet, now)
        all_stalls = stall.stalls(fleet, config)
        findings += stall.find_own(fleet, now, all_stalls)
        findings += collective.find(fleet, now, all_stalls)
        if any(f.fault_class in FAULTS_OF_OTHERS for f in findings):
            self._fault_wall = now
        findings += stall.find_dependent(fleet, now, all_stalls, self._fault_wall)
        findings += slow.find(self._slow, fleet, config, now) + lost.find(fleet, now)
        for node in observation.left:
            self._nodes.leave(node)
            self._nccl.leave(node)
        for event in observation.events:
            age = fleet.age(event)
            here = replace(event, wall_at=event.wall_at + fleet.offsets.get(event.node, 0.0))
            self._nodes.take(here, now, age)
            self._nccl.take(here, now, age)
        if not any(f.fault_class in FAULTS_OF_OTHERS for f in findings):  # else that is why the others wait
            findings += self._nccl.find(fleet, now)
        findings = lost_ranks.folded(self._nodes.join(findings, now))
        self._pulled = pulled.apply_collected_evidence(self._pulled, observation.pulled_findings, findings)
        findings = [*findings, *self._pulled]
        of_panels = self._take_panels(observation.panel_findings, findings, all_stalls, now)
        # Of the run and of no process: nobody is excused for it, and nobody's learning stops.
        told = [*findings, *self._collapse.find(fleet, now)]
        diagnoses = fusion.fuse(told, self._standing, self._fleet.roster.sizes(), now, of_panels)
        self._standing = {d.key: d for d in diagnoses}
        self._mark_quiet(findings)
        return diagnoses

    def _take_panels(
        self, fresh: tuple[Finding, ...], findings: list[Finding], all_stalls: list[stall.Stall], now: float
    ) -> list[Finding]:
        """What panels say and nothing explains. Somebody may stand still who is not named yet: new ones wait for that."""
        self._note_trouble(findings, now)
        for f in fresh:
            same = next((p for p in self._panels if p.finding.suspects == f.suspects), None)
            if same is None:
                self._panels.append(PanelFault(f, now))
            else:
                same.last_wall = now
        self._panels = [p for p in self._panels if now - p.last_wall <= SAME_FAULT_SECONDS and self._stands_alone(p)]
        kept = fusion.unexplained([p.finding for p in self._panels], findings, self._fleet.roster.sizes())
        self._panels = [p for p in self._panels if p.finding in kept]
        if not stall.emerging(stall.own(all_stalls)):
            for p in self._panels:
                p.told = True
        return [p.finding for p in self._panels if p.told]

    def _stands_alone(self, p: PanelFault) -> bool:
        """It is about processes that are there, and did not begin in the wake of something else."""
        since, until = self._trouble
        in_wake = since - ONSET_SECONDS <= p.finding.onset <= until + AFTERMATH_SECONDS
        return not in_wake and all(map(self._lives, p.finding.suspects))

    def _note_trouble(self, findings: list[Finding], now: float) -> None:
        since, until = self._trouble
        changed = self._fleet.changed_wall
        if findings or changed > until:
            began = min([f.onset for f in findings] + ([changed] if changed > until else []))
            self._trouble = (since if now - until <= AFTERMATH_SECONDS else began, now if findings else changed)

    def _lives(self, suspect: Suspect) -> bool:
        """Whether it is about processes that are still there; a whole node always is."""
        if not suspect.replica:
            return True
        ranks = self._fleet.roster.of_replica(suspect.replica).values()
        return bool(ranks) and all(s.incarnation == suspect.incarnation and not s.gone for s in ranks)

    def forget(self, replica: str, below_incarnation: int) -> None:
        """Incarnations of `replica` below this are being replaced: what happens to them from now on is wanted.

        Call it when the replacement is ordered, before the old process is killed.
        """
        self._fleet.forget(replica, below_incarnation, self._now)
        self._standing = {
            k: d
            for k, d in self._standing.items()
            if not any(s.replica == replica and (s.incarnation or 0) < below_incarnation for s in d.suspects)
        }

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        """Healthy again: this replica, at this incarnation or later, is there and has been seen to finish work.

        An idle one counts once it has worked under this name. The sentence says what was seen, or what is missing.
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
        return True, f"{lead.name()} has finished {lead.worked} units of work and is in phase {lead.phase}"

    def _missing(self, s: MonitoredProcess) -> str:
        """What keeps this process from counting as healthy; empty when nothing does."""
        if s.gone:
            return "its process is gone"
        if s.sample is None:
            return "registered, not sampled yet"
        if self._now - s.seen_wall > FRESH_SECONDS:
            return f"not seen for {self._now - s.seen_wall:.1f} s"
        for d in self._standing.values():
            if fusion.on_panels_alone(d):
                continue  # it is not as it was; whether it works is seen
            if any(who.replica == s.replica and who.incarnation == s.incarnation for who in d.suspects):
                return f"a finding stands against it ({d.fault_class})"
        if not s.worked:
            return f"in phase {s.phase}, no unit of work finished yet"
        if s.phase == Phase.START:
            return "in phase start"
        if s.progress_due and s.phase in WORK_PHASES and s.stall.wall >= self._config.hang_floor_seconds:
            return f"stands still in phase {s.phase} for {s.stall.wall:.1f} s"
        return ""

    def processes(self) -> list[MonitoredProcess]:
        """Everybody under watch now, the newest of each name."""
        return list(self._fleet.current())

    def deadlines(self) -> dict[str, str]:
        """Deadline in force for each `role/phase` that has learned one, in words."""
        gaps = self._fleet.gaps
        known = {key: gaps.p99(*key) for key in gaps.values}
        return {
            f"{role}/{phase}": learned_deadline(p99, self._config).text
            for (role, phase), p99 in sorted(known.items())
            if p99 is not None
        }

    def window(self, suspects: Iterable[Suspect] = ()) -> dict[str, Any]:
        """What was seen lately with the state before it, as JSON: store it with a diagnosis, `replay_window` decides
        again from it. It covers between half of `window_seconds` and all of it; of a large fleet those whom `suspects`
        name, and some of their peers."""
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
        """What was diagnosed after each observation, from `start` (of a window) or from nothing."""
        detector = cls(config, roles)
        if start is not None:
            detector._restore(start)
        return [detector.observe(o) for o in observations]

    @classmethod
    def replay_window(cls, window: Mapping[str, Any]) -> list[list[Diagnosis]]:
        """Decides again from a stored window.

        Raises:
            ValueError: the window is of another version, or damaged.
        """
        if window.get("version") != WINDOW_VERSION:
            raise ValueError(f"window: version {window.get('version')!r} is not {WINDOW_VERSION}")
        observations = [Observation.from_dict(o) for o in window["observations"]]
        config = DetectorConfig.model_validate(window["config"])
        return cls.replay(config, window["roles"], observations, window["start"])

    @classmethod
    def resumed(cls, config: DetectorConfig, roles: Mapping[str, int] | None, state: dict[str, Any]) -> Self:
        """A detector that knows what another had learned (`state`): a restarted watcher need not learn again."""
        detector = cls(config, roles)
        detector._restore(state)
        return detector

    def state(self) -> dict[str, Any]:
        """Everything learned and standing, as JSON."""
        return {**self._learned(), "subjects": [encode(s) for s in self._fleet.subjects.values()]}

    def state_in_parts(self, subjects_at_once: int) -> Iterator[str | None]:
        """`state` as text, made of a few subjects at a time; None until it is done. Observations may come in between:
        each subject is as it was when its turn came."""
        texts: list[str] = []
        keys = list(self._fleet.subjects)
        for begin in range(0, len(keys), subjects_at_once):
            there = (self._fleet.subjects.get(key) for key in keys[begin : begin + subjects_at_once])
            texts += [json.dumps(encode(s)) for s in there if s is not None]
            if begin + subjects_at_once < len(keys):
                yield None
        yield f'{json.dumps(self._learned())[:-1]}, "subjects": [{", ".join(texts)}]}}'

    def _learned(self) -> dict[str, Any]:
        """All of the state but the subjects."""
        fleet = {
            f.name: encode(getattr(self._fleet, f.name))
            for f in fields(MonitoredProcesses)
            if f.init and f.name != "subjects"
        }
        return {
            "fleet": {"@": "MonitoredProcesses", **fleet},
            "slow": encode(self._slow),
            "nodes": encode(self._nodes),
            "nccl": encode(self._nccl),
            "standing": encode(list(self._standing.values())),
            "fault_wall": self._fault_wall,
            "panels": [[p.finding.to_dict(), p.last_wall, p.told] for p in self._panels],
            "trouble": list(self._trouble),
            "pulled": [f.to_dict() for f in self._pulled],
            "collapse": self._collapse.to_dict(),
            "now": self._now,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._fleet, self._slow = decode(state["fleet"]), decode(state["slow"])
        if "subjects" in state:  # states of before 2026-11-22 hold them in the fleet
            subjects: list[MonitoredProcess] = [decode(s) for s in state["subjects"]]
            self._fleet = replace(self._fleet, subjects={s.key: s for s in subjects})
        self._nodes = decode(state["nodes"]) if "nodes" in state else NodeFaults()
        self._nccl = decode(state["nccl"]) if "nccl" in state else StalledCommunicators()
        self._standing = {d.key: d for d in decode(state["standing"])}
        self._fault_wall, self._now = state["fault_wall"], state["now"]
        self._pulled = [Finding.from_dict(f) for f in state.get("pulled", ())]
        self._collapse = CollapseWatch.from_dict(state["collapse"]) if "collapse" in state else CollapseWatch()
        self._panels = [PanelFault(Finding.from_dict(f), *more) for f, *more in state.get("panels", ())]
        since, until = state.get("trouble", (0.0, 0.0))
        self._trouble = (since, until)

    def _mark_quiet(self, findings: list[Finding]) -> None:
        """Nothing is learned from those under a finding, nor from those who wait while one stands."""
        quiet = {
            (s.replica, s.rank, s.incarnation)
            for f in findings
            for s in f.suspects
            if s.replica and s.rank is not None and s.incarnation is not None
        }
        if any(f.fault_class in FAULTS_OF_OTHERS for f in findings):
            quiet |= {s.key for s in self._fleet.current() if s.phase not in WORK_PHASES}
        self._fleet.quiet = quiet
