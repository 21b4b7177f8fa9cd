"""Training history of a run: one point per optimizer step, from the values that trainers report.

The axis is steps, not seconds: waiting for a repair does not affect the policy. Trainers and their controller report
the same values for a step; a point merges all reports and is complete when a later step is reported. When the newest
step of all live processes decreases, the run resumed from an older checkpoint, and later points are discarded.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

from rolecall.core.telemetry import ProcessSample
from rolecall.detector.live.fleet import MonitoredProcesses

SIGNS = (
    *("reward", "entropy", "kl_sampler", "response_length", "truncated_fraction", "filtered_fraction", "log_ratio_max"),
)
"""Fields of ProcessSample kept in the history. NaN: unknown at that step."""
OF_OTHERS = frozenset({"reward", "filtered_fraction"})
"""Fields that are not reported by trainers alone: reported by the sampler, or missing in a step without a finished
response."""
STEPS_KEPT = 256
"""Longer than a collapse takes, and small enough for every stored window (30 kB)."""

TELLERS_MAX = 8
"""Reports merged per step and observation. All trainers report the same values; several are read because an agent may
have sampled one in the middle of its update."""


@dataclass(slots=True)
class TrainingStepPoint:
    step: int
    wall_at: float  # time of the first report
    values: dict[str, float] = field(default_factory=dict)  # known SIGNS

    def get(self, sign: str) -> float:
        return self.values.get(sign, math.nan)


@dataclass(slots=True)
class TrainingHistory:
    """History of one run. The newest point may be incomplete."""

    points: deque[TrainingStepPoint] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT + 1))

    @property
    def done(self) -> Sequence[TrainingStepPoint]:
        """Complete points: all but the newest."""
        return list(islice(self.points, max(0, len(self.points) - 1)))

    def take(self, fleet: MonitoredProcesses) -> bool:
        """Adds the samples of the newest observation. Returns whether the complete points changed."""
        changed, newest, tellers = False, None, 0
        for subject in fleet.sampled:
            sample = subject.sample
            # Fast path: most processes of a large fleet report neither value.
            if sample is None or (sample.reward != sample.reward and sample.entropy != sample.entropy):
                continue
            step, last = step_of(sample), self.points[-1].step if self.points else -1
            if step < 0:
                continue  # before the first step
            if step < last:
                newest = _newest(fleet) if newest is None else newest
                if newest >= last:
                    continue  # it lags behind its peers
                self._go_back(newest)
                changed, last = True, self.points[-1].step if self.points else -1
            if step > last:
                self.points.append(TrainingStepPoint(step, sample.wall_at + subject.offset_seconds))
                changed, last, tellers = True, step, 0
            if step == last and tellers < TELLERS_MAX:
                _fill(self.points[-1], sample)
                tellers += 1
        return changed

    def _go_back(self, step: int) -> None:
        while self.points and self.points[-1].step >= step:
            self.points.pop()

    def to_dict(self) -> dict[str, Any]:
        return {"points": [[p.step, p.wall_at, dict(p.values)] for p in self.points]}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        made = cls()
        made.points.extend(TrainingStepPoint(step, wall_at, dict(values)) for step, wall_at, values in d["points"])
        return made


def step_of(sample: ProcessSample) -> int:
    """The step that the sample's values describe: trainers report them with the policy version that the step produced.
    Without versions, the current step is used, which is at most one later."""
    return sample.policy_version - 1 if sample.policy_version >= 0 else sample.step


def _newest(fleet: MonitoredProcesses) -> int:
    """Newest step of all live processes that report training values."""
    samples = (s.sample for s in fleet.current() if not s.gone and s.sample is not None)
    return max((step_of(p) for p in samples if p.reward == p.reward or p.entropy == p.entropy), default=-1)


def _fill(point: TrainingStepPoint, sample: ProcessSample) -> None:
    """Known values are kept unless a trainer now reports them as unknown: the earlier sample was taken mid-update."""
    is_trainer = not math.isnan(sample.entropy)
    for sign in SIGNS:
        value = getattr(sample, sign)
        if math.isfinite(value):
            point.values[sign] = value
        elif is_trainer and sign not in OF_OTHERS:
            point.values.pop(sign, None)
