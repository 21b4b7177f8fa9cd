"""T-PPO: the loss of long answers is proportional to their length, after any kill.

Of each answer two shares are taken: windows that were dropped, of those that came to an end; and tokens that were made
again, of those that were trained on. A long answer is in flight for longer, so it meets more deaths; each token is as
much at risk as any other, so the shares are what must not grow with length (`test_length_bias.py` has the test: lengths
are shuffled within each run, for one kill hits many). A context that had to be made again, after the engine and the
controller died, or after going back behind a window that was trained, is counted apart: it costs time, is not trained
on, and only answers of several windows have one.
"""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from rolecall.core.ids import GroupId
from rolecall.core.journal.ledger import GroupState, Ledger
from rolecall.rl_runtime.tasks.task import group_number
from tests.rl_runtime.algorithms.test_length_bias import (
    KILLS,
    LEVEL,
    LONG_TAIL,
    Losses,
    bucket,
    kill_again_and_again,
    level,
)
from tests.rl_runtime.controller.test_controller_windows import PREFIXES, tppo_job
from tests.rl_runtime.loop import World
from tests.rl_runtime.scripted_responses import request_seed_of

WINDOW = 16
RUNS = 3
"""In few runs the level says little: short answers lose no token, or all of theirs. What these show is that 60 kills lose
no group (`check` of each world); the long test has 50 runs, and the power."""


@dataclass
class Counts:
    """One entry a run; in it, one for each answer."""

    windows: list[Losses] = field(default_factory=list)
    """The share of its windows that was dropped, of answers that fill a window: a shorter one is at risk for less
    time."""
    tokens: list[Losses] = field(default_factory=list)
    """Tokens of its own windows made again, for each one trained on."""
    reasons: Counter[str] = field(default_factory=Counter)
    context_tokens: int = 0
    trained_tokens: int = 0
    kills: int = 0

    def add(self, w: World) -> None:
        self.kills += KILLS
        lengths: dict[int, int] = {}
        ended: defaultdict[int, list[float]] = defaultdict(list)
        made, used = Counter[int](), Counter[int]()
        states = Ledger(w.journal.store).groups()
        reasons = {line["group_id"]: line["reason"] for line in Ledger(w.journal.store).lines()}
        for group, (state, _) in states.items():
            number, request = group_number(group), f"{group}.0"
            lengths[number] = bucket(len(LONG_TAIL.tokens(request_seed_of(w.job.seed, request))))
            if state is GroupState.TRAINED:
                ended[number].append(0.0)
                start, stop, _ = w.fleet.used[GroupId(group)]
                used[number] += stop - start
                made[number] += w.fleet.tokens_made[request] - w.fleet.context_made[request]
            elif reasons[group] != "run_ended":
                ended[number].append(1.0)
                self.reasons[reasons[group]] += 1
        full = {n: found for n, found in ended.items() if lengths[n] >= bucket(WINDOW)}
        self.windows.append([(lengths[n], sum(found) / len(found)) for n, found in full.items()])
        self.tokens.append([(lengths[n], max(0, made[n] - used[n]) / used[n]) for n in used])
        self.context_tokens += w.fleet.context_made.total()
        self.trained_tokens += used.total()

    def reported(self) -> str:
        again = defaultdict[int, list[float]](list)
        for b, share in (pair for run in self.tokens for pair in run):
            again[b].append(share)
        shares = ", ".join(
            f"{2**b // 2}+: {sum(found) / len(found):.3f} of {len(found)}" for b, found in sorted(again.items())
        )
        return (
            f"{self.kills} kills; dropped {dict(self.reasons)}; made again for each token: {shares}; "
            f"{self.context_tokens} tokens of contexts, {self.trained_tokens} trained on; "
            f"levels: windows {level(self.windows):.3f}, tokens {level(self.tokens):.3f}"
        )


def check(counts: Counts) -> None:
    assert level(counts.windows) > LEVEL, counts.reported()
    assert level(counts.tokens) > LEVEL, counts.reported()


def counted(path: Path, prefixes: str, runs: range) -> Counts:
    counts = Counts()
    for run in runs:
        folder = path / f"{prefixes}-{run}"
        folder.mkdir()
        rng = random.Random(f"bias/tppo/{prefixes}/{run}")
        job = tppo_job(prefixes, num_steps=4, seed=run, algorithm__window_tokens=WINDOW)
        script = partial(kill_again_and_again, rng=rng)
        w = World(job=job, path=folder, seed=run, answers=LONG_TAIL, script=script)
        w.run()
        w.check()
        counts.add(w)
        w.journal.close()
    return counts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_windows_of_long_answers_are_not_lost_more_often(tmp_path: Path, prefixes: str) -> None:
    check(counted(tmp_path, prefixes, range(RUNS)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_nor_over_a_thousand_kills(tmp_path: Path, prefixes: str) -> None:
    counts = counted(tmp_path, prefixes, range(1000 // KILLS))
    print(counts.reported())
    assert counts.kills == 1000
    check(counts)
