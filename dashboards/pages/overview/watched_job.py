"""What the Overview page shows of a job that rolecall only watches: its ranks, the worst first; where their time goes;
its course over the steps; what can be seen of it, and why not the rest. Pure.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

from rolecall.core.ids import role_of
from rolecall.core.telemetry import PHASES_WITHOUT_DUE_PROGRESS, Phase
from rolecall.core.text import in_words, percent, plain, seconds
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.progress import Bucket
from rolecall.dashboards.data.reader import JournalSnapshot
from rolecall.dashboards.pages.style import Bar, Cell, Mark, Prose, Segment
from rolecall.views.lifetimes import replica_order
from rolecall.views.observed_capabilities import NO, NONE, PARTLY, YES, ObservedCapability
from rolecall.views.observed_course import VALUES, CoursePoint
from rolecall.views.observed_ranks import ObservedRank

LATE_STEPS, LATE_SECONDS = 5.0, 10.0
"""A rank stands still after so many of its steps without progress, and not before so long. Only a hint to look there:
the detectors learn their own deadlines, and say so in an incident."""
SLOW_RATIO = 1.5
"""Own time in a unit of work, against the median of the other ranks of the role."""
KINDS = ("bad", "warn", "note", "good", "soft")
"""Of a rank, worst first."""
GENERATING = frozenset({str(Phase.GENERATE), str(Phase.SCORE)})
BY = {"hooks": "torch's hooks", "integration": "its framework", "reporter": "its own calls", "": ""}
PHASE_COLOURS = {
    "step": "#3b7dd8", "compute": "#3b7dd8", "generate": "#c2711c", "score": "#8e5bd1", "update": "#1f9e89",
    "wait": "#8f98a3", "idle": "#b9c0c8", "sleep": "#b9c0c8", "reduce": "#5656c0", "optimizer": "#3c9cbd",
    "checkpoint": "#8a7350", "publish": "#5c9a45", "copy": "#b04fa8", "start": "#b8931c",
}  # fmt: skip
OTHER_COLOUR = "#6b7684"
MISSING_ORDER = {NO: 0, PARTLY: 1}


@dataclass(frozen=True, slots=True)
class RankState:
    kind: str  # of KINDS
    word: str


def rank_states(
    ranks: Sequence[ObservedRank], named: AbstractSet[tuple[str, int | None]], now: float
) -> dict[ObservedRank, RankState]:
    """`named`: (replica, rank) of the suspects of open incidents; rank None: the whole replica. `now`: wall seconds."""
    own: dict[str, list[float]] = {}
    for r in ranks:
        if r.own_seconds is not None and r.alive_at(now):
            own.setdefault(role_of(r.replica), []).append(r.own_seconds)
    ordered = {role: sorted(values) for role, values in own.items()}
    return {r: _state(r, named, now, ordered.get(role_of(r.replica), ())) for r in ranks}


def _state(
    rank: ObservedRank, named: AbstractSet[tuple[str, int | None]], now: float, own: Sequence[float]
) -> RankState:
    suspect = "suspect, " if {(rank.replica, rank.rank), (rank.replica, None)} & named else ""
    if not rank.is_alive:
        return RankState("bad" if suspect else "soft", f"{suspect}has ended")
    if not rank.alive_at(now):
        return RankState("bad", f"{suspect}not seen for {age(now - rank.seen_at)}")
    if rank.is_stopped:
        return RankState("bad", f"{suspect}stopped by a signal")
    silent = 0.0 if rank.progress_at is None else rank.seen_at - rank.progress_at
    is_due = rank.step_seconds is not None and rank.phase not in PHASES_WITHOUT_DUE_PROGRESS
    if rank.step_seconds is not None and is_due and silent > max(LATE_SECONDS, LATE_STEPS * rank.step_seconds):
        return RankState("bad" if suspect else "warn", f"{suspect}no progress for {age(silent)}")
    ratio = _ratio(rank, own)
    if ratio is not None and ratio >= SLOW_RATIO:
        return RankState("bad" if suspect else "warn", f"{suspect}{ratio:.1f} times the time of its peers")
    if suspect:
        return RankState("bad", "suspect")
    return RankState("note", "starting") if rank.phase == Phase.START else RankState("good", "works")


def _ratio(rank: ObservedRank, own: Sequence[float]) -> float | None:
    """Its own time in a unit of work over the median of its peers. None: fewer than two others tell theirs. `own`: of
    all, it included, in order."""
    num_others = len(own) - 1
    if rank.own_seconds is None or num_others < 2:
        return None
    here = bisect_left(own, rank.own_seconds)
    low, high = ((num_others - 1) // 2, num_others // 2)
    usual = sum(own[k if k < here else k + 1] for k in (low, high)) / 2
    return rank.own_seconds / usual if usual > 0 else None


def brief(value: float | None) -> str:
    """Seconds, in milliseconds where they are few; empty: not known."""
    return f"{1000 * value:.3g} ms" if value is not None and value < 0.1 else seconds(value, "")


def named_suspects(snapshot: JournalSnapshot) -> frozenset[tuple[str, int | None]]:
    return frozenset((s.replica, s.rank) for i in snapshot.projection.open_incidents() for s in i.diagnosis.suspects)


def phase_word(phase: str, beside: Collection[str]) -> str:
    """`step` of a process that also generates or scores is the rest: training."""
    return "train" if phase == Phase.STEP and GENERATING & set(beside) else in_words(phase)


def rank_table(snapshot: JournalSnapshot) -> tuple[list[str], list[list[Cell]]]:
    """Heading and rows, the worst rank first; a column in which no rank has a value is left out."""
    now, ranks = snapshot.at, snapshot.observed
    states = rank_states(ranks, named_suspects(snapshot), snapshot.sampled_at)
    ordered = sorted(ranks, key=lambda r: (KINDS.index(states[r].kind), replica_order(r.replica), r.rank, r.node))
    longest = {role_of(r.replica): 0.0 for r in ranks}
    for r in ranks:
        longest[role_of(r.replica)] = max(longest[role_of(r.replica)], r.own_seconds or 0.0)

    def row(r: ObservedRank) -> list[Cell]:
        alive, phases = r.alive_at(snapshot.sampled_at), [name for name, _ in r.phases]
        own: Cell = ""
        if r.own_seconds is not None:
            own = Bar(r.own_seconds / (longest[role_of(r.replica)] or 1.0), brief(r.own_seconds), states[r].kind)
        return [
            Mark(states[r].kind, states[r].word),
            plain(r.replica, 80),
            str(r.rank),
            plain(r.node, 80),
            str(r.pid),
            phase_word(r.phase, phases) if alive else "",
            f"{r.step:,}" if r.step >= 0 else "",
            brief(r.step_seconds),
            own,
            "" if r.progress_at is None else f"{age(max(0.0, now - r.progress_at))} ago",
            BY.get(r.reports_by, f"rule {plain(r.reports_by, 40)}"),
        ]

    head = ["state", "replica", "rank", "node", "pid", "phase", "step", "step time", "own time", "last progress"]
    head.append("reported by")
    rows = [row(r) for r in ordered]
    used = [n for n in range(len(head)) if any(str(cells[n]) for cells in rows)]
    return [head[n] for n in used], [[cells[n] for n in used] for cells in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePhases:
    """Where the time of one role's ranks goes. `segments` have the share of the time and, for a job with steps, the
    seconds of a step."""

    role: str
    num_ranks: int
    step_seconds: float | None
    segments: tuple[Segment, ...]


def role_phases(snapshot: JournalSnapshot) -> tuple[RolePhases, ...]:
    """By role, of its ranks that live and report phases: the mean of their shares."""
    by_role: dict[str, list[ObservedRank]] = {}
    for rank in snapshot.observed:
        if rank.phases and rank.alive_at(snapshot.sampled_at):
            by_role.setdefault(role_of(rank.replica), []).append(rank)
    found = []
    for role, ranks in sorted(by_role.items()):
        shares: dict[str, float] = {}
        for rank in ranks:
            for name, share in rank.phases:
                shares[name] = shares.get(name, 0.0) + share / len(ranks)
        known = [r.step_seconds for r in ranks if r.step_seconds is not None]
        step = statistics.median(known) if known else None
        segments = tuple(
            Segment(
                share=share,
                name=phase_word(name, shares),
                text=percent(share, 1) + (f", {brief(share * step)} of a step" if step is not None else ""),
                colour=PHASE_COLOURS.get(name, OTHER_COLOUR),
            )
            for name, share in sorted(shares.items(), key=lambda kv: -kv[1])
        )
        found.append(RolePhases(role=role, num_ranks=len(ranks), step_seconds=step, segments=segments))
    return tuple(found)


def course_buckets(course: Sequence[CoursePoint]) -> tuple[Bucket, ...]:
    """The course as points of the page's curves: what was known when a step was worked on, and the mean time of the
    steps since the point before."""
    found = []
    for before, point in pairwise(course):
        num = point.step - before.step
        took = (point.at - before.at) / num if num > 0 and point.at > before.at else math.nan
        found.append(
            Bucket(
                first_step=before.step,
                last_step=point.step,
                at=point.at,
                num=max(1, num),
                reward=point.values.get("reward", math.nan),
                seconds=took,
                seconds_max=took,
                tokens=math.nan,
                signs={name: value for name, value in point.values.items() if name != "reward"},
            )
        )
    return tuple(found)


def figures_of(snapshot: JournalSnapshot) -> list[tuple[str, str, str]]:
    """Key figures: label, value, note; those without a value are left out."""
    ranks = snapshot.observed
    if not ranks:
        return []
    alive = sum(r.alive_at(snapshot.sampled_at) for r in ranks)
    alive_words = "all alive" if alive == len(ranks) else f"{len(ranks) - alive} not alive"
    steps = [r.step for r in ranks if r.step >= 0]
    progress = [r.progress_at for r in ranks if r.progress_at is not None]
    nodes = {r.node for r in ranks}
    took = [r.step_seconds for r in ranks if r.step_seconds is not None and r.alive_at(snapshot.sampled_at)]
    lagging = f"slowest rank at {min(steps):,}" if steps and min(steps) != max(steps) else "all ranks"
    step = snapshot.course[-1].step if snapshot.course else max(steps, default=-1)
    newest = snapshot.course[-1].values if snapshot.course else {}
    rows = [
        ("ranks", f"{len(ranks):,}", alive_words + ("" if snapshot.watched else " when last seen")),
        ("nodes", f"{len(nodes):,}", plain(next(iter(nodes)), 80) if len(nodes) == 1 else ""),
        ("step of the job", f"{step:,}" if step >= 0 else "", lagging),
        ("time per step", brief(max(took)) if took else "", "of the slowest rank, in the last minute"),
        *((name, f"{newest[name]:.4g}" if name in newest else "", "newest that was told") for name in reversed(VALUES)),
        ("last progress", f"{age(max(0.0, snapshot.at - max(progress)))} ago" if progress else "", "of any rank"),
        ("last sample", f"{age(max(0.0, snapshot.at - max(r.seen_at for r in ranks)))} ago", "of any rank"),
    ]
    return [row for row in rows if row[1]]


def works(found: Sequence[ObservedCapability]) -> Mapping[str, tuple[str, ...]]:
    """seen, named, replaced, ended -> what works for all ranks."""
    lacking = {(c.about, c.name) for c in found if c.can != YES}
    by_about: dict[str, list[str]] = {}
    for c in found:
        if (c.about, c.name) not in lacking:
            by_about.setdefault(c.about, []).append(c.name)
    return {about: tuple(dict.fromkeys(names)) for about, names in by_about.items()}


def missing(found: Sequence[ObservedCapability]) -> list[list[Cell]]:
    """What does not work, or not always: how far, whose, what, why, and what can be done. What is not there at all (as
    a GPU on a node without one) is left out."""
    abouts = list(dict.fromkeys(c.about for c in found))
    same: dict[tuple[str, str, str, str, str], list[str]] = {}
    for c in sorted(found, key=lambda c: (abouts.index(c.about), MISSING_ORDER.get(c.can, 0))):
        if c.can in MISSING_ORDER:
            same.setdefault((c.about, c.can, c.ranks, c.because, c.fix), []).append(c.name)
    return [
        [
            Mark("bad", f"not {about}") if can == NO else Mark("warn", f"partly {about}"),
            plain(ranks, 160),
            "; ".join(names),
            Prose(plain(because, 300)),
            Prose(plain(fix, 300)),
        ]
        for (about, can, ranks, because, fix), names in same.items()
    ]


def absent(found: Sequence[ObservedCapability]) -> str:
    """`GPU: its agent sees no GPU`: what is not there to be seen, in one line."""
    named: dict[str, list[str]] = {}
    for c in found:
        if c.can == NONE and c.name not in named.setdefault(c.because, []):
            named[c.because].append(c.name)
    return "; ".join(f"{', '.join(names)}: {because}" for because, names in named.items())
