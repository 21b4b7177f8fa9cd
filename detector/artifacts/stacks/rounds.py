"""Localizes slow processes by flags counted over several rounds of stacks. Pure.

After ByteRobust (arXiv 2509.16293, stack aggregation, fail-slow): every ten seconds the group with most of the outliers
is flagged, and after five rounds the group with most flags is named. Here:

  flag     each outlier of a round gets one, and each group (node, replica, parallel group, never the whole role) that
           contains at least half of them: a single random outlier does not invalidate a round
  suspect  a group, or all processes that are flagged in the same rounds
  named    of the suspects with `NUM_FLAGS_MIN` flags, in `FLAGGED_RATIO_MIN` of the rounds: the one with the least
           likely flags under random outliers, at most `CHANCE_MAX` (many flags, few processes). Several processes are
           named as the smallest group that contains them, if it was flagged in the same rounds
  tie      processes with equally many flags in other rounds: none is named
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.detector.artifacts.stacks.processes import DumpedProcess, Group, Who, group_name, groups_of

NUM_ROUNDS = 5
ROUND_SECONDS = 10.0
"""As in ByteRobust: requested where there are too few rounds."""
NUM_FLAGS_MIN = 3
"""One or two noisy rounds name no suspect."""
FLAGGED_RATIO_MIN = 0.6
"""Three of five. Some rank is always last; one that blocks the others in most rounds slows them down."""
CHANCE_MAX = 0.05
NUM_GROUPS_MAX = 512
"""Only the groups with most flags are compared: a grid of many axes has very many."""
NUM_DRAWN_MAX = 32
"""With more outliers in a round, it is very unlikely that half are in one group by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagCount:
    """`rounds`: indices of those that flagged it. `chance`: probability that any suspect of its kind gets this many
    flags if each round draws its outliers at random. `name`: empty for processes that share only their rounds."""

    name: str
    members: tuple[DumpedProcess, ...]
    rounds: tuple[int, ...]
    chance: float

    @property
    def who(self) -> frozenset[Who]:
        return frozenset(p.key for p in self.members)

    def enough(self, num_rounds: int) -> bool:
        num = len(self.rounds)
        return num >= NUM_FLAGS_MIN and num >= FLAGGED_RATIO_MIN * num_rounds and self.chance <= CHANCE_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSummary:
    """`best`: the strongest suspect; several are a tie. `named`: whether it is named, and not only suspected.
    `flagged`: all, the least likely first."""

    best: tuple[FlagCount, ...]
    named: bool
    flagged: tuple[FlagCount, ...]


def tally(outliers: Sequence[Sequence[DumpedProcess]], processes: Sequence[DumpedProcess]) -> FlagSummary | None:
    """`outliers`: of each round; `processes`: all of the role. None if no round has any."""
    single = _processes(outliers, processes)
    if not single:
        return None
    groups = _groups(outliers, processes)
    flagged = sorted((*single, *groups), key=lambda f: (f.chance, len(f.members)))
    enough = [f for f in flagged if f.enough(len(outliers))]
    first = (enough or flagged)[0]
    alike = [f for f in single if len(f.rounds) == len(first.rounds)] if first in single else [first]
    if len(alike) == 1 and len(first.members) > 1 and first in single:
        holding = [f for f in groups if f.who >= first.who and set(f.rounds) >= set(first.rounds)]
        holding = [f for f in holding if f.enough(len(outliers)) or not enough]
        alike = [min(holding, key=lambda f: len(f.members))] if holding else alike
    return FlagSummary(best=tuple(alike), named=bool(enough) and len(alike) == 1, flagged=tuple(flagged))


def _processes(outliers: Sequence[Sequence[DumpedProcess]], processes: Sequence[DumpedProcess]) -> list[FlagCount]:
    """Grouped by the rounds in which they were outliers."""
    rounds: dict[Who, list[int]] = {}
    for n, some in enumerate(outliers):
        for process in some:
            rounds.setdefault(process.key, []).append(n)
    alike: dict[tuple[int, ...], list[DumpedProcess]] = {}
    for process in processes:
        if process.key in rounds:
            alike.setdefault(tuple(rounds[process.key]), []).append(process)
    num_drawn = [len(some) for some in outliers if some]
    share = sum(num_drawn) / len(num_drawn) / len(processes) if num_drawn else 0.0
    return [
        FlagCount(
            name=its[0].name if len(its) == 1 else "",
            members=tuple(its),
            rounds=when,
            chance=at_least(len(its), len(processes) * often(len(when), len(num_drawn), share)),
        )
        for when, its in alike.items()
    ]


def _groups(outliers: Sequence[Sequence[DumpedProcess]], processes: Sequence[DumpedProcess]) -> list[FlagCount]:
    rounds: dict[Group, list[int]] = {}
    for number, some in enumerate(outliers):
        held = Counter(group for p in some for group in groups_of(p))
        for group, num in held.items():
            if 2 * num >= len(some):
                rounds.setdefault(group, []).append(number)
    most = sorted(rounds, key=lambda group: -len(rounds[group]))[:NUM_GROUPS_MAX]
    members: dict[Group, list[DumpedProcess]] = {group: [] for group in most}
    for process in processes:
        for group in groups_of(process):
            if group in members:
                members[group].append(process)
    num_drawn = [min(len(some), NUM_DRAWN_MAX) for some in outliers if some]
    found: dict[frozenset[Who], FlagCount] = {}
    for group in most:
        its = members[group]
        if not 1 < len(its) < len(processes):
            continue
        share = len(its) / len(processes)
        flag = sum(often((num + 1) // 2, num, share) for num in num_drawn) / len(num_drawn)
        made = FlagCount(
            name=group_name(group),
            members=tuple(its),
            rounds=tuple(rounds[group]),
            chance=at_least(1, often(len(rounds[group]), len(num_drawn), flag) / share),
        )
        found.setdefault(made.who, made)  # of several names for the same processes, the simplest (first) one
    return list(found.values())


def often(num: int, num_draws: int, share: float) -> float:
    """Probability of at least `num` hits in `num_draws` draws."""
    return math.fsum(
        math.comb(num_draws, k) * share**k * (1 - share) ** (num_draws - k) for k in range(num, num_draws + 1)
    )


def at_least(num: int, expected: float) -> float:
    """Probability of `num` or more if `expected` is the mean (Poisson); `num` is at least 1."""
    if expected <= 0:
        return 0.0
    if num <= expected:
        return 1.0
    term = math.exp(num * math.log(expected) - expected - math.lgamma(num + 1))
    total, n = 0.0, num
    while term > total * 1e-9:
        total, n = total + term, n + 1
        term *= expected / n
    return min(1.0, total)
