"""`sequential`, the default panel detector: online detection of machines that differ from their peers and their own
past.

Two kinds of evidence, each with its own waiting time:

- Against its peers now, from the first minutes on: `peer_place` (a level farther from the peers' than healthy machines
  are from each other, whether or not it ever changed) and `peer_distance` (several metrics are far at once).
- Against its own past: `peer_place` again (a machine leaves its level by more than healthy machines do),
  `level_shifts` (a metric leaves its level among its peers and stays away; the strongest metric alone, and the
  strongest few together) and `novelty` (many metrics jump to unprecedented values).

Each score but `peer_place`'s is converted to a surprise by its healthy tail on this panel (`tails`), or until there is
one, by the scores of the peers so far, with a prior (`Channel`). The largest surprise has a tail again, which gives the
threshold for the requested rate of false alarms, without tuning per panel: it starts high, on the prior, and comes down
as the panel is observed. `peer_place` has budgets of its own.

Nothing is learned from a machine while it is suspected; after `TOLERATED_SECONDS`, a shift that persists becomes its
new normal level.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.metric_kinds import has_equal_levels, kind
from rolecall.detector.panels.panel import FALSE_ALARMS_PER_1000_MACHINE_DAYS, Floats, PanelShape
from rolecall.detector.panels.sequential.elementwise import Elementwise, clip, higher, lower, where
from rolecall.detector.panels.sequential.following import STATE_SHARE_MIN, VALUE_SHARE_MIN
from rolecall.detector.panels.sequential.level_shifts import ShiftChannel
from rolecall.detector.panels.sequential.novelty import DAY_SECONDS, Novelty
from rolecall.detector.panels.sequential.order import medians_of
from rolecall.detector.panels.sequential.peer_distance import PeerDistance
from rolecall.detector.panels.sequential.peer_place import WINDOW_TICKS, PeerPlace
from rolecall.detector.panels.sequential.priors import Priors, shipped
from rolecall.detector.panels.sequential.profile import PanelProfile, Profile, ScoreProfile, UsualPlaces, renewed
from rolecall.detector.panels.sequential.tails import BLOCK_TICKS, BLOCKS_MIN, TAIL_SHARE, Prior, ScoreTail

SECONDS_PER_DAY = 86_400.0
SUSPECT_SHARE = 0.6
"""Nothing is learned from a machine with a score above this share of the threshold."""
SHARE_SHOWN = 0.5
"""Metrics are shown if their score is at least this share of the strongest."""
SHARE_ALIKE = 0.2
"""A culprit's alarm includes metrics with a score of at least this share of its strongest."""
CALM_SHARE = 0.5
CALM_TICKS = 32
"""An alarm ends when the scores were below `CALM_SHARE` of the threshold, or the short averages normal, for this many
ticks."""
TOLERATED_SECONDS = 3600.0
PROPAGATION_SECONDS = 300.0
"""After one machine's alarm, weaker alarms of its peers that begin within this time are attributed to it; those in the
same metrics for as long as they last."""
SKEW_SECONDS = 4.0
"""Maximum time between equal changes of two machines: clock errors of 3 s, samples that average over a second. A change
counts as a machine's own only when its peers have not followed within this time."""
VALUE_MAX = 1e15
"""Larger values are clipped to this: squares of float32 overflow at 1e38."""
FIRST_BLOCKS, FIRST_SHARE = 32, 1 / 2
"""Share of the requested rate that the first so many blocks may use: models of a panel that has shown little are less
certain than they seem."""
START_TICKS = 16
"""Before, nothing can be said of a machine."""
LATE_SHARE = 0.75
"""A machine with fewer ticks than this share of the panel's came late."""
STAYS_SECONDS = 20.0
"""For which a machine must be far from its peers: shorter bursts of unequal work are common."""
MACHINES_MIN = 3
"""Of two machines that differ, only one that moved is named."""
MOVED_SCALES, MOVED_TIMES = 3.0, 3.0
"""Of two machines: the mean of the last ticks is so many robust scales from the level of one, and so many times as far
as that of the other."""
BLOCKS_YOUNG = 12
"""Scores of the first blocks, based on immature averages and scales, are too high: they count only until there are
`MATURE_SIZE` others."""
MATURE_SIZE = 150
QUARANTINE_BLOCKS = 3
"""Shift tails are not learned from blocks younger than this: a shift that begins in them may turn out to be a fault,
and in a role of four, one machine is a quarter of the sample. A jump ends immediately, so novelty needs no
quarantine."""
QUARANTINE_TICKS = 2 * BLOCK_TICKS
"""Nor are they learned from a machine suspected for longer than this."""
BOTH_PRIOR = Prior(location=math.log(2), beta=1.0, weight=256.0, beta_min=1.35)
"""The theoretical tail of the larger of two surprises: it dominates until a panel has enough data. Far tails are
slightly heavier than the sample shows: with a smaller minimum, simulated fleets have several times the requested rate
(docs/decisions/0019)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """`profile`: of one's own job. `healthy`: all machines are, so that all are learned from and none is named."""

    name: ClassVar[str] = "sequential"
    false_alarms_per_1000_machine_days: float = FALSE_ALARMS_PER_1000_MACHINE_DAYS
    profile: Profile | None = None
    healthy: bool = False
    priors: Priors = field(default_factory=shipped)

    def track(self, shape: PanelShape) -> "SequentialTracker":
        return SequentialTracker(shape, self)


YOUNG_WEIGHT = 4.0
"""Weight of the prior, as a number of block maxima, before a panel has a tail."""
MEANS_AT_LOCATION = -math.log(TAIL_SHARE)
"""Of an exponential: the quantile that `TAIL_SHARE` exceed, in means."""
PROFILE_WEIGHT_MAX = 60.0
"""Block maxima that a profile counts for; as many of the panel itself outweigh it."""
PROFILE_TIMES = (0.2, 20.0)
"""Scores of a job are so many times those of the prior."""
YOUNG_MARGIN = 1.0
"""The first threshold is higher by this share of itself, the one after k blocks by a (k + 1)-th of that."""


class Channel:
    """Scores of one channel, or their combination, and their healthy tail."""

    def __init__(
        self,
        num_machines: int,
        prior: Prior,
        quarantine: int = QUARANTINE_BLOCKS,
        profile: ScoreProfile | None = None,
    ) -> None:
        """`quarantine`: blocks."""
        self.young_weight = YOUNG_WEIGHT
        if profile is not None and prior.young_beta is not None:
            low, high = PROFILE_TIMES
            times = min(max(profile.mean * MEANS_AT_LOCATION / prior.location, low), high)
            self.young_weight += min(profile.num, PROFILE_WEIGHT_MAX)
            prior = replace(
                prior, location=times * prior.location, beta=times * prior.beta, young_beta=times * prior.young_beta
            )
        self.prior, self.tail, self.quarantine = prior, ScoreTail(prior), quarantine
        self.early_sum, self.num_early = 0.0, 0  # of block maxima of the first blocks
        self.maxima_sum, self.num_blocks = np.zeros(num_machines), 0
        self.block_max = np.full(num_machines, -np.inf, dtype=np.float32)
        self.scores = np.zeros(num_machines, dtype=np.float32)
        self.surprise = np.zeros(num_machines, dtype=np.float32)
        self.location = np.zeros(num_machines, dtype=np.float32)  # the score that is usual as a block's highest
        # Maxima (N,) of earlier blocks, and whether they count.
        self.waiting = deque[tuple[Floats, NDArray[np.bool_]]]()

    def score(self, scores: Floats) -> Floats:
        """Processes the scores of a tick; returns their surprise, (N,)."""
        self.scores = scores
        np.maximum(self.block_max, scores, out=self.block_max)
        if self.prior.young_beta is None or math.isfinite(self.tail.location):
            self.surprise = self.tail.surprise(scores)
            self.location = np.full_like(scores, self.tail.location)
        else:
            self.surprise = self._young_surprise(scores, self.prior.young_beta)
        return self.surprise

    def _young_surprise(self, scores: Floats, beta: float) -> Floats:
        """Before the panel has a tail: scores relative to the mean of the peers' block maxima so far (never the
        machine's own), which is pulled towards the prior's. With few maxima that mean is uncertain, and the tail of an
        exponential with an uncertain mean is Lomax's: it is heavy for three machines, and light for a hundred."""
        so_far = self.maxima_sum + np.maximum(self.block_max, 0)
        size = self.young_weight + (len(so_far) - 1) * (self.num_blocks + 1)
        usual = self.prior.location / MEANS_AT_LOCATION
        times = (self.young_weight * usual + so_far.sum() - so_far) / (size * usual)
        location = self.prior.location * np.maximum(times, 1)  # never lighter than the prior
        self.location = location.astype(np.float32)
        excess = (scores - location) / np.maximum(beta * times, self.prior.beta)
        young: Floats = (size * np.log1p(np.maximum(excess, 1 - size) / size)).astype(np.float32)
        return young

    def end_block(self, counted: NDArray[np.bool_], trusted: NDArray[np.bool_]) -> None:
        """`counted` (N,): machines with healthy maxima in this block; `trusted` (N,): machines whose earlier blocks
        still seem healthy."""
        finite = counted & np.isfinite(self.block_max)
        self.waiting.append((self.block_max.copy(), finite))
        if self.num_blocks < BLOCKS_YOUNG and finite.any():
            self.early_sum += float(np.maximum(self.block_max[finite], 0).sum())
            self.num_early += int(finite.sum())
        self.maxima_sum += np.maximum(self.block_max, 0)
        self.num_blocks += 1
        self.block_max[:] = -np.inf
        if len(self.waiting) > self.quarantine:
            maxima, healthy = self.waiting.popleft()
            if (healthy & trusted).any():
                self.tail.add(maxima[healthy & trusted])

    @property
    def learned(self) -> ScoreProfile | None:
        return ScoreProfile(mean=self.early_sum / self.num_early, num=self.num_early) if self.num_early else None


class SequentialTracker:
    machines_min: ClassVar[int] = 2

    def __init__(self, shape: PanelShape, settings: Sequential) -> None:
        self.shape, self.healthy = shape, settings.healthy
        # Requested false alarms per machine and block.
        asked = settings.false_alarms_per_1000_machine_days
        self.asked_per_block = asked / 1000 * BLOCK_TICKS * shape.interval_seconds / SECONDS_PER_DAY
        m, n = len(shape.metrics), len(shape.machines)
        share_min = [STATE_SHARE_MIN if kind(name) == "state" else VALUE_SHARE_MIN for name in shape.metrics]
        self.shifts = ShiftChannel(m, n, np.array(share_min, dtype=np.float32)[:, None])
        self.novelty = Novelty(m, n)
        skew_ticks = 1 + int(SKEW_SECONDS / shape.interval_seconds)
        # Of the last `skew_ticks` ticks: medians (M,), novelty scores (N,).
        self.middles, self.leaps = deque[Floats](maxlen=skew_ticks), deque[Floats](maxlen=skew_ticks)
        self.far = deque[Floats](maxlen=max(1, math.ceil(STAYS_SECONDS / shape.interval_seconds)))
        self.profile = settings.profile.of(shape) if settings.profile else None
        known = self.profile.scores if self.profile else {}
        scores = settings.priors.scores
        self.single = Channel(n, scores["single"], profile=known.get("single"))
        self.several = Channel(n, scores["several"], profile=known.get("several"))
        self.novel, self.both = Channel(n, scores["novelty"], quarantine=0), Channel(n, BOTH_PRIOR)
        self.equal_levels = np.array([has_equal_levels(name) for name in shape.metrics])
        self.peers = PeerDistance(m, n)
        self.distance = Channel(n, scores["distance"], profile=known.get("distance"))
        spreads = settings.priors.log_spreads(shape.metrics)
        self.place = PeerPlace(m, n, UsualPlaces.of(shape, spreads, self.profile), self.asked_per_block / BLOCK_TICKS)
        self.shift_blocks = deque[tuple[Floats, NDArray[np.bool_]]]()  # as `Channel.waiting`
        self.last = np.zeros((m, n), dtype=np.float32)  # the newest known value
        self.deviation = np.zeros((m, n), dtype=np.float32)
        # Ticks since it, and from the one before to it; infinite: there was none
        self.silent, self.apart = (np.full((m, n), np.inf, dtype=np.float32) for _ in range(2))
        self.middle = np.zeros(m, dtype=np.float32)
        self.here: NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)  # machines with a value that is as new as usual
        self.moved = np.zeros((m, n), dtype=np.bool_)  # the value was not always the same
        # `explained`: attributed to the culprit, since their alarms came after it
        self.alarmed, self.explained = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
        # Named because of its place among its peers, and the tick at which
        self.misplaced, self.misplaced_at = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.int64)
        self.named_for = np.zeros(n, dtype=np.int64)  # ticks since it is alarmed or misplaced
        self.tolerated = np.zeros(n, dtype=np.bool_)  # for so long that its level is its new past
        self.age = np.zeros(n, dtype=np.int64)  # ticks with a sample
        self.calm = np.zeros(n, dtype=np.int64)  # ticks since it was last above CALM_SHARE
        self.suspected_at = np.full(n, np.nan)  # NaN: not suspected
        self.ticks, self.at, self.reference = 0, math.nan, 0.0
        self.window_seconds = WINDOW_TICKS * shape.interval_seconds
        self.culprit = -1  # the machine that was reported first, or is the strongest
        self.culprit_at = -math.inf
        self.culprit_score = 0.0  # its highest so far, as a multiple of the threshold
        self.culprit_size = 0.0  # the largest deviation of its strongest metric so far, robust scales
        self.culprit_metrics = frozenset[int]()  # metrics of its alarm
        self.threshold = math.inf  # of `both`

    def tick(self, at: float, values: Floats) -> list[Finding]:
        if len(self.shape.machines) < self.machines_min:
            return []
        self.ticks += 1
        self.at = at
        [known] = _newest.apply(self, (self.last, self.silent, self.apart, self.moved), (np.ascontiguousarray(values),))
        self.age += known.any(axis=0)
        # Of a machine that left, the last value says nothing of where its peers are now.
        seen, current = np.isfinite(self.silent), known | (self.silent < self.apart)
        self.here = np.asarray(current.any(axis=0))
        self.middle = middle = self._middle(seen, current)
        known = known & (current.sum(axis=1) > 1)[:, None]
        self.middles.append(middle)
        recent = np.array(self.middles)
        low, high = recent.min(axis=0)[:, None], recent.max(axis=0)[:, None]
        residual, away = _residual.apply(self, (), (self.last, known), (middle[:, None], low, high))
        learning = ~(at - self.suspected_at <= TOLERATED_SECONDS)  # NaN: not suspected
        single, several = self.shifts.tick(residual, known, middle, learning, ~self.alarmed, self.place.distinct)
        shift = np.maximum(self.single.score(single), self.several.score(several))
        self.deviation = self.novelty.tick(at, self.last, away, known)
        self.leaps.append(self.novelty.scores(self.deviation))
        novel = self.novel.score(np.min(self.leaps, axis=0))
        # A value that stands still is an inventory: that a machine has more memory is no fault.
        comparable = self.equal_levels & (2 * self.moved.sum(axis=1) >= seen.sum(axis=1))
        self.far.append(self.peers.tick(residual, known, middle, learning, comparable & self.place.distinct))
        far = self.distance.score(np.min(self.far, axis=0))
        if 0 < self.novelty.reference < DAY_SECONDS:
            # Without the day before, work that recurs each day is a jump too: one must also be far from its peers.
            distant = self.far[-1] > self.distance.location
            novel = self.novel.surprise = np.where(distant, novel, 0).astype(np.float32)
        far = np.where(self.misplaced, 0, far)  # said already, by its place
        self.place.tick(residual, known, middle, ~(self.alarmed | self.misplaced) | self.tolerated, comparable)
        self._renew_tail()
        # Too few samples for the usual levels of a machine that came later than its peers.
        young = (self.age <= BLOCKS_MIN * BLOCK_TICKS) & (self.age < LATE_SHARE * self.ticks)
        young |= self.age < START_TICKS
        self.both.score(np.where(young, 0, np.maximum(np.maximum(shift, novel), far)).astype(np.float32))
        if not math.isfinite(self.both.tail.location):
            self.threshold = self._threshold()
        fresh = [] if self.healthy else self._judge(at)
        self._end_block()
        return fresh

    def learned(self) -> PanelProfile | None:
        """The profile with what this panel has shown so far; None if it has been too short to show anything."""
        if not self.place.learned.num_spreads.any():
            return None
        channels = {"single": self.single, "several": self.several, "distance": self.distance}
        scores = {name: score for name, c in channels.items() if (score := c.learned) is not None}
        return renewed(self.profile, self.shape, self.place.learned, scores)

    def _middle(self, seen: NDArray[np.bool_], current: NDArray[np.bool_]) -> Floats:
        """Median over machines of the newest values, (M,); of `seen` machines (M, N), those without a `current` value
        are taken to be where they usually are among the others."""
        middle: Floats = medians_of(self.last, current)[:, 0]
        some = (seen & ~current).any(axis=1)
        if some.any():
            habit, seen, current = self.shifts.following.habit[some], seen[some], current[some]
            middle[some] += (medians_of(habit, seen) - medians_of(habit, current))[:, 0]
            middle[some] = np.where(current.any(axis=1), middle[some], self.middle[some])
        return middle

    def _renew_tail(self) -> None:
        """Scores decrease once reference data exist: thresholds from scores without it do not apply."""
        if self.novelty.reference > self.reference:
            self.reference = self.novelty.reference
            self.novel.tail.renew(BLOCKS_MIN * len(self.alarmed))
            self.novel.block_max[:] = -np.inf

    def _judge(self, at: float) -> list[Finding]:
        relative = self.both.scores / self.threshold
        near = self.distance.surprise <= 0
        shifts_calm = self.shifts.calm
        calm = (relative < CALM_SHARE) | (shifts_calm & (self.novel.scores < self.novel.tail.location) & near)
        leaping = self.novel.surprise
        over_already = shifts_calm & (leaping <= self.threshold) & (self.distance.surprise <= self.threshold)
        placed = self.place.relative > 1
        self.named_for = np.where(self.alarmed | self.misplaced, self.named_for + 1, 0)
        lasting = self.named_for * self.shape.interval_seconds > TOLERATED_SECONDS
        if (lasting & ~self.tolerated).any():
            self.place.restart_past()
        self.tolerated = lasting
        above = (relative > 1) & ~over_already
        num_here = int(self.here.sum())
        if num_here < MACHINES_MIN:
            above &= self._moved()
        calm &= ~self.misplaced | (self.place.relative < CALM_SHARE)
        self.calm = np.where(calm & ~placed, self.calm + 1, 0)
        over = (self.alarmed | self.explained | self.misplaced) & (self.calm >= CALM_TICKS)
        if over.any():
            self.shifts.levels.forget(over)
            self.alarmed &= ~over
            self.misplaced &= ~over
            if self.culprit < 0 or not (self.alarmed | self.misplaced)[self.culprit]:
                self.explained &= ~over  # else it may come and go with its culprit
            above &= ~over  # residual evidence in the sums
        suspect = relative > SUSPECT_SHARE
        begins = suspect & np.isnan(self.suspected_at)
        self.suspected_at[begins] = at
        self.suspected_at[~suspect & ~self.alarmed] = np.nan
        if self.culprit >= 0:
            self.culprit_score = max(self.culprit_score, float(relative[self.culprit]))
            self.culprit_size = max(self.culprit_size, self._size(self.culprit))
        # A machine that was out of place from the start may still change: that is another finding, but not at once.
        named = self.alarmed | (self.misplaced & (self.ticks - self.misplaced_at <= CALM_TICKS))
        fresh = (above & ~named) | (placed & ~self.alarmed & ~self.misplaced)
        if not fresh.any():
            return []
        found = []
        present = self._present
        pair = present.sum() == 2
        evidence = np.maximum(relative, np.where(placed, self.place.relative, 0))
        for n in np.flatnonzero(fresh)[np.argsort(-evidence[fresh], kind="stable")]:
            soon = 0 < at - self.culprit_at <= PROPAGATION_SECONDS
            alike = self.shifts.first(int(n))[0] in self.culprit_metrics
            # A change is seen for up to one window after it has ended.
            fading = placed[n] and at - self.culprit_at <= PROPAGATION_SECONDS + self.window_seconds
            explained = soon or (bool(self.explained[n]) and (alike or bool(fading)))
            # Shift scores grow with time as well as size: a machine hit for longer is not necessarily hit harder.
            more = leaping[n] >= self.both.scores[n] or self._size(int(n)) > self.culprit_size
            outgrown = bool(evidence[n] > self.culprit_score and more)
            self.explained[n] = explained and not outgrown
            if self.explained[n]:
                self.calm[n] = 0
                continue  # propagation from the culprit; reported if it becomes stronger, or differs in its metrics
            if 2 * int(((above | placed) & present).sum()) > num_here and not pair:
                continue  # a majority is anomalous: peer comparison is invalid
            if placed[n]:
                self.misplaced[n], self.misplaced_at[n] = True, self.ticks
            self.alarmed[n] = above[n]
            self.calm[n] = 0
            found.append(self._finding(int(n), at))
            if not explained or outgrown:
                self.culprit, self.culprit_at, self.culprit_score = int(n), at, float(evidence[n])
                self.culprit_size = self._size(int(n))
                first, *others = self.shifts.strongest(int(n))
                strong = (o for o in others if o[3] > SHARE_ALIKE * first[3])
                self.culprit_metrics = frozenset(m for m, *_ in (first, *strong))
        return found

    def _moved(self) -> NDArray[np.bool_]:
        """(N,): of two machines that are there, the one that left its own level while the other did not. That they
        differ says nothing of which is at fault: each is an outlier to the other."""
        moved, pair = np.zeros(len(self.here), dtype=np.bool_), np.flatnonzero(self.here)
        if len(pair) == 2:
            metric = self.shifts.first(int(pair[self.both.scores[pair].argmax()]))[0]
            away = np.abs(self.novelty.recent[metric, pair] - self.novelty.level[metric, pair])
            far = away > MOVED_SCALES * self.shifts.following.usual[metric]
            moved[pair] = far & (away > MOVED_TIMES * away[::-1])
        return moved

    @property
    def _present(self) -> NDArray[np.bool_]:
        """(N,): machines with a value in the last ticks, also if one of now is missing."""
        return np.asarray(self.silent.min(axis=0) < BLOCK_TICKS)

    @property
    def scores(self) -> Floats:
        """(N,): compared with `threshold`."""
        return self.both.scores

    def _size(self, n: int) -> float:
        """Deviation of a machine's strongest metric, in robust scales."""
        return abs(self.shifts.first(n)[1])

    def _end_block(self) -> None:
        if self.ticks % BLOCK_TICKS:
            return
        # Machines above the threshold never count, reported or not: a fault must not be learned as part of the tail.
        counted = ~self.alarmed & ~self.misplaced & self._present
        counted &= self.healthy | (self.both.block_max <= self.threshold)
        suspect_for = self.at - self.suspected_at
        trusted = ~self.alarmed & ~(suspect_for > QUARANTINE_TICKS * self.shape.interval_seconds)
        num = self.ticks // BLOCK_TICKS
        if num == BLOCKS_YOUNG:
            self.shifts.levels.renew(MATURE_SIZE)
            self.single.tail.renew(MATURE_SIZE)
            self.several.tail.renew(MATURE_SIZE)
            self.both.tail.renew(MATURE_SIZE)
        self.shift_blocks.append((self.shifts.levels.end_block(), counted))
        if len(self.shift_blocks) > QUARANTINE_BLOCKS:
            maxima, healthy = self.shift_blocks.popleft()
            self.shifts.levels.learn(maxima[:, :, healthy & trusted])
        # The first block contains the start of all averages; shifts in the second are measured by the tails of the
        # first.
        self.single.end_block(counted & (num > 2), trusted)
        self.several.end_block(counted & (num > 2), trusted)
        self.novel.end_block(counted & (num > 1), counted)
        self.distance.end_block(counted & (num > 1), trusted)
        # The combined tail uses only blocks whose surprises come from known tails.
        self.both.end_block(counted & (num > BLOCKS_MIN + 1), trusted)
        self.threshold = self._threshold()

    def _threshold(self) -> float:
        """Of `both`: infinite for the first ticks, then from the prior, high and coming down, then from the panel."""
        tail, rate = self.both.tail, self.asked_per_block
        if self.ticks < START_TICKS:
            return math.inf
        if self.ticks < FIRST_BLOCKS * BLOCK_TICKS:
            rate *= FIRST_SHARE
        if math.isfinite(tail.location):
            return tail.threshold(rate)
        prior = ScoreTail(location=BOTH_PRIOR.location, beta=max(BOTH_PRIOR.beta, BOTH_PRIOR.beta_min))
        return prior.threshold(rate) * (1 + YOUNG_MARGIN / (1 + self.ticks / BLOCK_TICKS))

    def _finding(self, n: int, at: float) -> Finding:
        machine = self.shape.machines[n]
        num_peers = int(np.delete(self._present, n).sum())
        peers = f"{num_peers} peers" if num_peers > 1 else "one peer"
        shift = max(float(self.single.surprise[n]), float(self.several.surprise[n])) / self.threshold
        novel, far = (float(c.surprise[n]) / self.threshold for c in (self.novel, self.distance))
        place = float(self.place.relative[n])
        onset = float(self.suspected_at[n]) if math.isfinite(self.suspected_at[n]) else at
        evidence: list[Evidence] = []
        words = []
        if place > 1:
            moved_level = bool(self.place.changed[n])
            origin = "where it was among its peers" if moved_level else f"the median of its {peers}"
            out_of_place = self.place.metrics[n]
            for m in out_of_place:
                away = self.place.away(m, n)
                way = "above" if away > 0 else "below"
                text = f"{self.shape.metrics[m]}: {abs(away):.1f} times its usual noise {way} {origin}"
                evidence.append(Evidence(kind=f"metric:{self.shape.metrics[m]}", text=text, values={"noises": away}))
            names = " and ".join(self.shape.metrics[m] for m in out_of_place)
            where = f"left its level, unlike its {peers}" if moved_level else f"out of place among its {peers}"
            words.append(f"{names} {where}")
            evidence.append(_score("change" if moved_level else "place", place, 1.0))
        if far > 1:
            farthest = [int(m) for m in np.argsort(-self.peers.distance[:, n], kind="stable")[: self.peers.rank]]
            for m in farthest[:3]:
                distance = float(self.peers.distance[m, n])
                far_text = f"{distance:.0f} times as far from its peers' median as machines usually are"
                text = f"{self.shape.metrics[m]}: {far_text}"
                values = {"distances": distance}
                evidence.append(Evidence(kind=f"metric:{self.shape.metrics[m]}", text=text, values=values))
            words.append(f"{len(farthest)} of {len(self.shape.metrics)} metrics are far from its {peers}")
            evidence.append(_score("distance", far * self.threshold, self.threshold))
        if shift > 1 or max(novel, far, place) <= 1:
            first, *others = self.shifts.strongest(n)[:3]
            strongest = [first, *(o for o in others if o[3] > SHARE_SHOWN * first[3])]
            for m, age, mean, metric_score in strongest:
                way = "above" if mean > 0 else "below"
                text = (
                    f"{self.shape.metrics[m]}: {abs(mean):.1f} robust standard deviations {way} where it usually is "
                    f"among its peers, for about {age} ticks, not predicted by its own history or theirs"
                )
                values = {"sigmas": mean, "score": metric_score}
                evidence.append(Evidence(kind=f"metric:{self.shape.metrics[m]}", text=text, values=values))
                onset = min(onset, at - age * self.shape.interval_seconds)
            words.append(f"{self.shape.metrics[strongest[0][0]]} differs from its {peers}")
            evidence.append(_score("shift", shift * self.threshold, self.threshold))
        if novel > 1:
            score = float(self.novel.scores[n])
            moved = [int(m) for m in np.argsort(-self.deviation[:, n], kind="stable") if self.deviation[m, n] >= score]
            for m in moved[:3]:
                text = (
                    f"{self.shape.metrics[m]}: moved by {self.deviation[m, n]:.2f} of its usual range, outside of "
                    "all earlier values of it and its peers"
                )
                values = {"ranges": float(self.deviation[m, n])}
                evidence.append(Evidence(kind=f"metric:{self.shape.metrics[m]}", text=text, values=values))
            # The score is the minimum over these ticks: the change began with the first of them.
            onset = min(onset, at - (len(self.leaps) - 1) * self.shape.interval_seconds)
            words.append(
                f"{len(moved)} of {len(self.shape.metrics)} metrics jumped together, those of its {peers} did not"
            )
            evidence.append(_score("novelty", novel * self.threshold, self.threshold))
        times = max(shift, novel, far, place)
        verb = "changed" if max(shift, novel) > 1 or times <= 1 or self.place.changed[n] else "stands out"
        return Finding(
            detector="sequential",
            suspects=(self.shape.suspect(n),),
            fault_class=FaultClass.SLOW,
            onset=min(onset, at),
            detected_at=at,
            confidence=round(min(0.99, 1 - 0.3 / max(times, 1.0)), 2),
            because=f"{machine.name} of {self.shape.name} {verb}: {' and '.join(words)}",
            evidence=tuple(evidence),
        )


@Elementwise(np.bool_)
def _newest(state: Any, now: Any) -> tuple[Any, ...]:
    (last, silent, apart, moved), (value,), most = state, now, np.float32(VALUE_MAX)
    known = np.isfinite(value)
    newest = where(known, clip(value, -most, most), last)
    moved = moved | (np.isfinite(silent) & (newest != last))
    silent = silent + np.float32(1)
    return newest, where(known, np.float32(0), silent), where(known, silent, apart), moved, known


@Elementwise(np.float32, np.float32)
def _residual(_state: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    """Distances to the median, and beyond the range of the last ones: negative below, positive above, 0 within."""
    (value, known), (middle, low, high), zero = now, metric, np.float32(0)
    beyond = higher(value - high, zero) + lower(value - low, zero)
    return where(known, value - middle, zero), where(known, beyond, zero)


def _score(channel: str, score: float, threshold: float) -> Evidence:
    text = f"score of {channel}: {score:.2f}, threshold {threshold:.2f} for the configured false alarm rate"
    return Evidence(kind="score", text=text, values={"score": score, "threshold": threshold})
