"""Deadlines learned per (role, phase): max(floor, k x own P99), capped at the ceiling.

A sample is the effective time (run delay subtracted) between two advances of progress. Only completed gaps are learned,
and none from a process with a standing finding: faulty behaviour must not enter the baseline.
"""

from collections import deque
from dataclasses import dataclass, field

from rolecall.core.config.job import DetectorConfig
from rolecall.core.telemetry import PHASES_WITHOUT_DUE_PROGRESS

BEATS = "(beats)"
"""Pseudo-phase under which gaps between heartbeats are stored."""
GAPS_KEPT = 512
"""Gaps kept per (role, phase): the P99 of 512 values depends on the five largest."""
GAPS_MIN = 8
"""With fewer gaps the P99 is unknown: the role's other phases, or the first-unit deadline, are used instead."""
REFRESH_EVERY = 16
"""New gaps between two recomputations of the P99: sorting 512 numbers for each sample is too expensive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    seconds: float
    text: str  # its derivation, for `because`
    learned: bool


@dataclass(slots=True)
class ProgressGaps:
    values: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    cached: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, role: str, phase: str, seconds: float) -> None:
        key = (role, phase)
        kept = self.values.get(key)
        if kept is None:
            kept = self.values[key] = deque(maxlen=GAPS_KEPT)
            self.counts[key] = 0
        kept.append(seconds)
        self.counts[key] += 1
        if self.counts[key] % REFRESH_EVERY == 0 or self.counts[key] <= REFRESH_EVERY:
            self.cached[key] = _p99(kept)

    def p99(self, role: str, phase: str) -> float | None:
        """Seconds, or None with fewer than `GAPS_MIN` gaps."""
        key = (role, phase)
        return self.cached[key] if self.counts.get(key, 0) >= GAPS_MIN else None

    def p99_of_role(self, role: str) -> float | None:
        """The largest P99 of the role's phases: used for a phase too short to have been sampled."""
        lawful_waits = PHASES_WITHOUT_DUE_PROGRESS | {BEATS}
        keys = [k for k in self.values if k[0] == role and k[1] not in lawful_waits]
        known = [self.cached[k] for k in keys if self.counts[k] >= GAPS_MIN]
        return max(known) if known else None


def _p99(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def learned_deadline(p99: float | None, config: DetectorConfig) -> Deadline:
    """max(floor, k x P99), capped at the ceiling; without a P99, the first-unit deadline."""
    if p99 is None:
        seconds = config.first_unit_seconds
        return Deadline(seconds=seconds, text=f"{seconds:g} s, no history yet", learned=False)
    floor, factor = config.hang_floor_seconds, config.hang_p99_factor
    seconds = min(config.hang_ceiling_seconds, max(floor, factor * p99))
    return Deadline(seconds=seconds, text=f"{seconds:.1f} s = max({floor:g}, {factor:g} x P99 {p99:.2f})", learned=True)
