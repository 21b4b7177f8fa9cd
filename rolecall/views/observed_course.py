"""The course of a job that rolecall only watches, over its steps: when each was reached, reward, loss, policy health.

Such a job commits no steps to the journal. Its watch keeps a bounded course in one flag instead: with more points than
`POINTS_MAX` each second one is left out. A job that goes back, as to a checkpoint, does those steps again, so its
course is cut there.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import HEALTH_SIGNS, ProcessSample, is_instrumented

FLAG = "observed_course"
POINTS_MAX = 200
VALUES = ("loss", "reward")
TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoursePoint:
    """`step`: the one that is worked on. `at`: wall seconds, when the one before it ended. `values`: `loss`, `reward`
    and those of `HEALTH_SIGNS` that the job reports, the newest at that time; a mean over its ranks."""

    step: int
    at: float
    values: Mapping[str, float] = field(default_factory=dict)


def leading_role(samples: Iterable[ProcessSample]) -> str:
    """The role whose steps are the job's: the one that reports a reward, else trainers, else any with steps."""
    stepping = [s for s in samples if s.step >= 0]
    rewarded = sorted({s.role for s in stepping if not math.isnan(s.reward)})
    roles = rewarded or sorted({s.role for s in stepping}, key=lambda role: (role != TRAINER, role))
    return roles[0] if roles else ""


def point_of(samples: Sequence[ProcessSample]) -> CoursePoint | None:
    """Where a job stands. `samples`: the newest of each process that lives. None: no step is known."""
    reporting = [s for s in samples if is_instrumented(s)]
    role = leading_role(reporting)
    leaders = [s for s in reporting if s.role == role and s.step >= 0]
    if not leaders:
        return None
    step = max(s.step for s in leaders)
    at = max(s.wall_at - max(0.0, s.at - s.progress_at) if s.progress else s.wall_at for s in leaders if s.step == step)
    values = {}
    for name in (*VALUES, *HEALTH_SIGNS):
        known = [v for s in reporting if math.isfinite(v := getattr(s, name)) and (name in VALUES or s.healths)]
        if known:
            values[name] = sum(known) / len(known)
    return CoursePoint(step=step, at=at, values=values)


def step_at(course: Sequence[CoursePoint], at: float) -> int | None:
    """The step that was worked on at `at` (wall seconds), between two points by their times. None: before the first."""
    after = bisect_right(course, at, key=lambda p: p.at)
    if after == 0:
        return None
    before = course[after - 1]
    if after == len(course):
        return before.step
    following = course[after]
    share = (at - before.at) / (following.at - before.at)
    return before.step + int(share * (following.step - before.step))


class Course:
    """Owned by one thread."""

    def __init__(self, points: Iterable[CoursePoint] = ()) -> None:
        self._points = list(points)
        self._stride = 1

    def take(self, samples: Mapping[ProcessId, ProcessSample]) -> None:
        """`samples`: the newest of each process that lives."""
        point = point_of(tuple(samples.values()))
        if point is None:
            return
        while self._points and self._points[-1].step > point.step:
            self._points.pop()
        # The newest point moves until the next one is due.
        last_but_one = self._points[-2].step if len(self._points) > 1 else None
        if self._points and (
            self._points[-1].step == point.step
            or (last_but_one is not None and point.step - last_but_one < self._stride)
        ):
            self._points.pop()
        self._points.append(point)
        if len(self._points) > POINTS_MAX:
            self._points = [*self._points[:-1:2], self._points[-1]]
            self._stride *= 2

    @property
    def points(self) -> tuple[CoursePoint, ...]:
        return tuple(self._points)


def to_json(points: Iterable[CoursePoint]) -> str:
    rows = [[p.step, round(p.at, 3), {n: float(f"{v:.6g}") for n, v in p.values.items()}] for p in points]
    return json.dumps(rows, separators=(",", ":"))


def from_json(text: str | None) -> tuple[CoursePoint, ...]:
    """Empty for a text that is none of `to_json`."""
    try:
        return tuple(map(_point, json.loads(text or "[]")))
    except (ValueError, TypeError, AttributeError):
        return ()


def _point(row: Any) -> CoursePoint:
    step, at, values = row
    return CoursePoint(step=int(step), at=float(at), values={str(n): float(v) for n, v in values.items()})
