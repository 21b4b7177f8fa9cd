"""Policy collapse: a finding about the run, not about a machine.

    fleet -> training history (one point per step) -> collapse_symptoms -> one finding while they last

If trainer and engine disagree on tokens of the same policy version, weights or numerics are wrong: `silent_corruption`
between two roles. The log ratio is the maximum over all engines and does not identify one, so no replica is named.
Otherwise learning rate, reward or data are at fault: `user_code`. On-call is paged; replacing a machine would not help,
and a false alarm must not stop a run of several days (`recovery.policy`). Machine faults are independent diagnoses:
neither explains the other, because a run resumed from an older checkpoint is compared with its history up to there.

A finding stands until `QUIET_STEPS` consecutive steps show no symptom, or the run goes back to before its onset.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.policy_health import LOG_RATIO_ALARM
from rolecall.core.telemetry import Phase
from rolecall.detector.base.findings import ADVISES, COLLAPSE, settles
from rolecall.detector.live.collapse_tests import CollapseSymptom, collapse_symptoms
from rolecall.detector.live.findings import finding
from rolecall.detector.live.fleet import MonitoredProcesses
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.detector.live.training_history import TrainingHistory, TrainingStepPoint

QUIET_STEPS: Final = 16
"""Twice the steps needed to detect a symptom, so that an intermittent symptom is one incident."""
CONFIDENCE: Final = {FaultClass.SILENT_CORRUPTION: 0.9, FaultClass.USER_CODE: 0.7}
"""A difference of log-probabilities is measured; the cause of a drop in reward is inferred."""


@dataclass(slots=True)
class CollapseWatch:
    """Collapse state of one run."""

    course: TrainingHistory = field(default_factory=TrainingHistory)
    told: Finding | None = None
    since_step: int = 0  # onset of `told`
    quiet: int = 0  # steps since the last symptom

    def find(self, fleet: MonitoredProcesses, now: float) -> list[Finding]:
        if self.course.take(fleet):
            self._judge(fleet, now)
        return [self.told] if self.told else []

    def _judge(self, fleet: MonitoredProcesses, now: float) -> None:
        points = self.course.done
        if self.told and (not points or points[-1].step < self.since_step):
            self.told = None
        seen = collapse_symptoms(points)
        if seen:
            self.quiet = 0
            if self.told is None or _graver(seen, self.told):
                made = _finding(seen, points, fleet, now)
                self.told, self.since_step = made, min(sign.since.step for sign in seen)
        elif self.told:
            self.quiet += 1
            if self.quiet >= QUIET_STEPS:
                self.told = None

    def to_dict(self) -> dict[str, Any]:
        told = self.told.to_dict() if self.told else None
        return {"course": self.course.to_dict(), "told": told, "since_step": self.since_step, "quiet": self.quiet}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        return cls(
            course=TrainingHistory.from_dict(d["course"]),
            told=Finding.from_dict(d["told"]) if d["told"] else None,
            since_step=d["since_step"],
            quiet=d["quiet"],
        )


class CollapseStage(Stage):
    name = "collapse"

    def __init__(self) -> None:
        self._watch = CollapseWatch()

    def evaluate(self, tick: Tick) -> list[Finding]:
        return self._watch.find(tick.fleet, tick.now)

    def state(self) -> CollapseWatch:
        return self._watch

    def restore(self, state: CollapseWatch) -> None:
        self._watch = state


def _class(seen: Sequence[CollapseSymptom]) -> FaultClass:
    disagree = any(sign.kind == "engines_disagree" for sign in seen)
    return FaultClass.SILENT_CORRUPTION if disagree else FaultClass.USER_CODE


def _graver(seen: Sequence[CollapseSymptom], told: Finding) -> bool:
    return _class(seen) is FaultClass.SILENT_CORRUPTION and told.fault_class is not FaultClass.SILENT_CORRUPTION


def _finding(
    seen: Sequence[CollapseSymptom], points: Sequence[TrainingStepPoint], fleet: MonitoredProcesses, now: float
) -> Finding:
    fault = _class(seen)
    began = min((sign.since for sign in seen), key=lambda p: p.step)
    what = "; ".join(sign.text for sign in seen)
    if fault is FaultClass.SILENT_CORRUPTION:
        because, more = _of_weights(what, began, *_roles(fleet))
    else:
        because, more = _of_the_job(what, began, points)
    return finding(
        COLLAPSE,
        [],
        fault,
        onset=began.wall_at,
        now=now,
        confidence=CONFIDENCE[fault],
        because=because,
        evidence=(*(sign.evidence() for sign in seen), *more),
        about=f":{COLLAPSE}",  # no role: it must not explain crashes and hangs
    )


def _of_weights(what: str, began: TrainingStepPoint, trainers: str, engines: str) -> tuple[str, tuple[Evidence, ...]]:
    because = (
        f"weights or numerics differ between {trainers} and {engines}: {what}; these numbers do not identify the "
        "replica, so none is evicted"
    )
    settle = (
        f"compare the digest of the weights of each replica of {engines}, and its output for one fixed text, with "
        f"{trainers}: the replica that differs is wrong"
    )
    advice = f"find and replace the replica whose weights differ; steps from {began.step} on were trained on its tokens"
    return because, (settles(settle), Evidence(kind=ADVISES, text=advice))


def _of_the_job(
    what: str, began: TrainingStepPoint, points: Sequence[TrainingStepPoint]
) -> tuple[str, tuple[Evidence, ...]]:
    because = f"the policy collapsed, not a machine fault: {what}; {_engines_agree(points, began.step)}"
    advice = (
        f"check learning rate, reward function and data of step {began.step}, and what changed before it; "
        f"save a checkpoint of an earlier step before it is rotated out"
    )
    return because, (Evidence(kind=ADVISES, text=advice),)


def _engines_agree(points: Sequence[TrainingStepPoint], since: int) -> str:
    """Clause on engine-trainer agreement. Steps sampled only from versions that no trainer holds have no log ratio."""
    ratios = [(p.step, v) for p in points if (v := p.get("log_ratio_max")) == v][-8:]
    if not ratios:
        return "agreement between engines and trainers is unknown (no log ratio reported)"
    (last, _), largest = ratios[-1], max(v for _, v in ratios)
    if last < since:
        return (
            f"engines and trainers last reported agreement about tokens of the same version at step {last} "
            f"(within {largest:.1g})"
        )
    if largest > LOG_RATIO_ALARM:
        return (
            f"engines and trainers differ about tokens of the same version by up to {largest:.1g}, too rarely or too "
            "usual here to conclude that weights are wrong"
        )
    return f"engines and trainers agree about tokens of the same version (within {largest:.1g})"


def _roles(fleet: MonitoredProcesses) -> tuple[str, str]:
    """Names of the roles that report entropy and of the roles that generate, for `because`."""
    trainers = {s.role for s in fleet.current() if s.sample is not None and s.sample.entropy == s.sample.entropy}
    engines = {s.role for s in fleet.current() if s.phase == Phase.GENERATE or Phase.GENERATE in s.phases_done}
    return _named(trainers, "the trainers"), _named(engines - trainers, "the engines")


def _named(roles: set[str], otherwise: str) -> str:
    return f"role {' and '.join(sorted(roles))}" if roles else otherwise
