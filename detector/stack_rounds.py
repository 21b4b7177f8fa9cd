"""Who holds up the others again and again: flags counted over several rounds of stacks. Pure.

After ByteRobust (arXiv 2509.16293, stack aggregation, fail-slow): every ten seconds the group with most of the outliers
is flagged, and after five rounds the group flagged most is named. Here:

  a group     is a process, a node, a replica or a parallel group, never the whole role
  a flag      goes to each group that holds at least half of a round's outliers: one who is among them once, by chance,
              spoils no round
  named is    of the groups with `NUM_FLAGS_MIN` flags, in `FLAGGED_RATIO_MIN` of the rounds, the one whose flags are the
              least likely if outliers were drawn at random: many flags on few processes; at most `CHANCE_MAX` likely
  alike       groups of one size with as many flags: flagged in the same rounds they are named together, as the smallest
              group that holds them; in others it is a tie, and nobody is named
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.detector.stack_roster import Group, Process, Who, group_name, groups_of

NUM_ROUNDS = 5
ROUND_SECONDS = 10.0
"""ByteRobust's: what is asked for where rounds are too few."""
NUM_FLAGS_MIN = 3
"""One noisy round, or two, accuse nobody."""
FLAGGED_RATIO_MIN = 0.6
"""Three of five. Somebody is always the last: one for whom the others wait in most of the looks costs them that time."""
CHANCE_MAX = 0.05
NUM_GROUPS_MAX = 512
"""So many groups, flagged most, are compared: a grid of many axes has very many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flagged:
    """`rounds`: indices of those that flagged it. `chance`: how likely some group of its size had so many flags, had each
    round that flags anybody drawn its outlier at random."""

    name: str
    members: tuple[Process, ...]
    rounds: tuple[int, ...]
    chance: float

    @property
    def who(self) -> frozenset[Who]:
        return frozenset(p.key for p in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """`best`: the group, or the groups that are alike, most to blame. `named`: whether they are, and not only suspected;
    `tied`: not, since groups with as many flags contradict each other. `flagged`: all, the least likely first."""

    best: tuple[Flagged, ...]
    named: bool
    tied: bool
    flagged: tuple[Flagged, ...]


def tally(outliers: Sequence[Sequence[Process]], processes: Sequence[Process]) -> Tally | None:
    """`outliers`: of each round; `processes`: all of the role. None if no round has any."""
    flagged = _flagged(outliers, processes)
    if not flagged:
        return None
    enough = [f for f in flagged if _enough(f, len(outliers))]
    first = (enough or flagged)[0]
    alike = [f for f in flagged if (len(f.rounds), len(f.members)) == (len(first.rounds), len(first.members))]
    tied = any(f.rounds != first.rounds for f in alike)
    best = tuple(alike)
    if len(alike) > 1 and not tied:
        together = frozenset[Who]().union(*(f.who for f in alike))
        around = [f for f in flagged if f.who >= together and set(f.rounds) >= set(first.rounds)]
        around = [f for f in around if not enough or _enough(f, len(outliers))]
        best = (min(around, key=lambda f: len(f.members)),) if around else best
    return Tally(best=best, named=bool(enough) and not tied, tied=tied, flagged=tuple(flagged))


def _enough(f: Flagged, num_rounds: int) -> bool:
    num = len(f.rounds)
    return num >= NUM_FLAGS_MIN and num >= FLAGGED_RATIO_MIN * num_rounds and f.chance <= CHANCE_MAX


def _flagged(outliers: Sequence[Sequence[Process]], processes: Sequence[Process]) -> list[Flagged]:
    rounds: dict[Group, list[int]] = {}
    for n, some in enumerate(outliers):
        held = Counter(group for p in some for group in (("process", p.key), *groups_of(p)))
        for group, num in held.items():
            if 2 * num >= len(some):
                rounds.setdefault(group, []).append(n)
    num_flagging = sum(bool(some) for some in outliers)
    most = sorted(rounds, key=lambda group: -len(rounds[group]))[:NUM_GROUPS_MAX]
    members: dict[Group, list[Process]] = {group: [] for group in most}
    for p in processes:
        for group in (("process", p.key), *groups_of(p)):
            if group in members:
                members[group].append(p)
    found: dict[frozenset[Who], Flagged] = {}
    for group in most:
        its = members[group]
        if not its or len(its) == len(processes):
            continue
        made = Flagged(
            name=its[0].name if group[0] == "process" else group_name(group),
            members=tuple(its),
            rounds=tuple(rounds[group]),
            chance=chance(len(rounds[group]), num_flagging, len(its) / len(processes)),
        )
        found.setdefault(made.who, made)  # of names for the same processes the plainest: it comes first
    return sorted(found.values(), key=lambda f: (f.chance, len(f.members)))


def chance(num_flags: int, num_rounds: int, share: float) -> float:
    """Of `num_flags` or more in so many rounds for one of 1 / `share` groups, when each round hits one of them."""
    one = sum(
        math.comb(num_rounds, k) * share**k * (1 - share) ** (num_rounds - k) for k in range(num_flags, num_rounds + 1)
    )
    return min(1.0, one / share)
