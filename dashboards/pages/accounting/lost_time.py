"""ETTR per hour, and lost time by role, fault class and incident. Pure.

ETTR is defined by `views.ettr.ettr`, applied to each hour. A live run counts up to now, an ended one up to its last
committed step. `views.lost_time.lost_between` attributes the lost time to incidents.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolecall.views.ettr import Loss, Step, ettr, losses
from rolecall.views.incidents import MatchedIncidents
from rolecall.views.lost_time import CausedLoss, lost_between

HOUR_SECONDS = 3600.0
SHORT_RUNS = ((1800.0, 60.0), (3 * HOUR_SECONDS, 300.0))
"""(run shorter than, slice length), seconds: a run of a few hours needs finer bars."""
SLICES_MAX = 24 * 62
"""Two months of hours; a longer run shows the newest."""
UNDETECTED = "undetected"
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
    """`slice_seconds`: 3600, or less for a short run. `ettr`: of the whole run."""

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
    caused = _caused(joined, until)
    classes = {s.incident_id: str(s.diagnosis.fault_class) for s in joined.stories}
    width = next((width for shorter, width in SHORT_RUNS if until - began < shorter), HOUR_SECONDS)
    first = max(began // width, (until // width) - SLICES_MAX + 1)
    edges = [max(began, (first + n) * width) for n in range(int(until // width - first) + 1)]
    ends = [*edges[1:], until]
    commits, opened = sorted(s.at for s in committed), sorted(s.opened_at for s in joined.stories)
    slices, lost = [], dict[tuple[str, str], float]()
    effective = 0.0
    for start, end in zip(edges, ends, strict=True):
        if end <= start:
            continue
        here = [c for c in caused if c.loss.since < end and c.loss.until > start]
        ratio = ettr(start, end, [c.loss for c in here], num_rollouts=num_rollouts, num_trainers=num_trainers)
        shares = lost_between(start, end, here, num_rollouts=num_rollouts, num_trainers=num_trainers)
        for cause, seconds in shares.items():
            lost[cause] = lost.get(cause, 0.0) + seconds
        effective += (ratio or 0.0) * (end - start)
        slices.append(
            Slice(
                start=start,
                end=end,
                ettr=ratio,
                lost_seconds=(1.0 - ratio) * (end - start) if ratio is not None else 0.0,
                # The last commit ends the counted time of an ended run and is included.
                num_steps=(bisect_right if end == until else bisect_left)(commits, end) - bisect_left(commits, start),
                num_incidents=bisect_left(opened, end) - bisect_left(opened, start),
            )
        )
    total = sum(s.end - s.start for s in slices)
    return EttrBreakdown(
        slice_seconds=width,
        slices=tuple(slices),
        ettr=effective / total if total > 0 and num_rollouts + num_trainers else None,
        training_seconds=total,
        lost_seconds=sum(lost.values()),
        by_role=_ranked((role, seconds) for (role, _), seconds in lost.items()),
        by_class=_ranked((classes.get(which, which), seconds) for (_, which), seconds in lost.items()),
        by_incident=_ranked((which, seconds) for (_, which), seconds in lost.items())[:TOP_INCIDENTS],
        num_replicas=num_rollouts + num_trainers,
    )


def _caused(joined: MatchedIncidents, end: float) -> list[CausedLoss]:
    """Every loss with its incident."""
    found = []
    for story in joined.stories:
        alone = MatchedIncidents(stories=(story,), missed=(), false_alarms=())
        found += [CausedLoss(loss=loss, fault=story.incident_id) for loss in losses(alone, end)]
    unseen: Sequence[Loss] = losses(MatchedIncidents(stories=(), missed=joined.missed, false_alarms=()), end)
    return found + [CausedLoss(loss=loss, fault=UNDETECTED) for loss in unseen]


def _ranked(parts: Iterable[tuple[str, float]]) -> tuple[LostTimeShare, ...]:
    """Sums by name, largest first."""
    seconds: dict[str, float] = {}
    for name, part in parts:
        seconds[name] = seconds.get(name, 0.0) + part
    total = sum(seconds.values())
    ranked = sorted(seconds.items(), key=lambda kv: (-kv[1], kv[0]))
    return tuple(LostTimeShare(name=n, seconds=s, share=s / total if total else 0.0) for n, s in ranked)
