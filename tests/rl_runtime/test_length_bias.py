"""Long generations are not lost more often than short ones: 1,000 seeded kills over simulated runs.

Lengths are spread evenly over powers of two up to 256 tokens, so that a long answer takes many steps. What is lost is
counted by length: groups that were dropped for another reason than a filter's choice or the run's end, out of those that
came to an end; and the share of a request's tokens that was made again. Both are put to a one-sided test for a trend
with the logarithm of length (Cochran-Armitage for groups, the same for shares).
"""

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.ledger import FILTERED, GroupState, Ledger
from rolecall.rl_runtime.testing import request_seed_of
from rolecall.rl_runtime.testing_roles import Answers
from tests.rl_runtime.loop import World, small_job

LONG_TAIL = Answers(longest=256, long_tail=True, right_below=9)
Z_MAX = 2.33
"""Upper 1 % of the normal distribution: a trend stronger than that is called bias."""
ALGORITHMS: dict[str, dict[str, Any]] = {"grpo": {}, "dapo": {"overlong_cache": 2}}
VICTIMS = ("rollout/0", "rollout/1", "rollout/2", "trainer/0", "trainer/1", "controller/0")
KILLS = 20
"""Of one run."""
LAWFUL = ("run_ended", FILTERED)


def trend(lost: Mapping[int, float], exposed: Mapping[int, float]) -> float:
    """Standard score of a growth of lost/exposed with the bucket, 0 where nothing was lost."""
    pairs = [(b, 1.0) for b in exposed for _ in range(round(lost.get(b, 0.0)))]
    return trend_of(pairs + [(b, 0.0) for b, n in exposed.items() for _ in range(round(n - lost.get(b, 0.0)))])


def trend_of(pairs: Sequence[tuple[int, float]]) -> float:
    """The same for shares: correlation of (bucket, share), in standard errors of none."""
    n = len(pairs)
    mean_b, mean_y = sum(b for b, _ in pairs) / n, sum(y for _, y in pairs) / n
    both = sum((b - mean_b) * (y - mean_y) for b, y in pairs)
    spread = sum((b - mean_b) ** 2 for b, _ in pairs) * sum((y - mean_y) ** 2 for _, y in pairs)
    return both / math.sqrt(spread) * math.sqrt(n) if spread else 0.0


def bucket(num_tokens: int) -> int:
    return max(0, num_tokens).bit_length()


class Counts:
    """By bucket of length."""

    def __init__(self) -> None:
        self.groups, self.dropped = Counter[int](), Counter[int]()
        self.made_again: list[tuple[int, float]] = []
        """Of each request: (bucket, share of its tokens that was made again)."""
        self.kills = 0

    def add(self, w: World) -> None:
        self.kills += KILLS
        ended: dict[str, str] = {}
        for line in Ledger(w.journal.store).lines():
            if line["state"] == GroupState.TRAINED:
                ended[line["group_id"]] = ""
            elif line["state"] == GroupState.DROPPED:
                ended[line["group_id"]] = str(line["reason"])
        lengths: defaultdict[str, int] = defaultdict(int)
        for request, made in w.fleet.tokens_made.items():
            whole = len(w.answers.tokens(request_seed_of(w.job.seed, request)))
            lengths[request.rpartition(".")[0]] = max(whole, lengths[request.rpartition(".")[0]])
            self.made_again.append((bucket(whole), max(0, made - whole) / whole))
        for group, reason in ended.items():
            self.groups[bucket(lengths[group])] += 1
            self.dropped[bucket(lengths[group])] += bool(reason) and not reason.startswith(LAWFUL)


async def kill_again_and_again(w: World, rng: random.Random) -> None:
    """One after the other; who is killed next was there again."""
    w.journal.set_flag("hold", "faults are still to come")
    for _ in range(KILLS):
        victim = rng.choice(VICTIMS)
        await asyncio.sleep(rng.uniform(0.2, 1.5))
        if victim.startswith("controller"):
            while not (w.controllers and w.controllers[-1].supply.flowing and not w.mortalities[-1].dead):
                await asyncio.sleep(0.05)
            w.mortalities[-1].dies_at = 0
        else:
            while w.fleet.newest(victim).dead.is_set():
                await asyncio.sleep(0.05)
            w.fleet.kill(victim)
    w.journal.set_flag("hold", None)


def counted(path: Path, algorithm: str, runs: range) -> Counts:
    counts = Counts()
    for run in runs:
        folder = path / f"{algorithm}-{run}"
        folder.mkdir()
        rng = random.Random(f"bias/{algorithm}/{run}")
        settings = {f"algorithm__{k}": v for k, v in ALGORITHMS[algorithm].items()}
        job = small_job(num_steps=4, seed=run, algorithm__name=algorithm, **settings)
        w = World(job=job, path=folder, seed=run, answers=LONG_TAIL, script=partial(kill_again_and_again, rng=rng))
        w.run()
        w.check()
        counts.add(w)
        w.journal.close()
    return counts


def check(counts: Counts) -> None:
    assert trend(counts.dropped, counts.groups) < Z_MAX, (counts.dropped, counts.groups)
    assert trend_of(counts.made_again) < Z_MAX, trend_of(counts.made_again)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_long_generations_are_not_lost_more_often_than_short_ones(tmp_path: Path, algorithm: str) -> None:
    check(counted(tmp_path, algorithm, range(3)))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_the_same_over_a_thousand_kills(tmp_path: Path, algorithm: str) -> None:
    counts = counted(tmp_path, algorithm, range(1000 // KILLS))
    assert counts.kills == 1000
    check(counts)


def test_the_trend_test_tells_a_growing_rate_from_an_even_one() -> None:
    exposed = dict.fromkeys(range(1, 9), 1000.0)
    assert abs(trend(dict.fromkeys(range(1, 9), 10.0), exposed)) < 1e-9
    assert trend({b: 2.5 * b for b in exposed}, exposed) > Z_MAX
    assert trend({b: 2.5 * (9 - b) for b in exposed}, exposed) < -Z_MAX
    assert trend({}, exposed) == 0.0
