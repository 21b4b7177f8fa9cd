"""How fast one process of a watched job goes, from its samples: seconds of a step, its own seconds in a unit of work,
and the phases in which its time goes. Over the last minute, or the last few steps of a job with longer ones. Pure.
"""

from collections import deque
from dataclasses import dataclass, field

from rolecall.core.telemetry import Phase, ProcessSample, is_instrumented

WINDOW_SECONDS = 60.0
POINT_SECONDS = 1.0
"""Time between two points of a window: a job of a thousand steps a second needs no more."""
PART_SECONDS = 10.0
"""Least time of one part of the phases. It ends with a step, so that the parts hold whole steps."""
PARTS_MAX = 6


@dataclass(slots=True)
class _Rate:
    """A total per count, over the points of the last minute, at least the last two."""

    points: deque[tuple[float, int, float]] = field(default_factory=deque)  # seconds, count, total

    def take(self, at: float, count: int, total: float) -> None:
        points = self.points
        if points and (count < points[-1][1] or total < points[-1][2]):
            points.clear()  # it counts anew, as after a checkpoint was loaded
        if points and (count == points[-1][1] or at - points[-1][0] < POINT_SECONDS):
            return
        points.append((at, count, total))
        while len(points) > 2 and points[1][0] < at - WINDOW_SECONDS:
            points.popleft()

    @property
    def each(self) -> float | None:
        """None: not known yet."""
        if len(self.points) < 2:
            return None
        (_, few, less), (_, many, more) = self.points[0], self.points[-1]
        return (more - less) / (many - few)


@dataclass(slots=True)
class RankPace:
    """Of one process; samples are taken in their order. Times are those of its node, in seconds."""

    steps: _Rate = field(default_factory=_Rate)
    own: _Rate = field(default_factory=_Rate)
    parts: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=PARTS_MAX))
    part: dict[str, float] = field(default_factory=dict)  # phase -> seconds, since the last part ended
    last: tuple[float, str, int] | None = None  # time, phase, step of the sample before

    def take(self, sample: ProcessSample) -> None:
        if not is_instrumented(sample) or not sample.alive or not sample.page_ok:
            self.last = None
            return
        if sample.step >= 0 and sample.progress:
            self.steps.take(sample.at, sample.step, sample.progress_at)
        if sample.work_units:
            self.own.take(sample.at, sample.work_units, sample.busy_seconds)
        if self.last is not None and sample.at > self.last[0]:
            at, phase, step = self.last
            entered = min(max(sample.phase_since, at), sample.at)
            for name, spent in ((phase, entered - at), (str(sample.phase), sample.at - entered)):
                if spent > 0 and name != Phase.START:  # before the first unit of work
                    self.part[name] = self.part.get(name, 0.0) + spent
            # Of a process without steps any time ends a part.
            if sum(self.part.values()) >= PART_SECONDS and (sample.step < 0 or sample.step != step):
                self.parts.append(self.part)
                self.part = {}
        if self.last is None or sample.at > self.last[0]:
            self.last = sample.at, str(sample.phase), sample.step

    @property
    def step_seconds(self) -> float | None:
        return self.steps.each

    @property
    def own_seconds(self) -> float | None:
        """In a unit of work, without what it waits for other ranks."""
        return self.own.each

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        """(phase, share of the time), the largest first; they add up to 1. Empty: not known yet."""
        spent: dict[str, float] = {}
        for part in self.parts or (self.part,):
            for name, seconds in part.items():
                spent[name] = spent.get(name, 0.0) + seconds
        total = sum(spent.values())
        return tuple(sorted(((name, s / total) for name, s in spent.items()), key=lambda kv: (-kv[1], kv[0])))
