"""The learned band: are a microbatch's loss and gradient norm usual for this run? Pure.

One machine's silent corruption may give numbers that are wrong and finite. A microbatch far outside the band is
therefore computed again by another trainer, within its step, like one that is not finite.

    loss            |loss - median| > LOSS_SPREADS x spread
    gradient norm   log norm - median of log norms > max(NORM_SPREADS x spread, log NORM_FACTOR)

`spread` is 1.4826 x the median absolute deviation of the last `REMEMBERED` microbatches of committed steps, which all
trainers know from the ballots; the band is part of their state. It is silent for the first `WARM_UP` microbatches. A
gradient of 0 comes from groups with equal rewards: it is neither judged nor learned.

Those that were outside and that another trainer computed with the same result are proven right: while they are
remembered, up to `PROVEN_FACTOR` x the farthest of them is usual, too. A policy that has learned its task has many tiny
gradients and a large one now and then, each of which would else cost a second computation. Those that several trainers
had in one step were computed once each: they move median and spread, and prove nothing. So do those of the warm-up,
which were not judged: the ones that are outside at its end are forgotten.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Self

from rolecall.rl_runtime.protocol.messages import (
    CheckVerdict,
    ComparedMicrobatch,
    ComputedMicrobatch,
    MicrobatchNumbers,
)
from rolecall.rl_runtime.trainer.reduce import CommitVote

REMEMBERED: Final = 256
WARM_UP: Final = 32
LOSS_SPREADS: Final = 12.0
NORM_SPREADS: Final = 5.0
NORM_FACTOR: Final = 10.0
"""Wide, because gradient norms spread over an order of magnitude, and more while a policy learns. A false alarm costs
one computation (benchmarks/results/microbatch_band_*.md).
"""
PROVEN_FACTOR: Final = 2.0
LOSS_SPREAD_MIN: Final = 1e-3
"""Losses are sums of advantages of order one per token: less than this is rounding of a mean that is 0."""
ROUNDING_RATIO: Final = 0.05
"""Two devices may differ by this much in the same microbatch: bfloat16 on different kinds of GPU, with room."""


@dataclass(frozen=True, slots=True)
class LearnedBand:
    """`learned`: oldest first; `unproven`: those of them that were outside and computed once, oldest first."""

    learned: tuple[MicrobatchNumbers, ...] = ()
    unproven: tuple[MicrobatchNumbers, ...] = ()

    def after(self, committed: Iterable[MicrobatchNumbers], unproven: Iterable[MicrobatchNumbers] = ()) -> Self:
        """The band with one more step's microbatches. `unproven`: those of them that prove nothing."""
        new = tuple(n for n in committed if n.grad_norm > 0.0 and math.isfinite(n.grad_norm) and math.isfinite(n.loss))
        learned = (*self.learned, *new)[-REMEMBERED:]
        known = set(learned)
        band = type(self)(learned, tuple(n for n in (*self.unproven, *unproven) if n in known))
        if len(self.learned) < WARM_UP:
            band = type(self)(tuple(n for n in band.learned if not band._outside(n, proven=False)), band.unproven)
        return band

    def outside(self, numbers: MicrobatchNumbers) -> str:
        """The number that is far outside, with the limit; empty if none is, or too little is learned."""
        return self._outside(numbers, proven=True)

    def _outside(self, numbers: MicrobatchNumbers, *, proven: bool) -> str:
        """`proven`: whether what was proven right outside widens the band."""
        if len(self.learned) < WARM_UP or not numbers.grad_norm > 0.0:
            return ""
        doubted = set(self.unproven)
        right = [n for n in self.learned if n not in doubted] if proven else []
        losses = [n.loss for n in self.learned]
        middle = median(losses)
        room = LOSS_SPREADS * max(_spread(losses, middle), LOSS_SPREAD_MIN)
        room = max([room, *(PROVEN_FACTOR * far for far in (abs(n.loss - middle) for n in right) if far > room)])
        if abs(numbers.loss - middle) > room:
            return f"loss {numbers.loss:.3g}, usually {middle:.3g} and at most {room:.3g} from it"
        logs = [math.log(n.grad_norm) for n in self.learned]
        usual = median(logs)
        limit = usual + max(NORM_SPREADS * _spread(logs, usual), math.log(NORM_FACTOR))
        far_logs = (log for log in (math.log(n.grad_norm) for n in right) if log > limit)
        limit = max([limit, *(log + math.log(PROVEN_FACTOR) for log in far_logs)])
        if math.log(numbers.grad_norm) > limit:
            return (
                f"gradient norm {numbers.grad_norm:.3g}, usually {math.exp(usual):.3g} and at most "
                f"{math.exp(min(limit, 700.0)):.3g}"
            )
        return ""


def _spread(values: Sequence[float], middle: float) -> float:
    """Of a normal distribution, its standard deviation."""
    return 1.4826 * median(abs(v - middle) for v in values)


def unusual_microbatches(ballots: Sequence[CommitVote]) -> tuple[ComputedMicrobatch, ...]:
    """Microbatches outside their trainers' bands, in the order of their ids."""
    found = [
        ComputedMicrobatch(
            replica=ballot.replica,
            incarnation=ballot.incarnation,
            microbatch_id=stats.microbatch_id,
            group_ids=stats.group_ids,
            numbers=stats.numbers,
            because=stats.unusual,
        )
        for ballot in ballots
        for stats in ballot.microbatches
        if stats.unusual
    ]
    return tuple(sorted(found, key=lambda c: c.microbatch_id))


def compare(ballots: Sequence[CommitVote], first: Sequence[ComputedMicrobatch]) -> tuple[ComparedMicrobatch, ...]:
    """Verdicts on the unusual microbatches of a step whose members agree. `first`: those that another trainer computed
    before. Without any, the unusual ones are of several trainers.
    """
    if not first:
        return tuple(
            ComparedMicrobatch(first=u, by="", again=None, verdict=CheckVerdict.SEVERAL)
            for u in unusual_microbatches(ballots)
        )
    again = {s.microbatch_id: (ballot.replica, s) for ballot in ballots for s in ballot.microbatches}
    found = []
    for before in first:
        by, stats = again[before.microbatch_id]
        verdict = CheckVerdict.SAME
        if differ(before.numbers, stats.numbers):
            verdict = CheckVerdict.UNCLEAR if stats.unusual else CheckVerdict.WRONG
        found.append(ComparedMicrobatch(first=before, by=by, again=stats.numbers, verdict=verdict))
    return tuple(found)


def differ(one: MicrobatchNumbers, other: MicrobatchNumbers) -> bool:
    """Whether they differ by more than rounding."""
    loss_room = max(ROUNDING_RATIO * max(abs(one.loss), abs(other.loss)), LOSS_SPREAD_MIN)
    norm_room = ROUNDING_RATIO * max(one.grad_norm, other.grad_norm)
    return abs(one.loss - other.loss) > loss_room or abs(one.grad_norm - other.grad_norm) > norm_room


def band_after(band: LearnedBand, ballots: Sequence[CommitVote], compared: Sequence[ComparedMicrobatch]) -> LearnedBand:
    """The band after a step. What two trainers computed differently, and neither as usual, is not learned."""
    unclear = {c.first.microbatch_id for c in compared if c.verdict is CheckVerdict.UNCLEAR}
    once = {c.first.microbatch_id for c in compared if c.verdict is CheckVerdict.SEVERAL}
    stats = sorted((s for b in ballots for s in b.microbatches), key=lambda s: s.microbatch_id)
    return band.after(
        (s.numbers for s in stats if s.microbatch_id not in unclear),
        unproven=(s.numbers for s in stats if s.microbatch_id in once),
    )
