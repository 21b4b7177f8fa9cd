"""The course of a run's training, step by step: what its trainers said of each optimizer step, one point a step.

Steps and not seconds: a run that waits for a repair has no worse policy for it. Trainers, and their controller, say the
same of a step; a point is made of whatever any of them said, and is done when a later step is heard of. When the
newest step of all who live goes back, the run went on from an older checkpoint: what came after that never was.
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
"""Fields of ProcessSample that a course keeps. NaN: unknown at that step."""
OF_OTHERS = frozenset({"reward", "filtered_fraction"})
"""Not the trainers' alone: the sampler's, or of a step of which no answer was over."""
STEPS_KEPT = 256
"""Longer than a collapse takes, and small enough to be part of every stored window (30 kB)."""

TELLERS_MAX = 8
"""Of one step, in one observation. A thousand trainers say the same; a few more than one, for an agent may have read
one of them in the middle of its update."""


@dataclass(slots=True)
class TrainingStepPoint:
    step: int
    wall_at: float  # when it was first heard of
    values: dict[str, float] = field(default_factory=dict)  # of SIGNS, those that are known

    def get(self, sign: str) -> float:
        return self.values.get(sign, math.nan)


@dataclass(slots=True)
class TrainingHistory:
    """Of one run. The newest point may not be done yet."""

    points: deque[TrainingStepPoint] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT + 1))

    @property
    def done(self) -> Sequence[TrainingStepPoint]:
        """Points of steps after which another was heard of."""
        return list(islice(self.points, max(0, len(self.points) - 1)))

    def take(self, fleet: MonitoredProcesses) -> bool:
        """Reads those of whom the newest observation had a sample. Whether the done points are others than before."""
        changed, newest, tellers = False, None, 0
        for subject in fleet.sampled:
            sample = subject.sample
            # Nearly all of a large fleet say neither, or the same as those before them.
            if sample is None or (sample.reward != sample.reward and sample.entropy != sample.entropy):
                continue
            step, last = step_of(sample), self.points[-1].step if self.points else -1
            if step < 0:
                continue  # before the first one
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
    """Number of the step that its values are of: trainers tell them with the version that the step made. Who has no
    versions is taken by the step it works on, which is at most one further."""
    return sample.policy_version - 1 if sample.policy_version >= 0 else sample.step


def _newest(fleet: MonitoredProcesses) -> int:
    """Of all who live and tell of their training."""
    samples = (s.sample for s in fleet.current() if not s.gone and s.sample is not None)
    return max((step_of(p) for p in samples if p.reward == p.reward or p.entropy == p.entropy), default=-1)


def _fill(point: TrainingStepPoint, sample: ProcessSample) -> None:
    """What is known stays known, unless a trainer says otherwise: the sample before was taken amid its update."""
    is_trainer = not math.isnan(sample.entropy)
    for sign in SIGNS:
        value = getattr(sample, sign)
        if math.isfinite(value):
            point.values[sign] = value
        elif is_trainer and sign not in OF_OTHERS:
            point.values.pop(sign, None)
