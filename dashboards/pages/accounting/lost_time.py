"""ETTR per hour, and lost time by role, fault class and incident. Pure.

ETTR is 1 - lost time / time of each hour, with the lost time of `views/ettr.py`. A live run counts up to now, an ended
one up to its last committed step. `views.ettr.lost_seconds` attributes the lost time to incidents.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolecall.views.ettr import UNDETECTED, Loss, Step, losses, lost_seconds
from rolecall.views.incidents import MatchedIncidents

HOUR_SECONDS = 3600.0
SHORT_RUNS = ((1800.0, 60.0), (3 * HOUR_SECONDS, 300.0))
"""(run shorter than, slice length), seconds: a run of a few hours needs finer bars."""
SLICES_MAX = 24 * 62
"""Two months of hours; a longer run shows the newest."""
TOP_INCIDENTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One hour, or the part of it in which the run existed. Times are wall seconds."""

    start: float
    end: float
    ettr: float | None
    lost_seconds: float
    num_steps: int
    num_incidents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTimeShare:
    name: str
    seconds: float
    share: float  # of all lost time


@dataclass(frozen=True, slots=True, kw_only=True)
class EttrBreakdown:
    """`slice_seconds`: 3600, or less for a short run. `ettr`: of all slices."""

    slice_seconds: float
    slices: tuple[Slice, ...]
    ettr: float | None
    training_seconds: float
    lost_seconds: float
    by_role: tuple[LostTimeShare, ...]
    by_class: tuple[LostTimeShare, ...]
    by_incident: tuple[LostTimeShare, ...]  # the first ten
    num_replicas: int


def times(
    joined: MatchedIncidents,
    committed: Sequence[Step],
    *,
    began: float,
    until: float,
    num_rollouts: int,
    num_trainers: int,
) -> EttrBreakdown:
    """`began`, `until`: of training, wall seconds."""
    found = losses(joined, until)
    width = next((width for shorter, width in SHORT_RUNS if until - began < shorter), HOUR_SECONDS)
    first = max(began // width, (until // width) - SLICES_MAX + 1)
    edges = [max(began, (first + n) * width) for n in range(int(until // width - first) + 1)]
    ends = [*edges[1:], until]
    commits, opened = sorted(s.at for s in committed), sorted(s.opened_at for s in joined.stories)
    slices = []
    charged: list[tuple[str, Loss, float]] = []
    for start, end in zip(edges, ends, strict=True):
        if end <= start:
            continue
        lost = lost_seconds(found, start, end, num_rollouts=num_rollouts, num_trainers=num_trainers)
        charged += [(role, loss, seconds) for (role, loss), seconds in lost.items()]
        slices.append(
            Slice(
                start=start,
                end=end,
                ettr=1.0 - sum(lost.values()) / (end - start) if num_rollouts + num_trainers else None,
                lost_seconds=sum(lost.values()),
                # The last commit ends the counted time of an ended run and is included.
                num_steps=(bisect_right if end == until else bisect_left)(commits, end) - bisect_left(commits, start),
                num_incidents=bisect_left(opened, end) - bisect_left(opened, start),
            )
        )
    total = sum(s.end - s.start for s in slices)
    lost_total = sum(seconds for _, _, seconds in charged)
    return EttrBreakdown(
        slice_seconds=width,
        slices=tuple(slices),
        ettr=1.0 - lost_total / total if total > 0 and num_rollouts + num_trainers else None,
        training_seconds=total,
        lost_seconds=lost_total,
        by_role=_ranked((role, seconds) for role, _, seconds in charged),
        by_class=_ranked((loss.fault, seconds) for _, loss, seconds in charged),
        by_incident=_ranked((loss.incident_id or UNDETECTED, seconds) for _, loss, seconds in charged)[:TOP_INCIDENTS],
        num_replicas=num_rollouts + num_trainers,
    )


def _ranked(parts: Iterable[tuple[str, float]]) -> tuple[LostTimeShare, ...]:
    """Sums by name, largest first."""
    seconds: dict[str, float] = {}
    for name, part in parts:
        seconds[name] = seconds.get(name, 0.0) + part
    total = sum(seconds.values())
    ranked = sorted(seconds.items(), key=lambda kv: (-kv[1], kv[0]))
    return tuple(LostTimeShare(name=n, seconds=s, share=s / total if total else 0.0) for n, s in ranked)
